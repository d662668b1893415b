"""Hugging Face directories: config, safetensors weights (one file or shards), tokenizer files. Nothing in one is run.

The safetensors package validates and reads each file; what it does not check, and the index of shards, is checked here.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the name "bfloat16", by which safetensors asks for it)
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrt.artifacts.checkpoint import Checkpoint, TensorHeader
from jaxrt.artifacts.files import parse_json_object, printable, read_json_object, regular_size, unreadable
from jaxrt.errors import ArtifactError, UnsupportedModel, nearest

MAX_HEADER_BYTES = 100_000_000  # the format's own bound
MAX_CONFIG_BYTES = 1 << 22
MAX_INDEX_BYTES = 1 << 25

CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
READABLE = ("F32", "F16", "BF16", "F64")
NEVER_LOADED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".npy", ".msgpack", ".h5")  # pickles and their kind


@dataclass(frozen=True)
class _Shard:
    """One opened safetensors file."""

    path: Path
    size: int
    handle: Any  # safetensors.safe_open
    tensors: dict[str, TensorHeader]

    def read(self, name: str) -> np.ndarray:
        if self.tensors[name].dtype not in READABLE:
            raise _unsupported(self.tensors[name])
        if regular_size(self.path) != self.size:  # touching mapped pages that are gone would kill the process
            raise ArtifactError("the file has changed since it was opened", path=self.path, fix="load it again")
        try:
            return self.handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ArtifactError(printable(str(error)), path=self.path, field=printable(name)) from error


def open_safetensors(directory: Path) -> Checkpoint:
    """Opens a directory as Hugging Face's `save_pretrained` writes it: config.json and safetensors weights.

    All headers are validated before any tensor is touched. `read` returns F32, F16, BF16 and F64 tensors as they are
    stored, in arrays of their own; it may be called from several threads. A link may leave the directory only in the
    Hugging Face cache, from a snapshot to the blobs of the same repository.

    Raises: ArtifactError for files that are missing, malformed or contradict each other, and from `read` for a name
    that is not there; UnsupportedModel for a directory of pickled weights, for floating-point tensors of 8 bits and
    fewer, and from `read` for integers.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):
        raise ArtifactError(
            "no such directory, or none that may be read",
            path=directory,
            expected="a directory with config.json and weights",
        )
    shards = _open_weights(directory)
    config = _find(directory, CONFIG)
    if config is None:
        raise ArtifactError("not there", path=directory, field=CONFIG, fix="copy it from where the weights come from")
    generation = _find(directory, GENERATION)
    found = {name: _find(directory, name) for name in TOKENIZER_FILES}
    owners = {name: shard for shard in shards for name in shard.tensors}

    def read(name: str) -> np.ndarray:
        if name not in owners:
            raise ArtifactError("no such tensor", path=directory, field=printable(name), fix=nearest(name, owners))
        return owners[name].read(name)

    return Checkpoint(
        path=directory,
        format="safetensors",
        metadata=read_json_object(config, MAX_CONFIG_BYTES),
        tensors={name: shard.tensors[name] for name, shard in owners.items()},
        read=read,
        generation=read_json_object(generation, MAX_CONFIG_BYTES) if generation else {},
        tokenizer_files={name: path for name, path in found.items() if path},
    )


def _find(directory: Path, name: str) -> Path | None:
    """The file `name` of the directory, or None. Raises: ArtifactError for a link that leads outside."""
    path = directory / name
    if not os.path.lexists(path):
        return None
    try:
        target, root = path.resolve(strict=True), directory.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise unreadable(path, error) from error
    if not any(target.is_relative_to(allowed) for allowed in (root, *_blobs(root))):
        raise ArtifactError(
            f"a link to {printable(str(target), 1024)}",
            path=path,
            expected="files inside the directory",
            fix="copy the file into the directory, or open the directory it is in",
        )
    return path


def _blobs(root: Path) -> list[Path]:
    """Where links of a Hugging Face cache snapshot (REPOSITORY/snapshots/REVISION) lead: REPOSITORY/blobs."""
    return [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []


def _open_weights(directory: Path) -> list[_Shard]:
    single = _find(directory, SINGLE)
    if single is not None:
        return [_open_shard(single)]
    index = _find(directory, INDEX)
    if index is None:
        raise _no_weights(directory)
    content = read_json_object(index, MAX_INDEX_BYTES)
    weight_map = _weight_map(content, index)
    shards = []
    for name in sorted(set(weight_map.values())):
        path = _find(directory, name)
        if path is None:
            raise ArtifactError(
                f"the shard {printable(name)} is not there", path=index, field="weight_map", fix="copy or download it"
            )
        shards.append(_open_shard(path))
    _check_index(content, weight_map, shards, index)
    return shards


def _weight_map(content: dict[str, Any], index: Path) -> dict[str, str]:
    """Tensor name -> file name, each a plain name of a safetensors file."""
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError(
            f"{type(weight_map).__name__}",
            path=index,
            field="weight_map",
            expected="an object of tensor name to file name",
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or set(file) & {"/", "\\", "\0"}:
            raise ArtifactError(
                f"the file is {printable(repr(file))}",
                path=index,
                field=f"weight_map: {printable(name)}",
                expected="the name of a .safetensors file in the same directory",
            )
    return weight_map


def _check_index(content: dict[str, Any], weight_map: dict[str, str], shards: list[_Shard], index: Path) -> None:
    """Index and shards must tell the same: every tensor in its file and nowhere else, and the bytes of all together."""
    by_file = {shard.path.name: shard for shard in shards}
    for name, file in weight_map.items():
        if name not in by_file[file].tensors:
            raise ArtifactError(
                f"not in {file}, where {INDEX} says it is",
                path=by_file[file].path,
                field=printable(name),
                fix="copy or download the directory again",
            )
    for shard in shards:
        for name in shard.tensors:
            if weight_map.get(name) != shard.path.name:
                says = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise ArtifactError(
                    f"in this file; {INDEX} says it is {says}",
                    path=shard.path,
                    field=printable(name),
                    expected="each tensor in the one file that the index names",
                )
    metadata = content.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ArtifactError(f"{type(metadata).__name__}", path=index, field="metadata", expected="an object")
    total = sum(header.nbytes for shard in shards for header in shard.tensors.values())
    if metadata.get("total_size", total) != total:
        raise ArtifactError(
            printable(repr(metadata["total_size"])),
            path=index,
            field="total_size",
            expected=f"{total}, the bytes of the shards' tensors",
            fix="copy or download the directory again",
        )


def _open_shard(path: Path) -> _Shard:
    size = regular_size(path)
    try:
        with open(path, "rb") as file:
            length, most = int.from_bytes(file.read(8), "little"), min(MAX_HEADER_BYTES, size - 8)
            if length > most:
                raise ArtifactError(
                    f"{length:,} bytes",
                    path=path,
                    field="header length",
                    expected=f"at most {most:,}" if most >= 0 else "8 bytes to hold it",
                    fix="check that this is a safetensors file, and complete",
                )
            handle = safe_open(
                path, framework="np"
            )  # refuses holes, overlaps, sizes that do not fit, trailing bytes, ...
            header = parse_json_object(file.read(length), path, "header")
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        raise ArtifactError(
            printable(str(error)), path=path, field="header", fix="copy or download it again: it may be incomplete"
        ) from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        tensors[name] = TensorHeader(name, tuple(entry["shape"]), entry["dtype"], last - first, path)
        if entry["dtype"].startswith("F") and entry["dtype"] not in READABLE:  # quantised weights: better said at once
            raise _unsupported(tensors[name])
    return _Shard(path, size, handle, tensors)


def _unsupported(header: TensorHeader) -> UnsupportedModel:
    return UnsupportedModel(
        f"{header.file}: tensor {printable(header.name)!r} has dtype {header.dtype}",
        expected=f"one of {', '.join(READABLE)}",
        fix="convert the weights to BF16",
    )


def _no_weights(directory: Path) -> ArtifactError | UnsupportedModel:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        return unreadable(directory, error)
    expected = f"{SINGLE}, or {INDEX} and its shards"
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return ArtifactError(f"weights but no index: {_listing(shards)}", path=directory, expected=expected)
    if never := [name for name in names if name.endswith(NEVER_LOADED)]:
        return UnsupportedModel(
            f"{directory}: {_listing(never)}: pickled weights can run code when read and are never loaded",
            expected=expected,
            fix="convert them where you trust them: transformers' model.save_pretrained(..., safe_serialization=True)",
        )
    if files := [name for name in names if name.endswith(".gguf")]:
        return ArtifactError(f"GGUF files: {_listing(files)}", path=directory, fix="open the .gguf file itself")
    return ArtifactError("no weights", path=directory, expected=expected)


def _listing(names: Iterable[str]) -> str:
    first, *others = names
    return printable(first) + (f" and {len(others)} more" if others else "")
