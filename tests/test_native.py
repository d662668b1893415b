"""Native kernels against arithmetic in float64, in every instruction set that runs here, with derived bounds."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from jaxrt import native
from jaxrt.nn import attention, linear, packed
from jaxrt.nn.layers import rms_norm
from jaxrt.nn.scaled import scaled
from tests.files import random_blocks

EPS = np.finfo(np.float32).eps
HERE = [name for name in ("AVX-512", "AVX2", "NEON", "plain C++") if native.choose(name)]
assert not HERE or native.choose(HERE[0])
FORMATS = [*packed.FORMATS]

pytestmark = pytest.mark.skipif(bool(native.missing()), reason=f"no native kernels: {native.missing()}")


@pytest.fixture(params=HERE)
def instruction_set(request):
    best = HERE[0]
    assert native.choose(request.param)
    jax.clear_caches()
    yield request.param
    native.choose(best)


def weights(data: np.ndarray, format: str) -> np.ndarray:
    return gguf.quants.dequantize(data, GGMLQuantizationType[format])


def activations(rows: int, inputs: int) -> np.ndarray:
    """With outliers, as the activations of models have them."""
    rng = np.random.default_rng(rows)
    return (rng.normal(size=(rows, inputs)) * np.exp(rng.normal(size=(rows, inputs)))).astype(np.float32)


def rounding(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """How far a float32 product may be from the exact one: each of K sums rounds once, each product and scale too."""
    return (x.shape[1] + 8) * EPS * (np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T)


def test_the_formats_are_those_of_the_kernels():
    assert tuple(FORMATS) == native.FORMATS
    for format, known in packed.FORMATS.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[format]] == (known.weights, known.bytes)


@pytest.mark.parametrize("format", FORMATS)
def test_unpacking_is_bitwise_that_of_the_gguf_package(format):
    data = random_blocks(format, 9, 512)
    unpack = jax.jit(packed.unpack_part, static_argnums=(1, 2))
    assert np.array_equal(unpack(data, 512, format), weights(data, format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
def test_a_packed_product(instruction_set, format, rows):
    """Activations are rounded to 16 bits in blocks of 32: each by at most half of its block's largest over 32,767."""
    data, x = random_blocks(format, 37, 768), activations(rows, 768)
    w = weights(data, format)
    largest = np.repeat(np.abs(x.reshape(rows, -1, 32)).max(-1), 32, axis=1).astype(np.float64)
    rounded = (largest / 65_534 * (1 + 1e-3)) @ np.abs(w.astype(np.float64)).T
    found = np.asarray(jax.jit(native.matmul, static_argnames="format")(x, data, format=format))
    error = np.abs(found - x.astype(np.float64) @ w.astype(np.float64).T)
    # a minimum and its scaled integers may cancel: their parts round by themselves
    parts = (x.shape[1] + 8) * EPS * (np.abs(x) @ (2 * np.abs(w).max(1, keepdims=True) + np.abs(w)).T)
    assert (error <= (rounded if rows <= 8 else 0) + rounding(x, w) + parts).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 31])
@pytest.mark.parametrize("shape", [(37, 160), (64, 577), (3, 5), (1, 1)])
def test_a_float_product(instruction_set, dtype, rows, shape):
    w = np.random.default_rng(1).normal(size=shape).astype(dtype)
    x = activations(rows, shape[1])
    found = np.asarray(jax.jit(native.matmul)(x, w))
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert (np.abs(found - exact) <= rounding(x, w.astype(np.float32))).all()


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(instruction_set, rows, value):
    data, x = random_blocks("Q4_0", 4, 64), activations(rows, 64)
    x[0, 40] = value
    found = np.asarray(jax.jit(native.matmul, static_argnames="format")(x, data, format="Q4_0"))
    assert not np.isfinite(found[0]).any()
    assert np.isfinite(found[1:]).all()


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-30, 1e30])
def test_activations_of_any_size(instruction_set, scale):
    data, x = random_blocks("Q8_0", 4, 64), activations(1, 64) * np.float32(scale)
    found = np.asarray(jax.jit(native.matmul, static_argnames="format")(x, data, format="Q8_0"))
    exact = x.astype(np.float64) @ weights(data, "Q8_0").astype(np.float64).T
    assert np.allclose(found, exact, rtol=1e-3, atol=np.abs(exact).max() * 1e-4 + 1e-37)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "capacity", "positions"),
    [(9, 3, 64, 512, [200]), (4, 4, 16, 70, [69, 0]), (8, 2, 96, 1_300, [1_299, 511, 512]), (5, 1, 32, 33, [40])],
)
def test_attention_of_one_query(instruction_set, dtype, heads, groups, width, capacity, positions):
    check_attention(dtype, heads, groups, width, capacity, np.array(positions)[:, None])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "capacity", "new", "first"),
    [
        (9, 3, 64, 512, 128, [200]),
        (4, 4, 16, 70, 2, [68, 0]),
        (4, 1, 96, 300, 40, [255, 280, 127]),
        (5, 1, 48, 33, 33, [0]),
    ],
)
def test_attention_of_many_queries(instruction_set, dtype, heads, groups, width, capacity, new, first):
    check_attention(dtype, heads, groups, width, capacity, np.array(first)[:, None] + np.arange(new))


def check_attention(dtype, heads, groups, width, capacity, positions):
    rng, (rows, new) = np.random.default_rng(2), positions.shape
    q = rng.normal(size=(rows, new, heads, width)).astype(np.float32)
    k = rng.normal(size=(rows, groups, width, capacity)).astype(dtype)
    v = rng.normal(size=(rows, groups, capacity, width)).astype(dtype)
    used = np.minimum(positions, capacity - 1) + 1
    for row, count in enumerate(used.max(axis=1)):  # what stands behind the tokens is noise
        k[row, :, :, count:] = np.nan
        v[row, :, count:] = np.nan
    found = np.asarray(jax.jit(native.attend)(q, k, v, positions.astype(np.int32)))
    for row, query, head in np.ndindex(rows, new, heads):
        count = used[row, query]
        keys = k[row, head // (heads // groups), :, :count].astype(np.float64)
        values = v[row, head // (heads // groups), :count].astype(np.float64)
        scores = q[row, query, head].astype(np.float64) @ keys / np.sqrt(width)
        shares = np.exp(scores - scores.max())
        exact = shares @ values / shares.sum()
        assert np.abs(found[row, query, head] - exact).max() <= 64 * EPS * np.abs(values).max()


@pytest.mark.parametrize("new", [1, 50])
def test_attention_over_a_scaled_cache(instruction_set, new):
    rng = np.random.default_rng(2)
    q = rng.normal(size=(2, new, 6, 32)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 32, 700)), rng.normal(size=(2, 2, 700, 32))
    keys, values = scaled(k, 2, jnp.int8, jnp.float32), scaled(v, 3, jnp.int8, jnp.float32)
    positions = np.array([[650], [40]], np.int32) + np.arange(new, dtype=np.int32)
    plain = (k.values.astype(np.float32) * k.scales for k in (keys, values))
    exact = np.asarray(jax.jit(attention._attend)(q, *plain, positions))
    for attend in (attention.attend, attention._attend):
        found = np.asarray(jax.jit(attend)(q, keys, values, positions))
        assert np.abs(found - exact).max() <= 128 * EPS * np.abs(exact).max()
    weights = attention.attention_weights(q, keys, positions)
    assert np.abs(np.asarray(attention.mix(weights, values)) - exact).max() <= 128 * EPS * np.abs(exact).max()


def test_the_norm(instruction_set):
    x, weight = activations(5, 577), activations(1, 577)[0]
    found = np.asarray(jax.jit(rms_norm, static_argnums=2)(x, weight, 1e-5))
    wide = x.astype(np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(found, exact, rtol=577 * EPS)


@pytest.mark.parametrize("format", [None, "Q4_1"])
def test_products_have_derivatives_and_batches(format):
    data = activations(6, 64) if format is None else random_blocks(format, 6, 64)
    whole = jnp.asarray(data) if format is None else packed.Packed((jnp.asarray(data),), (format,), 64, jnp.float32)
    matrix = data if format is None else weights(data, format)
    x = activations(3, 64)
    gradient = jax.grad(lambda x: jnp.sum(linear.matmul(x, whole) ** 2))(x)
    assert np.allclose(gradient, 2 * (x @ matrix.T) @ matrix, rtol=2e-3, atol=1e-2)
    batched = jax.vmap(lambda row: linear.matmul(row[None], whole)[0])(x)
    assert np.allclose(batched, x @ matrix.T, rtol=1e-3, atol=1e-2)
    if format is None:
        by_weight = jax.grad(lambda w: jnp.sum(linear.matmul(x, w)))(whole)
        assert np.allclose(by_weight, np.tile(x.sum(0), (6, 1)), rtol=1e-4, atol=1e-4)


def test_the_norm_and_attention_have_derivatives():
    x, weight = activations(2, 32), activations(1, 32)[0]
    plain = jax.grad(lambda x: jnp.sum((x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * weight[None]) ** 2))(x)
    assert np.allclose(jax.grad(lambda x: jnp.sum(rms_norm(x, weight, 1e-5) ** 2))(x), plain, rtol=1e-3, atol=1e-3)
    q, k = activations(1, 64).reshape(1, 1, 2, 32), activations(3, 640).reshape(1, 2, 32, 30)[..., :30]
    v, at = np.swapaxes(k, 2, 3), np.full((1, 1), 20, np.int32)
    _, along = jax.jvp(lambda q: attention.attend(q, k, v, at), (q,), (q,))
    before, after = (attention.attend(q * scale, k, v, at) for scale in (0.999, 1.001))
    assert np.allclose(along, (after - before) / 0.002, atol=2e-2 * np.abs(along).max() + 1e-3)
    many, ats = np.tile(q, (1, 3, 1, 1)), np.array([[5, 20, 9]], np.int32)

    def slope(attend):
        return jax.grad(lambda q: jnp.sum(attend(q, k, v, ats) ** 2))(many)

    assert np.allclose(slope(attention.attend), slope(attention._attend), rtol=1e-4, atol=1e-5)


def test_calls_from_many_threads_end():
    """A handler that waited for the pool would stop here: all its threads would wait."""
    data = random_blocks("Q4_0", 512, 256)
    call = jax.jit(native.matmul, static_argnames="format")
    x = activations(1, 256)
    expected = np.asarray(call(x, data, format="Q4_0"))
    with ThreadPoolExecutor(16) as pool:
        found = [pool.submit(lambda: np.asarray(call(x, data, format="Q4_0"))) for _ in range(400)]
        assert all(np.array_equal(each.result(timeout=60), expected) for each in found)


def test_rows_are_taken_from_parts_of_several_formats():
    one, two = random_blocks("Q4_1", 5, 256), random_blocks("Q6_K", 3, 256)
    whole = packed.Packed((jnp.asarray(one), jnp.asarray(two)), ("Q4_1", "Q6_K"), 256, jnp.float32)
    matrix = np.concatenate([weights(one, "Q4_1"), weights(two, "Q6_K")])
    assert whole.shape == matrix.shape and whole.nbytes == one.nbytes + two.nbytes
    rows = np.array([[0, 4, 5], [7, 99, 3]])
    assert np.array_equal(packed.take_rows(whole, rows), matrix[np.clip(rows, 0, 7)])
    x = activations(2, 256)
    assert np.allclose(linear.matmul(x, whole), x @ matrix.T, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("x", "data"), [((1, 64), (4, 35)), ((1, 33), (4, 18)), ((2, 64), (4, 18))], ids=["bytes", "inputs", "both"]
)
def test_shapes_that_do_not_fit_are_refused(x, data):
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes of a packed product"):
        native.matmul(np.zeros(x, np.float32), np.zeros(data, np.uint8), "Q4_0")


def test_they_can_be_switched_off():
    code = "from jaxrt import native; print(native.missing(), native.instruction_set())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAXRT_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["JAXRT_NATIVE=0", "switches", "them", "off", "None"]
