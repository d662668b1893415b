"""The functional door: one pure function, jitted, differentiated and vmapped; equivalent to the runtime."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrt
from jaxrt.backend import XlaBackend
from jaxrt.runtime import ModelRuntime
from jaxrt.sessions.session import XlaSession
from tests.tiny import CONFIG, shared_model

PROMPT = [1, 2, 3, 4, 5, 6, 7]
PATH = "model.layers.0.output"


@pytest.fixture(scope="module")
def rt() -> ModelRuntime:
    return ModelRuntime(XlaBackend(), XlaSession(shared_model()))


def test_it_gives_what_the_runtime_gives(rt: ModelRuntime):
    wanted = rt.inspect(PROMPT, ["model.logits", PATH])
    door = rt.functional
    logits, cache, seen = jax.jit(lambda weights, tokens: door.apply(weights, tokens, observe=[PATH]))(
        door.weights, jnp.array(PROMPT)
    )
    np.testing.assert_allclose(logits, wanted["model.logits"].data, atol=1e-4 * np.abs(logits).max())  # type: ignore[union-attr]
    np.testing.assert_allclose(seen[PATH], wanted[PATH].data, atol=1e-4 * np.abs(seen[PATH]).max())  # type: ignore[union-attr]
    assert cache.lengths.tolist() == [7]


def test_a_cache_carries_on(rt: ModelRuntime):
    door = rt.functional
    whole, _, _ = door.apply(door.weights, PROMPT)
    _, cache, _ = door.apply(door.weights, PROMPT[:4], door.cache(1, 16))
    rest, cache, _ = door.apply(door.weights, PROMPT[4:], cache)
    np.testing.assert_allclose(rest, whole[:, 4:], atol=1e-4 * np.abs(whole).max())
    assert cache.lengths.tolist() == [7] and cache.kv.capacity == 16


def test_gradients_agree_with_finite_differences(rt: ModelRuntime):
    """Central differences err by h^2 / 6 of the third derivative and eps / h of the value: h = 1e-2 in float32."""
    door = rt.functional

    def logprob(vector: jax.Array) -> jax.Array:
        logits, _, _ = door.apply(door.weights, PROMPT, interventions=[jaxrt.Add(PATH, vector, strength=0.5)])
        return jax.nn.log_softmax(logits[0, -1])[42]

    start = jnp.asarray(np.random.default_rng(0).standard_normal(CONFIG.width, dtype=np.float32))
    gradient = jax.jit(jax.grad(logprob))(start)
    value = jax.jit(logprob)
    for direction in np.random.default_rng(1).standard_normal((4, CONFIG.width)).astype(np.float32):
        step = jnp.asarray(direction / np.linalg.norm(direction))
        measured = (value(start + step * 1e-2) - value(start - step * 1e-2)) / 2e-2
        np.testing.assert_allclose(jnp.dot(gradient, step), measured, rtol=2e-2, atol=2e-3)


def test_gradients_of_weights_and_embeddings(rt: ModelRuntime):
    door = rt.functional
    embeddings = door.weights.embedding[jnp.array([PROMPT])]
    by_token, _, _ = door.apply(door.weights, PROMPT)
    by_embedding, _, _ = door.apply(door.weights, embeddings)
    np.testing.assert_array_equal(by_token, by_embedding)

    def loss(weights, x):  # noqa: ANN001, ANN202
        return jnp.sum(door.apply(weights, x)[0][0, -1, :3])

    of_weights, of_embeddings = jax.jit(jax.grad(loss, argnums=(0, 1)))(door.weights, embeddings)
    assert of_embeddings.shape == (1, 7, CONFIG.width) and float(jnp.abs(of_embeddings).max()) > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(of_weights))
    assert float(jnp.abs(of_weights.layers[1].qkv).max()) > 0


def test_strengths_are_vmapped(rt: ModelRuntime):
    door, vector = rt.functional, jnp.ones(CONFIG.width)

    def last(strength: jax.Array) -> jax.Array:
        change = jaxrt.Add(PATH, vector, strength=strength, positions=[-1])
        return door.apply(door.weights, PROMPT, interventions=[change])[0][0, -1]

    strengths = jnp.array([0.0, 1.0, -2.0])
    swept = jax.jit(jax.vmap(last))(strengths)
    for row, strength in zip(swept, strengths, strict=True):
        np.testing.assert_allclose(row, last(strength), atol=1e-4 * np.abs(row).max())
    assert float(jnp.abs(swept[0] - swept[1]).max()) > 0.01


def test_bad_input_is_refused(rt: ModelRuntime):
    door = rt.functional
    with pytest.raises(jaxrt.RequestError, match="shape"):
        door.apply(door.weights, np.zeros((1, 2, 3), np.float32))
    with pytest.raises(jaxrt.RequestError, match="token id 258"):
        door.apply(door.weights, [258])
    with pytest.raises(jaxrt.RequestError, match="float"):
        door.apply(door.weights, [True])
    with pytest.raises(jaxrt.CapacityError, match="capacity"):
        door.apply(door.weights, PROMPT, door.cache(1, 4))
    beyond = [1] * (CONFIG.context + 1)
    for cache in (None, door.cache(1, CONFIG.context + 8)):
        with pytest.raises(jaxrt.CapacityError, match="context of the model"):
            door.apply(door.weights, beyond, cache)
    with pytest.raises(jaxrt.CapacityError, match="capacity of the cache"):  # as far as it can be said while tracing
        jax.eval_shape(lambda given: door.apply(door.weights, PROMPT, given), door.cache(1, 4))
    with pytest.raises(jaxrt.RequestError, match="rows of the cache"):
        door.apply(door.weights, PROMPT, door.cache(2, 16))
    with pytest.raises(jaxrt.RequestError, match="no place"):
        door.apply(door.weights, PROMPT, interventions=[jaxrt.Zero("nowhere")])
