"""`XlaModel`: weights placed on devices, with the programs and the buckets that serve them. Shared by its sessions."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrt import cache, sampling
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.config import ModelConfig
from jaxrt.decode_session import Bucket, BucketPolicy, DecodeSession, Recipe
from jaxrt.errors import RequestError
from jaxrt.models import steps
from jaxrt.program import Program
from jaxrt.requests import SamplingParams
from jaxrt.weights import Weights


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
    decode_session: DecodeSession = field(init=False)
    closed: bool = field(default=False, init=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.policy = BucketPolicy.covering(self.device.platform, self.config.context, rows=1, capacity=1)
        self.decode_session = DecodeSession(self.recipe, lambda: jax.default_device(self.device))

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

    def close(self) -> None:
        """Drop the weights and the executables."""
        self.decode_session.close()
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
    program = Program(steps.prefill(model.config), name=f"prefill_{bucket.tokens}", updates=KEPT)
    specs = {
        "weights": model.weights,
        "kv": model._kv(1, bucket.capacity),
        "state": model._state(1),
        "tokens": _int32(1, bucket.tokens),
        "following": _int32(bucket.tokens),
    }
    return Recipe(program, specs, ("logits", "scores"), ("count", "score"))


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
        steps.decode(model.config, bucket.tokens, counted=counted),
        name=f"decode_{bucket.tokens}",
        updates=KEPT,
    )
    specs = {
        "weights": model.weights,
        "kv": model._kv(bucket.rows, bucket.capacity),
        "state": model._state(bucket.rows),
        "knobs": model._knobs(bucket.rows),
        "forced": _int32(bucket.rows),
    }
    return Recipe(program, specs, ("logits", "packed"), ("count",) if counted else ())


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


_RECIPES = {"make": _make, "prefill": _prefill, "first": _first, "decode": _decode, "move": _move, "grow": _grow}
