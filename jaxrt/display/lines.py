"""Lines over a knob: what changes while a strength, a layer or a temperature does."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrt.display.axes import tick_text, ticks
from jaxrt.display.colours import SERIES
from jaxrt.display.lettering import CELL, cells, shorten, visible
from jaxrt.display.picture import Picture
from jaxrt.display.scene import Box, Dot, Label, Line, Scene, Shape
from jaxrt.errors import RequestError
from jaxrt.requests import shown

MOST_SERIES = 24
MOST_POINTS = 20_000  # of all series
MOST_DOTS = 100  # points of a line that get dots to point at; beyond, the line alone

_WIDTH, _HEIGHT, _SIZE = 560.0, 300.0, 11.0
_DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 3))  # told apart where the colours begin anew


def sweep(
    values: Sequence[float], series: Mapping[str, Sequence[float]], *, xlabel: str, ylabel: str, title: str = ""
) -> Picture:
    """Lines of one or more named series over the same values, joined in the order given.

    A NaN or an infinity is a gap; a point between two gaps is a dot. Pointing at a dot shows its numbers.
    Raises: RequestError for series of another length than `values`, what is no number, none or more than 24 series, or
    more than 20,000 points.
    """
    xs = _numbers("values", values)
    if not isinstance(series, Mapping) or not 1 <= len(series) <= MOST_SERIES:
        count = f"{len(series)} of them" if isinstance(series, Mapping) else f"type {type(series).__name__}"
        raise RequestError(f"series: {count}", expected=f"a mapping of 1 to {MOST_SERIES} names to numbers")
    ys = {str(name): _numbers(str(name), line) for name, line in series.items()}
    for name, line in ys.items():
        if len(line) != len(xs):
            raise RequestError(f"{len(line)} numbers in {shown(name)}", expected=f"{len(xs)}, one for each of values")
    if not np.isfinite(xs).all():
        raise RequestError("values that are not finite", expected="where on the axis each point stands")
    if not 1 <= len(xs) * len(ys) <= MOST_POINTS:
        raise RequestError(f"{len(xs) * len(ys):,} points", expected=f"1 to {MOST_POINTS:,}")
    facts = "; ".join(f"{visible(name)}: {_span(line)}" for name, line in list(ys.items())[:4])
    more = f"; and {len(ys) - 4} more" if len(ys) > 4 else ""
    name = visible(title or f"{ylabel} by {xlabel}")
    return Picture(name, facts + more, _scene(xs, ys, visible(xlabel), visible(ylabel), visible(title)))


def _numbers(name: str, values: Any) -> np.ndarray:
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        found = np.empty((0, 0))
    if found.ndim != 1:
        raise RequestError(f"{name}: {shown(values)}", expected="a list of numbers")
    return found


def _span(line: np.ndarray) -> str:
    finite = line[np.isfinite(line)]
    return f"{tick_text(finite.min())} to {tick_text(finite.max())}" if finite.size else "nothing finite"


# --- layout -----------------------------------------------------------------------------------------------------------


def _scene(xs: np.ndarray, ys: Mapping[str, np.ndarray], xlabel: str, ylabel: str, title: str) -> Scene:
    along, up = _range(xs), _range(np.concatenate(list(ys.values())))
    marks = [(tick, tick_text(tick)) for tick in ticks(*up)]
    left = max(cells(text) for _, text in marks) * _SIZE * CELL + 30
    top = 34.0 if title else 10.0

    def place(x: float, y: float) -> tuple[float, float]:
        share_x, share_y = (x - along[0]) / (along[1] - along[0]), (y - up[0]) / (up[1] - up[0])
        return left + share_x * _WIDTH, top + (1 - share_y) * _HEIGHT

    bottom, right = top + _HEIGHT, left + _WIDTH
    shapes: list[Shape] = [Label(left, 16, shorten(title, 80), 13, bold=True)] if title else []
    for tick, text in marks:
        y = place(0, tick)[1]
        shapes += [
            Line([(left, y), (right, y)], opacity=0.5 if tick == 0 else 0.15),
            Label(left - 8, y + 4, text, _SIZE, "end"),
        ]
    for tick in ticks(*along, 7):
        x = place(tick, 0)[0]
        shapes += [
            Line([(x, bottom), (x, bottom + 4)], opacity=0.6),
            Label(x, bottom + 18, tick_text(tick), _SIZE, "middle"),
        ]
    shapes += [
        Box(left, top, _WIDTH, _HEIGHT, opacity=0.3),
        Label(left + _WIDTH / 2, bottom + 38, shorten(xlabel, 80), 12, "middle"),
        Label(12, top + _HEIGHT / 2, shorten(ylabel, 40), 12, "middle", turn=-90),
    ]
    for index, (name, line) in enumerate(ys.items()):
        shapes += _line(name, xs, line, place, *_look(index))
    if len(ys) == 1:
        return Scene(right + 16, bottom + 44, shapes)
    legend, width, height = _legend(list(ys), right + 20, top)
    return Scene(right + 20 + width, max(bottom + 44, height), [*shapes, *legend])


def _look(index: int) -> tuple[str, tuple[float, ...]]:
    return SERIES[index % len(SERIES)], _DASHES[index // len(SERIES)]


def _range(numbers: np.ndarray) -> tuple[float, float]:
    """From the least to the greatest, with a little air; never empty."""
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    air = 0.04 * (high - low) or 0.5 * max(abs(low), 1.0)
    return low - air, high + air


def _line(name: str, xs: np.ndarray, ys: np.ndarray, place: Any, colour: str, dash: tuple[float, ...]) -> list[Shape]:
    shapes: list[Shape] = []
    finite = np.isfinite(ys)
    points = [place(float(x), float(y)) if seen else None for x, y, seen in zip(xs, ys, finite, strict=True)]
    run: list[tuple[float, float]] = []
    for point in [*points, None]:
        if point is not None:
            run.append(point)
            continue
        if len(run) > 1:
            shapes.append(Line(run, colour, 2, dash=dash))
        elif run and len(points) > MOST_DOTS:
            shapes.append(Dot(*run[0], 2.5, colour))
        run = []
    if len(points) <= MOST_DOTS:
        for point, x, y in zip(points, xs, ys, strict=True):
            if point is not None:
                shapes.append(Dot(*point, 3, colour, f"{visible(name)}: {tick_text(y)} at {tick_text(x)}"))
    return shapes


def _legend(names: Sequence[str], x: float, y: float) -> tuple[list[Shape], float, float]:
    """A line and a name each; their width and where they end."""
    shapes: list[Shape] = []
    texts = [shorten(visible(name), 32) for name in names]
    for index, text in enumerate(texts):
        colour, dash = _look(index)
        middle = y + 10 + index * 18
        shapes += [
            Line([(x, middle), (x + 22, middle)], colour, 2, dash=dash),
            Label(x + 28, middle + 4, text, _SIZE, title=visible(names[index])),
        ]
    return shapes, 28 + max(map(cells, texts)) * _SIZE * CELL, y + 20 + len(texts) * 18
