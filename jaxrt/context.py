"""`InferenceContext`: named values that stay on the device between calls, and the running of plans over them."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.errors
from jax import Array

from jaxrt.errors import ContextError, ExecutionError, SessionPoisoned, TopologyChanged, nearest
from jaxrt.program import Plan

if TYPE_CHECKING:
    from jaxrt.decode_session import DecodeSession

PyTree = Any


@dataclass(frozen=True, eq=False)
class _Entry:
    leaves: tuple[Array, ...]
    tree: Any


class InferenceContext(MutableMapping[str, PyTree]):
    """Owns arrays by name on one device or sharding. Plans read them; a plan that updates one donates its old buffers.

    What a running plan returns takes the old value's place before anything else can happen to it. Should the buffers
    be lost on the way (an interrupt in the middle of the call), the entry is gone and reading it raises
    SessionPoisoned.
    """

    def __init__(self, device: jax.Device | jax.sharding.Sharding | None = None) -> None:
        self._device = device if device is not None else jax.devices()[0]
        self._entries: dict[str, _Entry] = {}
        self._lost: set[str] = set()
        self._decode_session: DecodeSession | None = None

    @property
    def device(self) -> jax.Device | jax.sharding.Sharding:
        return self._device

    def __getitem__(self, name: str) -> PyTree:
        entry = self._entry(name)
        return entry.tree.unflatten(entry.leaves)

    def __setitem__(self, name: str, tree: PyTree) -> None:
        leaves, structure = jax.tree.flatten(tree)
        placed = jax.device_put(leaves, self._device)
        self._entries[name] = _Entry(tuple(placed), structure)
        self._lost.discard(name)

    def __delitem__(self, name: str) -> None:
        self._entry(name)
        del self._entries[name]

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
        self._entries.pop(name, None)
        self._lost.discard(name)

    def hold(self, name: str, leaves: Sequence[Array], tree: Any) -> None:
        """Hold a plan's output: leaves already on the device, and their structure."""
        self._entries[name] = _Entry(tuple(leaves), tree)
        self._lost.discard(name)

    def contains(self, name: str) -> bool:
        return name in self

    def is_empty(self) -> bool:
        return not self._entries

    def clear_persistent(self) -> None:
        """Drop every value; buffers nobody else holds are freed."""
        self._entries.clear()
        self._lost.clear()

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
        Raises: ContextError for a missing value; TopologyChanged when shapes, dtypes or devices are not the plan's.
        """
        names = names or {}
        leaves: list[Any] = []
        for slot in plan.inputs:
            leaves += given[slot.name] if slot.name in given else self._entry(names.get(slot.name, slot.name)).leaves
        leaves.append(plan.env(env))
        try:
            return self._take_back(plan, plan.executable(*leaves), names)
        except (TypeError, ValueError) as error:
            self._mark_lost(plan, names)
            raise TopologyChanged(
                f"{plan.name} was planned for other arguments: {error}", fix="plan again for these values"
            ) from error
        except BaseException as error:
            lost = self._mark_lost(plan, names)
            if lost and isinstance(error, RuntimeError):
                raise _poisoned(lost) from error
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise ExecutionError(
                    f"{plan.name} failed: {error}", fix="free device memory, or ask for fewer rows or tokens"
                ) from error
            raise

    def _take_back(self, plan: Plan, outputs: tuple[Array, ...], names: Mapping[str, str]) -> dict[str, tuple]:
        position, rest = 0, {}
        for slot in plan.targets:
            leaves = tuple(outputs[position : position + len(slot.leaves)])
            position += len(slot.leaves)
            if slot.name in plan.updates:
                updated = plan.updates[slot.name]
                self._entries[names.get(updated, updated)] = _Entry(leaves, slot.tree)
            else:
                rest[slot.name] = leaves
        return rest

    def _mark_lost(self, plan: Plan, names: Mapping[str, str]) -> str | None:
        """Forget the entries whose donated buffers are gone; the name of one."""
        lost = None
        for updated in plan.updates.values():
            name = names.get(updated, updated)
            entry = self._entries.get(name)
            if entry is not None and any(leaf.is_deleted() for leaf in entry.leaves):
                del self._entries[name]
                self._lost.add(name)
                lost = name
        return lost

    def _entry(self, name: str) -> _Entry:
        if name in self._entries:
            return self._entries[name]
        if name in self._lost:
            raise _poisoned(name)
        raise ContextError(f"no value {name!r} in this context", fix=nearest(name, self._entries))


def _poisoned(name: str) -> SessionPoisoned:
    return SessionPoisoned(
        f"the buffers of {name!r} were lost in a failed or interrupted call",
        fix="call session.reset(), or take a new session with rt.new_session()",
    )
