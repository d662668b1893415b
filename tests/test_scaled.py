"""Eight bits with scales: a cache with one for every head of every token, and a GPU's weights with one an output."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrt
from jaxrt import cache
from jaxrt.artifacts.load import load_weights, open_checkpoint
from jaxrt.backend import ModelSource, XlaBackend
from jaxrt.models import decoder
from jaxrt.models.reading import read_config
from jaxrt.nn.linear import _elsewhere, matmul
from jaxrt.nn.packed import take_rows
from jaxrt.nn.scaled import Scaled, scaled, widened
from jaxrt.planning import plan_artifact, resolve_storage
from jaxrt.runtime import ModelRuntime
from jaxrt.weights import named
from tests.files import tiny_config_json, tiny_llama_tensors, write_hf

TOKENS = [1, 7, 200, 33, 5, 90, 12]
SHAPE: dict[str, int] = {"width": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "head_width": 16}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_hf(tmp_path / "tiny", tiny_config_json(**SHAPE), tiny_llama_tensors(np.random.default_rng(3), **SHAPE))
    return tmp_path / "tiny"


def logits(rt: ModelRuntime) -> np.ndarray:
    """After a prompt of four tokens, and after each of three decoded ones."""
    session = rt.new_session()
    outputs = [session.prefill(jaxrt.PrefillInput(TOKENS[:4])).wait()]
    outputs += [session.decode(jaxrt.DecodeInput(tokens=[token])).wait() for token in TOKENS[4:]]
    return np.concatenate([output.read_logits().reshape(1, -1) for output in outputs])


@pytest.mark.parametrize("module", [np, jnp])
@pytest.mark.parametrize("axis", [0, 1])
def test_rounding(module: Any, axis: int):
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    x[1], x[:, 1] = 0, 0
    found = scaled(module.asarray(x), axis, jnp.int8, jnp.float32)
    assert isinstance(found.values, np.ndarray) == (module is np)
    # half a step of each stretch, whose largest is 127 steps
    steps = np.abs(x).max(axis=axis, keepdims=True) / 127
    assert (np.abs(np.asarray(widened(found)) - x) <= steps * (0.5 + 1e-4)).all()
    assert found.nbytes == x.size + 4 * x.size // x.shape[axis]


def test_rounding_to_eight_bit_floats():
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    found = scaled(x, 1, jnp.float8_e4m3fn, jnp.float32)
    # three bits of mantissa: half of an eighth; below 2^-6 of a scale the step stays what it is there
    tiny = np.abs(x).max(axis=1, keepdims=True) / 448 * 2.0**-10
    assert (np.abs(np.asarray(widened(found)) - x) <= np.abs(x) / 16 + tiny).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(value: float):
    x = np.ones((2, 8), np.float32)
    x[0, 3] = value
    for found in (scaled(x, 1, jnp.int8, jnp.float32), scaled(jnp.asarray(x), 1, jnp.int8, jnp.float32)):
        wide = np.asarray(widened(jax.tree.map(jnp.asarray, found)))
        assert not np.isfinite(wide[0]).any() and np.isfinite(wide[1]).all()


def test_a_cache_of_int8_is_as_one_of_floats_that_holds_its_numbers(path: Path, monkeypatch: pytest.MonkeyPatch):
    with jaxrt.load(path, kv_dtype="int8") as rt:
        found = logits(rt)

    def rounded(slots: Any, new: Any, starts: Any, axis: int) -> Any:
        return cache.write(slots, widened(scaled(new, 3, jnp.int8, jnp.float32)), starts, axis)

    monkeypatch.setattr(decoder, "write", rounded)
    jax.clear_caches()
    with jaxrt.load(path) as rt:
        exact = logits(rt)
    jax.clear_caches()
    # a number between two steps may fall to either side in the two, where the layers before it round differently
    assert np.abs(found - exact).max() <= 0.01 * np.abs(exact).max()
    assert np.median(np.abs(found - exact)) <= 1e-4 * np.abs(exact).max()


def test_a_cache_of_int8_has_the_bytes_of_its_plan(path: Path):
    plan = plan_artifact(path, rows=1, capacity=64, kv_dtype="int8", platform="cpu")
    assert plan.kv_dtype == "int8"
    with jaxrt.load(path, kv_dtype="int8") as rt:
        rt.warmup(capacity=64)
        rt.generate(TOKENS, jaxrt.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(rt.session.context["kv"]))
        assert held == cache.row_nbytes(rt.config, rt.session.capacity, jnp.int8)
        assert held * plan.capacities[-1] == plan.cache_bytes_per_row * rt.session.capacity


def test_sessions_with_a_cache_of_int8_are_values(path: Path, tmp_path: Path):
    params = jaxrt.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with jaxrt.load(path, kv_dtype="int8") as rt:
        alone = [rt.generate(TOKENS[:n], params).tokens for n in (3, 5, 7)]
        assert [answer.tokens for answer in rt.generate([TOKENS[:n] for n in (3, 5, 7)], params)] == alone
        rt.generate(TOKENS * 30, params)  # grows
        branch = rt.session.fork()
        branch.snapshot().save(tmp_path / "state")
        again = jaxrt.SessionState.restore(tmp_path / "state", rt)
        step = jaxrt.DecodeInput(tokens=[5])
        one, two = (each.observe_output(each.decode(step).wait())["model.logits"].data for each in (branch, again))
        assert np.array_equal(one, two)
        seen = rt.inspect(TOKENS, ["model.layers.0.attention.weights"])["model.layers.0.attention.weights"].data
        assert np.allclose(seen.sum(-1), 1, atol=1e-5)
    with jaxrt.load(path) as other, pytest.raises(jaxrt.RequestError, match="kv_dtype='int8'"):
        jaxrt.SessionState.restore(tmp_path / "state", other)


def test_the_functional_door_keeps_a_cache_that_can_be_differentiated(path: Path):
    with jaxrt.load(path, kv_dtype="int8") as rt:
        model = rt.functional
        gradient = jax.grad(lambda w: model.apply(w, jnp.array(TOKENS))[0][0, -1, 3])(model.weights)
        values = gradient.layers[0].qkv[-16:]  # only used from the cache
        assert float(jnp.abs(values).max()) > 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scales_after_the_product(dtype: Any):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(24, 64)).astype(np.float32), jnp.asarray(rng.normal(size=(3, 64)), dtype)
    weight = jax.tree.map(jnp.asarray, scaled(w, 1, jnp.int8, dtype))
    exact = np.asarray(x, np.float64) @ (np.asarray(weight.values, np.float64) * np.asarray(weight.scales)).T
    within = 64 * 2.0**-23 * np.abs(np.asarray(x, np.float64)) @ np.abs(w).T
    rounded = 0 if dtype == jnp.float32 else 2.0**-8 * np.abs(exact)
    for product in (_elsewhere(x, weight, dtype), _elsewhere(x, weight, jnp.float32)):
        assert product.dtype in (dtype, jnp.float32)
        assert (np.abs(np.asarray(product, np.float64) - exact) <= within + rounded).all()
    assert matmul(x, weight).dtype == dtype
    assert np.array_equal(take_rows(weight, jnp.array([3, 99])), np.asarray(widened(weight))[[3, 23]])


# The largest of 64 normal numbers is 2.6 deviations: 127 steps to it are off by 0.006 of one in the mean square, three
# bits of mantissa by 0.026 of each number. Some fifteen such roundings meet in a logit, at worst all in one direction.
@pytest.mark.parametrize(("storage", "within"), [("int8 by output", 0.09), ("fp8 by output", 0.39)])
def test_a_model_with_a_scale_for_every_output(path: Path, storage: str, within: float):
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    backend = XlaBackend("cpu")
    weights = load_weights(checkpoint, config, storage=storage, place=lambda n, s, d: jax.device_put(d, backend.device))
    assert all(isinstance(leaf, Scaled) for leaf in named(weights).values() if leaf.ndim == 2)
    with jaxrt.load(path) as plain, ModelRuntime.prepare(backend, ModelSource(config, weights)) as rt:
        exact, found = logits(plain), logits(rt)
        gradient = jax.grad(lambda w: rt.functional.apply(w, jnp.array(TOKENS))[0][0, -1, 3])(rt.functional.weights)
        assert gradient.layers[0].qkv.shape == (128, 64)
    error = np.sqrt(np.mean((exact - found) ** 2) / np.mean(exact**2))
    assert 0 < error < within


def test_what_a_gpu_holds_is_planned(path: Path):
    assert resolve_storage("int8", "auto", "gpu") == "int8 by output"
    assert resolve_storage("fp8", "bfloat16", "gpu") == "fp8 by output"
    assert resolve_storage("int4", "auto", "gpu") == "int4"
    with pytest.raises(jaxrt.RequestError, match="use int8"):
        resolve_storage("fp8", "auto", "cpu")
    plain = plan_artifact(path, rows=1, capacity=64, dtype="bfloat16", platform="gpu")
    plan = plan_artifact(path, rows=1, capacity=64, quantize="int8", platform="gpu")
    assert plan.dtype == "int8" and plan.kv_dtype == "bfloat16" and plan.workspace_bytes == plain.workspace_bytes
    assert 0.5 < plan.weights_bytes / plain.weights_bytes < 0.6
