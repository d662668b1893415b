"""What a model will take, from its headers alone: bytes, buckets and compiles, before anything is allocated."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrt import cache, native, sampling, weights
from jaxrt.artifacts.load import open_checkpoint
from jaxrt.artifacts.packing import held
from jaxrt.buckets import PLATFORMS, BucketPolicy
from jaxrt.config import ModelConfig
from jaxrt.errors import RequestError
from jaxrt.markup import table_html
from jaxrt.models.reading import read_config
from jaxrt.nn.attention import MANY_BLOCK

MIB = 1 << 20
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# XLA's CPU backend widens bfloat16 element by element: ten times slower at one row than float32.
NATIVE_DTYPE = {"cpu": "float32"}
KV_DTYPES = {**DTYPES, "int8": jnp.int8}
QUANTIZE = ("auto", "none", "keep", "int8", "int4", "fp8")
# Away from a CPU, where XLA multiplies: its products widen eight bits as they go, and take no scales of blocks.
ELSEWHERE = {"int8": "int8 by output", "fp8": "fp8 by output"}


@dataclass(frozen=True)
class ModelPlan:
    """Bytes are of the device; nothing of them is allocated by making a plan."""

    parameters: int
    weights_bytes: int
    cache_bytes_per_row: int  # at the full capacity asked for
    cache_bytes_per_1000_tokens: int
    sampler_bytes_per_row: int
    workspace_bytes: int  # the largest activations of one prefill chunk or one decode position
    total_bytes: int  # weights, cache and sampler of all rows, lane and workspace
    rows: tuple[int, ...]
    capacities: tuple[int, ...]
    prefill_lengths: tuple[int, ...]
    buckets: tuple[str, ...]
    compiles: int
    context: int
    dtype: str
    kv_dtype: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """Facts to show, as name and value."""
        return [
            ("parameters", f"{self.parameters:,}"),
            ("weights", f"{_mib(self.weights_bytes)} ({self.dtype})"),
            ("cache per row", f"{_mib(self.cache_bytes_per_row)} ({self.kv_dtype}, {self.capacities[-1]:,} tokens)"),
            ("cache per 1,000 tokens", _mib(self.cache_bytes_per_1000_tokens)),
            ("sampler per row", _mib(self.sampler_bytes_per_row)),
            ("workspace", _mib(self.workspace_bytes)),
            ("total", f"{_mib(self.total_bytes)} for up to {self.rows[-1]} rows"),
            ("row buckets", ", ".join(map(str, self.rows))),
            ("capacity buckets", ", ".join(f"{c:,}" for c in self.capacities)),
            ("prefill lengths", ", ".join(map(str, self.prefill_lengths))),
            ("compiles", f"{self.compiles} for a full warm-up; the first token needs 3"),
            ("context", f"{self.context:,} tokens"),
        ]

    def _repr_html_(self) -> str:
        return table_html(("", "plan"), self.lines(), "nothing is allocated yet")


def plan_model(
    config: ModelConfig,
    *,
    rows: int = 1,
    capacity: int = 2_048,
    dtype: Any = jnp.float32,
    kv_dtype: Any = None,
    platform: str = "cpu",
    specs: weights.Weights | None = None,
) -> ModelPlan:
    """The plan of serving `config` with up to `rows` rows of `capacity` tokens. specs: how the weights are held; None:
    as arrays of `dtype`.

    Raises: RequestError for rows or a capacity below one, or an unknown platform.
    """
    if rows < 1 or capacity < 1:
        raise RequestError(f"rows={rows}, capacity={capacity}", expected="whole numbers, one or more")
    if platform not in PLATFORMS:
        raise RequestError(f"platform {platform!r}", expected=f"one of {', '.join(PLATFORMS)}")
    kv_dtype = kv_dtype or dtype
    policy = BucketPolicy.covering(platform, config.context, rows, capacity)
    per_row = cache.row_nbytes(config, policy.capacities[-1], kv_dtype)
    sampler = _sampler_nbytes(config.vocab)
    specs = specs or weights.abstract(config, dtype)
    held = weights.nbytes(specs)
    workspace = _workspace(config, policy, dtype)
    if platform != "cpu" or native.missing():
        workspace += _unpacked_nbytes(specs)
    lanes = policy.rows[-1] + (policy.rows[-1] > 1)
    return ModelPlan(
        parameters=config.parameters,
        weights_bytes=held,
        cache_bytes_per_row=per_row,
        cache_bytes_per_1000_tokens=cache.row_nbytes(config, 1_000, kv_dtype),
        sampler_bytes_per_row=sampler,
        workspace_bytes=workspace,
        total_bytes=held + lanes * (per_row + sampler) + workspace,
        rows=policy.rows,
        capacities=policy.capacities,
        prefill_lengths=policy.platform.prefill,
        buckets=tuple(map(str, policy.buckets())),
        compiles=len(policy.buckets()),
        context=config.context,
        dtype=weights.stored(specs),
        kv_dtype=jnp.dtype(kv_dtype).name,
    )


def plan_artifact(
    path: Path,
    *,
    rows: int,
    capacity: int,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    quantize: str = "auto",
    platform: str | None = None,
) -> ModelPlan:
    """The plan of a checkpoint, read from its headers. platform None: that of JAX's default device.

    Raises: ArtifactError, UnsupportedModel, RequestError.
    """
    platform = platform or jax.default_backend()
    weights_dtype = resolve_dtype(dtype, platform)
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    return plan_model(
        config,
        rows=rows,
        capacity=capacity,
        dtype=weights_dtype,
        kv_dtype=resolve_kv_dtype(kv_dtype, weights_dtype),
        platform=platform,
        specs=held(checkpoint, config, weights_dtype, resolve_storage(quantize, dtype, platform)),
    )


def resolve_storage(quantize: str, dtype: str, platform: str) -> str:
    """How weights are held, as `packing.held` takes it: "auto" keeps packed ones so on a CPU that has the native
    kernels, unless a dtype is asked for. Raises: RequestError for what the platform cannot do."""
    if quantize not in QUANTIZE:
        raise RequestError(f"quantize={quantize!r}", expected=f"one of {', '.join(QUANTIZE)}")
    if quantize == "auto":
        return "packed" if platform == "cpu" and dtype == "auto" and not native.missing() else "float"
    if platform != "cpu":
        quantize = ELSEWHERE.get(quantize, quantize)
    elif quantize == "fp8":
        raise RequestError("quantize='fp8' on a CPU, which has no products of it", fix="use int8")
    elif quantize != "none" and dtype not in ("auto", "float32"):
        raise RequestError(f"quantize={quantize!r} with dtype={dtype!r}", fix="leave one of them out")
    return {"none": "float", "keep": "packed"}.get(quantize, quantize)


def resolve_dtype(name: str, platform: str) -> Any:
    """The dtype called `name`; "auto" is what the platform computes well. Raises: RequestError for an unknown name."""
    chosen = DTYPES.get(NATIVE_DTYPE.get(platform, "bfloat16") if name == "auto" else name)
    if chosen is None:
        raise RequestError(f"dtype {name!r}", expected=f"one of auto, {', '.join(DTYPES)}")
    return chosen


def resolve_kv_dtype(name: str, weights_dtype: Any) -> Any:
    """The cache's dtype called `name`; "auto" is that which the weights are computed in. Raises: RequestError for an
    unknown name."""
    chosen = weights_dtype if name == "auto" else KV_DTYPES.get(name)
    if chosen is None:
        raise RequestError(f"kv_dtype {name!r}", expected=f"one of auto, {', '.join(KV_DTYPES)}")
    return chosen


def _sampler_nbytes(vocab: int) -> int:
    """Of one row: what it asked for, and what sampling remembers."""
    state = jax.eval_shape(lambda: sampling.initial_state(1, vocab))
    leaves = jax.tree.leaves((sampling.abstract_knobs(1, vocab), state))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _workspace(config: ModelConfig, policy: BucketPolicy, dtype: Any) -> int:
    """Float32 scores of one block of one layer's attention, its widest activations and a position's logits, for the
    longest chunk."""
    tokens = max(policy.platform.prefill[-1], policy.rows[-1])
    scores = 4 * config.heads * tokens * min(MANY_BLOCK, policy.capacities[-1])
    widest = max(2 * config.mlp_width, (config.heads + 2 * config.kv_heads) * config.head_width)
    activations = jnp.dtype(dtype).itemsize * tokens * (2 * config.width + 2 * widest)
    return scores + activations + 4 * policy.rows[-1] * config.vocab


def _unpacked_nbytes(specs: weights.Weights) -> int:
    """Of the largest packed matrix as float32, which XLA makes to multiply by it."""
    leaves = jax.tree.leaves(specs, is_leaf=weights.is_spec)
    return max((4 * math.prod(spec.shape) for spec in leaves if spec.formats and not spec.scaled), default=0)


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"


def describe(config: ModelConfig) -> Mapping[str, str]:
    """The mechanisms of a model, for people."""
    return {
        "family": config.family,
        "layers": str(len(config.layers)),
        "width": str(config.width),
        "heads": f"{config.heads} ({config.kv_heads} KV) of {config.head_width}",
        "MLP width": str(config.mlp_width),
        "vocabulary": f"{config.vocab:,}",
        "context": f"{config.context:,}",
        "head": "tied to the embedding" if config.tied_head else "its own",
        "parameters": f"{config.parameters:,}",
    }
