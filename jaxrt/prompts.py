"""Prompts to requests: text, tokens or messages in, checked token ids out. Everything checkable is checked here, on
the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrt import knobs as knob_arrays
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.errors import CapacityError, RequestError
from jaxrt.requests import SamplingParams, is_list, is_whole, shown
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.session import XlaSession

Message = Mapping[str, Any]
PROMPTS = "text, token ids, or a list of those: never an empty one"


@dataclass(frozen=True)
class Request:
    """One prompt to answer, checked against the model."""

    tokens: tuple[int, ...]  # to append to the session
    params: SamplingParams
    row: int = 0  # its place in the list of prompts
    keep: int | None = None  # tokens of a given session to keep before it; None: all
    bad_words: tuple[tuple[int, ...], ...] = ()


def tokenizer_of(model: XlaModel) -> Tokenizer:
    """Raises: RequestError for a model that came without a tokenizer."""
    if model.tokenizer is None:
        raise RequestError(
            "this model came without a tokenizer", fix="give token ids, or put a tokenizer.json beside the weights"
        )
    return model.tokenizer


def requests_of(
    model: XlaModel,
    prompt: Any,
    params: SamplingParams | None,
    messages: Any,
    session: XlaSession | None,
    *,
    room: int = 1,
) -> tuple[list[Request], bool]:
    """What a user handed in as checked requests, each leaving `room` tokens of the context, and whether it was a single
    one.

    Raises: RequestError, CapacityError.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params of type {type(params).__name__}", expected="jaxrt.SamplingParams")
    params = params or model.defaults
    prompts, single = _prompts(model, prompt, messages, session)
    if session is not None:
        if len(prompts) != session.rows:
            raise RequestError(f"{len(prompts)} prompts", expected=f"one for each of the session's {session.rows} rows")
        if params.n > 1:
            raise RequestError(
                f"n={params.n} in a given session", fix="leave session= out, or ask once for each sample"
            )
    bad_words = _bad_words(model, params)
    knob_arrays.check(params, model.config.vocab, bad_words)
    if params.stop and model.tokenizer is None:
        raise RequestError("stop strings for a model without a tokenizer", fix="use stop_token_ids")
    requests = []
    for row, tokens in enumerate(prompts):
        _check_prompt(model, tokens)
        held = () if session is None else session.tokens[row]
        keep, before = None, len(held)
        if messages is not None:  # the whole conversation: of what the session holds, the part they have in common
            keep = before = min(_common(held, tokens), len(tokens) - 1)
            tokens = tokens[keep:]
        if before + len(tokens) + room > model.config.context:
            raise CapacityError(
                f"a prompt of {before + len(tokens):,} tokens",
                expected=f"fewer than the model's context of {model.config.context:,}",
                fix="shorten the prompt",
            )
        requests.append(Request(tuple(int(token) for token in tokens), params, row, keep, bad_words))
    return requests, single


def _prompts(
    model: XlaModel, prompt: Any, messages: Any, session: XlaSession | None
) -> tuple[list[Sequence[int]], bool]:
    if (prompt is None) == (messages is None):
        if prompt is None and session is not None:
            return [() for _ in range(session.rows)], session.rows == 1
        raise RequestError("both or neither of prompt and messages", expected="exactly one")
    if messages is not None:
        single = _is_list(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        if not _is_list(conversations) or not all(map(_is_list, conversations)):
            raise RequestError("messages that are no list", expected="a list of {'role': ..., 'content': ...}")
        prompts = [tokenizer_of(model).apply_chat_template(list(conversation)) for conversation in conversations]
        if not all(prompts):
            raise RequestError("messages that the chat template writes as nothing", expected="at least one token")
        return prompts, single
    if isinstance(prompt, str):
        return [_encode(model, prompt, session, 0)], True
    if not _is_list(prompt):
        raise RequestError(f"a prompt of {shown(prompt)}", expected=PROMPTS)
    if not isinstance(prompt[0], str) and not _is_list(prompt[0]):
        return [list(prompt)], True
    for one in prompt:
        if not isinstance(one, str) and not _is_list(one):
            raise RequestError(f"a prompt of {shown(one)} in a list of them", expected=PROMPTS)
    return [
        _encode(model, one, session, row) if isinstance(one, str) else list(one) for row, one in enumerate(prompt)
    ], False


def _is_list(value: Any) -> bool:
    return is_list(value) and len(value) > 0


def _encode(model: XlaModel, text: str, session: XlaSession | None, row: int) -> list[int]:
    if not text:
        raise RequestError("an empty prompt", expected="at least one character")
    tokenizer = tokenizer_of(model)
    longest = model.config.context * tokenizer.longest_token
    if len(text) > longest:  # tokenising megabytes takes a while, only to find that they do not fit
        raise CapacityError(
            f"a text of {len(text):,} characters",
            expected=f"at most {longest:,}, which no more than {model.config.context:,} tokens can spell",
            fix="shorten the prompt",
        )
    begins = session is None or not any(session.tokens[row : row + 1])  # only the beginning of a sequence gets a BOS
    return tokenizer.encode(text, add_special_tokens=begins)


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(held, tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(tokens)))


def _check_prompt(model: XlaModel, tokens: Sequence[Any]) -> None:
    for token in tokens:
        if not is_whole(token) or not 0 <= token < model.config.vocab:
            raise RequestError(f"token id {shown(token)}", expected=f"whole numbers from 0 to {model.config.vocab - 1}")


def _bad_words(model: XlaModel, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the start of a text and after a space."""
    if not params.bad_words:
        return ()
    encode = tokenizer_of(model).encode
    spelled = {
        tuple(encode(s + word.lstrip(), add_special_tokens=False)) for word in params.bad_words for s in ("", " ")
    }
    return tuple(sorted(tokens for tokens in spelled if tokens))
