"""The one matmul entry: every linear map of a model goes through `matmul`, whatever the storage of its weights."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxrt.weights import Matrix

# From this many rows on, a product with a tall matrix stored [N, K] is taken as (W x^T)^T: two transposes of
# activations buy a product along the rows as they are stored (CPU, jax 0.10.2: 128 rows times 1536 x 576 run at 30
# GFLOP/s stored [N, K] and 53 stored [K, N] on one machine, at 143 and 152 on another). Transposing the weights costs
# more than either.
FLIPPED_ROWS = 32


def matmul(x: Array, weight: Matrix, dtype: jnp.dtype | None = None) -> Array:
    """x times the linear map. Shapes: x [..., K]; result [..., N], of `dtype` or else x's."""
    array, contracted = weight.array, 1 if weight.transposed else 0
    tall = array.shape[contracted] > array.shape[1 - contracted]
    if weight.transposed and tall and x.size // x.shape[-1] >= FLIPPED_ROWS:
        # the barriers keep XLA from folding the transposes back into the product
        flipped = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
        product = jax.lax.dot_general(array, flipped, (((1,), (0,)), ((), ())), preferred_element_type=dtype or x.dtype)
        return jax.lax.optimization_barrier(product).T.reshape(*x.shape[:-1], array.shape[0])
    dimensions = (((x.ndim - 1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(x, array, dimensions, preferred_element_type=dtype or x.dtype)
