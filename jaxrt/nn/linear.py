"""The one matmul entry: every linear map of a model goes through `matmul`, whatever the storage of its weights."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxrt.weights import Matrix

# From this many rows on, a tall matrix stored [N, K] is transposed before the product (CPU, jax 0.10.2: 128 rows times
# 1536 x 576 run at 30 GFLOP/s stored [N, K] and at 53 once transposed; the copy costs under a tenth of that). A wide
# one runs as fast as it is stored, and its copy could be as large as a head.
TRANSPOSE_ROWS = 32


def matmul(x: Array, weight: Matrix, dtype: jnp.dtype | None = None) -> Array:
    """x times the linear map. Shapes: x [..., K]; result [..., N], of `dtype` or else x's."""
    array, contracted = weight.array, 1 if weight.transposed else 0
    tall = array.shape[contracted] > array.shape[1 - contracted]
    if weight.transposed and tall and x.size // x.shape[-1] >= TRANSPOSE_ROWS:
        # the barrier keeps XLA from folding the transpose back into the product
        array, contracted = jax.lax.optimization_barrier(array.T), 0
    dimensions = (((x.ndim - 1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(x, array, dimensions, preferred_element_type=dtype or x.dtype)
