"""A text with each token shaded by how unlikely the model found it, and the nats of each below."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrt.display.axes import tick_text, ticks
from jaxrt.display.colours import SURPRISE
from jaxrt.display.lettering import CELL, cells, label, piece, shorten, visible
from jaxrt.display.picture import Picture
from jaxrt.display.scene import Box, Label, Line, Scene, Shape
from jaxrt.errors import RequestError
from jaxrt.requests import Generation, Score, TokenLogprobs

MOST_TOKENS = 4_096

_WIDTH, _SIZE, _HIGH = 860.0, 14.0, 26.0  # of the text; of its letters; of its lines
_BARS = 90.0  # height of the nats
_DARKEST = 0.75  # opacity behind the least likely tokens
_FAINT = 0.55  # of a prompt's letters


@dataclass(frozen=True)
class _Token:
    token: int
    text: str
    logprob: float | None  # None for the first token, which nothing precedes
    standing: str = ""  # its rank, in words
    top: tuple[tuple[str, float], ...] = ()
    prompt: bool = False


def token_logprobs(answer: Generation | Score, tokenizer: Any = None) -> Picture:
    """The text of an answer (with `prompt_logprobs`, of its prompt too) or of a score, each token shaded by its
    log-probability: plain where the model was sure, full at 1 in 1,000 and below. Pointing at a token shows
    probability, rank and alternatives; bars show the nats of each, and the line above sums them.

    tokenizer: `rt.tokenizer`. An answer knows its texts, a prompt, alternatives and a score do not: without a
    tokenizer they are ⟨id⟩.

    Raises: RequestError for an answer without log-probabilities, or more than 4,096 tokens.
    """
    tokens = _tokens(answer, tokenizer)
    if len(tokens) > MOST_TOKENS:
        raise RequestError(
            f"{len(tokens):,} tokens", expected=f"at most {MOST_TOKENS:,} to draw", fix="draw a part of the text"
        )
    parts = [("prompt", [t for t in tokens if t.prompt]), ("text", [t for t in tokens if not t.prompt])]
    facts = "; ".join(_summary(name, part) for name, part in parts if part)
    shapes: list[Shape] = [
        Label(0, 16, "log-probability of each token", 13, bold=True),
        Label(0, 34, facts, 11, opacity=0.65),
    ]
    written, bottom = _text(tokens, 48.0)
    shapes += [*written, *_legend(bottom + 8), *_bars(tokens, bottom + 52)]
    scene = Scene(max(_WIDTH, cells(facts) * 11 * CELL), bottom + 52 + _BARS + 8, shapes)
    return Picture("log-probability of each token", facts, scene)


def _tokens(answer: Generation | Score, tokenizer: Any) -> list[_Token]:
    if isinstance(answer, Score):
        standing = {None: "", True: "the likeliest", False: "not the likeliest"}
        return [
            _Token(token, piece(token, tokenizer), logprob, standing[greedy])
            for token, logprob, greedy in zip(answer.tokens, answer.logprobs, answer.greedy, strict=True)
        ]
    if not isinstance(answer, Generation):
        raise RequestError(f"an answer of type {type(answer).__name__}", expected="a Generation or a Score")
    if answer.logprobs is None and answer.prompt_logprobs is None:
        raise RequestError(
            "an answer without log-probabilities", fix="ask for them: SamplingParams(logprobs=5, prompt_logprobs=5)"
        )
    found: list[_Token] = []
    if answer.prompt_logprobs is not None:
        texts = [piece(token, tokenizer) for token in answer.prompt_tokens]
        found += _entries(answer.prompt_tokens, texts, answer.prompt_logprobs, tokenizer, True)
    if answer.logprobs is not None:
        known = len(answer.pieces) == len(answer.tokens)
        pieces: Sequence[str] = answer.pieces if known else [""] * len(answer.tokens)
        texts = [
            text or piece(token, None if known else tokenizer)
            for text, token in zip(pieces, answer.tokens, strict=True)
        ]
        found += _entries(answer.tokens, texts, answer.logprobs, tokenizer, False)
    return found


def _entries(
    tokens: Sequence[int], texts: Sequence[str], entries: Sequence[TokenLogprobs | None], tokenizer: Any, prompt: bool
) -> Iterable[_Token]:
    for token, text, entry in zip(tokens, texts, entries, strict=True):
        if entry is None:
            yield _Token(token, text, None, prompt=prompt)
        else:
            top = tuple((piece(each, tokenizer), logprob) for each, logprob in entry.top.items())
            yield _Token(token, text, entry.logprob, f"rank {entry.rank:,}", top, prompt)


def _summary(name: str, tokens: Sequence[_Token]) -> str:
    nats = [token.logprob for token in tokens if token.logprob is not None]
    if not nats:
        return f"{name}: {len(tokens):,} tokens"
    total = sum(nats)
    try:
        perplexity = f"{math.exp(-total / len(nats)):.4g}"
    except OverflowError:
        perplexity = "∞"
    return f"{name}: {len(tokens):,} tokens, {tick_text(total)} nat, perplexity {perplexity}"


# --- layout -----------------------------------------------------------------------------------------------------------


def _text(tokens: Sequence[_Token], top: float) -> tuple[list[Shape], float]:
    """The tokens one after another, in lines; and where they end."""
    shapes: list[Shape] = []
    x, y = 0.0, top
    room = int(_WIDTH / (_SIZE * CELL))
    for token in tokens:
        text = shorten(visible(token.text), room)
        width = max(cells(text), 1) * _SIZE * CELL
        if x + width > _WIDTH:
            x, y = 0.0, y + _HIGH
        place, shade = (x, y, width, _HIGH - 4), _shade(token.logprob)
        shapes.append(Box(*place, SURPRISE, shade, _title(token), 2))
        if token.logprob is None or shade < 0.15:  # so that tokens without shade are told apart
            line = y + _HIGH - 4
            shapes.append(Line([(x + 1, line), (x + width - 1, line)], opacity=0.25))
        shapes.append(Label(x, y + 16, text, _SIZE, opacity=_FAINT if token.prompt else 1.0, room=place))
        x += width
        if token.text.endswith("\n"):
            x, y = 0.0, y + _HIGH
    return shapes, y + _HIGH


def _shade(logprob: float | None) -> float:
    """Opacity of what stands behind a token: even steps of nats, from sure to 1 in 1,000; a NaN is darkest."""
    if logprob is None:
        return 0.0
    return _DARKEST * (1.0 if math.isnan(logprob) else min(max(-logprob / math.log(1_000), 0.0), 1.0))


def _title(token: _Token) -> str:
    if token.logprob is None:
        return f"{label(token.text)} (token {token.token}): nothing precedes it"
    lines = [f"{label(token.text)} (token {token.token}): {_chance(token.logprob)}, {token.standing}"]
    return "\n".join([*lines, *(f"{label(text)}: {_chance(logprob)}" for text, logprob in token.top)])


def _chance(logprob: float) -> str:
    return f"{math.exp(logprob):.2%} ({tick_text(round(logprob, 4))} nat)"


def _legend(y: float) -> list[Shape]:
    shapes: list[Shape] = [Label(0, y + 12, "probability", 11, opacity=0.65)]
    x = 84.0
    for name, share in (("1", 1.0), ("0.5", 0.5), ("0.1", 0.1), ("0.01", 0.01), ("≤ 0.001", 0.001)):
        width = (cells(name) + 2) * 11 * CELL
        shapes += [
            Box(x, y, width, 16, SURPRISE, _shade(math.log(share)), radius=2),
            Box(x, y, width, 16, opacity=0.2, radius=2),
            Label(x + width / 2, y + 12, name, 11, "middle"),
        ]
        x += width + 6
    return shapes


def _bars(tokens: Sequence[_Token], top: float) -> list[Shape]:
    """Nats of each token, in order; a bar without end for what the model held impossible."""
    left, bottom = 40.0, top + _BARS
    nats = [-token.logprob for token in tokens if token.logprob is not None and math.isfinite(token.logprob)]
    most = max(1.0, *nats) if nats else 1.0
    step = min(14.0, (_WIDTH - left) / max(len(tokens), 1))
    end = left + step * len(tokens)
    shapes: list[Shape] = [Label(0, top - 8, "nats of each token", 11, opacity=0.65)]
    for tick in ticks(0, most, 3):
        y = bottom - tick / most * _BARS
        shapes += [
            Line([(left, y), (end, y)], opacity=0.2),
            Label(left - 6, y + 4, tick_text(tick), 10, "end", opacity=0.8),
        ]
    for index, token in enumerate(tokens):
        if token.logprob is None or math.isnan(token.logprob):
            continue
        height = min(-token.logprob / most, 1.0) * _BARS
        gap = 1.0 if step > 3 else 0.0
        paint = 0.5 if token.prompt else 1.0
        place = (left + index * step, bottom - height, step - gap, height)
        if height > 0:
            shapes.append(Box(*place, SURPRISE, paint, _title(token)))
        if math.isinf(token.logprob):
            shapes.append(Label(place[0] + step / 2, top - 2, "∞", 10, "middle"))
    return shapes
