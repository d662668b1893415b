"""The inside of a pass: what is observed equals other implementations' values, and edits do what their formulas say."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrt
from jaxrt.backend import XlaBackend
from jaxrt.models import decoder, steps
from jaxrt.observations import known_paths
from jaxrt.program import compiles
from jaxrt.runtime import ModelRuntime
from jaxrt.sampling import abstract_knobs
from jaxrt.sessions.session import XlaSession
from jaxrt.taps import PLAIN
from tests.conftest import GOLDEN
from tests.tiny import CONFIG, random_weights, shared_model

PROMPT = [1, 2, 3, 4, 5, 6, 7]
GREEDY = jaxrt.SamplingParams(temperature=0, max_tokens=12)
ALL = jaxrt.ObservationRequest.all()
WIDE = "model.layers.0.output"  # of width D


@pytest.fixture
def rt() -> ModelRuntime:
    return ModelRuntime(XlaBackend(), XlaSession(shared_model()))


@pytest.fixture(scope="module")
def seen() -> jaxrt.ObservationSet:
    return ModelRuntime(XlaBackend(), XlaSession(shared_model())).inspect(PROMPT, ALL)


def arrays(observations: jaxrt.ObservationSet) -> dict[str, np.ndarray]:
    return {path: value.data for path, value in observations.items()}  # type: ignore[union-attr]


# --- plain programs ---------------------------------------------------------------------------------------------------


def lowered(monkeypatch: pytest.MonkeyPatch, stubbed: bool) -> list[str]:
    """The texts of plain prefill and decode, with the taps or with stubs in their place."""

    class Stub:
        seen: dict[str, Any] = {}

        def __init__(self, *_: Any) -> None: ...
        def __call__(self, path: str, x: jax.Array, positions: jax.Array) -> jax.Array:
            return x

        edit = __call__

        def layer(self, index: int) -> tuple:
            return PLAIN, ()

        def see(self, *_: Any) -> None: ...

    with monkeypatch.context() as patch:
        if stubbed:
            patch.setattr(decoder, "Tap", Stub)
            patch.setattr(steps, "Tap", Stub)
        jax.clear_caches()
        state, kv = steps.empty_state(1, CONFIG.vocab), steps.cache.abstract(CONFIG, 1, 64, jnp.float32)
        tokens, one = jax.ShapeDtypeStruct((1, 16), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        shared = {"weights": random_weights(), "kv": kv, "state": state}
        prefilling = {**shared, "tokens": tokens, "following": jax.ShapeDtypeStruct((16,), jnp.int32)}
        decoding = {**shared, "knobs": abstract_knobs(1, CONFIG.vocab), "forced": jax.ShapeDtypeStruct((1,), jnp.int32)}
        return [
            jax.jit(program).lower(values, {"count": one, "score": one}).as_text()
            for program, values in (
                (steps.prefill(CONFIG), prefilling),
                (steps.decode(CONFIG, 16, counted=True), decoding),
                (steps.decode(CONFIG, 8, counted=False), decoding),
            )
        ]


def test_plain_programs_have_the_same_text_without_taps(monkeypatch: pytest.MonkeyPatch):
    with_taps, without = lowered(monkeypatch, stubbed=False), lowered(monkeypatch, stubbed=True)
    assert with_taps == without
    assert all("stablehlo.dot_general" in text or "jaxrt_matmul" in text for text in with_taps)


# --- observing --------------------------------------------------------------------------------------------------------


def test_every_path_has_the_shape_its_letters_say(seen: jaxrt.ObservationSet):
    found = {path: data.shape for path, data in arrays(seen).items()}
    assert set(found) == set(known_paths(2))
    assert found["model.embeddings"] == found[WIDE] == found["model.final_norm"] == (1, 7, 32)
    assert found["model.layers.1.attention.query"] == found["model.layers.1.attention.heads"] == (1, 7, 4, 8)
    assert found["model.layers.1.attention.key"] == found["model.layers.1.attention.value"] == (1, 7, 2, 8)
    assert found["model.layers.1.attention.weights"] == (1, 4, 7, 7) and found["model.logits"] == (1, 7, 258)


def test_attention_weights_are_causal_and_mix_the_values(seen: jaxrt.ObservationSet):
    found = arrays(seen)
    weights, values = found["model.layers.1.attention.weights"], found["model.layers.1.attention.value"]
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert (np.triu(weights[0, 0], 1) == 0).all()
    mixed = np.einsum("bnts,bsnh->btnh", weights, np.repeat(values, 2, axis=2))  # two query heads to a KV head
    np.testing.assert_allclose(mixed, found["model.layers.1.attention.heads"], atol=1e-5)


def test_long_prompts_are_observed_across_their_chunks(rt: ModelRuntime):
    """Equivalent: 200 tokens in two chunks, and the same as decoded one by one."""
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, 250, 200)]
    paths = jaxrt.ObservationRequest.selected([WIDE, "model.layers.1.attention.weights", "model.logits"])
    found = arrays(rt.inspect(prompt, paths))
    assert found["model.layers.1.attention.weights"].shape == (1, 4, 200, 200)
    session = rt.new_session()
    session.prefill(jaxrt.PrefillInput(prompt[:197]))
    rest = arrays(session.inspect_decode(jaxrt.DecodeInput(prompt[197:]), paths).observations)
    assert rest["model.layers.1.attention.weights"].shape == (1, 4, 3, 200)
    for path, data in found.items():
        axis = 2 if path.endswith("weights") else 1
        np.testing.assert_allclose(np.take(data, [197, 198, 199], axis), rest[path], atol=1e-4)


def test_sampled_positions_are_observed_one_by_one(rt: ModelRuntime):
    session, plain = rt.new_session(), rt.new_session()
    for one in (session, plain):
        one.prefill(jaxrt.PrefillInput(PROMPT))
    found = session.inspect_decode(jaxrt.DecodeInput(positions=5), jaxrt.ObservationRequest.selected(["model.logits"]))
    plain.decode(jaxrt.DecodeInput(positions=5))
    assert session.tokens == plain.tokens
    logits = arrays(found.observations)["model.logits"]
    assert logits.shape == (1, 5, 258) and tuple(logits[0].argmax(-1)) == session.tokens[0][-5:]
    np.testing.assert_array_equal(rt.observe_output(found.output)["model.logits"].data, logits)


def test_rows_are_observed_together(rt: ModelRuntime):
    batch = rt.new_session(rows=2)
    found = arrays(batch.inspect_prefill(jaxrt.PrefillInput([PROMPT, PROMPT[::-1]]), ALL).observations)
    alone = arrays(rt.inspect(PROMPT[::-1], ALL))
    for path in alone:
        np.testing.assert_array_equal(found[path][1:], alone[path])
    with pytest.raises(jaxrt.RequestError, match="same number"):
        batch.inspect_prefill(jaxrt.PrefillInput([PROMPT, [1]]), ALL)


def test_inspecting_leaves_the_runtime_session_alone(rt: ModelRuntime):
    rt.generate(PROMPT, GREEDY)
    before = rt.session.tokens
    rt.inspect([5, 6], ["model.logits"])
    assert rt.session.tokens == before


# --- against transformers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(demo_path: Any) -> ModelRuntime:
    return jaxrt.load(demo_path)


@pytest.fixture(scope="module")
def inside() -> dict[str, Any]:
    return json.loads((GOLDEN / "inside-smollm2.json").read_text())


def near(found: np.ndarray, wanted: Any, largest: float, within: float = 1e-4) -> None:
    """Equivalent, as the project means it: within 1e-4 of the largest value of the whole tensor."""
    assert np.abs(found - np.array(wanted, np.float32)).max() <= within * largest


LAYERS = 30
ROUNDED = LAYERS * 2**-16  # decoding with packed weights rounds activations to 16 bits, once more in every layer


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "within"), [("none", 1e-4), ("auto", ROUNDED)])
def test_the_demo_models_inside_equals_transformers(
    demo_path: Any, inside: dict[str, Any], quantize: str, within: float
):
    session = jaxrt.load(demo_path, quantize=quantize).session
    found = arrays(session.inspect_prefill(jaxrt.PrefillInput(inside["tokens"]), ALL).observations)
    more = arrays(session.inspect_decode(jaxrt.DecodeInput(inside["next"]), ALL).observations)
    last = len(inside["hidden"]) - 1
    for index, (wanted, largest) in enumerate(zip(inside["hidden"], inside["hidden_max"], strict=True)):
        path = "model.embeddings" if index == 0 else f"model.layers.{index - 1}.output"
        path = "model.final_norm" if index == last else path
        near(found[path][0, :, :: inside["wide"]], wanted, largest)
        near(more[path][0, :, :: inside["wide"]], inside["decode_hidden"][index], largest, within)
    for layer, wanted in enumerate(inside["attentions"]):
        near(found[f"model.layers.{layer}.attention.weights"][0], wanted, 1.0)
        decoded = more[f"model.layers.{layer}.attention.weights"][0, :, -1]
        near(decoded, inside["decode_attention"][layer], 1.0, within)
    near(found["model.logits"][0, :, :: inside["vocab"]], inside["logits"], inside["logits_max"])
    near(more["model.logits"][0, :, :: inside["vocab"]], inside["decode_logits"], inside["logits_max"], within)


@pytest.mark.slow
def test_heads_set_to_zero_equal_transformers_without_them(demo: ModelRuntime, inside: dict[str, Any]):
    removed = [
        jaxrt.Zero(f"model.layers.{layer}.attention.heads", heads=heads) for layer, heads in inside["removed"].items()
    ]
    found = arrays(demo.inspect(inside["tokens"], ["model.logits"], removed))["model.logits"]
    near(found[0, :, :: inside["vocab"]], inside["ablated_logits"], inside["logits_max"])
    plain = arrays(demo.inspect(inside["tokens"], ["model.logits"]))["model.logits"]
    assert np.abs(plain - found).max() > 1e-2 * inside["logits_max"]  # it made a difference


# --- intervening ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", known_paths(2))
def test_replacing_a_value_by_itself_changes_no_bit(rt: ModelRuntime, seen: jaxrt.ObservationSet, path: str):
    again = arrays(rt.inspect(PROMPT, ALL, [jaxrt.Replace(path, seen)]))
    for other, data in arrays(seen).items():
        np.testing.assert_array_equal(data, again[other])


def test_edits_do_what_their_formulas_say(rt: ModelRuntime):
    x = arrays(rt.inspect(PROMPT, [WIDE]))[WIDE]
    vector = np.linspace(-1, 1, 32, dtype=np.float32)
    several = np.random.default_rng(1).standard_normal((2, 32), dtype=np.float32)

    def edited(intervention: jaxrt.Intervention) -> np.ndarray:
        return arrays(rt.inspect(PROMPT, [WIDE], [intervention]))[WIDE]

    np.testing.assert_allclose(edited(jaxrt.Add(WIDE, vector, strength=4.0)), x + 4 * vector, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(edited(jaxrt.Scale(WIDE, 0.5)), x * 0.5)
    np.testing.assert_array_equal(edited(jaxrt.Zero(WIDE)), x * 0)
    np.testing.assert_allclose(edited(jaxrt.Zero(WIDE, strength=0.25)), x * 0.75, rtol=1e-6)
    np.testing.assert_array_equal(edited(jaxrt.Apply(WIDE, lambda x: jnp.abs(x))), np.abs(x))
    np.testing.assert_array_equal(edited(jaxrt.Replace(WIDE, vector))[0, 3], vector)
    one = edited(jaxrt.Add(WIDE, vector, positions=[2, -1]))
    np.testing.assert_allclose(one[0, [2, 6]], x[0, [2, 6]] + vector, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.delete(one, [2, 6], 1), np.delete(x, [2, 6], 1))
    two = edited(jaxrt.Replace(WIDE, several, positions=[5, 1]))
    np.testing.assert_array_equal(two[0, [5, 1]], several)


def test_heads_are_edited_one_by_one(rt: ModelRuntime):
    path = "model.layers.0.attention.heads"
    before = arrays(rt.inspect(PROMPT, [path]))[path]
    found = arrays(rt.inspect(PROMPT, [path], [jaxrt.Zero(path, heads=[1, 3])]))[path]
    assert (found[:, :, [1, 3]] == 0).all()
    np.testing.assert_array_equal(found[:, :, [0, 2]], before[:, :, [0, 2]])
    per_head = np.arange(8, dtype=np.float32)
    found = arrays(rt.inspect(PROMPT, [path], [jaxrt.Replace(path, per_head, heads=[2])]))[path]
    np.testing.assert_array_equal(found[0, :, 2], np.tile(per_head, (7, 1)))


def test_masked_tokens_are_never_chosen(rt: ModelRuntime):
    plain = rt.generate(PROMPT, GREEDY)
    masked = rt.generate(PROMPT, GREEDY, interventions=[jaxrt.MaskLogits(plain.tokens)])
    assert not set(plain.tokens) & set(masked.tokens)
    scored = rt.score([PROMPT], [jaxrt.MaskLogits([PROMPT[3]])])[0].logprobs
    assert scored[3] == -np.inf and scored[2] > -np.inf


def test_a_star_edits_every_layer(rt: ModelRuntime):
    star = rt.generate(PROMPT, GREEDY, interventions=[jaxrt.Scale("model.layers.*.mlp.output", 0.5)])
    each = [jaxrt.Scale(f"model.layers.{layer}.mlp.output", 0.5) for layer in range(2)]
    assert star.tokens == rt.generate(PROMPT, GREEDY, interventions=each).tokens
    assert star.tokens != rt.generate(PROMPT, GREEDY).tokens


def test_rows_of_one_batch_carry_different_interventions(rt: ModelRuntime):
    vector = np.random.default_rng(2).standard_normal(32, dtype=np.float32)
    prompts = [PROMPT, PROMPT, PROMPT[:4]]
    changes = [jaxrt.Add(WIDE, vector, strength=2.0, rows=[1]), jaxrt.Scale("model.layers.1.output", 0.3, rows=[2])]
    together = rt.generate(prompts, GREEDY, interventions=changes)
    alone = [
        rt.generate(PROMPT, GREEDY),
        rt.generate(PROMPT, GREEDY, interventions=[jaxrt.Add(WIDE, vector, strength=2.0)]),
        rt.generate(PROMPT[:4], GREEDY, interventions=[jaxrt.Scale("model.layers.1.output", 0.3)]),
    ]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert alone[0].tokens != alone[1].tokens
    swept = rt.generate([PROMPT] * 2, GREEDY, interventions=[jaxrt.Add(WIDE, vector, strength=[0.0, 2.0])])
    assert [one.tokens for one in swept] == [alone[0].tokens, alone[1].tokens]


def test_a_phase_limits_an_intervention(rt: ModelRuntime):
    plain = rt.generate(PROMPT, GREEDY).tokens
    flip = jaxrt.MaskLogits([plain[0]], phase="decode")
    assert rt.generate(PROMPT, GREEDY, interventions=[flip]).tokens[0] == plain[0]
    flip = jaxrt.MaskLogits([plain[0]], phase="prefill")
    assert rt.generate(PROMPT, GREEDY, interventions=[flip]).tokens[0] != plain[0]


def test_streams_are_steered_as_answers_are(rt: ModelRuntime):
    change = [jaxrt.Scale(WIDE, 0.3)]
    events = [token for event in rt.stream(PROMPT, GREEDY, interventions=change) for token in event.tokens]
    assert tuple(events) == rt.generate(PROMPT, GREEDY, interventions=change).tokens


def test_a_sweep_never_recompiles(rt: ModelRuntime):
    vector = np.ones(32, np.float32)
    rt.generate(PROMPT, GREEDY, interventions=[jaxrt.Add(WIDE, vector, strength=0.0, positions=[1])])
    before = compiles().misses + compiles().hits
    with jaxrt.forbid_compile():
        for strength in (0.5, 1.0, -3.0):
            change = jaxrt.Add(WIDE, vector * strength, strength=strength, positions=[2, 3], rows=[0])
            rt.generate(PROMPT, GREEDY, interventions=[change])
    assert compiles().misses + compiles().hits == before


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jaxrt.Add("model.layers.0.outptu", np.ones(32)), "model.layers.0.output"),
        (lambda: jaxrt.Add("model.layers.9.output", np.ones(32)), "no place"),
        (lambda: jaxrt.Add("model.layers.0", np.ones(32)), "no place"),
        (lambda: jaxrt.Add(WIDE, np.ones(31)), r"\[31\]"),
        (lambda: jaxrt.Add(WIDE, np.ones((3, 7, 32))), "3 rows"),
        (lambda: jaxrt.Add(WIDE, np.ones((3, 32)), positions=[1, 2]), "3 positions"),
        (lambda: jaxrt.Add(WIDE, "a"), "numbers"),
        (lambda: jaxrt.Add(WIDE, np.full(32, np.nan)), "NaN"),
        (lambda: jaxrt.Add(WIDE, jnp.full(32, jnp.nan)), "NaN"),
        (lambda: jaxrt.Add(WIDE, np.ones(32), strength=float("nan")), "NaN"),
        (lambda: jaxrt.Add(WIDE, np.ones(32), strength=[1.0, 2.0]), "one number"),
        (lambda: jaxrt.Scale(WIDE, float("inf")), "infinity"),
        (lambda: jaxrt.Zero(WIDE, heads=[0]), "path with heads"),
        (lambda: jaxrt.Zero("model.layers.0.attention.heads", heads=[4]), "below 4"),
        (lambda: jaxrt.Zero("model.layers.0.attention.key", heads=[2]), "below 2"),
        (lambda: jaxrt.Zero(WIDE, positions=[]), "one or more"),
        (lambda: jaxrt.Zero(WIDE, positions=[1, 1]), "once"),
        (lambda: jaxrt.Zero(WIDE, positions=[5_000]), "context"),
        (lambda: jaxrt.Zero(WIDE, positions=[-8]), "-7 or more"),
        (lambda: jaxrt.Zero(WIDE, positions=[True]), "whole"),
        (lambda: jaxrt.Zero(WIDE, rows=[1]), "number of rows"),
        (lambda: jaxrt.Zero(WIDE, phase="never"), "prefill"),
        (lambda: jaxrt.MaskLogits([258]), "below 258"),
        (lambda: jaxrt.MaskLogits([]), "one or more"),
        (lambda: jaxrt.Replace(WIDE, jaxrt.ObservationSet()), "no 'model.layers.0.output'"),
        (lambda: jaxrt.Apply(WIDE, 3), "pure JAX function"),
        (lambda: jaxrt.Apply(WIDE, lambda x: x[:, :1]), "same shape"),
        (lambda: "Zero", "one of Add"),
    ],
)
def test_bad_interventions_are_refused_and_nothing_is_lost(rt: ModelRuntime, make: Any, says: str):
    before = rt.generate(PROMPT, GREEDY).tokens
    with pytest.raises(jaxrt.RequestError, match=says):
        rt.generate(PROMPT, GREEDY, interventions=[make()])
    assert rt.generate(PROMPT, GREEDY).tokens == before


def test_bad_requests_to_observe_are_refused(rt: ModelRuntime):
    with pytest.raises(jaxrt.RequestError, match="model.layers.0.output"):
        rt.inspect(PROMPT, ["model.layers.0.outptu"])
    with pytest.raises(jaxrt.RequestError, match="no observation"):
        rt.inspect(PROMPT, ["model.layers.2"])
    with pytest.raises(jaxrt.RequestError, match="ObservationRequest.all"):
        rt.inspect(PROMPT, [])
    with pytest.raises(jaxrt.CapacityError, match="budget"):
        rt.inspect(PROMPT, ["model.logits"], budget_bytes=7 * 258 * 4 - 1)
    assert rt.inspect(PROMPT, ["model.logits"], budget_bytes=7 * 258 * 4)
    with pytest.raises(jaxrt.RequestError, match="one prompt"):
        rt.inspect([PROMPT, PROMPT], ["model.logits"])  # type: ignore[arg-type]
    with pytest.raises(jaxrt.RequestError, match="budget_bytes"):
        rt.inspect(PROMPT, ["model.logits"], budget_bytes=0)
