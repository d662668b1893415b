"""The portable contracts of documents 001 and 002: what a backend and its sessions promise, whatever device they run
on."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxrt.errors import SessionCapabilityError
from jaxrt.observations import ObservationSet

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


@dataclass(frozen=True)
class PreparedModel(Generic[Model]):
    """A model ready for a session, with the capabilities its session was admitted for. A session consumes it."""

    model: Model
    capabilities: SessionCapabilities


@runtime_checkable
class BackendSession(Protocol):
    """One model, one context, one cache. Inputs, outputs and completions are the backend's own."""

    def capabilities(self) -> SessionCapabilities:
        """Of this very session."""
        ...

    def prefill(self, input: Any) -> Submission:
        """Submit a prompt; nothing blocks."""
        ...

    def decode(self, input: Any) -> Submission:
        """Submit one or more further positions; nothing blocks."""
        ...

    def observe_output(self, output: Any) -> ObservationSet:
        """Bring an output to the host. Blocks: the one explicit synchronisation; plain inference never calls it."""
        ...


@runtime_checkable
class BackendProvider(Protocol):
    """Devices, and the making of models and sessions on them."""

    def descriptor(self) -> BackendDescriptor: ...

    def devices(self) -> Iterable[tuple[DeviceDescriptor, DeviceCapabilities]]: ...

    def prepare_model(self, config: Any) -> PreparedModel: ...

    def create_session(self, model: PreparedModel) -> BackendSession:
        """The model's session. Consumes `model`: a cache can never meet another model."""
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
