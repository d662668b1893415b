"""Attention of new queries over a cache, with grouped heads. Pure functions; masks are by position, never by
padding."""

import jax
import jax.numpy as jnp
from jax import Array


def attend(queries: Array, keys: Array, values: Array, positions: Array) -> Array:
    """Causal attention (Vaswani et al. 2017), K groups of N / K query heads sharing a key head (Ainslie et al. 2023).

    Slot s of the cache holds position s, so a query at position p sees the slots up to and including p; whatever
    stands behind it is masked.

    Shapes: queries [B, T, N, H]; keys [B, K, H, S]; values [B, K, S, H]; positions int32 [B, T]; result [B, T, N, H].
    Numerics: scores and softmax in float32; result in the queries' dtype.
    """
    rows, new, heads, head_width = queries.shape
    groups, capacity = values.shape[1], values.shape[2]
    queries = queries.reshape(rows, new, groups, heads // groups, head_width) * head_width**-0.5
    visible = jnp.arange(capacity, dtype=jnp.int32)[None, None, :] <= positions[:, :, None]  # [B, T, S]
    product = _attend_one if new == 1 else _attend_many
    return product(queries, keys, values, visible).reshape(rows, new, heads, head_width)


def _attend_many(queries: Array, keys: Array, values: Array, visible: Array) -> Array:
    keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    scores = jnp.einsum("btkgh,bkhs->bkgts", queries, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bksh->btkgh", weights.astype(queries.dtype), values)


def _attend_one(queries: Array, keys: Array, values: Array, visible: Array) -> Array:
    """The same for a single query, as multiply and sum: XLA's CPU dots take 1.2 x as long at this shape."""
    wide = queries[:, 0].astype(jnp.float32)  # [B, K, G, H]
    scores = jnp.sum(wide[..., None] * keys.astype(jnp.float32)[:, :, None], axis=3)  # [B, K, G, S]
    scores = jnp.where(visible[:, 0, None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    mixed = jnp.sum(weights[..., None] * values.astype(jnp.float32)[:, :, None], axis=3)  # [B, K, G, H]
    return (mixed / jnp.sum(weights, axis=-1, keepdims=True)).astype(queries.dtype)[:, None]
