#!/usr/bin/env python3
"""jaxrt beside transformers and, given a llama-bench, llama.cpp: interleaved in one run, medians and ratios.

    scripts/compare_peers.py --model FILE.gguf --transformers-python PYTHON [--llama-bench PATH] [-p 128] [-n 32] [-r 5]

PYTHON is an interpreter that has torch, transformers, accelerate and gguf (the `peers` extra). Every engine loads the
same weights in float32 in a process of its own and then takes turns, since a shared machine changes speed from minute
to minute. `--start` also times whole processes up to their first token.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

THREADS = str(os.cpu_count())


class Worker:
    """An engine in a process of its own: one JSON request a line in, one answer out."""

    def __init__(self, name: str, python: str, model: Path) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": THREADS}
        self._process = subprocess.Popen(
            [python, __file__, "--worker", name, "--model", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **request: object) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} worker ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def serve_jaxrt(model: Path):  # noqa: ANN201
    import jax
    import numpy as np

    import jaxrt
    from jaxrt import knobs

    runtime = jaxrt.load(model, dtype="float32")
    runtime.warmup(capacity=512)
    session, vocab = runtime.session, runtime.config.vocab
    neutral = knobs.neutral(1, vocab)

    def prefill(tokens: list[int]) -> float:
        session.start_anew(len(tokens))
        started = time.perf_counter()
        jax.block_until_ready(session.admit((0,), tokens, [neutral]).packed)
        return time.perf_counter() - started

    def answer(kind: str, prompt: int, new: int) -> float:
        tokens = np.random.default_rng(0).integers(0, vocab, prompt).tolist()
        if kind == "prefill":
            return prefill(tokens)
        params = jaxrt.SamplingParams(temperature=0.0, max_tokens=new + 1, ignore_eos=True)
        stats = runtime.generate(tokens, params).stats
        return new / stats.decode_tps

    return answer


def serve_transformers(model: Path):  # noqa: ANN201
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(THREADS))
    network = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)

    def timed(ids: torch.Tensor, new: int) -> float:
        started = time.perf_counter()
        network.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        return time.perf_counter() - started

    @torch.inference_mode()
    def answer(kind: str, prompt: int, new: int) -> float:
        ids = torch.randint(0, network.config.vocab_size, (1, prompt), generator=generator)
        if kind == "prefill":
            started = time.perf_counter()
            network(ids, logits_to_keep=1)
            return time.perf_counter() - started
        return timed(ids, new + 1) - timed(ids, 1)

    return answer


def work(name: str, model: Path) -> None:
    """Answer requests until the input ends. The first of a kind is a warm-up that nobody counts."""
    answer = {"jaxrt": serve_jaxrt, "transformers": serve_transformers}[name](model)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    for line in sys.stdin:
        answers.write(json.dumps(answer(**json.loads(line))) + "\n")
        answers.flush()


def llama(binary: str, model: Path, prompt: int, new: int, depth: int) -> float:
    """Seconds of one llama-bench test."""
    command = [binary, "-m", str(model), "-t", THREADS, "-p", str(prompt), "-n", str(new), "-r", "1", "-o", "json"]
    command += ["-d", str(depth)] if depth else []
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found[0]["avg_ns"] / 1e9


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


def first_token(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": THREADS})
    return time.perf_counter() - started


def compare(options: argparse.Namespace) -> dict:
    model = options.model.resolve()
    workers = [Worker("jaxrt", sys.executable, model)]
    if options.transformers_python:
        workers.append(Worker("transformers", options.transformers_python, model))
    tests = {"prefill": options.p, "decode": options.n}
    seconds: dict[str, dict[str, list[float]]] = {test: {} for test in tests}
    floors = []
    for run in range(options.r + 1):
        for test in tests:
            for worker in workers:
                took = worker.ask(kind=test, prompt=options.p, new=options.n)
                if run:
                    seconds[test].setdefault(worker.name, []).append(took)
        if options.llama_bench and run:
            peer = options.llama_model or model
            prefill = llama(options.llama_bench, peer, options.p, 0, 0)
            decode = llama(options.llama_bench, peer, 0, options.n, options.p)
            seconds["prefill"].setdefault("llama.cpp", []).append(prefill)
            seconds["decode"].setdefault("llama.cpp", []).append(decode)
        floors.append(bandwidth())
    for worker in workers:
        worker.close()
    speeds = {t: {e: tests[t] / statistics.median(s) for e, s in by.items()} for t, by in seconds.items()}
    found = {
        "model": model.name,
        "prompt": options.p,
        "new": options.n,
        "runs": options.r,
        "bandwidth_gbs": statistics.median(floors) / 1e9,
        "tokens_per_s": speeds,
        "ratio_to_jaxrt": {t: {e: by["jaxrt"] / v for e, v in by.items() if e != "jaxrt"} for t, by in speeds.items()},
        "decode_fraction_of_bandwidth": speeds["decode"]["jaxrt"] * options.bytes / statistics.median(floors),
    }
    if options.start:
        found["first_token_s"] = starts(options, model)
    return found


def starts(options: argparse.Namespace, model: Path) -> dict[str, float]:
    """Whole processes up to the first token, in turn: the second start of jaxrt, and transformers."""
    ours = [
        sys.executable,
        "-m",
        "jaxrt",
        "run",
        "The capital of France is",
        "--max-tokens",
        "1",
        "--model",
        str(model),
    ]
    theirs = [options.transformers_python or "", "-c", TRANSFORMERS_FIRST, str(model)]
    first_token(ours)
    seconds: dict[str, list[float]] = {}
    for _ in range(3):
        seconds.setdefault("jaxrt", []).append(first_token(ours))
        if options.transformers_python:
            seconds.setdefault("transformers", []).append(first_token(theirs))
    return {engine: statistics.median(took) for engine, took in seconds.items()}


def table(found: dict) -> str:
    engines = list(found["tokens_per_s"]["decode"])
    lines = ["| tokens/s | " + " | ".join(engines) + " |", "|---" * (len(engines) + 1) + "|"]
    for test, count in (("prefill", found["prompt"]), ("decode", found["new"])):
        cells = []
        for engine in engines:
            ratio = found["ratio_to_jaxrt"][test].get(engine)
            cells.append(f"{found['tokens_per_s'][test][engine]:.1f}" + (f" (jaxrt {ratio:.2f} x)" if ratio else ""))
        lines.append(f"| {test} {count} | " + " | ".join(cells) + " |")
    lines.append("")
    fraction = found["decode_fraction_of_bandwidth"]
    lines.append(f"decode at {fraction:.0%} of the bandwidth floor ({found['bandwidth_gbs']:.1f} GB/s measured)")
    for engine, took in found.get("first_token_s", {}).items():
        lines.append(f"first token of a new {engine} process: {took:.2f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file that every engine can read")
    parser.add_argument("--llama-model", type=Path, help="the same weights as F32 for llama-bench")
    parser.add_argument("--transformers-python")
    parser.add_argument("--llama-bench")
    parser.add_argument("-p", type=int, default=128)
    parser.add_argument("-n", type=int, default=32)
    parser.add_argument("-r", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=538_060_032, help="of weights read per token")
    parser.add_argument("--start", action="store_true", help="also time whole processes to their first token")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=["jaxrt", "transformers"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model)
        return
    found = compare(options)
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
