"""One suite for every backend: what documents 001 and 002 promise, kept by XLA and by NumPy. "The same" means
equivalent here: both backends are within float32's rounding of float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrt.backend import ModelSource, XlaBackend
from jaxrt.contracts import (
    BackendSession,
    Completion,
    InspectableBackendSession,
    ModelLoadingBackend,
    PreparedModel,
    SessionCapabilities,
    Submission,
)
from jaxrt.errors import CapacityError, ExecutionError, ModelLoadError, RequestError, SessionPoisoned
from jaxrt.interventions import Add, Intervention, MaskLogits, Replace, Scale, Zero
from jaxrt.observations import InspectedOutput, ObservationRequest, known_paths
from jaxrt.runtime import ModelRuntime
from jaxrt.sessions.outputs import DecodeInput, PrefillInput
from jaxrt.sessions.session import CAPABILITIES, XlaSession
from tests import reference
from tests.numpy_backend import Further, NumpyBackend, NumpyModel, NumpySession, Prompt, shape
from tests.tiny import CONFIG, make_model, random_weights, shared_model

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, CONFIG.vocab, 24)]
START = 18  # tokens of the prompt; the others are decoded
# Float32 sums of n products are off by at most n 2^-24 of what they add up, the longest here have as many as the MLP is
# wide, and a value has come through some ten of them a layer.
TOLERANCE = 10 * len(CONFIG.layers) * CONFIG.mlp_width * 2.0**-24
PATHS = known_paths(len(CONFIG.layers))


class FailedArray:
    """What JAX leaves where a pass failed on the device: there at once, and an error for whoever needs it."""

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")


@contextmanager
def failing_xla(session: XlaSession) -> Iterator[None]:
    """Passes submitted within fail on the device, after their submission."""

    def run(plan: Any, *arguments: Any) -> dict[str, tuple]:
        found = plain(plan, *arguments)
        return {**found, "packed": (FailedArray(),)} if "packed" in found else found

    plain, session.context.run = session.context.run, run
    try:
        yield
    finally:
        del session.context.run


@contextmanager
def failing_numpy(session: NumpySession) -> Iterator[None]:
    whole = session.model.weights
    session.model.weights = whole.replace(final_norm=whole.final_norm * np.float32(np.nan))
    yield
    session.model.weights = whole


@dataclass(frozen=True)
class Kit:
    """A backend, with the spellings of its own."""

    backend: Any
    config: Any  # what its prepare_model takes
    prepared: Callable[[], PreparedModel]  # a model for a session, cheaply
    owned: Callable[[], PreparedModel]  # one that nobody else uses, and that may be closed
    prompt: Callable[[Any], Any]
    further: Callable[..., Any]
    failing: Callable[[Any], Any]
    arrays: Callable[[Submission], list]  # what a submission's completion waits for

    def runtime(self) -> ModelRuntime:
        return ModelRuntime.from_prepared(self.backend, self.prepared())


KITS = {
    "xla": Kit(
        XlaBackend(),
        ModelSource(CONFIG, random_weights()),
        lambda: PreparedModel(shared_model(), CAPABILITIES),
        lambda: PreparedModel(make_model(), CAPABILITIES),
        PrefillInput,
        DecodeInput,
        failing_xla,
        lambda submission: list(submission.completion.arrays),
    ),
    "numpy": Kit(
        NumpyBackend(),
        NumpyModel(CONFIG, random_weights()),
        lambda: NumpyBackend().prepare_model(NumpyModel(CONFIG, random_weights())),
        lambda: NumpyBackend().prepare_model(NumpyModel(CONFIG, random_weights())),
        Prompt,
        Further,
        failing_numpy,
        lambda submission: [submission.completion],
    ),
}


@pytest.fixture(params=KITS)
def kit(request: pytest.FixtureRequest) -> Kit:
    return KITS[request.param]


@pytest.fixture
def rt(kit: Kit) -> Iterator[ModelRuntime]:
    """Not the runtime's close(), which would close the model that tests share."""
    runtime = kit.runtime()
    yield runtime
    runtime.session.close()


def expected(tokens: list[int] = TOKENS) -> np.ndarray:
    """float64 [T, V]."""
    return reference.logits(CONFIG, random_weights(), tokens)


def seen(rt: ModelRuntime, submission: Submission) -> np.ndarray:
    """[B, T, V], through the contract alone."""
    return rt.observe_output(submission.wait())["model.logits"].data


def assert_close(found: np.ndarray, wanted: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert found.shape == wanted.shape
    assert np.array_equal(np.isneginf(found), np.isneginf(wanted))  # masked logits
    finite = np.isfinite(wanted)
    assert np.isfinite(found[finite]).all()
    assert np.abs(found[finite] - wanted[finite]).max() <= tolerance * np.abs(wanted[finite]).max()


# --- what they are ----------------------------------------------------------------------------------------------------


def test_the_contracts_are_met(kit: Kit, rt: ModelRuntime):
    assert isinstance(kit.backend, ModelLoadingBackend)
    assert isinstance(rt.session, BackendSession) and isinstance(rt.session, InspectableBackendSession)
    described = kit.backend.descriptor()
    assert described.name and described.version
    assert all(device.id and device.family for device, _ in kit.backend.devices())


def test_a_model_is_prepared_from_the_backends_own_config(kit: Kit):
    with ModelRuntime.prepare(kit.backend, kit.config) as runtime:
        assert runtime.backend is kit.backend
        assert runtime.parts == (kit.backend, runtime.session)


def test_what_was_admitted_is_what_the_session_offers(kit: Kit):
    prepared = kit.prepared()
    admitted = prepared.capabilities
    runtime = ModelRuntime.from_prepared(kit.backend, prepared)
    assert runtime.capabilities() == runtime.session.capabilities() == admitted
    assert admitted == SessionCapabilities(True, True, True)


def test_a_prepared_model_makes_one_session(kit: Kit):
    prepared = kit.prepared()
    first = ModelRuntime.from_prepared(kit.backend, prepared)
    with pytest.raises(ModelLoadError, match="has its session already"):
        ModelRuntime.from_prepared(kit.backend, prepared)
    with pytest.raises(ModelLoadError, match="has its session already"):
        kit.backend.create_session(prepared)
    assert_close(seen(first, first.prefill(kit.prompt(TOKENS)))[0, 0], expected()[-1])  # which is none the worse for it


@pytest.mark.parametrize("missing", ["persistent_cache", "output_observation", "activation_inspection"])
def test_a_session_with_more_than_was_admitted_is_refused_and_all_is_closed(kit: Kit, missing: str):
    prepared = kit.owned()
    less = PreparedModel(prepared.model, replace(prepared.capabilities, **{missing: False}))
    with pytest.raises(ModelLoadError, match="exactly the admitted"):
        ModelRuntime.from_prepared(kit.backend, less)
    assert prepared.model.closed


# --- submissions ------------------------------------------------------------------------------------------------------


def test_a_prefill_gives_a_submission_whose_output_can_be_observed(kit: Kit, rt: ModelRuntime):
    submission = rt.prefill(kit.prompt(TOKENS))
    assert isinstance(submission, Submission) and isinstance(submission.completion, Completion)
    submission.completion.wait()
    assert submission.completion.is_complete()
    assert submission.wait() is submission.output  # again and again
    observed = rt.observe_output(submission.output)
    assert list(observed) == ["model.logits"]
    assert_close(observed["model.logits"].data, expected()[None, -1:])


def test_decoding_one_position_or_more_continues_the_cache(kit: Kit, rt: ModelRuntime):
    rt.prefill(kit.prompt(TOKENS[:START]))
    one = rt.decode(kit.further(TOKENS[START : START + 1]))
    more = rt.decode(kit.further(TOKENS[START + 1 :]))
    assert_close(seen(rt, one), expected()[None, START : START + 1])
    assert_close(seen(rt, more), expected()[None, START + 1 :])


def test_decoding_without_tokens_is_greedy(kit: Kit, rt: ModelRuntime):
    rt.prefill(kit.prompt(TOKENS))
    tokens = [*TOKENS]
    for _ in range(5):
        best = np.sort(expected(tokens)[-1])
        assert best[-1] - best[-2] > 0.01  # no tie that rounding could break
        tokens.append(int(expected(tokens)[-1].argmax()))
    alone = rt.decode(kit.further())
    rest = rt.decode(kit.further(positions=4))
    assert_close(seen(rt, alone)[0, -1], expected(tokens[: len(TOKENS) + 1])[-1])
    assert_close(seen(rt, rest)[0, -1], expected(tokens)[-1])


def test_a_prefill_after_a_decode_goes_on_from_there(kit: Kit, rt: ModelRuntime):
    rt.prefill(kit.prompt(TOKENS[:10]))
    rt.decode(kit.further(TOKENS[10:12]))
    assert_close(seen(rt, rt.prefill(kit.prompt(TOKENS[12:])))[0, 0], expected()[-1])


def test_outputs_stay_readable_after_later_submissions(kit: Kit, rt: ModelRuntime):
    first = rt.prefill(kit.prompt(TOKENS[:START]))
    rt.decode(kit.further(TOKENS[START:])).wait()
    assert_close(seen(rt, first)[0, 0], expected()[START - 1])


def test_sessions_of_one_model_are_independent(kit: Kit):
    one, other = kit.runtime(), kit.runtime()
    one.prefill(kit.prompt(TOKENS[:START]))
    other.prefill(kit.prompt(TOKENS[::-1]))
    ahead = one.decode(kit.further(TOKENS[START:]))
    other.session.close()
    assert_close(seen(one, ahead)[0, -1], expected()[-1])


def test_a_completion_waits_for_its_own_submission_alone(kit: Kit, rt: ModelRuntime, monkeypatch: pytest.MonkeyPatch):
    first = rt.prefill(kit.prompt(TOKENS[:START]))
    second = rt.decode(kit.further(TOKENS[START:]))
    waited: list = []
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: waited.extend(jax.tree.leaves(arrays)))
    first.completion.wait()
    monkeypatch.undo()
    theirs = {id(array) for array in kit.arrays(second)}
    assert not theirs & {id(array) for array in [*waited, *kit.arrays(first)]}
    if isinstance(rt.session, NumpySession):
        assert first.completion.is_complete() and not second.completion.is_complete()
    else:
        assert {id(array) for array in waited} == {id(array) for array in kit.arrays(first)}
    second.completion.wait()
    assert second.completion.is_complete()


def test_waiting_for_a_later_submission_completes_those_before_it(kit: Kit, rt: ModelRuntime):
    first = rt.prefill(kit.prompt(TOKENS[:START]))
    rt.decode(kit.further(TOKENS[START:])).wait()
    assert first.completion.is_complete()


def test_plain_inference_never_observes(kit: Kit, rt: ModelRuntime, monkeypatch: pytest.MonkeyPatch):
    def observed(*_: Any) -> None:
        raise AssertionError("an output was brought to the host")

    monkeypatch.setattr(type(rt.session), "observe_output", observed)
    rt.prefill(kit.prompt(TOKENS))
    rt.decode(kit.further(positions=3)).wait()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_decoding_before_any_prefill_is_refused(kit: Kit, rt: ModelRuntime):
    with pytest.raises(RequestError, match="nothing to go on from"):
        rt.decode(kit.further())
    assert_close(seen(rt, rt.prefill(kit.prompt(TOKENS)))[0, 0], expected()[-1])


@pytest.mark.parametrize("tokens", [[], [-1], [3, CONFIG.vocab], [1.5], [True], ["a"], "text", 7], ids=repr)
def test_bad_tokens_are_refused_before_anything_runs(kit: Kit, rt: ModelRuntime, tokens: Any):
    rt.prefill(kit.prompt(TOKENS[:START]))
    for submit in (lambda: rt.prefill(kit.prompt(tokens)), lambda: rt.decode(kit.further(tokens))):
        with pytest.raises(RequestError):
            submit()
    assert_close(seen(rt, rt.decode(kit.further(TOKENS[START:])))[0], expected()[START:])


@pytest.mark.parametrize("positions", [0, -1, 1.5, True, None])
def test_a_senseless_number_of_positions_is_refused(kit: Kit, rt: ModelRuntime, positions: Any):
    rt.prefill(kit.prompt(TOKENS))
    with pytest.raises(RequestError):
        rt.decode(kit.further(positions=positions))


def test_more_than_the_context_is_refused_before_anything_runs(kit: Kit, rt: ModelRuntime):
    rt.prefill(kit.prompt(TOKENS[:START]))
    with pytest.raises(CapacityError):
        rt.prefill(kit.prompt([1] * (CONFIG.context - START + 1)))
    with pytest.raises(CapacityError):
        rt.decode(kit.further(positions=CONFIG.context - START + 1))
    assert_close(seen(rt, rt.prefill(kit.prompt(TOKENS[START:])))[0, 0], expected()[-1])


def test_an_input_of_another_kind_is_refused(kit: Kit, rt: ModelRuntime):
    for submit in (rt.prefill, rt.decode):
        with pytest.raises(RequestError, match="an input of type list"):
            submit(TOKENS)
    with pytest.raises(RequestError):
        rt.prefill(kit.further(TOKENS))


def test_a_failed_pass_surfaces_at_wait_and_the_session_says_so_until_it_is_reset(kit: Kit, rt: ModelRuntime):
    rt.prefill(kit.prompt(TOKENS[:3])).wait()
    with kit.failing(rt.session):
        failed = rt.prefill(kit.prompt(TOKENS))
        for _ in range(2):
            with pytest.raises(ExecutionError):
                failed.wait()
    with pytest.raises((ExecutionError, SessionPoisoned), match="reset"):
        rt.prefill(kit.prompt(TOKENS)).wait()
    rt.session.reset()
    assert_close(seen(rt, rt.prefill(kit.prompt(TOKENS)))[0, 0], expected()[-1])


def test_closing_the_runtime_closes_its_session(kit: Kit):
    with ModelRuntime.from_prepared(kit.backend, kit.owned()) as rt:
        rt.prefill(kit.prompt(TOKENS)).wait()
    with pytest.raises(RequestError, match="closed"):
        rt.prefill(kit.prompt(TOKENS))
    rt.close()  # which is nothing new


def test_a_closed_session_says_so(kit: Kit, rt: ModelRuntime):
    rt.prefill(kit.prompt(TOKENS))
    rt.session.close()
    rt.session.close()  # which is nothing new
    everything = ObservationRequest.all()
    for submit in (
        lambda: rt.prefill(kit.prompt(TOKENS)),
        lambda: rt.decode(kit.further()),
        lambda: rt.inspect_prefill(kit.prompt(TOKENS), everything),
        lambda: rt.inspect_decode(kit.further(), everything),
    ):
        with pytest.raises(RequestError, match="closed"):
            submit()


# --- the inside -------------------------------------------------------------------------------------------------------


def inside(tokens: list[int]) -> dict[str, np.ndarray]:
    """float64, all that stands in one pass over `tokens`, with a row axis."""
    found: dict[str, np.ndarray] = {}

    def note(path: str, x: np.ndarray) -> np.ndarray:
        found[path] = x[None]
        return x

    reference.forward(CONFIG, random_weights(), tokens, tap=note)
    return found


def cut(path: str, x: np.ndarray, start: int) -> np.ndarray:
    """Of the tokens from `start` on."""
    return x[:, :, start:] if path.endswith("weights") else x[:, start:]


def test_the_whole_prompt_is_seen_at_every_path(kit: Kit, rt: ModelRuntime):
    found = rt.inspect_prefill(kit.prompt(TOKENS), ObservationRequest.all())
    assert isinstance(found, InspectedOutput)
    assert set(found.observations) == set(PATHS)
    for path, wanted in inside(TOKENS).items():
        assert wanted.shape == shape(CONFIG, path, len(TOKENS), len(TOKENS)), path
        assert_close(found.observations[path].data, wanted)


def test_decoded_positions_are_seen_at_every_path(kit: Kit, rt: ModelRuntime):
    rt.prefill(kit.prompt(TOKENS[:START]))
    found = rt.inspect_decode(kit.further(TOKENS[START:]), ObservationRequest.all()).observations
    assert set(found) == set(PATHS)
    for path, wanted in inside(TOKENS).items():
        assert_close(found[path].data, cut(path, wanted, START))


def test_greedy_positions_are_seen_one_by_one(kit: Kit, rt: ModelRuntime):
    rt.prefill(kit.prompt(TOKENS))
    request = ObservationRequest.selected(["model.embeddings", "model.layers.1.attention.weights"])
    found = rt.inspect_decode(kit.further(positions=3), request).observations
    tokens = [*TOKENS]
    for _ in range(3):
        tokens.append(int(expected(tokens)[-1].argmax()))
    for path in found:
        assert_close(found[path].data, cut(path, inside(tokens)[path], len(TOKENS)))


def test_only_what_is_asked_for_is_seen(kit: Kit, rt: ModelRuntime):
    request = ObservationRequest.selected(["model.layers.1.attention", "model.layers.*.output"])
    found = rt.inspect_prefill(kit.prompt(TOKENS), request).observations
    sites = ["heads", "key", "output", "query", "value", "weights"]
    wanted = ["model.layers.0.output", *(f"model.layers.1.attention.{site}" for site in sites), "model.layers.1.output"]
    assert list(found) == wanted


def test_an_inspected_pass_is_a_pass(kit: Kit, rt: ModelRuntime):
    request = ObservationRequest.selected(["model.final_norm"])
    output = rt.inspect_prefill(kit.prompt(TOKENS[:START]), request).output
    assert_close(rt.observe_output(output)["model.logits"].data[0, -1], expected()[START - 1])
    rt.inspect_decode(kit.further(TOKENS[START:-1]), request)
    assert_close(seen(rt, rt.decode(kit.further(TOKENS[-1:])))[0, 0], expected()[-1])


def test_inspection_is_refused_before_anything_runs(kit: Kit, rt: ModelRuntime):
    rt.prefill(kit.prompt(TOKENS[:START]))
    rest, nowhere = kit.prompt(TOKENS[START:]), ObservationRequest.selected(["model.layers.2"])
    with pytest.raises(RequestError, match=r"model\.layers\.2"):
        rt.inspect_prefill(rest, nowhere)
    with pytest.raises(RequestError, match=r"model\.layers\.2"):
        rt.inspect_decode(kit.further(), nowhere)
    with pytest.raises(CapacityError, match="observations"):
        rt.inspect_prefill(rest, ObservationRequest.all(budget_bytes=100))
    with pytest.raises(RequestError):
        rt.inspect_prefill(rest, ObservationRequest.all(), [Zero("model.layers.7.output")])
    assert_close(seen(rt, rt.prefill(rest))[0, 0], expected()[-1])


VECTOR = np.linspace(-1, 1, CONFIG.width, dtype=np.float32)
CHANGES: dict[str, list[Intervention]] = {
    "add": [Add("model.layers.0.output", VECTOR, strength=2.0)],
    "add to some": [Add("model.layers.*.mlp.output", VECTOR, positions=[0, 3, -1])],
    "scale a head": [Scale("model.layers.1.attention.heads", 0.5, heads=[2])],
    "zero a key": [Zero("model.layers.0.attention.key", heads=[1], positions=range(4))],
    "halve a weight": [Zero("model.layers.1.attention.weights", strength=0.5, heads=[0, 3])],
    "replace": [Replace("model.embeddings", np.outer([1, -1], VECTOR), positions=[2, 5], strength=0.75)],
    "mask": [MaskLogits([5, 200])],
    "in turn": [Scale("model.final_norm", 3.0), Add("model.final_norm", VECTOR), Zero("model.logits", positions=[1])],
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen_from_where_they_are_made_on_and_stay_in_the_cache(name: str):
    """XLA's pass with changes against NumPy's."""
    found = []
    for kit in KITS.values():
        runtime = kit.runtime()
        prefill = runtime.inspect_prefill(kit.prompt(TOKENS[:START]), ObservationRequest.all(), CHANGES[name])
        decode = runtime.inspect_decode(kit.further(TOKENS[START:]), ObservationRequest.all(), CHANGES[name])
        plain = runtime.inspect_decode(kit.further(TOKENS[:1]), ObservationRequest.all())
        found.append([prefill.observations, decode.observations, plain.observations])
        runtime.session.close()
    plainly = inside(TOKENS[:START])
    changed = [path for path in PATHS if not np.allclose(found[1][0][path].data, plainly[path], atol=1e-3)]
    assert changed
    for ours, theirs in zip(*found, strict=True):
        for path in PATHS:
            assert_close(ours[path].data, theirs[path].data)
