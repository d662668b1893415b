"""What is observed of a pass: how large it will be, and how the parts of it become one set."""

import math
from collections.abc import Sequence

import numpy as np

from jaxrt.config import ModelConfig
from jaxrt.errors import CapacityError, RequestError
from jaxrt.markup import bytes_text
from jaxrt.observations import ObservationRequest, ObservationSet, TensorObservation, dimensions, known_paths
from jaxrt.sessions.outputs import XlaOutput


def admit(
    config: ModelConfig, request: ObservationRequest, counts: Sequence[int], ends: Sequence[int]
) -> tuple[str, ...]:
    """The paths that `request` means, for rows of counts[b] new tokens that end at ends[b].

    Raises: RequestError for a selector that matches nothing, or rows of unequal length; CapacityError beyond the
    budget.
    """
    if not isinstance(request, ObservationRequest):
        raise RequestError(f"a request of type {type(request).__name__}", expected="an ObservationRequest")
    paths = request.paths(known_paths(len(config.layers)))
    if len(set(counts)) > 1:
        raise RequestError(f"{list(counts)} tokens a row to inspect", expected="the same number for each row")
    widths = {"B": len(counts), "T": counts[0], "S": max(ends), "D": config.width, "V": config.vocab}
    widths |= {"N": config.heads, "K": config.kv_heads, "H": config.head_width}
    needed = sum(4 * math.prod(widths[letter] for letter in dimensions(path)) for path in paths)
    if needed > request.budget_bytes:
        raise CapacityError(
            f"{bytes_text(needed)} of observations at {len(paths)} paths",
            expected=f"at most {bytes_text(request.budget_bytes)}",
            fix="observe fewer paths or tokens, or ask with a larger budget_bytes",
        )
    return paths


def of_prompts(output: XlaOutput, paths: Sequence[str], ends: Sequence[int]) -> ObservationSet:
    """Of a prefill: its parts are chunks, row after row, padding left out."""
    rows = len(ends)
    per_row = len(output.observed) // rows
    chunks = [output.observed[row * per_row : (row + 1) * per_row] for row in range(rows)]
    found = {
        path: np.concatenate([_joined(path, [(seen[path], count) for seen, count in row], ends) for row in chunks])
        for path in paths
    }
    return ObservationSet({path: TensorObservation(data) for path, data in found.items()})


def of_positions(output: XlaOutput, paths: Sequence[str], ends: Sequence[int]) -> ObservationSet:
    """Of a decode: its parts are positions of all rows."""
    found = {path: _joined(path, [(seen[path], count) for seen, count in output.observed], ends) for path in paths}
    return ObservationSet({path: TensorObservation(data) for path, data in found.items()})


def _joined(path: str, parts: Sequence[tuple], ends: Sequence[int]) -> np.ndarray:
    """Parts along their tokens; attention weights over as many slots as are attended to in the end."""
    letters = dimensions(path)
    axis = letters.index("T")
    cut = [np.take(np.asarray(array), range(count), axis=axis) for array, count in parts]
    joined = np.concatenate(cut, axis=axis)
    return joined[..., : max(ends)] if letters.endswith("S") else joined
