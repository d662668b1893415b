"""Colours: one scale for magnitudes, one for signed values, a few that are told apart; and the ink that reads on them.

Both scales are perceptually uniform to the eye's accuracy, and are told apart by the colour-blind.
"""

import math
from collections.abc import Sequence

# viridis (Smith and van der Walt 2015) and RdBu (Brewer), at equal steps between which colours are mixed
_MAGNITUDE = ["440154", "482878", "3e4a89", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"]
_SIGNED = ["053061", "2166ac", "4393c3", "92c5de", "d1e5f0", "f7f7f7", "fddbc7", "f4a582", "d6604d", "b2182b", "67001f"]

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c", "#a6761d")  # Okabe and Ito
SURPRISE = "#e66e1e"  # of unlikely tokens, as in `jaxrt.markup`
NAN = "#9a9a9a"
LIGHT, DARK = "#ffffff", "#111111"


def magnitude(share: float) -> str:
    """The colour of a share from 0 (dark) to 1 (bright); a NaN is grey."""
    return _mixed(_MAGNITUDE, share)


def signed(share: float) -> str:
    """The colour of a share from -1 (blue) through 0 (white) to 1 (red); a NaN is grey."""
    return _mixed(_SIGNED, (share + 1) / 2)


def ink(fill: str) -> str:
    """Black or white, whichever reads better on `fill` (#rrggbb), by relative luminance (WCAG 2)."""
    channels = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return DARK if luminance > 0.179 else LIGHT


def _mixed(stops: Sequence[str], share: float) -> str:
    if math.isnan(share):
        return NAN
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    a, b = (([int(stop[i : i + 2], 16) for i in (0, 2, 4)]) for stop in stops[low : low + 2])
    return "#" + "".join(f"{round(x + (y - x) * (place - low)):02x}" for x, y in zip(a, b, strict=True))
