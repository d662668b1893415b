"""What every function of `display` returns: shown by notebooks, saved as a page, as SVG or as PNG."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jaxrt.display import png
from jaxrt.display.scene import FONT, INK, PAPER, Scene, svg, text
from jaxrt.errors import RequestError

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
</head>
<body style="margin:24px;font-family:{font}">
{html}
</body>
</html>
"""


@dataclass(frozen=True)
class Picture:
    """A title, what there is to say about it in a line, and the shapes that show it."""

    title: str
    facts: str
    scene: Scene = field(repr=False)

    @cached_property
    def html(self) -> str:
        """A fragment for any page: one <div>, no scripts, nothing from elsewhere; it takes the page's text colour."""
        # position: tooltips and clipped texts stay inside, and a wide picture scrolls rather than shrinks
        return f'<div style="overflow-x:auto;max-width:100%">{svg(self.scene, self.title, "display:block")}</div>'

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a whole page (.html), the drawing on white (.svg), or its pixels on white (.png). Returns the path.

        Raises: RequestError for another suffix, or for .png without matplotlib; OSError.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix == ".html":
            path.write_text(_PAGE.format(title=text(self.title), font=FONT.replace('"', "'"), html=self.html), "utf-8")
        elif suffix == ".svg":
            path.write_text(svg(self.scene, self.title, f"color:{INK};background:{PAPER}") + "\n", "utf-8")
        elif suffix == ".png":
            png.save(self.scene, path)
        else:
            raise RequestError(
                f"a picture saved as {path.name!r}", expected="a name that ends in .html, .svg or .png", fix="rename it"
            )
        return path

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        width, height = round(self.scene.width), round(self.scene.height)
        return f"<Picture {self.title}: {self.facts}; {width} x {height}, .save('picture.html'), .svg or .png>"
