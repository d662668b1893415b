"""What a user asks for and what comes back, as data. Validated here, on the host, before anything is dispatched."""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NoReturn

import numpy as np

from jaxrt.errors import RequestError, nearest

MAX_SAMPLES = 1_024  # vLLM allows 16,384; a bounded `n` cannot be used to exhaust a host
MAX_LOGPROBS = 20
MAX_TOKENS = 1 << 30
MAX_STOP_STRINGS = 1_024
GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM


class FinishReason(StrEnum):
    """Why a generation ended. Precedence when several hold at one token: stop, then length."""

    STOP = "stop"  # a stop string, a stop token, or the model's end of sequence
    LENGTH = "length"  # max_tokens reached, or the model's context is full
    ABORT = "abort"  # interrupted


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens: vLLM's names and defaults, except `max_tokens`, which is 256 here.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. Penalties, `logit_bias`, `allowed_token_ids`
    and `bad_words` apply to the logits first; then temperature, min_p, top_k and top_p, in that order. `logprobs` asks
    for that many alternatives per new token (0: the chosen token alone), `prompt_logprobs` likewise for the prompt.
    Knobs are traced arrays on the device: no value of any of them compiles anything anew.

    numpy's numbers are taken as Python's, None as an empty list or mapping.

    Raises: RequestError for a value outside its range, and for an unknown name, with the nearest one.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    max_tokens: int = 256
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None

    def __new__(cls, *_values: Any, **named: Any) -> "SamplingParams":
        known = {f.name for f in dataclasses.fields(cls)}
        for name in named:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {shown(name)}", fix=nearest(name, known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            self._check_number(name, low, high)
        for name, low, high in _COUNTS:
            self._check_count(name, low, high)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        if self.top_p <= 0:
            _refuse("top_p", self.top_p, "above 0 and at most 1")
        if self.logprobs_mode not in ("raw", "processed"):
            _refuse("logprobs_mode", self.logprobs_mode, "'raw' or 'processed'")
        if self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.n > 1 and self.greedy:
            _refuse("n", self.n, "1 with temperature 0 (all samples would be equal)")
        self._set("stop", _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._set("bad_words", _texts("bad_words", self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                _refuse("allowed_token_ids", [], "at least one token id, or None")
        self._set("logit_bias", _biases(self.logit_bias))
        if self.seed == -1:  # vLLM's spelling of "none"
            self._set("seed", None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """SamplingParams from names and values. Raises: RequestError for an unknown name, with the nearest one."""
        return cls(**{str(name): value for name, value in values.items()})

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # normalising a frozen dataclass while it is being made

    def _check_number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not low <= value <= high:  # NaN lies nowhere
            _refuse(name, value, f"a number between {low:g} and {high:g}")
        self._set(name, float(value))

    def _check_count(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if name in _OPTIONAL and value is None:
            return
        if not is_whole(value) or not low <= value <= high:
            _refuse(name, value, f"a whole number between {low} and {high:,}")
        self._set(name, int(value))


_RANGES = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),  # logits are divided by it
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
)
_COUNTS = (
    ("n", 1, MAX_SAMPLES),
    ("top_k", -1, MAX_TOKENS),
    ("max_tokens", 1, MAX_TOKENS),
    ("min_tokens", 0, MAX_TOKENS),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("seed", -1, (1 << 64) - 1),
)
_OPTIONAL = ("logprobs", "prompt_logprobs", "seed")


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise RequestError(f"{name}={shown(value)}", expected=expected)


def shown(value: object) -> str:
    """The value as it is written, cut short."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) < 200 else text[:200] + "..."


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_list(value: Any) -> bool:
    """Whether the value is a list of something: no text, no bytes, no array without a dimension."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def is_whole(value: Any) -> bool:
    """Whether the value is an integer, numpy's included; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _texts(name: str, values: Any) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        _refuse(name, values, "a list of strings")
    if len(values) > MAX_STOP_STRINGS:
        _refuse(name, f"{len(values)} strings", f"at most {MAX_STOP_STRINGS:,}")
    for text in values:
        if not isinstance(text, str) or not text:
            _refuse(name, text, "strings that are not empty")
        if any("\ud800" <= character <= "\udfff" for character in text):
            _refuse(name, text, "valid Unicode: no lone surrogates, which no token spells")
    return tuple(values)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        _refuse(name, values, "a list of token ids")
    return tuple(_token_id(name, value) for value in values)


def _token_id(name: str, value: Any) -> int:
    if not is_whole(value) or not 0 <= value < MAX_TOKENS:
        _refuse(name, value, "token ids: whole numbers, zero or more")
    return int(value)


def _biases(values: Any) -> Mapping[int, float]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        _refuse("logit_bias", values, "a mapping of token id to bias")
    biases: dict[int, float] = {}
    for key, bias in values.items():
        spelled = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10  # JSON has text keys
        token = _token_id("logit_bias", int(key) if spelled else key)
        if token in biases:
            _refuse("logit_bias", {key: bias}, f"token {token} only once")
        if not _is_number(bias) or not -100 <= bias <= 100:
            _refuse("logit_bias", {key: bias}, "biases between -100 and 100")
        biases[token] = float(bias)
    return biases


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, in nat: of the token that stands there, and of the likeliest alternatives."""

    token: int
    logprob: float
    rank: int  # 1 is the likeliest token of the vocabulary
    top: Mapping[int, float] = field(default_factory=dict)  # token id -> log-probability, likeliest first


@dataclass(frozen=True)
class GenerationStats:
    """Where the time of one request went. Seconds and tokens per second; compile time is inside `ttft_s` where it
    fell there."""

    prompt_tokens: int
    new_tokens: int
    ttft_s: float  # submission to first token
    prefill_tps: float
    decode_tps: float  # after the first token
    compile_s: float  # waited for compiles, wherever they fell; prefill_tps leaves them out, ttft_s does not
    compiles: int = 0  # made meanwhile in this process; 0 when all came from the cache
    kernels: str = ""  # what multiplied: the native kernels' instruction set, or XLA

    def lines(self) -> list[tuple[str, str]]:
        """Facts to show, as name and value."""
        compiled = f"{self.compile_s:.2f} s, {self.compiles} compiled" if self.compile_s else "none"
        return [
            ("prompt", f"{self.prompt_tokens} tokens, {self.prefill_tps:,.1f} tokens/s"),
            ("answer", f"{self.new_tokens} tokens, {self.decode_tps:,.1f} tokens/s"),
            ("first token", f"{self.ttft_s:.3f} s"),
            ("compiling", compiled),
            *([("kernels", self.kernels)] if self.kernels else []),
        ]


@dataclass(frozen=True)
class TokenEvent:
    """A piece of streamed output. `text` is always valid UTF-8 and may be empty while a character or a stop string is
    open."""

    text: str
    tokens: tuple[int, ...] = ()
    index: int = 0  # which of `n` samples
    row: int = 0  # which prompt of a list
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    generation: "Generation | None" = None  # with the last event of a sample


@dataclass(frozen=True)
class Generation:
    """One finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    stats: GenerationStats
    stop_reason: str | int | None = None  # the stop string or token that ended it; None for end of sequence or length
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    samples: tuple["Generation", ...] = ()  # all `n` of them, this one first, when n > 1
    pieces: tuple[str, ...] = ()  # the text of each token, for display

    def as_json(self) -> dict[str, Any]:
        """What `jaxrt run --json` prints."""
        found: dict[str, Any] = {
            "prompt_tokens": list(self.prompt_tokens),
            "tokens": list(self.tokens),
            "text": self.text,
            "finish_reason": str(self.finish_reason),
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            "stats": dataclasses.asdict(self.stats),
        }
        if self.logprobs is not None:
            found["logprobs"] = [dataclasses.asdict(entry) for entry in self.logprobs]
        return found

    def _repr_html_(self) -> str:
        from jaxrt.markup import generation_html

        return generation_html(self)


@dataclass(frozen=True)
class Score:
    """How likely the model finds a given text."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]  # nat; None for the first token, which nothing precedes
    greedy: tuple[bool | None, ...]  # whether each token was the likeliest one
    text: str = ""

    @property
    def total(self) -> float:
        """Sum of the log-probabilities, in nat."""
        return sum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability; NaN for a single token."""
        return math.exp(-self.total / (len(self.tokens) - 1)) if len(self.tokens) > 1 else math.nan

    def as_json(self) -> dict[str, Any]:
        """What `jaxrt score --json` prints for each text."""
        return {**dataclasses.asdict(self), "total": self.total}
