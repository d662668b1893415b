"""What every test shares: JAX at its strictest, the demo model, the golden values."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, settings

from jaxrt import compile_cache
from jaxrt.artifacts.hub import resolve

# A silent promotion is a wrong dtype or a wrong shape. Eight virtual devices are not set here: they cost large matmuls
# a fifth of their speed on two cores and change the compile cache's keys, so tests of meshes run in their own process.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# As for any user, a program is compiled once on this machine: across test modules, processes and runs.
compile_cache.enable()

# An example may compile, and machines are shared: how long one takes says nothing.
settings.register_profile("jaxrt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("jaxrt")

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's file, fetched once for ever."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def golden() -> dict[str, dict[str, Any]]:
    """The demo model's reference values by prompt name: transformers in float32 on the same file, cross-checked with
    llama.cpp. Each has `tokens`, `greedy` (32 of them), `greedy_margin_min`, `nll` per token, `next_top5`."""
    return {case["name"]: case for case in json.loads((GOLDEN / "smollm2-135m.json").read_text())}
