"""Tiny models in memory, the same for every test that needs one."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrt import weights
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.config import LayerSpec, ModelConfig, RopeSpec
from jaxrt.sessions.model import XlaModel

CONFIG = ModelConfig(
    family="llama",
    vocab=258,
    width=32,
    mlp_width=80,
    heads=4,
    kv_heads=2,
    head_width=8,
    layers=(LayerSpec(RopeSpec(theta=10_000.0)),) * 2,
    context=2_048,
    tied_head=False,
    eos_tokens=(257,),
)


def random_weights(config: ModelConfig = CONFIG, seed: int = 0, scale: float = 0.2) -> weights.Weights:
    """Float32 weights with logits that spread over several nat, so that argmax and sampling mean something."""
    rng = np.random.default_rng(seed)

    def draw(spec: weights.ArraySpec) -> np.ndarray:
        noise = rng.standard_normal(spec.shape, dtype=np.float32)
        return 1 + noise * 0.1 if len(spec.shape) == 1 else noise * scale

    return jax.tree.map(draw, weights.abstract(config), is_leaf=weights.is_spec)


def make_model(config: ModelConfig = CONFIG, tokenizer: Tokenizer | None = None, **changes: Any) -> XlaModel:
    """A model of its own, with no plan made yet."""
    device = jax.devices()[0]
    placed = jax.device_put(random_weights(config), device)
    return XlaModel(config, placed, jnp.float32, device, tokenizer=tokenizer, **changes)


@cache
def shared_model() -> XlaModel:
    """One model for all tests that only use it: its plans are compiled once."""
    return make_model()
