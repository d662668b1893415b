"""A decoder in float64 numpy, written from the papers and not from ours: what the model's own passes are held
against."""

import numpy as np

from jaxrt import weights
from jaxrt.config import ModelConfig


def linear(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x @ np.asarray(weight, np.float64).T


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def turn(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions over halves, as complex numbers: (x[i] + j x[i + H/2]) exp(j p theta^(-2i/H)). x [T, N, H]."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def logits(config: ModelConfig, tree: weights.Weights, tokens: list[int]) -> np.ndarray:
    """float64 [T, V] of a whole sequence in one pass, without a cache."""
    n, k, h = config.heads, config.kv_heads, config.head_width
    x = np.asarray(tree.embedding, np.float64)[tokens]
    for spec, layer in zip(config.layers, tree.layers, strict=True):
        normed = rms_norm(x, layer.attention_norm, config.norm_eps)
        heads = linear(layer.qkv, normed).reshape(len(tokens), n + 2 * k, h)
        q, key = turn(heads[:, :n], spec.rope.theta), turn(heads[:, n : n + k], spec.rope.theta)
        mixed = np.zeros((len(tokens), n, h))
        for head in range(n):
            group = head // (n // k)
            for t in range(len(tokens)):
                scores = key[: t + 1, group] @ q[t, head] / np.sqrt(h)
                probabilities = np.exp(scores - scores.max())
                mixed[t, head] = probabilities / probabilities.sum() @ heads[: t + 1, n + k + group]
        x = x + linear(layer.output, mixed.reshape(len(tokens), n * h))
        gate, up = np.split(linear(layer.gate_up, rms_norm(x, layer.mlp_norm, config.norm_eps)), 2, axis=-1)
        x = x + linear(layer.down, gate / (1 + np.exp(-gate)) * up)
    x = rms_norm(x, tree.final_norm, config.norm_eps)
    return linear(tree.embedding if tree.head is None else tree.head, x)
