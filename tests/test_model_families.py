"""Every family and its variants against transformers in float32, as `tests/golden/make_families.py` wrote it down."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxrt
from jaxrt.artifacts.convert import convert_artifact
from jaxrt.models.families import FAMILIES
from tests.files import write_gguf, write_hf
from tests.golden.make_families import draw

GOLDEN = sorted((Path(__file__).parent / "golden" / "families").glob("*.json"))
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"olmo2": {"post_attention_layernorm": "post_attention_norm"}}
ALTERNATING = {"llama": {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}}


def gguf_name(name: str, model: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{(GGUF_NAMES | OTHER_NAMES.get(model, {}))[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    name = config["model_type"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "general.architecture": name,
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": head,
        f"{name}.attention.value_length": head,
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_parameters"]["rope_theta"],
    }


def alternating(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in the order 0, H/2, 1, H/2 + 1, ..., as GGUF has them for llama."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(np.swapaxes(halves, 1, 2).reshape(rows.shape))


def written(directory: Path, golden: dict[str, Any], format: str) -> Path:
    config, tensors = golden["config"], draw(golden["shapes"])
    if format != "gguf":
        path = write_hf(directory / "model", config, tensors)
        if format == "safetensors":
            return path
        convert_artifact(path, directory / "orbax")
        return directory / "orbax"
    for part, heads in ALTERNATING.get(config["model_type"], {}).items():
        tensors |= {name: alternating(tensor, config[heads]) for name, tensor in tensors.items() if part in name}
    named = {gguf_name(name, config["model_type"]): tensor for name, tensor in tensors.items()}
    return write_gguf(directory / "model.gguf", gguf_metadata(config), named)


def test_every_family_has_its_golden_values():
    assert {json.loads(path.read_text())["config"]["model_type"] for path in GOLDEN} == set(FAMILIES)


CASES = [
    pytest.param(path, format, id=f"{path.stem}-{format}")
    for path in GOLDEN
    for format in (*FAMILIES[json.loads(path.read_text())["config"]["model_type"]], "orbax")
]


@pytest.mark.parametrize(("path", "format"), CASES)
def test_the_numbers_are_those_of_transformers(tmp_path: Path, path: Path, format: str):
    golden = json.loads(path.read_text())
    tokens, expected = golden["tokens"], np.array(golden["logits"])
    with jaxrt.load(written(tmp_path, golden, format)) as runtime:
        door = runtime.functional
        logits, *_ = door.apply(door.weights, np.array([tokens], np.int32), door.cache(1, len(tokens)))
        found = np.asarray(logits)[0, -len(expected) :]
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()

        params = jaxrt.SamplingParams(temperature=0.0, max_tokens=len(golden["answer"]), ignore_eos=True)
        answer = runtime.generate(tokens, params)
        assert list(answer.tokens) == golden["answer"]
        several = runtime.generate([tokens[:7], tokens, tokens[3:20]], params)
        assert list(several[1].tokens) == golden["answer"]
