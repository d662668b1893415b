"""Programs and plans: the only place that lowers and compiles. Counts compiles, and can forbid them."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxrt.errors import CompileForbidden, ContextError, nearest

Values = Mapping[str, Any]  # name -> pytree of arrays
Env = Mapping[str, Array]  # symbol -> traced int32 scalar


@dataclass(frozen=True, eq=False)
class Program:
    """A named pure function `fn(values, env) -> {target: pytree}`.

    values: name -> pytree of arrays. env: symbol name -> int32 scalar. updates: {"kv": "kv_next"} makes target
    `kv_next` the context's new `kv`, whose old buffers are donated.
    """

    fn: Callable[[Values, Env], Mapping[str, Any]]
    name: str = field(kw_only=True)
    updates: Mapping[str, str] = field(default_factory=dict, kw_only=True)


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
    env.

    Dispatch costs microseconds a leaf, more for nested trees; so what is called is flat, and only what a caller asks
    for is put together again.
    """

    name: str
    inputs: tuple[Slot, ...]
    symbols: tuple[str, ...]
    targets: tuple[Slot, ...]  # those that update an input come first, so that no other output takes their buffer
    updates: Mapping[str, str]  # target -> the input it replaces
    executable: jax.stages.Compiled = field(repr=False)
    seconds: float  # tracing, lowering and compiling
    from_cache: bool  # loaded from the persistent compile cache

    def env(self, values: Mapping[str, int]) -> np.ndarray:
        """The symbols' values as the int32 vector an executable takes. Raises: ContextError for a missing or unknown
        one."""
        if values.keys() != set(self.symbols):
            raise ContextError(
                f"{self.name} got the symbols {sorted(values)}", expected=f"exactly {sorted(self.symbols)}"
            )
        return np.array([values[symbol] for symbol in self.symbols], np.int32)


def plan(
    program: Program,
    specs: Mapping[str, Any],
    targets: Sequence[str],
    symbols: Sequence[str] = (),
) -> Plan:
    """Trace, lower and compile `program` for inputs of the given shapes.

    specs: input name -> pytree of arrays or ShapeDtypeStructs. Only `targets`, and those that update an input, are
    computed.

    Raises: ContextError for a value or target the program does not know; CompileForbidden under `forbid_compile()`.
    Blocks: for as long as XLA compiles.
    """
    if _ledger.forbidden:
        raise CompileForbidden(
            f"{program.name} is not compiled for the shapes it is called with",
            fix="call warmup() with the rows and capacity that requests will need",
        )
    inputs = tuple(_slot(name, tree) for name, tree in specs.items())
    donated = [name for name in program.updates if name in specs]
    updates = {program.updates[name]: name for name in donated}
    wanted = [*updates, *(name for name in targets if name not in updates)]
    produced: list[Slot] = []

    def flat(*leaves: Array) -> tuple[Array, ...]:
        position, values = 0, {}
        for slot in inputs:
            values[slot.name] = slot.tree.unflatten(leaves[position : position + len(slot.leaves)])
            position += len(slot.leaves)
        outputs = program.fn(_Named(values, program.name), {s: leaves[-1][i] for i, s in enumerate(symbols)})
        produced.clear()
        flattened: list[Array] = []
        for name in wanted:
            if name not in outputs:
                raise ContextError(f"{program.name} has no target {name!r}", fix=nearest(name, outputs))
            produced.append(_slot(name, outputs[name]))
            flattened += jax.tree.leaves(outputs[name])
        return tuple(flattened)

    flat.__name__ = program.name
    donate, position = [], 0
    for slot in inputs:
        if slot.name in donated:
            donate += range(position, position + len(slot.leaves))
        position += len(slot.leaves)
    arguments = [leaf for slot in inputs for leaf in slot.leaves]
    arguments.append(jax.ShapeDtypeStruct((len(symbols),), jnp.int32))
    started = time.perf_counter()
    with _ledger.watch() as seen:
        lowered = jax.jit(flat, donate_argnums=donate, keep_unused=True).lower(*arguments)
        executable = lowered.compile()
    return Plan(
        name=program.name,
        inputs=inputs,
        symbols=tuple(symbols),
        targets=tuple(produced),
        updates=updates,
        executable=executable,
        seconds=time.perf_counter() - started,
        from_cache=seen.hits > 0 and seen.misses == 0,
    )


def _slot(name: str, tree: Any) -> Slot:
    leaves, structure = jax.tree.flatten(tree)
    return Slot(name, structure, tuple(_spec(leaf) for leaf in leaves))


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    placed = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not isinstance(leaf, Tracer)
    sharding = leaf.sharding if placed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class _Named(dict[str, Any]):
    """Values by name, whose missing key says what is there."""

    def __init__(self, values: Mapping[str, Any], program: str) -> None:
        super().__init__(values)
        self._program = program

    def __missing__(self, name: str) -> Any:
        raise ContextError(f"{self._program} needs a value {name!r}", expected=f"one of {sorted(self)}")


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
