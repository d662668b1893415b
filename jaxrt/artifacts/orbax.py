"""Converted models: weights laid out as jaxrt holds them, in a sealed directory.

It holds `jaxrt.json` (the manifest), `weights/` (Orbax), the tokenizer's files and generation_config.json.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrt.artifacts.checkpoint import Checkpoint
from jaxrt.artifacts.files import parse_json_object
from jaxrt.artifacts.sealed import KINDS, seal, unseal
from jaxrt.artifacts.sealed import check_free as check_free  # offered here too, beside what it guards
from jaxrt.artifacts.sealed import from_json as from_json
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.config import ModelConfig
from jaxrt.errors import ArtifactError

MARKER = KINDS["model"].marker
FORMAT = 1
GENERATION = "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
DTYPES = ("float32", "float16", "bfloat16")


def save_orbax(
    directory: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write a model that `open_orbax` reads. All or nothing: it is written beside `directory`, then renamed.

    weights: arrays (numpy or JAX) by leaf name, as `weights.named` gives them; float32, float16 or bfloat16.
    generation: the content of generation_config.json.
    Raises: ArtifactError when `directory` is there already or cannot be written.
    """
    for name, array in weights.items():
        if array.dtype.name not in DTYPES:
            raise ArtifactError(str(array.dtype), path=directory, field=name, expected=" or ".join(DTYPES))
    texts = {GENERATION: json.dumps(dict(generation), indent=1)} if generation else {}
    if tokenizer:
        texts[TOKENIZER], texts[TOKENIZER_CONFIG] = tokenizer.json(), json.dumps(tokenizer.config(), indent=1)
    body = {"config": dataclasses.asdict(config)}
    seal(directory, kind="model", format=FORMAT, body=body, arrays=weights, files=texts)


def open_orbax(directory: str | Path) -> Checkpoint:
    """Open a directory that `save_orbax` wrote. Checks the manifest, and that every file is there as it was saved.

    Tensor names are leaf names, `metadata["config"]` is the ModelConfig. `read` gives each array as it was saved,
    verified against its hash; call it once a name, from any thread.
    Raises: ArtifactError, from `read` too, naming what is damaged.
    """
    sealed = unseal(directory, kind="model", format=FORMAT)
    for name, header in sealed.headers.items():
        if header.dtype not in DTYPES:
            raise ArtifactError(
                repr(header.dtype),
                path=sealed.manifest,
                field=f"arrays.{name}.dtype",
                expected=" or ".join(DTYPES),
                fix=sealed.again,
            )
    generation = sealed.files.get(GENERATION)
    return Checkpoint(
        path=sealed.path,
        format="orbax",
        metadata={"config": sealed.parse(ModelConfig, "config")},
        tensors=sealed.headers,
        read=sealed.read,
        generation=parse_json_object(generation.read_bytes(), generation) if generation else {},
        tokenizer_files={name: sealed.files[name] for name in (TOKENIZER, TOKENIZER_CONFIG) if name in sealed.files},
    )
