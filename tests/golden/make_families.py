#!/usr/bin/env python3
"""What transformers computes, in float32, with a tiny random model of every family: tests/golden/families/NAME.json.

    tests/golden/make_families.py [NAME ...]        # with an interpreter that has torch and transformers

Weights are drawn by `draw` from a seed, tensor by tensor in the order of their names, so that a test can draw the same
ones without torch: the file holds the config, the tensors' shapes, tokens, and the logits of the last positions.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).parent / "families"
COMMON = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 8}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "tie_word_embeddings": False}),
    "smollm3-tied": ("SmolLM3Config", {"no_rope_layers": [0, 1, 0], "pretraining_tp": 1}),
    "qwen2": ("Qwen2Config", {"rope_theta": 1e6}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "rope_theta": 1e6}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
}
PROMPT, ANSWER = 40, 24


def draw(shapes: dict[str, list[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors: matrices with a spread of 0.3, vectors about 1 (norms) or 0 (biases)."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name in sorted(shapes):
        noise = rng.standard_normal(shapes[name], dtype=np.float32)
        vector = len(shapes[name]) == 1
        drawn[name] = noise * np.float32(0.3) + np.float32(vector and not name.endswith("bias"))
    return drawn


def golden(name: str) -> dict[str, Any]:
    import torch
    import transformers

    kind, changes = VARIANTS[name]
    config = getattr(transformers, kind)(**COMMON | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    shapes = {key: list(value.shape) for key, value in state.items()}
    model.load_state_dict({key: torch.from_numpy(value) for key, value in draw(shapes).items()}, strict=False)
    model.tie_weights()
    tokens = np.random.default_rng(1).integers(3, config.vocab_size, PROMPT).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].numpy()
        answer = model.generate(
            torch.tensor([tokens]), max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, eos_token_id=None
        )
    saved = config.to_dict() | {"architectures": [type(model).__name__]}
    return {
        "transformers": transformers.__version__,
        "config": saved,
        "shapes": shapes,
        "tokens": tokens,
        "logits": [[float(f"{x:.6g}") for x in row] for row in logits[-4:]],  # of the last four positions
        "answer": answer[0, PROMPT:].tolist(),
    }


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or VARIANTS:
        (OUT / f"{name}.json").write_text(json.dumps(golden(name), indent=None) + "\n")
        print(name, file=sys.stderr)


if __name__ == "__main__":
    main()
