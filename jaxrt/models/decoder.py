"""One forward pass for every text family: tokens and a cache in, hidden states and the cache out. Pure functions."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxrt.cache import KEY_SLOTS, VALUE_SLOTS, KVCache, write
from jaxrt.config import ModelConfig, RopeSpec
from jaxrt.nn.attention import attend, attention_weights, mix
from jaxrt.nn.layers import gated_mlp, rms_norm, rope_angles, rotate
from jaxrt.nn.linear import matmul
from jaxrt.nn.packed import take_rows
from jaxrt.observations import EMBEDDINGS_PATH, FINAL_NORM_PATH, WEIGHTS
from jaxrt.taps import EditArrays, Tap, Taps
from jaxrt.weights import LayerWeights, Weights


def forward(
    config: ModelConfig, weights: Weights, cache: KVCache, tokens: Array, starts: Array, tap: Tap | None = None
) -> tuple[Array, KVCache]:
    """Run T new tokens of each row through the model; row b's begin at position starts[b].

    Shapes: tokens int32 [B, T], or embeddings [B, T, D] in their place; starts int32 [B]; result [B, T, D],
    normalised for the head. tap: sees and may change every value that has a path.
    Donates: nothing itself; jitted callers donate the cache.
    """
    tap = tap or Tap()
    positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    angles: dict[RopeSpec, tuple[Array, Array]] = {}
    for layer in config.layers:
        if layer.rope is not None and layer.rope not in angles:
            angles[layer.rope] = rope_angles(layer.rope, config.head_width, positions)

    with jax.named_scope("embed"):
        given = jnp.issubdtype(tokens.dtype, jnp.floating)
        x = tokens if given else take_rows(weights.embedding, tokens)
        x = tap(EMBEDDINGS_PATH, x, positions)
    keys, values = [], []
    layers = zip(config.layers, weights.layers, cache.keys, cache.values, strict=True)
    for index, (spec, layer, k, v) in enumerate(layers):
        taps, edits = tap.layer(index)
        x, k, v, seen = _layer(config, taps, layer, x, k, v, angles.get(spec.rope), positions, starts, edits)
        tap.see(index, seen)
        keys.append(k)
        values.append(v)
    with jax.named_scope("final_norm"):
        x = tap(FINAL_NORM_PATH, rms_norm(x, weights.final_norm, config.norm_eps), positions)
    return x, KVCache(tuple(keys), tuple(values))


# An inner jitted function is traced and lowered once for all layers alike: 0.13 s instead of 0.85 s for 30 of them.
@partial(jax.jit, static_argnames=("config", "taps"))
def _layer(
    config: ModelConfig,
    taps: Taps,
    weights: LayerWeights,
    x: Array,
    keys: Array,
    values: Array,
    angles: tuple[Array, Array] | None,
    positions: Array,
    starts: Array,
    edits: tuple[EditArrays, ...],
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Attention and MLP, each normalised before or after, and added to the stream.

    Shapes: x [B, T, D]; keys [B, K, H, S]; values [B, K, S, H]. The last result holds what was observed, by site.
    """
    rows, new, _ = x.shape
    tap, before = Tap(taps, edits), config.norms == "before"
    norm = partial(rms_norm, eps=config.norm_eps)
    x = tap("input", x, positions)
    with jax.named_scope("attention"):
        fused = matmul(norm(x, weights.attention_norm) if before else x, weights.qkv)
        if weights.qkv_bias is not None:
            fused = fused + weights.qkv_bias[None, None].astype(fused.dtype)
        heads = fused.reshape(rows, new, config.heads + 2 * config.kv_heads, config.head_width)
        q, k, v = jnp.split(heads, (config.heads, config.heads + config.kv_heads), axis=2)
        if weights.query_norm is not None:
            q, k = _head_norm(q, weights.query_norm, norm), _head_norm(k, weights.key_norm, norm)
        q = tap("attention.query", q, positions)
        k = tap("attention.key", k, positions)
        v = tap("attention.value", v, positions)
        turned, turned_keys = (q, k) if angles is None else (rotate(q, angles), rotate(k, angles))
        keys = write(keys, turned_keys, starts, KEY_SLOTS)
        values = write(values, v, starts, VALUE_SLOTS)
        if taps.whole:
            mixed = mix(tap(WEIGHTS, attention_weights(turned, keys, positions), positions), values)
        else:
            mixed = attend(turned, keys, values, positions)
        mixed = tap("attention.heads", mixed.astype(x.dtype), positions)
        out = matmul(mixed.reshape(rows, new, -1), weights.output)
        out = out if before else norm(out, weights.attention_norm)
        x = x + tap("attention.output", out, positions)
    with jax.named_scope("mlp"):
        out = gated_mlp(norm(x, weights.mlp_norm) if before else x, weights.gate_up, weights.down)
        out = out if before else norm(out, weights.mlp_norm)
        x = x + tap("mlp.output", out, positions)
    return tap("output", x, positions), keys, values, tap.seen


def _head_norm(x: Array, weight: Array, norm: Callable[[Array, Array], Array]) -> Array:
    """Over each head, or over all heads of a position, as the weight is wide. Shapes: x [B, T, N, H]; weight [H] or
    [N H]; result like x."""
    return norm(x.reshape(*x.shape[:2], -1, weight.shape[0]), weight).reshape(x.shape)


def logits(weights: Weights, hidden: Array) -> Array:
    """Scores of every token of the vocabulary. Shapes: hidden [..., D]; result float32 [..., V]."""
    head = weights.embedding if weights.head is None else weights.head
    with jax.named_scope("head"):
        return matmul(hidden, head, dtype=jnp.float32)
