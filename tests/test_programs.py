"""What XLA makes of the programs: nothing as large as a weight or a cache is copied, every donated buffer is used in
place."""

import re
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest

import jaxrt
from jaxrt.buckets import MAX_COMPILES, Bucket, BucketPolicy
from jaxrt.errors import CapacityError, CompileForbidden, ContextError
from jaxrt.program import Program, compiles, plan
from jaxrt.sessions.model import XlaModel
from tests.tiny import CONFIG, make_model, shared_model

OPERATION = re.compile(r"= \w+\[([\d,]*)\]\S* (copy|convert|transpose)\(")


@pytest.fixture(scope="module")
def model() -> XlaModel:
    return shared_model()


@pytest.mark.parametrize("rows", [1, 4])
def test_decode_copies_and_converts_nothing_large(model: XlaModel, rows: int):
    made = model.plans.plan(Bucket("decode", rows, 512, 16))
    cache_size = CONFIG.kv_heads * CONFIG.head_width * 512  # of one layer and row; more than any weight here
    weight_size = CONFIG.width * CONFIG.width
    for line in made.executable.as_text().splitlines():
        found = OPERATION.search(line)
        if found:
            size = int(np.prod([int(n) for n in found[1].split(",") if n]))
            assert size < min(cache_size, weight_size) or CONFIG.vocab * rows == size, line


def test_decode_holds_no_second_cache(model: XlaModel):
    made = model.plans.plan(Bucket("decode", 1, 512, 16))
    memory = made.executable.memory_analysis()
    donated = sum(slot.nbytes for slot in made.inputs if slot.name in ("kv", "state"))
    assert memory.alias_size_in_bytes == donated
    cache = next(slot.nbytes for slot in made.inputs if slot.name == "kv")
    assert memory.temp_size_in_bytes < cache


def test_no_program_warns_of_unusable_donations(model: XlaModel):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = make_model()
        for bucket in fresh.policy.buckets():
            fresh.plans.plan(bucket)


def test_a_warm_up_makes_at_most_twenty_executables():
    for platform in ("cpu", "gpu"):
        for context in (64, 2_048, 8_192, 131_072):
            for rows in (1, 2, 4, 8, 32):
                for capacity in (1, 512, 2_048, 8_192, 131_072):
                    policy = BucketPolicy.covering(platform, context, rows, capacity)
                    assert len(policy.buckets()) <= MAX_COMPILES
                    assert policy.rows_for(rows) >= rows
                    assert policy.capacity_for(min(capacity, context)) <= context


def test_prefill_chunks_cover_the_prompt_at_no_more_than_any_equal_chunks_would_cost():
    policy = BucketPolicy.covering("cpu", 8_192, 1, 2_048)
    lengths, call = policy.platform.prefill, policy.platform.call_tokens
    assert policy.chunks(128) == (128,) and policy.chunks(512) == (512,) and policy.chunks(160) == (128, 32)
    assert policy.chunks(131_072) == (512,) * 256
    for tokens in range(1, 1_200):
        chunks = policy.chunks(tokens)
        cost = sum(chunks) + call * len(chunks)
        assert sum(chunks) >= tokens and list(chunks) == sorted(chunks, reverse=True)
        assert all(cost <= -(-tokens // length) * (length + call) for length in lengths)


def test_equal_requests_compile_once():
    fresh = make_model()
    before = compiles().misses + compiles().hits
    first = fresh.plans.plan(Bucket("make", 1, 512))
    assert fresh.plans.plan(Bucket("make", 1, 512)) is first
    assert compiles().misses + compiles().hits == before + 1


def test_forbid_compile_stops_plans_and_eager_operations():
    fresh = make_model()
    with jaxrt.forbid_compile():
        with pytest.raises(CompileForbidden, match="warmup"):
            fresh.plans.plan(Bucket("make", 1, 512))
        with pytest.raises(CompileForbidden, match="eager"):
            jax.jit(lambda x: x * 3 + 17)(np.ones(13, np.float32))
    assert fresh.plans.plan(Bucket("make", 1, 512)).name == "make_1"


def test_a_program_that_lacks_a_value_or_target_says_what_is_there():
    specs = {"here": np.ones(3, np.float32)}
    wants = Program(lambda values, env: {"out": values["there"]}, name="wants")
    with pytest.raises(ContextError, match="'there'.*'here'"):
        plan(wants, specs, ["out"])
    gives = Program(lambda values, env: {"out": values["here"]}, name="gives")
    with pytest.raises(ContextError, match="'result'"):
        plan(gives, specs, ["result"])


def test_a_context_runs_a_program_and_keeps_what_it_updates():
    """A running mean that is no language model: the state stays on the device and is donated at each step."""
    context = jaxrt.InferenceContext()
    context["mean"] = np.zeros(4, np.float32)
    step = Program(
        lambda values, env: {
            "mean_next": values["mean"] + (values["sample"] - values["mean"]) / (env["seen"] + 1).astype("float32"),
            "distance": abs(values["sample"] - values["mean"]).sum(),
        },
        name="running_mean",
        updates={"mean": "mean_next"},
    )
    samples = np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32)
    specs = {"mean": context["mean"], "sample": samples[0]}
    made = plan(step, specs, ["distance"], symbols=["seen"])
    for seen, sample in enumerate(samples):
        outputs = context.run(made, {"sample": (sample,)}, {"seen": seen})
        assert list(outputs) == ["distance"]
    np.testing.assert_allclose(context["mean"], samples.mean(0), rtol=1e-5)
    with pytest.raises(ContextError, match="seen"):
        context.run(made, {"sample": (samples[0],)}, {})


def test_a_context_is_a_mapping_of_values_on_its_device(model: XlaModel):
    context = jaxrt.InferenceContext(jax.devices()[0])
    assert context.device == jax.devices()[0] and context.is_empty() and context.nbytes() == 0
    context.insert("pair", {"a": np.zeros(3, np.float32), "b": np.ones((2, 2), np.int32)})
    context["other"] = np.zeros(5, np.float32)
    assert context.contains("pair") and len(context) == 2 and list(context) == ["pair", "other"]
    assert context.nbytes() == 12 + 16 + 20
    assert context["pair"]["a"].devices() == {context.device} and context.get("missing") is None
    assert context.remove("missing") is None and context.remove("other").shape == (5,)
    with pytest.raises(ContextError, match="'other'.*pair"):
        context["other"]
    assert not context.has_decode_session and context.take_decode_session() is None
    context.put_decode_session(model.plans)
    assert context.has_decode_session and context.take_decode_session() is model.plans
    assert not context.has_decode_session
    context.clear_persistent()
    assert context.is_empty() and "pair" not in context


def test_a_plan_says_what_it_takes_and_what_it_cost(model: XlaModel):
    made = model.plans.plan(Bucket("decode", 1, 512, 16))
    assert [slot.name for slot in made.inputs] == ["weights", "kv", "state", "knobs", "forced"]
    assert made.updates == {"kv_next": "kv", "state_next": "state"}
    assert [slot.name for slot in made.targets] == ["kv_next", "state_next", "logits", "packed"]
    assert made.seconds > 0 and isinstance(made.from_cache, bool)


def test_a_plan_for_other_shapes_is_a_topology_change(model: XlaModel):
    context = jaxrt.InferenceContext()
    context["x"] = np.zeros(3, np.float32)
    made = plan(Program(lambda v, env: {"y": v["x"] + 1}, name="plus"), {"x": context["x"]}, ["y"])
    context["x"] = np.zeros(4, np.float32)
    with pytest.raises(jaxrt.TopologyChanged, match="plus"):
        context.run(made, {}, {})


def test_a_second_process_compiles_nothing(tmp_path):  # noqa: ANN001
    code = f"""
from pathlib import Path
from jaxrt.compile_cache import enable
enable(Path({str(tmp_path / "cache")!r}))
from jaxrt.program import compiles
from jaxrt.sessions.outputs import DecodeInput, PrefillInput
from jaxrt.sessions.session import XlaSession
from tests.tiny import make_model
session = XlaSession(make_model())
session.prefill(PrefillInput([1, 2, 3]))
session.decode(DecodeInput(positions=3))
print(session.tokens[0], compiles().misses, compiles().hits)
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    first, second = (run.stdout.split(") ") for run in runs)
    assert first[0] == second[0]
    assert int(first[1].split()[0]) >= 4
    assert second[1].split()[0] == "0"


def test_a_policy_says_when_nothing_fits():
    policy = BucketPolicy.covering("cpu", 2_048, 4, 2_048)
    with pytest.raises(CapacityError, match="2,048"):
        policy.capacity_for(2_049)
