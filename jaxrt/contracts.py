"""The portable contracts of documents 001 and 002: what a backend and its sessions promise, whatever device they run
on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxrt.errors import ModelLoadError, SessionCapabilityError
from jaxrt.interventions import Intervention
from jaxrt.observations import InspectedOutput, ObservationRequest, ObservationSet

Model = TypeVar("Model")
Output = TypeVar("Output")


@dataclass(frozen=True)
class SessionCapabilities:
    """What a session can do beyond plain inference. Nothing is promised unless it is said."""

    persistent_cache: bool = False
    output_observation: bool = False
    activation_inspection: bool = False

    def validate(self, available: "SessionCapabilities") -> None:
        """Check that all of these are `available`. Raises: SessionCapabilityError naming the first that is missing."""
        for capability in fields(self):
            if getattr(self, capability.name) and not getattr(available, capability.name):
                raise SessionCapabilityError(
                    f"prepared session does not support required capability {capability.name}",
                    fix="choose a backend that offers it, or do without",
                )


@dataclass(frozen=True)
class BackendDescriptor:
    name: str
    version: str


@dataclass(frozen=True)
class DeviceDescriptor:
    id: str
    name: str
    family: str
    memory_bytes: int | None = None  # None where the device does not say


@dataclass(frozen=True)
class DeviceCapabilities:
    exact_completion: bool = False
    transfers: bool = False
    collectives: bool = False


@runtime_checkable
class Completion(Protocol):
    """Says when one submission is done: that one only."""

    def is_complete(self) -> bool:
        """Whether the work is done; never blocks."""
        ...

    def wait(self) -> None:
        """Blocks until the work is done. Raises: ExecutionError if it failed."""
        ...


@dataclass(frozen=True)
class Submission(Generic[Output]):
    """Work under way: its output on the device, and the completion that says when it may be read."""

    output: Output
    completion: Completion

    def wait(self) -> Output:
        """The output, once it is complete. Blocks. Raises: ExecutionError if the work failed."""
        self.completion.wait()
        return self.output


@dataclass(frozen=True, eq=False)
class PreparedModel(Generic[Model]):
    """A model ready for a session, with the capabilities its session was admitted for. The session consumes it."""

    model: Model
    capabilities: SessionCapabilities
    _left: list[None] = field(default_factory=lambda: [None], init=False, repr=False)  # sessions it still has

    def take(self) -> Model:
        """The model, for its one session. Raises: ModelLoadError the second time, from whichever thread."""
        try:
            self._left.pop()
        except IndexError:
            raise ModelLoadError(
                "this prepared model has its session already",
                expected="one session for each prepared model",
                fix="prepare or load the model again, or take another session from its runtime",
            ) from None
        return self.model


@runtime_checkable
class BackendSession(Protocol):
    """One model, one context, one cache. Inputs, outputs and completions are the backend's own."""

    def capabilities(self) -> SessionCapabilities:
        """Of this very session."""
        ...

    def prefill(self, input: Any) -> Submission:
        """Submit a prompt. Blocks at most for what was submitted before it."""
        ...

    def decode(self, input: Any) -> Submission:
        """Submit one or more further positions; nothing blocks."""
        ...

    def observe_output(self, output: Any) -> ObservationSet:
        """Bring an output to the host. Blocks: the one explicit synchronisation; plain inference never calls it."""
        ...

    def close(self) -> None:
        """Free what the session holds; further calls raise RequestError. Closing again does nothing."""
        ...


@runtime_checkable
class InspectableBackendSession(BackendSession, Protocol):
    """A session whose passes can be looked into and changed. Apart from plain submission, which pays nothing for it."""

    def inspect_prefill(
        self, input: Any, request: ObservationRequest, interventions: Sequence[Intervention] = ()
    ) -> InspectedOutput:
        """`prefill` with what the request means brought to the host, after the interventions. Blocks.

        Raises: RequestError for unknown paths, CapacityError beyond the request's budget, before anything runs.
        """
        ...

    def inspect_decode(
        self, input: Any, request: ObservationRequest, interventions: Sequence[Intervention] = ()
    ) -> InspectedOutput:
        """`decode` with what the request means brought to the host. Blocks; raises as inspect_prefill."""
        ...


@runtime_checkable
class BackendProvider(Protocol):
    """Devices, and the making of models and sessions on them."""

    def descriptor(self) -> BackendDescriptor: ...

    def devices(self) -> Iterable[tuple[DeviceDescriptor, DeviceCapabilities]]: ...

    def prepare_model(self, config: Any) -> PreparedModel: ...

    def create_session(self, model: PreparedModel) -> BackendSession:
        """The model's session. Consumes `model` by `take()`: a cache can never meet another model.

        Raises: ModelLoadError when it is consumed already.
        """
        ...


@runtime_checkable
class ModelLoadingBackend(BackendProvider, Protocol):
    """A backend that also reads checkpoints."""

    def session_capabilities(self, artifact: Path) -> SessionCapabilities:
        """What a session of this artifact would offer, from its headers alone."""
        ...

    def load_model(self, artifact: Path, options: Any) -> PreparedModel:
        """Read the artifact. Raises: ArtifactError, UnsupportedModel; ModelLoadError before any weight is read."""
        ...
