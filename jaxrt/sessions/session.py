"""`XlaSession`: one context over one model's weights, with a cache of one or more rows. Submits; blocks only where it
must read."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from jaxrt import knobs as knob_arrays
from jaxrt.context import InferenceContext
from jaxrt.contracts import SessionCapabilities, Submission
from jaxrt.decode_session import FIRST, Bucket
from jaxrt.errors import CapacityError, RequestError
from jaxrt.models.steps import FREE
from jaxrt.observations import LOGITS_PATH, ObservationSet, TensorObservation
from jaxrt.program import Plan
from jaxrt.requests import is_list, is_whole, shown
from jaxrt.sampling import Knobs
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.outputs import DecodeInput, PrefillInput, XlaOutput, submitted

CAPABILITIES = SessionCapabilities(persistent_cache=True, output_observation=True)
# A session of several rows prefills in a cache of its own, one row wide, and moves the result into its slot.
LANE = {"kv": "lane_kv", "state": "lane_state"}


@dataclass(eq=False)
class _Row:
    """The host's mirror of one row: always a prefix of what the device holds."""

    cached: list[int] = field(default_factory=list)  # tokens in the cache
    pending: int | None = None  # sampled or given last; not in the cache yet
    ahead: int = 0  # positions submitted and not read yet

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.cached, *(() if self.pending is None else (self.pending,)))

    def push(self, token: int) -> None:
        if self.pending is not None:
            self.cached.append(self.pending)
        self.pending = token

    def keep(self, length: int) -> None:
        if length <= len(self.cached):
            self.cached, self.pending = self.cached[:length], None


@dataclass(frozen=True, eq=False)
class _Unread:
    output: XlaOutput
    rows: tuple[int, ...]  # whose tokens they are, in the output's order
    positions: int
    forced: tuple[int, ...] = ()


class XlaSession:
    """A BackendSession on XLA devices. Its context holds weights, cache and row state; its decode session the plans.

    Calls from several threads take turns. Sessions on the same model run side by side.
    """

    def __init__(self, model: XlaModel, rows: int = 1) -> None:
        model.check_open()
        self.model = model
        self.rows = rows
        self.capacity = 0
        self.lock = threading.RLock()
        self.context = InferenceContext(model.device)
        self.context["weights"] = model.weights
        self.context.put_decode_session(model.decode_session)
        self._mirror = [_Row() for _ in range(rows)]
        self._unread: deque[_Unread] = deque()
        self._torn = False  # a submission was interrupted: the device may be ahead of the mirror
        self._closed = False
        self.owner: object | None = None  # the request it is generating for

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

    def keep(self, lengths: Sequence[int], pending: Sequence[int | None] = ()) -> None:
        """Keep the first lengths[b] tokens of row b, and tell the device. Blocks while submissions are under way.

        pending: tokens to put after them that are not in the cache yet.
        """
        self.settle()
        for row, length in zip(self._mirror, lengths, strict=True):
            row.keep(length)
        for row, token in zip(self._mirror, pending, strict=False):
            row.pending = row.pending if token is None else token
        self._tell_device()

    def reset(self) -> None:
        """Forget everything, lost buffers included: afterwards an empty session on the same weights."""
        with self.lock:
            if self._closed:
                self.check_usable()
            self.owner = None
            self._forget()

    def start_anew(self, tokens: int) -> None:
        """Empty the session for a request of `tokens` in the cache, at the smallest capacity that holds them."""
        wanted = self._capacity_for(tokens)
        if self.capacity == wanted and "kv" in self.context and "state" in self.context and not self._torn:
            self.keep([0] * self.rows)
        else:
            self._forget()

    def close(self) -> None:
        """Free the session's device memory; the weights stay with the model."""
        with self.lock:
            self._unread.clear()
            self.context.clear_persistent()
            self.context.put_decode_session(None)
            self._closed = True

    # --- BackendSession -------------------------------------------------------------------------------------------

    def prefill(self, input: PrefillInput) -> Submission[XlaOutput]:
        """Append tokens; the logits are those after each row's last one. Nothing blocks but a first compile.

        Raises: RequestError for no tokens, or ids outside the vocabulary; CapacityError past the model's context.
        """
        with self.lock:
            self.check_usable()
            prompts = self._per_row(_checked(input, PrefillInput).tokens)
            if not any(prompts):
                raise RequestError("a prefill without tokens", expected="at least one")
            self._begin([len(prompt) for prompt in prompts])
            knobs = knob_arrays.neutral(1, self.model.config.vocab)
            parts = [self.admit((row,), prompt, [knobs]) for row, prompt in enumerate(prompts) if prompt]
            logits = tuple(part.logits[-1] for part in parts)
            return submitted(XlaOutput(logits, tuple(part.packed[-1] for part in parts), by_row=True))

    def decode(self, input: DecodeInput) -> Submission[XlaOutput]:
        """One or more positions of every row: of the given tokens, or greedy from where the session stands.

        Raises: RequestError for bad ids, lists of unequal length, or nothing to go on from; CapacityError past the
        context.
        """
        with self.lock:
            self.check_usable()
            knobs = knob_arrays.neutral(self.rows, self.model.config.vocab)
            if _checked(input, DecodeInput).tokens is None:
                if not is_whole(input.positions) or input.positions < 1:
                    raise RequestError(f"{shown(input.positions)} positions", expected="a whole number, one or more")
                self._begin([input.positions] * self.rows)
                outputs = [self.step(count, knobs) for count in self._calls(input.positions)]
                return submitted(XlaOutput(outputs[-1].logits, tuple(part for o in outputs for part in o.packed)))
            prompts = self._per_row(input.tokens)
            if len({len(prompt) for prompt in prompts}) != 1 or not prompts[0]:
                found = [len(prompt) for prompt in prompts]
                raise RequestError(f"{found} tokens a row", expected="the same number for each, one or more")
            self._begin([len(prompt) for prompt in prompts])
            outputs = [self.step(1, knobs, forced) for forced in zip(*prompts, strict=True)]
            logits = tuple(output.logits[0] for output in outputs)
            return submitted(XlaOutput(logits, tuple(output.packed[0] for output in outputs)))

    def observe_output(self, output: XlaOutput) -> ObservationSet:
        """`model.logits`, float32 [B, T, V]: after each of T given tokens, or after the last position alone. Blocks."""
        return ObservationSet({LOGITS_PATH: TensorObservation(output.read_logits())})

    # --- what generation drives -----------------------------------------------------------------------------------

    def admit(self, rows: Sequence[int], tokens: Sequence[int], knobs: Sequence[Knobs], *, score: int = 0) -> XlaOutput:
        """Append `tokens` to the given rows, prefilled once, and sample each row's next token by its own one-row knobs.

        score: 1 also measures how likely each token's successor is, 2 names the likeliest ones too; the last has none.
        Output: logits of each chunk's last token; packed of the rows' sampled tokens, by row.
        """
        self.check_usable()
        if any(row in unread.rows for unread in self._unread for row in rows):
            self.settle()
        self._check_tokens(tokens)
        first = self._mirror[rows[0]]
        self.reserve(len(first.cached) + len(tokens))
        with self._submitting():
            lane = {} if self.rows == 1 else LANE
            if lane:
                self._fill_lane(rows[0])
            first.pending = None
            parts = self._prefill(first, tokens, score, lane)
            logits = tuple(part["logits"][0] for part, _ in parts)
            packed = ()
            for row, one_row in zip(rows, knobs, strict=True):
                given = {"logits": logits[-1:], "knobs": _flat(one_row)}
                packed += self.context.run(self.model.decode_session.plan(FIRST), given, {}, lane)["packed"]
                if lane:
                    self._move(row)
                    self._mirror[row].cached = [*first.cached]
            scores = tuple((part["scores"][0], count) for part, count in parts) if score else ()
            output = XlaOutput(logits, packed, scores, by_row=True)
            self._unread.append(_Unread(output, tuple(rows), positions=0))
        return output

    def step(
        self, positions: int, knobs: Knobs, forced: Sequence[int] | None = None, reach: int | None = None
    ) -> XlaOutput:
        """Submit up to `positions` further positions of every row that is not done, in one call.

        forced: per row a token to feed first in place of the sampled one, FREE, or HALT (that row makes no more steps).
        reach: most tokens any row will have in the cache then, where the knobs' limits end rows before `positions`.
        Raises: CapacityError when a row would run past the model's context.
        """
        self.check_usable()
        forced = tuple(forced) if forced is not None else (FREE,) * self.rows
        self._check_tokens([token for token in forced if token >= 0])
        going = [index for index, token in enumerate(forced) if token >= FREE]
        begun = {index for unread in self._unread for index in unread.rows}
        if any(forced[i] == FREE and self._mirror[i].pending is None and i not in begun for i in going):
            raise RequestError("nothing to go on from", fix="prefill a prompt first, or give the tokens to decode")
        self.reserve(max((self._length(i) + positions for i in going), default=0) if reach is None else reach)
        counted = self.model.policy.platform.counted
        size = next(size for size in self.model.policy.platform.positions if size >= positions)
        with self._submitting():
            given = {"knobs": _flat(knobs), "forced": (np.array(forced, np.int32),)}
            made = self._plan("decode", self.rows, self.capacity, size)
            found = self.context.run(made, given, {"count": positions} if counted else {})
            output = XlaOutput(found["logits"], found["packed"])
            for index in going:
                self._mirror[index].ahead += positions if counted else size
            self._unread.append(_Unread(output, tuple(range(self.rows)), positions if counted else size, forced))
        return output

    def collect(self, output: XlaOutput) -> np.ndarray:
        """A submission's packed columns, int32 [rows, n, C]; it and all before it are noted in the mirror. Blocks."""
        while any(unread.output is output for unread in self._unread):
            self._note_oldest()
        return output.read()

    def settle(self) -> None:
        """Read whatever is under way. Blocks."""
        while self._unread:
            self._note_oldest()

    def anticipate(self, prompts: Sequence[int], reach: int, end: int) -> None:
        """Start compiling in the background what prompts of these lengths need: first for `reach` tokens, then up to
        `end`."""
        policy = self.model.widen(self.rows, min(end, self.model.config.context))
        first, last = policy.capacity_for(reach), policy.capacity_for(min(end, self.model.config.context))
        size = policy.platform.positions[-1]
        widths = sorted({1, self.rows})
        steps = [*pairwise(rung for rung in policy.capacities if rung <= first)]
        found = [] if self.capacity else [Bucket("make", width, policy.capacities[0]) for width in widths]
        found += [Bucket("grow", width, *step) for step in steps if step[0] >= self.capacity for width in widths]
        found += [Bucket("prefill", 1, first, n) for n in sorted({n for p in prompts for n in policy.chunks(p)})]
        found += [FIRST, *([Bucket("move", self.rows, first)] if self.rows > 1 else [])]
        found.append(Bucket("decode", self.rows, first, size))
        for smaller, larger in [*pairwise(rung for rung in policy.capacities if first <= rung <= last)][:1]:
            found += [Bucket("grow", self.rows, smaller, larger), Bucket("decode", self.rows, larger, size)]
        self.model.decode_session.prepare(found)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in every row, growing by copying. Raises: CapacityError past the model's context."""
        wanted = self._capacity_for(tokens)
        if self.capacity >= wanted and "kv" in self.context:
            return
        lanes = ((self.rows, {}),) if self.rows == 1 else ((self.rows, {}), (1, LANE))
        start = self.capacity or self.model.policy.capacities[0]
        rungs = [start, *(rung for rung in self.model.policy.capacities if start < rung <= wanted)]
        plans = []  # all of them before anything changes: compiling may be refused, or interrupted
        for rows, names in lanes:
            plans += [] if self.capacity else [(self._plan("make", rows, rungs[0]), names)]
            plans += [(self._plan("grow", rows, *step), names) for step in pairwise(rungs)]
        with self._submitting():
            for made, names in plans:
                targets = self.context.run(made, {}, {}, names)
                for slot in made.targets:
                    name = slot.name.removesuffix("_next")
                    self.context.hold(names.get(name, name), targets[slot.name], slot.tree)
            self.capacity = wanted

    # --- inside ---------------------------------------------------------------------------------------------------

    def _begin(self, added: Sequence[int]) -> None:
        """Before a direct call that appends added[b] tokens to row b: all of it must fit, and a request that was
        generating here has ended. Raises: CapacityError."""
        self._capacity_for(max(self._length(index) + count for index, count in enumerate(added) if count))
        self.owner = None

    def _length(self, index: int) -> int:
        """Tokens of a row in the cache once everything submitted is done."""
        return len(self._mirror[index].cached) + self._mirror[index].ahead

    def _note_oldest(self) -> None:
        unread = self._unread[0]
        packed = unread.output.read()  # an interrupt while waiting leaves it unread
        try:
            self._unread.popleft()
            for position, index in enumerate(unread.rows):
                row = self._mirror[index]
                row.ahead = max(0, row.ahead - unread.positions)
                if unread.forced and unread.forced[index] >= 0:
                    row.pending = unread.forced[index]
                for token in packed[position, :, 0]:
                    if token >= 0:
                        row.push(int(token))
        except BaseException:  # interrupted half way: what follows no longer joins what was noted
            self._unread.clear()
            self._torn = True
            raise

    def _forget(self) -> None:
        self._unread.clear()
        self._mirror = [_Row() for _ in range(self.rows)]
        for name in ("kv", "state", *LANE.values()):
            self.context.discard(name)
        self.capacity, self._torn = 0, False

    def _capacity_for(self, tokens: int) -> int:
        context = self.model.config.context
        if tokens > context:
            raise CapacityError(
                f"{tokens:,} tokens", expected=f"at most {context:,}, the model's context", fix="shorten the prompt"
            )
        return self.model.widen(self.rows, tokens).capacity_for(tokens)

    def _plan(self, program: str, rows: int, capacity: int, tokens: int = 0) -> Plan:
        return self.model.decode_session.plan(Bucket(program, rows, capacity, tokens))  # type: ignore[arg-type]

    def _prefill(
        self, row: _Row, tokens: Sequence[int], score: int, lane: dict[str, str]
    ) -> list[tuple[dict[str, tuple], int]]:
        """Submit the chunks of a prompt: each one's targets, with its number of real tokens."""
        parts, start = [], 0
        for length in self.model.policy.chunks(len(tokens)):
            chunk = tokens[start : start + length]
            padded, successors = np.zeros((1, length), np.int32), np.zeros(length, np.int32)
            padded[0, : len(chunk)] = chunk
            successors[: len(chunk)] = [*tokens[start + 1 : start + length + 1], 0][: len(chunk)]
            given = {"tokens": (padded,), "following": (successors,)}
            made = self._plan("prefill", 1, self.capacity, length)
            parts.append((self.context.run(made, given, {"count": len(chunk), "score": score}, lane), len(chunk)))
            row.cached += [int(token) for token in chunk]
            start += length
        return parts

    def _fill_lane(self, row: int) -> None:
        """Bring the row into the lane, or empty the lane for a row that holds nothing."""
        if self._mirror[row].cached:
            self._move(row, take=1)
        else:
            self._write_state(LANE["state"], [_Row()])

    def _move(self, row: int, take: int = 0) -> None:
        self.context.run(self._plan("move", self.rows, self.capacity), {}, {"row": row, "take": take})

    def _write_state(self, name: str, mirror: Sequence[_Row]) -> None:
        self.context[name] = self.context[name].replace(
            lengths=np.array([len(row.cached) for row in mirror], np.int32),
            tokens=np.array([row.pending or 0 for row in mirror], np.int32),
            done=np.array([row.pending is None for row in mirror]),
        )

    def _tell_device(self) -> None:
        for row in self._mirror:
            row.ahead = 0
        if self.capacity:
            self._write_state("state", self._mirror)

    def check_usable(self) -> None:
        """Raises: RequestError when closed. After an interrupted submission the device is told what the mirror
        holds."""
        self.model.check_open()
        if self._closed:
            raise RequestError("this session is closed", fix="take another with rt.new_session()")
        if self._torn:
            self.settle()
            self._tell_device()
            self._torn = False

    @contextmanager
    def _submitting(self) -> Iterator[None]:
        """Marks the session torn unless the block ends: an interrupt may leave the device ahead of the mirror."""
        torn, self._torn = self._torn, True
        yield
        self._torn = torn

    def _calls(self, positions: int) -> list[int]:
        sizes = self.model.policy.platform.positions
        counts = []
        while positions:
            size = sizes[-1] if self.model.policy.platform.counted else max(s for s in sizes if s <= positions)
            counts.append(min(size, positions))
            positions -= counts[-1]
        return counts

    def _per_row(self, tokens: Sequence) -> list[list[int]]:
        if not is_list(tokens):
            raise RequestError(
                f"tokens of type {type(tokens).__name__}", expected="token ids, or one list of them a row"
            )
        nested = [isinstance(entry, Sequence | np.ndarray) for entry in tokens]
        if all(nested) and nested:
            prompts = [list(entry) for entry in tokens]
        elif self.rows == 1 and not any(nested):
            prompts = [list(tokens)]
        else:
            raise RequestError("token ids that are not one list a row", expected=f"{self.rows} lists of token ids")
        if len(prompts) != self.rows:
            raise RequestError(f"{len(prompts)} lists of tokens", expected=f"one for each of {self.rows} rows")
        for prompt in prompts:
            self._check_tokens(prompt)
        return prompts

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        """XLA clamps ids outside the table without a word, so they are refused here."""
        vocab = self.model.config.vocab
        for token in tokens:
            if not is_whole(token) or not 0 <= token < vocab:
                raise RequestError(f"token id {shown(token)}", expected=f"a whole number from 0 to {vocab - 1}")


def _checked(input: Any, kind: type) -> Any:
    if not isinstance(input, kind):
        raise RequestError(f"an input of type {type(input).__name__}", expected=f"a {kind.__name__}")
    return input


def _flat(knobs: Knobs) -> tuple:
    return tuple(jax.tree.leaves(knobs))
