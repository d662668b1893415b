"""A second backend, in NumPy alone: the contracts of documents 001 and 002 kept by other means than XLA's.

A submission is a value that is computed when somebody waits for it. For one sequence, in float64, on `tests.reference`;
so it is also what the taps and interventions of XLA sessions are held against.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxrt.artifacts.load import load_weights, open_checkpoint
from jaxrt.config import ModelConfig
from jaxrt.contracts import (
    BackendDescriptor,
    DeviceCapabilities,
    DeviceDescriptor,
    PreparedModel,
    SessionCapabilities,
    Submission,
)
from jaxrt.edits import check
from jaxrt.errors import CapacityError, ExecutionError, ModelLoadError, RequestError, SessionPoisoned
from jaxrt.interventions import Add, Apply, Intervention, MaskLogits, Replace, Scale, Zero
from jaxrt.models.reading import read_config
from jaxrt.observations import (
    LOGITS_PATH,
    InspectedOutput,
    ObservationRequest,
    ObservationSelector,
    ObservationSet,
    TensorObservation,
    dimensions,
    known_paths,
)
from jaxrt.requests import is_list, is_whole, shown
from jaxrt.weights import Weights
from tests import reference


@dataclass(frozen=True)
class Prompt:
    """Tokens to append; the logits are those after the last one."""

    tokens: Sequence[int]


@dataclass(frozen=True)
class Further:
    """Positions to decode: given tokens, with logits after each, or so many greedy ones, with logits after the last."""

    tokens: Sequence[int] | None = None
    positions: int = 1


@dataclass(frozen=True)
class NumpyOptions:
    """How to load."""

    required: SessionCapabilities = SessionCapabilities()


@dataclass(eq=False)
class NumpyModel:
    """A config with its weights: what the backend prepares, and what it makes of it."""

    config: ModelConfig
    weights: Weights
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class NumpyBackend:
    """inspection: whether its sessions can be looked into."""

    inspection: bool = True

    @property
    def offered(self) -> SessionCapabilities:
        return SessionCapabilities(True, True, self.inspection)

    def descriptor(self) -> BackendDescriptor:
        return BackendDescriptor("numpy", np.__version__)

    def devices(self) -> Iterable[tuple[DeviceDescriptor, DeviceCapabilities]]:
        yield DeviceDescriptor("0", "host", "cpu"), DeviceCapabilities(exact_completion=True)

    def prepare_model(self, config: NumpyModel) -> PreparedModel[NumpyModel]:
        return PreparedModel(NumpyModel(config.config, config.weights), self.offered)

    def create_session(self, model: PreparedModel[NumpyModel]) -> "NumpySession":
        return (InspectableNumpySession if self.inspection else NumpySession)(model.take())

    def session_capabilities(self, artifact: Path) -> SessionCapabilities:
        read_config(open_checkpoint(artifact))
        return self.offered

    def load_model(self, artifact: Path, options: NumpyOptions) -> PreparedModel[NumpyModel]:
        checkpoint = open_checkpoint(artifact)
        config = read_config(checkpoint)
        options.required.validate(self.offered)
        return self.prepare_model(NumpyModel(config, load_weights(checkpoint, config, place=lambda _, __, data: data)))


@dataclass(eq=False)
class Pass:
    """One submission: its own output, and its own completion. Computed once, after the passes before it."""

    config: ModelConfig
    weights: Weights
    before: "Pass | None"  # let go of once it has been computed
    tokens: Sequence[int]  # empty: greedy ones
    positions: int
    is_prompt: bool = False
    tap: reference.Tap = reference.untouched
    cache: reference.Cache | None = None
    logits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # [T, V]
    error: ExecutionError | None = None
    done: bool = False

    def is_complete(self) -> bool:
        return self.done

    def wait(self) -> None:
        """Raises: ExecutionError if this pass, or one before it, gave no numbers."""
        for one in reversed([*self._to_do()]):
            one._compute()
        if self.error is not None:
            raise self.error

    def _to_do(self) -> Iterator["Pass"]:
        one: Pass | None = self
        while one is not None and not one.done:
            yield one
            one = one.before

    def _compute(self) -> None:
        if self.before is not None and self.before.error is not None:
            error = self.before.error
            self.error = ExecutionError(f"a pass before this one failed: {error.found}", fix=error.fix)
        else:
            with np.errstate(invalid="ignore"):  # NaN is looked for here
                self._go_on_from(self.before)
            if np.isnan(self.logits).any():
                self.error = ExecutionError("logits that are not numbers", fix="correct the weights, then call reset()")
        self.before, self.done = None, True

    def _go_on_from(self, before: "Pass | None") -> None:
        cache = None if before is None else before.cache
        if self.tokens:
            self.logits, self.cache = self._forward(self.tokens, cache)
            return
        assert before is not None
        greedy, self.logits = [], before.logits
        for _ in range(self.positions):  # from the start each time, so that the tap sees all of them at once
            greedy.append(int(self.logits[-1].argmax()))
            self.logits, self.cache = self._forward(greedy, cache)

    def _forward(self, tokens: Sequence[int], cache: reference.Cache | None) -> tuple[np.ndarray, reference.Cache]:
        return reference.forward(self.config, self.weights, tokens, cache, self.tap)


class NumpySession:
    """A BackendSession of one sequence."""

    def __init__(self, model: NumpyModel) -> None:
        if model.closed:
            raise ModelLoadError("a closed model", fix="prepare it again")
        self.model = model
        self.closed = False
        self.reset()

    def capabilities(self) -> SessionCapabilities:
        return SessionCapabilities(persistent_cache=True, output_observation=True)

    def prefill(self, input: Prompt) -> Submission[Pass]:
        return self._submitted(self._begin(input, Prompt))

    def decode(self, input: Further) -> Submission[Pass]:
        return self._submitted(self._begin(input, Further))

    def observe_output(self, output: Pass) -> ObservationSet:
        output.wait()
        alone = output.is_prompt or not output.tokens
        return ObservationSet({LOGITS_PATH: TensorObservation(output.logits[-1 if alone else 0 :][None])})

    def reset(self) -> None:
        """An empty session on the same model, whatever happened."""
        self._last: Pass | None = None
        self._length = 0  # tokens in the cache once everything submitted is computed

    def close(self) -> None:
        self.reset()
        self.closed = True

    def _begin(self, input: Any, kind: type) -> Pass:
        """The pass that `input` asks for, checked and not submitted. Raises: RequestError, SessionPoisoned."""
        if self.closed or self.model.closed:
            raise RequestError("this session is closed", fix="prepare the model again")
        if self._last is not None and self._last.error is not None:
            raise SessionPoisoned(f"a session after a pass that failed: {self._last.error.found}", fix="call reset()")
        if not isinstance(input, kind):
            raise RequestError(f"an input of type {type(input).__name__}", expected=f"a {kind.__name__}")
        tokens = self._checked(input.tokens) if kind is Prompt or input.tokens is not None else ()
        positions = len(tokens) if tokens else input.positions
        if not tokens and self._last is None:
            raise RequestError("nothing to go on from", fix="prefill a prompt first")
        if not is_whole(positions) or positions < 1:
            raise RequestError(f"{shown(positions)} positions", expected="a whole number, one or more")
        config = self.model.config
        if self._length + positions > config.context:
            raise CapacityError(f"{self._length + positions:,} tokens", expected=f"at most {config.context:,}")
        return Pass(config, self.model.weights, self._last, tokens, positions, is_prompt=kind is Prompt)

    def _checked(self, tokens: Any) -> tuple[int, ...]:
        vocab = self.model.config.vocab
        if not is_list(tokens) or len(tokens) == 0:
            raise RequestError(f"tokens={shown(tokens)}", expected="token ids, one or more")
        for token in tokens:
            if not is_whole(token) or not 0 <= token < vocab:
                raise RequestError(f"token id {shown(token)}", expected=f"a whole number from 0 to {vocab - 1}")
        return tuple(int(token) for token in tokens)

    def _submitted(self, one: Pass) -> Submission[Pass]:
        self._last = one
        self._length += one.positions
        return Submission(one, one)


class InspectableNumpySession(NumpySession):
    """An InspectableBackendSession of one sequence."""

    def capabilities(self) -> SessionCapabilities:
        return SessionCapabilities(True, True, True)

    def inspect_prefill(
        self, input: Prompt, request: ObservationRequest, interventions: Sequence[Intervention] = ()
    ) -> InspectedOutput[Pass]:
        return self._inspected(self._begin(input, Prompt), request, interventions, "prefill")

    def inspect_decode(
        self, input: Further, request: ObservationRequest, interventions: Sequence[Intervention] = ()
    ) -> InspectedOutput[Pass]:
        return self._inspected(self._begin(input, Further), request, interventions, "decode")

    def _inspected(
        self,
        one: Pass,
        request: ObservationRequest,
        interventions: Sequence[Intervention],
        phase: Literal["prefill", "decode"],
    ) -> InspectedOutput[Pass]:
        changes = [c for c in check(one.config, interventions, 1) if c.phase in ("both", phase)]
        paths = request.paths(known_paths(len(one.config.layers)))
        end = self._length + one.positions
        needed = sum(4 * math.prod(shape(one.config, path, one.positions, end)) for path in paths)
        if needed > request.budget_bytes:
            raise CapacityError(f"{needed:,} bytes of observations", expected=f"at most {request.budget_bytes:,}")
        one.tap = looking = Looking(changes, self._length, end)
        self._submitted(one).wait()
        return InspectedOutput(
            one, ObservationSet({path: TensorObservation(looking.seen[path][None]) for path in paths})
        )


def shape(config: ModelConfig, path: str, tokens: int, attended: int) -> tuple[int, ...]:
    """Of what stands at `path` in a pass of one row, so many tokens, and so many attended to by the last of them."""
    widths = {"B": 1, "T": tokens, "S": attended, "D": config.width, "V": config.vocab}
    widths |= {"N": config.heads, "K": config.kv_heads, "H": config.head_width}
    return tuple(widths[letter] for letter in dimensions(path))


@dataclass
class Looking:
    """A tap that changes what stands at a path, and notes it. Positions of the pass are start, ..., end - 1."""

    changes: Sequence[Intervention]
    start: int
    end: int
    seen: dict[str, np.ndarray] = field(default_factory=dict)

    def __call__(self, path: str, x: np.ndarray) -> np.ndarray:
        turned = dimensions(path) == "BNTS"
        x = x.swapaxes(0, 1) if turned else x  # tokens first
        for change in self.changes:
            if ObservationSelector(change.path, exact=True).matches(path):
                x = self._changed(path, x, change)
        x = x.swapaxes(0, 1) if turned else x
        self.seen[path] = x
        return x

    def _changed(self, path: str, x: np.ndarray, change: Intervention) -> np.ndarray:
        """x [T, ...] with one intervention on the positions and heads that it names."""
        if change.rows is not None and 0 not in change.rows:
            return x
        given = change.value if isinstance(change, Replace) else getattr(change, "vector", 0)
        seen = isinstance(given, ObservationSet)
        values = given[path].data if seen else np.asarray(given)
        if dimensions(path) == "BNTS" and values.ndim == 4:
            values = values.swapaxes(1, 2)
        if values.ndim == x.ndim + 1:
            values = values[0]  # the row
        by_position = values.ndim == x.ndim and (seen or len(values) > 1)
        places = self._places(change, len(values) if by_position else self.end)
        chosen, value = np.zeros(x.shape, bool), np.zeros(x.shape)
        for order, place in enumerate(places):
            if self.start <= place < self.start + len(x):
                chosen[place - self.start] = True
                one = values[place if seen or change.positions is None else order] if by_position else values
                value[place - self.start] = one
        if getattr(change, "heads", None) is not None:
            chosen[:, [head for head in range(x.shape[1]) if head not in change.heads]] = False
        return np.where(chosen, formula(change, x, value), x)

    def _places(self, change: Intervention, count: int) -> Sequence[int]:
        """Absolute positions; of all, the first `count`."""
        if change.positions is None:
            return range(count)
        return [position + self.end if position < 0 else position for position in change.positions]


def formula(change: Any, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    """What an intervention makes of x."""
    match change:
        case Add():
            return x + change.strength * value
        case Scale():
            return x * change.factor
        case Zero():
            return x * (1 - change.strength)
        case Replace():
            return x + change.strength * (value - x)
        case MaskLogits():
            return np.where(np.isin(np.arange(x.shape[-1]), change.ids), -np.inf, x)
        case Apply():
            return np.asarray(change.fn(x.astype(np.float32)), np.float64)
    raise RequestError(f"an intervention of type {type(change).__name__}", expected="one of Add, Scale, ...")
