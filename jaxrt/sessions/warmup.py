"""Warming up: the executables of a policy compiled in parallel, then run once each, since the first run of one is
slow."""

from collections.abc import Callable

from jaxrt import knobs as knob_arrays
from jaxrt.errors import RequestError
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.session import XlaSession

DEFAULT_CAPACITY = 2_048  # tokens a row; less where the model's context is

Progress = Callable[[int, int, str], None]


def warm_up(model: XlaModel, rows: int, capacity: int | None, progress: Progress | None) -> int:
    """Make every executable for up to `rows` rows of `capacity` tokens; their number. Raises: RequestError,
    CapacityError."""
    for name, value in (("rows", rows), ("capacity", capacity)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RequestError(f"warmup({name}={value!r})", expected="a whole number, one or more")
    policy = model.cover(rows, min(capacity or DEFAULT_CAPACITY, model.config.context))
    made = model.decode_session.warm(policy.buckets(), progress)
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
                    session.step(min(positions, 2), knob_arrays.neutral(width, model.config.vocab))
                session.settle()
        finally:
            session.close()
    return len(made)
