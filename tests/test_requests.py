"""Sampling parameters are checked when they are made: what cannot be served as written never reaches a device."""

import copy
import json
import math
import pickle
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrt.errors import JaxrtError, RequestError
from jaxrt.requests import MAX_LOGPROBS, MAX_SAMPLES, FinishReason, Generation, GenerationStats, SamplingParams, Score

REFUSED = [
    # numbers: range, kind, and what is no number at all
    *(("temperature", value) for value in (math.nan, math.inf, -math.inf, -0.1, 100.1, "1", None, True, 10**400, 1j)),
    *(("top_p", value) for value in (0, 0.0, -0.5, 1.0001, math.nan, "0.9", None, False)),
    *(("min_p", value) for value in (-0.01, 1.01, math.nan, math.inf, None)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan, "0")),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, math.inf, [])),
    *(("repetition_penalty", value) for value in (0, 0.0, -1.0, 1e-300, 101, math.nan)),
    # counts
    *(("n", value) for value in (0, -1, 10**9, MAX_SAMPLES + 1, 1.0, True, None, "2", math.nan)),
    *(("max_tokens", value) for value in (0, -1, 10**12, 10**5_000, 16.0, None, True)),
    *(("min_tokens", value) for value in (-1, 257, 10**12, 0.0, None)),  # max_tokens is 256
    *(("top_k", value) for value in (-2, 1.5, None, True, 10**12)),
    *(("logprobs", value) for value in (-1, MAX_LOGPROBS + 1, True, 1.0, "5")),
    *(("prompt_logprobs", value) for value in (-1, MAX_LOGPROBS + 1, False)),
    *(("seed", value) for value in (2**64, -2, 1.0, "7", True)),
    # texts
    *(("stop", value) for value in ("", [""], ["a", ""], [1], 7, ["x"] * 10_000, [None], b"stop", {"a"}, "\ud800")),
    *(("bad_words", value) for value in ("word", [""], [5], [b"word"], ["\udfff"])),
    # tokens
    *(("stop_token_ids", value) for value in ([-1], ["1"], [True], [1.0], 3, "12", [2**31], {1}, [None])),
    *(("allowed_token_ids", value) for value in ([], (), [-1], [1, "2"], 5)),
    *(
        ("logit_bias", value)
        for value in (
            {"x": 1}, {"-1": 1}, {-1: 1}, {1.5: 1}, {True: 1}, {None: 1}, {"²": 1}, {"9" * 5_000: 1},
            {1: math.nan}, {1: -math.inf}, {1: 100.5}, {1: "5"}, {1: None}, {1: True}, {5: 1, "5": 2}, [(1, 2)], 3,
        )
    ),
    # flags and words
    *((name, value) for name in ("ignore_eos", "skip_special_tokens") for value in (1, "yes", None)),
    ("include_stop_str_in_output", 0),
    *(("logprobs_mode", value) for value in ("RAW", None, "")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}{i}" for i, (name, _) in enumerate(REFUSED)])
def test_a_value_that_cannot_be_served_is_refused_by_name(name: str, value: object):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name}=")
    assert caught.value.expected
    assert len(str(caught.value)) < 400  # a huge value is not repeated whole


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-9), ("temperature", 100), ("top_p", 1), ("top_p", 1e-9), ("min_p", 0), ("min_p", 1),
        ("presence_penalty", -2), ("frequency_penalty", 2), ("repetition_penalty", 100), ("n", MAX_SAMPLES),
        ("max_tokens", 1), ("min_tokens", 256), ("top_k", 0), ("top_k", 10**6), ("logprobs", 0), ("logprobs", None),
        ("prompt_logprobs", MAX_LOGPROBS), ("seed", 0), ("seed", 2**64 - 1), ("seed", None),
        ("logprobs_mode", "processed"), ("allowed_token_ids", None), ("ignore_eos", True),
    ],
)  # fmt: skip
def test_the_ends_of_every_range_are_served(name: str, value: object):
    made = SamplingParams(**{name: value})
    assert {f.name: vars(made)[f.name] for f in fields(made)}[name] == value


def test_defaults_are_those_of_vllm_except_max_tokens():
    made = SamplingParams()
    assert (made.temperature, made.top_p, made.top_k, made.min_p, made.n) == (1.0, 1.0, 0, 0.0, 1)
    assert (made.presence_penalty, made.frequency_penalty, made.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (made.seed, made.logprobs, made.prompt_logprobs, made.allowed_token_ids) == (None, None, None, None)
    assert (made.stop, made.stop_token_ids, made.bad_words, made.logit_bias) == ((), (), (), {})
    assert (made.min_tokens, made.ignore_eos, made.skip_special_tokens) == (0, False, True)
    assert made.max_tokens == 256


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature'.*'temperature'"):
        SamplingParams(temprature=0.5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(RequestError, match="'stop_token_id'.*'stop_token_ids'"):
        SamplingParams.from_dict({"stop_token_id": [1]})
    with pytest.raises(RequestError, match="unknown sampling parameter '7'"):
        SamplingParams.from_dict({7: 1})  # pyright: ignore[reportArgumentType]


def test_a_request_error_is_a_jaxrt_error_and_a_value_error():
    with pytest.raises(ValueError) as caught:
        SamplingParams(top_p=2)
    assert isinstance(caught.value, JaxrtError)


def test_more_tokens_at_least_than_at_most_is_refused_whichever_was_set():
    with pytest.raises(RequestError, match=r"min_tokens=5; expected at most max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError):
        replace(SamplingParams(min_tokens=5), max_tokens=4)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9, 9.9e-6])
def test_temperatures_that_are_almost_zero_are_greedy_and_allow_one_sample(temperature: float):
    assert SamplingParams(temperature=temperature).greedy
    with pytest.raises(RequestError, match="n=2"):
        SamplingParams(temperature=temperature, n=2)
    assert not SamplingParams(temperature=1e-5, n=2).greedy


def test_spellings_of_nothing_are_one():
    nothing = dict.fromkeys(("stop", "bad_words", "stop_token_ids", "logit_bias", "allowed_token_ids", "seed"))
    assert SamplingParams(**nothing) == SamplingParams()
    assert SamplingParams(seed=-1).seed is None


def test_lists_become_tuples_and_json_keys_token_ids():
    made = SamplingParams.from_dict(
        json.loads('{"stop": "a", "stop_token_ids": [1, 2], "logit_bias": {"05": -100, "7": 1}}')
    )
    assert made.stop == ("a",)
    assert made.stop_token_ids == (1, 2)
    assert made.logit_bias == {5: -100.0, 7: 1.0}


def test_what_the_caller_changes_later_changes_nothing():
    stop, bias = ["a"], {1: 2.0}
    made = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[3] = 4.0
    assert made.stop == ("a",)
    assert made.logit_bias == {1: 2.0}


def test_numpy_numbers_become_python_ones():
    made = SamplingParams(
        temperature=np.float32(0.5), top_p=Fraction(1, 2), top_k=np.int64(5), seed=np.uint64(2**64 - 1),
        stop_token_ids=[np.int32(3)], logit_bias={np.int64(4): np.float16(1.5)},
    )  # fmt: skip
    assert made == SamplingParams(
        temperature=0.5, top_p=0.5, top_k=5, seed=2**64 - 1, stop_token_ids=(3,), logit_bias={4: 1.5}
    )
    for value in (made.temperature, made.top_k, made.seed, made.stop_token_ids[0], *made.logit_bias):
        assert type(value) in (int, float)
    with pytest.raises(RequestError):
        SamplingParams(n=np.bool_(True))
    with pytest.raises(RequestError):
        SamplingParams(temperature=np.float32("nan"))


def test_params_can_be_copied_pickled_and_replaced():
    made = SamplingParams(temperature=0.7, stop=["x"], logit_bias={1: 2})
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made)) == replace(made)


TEXTS = st.text(st.sampled_from("a7-é\ud800\0"), max_size=4)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([f.name for f in fields(SamplingParams)]), ANYTHING, max_size=4))
def test_whatever_is_asked_is_served_or_refused_and_nothing_else(values: dict):
    try:
        made = SamplingParams.from_dict(values)
    except RequestError:
        return
    assert 0 <= made.temperature <= 100 and 0 < made.top_p <= 1 and 0 <= made.min_p <= 1
    assert 1 <= made.n <= MAX_SAMPLES and made.min_tokens <= made.max_tokens
    assert all(text for text in (*made.stop, *made.bad_words))


def test_an_answer_is_json_as_the_command_line_prints_it():
    stats = GenerationStats(2, 1, ttft_s=0.5, prefill_tps=4.0, decode_tps=0.0, compile_s=0.0)
    made = Generation("é", (5,), FinishReason.LENGTH, (1, 2), SamplingParams(), 9, stats)
    found = json.loads(json.dumps(made.as_json()))
    assert found["prompt_tokens"] == [1, 2]
    assert found["tokens"] == [5]
    assert (found["text"], found["finish_reason"], found["seed"]) == ("é", "length", 9)
    assert found["stats"]["ttft_s"] == 0.5
    assert "logprobs" not in found


def test_a_score_sums_what_there_is():
    scored = Score(tokens=(1, 2, 3), logprobs=(None, -1.0, -3.0), greedy=(None, True, False))
    assert scored.total == -4.0
    assert scored.perplexity == pytest.approx(math.e**2)
    assert math.isnan(Score(tokens=(1,), logprobs=(None,), greedy=(None,)).perplexity)
