"""`Intervention`s checked against a model and lowered: what is compiled in, and arrays with one row a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxrt.config import ModelConfig
from jaxrt.errors import RequestError, nearest
from jaxrt.interventions import Add, Apply, Intervention, MaskLogits, Replace, Scale, Zero
from jaxrt.observations import (
    ObservationSelector,
    ObservationSet,
    TensorObservation,
    dimensions,
    known_paths,
)
from jaxrt.requests import is_list
from jaxrt.taps import Edit, EditArrays, Taps

SHORTEST = 16  # places for values that differ by position; more in powers of two, so that few shapes are compiled


@dataclass(frozen=True)
class Lowered:
    """Interventions on some rows in one phase: edits to compile in, and their arrays."""

    edits: tuple[Edit, ...] = ()
    arrays: tuple[EditArrays, ...] = ()

    @property
    def taps(self) -> Taps:
        return Taps.of(edits=self.edits)

    def row(self, index: int) -> "Lowered":
        """The same for one row alone."""

        def cut(array: Any, rows: int) -> Any:
            return array if array is None or array.shape[0] < rows else array[index : index + 1]

        one, edits = [], []
        for edit, arrays in zip(self.edits, self.arrays, strict=True):
            rows = arrays.index.shape[0]
            value = cut(arrays.value, rows) if rows > 1 else arrays.value
            edits.append(Edit(edit.paths, edit.kind, None if value is None else value.shape, edit.heads, edit.fn))
            one.append(EditArrays(cut(arrays.index, rows), cut(arrays.strength, rows), value, arrays.heads))
        return Lowered(tuple(edits), tuple(one))

    def placed(self, device: Any) -> "Lowered":
        """The same with its arrays on a device; once a request, not at every call."""
        return Lowered(self.edits, jax.device_put(self.arrays, device)) if self.edits else self


@dataclass(frozen=True)
class Places:
    """Where interventions meet sequences: for each row which of the user's it is (None: a spare row), and how long its
    prompt is."""

    numbers: tuple[int | None, ...]
    ends: tuple[int, ...]
    rows: int = field(init=False)  # how many the user has

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", 1 + max(number for number in self.numbers if number is not None))


def check(config: ModelConfig, interventions: Any, rows: int) -> tuple[Intervention, ...]:
    """Everything that can be said without prompts. Raises: RequestError naming what is wrong with which."""
    if isinstance(interventions, Intervention) or not is_list(interventions):
        raise RequestError(
            f"interventions of type {type(interventions).__name__}", expected="a list of Add, Scale, Zero, ..."
        )
    for intervention in interventions:
        if not isinstance(intervention, Intervention) or type(intervention) is Intervention:
            raise RequestError(
                f"an intervention of type {type(intervention).__name__}",
                expected="one of Add, Scale, Replace, Zero, MaskLogits, Apply",
            )
        paths = _paths(config, intervention)
        for row in intervention.rows or ():
            if row >= rows:
                raise RequestError(f"row {row} in rows", expected=f"below {rows}, the number of rows")
        for position in intervention.positions or ():
            if not -config.context <= position < config.context:
                raise RequestError(f"position {position}", expected=f"within the context of {config.context:,}")
        _heads(config, intervention, paths)
        for path in paths:
            _value(config, intervention, path, rows)
        _per_row(intervention, rows)
    return tuple(interventions)


def lower(
    config: ModelConfig, interventions: Sequence[Intervention], places: Places, phase: Literal["prefill", "decode"]
) -> Lowered:
    """The interventions of one phase, for rows at `places`. They have been checked.

    Raises: RequestError for a position before the start of a prompt, or past the values given for it.
    """
    edits, arrays = [], []
    for intervention in interventions:
        if intervention.phase not in ("both", phase):
            continue
        paths = _paths(config, intervention)
        heads = _heads(config, intervention, paths)
        strength = _spread(_per_row(intervention, places.rows), places)
        separate = isinstance(intervention, Replace) and isinstance(intervention.value, ObservationSet)
        for group in [(path,) for path in paths] if separate else [paths]:
            value = _value(config, intervention, group[0], places.rows)
            index = _index(config, intervention, places, value)
            if value is not None:
                value = _padded(_spread(value, places) if value.shape[0] > 1 else value)
            fn = intervention.fn if isinstance(intervention, Apply) else None
            shape = None if value is None else tuple(value.shape)
            edits.append(Edit(group, _KINDS[type(intervention)], shape, None if heads is None else len(heads), fn))
            arrays.append(EditArrays(index, strength, value, heads))
    return Lowered(tuple(edits), tuple(arrays))


_KINDS = {Add: "add", Scale: "scale", Replace: "replace", Zero: "replace", MaskLogits: "mask", Apply: "apply"}


def _paths(config: ModelConfig, intervention: Intervention) -> tuple[str, ...]:
    known = known_paths(len(config.layers))
    selector = ObservationSelector(intervention.path, exact=True)
    found = tuple(path for path in known if selector.matches(path))
    if not found:
        raise RequestError(f"no place for an intervention at {intervention.path!r}", fix=nearest(selector.path, known))
    return found


def _heads(config: ModelConfig, intervention: Intervention, paths: Sequence[str]) -> np.ndarray | None:
    """bool [N] of the heads that are meant, at paths with heads."""
    letter = next((letter for letter in dimensions(paths[0]) if letter in "NK"), None)
    wanted = getattr(intervention, "heads", None)
    if letter is None:
        if wanted is not None:
            raise RequestError(
                f"heads at {intervention.path}", expected="a path with heads", fix="use ...attention.heads"
            )
        return None
    there = {"N": config.heads, "K": config.kv_heads}[letter]
    for head in wanted or ():
        if head >= there:
            raise RequestError(f"head {head} at {intervention.path}", expected=f"below {there}")
    return np.isin(np.arange(there), list(range(there)) if wanted is None else wanted)


def _per_row(intervention: Intervention, rows: int) -> Any:
    """f32 [rows]: the strength, or factor, of every row of the user's."""
    name = "factor" if isinstance(intervention, Scale) else "strength"
    strength = _checked(name, getattr(intervention, name, np.float32(1)))
    if tuple(strength.shape) not in ((), (rows,)):
        raise RequestError(f"{name} of shape {list(strength.shape)}", expected=f"one number, or one for each of {rows}")
    module = jnp if isinstance(strength, Tracer) else np
    return module.broadcast_to(strength, (rows,)).astype(np.float32)


def _spread(values: Any, places: Places) -> Any:
    """Values of the user's rows as values of the session's; spare rows get those of the first, and never use them."""
    return values[np.array([number or 0 for number in places.numbers])]


def _value(config: ModelConfig, intervention: Intervention, path: str, rows: int) -> Any:
    """f32 [R, P, ...] to add or put in place, R and P one where it is the same for all; None where there is none."""
    widths = {"D": config.width, "V": config.vocab, "N": config.heads, "K": config.kv_heads, "H": config.head_width}
    letters = dimensions(path).replace("B", "").replace("T", "")
    trailing = tuple(widths.get(letter) for letter in letters)  # None for S: as many slots as are attended to
    if isinstance(intervention, MaskLogits):
        assert intervention.ids is not None
        for token in intervention.ids:
            if token >= config.vocab:
                raise RequestError(f"token id {token} in ids", expected=f"below {config.vocab}")
        return np.isin(np.arange(config.vocab), intervention.ids).astype(np.float32)[None, None]
    if isinstance(intervention, Zero):
        return np.zeros((1, 1, *(1 for _ in trailing)), np.float32)
    if isinstance(intervention, Add):
        value, name = intervention.vector, "vector"
    elif isinstance(intervention, Replace):
        value, name = intervention.value, "value"
    else:
        return None
    if isinstance(value, ObservationSet):
        found = value.get(path)
        if not isinstance(found, TensorObservation):
            raise RequestError(f"the observations to replace with have no {path!r}", fix=nearest(path, value))
        value = found.data
    value = _checked(name, value)
    module = jnp if isinstance(value, Tracer) else np
    if value.ndim == len(trailing) + 2 and dimensions(path) == "BNTS":
        value = module.moveaxis(value, 1, 2)
    if value.ndim == 1 and len(letters) == 2 and letters != "NS":
        value = value[None]  # the same for every head
    before = value.ndim - len(trailing)
    fits = 0 <= before <= 2 and all(
        wanted in (None, found) or (found == 1 and letter in "NK")
        for letter, wanted, found in zip(letters, trailing, value.shape[max(before, 0) :], strict=True)
    )
    if not fits:
        raise RequestError(
            f"a {name} of shape {list(value.shape)} at {path}",
            expected=f"[{', '.join(letters)}] = {[width or 'S' for width in trailing]}, "
            "or with positions, or rows and positions, before it",
        )
    value = value.reshape(*(1,) * (2 - before), *value.shape)
    if value.shape[0] not in (1, rows):
        raise RequestError(f"a {name} of {value.shape[0]} rows", expected=f"one row, or {rows}")
    if value.shape[1] > config.context:
        raise RequestError(f"a {name} of {value.shape[1]} positions", expected=f"at most {config.context:,}")
    return value


def _index(config: ModelConfig, intervention: Intervention, places: Places, value: Any) -> np.ndarray:
    """int32 [B, C]: which value goes to each position; -1 where the intervention does not apply."""
    index = np.full((len(places.numbers), config.context), -1, np.int32)
    count = 1 if value is None else value.shape[1]
    seen = isinstance(intervention, Replace) and isinstance(intervention.value, ObservationSet)
    positions = intervention.positions
    if positions is not None and not seen and count not in (1, len(positions)):
        raise RequestError(
            f"{count} positions of values at {intervention.path}", expected=f"one, or {len(positions)} as in positions"
        )
    for row, (number, end) in enumerate(zip(places.numbers, places.ends, strict=True)):
        if number is None or (intervention.rows is not None and number not in intervention.rows):
            continue
        if positions is None:
            index[row, : None if count == 1 and not seen else count] = 0 if count == 1 else np.arange(count)
            continue
        for order, position in enumerate(positions):
            place = position + end if position < 0 else position
            if place < 0:
                raise RequestError(f"position {position} of a prompt of {end} tokens", expected=f"{-end} or more")
            if seen and place >= count:
                raise RequestError(
                    f"position {position}, and observations of {count} positions", expected=f"below {count}"
                )
            index[row, place] = place if seen else 0 if count == 1 else order
    return index


def _padded(value: Any) -> Any:
    """Room for a power of two of positions, and of attended slots: few shapes, few compiles."""
    module = jnp if isinstance(value, Tracer) else np
    count = value.shape[1]
    room = count if count == 1 else max(SHORTEST, 1 << (count - 1).bit_length())
    return module.pad(value, [(0, 0), (0, room - count), *[(0, 0)] * (value.ndim - 2)])


def _checked(name: str, value: Any) -> Any:
    """float32 numbers; device arrays come to the host to be checked, traced ones go on as they are."""
    if isinstance(value, Tracer):
        return value.astype(jnp.float32)
    array = np.asarray(value, np.float32)
    if not np.isfinite(array).all():
        raise RequestError(f"a {name} that holds NaN or infinity", expected="finite numbers")
    return array
