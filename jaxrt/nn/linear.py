"""The one matmul entry: every linear map of a model goes through `matmul`, whatever the storage of its weights."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxrt.weights import Matrix

# From this many rows on, transposing the weights first beats multiplying by them as stored (CPU, jax 0.10.2: 128 rows
# times 1536 x 576 run at 30 GFLOP/s stored [N, K] and at 53 once transposed; the copy costs under a tenth of that).
TRANSPOSE_ROWS = 32


def matmul(x: Array, weight: Matrix, dtype: jnp.dtype | None = None) -> Array:
    """x times the linear map. Shapes: x [..., K]; result [..., N], of `dtype` or else x's."""
    array = weight.array
    rows = x.size // x.shape[-1]
    if weight.transposed and rows >= TRANSPOSE_ROWS:
        # the barrier keeps XLA from folding the transpose back into the product
        array = jax.lax.optimization_barrier(array.T)
    contracted = 1 if weight.transposed and rows < TRANSPOSE_ROWS else 0
    return jax.lax.dot_general(
        x, array, (((x.ndim - 1,), (contracted,)), ((), ())), preferred_element_type=dtype or x.dtype
    )
