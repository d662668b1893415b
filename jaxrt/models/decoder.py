"""One forward pass for every text family: tokens and a cache in, hidden states and the cache out. Pure functions."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxrt.cache import KEY_SLOTS, VALUE_SLOTS, KVCache, write
from jaxrt.config import ModelConfig, RopeSpec
from jaxrt.nn.attention import attend
from jaxrt.nn.layers import gated_mlp, rms_norm, rope_angles, rotate
from jaxrt.nn.linear import matmul
from jaxrt.weights import LayerWeights, Weights


def forward(
    config: ModelConfig, weights: Weights, cache: KVCache, tokens: Array, starts: Array
) -> tuple[Array, KVCache]:
    """Run T new tokens of each row through the model; row b's begin at position starts[b].

    Shapes: tokens int32 [B, T]; starts int32 [B]; result [B, T, D], normalised for the head.
    Donates: nothing itself; jitted callers donate the cache.
    """
    positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    angles: dict[RopeSpec, tuple[Array, Array]] = {}
    for layer in config.layers:
        if layer.rope not in angles:
            angles[layer.rope] = rope_angles(layer.rope, config.head_width, positions)

    with jax.named_scope("embed"):
        x = jnp.take(weights.embedding, tokens, axis=0, mode="clip")
    keys, values = [], []
    for spec, layer, k, v in zip(config.layers, weights.layers, cache.keys, cache.values, strict=True):
        x, k, v = _layer(config, layer, x, k, v, angles[spec.rope], positions, starts)
        keys.append(k)
        values.append(v)
    with jax.named_scope("final_norm"):
        x = rms_norm(x, weights.final_norm, config.norm_eps)
    return x, KVCache(tuple(keys), tuple(values))


# An inner jitted function is traced and lowered once for all layers alike: 0.13 s instead of 0.85 s for 30 of them.
@partial(jax.jit, static_argnames="config")
def _layer(
    config: ModelConfig,
    weights: LayerWeights,
    x: Array,
    keys: Array,
    values: Array,
    angles: tuple[Array, Array],
    positions: Array,
    starts: Array,
) -> tuple[Array, Array, Array]:
    """Pre-norm attention and MLP, each added to the stream. Shapes: x [B, T, D]; keys [B, K, H, S]; values [B, K, S,
    H]."""
    rows, new, _ = x.shape
    with jax.named_scope("attention"):
        fused = matmul(rms_norm(x, weights.attention_norm, config.norm_eps), weights.qkv)
        heads = fused.reshape(rows, new, config.heads + 2 * config.kv_heads, config.head_width)
        q, k, v = jnp.split(heads, (config.heads, config.heads + config.kv_heads), axis=2)
        keys = write(keys, rotate(k, angles), starts, KEY_SLOTS)
        values = write(values, v, starts, VALUE_SLOTS)
        mixed = attend(rotate(q, angles), keys, values, positions)
        x = x + matmul(mixed.reshape(rows, new, -1), weights.output)
    with jax.named_scope("mlp"):
        x = x + gated_mlp(rms_norm(x, weights.mlp_norm, config.norm_eps), weights.gate_up, weights.down)
    return x, keys, values


def logits(weights: Weights, hidden: Array) -> Array:
    """Scores of every token of the vocabulary. Shapes: hidden [..., D]; result float32 [..., V]."""
    head = weights.embedding if weights.head is None else weights.head
    with jax.named_scope("head"):
        return matmul(hidden, head, dtype=jnp.float32)
