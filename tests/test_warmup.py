"""After a warm-up nothing compiles, whatever is asked for within it, and nothing stays behind on the device."""

import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxrt
from jaxrt.backend import ModelSource, XlaBackend
from jaxrt.buckets import PLATFORMS
from jaxrt.runtime import ModelRuntime
from jaxrt.sessions import warmup
from tests.tiny import CONFIG, random_weights


def random_params(draw: random.Random, vocab: int) -> jaxrt.SamplingParams:
    """Every knob on now and then, the same for no two requests."""
    maybe: dict[str, Any] = {
        "top_k": draw.randint(1, 2 * vocab),
        "top_p": draw.uniform(0.05, 1.0),
        "min_p": draw.uniform(0.0, 0.5),
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "repetition_penalty": draw.uniform(0.5, 2),
        "seed": draw.getrandbits(64),
        "stop_token_ids": [draw.randrange(vocab) for _ in range(3)],
        "logit_bias": {draw.randrange(vocab): draw.uniform(-100, 100) for _ in range(4)},
        "allowed_token_ids": [draw.randrange(vocab) for _ in range(20)],
        "min_tokens": 2,
        "logprobs": draw.randint(0, 20),
        "prompt_logprobs": draw.randint(0, 20),
        "ignore_eos": True,
        "logprobs_mode": "processed",
    }
    chosen = {name: value for name, value in maybe.items() if draw.random() < 0.3}
    return jaxrt.SamplingParams(
        temperature=draw.choice([0.0, 0.5, 1.0, 1.7]), max_tokens=draw.choice([2, 5, 17, 40]), **chosen
    )


def random_requests(runtime: ModelRuntime, count: int, longest: int, seed: int) -> None:
    draw, vocab = random.Random(seed), runtime.config.vocab
    for _ in range(count):
        prompts = [
            [draw.randrange(vocab) for _ in range(int(longest ** draw.random()))] for _ in range(draw.randint(1, 4))
        ]
        params = random_params(draw, vocab)
        if len(prompts) == 1 and draw.random() < 0.3:
            events = list(runtime.stream(prompts[0], params))
            assert events[-1].generation is not None
            continue
        answers = runtime.generate(prompts if len(prompts) > 1 else prompts[0], params)
        for answer in answers if isinstance(answers, list) else [answers]:
            assert 1 <= len(answer.tokens) <= params.max_tokens
    runtime.score([[draw.randrange(vocab) for _ in range(longest)]])


def settled_arrays() -> int:
    return len(jax.live_arrays())


def test_two_hundred_random_requests_compile_nothing():
    source = ModelSource(CONFIG, jax.tree.map(jnp.asarray, random_weights()))
    with ModelRuntime.prepare(XlaBackend(), source) as runtime:
        seen: list[tuple[int, int]] = []
        made = runtime.warmup(rows=4, capacity=2_048, progress=lambda done, total, name: seen.append((done, total)))
        assert made <= 20 and seen[-1] == (made, made) and len(seen) == made
        random_requests(runtime, 3, 1_500, seed=0)
        before = settled_arrays()
        with jaxrt.forbid_compile():
            random_requests(runtime, 200, 1_500, seed=1)
        assert settled_arrays() <= before


@pytest.mark.slow
def test_twenty_random_requests_on_the_demo_model_compile_nothing(demo_path: Path):
    with jaxrt.load(demo_path) as runtime:
        runtime.warmup(rows=4, capacity=2_048)
        runtime.generate([1, 2, 3], jaxrt.SamplingParams(max_tokens=2))  # rt.session holds its cache from now on
        before = settled_arrays()
        with jaxrt.forbid_compile():
            random_requests(runtime, 20, 1_500, seed=2)
        assert settled_arrays() <= before


@pytest.mark.parametrize("arguments", [{"rows": 0}, {"rows": 1.5}, {"capacity": 0}, {"capacity": True}])
def test_a_warm_up_of_nothing_is_refused(arguments: dict[str, Any]):
    source = ModelSource(CONFIG, jax.tree.map(jnp.asarray, random_weights()))
    with ModelRuntime.prepare(XlaBackend(), source) as runtime, pytest.raises(jaxrt.RequestError):
        runtime.warmup(**arguments)


@pytest.mark.parametrize(("seconds", "kept"), [({1: 2.0, 8: 1.0}, (1, 8)), ({1: 1.0, 8: 2.0}, (1,))])
def test_on_a_gpu_the_faster_decode_executables_are_kept(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], kept: tuple[int, ...]
):
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["gpu"])
    measured, real = [], warmup._seconds

    def seconds_of(session: Any, positions: int) -> float:
        measured.append(real(session, positions))
        return seconds[positions]

    monkeypatch.setattr(warmup, "_seconds", seconds_of)
    with ModelRuntime.prepare(XlaBackend("cpu"), ModelSource(CONFIG, random_weights())) as runtime:
        runtime.warmup(rows=2, capacity=CONFIG.context)
        assert len(measured) >= 4 and all(0 < each < 60 for each in measured)
        assert runtime.session.model.policy.platform.positions == kept
        with jaxrt.forbid_compile():
            params = jaxrt.SamplingParams(max_tokens=21, ignore_eos=True, temperature=0)
            one = runtime.generate([1, 2, 3], params)
            assert runtime.generate([[1, 2, 3], [4, 5]], params)[0].tokens == one.tokens


def test_warming_up_in_the_background_makes_the_same_plans_and_requests_wait_for_theirs():
    source = ModelSource(CONFIG, jax.tree.map(jnp.asarray, random_weights()))
    with ModelRuntime.prepare(XlaBackend("cpu"), source) as runtime:
        params = jaxrt.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        count = runtime.warmup(rows=2, capacity=64, wait=False)
        answer = runtime.generate([1, 2, 3], params)
        assert len(answer.tokens) == 4
        assert runtime.warmup(rows=2, capacity=64) == count
        with jaxrt.forbid_compile():
            assert runtime.generate([1, 2, 3], params).tokens == answer.tokens
        with pytest.raises(jaxrt.RequestError, match="progress"):
            runtime.warmup(wait=False, progress=lambda *_: None)
