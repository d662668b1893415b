"""How each weight is held: as an array, packed as the file has it, or packed while it is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrt.artifacts.checkpoint import Checkpoint
from jaxrt.config import ModelConfig
from jaxrt.models.reading import Rule, tensor_rules
from jaxrt.nn.packed import FORMATS, Packed
from jaxrt.weights import ArraySpec, Weights, abstract, named, unnamed

# What weights of any type are packed into at load: of the layers, and of the two tables of the vocabulary, which bear
# four bits badly.
QUANTIZED: Mapping[str, tuple[str, str]] = {
    "int8": ("Q8_0", "Q8_0"),
    "int4": ("Q4_1", "Q8_0"),
    "int8 by output": ("int8", "int8"),
    "fp8 by output": ("float8_e4m3fn", "float8_e4m3fn"),
}
TABLES = ("embedding", "head")


def held(checkpoint: Checkpoint, config: ModelConfig, dtype: Any, storage: str) -> Weights:
    """The tree of ArraySpec of a checkpoint's weights, from its headers.

    storage: "float", arrays of `dtype`; "packed", as the file has them where they are packed; or a name of QUANTIZED,
    packed at load, where their inputs are a multiple of a block. The rest are arrays of `dtype`.
    """
    specs = named(abstract(config, dtype))
    rules = tensor_rules(checkpoint, config)
    chosen = {name: _spec(checkpoint, name, spec, rules[name], storage) for name, spec in specs.items()}
    return unnamed(abstract(config, dtype), chosen)


def _spec(checkpoint: Checkpoint, name: str, spec: ArraySpec, rule: Rule, storage: str) -> ArraySpec:
    if len(spec.shape) != 2 or storage == "float":
        return spec
    if storage == "packed":
        formats: list[str] = []
        outputs: list[int] = []
        for source in rule.sources:
            header = checkpoint.tensors.get(source.name)
            if header is None or header.dtype not in FORMATS:
                return spec
            if formats and formats[-1] == header.dtype:
                outputs[-1] += source.shape[0]
            else:
                formats.append(header.dtype)
                outputs.append(source.shape[0])
        return replace(spec, formats=tuple(formats), outputs=tuple(outputs))
    format = QUANTIZED[storage][name in TABLES]
    if format in FORMATS and spec.shape[1] % FORMATS[format].weights:
        return spec
    return replace(spec, formats=(format,), outputs=(spec.shape[0],))


def read_packed(
    checkpoint: Checkpoint,
    spec: ArraySpec,
    rule: Rule,
    put_in_order: Callable[[np.ndarray, int], np.ndarray],
    new: Callable[[tuple[int, ...], np.dtype], np.ndarray],
) -> tuple[Packed, str | None]:
    """A packed leaf in host memory that `new` gives, and the name of the first tensor whose scales are not finite.

    put_in_order: rows whose halves alternate, by head width.
    """
    parts, sources, bad = [], iter(rule.sources), None
    for format, outputs in zip(spec.formats, spec.outputs, strict=True):
        part, row = new((outputs, FORMATS[format].row_bytes(spec.shape[1])), np.dtype(np.uint8)), 0
        while row < outputs:
            source = next(sources)
            if checkpoint.read_packed and checkpoint.tensors[source.name].dtype == format:
                rows = checkpoint.read_packed(source.name)
            else:
                rows = _pack(checkpoint.read(source.name), format)
            if source.interleaved:
                rows = put_in_order(rows, source.interleaved)
            part[row : row + len(rows)] = rows
            row += len(rows)
            if not _finite(rows, format):
                bad = bad or source.name
        parts.append(part)
    return Packed(tuple(parts), spec.formats, spec.shape[1], spec.dtype), bad


def _pack(array: np.ndarray, format: str) -> np.ndarray:
    """[N, K] as blocks, uint8 [N, bytes of a row], rounded as the gguf package does it."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    with np.errstate(all="ignore"):  # what is not finite makes scales that are not
        return quantize(array.astype(np.float32, copy=False), GGMLQuantizationType[format])


def _finite(blocks: np.ndarray, format: str) -> bool:
    """Whether every scale and minimum is a finite number: an exponent of five ones, in the second byte, says no."""
    known = FORMATS[format]
    blocks = blocks.reshape(-1, known.bytes)
    return all(bool(((blocks[:, at + 1] & 0x7C) != 0x7C).all()) for at in known.halves)
