"""Sessions as a tree of what they have in common: shared beginnings once, and where they part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrt.display.lettering import CELL, cells, shorten, shorten_middle, visible
from jaxrt.display.picture import Picture
from jaxrt.display.scene import Box, Dot, Label, Line, Scene, Shape
from jaxrt.errors import RequestError
from jaxrt.requests import is_list

MOST_ROWS = 256

_SIZE, _HIGH, _INDENT, _ROOM = 12.0, 26.0, 24.0, 56  # of letters; of a line; a level; cells of a stretch's text
_FILL = "#3b82c4"


@dataclass(frozen=True)
class Stretch:
    """Tokens without a branch between them: who ends at their end, and what goes on from there. Children begin with
    different tokens, in the order in which they were first named."""

    tokens: tuple[int, ...]
    names: tuple[str, ...] = ()
    children: tuple["Stretch", ...] = ()


def prefix_tree(sequences: Mapping[str, Sequence[int]]) -> Stretch:
    """The tree of common prefixes: what all begin with, empty where they have nothing in common, and the rest below.

    Only the root may be empty. Names that end at the same place have the same tokens.
    """
    return _stretch([(name, tuple(tokens)) for name, tokens in sequences.items()], 0)


def _stretch(named: list[tuple[str, tuple[int, ...]]], start: int) -> Stretch:
    """Of sequences that are alike before `start`."""
    first = named[0][1] if named else ()
    end = min((_common(first, tokens, start) for _, tokens in named), default=0)
    groups: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for name, tokens in named:
        if len(tokens) > end:
            groups.setdefault(tokens[end], []).append((name, tokens))
    names = tuple(name for name, tokens in named if len(tokens) == end)
    return Stretch(first[start:end], names, tuple(_stretch(group, end) for group in groups.values()))


def _common(a: Sequence[int], b: Sequence[int], start: int) -> int:
    end = min(len(a), len(b))
    return next((i for i in range(start, end) if a[i] != b[i]), end)


def session_tree(sessions: Mapping[str, Any] | Sequence[Any], tokenizer: Any = None) -> Picture:
    """Sessions, and each of their rows, by what they have in common: forks hang below the stretch that they share.

    sessions: by name, or a list; anything with `.tokens`, a tuple of token ids per row, and `.lengths`, the tokens in
    the cache. tokenizer: `rt.tokenizer`; without, stretches are shown as ids.

    Raises: RequestError for what is no session, or more than 256 rows; and what reading a closed session raises.
    """
    if not isinstance(sessions, Mapping):
        if not is_list(sessions):
            raise RequestError(
                f"sessions of type {type(sessions).__name__}", expected="sessions by name, or a list of them"
            )
        sessions = {f"session {index}": session for index, session in enumerate(sessions)}
    tokens: dict[str, tuple[int, ...]] = {}
    notes: dict[str, str] = {}
    for name, session in sessions.items():
        if not hasattr(session, "tokens") or not hasattr(session, "lengths"):
            raise RequestError(f"{name}: a {type(session).__name__}", expected="a session, with .tokens and .lengths")
        rows = session.tokens
        for row, (row_tokens, cached) in enumerate(zip(rows, session.lengths, strict=True)):
            own = f"{name} [{row}]" if len(rows) > 1 else str(name)
            tokens[own] = tuple(int(token) for token in row_tokens)
            notes[own] = _count(len(row_tokens)) + (f", {cached:,} in the cache" if cached != len(row_tokens) else "")
    if not 1 <= len(tokens) <= MOST_ROWS:
        raise RequestError(f"{len(tokens):,} rows of sessions", expected=f"1 to {MOST_ROWS}")
    tree = prefix_tree(tokens)
    total = sum(map(len, tokens.values()))
    rows = "1 row" if len(tokens) == 1 else f"{len(tokens)} rows"
    facts = f"{rows}: {_count(total)}, {_size(tree):,} without repetition"
    return Picture("tree of sessions", facts, _scene(tree, notes, tokenizer, facts))


def _size(stretch: Stretch) -> int:
    return len(stretch.tokens) + sum(map(_size, stretch.children))


def _count(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens:,} tokens"


# --- layout -----------------------------------------------------------------------------------------------------------


def _scene(tree: Stretch, notes: Mapping[str, str], tokenizer: Any, facts: str) -> Scene:
    shapes: list[Shape] = [
        Label(0, 16, "sessions", 13, bold=True),
        Label(0, 34, facts, 11, opacity=0.65),
    ]
    right, bottom = max(480.0, cells(facts) * 11 * CELL), 46.0

    def draw(stretch: Stretch, depth: int, start: int) -> float:
        """A line, and below it the lines of the children; where it stands."""
        nonlocal right, bottom
        x, y = depth * _INDENT, bottom
        bottom += _HIGH
        end = _line(shapes, stretch, x, y, start, notes, tokenizer)
        right = max(right, end)
        stops = [draw(child, depth + 1, start + len(stretch.tokens)) for child in stretch.children]
        for stop in stops:
            shapes.append(Line([(x + 8, stop), (x + _INDENT, stop)], opacity=0.5))
        if stops:
            shapes.append(Line([(x + 8, y + _HIGH - 4), (x + 8, stops[-1])], opacity=0.5))
        return y + (_HIGH - 4) / 2

    draw(tree, 0, 0)
    return Scene(right, bottom, shapes)


def _line(
    shapes: list[Shape], stretch: Stretch, x: float, y: float, start: int, notes: Mapping[str, str], tokenizer: Any
) -> float:
    """One stretch, its length and the names that end with it. Returns where it ends."""
    if stretch.tokens:
        whole = visible(_spelled(stretch.tokens, tokenizer))
        text = shorten_middle(whole, _ROOM)
        width = cells(text) * _SIZE * CELL + 10
        end = start + len(stretch.tokens)
        title = f"tokens {start} to {end - 1}\n{shorten_middle(whole, 600)}"
        room = (x, y, width, _HIGH - 4)
        shapes += [Box(*room, _FILL, 0.22, title, 3), Label(x + 5, y + 15, text, _SIZE, room=room)]
        x += width + 8
        count = f"{len(stretch.tokens):,}"
        shapes.append(Label(x, y + 15, count, 10, opacity=0.65, title=_count(len(stretch.tokens))))
        x += cells(count) * 10 * CELL + 10
    elif stretch.children:
        shapes += [Dot(x + 8, y + 11, 4), Label(x + 20, y + 15, "nothing in common", 10, opacity=0.65)]
        x += 20 + 17 * 10 * CELL + 10
    for name in stretch.names:
        shown = shorten(visible(name), 40)
        shapes.append(Label(x, y + 15, shown, _SIZE, bold=True, title=visible(name)))
        x += cells(shown) * _SIZE * CELL + 6
        shapes.append(Label(x, y + 15, notes[name], 10, opacity=0.65))
        x += cells(notes[name]) * 10 * CELL + 16
    return x


def _spelled(tokens: Sequence[int], tokenizer: Any) -> str:
    return tokenizer.decode(list(tokens)) if tokenizer is not None else " ".join(map(str, tokens))
