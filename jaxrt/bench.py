"""`jaxrt bench`: prefill and decode measured like llama-bench, beside what this device can do at most."""

import csv
import io
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
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
from jaxrt.program import compiles
from jaxrt.runtime import ModelRuntime
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
    bandwidth_gbs: float  # read bandwidth, 10^9 bytes a second, measured beside every test; their median
    matmul_gflops: float  # square matmul in the weights' dtype, likewise
    compile_s: float
    peak_bytes: int  # of the process on CPU, of the device elsewhere
    versions: dict[str, str]
    results: tuple[Result, ...]


def measure(
    runtime: ModelRuntime,
    *,
    model: str,
    prompts: Sequence[int],
    news: Sequence[int],
    depths: Sequence[int],
    rows: Sequence[int],
    repetitions: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Run every combination `repetitions` times after a warm-up run. Blocks. Raises: CapacityError past the context."""
    session = runtime.session
    if not isinstance(session, XlaSession):
        raise RequestError(f"a {type(session).__name__}", expected="an XlaSession")
    held = session.model
    peaks = []  # measured beside every test: a shared machine changes speed from minute to minute
    if not any(prompts) and not any(news):
        raise RequestError("nothing to measure", expected="a number of prompt tokens (-p) or of new tokens (-n)")
    tests = [(count, 0, *rest) for count, *rest in product(prompts, depths, rows) if count]
    tests += [(0, count, *rest) for count, *rest in product(news, depths, rows) if count]
    results = []
    for done, (prompt, new, depth, width) in enumerate(tests):
        if progress is not None:
            progress(done, len(tests), f"{'prefill' if prompt else 'decode'} {prompt or new}")
        peaks.append((_bandwidth(held.device), _matmul_peak(held.device, held.weights.embedding.dtype)))
        bandwidth, peak = peaks[-1]
        own = XlaSession(held, width)
        try:
            seconds = [_run(own, prompt, new, depth) for _ in range(repetitions + 1)][1:]
        finally:
            own.close()
        ceiling = peak / _flops(held.config) if prompt else width * bandwidth / _bytes(own, depth + new // 2)
        results.append(_result((prompt, new, depth, width), seconds, ceiling))
    return Report(
        device=f"{held.device.device_kind} ({held.device.platform})",
        model=model,
        weights_bytes=sum(leaf.nbytes for leaf in named(held.weights).values()),
        n_params=held.config.parameters,
        dtype=stored(held.weights),
        kv_dtype=np.dtype(held.cache_dtype).name,
        bandwidth_gbs=statistics.median(b for b, _ in peaks) / 1e9,
        matmul_gflops=statistics.median(p for _, p in peaks) / 1e9,
        compile_s=compiles().seconds,
        peak_bytes=_peak_bytes(held.device),
        versions={"jaxrt": __version__, "jax": jax.__version__},
        results=tuple(results),
    )


def _run(session: XlaSession, prompt: int, new: int, depth: int) -> float:
    """Seconds of one test, the filling of the cache before it not counted."""
    vocab, rows = session.model.config.vocab, range(session.rows)
    tokens = np.random.default_rng(0).integers(0, vocab, depth + prompt + 1).tolist()
    session.start_anew(depth + prompt + new + 1)
    session.reserve(depth + prompt + new + 1)
    one_row, knobs = knob_arrays.neutral(1, vocab), knob_arrays.neutral(session.rows, vocab)
    before = depth if prompt else max(depth, 1)
    for row in rows:
        if before:
            session.admit((row,), tokens[:before], [one_row])
    session.settle()
    started = time.perf_counter()
    if prompt:
        outputs = [session.admit((row,), tokens[depth : depth + prompt], [one_row]) for row in rows]
        jax.block_until_ready(outputs[-1].packed)
    else:
        for start in range(0, new, session.positions):
            session.step(min(session.positions, new - start), knobs)
    session.settle()
    return time.perf_counter() - started


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
    lines = ["| model | size | dtype | device | test | t/s | of ceiling |", "|---|---:|---|---|---:|---:|---:|"]
    facts = f"| {report.model} | {report.weights_bytes / 2**20:,.0f} MiB | {report.dtype} | {report.device} |"
    for result in report.results:
        speed = f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}"
        lines.append(f"{facts} {result.test} | {speed} | {result.peak_fraction:.0%} |")
    peaks = f"read bandwidth {report.bandwidth_gbs:.1f} GB/s, matmul peak {report.matmul_gflops:,.0f} GFLOP/s"
    peak_memory = f"peak memory {report.peak_bytes / 2**20:,.0f} MiB"
    return "\n".join([*lines, "", f"{peaks}, compiling {report.compile_s:.1f} s, {peak_memory}"])


_RENDERERS: dict[str, Callable[[Report], str]] = {"json": _json, "csv": _csv, "md": _markdown}
