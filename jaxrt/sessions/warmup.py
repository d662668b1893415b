"""Warming up: the executables of a policy compiled in parallel, then run once each, since the first run of one is
slow. Where a device has decode executables of one position and of several, those that are slower are left aside."""

import time
from collections.abc import Callable

from jaxrt import knobs as knob_arrays
from jaxrt.buckets import BucketPolicy
from jaxrt.errors import RequestError
from jaxrt.models.steps import FREE, HALT
from jaxrt.requests import is_whole, shown
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.session import XlaSession

DEFAULT_CAPACITY = 2_048  # tokens a row; less where the model's context is

TIMED = 16  # positions decoded to compare executables
RUNS = 3

Progress = Callable[[int, int, str], None]


def warm_later(model: XlaModel, rows: int, capacity: int | None) -> int:
    """Start making what `warm_up` makes, in the background and without running it; their number. Raises: as that."""
    return len(model.plans.prepare(_covering(model, rows, capacity).buckets()))


def warm_up(model: XlaModel, rows: int, capacity: int | None, progress: Progress | None) -> int:
    """Make every executable for up to `rows` rows of `capacity` tokens; their number. Raises: RequestError,
    CapacityError."""
    policy = _covering(model, rows, capacity)
    made = model.plans.warm(policy.buckets(), progress)
    seconds: dict[int, float] = dict.fromkeys(policy.platform.positions, 0.0)
    for width in policy.rows:
        session = XlaSession(model, width)
        knobs = knob_arrays.neutral(1, model.config.vocab)
        try:
            for rung in policy.capacities:
                session.reserve(rung)
                for length in policy.platform.prefill:
                    session.keep([0] * width)
                    session.admit((0,), [0] * length, [knobs])
                for positions in policy.platform.positions:
                    going = [FREE, *[HALT] * (width - 1)]
                    session.step(min(positions, 2), knob_arrays.neutral(width, model.config.vocab), going)
                session.settle()
                for positions in seconds if len(seconds) > 1 else ():
                    session.keep([0] * width)
                    seconds[positions] += _seconds(session, positions)
        finally:
            session.close()
    if len(seconds) > 1:
        model.decode_by(tuple(count for count in seconds if count == 1 or seconds[count] <= seconds[1]))
    return len(made)


def _covering(model: XlaModel, rows: int, capacity: int | None) -> BucketPolicy:
    for name, value in (("rows", rows), ("capacity", capacity)):
        if value is not None and (not is_whole(value) or value < 1):
            raise RequestError(f"warmup({name}={shown(value)})", expected="a whole number, one or more")
    model.check_open()
    return model.cover(rows, min(capacity or DEFAULT_CAPACITY, model.config.context))


def _seconds(session: XlaSession, positions: int) -> float:
    """Of a position of the first row, decoded `positions` a call; the best of several runs."""
    knobs = knob_arrays.neutral(session.rows, session.model.config.vocab)
    session.admit((0,), [0], [knob_arrays.neutral(1, session.model.config.vocab)])
    going, best = [FREE, *[HALT] * (session.rows - 1)], float("inf")
    for _ in range(RUNS):
        session.settle()
        started = time.perf_counter()
        for _ in range(TIMED // positions):
            session.step(positions, knobs, going)
        session.settle()
        best = min(best, (time.perf_counter() - started) / (TIMED // positions * positions))
    return best
