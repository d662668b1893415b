"""The only family names: how files spell each family's config and its tensors. A family is a row."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Dialect:
    """How one file format spells one family."""

    names: frozenset[str]  # what files may call it
    fixed: Mapping[str, tuple[Any, ...]]  # keys, and the values that jaxrt implements
    ignored: frozenset[str]  # keys that do not change what is computed
    tensors: Mapping[str, tuple[str, ...]]  # leaf -> tensors, {} the layer number
    interleaved: frozenset[str] = frozenset()  # tensors whose rows alternate between rotary halves
    spare: tuple[str, ...] = ()  # tensors whose content is known from the config
    mechanisms: Mapping[str, Any] = field(default_factory=dict)  # what of ModelConfig the family has by its name
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys, where the family's own differ


ROPE_DIVISORS = "rope_freqs.weight"

# Bookkeeping of the library that wrote config.json, training settings, and sampling (see generation_config.json).
# fmt: off
_JSON_IGNORED = frozenset({
    "architectures", "model_type", "_name_or_path", "_model_name_or_path", "torch_dtype", "dtype",
    "transformers_version", "use_cache", "transformers.js_config", "is_llama_config", "unsloth_fixed",
    "unsloth_version", "_attn_implementation_autoset", "initializer_range", "attention_dropout", "pad_token_id",
    "unk_token_id", "sep_token_id", "decoder_start_token_id", "is_decoder", "output_attentions",
    "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate", "torchscript", "use_bfloat16",
    "tf_legacy_loss", "id2label", "label2id", "finetuning_task", "problem_type", "task_specific_params",
    "tokenizer_class", "prefix", "chunk_size_feed_forward", "do_sample", "temperature", "top_k", "top_p", "typical_p",
    "num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty", "early_stopping", "length_penalty",
    "max_length", "min_length", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
    "encoder_no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "remove_invalid_values",
})
# fmt: on
_JSON_FIXED = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1.0,),
}
_JSON_TENSORS = {
    "embedding": ("model.embed_tokens.weight",),
    "layers.{}.attention_norm": ("model.layers.{}.input_layernorm.weight",),
    "layers.{}.qkv": tuple(f"model.layers.{{}}.self_attn.{part}_proj.weight" for part in "qkv"),
    "layers.{}.output": ("model.layers.{}.self_attn.o_proj.weight",),
    "layers.{}.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight",),
    "layers.{}.gate_up": ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
    "layers.{}.down": ("model.layers.{}.mlp.down_proj.weight",),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}
_GGUF_TENSORS = {
    "embedding": ("token_embd.weight",),
    "layers.{}.attention_norm": ("blk.{}.attn_norm.weight",),
    "layers.{}.qkv": ("blk.{}.attn_q.weight", "blk.{}.attn_k.weight", "blk.{}.attn_v.weight"),
    "layers.{}.output": ("blk.{}.attn_output.weight",),
    "layers.{}.mlp_norm": ("blk.{}.ffn_norm.weight",),
    "layers.{}.gate_up": ("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight"),
    "layers.{}.down": ("blk.{}.ffn_down.weight",),
    "final_norm": ("output_norm.weight",),
    "head": ("output.weight",),
}
_GGUF_FIXED = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.factor": (1.0,),
    "rope.scale_linear": (1.0,),
}

_LLAMA_JSON = Dialect(
    names=frozenset({"LlamaForCausalLM", "llama"}),
    fixed=_JSON_FIXED
    | {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "rope_interleaved": (False,),
        "quantization_config": (),
        "sliding_window": (),
    },
    ignored=_JSON_IGNORED,
    tensors=_JSON_TENSORS,
    spare=("model.layers.{}.self_attn.rotary_emb.inv_freq",),
)
_LLAMA_GGUF = Dialect(
    names=frozenset({"llama"}),
    fixed=_GGUF_FIXED,
    ignored=frozenset({"rope.scaling.original_context_length", "rope.scaling.finetuned"}),
    tensors=_GGUF_TENSORS,
    interleaved=frozenset({"blk.{}.attn_q.weight", "blk.{}.attn_k.weight"}),
    spare=(ROPE_DIVISORS,),
)
_PLAIN_GGUF = replace(_LLAMA_GGUF, interleaved=frozenset())
# Sliding windows are there in their configs, switched off; then the window and the layers it is for mean nothing.
_QWEN_JSON = replace(
    _LLAMA_JSON,
    fixed={key: values for key, values in _LLAMA_JSON.fixed.items() if key != "sliding_window"}
    | {"use_sliding_window": (False,)},
    ignored=_JSON_IGNORED | {"sliding_window", "max_window_layers"},
    defaults={"max_position_embeddings": 32_768},
)
_QKV_BIAS, _HEAD_NORM, _NORMS_AFTER = {"qkv_bias": True}, {"head_norm": "head"}, {"head_norm": "all", "norms": "after"}
_HEAD_NORMS = {
    "layers.{}.query_norm": ("model.layers.{}.self_attn.q_norm.weight",),
    "layers.{}.key_norm": ("model.layers.{}.self_attn.k_norm.weight",),
}
_GGUF_HEAD_NORMS = {
    "layers.{}.query_norm": ("blk.{}.attn_q_norm.weight",),
    "layers.{}.key_norm": ("blk.{}.attn_k_norm.weight",),
}

FAMILIES: dict[str, dict[str, Dialect]] = {
    "llama": {"safetensors": _LLAMA_JSON, "gguf": _LLAMA_GGUF},
    # GGUF calls it llama. Where config.json does not say, there is a window, which is refused.
    "mistral": {
        "safetensors": replace(
            _LLAMA_JSON,
            names=frozenset({"MistralForCausalLM", "mistral"}),
            defaults={"sliding_window": 4_096, "max_position_embeddings": 131_072, "num_key_value_heads": 8},
        ),
    },
    "phi3": {
        "safetensors": replace(
            _LLAMA_JSON,
            names=frozenset({"Phi3ForCausalLM", "phi3"}),
            ignored=_JSON_IGNORED | {"auto_map", "embd_pdrop", "resid_pdrop", "original_max_position_embeddings"},
            tensors=_JSON_TENSORS
            | {
                "layers.{}.qkv": ("model.layers.{}.self_attn.qkv_proj.weight",),
                "layers.{}.gate_up": ("model.layers.{}.mlp.gate_up_proj.weight",),
            },
            defaults={"max_position_embeddings": 4_096, "rms_norm_eps": 1e-5},
        ),
    },
    "olmo2": {
        "safetensors": replace(
            _LLAMA_JSON,
            names=frozenset({"Olmo2ForCausalLM", "olmo2"}),
            tensors=_JSON_TENSORS
            | _HEAD_NORMS
            | {
                "layers.{}.attention_norm": ("model.layers.{}.post_attention_layernorm.weight",),
                "layers.{}.mlp_norm": ("model.layers.{}.post_feedforward_layernorm.weight",),
            },
            mechanisms=_NORMS_AFTER,
            defaults={"rms_norm_eps": 1e-5},
        ),
        "gguf": replace(
            _PLAIN_GGUF,
            names=frozenset({"olmo2"}),
            tensors=_GGUF_TENSORS
            | _GGUF_HEAD_NORMS
            | {
                "layers.{}.attention_norm": ("blk.{}.post_attention_norm.weight",),
                "layers.{}.mlp_norm": ("blk.{}.post_ffw_norm.weight",),
            },
            mechanisms=_NORMS_AFTER,
        ),
    },
    "smollm3": {
        "safetensors": replace(
            _QWEN_JSON,
            names=frozenset({"SmolLM3ForCausalLM", "smollm3"}),
            defaults={
                "max_position_embeddings": 32_768,
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
                "no_rope_layer_interval": 4,
                "num_key_value_heads": 4,
            },
        ),
    },
    "qwen2": {
        "safetensors": replace(
            _QWEN_JSON,
            names=frozenset({"Qwen2ForCausalLM", "qwen2"}),
            tensors=_JSON_TENSORS
            | {"layers.{}.qkv_bias": tuple(f"model.layers.{{}}.self_attn.{part}_proj.bias" for part in "qkv")},
            mechanisms=_QKV_BIAS,
        ),
        "gguf": replace(
            _PLAIN_GGUF,
            names=frozenset({"qwen2"}),
            tensors=_GGUF_TENSORS | {"layers.{}.qkv_bias": tuple(f"blk.{{}}.attn_{part}.bias" for part in "qkv")},
            mechanisms=_QKV_BIAS,
        ),
    },
    "qwen3": {
        "safetensors": replace(
            _QWEN_JSON,
            names=frozenset({"Qwen3ForCausalLM", "qwen3"}),
            tensors=_JSON_TENSORS | _HEAD_NORMS,
            mechanisms=_HEAD_NORM,
            defaults=_QWEN_JSON.defaults | {"head_dim": 128},
        ),
        "gguf": replace(
            _PLAIN_GGUF,
            names=frozenset({"qwen3"}),
            tensors=_GGUF_TENSORS | _GGUF_HEAD_NORMS,
            mechanisms=_HEAD_NORM,
        ),
    },
}
