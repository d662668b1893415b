"""Sessions: submissions, rows, growth, rewinding, donated buffers, and what happens when a call goes wrong."""

import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrt.buckets import Bucket
from jaxrt.contracts import BackendSession, SessionCapabilities
from jaxrt.errors import CapacityError, ExecutionError, RequestError, SessionPoisoned
from jaxrt.program import forbid_compile
from jaxrt.sessions.outputs import DecodeInput, PrefillInput, XlaOutput
from jaxrt.sessions.session import XlaSession
from tests import reference
from tests.tiny import CONFIG, make_model, random_weights, shared_model

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, CONFIG.vocab, 40)]
CLOSE = 1e-4  # "equivalent" in the design: relative to the largest logit


def fresh(rows: int = 1) -> XlaSession:
    return XlaSession(shared_model(), rows)


def expected_logits(tokens: list[int]) -> np.ndarray:
    return reference.logits(CONFIG, random_weights(), tokens)[-1]


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() < CLOSE * np.abs(expected).max())


def test_a_session_is_a_backend_session():
    session = fresh()
    assert isinstance(session, BackendSession)
    assert session.capabilities() == SessionCapabilities(True, True, True)


def test_prefill_gives_the_logits_after_the_last_token():
    session = fresh()
    output = session.prefill(PrefillInput(PROMPT)).wait()
    found = session.observe_output(output)["model.logits"]
    assert found.shape == (1, 1, CONFIG.vocab)
    assert close(found.data[0, 0], expected_logits(PROMPT))


def test_decoding_given_tokens_gives_logits_after_each():
    session = fresh()
    session.prefill(PrefillInput(PROMPT[:30]))
    output = session.decode(DecodeInput(tokens=PROMPT[30:])).wait()
    found = session.observe_output(output)["model.logits"]
    assert found.shape == (1, 10, CONFIG.vocab)
    assert close(found.data[0, -1], expected_logits(PROMPT))
    assert list(session.lengths) == [40]


def test_greedy_positions_follow_the_argmax_of_a_full_pass():
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    session.decode(DecodeInput(positions=20))
    tokens = list(session.tokens[0])
    assert list(session.lengths) == [60] and len(tokens) == 61
    scores = reference.logits(CONFIG, random_weights(), tokens[:-1])[len(PROMPT) - 1 :]
    best = np.sort(scores, axis=-1)
    clear = best[:, -1] - best[:, -2] > 0.01
    assert clear.sum() > 15
    assert np.array_equal(scores.argmax(-1)[clear], np.array(tokens[len(PROMPT) :])[clear])


def test_rows_of_a_batch_equal_sessions_alone():
    prompts = [PROMPT, PROMPT[:3], [7], PROMPT[::-1] * 3]
    batch = fresh(4)
    batch.prefill(PrefillInput(prompts))
    batch.decode(DecodeInput(positions=18))
    for row, prompt in enumerate(prompts):
        alone = fresh()
        alone.prefill(PrefillInput(prompt))
        alone.decode(DecodeInput(positions=18))
        assert batch.tokens[row] == alone.tokens[0]


def test_a_row_of_a_batch_can_be_continued():
    batch = fresh(2)
    batch.prefill(PrefillInput([PROMPT[:10], PROMPT[:5]]))
    output = batch.prefill(PrefillInput([PROMPT[10:], []])).wait()
    assert list(batch.lengths) == [40, 5]
    assert close(output.read_logits()[0, 0], expected_logits(PROMPT))


def test_capacity_grows_and_keeps_what_was_there():
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    assert session.capacity == 512
    output = session.prefill(PrefillInput([1] * 500)).wait()
    assert session.capacity == 2_048 and list(session.lengths) == [540]
    assert close(output.read_logits()[0, 0], expected_logits(PROMPT + [1] * 500))


def test_a_session_outlives_a_change_of_the_bucket_ladder():
    model = make_model(replace(CONFIG, context=8_192))
    session = XlaSession(model)
    session.prefill(PrefillInput(PROMPT + [1] * 500))
    assert session.capacity == 2_048
    model.cover(rows=4, capacity=8_192)  # few enough executables only without the 2,048
    assert model.policy.capacities == (512, 8_192)
    output = session.prefill(PrefillInput([1] * 1_600)).wait()
    assert session.capacity == 8_192
    assert close(output.read_logits()[0, 0], expected_logits(PROMPT + [1] * 2_100))


def test_rewind_and_replay_is_bitwise_the_same():
    session = fresh()
    session.prefill(PrefillInput(PROMPT[:32]))
    first = session.prefill(PrefillInput(PROMPT[32:])).wait().read_logits()
    session.decode(DecodeInput(positions=7))
    after = session.tokens
    session.rewind(32)
    assert list(session.lengths) == [32] and session.tokens == (tuple(PROMPT[:32]),)
    again = session.prefill(PrefillInput(PROMPT[32:])).wait().read_logits()
    session.decode(DecodeInput(positions=7))
    assert np.array_equal(first, again)
    assert session.tokens == after


@pytest.mark.parametrize("length", [-1, 41 + 1, 2.0, True, None])
def test_a_rewind_out_of_range_is_refused_and_changes_nothing(length):  # noqa: ANN001
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    with pytest.raises(RequestError):
        session.rewind(length)
    assert list(session.lengths) == [40]


@pytest.mark.parametrize("tokens", [[], [-1], [CONFIG.vocab], [1.5], [True], ["a"], [[1], [2]]])
def test_bad_tokens_are_refused_before_dispatch(tokens: list):
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    before = session.tokens
    for submit in (lambda: session.prefill(PrefillInput(tokens)), lambda: session.decode(DecodeInput(tokens))):
        with pytest.raises(RequestError):
            submit()
    assert session.tokens == before
    session.decode(DecodeInput(positions=1))


def test_decoding_without_a_prompt_is_refused():
    with pytest.raises(RequestError, match="nothing to go on from"):
        fresh().decode(DecodeInput())


def test_the_model_context_is_the_limit():
    session = fresh()
    with pytest.raises(CapacityError, match="2,048"):
        session.prefill(PrefillInput([1] * 2_049))
    session.prefill(PrefillInput([1] * 2_048))
    with pytest.raises(CapacityError):
        session.decode(DecodeInput())
    assert list(session.lengths) == [2_048]


def test_a_completion_knows_of_its_own_submission_only():
    session = fresh()
    first = session.prefill(PrefillInput(PROMPT))
    first.completion.wait()
    assert first.completion.is_complete()
    second = session.decode(DecodeInput(positions=16))
    third = session.decode(DecodeInput(positions=16))
    third.completion.wait()
    assert second.completion.is_complete()
    held = {id(a) for a in (*second.completion.arrays, *third.completion.arrays)}
    cache = {id(a) for name in ("kv", "state") for a in jax.tree.leaves(session.context[name])}
    assert not held & cache
    assert not any(a.is_deleted() for a in first.completion.arrays)


def test_donated_buffers_keep_their_addresses_over_100_steps():
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    session.decode(DecodeInput())
    session.settle()

    def addresses() -> list[int]:
        leaves = jax.tree.leaves((session.context["kv"], session.context["state"]))
        return [leaf.unsafe_buffer_pointer() for leaf in leaves]

    before = addresses()
    for _ in range(100):
        session.decode(DecodeInput())
    session.settle()
    assert addresses() == before


def test_an_interrupted_submission_leaves_a_usable_session(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C after the device was told and before the host noted it: the mirror is behind, and is what counts."""
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    session.settle()
    run = session.context.run

    def interrupted(*arguments):  # noqa: ANN002, ANN202
        run(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(session.context, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.decode(DecodeInput(positions=5))
    monkeypatch.undo()
    alone = fresh()
    alone.prefill(PrefillInput(PROMPT))
    for one in (session, alone):
        one.decode(DecodeInput(positions=5))
    assert session.tokens == alone.tokens


def test_lost_buffers_poison_the_session_until_it_is_reset():
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    session.settle()
    for leaf in jax.tree.leaves(session.context["kv"]):
        leaf.delete()
    for _ in range(2):
        with pytest.raises(SessionPoisoned, match="reset"):
            session.decode(DecodeInput())
    session.reset()
    session.prefill(PrefillInput(PROMPT))
    assert session.tokens[0][:40] == tuple(PROMPT)


def test_an_interrupted_growth_leaves_a_usable_session(monkeypatch: pytest.MonkeyPatch):
    """Compiling the growth of the second cache takes seconds: the first one must not have grown by then."""
    session = fresh(2)
    session.prefill(PrefillInput([[1, 2], [3]]))
    plan = session.model.plans.plan

    def interrupted(bucket):  # noqa: ANN001, ANN202
        if bucket.program == "grow" and bucket.rows == 1:
            raise KeyboardInterrupt
        return plan(bucket)

    monkeypatch.setattr(session.model.plans, "plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(PrefillInput([[1] * 600, [2] * 600]))
    monkeypatch.undo()
    session.prefill(PrefillInput([[1] * 600, [2] * 600]))
    assert list(session.lengths) == [602, 601]


def test_an_interrupt_while_reading_loses_no_token(monkeypatch: pytest.MonkeyPatch):
    session, alone = fresh(), fresh()
    for one in (session, alone):
        one.prefill(PrefillInput(PROMPT))
        one.decode(DecodeInput(positions=16))
        one.decode(DecodeInput(positions=16))
    read = XlaOutput.read

    def interrupted(output: XlaOutput) -> np.ndarray:
        monkeypatch.setattr(XlaOutput, "read", read)
        read(output)
        raise KeyboardInterrupt

    monkeypatch.setattr(XlaOutput, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.settle()
    assert session.tokens == alone.tokens


@pytest.mark.parametrize(
    "submit",
    [
        lambda session: session.prefill(PrefillInput([[1, 2], [1] * 3_000])),
        lambda session: session.decode(DecodeInput(tokens=[[1] * 2_040] * 2)),
        lambda session: session.decode(DecodeInput(positions=10**12)),
    ],
    ids=["prefill", "tokens", "positions"],
)
def test_what_does_not_fit_is_refused_before_any_of_it_is_dispatched(submit):  # noqa: ANN001
    session = fresh(2)
    session.prefill(PrefillInput([PROMPT, PROMPT]))
    before = session.tokens
    with pytest.raises(CapacityError):
        submit(session)
    assert session.tokens == before


@pytest.mark.parametrize("given", [None, 5, [1, 2], PrefillInput(None), PrefillInput(5), DecodeInput(5)], ids=repr)
def test_inputs_of_another_kind_are_refused(given: object):
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    for submit in (session.prefill, session.decode):
        with pytest.raises(RequestError):
            submit(given)


def test_numpy_numbers_are_numbers():
    session = fresh()
    session.prefill(PrefillInput(np.array(PROMPT)))
    session.decode(DecodeInput(positions=np.int64(3)))
    session.rewind(session.lengths[0] - 3)
    assert session.tokens == (tuple(PROMPT),)


def test_running_out_of_device_memory_is_an_execution_error(monkeypatch: pytest.MonkeyPatch):
    session = fresh()

    def full(*_):  # noqa: ANN002, ANN202
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    plan = session.model.plans.plan
    monkeypatch.setattr(session.model.plans, "plan", lambda bucket: replace(plan(bucket), executable=full))
    with pytest.raises(ExecutionError, match="fewer rows"):
        session.prefill(PrefillInput(PROMPT))
    monkeypatch.undo()
    session.prefill(PrefillInput(PROMPT))
    assert session.tokens[0][:40] == tuple(PROMPT)


def test_closing_ends_compiles_that_have_not_started():
    model = make_model()
    recipe = model.plans._recipe

    def slowly(bucket):  # noqa: ANN001, ANN202
        time.sleep(0.2)
        return recipe(bucket)

    model.plans._recipe = slowly
    futures = model.plans.prepare(Bucket("make", rows, 512) for rows in range(1, 20))
    model.close()
    assert all(future.done() for future in futures)
    with forbid_compile():  # which waits for compiles in the background
        pass


def test_a_closed_session_says_so():
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    session.close()
    assert session.context.nbytes() == 0
    with pytest.raises(RequestError, match="closed"):
        session.prefill(PrefillInput(PROMPT))
    with pytest.raises(RequestError, match="closed"):
        session.reset()


def test_finished_positions_are_not_held_on_the_device():
    """Each unread output holds [B, V] logits: a loop of `decode().wait()` would otherwise pile them up."""
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    for _ in range(12):
        session.decode(DecodeInput()).wait()
    assert len(session._unread) <= 1
    assert list(session.lengths) == [40 + 12]


def test_two_threads_take_turns():
    session = fresh()
    session.prefill(PrefillInput(PROMPT))
    threads = [threading.Thread(target=session.decode, args=(DecodeInput(positions=9),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(session.lengths) == [40 + 36]


def test_nan_weights_are_reported_and_never_a_silent_token_zero():
    model = make_model()
    model.weights = model.weights.replace(final_norm=model.weights.final_norm * np.float32(np.nan))
    session = XlaSession(model)
    output = session.prefill(PrefillInput(PROMPT)).wait()
    assert output.read()[0, 0, 1] == 1
