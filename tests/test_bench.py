"""`jaxrt bench`: what a report holds, and a decode step taken apart. No test looks at how long anything took."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from jaxrt import bench, native
from jaxrt.backend import XlaBackend
from jaxrt.cli import commands
from jaxrt.errors import CapacityError
from jaxrt.explain_decode import Explanation, _explanation, lines
from jaxrt.nn.packed import Packed
from jaxrt.runtime import ModelRuntime
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.session import XlaSession
from jaxrt.weights import named, unnamed

from .tiny import CONFIG, make_model, shared_model

PARTS = ["matmuls", "attention", "norms and the rest", "sampling", "host"]


def report(model: XlaModel, **changes: object) -> bench.Report:
    asked = {"prompts": (4,), "news": (3,), "depths": (0,), "rows": (1,), "repetitions": 2, **changes}
    return bench.measure(ModelRuntime(XlaBackend(), XlaSession(model)), model="tiny", **asked)


def packed_model() -> XlaModel:
    """Matrices of 32 inputs as Q8_0, the others (80 inputs) as float32."""
    model = make_model()

    def pack(leaf: np.ndarray) -> object:
        if leaf.ndim != 2 or leaf.shape[1] % 32:
            return leaf
        blocks = jnp.asarray(quantize(np.asarray(leaf), GGMLQuantizationType.Q8_0))
        return Packed((blocks,), ("Q8_0",), leaf.shape[1], jnp.dtype(jnp.float32))

    leaves = {name: pack(leaf) for name, leaf in named(model.weights).items()}
    return replace(model, weights=unnamed(model.weights, leaves))


def check_adds_up(found: Explanation) -> None:
    assert [part.name for part in found.parts] == PARTS
    assert found.step_us > 0 and all(part.us >= 0 for part in found.parts)
    total = sum(part.us for part in found.parts)
    # noise of a step this short may make parts longer than the whole, which a note must say
    assert found.notes or total == pytest.approx(found.step_us)
    assert all(part.share == pytest.approx(part.us / found.step_us) for part in found.parts)
    assert all(part.gbs is None or part.gbs == pytest.approx(part.bytes / part.us / 1e3) for part in found.parts)
    assert [part.name for part in found.parts if part.bytes] == ["matmuls", "attention"]


def test_a_report_says_what_one_user_waits_for():
    found = json.loads(bench.render(report(shared_model()), "json"))
    assert found["ttft_s"] > 0
    assert 0 < found["inter_token_p50_ms"] <= found["inter_token_p99_ms"]
    assert found["kernels"] == (native.instruction_set() or "XLA")
    assert found["explain"] == []
    assert [(r["n_prompt"], r["n_gen"]) for r in found["results"]] == [(4, 0), (0, 3)]
    shown = bench.render(report(shared_model()), "md")
    assert "first token after" in shown and "p99" in shown and f"kernels {found['kernels']}" in shown


@pytest.mark.parametrize(("prompts", "news"), [((0,), (3,)), ((4,), (0,)), ((), (3,)), ((4,), ())])
def test_what_was_not_asked_for_is_not_made_up(prompts: tuple, news: tuple):
    found = report(shared_model(), prompts=prompts, news=news)
    assert (found.ttft_s is None) == (not any(prompts))
    assert (found.inter_token_p50_ms is None) == (found.inter_token_p99_ms is None) == (not any(news))
    shown = bench.render(found, "md")
    assert ("first token after" in shown) == any(prompts) and ("then one every" in shown) == any(news)


def test_a_step_is_taken_apart_at_every_depth_and_number_of_rows():
    found = report(shared_model(), depths=(0, 40), rows=(1, 3), explain=True)
    assert [(one.n_depth, one.rows) for one in found.explain] == [(0, 1), (0, 3), (40, 1), (40, 3)]
    for one in found.explain:
        check_adds_up(one)
    matmuls = {one.parts[0].bytes for one in found.explain}
    tables = CONFIG.vocab * CONFIG.width  # one of the two is only looked up
    norms = (2 * len(CONFIG.layers) + 1) * CONFIG.width
    assert matmuls == {4 * (CONFIG.parameters - tables - norms)}
    attention = [one.parts[1].bytes for one in found.explain]
    assert attention[1] == 3 * attention[0] and attention[3] == 3 * attention[2] and attention[2] > attention[0]
    parsed = json.loads(bench.render(found, "json"))["explain"]
    assert [part["name"] for part in parsed[0]["parts"]] == PARTS
    shown = bench.render(found, "md")
    assert "one decode step @ d40 x 3" in shown and all(f"| {name} |" in shown for name in PARTS)


def test_packed_weights_are_read_packed():
    model = packed_model()
    (found,) = report(model, explain=True).explain
    check_adds_up(found)
    read = sum(leaf.nbytes for name, leaf in named(model.weights).items() if leaf.ndim == 2 and name != "embedding")
    assert found.parts[0].bytes == read < sum(leaf.nbytes for leaf in named(shared_model().weights).values())


def test_parts_that_come_to_more_than_the_whole_leave_nothing_and_say_so():
    timed = {"step": 10e-6, "device": 9e-6, "matmuls": 8e-6, "attention": 3e-6, "sampling": -1e-6}
    found = _explanation(0, 1, timed, {"matmuls": 8_000, "attention": 3_000})
    assert [round(part.us) for part in found.parts] == [8, 3, 0, 0, 1]
    assert [part.gbs for part in found.parts] == [pytest.approx(1.0), pytest.approx(1.0), None, None, None]
    assert len(found.notes) == 2 and "2 us more" in found.notes[0] and "noise" in found.notes[1]
    assert lines([found])[-2:] == [*found.notes]
    slower = _explanation(0, 1, {**timed, "device": 14e-6}, {})
    assert slower.parts[-1].us == 0 and "4 us more" in slower.notes[0]


def test_a_step_past_the_context_is_refused():
    with pytest.raises(CapacityError):
        report(shared_model(), prompts=(0,), news=(1,), depths=(CONFIG.context - 1,), explain=True)


def test_explaining_has_no_place_in_csv():
    done = CliRunner().invoke(commands, ["bench", "--explain", "-o", "csv"], standalone_mode=True)
    assert done.exit_code == 2 and "-o md" in done.output
