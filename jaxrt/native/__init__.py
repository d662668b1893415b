"""Native kernels behind `jax.ffi`, on CPU: products with float and packed weights, attention, norms.

They are built with the package where there is a C++ compiler. Where they are not, `missing()` says why, and the same
mathematics runs in pure JAX.
"""

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

FOLDER = Path(__file__).parent
# in the order of the kernels' own table
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
HEAD_WIDTHS = 16  # the longest vector: attention takes heads whose width is a multiple of it
_FLOATS = {jnp.dtype(jnp.float32): "float32", jnp.dtype(jnp.bfloat16): "bfloat16"}
_TARGETS = (
    *(f"jaxrt_{kernel}_{kind}" for kernel in ("matmul", "attend") for kind in _FLOATS.values()),
    "jaxrt_matmul_packed",
    "jaxrt_attend_int8",
    "jaxrt_norm",
)


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, its kernels registered; or why there is none."""
    if os.environ.get("JAXRT_NATIVE") == "0":
        return "JAXRT_NATIVE=0 switches them off"
    found = sorted(FOLDER.glob("kernels*.so"))
    if not found:
        return "they were not built: install a C++ compiler (g++ or clang++), then install jaxrt again"
    try:
        library = ctypes.CDLL(str(found[-1]))
        library.jaxrt_sources.restype = library.jaxrt_instruction_set.restype = ctypes.c_char_p
        if library.jaxrt_sources().decode() != _sources():
            return f"{found[-1].name} was built from other sources: install jaxrt again"
        for target in _TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        return f"{found[-1].name} cannot be used: {error}"
    return library


def _sources() -> str:
    paths = sorted(path for path in FOLDER.iterdir() if path.suffix in (".cc", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def missing() -> str | None:
    """Why there are no native kernels; None where there are."""
    library = _library()
    return library if isinstance(library, str) else None


def instruction_set() -> str | None:
    """The one in use: AVX-512, AVX2, NEON or plain C++; None without native kernels."""
    library = _library()
    return None if missing() or isinstance(library, str) else library.jaxrt_instruction_set().decode()


def choose(name: str) -> bool:
    """Use another instruction set, for measuring and tests; whether this processor has it."""
    library = _library()
    return not isinstance(library, str) and bool(library.jaxrt_choose(name.encode()))


def handles(array: Array) -> bool:
    """Whether there are kernels for weights, or a cache, of that dtype."""
    return missing() is None and jnp.dtype(array.dtype) in _FLOATS


def matmul(rows: Array, weight: Array, format: str | None = None) -> Array:
    """rows float32 [R, K] times weight: float32 or bfloat16 [N, K], or of a packed format, uint8 [N, bytes of a row].

    Result: float32 [R, N]. Like all here it is for lowerings on CPU, and has no derivative of its own.
    """
    attributes: dict[str, Any] = {} if format is None else {"format": np.int64(FORMATS.index(format))}
    kind = "packed" if format else _FLOATS[jnp.dtype(weight.dtype)]
    return _call(f"jaxrt_matmul_{kind}", (rows.shape[0], weight.shape[0]), rows, weight, **attributes)


def attend(queries: Array, keys: Array, values: Array, positions: Array) -> Array:
    """Attention over a cache: queries float32 [B, T, N, H]; keys [B, K, H, S] and values [B, K, S, H], float32 or
    bfloat16; positions int32 [B, T]; result like queries. H is a multiple of HEAD_WIDTHS."""
    return _call(f"jaxrt_attend_{_FLOATS[jnp.dtype(keys.dtype)]}", queries.shape, queries, keys, values, positions)


def attend_scaled(
    queries: Array, keys: Array, values: Array, positions: Array, key_scales: Array, value_scales: Array
) -> Array:
    """`attend` over a cache of int8 with scales float32 [B, K, 1, S] and [B, K, S, 1]. Without a derivative: rounding
    has none."""
    return _call("jaxrt_attend_int8", queries.shape, queries, keys, values, positions, key_scales, value_scales)


def norm(rows: Array, weight: Array, eps: float) -> Array:
    """Root mean square normalisation of each row: rows float32 [R, D], weight float32 [D]; result like rows."""
    return _call("jaxrt_norm", rows.shape, rows, weight, eps=np.float32(eps))


def _call(target: str, shape: tuple[int, ...], *arguments: Array, **attributes: Any) -> Array:
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.ffi.ffi_call(target, result, vmap_method="sequential")(*arguments, **attributes)


def differentiable(kernel: Callable[..., Array], reference: Callable[..., Array]) -> Callable[..., Array]:
    """The kernel, with the derivative of the reference, which computes the same of the same arrays."""
    both = jax.custom_jvp(kernel)

    @both.defjvp
    def derivative(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        return kernel(*primals), jax.jvp(reference, primals, tangents)[1]

    return both
