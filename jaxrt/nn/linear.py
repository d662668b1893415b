"""The one matmul entry: every linear map of a model goes through `matmul`, whatever the storage of its weights.

Weights are stored as checkpoints have them, [N, K]: outputs by inputs, as arrays or packed. On CPU the native kernels
(`jaxrt.native`) multiply, where they were built. Where they were not, XLA does: its CPU backend runs one row at the
memory's speed stored [N, K], and 128 rows faster than [K, N]. Between, and for matrices taller than wide, it wants the
product the other way round, (W x^T)^T. Microseconds for 576 x 3072 and 1536 x 576 (two cores, AVX2, jax 0.10.2):

    rows   x W, stored [K, N]   x W^T, stored [N, K]   (W x^T)^T
    1      344, 188             294, 139
    4      1103, 493            1100, 327              588, 207
    8      1041, 629            1296, 434              730, 269
    128    3800, 1490           3350, 1580             3870, 1810

On another machine of the kind 128 rows of the tall one took 7550 as stored [N, K] and 4270 stored [K, N], which is
what the product the other way round avoids.
"""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxrt import native
from jaxrt.nn.packed import Packed, unpack_part, unpacked
from jaxrt.nn.scaled import Scaled

DIRECT_ROWS = 64  # from here on a wide matrix is multiplied as it stands


def matmul(x: Array, weight: Array | Packed | Scaled, dtype: jnp.dtype | None = None) -> Array:
    """x times the linear map. Shapes: x [..., K]; weight [N, K]; result [..., N], of `dtype` or else x's."""
    rows = x.reshape(-1, weight.shape[1])
    cpu, elsewhere = partial(_on_cpu, dtype=dtype or x.dtype), partial(_elsewhere, dtype=dtype or x.dtype)
    product = jax.lax.platform_dependent(rows, weight, cpu=cpu, default=elsewhere)
    return product.reshape(*x.shape[:-1], weight.shape[0])


def _on_cpu(rows: Array, weight: Array | Packed | Scaled, dtype: jnp.dtype) -> Array:
    if isinstance(weight, Packed) and not native.missing():
        wide = rows.astype(jnp.float32)
        parts = [_native(format)(wide, part) for part, format in zip(weight.parts, weight.formats, strict=True)]
        return (parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)).astype(dtype)
    matrix = unpacked(weight) if isinstance(weight, Packed | Scaled) else weight
    if native.handles(matrix):
        return _native(None)(rows.astype(jnp.float32), matrix).astype(dtype)
    outputs, inputs = matrix.shape
    few = 1 < rows.shape[0] < DIRECT_ROWS
    tall = inputs > outputs and rows.shape[0] > 1
    return (_flipped if few or tall else _direct)(rows, matrix, dtype)


@cache
def _native(format: str | None) -> Callable[[Array, Array], Array]:
    """The kernel for arrays, or for a packed format."""

    def reference(rows: Array, weight: Array) -> Array:
        matrix = weight.astype(jnp.float32) if format is None else unpack_part(weight, rows.shape[1], format)
        return _direct(rows, matrix, jnp.float32)

    return native.differentiable(partial(native.matmul, format=format), reference)


def _elsewhere(rows: Array, weight: Array | Packed | Scaled, dtype: jnp.dtype) -> Array:
    if isinstance(weight, Scaled):  # XLA widens the values within the product; a scale there would keep it from that
        product = _direct(rows, weight.values.astype(rows.dtype), jnp.dtype(jnp.float32))
        return (product * weight.scales.T).astype(dtype)
    return _direct(rows, unpacked(weight) if isinstance(weight, Packed) else weight, dtype)


def _direct(rows: Array, weight: Array, dtype: jnp.dtype) -> Array:
    return jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _flipped(rows: Array, weight: Array, dtype: jnp.dtype) -> Array:
    # the barriers keep XLA from folding the transposes back into the product
    columns = jax.lax.optimization_barrier(rows.T)
    product = jax.lax.dot_general(weight, columns, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
    return jax.lax.optimization_barrier(product).T
