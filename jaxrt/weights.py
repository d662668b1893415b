"""The weights, declared once: `abstract(config)` says shape, dtype and logical axes of every array; the rest is
derived.

Arrays are per layer, never stacked (scanning over stacked weights costs 2.7 x on CPU and copies on GPU). Q, K and V
are one matrix, gate and up another. Logical axes name what a dimension is, so that `mesh` can place it without
knowing the model.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrt.config import ModelConfig

# A matrix that is taller than wide multiplies one row faster when stored transposed (CPU, jax 0.10.2: 1536 x 576 takes
# 186 us stored [N, K] and 351 us stored [K, N]); prefill transposes it inside.
Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class ArraySpec:
    """Declaration of one array: static, a leaf of the abstract tree."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: Axes

    @property
    def nbytes(self) -> int:
        size = jnp.dtype(self.dtype).itemsize
        for extent in self.shape:
            size *= extent
        return size


@struct.dataclass
class Matrix:
    """A linear map from K inputs to N outputs, stored [K, N], or [N, K] when `transposed`."""

    array: Any  # jax.Array, or ArraySpec in an abstract tree
    transposed: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class LayerWeights:
    attention_norm: Any  # [D]
    qkv: Matrix  # D -> (N + 2 K) H
    output: Matrix  # N H -> D
    mlp_norm: Any  # [D]
    gate_up: Matrix  # D -> 2 F
    down: Matrix  # F -> D


@struct.dataclass
class Weights:
    embedding: Any  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Any  # [D], float32 like every norm
    head: Matrix | None  # D -> V; None when tied to the embedding


def abstract(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Weights:
    """The tree of ArraySpec for `config`: what to load, how to place it, how many bytes it takes.

    Norms stay float32 whatever `dtype` is.
    """
    width, inner = config.width, config.heads * config.head_width

    def matrix(inputs: int, outputs: int, axes: Axes) -> Matrix:
        transposed = inputs > outputs
        shape = (outputs, inputs) if transposed else (inputs, outputs)
        return Matrix(ArraySpec(shape, dtype, axes[::-1] if transposed else axes), transposed)

    def norm() -> ArraySpec:
        return ArraySpec((width,), jnp.float32, ("width",))

    layer = LayerWeights(
        attention_norm=norm(),
        qkv=matrix(width, (config.heads + 2 * config.kv_heads) * config.head_width, ("width", "heads")),
        output=matrix(inner, width, ("heads", "width")),
        mlp_norm=norm(),
        gate_up=matrix(width, 2 * config.mlp_width, ("width", "mlp")),
        down=matrix(config.mlp_width, width, ("mlp", "width")),
    )
    return Weights(
        embedding=ArraySpec((config.vocab, width), dtype, ("vocab", "width")),
        layers=(layer,) * len(config.layers),
        final_norm=norm(),
        # the head multiplies one row per step and is stored like the table: [V, D]
        head=None
        if config.tied_head
        else Matrix(ArraySpec((config.vocab, width), dtype, ("vocab", "width")), transposed=True),
    )


def is_spec(leaf: object) -> bool:
    return isinstance(leaf, ArraySpec)


def named(weights: Weights) -> dict[str, Any]:
    """Leaves by path: `embedding`, `layers.0.qkv`, ..., `head`; for loading, converting and showing."""
    flat, _ = jax.tree_util.tree_flatten_with_path(weights, is_leaf=is_spec)
    return {_path(keys): leaf for keys, leaf in flat}


def _path(keys: tuple[Any, ...]) -> str:
    parts = [str(key.name) if isinstance(key, jax.tree_util.GetAttrKey) else str(key.idx) for key in keys]
    return ".".join(part for part in parts if part != "array")


def unnamed(specs: Weights, leaves: dict[str, Any]) -> Weights:
    """The tree of `specs` with its leaves replaced by name; the inverse of `named`."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: leaves[_path(keys)], specs, is_leaf=is_spec)


def nbytes(specs: Weights) -> int:
    """Bytes of an abstract tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(specs, is_leaf=is_spec))
