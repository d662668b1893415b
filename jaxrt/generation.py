"""The text loop: requests through a session, tokens back to text, as events or whole answers. Host code only."""

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

import jax
import numpy as np

from jaxrt import knobs as knob_arrays
from jaxrt.edits import Lowered, Places, lower
from jaxrt.errors import ExecutionError, RequestError, SessionPoisoned
from jaxrt.interventions import Intervention
from jaxrt.models.steps import FREE, HALT
from jaxrt.program import compiles
from jaxrt.prompts import Request
from jaxrt.requests import FinishReason, Generation, GenerationStats, TokenEvent, TokenLogprobs
from jaxrt.sampling import Columns, Knobs, unpack
from jaxrt.sessions.outputs import XlaOutput
from jaxrt.sessions.session import XlaSession
from jaxrt.text import TextStream

MAX_ROWS = 8  # of one batch; longer lists run in several
EVENT_S = 0.06  # a streamed event should not wait longer than this for its tokens


@dataclass(eq=False)
class _Sample:
    """One answer in the making."""

    request: Request
    index: int  # which of the request's n
    seed: int
    eos: tuple[int, ...]
    text: TextStream | None  # None for a model without a tokenizer
    limit: int = 0  # most new tokens: max_tokens, or what the context leaves
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    kept: int = 0  # tokens of the session's row before the answer
    first_s: float = 0.0
    last_s: float = 0.0

    def take(self, token: int) -> str:
        """Note one new token: the text that became certain with it."""
        params = self.request.params
        self.tokens.append(token)
        stopped = token in params.stop_token_ids or (token in self.eos and not params.ignore_eos)
        delta = ""
        if self.text is not None:
            if not stopped or params.include_stop_str_in_output:
                self.text.armed = len(self.tokens) > params.min_tokens
                delta = self.text.push(token)
            if self.text.stopped is not None:
                self.finish, self.stop_reason = FinishReason.STOP, self.text.stopped
        if self.finish is None and stopped:
            self.finish = FinishReason.STOP
            self.stop_reason = token if token in params.stop_token_ids else None
        if self.finish is None and len(self.tokens) >= self.limit:
            self.finish = FinishReason.LENGTH
        if self.finish is not None and self.text is not None:
            delta += self.text.finish()
        self.pieces.append(delta)
        return delta


def stream(
    session: XlaSession,
    requests: list[Request],
    given: XlaSession | None,
    interventions: Sequence[Intervention] = (),
    *,
    streaming: bool = True,
) -> Iterator[TokenEvent]:
    """Events of all requests. One sample runs in `session`, or in `given`; several in batches, in sessions of their
    own. streaming: events should come as soon as their tokens."""
    seeds = [r.params.seed if r.params.seed is not None else secrets.randbits(63) for r in requests]
    wanted = [(r, index, seed) for r, seed in zip(requests, seeds, strict=True) for index in range(r.params.n)]
    if given is not None or len(wanted) == 1:
        loop = _Loop(given or session, wanted, interventions, append=given is not None, streaming=streaming)
        yield from loop.events()
        return
    rest = iter(wanted)
    while batch := list(islice(rest, MAX_ROWS)):
        own = XlaSession(session.model, session.model.widen(len(batch), 1).rows_for(len(batch)))
        try:
            yield from _Loop(own, batch, interventions, append=False, streaming=streaming).events()
        finally:
            own.close()


def generate(
    session: XlaSession,
    requests: list[Request],
    given: XlaSession | None,
    interventions: Sequence[Intervention] = (),
) -> list[Generation]:
    """The answers in order. Where n > 1 a request's first sample holds them all."""
    answers: dict[int, list[tuple[int, Generation]]] = {}
    for event in stream(session, requests, given, interventions, streaming=False):
        if event.generation is not None:
            answers.setdefault(event.row, []).append((event.index, event.generation))
    found = []
    for row, request in enumerate(requests):
        samples = [answer for _, answer in sorted(answers[row], key=lambda pair: pair[0])]
        found.append(replace(samples[0], samples=tuple(samples)) if request.params.n > 1 else samples[0])
    return found


class _Loop:
    """One batch of samples through one session: row b is sample b. At most one submission is ahead of the one being
    read."""

    def __init__(
        self,
        session: XlaSession,
        wanted: Sequence[tuple[Request, int, int]],
        interventions: Sequence[Intervention],
        *,
        append: bool,
        streaming: bool,
    ) -> None:
        self.session, self.append, self.streaming = session, append, streaming
        self.samples = [_sample(session, *one) for one in wanted]
        # positions, rows and output of what is not read yet
        self.in_flight: deque[tuple[int, tuple[int, ...], XlaOutput]] = deque()
        self.begun: list[tuple[int, int | None]] = []  # where each row stood: tokens in the cache, and one after them
        # of all rows; neutral until they are admitted
        self.knobs = knob_arrays.neutral(session.rows, session.model.config.vocab)
        self.interventions = interventions
        self.edits = Lowered()  # of decoding
        self.token_s = EVENT_S  # what a position takes, as last seen
        self.clock = _Clock()
        self.compiled = compiles().misses
        self.waited_s = session.model.plans.waited_s
        self.waited_first_s = 0.0  # for compiles, before the first token

    def events(self) -> Iterator[TokenEvent]:
        session = self.session
        with session.lock:
            session.check_usable()
            session.owner = self
        try:
            with session.lock:
                self._admit()
            while any(sample.finish is None for sample in self.samples):
                with session.lock:
                    if session.owner is not self:
                        raise RequestError(
                            "another request took over this session", fix="give each its own: rt.new_session()"
                        )
                    columns, rows = self._advance()
                yield from self._events(columns, rows)
        finally:
            with session.lock, suppress(SessionPoisoned):  # which the next use of the session reports
                if session.owner is self and not session.closed:
                    session.owner = None
                    self._leave()

    def _admit(self) -> None:
        """Prefill every row, each request once however many samples it has, and submit the first tokens."""
        session, model = self.session, self.session.model
        found = [self._feed(row, sample) for row, sample in enumerate(self.samples)]
        fed, prompts = [tokens for _, tokens in found], [[*held, *tokens] for held, tokens in found]
        for sample, prompt in zip(self.samples, prompts, strict=True):
            sample.kept = len(prompt)
            sample.limit = min(sample.request.params.max_tokens, model.config.context - sample.kept)
        reach = max(sample.kept + min(sample.limit, session.positions) for sample in self.samples)
        self.knobs = self._make_knobs(range(len(self.samples)), prompts, session.rows)
        places = Places(
            tuple(self.samples[row].request.row if row < len(self.samples) else None for row in range(session.rows)),
            tuple(self.samples[row].kept if row < len(self.samples) else 0 for row in range(session.rows)),
        )
        prefilling = lower(model.config, self.interventions, places, "prefill").placed(model.device)
        self.edits = lower(model.config, self.interventions, places, "decode").placed(model.device)
        again = [len(tokens) > len(sample.request.tokens) for tokens, sample in zip(fed, self.samples, strict=True)]
        self.begun = [(len(held), tokens[0] if one else None) for (held, tokens), one in zip(found, again, strict=True)]
        if self.append:
            session.keep([length for length, _ in self.begun])
        else:
            session.start_anew(reach)
        session.anticipate([len(tokens) for tokens in fed], reach, max(s.kept + s.limit for s in self.samples))
        for _, group in groupby(range(len(self.samples)), key=lambda row: self.samples[row].request.row):
            rows = tuple(group)
            asked = self.samples[rows[0]].request.params.prompt_logprobs
            one_row = [self._make_knobs([row], prompts, 1) for row in rows]
            score = 0 if asked is None else 1 + (asked > 0)
            output = session.admit(rows, fed[rows[0]], one_row, score=score, edits=prefilling.row(rows[0]))
            self.in_flight.append((1, rows, output))
            if asked is not None:
                scores = unpack(output.read_scores())
                described = [None, *(_logprobs(scores, i, token, asked) for i, token in enumerate(fed[rows[0]][1:]))]
                for row in rows:
                    self.samples[row].prompt_logprobs = tuple(described[again[row] :])

    def _feed(self, row: int, sample: _Sample) -> tuple[Sequence[int], list[int]]:
        """The tokens to keep, and those to prefill: the prompt, after a last sampled token that is not in the cache
        yet."""
        tokens = list(sample.request.tokens)
        if not self.append:
            return (), tokens
        held, cached = self.session.tokens[row][: sample.request.keep], int(self.session.lengths[row])
        if not held and not tokens:
            raise RequestError(
                "an empty session and no prompt", expected="something to go on from", fix="give a prompt"
            )
        start = min(cached, len(held))
        if not tokens and start == len(held):
            start -= 1  # the logits after its last token are gone: run that token again
        return held[:start], [*held[start:], *tokens]

    def _make_knobs(self, rows: Sequence[int], prompts: list[list[int]], width: int) -> Knobs:
        samples = [self.samples[row] for row in rows]
        model = self.session.model
        knobs = knob_arrays.make_knobs(
            [sample.request.params for sample in samples],
            vocab=model.config.vocab,
            prompts=[prompts[row] for row in rows],
            eos=model.config.eos_tokens,
            bad_words=[sample.request.bad_words for sample in samples],
            seeds=[sample.seed for sample in samples],
            samples=[sample.index for sample in samples],
            limits=[sample.limit for sample in samples],
            rows=width,
        )
        return jax.device_put(knobs, model.device)  # once a request, not at every call

    def _advance(self) -> tuple[Columns, tuple[int, ...]]:
        """Keep the device busy, then read the oldest submission: its columns [b, n] and the rows they are of."""
        session = self.session
        while len(self.in_flight) < 2 and (positions := self._next_positions()):
            halted = [HALT if s.finish is not None else FREE for s in self.samples]
            forced = [*halted, *[HALT] * (session.rows - len(halted))]
            output = session.step(positions, self.knobs, forced, self._reach(positions), edits=self.edits)
            self.in_flight.append((positions, tuple(range(len(self.samples))), output))
        positions, rows, output = self.in_flight.popleft()
        columns = unpack(session.collect(output))
        self.token_s = self.clock.lap() / positions
        return columns, rows

    def _events(self, columns: Columns, rows: tuple[int, ...]) -> Iterator[TokenEvent]:
        """One event a token. A token counts from when it is handed out: who stops listening leaves the rest behind."""
        for position in range(columns.tokens.shape[1]):
            for place, row in enumerate(rows):
                if self.samples[row].finish is None and columns.tokens[place, position] >= 0:
                    yield self._event(row, columns, (place, position))

    def _going(self) -> list[tuple[_Sample, int]]:
        """The samples that are not finished, with their tokens so far, those under way included."""
        under_way = [sum(count for count, rows, _ in self.in_flight if row in rows) for row in range(len(self.samples))]
        pairs = zip(self.samples, under_way, strict=True)
        return [(sample, len(sample.tokens) + ahead) for sample, ahead in pairs if sample.finish is None]

    def _reach(self, positions: int) -> int:
        """Most tokens in a row's cache after so many further positions: none goes beyond its own limit."""
        return max(sample.kept + min(sample.limit, count + positions) - 1 for sample, count in self._going())

    def _next_positions(self) -> int:
        needed = [sample.limit - count for sample, count in self._going()]
        most = max(1, int(EVENT_S / self.token_s)) if self.streaming else self.session.positions
        return max(0, min(max(needed, default=0), most, self.session.positions))

    def _event(self, row: int, columns: Columns, at: tuple[int, int]) -> TokenEvent:
        sample, token = self.samples[row], int(columns.tokens[at])
        if columns.bad[at]:
            raise ExecutionError(
                f"no token can be chosen at position {sample.kept + len(sample.tokens)}: the logits are NaN, or "
                "every token is forbidden",
                fix="check the weights, allowed_token_ids, logit_bias and bad_words",
            )
        sample.last_s = self.clock.now()
        if not sample.tokens:
            sample.first_s = sample.last_s
            self.waited_first_s = self.session.model.plans.waited_s - self.waited_s
        described = None
        if sample.request.params.logprobs is not None:
            described = (_logprobs(columns, at, token, sample.request.params.logprobs),)
            sample.logprobs += described
        text = sample.take(token)
        return TokenEvent(
            text=text,
            tokens=(token,),
            index=sample.index,
            row=sample.request.row,
            finish_reason=sample.finish,
            logprobs=described,
            generation=None if sample.finish is None else self._generation(sample),
        )

    def _generation(self, sample: _Sample) -> Generation:
        params, new, prompt = sample.request.params, len(sample.tokens), len(sample.request.tokens)
        waited = self.session.model.plans.waited_s - self.waited_s
        decoding = sample.last_s - sample.first_s
        return Generation(
            text=sample.text.text if sample.text is not None else "",
            tokens=tuple(sample.tokens),
            finish_reason=sample.finish or FinishReason.ABORT,
            prompt_tokens=sample.request.tokens,
            params=params,
            seed=sample.seed,
            stats=GenerationStats(
                prompt_tokens=prompt,
                new_tokens=new,
                ttft_s=sample.first_s,
                prefill_tps=prompt / max(sample.first_s - self.waited_first_s, 1e-9),
                decode_tps=(new - 1) / decoding if new > 1 and decoding > 0 else 0.0,
                compile_s=waited,
                compiles=compiles().misses - self.compiled,
                kernels=self.session.model.kernels,
            ),
            stop_reason=sample.stop_reason,
            logprobs=tuple(sample.logprobs) if params.logprobs is not None else None,
            prompt_logprobs=sample.prompt_logprobs,
            pieces=tuple(sample.pieces),
        )

    def _leave(self) -> None:
        """Leave the session where the answers end: what ran ahead of a stop string is out of sight."""
        spare = [0] * (self.session.rows - len(self.samples))
        if any(sample.tokens for sample in self.samples):
            self.session.keep([*(sample.kept + len(sample.tokens) for sample in self.samples), *spare])
        elif self.begun:  # a request that gave nothing leaves it as it was
            self.session.keep([*(length for length, _ in self.begun), *spare], [token for _, token in self.begun])


def _sample(session: XlaSession, request: Request, index: int, seed: int) -> _Sample:
    tokenizer, params = session.model.tokenizer, request.params
    text = None
    if tokenizer is not None:
        text = TextStream(
            tokenizer,
            stop=tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
    return _Sample(request, index, seed, session.model.config.eos_tokens, text)


def _logprobs(columns: Columns, at: int | tuple[int, int], token: int, count: int) -> TokenLogprobs:
    top = zip(columns.top_tokens[at][:count], columns.top_logprobs[at][:count], strict=True)
    possible = {int(alternative): float(value) for alternative, value in top if value > -np.inf}
    return TokenLogprobs(
        token=token,
        logprob=float(columns.logprobs[at]),
        rank=int(columns.ranks[at]),
        top=possible,
    )


class _Clock:
    """Seconds since a batch began."""

    def __init__(self) -> None:
        self._started = self._lap = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def lap(self) -> float:
        last, self._lap = self._lap, time.perf_counter()
        return self._lap - last
