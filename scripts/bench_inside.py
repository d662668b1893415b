"""What looking inside and keeping sessions as values costs, each beside the plain thing in the same run.

    scripts/bench_inside.py [--model smollm2-135m] [-r 5]

Prints a Markdown table of medians. Every pair of timings is interleaved, so that a busy machine slows both.
"""

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import jaxrt

PIECE = 1 << 22  # bytes read or written at a time


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(repeats: int, *calls: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[float]:
    """The median seconds of each, after one round to warm up. before: runs before each round, untimed."""
    rounds = []
    for _ in range(1 + repeats):
        before()
        rounds.append([seconds(call) for call in calls])
    return [statistics.median(column) for column in zip(*rounds[1:], strict=True)]


def looking(rt: jaxrt.ModelRuntime, repeats: int, tokens: list[int]) -> list[tuple[str, str]]:
    """A prefill of 128 tokens: plain, with all layer outputs, and with a vector added."""
    session = rt.new_session()
    given = jaxrt.PrefillInput(tokens[:128])
    outputs = jaxrt.ObservationRequest.selected(["model.layers.*.output"])
    vector = np.ones(rt.config.width, np.float32)
    add = [jaxrt.Add("model.layers.3.output", vector, strength=0.1)]
    nothing = jaxrt.ObservationRequest.selected(["model.logits"])

    def anew(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            session.rewind(0)
            call()

        return run

    session.prefill(given).wait()
    plain, inspected, changed = interleaved(
        repeats,
        anew(lambda: session.observe_output(session.prefill(given).wait())),
        anew(lambda: session.inspect_prefill(given, outputs)),
        anew(lambda: session.inspect_prefill(given, nothing, add)),
    )
    return [
        ("prefill of 128 tokens", f"{plain * 1e3:.0f} ms"),
        ("… with all layer outputs observed", f"{inspected / plain:.2f} x"),
        ("… with a vector added and all logits observed", f"{changed / plain:.2f} x"),
    ]


def branching(rt: jaxrt.ModelRuntime, repeats: int, tokens: list[int]) -> list[tuple[str, str]]:
    """A session of 1,000 tokens: its fork, the copy at the first write, and 8 branches beside 8 prefills."""
    session = rt.new_session()
    session.prefill(jaxrt.PrefillInput(tokens)).wait()

    def write_own() -> None:
        session.rewind(len(tokens))
        session.decode(jaxrt.DecodeInput(tokens=tokens[-1:])).wait()

    def branches() -> None:
        for _ in range(8):
            fork = session.fork()
            fork.decode(jaxrt.DecodeInput(tokens=tokens[-1:])).wait()
            fork.close()

    def prefill() -> None:
        fresh = rt.new_session()
        fresh.prefill(jaxrt.PrefillInput(tokens)).wait()
        fresh.close()

    kv = sum(leaf.nbytes for leaf in jax.tree.leaves(session.context["kv"]))
    forking, own, eight, once = interleaved(repeats, lambda: session.fork().close(), write_own, branches, prefill)
    each = eight / 8 - own
    return [
        ("fork of a session of 1,000 tokens", f"{forking * 1e6:.0f} µs"),
        (f"its copy at the first write ({kv / 1e6:.0f} MB)", f"{each * 1e3:.1f} ms"),
        ("8 branches that each decode once, beside one prefill of the 1,000 tokens", f"{eight / once:.2f} x"),
    ]


def saving(rt: jaxrt.ModelRuntime, repeats: int, tokens: list[int], rows: int) -> list[tuple[str, str]]:
    """Snapshot and save, then restore, beside the disk's own rate for as many bytes, past the page cache (Linux)."""
    session = rt.new_session()
    session.prefill(jaxrt.PrefillInput(tokens)).wait()
    session = session.fork(rows=rows)
    session.decode(jaxrt.DecodeInput(tokens=[tokens[-1:]] * rows)).wait()
    size = session.snapshot().nbytes
    content = mmap.mmap(-1, -(-size // PIECE) * PIECE)  # whole pages, as direct access wants them
    content.write(os.urandom(size))
    pieces = [memoryview(content)[start : start + PIECE] for start in range(0, len(content), PIECE)]
    with tempfile.TemporaryDirectory() as directory:
        state, plain = Path(directory) / "state", Path(directory) / "plain"

        def direct(flags: int, move: Callable[[int, list[memoryview]], int]) -> None:
            file = os.open(plain, flags | os.O_DIRECT)
            for piece in pieces:
                move(file, [piece])
            os.fsync(file)
            os.close(file)

        def clear() -> None:
            """Give the memory back, so that all find pages which the machine has given already: on a virtual machine
            new ones can cost more than the disk."""
            shutil.rmtree(state, ignore_errors=True)
            plain.unlink(missing_ok=True)

        saved, written, restored, read = interleaved(
            repeats,
            lambda: session.snapshot().save(state),
            lambda: direct(os.O_WRONLY | os.O_CREAT, os.writev),
            lambda: jaxrt.SessionState.restore(state, rt).close(),
            lambda: direct(os.O_RDONLY, os.readv),
            before=clear,
        )
    return [
        (f"snapshot and save of {size / 1e6:.0f} MB", f"{size / saved / 1e6:.0f} MB/s"),
        ("… beside the disk's own writing", f"{written / saved:.2f} x"),
        ("restore", f"{size / restored / 1e6:.0f} MB/s"),
        ("… beside the disk's own reading", f"{read / restored:.2f} x"),
    ]


def planning(repeats: int) -> list[tuple[str, str]]:
    """A small program: planned once beside a plain jitted call, and beside planning at every step."""

    def body(values: dict, env: dict) -> dict:
        return {"y": values["x"] * 2.0 + 1.0}

    context = jaxrt.InferenceContext(jax.devices()[0])
    context["x"] = np.ones((8, 8), np.float32)
    program = jaxrt.Program(body, name="small")
    plan = context.prebuild(program, "y").plan
    jitted, x = jax.jit(lambda x: x * 2.0 + 1.0), context["x"]
    many = range(1_000)
    prebuilt, plain = interleaved(
        repeats,
        lambda: [context.realize_prebuilt(plan) for _ in many],
        lambda: [np.asarray(jitted(x)) for _ in many],
    )
    (anew,) = interleaved(repeats, lambda: context.realize(program, "y"))
    return [
        ("`realize_prebuilt`, beyond a plain jitted call", f"{(prebuilt - plain) * 1e3:.0f} µs"),
        ("`realize`, which plans at every step, beside `realize_prebuilt`", f"{anew / prebuilt * 1e3:,.0f} x"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("-r", "--repeats", type=int, default=5)
    given = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 40_000, 1_000).tolist()
    with jaxrt.load(given.model) as rt:
        found = [*looking(rt, given.repeats, tokens), *branching(rt, given.repeats, tokens)]
        found += [*saving(rt, given.repeats, tokens, 1), *saving(rt, given.repeats, tokens, 8)]
        found += planning(given.repeats)
    print("| | |\n|---|---|")
    for name, value in found:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
