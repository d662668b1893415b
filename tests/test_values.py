"""Sessions as values: forks, rewinds, snapshots. Bitwise, unless a test says equivalent."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrt
from jaxrt.backend import XlaBackend
from jaxrt.buckets import Bucket
from jaxrt.runtime import ModelRuntime
from jaxrt.sessions.session import XlaSession
from tests.tiny import make_model, shared_model

PROMPT = [1, 2, 3, 4, 5, 6, 7]
GREEDY = jaxrt.SamplingParams(temperature=0, max_tokens=9)
SEEDED = jaxrt.SamplingParams(temperature=1.0, max_tokens=9, seed=7)


@pytest.fixture
def rt() -> ModelRuntime:
    return ModelRuntime(XlaBackend(), XlaSession(shared_model()))


def begun(rt: ModelRuntime, prompt: list[int] = PROMPT) -> XlaSession:
    session = rt.new_session()
    rt.generate(prompt, GREEDY, session=session)
    return session


def logits_after(session: XlaSession, tokens: list[int]) -> np.ndarray:
    return session.observe_output(session.prefill(jaxrt.PrefillInput(tokens)).wait())["model.logits"].data  # type: ignore[union-attr]


def test_a_fork_shares_its_buffers_until_either_writes(rt: ModelRuntime):
    session = begun(rt)
    fork = session.fork()
    assert fork.tokens == session.tokens and fork.context.alloc_id("kv") == session.context.alloc_id("kv")
    assert fork.context["kv"].keys[0] is session.context["kv"].keys[0]
    before = session.context["kv"].keys[0]
    rt.generate([9], GREEDY, session=fork)
    assert fork.context.alloc_id("kv") != session.context.alloc_id("kv") and not before.is_deleted()
    assert session.tokens != fork.tokens and session.tokens[0] == fork.tokens[0][: len(session.tokens[0])]


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
@pytest.mark.parametrize("first", ["fork", "original"])
def test_a_fork_and_its_original_go_on_alike(rt: ModelRuntime, params: jaxrt.SamplingParams, first: str):
    session = begun(rt)
    fork = session.fork()
    order = (fork, session) if first == "fork" else (session, fork)
    one, two = (rt.generate([9, 8], params, session=branch) for branch in order)
    assert one.tokens == two.tokens and session.tokens == fork.tokens
    np.testing.assert_array_equal(logits_after(session, [3]), logits_after(fork, [3]))


def test_a_fork_of_several_rows_costs_one_prefill(rt: ModelRuntime):
    session = begun(rt)
    fork = session.fork(rows=4)
    assert fork.lengths.tolist() == [session.lengths[0]] * 4 and not fork.context.contains("kv")
    fork.decode(jaxrt.DecodeInput(positions=6))
    alone = session.fork()
    alone.decode(jaxrt.DecodeInput(positions=6))
    assert all(row == alone.tokens[0] for row in fork.tokens)
    assert len(session.tokens[0]) == len(alone.tokens[0]) - 6  # the original stands where it stood
    with pytest.raises(jaxrt.RequestError, match="4, as many"):
        fork.fork(rows=2)


def test_forks_of_batches_and_of_forks(rt: ModelRuntime):
    batch = rt.new_session(rows=2)
    batch.prefill(jaxrt.PrefillInput([PROMPT, PROMPT[::-1]]))
    child = batch.fork()
    grandchild = child.fork()
    for session in (grandchild, batch, child):
        session.decode(jaxrt.DecodeInput(positions=5))
    assert batch.tokens == child.tokens == grandchild.tokens
    child.close()
    grandchild.prefill(jaxrt.PrefillInput([[5], []]))
    assert len(grandchild.tokens[0]) == len(batch.tokens[0]) + 1


def test_a_warmed_up_fork_compiles_nothing():
    rt = ModelRuntime(XlaBackend(), XlaSession(make_model()))
    rt.warmup(rows=1, capacity=512)
    session = begun(rt)
    with jaxrt.forbid_compile():
        branches = [session.fork() for _ in range(3)]
        answers = [rt.generate([token], GREEDY, session=branch) for token, branch in enumerate(branches)]
    assert len({answer.tokens for answer in answers}) > 1


def test_a_fork_of_an_empty_session_and_dropped_originals(rt: ModelRuntime):
    empty = rt.new_session().fork()
    assert empty.lengths.tolist() == [0]
    assert rt.generate(PROMPT, GREEDY, session=empty).tokens == rt.generate(PROMPT, GREEDY).tokens
    session = begun(rt)
    fork, tokens = session.fork(), session.tokens
    session.close()
    assert not fork.context.is_shared("kv") and fork.tokens == tokens
    rt.generate([9], GREEDY, session=fork)


def test_rewind_and_replay(rt: ModelRuntime):
    session = begun(rt)
    tokens, branch = session.tokens[0], session.fork()
    branch.rewind(7)
    assert branch.tokens[0] == tuple(PROMPT) and session.tokens[0] == tokens
    again = rt.generate(list(tokens[7:8]), GREEDY, session=branch)
    assert again.tokens[:7] == tokens[8:15]
    for length in (-1, len(branch.tokens[0]) + 1, 1.5, True):
        with pytest.raises(jaxrt.RequestError, match="rewind"):
            branch.rewind(length)  # type: ignore[arg-type]


def test_a_saved_session_goes_on_bit_for_bit(rt: ModelRuntime, tmp_path: Path):
    session = begun(rt)
    state = session.snapshot()
    assert state.lengths.tolist() == session.lengths.tolist() and state.arrays["keys"].shape[-1] == session.lengths[0]
    state.save(tmp_path / "state")
    back = jaxrt.SessionState.restore(tmp_path / "state", rt)
    assert back.tokens == session.tokens and back.capacity == session.capacity
    for params in (GREEDY, SEEDED):
        one, two = (rt.generate([9, 8], params, session=branch) for branch in (session, back))
        assert one.tokens == two.tokens
    np.testing.assert_array_equal(logits_after(session, [3]), logits_after(back, [3]))
    assert "SessionState" in repr(state) and "session state" in state._repr_html_()


def test_a_saved_session_goes_on_in_another_process(rt: ModelRuntime, tmp_path: Path):
    session = begun(rt)
    session.snapshot().save(tmp_path / "state")
    code = f"""
import jaxrt, numpy as np
from jaxrt.backend import XlaBackend
from jaxrt.runtime import ModelRuntime
from jaxrt.sessions.session import XlaSession
from tests.tiny import make_model
rt = ModelRuntime(XlaBackend(), XlaSession(make_model()))
back = jaxrt.SessionState.restore({str(tmp_path / "state")!r}, rt)
out = back.prefill(jaxrt.PrefillInput([9, 8])).wait()
print(back.observe_output(out)["model.logits"].data.tobytes().hex())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == logits_after(session, [9, 8]).tobytes().hex()


@pytest.mark.parametrize(("rows", "capacity"), [(None, 2_048), (3, None), (2, 1_000)])
def test_other_rows_and_capacities_are_equivalent(rt: ModelRuntime, rows: int | None, capacity: int | None):
    session = begun(rt)
    back = session.snapshot().open(rt, rows=rows, capacity=capacity)
    prompts: Any = [9, 8] if rows is None else [[9, 8], *[[]] * (rows - 1)]
    found, wanted = logits_after(back, prompts)[0], logits_after(session, [9, 8])[0]
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


@settings(max_examples=15)
@given(data=st.data())
def test_random_runs_forked_saved_and_rewound_at_random_points(data: st.DataObject):
    rt = ModelRuntime(XlaBackend(), XlaSession(shared_model()))
    session, twin = rt.new_session(), rt.new_session()
    for _ in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=40))
        params = data.draw(st.sampled_from([GREEDY, SEEDED]))
        answers = [rt.generate(prompt, params, session=one).tokens for one in (session, twin)]
        assert answers[0] == answers[1]
        what = data.draw(st.sampled_from(["fork", "snapshot", "rewind", "nothing"]))
        if what == "fork":
            twin = twin.fork()
        elif what == "snapshot":
            twin = twin.snapshot().open(rt)
        elif what == "rewind":
            length = data.draw(st.integers(0, len(session.tokens[0])))
            session.rewind(length)
            twin.rewind(length)
        assert session.tokens == twin.tokens
    np.testing.assert_array_equal(logits_after(session, [3]), logits_after(twin, [3]))


def test_foreign_and_damaged_states_are_refused(rt: ModelRuntime, tmp_path: Path):
    state = begun(rt).snapshot()
    state.save(tmp_path / "state")
    with pytest.raises(jaxrt.ArtifactError, match="already"):
        state.save(tmp_path / "state")
    other = make_model()
    other.weights.layers[0].output.block_until_ready()
    changed = other.weights.replace(final_norm=other.weights.final_norm * np.float32(1.5))
    stranger = ModelRuntime(
        XlaBackend(), XlaSession(type(other)(other.config, changed, other.cache_dtype, other.device))
    )
    with pytest.raises(jaxrt.RequestError, match="another model"):
        jaxrt.SessionState.restore(tmp_path / "state", stranger)
    with pytest.raises(jaxrt.ArtifactError, match="saved session"):
        jaxrt.load(tmp_path / "state")
    with pytest.raises(jaxrt.RequestError, match="at most 1"):
        rt.new_session(rows=2).snapshot().open(rt, rows=1)
    with pytest.raises(jaxrt.CapacityError):
        state.open(rt, capacity=3)
    for path in [path for path in sorted((tmp_path / "state").rglob("*")) if path.is_file() and path.stat().st_size]:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(jaxrt.ArtifactError):
            jaxrt.SessionState.read(tmp_path / "state")
        path.write_bytes(content)
    assert jaxrt.SessionState.read(tmp_path / "state").tokens == state.tokens


def test_closed_and_running_sessions_are_refused(rt: ModelRuntime):
    session = begun(rt)
    stream = rt.stream([9], GREEDY, session=session)
    next(stream)
    for act in (session.fork, session.snapshot):
        with pytest.raises(jaxrt.RequestError, match="generating"):
            act()
    stream.close()
    assert session.fork().tokens == session.tokens
    session.close()
    for act in (
        session.fork,
        session.snapshot,
        lambda: session.rewind(1),
        lambda: session.prefill(jaxrt.PrefillInput([1])),
    ):
        with pytest.raises(jaxrt.RequestError, match="closed"):
            act()


def test_closing_the_runtime_closes_every_session():
    rt = ModelRuntime(XlaBackend(), XlaSession(make_model()))
    session = begun(rt)
    fork = session.fork()
    rt.close()
    assert session.closed and fork.closed
    with pytest.raises(jaxrt.RequestError, match="closed"):
        fork.fork()


def test_another_cache_in_the_context_is_noticed(rt: ModelRuntime):
    """The oracle of a swapped cache: without the guard the session would go on over what another one wrote."""
    session, other = begun(rt), begun(rt, PROMPT[::-1])
    session.context["kv"] = jax.tree.map(np.array, other.context["kv"])
    allocation = jaxrt.Allocation.of(session.context)
    plans = session.decode_session
    assert plans.validity_for(session.model.key, allocation) is jaxrt.PlanValidity.AllocationChanged
    with pytest.raises(jaxrt.TopologyChanged, match="not its own"):
        session.prefill(jaxrt.PrefillInput([1]))
    plans.rebind_kv(allocation)
    assert plans.is_valid_for(session.model.key, allocation)
    session.prefill(jaxrt.PrefillInput([1]))
    session.context["kv"] = {"keys": np.zeros(3, np.float32)}
    wrong = jaxrt.Allocation.of(session.context)
    assert plans.validity_for(session.model.key, wrong) is jaxrt.PlanValidity.Stale
    with pytest.raises(jaxrt.RebindRefused) as refused:
        plans.rebind_kv(wrong)
    assert refused.value.reason == "missing slot" and not plans.is_valid_for(session.model.key, wrong)
    session.reset()
    assert rt.generate(PROMPT, GREEDY, session=session).tokens == rt.generate(PROMPT, GREEDY).tokens


def test_a_taken_decode_session_is_missed_and_stays_in_place_on_errors(rt: ModelRuntime, monkeypatch: Any):
    session = begun(rt)
    taken = session.context.take_decode_session()
    with pytest.raises(jaxrt.ContextError, match="put back"):
        session.prefill(jaxrt.PrefillInput([1]))
    session.context.put_decode_session(taken)

    def failing(bucket: Bucket) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.model.plans, "plan", failing)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(jaxrt.PrefillInput([1]))
    assert session.context.has_decode_session
    session.prefill(jaxrt.PrefillInput([1]))


def test_truncate_to_is_rewind_and_keeps_the_allocation(rt: ModelRuntime):
    """`truncate_to` is metadata alone: the same buffers at the same address, the same `alloc_id`."""
    session = begun(rt)
    identity, kv = session.context.alloc_id("kv"), session.context["kv"]
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kv)]
    session.rewind(3)
    assert list(session.lengths) == [3] and session.tokens == (tuple(PROMPT[:3]),)
    assert session.context.alloc_id("kv") == identity
    assert session.context["kv"].keys[0] is kv.keys[0]
    rt.generate([9], GREEDY, session=session)
    assert session.context.alloc_id("kv") == identity  # written in place
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(session.context["kv"])] == places


def test_alloc_id_is_minted_anew_by_a_new_cache(rt: ModelRuntime):
    session = begun(rt)
    seen = [session.context.alloc_id("kv")]
    for renew in (lambda: session.reset(), lambda: session.resume(begun(rt).snapshot())):
        renew()
        rt.generate(PROMPT, GREEDY, session=session)
        assert session.context.alloc_id("kv") not in seen
        seen.append(session.context.alloc_id("kv"))


@pytest.mark.parametrize("program", ["copy", "decode", "prefill"])
def test_an_interrupt_in_a_donating_call_leaves_original_and_fork_usable(
    rt: ModelRuntime, monkeypatch: pytest.MonkeyPatch, program: str
):
    """Ctrl-C after the device was told: in the copy that a first write to a fork makes, and in passes with edits."""
    session = begun(rt)
    fork = session.fork()
    run = fork.context.run
    changes = [jaxrt.Zero("model.layers.0.attention.heads", heads=[0])]

    def interrupted(plan: Any, *arguments: Any) -> Any:
        found = run(plan, *arguments)
        if plan.name.startswith(program):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(fork.context, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rt.generate([9, 8], GREEDY, session=fork, interventions=changes)
    monkeypatch.undo()
    for one in (fork, session):
        one.rewind(len(PROMPT))
    after = [rt.generate([9, 8], GREEDY, session=one, interventions=changes).tokens for one in (fork, session)]  # type: ignore[union-attr]
    assert after[0] == after[1]


def test_threads_on_one_session_and_its_forks_take_turns(rt: ModelRuntime):
    """Each thread's call is whole: submissions of several threads add up, and their inspections are their own."""
    session = begun(rt)
    branches = [session.fork() for _ in range(3)]
    start = int(session.lengths[0])
    request = jaxrt.ObservationRequest.selected(["model.layers.0.output"])
    wanted = session.fork().inspect_decode(jaxrt.DecodeInput(positions=3), request)
    failures: list[BaseException] = []

    def work(one: XlaSession) -> None:
        try:
            for _ in range(2):
                one.decode(jaxrt.DecodeInput(positions=3))
            one.inspect_decode(jaxrt.DecodeInput(positions=3), request)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in [session, session, *branches]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert list(session.lengths) == [start + 18] and all(list(one.lengths) == [start + 9] for one in branches)
    assert len({one.tokens for one in branches}) == 1
    assert session.tokens[0][: start + 9] == branches[0].tokens[0][: start + 9]
    assert wanted.observations["model.layers.0.output"].shape[1] == 3  # type: ignore[union-attr]
