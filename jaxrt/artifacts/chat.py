"""Conversations as text: checks that messages are plain data, and renders them through a model's chat template."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrt.errors import RequestError

MAX_DEPTH = 32  # containers within containers


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    **variables: Any,
) -> str:
    """The text of a conversation, written by `template` (Jinja source).

    messages: dicts with a `role`, and a `content` that is text or a list of parts {"type": "text", "text": ...}, which
    are joined; with `tool_calls` the content may be None. variables: further plain data for the template.
    Raises: RequestError for what is not plain data, without a template, and for what the template itself refuses;
    ArtifactError for a template that is malformed, endless, or reaches for what it must not have.
    """
    if template is None:
        raise RequestError(
            "this model came without a chat template", fix="give the prompt as text, or pass chat_template="
        )
    if not isinstance(template, str):
        raise RequestError(f"a chat template of type {type(template).__name__}", expected="Jinja source text")
    values = {name: _plain(value, name) for name, value in variables.items()}
    values["messages"] = _messages(messages)
    values["tools"] = _plain(tools, "tools")
    values["add_generation_prompt"] = bool(add_generation_prompt)
    values |= {name: text for name, text in (("bos_token", bos_token), ("eos_token", eos_token)) if text is not None}
    from jaxrt.artifacts import sandbox  # Jinja takes 40 ms to import, which only a chat should pay

    return sandbox.render(template, values)


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages of type {type(messages).__name__}", expected="a list of dicts")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is a {type(message).__name__}", expected='{"role": ..., "content": ...}')
    plain = _plain(message, where)
    if not isinstance(plain.get("role"), str):
        raise RequestError(f"{where} has role {plain.get('role')!r}", expected='text such as "user"')
    content = plain.get("content")
    if isinstance(content, list):  # what a template that knows parts would write: one after the other
        plain["content"] = "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    elif not isinstance(content, str) and (content is not None or not plain.get("tool_calls")):
        raise RequestError(f"{where} has content of type {type(content).__name__}", expected="text, or a list of parts")
    return plain


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RequestError(f"{where} is of type {kind!r}", expected='{"type": "text", "text": ...}')
    return part["text"]


def _plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy of `value` in JSON's own types, so that a template holds no object of the caller's."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} deep", expected="plain data")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass too: the characters alone
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float) and math.isfinite(value):
        return float.__float__(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"{where} has a key of type {type(key).__name__}", expected="text keys")
        return {str.__str__(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    raise RequestError(
        f"{where} holds a {type(value).__name__}", expected="plain data: text, finite numbers, lists, dicts"
    )
