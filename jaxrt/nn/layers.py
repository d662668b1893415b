"""Normalisation, rotary positions and the gated MLP: pure functions of arrays."""

import math
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrt import native
from jaxrt.config import RopeSpec
from jaxrt.nn.linear import matmul


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root mean square normalisation (Zhang and Sennrich 2019).

    Shapes: x [..., D]; weight [D] float32; result like x.
    Numerics: in float32, then cast back to x's dtype.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    normed = jax.lax.platform_dependent(rows, weight, cpu=_norm_on_cpu(eps), default=partial(_norm, eps=eps))
    return normed.reshape(x.shape).astype(x.dtype)


def _norm(rows: Array, weight: Array, eps: float) -> Array:
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(rows), axis=-1, keepdims=True) + eps)
    return rows * scale * weight[None]


def _norm_on_cpu(eps: float) -> Callable[[Array, Array], Array]:
    return partial(_norm, eps=eps) if native.missing() else _native_norm(eps)


@cache
def _native_norm(eps: float) -> Callable[[Array, Array], Array]:
    return native.differentiable(partial(native.norm, eps=eps), partial(_norm, eps=eps))


def inverse_frequencies(spec: RopeSpec, head_width: int) -> np.ndarray:
    """Angle per position of each rotary pair, float64 [H/2]: theta^(-2i/H), rescaled as `spec` says.

    Source: Su et al. 2021; the "llama3" rescaling is section 3.4 of the Llama 3 report (wavelengths beyond
    original_context / low_freq_factor are stretched by `factor`, those below original_context / high_freq_factor are
    kept, those between are blended linearly in original_context / wavelength).
    """
    frequencies = spec.theta ** (-np.arange(0, head_width, 2, dtype=np.float64) / head_width)
    if spec.scaling == "none":
        return frequencies
    if spec.scaling == "linear":
        return frequencies / spec.factor
    turns = spec.original_context * frequencies / (2 * math.pi)  # how often a pair turns in the original context
    kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / spec.factor)


def rope_angles(spec: RopeSpec, head_width: int, positions: Array) -> tuple[Array, Array]:
    """Cosines and signed sines of the rotation at each position, for `rotate`.

    Shapes: positions int32 [B, T]; results float32 [B, T, 1, H], ready to broadcast over heads.
    """
    frequencies = jnp.asarray(inverse_frequencies(spec, head_width), jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Turn each pair (i, i + H/2) of x by its position's angle. Shapes: x [B, T, N, H]; result like x.

    As x cos + roll(x, H/2) sin, which XLA's CPU backend runs twice as fast as two halves put together.
    """
    cos, sin = angles
    wide = x.astype(jnp.float32)
    return (wide * cos + jnp.roll(wide, x.shape[-1] // 2, axis=-1) * sin).astype(x.dtype)


def gated_mlp(x: Array, gate_up: Array, down: Array) -> Array:
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)). Shapes: x [B, T, D]; gate_up [2 F, D]; down [D, F]; result
    like x."""
    gate, up = jnp.split(matmul(x, gate_up), 2, axis=-1)
    return matmul(jax.nn.silu(gate) * up, down)
