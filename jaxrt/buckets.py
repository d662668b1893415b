"""Buckets: the static shapes of executables, and the policy that chooses which there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from jaxrt.errors import CapacityError
from jaxrt.taps import PLAIN, Taps

MAX_COMPILES = 20  # of one warm-up
GROWTH = 4  # factor between capacities


@dataclass(frozen=True)
class Bucket:
    """The static shapes of one executable.

    tokens: length of a prefill chunk, most positions of a decode call, or the new capacity of a growth.
    """

    program: Literal["make", "prefill", "first", "decode", "move", "grow", "copy"]
    rows: int
    capacity: int
    tokens: int = 0
    taps: Taps = PLAIN

    def __str__(self) -> str:
        if self == FIRST:
            return "first[1 row]"
        count = {"prefill": f", {self.tokens} tokens", "decode": f", {self.tokens} positions"}.get(self.program, "")
        count = f" to {self.tokens}" if self.program == "grow" else count
        taps = f", {self.taps}" if self.taps != PLAIN else ""
        return f"{self.program}[{self.rows} row{'s' * (self.rows > 1)}, capacity {self.capacity}{count}{taps}]"


FIRST = Bucket("first", 1, 0)  # of every session: it does not see the cache


@dataclass(frozen=True)
class Platform:
    """What suits a kind of device."""

    prefill: tuple[int, ...]  # chunk lengths
    call_tokens: int  # what a call costs beside its tokens, in tokens: the time to read the weights once
    positions: tuple[int, ...]  # decode positions a call
    counted: bool  # the trip count of a decode call is traced (a GPU would ask the host for it at every position)
    smallest: int = 512  # capacity


PLATFORMS: Mapping[str, Platform] = {
    "cpu": Platform(prefill=(32, 128, 512), call_tokens=8, positions=(16,), counted=True),
    "gpu": Platform(prefill=(64, 512), call_tokens=200, positions=(1, 8), counted=False),
}


@dataclass(frozen=True)
class BucketPolicy:
    """Which buckets there are: every request is served by the first that fits."""

    rows: tuple[int, ...]
    capacities: tuple[int, ...]
    platform: Platform

    @classmethod
    def covering(cls, platform: str, context: int, rows: int, capacity: int) -> "BucketPolicy":
        """A policy for up to `rows` rows of up to `capacity` tokens, with at most MAX_COMPILES executables.

        Rows double and capacities grow fourfold; where that makes too many executables, both ladders lose rungs.
        """
        shape = PLATFORMS[platform]
        capacity = min(max(capacity, shape.smallest), context)
        shape = replace(shape, prefill=_within(shape.prefill, capacity))
        policy = cls(_ladder(1, rows, 2), _ladder(shape.smallest, capacity, GROWTH), shape)
        growth = 2
        while len(policy.buckets()) > MAX_COMPILES and len(policy.rows) > 2:
            growth *= 2
            policy = replace(policy, rows=_ladder(1, rows, growth))
        growth = GROWTH
        while len(policy.buckets()) > MAX_COMPILES and len(policy.capacities) > 2:
            growth *= GROWTH
            policy = replace(policy, capacities=_ladder(shape.smallest, capacity, growth))
        return policy

    def widened(self, rows: int, capacity: int, context: int) -> "BucketPolicy":
        """This policy with further rungs, so that it also holds `rows` rows of `capacity` tokens."""
        more_rows, more = list(self.rows), list(self.capacities)
        while more_rows[-1] < rows:
            more_rows.append(more_rows[-1] * 2)
        while more[-1] < capacity:
            more.append(min(more[-1] * GROWTH, context))
        return replace(self, rows=tuple(more_rows), capacities=tuple(more))

    def buckets(self) -> tuple[Bucket, ...]:
        """Everything a warm-up compiles, what a single prompt needs first coming first, and forks last."""
        found: list[Bucket] = []
        for rows in self.rows:
            found.append(Bucket("make", rows, self.capacities[0]))
            for i, capacity in enumerate(self.capacities):
                if rows == 1:
                    found += (Bucket("prefill", 1, capacity, length) for length in self.platform.prefill)
                else:
                    found.append(Bucket("move", rows, capacity))
                found += (Bucket("decode", rows, capacity, count) for count in self.platform.positions)
                if rows == 1 and i == 0:
                    found.append(FIRST)
                if i + 1 < len(self.capacities):
                    found.append(Bucket("grow", rows, capacity, self.capacities[i + 1]))
        copies = [Bucket("copy", rows, capacity) for rows in self.rows for capacity in self.capacities]
        return (*found, *copies[: max(0, MAX_COMPILES - len(found))])  # quick to make on demand, if there is no room

    def first(self) -> tuple[Bucket, ...]:
        """What a first short prompt needs, the slowest to compile first."""
        capacity = self.capacities[0]
        decode = Bucket("decode", 1, capacity, self.platform.positions[-1])
        return Bucket("prefill", 1, capacity, self.platform.prefill[0]), decode, FIRST, Bucket("make", 1, capacity)

    def rows_for(self, rows: int) -> int:
        """The fewest rows that hold `rows`. Raises: CapacityError when none does."""
        return _first_fit(rows, self.rows, "rows")

    def capacity_for(self, tokens: int) -> int:
        """The smallest capacity that holds `tokens`. Raises: CapacityError when none does."""
        return _first_fit(tokens, self.capacities, "tokens")

    def chunks(self, tokens: int) -> tuple[int, ...]:
        """The prefill lengths that take `tokens` at the least cost; the last may be padded. A function of the count
        alone."""
        longest = self.platform.prefill[-1]
        whole, rest = divmod(tokens, longest)
        return (longest,) * whole + _cheapest(rest, self.platform.prefill, self.platform.call_tokens)


@cache
def _cheapest(tokens: int, lengths: tuple[int, ...], call_tokens: int) -> tuple[int, ...]:
    if tokens <= 0:
        return ()
    plans = [(length, *_cheapest(tokens - length, lengths, call_tokens)) for length in reversed(lengths)]
    return min(plans, key=lambda chunks: sum(chunks) + call_tokens * len(chunks))


def _ladder(first: int, last: int, growth: int) -> tuple[int, ...]:
    rungs = [min(first, last)]
    while rungs[-1] < last:
        rungs.append(min(rungs[-1] * growth, last))
    return tuple(rungs)


def _within(lengths: Sequence[int], capacity: int) -> tuple[int, ...]:
    return tuple(length for length in lengths if length <= capacity) or (capacity,)


def _first_fit(wanted: int, rungs: Sequence[int], unit: str) -> int:
    for rung in rungs:
        if wanted <= rung:
            return rung
    raise CapacityError(f"{wanted:,} {unit}", expected=f"at most {rungs[-1]:,}", fix="ask for less, or warm up more")
