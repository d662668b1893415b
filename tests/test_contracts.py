"""The documented types and the rules of each, a test a row; on the NumPy backend, since none of it is about devices.
What sessions do with them is in test_conformance.py, what is observed in test_observation_types.py."""

import json
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrt.backend import LoadOptions, XlaBackend
from jaxrt.contracts import (
    BackendDescriptor,
    BackendProvider,
    BackendSession,
    Completion,
    DeviceCapabilities,
    DeviceDescriptor,
    InspectableBackendSession,
    ModelLoadingBackend,
    PreparedModel,
    SessionCapabilities,
    Submission,
)
from jaxrt.errors import ArtifactError, ExecutionError, ModelLoadError, RequestError, SessionCapabilityError
from jaxrt.observations import InspectedOutput, ObservationRequest, ObservationSet
from jaxrt.runtime import ModelRuntime
from tests.files import tiny_config_json, tiny_llama_tensors, write_hf
from tests.numpy_backend import (
    Further,
    InspectableNumpySession,
    NumpyBackend,
    NumpyModel,
    NumpyOptions,
    NumpySession,
    Prompt,
)
from tests.tiny import CONFIG, random_weights

ALL = SessionCapabilities(True, True, True)
NAMES = [field.name for field in fields(SessionCapabilities)]
TOKENS = [5, 6, 7]


def source() -> NumpyModel:
    return NumpyModel(CONFIG, random_weights())


def checkpoint(directory: Path, *, spoilt: bool = False) -> Path:
    """A tiny Llama on disk. Spoilt: its headers are in order, and one of its weights is NaN."""
    tensors = tiny_llama_tensors(np.random.default_rng(0))
    if spoilt:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    return write_hf(directory, tiny_config_json(), tensors)


# --- ModelRuntime (2.1) -----------------------------------------------------------------------------------------------


def test_prepare_is_prepare_model_and_from_prepared():
    backend = NumpyBackend()
    config = source()
    runtime = ModelRuntime.prepare(backend, config)
    assert runtime.session.model.config is CONFIG and runtime.session.model.weights is config.weights
    runtime.prefill(Prompt(TOKENS)).wait()


def test_from_prepared_consumes_the_model():
    prepared = NumpyBackend().prepare_model(source())
    runtime = ModelRuntime.from_prepared(NumpyBackend(), prepared)
    assert runtime.session.model is prepared.model
    with pytest.raises(ModelLoadError):
        ModelRuntime.from_prepared(NumpyBackend(), prepared)
    assert not prepared.model.closed  # it is the first session's, and that goes on
    runtime.prefill(Prompt(TOKENS)).wait()


@pytest.mark.parametrize("inspection", [False, True], ids=["a session with less", "a session with more"])
def test_from_prepared_wants_the_very_capabilities_that_were_admitted(inspection: bool):
    made: list[NumpySession] = []

    class Other(NumpyBackend):
        def create_session(self, model: PreparedModel) -> NumpySession:
            made.append(super().create_session(model))
            return made[0]

    admitted = SessionCapabilities(True, True, not inspection)
    prepared = PreparedModel(source(), admitted)
    with pytest.raises(SessionCapabilityError) as caught:
        ModelRuntime.from_prepared(Other(inspection), prepared)
    assert str(admitted) in caught.value.expected and str(made[0].capabilities()) in caught.value.found
    assert made[0].closed and prepared.model.closed


def test_load_is_load_model_and_from_prepared(tmp_path: Path):
    runtime = ModelRuntime.load(NumpyBackend(), str(checkpoint(tmp_path)), NumpyOptions(required=ALL))
    assert runtime.session.model.config.vocab == 258 and runtime.capabilities() == ALL
    runtime.prefill(Prompt(TOKENS)).wait()


def test_load_takes_options_that_require_nothing(tmp_path: Path):
    class Lenient(NumpyBackend):
        def load_model(self, artifact: Path, options: Any) -> PreparedModel:
            assert options is None
            return super().load_model(artifact, NumpyOptions())

    assert ModelRuntime.load(Lenient(), checkpoint(tmp_path), None).capabilities() == ALL


class LesserXla(XlaBackend):
    """Declares less than it could do."""

    def session_capabilities(self, artifact: Path) -> SessionCapabilities:
        return replace(super().session_capabilities(artifact), activation_inspection=False)


@pytest.mark.parametrize(
    ("backend", "options"),
    [(lambda: NumpyBackend(inspection=False), NumpyOptions), (LesserXla, LoadOptions)],
    ids=["numpy", "xla"],
)
def test_load_misses_a_capability_before_it_reads_a_weight(tmp_path: Path, backend: Any, options: Any):
    path = checkpoint(tmp_path, spoilt=True)
    with pytest.raises(ArtifactError, match="NaN"):  # what reading the weights says
        ModelRuntime.load(backend(), path, options())
    with pytest.raises(SessionCapabilityError, match="required capability activation_inspection"):
        ModelRuntime.load(backend(), path, options(required=ALL))


def test_load_model_alone_misses_a_capability_before_it_reads_a_weight(tmp_path: Path):
    path = checkpoint(tmp_path, spoilt=True)
    with pytest.raises(SessionCapabilityError, match="activation_inspection"):
        NumpyBackend(inspection=False).load_model(path, NumpyOptions(required=ALL))


def test_session_capabilities_are_told_from_the_headers_alone(tmp_path: Path):
    path = checkpoint(tmp_path, spoilt=True)
    for backend in (NumpyBackend(), XlaBackend()):
        assert backend.session_capabilities(path) == ALL
        with pytest.raises(ArtifactError):
            backend.session_capabilities(tmp_path / "nowhere")


@pytest.mark.parametrize("name", NAMES)
def test_load_wants_the_very_capabilities_that_were_declared_and_closes_what_it_made(tmp_path: Path, name: str):
    """A model that turns out to offer more than its headers promised."""
    made: list[PreparedModel] = []

    class Modest(NumpyBackend):
        def session_capabilities(self, artifact: Path) -> SessionCapabilities:
            return replace(super().session_capabilities(artifact), **{name: False})

        def load_model(self, artifact: Path, options: NumpyOptions) -> PreparedModel:
            made.append(super().load_model(artifact, options))
            return made[0]

    with pytest.raises(SessionCapabilityError, match="the loaded model offers"):
        ModelRuntime.load(Modest(), checkpoint(tmp_path), NumpyOptions())
    assert made[0].model.closed


def test_load_on_xla_closes_the_model_that_offers_more_than_was_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[PreparedModel] = []
    load = LesserXla.load_model
    monkeypatch.setattr(LesserXla, "load_model", lambda *given: made.append(load(*given)) or made[0])
    with pytest.raises(SessionCapabilityError):
        ModelRuntime.load(LesserXla(), checkpoint(tmp_path), LoadOptions())
    assert made[0].model.closed and not hasattr(made[0].model, "weights")


@pytest.mark.parametrize("way", ["prepare", "load"])
def test_a_session_that_cannot_be_made_leaves_no_model_open(tmp_path: Path, way: str):
    made: list[PreparedModel] = []

    class Broken(NumpyBackend):
        def create_session(self, model: PreparedModel) -> NumpySession:
            made.append(model)
            raise ModelLoadError("no room")

    with pytest.raises(ModelLoadError, match="no room"):
        if way == "prepare":
            ModelRuntime.prepare(Broken(), source())
        else:
            ModelRuntime.load(Broken(), checkpoint(tmp_path), NumpyOptions())
    assert made[0].model.closed


def test_backend_session_and_parts_are_those_it_was_made_of():
    backend = NumpyBackend()
    runtime = ModelRuntime.prepare(backend, source())
    assert runtime.backend is backend
    assert runtime.parts == (backend, runtime.session)
    for name in ("backend", "session", "parts"):
        with pytest.raises(AttributeError):
            setattr(runtime, name, None)  # a session can never meet another backend


def test_capabilities_are_those_of_the_realised_session():
    assert ModelRuntime.prepare(NumpyBackend(), source()).capabilities() == ALL
    assert ModelRuntime.prepare(NumpyBackend(inspection=False), source()).capabilities() == replace(
        ALL, activation_inspection=False
    )


class Recorder:
    """A session that notes what it is asked, of a backend nobody knows."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def capabilities(self) -> SessionCapabilities:
        return ALL

    def prefill(self, input: Any) -> Submission:
        return self._noted("prefill", input)

    def decode(self, input: Any) -> Submission:
        return self._noted("decode", input)

    def observe_output(self, output: Any) -> ObservationSet:
        return self._noted("observe_output", output)

    def inspect_prefill(self, input: Any, request: Any, interventions: Sequence = ()) -> InspectedOutput:
        return self._noted("inspect_prefill", input, request, interventions)

    def inspect_decode(self, input: Any, request: Any, interventions: Sequence = ()) -> InspectedOutput:
        return self._noted("inspect_decode", input, request, interventions)

    def close(self) -> None:
        self._noted("close")

    def _noted(self, *asked: Any) -> Any:
        self.asked.append(asked)
        return asked


def test_prefill_decode_observe_and_inspect_are_the_sessions_own():
    session, one, two, three = Recorder(), object(), object(), object()
    runtime = ModelRuntime(NumpyBackend(), session)
    assert runtime.prefill(one) == ("prefill", one)
    assert runtime.decode(one) == ("decode", one)
    assert runtime.observe_output(one) == ("observe_output", one)
    assert runtime.inspect_prefill(one, two) == ("inspect_prefill", one, two, ())
    assert runtime.inspect_decode(one, two, three) == ("inspect_decode", one, two, three)
    assert len(session.asked) == 5


def test_inspect_is_refused_where_the_session_cannot_be_looked_into():
    runtime = ModelRuntime.prepare(NumpyBackend(inspection=False), source())
    runtime.prefill(Prompt(TOKENS))
    with pytest.raises(RequestError, match="activation_inspection"):
        runtime.inspect_prefill(Prompt(TOKENS), ObservationRequest.all())
    with pytest.raises(RequestError, match="activation_inspection"):
        runtime.inspect_decode(Further(), ObservationRequest.all())


# --- BackendSession (2.2) ---------------------------------------------------------------------------------------------


def test_inputs_and_outputs_are_the_backends_own():
    runtime = ModelRuntime(NumpyBackend(), Recorder())
    assert runtime.prefill("whatever") == ("prefill", "whatever")


def test_whatever_has_the_methods_is_a_session():
    assert isinstance(Recorder(), BackendSession) and isinstance(Recorder(), InspectableBackendSession)
    assert not isinstance(object(), BackendSession)


def test_inspection_is_apart_from_plain_submission():
    plain, inspectable = NumpySession(source()), InspectableNumpySession(source())
    assert isinstance(plain, BackendSession) and not isinstance(plain, InspectableBackendSession)
    assert isinstance(inspectable, InspectableBackendSession)


def test_decode_submits_one_or_more_positions():
    session = NumpySession(source())
    session.prefill(Prompt(TOKENS))
    outputs = [session.decode(Further([1])).wait(), session.decode(Further([2, 3, 4])).wait()]
    assert [session.observe_output(output)["model.logits"].shape[1] for output in outputs] == [1, 3]


def test_observe_output_is_the_synchronisation():
    session = NumpySession(source())
    submission = session.prefill(Prompt(TOKENS))
    assert not submission.completion.is_complete()
    session.observe_output(submission.output)
    assert submission.completion.is_complete()


# --- capabilities and descriptors (2.3) -------------------------------------------------------------------------------


def test_session_capabilities_default_to_nothing():
    assert SessionCapabilities() == SessionCapabilities(False, False, False)
    assert NAMES == ["persistent_cache", "output_observation", "activation_inspection"]
    with pytest.raises(FrozenInstanceError):
        ALL.persistent_cache = False  # type: ignore[misc]


def test_session_capabilities_validate_names_the_first_that_is_missing():
    for index, name in enumerate(NAMES):
        available = SessionCapabilities(**dict.fromkeys(NAMES[:index], True))
        with pytest.raises(SessionCapabilityError) as caught:
            ALL.validate(available)
        assert caught.value.found == f"prepared session does not support required capability {name}"


def test_session_capabilities_validate_minds_only_what_is_required():
    for name in NAMES:
        SessionCapabilities(**{name: True}).validate(SessionCapabilities(**{name: True}))
    SessionCapabilities().validate(SessionCapabilities())
    SessionCapabilities().validate(ALL)
    ALL.validate(ALL)


def test_device_capabilities_default_to_nothing():
    assert DeviceCapabilities() == DeviceCapabilities(exact_completion=False, transfers=False, collectives=False)


def test_descriptors_are_open_strings():
    assert BackendDescriptor("mine", "7").name == "mine"
    assert DeviceDescriptor("0", "a thing", "things").memory_bytes is None
    json.dumps([vars(DeviceDescriptor("0", "a thing", "things", 1 << 40)), vars(BackendDescriptor("mine", "7"))])


def test_xla_describes_its_devices():
    found = list(XlaBackend().devices())
    assert XlaBackend().descriptor().name == "xla" and found
    for device, capabilities in found:
        assert device.family == XlaBackend().device.platform and capabilities.exact_completion
        assert isinstance(device.id, str) and (device.memory_bytes is None or device.memory_bytes > 0)


# --- submissions and prepared models ----------------------------------------------------------------------------------


@dataclass
class Once:
    """A completion that notes how often it was waited for."""

    error: Exception | None = None
    waits: int = 0

    def is_complete(self) -> bool:
        return self.waits > 0

    def wait(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error


def test_completion_is_whatever_says_when_it_is_done():
    assert isinstance(Once(), Completion) and not isinstance(object(), Completion)


def test_submission_wait_waits_and_gives_the_output():
    completion, output = Once(), object()
    submission = Submission(output, completion)
    assert submission.output is output and not completion.is_complete()
    assert submission.wait() is output
    assert completion.waits == 1


def test_submission_wait_fails_where_its_completion_does():
    with pytest.raises(ExecutionError, match="the device fell over"):
        Submission(object(), Once(ExecutionError("the device fell over"))).wait()


def test_prepared_model_is_readable_until_and_after_it_is_consumed():
    model = source()
    prepared = PreparedModel(model, ALL)
    assert prepared.model is model and prepared.capabilities == ALL
    assert prepared.take() is model
    assert prepared.model is model
    with pytest.raises(FrozenInstanceError):
        prepared.model = None  # type: ignore[misc]
    assert repr(PreparedModel("m", ALL)) == f"PreparedModel(model='m', capabilities={ALL})"


def test_prepared_model_is_consumed():
    prepared = PreparedModel(source(), ALL)
    prepared.take()
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="prepare or load the model again"):
            prepared.take()


def test_backend_provider_and_model_loading_backend_are_what_has_the_methods():
    class NoFiles:
        descriptor = NumpyBackend.descriptor
        devices = NumpyBackend.devices
        prepare_model = NumpyBackend.prepare_model
        create_session = NumpyBackend.create_session

    assert isinstance(NumpyBackend(), ModelLoadingBackend) and isinstance(XlaBackend(), ModelLoadingBackend)
    assert isinstance(NoFiles(), BackendProvider) and not isinstance(NoFiles(), ModelLoadingBackend)


def test_a_missing_capability_is_a_model_load_error_and_a_bad_file_says_so_itself():
    assert issubclass(SessionCapabilityError, ModelLoadError)
    assert not issubclass(ArtifactError, ModelLoadError)
