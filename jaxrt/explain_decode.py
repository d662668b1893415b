"""Where the time of one decode step goes on this device: matmuls, attention, the rest of the model, sampling, host.

A step is one position of every row, in a call of its own, read back before the next. Its wall time, `step_us`, is
measured in a session that holds the asked tokens. Its parts:

- host: the step less what the device takes for it. The device's time a position is the difference between one call of
  n positions and one of a single position, over n - 1: both pay for dispatch and reading back once. Generation asks for
  n positions a call and submits the next call before it reads, so that it pays about one n-th of this part or nothing.
- matmuls: every matrix of the model, in its order and as it is stored, with nothing between them.
- attention: one query a head over the session's own cache in every layer. Rotation and cache writes belong to the rest.
- sampling: the greedy `sampling.step` over logits of the step's shape.
- norms and the rest: what is left of the device's time. It is the only part that is not timed itself.

Matmuls, attention and sampling are each compiled alone on the step's shapes, as a loop on the device of few turns and
of many; the difference between the two, over the turns between them, leaves out what a call costs. A turn needs a
number from the turn before it, so that no turn can be left out or run beside another. Alone a part may find more of its
data in the processor's caches than within a step, or less; where the parts come to more than the whole, the rest is
zero and a note says by how much. Every figure is the median of rounds in which all parts take turns, since a shared
machine changes speed from minute to minute.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrt import cache, sampling
from jaxrt import knobs as knob_arrays
from jaxrt.cache import KVCache
from jaxrt.nn.attention import attend
from jaxrt.nn.linear import matmul
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.session import XlaSession
from jaxrt.weights import Weights

SINGLE = 4  # calls of one position a round
FEW, MANY = 2, 10  # turns of a loop on the device
TRACE = 1e-6  # how much of a turn's result goes into the next one's input


@dataclass(frozen=True)
class Part:
    """One part of a step. bytes: read once a step, of matrices or of the cache's used slots; None where unknown."""

    name: str
    us: float
    share: float  # of the step
    bytes: int | None = None
    gbs: float | None = None  # 10^9 bytes a second while it runs


@dataclass(frozen=True)
class Explanation:
    """One decode step with n_depth tokens in the cache of every row, taken apart."""

    n_depth: int
    rows: int
    step_us: float  # wall time
    parts: tuple[Part, ...]  # their times add up to step_us, unless a note says otherwise
    notes: tuple[str, ...] = ()


def explain_step(session: XlaSession, n_depth: int, repetitions: int) -> Explanation:
    """Take apart the steps of a session whose rows hold max(n_depth, 1) tokens each. Blocks; rewinds the session.

    Raises: CapacityError when the context has no room for the steps.
    """
    model, rows, count = session.model, session.rows, session.positions
    length = max(n_depth, 1)
    middle = length + count // 2  # of the positions the steps are at
    products, mixed, sampled = _products(model, rows), _attention(model, rows, middle), _sampling(model, rows)
    rounds: list[dict[str, float]] = []
    for _ in range(repetitions + 1):
        one, device = _step(session, length, count)
        kv = session.context["kv"]  # read anew each round: the steps donate it
        rounds.append(
            {
                "step": one,
                "device": device,
                "matmuls": products.seconds(model.weights),
                "attention": mixed.seconds(kv),
                "sampling": sampled.seconds(None),
            }
        )
        del kv
    timed = {name: statistics.median(found[name] for found in rounds[1:]) for name in rounds[0]}  # the first compiles
    read = {
        "matmuls": sum(matrix.nbytes for matrix in _matrices(model.weights)),
        "attention": rows * cache.row_nbytes(model.config, middle + 1, model.cache_dtype),
    }
    return _explanation(n_depth, rows, timed, read)


def _explanation(n_depth: int, rows: int, timed: dict[str, float], read: dict[str, int]) -> Explanation:
    """timed: seconds of `step`, `device` and the parts that were timed alone; read: bytes of those that have any."""
    notes = []
    step, alone = timed["step"], {name: max(timed[name], 0.0) for name in ("matmuls", "attention", "sampling")}
    host, rest = step - timed["device"], timed["device"] - sum(alone.values())
    if host < 0:
        notes.append(f"a position within a long call takes {-host * 1e6:,.0f} us more than a call of its own")
    if rest < 0:
        notes.append(f"timed alone, the parts come to {-rest * 1e6:,.0f} us more than the device takes for a step")
    if any(timed[name] < 0 for name in alone):
        notes.append("a part is too short to be told from the noise")
    seconds = {
        "matmuls": alone["matmuls"],
        "attention": alone["attention"],
        "norms and the rest": max(rest, 0.0),
        "sampling": alone["sampling"],
        "host": max(host, 0.0),
    }
    parts = []
    for name, s in seconds.items():
        speed = read[name] / s / 1e9 if name in read and s > 0 else None
        parts.append(Part(name, us=1e6 * s, share=s / step, bytes=read.get(name), gbs=speed))
    return Explanation(n_depth, rows, 1e6 * step, tuple(parts), tuple(notes))


def lines(explanations: Sequence[Explanation]) -> list[str]:
    """Markdown: a table for each, and its notes."""
    found = []
    for one in explanations:
        rows = f" x {one.rows}" if one.rows > 1 else ""
        found += ["", f"one decode step @ d{one.n_depth}{rows}, in a call of its own: {one.step_us:,.0f} us", ""]
        found += ["| part | us | share | MB read | GB/s |", "|---|---:|---:|---:|---:|"]
        for part in one.parts:
            megabytes = "" if part.bytes is None else f"{part.bytes / 1e6:,.1f}"
            speed = "" if part.gbs is None else f"{part.gbs:.1f}"
            found.append(f"| {part.name} | {part.us:,.0f} | {part.share:.0%} | {megabytes} | {speed} |")
        found += ["", *one.notes] if one.notes else []
    return found


def _step(session: XlaSession, length: int, count: int) -> tuple[float, float]:
    """Seconds of a call of one position, and of the device a position."""
    knobs = knob_arrays.neutral(session.rows, session.model.config.vocab)
    session.rewind(length - 1)
    _call(session, 1, knobs, [0] * session.rows)  # tells the device where it stands: not what a step costs
    one = statistics.median(_call(session, 1, knobs) for _ in range(SINGLE))
    return one, (_call(session, count, knobs) - one) / (count - 1)


def _call(session: XlaSession, positions: int, knobs: sampling.Knobs, forced: Sequence[int] | None = None) -> float:
    started = time.perf_counter()
    session.step(positions, knobs, forced)
    session.settle()
    return time.perf_counter() - started


class _Loop:
    """A part by itself: `turn(carry, inputs, arrays) -> carry`, FEW and MANY times over in one call on the device."""

    def __init__(self, model: XlaModel, turn: Callable[[Any, Any, Any], Any], start: Any, inputs: Any) -> None:
        def run(turns: int, start: Any, inputs: Any, arrays: Any) -> Any:
            return jax.lax.fori_loop(0, turns, lambda _, carry: turn(carry, inputs, arrays), start)

        self._given = jax.device_put((start, inputs), model.device)
        self._few, self._many = (jax.jit(partial(run, turns)) for turns in (FEW, MANY))

    def seconds(self, arrays: Any) -> float:
        """Of one turn over the arrays."""
        few, many = self._call(self._few, arrays), self._call(self._many, arrays)
        return (many - few) / (MANY - FEW)

    def _call(self, loop: Callable[..., Any], arrays: Any) -> float:
        started = time.perf_counter()
        jax.block_until_ready(loop(*self._given, arrays))
        return time.perf_counter() - started


def _products(model: XlaModel, rows: int) -> _Loop:
    dtype = model.weights.embedding.dtype
    widths = {matrix.shape[1] for matrix in _matrices(model.weights)}
    inputs = {width: _noise(rows, width).astype(dtype) for width in widths}

    def turn(trace: Array, inputs: dict[int, Array], weights: Weights) -> Array:
        *layers, head = _matrices(weights)
        for matrix in layers:
            trace = _trace(matmul(inputs[matrix.shape[1]] + trace, matrix))
        return _trace(matmul(inputs[head.shape[1]] + trace, head, dtype=jnp.float32)).astype(dtype)

    return _Loop(model, turn, np.zeros((rows, 1), dtype), inputs)


def _trace(product: Array) -> Array:
    """A number of each row of a whole product. The barrier keeps XLA from working out that number alone."""
    return jax.lax.optimization_barrier(product)[:, :1] * TRACE


def _matrices(weights: Weights) -> Iterator[Any]:
    """Those that a step multiplies by, in its order: the head last."""
    for layer in weights.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
    yield weights.embedding if weights.head is None else weights.head


def _attention(model: XlaModel, rows: int, position: int) -> _Loop:
    config = model.config
    queries = _noise(rows, 1, config.heads, config.head_width).astype(model.weights.embedding.dtype)
    positions = np.full((rows, 1), position, np.int32)

    def turn(mixed: Array, inputs: tuple[Array, Array], kv: KVCache) -> Array:
        queries, positions = inputs
        for keys, values in zip(kv.keys, kv.values, strict=True):
            mixed = attend(queries + mixed * TRACE, keys, values, positions)
        return mixed

    return _Loop(model, turn, np.zeros_like(queries), (queries, positions))


def _sampling(model: XlaModel, rows: int) -> _Loop:
    vocab = model.config.vocab
    state = jax.jit(partial(sampling.initial_state, rows, vocab))()
    start = (_noise(rows, vocab), state, np.zeros((rows, sampling.COLUMNS), np.int32))
    inputs = (knob_arrays.neutral(rows, vocab), np.ones(rows, np.int32), np.ones(rows, np.bool_))

    def turn(carry: tuple, inputs: tuple, nothing: None) -> tuple:
        logits, state, _ = carry
        knobs, positions, active = inputs
        tokens, state, _, packed = sampling.step(logits, knobs, state, positions, active)
        return logits.at[:, 0].set(tokens.astype(jnp.float32) * TRACE), state, packed

    return _Loop(model, turn, start, inputs)


def _noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)
