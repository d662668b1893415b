"""Buckets, the policy that chooses them, and `DecodeSession`: one plan per bucket, made once, in parallel, or on
demand."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from jaxrt.errors import CapacityError, ContextError
from jaxrt.program import Plan, Program, in_background, plan

MAX_COMPILES = 20  # of one warm-up
GROWTH = 4  # factor between capacities


@dataclass(frozen=True)
class Bucket:
    """The static shapes of one executable.

    tokens: length of a prefill chunk, most positions of a decode call, or the new capacity of a growth.
    """

    program: Literal["make", "prefill", "first", "decode", "move", "grow"]
    rows: int
    capacity: int
    tokens: int = 0

    def __str__(self) -> str:
        if self == FIRST:
            return "first[1 row]"
        count = {"prefill": f", {self.tokens} tokens", "decode": f", {self.tokens} positions"}.get(self.program, "")
        count = f" to {self.tokens}" if self.program == "grow" else count
        return f"{self.program}[{self.rows} row{'s' * (self.rows > 1)}, capacity {self.capacity}{count}]"


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
    "cpu": Platform(prefill=(32, 128), call_tokens=8, positions=(16,), counted=True),
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
        """Everything a warm-up compiles, what a single prompt needs first coming first."""
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
        return tuple(found)

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
    plans = []
    for length in lengths:
        if length < tokens:
            calls = -(-tokens // length)
            plans.append((length,) * calls)
        else:
            plans.append((length,))
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


@dataclass(frozen=True)
class Recipe:
    """What a bucket's plan is made from."""

    program: Program
    specs: Mapping[str, Any]
    targets: tuple[str, ...]
    symbols: tuple[str, ...] = ()


class DecodeSession:
    """The plans of one model on one placement, one per bucket. Sessions on the same weights share it; it holds no
    buffers."""

    def __init__(self, recipe: Callable[[Bucket], Recipe], placement: Callable[[], AbstractContextManager]) -> None:
        self._recipe = recipe
        self._placement = placement
        self._plans: dict[Bucket, Future[Plan]] = {}
        self._lock = threading.Lock()
        self.waited_s = 0.0  # what callers of `plan` waited for compiles
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="jaxrt-compile")

    def plan(self, bucket: Bucket) -> Plan:
        """The bucket's plan, made now if nobody made it yet.

        Raises: CompileForbidden under `forbid_compile()`. Blocks: while it is being compiled, here or elsewhere.
        """
        with self._lock:
            future = self._plans.get(bucket)
            mine = future is None
            if mine:
                future = self._plans[bucket] = Future()
        if future.done():
            return future.result()
        started = time.perf_counter()
        if mine:
            self._make(bucket, future)
        made = future.result()
        self.waited_s += time.perf_counter() - started
        return made

    def prepare(self, buckets: Iterable[Bucket]) -> list["Future[Plan]"]:
        """Start making plans in background threads, in order; those made or under way are left alone."""
        futures = []
        for bucket in buckets:
            with self._lock:
                if bucket in self._plans:
                    futures.append(self._plans[bucket])
                    continue
                future = self._plans[bucket] = Future()
            in_background(future)
            self._pool.submit(self._make, bucket, future)
            futures.append(future)
        return futures

    def warm(self, buckets: Sequence[Bucket], progress: Callable[[int, int, str], None] | None = None) -> list[Plan]:
        """Make the plans of all `buckets`, in parallel; `progress(done, total, name)` after each."""
        futures = self.prepare(buckets)
        names = dict(zip(futures, map(str, buckets), strict=True))
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            if progress is not None:
                progress(done, len(futures), names[future])
        return [future.result() for future in futures]

    def close(self) -> None:
        """Drop the plans; compiles under way finish, queued ones do not start."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            left = [future for future in self._plans.values() if not future.done()]
            self._plans.clear()
        for future in left:  # those that never started: whoever waits for them learns it
            future.set_exception(ContextError("closed before it was compiled"))

    def _make(self, bucket: Bucket, future: "Future[Plan]") -> None:
        try:
            recipe = self._recipe(bucket)
            with self._placement():
                made = plan(recipe.program, recipe.specs, recipe.targets, recipe.symbols)
        except BaseException as error:
            with self._lock:  # a later call tries again
                self._plans.pop(bucket, None)
            future.set_exception(error)
        else:
            future.set_result(made)
