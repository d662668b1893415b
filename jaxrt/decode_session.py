"""`DecodeSession`: a model's plans, bound to one KV allocation, with what says whether they still fit it."""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

import jax

from jaxrt.buckets import Bucket
from jaxrt.errors import TopologyChanged
from jaxrt.plans import Plans
from jaxrt.program import Plan

if TYPE_CHECKING:
    from jaxrt.context import InferenceContext


class PlanValidity(Enum):
    """Whether plans fit a cache: as it is, after a rebind, or not at all."""

    Valid = "valid"
    AllocationChanged = "allocation changed"
    Stale = "stale"


class RebindReason(StrEnum):
    """Why a cache cannot take the place of the one that plans are bound to."""

    RESIDENCY_UNKNOWN = "residency unknown"  # not an array on a device
    RESIDENCY_DIFFERS = "residency differs"
    MISSING_SLOT = "missing slot"
    UNBAKED_SLOT = "unbaked slot"  # one that the plans know nothing of
    STORAGE_DIFFERS = "storage differs"  # shape or dtype


class RebindRefused(TopologyChanged):
    """A cache that plans cannot be bound to. `slot` names the array, such as `keys[3]`; nothing was rebound."""

    def __init__(self, reason: RebindReason, slot: str, found: str, expected: str) -> None:
        self.reason, self.slot = reason, slot
        super().__init__(
            f"{slot}: {reason}: {found}", expected=expected, fix="plan for this cache: reset(), or a new session"
        )


@dataclass(frozen=True)
class PlanKey:
    """Everything that is baked into the plans of a model."""

    family: str
    structure: str  # hash of the config and of the weights' dtypes
    instance: int  # of the placed weights; never used twice
    dtype: str
    kv_dtype: str
    placement: str


@dataclass(frozen=True)
class Allocation:
    """Buffers of a cache: which they are, and their geometry."""

    alloc_id: int
    slots: tuple[tuple[str, Any], ...]  # name and (shape, dtype, sharding); None in its place for no device array

    @classmethod
    def of(cls, context: "InferenceContext", name: str = "kv") -> "Allocation":
        """The allocation that `context` holds under `name`. Raises: ContextError, SessionPoisoned."""
        flat, _ = jax.tree_util.tree_flatten_with_path(context[name])
        slots = []
        for keys, leaf in flat:
            placed = isinstance(leaf, jax.Array) and not leaf.is_deleted()
            slots.append((jax.tree_util.keystr(keys).lstrip("."), _storage(leaf) if placed else None))
        return cls(context.alloc_id(name), tuple(slots))


def _storage(leaf: jax.Array) -> tuple:
    return tuple(leaf.shape), str(leaf.dtype), leaf.sharding


class DecodeSession:
    """The plans of a session: shared with other sessions of the model, bound to this one's cache."""

    def __init__(self, plans: Plans, key: PlanKey) -> None:
        self.plans, self.key = plans, key
        self.bound: Allocation | None = None

    def plan(self, bucket: Bucket) -> Plan:
        """The bucket's plan; see `Plans.plan`."""
        return self.plans.plan(bucket)

    def prepare(self, buckets: Iterable[Bucket]) -> list["Future[Plan]"]:
        """Start making plans in the background; see `Plans.prepare`."""
        return self.plans.prepare(buckets)

    def bind(self, allocation: Allocation) -> None:
        """Note the cache that the session has just made."""
        self.bound = allocation

    def validity_for(self, key: PlanKey, allocation: Allocation) -> PlanValidity:
        """Whether the plans may run over that cache of a model with that key. Only `Valid` may: `AllocationChanged`
        means that everything but the identity of the buffers is the same, which `rebind_kv` may mend."""
        if key != self.key or self.bound is None or allocation.slots != self.bound.slots:
            return PlanValidity.Stale
        same = allocation.alloc_id == self.bound.alloc_id
        return PlanValidity.Valid if same else PlanValidity.AllocationChanged

    def is_valid_for(self, key: PlanKey, allocation: Allocation) -> bool:
        return self.validity_for(key, allocation) is PlanValidity.Valid

    def rebind_kv(self, allocation: Allocation) -> None:
        """Go on over another cache of the same geometry, which holds what the session says it holds; all of it, or
        nothing. Raises: RebindRefused."""
        baked, incoming = dict(self.bound.slots if self.bound else ()), dict(allocation.slots)
        for slot, wanted in baked.items():
            if slot not in incoming:
                raise RebindRefused(RebindReason.MISSING_SLOT, slot, "not there", f"{wanted}")
            found = incoming[slot]
            if found is None:
                raise RebindRefused(RebindReason.RESIDENCY_UNKNOWN, slot, "no array on a device", f"{wanted}")
            if found[2] != wanted[2]:
                raise RebindRefused(RebindReason.RESIDENCY_DIFFERS, slot, f"{found[2]}", f"{wanted[2]}")
            if found[:2] != wanted[:2]:
                raise RebindRefused(RebindReason.STORAGE_DIFFERS, slot, f"{found[:2]}", f"{wanted[:2]}")
        for slot, found in incoming.items():
            if slot not in baked:
                raise RebindRefused(RebindReason.UNBAKED_SLOT, slot, f"{found}", "only slots that were planned for")
        self.bound = allocation
