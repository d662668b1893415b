"""Configs are read closed: what is computed is read or checked, and everything else is refused by name and value."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrt.artifacts.checkpoint import Checkpoint, TensorHeader
from jaxrt.config import ModelConfig, RopeSpec
from jaxrt.errors import ArtifactError, JaxrtError, UnsupportedModel
from jaxrt.models.reading import read_config, spare_tensors, tensor_rules
from tests.files import tiny_config_json, tiny_gguf_metadata

# What transformers 5.24 writes for a tiny LlamaConfig with Llama 3.1's rope.
WRITTEN_BY_TRANSFORMERS_5 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": 64,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def from_json(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return read_config(Checkpoint(Path("model"), "safetensors", config, {}, no_data, generation or {}))


def from_gguf(metadata: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> ModelConfig:
    """A file of these tensors besides an embedding of 258 x 32."""
    arrays = {"token_embd.weight": np.zeros((258, 32), np.float32)} | (tensors or {})
    headers = {
        name: TensorHeader(name, array.shape, "F32", array.nbytes, Path("model.gguf")) for name, array in arrays.items()
    }
    return read_config(Checkpoint(Path("model.gguf"), "gguf", metadata, headers, arrays.__getitem__))


def no_data(name: str) -> np.ndarray:
    raise AssertionError(f"{name} was read")


def test_every_field_of_config_json_arrives() -> None:
    config = from_json(tiny_config_json(rope_theta=5e5, norm_eps=1e-6, tied=True))
    assert (config.family, config.vocab, config.width, config.mlp_width) == ("llama", 258, 32, 48)
    assert (config.heads, config.kv_heads, config.head_width, len(config.layers)) == (4, 2, 8, 2)
    assert (config.context, config.norm_eps, config.tied_head) == (256, 1e-6, True)
    assert (config.bos_token, config.eos_tokens, config.layers[0].rope) == (256, (257,), RopeSpec(5e5))


def test_gguf_metadata_gives_the_same_config_as_config_json() -> None:
    metadata = tiny_gguf_metadata(norm_eps=2.0**-17)
    assert from_gguf(metadata) == from_json(tiny_config_json(norm_eps=2.0**-17, tied=True))
    untied = from_gguf(metadata, {"output.weight": np.zeros((258, 32), np.float32)})
    assert untied == from_json(tiny_config_json(norm_eps=2.0**-17, tied=False))


def test_a_config_as_transformers_5_writes_it_is_read() -> None:
    config = from_json(WRITTEN_BY_TRANSFORMERS_5)
    assert config.layers == (config.layers[0],) * 2
    assert config.layers[0].rope == RopeSpec(500_000.0, "llama3", 8.0, 1.0, 4.0, 8_192)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 10000}, RopeSpec(10_000.0)),
        ({"rope_theta": None, "rope_scaling": None}, RopeSpec(10_000.0)),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "default"}}, RopeSpec(1e6)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(1e4, "linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, RopeSpec(5e5, "llama3", 8.0)),
        ({"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, RopeSpec(5e5, "llama3", 8.0)),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, RopeSpec(3e4)),
    ],
)
def test_every_spelling_of_rope_is_understood(keys: dict[str, Any], expected: RopeSpec) -> None:
    assert from_json(tiny_config_json() | keys).layers[1].rope == expected


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = {'quant_method': 'awq'}"),
        ({"num_local_experts": 8}, "num_local_experts = 8 (unknown key)"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map = {'AutoModel': 'code.Model'}"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type = yarn"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 4.0}}, "linear and llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "beta": 3}}, "rope_scaling.beta = 3"),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": LLAMA3}, "rope_parameters and rope_scaling differ"),
    ],
)
def test_what_jaxrt_does_not_compute_is_refused_by_key_and_value(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        from_json(tiny_config_json() | keys)
    assert named in str(caught.value)


def test_all_refused_keys_are_named_at_once() -> None:
    with pytest.raises(UnsupportedModel, match=r"hidden_act = 'relu'.*mup_scale = 3\.0.*pretraining_tp = 4"):
        from_json(tiny_config_json() | {"hidden_act": "relu", "mup_scale": 3.0, "pretraining_tp": 4})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", 2.0),
        ("num_hidden_layers", True),
        ("vocab_size", 2**40),
        ("vocab_size", None),
        ("hidden_size", -32),
        ("head_dim", 0),
        ("num_attention_heads", [4]),
        ("rope_theta", 0),
        ("rope_theta", math.nan),
        ("rope_theta", math.inf),
        ("rope_theta", "1e4"),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", math.nan),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", LLAMA3 | {"high_freq_factor": 1.0}),
        ("rope_scaling", {"type": "llama3", "factor": 8.0}),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", 258),
        ("eos_token_id", [257, -1]),
        ("bos_token_id", "<s>"),
        ("architectures", "LlamaForCausalLM"),
    ],
)
def test_absurd_values_of_config_json_are_named(key: str, value: Any) -> None:
    with pytest.raises(ArtifactError) as caught:
        from_json(tiny_config_json() | {key: value})
    assert caught.value.field.startswith(key)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_config_without_a_size_is_no_config(key: str) -> None:
    config = tiny_config_json()
    del config[key]
    with pytest.raises(ArtifactError, match=f"{key}: missing"):
        from_json(config)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="4 query heads and 3 KV heads"):
        from_json(tiny_config_json(kv_heads=3))
    with pytest.raises(ArtifactError, match="width 32 is not a multiple of 5 heads"):
        from_json(tiny_config_json(heads=5) | {"head_dim": None})


def test_an_unknown_architecture_names_the_known_and_the_nearest() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        from_json(tiny_config_json() | {"architectures": ["LlamaForCausalLMs"], "model_type": "llamas"})
    assert "LlamaForCausalLMs" in caught.value.found
    assert {"LlamaForCausalLM", "llama"} <= set(caught.value.expected.replace(",", "").split())
    assert "did you mean 'LlamaForCausalLM'" in caught.value.fix
    with pytest.raises(UnsupportedModel, match="general.architecture gpt2; expected one of llama"):
        from_gguf({"general.architecture": "gpt2"})


@pytest.mark.parametrize("model_type", ["mistral", "llama4", None])
def test_an_architecture_must_agree_with_its_model_type(model_type: str | None) -> None:
    config = tiny_config_json() | {"model_type": model_type}
    if model_type is None:
        assert from_json(config).family == "llama"
    else:
        with pytest.raises(UnsupportedModel, match=model_type):
            from_json(config)


def test_no_architecture_at_all_is_an_error() -> None:
    with pytest.raises(ArtifactError, match="architectures and model_type"):
        from_json(tiny_config_json() | {"architectures": None, "model_type": None})


def test_generation_config_decides_on_the_end_of_sequence() -> None:
    assert from_json(tiny_config_json(), {"eos_token_id": [7, 9, 7]}).eos_tokens == (7, 9)
    assert from_json(tiny_config_json(), {"eos_token_id": 7}).eos_tokens == (7,)
    assert from_json(tiny_config_json() | {"eos_token_id": [3, 4]}, {"eos_token_id": None}).eos_tokens == (3, 4)


def test_gguf_ends_at_end_of_sequence_of_turn_and_of_message() -> None:
    more = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 257}
    assert from_gguf(tiny_gguf_metadata() | more).eos_tokens == (257, 5)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window = 4096"),
        ({"llama.attention.something_new": 1.5}, "llama.attention.something_new = 1.5 (unknown key)"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type = yarn"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count = 4"),
        ({"llama.attention.value_length": 16}, "attention.value_length = 16"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, "llama.rope.scaling.factor = 2.0"),
    ],
)
def test_gguf_keys_that_jaxrt_does_not_compute_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        from_gguf(tiny_gguf_metadata() | keys)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 10**9),
        ("llama.attention.key_length", 0),
        ("llama.rope.freq_base", math.nan),
        ("llama.attention.layer_norm_rms_epsilon", 0.0),
        ("llama.feed_forward_length", [48, 48]),
        ("llama.context_length", None),
        ("tokenizer.ggml.eos_token_id", 10**6),
    ],
)
def test_absurd_values_of_gguf_are_named(key: str, value: Any) -> None:
    with pytest.raises(ArtifactError) as caught:
        from_gguf(tiny_gguf_metadata() | {key: value})
    assert caught.value.field == key


def test_gguf_knows_linear_scaling_with_and_without_its_type() -> None:
    scaled = {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 64}
    for kind in ({}, {"llama.rope.scaling.type": "linear"}):
        config = from_gguf(tiny_gguf_metadata() | scaled | kind)
        assert config.layers[0].rope == RopeSpec(10_000.0, "linear", 4.0)


def divisors(theta: float, head_width: int, factor: float) -> np.ndarray:
    """The tensor that llama.cpp's converter writes for Llama 3: the rule of the report, one frequency at a time."""
    found = []
    for pair in range(head_width // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_width)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_divisors_of_llama_3_are_recognised(factor: float) -> None:
    metadata = tiny_gguf_metadata(rope_theta=500_000.0, head_width=64)
    tensor = divisors(500_000.0, 64, factor)
    assert np.sum((tensor > 1) & (tensor < factor)) > 1, "a case without blended frequencies proves little"
    config = from_gguf(metadata, {"rope_freqs.weight": tensor})
    assert config.layers[1].rope == RopeSpec(500_000.0, "llama3", factor, 1.0, 4.0, 8_192)


@pytest.mark.parametrize("spoil", ["one value", "other theta", "shape", "nan", "zero"])
def test_other_rope_divisors_are_refused(spoil: str) -> None:
    tensor = divisors(10_000.0 if spoil == "other theta" else 500_000.0, 64, 8.0)
    if spoil == "shape":
        tensor = tensor[:16]
    elif spoil != "other theta":
        tensor[20] = {"one value": 3.0, "nan": math.nan, "zero": 0.0}[spoil]
    with pytest.raises(UnsupportedModel, match="rope_freqs.weight"):
        from_gguf(tiny_gguf_metadata(rope_theta=500_000.0, head_width=64), {"rope_freqs.weight": tensor})


def test_rules_name_every_tensor_with_the_shape_it_must_have() -> None:
    checkpoint = Checkpoint(Path("model"), "safetensors", tiny_config_json(), {}, no_data)
    rules = tensor_rules(checkpoint, read_config(checkpoint))
    assert len(rules) == 2 * 6 + 3
    shapes = {source.name: source.shape for rule in rules.values() for source in rule.sources}
    assert len(shapes) == 2 * 9 + 3
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (32, 48)
    mlp = "model.layers.1.mlp"
    assert [source.name for source in rules["layers.1.gate_up"].sources] == [
        f"{mlp}.gate_proj.weight",
        f"{mlp}.up_proj.weight",
    ]


def test_only_known_tensors_may_be_there_in_vain() -> None:
    checkpoint = Checkpoint(Path("model"), "safetensors", tiny_config_json(tied=True), {}, no_data)
    spare = spare_tensors(checkpoint, read_config(checkpoint))
    assert spare["lm_head.weight"] == "model.embed_tokens.weight"
    assert spare["model.layers.1.self_attn.rotary_emb.inv_freq"] is None
    untied = Checkpoint(Path("model"), "safetensors", tiny_config_json(), {}, no_data)
    assert "lm_head.weight" not in spare_tensors(untied, read_config(untied))


def test_refusals_are_jaxrt_errors_that_name_the_file() -> None:
    with pytest.raises(JaxrtError, match="config.json"):
        from_json(tiny_config_json() | {"hidden_act": "gelu"})
    with pytest.raises(JaxrtError, match="model.gguf"):
        from_gguf(tiny_gguf_metadata() | {"llama.expert_count": 8})
