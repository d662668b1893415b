"""Round numbers along an axis, and how they are written."""

import math


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten that lie from `low` to `high`: at least two wherever they
    differ, and about as many as asked for."""
    if not low < high:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    found = []
    while (first + len(found)) * step <= high + 1e-9 * step:
        found.append((first + len(found)) * step)
    return found


def tick_text(value: float) -> str:
    """As short as it can be written to six digits, with a real minus."""
    return f"{value + 0.0:,.6g}".replace("-", "−")
