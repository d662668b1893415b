#!/usr/bin/env python3
"""jaxrt beside llama.cpp and transformers: taking turns in one run, as a table of medians and ratios, and a picture.

    scripts/compare_peers.py --model FILE.gguf --llama-bench PATH [--transformers-python PYTHON] [--plot OUT]

PATH is a llama-bench; several rows are timed by the llama-batched-bench beside it. PYTHON is an interpreter that has
torch, transformers, accelerate and gguf (the `peers` extra). The engines take turns, test by test, since a shared
machine changes speed from minute to minute: read the ratios.

jaxrt and llama.cpp run the file as it is, packed weights as they are packed (`--llama-model` gives llama.cpp another
one, `--dtype` jaxrt another dtype); transformers unpacks it to float32. Each keeps its cache as it does by itself: on
CPU jaxrt and transformers in float32, llama.cpp in float16. `--start` also times whole processes up to their first
token. `--plot OUT` draws OUT.png and OUT.svg (the `viz` extra).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

THREADS = str(os.cpu_count())
JAXRT, TRANSFORMERS, LLAMA = "jaxrt", "transformers", "llama.cpp"


@dataclass(frozen=True)
class Test:
    """n_prompt tokens prefilled, or n_gen decoded, with n_depth in the cache before, in each row. Named as llama-bench
    names them."""

    n_prompt: int
    n_gen: int
    n_depth: int
    rows: int

    @property
    def name(self) -> str:
        what = f"prefill {self.n_prompt}" if self.n_prompt else f"decode {self.n_gen}"
        depth = f", after {self.n_depth:,}" if self.n_depth else ""
        return what + depth + (f", {self.rows} rows" if self.rows > 1 else "")

    def speed(self, seconds: float) -> float:
        """Tokens a second, of all rows together."""
        return self.rows * (self.n_prompt or self.n_gen) / seconds


Timer = Callable[[Test], float | None]  # seconds of a test; None where the engine cannot run it


class Worker:
    """An engine in a process of its own: one test a line in, its seconds out."""

    def __init__(self, name: str, python: str, options: argparse.Namespace) -> None:
        self.name = name
        asked = ["--worker", name, "--model", str(options.model), "--dtype", options.dtype]
        self._process = subprocess.Popen(
            [python, __file__, *asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": THREADS},
        )

    def __call__(self, test: Test) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(asdict(test)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} worker ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def serve_jaxrt(model: Path, dtype: str) -> Timer:
    import jaxrt
    from jaxrt.bench import run_test

    runtime = jaxrt.load(model, dtype=dtype)
    sessions = {1: runtime.session}

    def answer(test: Test) -> float:
        if test.rows not in sessions:
            sessions[test.rows] = runtime.new_session(rows=test.rows)
        return run_test(sessions[test.rows], test.n_prompt, test.n_gen, test.n_depth)

    return answer


def serve_transformers(model: Path, dtype: str) -> Timer:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(THREADS))
    network = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def answer(test: Test) -> float:
        def tokens(count: int) -> torch.Tensor:
            return torch.randint(0, network.config.vocab_size, (test.rows, count), generator=generator)

        before = test.n_depth if test.n_prompt else max(test.n_depth, 1)
        cache = network(tokens(before), logits_to_keep=1).past_key_values if before else None
        given = tokens(test.n_prompt or 1)
        started = time.perf_counter()
        for _ in range(test.n_gen or 1):
            out = network(given, past_key_values=cache, logits_to_keep=1)
            given, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        return time.perf_counter() - started

    return answer


def work(name: str, model: Path, dtype: str) -> None:
    """Answer until the input ends. The first answer to a test is a warm-up that nobody counts."""
    answer = {JAXRT: serve_jaxrt, TRANSFORMERS: serve_transformers}[name](model, dtype)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    for line in sys.stdin:
        answers.write(json.dumps(answer(Test(**json.loads(line)))) + "\n")
        answers.flush()


def llama_timer(bench: str, model: Path) -> Timer:
    """llama-bench for one row; for several the llama-batched-bench beside it, where there is one."""
    batched = Path(bench).with_name("llama-batched-bench")

    def answer(test: Test) -> float | None:
        common = ["-m", str(model), "-t", THREADS]
        if test.rows == 1:
            counts = ["-p", str(test.n_prompt), "-n", str(test.n_gen), "-d", str(test.n_depth)]
            return json.loads(output([bench, *common, *counts, "-r", "1", "-o", "json"]))[0]["avg_ns"] / 1e9
        if test.n_prompt or not batched.is_file():
            return None
        before = max(test.n_depth, 1)
        counts = ["-npp", str(before), "-ntg", str(test.n_gen), "-npl", str(test.rows)]
        room = ["-c", str(test.rows * (before + test.n_gen))]
        lines = output([str(batched), *common, *room, *counts, "--output-format", "jsonl"]).splitlines()
        return json.loads(next(line for line in lines if line.startswith("{")))["t_tg"]

    return answer


def output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{Path(command[0]).name} ended with {done.returncode}:\n{done.stderr[-2_000:]}")
    return done.stdout


def bandwidth() -> float:
    """Read bandwidth in bytes a second: a sum over 256 MiB, the best of eight."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    array = jax.device_put(np.ones(64 << 20, np.float32))
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    seconds = []
    for _ in range(8):
        started = time.perf_counter()
        total(array).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return array.nbytes / min(seconds)


TRANSFORMERS_FIRST = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
path = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
ids = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=1, do_sample=False)[0]))
"""


def starts(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of whole processes up to the first token, in turn: the second start of jaxrt, and transformers."""
    ours = [sys.executable, "-m", "jaxrt", "run", "The capital of France is", "--max-tokens", "1"]
    ours += ["--model", str(options.model), "--dtype", options.dtype]
    commands = {JAXRT: ours}
    if options.transformers_python:
        commands[TRANSFORMERS] = [options.transformers_python, "-c", TRANSFORMERS_FIRST, str(options.model)]
    completion = Path(options.llama_bench or "").with_name("llama-completion")
    if completion.is_file():
        told = ["-p", "The capital of France is", "-n", "1", "--temp", "0", "-no-cnv", "-t", THREADS]
        commands[LLAMA] = [str(completion), "-m", str(options.llama_model), *told]
    output(ours)
    seconds: dict[str, list[float]] = {engine: [] for engine in commands}
    for _ in range(3):
        for engine, command in commands.items():
            started = time.perf_counter()
            output(command)
            seconds[engine].append(time.perf_counter() - started)
    return {engine: statistics.median(took) for engine, took in seconds.items()}


@dataclass(frozen=True)
class Row:
    """What the engines did in one test: tokens a second of each run, by engine."""

    test: Test
    speeds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, engine: str) -> float | None:
        return statistics.median(self.speeds[engine]) if engine in self.speeds else None

    def ratio(self, engine: str) -> float | None:
        """jaxrt's speed over that engine's: the median of the ratios of each run, whose two took turns."""
        pairs = zip(self.speeds[JAXRT], self.speeds.get(engine, ()), strict=False)
        ratios = [ours / theirs for ours, theirs in pairs]
        return statistics.median(ratios) if ratios else None


def wanted(options: argparse.Namespace) -> list[Test]:
    """Prompts into an empty cache; decoding at every depth in one row, and in all rows at the first depth."""
    depths, rows = options.d or [0, 2_048], options.b or [1, 4, 8]
    tests = [Test(prompt, 0, 0, 1) for prompt in options.p or [128, 512]]
    tests += [Test(0, options.n, depth, 1) for depth in depths]
    return tests + [Test(0, options.n, depths[0], count) for count in rows if count > 1]


def compare(options: argparse.Namespace) -> dict[str, Any]:
    engines: dict[str, Timer] = {JAXRT: Worker(JAXRT, sys.executable, options)}
    if options.transformers_python:
        engines[TRANSFORMERS] = Worker(TRANSFORMERS, options.transformers_python, options)
    if options.llama_bench:
        engines[LLAMA] = llama_timer(options.llama_bench, options.llama_model)
    rows, floors = [Row(test) for test in wanted(options)], []
    for run in range(options.r + 1):
        for row in rows:
            print(f"run {run} of {options.r}: {row.test.name}", file=sys.stderr)
            for engine, timer in engines.items():
                # the first run warms the workers up; llama.cpp's processes warm up by themselves, every time
                if run or engine != LLAMA:
                    took = timer(row.test)
                    if run and took is not None:
                        row.speeds.setdefault(engine, []).append(row.test.speed(took))
        floors.append(bandwidth())
    for worker in engines.values():
        if isinstance(worker, Worker):
            worker.close()
    return {
        "model": options.model.name,
        "llama_model": options.llama_model.name,
        "dtype": options.dtype,
        "threads": int(THREADS),
        "runs": options.r,
        "bandwidth_gbs": statistics.median(floors) / 1e9,
        "engines": list(engines),
        "tests": [
            {
                "name": row.test.name,
                **asdict(row.test),
                "samples_ts": row.speeds,
                "median_ts": {engine: row.median(engine) for engine in engines},
                "jaxrt_ratio": {engine: row.ratio(engine) for engine in engines if engine != JAXRT},
            }
            for row in rows
        ],
        "first_token_s": starts(options) if options.start else {},
    }


def table(found: dict[str, Any]) -> str:
    peers = [engine for engine in found["engines"] if engine != JAXRT]
    head = ["tokens/s", JAXRT, *(cell for peer in peers for cell in (peer, f"jaxrt / {peer}"))]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for test in found["tests"]:
        cells = [test["name"], shown(test["median_ts"][JAXRT], ".1f")]
        for peer in peers:
            cells += [shown(test["median_ts"][peer], ".1f"), shown(test["jaxrt_ratio"][peer], ".2f", " x")]
        lines.append("| " + " | ".join(cells) + " |")
    files = found["model"] + ("" if LLAMA not in peers else f" (llama.cpp: {found['llama_model']})")
    machine = f"{found['threads']} threads, read bandwidth {found['bandwidth_gbs']:.1f} GB/s"
    lines += ["", f"{files}, dtype {found['dtype']}; medians of {found['runs']}; {machine}"]
    lines += [f"first token of a new {engine} process: {took:.2f} s" for engine, took in found["first_token_s"].items()]
    return "\n".join(lines)


def shown(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def plot(found: dict[str, Any], out: Path) -> None:
    """OUT.png and OUT.svg: decoding against what is in the cache, and against the rows of a batch."""
    import matplotlib
    from matplotlib.figure import Figure

    from jaxrt.display.colours import SERIES

    matplotlib.rcParams["svg.hashsalt"] = "jaxrt"  # the same figures, the same file
    decoding = [test for test in found["tests"] if test["n_gen"]]
    first = decoding[0]["n_depth"]
    count = decoding[0]["n_gen"]
    sides = (
        ("n_depth", [test for test in decoding if test["rows"] == 1], "tokens in the cache", "one row"),
        (
            "rows",
            [test for test in decoding if test["n_depth"] == first],
            "rows of one batch",
            f"after {first:,} tokens",
        ),
    )
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (place, tests, label, title) in zip(figure.subplots(1, 2), sides, strict=True):
        tests = sorted(tests, key=lambda test: test[place])
        for engine, colour, marker in zip(found["engines"], SERIES, "osD", strict=False):
            drawn = [test for test in tests if test["median_ts"][engine] is not None]
            places, speeds = [t[place] for t in drawn], [t["median_ts"][engine] for t in drawn]
            axes.plot(places, speeds, color=colour, marker=marker, label=engine)
            samples = [t["samples_ts"][engine] for t in drawn]
            axes.vlines(places, [min(s) for s in samples], [max(s) for s in samples], color=colour, alpha=0.4)
        axes.set(xlabel=label, ylabel="tokens/s, all rows together" if place == "rows" else "tokens/s", ylim=(0, None))
        axes.set_title(f"decode {count}, {title}", fontsize="medium")
        least = min((test[place] for test in tests if test[place]), default=1)
        axes.set_xscale("symlog", base=2, linthresh=least)  # a depth may be 0
        axes.set_xlim(min(test[place] for test in tests) - 0.1 * least, max(test[place] for test in tests) * 1.1)
        axes.set_xticks([test[place] for test in tests], [f"{test[place]:,}" for test in tests])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(f"{found['model']}, {found['threads']} threads: medians of {found['runs']}", fontsize="medium")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out.with_suffix(".png"), dpi=130)
    figure.savefig(out.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--llama-model", type=Path, help="another one for llama.cpp, such as the same weights as F32")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of jaxrt's weights")
    parser.add_argument("--transformers-python", help="an interpreter that has transformers")
    parser.add_argument("--llama-bench", help="the program; llama-batched-bench is looked for beside it")
    parser.add_argument("-p", type=int, action="append", help="prompt tokens to prefill [128, 512]")
    parser.add_argument("-n", type=int, default=32, help="tokens to decode [32]")
    parser.add_argument("-d", type=int, action="append", help="tokens in the cache before decoding [0, 2048]")
    parser.add_argument("-b", type=int, action="append", help="rows to decode at the first depth [1, 4, 8]")
    parser.add_argument("-r", type=int, default=5, help="runs that count [5]")
    parser.add_argument("--start", action="store_true", help="also time whole processes to their first token")
    parser.add_argument("--json", action="store_true", help="print one JSON object, every run's speed in it")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw OUT.png and OUT.svg")
    parser.add_argument("--worker", choices=[JAXRT, TRANSFORMERS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = options.model.resolve()
    options.llama_model = (options.llama_model or options.model).resolve()
    if options.worker:
        work(options.worker, options.model, options.dtype)
        return
    found = compare(options)
    print(json.dumps(found) if options.json else table(found))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
