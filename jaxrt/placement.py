"""Arrays on a device or a mesh: putting them there, and the entries of a context, which may share them."""

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import jax
import numpy as np
from jax import Array

from jaxrt.errors import ContextError

Placement = jax.Device | jax.sharding.Sharding

ALIGNED = 64  # bytes

_alloc_ids = itertools.count(1)  # of this process; never used twice


class Entry:
    """One value of one context. Those that hold the same buffers stand in one weak set, so that an entry which is
    dropped, or whose context is collected, shares no more."""

    __slots__ = ("leaves", "tree", "alloc_id", "holders", "__weakref__")

    def __init__(
        self,
        leaves: Sequence[Array],
        tree: Any,
        alloc_id: int | None = None,
        holders: "WeakSet[Entry] | None" = None,
    ) -> None:
        self.leaves, self.tree = tuple(leaves), tree
        self.alloc_id = next(_alloc_ids) if alloc_id is None else alloc_id
        self.holders: WeakSet[Entry] | None = holders

    @property
    def shared(self) -> bool:
        return self.holders is not None and len(self.holders) > 1

    def twin(self) -> "Entry":
        """Another entry on the same buffers."""
        if self.holders is None:
            self.holders = WeakSet[Entry]((self,))
        twin = Entry(self.leaves, self.tree, self.alloc_id, self.holders)
        self.holders.add(twin)
        return twin

    def release(self) -> None:
        """Share no more, whoever still refers to this entry (a traceback for one)."""
        if self.holders is not None:
            self.holders.discard(self)


def placed(name: str, leaves: Sequence[Any], device: Placement) -> tuple[Array, ...]:
    """The leaves on the device. Numpy's are copied: JAX would go on using their memory, on which they are written."""
    if any(isinstance(leaf, Array) and leaf.is_deleted() for leaf in leaves):
        raise ContextError(f"{name!r} holds an array that was donated or deleted", fix="insert what replaced it")
    where = sharding_of(device)
    if all(isinstance(leaf, Array) and leaf.committed and leaf.sharding == where for leaf in leaves):
        return tuple(leaves)  # they are there: the weights of every session, whose placing took 5 ms
    given = [leaf if isinstance(leaf, Array) else _unaligned(leaf) for leaf in leaves]
    try:
        return tuple(jax.block_until_ready(jax.device_put(given, device)))  # until JAX has read them
    except (TypeError, ValueError) as error:
        raise ContextError(f"{name!r} cannot be placed on {where_text(device)}: {error}") from error


def _unaligned(leaf: Any) -> np.ndarray:
    """The host's array where JAX has to copy it: `device_put` goes on using memory aligned to 64 bytes."""
    array = np.asarray(leaf)
    if array.dtype.hasobject or not array.nbytes or (array.flags.c_contiguous and array.ctypes.data % ALIGNED):
        return array  # the first two hold nothing, or nothing that goes on a device
    buffer = np.empty(array.nbytes + 2 * ALIGNED, np.uint8)
    start = -buffer.ctypes.data % ALIGNED + array.itemsize % ALIGNED
    other = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    other[...] = array
    return other


def sharding_of(device: Placement) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device) if isinstance(device, jax.Device) else device


def replicated(device: Placement) -> Placement:
    """Where constants go: their shapes need not divide as those of the context's values do."""
    if isinstance(device, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(device.mesh, jax.sharding.PartitionSpec())
    return device


def first_device(device: Placement) -> jax.Device:
    return min(sharding_of(device).device_set, key=lambda each: each.id)


def where_text(device: Placement) -> str:
    first, count = first_device(device), len(sharding_of(device).device_set)
    return f"{first.platform}:{first.id}" if count == 1 else f"{count} devices from {first.platform}:{first.id}"


def shapes_text(leaves: Sequence[Array]) -> str:
    """`float32[4, 8], 3 × int32[]`: equal ones together, a few of them."""
    counts: dict[str, int] = {}
    for leaf in leaves:
        text = f"{leaf.dtype}{list(leaf.shape)}"
        counts[text] = counts.get(text, 0) + 1
    parts = [text if count == 1 else f"{count:,} × {text}" for text, count in counts.items()]
    return ", ".join(parts[:4]) + (f", and {len(parts) - 4:,} other shapes" if len(parts) > 4 else "")
