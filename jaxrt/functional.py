"""The functional door: a model as one pure function, for `jax.jit`, `jax.grad` and `jax.vmap`. Nothing is donated."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.core import Tracer

from jaxrt import cache as kv_cache
from jaxrt.cache import KVCache
from jaxrt.edits import Places, check, lower
from jaxrt.errors import CapacityError, RequestError
from jaxrt.interventions import Intervention
from jaxrt.models import decoder
from jaxrt.nn.packed import Packed, unpacked
from jaxrt.nn.scaled import Scaled
from jaxrt.observations import LOGITS_PATH, ObservationRequest, ObservationSelector, known_paths
from jaxrt.sessions.model import XlaModel
from jaxrt.taps import Tap, Taps
from jaxrt.weights import Weights, is_leaf

_unpack = jax.jit(unpacked)


@struct.dataclass
class Cache:
    """Keys and values with how many tokens each row holds: what `Functional.apply` takes and gives."""

    kv: KVCache
    lengths: Any  # int32 [B]


class Functional:
    """A model's pass as a pure function of its weights. Attention is computed whole, so that it can be differentiated;
    results are equivalent to the runtime's. JAX compiles what is jitted here, outside of jaxrt's buckets: give it the
    weights as an argument, since those that a jitted function closes over become constants, minutes to compile."""

    def __init__(self, model: XlaModel) -> None:
        self._model = model
        self._unpacked: Weights | None = None

    @property
    def weights(self) -> Weights:
        """As floating-point arrays, which can be differentiated: the runtime's own, or where it holds packed ones their
        values, unpacked once. `apply` takes `rt.session.model.weights`, packed, too."""
        self._model.check_open()
        if self._unpacked is None:
            self._unpacked = jax.tree.map(
                lambda leaf: _unpack(leaf) if isinstance(leaf, Packed | Scaled) else leaf,
                self._model.weights,
                is_leaf=is_leaf,
            )
        return self._unpacked

    def cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` sequences of up to `capacity` tokens; of the weights' dtype where the runtime's own
        is int8, since rounding has no derivative."""
        dtype = self._model.cache_dtype
        dtype = self._model.weights.embedding.dtype if kv_cache.is_scaled(dtype) else dtype
        kv = kv_cache.abstract(self._model.config, rows, capacity, dtype)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kv)
        return Cache(zeros, jnp.zeros((rows,), jnp.int32))

    def apply(
        self,
        weights: Weights,
        tokens: Any,
        cache: Cache | None = None,
        interventions: Sequence[Intervention] = (),
        *,
        observe: Sequence[str | ObservationSelector] = (),
    ) -> tuple[Array, Cache, dict[str, Array]]:
        """Logits [B, T, V] after each token, the cache with them in it, and what was observed, by path.

        tokens: int32 [B, T] or [T], or embeddings [B, T, D] in their place. cache: what came before them; None:
        nothing. interventions: with a cache and T = 1 those of decoding apply, else those of prefill; their vectors
        and strengths may be traced.
        Raises: RequestError for a bad shape, path or intervention; CapacityError beyond the model's context or the
        cache's capacity, as far as its lengths are not traced.
        """
        config = self._model.config
        x = jnp.asarray(tokens)
        x = x[None] if x.ndim == 1 else x
        given = jnp.issubdtype(x.dtype, jnp.floating)
        if x.ndim != (3 if given else 2) or 0 in x.shape or (given and x.shape[2] != config.width):
            raise RequestError(
                f"tokens of shape {list(x.shape)}", expected=f"ids [B, T] or embeddings [B, T, {config.width}]"
            )
        if not given:
            x = self._checked(x)
        rows, new = x.shape[:2]
        fresh, cache = cache is None, cache or self.cache(rows, new)
        changes = check(config, interventions, rows)
        ends = self._ends(None if fresh else cache.lengths, rows, new, cache.kv.capacity, changes)
        phase = "decode" if new == 1 and not fresh else "prefill"
        lowered = lower(config, changes, Places(tuple(range(rows)), ends), phase)
        observed: tuple[str, ...] = ()
        if observe:
            observed = ObservationRequest.selected(observe).paths(known_paths(len(config.layers)))
        tap = Tap(Taps(observed, lowered.edits, whole=True), jax.tree.map(jnp.asarray, lowered.arrays))
        hidden, kv = decoder.forward(config, weights, cache.kv, x, cache.lengths, tap)
        positions = cache.lengths[:, None] + jnp.arange(new, dtype=jnp.int32)[None, :]
        logits = tap(LOGITS_PATH, decoder.logits(weights, hidden), positions)
        return logits, Cache(kv, cache.lengths + jnp.int32(new)), tap.seen

    def _checked(self, tokens: Array) -> Array:
        """int32 ids. Raises: RequestError for ids outside the vocabulary, where they are not traced."""
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise RequestError(f"tokens of {tokens.dtype}", expected="int32 ids, or floating embeddings")
        vocab = self._model.config.vocab
        if not isinstance(tokens, Tracer):
            outside = np.asarray(tokens)[(np.asarray(tokens) < 0) | (np.asarray(tokens) >= vocab)]
            if outside.size:
                raise RequestError(f"token id {outside[0]}", expected=f"a whole number from 0 to {vocab - 1}")
        return tokens.astype(jnp.int32)

    def _ends(
        self, before: Any, rows: int, new: int, capacity: int, changes: Sequence[Intervention]
    ) -> tuple[int, ...]:
        """Where each row ends: what negative positions count from. before: the lengths of a cache that was given."""
        if before is not None and before.shape != (rows,):
            raise RequestError(f"{rows} rows of tokens", expected=f"{before.shape[0]}, the rows of the cache")
        ends = (new,) * rows
        if isinstance(before, Tracer):
            if any(position < 0 for change in changes for position in change.positions or ()):
                raise RequestError(
                    "negative positions over a traced cache", expected="positions counted from 0", fix="name them so"
                )
        elif before is not None:
            ends = tuple(int(length) + new for length in np.asarray(before))
        for name, room in (("capacity of the cache", capacity), ("context of the model", self._model.config.context)):
            if max(ends) > room:
                raise CapacityError(f"{max(ends):,} tokens", expected=f"at most {room:,}, the {name}")
        return ends
