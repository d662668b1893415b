"""Converted models: weights laid out as jaxrt holds them, saved with Orbax beside a manifest that proves them intact.

A directory holds `jaxrt.json` (the manifest), `weights/` (Orbax), the tokenizer's files and generation_config.json.
Orbax does not see flipped bytes, so every array and file has a SHA-256 in the manifest, and the manifest has its own.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import EllipsisType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import ml_dtypes
import numpy as np

from jaxrt.artifacts.checkpoint import Checkpoint, TensorHeader
from jaxrt.artifacts.files import parse_json_object, printable, read_json_object, unreadable
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.config import ModelConfig
from jaxrt.errors import ArtifactError, nearest

MARKER = "jaxrt.json"
FORMAT = 1
WEIGHTS = "weights"
GENERATION = "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
MAX_MANIFEST_BYTES = 1 << 26
HASHED_WHOLE = 1 << 20  # files up to this many bytes are hashed when opened, larger ones array by array when read
GROUP_BYTES = 1 << 27  # loaded by one call of Orbax, which costs 50 ms or more whatever it loads


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
    directory = Path(directory)
    check_free(directory)
    arrays = {name: np.ascontiguousarray(array) for name, array in weights.items()}
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise ArtifactError(str(array.dtype), path=directory, field=name, expected=" or ".join(DTYPES))
    texts = {GENERATION: json.dumps(dict(generation), indent=1)} if generation else {}
    if tokenizer:
        texts[TOKENIZER], texts[TOKENIZER_CONFIG] = tokenizer.json(), json.dumps(tokenizer.config(), indent=1)
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}.unfinished"
    try:
        unfinished.mkdir(parents=True)
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        _save_arrays(unfinished / WEIGHTS, arrays, directory)
        body = {
            "format": FORMAT,
            "config": dataclasses.asdict(config),
            "arrays": {name: _describe(array) for name, array in arrays.items()},
            "files": {
                path.relative_to(unfinished).as_posix(): {"bytes": path.stat().st_size, "sha256": _hash_file(path)}
                for path in sorted(unfinished.rglob("*"))
                if path.is_file()
            },
        }
        (unfinished / MARKER).write_text(json.dumps(body | {"sha256": _hash_json(body)}, indent=1), encoding="utf-8")
        unfinished.rename(directory)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(
            f"cannot be written: {reason}", path=directory, fix="check space and permissions"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_free(directory: Path) -> None:
    """Raises: ArtifactError where something is there already; an empty directory is nothing."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ArtifactError("it is there already", path=directory, fix="name another directory, or remove this one")


def open_orbax(directory: str | Path) -> Checkpoint:
    """Open a directory that `save_orbax` wrote. Checks the manifest, and that every file is there in its size.

    Tensor names are leaf names, `metadata["config"]` is the ModelConfig. `read` gives each array as it was saved,
    verified against its hash; call it once a name, from any thread.
    Raises: ArtifactError, from `read` too, naming what is damaged.
    """
    directory = Path(directory)
    manifest_path = directory / MARKER
    manifest = read_json_object(manifest_path, MAX_MANIFEST_BYTES)
    if manifest.get("format") != FORMAT:
        raise ArtifactError(
            f"{manifest.get('format')!r:.40}",
            path=manifest_path,
            field="format",
            expected=str(FORMAT),
            fix="read it with the jaxrt that wrote it, or convert the model again",
        )
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != _hash_json(body):
        raise ArtifactError("differs from its own hash", path=manifest_path, fix=AGAIN)
    config = from_json(ModelConfig, body.get("config"), manifest_path, "config")
    files = from_json(dict[str, _File], body.get("files"), manifest_path, "files")
    arrays = from_json(dict[str, _Array], body.get("arrays"), manifest_path, "arrays")
    for name, file in files.items():
        _check_file(directory, name, file)
    headers = {name: _header(name, array, directory) for name, array in arrays.items()}
    claimed, held = sum(header.nbytes for header in headers.values()), sum(file.bytes for file in files.values())
    if claimed > held:
        raise ArtifactError(
            f"{claimed:,} bytes in {held:,} bytes of files", path=manifest_path, field="arrays", fix=AGAIN
        )
    return Checkpoint(
        path=directory,
        format="orbax",
        metadata={"config": config},
        tensors=headers,
        read=_Arrays(directory / WEIGHTS, headers, {name: array.sha256 for name, array in arrays.items()}).read,
        generation=parse_json_object((directory / GENERATION).read_bytes(), directory / GENERATION)
        if GENERATION in files
        else {},
        tokenizer_files={name: directory / name for name in (TOKENIZER, TOKENIZER_CONFIG) if name in files},
    )


AGAIN = "copy the directory again, or convert the model again"


@dataclasses.dataclass(frozen=True)
class _File:
    bytes: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class _Array:
    shape: tuple[int, ...]
    dtype: Literal["float32", "float16", "bfloat16"]
    sha256: str


def _describe(array: np.ndarray) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": _hash(array)}


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()


def _hash_file(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.stat().st_size <= HASHED_WHOLE else None


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_file(directory: Path, name: str, file: _File) -> None:
    path = directory / name
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ArtifactError(printable(name), path=directory / MARKER, field="files", expected="paths inside it")
    try:
        size = path.stat().st_size
        if size == file.bytes and (size > HASHED_WHOLE or file.sha256 == _hash_file(path)):
            return
    except FileNotFoundError:
        raise ArtifactError("missing", path=path, expected=f"{file.bytes:,} bytes", fix=AGAIN) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    found = "another content" if size == file.bytes else f"{size:,} bytes"
    raise ArtifactError(found, path=path, expected=f"the {file.bytes:,} bytes that were saved", fix=AGAIN)


def _header(name: str, array: _Array, directory: Path) -> TensorHeader:
    if any(extent < 1 for extent in array.shape):
        raise ArtifactError(str(list(array.shape)), path=directory / MARKER, field=name, expected="positive extents")
    nbytes = math.prod(array.shape) * DTYPES[array.dtype].itemsize
    return TensorHeader(name, array.shape, array.dtype, nbytes, directory / WEIGHTS)


class _Arrays:
    """The saved arrays, loaded a group at a time and handed out one by one."""

    def __init__(self, path: Path, headers: Mapping[str, TensorHeader], hashes: Mapping[str, str]) -> None:
        self._path, self._headers, self._hashes = path, headers, hashes
        self._groups = _groups(headers)
        self._waiting: dict[str, np.ndarray] = {}  # loaded with another of their group, not yet asked for
        self._shapes_checked = False
        self._lock = threading.Lock()

    def read(self, name: str) -> np.ndarray:
        if name not in self._headers:
            raise ArtifactError(
                "no such array", path=self._path, field=printable(name), fix=nearest(name, self._headers)
            )
        with self._lock:
            if name not in self._waiting:
                self._load(self._groups[name])
            array = self._waiting.pop(name)
        if _hash(array) != self._hashes[name]:
            raise ArtifactError("differs from its hash", path=self._path, field=name, fix=AGAIN)
        return array

    def _load(self, names: list[str]) -> None:
        from orbax.checkpoint import v1 as ocp

        path = str(self._path.absolute())
        wanted: dict[str, np.ndarray | EllipsisType] = dict.fromkeys(self._headers, ...)
        for name in names:
            wanted[name] = np.empty(0, DTYPES[self._headers[name].dtype])
        try:
            if not self._shapes_checked:  # before memory is taken for them
                self._check_shapes(ocp.metadata(path).metadata)
            loaded = ocp.load(path, wanted)
        except ArtifactError:
            raise
        except Exception as error:  # of many kinds, from Orbax, TensorStore and asyncio
            raise ArtifactError(
                f"Orbax cannot read it: {printable(str(error), 200)}",
                path=self._path,
                field=f"{names[0]} to {names[-1]}",
                fix=AGAIN,
            ) from error
        self._waiting |= {name: loaded[name] for name in names}

    def _check_shapes(self, stored: Any) -> None:
        for name, header in self._headers.items():
            shape = tuple(stored[name].shape)
            if shape != header.shape:
                raise ArtifactError(
                    f"shape {list(shape)}", path=self._path, field=name, expected=str(list(header.shape)), fix=AGAIN
                )
        self._shapes_checked = True


def _groups(headers: Mapping[str, TensorHeader]) -> dict[str, list[str]]:
    """For each array those loaded with it: neighbours up to GROUP_BYTES."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, header in headers.items():
        if filled and filled + header.nbytes > GROUP_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += header.nbytes
    return {name: group for group in groups for name in group}


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray], directory: Path) -> None:
    from orbax.checkpoint import v1 as ocp  # two seconds of import, wanted by few programs

    context = ocp.Context()
    context.array.saving.use_compression = False  # a few percent smaller, five times slower to read
    context.array.saving.enable_post_merge_validation = False  # reads all back, and the hashes prove more
    try:
        with context:
            ocp.save(str(path.absolute()), dict(arrays))
    except OSError:
        raise
    except Exception as error:
        raise ArtifactError(
            f"Orbax cannot save: {printable(str(error), 400)}", path=directory, fix="check space and permissions"
        ) from error


def from_json(kind: Any, value: Any, path: Path, field: str) -> Any:
    """`value`, out of JSON, as the type `kind`: a dataclass, tuple, dict, Literal, optional or plain type.

    Fields that are left out take their defaults. Raises: ArtifactError for anything that does not fit.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    wrong = ArtifactError(f"{value!r:.80}", path=path, field=field, expected=str(kind), fix=AGAIN)
    if dataclasses.is_dataclass(kind):
        fields = {entry.name: entry for entry in dataclasses.fields(kind)}
        if not isinstance(value, dict):
            raise wrong
        for name in value.keys() - fields.keys():
            raise ArtifactError(
                "unknown", path=path, field=f"{field}.{printable(name)}", fix="read it with the jaxrt that wrote it"
            )
        for name in fields.keys() - value.keys():
            if fields[name].default is fields[name].default_factory is dataclasses.MISSING:
                raise ArtifactError("missing", path=path, field=f"{field}.{name}", fix=AGAIN)
        make, hints = cast(type, kind), get_type_hints(kind)
        return make(**{name: from_json(hints[name], item, path, f"{field}.{name}") for name, item in value.items()})
    if origin is tuple:
        if not isinstance(value, list):
            raise wrong
        return tuple(from_json(arguments[0], item, path, field) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong
        return {key: from_json(arguments[1], item, path, f"{field}.{printable(key)}") for key, item in value.items()}
    if origin in (Union, UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else from_json(inner, value, path, field)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            raise wrong
        return value
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind is float or type(value) is not kind:
        raise wrong
    return value
