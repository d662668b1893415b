"""The KV cache as a value: per-layer arrays, declared, written in place, grown by copying. It has no owner here."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxrt.config import ModelConfig


@struct.dataclass
class KVCache:
    """Keys (rotated) and values of every layer. Slot s of a row holds position s; slots past the row's length are
    noise."""

    keys: tuple[Any, ...]  # L of [B, K, S, H]
    values: tuple[Any, ...]  # L of [B, K, S, H]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


def abstract(config: ModelConfig, rows: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """Shapes and dtypes of a cache for `rows` sequences of up to `capacity` tokens."""
    layer = jax.ShapeDtypeStruct((rows, config.kv_heads, capacity, config.head_width), dtype)
    return KVCache(keys=(layer,) * len(config.layers), values=(layer,) * len(config.layers))


def row_nbytes(config: ModelConfig, capacity: int, dtype: jnp.dtype) -> int:
    """Bytes of one row of `capacity` slots."""
    per_slot = 2 * config.kv_heads * config.head_width * jnp.dtype(dtype).itemsize
    return per_slot * capacity * len(config.layers)


def write(slots: Array, new: Array, starts: Array) -> Array:
    """Put the T new entries of each row into its slots from `starts` on; entries past the capacity are dropped.

    Shapes: slots [B, K, S, H]; new [B, T, K, H]; starts int32 [B]; result like slots, which should be donated.
    """
    capacity, count = slots.shape[2], new.shape[1]
    new = jnp.swapaxes(new, 1, 2).astype(slots.dtype)
    for row in range(slots.shape[0]):  # one in-place slice each: a scatter over rows costs more on CPU
        block, start = new[row : row + 1], starts[row]
        corner = (row, 0, start, 0)
        if count > 1:
            corner, block = _shift_to_fit(slots, block, row, start, capacity)
        slots = jax.lax.dynamic_update_slice(slots, block, corner)
    return slots


def _shift_to_fit(slots: Array, block: Array, row: int, start: Array, capacity: int) -> tuple[tuple, Array]:
    """A padded chunk may reach past the last slot, where XLA would move the whole write backwards over older entries.

    Move it ourselves and keep what stood there: old | new[:capacity - start].
    """
    count = block.shape[2]
    fits = jnp.minimum(start, capacity - count)
    corner = (row, 0, fits, 0)
    old = jax.lax.dynamic_slice(slots, corner, block.shape)
    moved = jax.lax.dynamic_slice(jnp.concatenate([old, block], axis=2), (0, 0, count - (start - fits), 0), block.shape)
    kept = jnp.arange(count, dtype=jnp.int32) < start - fits
    return corner, jnp.where(kept[None, None, :, None], old, moved)


def grow(cache: KVCache, capacity: int) -> KVCache:
    """The same entries in a larger cache."""

    def widen(slots: Array) -> Array:
        return jnp.pad(slots, ((0, 0), (0, 0), (0, capacity - slots.shape[2]), (0, 0)))

    return jax.tree.map(widen, cache)
