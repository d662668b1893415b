"""A picture as a list of shapes, in pixels from the top left; and the same as SVG. `png` draws it by matplotlib.

Whatever is to be seen is laid out once, as shapes; so both forms agree. A colour None is the page's own ink
(`currentColor`), which reads on light and dark themes. Every text is escaped here, and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from jaxrt.display.lettering import visible

FONT = "ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace"
MARGIN = 8  # pixels around a scene
PAPER, INK = "#ffffff", "#222222"  # where there is no theme: .svg and .png files


@dataclass(frozen=True)
class Box:
    """A rectangle; its outline alone where `fill` is None."""

    x: float
    y: float
    width: float
    height: float
    fill: str | None = None
    opacity: float = 1.0
    title: str = ""
    radius: float = 0.0


@dataclass(frozen=True)
class Grid:
    """Cells side by side, `side` pixels each way. colours: by row and column; None leaves a cell empty. titles: alike,
    or none."""

    x: float
    y: float
    width: float  # of a cell
    height: float
    colours: Sequence[Sequence[str | None]]
    titles: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Line:
    """A line through points. dash: lengths drawn and left out in turn."""

    points: Sequence[tuple[float, float]]
    colour: str | None = None
    width: float = 1.0
    opacity: float = 1.0
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    fill: str | None = None
    title: str = ""


@dataclass(frozen=True)
class Label:
    """A text on the baseline `y`. anchor: "start", "middle" or "end" stands at `x`. turn: degrees clockwise about
    (x, y). room: the box (x, y, width, height) outside of which nothing is drawn."""

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: str = "start"
    colour: str | None = None
    opacity: float = 1.0
    bold: bool = False
    turn: float = 0.0
    room: tuple[float, float, float, float] | None = None
    title: str = ""


Shape = Box | Grid | Line | Dot | Label


@dataclass(frozen=True)
class Scene:
    width: float
    height: float
    shapes: Sequence[Shape]


def svg(scene: Scene, title: str, style: str = "") -> str:
    """The scene as one <svg> element that needs nothing from elsewhere. title: for those who cannot see it."""
    width, height = _number(scene.width + 2 * MARGIN), _number(scene.height + 2 * MARGIN)
    inner = "".join(_DRAWN[type(shape)](shape) for shape in scene.shapes)
    # direction: a page in Arabic would otherwise swap the ends that texts are anchored at
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{text(title)}" width="{width}" '
        f'height="{height}" viewBox="{-MARGIN} {-MARGIN} {width} {height}" font-family="{FONT}" fill="currentColor" '
        f'style="direction:ltr;{style}">{inner}</svg>'
    )


def text(value: str) -> str:
    """Escaped for elements and attributes, everything in it visible; line breaks stay."""
    return escape("\n".join(map(visible, value.split("\n"))), quote=True)


def _box(box: Box) -> str:
    paint = _paint(box.fill, box.opacity)
    if box.fill is None:
        paint = f' fill="none" stroke="currentColor" stroke-opacity="{box.opacity:g}"'
    radius = f' rx="{_number(box.radius)}"' if box.radius else ""
    return _element("rect", _place(box.x, box.y, box.width, box.height) + radius + paint, _title(box.title))


def _grid(grid: Grid) -> str:
    parts = []
    for i, row in enumerate(grid.colours):
        for j, colour in enumerate(row):
            if colour is None:
                continue
            place = _place(grid.x + j * grid.width, grid.y + i * grid.height, grid.width, grid.height)
            title = _title(grid.titles[i][j]) if grid.titles else ""
            parts.append(_element("rect", f'{place} fill="{colour}"', title))
    return f'<g shape-rendering="crispEdges">{"".join(parts)}</g>'  # no seams between cells


def _line(line: Line) -> str:
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in line.points)
    dash = f' stroke-dasharray="{" ".join(map(_number, line.dash))}"' if line.dash else ""
    opacity = f' stroke-opacity="{line.opacity:g}"' if line.opacity < 1 else ""
    colour = line.colour or "currentColor"
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{_number(line.width)}" '
        f'stroke-linejoin="round"{dash}{opacity}/>'
    )


def _dot(dot: Dot) -> str:
    place = f'cx="{_number(dot.x)}" cy="{_number(dot.y)}" r="{_number(dot.radius)}"'
    return _element("circle", place + _paint(dot.fill, 1.0), _title(dot.title))


def _label(label: Label) -> str:
    x, y, outer = label.x, label.y, ""
    if label.room is not None:  # an inner <svg> shows nothing outside of itself, whatever font the text meets
        left, top, width, height = label.room
        x, y, outer = x - left, y - top, _place(left, top, width, height)
    extra = f' text-anchor="{label.anchor}"' if label.anchor != "start" else ""
    extra += ' font-weight="bold"' if label.bold else ""
    extra += f' transform="rotate({_number(label.turn)} {_number(x)} {_number(y)})"' if label.turn else ""
    extra += "" if label.title else ' pointer-events="none"'  # what lies below shows its title
    place = f'x="{_number(x)}" y="{_number(y)}" font-size="{_number(label.size)}"'
    # xml:space keeps the blanks at the ends of a token
    attributes = f'{place} xml:space="preserve"{extra}{_paint(label.colour, label.opacity)}'
    drawn = _element("text", attributes, _title(label.title) + text(label.text))
    return _element("svg", outer, drawn) if outer else drawn


def _element(name: str, attributes: str, inner: str) -> str:
    return f"<{name} {attributes}>{inner}</{name}>" if inner else f"<{name} {attributes}/>"


def _title(title: str) -> str:
    return f"<title>{text(title)}</title>" if title else ""


def _paint(fill: str | None, opacity: float) -> str:
    colour = f' fill="{fill}"' if fill is not None else ""
    return colour + (f' fill-opacity="{opacity:.3g}"' if opacity < 1 else "")


def _place(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


_DRAWN = {Box: _box, Grid: _grid, Line: _line, Dot: _dot, Label: _label}
