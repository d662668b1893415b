"""Sampling parameters to arrays: checked against the vocabulary, then packed as `Knobs`, one row a sample."""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

import numpy as np

from jaxrt.errors import RequestError
from jaxrt.requests import MAX_TOKENS, SamplingParams
from jaxrt.sampling import FLOATS, INTS, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, Knobs, abstract_knobs

Words = Sequence[Sequence[int]]  # bad words, tokenised


@lru_cache(maxsize=8)
def neutral(rows: int, vocab: int) -> Knobs:
    """Greedy, without limit, everything off: read-only numpy arrays, made once.

    `make_knobs` returns these very objects for dense arrays in which nothing is set: a caller can keep them uploaded.
    """
    shapes = abstract_knobs(rows, vocab)
    floats, ints = _scalars(SamplingParams(temperature=0.0), vocab, (), sample=0, limit=MAX_TOKENS)
    knobs = Knobs(
        floats=np.full(shapes.floats.shape, floats, np.float32),
        ints=np.full(shapes.ints.shape, ints, np.int32),
        keys=np.zeros(shapes.keys.shape, np.uint32),
        bias=np.zeros(shapes.bias.shape, np.float32),
        stops=np.zeros(shapes.stops.shape, np.bool_),
        prompted=np.zeros(shapes.prompted.shape, np.bool_),
        banned=np.full(shapes.banned.shape, -1, np.int32),
    )
    for array in (knobs.floats, knobs.ints, knobs.keys, knobs.bias, knobs.stops, knobs.prompted, knobs.banned):
        array.setflags(write=False)
    return knobs


def make_knobs(
    requests: Sequence[SamplingParams],
    *,
    vocab: int,
    prompts: Sequence[Sequence[int]],
    eos: Collection[int],
    bad_words: Sequence[Words],
    seeds: Sequence[int],
    samples: Sequence[int],
    limits: Sequence[int] | None = None,
    rows: int | None = None,
) -> Knobs:
    """The knobs of one sample a row, as numpy arrays.

    prompts: token ids, which the repetition penalty counts as seen. eos: the model's end-of-sequence tokens. bad_words:
    every spelling of each of the row's bad words, in tokens. seeds: 0 to 2**64 - 1. samples: the row's index among its
    request's n. limits: most new tokens; max_tokens where not given. rows: the bucket's, neutral beyond the requests.

    Raises: RequestError for a token outside the vocabulary, or bad words that are too many or too long.
    """
    _check_tokens("end-of-sequence tokens", eos, vocab)
    for params, prompt, words in zip(requests, prompts, bad_words, strict=True):
        check(params, vocab, words)
        _check_tokens("prompt", prompt if params.repetition_penalty != 1 else (), vocab)
    off = neutral(len(requests) if rows is None else rows, vocab)
    floats, ints, keys = off.floats.copy(), off.ints.copy(), off.keys.copy()
    for row, params in enumerate(requests):
        limit = params.max_tokens if limits is None else limits[row]
        floats[row], ints[row] = _scalars(params, vocab, bad_words[row], sample=samples[row], limit=limit)
        keys[row] = seeds[row] >> 32, seeds[row] & 0xFFFFFFFF
    biases = [_bias(params, words, vocab) for params, words in zip(requests, bad_words, strict=True)]
    stops = [{*params.stop_token_ids, *(() if params.ignore_eos else eos)} for params in requests]
    seen = [prompt if p.repetition_penalty != 1 else () for p, prompt in zip(requests, prompts, strict=True)]
    return Knobs(
        floats=floats,
        ints=ints,
        keys=keys,
        bias=_filled(off.bias, biases),
        stops=_filled(off.stops, [_marks(tokens, vocab) for tokens in stops]),
        prompted=_filled(off.prompted, [_marks(tokens, vocab) for tokens in seen]),
        banned=_filled(off.banned, [_banned(words) for words in bad_words]),
    )


def check(params: SamplingParams, vocab: int, words: Words = ()) -> None:
    """Raises: RequestError for a token id that the vocabulary does not have, naming the knob, or bad words (in tokens)
    that are too many or too long."""
    _check_words(words, vocab)
    _check_tokens("logit_bias", params.logit_bias, vocab)
    _check_tokens("allowed_token_ids", params.allowed_token_ids or (), vocab)
    _check_tokens("stop_token_ids", params.stop_token_ids, vocab)


def _check_tokens(knob: str, tokens: Iterable[int], vocab: int) -> None:
    outside = [token for token in tokens if not 0 <= token < vocab]
    if outside:
        raise RequestError(f"{knob}: token id {outside[0]}", expected=f"ids from 0 to {vocab - 1:,}, the vocabulary")


def _check_words(words: Words, vocab: int) -> None:
    several = sum(len(word) > 1 for word in words)
    if several > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words: {several} spellings of two or more tokens",
            expected=f"at most {MAX_BAD_WORDS}",
            fix="give fewer",
        )
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words: one of {len(word)} tokens", expected=f"1 to {MAX_BAD_WORD_TOKENS}", fix="give a part of it"
            )
        _check_tokens("bad_words", word, vocab)


def _scalars(
    params: SamplingParams, vocab: int, words: Words, *, sample: int, limit: int
) -> tuple[list[float], list[int]]:
    """Values of FLOATS and INTS, in their order."""
    floats = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
    }
    ints = {
        "top_k": params.top_k if 0 < params.top_k < vocab else 0,
        "min_tokens": params.min_tokens,
        "limit": limit,
        "sample": sample,
        "logprobs": -1 if params.logprobs is None else params.logprobs,
        "processed": int(params.logprobs_mode == "processed"),
        "biased": int(_biased(params, words)),
        "bad_words": sum(len(word) > 1 for word in words),
    }
    return [floats[name] for name in FLOATS], [ints[name] for name in INTS]


def _biased(params: SamplingParams, words: Words) -> bool:
    return bool(params.logit_bias) or params.allowed_token_ids is not None or any(len(word) == 1 for word in words)


def _bias(params: SamplingParams, words: Words, vocab: int) -> np.ndarray | None:
    """float32 [V] to add to the logits: logit_bias, and -inf for what may never be chosen."""
    if not _biased(params, words):
        return None
    bias = np.zeros(vocab, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0
    for token, value in params.logit_bias.items():
        bias[token] += value
    bias[[word[0] for word in words if len(word) == 1]] = -np.inf
    return bias


def _marks(tokens: Collection[int], vocab: int) -> np.ndarray | None:
    """bool [V], true at `tokens`."""
    if not tokens:
        return None
    marks = np.zeros(vocab, np.bool_)
    marks[list(tokens)] = True
    return marks


def _banned(words: Words) -> np.ndarray | None:
    """int32 [W, M]: words of two or more tokens, each at the end of its line."""
    several = [word for word in words if len(word) > 1]
    if not several:
        return None
    lines = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for line, word in zip(lines, several, strict=False):
        line[-len(word) :] = word
    return lines


def _filled(off: np.ndarray, rows: Sequence[np.ndarray | None]) -> np.ndarray:
    """`off` with the given rows put in; `off` itself when there are none."""
    if all(row is None for row in rows):
        return off
    array = off.copy()
    for row, values in enumerate(rows):
        if values is not None:
            array[row] = values
    return array
