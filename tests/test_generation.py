"""The text loop on a tiny model with a byte tokenizer: prompts, batches, streams, stops, seeds, scores, and what is
refused."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrt
from jaxrt import FinishReason, RequestError, SamplingParams
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.backend import ModelSource, XlaBackend
from jaxrt.runtime import ModelRuntime
from jaxrt.sessions.session import XlaSession
from tests import reference
from tests.files import byte_tokenizer_json
from tests.tiny import CONFIG, make_model, random_weights

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def rt(tmp_path_factory: pytest.TempPathFactory) -> ModelRuntime:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(byte_tokenizer_json(), encoding="utf-8")
    tokenizer = Tokenizer.from_files({"tokenizer.json": path})
    source = ModelSource(CONFIG, jax.tree.map(jnp.asarray, random_weights()), tokenizer=tokenizer)
    return ModelRuntime.prepare(XlaBackend(), source)


def greedy_reference(tokens: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy continuation by float64 numpy, with the margin between the best two logits at each step."""
    tree, tokens, margins = random_weights(), list(tokens), []
    for _ in range(count):
        scores = reference.logits(CONFIG, tree, tokens)[-1]
        best = np.sort(scores)
        margins.append(best[-1] - best[-2])
        tokens.append(int(scores.argmax()))
    return tokens[-count:], margins


def test_one_prompt_is_continued_greedily(rt: ModelRuntime):
    answer = rt.generate("hello", GREEDY)
    expected, margins = greedy_reference(list(b"hello"), 24)
    assert min(margins) > 0.01
    assert list(answer.tokens) == expected
    assert answer.prompt_tokens == tuple(b"hello")
    assert answer.finish_reason == FinishReason.LENGTH
    assert answer.text == bytes(t for t in expected if t < 256).decode("utf-8", errors="replace")
    assert answer.stats.prompt_tokens == 5 and answer.stats.new_tokens == 24


def test_the_session_holds_the_answer_and_goes_on_from_it(rt: ModelRuntime):
    whole = rt.generate("hello", GREEDY)
    first = rt.generate("hello", SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    assert rt.session.tokens[0] == (*b"hello", *first.tokens)
    assert list(rt.session.lengths) == [14]
    rest = rt.generate(None, SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True), session=rt.session)
    assert (*first.tokens, *rest.tokens) == whole.tokens


def test_a_continued_session_takes_a_further_prompt(rt: ModelRuntime):
    session = rt.new_session()
    first = rt.generate("ab", SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), session=session)
    then = rt.generate("cd", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), session=session)
    fresh = rt.generate([*b"ab", *first.tokens, *b"cd"], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert then.tokens == fresh.tokens
    session.rewind(2)
    again = rt.generate(None, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), session=session)
    assert again.tokens == first.tokens


def test_a_list_is_answered_in_order_and_like_its_members(rt: ModelRuntime):
    prompts = [f"prompt number {i} " * (i % 4 + 1) for i in range(11)]  # more than one batch holds
    together = rt.generate(prompts, GREEDY)
    assert [answer.prompt_tokens for answer in together] == [tuple(p.encode()) for p in prompts]
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.tokens == rt.generate(prompt, GREEDY).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_text_is_the_generated_text(rt: ModelRuntime, temperature: float):
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=5, ignore_eos=True)
    events = list(rt.stream("stream", params))
    answer = rt.generate("stream", params)
    assert "".join(event.text for event in events) == answer.text
    assert tuple(t for event in events for t in event.tokens) == answer.tokens
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].generation.text == answer.text and events[-1].finish_reason == answer.finish_reason
    for event in events:
        event.text.encode("utf-8")


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_streamed(rt: ModelRuntime):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    alone = rt.generate("seeded", params)
    batch = rt.generate(["a", "bb", "ccc", "seeded"], params)
    streamed = [t for event in rt.stream("seeded", params) for t in event.tokens]
    assert batch[3].tokens == alone.tokens == tuple(streamed)
    assert alone.seed == 11
    assert rt.generate("seeded", SamplingParams(seed=12, max_tokens=20, ignore_eos=True)).tokens != alone.tokens


def test_without_a_seed_one_is_drawn_and_reported(rt: ModelRuntime):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    drawn = rt.generate("x", params)
    again = rt.generate("x", SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=drawn.seed))
    assert drawn.tokens == again.tokens
    assert rt.generate("x", params).seed != drawn.seed


def test_samples_of_one_prompt_differ_and_the_first_is_the_one_alone(rt: ModelRuntime):
    params = SamplingParams(n=10, seed=3, max_tokens=8, ignore_eos=True)
    answer = rt.generate("n", params)
    assert len(answer.samples) == 10 and len({sample.tokens for sample in answer.samples}) == 10
    assert answer.tokens == answer.samples[0].tokens
    assert answer.tokens == rt.generate("n", SamplingParams(seed=3, max_tokens=8, ignore_eos=True)).tokens


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(rt: ModelRuntime):
    whole = rt.generate("stop", SamplingParams(temperature=1.0, seed=2, max_tokens=60, ignore_eos=True))
    stop = whole.text[20:24]
    assert len(stop.encode()) >= 4
    place = whole.text.find(stop)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=60, ignore_eos=True, stop=[stop])
    answer = rt.generate("stop", params)
    assert answer.text == whole.text[:place]
    assert answer.finish_reason == FinishReason.STOP and answer.stop_reason == stop
    assert answer.tokens == whole.tokens[: len(answer.tokens)]
    assert rt.session.tokens[0] == (*b"stop", *answer.tokens)
    shown = rt.generate("stop", SamplingParams(**{**params.__dict__, "include_stop_str_in_output": True}))
    assert shown.text == whole.text[: place + len(stop)]
    assert "".join(event.text for event in rt.stream("stop", params)) == answer.text


def test_stop_tokens_and_end_of_sequence(rt: ModelRuntime):
    whole = rt.generate("eos", GREEDY)
    token = whole.tokens[6]
    first = whole.tokens.index(token)
    params = replace(GREEDY, stop_token_ids=[token])
    stopped = rt.generate("eos", params)
    assert stopped.tokens == whole.tokens[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, token)
    later = rt.generate("eos", replace(params, min_tokens=24))
    assert len(later.tokens) == 24 and token not in later.tokens
    only_end = SamplingParams(temperature=0.0, allowed_token_ids=[257], max_tokens=5)
    forced = rt.generate("eos", only_end)
    assert forced.tokens == (257,) and forced.text == "" and forced.finish_reason == FinishReason.STOP
    assert rt.generate("eos", replace(only_end, ignore_eos=True)).tokens == (257,) * 5


def test_logprobs_are_the_models_own(rt: ModelRuntime):
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=6, logprobs=4, prompt_logprobs=2, ignore_eos=True)
    answer = rt.generate("logprobs", params)
    scores = reference.logits(CONFIG, random_weights(), [*b"logprobs", *answer.tokens])
    shifted = scores - scores.max(-1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    for i, (token, entry) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        row = expected[7 + i]
        assert entry.token == token and abs(entry.logprob - row[token]) < 1e-4
        assert entry.rank == 1 + (row > row[token]).sum()
        assert list(entry.top) == list(np.argsort(-row)[:4])
    assert answer.prompt_logprobs[0] is None
    for i, entry in enumerate(answer.prompt_logprobs[1:]):
        assert entry.token == b"logprobs"[i + 1] and abs(entry.logprob - expected[i, entry.token]) < 1e-4
        assert list(entry.top) == list(np.argsort(-expected[i])[:2])


def test_score_is_teacher_forced(rt: ModelRuntime):
    text = "a text to score, longer than one chunk of the prefill " * 3
    scored = rt.score([text, [5, 6, 7]])
    scores = reference.logits(CONFIG, random_weights(), list(text.encode()))
    shifted = scores - scores.max(-1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    tokens = np.array(list(text.encode()))
    assert scored[0].logprobs[0] is None and scored[0].tokens == tuple(tokens)
    np.testing.assert_allclose(scored[0].logprobs[1:], expected[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-4)
    assert scored[0].greedy[1:] == tuple(expected[:-1].argmax(-1) == tokens[1:])
    assert len(scored[1].logprobs) == 3


def test_bad_words_never_appear(rt: ModelRuntime):
    whole = rt.generate("words", GREEDY)
    start = next(i for i in range(1, 20) if max(whole.tokens[i : i + 2]) < 128)  # two bytes that are characters
    pair = bytes(whole.tokens[start : start + 2]).decode()
    answer = rt.generate("words", replace(GREEDY, bad_words=[pair]))
    assert answer.tokens[: start + 1] == whole.tokens[: start + 1]
    assert pair in whole.text and pair not in answer.text


def test_a_full_context_ends_the_answer(rt: ModelRuntime):
    answer = rt.generate([1] * (CONFIG.context - 5), SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    assert len(answer.tokens) == 5 and answer.finish_reason == FinishReason.LENGTH


BAD_PROMPTS = [
    "",
    [],
    [[]],
    [-1],
    [CONFIG.vocab],
    [1.5],
    [True],
    7,
    {"a": 1},
    b"bytes",
    ["ok", ""],
    [[1], "x", 3],
    "\ud800",
    np.array(5),
    np.array([True]),
    bytearray(b"abc"),
    [10**5_000],
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda prompt: type(prompt).__name__)
def test_bad_prompts_are_refused_and_the_next_call_works(rt: ModelRuntime, prompt: object):
    with pytest.raises(RequestError):
        rt.generate(prompt, GREEDY)
    assert len(rt.generate("next", GREEDY).tokens) == 24


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={CONFIG.vocab: 1.0}),
        SamplingParams(allowed_token_ids=[CONFIG.vocab]),
        SamplingParams(stop_token_ids=[CONFIG.vocab + 5]),
        {"temperature": 1.0},
    ],
    ids=["bias", "allowed", "stop", "a dict"],
)
def test_parameters_are_checked_against_the_model(rt: ModelRuntime, params: object):
    with pytest.raises(RequestError):
        rt.generate("x", params)


def test_a_prompt_longer_than_the_context_is_refused(rt: ModelRuntime):
    with pytest.raises(jaxrt.CapacityError, match="2,048"):
        rt.generate([1] * 2_048, GREEDY)
    with pytest.raises(jaxrt.CapacityError):
        rt.score([[1] * 2_049])


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(rt: ModelRuntime):
    with pytest.raises(jaxrt.CapacityError, match="characters"):
        rt.generate("x" * 50_000_000, GREEDY)


def test_a_text_of_the_whole_context_can_be_scored(rt: ModelRuntime):
    assert len(rt.score([[1] * CONFIG.context])[0].logprobs) == CONFIG.context


def test_a_stream_goes_on_from_where_its_session_stands_when_it_starts(rt: ModelRuntime):
    session = rt.new_session()
    rt.generate("ab", replace(GREEDY, max_tokens=3), session=session)
    waiting = rt.stream("ef", replace(GREEDY, max_tokens=2), session=session)
    rt.generate("cd", replace(GREEDY, max_tokens=3), session=session)
    before = session.tokens[0]
    list(waiting)
    assert session.tokens[0][: len(before) + 2] == (*before, *b"ef")


def test_no_token_left_is_an_error_and_not_token_zero(rt: ModelRuntime):
    words = [chr(i) for i in range(97, 100)]
    params = SamplingParams(temperature=0.0, allowed_token_ids=list(b"abc"), bad_words=words, max_tokens=3)
    with pytest.raises(jaxrt.ExecutionError, match="forbidden"):
        rt.generate("x", params)
    assert len(rt.generate("next", GREEDY).tokens) == 24


def test_ctrl_c_stops_and_leaves_the_session_usable(rt: ModelRuntime):
    session = rt.new_session()
    events = rt.stream("interrupted", GREEDY, session=session)
    seen = [next(events) for _ in range(5)]
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    assert session.tokens[0] == (*b"interrupted", *(t for event in seen for t in event.tokens))
    rest = rt.generate(None, SamplingParams(temperature=0.0, max_tokens=19, ignore_eos=True), session=session)
    whole = rt.generate("interrupted", GREEDY)
    assert (*(t for event in seen for t in event.tokens), *rest.tokens) == whole.tokens


def test_an_abandoned_stream_gives_way_to_the_next_request(rt: ModelRuntime):
    abandoned = rt.stream("first", GREEDY)
    next(abandoned)
    answer = rt.generate("second", GREEDY)
    assert answer.tokens == rt.generate("second", GREEDY).tokens
    rt.generate("third", GREEDY)
    with pytest.raises(RequestError, match="took over"):
        list(abandoned)
    assert rt.session.tokens[0][:5] == tuple(b"third")


def test_rows_that_end_at_the_context_do_not_stop_the_others(rt: ModelRuntime):
    params = replace(GREEDY, max_tokens=50)
    prompts = [[1] * (CONFIG.context - 5), [1, 2, 3]]
    answers = rt.generate(prompts, params)
    assert [len(answer.tokens) for answer in answers] == [5, 50]
    assert [answer.tokens for answer in answers] == [rt.generate(prompt, params).tokens for prompt in prompts]
    assert len(list(rt.stream(prompts, params))) == 55


def test_looking_at_a_session_does_not_disturb_its_stream(rt: ModelRuntime):
    session = rt.new_session()
    found = []
    for event in rt.stream("looked at", GREEDY, session=session):
        found += event.tokens
        assert session.tokens[0][: 9 + len(found)] == (*b"looked at", *found)
        assert session.lengths[0] >= 9
    assert tuple(found) == rt.generate("looked at", GREEDY).tokens


@pytest.mark.parametrize(
    "change",
    [
        lambda session: session.rewind(3),
        lambda session: session.reset(),
        lambda session: session.prefill(jaxrt.PrefillInput([1, 2])),
        lambda session: session.decode(jaxrt.DecodeInput(positions=3)),
    ],
    ids=["rewind", "reset", "prefill", "decode"],
)
def test_a_stream_ends_when_its_session_is_changed_under_it(rt: ModelRuntime, change: Callable[[Any], Any]):
    session = rt.new_session()
    events = rt.stream("changed", GREEDY, session=session)
    next(events)
    change(session)
    after = session.tokens
    with pytest.raises(RequestError, match="took over"):
        list(events)
    assert session.tokens == after


@pytest.mark.parametrize("broken", ["bad words", "compile", "interrupt"])
def test_a_request_that_fails_leaves_its_session_as_it_was(
    rt: ModelRuntime, broken: str, monkeypatch: pytest.MonkeyPatch
):
    session, alone = rt.new_session(2), rt.new_session(2)
    for one in (session, alone):
        rt.generate(["abc", "d"], GREEDY, session=one)
    before = session.tokens
    if broken == "bad words":
        with pytest.raises(RequestError):
            rt.generate(["x", "y"], replace(GREEDY, bad_words=["x" * 500]), session=session)
    elif broken == "compile":
        with pytest.raises(jaxrt.CompileForbidden), jaxrt.forbid_compile():
            monkeypatch.setattr(rt.session.model.plans, "_plans", {})
            rt.generate(["x" * 600, "y"], GREEDY, session=session)
    else:
        monkeypatch.setattr(session, "collect", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rt.generate(["x", "y"], GREEDY, session=session)
    monkeypatch.undo()
    assert session.tokens == before
    goes_on = [[answer.tokens for answer in rt.generate(["z", "zz"], GREEDY, session=s)] for s in (session, alone)]
    assert goes_on[0] == goes_on[1]


def test_an_empty_row_without_a_prompt_is_refused_and_the_others_stay(rt: ModelRuntime):
    session = rt.new_session(2)
    session.prefill(jaxrt.PrefillInput([[1, 2, 3], []]))
    before = session.tokens
    with pytest.raises(RequestError, match="empty session"):
        rt.generate(None, GREEDY, session=session)
    assert session.tokens == before


@pytest.mark.parametrize("given", ["name", 3, object()], ids=repr)
def test_what_is_no_session_of_the_model_is_refused(rt: ModelRuntime, given: object):
    with pytest.raises(RequestError, match="no session"):
        rt.generate("x", GREEDY, session=given)
    with pytest.raises(RequestError, match="no session"):
        rt.stream("x", GREEDY, session=XlaSession(make_model()))


def test_threads_that_generate_on_one_runtime_take_turns(rt: ModelRuntime):
    params = replace(GREEDY, max_tokens=200)
    expected = rt.generate("turns", params).tokens
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(rt.generate, "turns", params) for _ in range(6)]
    assert [answer.result().tokens for answer in found] == [expected] * 6


def test_prompt_logprobs_of_a_continued_session_are_those_of_the_prompt(rt: ModelRuntime):
    session = rt.new_session()
    first = rt.generate("ab", replace(GREEDY, max_tokens=3), session=session)
    then = rt.generate("cd", replace(GREEDY, prompt_logprobs=1), session=session)
    whole = rt.generate([*b"ab", *first.tokens, *b"cd"], replace(GREEDY, prompt_logprobs=1))
    assert [entry.token for entry in then.prompt_logprobs] == list(b"cd")
    np.testing.assert_allclose(
        [entry.logprob for entry in then.prompt_logprobs],
        [entry.logprob for entry in whole.prompt_logprobs[-2:]],
        atol=1e-4,
    )


@pytest.mark.parametrize("messages", [[1, 2], [None], [[]], "hi", [[{"role": "user", "content": "x"}], "x"], 5, {}])
def test_messages_that_are_no_list_of_messages_are_refused(rt: ModelRuntime, messages: object):
    with pytest.raises(RequestError):
        rt.generate(messages=messages, params=GREEDY)


def test_messages_that_a_template_writes_as_nothing_are_refused(rt: ModelRuntime, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tokenizer, "apply_chat_template", lambda *_: [])
    with pytest.raises(RequestError, match="nothing"):
        rt.generate(messages=[{"role": "user", "content": "x"}], params=GREEDY)


@pytest.mark.parametrize("texts", [[["a", "b"]], "abc", [[[1, 2]]], []], ids=repr)
def test_only_a_list_of_texts_is_scored(rt: ModelRuntime, texts: object):
    with pytest.raises(RequestError):
        rt.score(texts)


def test_a_score_of_nan_is_an_error():
    weights = random_weights()
    weights = weights.replace(final_norm=weights.final_norm * np.float32(np.nan))
    runtime = ModelRuntime.prepare(XlaBackend(), ModelSource(CONFIG, jax.tree.map(jnp.asarray, weights)))
    with runtime, pytest.raises(jaxrt.ExecutionError, match="NaN"):
        runtime.score([[1, 2, 3]])


def test_a_closed_runtime_says_so_however_it_is_used():
    runtime = ModelRuntime.prepare(XlaBackend(), ModelSource(CONFIG, jax.tree.map(jnp.asarray, random_weights())))
    streams = [runtime.stream([1, 2], GREEDY), runtime.stream([[1], [2]], GREEDY)]
    for events in streams:
        next(events)
    runtime.close()
    runtime.close()
    calls = [
        runtime.new_session,
        runtime.warmup,
        lambda: runtime.score([[1, 2]]),
        lambda: runtime.generate([1, 2], GREEDY),
        lambda: runtime.generate([[1, 2], [3]], GREEDY),
        *(lambda events=events: list(events) for events in streams),
    ]
    for call in calls:
        with pytest.raises(RequestError, match="closed"):
            call()
    assert "model in memory" in runtime._repr_html_()


def test_closing_frees_the_device(tmp_path: Path):
    before = len(jax.live_arrays())
    source = ModelSource(CONFIG, jax.tree.map(jnp.asarray, random_weights()))
    with ModelRuntime.prepare(XlaBackend(), source) as runtime:
        runtime.generate([1, 2, 3], GREEDY)
        runtime.generate([[1, 2, 3], [4]], GREEDY)
        del source
    assert len(jax.live_arrays()) <= before
    with pytest.raises(RequestError, match="closed"):
        runtime.generate([1, 2, 3], GREEDY)
