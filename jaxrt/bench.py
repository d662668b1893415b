"""`jaxrt bench`: prefill and decode measured like llama-bench, beside what this device can do at most."""

import csv
import io
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrt import __version__, cache
from jaxrt import knobs as knob_arrays
from jaxrt.config import ModelConfig
from jaxrt.errors import RequestError
from jaxrt.explain_decode import Explanation, explain_step, lines
from jaxrt.program import compiles
from jaxrt.runtime import ModelRuntime
from jaxrt.sampling import Knobs
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.session import XlaSession
from jaxrt.weights import named, stored

BANDWIDTH_BYTES = 256 << 20  # read once a run: far beyond any cache
MATMUL_WIDTH = 1_024
PEAK_RUNS = 8


@dataclass(frozen=True)
class Result:
    """One test: n_prompt tokens prefilled, or n_gen decoded, with n_depth in the cache. llama-bench's names; ts:
    tokens a second."""

    n_prompt: int
    n_gen: int
    n_depth: int
    rows: int
    avg_ts: float
    stddev_ts: float
    median_ts: float
    avg_ns: int
    stddev_ns: int
    samples_ts: tuple[float, ...]
    peak_fraction: float  # of the bandwidth's (decode) or the matmul's (prefill) ceiling

    @property
    def test(self) -> str:
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return name + (f" @ d{self.n_depth}" if self.n_depth else "") + (f" x {self.rows}" if self.rows > 1 else "")


@dataclass(frozen=True)
class Report:
    device: str
    model: str
    weights_bytes: int
    n_params: int
    dtype: str
    kv_dtype: str
    kernels: str  # what multiplies: the instruction set of the native kernels, or XLA
    bandwidth_gbs: float  # read bandwidth, 10^9 bytes a second, measured beside every test; their median
    matmul_gflops: float  # square matmul in the weights' dtype, likewise
    # What one user waits for: one row, each token read as soon as it is there, of the first n_prompt, n_gen and n_depth
    # asked for; None where no prompt, or no new token, was.
    ttft_s: float | None  # from handing in the prompt to its first token on the host, median
    inter_token_p50_ms: float | None  # between tokens, one position a call, of all repetitions together
    inter_token_p99_ms: float | None
    compile_s: float
    peak_bytes: int  # of the process on CPU, of the device elsewhere
    versions: dict[str, str]
    results: tuple[Result, ...]
    explain: tuple[Explanation, ...] = ()  # of each n_depth and rows, where it was asked for


def measure(
    runtime: ModelRuntime,
    *,
    model: str,
    prompts: Sequence[int],
    news: Sequence[int],
    depths: Sequence[int],
    rows: Sequence[int],
    repetitions: int,
    explain: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Run every combination `repetitions` times after a warm-up run. explain: also take a decode step apart. Blocks.

    Raises: CapacityError past the context.
    """
    session = runtime.session
    if not isinstance(session, XlaSession):
        raise RequestError(f"a {type(session).__name__}", expected="an XlaSession")
    held = session.model
    peaks = []  # measured beside every test: a shared machine changes speed from minute to minute
    if not any(prompts) and not any(news):
        raise RequestError("nothing to measure", expected="a number of prompt tokens (-p) or of new tokens (-n)")
    tests = [(count, 0, *rest) for count, *rest in product(prompts, depths, rows) if count]
    tests += [(0, count, *rest) for count, *rest in product(news, depths, rows) if count]
    explained = [*product(depths, rows)] if explain else []
    count = len(tests) + 1 + len(explained)
    note = progress or (lambda done, total, what: None)
    results = []
    for done, (prompt, new, depth, width) in enumerate(tests):
        note(done, count, f"{'prefill' if prompt else 'decode'} {prompt or new}")
        peaks.append((_bandwidth(held.device), _matmul_peak(held.device, held.weights.embedding.dtype)))
        bandwidth, peak = peaks[-1]
        with closing(XlaSession(held, width)) as own:
            seconds = [run_test(own, prompt, new, depth) for _ in range(repetitions + 1)][1:]
            ceiling = peak / _flops(held.config) if prompt else width * bandwidth / _bytes(own, depth + new // 2)
        results.append(_result((prompt, new, depth, width), seconds, ceiling))
    note(len(tests), count, "latency")
    ttft_s, p50_ms, p99_ms = _latency(held, _first(prompts), _first(news), _first(depths), repetitions)
    compile_s, peak_bytes = compiles().seconds, _peak_bytes(held.device)  # of what was measured so far
    explanations = []
    for done, (depth, width) in enumerate(explained, len(tests) + 1):
        note(done, count, f"a step at {depth}")
        with closing(XlaSession(held, width)) as own:
            _fill(own, max(depth, 1), depth + own.positions + 1)
            explanations.append(explain_step(own, depth, repetitions))
    return Report(
        device=f"{held.device.device_kind} ({held.device.platform})",
        model=model,
        weights_bytes=sum(leaf.nbytes for leaf in named(held.weights).values()),
        n_params=held.config.parameters,
        dtype=stored(held.weights),
        kv_dtype=np.dtype(held.cache_dtype).name,
        kernels=held.kernels,
        bandwidth_gbs=statistics.median(b for b, _ in peaks) / 1e9,
        matmul_gflops=statistics.median(p for _, p in peaks) / 1e9,
        ttft_s=ttft_s,
        inter_token_p50_ms=p50_ms,
        inter_token_p99_ms=p99_ms,
        compile_s=compile_s,
        peak_bytes=peak_bytes,
        versions={"jaxrt": __version__, "jax": jax.__version__},
        results=tuple(results),
        explain=tuple(explanations),
    )


def run_test(session: XlaSession, prompt: int, new: int, depth: int) -> float:
    """Seconds of one test, the filling of the cache before it not counted."""
    before = depth if prompt else max(depth, 1)
    _fill(session, before, before + prompt + new)
    one_row, knobs = _neutral(session, 1), _neutral(session, session.rows)
    tokens = _tokens(session, prompt)
    started = time.perf_counter()
    if prompt:
        outputs = [session.admit((row,), tokens, [one_row]) for row in range(session.rows)]
        jax.block_until_ready(outputs[-1].packed)
    else:
        for start in range(0, new, session.positions):
            session.step(min(session.positions, new - start), knobs)
    session.settle()
    return time.perf_counter() - started


def _latency(model: XlaModel, prompt: int, new: int, depth: int, repetitions: int) -> tuple[float | None, ...]:
    """`ttft_s`, `inter_token_p50_ms` and `inter_token_p99_ms` of a report."""
    first, between = [], []
    with closing(XlaSession(model)) as session:
        knobs, tokens = _neutral(session, 1), _tokens(session, prompt or 1)
        for repetition in range(repetitions + 1):
            _fill(session, depth, depth + len(tokens) + new)
            moments = [time.perf_counter()]
            session.collect(session.admit((0,), tokens, [knobs]))
            moments.append(time.perf_counter())
            for _ in range(new):
                session.collect(session.step(1, knobs))
                moments.append(time.perf_counter())
            if repetition:  # the first may compile
                took = np.diff(moments).tolist()
                first.append(took[0])
                between += took[1:]
    percentiles = (1e3 * np.percentile(between, (50, 99))).tolist() if new else (None, None)
    return (statistics.median(first) if prompt else None, *percentiles)


def _first(counts: Sequence[int]) -> int:
    return counts[0] if counts else 0


def _fill(session: XlaSession, tokens: int, reach: int) -> None:
    """Put `tokens` into every row of an emptied session, with room for `reach` of them."""
    session.start_anew(reach)
    session.reserve(reach)
    for row in range(session.rows if tokens else 0):
        session.admit((row,), _tokens(session, tokens), [_neutral(session, 1)])
    session.settle()


def _tokens(session: XlaSession, count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, session.model.config.vocab, count).tolist()


def _neutral(session: XlaSession, rows: int) -> Knobs:
    return knob_arrays.neutral(rows, session.model.config.vocab)


def _result(test: tuple[int, int, int, int], seconds: Sequence[float], ceiling_ts: float) -> Result:
    prompt, new, depth, rows = test
    speeds = tuple(rows * (prompt or new) / s for s in seconds)
    spread = statistics.stdev if len(seconds) > 1 else lambda _: 0.0
    return Result(
        *test,
        avg_ts=statistics.fmean(speeds),
        stddev_ts=spread(speeds),
        median_ts=statistics.median(speeds),
        avg_ns=int(1e9 * statistics.fmean(seconds)),
        stddev_ns=int(1e9 * spread(seconds)),
        samples_ts=speeds,
        peak_fraction=statistics.median(speeds) / ceiling_ts,
    )


def _bytes(session: XlaSession, length: int) -> int:
    """Read by one decode position: every weight but an embedding table that is only looked up, and the cache's used
    slots."""
    model = session.model
    weights = sum(leaf.nbytes for leaf in named(model.weights).values())
    looked_up = 0 if model.config.tied_head else model.weights.embedding.nbytes
    return weights - looked_up + session.rows * cache.row_nbytes(model.config, length, model.cache_dtype)


def _flops(config: ModelConfig) -> int:
    """Of one prefill token: two a weight of the layers; attention and the one position's head left out."""
    tables = config.vocab * config.width * (1 if config.tied_head else 2)
    return 2 * (config.parameters - tables)


def _bandwidth(device: jax.Device) -> float:
    """Bytes a second of reading a large array, the best of several runs."""
    array = jax.device_put(np.ones(BANDWIDTH_BYTES // 4, np.float32), device)
    return BANDWIDTH_BYTES / _best(jax.jit(jnp.sum), array)


def _matmul_peak(device: jax.Device, dtype: Any) -> float:
    """Floating-point operations a second of a square matmul, the best of several runs."""
    square = jax.device_put(np.ones((MATMUL_WIDTH, MATMUL_WIDTH), dtype), device)
    return 2 * MATMUL_WIDTH**3 / _best(jax.jit(jnp.dot), square, square)


def _best(call: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    call(*arguments).block_until_ready()
    seconds = []
    for _ in range(PEAK_RUNS):
        started = time.perf_counter()
        call(*arguments).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _peak_bytes(device: jax.Device) -> int:
    stats = device.memory_stats()
    return stats["peak_bytes_in_use"] if stats else 1_024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def render(report: Report, form: str) -> str:
    """The report as "md", "csv" or "json"."""
    return _RENDERERS[form](report)


def _json(report: Report) -> str:
    return json.dumps(asdict(report))


def _csv(report: Report) -> str:
    text = io.StringIO()
    rows = [{"model": report.model, "device": report.device, **asdict(result)} for result in report.results]
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip()


def _markdown(report: Report) -> str:
    table = ["| model | size | dtype | device | test | t/s | of ceiling |", "|---|---:|---|---|---:|---:|---:|"]
    facts = f"| {report.model} | {report.weights_bytes / 2**20:,.0f} MiB | {report.dtype} | {report.device} |"
    for result in report.results:
        speed = f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}"
        table.append(f"{facts} {result.test} | {speed} | {result.peak_fraction:.0%} |")
    limits = f"read bandwidth {report.bandwidth_gbs:.1f} GB/s, matmul peak {report.matmul_gflops:,.0f} GFLOP/s"
    peak_memory = f"peak memory {report.peak_bytes / 2**20:,.0f} MiB"
    machine = f"{limits}, kernels {report.kernels}, compiling {report.compile_s:.1f} s, {peak_memory}"
    waits = [] if report.ttft_s is None else [f"first token after {1e3 * report.ttft_s:,.1f} ms"]
    if report.inter_token_p50_ms is not None:
        waits.append(f"then one every {report.inter_token_p50_ms:.1f} ms (p99 {report.inter_token_p99_ms:.1f} ms)")
    return "\n".join([*table, "", machine, *([", ".join(waits)] if waits else []), *lines(report.explain)])


_RENDERERS: dict[str, Callable[[Report], str]] = {"json": _json, "csv": _csv, "md": _markdown}
