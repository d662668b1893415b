"""The demo model against values from transformers in float32: tokens, greedy continuations, log-likelihoods."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxrt
from jaxrt import native
from jaxrt.runtime import ModelRuntime

pytestmark = pytest.mark.slow

NAMES = ["capital", "code", "unicode", "numbers", "space", "one-token", "long", "chat", "chat-multi"]
CLEAR = 0.01  # nat between the best two logits: below it another correct implementation may take the other branch
NAT = 2e-3


WAYS: dict[str, dict[str, Any]] = {
    "packed": {"quantize": "keep"},
    "float32": {"dtype": "float32"},
    "float32 by XLA": {"dtype": "float32"},  # without the native kernels
}


@pytest.fixture(scope="module", params=WAYS)
def rt(request: pytest.FixtureRequest, demo_path: Path) -> Iterator[ModelRuntime]:
    with pytest.MonkeyPatch.context() as patch:
        if "XLA" in request.param:
            patch.setattr(native, "missing", lambda: "left out")
            jax.clear_caches()
        with jaxrt.load(demo_path, **WAYS[request.param]) as runtime:
            yield runtime
    jax.clear_caches()


def test_every_golden_entry_is_tested(golden: dict[str, Any]):
    assert sorted(golden) == sorted(NAMES)


def ask(entry: dict[str, Any]) -> dict[str, Any]:
    return {"messages": entry["messages"]} if "messages" in entry else {"prompt": entry["prompt"]}


@pytest.mark.parametrize("name", NAMES)
def test_prompt_tokens_and_greedy_tokens(rt: ModelRuntime, golden: dict[str, Any], name: str):
    entry = golden[name]
    params = jaxrt.SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    answer = rt.generate(params=params, **ask(entry))
    assert list(answer.prompt_tokens) == entry["tokens"]
    if entry["greedy_margin_min"] >= CLEAR:
        assert list(answer.tokens) == entry["greedy"]
    else:  # teacher-forced: each step's argmax on the reference's own path
        scored = rt.score([[*entry["tokens"], *entry["greedy"]]])[0]
        missed = [i for i, likeliest in enumerate(scored.greedy[len(entry["tokens"]) :]) if not likeliest]
        assert len(missed) <= 1  # the step with the small margin


@pytest.mark.parametrize("name", NAMES)
def test_scores(rt: ModelRuntime, golden: dict[str, Any], name: str):
    entry = golden[name]
    scored = rt.score([entry["tokens"]])[0]
    found = -np.array(scored.logprobs[1:], np.float64)
    np.testing.assert_allclose(found, entry["nll"], atol=NAT, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_next_tokens(rt: ModelRuntime, golden: dict[str, Any], name: str):
    entry = golden[name]
    params = jaxrt.SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    found = rt.generate(entry["tokens"], params).logprobs[0].top
    for token, logprob in entry["next_top5"]:
        assert abs(found.get(token, -np.inf) - logprob) < NAT


def test_a_batch_gives_the_same_tokens_as_each_alone(rt: ModelRuntime, golden: dict[str, Any]):
    entries = [golden[name] for name in ("capital", "code", "numbers", "space")]
    assert min(entry["greedy_margin_min"] for entry in entries) > CLEAR
    params = jaxrt.SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    answers = rt.generate([entry["prompt"] for entry in entries], params)
    assert [list(answer.tokens) for answer in answers] == [entry["greedy"] for entry in entries]


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"kv_dtype": "bfloat16"}, {"quantize": "int8"}])
def test_what_rounding_costs(demo_path: Path, golden: dict[str, Any], options: dict[str, Any]):
    """The likeliest token is the reference's at 95 % of the steps along its own path, perplexity within 1 %."""
    with jaxrt.load(demo_path, **options) as rt:
        scored = rt.score([[*entry["tokens"], *entry["greedy"]] for entry in golden.values()])
        same = [
            likeliest
            for score, entry in zip(scored, golden.values(), strict=True)
            for likeliest in score.greedy[len(entry["tokens"]) :]
        ]
        assert len(same) == 32 * len(NAMES) and np.mean(same) >= 0.95
        nll = [
            np.array(score.logprobs[1 : len(entry["tokens"])])
            for score, entry in zip(scored, golden.values(), strict=True)
        ]
    expected = np.mean(np.concatenate([entry["nll"] for entry in golden.values()]))
    assert abs(np.exp(-np.mean(np.concatenate(nll)) - expected) - 1) <= 0.01
