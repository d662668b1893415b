"""The documents' Python runs as it stands there, and the names they give to documented interfaces are jaxrt's."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import jaxrt

DOCS = Path(__file__).parent.parent / "docs"
NAMES = (DOCS / "documented-names.md").read_text(encoding="utf-8")

# What each table of documents 000, 001 and 002 names, by the heading it goes under here.
DOCUMENTED = {
    "`InferenceContext`": (
        *("new", "device", "take_decode_session", "put_decode_session", "has_decode_session"),
        *("insert", "remove", "contains", "get", "len", "is_empty", "clear_persistent"),
        *("realize_one_as", "realize_one_as_with_env", "prebuild_optimized_as_with_env"),
        *("prebuild_optimized_capturing_as_with_env", "realize_prebuilt_as_with_env"),
        *("realize_many_as", "realize_many_as_with_env", "realize_split_as"),
    ),
    "Types around a context": (
        *("NodeId", "SymId", "SymGen", "SymEnv", "bind", "get", "is_bound", "clear", "len", "is_empty"),
        *("DynScalar", "Extent", "OptimizedGraph", "StorageCache", "SplitRealizeOutput"),
        *("Error::TopologyChanged", "KvAllocId"),
    ),
    "`DecodeSession`": (
        *("realize_token", "DecodeTokenData", "per_token_sym_env", "is_valid_for", "validity_for", "PlanValidity"),
        *("rebind_kv", "RebindRefusal", "ResidencyUnknown", "ResidencyDiffers", "MissingSlot", "UnbakedSlot"),
        *("StorageDiffers", "LockPoisoned", "graph", "optimized", "effective_target", "logits_node"),
        *("token_ids_node", "rope_cos_node", "rope_sin_node", "mask_node", "kv_nodes", "offset_node"),
        *("cached_len_sym", "attended_len_sym", "base_cache", "graph_node_count", "seq", "max_seq_len", "n_layers"),
        *("cache_dtype", "shape_key", "alloc_id", "kv_location"),
        *("forward_decode_step", "forward_with_kv_context_persistent"),
    ),
    "KV caches and their neighbours": (
        *("KvCache", "with_dims", "with_capacity", "layer", "layer_mut", "set_layer", "clear", "truncate_to"),
        *("slot_storage", "bump_version", "alloc_id", "device_location", "KvSlot", "AuthorityState"),
        *("LatentKvCache", "PagedDecodeSession", "PagedDecodePlan", "KvBlockPool", "CapturedDecodeSession"),
        *("DecodeBackbone", "drop_decode_session", "SamplingStrategy", "generate", "LogitsProcessor"),
        *("generate_streaming_with_kv_context", "generate_streaming_spec_with_kv_context"),
    ),
    "`ModelRuntime`": (
        *("prepare", "from_prepared", "load", "backend", "session", "session_mut", "parts_mut", "capabilities"),
        *("prefill", "decode", "observe_output", "inspect_prefill", "inspect_decode"),
        *("SessionAuthority", "SubmissionLease", "BoundedCompletionWait"),
    ),
    "`BackendSession`": (
        *("BackendSession", "PrefillInput", "DecodeInput", "Output", "Completion", "capabilities", "prefill"),
        *("decode", "observe_output", "InspectableBackendSession", "inspect_prefill", "inspect_decode"),
    ),
    "Types around a session": (
        *("SessionCapabilities", "validate", "SessionCapabilityError", "DeviceCapabilities", "BackendDescriptor"),
        *("DeviceDescriptor", "Completion", "Submission", "SessionSubmission", "PreparedModel", "BackendProvider"),
        *("session_capability_mismatch", "ModelLoadingBackend", "prepare_inspected_model", "ModelLoadError"),
        *("LoadOptions", "BackendError", "ObservationSet", "insert", "extend", "prefixed", "ObservationValue"),
        *("TensorObservation", "TensorObservationData", "ObservationSelector", "ObservationRequest"),
        *("InspectedOutput", "MODEL_LOGITS_OBSERVATION_PATH", "DistributedCapabilities", "CollectiveGroupId"),
        "CollectiveScope",
    ),
    "Above the session": (
        *("TextGenerationConfig", "TextGenerationBackend", "TextGeneration", "ControlledTextGeneration"),
        *("TokenFilter", "TokenFilterController", "SchedulerLimits", "SpeculativeExecutor", "resolve_round"),
        *("MtpStats", "MtpCapability", "ModelCapabilityBackend", "MultimodalPreparationBackend"),
        *("RealtimeBackend", "DistributedSession"),
    ),
}


def python_of(document: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.M | re.S))


def tables() -> dict[str, list[list[str]]]:
    """The rows of each section's table, a list of cells each."""
    found = {}
    for section in re.split(r"^## ", NAMES, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("|")]
        if lines:
            found[title] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return found


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def look_up(name: str) -> Any:
    """What `name` stands for, from `jaxrt` on; a field without a default has only its annotation.

    Raises: AttributeError where there is none.
    """
    found: Any = jaxrt
    for part in name.removeprefix("jaxrt.").split("."):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError as error:
                raise AttributeError(name) from error
        elif isinstance(found, type) and not hasattr(found, part):
            fields = {key: kind for one in found.__mro__ for key, kind in inspect.get_annotations(one).items()}
            if part not in fields:
                raise AttributeError(name)
            found = fields[part]
        else:
            found = getattr(found, part)
    return found


def kalman() -> tuple[float, float]:
    """The document's filter in float64: its last position and speed."""
    ticks = [1, 1, 3, 1, 2] * 10
    measured = 0.7 * np.cumsum(ticks) + np.random.default_rng(0).normal(0, 0.7, len(ticks))
    mean, covariance, observe = np.zeros((2, 1)), np.eye(2), np.array([[1.0, 0.0]])
    for elapsed, position in zip(ticks, measured, strict=True):
        move = np.array([[1, elapsed], [0, 1]])
        mean, covariance = move @ mean, move @ covariance @ move.T + 0.01 * np.eye(2)
        gain = covariance @ observe.T @ np.linalg.inv(observe @ covariance @ observe.T + 0.5)
        mean = mean + gain @ (position - observe @ mean)
        covariance = (np.eye(2) - gain @ observe) @ covariance
    return float(mean[0, 0]), float(mean[1, 0])


@pytest.mark.parametrize("document", [path for path in sorted(DOCS.glob("*.md")) if python_of(path)], ids=str)
def test_the_python_of_a_document_runs(document: Path, tmp_path: Path):
    command = [sys.executable, "-W", "error", "-c", python_of(document)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if document.name == "documented-names.md":
        printed = [float(number) for number in re.findall(r"-?\d+\.\d+", done.stdout)]
        np.testing.assert_allclose(printed, kalman(), atol=1e-3)


@pytest.mark.parametrize("section", DOCUMENTED)
def test_every_documented_name_has_a_row(section: str):
    rows = tables()[section]
    assert all(len(row) == 3 and all(row) for row in rows)
    listed = [name for row in rows for name in code(row[0])]
    assert sorted(listed) == sorted(DOCUMENTED[section])  # each in one row, and no others


@pytest.mark.parametrize("section", DOCUMENTED)
def test_every_name_of_ours_exists(section: str):
    missing = []
    for documented, ours, differs in tables()[section]:
        assert code(ours) or ours == "not in this version", documented
        mentioned = [name for name in code(differs) if re.fullmatch(r"[A-Z]\w+\.\w+|jaxrt\.[\w.]+", name)]
        for name in [*code(ours), *mentioned]:
            try:
                look_up(name)
            except AttributeError:
                missing.append(name)
    assert not missing


@pytest.mark.parametrize("name", ["InferenceContext.realise", "jaxrt.cash.KVCache", "Plan.targets.no", "Nothing"])
def test_a_name_that_does_not_exist_is_noticed(name: str):
    with pytest.raises(AttributeError):
        look_up(name)
