"""A checkpoint as every file format presents it: headers first, tensors on demand. Knows no model and no device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class TensorHeader:
    """What a file says of one tensor before its data is read."""

    name: str
    shape: tuple[int, ...]  # row-major, as numpy reads it: a linear map is [outputs, inputs]
    dtype: str  # the file's own word: "F32", "BF16", "Q4_1", ...
    nbytes: int  # on disk
    file: Path


@dataclass(frozen=True)
class Checkpoint:
    """An opened artifact: validated headers, and a reader for the data."""

    path: Path
    format: Literal["gguf", "safetensors", "orbax"]
    metadata: Mapping[str, Any]  # GGUF's key-value pairs, or config.json
    tensors: Mapping[str, TensorHeader]
    # by tensor name: float32, bfloat16, ... of the header's shape; quantised types dequantised to float32
    read: Callable[[str], np.ndarray]
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json, empty where there is none
    # "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    # packed tensors as they stand in the file, uint8 [outputs, bytes of a row]; None where a format has none
    read_packed: Callable[[str], np.ndarray] | None = None
