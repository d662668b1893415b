"""`XlaBackend`: XLA devices as a BackendProvider that also reads checkpoints."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from jaxrt import weights
from jaxrt.artifacts.load import generation_defaults, load_tokenizer, load_weights, open_checkpoint
from jaxrt.artifacts.packing import held
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.config import ModelConfig
from jaxrt.contracts import (
    BackendDescriptor,
    DeviceCapabilities,
    DeviceDescriptor,
    PreparedModel,
    SessionCapabilities,
)
from jaxrt.errors import ModelLoadError, RequestError
from jaxrt.models.reading import read_config
from jaxrt.planning import resolve_dtype, resolve_kv_dtype, resolve_storage
from jaxrt.requests import SamplingParams
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.session import CAPABILITIES, XlaSession


@dataclass(frozen=True)
class LoadOptions:
    """How to load. dtype "auto" is float32 on CPU and bfloat16 elsewhere; kv_dtype "auto" is the same as the
    weights'. quantize: "auto" keeps packed weights of a file packed on a CPU with the native kernels, unless a dtype is
    named; "keep" does so anywhere; "none" unpacks them; "int8", "int4" and, on a GPU, "fp8" pack at load. prepare:
    compile what a first prompt needs while the weights are read."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    quantize: Literal["auto", "none", "keep", "int8", "int4", "fp8"] = "auto"
    prepare: bool = False
    required: SessionCapabilities = SessionCapabilities()
    progress: Callable[[int, int], None] | None = None  # bytes of weights placed, of all


@dataclass(frozen=True, eq=False)
class ModelSource:
    """What `prepare_model` takes: a config, its weights (arrays, in the tree of `weights.abstract(config)`), and
    their text side."""

    config: ModelConfig
    weights: weights.Weights
    kv_dtype: Any = None  # None: the embedding's
    tokenizer: Tokenizer | None = None
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    path: Path | None = None


class XlaBackend:
    """One XLA device. `device` is a jax.Device, or a platform name such as "cpu", "gpu" or "gpu:1"; None is JAX's
    default."""

    def __init__(self, device: jax.Device | str | None = None) -> None:
        self.device = find_device(device) if device is None or isinstance(device, str) else device

    def descriptor(self) -> BackendDescriptor:
        return BackendDescriptor("xla", jax.__version__)

    def devices(self) -> Iterable[tuple[DeviceDescriptor, DeviceCapabilities]]:
        for device in jax.devices(self.device.platform):
            memory = (device.memory_stats() or {}).get("bytes_limit")
            described = DeviceDescriptor(str(device.id), device.device_kind, device.platform, memory)
            yield described, DeviceCapabilities(exact_completion=True, transfers=True)

    def prepare_model(self, config: ModelSource) -> PreparedModel[XlaModel]:
        """Place the weights. Raises: ModelLoadError where they do not fit their config."""
        _check_weights(config)
        model = XlaModel(
            config=config.config,
            weights=jax.device_put(config.weights, self.device),
            cache_dtype=config.kv_dtype or config.weights.embedding.dtype,
            device=self.device,
            tokenizer=config.tokenizer,
            defaults=config.defaults,
            path=config.path,
        )
        return PreparedModel(model, CAPABILITIES)

    def create_session(self, model: PreparedModel[XlaModel]) -> XlaSession:
        """Raises: ModelLoadError when `model` has its session already."""
        return XlaSession(model.take())

    def session_capabilities(self, artifact: Path) -> SessionCapabilities:
        """From the headers alone. Raises: ArtifactError, UnsupportedModel."""
        read_config(open_checkpoint(artifact))
        return CAPABILITIES

    def load_model(self, artifact: Path, options: LoadOptions) -> PreparedModel[XlaModel]:
        """Read an artifact onto the device; what its headers tell is checked before any weight is read.

        Raises: ArtifactError, UnsupportedModel; SessionCapabilityError for a required capability that is missing.
        """
        checkpoint = open_checkpoint(artifact)
        config = read_config(checkpoint)
        options.required.validate(CAPABILITIES)
        dtype = resolve_dtype(options.dtype, self.device.platform)
        kv_dtype = resolve_kv_dtype(options.kv_dtype, dtype)
        storage = resolve_storage(options.quantize, options.dtype, self.device.platform)
        specs = held(checkpoint, config, dtype, storage)
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        model = XlaModel(
            config=config,
            weights=jax.tree.map(lambda spec: spec.struct(sharding), specs, is_leaf=weights.is_spec),
            cache_dtype=kv_dtype,
            device=self.device,
            path=checkpoint.path,
        )

        def place(name: str, spec: weights.ArraySpec, data: Any) -> Any:
            return jax.device_put(data, self.device)

        try:
            if options.prepare:
                model.plans.prepare(model.policy.first())
            model.tokenizer, model.defaults = load_tokenizer(checkpoint), generation_defaults(checkpoint, config)
            model.weights = load_weights(
                checkpoint, config, dtype=dtype, storage=storage, place=place, progress=options.progress
            )
        except BaseException:
            model.close()
            raise
        return PreparedModel(model, CAPABILITIES)


def find_device(name: str | None) -> jax.Device:
    """The device called `name`: a platform, or platform:index. Raises: RequestError where there is none such."""
    if name is None:
        return jax.devices()[0]
    platform, _, index = name.partition(":")
    try:
        devices = jax.devices(platform)
        return devices[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        there = ", ".join(f"{d.platform}:{d.id}" for d in jax.devices())
        raise RequestError(f"no device {name!r}", expected=f"one of {there}", fix="see `jaxrt doctor`") from error


def _check_weights(source: ModelSource) -> None:
    specs = weights.named(weights.abstract(source.config))
    found = weights.named(source.weights)
    wrong = [
        f"{name} is {found[name].shape if name in found else 'missing'}, expected {spec.shape}"
        for name, spec in specs.items()
        if name not in found or tuple(found[name].shape) != spec.shape
    ]
    wrong += [f"{name} is not part of this model" for name in found if name not in specs]
    if wrong:
        raise ModelLoadError("weights that do not fit their config: " + "; ".join(wrong[:8]))
