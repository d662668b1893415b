"""Reading a model's config and the names of its tensors from a file, as the table of families spells them.

Configs are read closed: every key is read, checked to have a value jaxrt implements, or listed as one that cannot
change what the model computes. Any other key raises, so that a variant is refused before it produces wrong text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxrt import weights
from jaxrt.config import LayerSpec, ModelConfig, RopeSpec
from jaxrt.errors import ArtifactError, UnsupportedModel, nearest
from jaxrt.models.families import FAMILIES, ROPE_DIVISORS, Dialect
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
        **{
            f"layers.{{}}.{name}_norm": ((width,),)
            for name, width in zip(("query", "key"), config.head_norm_widths, strict=False)
        },
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
        layers=_without_rope(keys, layer, layers),
        context=keys.count("max_position_embeddings", MAX_CONTEXT, default=2_048),
        norm_eps=keys.positive("rms_norm_eps", 1.0, default=1e-6),
        tied_head=keys.flag("tie_word_embeddings", default=False),
        bos_token=next(iter(keys.token_ids("bos_token_id", vocab)), None),
        eos_tokens=generation.token_ids("eos_token_id", vocab) or eos,
        **dialect.mechanisms,
    )
    keys.close(dialect.fixed, dialect.ignored)
    return config


def _without_rope(keys: Keys, layer: LayerSpec, count: int) -> tuple[LayerSpec, ...]:
    """`count` layers, those without RoPE where `no_rope_layers` has a 0, or else every `no_rope_layer_interval`-th."""
    interval = keys.count("no_rope_layer_interval", MAX_LAYERS, default=0)
    if not interval:
        return (layer,) * count
    turned = keys.read("no_rope_layers") or [(at + 1) % interval != 0 for at in range(count)]
    if not isinstance(turned, list) or len(turned) != count or any(each not in (0, 1) for each in turned):
        raise keys.wrong("no_rope_layers", turned, f"{count} times 0 or 1")
    return tuple(layer if each else replace(layer, rope=None) for each in turned)


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


_READERS = {"safetensors": _from_json, "gguf": _from_gguf}
