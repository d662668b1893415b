"""One plan per bucket, made once, in parallel, or on demand."""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jaxrt.buckets import Bucket
from jaxrt.errors import ContextError
from jaxrt.program import Plan, Program, in_background, plan
from jaxrt.taps import PLAIN

MAX_TAPPED = 32  # plans that observe or edit, of all sorts; those not used for longest are dropped


@dataclass(frozen=True)
class Recipe:
    """What a bucket's plan is made from."""

    program: Program
    specs: Mapping[str, Any]
    targets: tuple[str, ...]
    symbols: tuple[str, ...] = ()


class Plans:
    """The plans of one model on one placement, one per bucket. Sessions on the same weights share them; they hold no
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
            elif bucket.taps != PLAIN:
                self._plans[bucket] = self._plans.pop(bucket)  # the last one used
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
            with self._lock:
                tapped = [one for one, its in self._plans.items() if one.taps != PLAIN and its.done()]
                for one in tapped[:-MAX_TAPPED]:
                    del self._plans[one]
                busy = not all(its.done() for its in self._plans.values())
            if not busy:
                _give_back_memory()


def _give_back_memory() -> None:
    """What compiling freed, to the system: the C library of GNU keeps some 250 MB of it after three executables."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
