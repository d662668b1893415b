"""`InferenceContext`: named values that stay on the device between calls, and the running of plans over them."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.errors
import numpy as np
from jax import Array

from jaxrt.errors import ContextError, ExecutionError, RequestError, SessionPoisoned, TopologyChanged, nearest
from jaxrt.markup import bytes_text, table_html
from jaxrt.placement import Entry, Placement, first_device, placed, replicated, shapes_text, sharding_of, where_text
from jaxrt.program import Plan, Program, Slot, plan
from jaxrt.realize import COPY, Prebuilt, SplitOutput, checked_dtype, checked_targets, for_reading, hosted, reads
from jaxrt.symbols import SymEnv

if TYPE_CHECKING:
    from jaxrt.decode_session import DecodeSession

PyTree = Any


class InferenceContext(MutableMapping[str, PyTree]):
    """Owns arrays by name on one device or sharding. Plans read them; a plan that updates one donates its old buffers.

    What a running plan returns takes the old value's place before anything else can happen to it. Should the buffers
    be lost on the way (an interrupt in the middle of the call), the entry is gone and reading it raises
    SessionPoisoned.

    What is inserted is placed on `device`: numpy arrays are copied, a jax array that is there already is held as it
    is, so that an update consumes it. `uploads` counts the leaves of constants uploaded so far.
    """

    def __init__(self, device: Placement | None = None) -> None:
        self._device = device if device is not None else jax.devices()[0]
        self._entries: dict[str, Entry] = {}
        self._lost: set[str] = set()
        self._decode_session: DecodeSession | None = None
        self.uploads = 0

    @property
    def device(self) -> Placement:
        return self._device

    def __getitem__(self, name: str) -> PyTree:
        entry = self._entry(name)
        return entry.tree.unflatten(entry.leaves)

    def __setitem__(self, name: str, tree: PyTree) -> None:
        leaves, structure = jax.tree.flatten(tree)
        self._put(name, Entry(placed(name, leaves, self._device), structure))

    def __delitem__(self, name: str) -> None:
        self._entry(name)
        self._entries.pop(name).release()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def insert(self, name: str, tree: PyTree) -> None:
        """Hold `tree` under `name`, in place of what stood there."""
        self[name] = tree

    def remove(self, name: str) -> PyTree | None:
        """Take the value out and return it; None where there was none."""
        return self.pop(name, None)

    def discard(self, name: str) -> None:
        """Drop the value, lost or not, if there is one."""
        if name in self._entries:
            del self[name]
        self._lost.discard(name)

    def hold(self, name: str, leaves: Sequence[Array], tree: Any) -> None:
        """Hold a plan's output: leaves already on the device, and their structure."""
        self._put(name, Entry(leaves, tree))

    def contains(self, name: str) -> bool:
        return name in self

    def is_empty(self) -> bool:
        return not self._entries

    def clear_persistent(self) -> None:
        """Drop every value; buffers nobody else holds are freed."""
        for name in (*self._entries, *self._lost):
            self.discard(name)

    def nbytes(self) -> int:
        """Bytes of all values held."""
        return sum(leaf.nbytes for entry in self._entries.values() for leaf in entry.leaves)

    def take_decode_session(self) -> "DecodeSession | None":
        """Take the held decode session out, leaving None."""
        session, self._decode_session = self._decode_session, None
        return session

    def put_decode_session(self, session: "DecodeSession | None") -> None:
        """Hold a decode session; the other half of `take_decode_session`."""
        self._decode_session = session

    @property
    def has_decode_session(self) -> bool:
        return self._decode_session is not None

    # --- allocations, and sharing them ----------------------------------------------------------------------------

    def alloc_id(self, name: str) -> int:
        """The identity of a value's buffers: new when a value is inserted, kept while plans update it in place, the
        same where it is shared; never used again in this process. Raises: ContextError for no such value."""
        return self._entry(name).alloc_id

    def share(self, name: str, other: "InferenceContext", as_name: str | None = None) -> None:
        """Make `other` hold the same buffers, as `as_name` there. Copies nothing.

        While both hold them, neither may update them; see `own`.
        Raises: ContextError for no such value, or a context on another device.
        """
        entry = self._entry(name)
        if sharding_of(other.device) != sharding_of(self.device):
            raise ContextError(
                f"a context on {where_text(other.device)} to share {name!r} with",
                expected=f"one on {where_text(self.device)}",
                fix="insert the value there, which copies it",
            )
        other._put(name if as_name is None else as_name, entry.twin())

    def is_shared(self, name: str) -> bool:
        """Whether another live entry holds the same buffers. Raises: ContextError for no such value."""
        return self._entry(name).shared

    def own(self, name: str, copy: Plan) -> None:
        """Put a copy of its own in place of a shared value, under a new `alloc_id`; a value not shared stays.

        copy: a plan of `COPY` for the value's shapes: from the input "value" it makes the target "copy".
        Raises: as `run`.
        """
        if self.is_shared(name):
            made = self.run(copy, {}, {}, {"value": name})
            self.hold(name, made["copy"], self._entry(name).tree)

    # --- programs, planned on the spot ----------------------------------------------------------------------------

    def realize(
        self, program: Program, target: str, *, env: Mapping[str, int] | None = None, dtype: Any = None
    ) -> np.ndarray:
        """One target of `program`, computed from this context's values, as a numpy array that is a copy.

        Traces, lowers and compiles anew at each call: `prebuild` for loops. What the program reads comes from this
        context, else from `program.constants`, uploaded for this call. Updates take effect; a value that only the
        constants have lives in this context from its first update on. A shared value is copied before it is updated.
        dtype: what the target is cast to on the device.

        Raises: ContextError for a value or target that is not there, or a target of several arrays; UnboundSymbol;
        RequestError for a bad env or dtype; ExecutionError when the device fails; whatever the function raises.
        Blocks: until the target is there.
        """
        return self.realize_many(program, [target], env=env, dtype=dtype)[0]

    def realize_many(
        self, program: Program, targets: Sequence[str], *, env: Mapping[str, int] | None = None, dtype: Any = None
    ) -> list[np.ndarray]:
        """Several targets of one run, as `realize` makes them. For no targets nothing runs, updates neither."""
        return list(self.realize_split(program, targets, len(targets), env=env, dtype=dtype).host)

    def realize_split(
        self,
        program: Program,
        targets: Sequence[str],
        n_host: int,
        *,
        env: Mapping[str, int] | None = None,
        dtype: Any = None,
    ) -> SplitOutput:
        """As `realize_many`, but only the first `n_host` targets are downloaded, and cast; the rest stay on the
        device, in buffers of their own and in order.

        Raises: RequestError for `n_host` below zero or above the number of targets; else as `realize`.
        """
        targets = checked_targets(program, targets, n_host)
        if not targets:
            return SplitOutput((), ())
        made, given, keys = self._planned(program, targets, n_host, env, dtype)
        outputs = self._run_owned(made, given, env)
        arrays = [outputs[key][0] for key in keys]
        return SplitOutput(tuple(_downloaded(made, array) for array in arrays[:n_host]), tuple(arrays[n_host:]))

    def prebuild(
        self,
        program: Program,
        target: str,
        *,
        env: Mapping[str, int] | None = None,
        dtype: Any = None,
        capture: bool = False,
    ) -> Prebuilt:
        """`realize` that keeps its plan, for `realize_prebuilt`.

        capture: the plan holds the constants it uploaded for ever. Without, each call uploads them again. A constant
        that is updated cannot be captured: it is uploaded whenever the context has no value for it.
        Raises: as `realize`.
        """
        made, given, (key,) = self._planned(program, checked_targets(program, [target], 1), 1, env, dtype)
        captured = {name: leaves for name, leaves in given.items() if capture and name not in made.donated}
        host = {name: tuple(map(np.asarray, jax.tree.leaves(program.constants[name]))) for name in given}
        made = replace(made, constants={**host, **captured})
        kept = [s for s in made.inputs if s.name not in made.donated and (s.name in captured or s.name not in given)]
        cache = {
            s.name: s.tree.unflatten(captured[s.name] if s.name in captured else self._entry(s.name).leaves)
            for s in kept
        }
        result = _downloaded(made, self._run_owned(made, given, env)[key][0])
        return Prebuilt(made, result, cache)

    def realize_prebuilt(self, plan: Plan, *, env: Mapping[str, int] | None = None) -> np.ndarray:
        """Run what `prebuild` planned, over this context's values of now: no tracing, lowering or compiling. Any
        context will do whose values have the same structure, shapes, dtypes and placement.

        Raises: TopologyChanged where they do not, before anything ran; ContextError for a missing value, or a shared
        one that the plan updates (`own` it first, or `realize`, which copies); UnboundSymbol; RequestError for a bad
        env; ExecutionError when the device fails.
        Blocks: until the target is there.
        """
        if not isinstance(plan, Plan):
            raise RequestError(
                f"a plan of type {type(plan).__name__}", expected="the `plan` of what prebuild() returned"
            )
        result = plan.result
        given: dict[str, Sequence[Array]] = {}
        for name, leaves in plan.constants.items():
            if name not in self._entries and name not in self._lost:  # what is lost does not start anew unasked
                given[name] = leaves if name in plan.captured else self._upload(name, leaves)
        return _downloaded(plan, self.run(plan, given, {} if env is None else env)[result][0])

    def _planned(
        self, program: Program, targets: Sequence[str], n_host: int, env: Mapping[str, int] | None, dtype: Any
    ) -> tuple[Plan, dict[str, tuple[Array, ...]], list[str]]:
        """A plan for the targets, the constants uploaded for it, and what it calls each target."""
        dtype, symbols = checked_dtype(dtype), SymEnv(env)
        # What is lost does not start anew from a constant unasked: reading it raises.
        constants = hosted(program, {*self._entries, *self._lost})
        found = reads(program, {**constants, **self}, symbols, targets, lambda name: self._absent(name, program))
        given, specs = {}, {}
        for name in found.names:
            if name in constants:
                leaves, structure = jax.tree.flatten(constants[name])
                given[name] = self._upload(name, leaves)
                specs[name] = structure.unflatten(given[name])
            else:
                specs[name] = self[name]
        reading, keys = for_reading(program, targets, n_host, dtype)
        with jax.default_device(first_device(self.device)):  # where a program without inputs runs
            made = plan(reading, specs, keys, found.symbols)
        return made, given, keys

    def _run_owned(
        self, made: Plan, given: Mapping[str, Sequence[Array]], env: Mapping[str, int] | None
    ) -> dict[str, tuple]:
        """Run; what is shared and about to be updated is copied first."""
        for name in made.donated:
            if name not in given and self.is_shared(name):
                self.own(name, plan(COPY, {"value": self[name]}, ["copy"]))
        return self.run(made, given, {} if env is None else env)

    def _upload(self, name: str, leaves: Sequence[Any]) -> tuple[Array, ...]:
        arrays = placed(name, leaves, replicated(self.device))
        self.uploads += len(arrays)
        return arrays

    # --- plans ----------------------------------------------------------------------------------------------------

    def run(
        self,
        plan: Plan,
        given: Mapping[str, Sequence[Any]],
        env: Mapping[str, int],
        names: Mapping[str, str] | None = None,
    ) -> dict[str, tuple]:
        """Dispatch `plan` over this context's values and the leaves `given` by name; nothing blocks.

        names: where a value of the plan goes by another name here. Returns the leaves of every target that replaces
        no value.
        Donates: the values the plan updates, which are replaced by what comes back.
        Raises: ContextError for a missing value, or a shared one that would be donated; TopologyChanged when
        structure, shapes, dtypes or devices are not the plan's, and then nothing is lost.
        """
        names = names or {}
        for name in plan.donated:
            if name not in given and self._entry(names.get(name, name)).shared:
                raise ContextError(
                    f"{names.get(name, name)!r}, which {plan.name} updates, is shared with another context",
                    fix="make this context own a copy first: context.own(name, copy)",
                )
        leaves: list[Any] = []
        for slot in plan.inputs:
            if slot.name in given:
                leaves += given[slot.name]
                continue
            entry = self._entry(names.get(slot.name, slot.name))
            if entry.tree is not slot.tree:
                _check_structure(plan, slot, entry)
            leaves += entry.leaves
        if plan.symbols:
            leaves.append(plan.env(env))
        try:
            return self._take_back(plan, plan.executable(*leaves), given, names)
        except (TypeError, ValueError) as error:
            self._mark_lost(plan, given, names)
            raise TopologyChanged(
                f"{plan.name} was planned for other arguments: {error}", fix="plan again for these values"
            ) from error
        except BaseException as error:
            lost = self._mark_lost(plan, given, names)
            if lost and isinstance(error, RuntimeError):
                raise _poisoned(lost) from error
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise _failed(plan, error) from error
            raise

    def _take_back(
        self, plan: Plan, outputs: tuple[Array, ...], given: Mapping[str, Any], names: Mapping[str, str]
    ) -> dict[str, tuple]:
        position, rest = 0, {}
        for slot in plan.targets:
            leaves = tuple(outputs[position : position + len(slot.leaves)])
            position += len(slot.leaves)
            updated = plan.updates.get(slot.name)
            if updated is None:
                rest[slot.name] = leaves
            elif updated in plan.donated and updated not in given:
                self._entries[names.get(updated, updated)].leaves = leaves
            else:
                self._put(names.get(updated, updated), Entry(leaves, slot.tree))
        return rest

    def _mark_lost(self, plan: Plan, given: Mapping[str, Any], names: Mapping[str, str]) -> str | None:
        """Forget the entries whose buffers are gone; the name of one."""
        lost = None
        for slot in plan.inputs:
            name = names.get(slot.name, slot.name)
            entry = None if slot.name in given else self._entries.get(name)
            if entry is not None and any(leaf.is_deleted() for leaf in entry.leaves):
                self._entries.pop(name).release()
                self._lost.add(name)
                lost = name
        return lost

    def _put(self, name: str, entry: Entry) -> None:
        replaced = self._entries.get(name)
        self._entries[name] = entry
        self._lost.discard(name)
        if replaced is not None:
            replaced.release()

    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise self._absent(name)
        return entry

    def _absent(self, name: str, program: Program | None = None) -> Exception:
        if name in self._lost:
            return _poisoned(name)
        known = self._entries.keys() | (program.constants.keys() if program else ())
        found = f"{program.name} reads {name!r}, and there is no such value" if program else f"no value {name!r}"
        return ContextError(f"{found} in this context", fix=nearest(name, known) if known else "insert it first")

    # --- how it looks ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        count = "1 value" if len(self) == 1 else f"{len(self):,} values"
        return f"InferenceContext({where_text(self.device)}: {count}, {bytes_text(self.nbytes())})"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, str, str, str]] = []
        for name, entry in self._entries.items():
            size = bytes_text(sum(leaf.nbytes for leaf in entry.leaves))
            rows.append((name, shapes_text(entry.leaves), size, "shared" if entry.shared else ""))
        rows += [(name, "lost in a failed or interrupted call", "", "lost") for name in sorted(self._lost)]
        return table_html(("value", "arrays", "bytes", ""), rows, repr(self))


def _check_structure(plan: Plan, slot: Slot, entry: Entry) -> None:
    if entry.tree != slot.tree:
        raise TopologyChanged(
            f"{plan.name} was planned for {slot.name!r} as {slot.tree}, and it is {entry.tree}",
            fix="plan again for these values",
        )
    entry.tree = slot.tree  # equal; the next call sees it at once


def _downloaded(plan: Plan, array: Array) -> np.ndarray:
    """A copy on the host: a view would move the device's buffers (see the architecture), and die with them."""
    try:
        return np.array(array)
    except jax.errors.JaxRuntimeError as error:
        raise _failed(plan, error) from error


def _failed(plan: Plan, error: BaseException) -> ExecutionError:
    return ExecutionError(f"{plan.name} failed: {error}", fix="free device memory, or ask for fewer rows or tokens")


def _poisoned(name: str) -> SessionPoisoned:
    return SessionPoisoned(
        f"the buffers of {name!r} were lost in a failed or interrupted call",
        fix="insert it again; in a session, call session.reset(), or take a new one with rt.new_session()",
    )
