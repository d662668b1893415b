"""Interventions as data: changes made to a pass at the paths of its observations. Checked when made; no jax here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from jaxrt.errors import RequestError
from jaxrt.observations import LOGITS_PATH, ObservationSet, TensorObservation
from jaxrt.requests import is_list, is_whole, shown

Phase = Literal["both", "prefill", "decode"]
Value = Any  # numbers, numpy, a TensorObservation; or a jax.Array, traced ones included


@dataclass(frozen=True, eq=False)
class Intervention:
    """A change at `path`, where `*` stands for every layer's number.

    A path is part of the compiled program; all else is traced. To sweep over layers, change all of them in one list and
    let the strengths of all but one be 0.

    positions: places in the sequence, counted from 0, or from the end of the prompt when negative; None is all.
    rows: of the batch: the place of a prompt in a list of prompts; None is all. phase: when it applies.
    """

    path: str
    positions: Sequence[int] | None = field(default=None, kw_only=True)
    rows: Sequence[int] | None = field(default=None, kw_only=True)
    phase: Phase = field(default="both", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise RequestError(f"a path {shown(self.path)}", expected="one such as 'model.layers.3.output'")
        if self.phase not in get_args(Phase):
            raise RequestError(f"phase={shown(self.phase)}", expected=f"one of {', '.join(get_args(Phase))}")
        _set(self, "positions", _whole_numbers("positions", self.positions))
        _set(self, "rows", _whole_numbers("rows", self.rows, lowest=0))


@dataclass(frozen=True, eq=False)
class _OfHeads(Intervention):
    """heads: which of the heads, at paths that have them: query heads, or KV heads for keys and values."""

    heads: Sequence[int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "heads", _whole_numbers("heads", self.heads, lowest=0))


@dataclass(frozen=True, eq=False)
class Add(_OfHeads):
    """x + strength * vector. vector: shaped like one position ([D], [N, H], ...), with a position axis before it if
    there is one for each of `positions`, and a row axis before that. strength: one number, or one a row."""

    vector: Value
    strength: Value = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "vector", _finite("vector", self.vector))
        _set(self, "strength", _finite("strength", self.strength))


@dataclass(frozen=True, eq=False)
class Scale(_OfHeads):
    """x * factor. factor: one number, or one a row."""

    factor: Value

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "factor", _finite("factor", self.factor))


@dataclass(frozen=True, eq=False)
class Replace(_OfHeads):
    """`value` in place of what is there (activation patching), or part of the way there: x + strength * (value - x).

    value: shaped as `Add.vector`; or the ObservationSet of another run, whose position t replaces position t.
    """

    value: Value
    strength: Value = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.value, ObservationSet):
            _set(self, "value", _finite("value", self.value))
        _set(self, "strength", _finite("strength", self.strength))


@dataclass(frozen=True, eq=False)
class Zero(_OfHeads):
    """Zeros in place of what is there (ablation); with a strength below one, x * (1 - strength)."""

    strength: Value = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "strength", _finite("strength", self.strength))


@dataclass(frozen=True, eq=False)
class Apply(_OfHeads):
    """fn(x) in place of x. fn: a pure JAX function that keeps shape and dtype and treats every position by itself
    (a chunk of a prompt may be padded). It is compiled in: keep one function object to compile once."""

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn):
            raise RequestError(f"fn={shown(self.fn)}", expected="a pure JAX function")


@dataclass(frozen=True, eq=False)
class MaskLogits(Intervention):
    """The tokens `ids` can neither be chosen nor weigh in: their logits are minus infinity."""

    path: str = field(default=LOGITS_PATH, init=False)
    ids: Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ids is None:
            raise RequestError("ids=None", expected="a list of token ids")
        unique = tuple(dict.fromkeys(self.ids)) if is_list(self.ids) else self.ids
        _set(self, "ids", _whole_numbers("ids", unique, lowest=0))


def _set(intervention: Intervention, name: str, value: Any) -> None:
    object.__setattr__(intervention, name, value)


def _whole_numbers(name: str, numbers: Any, lowest: int | None = None) -> tuple[int, ...] | None:
    if numbers is None:
        return None
    numbers = (numbers,) if is_whole(numbers) else numbers
    if isinstance(numbers, range):
        numbers = tuple(numbers)
    if not is_list(numbers) or len(numbers) == 0:
        raise RequestError(f"{name}={shown(numbers)}", expected="whole numbers, one or more", fix="leave out for all")
    for number in numbers:
        if not is_whole(number) or (lowest is not None and number < lowest):
            least = "" if lowest is None else f" from {lowest} on"
            raise RequestError(f"{shown(number)} in {name}", expected=f"whole numbers{least}")
    if len({int(number) for number in numbers}) < len(numbers):
        raise RequestError(f"{name}={shown(numbers)}", expected="each number once")
    return tuple(int(number) for number in numbers)


def _finite(name: str, value: Value) -> Value:
    """Host values as float32, checked; device arrays, which may be traced, as they are (`edits` checks those)."""
    if isinstance(value, TensorObservation):
        value = value.data
    if hasattr(value, "aval"):
        return value
    try:
        array = np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name}={shown(value)}", expected="numbers") from error
    if not np.isfinite(array).all():
        raise RequestError(f"a {name} that holds NaN or infinity", expected="finite numbers")
    return array
