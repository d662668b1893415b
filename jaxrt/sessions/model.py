"""`XlaModel`: weights placed on devices, with the programs and the buckets that serve them. Shared by its sessions."""

import dataclasses
import hashlib
import itertools
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrt import cache, native, sampling
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.buckets import Bucket, BucketPolicy
from jaxrt.config import ModelConfig
from jaxrt.decode_session import PlanKey
from jaxrt.errors import RequestError
from jaxrt.models import steps
from jaxrt.plans import Plans, Recipe
from jaxrt.program import Program
from jaxrt.requests import SamplingParams
from jaxrt.taps import abstract_edits
from jaxrt.weights import Weights, named, stored

if TYPE_CHECKING:
    from jaxrt.sessions.session import XlaSession

_instances = itertools.count()


@dataclass(eq=False)
class XlaModel:
    """What every session of one model shares. `policy` widens as requests need more rows or capacity."""

    config: ModelConfig
    weights: Weights
    cache_dtype: Any
    device: jax.Device
    tokenizer: Tokenizer | None = None
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    path: Path | None = None
    policy: BucketPolicy = field(init=False)
    plans: Plans = field(init=False)
    key: PlanKey = field(init=False)
    sessions: "weakref.WeakSet[XlaSession]" = field(default_factory=weakref.WeakSet, init=False, repr=False)
    closed: bool = field(default=False, init=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.policy = BucketPolicy.covering(self.device.platform, self.config.context, rows=1, capacity=1)
        self.plans = Plans(self.recipe, lambda: jax.default_device(self.device))
        dtypes = {name: stored(leaf) for name, leaf in named(self.weights).items()}
        self.key = PlanKey(
            family=self.config.family,
            structure=_hash_json({"config": dataclasses.asdict(self.config), "dtypes": dtypes}),
            instance=next(_instances),
            dtype=stored(self.weights),
            kv_dtype=jnp.dtype(self.cache_dtype).name,
            placement=str(self.device),
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the config and of every weight: what a saved session belongs to. Reads all weights, once."""
        with ThreadPoolExecutor() as pool:  # hashing lets other threads run
            hashes = dict(zip(named(self.weights), pool.map(_hash, named(self.weights).values()), strict=True))
        return _hash_json({"structure": self.key.structure, "weights": hashes})

    @property
    def kernels(self) -> str:
        """What multiplies: the instruction set of the native kernels, or XLA."""
        return (native.instruction_set() if self.device.platform == "cpu" else None) or "XLA"

    def cover(self, rows: int, capacity: int) -> BucketPolicy:
        """The buckets a warm-up for `rows` rows of `capacity` tokens makes; requests within them use no others."""
        with self._lock:
            self.policy = BucketPolicy.covering(self.device.platform, self.config.context, rows, capacity)
            return self.policy

    def widen(self, rows: int, capacity: int) -> BucketPolicy:
        """The policy, with rungs added until it holds `rows` rows of `capacity` tokens."""
        with self._lock:
            self.policy = self.policy.widened(rows, capacity, self.config.context)
            return self.policy

    def decode_by(self, positions: tuple[int, ...]) -> None:
        """Let decode calls be of these numbers of positions from now on."""
        with self._lock:
            platform = dataclasses.replace(self.policy.platform, positions=positions)
            self.policy = dataclasses.replace(self.policy, platform=platform)

    def close(self) -> None:
        """Close every session; drop the weights and the executables."""
        for session in tuple(self.sessions):
            session.close()
        self.plans.close()
        if not self.closed:
            self.closed = True
            del self.weights

    def check_open(self) -> None:
        """Raises: RequestError when closed."""
        if self.closed:
            raise RequestError("this model is closed", fix="load it again with jaxrt.load()")

    def recipe(self, bucket: Bucket) -> Recipe:
        """What the plan of `bucket` is made from."""
        return _RECIPES[bucket.program](self, bucket)

    def _placed(self, tree: Any) -> Any:
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    def _kv(self, rows: int, capacity: int) -> Any:
        return self._placed(cache.abstract(self.config, rows, capacity, self.cache_dtype))

    def _state(self, rows: int) -> Any:
        return self._placed(jax.eval_shape(lambda: steps.empty_state(rows, self.config.vocab)))

    def _edits(self, bucket: Bucket) -> dict[str, Any]:
        arrays = abstract_edits(bucket.taps, bucket.rows, self.config.context)
        return {"edits": arrays} if arrays else {}

    def _knobs(self, rows: int) -> Any:
        return sampling.abstract_knobs(rows, self.config.vocab)


KEPT = {"kv": "kv_next", "state": "state_next"}


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _make(model: XlaModel, bucket: Bucket) -> Recipe:
    program = Program(
        steps.make(model.config, bucket.rows, bucket.capacity, model.cache_dtype), name=f"make_{bucket.rows}"
    )
    return Recipe(program, {}, ("kv", "state"))


def _prefill(model: XlaModel, bucket: Bucket) -> Recipe:
    program = Program(steps.prefill(model.config, bucket.taps), name=f"prefill_{bucket.tokens}", updates=KEPT)
    specs = {
        "weights": model.weights,
        "kv": model._kv(1, bucket.capacity),
        "state": model._state(1),
        "tokens": _int32(1, bucket.tokens),
        "following": _int32(bucket.tokens),
        **model._edits(bucket),
    }
    return Recipe(program, specs, ("logits", "scores", *_observed(bucket)), ("count", "score"))


def _first(model: XlaModel, bucket: Bucket) -> Recipe:
    program = Program(steps.first, name="first", updates={"state": "state_next"})
    specs = {
        "state": model._state(1),
        "logits": jax.ShapeDtypeStruct((1, model.config.vocab), jnp.float32),
        "knobs": model._knobs(1),
    }
    return Recipe(program, specs, ("packed",))


def _decode(model: XlaModel, bucket: Bucket) -> Recipe:
    counted = model.policy.platform.counted
    program = Program(
        steps.decode(model.config, bucket.tokens, counted=counted, taps=bucket.taps),
        name=f"decode_{bucket.tokens}",
        updates=KEPT,
    )
    specs = {
        "weights": model.weights,
        "kv": model._kv(bucket.rows, bucket.capacity),
        "state": model._state(bucket.rows),
        "knobs": model._knobs(bucket.rows),
        "forced": _int32(bucket.rows),
        **model._edits(bucket),
    }
    symbols = ("count",) if counted and not bucket.taps.observed else ()
    return Recipe(program, specs, ("logits", "packed", *_observed(bucket)), symbols)


def _observed(bucket: Bucket) -> tuple[str, ...]:
    return ("observed",) if bucket.taps.observed else ()


def _move(model: XlaModel, bucket: Bucket) -> Recipe:
    updates = {**KEPT, "lane_kv": "lane_kv_next", "lane_state": "lane_state_next"}
    program = Program(steps.move, name=f"move_{bucket.rows}", updates=updates)
    specs = {
        "kv": model._kv(bucket.rows, bucket.capacity),
        "state": model._state(bucket.rows),
        "lane_kv": model._kv(1, bucket.capacity),
        "lane_state": model._state(1),
    }
    return Recipe(program, specs, (), ("row", "take"))


def _grow(model: XlaModel, bucket: Bucket) -> Recipe:
    program = Program(steps.grow(bucket.tokens), name=f"grow_{bucket.rows}")
    return Recipe(program, {"kv": model._kv(bucket.rows, bucket.capacity)}, ("kv_next",))


def _copy(model: XlaModel, bucket: Bucket) -> Recipe:
    program = Program(steps.copy, name=f"copy_{bucket.rows}")
    specs = {"kv": model._kv(bucket.rows, bucket.capacity), "state": model._state(bucket.rows)}
    return Recipe(program, specs, ("kv_next", "state_next"))


_RECIPES = {
    "make": _make,
    "prefill": _prefill,
    "first": _first,
    "decode": _decode,
    "move": _move,
    "grow": _grow,
    "copy": _copy,
}


def _hash(leaf: Any) -> str:
    found = hashlib.sha256()
    for array in jax.tree.leaves(leaf):
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
