"""The in-graph side of observations and interventions: what a compiled pass lets out, and what it changes on the way.

A tap stands at every path. In a plain program it hands its value on, so that the program's text is that of a model
without taps. In a program that observes or edits anything, every tap is a barrier to fusion: then each stretch between
two paths is computed the same way whatever else is observed or edited, and an edit that changes nothing changes no bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxrt.errors import RequestError
from jaxrt.observations import WEIGHTS, dimensions, layer_path


@dataclass(frozen=True)
class Edit:
    """What is compiled in of one intervention; the rest of it is arrays."""

    paths: tuple[str, ...]
    kind: str  # of KINDS
    value: tuple[int, ...] | None = None  # shape of its value
    heads: int | None = None  # how many there are, at paths with heads
    fn: Callable[[Array], Array] | None = None


@struct.dataclass
class EditArrays:
    """What is traced of one intervention. C is the model's context: every position has a place."""

    index: Any  # int32 [B, C]: which value goes to a position; -1: leave it
    strength: Any  # f32 [B]
    value: Any  # f32 [R, P, ...] with R one or B; None where the kind takes none. At weights [R, P, N, S]
    heads: Any  # bool [N]; None where there are none


@dataclass(frozen=True)
class Taps:
    """What a program observes and edits, and how: static, part of its bucket."""

    observed: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    cut: bool = False  # barriers at every path
    whole: bool = False  # attention over the whole capacity at once, weights and all: it can be differentiated

    @classmethod
    def of(cls, observed: Sequence[str] = (), edits: Sequence[Edit] = ()) -> "Taps":
        """The taps of a runtime's program; PLAIN when there is nothing to do."""
        observed, edits = tuple(observed), tuple(edits)
        return cls(observed, edits, cut=bool(observed or edits))

    def __str__(self) -> str:
        counts = {"observed": len(self.observed), "edited": sum(len(edit.paths) for edit in self.edits)}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


PLAIN = Taps()


def abstract_edits(taps: Taps, rows: int, context: int) -> tuple[EditArrays, ...]:
    """Shapes and dtypes of the arrays that go with `taps`."""

    def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    return tuple(
        EditArrays(
            index=spec(rows, context, dtype=jnp.int32),
            strength=spec(rows),
            value=None if edit.value is None else spec(*edit.value),
            heads=None if edit.heads is None else spec(edit.heads, dtype=jnp.bool_),
        )
        for edit in taps.edits
    )


class Tap:
    """Taps while a pass is traced: called with each value on its way, it gives the value to go on with."""

    def __init__(self, taps: Taps = PLAIN, edits: Sequence[EditArrays] = ()) -> None:
        self.taps = taps
        self.seen: dict[str, Array] = {}
        self._edits = tuple(edits)

    def __call__(self, path: str, x: Array, positions: Array) -> Array:
        """x, edited and noted. Shapes: x as the path says, of T tokens; positions int32 [B, T]."""
        x = self.edit(path, x, positions)
        if path in self.taps.observed:
            self.seen[path] = x
        return x

    def edit(self, path: str, x: Array, positions: Array) -> Array:
        """x with every edit of this path, in their order."""
        x = self._barrier(x)
        for edit, arrays in zip(self.taps.edits, self._edits, strict=True):
            if path in edit.paths:
                x = self._barrier(_edited(path, x, edit, arrays, positions))
        return x

    def layer(self, index: int) -> tuple[Taps, tuple[EditArrays, ...]]:
        """The taps of one layer with their arrays; layers that are tapped alike have equal taps."""
        inner, pairs = layer_path(index, ""), zip(self.taps.edits, self._edits, strict=True)
        found = [(edit, arrays, _below(inner, edit.paths)) for edit, arrays in pairs]
        observed = _below(inner, self.taps.observed)
        edits = tuple(replace(edit, paths=paths) for edit, _, paths in found if paths)
        whole = self.taps.whole or WEIGHTS in observed or any(WEIGHTS in edit.paths for edit in edits)
        taps = replace(self.taps, observed=observed, edits=edits, whole=whole)
        return taps, tuple(arrays for _, arrays, paths in found if paths)

    def see(self, index: int, seen: Mapping[str, Array]) -> None:
        """Note what was observed inside a layer."""
        self.seen.update({layer_path(index, site): value for site, value in seen.items()})

    def _barrier(self, x: Array) -> Array:
        return jax.lax.optimization_barrier(x) if self.taps.cut else x


def _below(prefix: str, paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(path.removeprefix(prefix) for path in paths if path.startswith(prefix))


def _edited(path: str, x: Array, edit: Edit, arrays: EditArrays, positions: Array) -> Array:
    if edit.fn is not None:
        changed = edit.fn(x)
        if (getattr(changed, "shape", None), getattr(changed, "dtype", None)) != (x.shape, x.dtype):
            raise RequestError(
                f"Apply at {path} turned {x.dtype}{list(x.shape)} into {shown_type(changed)}",
                expected="the same shape and dtype",
            )
    turn = dimensions(path) == "BNTS"
    x, index = (jnp.moveaxis(x, 1, 2) if turn else x), _index(arrays.index, positions)
    spread = (..., *(None,) * (x.ndim - 2))
    chosen = (index >= 0)[spread]
    if arrays.heads is not None:
        chosen = chosen & arrays.heads[None, None, :, None]
    if edit.fn is not None:
        new = jnp.moveaxis(changed, 1, 2) if turn else changed
    else:
        strength = arrays.strength[:, None][spread]
        value = None if arrays.value is None else _values(arrays.value, index, x.shape[-1])
        new = KINDS[edit.kind](x.astype(jnp.float32), value, strength).astype(x.dtype)
    x = jnp.where(chosen, new, x)
    return jnp.moveaxis(x, 2, 1) if turn else x


def _index(places: Array, positions: Array) -> Array:
    """int32 [B, T]: the value that goes to each position; positions past the context have none."""
    return jnp.take_along_axis(places, positions, axis=1, mode="fill", fill_value=-1)


def _values(value: Array, index: Array, last: int) -> Array:
    """The value of every token, ready to broadcast: [B or 1, T or 1, ...]; a shorter last axis is filled with zeros."""
    if value.shape[1] > 1:
        at = jnp.maximum(index, 0)
        value = value[0][at] if value.shape[0] == 1 else jax.vmap(lambda one, place: one[place])(value, at)
    width = value.shape[-1]
    if width in (1, last):
        return value
    padding = [(0, 0)] * (value.ndim - 1) + [(0, max(0, last - width))]
    return jnp.pad(value[..., :last], padding)


def _replace(x: Array, value: Array, strength: Array) -> Array:
    return jnp.where(strength == 1, value, x + strength * (value - x))


KINDS: Mapping[str, Callable[[Array, Any, Array], Array]] = {
    "add": lambda x, value, strength: x + strength * value,
    "scale": lambda x, value, strength: x * strength,
    "replace": _replace,
    "mask": lambda x, value, strength: jnp.where(value > 0, -jnp.inf, x),
}


def shown_type(value: Any) -> str:
    """dtype and shape of an array, or the type of anything else."""
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
