"""The five-minute check on a GPU host: is it right, is it in place, how fast is it, how long does it take to start.

    scripts/gpu_check.sh [--budget-s 270] [--only WORD] [--tiny]

Random weights, made on the device, in the shapes of Llama-3.2-1B and Llama-3.1-8B: nothing is downloaded. Everything
is measured through jaxrt's own backend, sessions, plans and `jaxrt.bench`, with the buckets of a GPU. One JSON file
holds a section for each thing looked at: its `status` is "ok", "failed" (with an `error`) or "skipped" (with a
`reason`). It is written anew after every section, so that a run that is cut short leaves what it found.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrt import __version__, bench, compile_cache
from jaxrt import knobs as knob_arrays
from jaxrt import weights as weight_trees
from jaxrt.backend import ModelSource, XlaBackend
from jaxrt.buckets import FIRST, PLATFORMS, Bucket, BucketPolicy
from jaxrt.nn import scaled
from jaxrt.planning import resolve_dtype
from jaxrt.program import compiles
from jaxrt.runtime import ModelRuntime
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.outputs import DecodeInput, PrefillInput
from jaxrt.sessions.session import XlaSession
from scripts.gpu_models import SHAPES, SMALL, TINY, noise, random_weights
from scripts.gpu_report import Budget, CheckFailed, Report, Section, Skipped
from scripts.hlo import large_moves

ONE, SEVERAL = GPU_POSITIONS = PLATFORMS["gpu"].positions
CAPACITY = 512  # tokens, of the decode measurements
PROMPT = 2_048  # tokens, of the prefill measurement
PROMPT_CAPACITY = 2_560  # tokens: one rung that holds the prompt and what follows it
NEW = 128  # positions of one decode run
REPETITIONS = 3
STEPS = 100  # decode calls over which the cache must keep its addresses
TOLERANCE = 0.02  # of the largest logit, float32 against the CPU: a GPU may multiply in TF32
STARTS = ("cold", "warm")


class Check:
    """What the sections share: the device, the models on it, its ceilings, and the warnings that came up."""

    def __init__(self, tiny: bool, budget: Budget) -> None:
        self.tiny, self.budget = tiny, budget
        self.shapes = {"tiny": TINY} if tiny else SHAPES
        self.warned: list[str] = []
        self.bandwidth_gbs: float | None = None  # 10^9 bytes a second
        self.matmul_tflops: float | None = None  # 10^12 operations a second
        self._runtimes: dict[str, ModelRuntime] = {}
        warnings.filterwarnings("always", message=".*donated buffers")
        warnings.showwarning = self._note_warning  # for all threads: plans are made in several

    def sections(self) -> list[Section]:
        """The most important first. The times are guesses for an H100 with 16 cores."""
        found = [Section("device", 0, self.device), Section("ceilings", 10, self.ceilings)]
        found.append(Section("answers", 20, self.answers))
        for name, compile_s in zip(self.shapes, (30, 50), strict=False):
            found += [
                Section(f"{name}.compile", compile_s, self._of(self.compile, name)),
                Section(f"{name}.copies", 5, self._of(self.copies, name)),
                Section(f"{name}.donation", 5, self._of(self.donation, name)),
                Section(f"{name}.decode.1", 5, self._of(self.decode, name, rows=1)),
                Section(f"{name}.positions", 5, self._of(self.positions, name)),
                Section(f"{name}.prefill", 10, self._of(self.prefill, name)),
                Section(f"{name}.decode.8", 10, self._of(self.decode, name, rows=8)),
            ]
        found.append(Section("start", 60, self.start))
        found += [
            Section(f"{name}.decode.32", needs_s, self._of(self.decode, name, rows=32))
            for name, needs_s in zip(self.shapes, (25, 40), strict=False)
        ]
        found += [Section(f"{name}.int8", 30, self._of(self.int8, name)) for name in self.shapes]
        return [replace(section, needs_s=section.needs_s / 10) for section in found] if self.tiny else found

    def close(self) -> None:
        for runtime in self._runtimes.values():
            runtime.close()

    # --- sections -------------------------------------------------------------------------------------------------

    def device(self, found: dict[str, Any]) -> None:
        """What is there. Raises: CheckFailed without a GPU."""
        device = self._device
        found |= {
            "kind": device.device_kind,
            "platform": device.platform,
            "platform_version": device.client.platform_version,
            "devices": jax.device_count(),
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            "cores": os.cpu_count(),
            "versions": {"jaxrt": __version__, "jax": jax.__version__, "python": sys.version.split()[0]},
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }
        if device.platform != "gpu" and not self.tiny:
            raise CheckFailed("JAX sees no GPU here; see `python -m jaxrt doctor`")

    def ceilings(self, found: dict[str, Any]) -> None:
        """Read bandwidth and square matmul, with arrays large enough that a launch costs nothing beside them."""
        dtype, (size, width) = self._dtype, (1 << 26, 1_024) if self.tiny else (1 << 32, 8_192)
        with jax.default_device(self._device):
            array = jax.jit(lambda: jnp.ones(size // 4, jnp.float32))()
            self.bandwidth_gbs = size / _seconds(jax.jit(jnp.sum), array) / 1e9
            array.delete()
            # Noise: ones would draw less power, and run faster, than weights do.
            square = noise(0, 1.0, (width, width), dtype)
            self.matmul_tflops = 2 * width**3 / _seconds(jax.jit(jnp.dot), square, square) / 1e12
            square.delete()
        found |= {
            "read_bytes": size,
            "bandwidth_gbs": round(self.bandwidth_gbs, 1),
            "matmul_width": width,
            "matmul_dtype": jnp.dtype(dtype).name,
            "matmul_tflops": round(self.matmul_tflops, 3),
        }

    def answers(self, found: dict[str, Any]) -> None:
        """A tiny model in float32, prefilled and decoded here and on the CPU: its logits are the same.

        Raises: CheckFailed where they differ by more than TOLERANCE of the largest.
        """
        try:
            reference = jax.devices("cpu")[0]
        except RuntimeError as error:
            raise Skipped(f"no CPU to compare with: {error}") from error
        config, tokens = TINY, np.random.default_rng(0).integers(0, TINY.vocab, 80).tolist()
        arrays = jax.device_get(random_weights(config, jnp.float32, self._device, scale=0.1))
        seen = []
        for device in (reference, self._device):
            with ModelRuntime.prepare(XlaBackend(device), ModelSource(config, arrays)) as runtime:
                session = runtime.session
                prompt = session.prefill(PrefillInput(tokens[:70])).wait().read_logits()
                rest = session.decode(DecodeInput(tokens=tokens[70:])).wait().read_logits()
                seen.append(np.concatenate([prompt, rest], axis=1))
        expected, here = seen
        error = float(np.abs(here - expected).max() / np.abs(expected).max())
        found |= {
            "dtype": "float32",
            "error_of_largest_logit": error,
            "tolerance": TOLERANCE,
            "same_greedy_tokens": float((here.argmax(-1) == expected.argmax(-1)).mean()),
        }
        if not error <= TOLERANCE:  # also where it is not a number
            raise CheckFailed(f"logits differ from the CPU's by {error:.2%} of the largest")

    def compile(self, found: dict[str, Any], name: str) -> None:
        """The executables of one and of eight rows and of the long prompt, side by side; seconds of each."""
        runtime = self._runtime(name)
        model = _held(runtime)
        found |= {
            "dtype": weight_trees.stored(model.weights),
            "parameters": model.config.parameters,
            "weights_bytes": sum(leaf.nbytes for leaf in weight_trees.named(model.weights).values()),
        }
        buckets = [Bucket("decode", 1, CAPACITY, ONE), *_decode_buckets(1), *_prefill_buckets(), *_decode_buckets(8)]
        started = time.monotonic()
        plans = model.plans.warm(list(dict.fromkeys(buckets)))
        found["wall_s"] = round(time.monotonic() - started, 2)
        found["seconds_of_each"] = {
            str(bucket): round(plan.seconds, 2) for bucket, plan in zip(dict.fromkeys(buckets), plans, strict=True)
        }

    def copies(self, found: dict[str, Any], name: str) -> None:
        """What decode's optimised HLO copies, converts or transposes. Raises: CheckFailed where it is as large as the
        smallest weight matrix, or one layer's keys."""
        model = _held(self._runtime(name))
        leaves = weight_trees.named(model.weights).values()
        smallest = min(leaf.size for leaf in leaves if leaf.ndim == 2)
        for rows, count in ((1, ONE), (1, SEVERAL), (8, SEVERAL)):
            bucket = Bucket("decode", rows, CAPACITY, count)
            executable = model.plans.plan(bucket).executable
            limit = min(smallest, rows * model.config.kv_heads * model.config.head_width * CAPACITY)
            moved = large_moves(executable.as_text(), limit)
            memory = executable.memory_analysis()
            found[str(bucket)] = {
                "limit_elements": limit,
                "large": len(moved),
                "lines": moved[:8],
                "temporary_bytes": memory and memory.temp_size_in_bytes,
            }
        bad = [key for key, value in found.items() if isinstance(value, dict) and value["large"]]
        if bad:
            raise CheckFailed(
                f"{', '.join(bad)}: something as large as a weight or a layer's keys is copied or converted"
            )

    def donation(self, found: dict[str, Any], name: str) -> None:
        """Whether decode works in place, with one position a call and with several.

        Raises: CheckFailed where a cache's buffer moves within STEPS calls, less is aliased than donated, JAX warned of
        unusable donations since this check began, or logits are not finite.
        """
        model = _held(self._runtime(name))
        bad = []
        self._choose(model, CAPACITY)
        for count in GPU_POSITIONS:
            plan = model.plans.plan(Bucket("decode", 1, CAPACITY, count))
            memory = plan.executable.memory_analysis()
            donated = sum(slot.nbytes for slot in plan.inputs if slot.name in plan.donated)
            calls = min(STEPS, (CAPACITY - 10) // count)  # the cache must not grow meanwhile
            with closing(XlaSession(model)) as session:
                moved, finite = _watch_addresses(session, count, calls)
            found[f"{count} positions a call"] = {
                "donated_bytes": donated,
                "aliased_bytes": memory and memory.alias_size_in_bytes,
                "calls": calls,
                "buffers_that_moved": moved,
                "logits_finite": finite,
            }
            bad += [f"{moved} buffers of the cache moved with {count} positions a call"] if moved else []
            bad += [] if finite else [f"logits are not finite with {count} positions a call"]
            if memory and memory.alias_size_in_bytes < donated:
                bad.append(f"{donated - memory.alias_size_in_bytes:,} donated bytes are not aliased")
        found["warnings"] = [text for text in self.warned if "donated buffers" in text]
        bad += ["JAX warned of unusable donations"] if found["warnings"] else []
        if bad:
            raise CheckFailed("; ".join(bad))

    def decode(self, found: dict[str, Any], name: str, rows: int) -> None:
        """Positions of every row, several a call, beside the read bandwidth."""
        runtime = self._runtime(name)
        model = _held(runtime)
        self._choose(model, CAPACITY, rows=rows)
        started = time.monotonic()
        model.plans.warm(_decode_buckets(rows))
        found["compile_wall_s"] = round(time.monotonic() - started, 2)
        found |= self._decoded(runtime, rows)

    def positions(self, found: dict[str, Any], name: str) -> None:
        """One row, one position a call beside several."""
        runtime = self._runtime(name)
        model = _held(runtime)
        for count in GPU_POSITIONS:
            self._choose(model, CAPACITY, positions=(count,))
            found[f"{count} a call"] = self._decoded(runtime, 1)
        one, several = (found[f"{count} a call"]["tokens_per_s"] for count in GPU_POSITIONS)
        found["several_over_one"] = round(several / one, 3)

    def prefill(self, found: dict[str, Any], name: str) -> None:
        """A long prompt of one row, in chunks, beside the matmul peak."""
        runtime = self._runtime(name)
        model = _held(runtime)
        self._choose(model, PROMPT_CAPACITY)
        model.plans.warm(_prefill_buckets())
        report = bench.measure(
            runtime, model=name, prompts=[PROMPT], news=[0], depths=[0], rows=[1], repetitions=REPETITIONS
        )
        result = report.results[0]
        achieved = result.peak_fraction * report.matmul_gflops / 1e3  # bench's own peak is of a small matmul
        found |= {
            "tokens": PROMPT,
            "chunks": model.policy.chunks(PROMPT),
            "tokens_per_s": round(result.median_ts, 1),
            "seconds_of_prompt": round(PROMPT / result.median_ts, 4),
            "achieved_tflops": round(achieved, 3),
            "fraction_of_matmul_peak": self.matmul_tflops and round(achieved / self.matmul_tflops, 4),
        }

    def start(self, found: dict[str, Any]) -> None:
        """A process that compiles everything, and a second one that finds it in the persistent cache: seconds since
        each was launched. Raises: CheckFailed where one fails, or the second compiles."""
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        with tempfile.TemporaryDirectory() as directory:
            for kind in STARTS:
                command = [sys.executable, __file__, "--start", str(Path(directory) / "cache"), str(time.time())]
                command += ["--tiny"] if self.tiny else []
                launched = time.monotonic()
                ran = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=max(self.budget.left_s, 1)
                )
                if ran.returncode:
                    raise CheckFailed(f"the {kind} start ended with {ran.returncode}: {ran.stderr[-800:]}")
                found[kind] = json.loads(ran.stdout.splitlines()[-1])
                found[kind]["whole_process_s"] = round(time.monotonic() - launched, 2)
        if found["warm"]["compiled"]:
            raise CheckFailed(f"the second process compiled {found['warm']['compiled']} executables anew")

    def int8(self, found: dict[str, Any], name: str) -> None:
        """Decode with weights of eight bits and a scale for every output, and what its HLO widens in memory."""
        plain = _held(self._runtime(name))
        for kind in scaled.TYPES:
            weights = jax.tree.map(partial(_eight_bits, kind=kind), plain.weights)
            with ModelRuntime.prepare(XlaBackend(self._device), ModelSource(plain.config, weights)) as runtime:
                self._choose(_held(runtime), CAPACITY)
                found[kind] = self._decoded(runtime, 1)
                text = _held(runtime).plans.plan(Bucket("decode", 1, CAPACITY, SEVERAL)).executable.as_text()
            matrices = [leaf for leaf in weight_trees.named(weights).values() if leaf.ndim == 2]
            found[kind]["weights_bytes"] = sum(leaf.nbytes for leaf in matrices)
            found[kind]["widened"] = large_moves(text, min(leaf.size for leaf in matrices))[:8]

    # --- what they share ------------------------------------------------------------------------------------------

    @property
    def _device(self) -> jax.Device:
        return jax.devices()[0]

    @property
    def _dtype(self) -> Any:
        """bfloat16 on a GPU; float32 where --tiny runs on a CPU, which computes in that."""
        return resolve_dtype("auto", self._device.platform)

    def _of(self, look: Callable[..., None], name: str, **more: Any) -> Callable[[dict[str, Any]], None]:
        return lambda found: look(found, name, **more)

    def _runtime(self, name: str) -> ModelRuntime:
        """The model of that name, made when first asked for. Raises: Skipped where it cannot fit the device."""
        if name not in self._runtimes:
            config = self.shapes[name]
            held = weight_trees.nbytes(weight_trees.abstract(config, self._dtype))
            limit = (self._device.memory_stats() or {}).get("bytes_limit")
            if limit and held * 1.2 > limit:
                raise Skipped(f"weights of {held:,} bytes do not fit a device of {limit:,} bytes")
            backend = XlaBackend(self._device)
            source = ModelSource(config, random_weights(config, self._dtype, self._device))
            self._runtimes[name] = ModelRuntime.prepare(backend, source)
            self._choose(_held(self._runtimes[name]), CAPACITY)
        return self._runtimes[name]

    def _choose(
        self, model: XlaModel, capacity: int, rows: int = 1, positions: tuple[int, ...] = GPU_POSITIONS
    ) -> None:
        """Let the model's next session use just these buckets, of a GPU's kind: those that were compiled for it."""
        model.policy = _gpu_policy(capacity, rows, positions)

    def _decoded(self, runtime: ModelRuntime, rows: int) -> dict[str, Any]:
        """One decode measurement. Fractions are of `ceilings`: bench's own bandwidth is of a smaller array."""
        report = bench.measure(
            runtime, model="", prompts=[0], news=[0, NEW], depths=[0], rows=[rows], repetitions=REPETITIONS
        )
        result = report.results[0]
        achieved = result.peak_fraction * report.bandwidth_gbs
        return {
            "rows": rows,
            "positions": NEW,
            "capacity": CAPACITY,
            "tokens_per_s": round(result.median_ts, 2),
            "ms_per_position": round(1e3 * rows / result.median_ts, 4),
            "achieved_gbs": round(achieved, 2),
            "fraction_of_bandwidth": self.bandwidth_gbs and round(achieved / self.bandwidth_gbs, 4),
        }

    def _note_warning(self, message: Any, category: Any, *rest: Any, **more: Any) -> None:
        self.warned.append(f"{category.__name__}: {message}"[:500])


def _held(runtime: ModelRuntime) -> XlaModel:
    session = runtime.session
    assert isinstance(session, XlaSession)
    return session.model


def _eight_bits(leaf: jax.Array, kind: str) -> Any:
    if leaf.ndim != 2:
        return leaf
    return jax.jit(scaled.scaled, static_argnums=(1, 2, 3))(leaf, 1, jnp.dtype(kind), leaf.dtype)


def _gpu_policy(capacity: int, rows: int = 1, positions: tuple[int, ...] = GPU_POSITIONS) -> BucketPolicy:
    return BucketPolicy((1, rows), (capacity,), replace(PLATFORMS["gpu"], positions=positions))


def _decode_buckets(rows: int) -> list[Bucket]:
    """What a session of `rows` rows needs to be given a short prompt and to decode several positions a call."""
    found = [Bucket("make", 1, CAPACITY), Bucket("prefill", 1, CAPACITY, PLATFORMS["gpu"].prefill[0]), FIRST]
    if rows > 1:
        found += [Bucket("make", rows, CAPACITY), Bucket("move", rows, CAPACITY)]
    return [Bucket("decode", rows, CAPACITY, SEVERAL), *found]


def _prefill_buckets() -> list[Bucket]:
    chunks = sorted(set(_gpu_policy(PROMPT_CAPACITY).chunks(PROMPT)))
    prefills = [Bucket("prefill", 1, PROMPT_CAPACITY, length) for length in chunks]
    return [*prefills, Bucket("make", 1, PROMPT_CAPACITY), FIRST]


def _seconds(call: Callable[..., jax.Array], *arguments: jax.Array, queued: int = 4, runs: int = 5) -> float:
    """Of one call, the best of several runs; calls are queued, so that the host's part is hidden."""
    call(*arguments).block_until_ready()
    best = math.inf
    for _ in range(runs):
        started = time.perf_counter()
        jax.block_until_ready([call(*arguments) for _ in range(queued)])
        best = min(best, (time.perf_counter() - started) / queued)
    return best


def _watch_addresses(session: XlaSession, positions: int, calls: int) -> tuple[int, bool]:
    """How many of the cache's buffers changed their address while decoding, and whether the last logits are finite."""
    knobs = knob_arrays.neutral(1, session.model.config.vocab)
    session.prefill(PrefillInput([1, 2, 3, 4])).wait()

    def places() -> list[int]:
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(session.context["kv"])]

    before, moved = places(), set()
    for _ in range(calls):
        output = session.step(positions, knobs)
        moved |= {index for index, pair in enumerate(zip(before, places(), strict=True)) if pair[0] != pair[1]}
    session.settle()
    return len(moved), bool(np.isfinite(np.array(output.logits[-1])).all())


# --- running --------------------------------------------------------------------------------------------------------


def start_once(directory: Path, launched: float, tiny: bool) -> dict[str, Any]:
    """From nothing to the first tokens, with the persistent compile cache in `directory`: what was compiled, and
    seconds since `launched` (of time.time)."""

    def since() -> float:
        return round(time.time() - launched, 2)

    found: dict[str, Any] = {"imported_s": since()}
    compile_cache.enable(directory)
    device = jax.devices()[0]
    found["device_s"] = since()
    config = TINY if tiny else SHAPES[SMALL]
    source = ModelSource(config, random_weights(config, resolve_dtype("auto", device.platform), device))
    with ModelRuntime.prepare(XlaBackend(device), source) as runtime:
        model = _held(runtime)
        jax.block_until_ready(model.weights)
        found["weights_s"] = since()
        model.policy = _gpu_policy(CAPACITY)
        model.plans.prepare(_decode_buckets(1))  # side by side, as a request does it
        runtime.session.prefill(PrefillInput(list(range(64)))).wait()
        found["prompt_s"] = since()
        runtime.session.decode(DecodeInput(positions=SEVERAL)).wait().read()
        found["first_tokens_s"] = since()
    counted = compiles()
    return {**found, "compiled": counted.misses, "loaded": counted.hits}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=270.0, help="seconds for everything")
    parser.add_argument("--only", default="", help="only sections whose name has this in it, and device and ceilings")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on whatever device there is")
    parser.add_argument("--start", nargs=2, metavar=("CACHE", "LAUNCHED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        print(json.dumps(start_once(Path(given.start[0]), float(given.start[1]), given.tiny)))
        return 0
    budget = Budget(given.budget_s)
    path = Path(os.environ.get("OUT") or ".") / "gpu_check.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if given.tiny:  # its seconds mean nothing: compile once for ever, as tests do
        compile_cache.enable()
    facts = {
        "tiny": given.tiny,
        "budget_s": given.budget_s,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    report, check = Report(path, budget, facts), Check(given.tiny, budget)
    sections = [s for s in check.sections() if given.only in s.name or s.name in ("device", "ceilings")]
    report.run(sections)
    check.close()
    failed = report.with_status("failed")
    print(f"{path}: {len(failed)} of {len(sections)} sections failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
