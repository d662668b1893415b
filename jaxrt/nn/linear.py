"""The one matmul entry: every linear map of a model goes through `matmul`, whatever the storage of its weights.

Weights are stored as checkpoints have them, [N, K]: outputs by inputs. XLA's CPU backend runs one row at the memory's
speed that way, and 128 rows faster than stored [K, N]. Between, and for matrices taller than wide, it wants the
product the other way round, (W x^T)^T. Microseconds for 576 x 3072 and 1536 x 576 (two cores, AVX2, jax 0.10.2):

    rows   x W, stored [K, N]   x W^T, stored [N, K]   (W x^T)^T
    1      344, 188             294, 139
    4      1103, 493            1100, 327              588, 207
    8      1041, 629            1296, 434              730, 269
    128    3800, 1490           3350, 1580             3870, 1810

On another machine of the kind 128 rows of the tall one took 7550 as stored [N, K] and 4270 stored [K, N], which is
what the product the other way round avoids.
"""

import jax
import jax.numpy as jnp
from jax import Array

DIRECT_ROWS = 64  # from here on a wide matrix is multiplied as it stands


def matmul(x: Array, weight: Array, dtype: jnp.dtype | None = None) -> Array:
    """x times the linear map. Shapes: x [..., K]; weight [N, K]; result [..., N], of `dtype` or else x's."""
    outputs, inputs = weight.shape
    dtype = dtype or x.dtype
    rows = x.reshape(-1, inputs)
    few = 1 < rows.shape[0] < DIRECT_ROWS
    tall = inputs > outputs and rows.shape[0] > 1
    cpu = _flipped if few or tall else _direct
    product = jax.lax.platform_dependent(
        rows, weight, cpu=lambda x, w: cpu(x, w, dtype), default=lambda x, w: _direct(x, w, dtype)
    )
    return product.reshape(*x.shape[:-1], outputs)


def _direct(rows: Array, weight: Array, dtype: jnp.dtype) -> Array:
    return jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _flipped(rows: Array, weight: Array, dtype: jnp.dtype) -> Array:
    # the barriers keep XLA from folding the transposes back into the product
    columns = jax.lax.optimization_barrier(rows.T)
    product = jax.lax.dot_general(weight, columns, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
    return jax.lax.optimization_barrier(product).T
