"""Packed weights: matrices that stay in memory as blocks of small integers with scales, in GGUF's own layouts.

A format is a row of `FORMATS`: how many weights a block has, in how many bytes, where its halves stand, and what it
unpacks to. The unpacking here is the reference, and what runs where there is no native kernel; the layouts are those
of the GGML library's types of the same names.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxrt.nn.scaled import Scaled, widened


@dataclass(frozen=True)
class Format:
    weights: int  # of a block
    bytes: int
    halves: tuple[int, ...]  # where scales and minima of IEEE binary16 stand in a block
    unpack: Callable[[Array], Array]  # blocks uint8 [..., bytes] -> float32 [..., weights]

    def row_bytes(self, inputs: int) -> int:
        return inputs // self.weights * self.bytes


@struct.dataclass
class Packed:
    """A linear map [N, K] in packed parts, one below the other: fused matrices may come from tensors of several
    formats. A pytree whose leaves are the parts; `dtype` is what products and looked-up rows are computed in."""

    parts: tuple[Any, ...]  # uint8 [N_i, bytes of a row]
    formats: tuple[str, ...] = struct.field(pytree_node=False)
    inputs: int = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.inputs

    @property
    def ndim(self) -> int:
        return 2

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """As held: packed."""
        return sum(part.nbytes for part in self.parts)


def unpacked(weight: Packed | Scaled) -> Array:
    """The matrix itself, [N, K] of its dtype."""
    if isinstance(weight, Scaled):
        return widened(weight)
    rows = [unpack_part(part, weight.inputs, format) for part, format in zip(weight.parts, weight.formats, strict=True)]
    return (rows[0] if len(rows) == 1 else jnp.concatenate(rows)).astype(weight.dtype)


def unpack_part(data: Array, inputs: int, format: str) -> Array:
    """uint8 [N, bytes of a row] -> float32 [N, inputs]."""
    known = FORMATS[format]
    blocks = data.reshape(data.shape[0], inputs // known.weights, known.bytes)
    return known.unpack(blocks).reshape(data.shape[0], inputs)


def take_rows(weight: Array | Packed | Scaled, rows: Array) -> Array:
    """Rows of a matrix [N, K] by number, clipped to those there are: [..., K], of the matrix's dtype."""
    if isinstance(weight, Scaled):
        values, scales = (jnp.take(part, rows, axis=0, mode="clip") for part in (weight.values, weight.scales))
        return widened(Scaled(values, scales, weight.dtype))
    if not isinstance(weight, Packed):
        return jnp.take(weight, rows, axis=0, mode="clip")
    flat, first, found = rows.reshape(-1), 0, None
    for part, format in zip(weight.parts, weight.formats, strict=True):
        here = unpack_part(jnp.take(part, flat - first, axis=0, mode="clip"), weight.inputs, format)
        found = here if found is None else jnp.where((flat >= first)[:, None], here, found)
        first += part.shape[0]
    assert found is not None
    return found.reshape(*rows.shape, weight.inputs).astype(weight.dtype)


def _half(blocks: Array, at: int) -> Array:
    """[..., 1] float32 of the two bytes at `at`."""
    return jax.lax.bitcast_convert_type(blocks[..., at : at + 2], jnp.float16).astype(jnp.float32)[..., None]


def _signed(data: Array) -> Array:
    return jax.lax.bitcast_convert_type(data, jnp.int8).astype(jnp.float32)


def _nibbles(data: Array) -> Array:
    """All low halves, then all high ones, of the last axis."""
    return jnp.concatenate([data & 15, data >> 4], axis=-1)


def _fields(data: Array, width: int) -> Array:
    """Bit fields from the lowest up: [..., n] -> [..., 8 / width, n]."""
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8).reshape(*(1,) * (data.ndim - 1), -1, 1)
    return (data[..., None, :] >> shifts) & ((1 << width) - 1)


def _fifth(blocks: Array, at: int) -> Array:
    """Bit i of the four bytes at `at`, for weight i: [..., 32]."""
    bits = jnp.swapaxes(_fields(blocks[..., at : at + 4], 1), -1, -2)
    return bits.reshape(*blocks.shape[:-1], 32)


def _five(blocks: Array, bits: int, fours: int) -> Array:
    return (_nibbles(blocks[..., fours : fours + 16]) | _fifth(blocks, bits) << 4).astype(jnp.float32)


def _q4(blocks: Array, at: int) -> Array:
    return _nibbles(blocks[..., at : at + 16]).astype(jnp.float32)


def _six_bits(blocks: Array) -> tuple[Array, Array]:
    """Scale and minimum of each of the eight parts of a K block, [..., 8, 1], with the block's own multiplied in."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = jnp.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1).astype(jnp.float32)
    minima = jnp.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=-1).astype(jnp.float32)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]


def _four_k(blocks: Array, at: int) -> Array:
    """[..., 8, 32]: each 32 bytes hold two parts, low halves first."""
    data = blocks[..., at : at + 128].reshape(*blocks.shape[:-1], 4, 32)
    return _fields(data, 4).reshape(*blocks.shape[:-1], 8, 32)


def _flat(parts: Array) -> Array:
    return parts.reshape(*parts.shape[:-2], -1)


def _q4_k(blocks: Array) -> Array:
    scales, minima = _six_bits(blocks)
    return _flat(scales * _four_k(blocks, 16).astype(jnp.float32) - minima)


def _q5_k(blocks: Array) -> Array:
    scales, minima = _six_bits(blocks)
    five = _four_k(blocks, 48) | _fields(blocks[..., 16:48], 1) << 4
    return _flat(scales * five.astype(jnp.float32) - minima)


def _q6_k(blocks: Array) -> Array:
    lead = blocks.shape[:-1]
    fours = _fields(blocks[..., :128].reshape(*lead, 2, 64), 4).reshape(*lead, 2, 4, 32)
    twos = _fields(blocks[..., 128:192].reshape(*lead, 2, 32), 2)
    values = (fours | twos << 4).astype(jnp.float32).reshape(*lead, 16, 16) - 32
    return _flat((_half(blocks, 208) * _signed(blocks[..., 192:208]))[..., None] * values)


FORMATS: Mapping[str, Format] = {
    "Q8_0": Format(32, 34, (0,), lambda b: _half(b, 0) * _signed(b[..., 2:])),
    "Q4_0": Format(32, 18, (0,), lambda b: _half(b, 0) * (_q4(b, 2) - 8)),
    "Q4_1": Format(32, 20, (0, 2), lambda b: _half(b, 0) * _q4(b, 4) + _half(b, 2)),
    "Q5_0": Format(32, 22, (0,), lambda b: _half(b, 0) * (_five(b, 2, 6) - 16)),
    "Q5_1": Format(32, 24, (0, 2), lambda b: _half(b, 0) * _five(b, 4, 8) + _half(b, 2)),
    "Q4_K": Format(256, 144, (0, 2), _q4_k),
    "Q5_K": Format(256, 176, (0, 2), _q5_k),
    "Q6_K": Format(256, 210, (208,), _q6_k),
}


def row_bytes(formats: Sequence[str], outputs: Sequence[int], inputs: int) -> int:
    """Bytes of a map whose parts have those formats and outputs."""
    return sum(FORMATS[format].row_bytes(inputs) * count for format, count in zip(formats, outputs, strict=True))
