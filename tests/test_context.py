"""`InferenceContext` and plan-once: values that stay on the device, programs over them, and what a plan is made of.

Named after the rows of the documented interface. Expected values come from numpy.
"""

import gc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrt.context import InferenceContext
from jaxrt.decode_session import DecodeSession
from jaxrt.errors import (
    ContextError,
    ExecutionError,
    RequestError,
    SessionPoisoned,
    TopologyChanged,
    UnboundSymbol,
)
from jaxrt.program import Program, compiles, forbid_compile, plan
from jaxrt.realize import COPY
from jaxrt.symbols import SymEnv

RNG = np.random.default_rng(0)  # whole numbers, so that float32 is exact
X = RNG.integers(1, 9, (3, 4)).astype(np.float32)
W = RNG.integers(-9, 9, (4, 2)).astype(np.float32)


def count_step(values, env):  # noqa: ANN001, ANN201
    """A program with state: the sum of all it was told, and how far that is from x."""
    total = values["total"] + values["x"] * env["times"].astype(jnp.float32)
    return {"total_next": total, "distance": jnp.abs(total - values["x"]).sum(), "twice": 2 * total}


STEP = Program(count_step, name="count", updates={"total": "total_next"})
PLUS = Program(lambda v, e: {"y": v["x"] + 1, "z": v["x"] * 2}, name="plus")


def counting() -> InferenceContext:
    context = InferenceContext()
    context["x"], context["total"] = X, np.zeros_like(X)
    return context


def compiled() -> int:
    return compiles().misses + compiles().hits


# --- the mapping --------------------------------------------------------------------------------------------------


def test_new_and_device():
    context = InferenceContext()
    assert context.device == jax.devices()[0] and len(context) == 0 and not context.has_decode_session
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert InferenceContext(sharding).device is sharding


def test_take_put_decode_session_and_has_decode_session():
    context, session = InferenceContext(), object.__new__(DecodeSession)
    assert context.take_decode_session() is None
    context.put_decode_session(session)
    assert context.has_decode_session
    assert context.take_decode_session() is session and not context.has_decode_session
    context.put_decode_session(None)
    assert context.take_decode_session() is None


def test_insert_replaces_and_copies_what_numpy_owns():
    context = InferenceContext()
    memory = np.zeros(4096 + 16, np.float32)
    mine = memory[-memory.ctypes.data // 4 % 16 :][:4096]  # aligned: jax.device_put alone would go on using its memory
    context.insert("x", {"a": mine})
    mine[:] = 7
    assert (np.array(context["x"]["a"]) == 0).all()
    context.insert("x", X)
    np.testing.assert_array_equal(context["x"], X)
    assert len(context) == 1
    with pytest.raises(ContextError, match="'words' cannot be placed"):
        context["words"] = ["no", "numbers"]


def test_remove_makes_the_next_realize_take_the_constant():
    context = InferenceContext()
    context["x"] = X
    program = Program(PLUS.fn, name="plus", constants={"x": 10 * X})
    np.testing.assert_array_equal(context.realize(program, "y"), X + 1)
    np.testing.assert_array_equal(context.remove("x"), X)
    np.testing.assert_array_equal(context.realize(program, "y"), 10 * X + 1)
    assert context.remove("x") is None
    with pytest.raises(ContextError, match="plus reads 'x'.*insert it first"):
        context.realize(PLUS, "y")


def test_contains_get_len_is_empty():
    context = counting()
    assert context.contains("x") and "x" in context and not context.contains("y") and len(context) == 2
    assert context.get("y") is None and not context.is_empty() and context.nbytes() == 2 * X.nbytes
    np.testing.assert_array_equal(context.get("x"), X)


def test_clear_persistent_frees_what_nobody_else_holds():
    context, other = counting(), InferenceContext()
    context.share("x", other)
    before = sum(array.nbytes for array in jax.live_arrays())
    context.clear_persistent()
    gc.collect()
    assert context.is_empty()
    assert before - sum(array.nbytes for array in jax.live_arrays()) == X.nbytes  # total, not x
    np.testing.assert_array_equal(other["x"], X)
    assert not other.is_shared("x")


# --- realize ------------------------------------------------------------------------------------------------------


def test_realize_one_as():
    context = InferenceContext()
    context["x"] = X
    found = context.realize(Program(lambda v, e: {"y": v["x"] @ W}, name="matmul"), "y")
    np.testing.assert_array_equal(found, X @ W)
    assert type(found) is np.ndarray and found.dtype == np.float32 and list(context) == ["x"]
    same = context.realize(Program(lambda v, e: {"y": v["x"]}, name="same"), "y")
    same[:] = 0  # a copy of its own: the value is untouched
    np.testing.assert_array_equal(context["x"], X)


def test_realize_one_as_with_env():
    context = counting()
    program = Program(lambda v, e: {"y": v["x"] * e["a"].astype(jnp.float32), "a": e["a"]}, name="scale")
    for env in ({"a": 3, "unread": 9}, SymEnv({"a": 3})):
        np.testing.assert_array_equal(context.realize(program, "y", env=env), X * 3)
    assert context.realize(program, "a", env={"a": -(2**31)}) == -(2**31)
    for env in ({}, None, SymEnv(), {"b": 1}):
        with pytest.raises(UnboundSymbol, match="scale reads the symbol 'a'"):
            context.realize(program, "y", env=env)
    for bad in (1.5, True, 2**31, "1"):
        with pytest.raises(RequestError, match="'a'"):
            context.realize(program, "y", env={"a": bad})
    with pytest.raises(RequestError, match="env of type int"):
        context.realize(program, "y", env=5)


def test_realize_many_as():
    context = counting()
    found = context.realize_many(STEP, ["twice", "distance", "twice"], env={"times": 3})
    np.testing.assert_array_equal(found[0], 6 * X)
    np.testing.assert_array_equal(found[1], np.abs(3 * X - X).sum())
    np.testing.assert_array_equal(found[2], found[0])
    np.testing.assert_array_equal(context["total"], 3 * X)  # the update took effect, once
    with forbid_compile():
        assert context.realize_many(STEP, []) == []
    np.testing.assert_array_equal(context["total"], 3 * X)
    with pytest.raises(RequestError, match="list of target names"):
        context.realize_many(STEP, "twice")
    with pytest.raises(RequestError, match="list of target names"):
        context.realize(STEP, 5)
    with pytest.raises(RequestError, match="type function.*wrap it"):
        context.realize(count_step, "twice")


def test_realize_split_as_host_and_resident():
    """As a training step: the loss to the host, parameters and momentum stay."""
    context = counting()
    targets = ["distance", "total_next", "twice", "total_next"]
    found = context.realize_split(STEP, targets, 1, env={"times": 2}, dtype="bfloat16")
    (loss,), resident = found.host, found.device
    assert loss.dtype == jnp.bfloat16 and abs(float(loss) - np.abs(X).sum()) < 0.01 * np.abs(X).sum()
    assert all(isinstance(array, jax.Array) and array.dtype == jnp.float32 for array in resident)
    context.realize(STEP, "twice", env={"times": 1})  # consumes the context's total, but not what was handed out
    for array, expected in zip(resident, (2 * X, 4 * X, 2 * X), strict=True):
        np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(context["total"], 3 * X)
    assert context.realize_split(STEP, [], 0).device == ()


@pytest.mark.parametrize("n_host", [-1, 3, 1.0, True])
def test_realize_split_as_refuses_a_wrong_count_before_anything_runs(n_host):  # noqa: ANN001
    context = counting()
    with forbid_compile(), pytest.raises(RequestError, match="n_host"):
        context.realize_split(STEP, ["twice", "distance"], n_host, env={"times": 1})
    np.testing.assert_array_equal(context["total"], np.zeros_like(X))


def test_a_dtype_is_cast_to_on_the_device_and_never_reinterpreted():
    context = InferenceContext()
    context["half"] = jnp.asarray(X, jnp.bfloat16)
    program = Program(lambda v, e: {"y": v["half"]}, name="half")
    as_is = context.realize(program, "y")
    assert as_is.dtype == jnp.bfloat16
    np.testing.assert_array_equal(context.realize(program, "y", dtype=np.float32), as_is.astype(np.float32))
    np.testing.assert_array_equal(context.realize(program, "y", dtype="int32"), as_is.astype(np.int32))
    for bad in ("float64", np.int64, "words", object, "str"):
        with pytest.raises(RequestError, match="dtype"):
            context.realize(program, "y", dtype=bad)


def test_only_what_is_asked_for_is_computed_and_read():
    calls = []

    def dear(x):  # noqa: ANN001, ANN202
        calls.append(x.shape)
        return x

    def fn(values, env):  # noqa: ANN001, ANN202
        x = values["x"]
        return {"cheap": x + 1, "dear": jax.pure_callback(dear, jax.ShapeDtypeStruct(x.shape, x.dtype), x)}

    context = counting()
    program = Program(fn, name="lazy", constants={"never": X})
    assert [slot.name for slot in context.prebuild(program, "cheap").plan.inputs] == ["x"]
    assert context.uploads == 0 and calls == []
    np.testing.assert_array_equal(context.realize(program, "dear"), X)
    assert calls == [X.shape]


def test_the_context_wins_over_a_constant_and_constants_are_uploaded_at_each_call():
    context = InferenceContext()
    program = Program(lambda v, e: {"y": v["x"] @ v["w"]}, name="matmul", constants={"x": X, "w": W, "unread": X})
    for uploads in (2, 4):
        np.testing.assert_array_equal(context.realize(program, "y"), X @ W)
        assert context.uploads == uploads and context.is_empty()
    context["w"] = 2 * W
    np.testing.assert_array_equal(context.realize(program, "y"), X @ (2 * W))
    assert context.uploads == 5


def test_an_updated_constant_lives_in_the_context_from_then_on():
    start = np.ones_like(X)
    program = Program(count_step, name="count", updates=STEP.updates, constants={"total": start, "x": X})
    context = InferenceContext()
    for times in (1, 2):
        context.realize(program, "distance", env={"times": times})
    np.testing.assert_array_equal(context["total"], 1 + 3 * X)
    assert list(context) == ["total"] and context.uploads == 3  # x twice, total once
    np.testing.assert_array_equal(start, np.ones_like(X))  # and nobody wrote into the constant


def test_an_update_that_reads_nothing_begins_a_value():
    begin = Program(lambda v, e: {"x_next": jnp.zeros(3), "size": e["n"]}, name="begin", updates={"x": "x_next"})
    context = InferenceContext()
    assert context.realize(begin, "size", env={"n": 3}) == 3
    np.testing.assert_array_equal(context["x"], np.zeros(3))


def test_what_is_wrong_is_said_in_the_words_of_the_program():
    context = counting()

    def refuses(fn, match, target="y", error=ContextError):  # noqa: ANN001, ANN202
        with pytest.raises(error, match=match):
            context.realize(Program(fn, name="odd"), target)

    refuses(lambda v, e: {"y": v["totl"]}, "odd reads 'totl'.*'total'")
    refuses(lambda v, e: {"logits": v["x"]}, "no target 'logit'.*did you mean 'logits'", target="logit")
    refuses(lambda v, e: v["x"], "odd returned a .*mapping of target names")
    refuses(lambda v, e: {"y": {"a": v["x"], "b": v["x"]}}, "'y' of odd is a tree of 2 arrays")
    refuses(lambda v, e: {"y": "text"}, "holds a str")
    refuses(lambda v, e: {"y": jax.random.key(0)}, "key_data")
    refuses(lambda v, e: {"y": 1 / 0}, "division by zero", error=ZeroDivisionError)  # the user's own errors pass
    with pytest.raises(ContextError, match="'words' of odd"):
        context.realize(Program(lambda v, e: {"y": v["words"]}, name="odd", constants={"words": "text"}), "y")
    with pytest.raises(ContextError, match="target of its own"):
        Program(count_step, name="odd", updates={"a": "t", "b": "t"})
    for grown in (lambda v, e: {"n": jnp.zeros(5), "y": 1}, lambda v, e: {"n": {"a": v["x"]}, "y": 1}):
        with pytest.raises(ContextError, match="odd updates 'x'"):
            context.realize(Program(grown, name="odd", updates={"x": "n"}), "y")
    np.testing.assert_array_equal(context["x"], X)


def test_values_can_be_looked_through_handed_on_and_asked_for():
    context = counting()
    program = Program(
        lambda v, e: {
            "sum": jax.jit(lambda all: sum(all.values()))(v),
            "bias": v["bias"] if "bias" in v else jnp.float32(5),
            "names": len(v) + len(dict(**v)) + 0 * (v.get("missing") is None),
        },
        name="open",
    )
    np.testing.assert_array_equal(context.realize(program, "sum"), X)
    assert context.realize(program, "bias") == 5 and context.realize(program, "names") == 4
    context["bias"] = np.float32(7)
    assert context.realize(Program(lambda v, e: {"b": v.get("bias", 5)}, name="asks"), "b") == 7


# --- allocations, and sharing them --------------------------------------------------------------------------------


def test_kv_alloc_id_names_an_allocation_and_not_its_shape():
    context = counting()
    first = context.alloc_id("total")
    context.realize(STEP, "twice", env={"times": 1})
    context.realize_prebuilt(context.prebuild(STEP, "twice", env={"times": 1}).plan, env={"times": 1})
    assert context.alloc_id("total") == first != context.alloc_id("x")  # updated in place
    seen = {first, context.alloc_id("x")}
    leaves, tree = jax.tree.flatten(context["x"])
    for insert in (
        lambda: context.insert("total", np.zeros_like(X)),
        lambda: context.__setitem__("total", context["total"]),
        lambda: context.hold("total", leaves, tree),
        lambda: context.remove("total") is None or context.insert("total", X),
    ):
        insert()
        assert context.alloc_id("total") not in seen and type(context.alloc_id("total")) is int
        seen.add(context.alloc_id("total"))
    context.clear_persistent()
    with pytest.raises(ContextError, match="'total'"):
        context.alloc_id("total")


def test_a_shared_value_is_one_allocation_until_someone_lets_go():
    context, other, third = counting(), InferenceContext(), InferenceContext()
    assert not context.is_shared("total")
    context.share("total", other)
    other.share("total", third, as_name="lane")
    assert context["total"].unsafe_buffer_pointer() == third["lane"].unsafe_buffer_pointer()
    assert context.alloc_id("total") == other.alloc_id("total") == third.alloc_id("lane")
    assert context.is_shared("total") and other.is_shared("total") and third.is_shared("lane")
    other["total"] = X  # replaced
    assert context.is_shared("total") and not other.is_shared("total")
    del third  # collected
    gc.collect()
    assert not context.is_shared("total")
    for drop in (
        lambda: other.discard("total"),
        lambda: other.remove("total"),
        other.clear_persistent,
        lambda: other.hold("total", [], None),
    ):
        context.share("total", other)
        assert context.is_shared("total")
        drop()
        assert not context.is_shared("total")
    made = plan(PLUS, {"x": np.ones(3, np.float32)}, ["y"])
    context.share("total", other)
    with pytest.raises(TopologyChanged) as kept:  # its traceback refers to the entry
        other.run(made, {}, {}, {"x": "total"})
    other.discard("total")
    assert kept.tb is not None and not context.is_shared("total")
    context.share("total", context, as_name="twin")
    assert context.is_shared("total") and context.alloc_id("twin") == context.alloc_id("total")
    context.share("total", context)
    assert context.is_shared("twin")
    with pytest.raises(ContextError, match="'missing'"):
        context.share("missing", other)


def test_no_plan_donates_what_is_shared():
    context, fork = counting(), InferenceContext()
    made = context.prebuild(STEP, "twice", env={"times": 1}).plan
    for name in context:
        context.share(name, fork)
    for holder in (context, fork):
        with pytest.raises(ContextError, match="'total', which count updates, is shared.*own"):
            holder.realize_prebuilt(made, env={"times": 1})
        np.testing.assert_array_equal(holder["total"], X)
    copy = plan(COPY, {"value": context["total"]}, ["copy"])
    before = fork.alloc_id("total")
    with forbid_compile():
        fork.own("total", copy)
        assert fork["total"].unsafe_buffer_pointer() != context["total"].unsafe_buffer_pointer()
        assert fork.alloc_id("total") != before == context.alloc_id("total")
        owned = fork.alloc_id("total")
        fork.own("total", copy)  # its own already
        assert fork.alloc_id("total") == owned
        np.testing.assert_array_equal(fork.realize_prebuilt(made, env={"times": 5}), 2 * 6 * X)
        np.testing.assert_array_equal(context.realize_prebuilt(made, env={"times": 1}), 2 * 2 * X)
    assert context.is_shared("x")  # never updated, and never copied
    with pytest.raises(ContextError, match="'missing'"):
        context.own("missing", copy)


def test_realize_copies_what_is_shared_before_it_updates_it():
    context, fork = counting(), InferenceContext()
    for name in context:
        context.share(name, fork)
    np.testing.assert_array_equal(fork.realize(STEP, "twice", env={"times": 3}), 6 * X)
    np.testing.assert_array_equal(context["total"], np.zeros_like(X))
    fork.share("total", context)
    built = fork.prebuild(STEP, "twice", env={"times": 1})
    np.testing.assert_array_equal(built.result, 8 * X)
    np.testing.assert_array_equal(context["total"], 3 * X)
    assert not fork.is_shared("total") and fork.is_shared("x")


# --- what goes wrong on the way -----------------------------------------------------------------------------------


def interrupted(made, error):  # noqa: ANN001, ANN201
    """The plan, whose call is cut short after its donated buffers are gone."""

    def call(*leaves):  # noqa: ANN002, ANN202
        made.executable(*leaves)
        raise error

    return replace(made, executable=call)


def test_what_an_interrupt_loses_is_named_until_it_is_inserted_again():
    context = counting()
    made = context.prebuild(STEP, "twice", env={"times": 1}).plan
    with pytest.raises(KeyboardInterrupt):
        context.realize_prebuilt(interrupted(made, KeyboardInterrupt()), env={"times": 1})
    for lose in (
        lambda: context["total"],
        lambda: context.realize_prebuilt(made, env={"times": 1}),
        lambda: context.realize(STEP, "twice", env={"times": 1}),
        lambda: context.realize(Program(lambda v, e: {"y": v["total"]}, name="reads"), "y"),
        lambda: context.realize(replace(STEP, constants={"total": X}), "twice", env={"times": 1}),
        lambda: context.share("total", InferenceContext()),
    ):
        with pytest.raises(SessionPoisoned, match="'total'.*insert it again.*reset"):
            lose()
    np.testing.assert_array_equal(context["x"], X)
    assert "lost" in context._repr_html_() and "total" in context._repr_html_()
    context["total"] = X
    np.testing.assert_array_equal(context.realize_prebuilt(made, env={"times": 1}), 4 * X)
    assert "lost" not in context._repr_html_()


def test_a_lost_value_does_not_start_anew_from_its_constant_but_may_be_begun_again():
    context = InferenceContext()
    program = replace(STEP, constants={"total": np.zeros_like(X), "x": X})
    made = context.prebuild(program, "twice", env={"times": 1}).plan
    with pytest.raises(KeyboardInterrupt):
        context.realize_prebuilt(interrupted(made, KeyboardInterrupt()), env={"times": 1})
    with pytest.raises(SessionPoisoned, match="'total'"):
        context.realize_prebuilt(made, env={"times": 1})
    begin = Program(lambda v, e: {"n": v["x"], "y": e["k"]}, name="begin", constants={"x": X}, updates={"total": "n"})
    assert context.realize(begin, "y", env={"k": 8}) == 8
    np.testing.assert_array_equal(context["total"], X)


def test_a_deleted_array_is_refused_where_it_is_inserted():
    context, gone = counting(), jax.device_put(X, jax.devices()[0])
    gone.delete()
    with pytest.raises(ContextError, match="'x' holds an array that was donated"):
        context["x"] = gone
    np.testing.assert_array_equal(context["x"], X)  # what was there stays


def test_a_failed_device_is_an_execution_error_and_a_deleted_array_a_lost_value():
    context = counting()
    made = context.prebuild(STEP, "twice", env={"times": 1}).plan

    def full(*_):  # noqa: ANN002, ANN202
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with pytest.raises(ExecutionError, match="count failed"):
        context.realize_prebuilt(replace(made, executable=full), env={"times": 1})
    np.testing.assert_array_equal(context["total"], X)
    context["x"].delete()  # behind its back
    with pytest.raises(SessionPoisoned, match="'x'"):
        context.realize_prebuilt(made, env={"times": 1})
    np.testing.assert_array_equal(context["total"], X)


def test_a_callback_that_fails_on_the_device_is_an_execution_error():
    def refuse(x):  # noqa: ANN001, ANN202
        raise ArithmeticError("no such number")

    program = Program(
        lambda v, e: {"y": jax.pure_callback(refuse, jax.ShapeDtypeStruct((3, 4), jnp.float32), v["x"])}, name="asks"
    )
    with pytest.raises(ExecutionError, match="asks failed"):
        counting().realize(program, "y")


# --- how it looks -------------------------------------------------------------------------------------------------


def test_a_context_shows_its_values_in_a_line_and_in_a_table():
    context, other = counting(), InferenceContext()
    context["<kv>"] = [np.zeros((2, 3), np.int32)] * 2 + [np.zeros(n, np.float32) for n in range(5)]
    context.share("x", other)
    assert repr(context) == "InferenceContext(cpu:0: 3 values, 184 B)"
    assert repr(other) == "InferenceContext(cpu:0: 1 value, 48 B)"
    html = context._repr_html_()
    assert "&lt;kv&gt;" in html and "<kv>" not in html and "2 × int32[2, 3]" in html and "2 other shapes" in html
    assert html.count("shared") == 1 and "float32[3, 4]" in html and "48 B" in html


@pytest.mark.parametrize("offset", [0, 4, 16, 60])
def test_what_comes_from_numpy_is_the_contexts_own_at_any_alignment(offset):
    """JAX borrows memory that is aligned to 64 bytes: writes to it would show, and donating it would copy."""
    memory = np.zeros(4_096 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    given = memory[start : start + 4_096].view(np.float32)
    context = InferenceContext(jax.devices()[0])
    context["x"] = given
    address = context["x"].unsafe_buffer_pointer()
    given[:] = 7
    assert not bool(jax.numpy.any(context["x"]))  # a view of numpy would keep it from being donated
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(context["x"])
    assert doubled.unsafe_buffer_pointer() == address
