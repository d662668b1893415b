"""Warming up: the executables of a policy compiled in parallel, then run once each, since the first run of one is
slow."""

from collections.abc import Callable

from jaxrt import knobs as knob_arrays
from jaxrt.errors import RequestError
from jaxrt.models.steps import FREE, HALT
from jaxrt.requests import is_whole, shown
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.session import XlaSession

DEFAULT_CAPACITY = 2_048  # tokens a row; less where the model's context is

Progress = Callable[[int, int, str], None]


def warm_up(model: XlaModel, rows: int, capacity: int | None, progress: Progress | None) -> int:
    """Make every executable for up to `rows` rows of `capacity` tokens; their number. Raises: RequestError,
    CapacityError."""
    for name, value in (("rows", rows), ("capacity", capacity)):
        if value is not None and (not is_whole(value) or value < 1):
            raise RequestError(f"warmup({name}={shown(value)})", expected="a whole number, one or more")
    model.check_open()
    policy = model.cover(rows, min(capacity or DEFAULT_CAPACITY, model.config.context))
    made = model.plans.warm(policy.buckets(), progress)
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
        finally:
            session.close()
    return len(made)
