"""Programs and plans: the only place that lowers and compiles. Counts compiles, and can forbid them."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxrt.errors import CompileForbidden, ContextError, nearest
from jaxrt.explain import Explanation, explain
from jaxrt.symbols import packed, unbound

Values = Mapping[str, Any]  # name -> pytree of arrays
Env = Mapping[str, Array]  # symbol -> traced int32 scalar


@dataclass(frozen=True, eq=False)
class Program:
    """A named pure function `fn(values, env) -> {target: pytree}`.

    values: name -> pytree of arrays. env: symbol name -> int32 scalar. constants: name -> pytree of numpy arrays, for
    the values that a context does not hold. updates: {"kv": "kv_next"} makes target `kv_next` the context's new `kv`,
    whose old buffers are donated; shapes, dtypes and structure must stay as they are.

    Raises: ContextError when two values are updated by one target.
    """

    fn: Callable[[Values, Env], Mapping[str, Any]]
    name: str = field(kw_only=True)
    constants: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    updates: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if len(set(self.updates.values())) < len(self.updates):
            raise ContextError(f"{self.name} updates {dict(self.updates)}", expected="a target of its own for each")

    def trace(self, values: Values, env: Env) -> Mapping[str, Any]:
        """The function's targets. Raises: ContextError where it returns no mapping; whatever the function raises."""
        outputs = self.fn(values, env)
        if not isinstance(outputs, Mapping):
            raise ContextError(
                f"{self.name} returned a {type(outputs).__name__}", expected="a mapping of target names to arrays"
            )
        return outputs


@dataclass(frozen=True)
class Slot:
    """One named value of a plan, flattened: where its leaves go and how to put them together again."""

    name: str
    tree: Any  # jax.tree_util.PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in self.leaves)


@dataclass(frozen=True, eq=False)
class Plan:
    """A program compiled for given shapes and placement. Takes one flat tuple: the inputs' leaves in order, then the
    env where there are symbols.

    Dispatch costs microseconds a leaf, more for nested trees; so what is called is flat, and only what a caller asks
    for is put together again. Holds no buffers but captured constants.
    """

    name: str
    inputs: tuple[Slot, ...]
    symbols: tuple[str, ...]
    targets: tuple[Slot, ...]  # those that update an input come first, so that no other output takes their buffer
    updates: Mapping[str, str]  # target -> the value it replaces
    executable: jax.stages.Compiled = field(repr=False)
    seconds: float  # tracing, lowering and compiling
    from_cache: bool  # loaded from the persistent compile cache
    # Inputs for a context that does not hold them: numpy leaves, uploaded at each call, or device leaves, captured.
    constants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, repr=False)

    def env(self, values: Mapping[str, int]) -> np.ndarray:
        """The symbols' values as the int32 vector an executable takes; others may be there too.

        Raises: UnboundSymbol for a missing one; RequestError for a value that is no whole number of 32 bits.
        """
        return packed(self.symbols, values, self.name)

    @cached_property
    def donated(self) -> tuple[str, ...]:
        """The inputs whose buffers a call consumes."""
        replaced = set(self.updates.values())
        return tuple(slot.name for slot in self.inputs if slot.name in replaced)

    @cached_property
    def captured(self) -> tuple[str, ...]:
        """The constants that were uploaded once for ever."""
        return tuple(n for n, leaves in self.constants.items() if all(isinstance(leaf, Array) for leaf in leaves))

    @cached_property
    def result(self) -> str:
        """The one target that replaces no value. Raises: ContextError when there are more, or it is no single array."""
        rest = [slot for slot in self.targets if slot.name not in self.updates]
        if len(rest) != 1 or len(rest[0].leaves) != 1:
            raise ContextError(
                f"{self.name} was planned for {[slot.name for slot in rest]}",
                expected="one target that is one array",
                fix="take the plan that context.prebuild() returns",
            )
        return rest[0].name

    def explain(self) -> Explanation:
        """What it takes, makes and costs, as text, HTML or JSON. Runs nothing."""
        return explain(self)

    def _repr_html_(self) -> str:
        return self.explain()._repr_html_()


def plan(
    program: Program,
    specs: Mapping[str, Any],
    targets: Sequence[str],
    symbols: Sequence[str] = (),
) -> Plan:
    """Trace, lower and compile `program` for inputs of the given shapes.

    specs: input name -> pytree of arrays or ShapeDtypeStructs. Only `targets`, and those that update a value, are
    computed.

    Raises: ContextError for a value, symbol or target the program does not know, or an update of other shapes than
    the value it replaces; CompileForbidden under `forbid_compile()`.
    Blocks: for as long as XLA compiles.
    """
    if _ledger.forbidden:
        raise CompileForbidden(
            f"{program.name} is not compiled for the shapes it is called with",
            fix="call warmup() with the rows and capacity that requests will need, or prebuild() a program of your own",
        )
    inputs = {name: slot(name, tree) for name, tree in specs.items()}
    updates = {target: name for name, target in program.updates.items()}
    wanted = list(dict.fromkeys([*updates, *targets]))
    produced: list[Slot] = []

    def flat(*leaves: Array) -> tuple[Array, ...]:
        position, values = 0, {}
        for name, each in inputs.items():
            values[name] = each.tree.unflatten(leaves[position : position + len(each.leaves)])
            position += len(each.leaves)
        env = {symbol: leaves[-1][i] for i, symbol in enumerate(symbols)}
        outputs = program.trace(
            Named(values, lambda name: _no_value(program.name, name, values)),
            Named(env, lambda name: unbound(name, env, program.name)),
        )
        produced.clear()
        flattened: list[Array] = []
        for name in wanted:
            made, found = target(program, name, outputs)
            replaced = inputs.get(updates.get(name, ""))
            if replaced is not None:
                _check_update(program, made, replaced)
                found = [_as_placed(leaf, spec) for leaf, spec in zip(found, replaced.leaves, strict=True)]
            produced.append(made)
            flattened += found
        return tuple(flattened)

    flat.__name__ = program.name
    donate, position = [], 0
    for name, each in inputs.items():
        if name in program.updates:
            donate += range(position, position + len(each.leaves))
        position += len(each.leaves)
    arguments = [leaf for each in inputs.values() for leaf in each.leaves]
    if symbols:
        arguments.append(jax.ShapeDtypeStruct((len(symbols),), jnp.int32))
    started = time.perf_counter()
    with _ledger.watch() as seen:
        lowered = jax.jit(flat, donate_argnums=donate, keep_unused=True).lower(*arguments)
        executable = lowered.compile()
    return Plan(
        name=program.name,
        inputs=tuple(inputs.values()),
        symbols=tuple(symbols),
        targets=tuple(produced),
        updates=updates,
        executable=executable,
        seconds=time.perf_counter() - started,
        from_cache=seen.hits > 0 and seen.misses == 0,
    )


def slot(name: str, tree: Any) -> Slot:
    """The slot of a pytree of arrays or ShapeDtypeStructs, with their placement where they have one."""
    leaves, structure = jax.tree.flatten(tree)
    return Slot(name, structure, tuple(_spec(leaf) for leaf in leaves))


def target(program: Program, name: str, outputs: Mapping[str, Any]) -> tuple[Slot, list[Array]]:
    """One of a program's outputs, while it is traced. Raises: ContextError for none, or what is no array."""
    if name not in outputs:
        raise ContextError(f"{program.name} has no target {name!r}", fix=nearest(name, outputs))
    leaves, structure = jax.tree.flatten(outputs[name])
    for leaf in leaves:
        if not isinstance(leaf, Array | np.ndarray | np.generic | bool | int | float | complex):
            raise ContextError(f"target {name!r} of {program.name} holds a {type(leaf).__name__}", expected="arrays")
    arrays = [leaf if isinstance(leaf, Array) else jnp.asarray(leaf) for leaf in leaves]
    return Slot(name, structure, tuple(_spec(leaf) for leaf in arrays)), arrays


def _check_update(program: Program, made: Slot, replaced: Slot) -> None:
    same = [(leaf.shape, leaf.dtype) for leaf in made.leaves] == [(leaf.shape, leaf.dtype) for leaf in replaced.leaves]
    if not same or made.tree != replaced.tree:
        raise ContextError(
            f"{program.name} updates {replaced.name!r} by {made}",
            expected=str(replaced),
            fix="keep structure, shapes and dtypes, or make it a plain target and insert that",
        )


def _as_placed(leaf: Array, spec: jax.ShapeDtypeStruct) -> Array:
    """On a mesh XLA may choose another sharding than the donated buffer's, which then cannot be used."""
    on_mesh = isinstance(spec.sharding, jax.sharding.NamedSharding)
    return jax.lax.with_sharding_constraint(leaf, spec.sharding) if on_mesh else leaf


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    placed = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not isinstance(leaf, Tracer)
    sharding = leaf.sharding if placed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class Named(Mapping[str, Any]):
    """What a program's function is given by name. Remembers in `seen` what was looked at, in order."""

    def __init__(self, values: Mapping[str, Any], absent: Callable[[str], Exception]) -> None:
        self._values, self._absent = values, absent
        self.seen: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise self._absent(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._values:
            return False
        self.seen[name] = None  # type: ignore[index]  # a branch may hang on it
        return True

    def __iter__(self) -> Iterator[str]:
        self.seen.update(dict.fromkeys(self._values))
        return iter(self._values)

    def __len__(self) -> int:
        return sum(1 for _ in self)


# A function may hand on all of its values at once, to a jitted function of its own for one.
jax.tree_util.register_pytree_node(
    Named,
    lambda named: (list(named.values()), tuple(named)),
    lambda names, values: dict(zip(names, values, strict=True)),  # type: ignore[arg-type]
)


def _no_value(program: str, name: str, values: Mapping[str, Any]) -> ContextError:
    return ContextError(f"{program} needs a value {name!r}", expected=f"one of {sorted(values)}")


@dataclass
class CompileCount:
    """Compile requests seen, by outcome. With the persistent cache off, every request is a miss."""

    hits: int = 0  # loaded from the persistent cache
    misses: int = 0  # compiled
    seconds: float = 0.0


class _Ledger:
    """Every backend compile and cache load of this process, from JAX's own monitoring events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._background: set[Future] = set()
        self.total = CompileCount()
        self.forbidden = 0
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    @contextlib.contextmanager
    def watch(self) -> Iterator[CompileCount]:
        """Counts what this thread compiles."""
        outer, self._threads.count = self._count(), CompileCount()
        try:
            yield self._threads.count
        finally:
            self._threads.count = outer

    def _count(self) -> CompileCount | None:
        return self._threads.__dict__.get("count")

    def _on_event(self, event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self._threads.hit = True

    def _on_duration(self, event: str, duration_secs: float, **facts: Any) -> None:
        if event != "/jax/core/compile/backend_compile_duration":
            return
        hit = self._threads.__dict__.pop("hit", False)
        with self._lock:
            for count in filter(None, (self.total, self._count())):
                count.hits += hit
                count.misses += not hit
                count.seconds += duration_secs
        if self.forbidden:
            raise CompileForbidden(
                f"{facts.get('fun_name', 'a function')} was {'loaded from the cache' if hit else 'compiled'}",
                expected="no compile inside forbid_compile()",
                fix="call warmup() for the shapes in use, and keep eager jnp operations out of the block",
            )

    def in_background(self, future: Future) -> None:
        """Remember a compile that runs in another thread, so that forbidding waits for it."""
        self._background.add(future)
        future.add_done_callback(self._background.discard)

    @contextlib.contextmanager
    def forbid(self) -> Iterator[None]:
        wait(list(self._background))
        with self._lock:
            self.forbidden += 1
        try:
            yield
        finally:
            with self._lock:
                self.forbidden -= 1


_ledger = _Ledger()
in_background = _ledger.in_background


def forbid_compile() -> contextlib.AbstractContextManager[None]:
    """Inside this context any backend compile or compile-cache load, in any thread, raises CompileForbidden.

    Waits first for compiles that already run in the background.
    """
    return _ledger.forbid()


def compiles() -> CompileCount:
    """What this process has compiled and loaded so far."""
    return CompileCount(_ledger.total.hits, _ledger.total.misses, _ledger.total.seconds)
