"""The only family names: how files spell each family's config, and which tensors make its weights. A family is a row.

Configs are read closed: every key is read, checked to have a value jaxrt implements, or listed as one that cannot
change what the model computes. Any other key raises, so that a variant is refused before it produces wrong text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxrt import weights
from jaxrt.config import LayerSpec, ModelConfig, RopeSpec
from jaxrt.errors import ArtifactError, UnsupportedModel, nearest
from jaxrt.models.keys import Keys
from jaxrt.nn.layers import inverse_frequencies


class Artifact(Protocol):
    """What of an opened checkpoint is read here."""

    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> Literal["gguf", "safetensors", "orbax"]: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def generation(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    def read(self, name: str, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Source:
    """A tensor as it should stand in the file."""

    name: str
    shape: tuple[int, ...]  # [outputs, inputs]
    interleaved: int = (
        0  # head width, where the two halves of each head's rows alternate; 0 where they follow one another
    )


@dataclass(frozen=True)
class Rule:
    """How one leaf of our weights is made: its sources joined along axis 0 (outputs)."""

    sources: tuple[Source, ...]


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


def read_config(checkpoint: Artifact) -> ModelConfig:
    """The model's config from its headers.

    Raises: UnsupportedModel for an unknown architecture or anything jaxrt does not compute; ArtifactError for a key
    that is missing, of the wrong type or out of all reason.
    """
    if checkpoint.format == "orbax":  # written by jaxrt, which stores the config itself
        return checkpoint.metadata["config"]
    family, dialect = _find(checkpoint)
    return _READERS[checkpoint.format](checkpoint, family, dialect)


def tensor_rules(checkpoint: Artifact, config: ModelConfig) -> dict[str, Rule]:
    """For each leaf of `weights.abstract(config)`, the tensors it is made of and the shapes they must have."""
    leaves = weights.named(weights.abstract(config))
    if checkpoint.format == "orbax":
        return {leaf: Rule((Source(leaf, spec.shape),)) for leaf, spec in leaves.items()}
    _, dialect = _find(checkpoint)
    shapes = _shapes(config)
    rules = {}
    for leaf in leaves:
        kind, layer = _layer(leaf)
        rules[leaf] = Rule(
            tuple(
                Source(name.format(layer), shape, config.head_width if name in dialect.interleaved else 0)
                for name, shape in zip(dialect.tensors[kind], _joined(shapes[kind], dialect.tensors[kind]), strict=True)
            )
        )
    return rules


def spare_tensors(checkpoint: Artifact, config: ModelConfig) -> dict[str, str | None]:
    """Tensors that may be in the file unused, and the tensor each must equal (None: the config tells its content)."""
    if checkpoint.format == "orbax":
        return {}
    _, dialect = _find(checkpoint)
    spare: dict[str, str | None] = {
        name.format(layer): None for name in dialect.spare for layer in range(len(config.layers))
    }
    if config.tied_head:
        spare[dialect.tensors["head"][0]] = dialect.tensors["embedding"][0]
    return spare


def _layer(leaf: str) -> tuple[str, int]:
    """`layers.3.qkv` -> (`layers.{}.qkv`, 3)."""
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", leaf)
    return (f"layers.{{}}.{found[2]}", int(found[1])) if found else (leaf, 0)


def _joined(shapes: tuple[tuple[int, ...], ...], names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The shapes of a leaf's parts, or of all of them in one where a file has them as one tensor."""
    return ((sum(shape[0] for shape in shapes), *shapes[0][1:]),) if len(names) == 1 else shapes


def _shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Shapes of the parts that each leaf fuses, [outputs, inputs]."""
    width, mlp, vocab = config.width, config.mlp_width, config.vocab
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    return {
        "embedding": ((vocab, width),),
        "layers.{}.attention_norm": ((width,),),
        "layers.{}.qkv": ((queries, width), (keys, width), (keys, width)),
        "layers.{}.output": ((width, queries),),
        "layers.{}.mlp_norm": ((width,),),
        "layers.{}.gate_up": ((mlp, width), (mlp, width)),
        "layers.{}.down": ((width, mlp),),
        "layers.{}.qkv_bias": ((queries,), (keys,), (keys,)),
        "layers.{}.query_norm": ((config.head_width,),),
        "layers.{}.key_norm": ((config.head_width,),),
        "final_norm": ((width,),),
        "head": ((vocab, width),),
    }


def _find(checkpoint: Artifact) -> tuple[str, Dialect]:
    metadata = checkpoint.metadata
    if checkpoint.format == "gguf":
        field, given = "general.architecture", [metadata.get("general.architecture")]
    else:
        architectures = metadata.get("architectures") or []
        if not isinstance(architectures, list):
            raise ArtifactError(
                f"{architectures!r:.80}", path=checkpoint.path, field="architectures", expected="a list"
            )
        field, given = "architectures and model_type", [*architectures, metadata.get("model_type")]
    names = [name for name in given if name is not None]
    if not names or not all(isinstance(name, str) for name in names):
        raise ArtifactError(f"{given!r:.80}", path=checkpoint.path, field=field, expected="the model's architecture")
    known = {}
    for family, dialects in FAMILIES.items():
        dialect = dialects.get(checkpoint.format)
        if dialect is None:
            continue
        if dialect.names.issuperset(names):
            return family, dialect
        known |= dict.fromkeys(dialect.names, family)
    unknown = [name for name in names if name not in known] or names
    raise UnsupportedModel(
        f"{checkpoint.path}: {field} {', '.join(names):.200}",
        expected=f"one of {', '.join(sorted(known))}",
        fix=nearest(unknown[0], known),
    )


# Bounds of reason, checked before anything is sized by these numbers; ten times what exists, or more.
MAX_VOCAB, MAX_WIDTH, MAX_HEADS, MAX_LAYERS, MAX_CONTEXT = 10_000_000, 10_000_000, 100_000, 1_000, 1_000_000_000
MAX_THETA, MAX_FACTOR = 1e15, 1e6


def _from_json(checkpoint: Artifact, family: str, dialect: Dialect) -> ModelConfig:
    """From config.json; what it leaves out has the default of the library that defined the format."""
    keys = Keys({**dialect.defaults, **checkpoint.metadata}, checkpoint.path / "config.json")
    generation = Keys(checkpoint.generation, checkpoint.path / "generation_config.json")
    vocab, heads = keys.count("vocab_size", MAX_VOCAB), keys.count("num_attention_heads", MAX_HEADS)
    width = keys.count("hidden_size", MAX_WIDTH)
    head_width = _head_width(keys, "head_dim", width, heads)
    layer = LayerSpec(_rope_from_json(keys, checkpoint.path / "config.json"))
    eos = keys.token_ids("eos_token_id", vocab)
    layers = keys.count("num_hidden_layers", MAX_LAYERS)
    kinds = keys.read("layer_types")
    if kinds is not None and kinds != ["full_attention"] * layers:
        raise UnsupportedModel(
            f"{checkpoint.path / 'config.json'}: layer_types = {kinds!r:.200}", expected=f"{layers} x full_attention"
        )
    config = ModelConfig(
        family=family,
        vocab=vocab,
        width=width,
        mlp_width=keys.count("intermediate_size", MAX_WIDTH),
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", MAX_HEADS, default=heads),
        head_width=head_width,
        layers=(layer,) * layers,
        context=keys.count("max_position_embeddings", MAX_CONTEXT, default=2_048),
        norm_eps=keys.positive("rms_norm_eps", 1.0, default=1e-6),
        tied_head=keys.flag("tie_word_embeddings", default=False),
        bos_token=next(iter(keys.token_ids("bos_token_id", vocab)), None),
        eos_tokens=generation.token_ids("eos_token_id", vocab) or eos,
        **dialect.mechanisms,
    )
    keys.close(dialect.fixed, dialect.ignored)
    return config


def _rope_from_json(keys: Keys, path: Path) -> RopeSpec:
    """From `rope_theta` and `rope_scaling`, or from `rope_parameters`, which holds both."""
    sections = {name: keys.section(name) for name in ("rope_parameters", "rope_scaling")}
    given = {name: section for name, section in sections.items() if section}
    if len(given) > 1 and sections["rope_parameters"] != sections["rope_scaling"]:
        raise UnsupportedModel(f"{path}: rope_parameters and rope_scaling differ", expected="only one of them")
    name, section = next(iter(given.items()), ("rope_parameters", {}))
    rope = Keys({f"{name}.{key}": value for key, value in section.items()}, path, prefix=f"{name}.")
    outer = keys.positive("rope_theta", MAX_THETA, default=10_000.0)
    theta = rope.positive("rope_theta", MAX_THETA, default=outer)
    kinds = {kind for kind in (rope.text("rope_type"), rope.text("type")) if kind} or {"default"}
    spec = RopeSpec(theta)
    if kinds == {"linear"}:
        spec = RopeSpec(theta, "linear", rope.positive("factor", MAX_FACTOR))
    elif kinds == {"llama3"}:
        spec = RopeSpec(
            theta,
            "llama3",
            rope.positive("factor", MAX_FACTOR),
            rope.positive("low_freq_factor", MAX_FACTOR),
            rope.positive("high_freq_factor", MAX_FACTOR),
            rope.count("original_max_position_embeddings", MAX_CONTEXT),
        )
        if spec.high_freq_factor <= spec.low_freq_factor:
            raise rope.wrong("high_freq_factor", spec.high_freq_factor, f"more than {spec.low_freq_factor:g}")
    elif kinds != {"default"}:
        raise UnsupportedModel(
            f"{path}: {name}.rope_type = {' and '.join(sorted(kinds)):.80}", expected="default, linear or llama3"
        )
    rope.close({"partial_rotary_factor": (1.0,)})
    return spec


def _from_gguf(checkpoint: Artifact, family: str, dialect: Dialect) -> ModelConfig:
    """From the `ARCHITECTURE.*` keys and the special tokens' ids."""
    metadata, path = checkpoint.metadata, checkpoint.path
    keys = Keys(metadata, path, prefix=f"{metadata['general.architecture']}.")
    tokens = Keys(metadata, path, prefix="tokenizer.ggml.")
    embedding = checkpoint.tensors.get(dialect.tensors["embedding"][0])
    if embedding is None or len(embedding.shape) != 2:
        raise ArtifactError(
            "missing, or not a matrix", path=path, field=dialect.tensors["embedding"][0], expected="the embedding table"
        )
    vocab = keys.count("vocab_size", MAX_VOCAB, default=embedding.shape[0])
    width, heads = keys.count("embedding_length", MAX_WIDTH), keys.count("attention.head_count", MAX_HEADS)
    head_width = _head_width(keys, "attention.key_length", width, heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.count(name, MAX_WIDTH, default=head_width) != head_width:
            raise UnsupportedModel(f"{path}: {name} = {keys.read(name)}", expected=f"the head width, {head_width}")
    layer = LayerSpec(_rope_from_gguf(keys, checkpoint, head_width))
    eos = [tokens.token_ids(f"{name}_token_id", vocab) for name in ("eos", "eot", "eom")]
    config = ModelConfig(
        family=family,
        vocab=vocab,
        width=width,
        mlp_width=keys.count("feed_forward_length", MAX_WIDTH),
        heads=heads,
        kv_heads=keys.count("attention.head_count_kv", MAX_HEADS, default=heads),
        head_width=head_width,
        layers=(layer,) * keys.count("block_count", MAX_LAYERS),
        context=keys.count("context_length", MAX_CONTEXT),
        norm_eps=keys.positive("attention.layer_norm_rms_epsilon", 1.0),
        tied_head=dialect.tensors["head"][0] not in checkpoint.tensors,
        bos_token=next(iter(tokens.token_ids("bos_token_id", vocab)), None),
        eos_tokens=tuple(dict.fromkeys(sum(eos, ()))),
        **dialect.mechanisms,
    )
    keys.close(dialect.fixed, dialect.ignored)
    return config


def _rope_from_gguf(keys: Keys, checkpoint: Artifact, head_width: int) -> RopeSpec:
    """From `rope.*`; the llama3 scaling is stored as a tensor of divisors, which must be those of its formula."""
    theta = keys.positive("rope.freq_base", MAX_THETA, default=10_000.0)
    # a factor without a type is linear: the format's reference reader takes it so
    scaling = keys.text("rope.scaling.type") or ("linear" if keys.has("rope.scaling.factor") else "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedModel(f"{checkpoint.path}: rope.scaling.type = {scaling:.80}", expected="none or linear")
    spec = RopeSpec(theta)
    if scaling == "linear":
        spec = RopeSpec(theta, "linear", keys.positive("rope.scaling.factor", MAX_FACTOR))
    if ROPE_DIVISORS not in checkpoint.tensors:
        return spec
    found = f"{ROPE_DIVISORS} of shape {checkpoint.tensors[ROPE_DIVISORS].shape}"
    if checkpoint.tensors[ROPE_DIVISORS].shape == (head_width // 2,) and scaling == "none":
        divisors = checkpoint.read(ROPE_DIVISORS).astype(np.float64)
        factor = float(divisors.max())
        found += f" with values up to {factor:g}"
        if 1 <= factor <= MAX_FACTOR:
            scaled = RopeSpec(theta, "llama3", factor)
            formula = inverse_frequencies(spec, head_width) / inverse_frequencies(scaled, head_width)
            if np.allclose(divisors, formula, rtol=1e-4, atol=0):
                return scaled
    raise UnsupportedModel(
        f"{checkpoint.path}: {found}, rope.scaling.type {scaling}",
        expected=f"{head_width // 2} divisors of the llama3 scaling (low 1, high 4, original context 8,192)",
    )


def _head_width(keys: Keys, name: str, width: int, heads: int) -> int:
    head_width = keys.count(name, MAX_WIDTH, default=0)
    if head_width == 0 and width % heads:
        raise keys.wrong(name, None, f"a head width, since width {width} is not a multiple of {heads} heads")
    return head_width or width // heads


ROPE_DIVISORS = "rope_freqs.weight"
_READERS = {"safetensors": _from_json, "gguf": _from_gguf}

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
# Sliding windows are there in their configs, switched off; then the window and the layers it is for mean nothing.
_QWEN_JSON = replace(
    _LLAMA_JSON,
    fixed={key: values for key, values in _LLAMA_JSON.fixed.items() if key != "sliding_window"}
    | {"use_sliding_window": (False,)},
    ignored=_JSON_IGNORED | {"sliding_window", "max_window_layers"},
    defaults={"max_position_embeddings": 32_768},
)
_QKV_BIAS, _HEAD_NORM = {"qkv_bias": True}, {"head_norm": True}

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
    "qwen2": {
        "safetensors": replace(
            _QWEN_JSON,
            names=frozenset({"Qwen2ForCausalLM", "qwen2"}),
            tensors=_JSON_TENSORS
            | {"layers.{}.qkv_bias": tuple(f"model.layers.{{}}.self_attn.{part}_proj.bias" for part in "qkv")},
            mechanisms=_QKV_BIAS,
        ),
        "gguf": replace(
            _LLAMA_GGUF,
            names=frozenset({"qwen2"}),
            tensors=_GGUF_TENSORS | {"layers.{}.qkv_bias": tuple(f"blk.{{}}.attn_{part}.bias" for part in "qkv")},
            interleaved=frozenset(),
            mechanisms=_QKV_BIAS,
        ),
    },
    "qwen3": {
        "safetensors": replace(
            _QWEN_JSON,
            names=frozenset({"Qwen3ForCausalLM", "qwen3"}),
            tensors=_JSON_TENSORS
            | {
                "layers.{}.query_norm": ("model.layers.{}.self_attn.q_norm.weight",),
                "layers.{}.key_norm": ("model.layers.{}.self_attn.k_norm.weight",),
            },
            mechanisms=_HEAD_NORM,
            defaults=_QWEN_JSON.defaults | {"head_dim": 128},
        ),
        "gguf": replace(
            _LLAMA_GGUF,
            names=frozenset({"qwen3"}),
            tensors=_GGUF_TENSORS
            | {
                "layers.{}.query_norm": ("blk.{}.attn_q_norm.weight",),
                "layers.{}.key_norm": ("blk.{}.attn_k_norm.weight",),
            },
            interleaved=frozenset(),
            mechanisms=_HEAD_NORM,
        ),
    },
}
