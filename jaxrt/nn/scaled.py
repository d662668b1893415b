"""Arrays of eight bits whose numbers share a scale along one axis: a cache, a scale for every slot and head; weights on
a GPU, a scale for every output, where XLA widens them inside the product and the scale comes after it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
TYPES = {dtype.name: dtype for dtype in LARGEST}


@struct.dataclass
class Scaled:
    """`values` times `scales`. A pytree; `dtype` is what products and looked-up rows are computed in."""

    values: Any  # int8 or float8_e4m3fn
    scales: Any  # float32 of the same number of dimensions, one long where a scale is shared
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def nbytes(self) -> int:
        """As held: a byte a number, and the scales."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def formats(self) -> tuple[str, ...]:
        return (jnp.dtype(self.values.dtype).name,)


def scaled(x: Any, axis: int, type: Any, dtype: Any) -> Scaled:
    """x rounded to `type`, the largest of each stretch along `axis` to the largest that the type has. numpy in, numpy
    out. What is not finite makes its scale so, and with it every product."""
    module: Any = np if isinstance(x, np.ndarray) else jnp
    x, most = x.astype(np.float32), LARGEST[jnp.dtype(type)]
    scales = module.max(module.abs(x), axis=axis, keepdims=True) / np.float32(most)
    with np.errstate(invalid="ignore"):  # of infinity by infinity
        values = x / module.where(scales > 0, scales, np.float32(1))
    if jnp.issubdtype(type, jnp.integer):
        values = module.nan_to_num(module.round(values))
    return Scaled(values.astype(type), scales, dtype)


def widened(x: Scaled) -> Array:
    """The array itself, of its dtype."""
    return (x.values.astype(jnp.float32) * x.scales).astype(x.dtype)


def nbytes(shape: tuple[int, ...], axis: int) -> int:
    """Bytes of an array of that shape with a scale for every stretch along `axis`."""
    numbers = int(np.prod(shape))
    return numbers + 4 * (numbers // shape[axis] if shape[axis] else 0)
