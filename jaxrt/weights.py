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
from jaxrt.nn import scaled
from jaxrt.nn.packed import Packed, row_bytes
from jaxrt.nn.scaled import Scaled

Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class ArraySpec:
    """Declaration of one array, or packed or scaled matrix: static, a leaf of the abstract tree."""

    shape: tuple[int, ...]
    dtype: jnp.dtype  # of a packed one: what it is computed in
    axes: Axes
    formats: tuple[str, ...] = ()  # of a packed one's parts; the type of a scaled one
    outputs: tuple[int, ...] = ()  # rows of each part

    @property
    def scaled(self) -> bool:
        return any(format in scaled.TYPES for format in self.formats)

    @property
    def nbytes(self) -> int:
        if self.scaled:
            return scaled.nbytes(self.shape, axis=1)
        if self.formats:
            return row_bytes(self.formats, self.outputs, self.shape[1])
        size = jnp.dtype(self.dtype).itemsize
        for extent in self.shape:
            size *= extent
        return size

    def struct(self, sharding: Any) -> Any:
        """Shapes and dtypes as they will be held, for programs that are compiled before the weights are there."""

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        if self.scaled:
            scales = array((self.shape[0], 1), jnp.float32)
            return Scaled(array(self.shape, scaled.TYPES[self.formats[0]]), scales, self.dtype)
        if self.formats:
            pairs = zip(self.outputs, self.formats, strict=True)
            parts = tuple(array((count, row_bytes((one,), (1,), self.shape[1])), jnp.uint8) for count, one in pairs)
            return Packed(parts, self.formats, self.shape[1], self.dtype)
        return array(self.shape, self.dtype)


@struct.dataclass
class LayerWeights:
    """Leaves are jax.Array, Packed or Scaled, or ArraySpec in an abstract tree. Linear maps are stored as checkpoints
    have them: [out, in]."""

    attention_norm: Any  # [D]
    qkv: Any  # [(N + 2 K) H, D]
    output: Any  # [D, N H]
    mlp_norm: Any  # [D]
    gate_up: Any  # [2 F, D]
    down: Any  # [D, F]
    qkv_bias: Any = None  # [(N + 2 K) H], float32; None where the model has none, as the norms of the heads
    query_norm: Any = None  # [H] or [N H]
    key_norm: Any = None  # [H] or [K H]


@struct.dataclass
class Weights:
    embedding: Any  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Any  # [D], float32 like every norm
    head: Any  # [V, D]; None when tied to the embedding


def abstract(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Weights:
    """The tree of ArraySpec for `config`: what to load, how to place it, how many bytes it takes.

    Norms and biases stay float32 whatever `dtype` is.
    """
    width, inner = config.width, config.heads * config.head_width

    def matrix(outputs: int, inputs: int, axes: Axes) -> ArraySpec:
        return ArraySpec((outputs, inputs), dtype, axes)

    def vector(extent: int, axis: str | None) -> ArraySpec:
        return ArraySpec((extent,), jnp.float32, (axis,))

    heads = (config.heads + 2 * config.kv_heads) * config.head_width
    layer = LayerWeights(
        attention_norm=vector(width, "width"),
        qkv=matrix(heads, width, ("heads", "width")),
        output=matrix(width, inner, ("width", "heads")),
        mlp_norm=vector(width, "width"),
        gate_up=matrix(2 * config.mlp_width, width, ("mlp", "width")),
        down=matrix(width, config.mlp_width, ("width", "mlp")),
        qkv_bias=vector(heads, "heads") if config.qkv_bias else None,
        **dict(zip(("query_norm", "key_norm"), (vector(each, None) for each in config.head_norm_widths), strict=False)),
    )
    return Weights(
        embedding=matrix(config.vocab, width, ("vocab", "width")),
        layers=(layer,) * len(config.layers),
        final_norm=vector(width, "width"),
        head=None if config.tied_head else matrix(config.vocab, width, ("vocab", "width")),
    )


def is_spec(leaf: object) -> bool:
    return isinstance(leaf, ArraySpec)


def is_leaf(leaf: object) -> bool:
    """Whether it stands for one matrix or vector: a packed one is a tree of its own to JAX."""
    return isinstance(leaf, ArraySpec | Packed | Scaled)


def named(weights: Weights) -> dict[str, Any]:
    """Leaves by path: `embedding`, `layers.0.qkv`, ..., `head`; for loading, converting and showing."""
    flat, _ = jax.tree_util.tree_flatten_with_path(weights, is_leaf=is_leaf)
    return {_path(keys): leaf for keys, leaf in flat}


def _path(keys: tuple[Any, ...]) -> str:
    return ".".join(str(key.name) if isinstance(key, jax.tree_util.GetAttrKey) else str(key.idx) for key in keys)


def unnamed(specs: Weights, leaves: dict[str, Any]) -> Weights:
    """The tree of `specs` with its leaves replaced by name; the inverse of `named`."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: leaves[_path(keys)], specs, is_leaf=is_spec)


def stored(weights: Any) -> str:
    """How most of the bytes of a tree, or one leaf, are held: "float32", "Q4_1", ..."""
    held: dict[str, int] = {}
    for leaf in jax.tree.leaves(weights, is_leaf=is_leaf):
        kind = "+".join(leaf.formats) if getattr(leaf, "formats", ()) else jnp.dtype(leaf.dtype).name
        bytes_of = leaf.nbytes if is_spec(leaf) else sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(leaf))
        held[kind] = held.get(kind, 0) + bytes_of
    return max(held, key=lambda kind: held[kind])


def nbytes(specs: Weights) -> int:
    """Bytes of an abstract tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(specs, is_leaf=is_spec))
