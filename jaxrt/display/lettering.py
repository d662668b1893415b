"""Texts as pictures show them: nothing invisible, nothing that reaches out of its place, cut to the room there is."""

import unicodedata
from collections.abc import Sequence

from jaxrt.errors import RequestError
from jaxrt.requests import is_list, is_whole, shown

CELL = 0.62  # width of a character in ems: what the widest of the usual monospaced fonts takes, and a little more

_BLANKS = {"\n": "↵", "\t": "⇥"}
# Controls, formats (marks of direction, joiners), surrogates, private and unassigned characters, separators of lines:
# they have no picture, move what stands beside them, or are no XML.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def visible(text: str) -> str:
    """`text` with every character to be seen: line breaks and tabs as arrows, others without a picture as Python writes
    them (\\x1b, \\u202e); a combining mark that begins the text gets a ring to stand on."""
    seen = "".join(map(_visible, text))
    return "◌" + seen if seen and unicodedata.combining(seen[0]) else seen


def label(text: str) -> str:
    """`visible`, with blanks as dots: what a token is called where it stands alone."""
    return "".join("·" if unicodedata.category(each) == "Zs" else each for each in visible(text))


def cells(text: str) -> int:
    """Width of a visible text, in monospaced characters: wide ones are two, combining ones none."""
    return sum(map(_cells, text))


def shorten(text: str, room: int) -> str:
    """A visible text in at most `room` cells, the end cut off."""
    if cells(text) <= room:
        return text
    return _fitting(text, room - 1) + "…"


def shorten_middle(text: str, room: int) -> str:
    """A visible text in at most `room` cells, the middle left out."""
    if cells(text) <= room:
        return text
    head = _fitting(text, (room - 3) // 2 + 1)
    tail = _fitting(text[::-1], room - 3 - cells(head))[::-1]
    return f"{head} … {tail}"


def token_texts(tokens: object, tokenizer: object | None) -> list[str]:
    """What each of a list of tokens is called: strings are taken as they are; ids are ⟨id⟩ without a tokenizer.

    tokenizer: anything with `piece(token) -> str`. A token without text of its own is ⟨id⟩ too.
    Raises: RequestError for what is neither strings nor ids.
    """
    if is_list(tokens) or (isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes)):
        found = list(tokens)  # type: ignore[call-overload]
        if all(isinstance(token, str) for token in found):
            return found
        if all(is_whole(token) and token >= 0 for token in found):
            return [piece(int(token), tokenizer) for token in found]
    raise RequestError(f"tokens {shown(tokens)}", expected="a list of texts, or of token ids with tokenizer=")


def piece(token: int, tokenizer: object | None) -> str:
    """The text of one token id; ⟨id⟩ where there is none."""
    text = tokenizer.piece(token) if tokenizer is not None else ""  # type: ignore[attr-defined]
    return text or f"⟨{token}⟩"


def _visible(character: str) -> str:
    if character in _BLANKS:
        return _BLANKS[character]
    unseen = unicodedata.category(character) in _UNSEEN
    return character.encode("unicode_escape").decode() if unseen else character


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _fitting(text: str, room: int) -> str:
    """The longest beginning of at most `room` cells."""
    taken = 0
    for index, character in enumerate(text):
        taken += _cells(character)
        if taken > room:
            return text[:index]
    return text
