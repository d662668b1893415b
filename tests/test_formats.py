"""The same weights from every format: GGUF (Q4_1), GGUF (F32), safetensors and Orbax give the same model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxrt
from jaxrt.artifacts.convert import convert_artifact
from jaxrt.artifacts.load import open_checkpoint
from tests.files import write_gguf, write_hf

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
GREEDY = jaxrt.SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def answers(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    with jaxrt.load(path) as runtime:
        tokens = runtime.generate([504, 3575, 282, 4649, 314], GREEDY).tokens
        session = runtime.new_session()
        output = session.prefill(jaxrt.PrefillInput([504, 3575, 282, 4649, 314])).wait()
        return tokens, output.read_logits()


@pytest.fixture(scope="module")
def expected(demo_path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    return answers(demo_path)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which GGUF's llama architecture stores the rows of q and k."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


HF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{layer}{HF[parts[-1]]}.weight"


@pytest.fixture(params=["gguf", "safetensors", "sharded", "orbax"])
def converted(request: pytest.FixtureRequest, demo_path: Path, tmp_path: Path) -> Iterator[Path]:
    source = open_checkpoint(demo_path)
    if request.param == "orbax":
        convert_artifact(demo_path, tmp_path / "orbax")
        yield tmp_path / "orbax"
        return
    tensors = {name: source.read(name) for name in source.tensors}
    if request.param == "gguf":
        write_gguf(tmp_path / "f32.gguf", dict(source.metadata), tensors)
        yield tmp_path / "f32.gguf"
        return
    renamed = {}
    for name, array in tensors.items():
        heads = {"attn_q": 9, "attn_k": 3}.get(name.split(".")[-2])
        renamed[hf_name(name)] = halves(array, heads) if heads else array
        if heads:
            assert np.array_equal(interleaved(renamed[hf_name(name)], heads), array)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1_536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8_192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    write_hf(tmp_path / "hf", config, renamed, shards=3 if request.param == "sharded" else 1)
    yield tmp_path / "hf"


def test_a_format_changes_no_token_and_hardly_a_logit(converted: Path, expected: tuple[tuple[int, ...], np.ndarray]):
    tokens, logits = answers(converted)
    assert tokens == expected[0]
    assert np.abs(logits - expected[1]).max() < 1e-4 * np.abs(expected[1]).max()
