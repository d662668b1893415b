"""What `gpu_check` runs: random weights, made on the device, in the shapes of well-known models."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrt import weights as weight_trees
from jaxrt.config import LayerSpec, ModelConfig, RopeSpec

SMALL, LARGE = "llama-3.2-1b", "llama-3.1-8b"


def _shape(width: int, mlp_width: int, head_width: int, layers: int, factor: float, tied: bool) -> ModelConfig:
    rope = RopeSpec(theta=500_000.0, scaling="llama3", factor=factor)
    return ModelConfig(
        family="llama",
        vocab=128_256,
        width=width,
        mlp_width=mlp_width,
        heads=32,
        kv_heads=8,
        head_width=head_width,
        layers=(LayerSpec(rope),) * layers,
        context=131_072,
        tied_head=tied,
    )


SHAPES = {
    SMALL: _shape(2_048, 8_192, 64, 16, 32.0, tied=True),
    LARGE: _shape(4_096, 14_336, 128, 32, 8.0, tied=False),
}
# One layer, and tables and activations of 32 rows that stay smaller than the smallest weight, as in the real shapes.
TINY = replace(
    SHAPES[LARGE],
    vocab=256,
    width=128,
    mlp_width=160,
    heads=4,
    kv_heads=2,
    head_width=32,
    layers=SHAPES[LARGE].layers[:1],
)


def random_weights(config: ModelConfig, dtype: Any, device: jax.Device, scale: float = 0.02) -> weight_trees.Weights:
    """Weights made where they will stay: matrices with `scale` as their standard deviation, norms of one."""
    keys = iter(range(10_000))

    def draw(spec: weight_trees.ArraySpec) -> jax.Array:
        if len(spec.shape) == 1:
            return _ones(spec.shape, spec.dtype)
        return noise(next(keys), scale, spec.shape, spec.dtype)

    with jax.default_device(device):
        return jax.tree.map(draw, weight_trees.abstract(config, dtype), is_leaf=weight_trees.is_spec)


def _ones(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.jit(jnp.ones, static_argnums=(0, 1))(shape, dtype)


def _draw(seed: Any, scale: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype) * scale.astype(dtype)


_noise_jit = jax.jit(_draw, static_argnums=(2, 3))


def noise(seed: int, scale: float, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return _noise_jit(np.uint32(seed), np.float32(scale), shape, jnp.dtype(dtype))
