"""Scenes as PNG, by matplotlib, which is imported only here: the `viz` extra."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from jaxrt.display.lettering import visible
from jaxrt.display.scene import INK, MARGIN, PAPER, Box, Dot, Grid, Label, Line, Scene
from jaxrt.errors import RequestError

PER_INCH = 100  # pixels of a scene
MOST_PIXELS = 60_000_000  # of a file; beyond, the scale goes down from 2

# Asked of the machine in this order; a character that none has is drawn as an empty box.
_FONTS = (
    "DejaVu Sans Mono", "DejaVu Sans", "Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans Arabic",
    "Noto Sans Devanagari", "Noto Emoji", "Unifont",
)  # fmt: skip


def save(scene: Scene, path: Path) -> None:
    """Write the scene to `path`, two pixels for one, on white.

    Raises: RequestError where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise RequestError(
            f"{path.name} needs matplotlib, which is not installed",
            fix="pip install 'jaxrt[viz]', or save as .html or .svg, which need nothing",
        ) from error
    installed = set(fontManager.get_font_names())
    fonts = [name for name in _FONTS if name in installed]
    # a figure of its own, with its own canvas: pyplot and its global state stay the notebook's
    width, height = scene.width + 2 * MARGIN, scene.height + 2 * MARGIN
    figure = Figure(figsize=(width / PER_INCH, height / PER_INCH), facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    for order, shape in enumerate(scene.shapes):
        _DRAWN[type(shape)](axes, shape, order, fonts)
    axes.set_xlim(-MARGIN, width - MARGIN)  # after the grids, which set limits of their own
    axes.set_ylim(height - MARGIN, -MARGIN)
    scale = min(2.0, (MOST_PIXELS / (width * height)) ** 0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message=r"Matplotlib currently does not support \w+ natively")
        figure.savefig(path, format="png", dpi=PER_INCH * scale)


def _box(axes: Any, box: Box, order: int, _: list[str]) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    fill, edge = (box.fill, "none") if box.fill is not None else ("none", INK)
    paint = {"facecolor": fill, "edgecolor": edge, "alpha": box.opacity, "linewidth": _points(1), "zorder": order}
    if box.radius:
        style = f"round,pad=0,rounding_size={min(box.radius, box.width / 2, box.height / 2)}"
        axes.add_patch(FancyBboxPatch((box.x, box.y), box.width, box.height, boxstyle=style, **paint))
    else:
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, **paint))


def _grid(axes: Any, grid: Grid, order: int, _: list[str]) -> None:
    from matplotlib.colors import to_rgba

    cells = np.array([[to_rgba(colour or PAPER, 1.0 if colour else 0.0) for colour in row] for row in grid.colours])
    right, bottom = grid.x + cells.shape[1] * grid.width, grid.y + cells.shape[0] * grid.height
    extent = (grid.x, right, bottom, grid.y)
    axes.imshow(cells, extent=extent, interpolation="nearest", aspect="auto", zorder=order)


def _line(axes: Any, line: Line, order: int, _: list[str]) -> None:
    xs, ys = zip(*line.points, strict=True)
    paint: dict[str, Any] = {"color": line.colour or INK, "alpha": line.opacity, "linewidth": _points(line.width)}
    if line.dash:
        paint["dashes"] = [part / line.width for part in line.dash]
    axes.plot(xs, ys, zorder=order, **paint)


def _dot(axes: Any, dot: Dot, order: int, _: list[str]) -> None:
    from matplotlib.patches import Circle

    axes.add_patch(Circle((dot.x, dot.y), dot.radius, facecolor=dot.fill or INK, edgecolor="none", zorder=order))


def _label(axes: Any, label: Label, order: int, fonts: list[str]) -> None:
    from matplotlib.patches import Rectangle

    drawn = axes.text(
        label.x,
        label.y,
        visible(label.text),
        fontsize=_points(label.size),
        fontfamily=fonts,
        fontweight="bold" if label.bold else "normal",
        color=label.colour or INK,
        alpha=label.opacity,
        ha={"start": "left", "middle": "center", "end": "right"}[label.anchor],
        va="baseline",
        rotation=-label.turn,
        rotation_mode="anchor",
        parse_math=False,  # a dollar is a dollar
        zorder=order,
    )
    if label.room is not None:
        left, top, width, height = label.room
        drawn.set_clip_on(True)
        drawn.set_clip_path(Rectangle((left, top), width, height, transform=axes.transData))


def _points(pixels: float) -> float:
    return pixels * 72 / PER_INCH


_DRAWN = {Box: _box, Grid: _grid, Line: _line, Dot: _dot, Label: _label}
