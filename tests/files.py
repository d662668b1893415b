"""Writers of tiny checkpoints for the tests: GGUF files and Hugging Face directories, byte by byte, to be spoilt."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType

from jaxrt.nn.packed import FORMATS

GgmlTensor = (
    np.ndarray | tuple[bytes, Sequence[int], GGMLQuantizationType]
)  # the bytes as stored, the numpy shape, the type

_KINDS = {
    np.dtype(np.uint8): GGUFValueType.UINT8,
    np.dtype(np.int8): GGUFValueType.INT8,
    np.dtype(np.uint16): GGUFValueType.UINT16,
    np.dtype(np.int16): GGUFValueType.INT16,
    np.dtype(np.uint32): GGUFValueType.UINT32,
    np.dtype(np.int32): GGUFValueType.INT32,
    np.dtype(np.float32): GGUFValueType.FLOAT32,
    np.dtype(np.bool_): GGUFValueType.BOOL,
    np.dtype(np.uint64): GGUFValueType.UINT64,
    np.dtype(np.int64): GGUFValueType.INT64,
    np.dtype(np.float64): GGUFValueType.FLOAT64,
}
_GGML = {
    np.dtype(np.float32): GGMLQuantizationType.F32,
    np.dtype(np.float16): GGMLQuantizationType.F16,
    np.dtype(ml_dtypes.bfloat16): GGMLQuantizationType.BF16,
    np.dtype(np.float64): GGMLQuantizationType.F64,
    np.dtype(np.int8): GGMLQuantizationType.I8,
    np.dtype(np.int32): GGMLQuantizationType.I32,
}
_SAFETENSORS = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float64): "F64",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
}


# GGUF ---------------------------------------------------------------------------------------------------------------


def gguf_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_start(n_tensors: int, n_pairs: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_pairs)


def gguf_value(value: Any) -> tuple[int, bytes]:
    """The type number and the bytes of a metadata value.

    Whole numbers are UINT32 (INT32 below zero), other numbers FLOAT32; a numpy scalar or array is of its own type.
    """
    if isinstance(value, str):
        return GGUFValueType.STRING, gguf_string(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        start = struct.pack("<IQ", GGUFValueType.STRING, len(value))
        return GGUFValueType.ARRAY, start + b"".join(map(gguf_string, value))
    array = value if isinstance(value, np.ndarray | np.generic) else np.array(value, _natural(value))
    kind = _KINDS[array.dtype]
    if array.ndim == 0:
        return kind, array.tobytes()
    return GGUFValueType.ARRAY, struct.pack("<IQ", kind, len(array)) + array.tobytes()


def _natural(value: Any) -> type:
    values = value if isinstance(value, list) else [value]
    if all(isinstance(each, bool) for each in values) and values:
        return np.bool_
    if all(isinstance(each, int) for each in values):
        return np.int32 if min(values, default=0) < 0 else np.uint32
    return np.float32


def gguf_pair(key: str | bytes, value: Any) -> bytes:
    kind, data = gguf_value(value)
    return gguf_string(key) + struct.pack("<I", kind) + data


def gguf_tensor(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor's header; `shape` as numpy has it."""
    return gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgmlTensor], alignment: int = 32, version: int = 3
) -> bytes:
    """A whole GGUF file. `general.alignment` is written where it is not the default."""
    metadata = dict(metadata) if alignment == 32 else {**metadata, "general.alignment": alignment}
    header = gguf_start(len(tensors), len(metadata), version)
    header += b"".join(gguf_pair(key, value) for key, value in metadata.items())
    parts, offset = [], 0
    for name, tensor in tensors.items():
        stored = tensor if isinstance(tensor, tuple) else (tensor.tobytes(), tensor.shape, _GGML[tensor.dtype])
        header += gguf_tensor(name, stored[1], stored[2], offset)
        padding = -len(stored[0]) % alignment
        parts += [stored[0], bytes(padding)]
        offset += len(stored[0]) + padding
    return b"".join([header, bytes(-len(header) % alignment), *parts])


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgmlTensor], alignment: int = 32) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, alignment))
    return path


def random_blocks(format: str, outputs: int, inputs: int, seed: int = 0, scale: float = 1 / 16) -> np.ndarray:
    """Packed weights, uint8 [outputs, bytes of a row]: every bit pattern of the integers occurs, the block scales and
    minima are normal with that deviation."""
    rng, known = np.random.default_rng(seed), FORMATS[format]
    data = rng.integers(0, 256, (outputs, inputs // known.weights, known.bytes), dtype=np.uint8)
    for at in known.halves:
        halves = (rng.normal(size=data.shape[:2]) * scale).astype(np.float16)
        data[..., at : at + 2] = np.frombuffer(halves.tobytes(), np.uint8).reshape(*halves.shape, 2)
    return data.reshape(outputs, -1)


# Hugging Face -------------------------------------------------------------------------------------------------------


def safetensors_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    header, end = {}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _SAFETENSORS[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    return safetensors_file(json.dumps(header).encode(), b"".join(array.tobytes() for array in tensors.values()))


def safetensors_file(header: bytes, data: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def write_hf(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    shards: int = 1,
    tokenizer_json: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> Path:
    """A directory as `save_pretrained` writes it; tensors are dealt out to `shards` files in turn."""
    directory.mkdir(parents=True, exist_ok=True)
    objects = {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation_config,
    }
    texts = {name: json.dumps(value) for name, value in objects.items() if value is not None}
    texts |= {"tokenizer.json": tokenizer_json, "chat_template.jinja": chat_template}
    for name, text in texts.items():
        if text is not None:
            (directory / name).write_text(text, encoding="utf-8")
    if shards == 1:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return directory
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    weight_map = {name: files[number % shards] for number, name in enumerate(tensors)}
    for file in files:
        part = {name: array for name, array in tensors.items() if weight_map[name] == file}
        (directory / file).write_bytes(safetensors_bytes(part))
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


# A tiny Llama -------------------------------------------------------------------------------------------------------


def tiny_llama_tensors(
    rng: np.random.Generator,
    vocab: int = 258,
    width: int = 32,
    mlp: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_width: int = 8,
    layers: int = 2,
    tied: bool = False,
) -> dict[str, np.ndarray]:
    """Random float32 weights under their Hugging Face names, linear maps [outputs, inputs]."""

    def linear(outputs: int, inputs: int) -> np.ndarray:
        return (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(width)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": linear(vocab, width)}
    for layer in range(layers):
        own = {
            "input_layernorm": norm(),
            "self_attn.q_proj": linear(heads * head_width, width),
            "self_attn.k_proj": linear(kv_heads * head_width, width),
            "self_attn.v_proj": linear(kv_heads * head_width, width),
            "self_attn.o_proj": linear(width, heads * head_width),
            "post_attention_layernorm": norm(),
            "mlp.gate_proj": linear(mlp, width),
            "mlp.up_proj": linear(mlp, width),
            "mlp.down_proj": linear(width, mlp),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": array for name, array in own.items()}
    tensors["model.norm.weight"] = norm()
    if not tied:
        tensors["lm_head.weight"] = linear(vocab, width)
    return tensors


def tiny_config_json(
    vocab: int = 258,
    width: int = 32,
    mlp: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_width: int = 8,
    layers: int = 2,
    tied: bool = False,
    context: int = 256,
    rope_theta: float = 10_000.0,
    norm_eps: float = 1e-5,
) -> dict[str, Any]:
    """The config.json that goes with `tiny_llama_tensors`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_width,
        "max_position_embeddings": context,
        "rms_norm_eps": norm_eps,
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }


def tiny_gguf_metadata(
    vocab: int = 258,
    width: int = 32,
    mlp: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_width: int = 8,
    layers: int = 2,
    context: int = 256,
    rope_theta: float = 10_000.0,
    norm_eps: float = 1e-5,
) -> dict[str, Any]:
    """The GGUF key-value pairs that go with `hf_to_gguf_tensors(tiny_llama_tensors(...))`.

    Whether the head is tied shows in the tensors alone.
    """
    metadata = {
        "general.architecture": "llama",
        "llama.vocab_size": vocab,
        "llama.block_count": layers,
        "llama.context_length": context,
        "llama.embedding_length": width,
        "llama.feed_forward_length": mlp,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": norm_eps,
        "llama.rope.freq_base": rope_theta,
        "llama.rope.dimension_count": head_width,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }
    if head_width * heads != width:
        metadata |= {"llama.attention.key_length": head_width, "llama.attention.value_length": head_width}
    return metadata


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_to_gguf_tensors(tensors: Mapping[str, np.ndarray], heads: int = 4, kv_heads: int = 2) -> dict[str, np.ndarray]:
    """The same weights under GGUF's names.

    Query and key rows are in GGUF's order for the llama architecture: rotary partners (i and i + H/2) side by side.
    """
    converted = {}
    for name, array in tensors.items():
        stem = name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        for projection, count in (("self_attn.q_proj", heads), ("self_attn.k_proj", kv_heads)):
            if stem == projection:
                halves = array.reshape(count, 2, len(array) // count // 2, -1)
                array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        converted[f"{prefix}{_GGUF_NAMES[stem]}.weight"] = array
    return converted


def byte_tokenizer_json() -> str:
    """A tokenizer.json of 258 tokens: byte b is token b, then `<s>` (256), `</s>` (257). It adds no token to a text."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    special = [
        {"id": number, "content": content, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, content in ((256, "<s>"), (257, "</s>"))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {letters[byte]: byte for byte in range(256)} | {"<s>": 256, "</s>": 257},
                "merges": [],
            },
        }
    )
