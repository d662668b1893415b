"""`ModelRuntime`: a backend and its session as one owner; and the short ways in, `load`, `generate`, `stream`,
`score`."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxrt import compile_cache, generation, scoring
from jaxrt.artifacts.hub import resolve
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.backend import LoadOptions, XlaBackend
from jaxrt.config import ModelConfig
from jaxrt.contracts import (
    BackendProvider,
    BackendSession,
    InspectableBackendSession,
    ModelLoadingBackend,
    PreparedModel,
    SessionCapabilities,
    Submission,
)
from jaxrt.edits import check
from jaxrt.errors import RequestError, SessionCapabilityError
from jaxrt.functional import Functional
from jaxrt.interventions import Intervention
from jaxrt.markup import weights_html
from jaxrt.observations import (
    BUDGET_BYTES,
    InspectedOutput,
    ObservationRequest,
    ObservationSelector,
    ObservationSet,
)
from jaxrt.planning import describe
from jaxrt.prompts import Message, requests_of, tokenizer_of
from jaxrt.requests import SamplingParams, Score, TokenEvent, is_whole, shown
from jaxrt.sessions.outputs import PrefillInput
from jaxrt.sessions.session import XlaSession
from jaxrt.sessions.warmup import warm_later, warm_up
from jaxrt.weights import named, stored

Prompt = str | Sequence[int]


class ModelRuntime:
    """A prepared model, its backend and its session. Also a context manager: leaving it frees the device memory."""

    def __init__(self, backend: BackendProvider, session: BackendSession) -> None:
        self._backend = backend
        self._session = session

    @classmethod
    def prepare(cls, backend: BackendProvider, config: Any) -> "ModelRuntime":
        """Prepare a model from the backend's own config and make its session; raises as from_prepared."""
        model = backend.prepare_model(config)
        with _closed_on_failure(model.model):
            return cls.from_prepared(backend, model)

    @classmethod
    def from_prepared(cls, backend: BackendProvider, model: PreparedModel) -> "ModelRuntime":
        """Make the session of a prepared model, which is consumed.

        Raises: SessionCapabilityError unless the session's capabilities are exactly those that were admitted (session
        and model are closed then); ModelLoadError when the model has its session already.
        """
        session = backend.create_session(model)
        with _closed_on_failure(model.model), _closed_on_failure(session):
            _check_same("the session", session.capabilities(), model.capabilities)
        return cls(backend, session)

    @classmethod
    def load(cls, backend: ModelLoadingBackend, artifact_path: str | os.PathLike[str], options: Any) -> "ModelRuntime":
        """Load an artifact on `backend` and make its session.

        options: the backend's own. Where they have a field `required`, those SessionCapabilities are looked for in
        what the artifact's headers promise, before any weight is read.
        Raises: ArtifactError, UnsupportedModel; SessionCapabilityError for a capability that is missing, or for more or
        fewer than were declared; ModelLoadError. What was made by then is closed.
        """
        path = Path(artifact_path)
        declared = backend.session_capabilities(path)
        getattr(options, "required", SessionCapabilities()).validate(declared)
        model = backend.load_model(path, options)
        with _closed_on_failure(model.model):
            _check_same("the loaded model", model.capabilities, declared)
            return cls.from_prepared(backend, model)

    @property
    def backend(self) -> BackendProvider:
        return self._backend

    @property
    def session(self) -> BackendSession:
        """The runtime's own session."""
        return self._session

    @property
    def parts(self) -> tuple[BackendProvider, BackendSession]:
        return self._backend, self._session

    def capabilities(self) -> SessionCapabilities:
        """Of the realised session."""
        return self._session.capabilities()

    def prefill(self, input: Any) -> Submission:
        """Submit a prompt to the session. Blocks at most for what was submitted before it."""
        return self._session.prefill(input)

    def decode(self, input: Any) -> Submission:
        """Submit one or more further positions; nothing blocks."""
        return self._session.decode(input)

    def observe_output(self, output: Any) -> ObservationSet:
        """Bring a completed output to the host. Blocks: the explicit synchronisation."""
        return self._session.observe_output(output)

    def inspect_prefill(
        self, input: Any, request: ObservationRequest, interventions: Sequence[Intervention] = ()
    ) -> InspectedOutput:
        """`prefill` with a look inside, and changes to it. Blocks.

        Raises: RequestError where the session has no activation_inspection, or for paths there are not.
        """
        return self._inspectable().inspect_prefill(input, request, interventions)

    def inspect_decode(
        self, input: Any, request: ObservationRequest, interventions: Sequence[Intervention] = ()
    ) -> InspectedOutput:
        """`decode` with a look inside, and changes to it. Blocks; raises as inspect_prefill."""
        return self._inspectable().inspect_decode(input, request, interventions)

    def _inspectable(self) -> InspectableBackendSession:
        session = self._session
        if not session.capabilities().activation_inspection or not isinstance(session, InspectableBackendSession):
            raise RequestError(
                f"a {type(session).__name__} without activation_inspection",
                fix="choose a backend that offers it, or observe_output of a plain pass",
            )
        return session

    # --- text, on XLA sessions ------------------------------------------------------------------------------------

    @property
    def config(self) -> ModelConfig:
        return self._xla().model.config

    @property
    def artifact_path(self) -> Path | None:
        """Where the weights came from; None for a model made in memory."""
        return self._xla().model.path

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises: RequestError for a model without one."""
        return tokenizer_of(self._xla().model)

    def new_session(self, rows: int = 1) -> XlaSession:
        """Another session on the same weights, with a cache of its own for `rows` sequences."""
        if not is_whole(rows) or rows < 1:
            raise RequestError(f"{shown(rows)} rows", expected="a whole number, one or more")
        return XlaSession(self._xla().model, int(rows))

    def warmup(
        self,
        rows: int = 1,
        capacity: int | None = None,
        progress: Callable[[int, int, str], None] | None = None,
        *,
        wait: bool = True,
    ) -> int:
        """Compile, and run once, everything that requests of up to `rows` rows and `capacity` tokens need: at most 20
        executables.

        capacity: tokens a row, prompt and answer together; None is 2,048 or the model's context if that is less.
        progress: called with executables done, their number, and the last one's name. wait: False compiles in the
        background, most used first, runs nothing, and does not report progress; a request meanwhile waits for what it
        needs only. Returns their number.
        """
        model = self._xla().model
        if wait:
            return warm_up(model, rows, capacity, progress)
        if progress is not None:
            raise RequestError("warmup(wait=False, progress=...)", expected="progress only of what is waited for")
        return warm_later(model, rows, capacity)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        session: XlaSession | None = None,
        interventions: Sequence[Intervention] = (),
    ) -> Any:
        """Answer one prompt (a Generation), or a list of them as rows of one batch (a list of Generations).

        prompt: text (raw, with a BOS where the model adds one) or token ids. messages: through the chat template
        instead.
        params: None means the checkpoint's own generation_config.json, else greedy; `Generation.params` says which.
        session: where to continue; None starts anew in `rt.session` for one prompt, in a session of its own for
        several.
        interventions: changes to the pass, as data; `rows` in them are places in the list of prompts.

        Raises: RequestError and CapacityError before anything is dispatched.
        """
        with self._chosen(session).lock:  # calls from several threads take turns
            requests, single = requests_of(self._xla().model, prompt, params, messages, session)
            changes = check(self.config, interventions, len(requests))
            found = generation.generate(self._xla(), requests, session, changes)
        return found[0] if single else found

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        session: XlaSession | None = None,
        interventions: Sequence[Intervention] = (),
    ) -> Iterator[TokenEvent]:
        """The same as events while the answer grows; the texts of a sample's events add up to its `Generation.text`."""
        with self._chosen(session).lock:
            requests, _ = requests_of(self._xla().model, prompt, params, messages, session)
            changes = check(self.config, interventions, len(requests))
        return generation.stream(self._xla(), requests, session, changes)

    @property
    def functional(self) -> Functional:
        """The model as a pure function, for jax.jit, jax.grad and jax.vmap."""
        return Functional(self._xla().model)

    def score(self, texts: Sequence[Prompt], interventions: Sequence[Intervention] = ()) -> list[Score]:
        """How likely the model finds each text: log-probabilities in nat, one a token, None for the first.

        interventions: changes to the pass; `rows` in them are places in the list of texts.
        """
        return scoring.score(self._xla().model, texts, interventions)

    def inspect(
        self,
        prompt: Prompt | None = None,
        paths: Sequence[str | ObservationSelector] | ObservationRequest = (),
        interventions: Sequence[Intervention] = (),
        *,
        messages: Sequence[Message] | None = None,
        budget_bytes: int = BUDGET_BYTES,
    ) -> ObservationSet:
        """What one pass over a prompt holds at `paths`, in a session of its own. Blocks.

        paths: each means itself and all below it, `*` any layer; or an ObservationRequest, which has its own budget.
        interventions: changes to the pass, which are seen. budget_bytes: most that the observations may take.
        Raises: RequestError and CapacityError before anything is dispatched.
        """
        model = self._xla().model
        (request, *others), single = requests_of(model, prompt, None, messages, None, room=0)
        if not single or others:
            raise RequestError("a list of prompts to inspect", expected="one prompt", fix="inspect them one by one")
        if not isinstance(paths, ObservationRequest):
            paths = ObservationRequest.selected(paths, budget_bytes=budget_bytes)
        session = XlaSession(model)
        try:
            return session.inspect_prefill(PrefillInput(request.tokens), paths, interventions).observations
        finally:
            session.close()

    def close(self) -> None:
        """Free the device memory: sessions, weights, executables. Further calls raise."""
        if isinstance(self._session, XlaSession):
            self._session.model.close()  # closes its sessions, this one among them
        else:
            self._session.close()

    def __enter__(self) -> "ModelRuntime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _xla(self) -> XlaSession:
        if not isinstance(self._session, XlaSession):
            raise RequestError(
                f"{type(self._session).__name__} has no text side", fix="use prefill and decode, or an XlaBackend"
            )
        return self._session

    def _chosen(self, session: Any) -> XlaSession:
        own = self._xla()
        if session is None:
            return own
        if not isinstance(session, XlaSession) or session.model is not own.model:
            raise RequestError("session= is no session of this model", fix="take one with rt.new_session()")
        return session

    def _repr_html_(self) -> str:
        model = self._xla().model
        held = {} if model.closed else named(model.weights)
        leaves = [(name, tuple(leaf.shape), stored(leaf), leaf.nbytes) for name, leaf in held.items()]
        return weights_html(str(model.path or "model in memory"), describe(model.config), leaves)


@contextmanager
def _closed_on_failure(made: Any) -> Iterator[None]:
    """Close `made` when the block fails, so that no device memory waits for a traceback to be forgotten. The model of
    another backend may have nothing to close."""
    try:
        yield
    except BaseException:
        close = getattr(made, "close", None)
        if close is not None:
            close()
        raise


def _check_same(what: str, realised: SessionCapabilities, admitted: SessionCapabilities) -> None:
    """Raises: SessionCapabilityError for any difference: what was not admitted was not planned for either."""
    if realised != admitted:
        raise SessionCapabilityError(
            f"{what} offers {realised}",
            expected=f"exactly the admitted {admitted}",
            fix="correct what the backend declares",
        )


def load(
    path_or_id: str | os.PathLike[str],
    *,
    device: Any = None,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    quantize: str = "auto",
    prepare: bool = False,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelRuntime:
    """Load a model: a demo name, a Hugging Face id, a directory, a .gguf file, or an Orbax directory.

    device: a jax.Device, or "cpu", "gpu", "gpu:1"; None is JAX's default. dtype: "auto", "float32" or "bfloat16";
    kv_dtype also "int8", with a scale for every head of every token. quantize: "auto" keeps packed weights packed where
    that pays (on CPU, unless a dtype is named), "none" unpacks them, "keep" never does; "int8" and "int4" pack any
    checkpoint's weights in groups of 32. On a GPU "int8", and "fp8", have a scale for every output instead.
    prepare: compile what a first prompt needs in the background while the weights are read, for a program that is
    going to generate. progress: called with the bytes of weights placed and their total.

    Turns on JAX's persistent compile cache, in a private directory, unless one is configured.
    Raises: ArtifactError for what cannot be read, UnsupportedModel for what jaxrt does not do.
    """
    compile_cache.enable()
    path = resolve(path_or_id, revision=revision)
    options = LoadOptions(dtype, kv_dtype, quantize, prepare, progress=progress)  # type: ignore[arg-type]
    return ModelRuntime.load(XlaBackend(device), path, options)
