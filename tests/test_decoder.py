"""The forward pass against float64 numpy, and its invariants: chunks, padding, rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrt import cache
from jaxrt.config import LayerSpec, ModelConfig, RopeSpec
from jaxrt.models import decoder
from jaxrt.nn.layers import inverse_frequencies
from tests import reference
from tests.tiny import CONFIG, random_weights

# float32 against float64 through two layers of width 32: rounding of about sqrt(width * layers) * 2^-24, relative to
# the largest logit; 1e-5 leaves an order of magnitude.
CLOSE = 1e-5

TOKENS = list(np.random.default_rng(1).integers(0, CONFIG.vocab, 23))


@jax.jit
def run(tree, kv, tokens, starts):  # noqa: ANN001, ANN201
    hidden, kv = decoder.forward(CONFIG, tree, kv, tokens, starts)
    return decoder.logits(tree, hidden), kv


def empty(rows: int, capacity: int) -> cache.KVCache:
    shapes = cache.abstract(CONFIG, rows, capacity, jnp.float32)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def chunked(tree, tokens: list[int], sizes: list[int], capacity: int = 64) -> np.ndarray:  # noqa: ANN001
    kv, start, found = empty(1, capacity), 0, []
    for size in sizes:
        part = np.array([tokens[start : start + size]], np.int32)
        logits, kv = run(tree, kv, part, np.array([start], np.int32))
        found.append(np.asarray(logits)[0])
        start += size
    return np.concatenate(found)


def test_one_pass_equals_float64_numpy():
    tree = random_weights()
    expected = reference.logits(CONFIG, tree, TOKENS)
    found = chunked(tree, TOKENS, [len(TOKENS)])
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()


@pytest.mark.parametrize("sizes", [[22, 1], [8, 8, 7], [1] * 23], ids=["last alone", "chunks", "one by one"])
def test_chunks_equal_one_pass(sizes: list[int]):
    tree = random_weights()
    expected = reference.logits(CONFIG, tree, TOKENS)
    assert np.abs(chunked(tree, TOKENS, sizes) - expected).max() < CLOSE * np.abs(expected).max()


@pytest.mark.parametrize("capacity", [128, 129, 200, 512, 600, 1_100])
def test_blocks_of_attention_change_nothing(capacity: int):
    """Capacities that are and are not whole blocks, of many queries and of one; a block that reaches back counts
    once."""
    tree = random_weights()
    tokens = list(np.random.default_rng(2).integers(0, CONFIG.vocab, min(capacity, 560)))
    sizes = [len(tokens) - 70, 68, 1, 1]
    expected = reference.logits(CONFIG, tree, tokens)
    assert np.abs(chunked(tree, tokens, sizes, capacity) - expected).max() < CLOSE * np.abs(expected).max()


def test_rows_do_not_see_each_other():
    tree = random_weights()
    tokens = np.array([TOKENS[:8], TOKENS[8:16], TOKENS[:8]], np.int32)
    kv = jax.tree.map(lambda leaf: leaf + 7, empty(3, 32))  # whatever stood in the cache before is masked
    logits, kv = run(tree, kv, tokens, np.zeros(3, np.int32))
    for row in range(3):
        expected = reference.logits(CONFIG, tree, list(tokens[row]))
        assert np.abs(np.asarray(logits)[row] - expected).max() < CLOSE * np.abs(expected).max()


def test_a_padded_chunk_at_the_end_of_the_cache_keeps_what_stood_before():
    """XLA clamps the start of a write that does not fit, which moved it over older entries."""
    tree = random_weights()
    kv, start = empty(1, 16), 0
    for size in (12, 3):
        padded = np.zeros((1, 8 if size == 3 else 12), np.int32)
        padded[0, :size] = TOKENS[start : start + size]
        logits, kv = run(tree, kv, padded, np.array([start], np.int32))
        start += size
    expected = reference.logits(CONFIG, tree, TOKENS[:15])[-1]
    assert np.abs(np.asarray(logits)[0, 2] - expected).max() < CLOSE * np.abs(expected).max()


def test_tied_heads_use_the_embedding():
    tied = ModelConfig(**{**CONFIG.__dict__, "tied_head": True})
    tree = random_weights(tied)
    assert tree.head is None
    hidden = np.random.default_rng(0).standard_normal((1, 1, CONFIG.width), dtype=np.float32)
    np.testing.assert_allclose(decoder.logits(tree, hidden), hidden @ tree.embedding.T, rtol=1e-5, atol=1e-5)


def test_llama3_scaling_by_hand():
    """Llama 3.1: factor 8, low 1, high 4, original 8,192, theta 500,000, head 128. Wavelengths worked out by hand."""
    spec = RopeSpec(theta=500_000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, original_context=8_192)
    plain = 500_000.0 ** (-np.arange(64) * 2 / 128)
    found = inverse_frequencies(spec, 128)
    wavelength = 2 * np.pi / plain
    assert np.array_equal(found[wavelength < 2_048], plain[wavelength < 2_048])
    np.testing.assert_allclose(found[wavelength > 8_192], plain[wavelength > 8_192] / 8, rtol=1e-12)
    middle = np.flatnonzero((wavelength > 2_048) & (wavelength < 8_192))
    assert len(middle) > 0
    for i in middle:
        smooth = (8_192 / wavelength[i] - 1) / (4 - 1)
        np.testing.assert_allclose(found[i], (1 - smooth) * plain[i] / 8 + smooth * plain[i], rtol=1e-12)


def test_linear_scaling_divides_every_frequency():
    found = inverse_frequencies(RopeSpec(theta=100.0, scaling="linear", factor=4.0), 4)
    np.testing.assert_allclose(found, [1 / 4, 0.1 / 4])


def test_layers_alike_are_traced_once():
    jaxpr = jax.make_jaxpr(lambda *a: decoder.forward(CONFIG, *a))(
        random_weights(), empty(1, 16), np.zeros((1, 4), np.int32), np.zeros(1, np.int32)
    )
    calls = [eqn for eqn in jaxpr.eqns if eqn.params.get("name") == "_layer"]
    assert len(calls) == len(CONFIG.layers)
    assert len({id(eqn.params["jaxpr"]) for eqn in calls}) == 1


def test_layers_of_one_model_may_turn_differently():
    mixed = ModelConfig(
        **{**CONFIG.__dict__, "layers": (LayerSpec(RopeSpec(theta=100.0)), LayerSpec(RopeSpec(theta=10_000.0)))}
    )
    tree = random_weights()
    tokens = np.array([TOKENS], np.int32)
    hidden, _ = decoder.forward(mixed, tree, empty(1, 32), tokens, np.zeros(1, np.int32))
    expected = reference.logits(mixed, tree, TOKENS)
    found = np.asarray(decoder.logits(tree, hidden))[0]
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_weights_and_cache_may_be_of_other_dtypes(dtypes: tuple[str, str]):
    """bfloat16 rounds by 2^-9; some 20 roundings in a row are 0.9 % rms, and 5 sigma over 6,000 logits is 4.4 %."""
    cast = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtypes[0] if leaf.ndim > 1 else jnp.float32), random_weights())
    shapes = cache.abstract(CONFIG, 1, 32, dtypes[1])
    kv = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    found = []
    for start, size in ((0, 22), (22, 1)):
        logits, kv = run(cast, kv, np.array([TOKENS[start : start + size]], np.int32), np.array([start], np.int32))
        found.append(np.asarray(logits)[0])
        assert logits.dtype == jnp.float32 and kv.keys[0].dtype == dtypes[1]
    expected = reference.logits(CONFIG, random_weights(), TOKENS)
    assert np.abs(np.concatenate(found) - expected).max() < 0.044 * np.abs(expected).max()
