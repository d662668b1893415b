"""Submitting programs over rows, and keeping the host's mirror of them: what generation drives. Blocks only where it
must read."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from jaxrt.buckets import FIRST, Bucket
from jaxrt.context import InferenceContext
from jaxrt.decode_session import Allocation, DecodeSession
from jaxrt.edits import Lowered
from jaxrt.errors import CapacityError, ContextError, RequestError, TopologyChanged
from jaxrt.models.steps import FREE
from jaxrt.program import Plan
from jaxrt.sampling import Knobs
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.outputs import XlaOutput
from jaxrt.sessions.rows import Row, Unread, check_tokens
from jaxrt.sessions.state import SessionState
from jaxrt.taps import Taps

# A session of several rows prefills in a cache of its own, one row wide, and moves the result into its slot.
LANE = {"kv": "lane_kv", "state": "lane_state"}
NO_EDITS = Lowered()


class RowSession:
    """One context over one model's weights, with a cache of one or more rows."""

    def __init__(self, model: XlaModel, rows: int = 1) -> None:
        model.check_open()
        self.model = model
        self.rows = rows
        self.capacity = 0
        self.lock = threading.RLock()
        self.context = InferenceContext(model.device)
        self.context["weights"] = model.weights
        self.context.put_decode_session(DecodeSession(model.plans, model.key))
        self._mirror = [Row() for _ in range(rows)]
        self._unread: deque[Unread] = deque()
        self._torn = False  # a submission was interrupted: the device may be ahead of the mirror
        self._lane_alone = False  # a fork of one row that will be several: so far its lane is all it has
        self._told = True  # the device's lengths and last tokens are the mirror's
        self._closed = False
        self.owner: object | None = None  # the request it is generating for

    @property
    def decode_session(self) -> DecodeSession:
        """Its plans. Raises: ContextError while they are taken out of the context."""
        with self.lock:
            found = self.context.take_decode_session()
            self.context.put_decode_session(found)
        if found is None:
            raise ContextError("the context has no decode session", fix="put back the one that was taken out of it")
        return found

    def admit(
        self,
        rows: Sequence[int],
        tokens: Sequence[int],
        knobs: Sequence[Knobs],
        *,
        score: int = 0,
        observed: Sequence[str] = (),
        edits: Lowered = NO_EDITS,
    ) -> XlaOutput:
        """Append `tokens` to the given rows, prefilled once, and sample each row's next token by its own one-row knobs.

        score: 1 also measures how likely each token's successor is, 2 names the likeliest ones too; the last has none.
        observed: paths to look at. edits: of one row.
        Output: logits of each chunk's last token; packed of the rows' sampled tokens, by row.
        """
        self.check_usable()
        if any(row in unread.rows for unread in self._unread for row in rows):
            self.settle()
        check_tokens(tokens, self.model.config.vocab)
        first = self._mirror[rows[0]]
        self.reserve(len(first.cached) + len(tokens))
        with self._submitting() as plans:
            lane = {} if self.rows == 1 else LANE
            if lane:
                self._fill_lane(plans, rows[0])
            first.pending = None
            taps = Taps.of(observed, edits.edits)
            parts = self._prefill(plans, first, tokens, score, lane, taps, edits)
            logits = tuple(part["logits"][0] for part, _ in parts)
            packed = ()
            for row, one_row in zip(rows, knobs, strict=True):
                given = {"logits": logits[-1:], "knobs": _flat(one_row)}
                packed += self.context.run(plans.plan(FIRST), given, {}, lane)["packed"]
                if lane:
                    self._move(plans, row)
                    self._mirror[row].cached = [*first.cached]
            scores = tuple((part["scores"][0], count) for part, count in parts) if score else ()
            seen = tuple((part["observed"], count) for part, count in parts) if observed else ()
            output = XlaOutput(logits, packed, scores, by_row=True, observed=seen)
            self._unread.append(Unread(output, tuple(rows), positions=0))
        return output

    def step(
        self,
        positions: int,
        knobs: Knobs,
        forced: Sequence[int] | None = None,
        reach: int | None = None,
        *,
        observed: Sequence[str] = (),
        edits: Lowered = NO_EDITS,
    ) -> XlaOutput:
        """Submit up to `positions` further positions of every row that is not done, in one call.

        forced: per row a token to feed first in place of the sampled one, FREE, or HALT (that row makes no more steps).
        reach: most tokens any row will have in the cache then, where the knobs' limits end rows before `positions`.
        observed: paths to look at, which takes one position at a time. edits: of all rows.
        Raises: CapacityError when a row would run past the model's context.
        """
        self.check_usable()
        forced = tuple(forced) if forced is not None else (FREE,) * self.rows
        check_tokens([token for token in forced if token >= 0], self.model.config.vocab)
        going = [index for index, token in enumerate(forced) if token >= FREE]
        begun = {index for unread in self._unread for index in unread.rows}
        if any(forced[i] == FREE and self._mirror[i].pending is None and i not in begun for i in going):
            raise RequestError("nothing to go on from", fix="prefill a prompt first, or give the tokens to decode")
        self.reserve(max((self._length(i) + positions for i in going), default=0) if reach is None else reach)
        counted = self.model.policy.platform.counted and not observed
        sizes = (1,) if observed else self.model.policy.platform.positions
        size = next(size for size in sizes if size >= positions)
        with self._submitting() as plans:
            given = {"knobs": _flat(knobs), "forced": (np.array(forced, np.int32),), **_given(edits)}
            made = plans.plan(Bucket("decode", self.rows, self.capacity, size, Taps.of(observed, edits.edits)))
            found = self.context.run(made, given, {"count": positions} if counted else {})
            seen = ((_named(made, found, "observed"), 1),) if observed else ()
            output = XlaOutput(found["logits"], found["packed"], observed=seen)
            for index in going:
                self._mirror[index].ahead += positions if counted else size
            self._unread.append(Unread(output, tuple(range(self.rows)), positions if counted else size, forced))
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

    def note_finished(self) -> None:
        """Read what is done without waiting for the rest: unread outputs hold their logits on the device."""
        while self._unread and all(array.is_ready() for array in self._unread[0].output.packed):
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
        self.decode_session.prepare(found)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in every row, growing by copying. Raises: CapacityError past the model's context."""
        wanted = self._capacity_for(tokens)
        if self.capacity >= wanted and "kv" in self.context:
            return
        lanes = self._lanes()
        start = self.capacity or self.model.policy.capacities[0]
        rungs = [start, *(rung for rung in self.model.policy.capacities if start < rung <= wanted)]
        with self._submitting() as plans:
            needed = []  # all of them before anything changes: compiling may be refused, or interrupted
            for rows, names in lanes:
                needed += [] if self.capacity else [(plans.plan(Bucket("make", rows, rungs[0])), names)]
                needed += [(plans.plan(Bucket("grow", rows, *step)), names) for step in pairwise(rungs)]
            for made, names in needed:
                self._hold(made, names)
            self.capacity = max(self.capacity, wanted)
            plans.bind(Allocation.of(self.context))

    def keep(self, lengths: Sequence[int], pending: Sequence[int | None] = ()) -> None:
        """Keep the first lengths[b] tokens of row b; the device is told at the next submission. Blocks while
        submissions are under way.

        pending: tokens to put after them that are not in the cache yet.
        """
        self.settle()
        for row, length in zip(self._mirror, lengths, strict=True):
            row.keep(length)
            row.ahead = 0
        for row, token in zip(self._mirror, pending, strict=False):
            row.pending = row.pending if token is None else token
        self._told = False

    def start_anew(self, tokens: int) -> None:
        """Empty the session for a request of `tokens` in the cache, at the smallest capacity that holds them."""
        wanted = self._capacity_for(tokens)
        if self.capacity == wanted and "kv" in self.context and "state" in self.context and not self._torn:
            self.keep([0] * self.rows)
        else:
            self._forget()

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
        self._mirror = [Row() for _ in range(self.rows)]
        for name in ("kv", "state", *LANE.values()):
            self.context.discard(name)
        self.capacity, self._torn, self._told, self._lane_alone = 0, False, True, False

    def _capacity_for(self, tokens: int) -> int:
        context = self.model.config.context
        if tokens > context:
            raise CapacityError(
                f"{tokens:,} tokens", expected=f"at most {context:,}, the model's context", fix="shorten the prompt"
            )
        return self.model.widen(self.rows, tokens).capacity_for(tokens)

    def _lanes(self) -> tuple[tuple[int, dict[str, str]], ...]:
        """The caches there are: how many rows each has, and what its values are called."""
        return ((self.rows, {}),) if self.rows == 1 else ((self.rows, {}), (1, LANE))

    def _hold(self, made: Plan, names: dict[str, str]) -> None:
        """Run a plan that makes values, and hold them."""
        targets = self.context.run(made, {}, {}, names)
        for slot in made.targets:
            name = slot.name.removesuffix("_next")
            self.context.hold(names.get(name, name), targets[slot.name], slot.tree)

    def _prefill(
        self,
        plans: DecodeSession,
        row: Row,
        tokens: Sequence[int],
        score: int,
        lane: dict[str, str],
        taps: Taps,
        edits: Lowered,
    ) -> list[tuple[dict[str, Any], int]]:
        """Submit the chunks of a prompt: each one's targets, with its number of real tokens."""
        parts, start = [], 0
        for length in self.model.policy.chunks(len(tokens)):
            chunk = tokens[start : start + length]
            padded, successors = np.zeros((1, length), np.int32), np.zeros(length, np.int32)
            padded[0, : len(chunk)] = chunk
            successors[: len(chunk)] = [*tokens[start + 1 : start + length + 1], 0][: len(chunk)]
            given = {"tokens": (padded,), "following": (successors,), **_given(edits)}
            made = plans.plan(Bucket("prefill", 1, self.capacity, length, taps))
            found: dict[str, Any] = self.context.run(made, given, {"count": len(chunk), "score": score}, lane)
            if taps.observed:
                found["observed"] = _named(made, found, "observed")
            parts.append((found, len(chunk)))
            row.cached += [int(token) for token in chunk]
            start += length
        return parts

    def _fill_lane(self, plans: DecodeSession, row: int) -> None:
        """Bring the row into the lane, or empty the lane for a row that holds nothing."""
        if self._mirror[row].cached:
            self._move(plans, row, take=1)
        else:
            self._write_state(LANE["state"], [Row()])

    def _move(self, plans: DecodeSession, row: int, take: int = 0) -> None:
        self.context.run(plans.plan(Bucket("move", self.rows, self.capacity)), {}, {"row": row, "take": take})

    def _write_state(self, name: str, mirror: Sequence[Row]) -> None:
        self.context[name] = self.context[name].replace(
            lengths=np.array([len(row.cached) for row in mirror], np.int32),
            tokens=np.array([row.pending or 0 for row in mirror], np.int32),
            done=np.array([row.pending is None for row in mirror]),
        )

    def check_usable(self) -> None:
        """Raises: RequestError when closed. After an interrupted submission the device is told what the mirror
        holds."""
        self.model.check_open()
        if self._closed:
            raise RequestError("this session is closed", fix="take another with rt.new_session()")
        if self._torn:
            self.settle()
            for row in self._mirror:
                row.ahead = 0
            self._torn, self._told = False, False

    @contextmanager
    def _submitting(self) -> Iterator[DecodeSession]:
        """The plans, taken from the context for a submission and put back whatever happens.

        Before it the device is told what the mirror holds, where it does not know. Marks the session torn unless the
        block ends: an interrupt may leave the device ahead of the mirror.
        """
        plans = self.context.take_decode_session()
        if plans is None:
            raise ContextError("the context has no decode session", fix="put back the one that was taken out of it")
        torn, self._torn = self._torn, True
        try:
            if self.capacity:
                self._make_own(plans)
                self._check_allocation(plans)
                if not self._told:
                    self._write_state("state", self._mirror)
            self._told = True
            yield plans
            self._torn = torn
        finally:
            self.context.put_decode_session(plans)

    def _share(self, source: "RowSession") -> None:
        """Stand where `source` does, over its buffers: one row of it may become several here."""
        self._mirror = [source._mirror[row if source.rows > 1 else 0].copy() for row in range(self.rows)]
        self.capacity, self._told = source.capacity, False
        self._lane_alone = self.capacity > 0 and self.rows > source.rows
        if not self.capacity:
            return
        for _, names in source._lanes():
            for name in ("kv", "state"):
                held = names.get(name, name)
                source.context.share(held, self.context, LANE[name] if self._lane_alone else held)
        if not self._lane_alone:
            self.decode_session.bind(Allocation.of(self.context))

    def _make_own(self, plans: DecodeSession) -> None:
        """Before the first write to buffers that another session holds too: copy them."""
        shared = [lane for lane in self._lanes() if self._is_shared(lane[1])]
        copies = [(plans.plan(Bucket("copy", rows, self.capacity)), names) for rows, names in shared]
        for made, names in copies:
            self._hold(made, names)
        if self._lane_alone:
            self._spread(plans)
        elif copies:
            plans.bind(Allocation.of(self.context))

    def _is_shared(self, names: dict[str, str]) -> bool:
        held = [names.get(name, name) for name in ("kv", "state")]
        return any(name in self.context and self.context.is_shared(name) for name in held)

    def _spread(self, plans: DecodeSession) -> None:
        """Put the lane into every row of a cache that is made for them."""
        rungs = [rung for rung in self.model.policy.capacities if rung < self.capacity]
        steps = [*pairwise([*rungs, self.capacity])]
        made = [plans.plan(Bucket("make", self.rows, (*rungs, self.capacity)[0]))]
        made += [plans.plan(Bucket("grow", self.rows, *step)) for step in steps]
        plans.plan(Bucket("move", self.rows, self.capacity))
        for one in made:
            self._hold(one, {})
        for row in range(self.rows):
            self._move(plans, row)
        self._lane_alone = False
        plans.bind(Allocation.of(self.context))

    def _load(self, state: SessionState, capacity: int) -> None:
        """Hold what a state holds, in buffers of the session's own."""
        self._forget()
        if not state.arrays:
            return
        self.reserve(capacity)
        with self._submitting() as plans:
            self.context.discard("kv")  # before as much is taken again
            self.context["kv"] = state.cache(self.rows, self.capacity)
            self.context["state"] = self.context["state"].replace(sampler=state.sampler(self.rows))
            plans.bind(Allocation.of(self.context))
        self._told = False
        self._mirror = [*state.mirror(), *(Row() for _ in range(self.rows - len(state.tokens)))]

    def _check_allocation(self, plans: DecodeSession) -> None:
        """Raises: TopologyChanged when another cache stands in the place of the session's own."""
        if plans.bound is not None and plans.bound.alloc_id == self.context.alloc_id("kv"):
            return
        validity = plans.validity_for(self.model.key, Allocation.of(self.context))
        raise TopologyChanged(
            f"the cache in this session's context is not its own: {validity.value}",
            fix="call decode_session.rebind_kv() if it holds what session.tokens says, else reset()",
        )

    def _calls(self, positions: int) -> list[int]:
        sizes = self.model.policy.platform.positions
        counts = []
        while positions:
            size = sizes[-1] if self.model.policy.platform.counted else max(s for s in sizes if s <= positions)
            counts.append(min(size, positions))
            positions -= counts[-1]
        return counts


def _flat(knobs: Knobs) -> tuple:
    return tuple(jax.tree.leaves(knobs))


def _given(edits: Lowered) -> dict[str, tuple]:
    return {"edits": tuple(jax.tree.leaves(edits.arrays))} if edits.edits else {}


def _named(plan: Plan, found: dict[str, Any], target: str) -> dict[str, jax.Array]:
    """A target's leaves put together again."""
    slot = next(slot for slot in plan.targets if slot.name == target)
    return slot.tree.unflatten(found[target])
