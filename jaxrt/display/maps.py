"""Attention maps: who looks at whom, for one head or for all heads of a layer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxrt.display.colours import magnitude, signed
from jaxrt.display.lettering import CELL, cells, label, shorten, token_texts
from jaxrt.display.picture import Picture
from jaxrt.display.scene import Box, Grid, Label, Scene, Shape
from jaxrt.errors import RequestError, nearest
from jaxrt.observations import WEIGHTS, layer_path
from jaxrt.requests import is_whole, shown

MOST_SIDE = 256  # cells along a side of one map
MOST_CELLS = 40_000  # of all maps together; each costs about 100 bytes of markup

Scale = Literal["sqrt", "linear"]

_SIZE = 11.0  # of letters
_NAME = 14  # cells of a token's name beside a map


@dataclass(frozen=True)
class _Heads:
    """What is drawn: weights float32 [N, T, S] of the heads numbered `heads`, the texts of the S keys, whose last T
    are the queries; and how many neighbours each way were made one cell, the one furthest from zero standing for
    all."""

    layer: int
    heads: tuple[int, ...]
    weights: np.ndarray
    names: tuple[str, ...] | None
    block: int


def attention(
    observations: Mapping[str, Any],
    *,
    layer: int,
    head: int | None = None,
    tokens: Sequence[str] | Sequence[int] | None = None,
    tokenizer: Any = None,
    row: int = 0,
    scale: Scale = "sqrt",
) -> Picture:
    """How much each token (from top to bottom) attends to each (from left to right), in one head or, for None, in all
    heads of a layer.

    observations: what `rt.inspect(prompt, ["model.layers.*.attention.weights"])` gives: [B, N, T, S] at each path.
    tokens: the S attended tokens, as texts, or as ids with `tokenizer`; the last T of them are the ones that attend.
    scale: of the colours; "sqrt" shows small weights too. The colours reach from 0 to 1, whatever the map holds, so
    that pictures compare; for weights beyond (after an intervention) as far as the weights do.

    A side of more than 256 tokens, or a picture of more than 40,000 cells, is drawn in blocks of 2 x 2, 3 x 3, ...
    tokens, each with the weight of them that is furthest from zero; the picture says so.
    Raises: RequestError for a layer that was not observed, a head or row that is not there, a wrong number of tokens.
    """
    if scale not in ("sqrt", "linear"):
        raise RequestError(f"scale={shown(scale)}", expected="'sqrt' or 'linear'")
    found = _heads(_observed(observations, layer), layer, head, row)
    names = None if tokens is None else _names(tokens, tokenizer, found.shape[2])
    numbers = tuple(range(found.shape[0])) if head is None else (int(head),)
    block = _block_size(*found.shape)
    data = _Heads(layer, numbers, found, names, block)
    which = f"head {numbers[0]}" if head is not None else f"all {len(numbers)} heads"
    _, length, attended = found.shape
    facts = f"{length} x {attended} tokens, {_peak(data)}"
    return Picture(f"attention of layer {layer}, {which}", facts, _scene(data, scale))


def _observed(observations: Mapping[str, Any], layer: int) -> np.ndarray:
    if not isinstance(observations, Mapping):
        raise RequestError(f"observations of type {type(observations).__name__}", expected="what rt.inspect() returns")
    if not is_whole(layer):
        raise RequestError(f"layer={shown(layer)}", expected="a layer's number")
    path = layer_path(layer, WEIGHTS)
    if path not in observations:
        seen = [known for known in observations if known.endswith(WEIGHTS)]
        fix = nearest(path, seen) if seen else "observe it: rt.inspect(prompt, ['model.layers.*.attention.weights'])"
        raise RequestError(f"no observation at {path!r}", fix=fix)
    data = np.asarray(getattr(observations[path], "data", observations[path]))
    if data.ndim != 4 or data.size == 0 or data.shape[2] > data.shape[3]:
        raise RequestError(f"weights of shape {list(data.shape)} at {path!r}", expected="[B, N, T, S] with T <= S")
    return data


def _heads(data: np.ndarray, layer: int, head: int | None, row: int) -> np.ndarray:
    for name, value, count in (("row", row, data.shape[0]), ("head", head, data.shape[1])):
        if value is None and name == "head":
            continue
        if not is_whole(value) or not 0 <= value < count:
            raise RequestError(f"{name}={shown(value)} of layer {layer}", expected=f"0 to {count - 1}")
    return np.asarray(data[row] if head is None else data[row, head : head + 1], np.float32)


def _names(tokens: Any, tokenizer: Any, attended: int) -> tuple[str, ...]:
    names = tuple(map(label, token_texts(tokens, tokenizer)))
    if len(names) != attended:
        raise RequestError(
            f"{len(names)} tokens", expected=f"{attended}, one for each that is attended to, those in the cache too"
        )
    return names


def _block_size(count: int, length: int, attended: int) -> int:
    """The fewest neighbours to draw as one that keep within the bounds."""
    by_side = -(-attended // MOST_SIDE)
    block = max(by_side, 1)
    while count * -(-length // block) * -(-attended // block) > MOST_CELLS:
        block += 1
    return block


def _peak(data: _Heads) -> str:
    if not np.isfinite(data.weights).any():
        return "no finite weight"
    where = np.unravel_index(
        np.nanargmax(np.where(np.isfinite(data.weights), data.weights, np.nan)), data.weights.shape
    )
    index, query, key = map(int, where)
    head = f" in head {data.heads[index]}" if len(data.heads) > 1 else ""
    return f"most {data.weights[where]:.3f}{head}: {_pair(data, query, key, 1)}"


# --- layout -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Range:
    """From weights to colours."""

    low: float
    high: float
    scale: Scale

    def colour(self, weight: float) -> str:
        share = weight / max(self.high, -self.low)
        bent = math.copysign(math.sqrt(abs(share)), share) if self.scale == "sqrt" else share
        return signed(bent) if self.low < 0 else magnitude(bent)


def _range(weights: np.ndarray, scale: Scale) -> _Range:
    finite = weights[np.isfinite(weights)]
    reach = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    return _Range(-reach if finite.size and finite.min() < 0 else 0.0, reach, scale)


@dataclass(frozen=True)
class _Place:
    """Where the maps stand: `across` of them in a line, one each `step` pixels."""

    left: float
    top: float
    cell: float
    across: int
    step: tuple[float, float]
    size: tuple[float, float]  # of a map

    def corner(self, index: int) -> tuple[float, float]:
        line, column = divmod(index, self.across)
        return self.left + column * self.step[0], self.top + line * self.step[1]


def _scene(data: _Heads, scale: Scale) -> Scene:
    count, length, attended = data.weights.shape
    rows, columns = -(-length // data.block), -(-attended // data.block)
    side = min(640.0, max(200.0, 920.0 / count - 24))
    cell = min(max(side / columns, 0.75), 18.0 if count == 1 else 14.0)
    every = math.ceil((_SIZE + 1.5) / cell)  # of the names: those that there is room for
    named = data.names is not None and (count == 1 or every == 1)
    names = [shorten(name, _NAME) for name in data.names or ()] if named else []
    below, beside = names[:: data.block], names[attended - length :: data.block]  # a block goes by its first token
    margin = max(map(cells, names), default=0) * _SIZE * CELL + 8 if named else 16.0
    across = max(1, min(count, int(930 / (columns * cell + 24))))
    size = columns * cell, rows * cell
    place = _Place(margin, 54.0 if count == 1 else 68.0, cell, across, (size[0] + 24, size[1] + 26), size)
    colours = _range(data.weights, scale)

    heading, note = _heading(data), _note(data)
    shapes: list[Shape] = [Label(0, 16, heading, 13, bold=True), Label(0, 34, note, opacity=0.65)]
    for index, number in enumerate(data.heads):
        x, y = place.corner(index)
        shapes += [_map(data, index, x, y, cell, colours), Box(x, y, *size, opacity=0.3)]
        if count > 1:
            shapes.append(Label(x, y - 4, f"head {number}", opacity=0.8))
        if named and index % across == 0:
            shapes += _beside(beside, x, y, cell, every)
        if named and index + across >= count:  # no map below
            shapes += _below(below, x, y + size[1], cell, every)
    right = place.corner(min(count, across) - 1)[0] + size[0]
    bottom = place.corner(count - 1)[1] + size[1] + (margin if named else 0)
    shapes += _bar(colours, right + 16, place.top)
    return Scene(max(right + 64, cells(note) * _SIZE * CELL), max(bottom, place.top + 126), shapes)


def _beside(names: Sequence[str], x: float, y: float, cell: float, every: int) -> list[Shape]:
    """The tokens that attend, left of a map."""
    return [
        Label(x - 6, y + (i + 0.5) * cell + 4, name, _SIZE, "end") for i, name in enumerate(names) if i % every == 0
    ]


def _below(names: Sequence[str], x: float, y: float, cell: float, every: int) -> list[Shape]:
    """The tokens attended to, under a map."""
    return [
        Label(x + (j + 0.5) * cell + 4, y + 6, name, _SIZE, "end", turn=-90)
        for j, name in enumerate(names)
        if j % every == 0
    ]


def _map(data: _Heads, place: int, x: float, y: float, cell: float, colours: _Range) -> Grid:
    """One head's weights. What a query cannot see yet, exactly zero and to the right of the query, stays empty."""
    weights = _blocks(data.weights[place], data.block)
    length, attended = data.weights.shape[1:]
    fills: list[list[str | None]] = []
    titles: list[list[str]] = []
    for i, line in enumerate(weights):
        newest = attended - length + min((i + 1) * data.block, length) - 1
        unseen = [weight == 0 and j * data.block > newest for j, weight in enumerate(line)]
        fills.append([None if hidden else colours.colour(float(w)) for hidden, w in zip(unseen, line, strict=True)])
        titles.append([f"{_pair(data, i, j, data.block)}: {weight:.4g}" for j, weight in enumerate(line)])
    return Grid(x, y, cell, cell, fills, titles)


def _blocks(weights: np.ndarray, block: int) -> np.ndarray:
    """Of each block x block weights the one furthest from zero, [T, S] to [ceil(T / block), ceil(S / block)]."""
    if block == 1:
        return weights
    padding = [(0, -extent % block) for extent in weights.shape]
    padded = np.pad(weights, padding)
    tiles = padded.reshape(padded.shape[0] // block, block, padded.shape[1] // block, block).swapaxes(1, 2)
    tiles = tiles.reshape(*tiles.shape[:2], block * block)
    furthest = np.argmax(np.abs(tiles), axis=-1)  # a NaN counts as furthest, and so is seen
    return np.take_along_axis(tiles, furthest[..., None], axis=-1)[..., 0]


def _pair(data: _Heads, query: int, key: int, block: int) -> str:
    """Who attends to whom, by place in the grid."""
    _, length, attended = data.weights.shape
    return f"{_who(data, query, block, attended - length, attended)} → {_who(data, key, block, 0, attended)}"


def _who(data: _Heads, place: int, block: int, start: int, end: int) -> str:
    first = start + place * block
    last = min(first + block, end) - 1
    if first != last:
        return f"{first}-{last}"
    return str(first) if data.names is None else f"{first} {shorten(data.names[first], 40)}"


def _heading(data: _Heads) -> str:
    return f"attention, layer {data.layer}" + (f", head {data.heads[0]}" if len(data.heads) == 1 else "")


def _note(data: _Heads) -> str:
    note = "each line: one token, and where it looks"
    if data.block > 1:
        note += f"; each cell: the largest of {data.block} x {data.block} weights"
    return note


def _bar(colours: _Range, x: float, y: float) -> list[Shape]:
    """What the colours mean, largest on top, in equal steps of colour."""
    steps, height, root = 60, 120.0, colours.scale == "sqrt"
    lowest = -1.0 if colours.low < 0 else 0.0
    shares = np.linspace(1.0, lowest, steps)
    weights = shares * np.abs(shares) if root else shares
    shapes: list[Shape] = [Grid(x, y, 12, height / steps, [[colours.colour(w * colours.high)] for w in weights])]
    ticks = (1.0, 0.5, 0.2, 0.05) if root else (1.0, 0.75, 0.5, 0.25)
    if lowest:
        ticks = (1.0, ticks[2], -ticks[2], -1.0)
    for tick in (0.0, *ticks):
        share = math.copysign(math.sqrt(abs(tick)), tick) if root else tick
        place = (1 - share) / (1 - lowest) * height
        shapes.append(Label(x + 17, y + place + 4, f"{tick * colours.high:.3g}", 10, opacity=0.8))
    return shapes
