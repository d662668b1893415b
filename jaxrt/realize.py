"""From a program and the values at hand to the plan that computes chosen targets and reads nothing else."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrt.errors import ContextError, RequestError
from jaxrt.program import Named, Plan, Program, target
from jaxrt.requests import is_whole, shown
from jaxrt.symbols import SymEnv, unbound

# What `InferenceContext.own` runs. Its outputs are buffers of their own, since nothing is donated to it.
COPY = Program(lambda values, env: {"copy": jax.tree.map(jnp.copy, values["value"])}, name="copy")


@dataclass(frozen=True, eq=False)
class Prebuilt:
    """A plan that has run once. `cache`: name -> pytree of the device values it read and did not donate; when captured,
    with the constants it uploaded."""

    plan: Plan
    result: np.ndarray
    cache: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class SplitOutput:
    """Targets in the order asked for: `host` are copies as numpy arrays, `device` stay where they were made."""

    host: tuple[np.ndarray, ...]
    device: tuple[Array, ...]


@dataclass(frozen=True)
class Reads:
    """What a program looks at, and updates, of the values and symbols at hand."""

    names: tuple[str, ...]
    symbols: tuple[str, ...]


def hosted(program: Program, besides: Collection[str]) -> dict[str, Any]:
    """The program's constants but for those named, as pytrees of numpy arrays. Raises: ContextError for what is no
    array of numbers."""
    found = {}
    for name in program.constants.keys() - set(besides):
        found[name] = jax.tree.map(np.asarray, program.constants[name])
        for leaf in jax.tree.leaves(found[name]):
            if not _numeric(leaf.dtype):
                raise ContextError(f"constant {name!r} of {program.name} holds {leaf.dtype}", expected="numbers")
    return found


def reads(
    program: Program,
    available: Mapping[str, Any],
    env: SymEnv,
    targets: Sequence[str],
    absent: Callable[[str], Exception],
) -> Reads:
    """Trace `program` once over all that is available: name -> pytree of arrays. Computes and compiles nothing.

    Raises: what `absent` makes of a missing value; ContextError for an unknown target or one that is no single array
    of numbers; UnboundSymbol; whatever the function itself raises.
    """
    seen = Reads((), ())

    def look(values: dict[str, Any], symbols: dict[str, Array]) -> None:
        nonlocal seen
        named, bound = Named(values, absent), Named(symbols, lambda name: unbound(name, env, program.name))
        outputs = program.trace(named, bound)
        for name in targets:
            _check_single(program, name, outputs)
        seen = Reads(tuple(named.seen), tuple(bound.seen))

    jax.eval_shape(look, dict(available), {name: jax.ShapeDtypeStruct((), jnp.int32) for name in env})
    updated = [name for name in program.updates if name in available]
    return Reads(tuple(dict.fromkeys([*seen.names, *updated])), seen.symbols)


def for_reading(
    program: Program, targets: Sequence[str], n_host: int, dtype: np.dtype | None
) -> tuple[Program, list[str]]:
    """`program` as one whose outputs are its updates and `targets` alone; with what each target is called in it.

    The first `n_host` are cast to `dtype`. A target that updates a value comes out twice: in the value's buffer, which
    the next call consumes, and in a buffer for the reader.
    """
    casts = [dtype if index < n_host else None for index in range(len(targets))]
    keys = []
    for name, cast in zip(targets, casts, strict=True):
        key = name if cast is None else f"{name} as {cast.name}"
        keys.append(f"{key} to read" if key in program.updates.values() else key)

    def fn(values: Mapping[str, Any], env: Mapping[str, Array]) -> dict[str, Any]:
        outputs = program.trace(values, env)
        found = {name: outputs[name] for name in program.updates.values() if name in outputs}
        for key, name, cast in zip(keys, targets, casts, strict=True):
            (array,) = target(program, name, outputs)[1]
            found[key] = array if cast is None else array.astype(cast)
        return found

    return Program(fn, name=program.name, updates=program.updates), keys


def checked_dtype(dtype: Any) -> np.dtype | None:
    """`dtype` as numpy knows it. Raises: RequestError for one of no numbers, or that JAX holds only under x64."""
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if not _numeric(found):
        raise RequestError(f"dtype {shown(dtype)}", expected="a dtype of numbers, such as 'float32'")
    if found.itemsize * 8 > (64 if found.kind == "c" else 32) and not jax.config.read("jax_enable_x64"):
        raise RequestError(f"dtype {found.name}", expected="at most 32 bits", fix="cast on the host afterwards")
    return found


def checked_targets(program: Program, targets: Sequence[str], n_host: int) -> list[str]:
    """Raises: RequestError for what is no program, what is no list of names, or a count that is not within it."""
    if not isinstance(program, Program):
        raise RequestError(f"a program of type {type(program).__name__}", fix="wrap it: Program(fn, name=...)")
    if isinstance(targets, str) or not all(isinstance(name, str) for name in targets):
        raise RequestError(f"targets {shown(targets)}", expected="a list of target names")
    if not is_whole(n_host) or not 0 <= n_host <= len(targets):
        raise RequestError(f"n_host {shown(n_host)}", expected=f"a whole number from 0 to {len(targets)}, the targets")
    return list(targets)


def _check_single(program: Program, name: str, outputs: Mapping[str, Any]) -> None:
    made, leaves = target(program, name, outputs)
    if made.tree != jax.tree.structure(0):
        raise ContextError(
            f"target {name!r} of {program.name} is a tree of {len(leaves)} arrays",
            expected="one array",
            fix="give its arrays names of their own among the targets",
        )
    if jnp.issubdtype(leaves[0].dtype, jax.dtypes.extended):
        raise ContextError(
            f"target {name!r} of {program.name} is {leaves[0].dtype}",
            expected="numbers",
            fix="return jax.random.key_data() of a key",
        )


def _numeric(dtype: np.dtype) -> bool:
    return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)
