"""Observations as data: the documented types and the rules of each, a test a row."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxrt.errors import RequestError
from jaxrt.observations import (
    InspectedOutput,
    ObservationRequest,
    ObservationSelector,
    ObservationSet,
    TensorObservation,
    known_paths,
)


def test_observation_set_is_in_path_order():
    found = ObservationSet({"b": 1, "a.b": 2.0, "a": True})
    found.insert("a.a", "text")
    assert list(found) == ["a", "a.a", "a.b", "b"] and len(found) == 4
    assert list(found.values()) == [True, "text", 2.0, 1]
    assert found.get("a.b") == 2.0 and found.get("c") is None and "b" in found
    assert not ObservationSet()


def test_observation_set_insert_refuses_an_empty_path_and_keeps_the_first_of_two():
    found = ObservationSet({"a": 1})
    with pytest.raises(RequestError, match="empty path"):
        found.insert("", 1)
    with pytest.raises(RequestError, match="'a' is already there"):
        found.insert("a", 2)
    assert dict(found) == {"a": 1}


def test_observation_set_prefixed_adds_a_dot_and_nothing_for_nothing():
    found = ObservationSet({"a": 1, "b.c": 2})
    assert dict(found.prefixed("model")) == {"model.a": 1, "model.b.c": 2}
    assert dict(found.prefixed("")) == dict(found) == {"a": 1, "b.c": 2}


def test_observation_set_extend_keeps_earlier_inserts():
    found = ObservationSet({"b": 1})
    with pytest.raises(RequestError, match="'b' is already there"):
        found.extend(ObservationSet({"a": 0, "b": 2, "c": 3}))
    assert dict(found) == {"a": 0, "b": 1}
    found.extend({"c": 3})
    assert list(found) == ["a", "b", "c"]


@pytest.mark.parametrize("value", [1.5, -3, 1 << 63, True, "text", TensorObservation(np.zeros(2))], ids=repr)
def test_observation_value_is_a_tensor_a_number_a_truth_or_a_text(value: Any):
    assert ObservationSet({"a": value})["a"] is value


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.float16, np.float32),
        (ml_dtypes.bfloat16, np.float32),
        (np.float32, np.float32),
        (np.int8, np.int64),
        (np.uint32, np.uint64),
        (np.bool_, np.bool_),
    ],
)
def test_tensor_observation_widens_to_one_type_of_each_kind(given: Any, kept: Any):
    found = TensorObservation(np.array([[0, 1], [1, 0]]).astype(given))
    assert found.data.dtype == kept and found.data.tolist() == [[0, 1], [1, 0]]


def test_tensor_observation_is_row_major_and_shaped_as_its_data():
    found = TensorObservation(np.arange(6.0).reshape(2, 3).T)
    assert found.shape == (3, 2) and found.data.flags.c_contiguous
    assert found.data.ravel().tolist() == [0, 3, 1, 4, 2, 5]
    assert TensorObservation(np.array(7.0)).shape == ()


def test_observation_selector_exact_is_the_path_alone():
    selector = ObservationSelector("model.layers.2", exact=True)
    assert selector.matches("model.layers.2")
    for path in ("model.layers.2.output", "model.layers", "model.layers.20", "model.layers.3"):
        assert not selector.matches(path), path


def test_observation_selector_prefix_is_the_path_and_all_below_it():
    selector = ObservationSelector("model.layers.2")
    for path in ("model.layers.2", "model.layers.2.output", "model.layers.2.attention.query"):
        assert selector.matches(path), path
    for path in ("model.layers.20.output", "model.layers", "model.layers.20", "xmodel.layers.2", "model"):
        assert not selector.matches(path), path


def test_observation_selector_star_is_one_layer_number():
    selector = ObservationSelector("model.layers.*.output", exact=True)
    assert selector.matches("model.layers.0.output") and selector.matches("model.layers.31.output")
    for path in (
        "model.layers.output",
        "model.layers.0.mlp.output",
        "model.layers.x.output",
        "model.layers.0.1.output",
    ):
        assert not selector.matches(path), path
    assert not ObservationSelector("model.*").matches("model.logits")


@pytest.mark.parametrize("path", ["", ".", "model..logits", "model.", ".model", None, 3], ids=repr)
def test_observation_selector_refuses_what_is_no_path(path: Any):
    with pytest.raises(RequestError, match="observation path"):
        ObservationSelector(path)


def test_observation_request_all_is_everything():
    request = ObservationRequest.all()
    assert request.selectors == () and request.matches("whatever.there.is")
    assert request.paths(known_paths(2)) == known_paths(2)


def test_observation_request_selected_is_what_any_selector_matches():
    request = ObservationRequest.selected(["model.layers.1", ObservationSelector("model.logits", exact=True)])
    assert request.selectors == (ObservationSelector("model.layers.1"), ObservationSelector("model.logits", exact=True))
    assert request.matches("model.layers.1.output") and request.matches("model.logits")
    assert not request.matches("model.layers.0.output") and not request.matches("model.logits.0")
    assert ObservationRequest.selected("model.logits").paths(known_paths(1)) == ("model.logits",)


def test_observation_request_selected_of_nothing_is_refused():
    """The documents take it as everything, and warn of it."""
    with pytest.raises(RequestError, match="all()"):
        ObservationRequest.selected([])


def test_observation_request_paths_are_in_the_order_of_the_pass_and_each_selector_must_mean_some():
    known = known_paths(12)
    request = ObservationRequest.selected(["model.logits", "model.layers.*.output", "model.embeddings"])
    wanted = ("model.embeddings", *(f"model.layers.{n}.output" for n in range(12)), "model.logits")
    assert request.paths(known) == wanted
    with pytest.raises(RequestError, match=r"model\.layers\.0\.output"):  # the nearest
        ObservationRequest.selected(["model.logits", "model.layers.0.outputs"]).paths(known)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, None])
def test_observation_request_budget_is_a_number_of_bytes(budget: Any):
    with pytest.raises(RequestError, match="budget_bytes"):
        ObservationRequest.all(budget_bytes=budget)


def test_inspected_output_is_the_output_and_what_was_seen():
    output, observations = object(), ObservationSet({"a": 1})
    found = InspectedOutput(output, observations)
    assert found.output is output and found.observations is observations


def test_paths_are_those_of_the_design():
    sites = "input attention.query attention.key attention.value attention.weights attention.heads attention.output"
    layer = [*sites.split(), "mlp.output", "output"]
    inner = [f"model.layers.{number}.{site}" for number in (0, 1) for site in layer]
    assert list(known_paths(2)) == ["model.embeddings", *inner, "model.final_norm", "model.logits"]
