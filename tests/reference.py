"""A decoder in float64 numpy, written from the papers and not from ours: what the model's own passes are held
against. One function for each formula; whoever looks inside, or changes what stands there, gives a `Tap`."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxrt import weights
from jaxrt.config import LayerSpec, ModelConfig
from jaxrt.observations import EMBEDDINGS_PATH, FINAL_NORM_PATH, LOGITS_PATH, layer_path

# Called at every observation path with what stands there, without a row axis: [T, ...], or [N, T, S] for attention
# weights. What it gives back goes on.
Tap = Callable[[str, np.ndarray], np.ndarray]
Cache = tuple[tuple[np.ndarray, np.ndarray], ...]  # per layer: turned keys and values, [S, K, H]


def untouched(path: str, x: np.ndarray) -> np.ndarray:
    return x


def logits(config: ModelConfig, tree: weights.Weights, tokens: list[int]) -> np.ndarray:
    """float64 [T, V] of a whole sequence in one pass, without a cache."""
    return forward(config, tree, tokens)[0]


def forward(
    config: ModelConfig,
    tree: weights.Weights,
    tokens: Sequence[int],
    cache: Cache | None = None,
    tap: Tap = untouched,
) -> tuple[np.ndarray, Cache]:
    """float64 logits [T, V] of tokens that follow the S in the cache, and the cache of S + T that they leave."""
    cache = cache or empty_cache(config)
    x = tap(EMBEDDINGS_PATH, np.asarray(tree.embedding, np.float64)[list(tokens)])
    after = []
    for index, spec in enumerate(config.layers):

        def inside(site: str, value: np.ndarray, index: int = index) -> np.ndarray:
            return tap(layer_path(index, site), value)

        x, kept = layer(config, spec, tree.layers[index], x, cache[index], inside)
        after.append(kept)
    x = tap(FINAL_NORM_PATH, rms_norm(x, tree.final_norm, config.norm_eps))
    return tap(LOGITS_PATH, linear(tree.embedding if tree.head is None else tree.head, x)), tuple(after)


def empty_cache(config: ModelConfig) -> Cache:
    nothing = np.zeros((0, config.kv_heads, config.head_width))
    return ((nothing, nothing),) * len(config.layers)


def layer(
    config: ModelConfig,
    spec: LayerSpec,
    own: weights.LayerWeights,
    x: np.ndarray,
    cached: tuple[np.ndarray, np.ndarray],
    tap: Tap,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """x [T, D] after attention and MLP, each added to what it was computed from; and the layer's cache after it."""
    n, k, start = config.heads, config.kv_heads, len(cached[0])
    x = tap("input", x)
    projected = linear(own.qkv, rms_norm(x, own.attention_norm, config.norm_eps))
    heads = projected.reshape(len(x), n + 2 * k, config.head_width)
    query = turn(tap("attention.query", heads[:, :n]), spec.rope.theta, start)
    key = turn(tap("attention.key", heads[:, n : n + k]), spec.rope.theta, start)
    value = tap("attention.value", heads[:, n + k :])
    keys, values = np.concatenate([cached[0], key]), np.concatenate([cached[1], value])
    probabilities = tap("attention.weights", attention_weights(query, np.repeat(keys, n // k, axis=1)))
    mixed = tap("attention.heads", mix(probabilities, np.repeat(values, n // k, axis=1)))
    x = x + tap("attention.output", linear(own.output, mixed.reshape(len(x), -1)))
    x = x + tap("mlp.output", gated(own, rms_norm(x, own.mlp_norm, config.norm_eps)))
    return tap("output", x), (keys, values)


def linear(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x @ np.asarray(weight, np.float64).T


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def turn(x: np.ndarray, theta: float, start: int) -> np.ndarray:
    """Rotary positions over halves, as complex numbers: (x[i] + j x[i + H/2]) exp(j p theta^(-2i/H)). x [T, N, H], of
    positions from `start` on."""
    half = x.shape[-1] // 2
    angles = (start + np.arange(x.shape[0]))[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention_weights(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """softmax(q k / sqrt(H)) over the keys up to each query's own. query [T, N, H], keys [S, N, H]; [N, T, S]."""
    count, length = len(query), len(keys)
    scores = query.swapaxes(0, 1) @ keys.transpose(1, 2, 0) / np.sqrt(query.shape[-1])
    scores[:, ~np.tri(count, length, length - count, dtype=bool)] = -np.inf
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def mix(probabilities: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values [S, N, H] as [N, T, S] weighs them; [T, N, H]."""
    return (probabilities @ values.swapaxes(0, 1)).swapaxes(0, 1)


def gated(own: weights.LayerWeights, x: np.ndarray) -> np.ndarray:
    """The MLP: down(silu(gate x) * up x)."""
    gate, up = np.split(linear(own.gate_up, x), 2, axis=-1)
    return linear(own.down, gate / (1 + np.exp(-gate)) * up)
