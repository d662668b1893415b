"""Plan-once: what is planned, captured, explained and read by symbols; and when a plan no longer fits.

Named after the rows of the documented interface. Expected values come from numpy.
"""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrt.context import InferenceContext
from jaxrt.errors import (
    CompileForbidden,
    ContextError,
    ReboundSymbol,
    RequestError,
    TopologyChanged,
    UnboundSymbol,
)
from jaxrt.program import Program, compiles, forbid_compile, plan
from jaxrt.symbols import SymEnv

RNG = np.random.default_rng(0)  # whole numbers, so that float32 is exact
X = RNG.integers(1, 9, (3, 4)).astype(np.float32)
W = RNG.integers(-9, 9, (4, 2)).astype(np.float32)


def count_step(values, env):  # noqa: ANN001, ANN201
    """A program with state: the sum of all it was told, and how far that is from x."""
    total = values["total"] + values["x"] * env["times"].astype(jnp.float32)
    return {"total_next": total, "distance": jnp.abs(total - values["x"]).sum(), "twice": 2 * total}


STEP = Program(count_step, name="count", updates={"total": "total_next"})


def counting() -> InferenceContext:
    context = InferenceContext()
    context["x"], context["total"] = X, np.zeros_like(X)
    return context


def compiled() -> int:
    return compiles().misses + compiles().hits


def test_prebuild_optimized_as_with_env():
    context = counting()
    built = context.prebuild(STEP, "distance", env={"times": 4})
    np.testing.assert_array_equal(built.result, np.abs(4 * X - X).sum())
    np.testing.assert_array_equal(context["total"], 4 * X)
    assert built.plan.symbols == ("times",) and built.plan.donated == ("total",)
    with pytest.raises(UnboundSymbol):
        context.prebuild(STEP, "distance")


def test_prebuild_optimized_capturing_as_with_env():
    program = Program(lambda v, e: {"y": v["x"] @ v["w"]}, name="matmul", constants={"w": W})
    context = InferenceContext()
    context["x"] = X
    loose, captured = context.prebuild(program, "y"), context.prebuild(program, "y", capture=True)
    assert list(loose.cache) == ["x"] and sorted(captured.cache) == ["w", "x"]
    np.testing.assert_array_equal(captured.cache["w"], W)
    assert context.uploads == 2
    for built, uploads in ((captured, 2), (captured, 2), (loose, 3), (loose, 4)):
        np.testing.assert_array_equal(context.realize_prebuilt(built.plan), X @ W)
        assert context.uploads == uploads
    context["w"] = 3 * W  # the context wins over what was captured
    np.testing.assert_array_equal(context.realize_prebuilt(captured.plan), X @ (3 * W))


def test_realize_prebuilt_as_with_env_plans_and_uploads_nothing():
    traced = []
    program = Program(
        lambda v, e: traced.append(1) or count_step(v, e), name="count", updates=STEP.updates, constants={"x": X}
    )
    context = InferenceContext()
    context["total"] = np.zeros_like(X)
    built = context.prebuild(program, "distance", env={"times": 1}, capture=True)
    traces, compiles_before, uploads, address = len(traced), compiled(), context.uploads, None
    with forbid_compile():
        for times in range(2, 100):
            found = context.realize_prebuilt(built.plan, env=SymEnv({"times": times, "unread": 0}))
            address = address or context["total"].unsafe_buffer_pointer()
            assert context["total"].unsafe_buffer_pointer() == address  # donated: updated where it stands
    assert (len(traced), compiled(), context.uploads) == (traces, compiles_before, uploads)
    total = sum(times * X for times in range(1, 100))
    np.testing.assert_array_equal(found, np.abs(total - X).sum())
    np.testing.assert_array_equal(context["total"], total)
    with pytest.raises(UnboundSymbol, match="'times'"):
        context.realize_prebuilt(built.plan)
    with pytest.raises(RequestError, match="'times'"):
        context.realize_prebuilt(built.plan, env={"times": 0.5})
    with pytest.raises(CompileForbidden, match="prebuild"), forbid_compile():
        context.realize(program, "distance", env={"times": 1})


def test_an_updated_constant_is_uploaded_where_a_context_has_none_and_never_captured():
    program = Program(count_step, name="count", updates=STEP.updates, constants={"total": np.zeros_like(X), "x": X})
    context = InferenceContext()
    plan_of = context.prebuild(program, "twice", env={"times": 1}, capture=True).plan
    assert plan_of.captured == ("x",) and context.uploads == 2
    np.testing.assert_array_equal(context.realize_prebuilt(plan_of, env={"times": 2}), 6 * X)
    other = InferenceContext()
    np.testing.assert_array_equal(other.realize_prebuilt(plan_of, env={"times": 5}), 10 * X)
    assert (context.uploads, other.uploads) == (2, 1)


def test_optimized_graph_bakes_no_values_and_no_env():
    """A plan holds shapes, not buffers: another context, values and symbols run through it."""
    first, second = counting(), counting()
    built = first.prebuild(STEP, "twice", env={"times": 1})
    second["x"] = 5 * X
    np.testing.assert_array_equal(second.realize_prebuilt(built.plan, env={"times": 3}), 2 * (5 * X * 3))
    np.testing.assert_array_equal(first["total"], X)
    assert built.plan.constants == {} and built.plan.result == "twice"
    with pytest.raises(ContextError, match="no value 'total' in this context"):
        InferenceContext().realize_prebuilt(built.plan, env={"times": 3})
    many = plan(STEP, {"x": first["x"], "total": first["total"]}, ["twice", "distance"], ["times"])
    with pytest.raises(ContextError, match="one target"):
        first.realize_prebuilt(many, env={"times": 1})
    with pytest.raises(RequestError, match="type Prebuilt.*`plan`"):
        first.realize_prebuilt(built, env={"times": 1})


def test_storage_cache_is_what_was_read_and_not_donated():
    context = counting()
    built = context.prebuild(STEP, "twice", env={"times": 1})
    assert list(built.cache) == ["x"]
    assert built.cache["x"].unsafe_buffer_pointer() == context["x"].unsafe_buffer_pointer()
    context.realize_prebuilt(built.plan, env={"times": 1})
    np.testing.assert_array_equal(built.cache["x"], X)  # still there


def test_topology_changed_for_other_shapes_dtypes_and_structures_loses_nothing():
    context = counting()
    built = context.prebuild(STEP, "twice", env={"times": 1})
    total = context["total"]
    for other in (np.ones((3, 5), np.float32), X.astype(np.int32), {"inside": X}, (X, X)):
        context["x"] = other
        with pytest.raises(TopologyChanged, match="count was planned"):
            context.realize_prebuilt(built.plan, env={"times": 1})
        assert context["total"] is total and not total.is_deleted()
    context["x"] = X
    np.testing.assert_array_equal(context.realize_prebuilt(built.plan, env={"times": 1}), 4 * X)


def in_another_process(code: str) -> None:
    """Run with eight virtual devices."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=flags)
    assert done.returncode == 0, done.stderr


def test_topology_changed_for_other_devices_and_meshes_loses_nothing():
    in_another_process("""
        import warnings; warnings.simplefilter("error")
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from jaxrt.context import InferenceContext
        from jaxrt.errors import ContextError, TopologyChanged
        from jaxrt.program import Program
        devices, x = jax.devices(), np.arange(16, dtype=np.float32)
        step = Program(lambda v, e: {"n": jnp.cumsum(v["x"]) * v["k"], "sum": v["x"].sum()}, name="step",
                       constants={"k": np.float32(2)}, updates={"x": "n"})
        split = lambda count: NamedSharding(Mesh(np.array(devices[:count]), ("d",)), P("d"))
        places = [devices[0], devices[1], split(4), split(8)]
        contexts = [InferenceContext(place) for place in places]
        for context in contexts:
            context["x"] = x
        plans = [context.prebuild(step, "sum", capture=True).plan for context in contexts]
        for context, own in zip(contexts, plans):
            expected = np.cumsum(x) * 2  # of the prebuild; integers, exact
            for other in plans:
                if other is not own:
                    try:
                        context.realize_prebuilt(other)
                        raise SystemExit(f"{own} ran {other}")
                    except TopologyChanged:
                        pass
            for _ in range(3):
                np.testing.assert_array_equal(context["x"], expected)
                assert context.realize_prebuilt(own) == expected.sum()
                expected = np.cumsum(expected) * 2
        """)


def test_a_program_runs_where_its_context_is():
    in_another_process("""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from jaxrt.context import InferenceContext
        from jaxrt.errors import ContextError
        from jaxrt.program import Program
        devices = jax.devices()
        context = InferenceContext(devices[3])
        nothing = Program(lambda v, e: {"y": jnp.arange(3)}, name="nothing")
        constant = Program(lambda v, e: {"y": v["c"]}, name="constant", constants={"c": np.ones(3, np.float32)})
        for program in (nothing, constant):
            assert context.realize_split(program, ["y"], 0).device[0].devices() == {devices[3]}
        context["x"] = np.ones(3, np.float32)
        try:
            context.share("x", InferenceContext(devices[4]))
            raise SystemExit("shared across devices")
        except ContextError as error:
            assert "cpu:4" in str(error) and "cpu:3" in str(error)
        mesh = InferenceContext(NamedSharding(Mesh(np.array(devices), ("d",)), P("d")))
        mesh["x"] = np.arange(16, dtype=np.float32)
        step = Program(lambda v, e: {"n": v["x"][::-1] + v["c"].sum(), "y": v["x"]}, name="step",
                       constants={"c": np.ones(3, np.float32)}, updates={"x": "n"})
        made = mesh.prebuild(step, "y").plan
        for _ in range(3):
            mesh.realize_prebuilt(made)
            assert mesh["x"].sharding == mesh.device
        np.testing.assert_array_equal(mesh["x"], np.arange(16, dtype=np.float32) + 12)
        # XLA would keep this one whole on every device, and could not use the donated parts.
        whole = Program(lambda v, e: {"n": jnp.ones(16) * v["c"].sum(), "y": v["x"]}, name="whole",
                        constants={"c": np.ones(3, np.float32)}, updates={"x": "n"})
        mesh.realize(whole, "y")
        assert mesh["x"].sharding == mesh.device and (np.array(mesh["x"]) == 3).all()
        try:
            mesh["odd"] = np.zeros(3, np.float32)
            raise SystemExit("placed")
        except ContextError as error:
            assert "8 devices" in str(error)
        """)


# --- symbols ------------------------------------------------------------------------------------------------------


def test_sym_env_is_written_once():
    env = SymEnv({"cached_len": 5})
    env.bind("cached_len", 5)
    env.bind("seq", np.int64(1))
    with pytest.raises(ReboundSymbol, match="'cached_len' bound to 6 where it is 5"):
        env.bind("cached_len", 6)
    assert env["cached_len"] == 5 and env.get("seq") == 1 and type(env["seq"]) is int
    assert env.is_bound("seq") and not env.is_bound("k_len") and env.get("k_len") is None
    assert len(env) == 2 and dict(env) == {"cached_len": 5, "seq": 1} and not env.is_empty()
    assert repr(env) == "SymEnv({'cached_len': 5, 'seq': 1})"
    with pytest.raises(UnboundSymbol, match="'cache_len'.*did you mean 'cached_len'"):
        env["cache_len"]
    env.clear()
    assert env.is_empty() and len(env) == 0
    env.bind("cached_len", 6)
    assert env["cached_len"] == 6
    assert issubclass(UnboundSymbol, ContextError) and issubclass(ReboundSymbol, ContextError)


@pytest.mark.parametrize("value", [True, 1.0, np.float32(1), 2**31, -(2**31) - 1, "1", None, 10**30])
def test_sym_env_takes_whole_numbers_of_32_bits(value):  # noqa: ANN001
    env = SymEnv()
    with pytest.raises(RequestError, match="'n'"):
        env.bind("n", value)
    assert env.is_empty()
    for bad in ("", 5):
        with pytest.raises(RequestError, match="named"):
            env.bind(bad, 1)


def test_dyn_scalar_is_a_symbol_or_a_number_of_the_program():
    """A symbol is read from each pass's env by one plan; a number of Python's is baked into its own."""

    def window(offset):  # noqa: ANN001, ANN202
        def fn(values, env):  # noqa: ANN001, ANN202
            start = env["offset"] if offset is None else offset
            return {"y": jax.lax.dynamic_slice_in_dim(values["x"], start, 1, axis=0)}

        return Program(fn, name="window")

    context = counting()
    built = context.prebuild(window(None), "y", env={"offset": 0})
    with forbid_compile():
        for row in range(3):
            np.testing.assert_array_equal(context.realize_prebuilt(built.plan, env={"offset": row}), X[row : row + 1])
    concrete = context.prebuild(window(2), "y")
    assert concrete.plan.symbols == ()
    np.testing.assert_array_equal(context.realize_prebuilt(concrete.plan, env={"offset": 0}), X[2:])


# --- what a plan says of itself -----------------------------------------------------------------------------------


def test_explain_says_what_a_plan_takes_makes_and_costs():
    program = Program(
        lambda v, e: {
            "state_next": jax.tree.map(lambda leaf: leaf + 1, v["state"]),
            "y": v["x"] @ v["w"] * e["k"].astype(jnp.float32),
        },
        name="<matmul>",
        constants={"w": W},
        updates={"state": "state_next"},
    )
    context = InferenceContext()
    context["x"], context["state"] = X, {"a": np.zeros(5, np.float32), "b": np.zeros((2, 2), np.float32)}
    made = context.prebuild(program, "y", env={"k": 2}, capture=True).plan
    facts = made.explain().as_json()
    assert facts == json.loads(json.dumps(facts)) and facts["program"] == "<matmul>"
    assert {row["name"]: (row["leaves"], row["bytes"], row["donated"]) for row in facts["inputs"]} == {
        "x": (1, 48, False),
        "w": (1, 32, False),
        "state": (2, 36, True),
    }
    assert facts["targets"] == [
        {"name": "state_next", "bytes": 36, "replaces": "state"},
        {"name": "y", "bytes": 24, "replaces": None},
    ]
    assert facts["symbols"] == ["k"] and facts["constants"] == [{"name": "w", "bytes": 32, "captured": True}]
    assert facts["memory"]["argument"] == 48 + 32 + 36 + 4 and facts["memory"]["aliased"] == 36
    assert facts["memory"]["output"] >= 60 and facts["memory"]["temporary"] >= 0
    assert facts["flops"] >= 2 * 3 * 4 * 2 and facts["bytes_accessed"] >= 48 + 32 + 24
    assert facts["compile_s"] == made.seconds > 0 and facts["from_cache"] is made.from_cache
    text = str(made.explain())
    assert text.startswith("plan of <matmul>\n") and "2 arrays, donated" in text and "in place of state" in text
    columns = {line.index("48 B") + 4 for line in text.splitlines() if "48 B" in line}
    assert columns == {line.index("36 B") + 4 for line in text.splitlines() if "36 B" in line}  # aligned on the right
    html = made._repr_html_()
    assert html == made.explain()._repr_html_() and "&lt;matmul&gt;" in html and "<matmul>" not in html
    loose = context.prebuild(program, "y", env={"k": 2}).plan.explain()
    assert not loose.constants[0]["captured"] and "uploaded where the context has none" in str(loose)


def test_explain_says_where_xla_says_nothing():
    context = counting()
    made = context.prebuild(STEP, "twice", env={"times": 1}).plan

    class Silent:
        def memory_analysis(self) -> None:
            return None

        def cost_analysis(self) -> dict[str, float]:
            return {"flops": -1.0}

    facts = replace(made, executable=Silent()).explain()
    assert facts.flops is None and facts.bytes_accessed is None and set(facts.memory.values()) == {None}
    assert str(facts).count("not said") == 6


# --- a whole program ----------------------------------------------------------------------------------------------


def test_a_kalman_filter_keeps_its_state_on_the_device():
    """A program of the user's own: position and speed from noisy positions, against numpy in float64."""
    transition, observe = np.array([[1, 1], [0, 1]]), np.array([[1, 0]])
    drift, noise = 0.01 * np.eye(2), np.array([[0.5]])

    def fn(values, env):  # noqa: ANN001, ANN202
        mean, covariance = values["state"]["mean"], values["state"]["covariance"]
        a, c = values["transition"], values["observe"]
        mean, covariance = a @ mean, a @ covariance @ a.T + values["drift"]
        gain = covariance @ c.T @ jnp.linalg.inv(c @ covariance @ c.T + values["noise"])
        mean = mean + gain @ (values["measured"][env["step"]] - c @ mean)
        covariance = (jnp.eye(2) - gain @ c) @ covariance
        return {"next": {"mean": mean, "covariance": covariance}, "speed": mean[1], "gain": gain}

    constants = {"transition": transition, "observe": observe, "drift": drift, "noise": noise}
    constants = {name: value.astype(np.float32) for name, value in constants.items()}
    program = Program(fn, name="kalman", constants=constants, updates={"state": "next"})
    measured = np.arange(30) * 0.7 + np.random.default_rng(1).normal(0, 0.7, 30)
    context = InferenceContext()
    context["measured"] = measured.astype(np.float32)
    context["state"] = {"mean": np.zeros(2, np.float32), "covariance": np.eye(2, dtype=np.float32)}
    built = context.prebuild(program, "speed", env={"step": 0}, capture=True)
    with forbid_compile():
        speeds = [built.result, *(context.realize_prebuilt(built.plan, env={"step": n}) for n in range(1, 30))]

    mean, covariance, expected = np.zeros(2), np.eye(2), []
    for z in measured:
        mean, covariance = transition @ mean, transition @ covariance @ transition.T + drift
        gain = covariance @ observe.T @ np.linalg.inv(observe @ covariance @ observe.T + noise)
        mean = mean + gain @ (z - observe @ mean)
        covariance = (np.eye(2) - gain @ observe) @ covariance
        expected.append(mean[1])
    np.testing.assert_allclose(speeds, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(context["state"]["covariance"], covariance, rtol=1e-4, atol=1e-6)
    assert context.uploads == 4
