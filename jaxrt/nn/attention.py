"""Attention of new queries over a cache, with grouped heads. Pure functions; masks are by position, never by
padding."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxrt import native
from jaxrt.nn.scaled import Scaled

# Slots looked at in one turn of the loop, for many queries and for one. The loop ends at the last position in use, so
# that time follows the tokens and not the capacity.
MANY_BLOCK, ONE_BLOCK = 128, 512
LOWEST = -1e30  # a masked score: not -inf, since a block in which a query sees nothing must not subtract infinities


def attend(queries: Array, keys: Array | Scaled, values: Array | Scaled, positions: Array) -> Array:
    """Causal attention (Vaswani et al. 2017), K groups of N / K query heads sharing a key head (Ainslie et al. 2023).

    Slot s of the cache holds position s, so a query at position p sees the slots up to and including p; whatever
    stands behind it is masked. Slots are taken block by block with a running maximum (Milakov and Gimelshein 2018).

    Shapes: queries [B, T, N, H]; keys [B, K, H, S]; values [B, K, S, H]; positions int32 [B, T]; result [B, T, N, H].
    Numerics: scores and softmax in float32; result in the queries' dtype.
    """
    fits = queries.shape[3] % native.HEAD_WIDTHS == 0
    if fits and (not native.missing() if isinstance(keys, Scaled) else native.handles(keys)):
        return jax.lax.platform_dependent(queries, keys, values, positions, cpu=_on_cpu, default=_attend)
    return _attend(queries, keys, values, positions)


def _on_cpu(queries: Array, keys: Array | Scaled, values: Array | Scaled, positions: Array) -> Array:
    wide = queries.astype(jnp.float32)
    if isinstance(keys, Scaled) and isinstance(values, Scaled):
        scales = keys.scales, values.scales
        return native.attend_scaled(wide, keys.values, values.values, positions, *scales).astype(queries.dtype)
    return _native(wide, keys, values, positions).astype(queries.dtype)


def _attend(queries: Array, keys: Array | Scaled, values: Array | Scaled, positions: Array) -> Array:
    rows, new, heads, head_width = queries.shape
    groups, capacity = values.shape[1], values.shape[2]
    grouped = queries.reshape(rows, new, groups, heads // groups, head_width) * head_width**-0.5
    grouped = jnp.moveaxis(grouped, 1, 3)  # [B, K, G, T, H]
    score, mix, block = (_score_one, _mix_one, ONE_BLOCK) if new == 1 else (_score_many, _mix_many, MANY_BLOCK)
    block = min(block, capacity)

    def piece(slots: Array | Scaled, start: Array, axis: int) -> Array | Scaled:
        return jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, start, block, axis), slots)

    def look(index: Array) -> tuple[Array, Array, Array]:
        """One block by itself: the highest score, the sum of weights relative to it, and the values they mix."""
        start = jnp.minimum(index * block, capacity - block)  # the last block may reach back into the one before it
        slots = start + jnp.arange(block, dtype=jnp.int32)[None, None, :]
        visible = (slots <= positions[:, :, None]) & (slots >= index * block)  # [B, T, block]
        scores = _scored(score, grouped, piece(keys, start, 3))
        scores = jnp.where(visible[:, None, None], scores, LOWEST)
        highest = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - highest[..., None])
        return highest, jnp.sum(weights, axis=-1), _mixed(mix, weights, piece(values, start, 2), queries.dtype)

    def add(index: Array, seen: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        (old, total, mixed), (new_highest, added, more) = seen, look(index)
        highest = jnp.maximum(old, new_highest)
        fading, growing = jnp.exp(old - highest), jnp.exp(new_highest - highest)
        return highest, total * fading + added * growing, mixed * fading[..., None] + more * growing[..., None]

    if block == capacity:
        _, total, mixed = look(jnp.int32(0))
    else:
        shape = grouped.shape[:-1]
        nothing = (jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((*shape, head_width)))
        blocks = jnp.minimum(jnp.max(positions), capacity - 1) // block + 1
        _, total, mixed = jax.lax.fori_loop(0, blocks, add, nothing)
    return jnp.moveaxis(mixed / total[..., None], 3, 1).reshape(queries.shape).astype(queries.dtype)


_native = native.differentiable(native.attend, _attend)


def attention_weights(queries: Array, keys: Array | Scaled, positions: Array) -> Array:
    """The weights of `attend`, all of them: how much each query takes from every slot.

    Shapes: queries [B, T, N, H]; keys [B, K, H, S]; positions int32 [B, T]; result float32 [B, N, T, S].
    """
    rows, new, heads, head_width = queries.shape
    groups, capacity = keys.shape[1], keys.shape[3]
    grouped = queries.reshape(rows, new, groups, heads // groups, head_width) * head_width**-0.5
    scores = _scored(_score_many, jnp.moveaxis(grouped, 1, 3), keys)
    visible = jnp.arange(capacity, dtype=jnp.int32)[None, None, :] <= positions[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, LOWEST), axis=-1)
    return weights.reshape(rows, heads, new, capacity)


def mix(weights: Array, values: Array | Scaled) -> Array:
    """The values as the weights mix them. Shapes: weights [B, N, T, S]; values [B, K, S, H]; result [B, T, N, H]."""
    rows, heads, new, capacity = weights.shape
    groups = values.shape[1]
    mixed = _mixed(_mix_many, weights.reshape(rows, groups, heads // groups, new, capacity), values, weights.dtype)
    return jnp.moveaxis(mixed, 3, 1).reshape(rows, new, heads, values.shape[-1])


def _scored(score: Callable[[Array, Array], Array], queries: Array, keys: Array | Scaled) -> Array:
    if isinstance(keys, Scaled):
        return score(queries, keys.values) * keys.scales[:, :, None]
    return score(queries, keys)


def _mixed(mix: Callable[[Array, Array], Array], weights: Array, values: Array | Scaled, dtype: jnp.dtype) -> Array:
    if isinstance(values, Scaled):
        scales = jnp.moveaxis(values.scales, 3, 2)[:, :, None]
        return mix(weights * scales, values.values.astype(dtype))
    return mix(weights, values)


def _score_many(queries: Array, keys: Array) -> Array:
    keys = keys.astype(queries.dtype)
    return jnp.einsum("bkgth,bkhs->bkgts", queries, keys, preferred_element_type=jnp.float32)


def _mix_many(weights: Array, values: Array) -> Array:
    weights = weights.astype(values.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", weights, values, preferred_element_type=jnp.float32)


# For one query as multiply and sum: XLA's CPU dots take 1.2 x as long at this shape.
def _score_one(queries: Array, keys: Array) -> Array:
    wide = queries[:, :, :, 0, :, None].astype(jnp.float32)  # [B, K, G, H, 1]
    return jnp.sum(wide * keys[:, :, None].astype(jnp.float32), axis=3)[:, :, :, None]


def _mix_one(weights: Array, values: Array) -> Array:
    wide = weights[:, :, :, 0, :, None]  # [B, K, G, S, 1]
    return jnp.sum(wide * values[:, :, None].astype(jnp.float32), axis=3)[:, :, :, None]
