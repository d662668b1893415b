"""`XlaSession`: a session as users have it: prefill and decode, the inside of both, and sessions as values."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrt import knobs as knob_arrays
from jaxrt.contracts import SessionCapabilities, Submission
from jaxrt.edits import Lowered, Places, check, lower
from jaxrt.errors import CapacityError, RequestError
from jaxrt.interventions import Intervention
from jaxrt.observations import LOGITS_PATH, InspectedOutput, ObservationRequest, ObservationSet, TensorObservation
from jaxrt.requests import is_whole, shown
from jaxrt.sessions import inspection
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.outputs import DecodeInput, PrefillInput, XlaOutput, submitted
from jaxrt.sessions.rows import per_row
from jaxrt.sessions.state import SessionState
from jaxrt.sessions.submitting import NO_EDITS, RowSession

CAPABILITIES = SessionCapabilities(persistent_cache=True, output_observation=True, activation_inspection=True)


class XlaSession(RowSession):
    """A BackendSession on XLA devices. Its context holds weights, cache and row state; its decode session the plans.

    Calls from several threads take turns. Sessions on the same model run side by side.
    """

    def __init__(self, model: XlaModel, rows: int = 1) -> None:
        super().__init__(model, rows)
        model.sessions.add(self)

    # --- what it holds --------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in the cache, int [B]. Blocks while submissions are under way."""
        with self.lock:
            self.settle()
            return np.array([len(row.cached) for row in self._mirror])

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of each row, with the last sampled one that is not in the cache yet. Blocks as `lengths` does."""
        with self.lock:
            self.settle()
            return tuple(row.tokens for row in self._mirror)

    @property
    def positions(self) -> int:
        """Most positions of one decode call."""
        return self.model.policy.platform.positions[-1]

    @property
    def closed(self) -> bool:
        return self._closed

    def capabilities(self) -> SessionCapabilities:
        return CAPABILITIES

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of every row. The cache is not touched: later entries are simply out of sight.

        Raises: RequestError below zero or past the end of a row.
        """
        with self.lock:
            self.check_usable()
            self.settle()
            shortest = min(len(row.tokens) for row in self._mirror)
            if not is_whole(length) or not 0 <= length <= shortest:
                raise RequestError(f"rewind to {shown(length)}", expected=f"a length between 0 and {shortest} tokens")
            self.owner = None
            self.keep([int(length)] * self.rows)

    def reset(self) -> None:
        """Forget everything, lost buffers included: afterwards an empty session on the same weights."""
        with self.lock:
            if self._closed:
                self.check_usable()
            self.owner = None
            self._forget()

    def close(self) -> None:
        """Free the session's device memory; the weights stay with the model."""
        with self.lock:
            self._unread.clear()
            self.context.clear_persistent()
            self.context.put_decode_session(None)
            self._closed = True

    # --- sessions as values ---------------------------------------------------------------------------------------

    def fork(self, rows: int | None = None) -> "XlaSession":
        """Another session that stands where this one does. The cache is shared until either writes, and copied then.

        rows: for a session of one row, how many rows the fork has, all alike. None: as many as this session.
        Raises: RequestError when closed, while a request is generating here, or for another number of rows.
        """
        with self.lock:
            self._check_idle("fork")
            if rows is not None and (not is_whole(rows) or rows < 1 or self.rows not in (1, rows)):
                expected = f"{self.rows}, as many as there are" if self.rows > 1 else "a whole number, one or more"
                raise RequestError(f"a fork of {shown(rows)} rows", expected=expected)
            other = XlaSession(self.model, int(rows or self.rows))
            other._share(self)
            return other

    def snapshot(self) -> SessionState:
        """All that this session holds, on the host: tokens, the used part of the cache, the sampler's state. Blocks.

        Raises: RequestError when closed, or while a request is generating here.
        """
        with self.lock:
            self._check_idle("snapshot")
            kv = self.context["kv"] if self.capacity else None
            sampler = self.context["state"].sampler if self.capacity else None
            return SessionState.of(self.model, [row.copy() for row in self._mirror], self.capacity, kv, sampler)

    def resume(self, state: SessionState, capacity: int | None = None) -> None:
        """Take what a state holds in place of what is here. Rows beyond the state's stay empty.

        capacity: tokens to make room for; None: as many as there was room for.
        Raises: RequestError for a state of another model, or of more rows than there are; CapacityError.
        """
        with self.lock:
            self._check_idle("resume")
            state.check(self.model, self.rows)
            longest = int(max(state.lengths))
            if capacity is not None and capacity < longest:
                raise CapacityError(f"capacity={capacity}", expected=f"{longest:,} or more, the tokens of the state")
            self._load(state, self._capacity_for(capacity or state.capacity))

    def _check_idle(self, what: str) -> None:
        self.check_usable()
        if self.owner is not None:
            raise RequestError(f"{what} of a session that is generating", fix="finish the answer, or close its stream")
        self.settle()

    # --- BackendSession -------------------------------------------------------------------------------------------

    def prefill(self, input: PrefillInput) -> Submission[XlaOutput]:
        """Append tokens; the logits are those after each row's last one, and the likeliest next token is noted as the
        one that decoding goes on from (`rewind` drops it). Blocks for a first compile, and until what was submitted
        before is done.

        Raises: RequestError for no tokens, or ids outside the vocabulary; CapacityError past the model's context.
        """
        with self.lock:
            return submitted(self._prefill_rows(self._prompts(input)))

    def decode(self, input: DecodeInput) -> Submission[XlaOutput]:
        """One or more positions of every row: of the given tokens, or greedy from where the session stands.

        Raises: RequestError for bad ids, lists of unequal length, or nothing to go on from; CapacityError past the
        context.
        """
        with self.lock:
            return submitted(self._decode_rows(*self._positions(input)))

    def inspect_prefill(
        self, input: PrefillInput, request: ObservationRequest, interventions: Sequence[Intervention] = ()
    ) -> InspectedOutput[XlaOutput]:
        """`prefill` with a look inside, and changes to it. Blocks until all of it is on the host.

        Observations are of the tokens given: [B, T, ...], rows of several being of one length.
        Raises: as prefill; RequestError for unknown paths or bad interventions, CapacityError beyond the request's
        budget, before anything runs.
        """
        with self.lock:
            prompts = self._prompts(input)
            ends = [self._length(row) + len(prompt) for row, prompt in enumerate(prompts)]
            lowered = self._lowered(interventions, ends, "prefill")
            paths = inspection.admit(self.model.config, request, [len(prompt) for prompt in prompts], ends)
            output = self._prefill_rows(prompts, paths, lowered)
            return InspectedOutput(output, inspection.of_prompts(output, paths, ends))

    def inspect_decode(
        self, input: DecodeInput, request: ObservationRequest, interventions: Sequence[Intervention] = ()
    ) -> InspectedOutput[XlaOutput]:
        """`decode`, a position at a time, with a look inside, and changes to it. Blocks; raises as inspect_prefill."""
        with self.lock:
            count, forced = self._positions(input)
            ends = [self._length(row) + count for row in range(self.rows)]
            lowered = self._lowered(interventions, ends, "decode")
            paths = inspection.admit(self.model.config, request, [count] * self.rows, ends)
            output = self._decode_rows(count, forced, paths, lowered)
            return InspectedOutput(output, inspection.of_positions(output, paths, ends))

    def observe_output(self, output: XlaOutput) -> ObservationSet:
        """`model.logits`, float32 [B, T, V]: after each of T given tokens, or after the last position alone. Blocks."""
        return ObservationSet({LOGITS_PATH: TensorObservation(output.read_logits())})

    # --- inside ---------------------------------------------------------------------------------------------------

    def _prompts(self, input: PrefillInput) -> list[list[int]]:
        self.check_usable()
        prompts = per_row(_checked(input, PrefillInput).tokens, self.rows, self.model.config.vocab)
        if not any(prompts):
            raise RequestError("a prefill without tokens", expected="at least one")
        return prompts

    def _positions(self, input: DecodeInput) -> tuple[int, list[tuple[int, ...]]]:
        """How many positions, and the tokens of each where they are given."""
        self.check_usable()
        if _checked(input, DecodeInput).tokens is None:
            if not is_whole(input.positions) or input.positions < 1:
                raise RequestError(f"{shown(input.positions)} positions", expected="a whole number, one or more")
            return int(input.positions), []
        prompts = per_row(input.tokens, self.rows, self.model.config.vocab)
        if len({len(prompt) for prompt in prompts}) != 1 or not prompts[0]:
            found = [len(prompt) for prompt in prompts]
            raise RequestError(f"{found} tokens a row", expected="the same number for each, one or more")
        return len(prompts[0]), list(zip(*prompts, strict=True))

    def _lowered(self, interventions: Sequence[Intervention], ends: Sequence[int], phase: Any) -> Lowered:
        config = self.model.config
        checked = check(config, interventions, self.rows)
        return lower(config, checked, Places(tuple(range(self.rows)), tuple(ends)), phase).placed(self.model.device)

    def _prefill_rows(
        self, prompts: Sequence[Sequence[int]], observed: Sequence[str] = (), edits: Lowered = NO_EDITS
    ) -> XlaOutput:
        self._begin([len(prompt) for prompt in prompts])
        knobs = knob_arrays.neutral(1, self.model.config.vocab)
        parts = [
            self.admit((row,), prompt, [knobs], observed=observed, edits=edits.row(row))
            for row, prompt in enumerate(prompts)
            if prompt
        ]
        return XlaOutput(
            logits=tuple(part.logits[-1] for part in parts),
            packed=tuple(part.packed[-1] for part in parts),
            observed=tuple(seen for part in parts for seen in part.observed),
            by_row=True,
        )

    def _decode_rows(
        self,
        count: int,
        forced: Sequence[tuple[int, ...]],
        observed: Sequence[str] = (),
        edits: Lowered = NO_EDITS,
    ) -> XlaOutput:
        """Given tokens, and observed ones, a position a call; others as many as a call takes."""
        self._begin([count] * self.rows)
        self.note_finished()
        knobs = knob_arrays.neutral(self.rows, self.model.config.vocab)
        inside: dict[str, Any] = {"observed": observed, "edits": edits}
        if forced:
            outputs = [self.step(1, knobs, tokens, **inside) for tokens in forced]
            packed = tuple(output.packed[0] for output in outputs)
        else:
            calls = [1] * count if observed else self._calls(count)
            outputs = [self.step(positions, knobs, **inside) for positions in calls]
            packed = tuple(part for output in outputs for part in output.packed)
        logits = tuple(output.logits[0] for output in (outputs if forced or observed else outputs[-1:]))
        return XlaOutput(logits, packed, observed=tuple(seen for output in outputs for seen in output.observed))


def _checked(input: Any, kind: type) -> Any:
    if not isinstance(input, kind):
        raise RequestError(f"an input of type {type(input).__name__}", expected=f"a {kind.__name__}")
    return input
