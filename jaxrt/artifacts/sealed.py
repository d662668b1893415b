"""Sealed directories: named arrays that Orbax keeps, beside a JSON manifest that proves them, every file and itself.

Orbax does not see flipped bytes, so every array and every small file has a SHA-256 in the manifest, and the manifest
has its own. Files over HASHED_WHOLE bytes that Orbax wrote hold nothing but arrays, whose hashes prove them.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import EllipsisType, MappingProxyType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import ml_dtypes
import numpy as np

from jaxrt.artifacts.checkpoint import TensorHeader
from jaxrt.artifacts.files import printable, read_json_object, unreadable
from jaxrt.errors import ArtifactError, nearest

Kind = Literal["model", "session"]


@dataclasses.dataclass(frozen=True)
class KindOfSeal:
    title: str  # as errors call such a directory
    marker: str  # the manifest's name, by which it is known
    folder: str  # of Orbax
    again: str  # how to get another one
    use: str  # what it is good for


KINDS: Mapping[Kind, KindOfSeal] = {
    "model": KindOfSeal(
        "a converted model", "jaxrt.json", "weights", "convert the model again", "load it with jaxrt.load"
    ),
    "session": KindOfSeal(
        "a saved session",
        "jaxrt-session.json",
        "arrays",
        "take the snapshot again",
        "restore it into a session of its model",
    ),
}
UNNAMED: Kind = "model"  # manifests of this kind are older than the others, and do not say their kind

_TYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.int64, np.uint32, np.uint8, np.int8, np.bool_)
DTYPES = {np.dtype(kind).name: np.dtype(kind) for kind in _TYPES}
DtypeName = Literal["float32", "float16", "bfloat16", "int32", "int64", "uint32", "uint8", "int8", "bool"]

MAX_MANIFEST_BYTES = 1 << 26
HASHED_WHOLE = 1 << 20
HASHERS = 4  # threads; hashing leaves the interpreter's lock, at 1.5 GB/s on one core of an x86 server
GROUP_BYTES = 1 << 27  # read by one call of Orbax, which costs 20 ms on such a core whatever it reads
CHUNK_BYTES = 1 << 23  # larger arrays are cut: 185 MB in pieces are read twice as fast as whole, on two cores ...
LEAST_CHUNK_BYTES = 1 << 19  # ... but never into smaller pieces than these
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_RESERVED = ("format", "kind", "arrays", "files", "sha256")


def seal(
    directory: str | Path,
    *,
    kind: Kind,
    format: int,
    body: Mapping[str, Any],
    arrays: Mapping[str, Any],
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a directory that `unseal` reads. All or nothing: it is written beside `directory`, then renamed.

    body: what the manifest shall say, fit for JSON. arrays: numpy or JAX, of DTYPES, any shape; not to be changed
    meanwhile. files: texts by file name.
    Raises: ArtifactError for what a sealed directory cannot hold, and when `directory` is there already or cannot be
    written; TypeError for a body that is no JSON.
    """
    directory, known = Path(directory), KINDS[kind]
    check_free(directory)
    held = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    _check_sealable(directory, known, body, held, files)
    head = {"format": format} | ({} if kind == UNNAMED else {"kind": kind}) | json.loads(json.dumps(dict(body)))
    unfinished = directory.parent / f".{directory.name}.{secrets.token_hex(4)}.unfinished"
    try:
        unfinished.mkdir(parents=True)
        for name, text in files.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        with ThreadPoolExecutor(HASHERS, thread_name_prefix="jaxrt-hash") as pool:
            hashes = {name: pool.submit(_hash, array) for name, array in held.items()}
            _save_arrays(unfinished / known.folder, held, directory)
        manifest = head | {
            "arrays": {
                name: {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": hashes[name].result()}
                for name, array in held.items()
            },
            "files": {
                name: {"bytes": size, "sha256": _hash_file(path) if name in files or size <= HASHED_WHOLE else None}
                for path in sorted(unfinished.rglob("*"))
                if path.is_file()
                for name, size in [(path.relative_to(unfinished).as_posix(), path.stat().st_size)]
            },
        }
        text = json.dumps(manifest | {"sha256": _hash_json(manifest)}, indent=1)
        if len(text) > MAX_MANIFEST_BYTES:
            raise ArtifactError(
                f"a manifest of {len(text):,} bytes", path=directory, expected=f"at most {MAX_MANIFEST_BYTES:,}"
            )
        (unfinished / known.marker).write_text(text, encoding="utf-8")
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


def unseal(directory: str | Path, *, kind: Kind, format: int) -> "Sealed":
    """Open a directory that `seal` wrote. Checks the manifest, and that every file is there as it was saved.

    Files that the manifest does not name are none of its business. Raises: ArtifactError naming what is damaged, or
    what the directory is instead.
    """
    directory, known = Path(directory), KINDS[kind]
    path, again = directory / known.marker, _again(known)
    if not os.path.exists(path):
        for other in KINDS.values():
            if os.path.isfile(directory / other.marker):
                raise ArtifactError(other.title, path=directory, expected=known.title, fix=other.use)
    manifest = read_json_object(path, MAX_MANIFEST_BYTES)
    for field, expected, found in (
        ("kind", kind, manifest.get("kind", UNNAMED)),
        ("format", format, manifest.get("format")),
    ):
        if type(found) is not type(expected) or found != expected:
            fix = f"read it with the jaxrt that wrote it, or {known.again}"
            raise ArtifactError(f"{found!r:.40}", path=path, field=field, expected=str(expected), fix=fix)
    if manifest.pop("sha256", None) != _hash_json(manifest):
        raise ArtifactError("differs from its own hash", path=path, fix=again)
    files = from_json(dict[str, _File], manifest.get("files"), path, "files", again)
    arrays = from_json(dict[str, _Array], manifest.get("arrays"), path, "arrays", again)
    for name, file in files.items():
        _check_file(directory, name, file, path, again)
    headers = {name: _header(name, array, path, directory / known.folder) for name, array in arrays.items()}
    claimed, held = sum(header.nbytes for header in headers.values()), sum(file.bytes for file in files.values())
    if claimed > held:
        raise ArtifactError(f"{claimed:,} bytes in {held:,} bytes of files", path=path, field="arrays", fix=again)
    return Sealed(
        path=directory,
        manifest=path,
        body={key: value for key, value in manifest.items() if key not in _RESERVED},
        files={name: directory / name for name in files},
        headers=headers,
        again=again,
        _hashes={name: array.sha256 for name, array in arrays.items()},
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sealed:
    """An opened directory. Its arrays are loaded a group at a time and handed out one by one."""

    path: Path
    manifest: Path  # the file
    body: Mapping[str, Any]
    files: Mapping[str, Path]
    headers: Mapping[str, TensorHeader]
    again: str  # the last part of errors about damage
    _hashes: Mapping[str, str]
    _waiting: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # loaded, not yet asked for
    _shapes_checked: threading.Event = dataclasses.field(default_factory=threading.Event)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def parse(self, kind: Any, field: str) -> Any:
        """The body's `field` as the type `kind`; see `from_json`. Raises: ArtifactError."""
        return from_json(kind, self.body.get(field), self.manifest, field, self.again)

    def read(self, name: str) -> np.ndarray:
        """One array as it was saved, verified against its hash; call it once a name, from any thread.

        Raises: ArtifactError when it is damaged or there is none of this name.
        """
        if name not in self.headers:
            raise ArtifactError("no such array", path=self.path, field=printable(name), fix=nearest(name, self.headers))
        header = self.headers[name]
        with self._lock:
            if name not in self._waiting:
                self._load(_group(self.headers, name))
            array = self._waiting.pop(name)
        if _hash(array) != self._hashes[name]:
            raise ArtifactError("differs from its hash", path=header.file, field=printable(name), fix=self.again)
        return array

    def read_all(self) -> dict[str, np.ndarray]:
        """Every array, as `read` gives it; one call of Orbax, then hashed in parallel. Raises: ArtifactError."""
        with self._lock:
            self._load(list(self.headers))
        with ThreadPoolExecutor(HASHERS, thread_name_prefix="jaxrt-hash") as pool:
            return dict(zip(self.headers, pool.map(self.read, self.headers), strict=True))

    def _load(self, names: list[str]) -> None:
        full = [name for name in names if self.headers[name].nbytes]
        for name in names:
            if name not in full:  # Orbax was not given it
                self._waiting[name] = np.empty(self.headers[name].shape, DTYPES[self.headers[name].dtype])
        if not full:
            return
        from orbax.checkpoint import v1 as ocp  # two seconds of import, wanted by few programs

        folder = self.headers[full[0]].file
        wanted: dict[str, np.ndarray | EllipsisType] = {
            name: ... for name, header in self.headers.items() if header.nbytes
        }
        for name in full:
            wanted[name] = np.empty(0, DTYPES[self.headers[name].dtype])
        try:
            if not self._shapes_checked.is_set():  # before memory is taken for what Orbax holds
                self._check_shapes(ocp.metadata(str(folder.absolute())).metadata)
            loaded = ocp.load(str(folder.absolute()), wanted)
        except ArtifactError:
            raise
        except Exception as error:  # of many kinds, from Orbax, TensorStore and asyncio
            raise ArtifactError(
                f"Orbax cannot read it: {printable(str(error), 200)}",
                path=folder,
                field=printable(f"{full[0]} to {full[-1]}"),
                fix=self.again,
            ) from error
        self._waiting.update({name: loaded[name] for name in full})

    def _check_shapes(self, stored: Any) -> None:
        for name, header in self.headers.items():
            shape = tuple(stored[name].shape) if header.nbytes else header.shape
            if shape != header.shape:
                raise ArtifactError(
                    f"shape {list(shape)}",
                    path=header.file,
                    field=printable(name),
                    expected=str(list(header.shape)),
                    fix=self.again,
                )
        self._shapes_checked.set()


@dataclasses.dataclass(frozen=True)
class _File:
    bytes: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class _Array:
    shape: tuple[int, ...]
    dtype: DtypeName
    sha256: str


def _again(known: KindOfSeal) -> str:
    return f"copy the directory again, or {known.again}"


def _check_sealable(
    directory: Path,
    known: KindOfSeal,
    body: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    files: Mapping[str, str],
) -> None:
    for name in body:
        if name in _RESERVED:
            raise ArtifactError("the manifest's own field", path=directory, field=name, expected="another name")
    for name in files:
        if not _NAME.fullmatch(name) or name in (known.marker, known.folder):
            raise ArtifactError("cannot name a file", path=directory, field=printable(name), expected=_NAME.pattern)
    for name, array in arrays.items():
        if not _NAME.fullmatch(name):
            raise ArtifactError("cannot name an array", path=directory, field=printable(name), expected=_NAME.pattern)
        if array.dtype not in DTYPES.values():  # by more than its name, which leaves out the order of bytes
            found = array.dtype.str if array.dtype.name in DTYPES else array.dtype.name
            raise ArtifactError(found, path=directory, field=name, expected=" or ".join(DTYPES))


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_file(directory: Path, name: str, file: _File, manifest: Path, again: str) -> None:
    path, inside = directory / name, PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts or str(inside) != name:
        raise ArtifactError(printable(name), path=manifest, field="files", expected="paths inside it")
    try:
        status = path.stat()
        size = status.st_size if stat.S_ISREG(status.st_mode) else -1  # opening a pipe may block
        unproved = file.sha256 is None and size > HASHED_WHOLE
        if size == file.bytes and (unproved or file.sha256 == _hash_file(path)):
            return
    except FileNotFoundError:
        raise ArtifactError("missing", path=path, expected=f"{file.bytes:,} bytes", fix=again) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    found = "another content" if size == file.bytes else f"{size:,} bytes" if size >= 0 else "no regular file"
    raise ArtifactError(found, path=path, expected=f"the {file.bytes:,} bytes that were saved", fix=again)


def _header(name: str, array: _Array, manifest: Path, folder: Path) -> TensorHeader:
    try:
        nbytes = np.broadcast_to(np.empty((), DTYPES[array.dtype]), array.shape).nbytes  # takes no memory
    except (ValueError, OverflowError) as error:  # what no array can be
        raise ArtifactError(
            f"shape {printable(str(list(array.shape)))}", path=manifest, field=printable(name), expected="a shape"
        ) from error
    return TensorHeader(name, array.shape, array.dtype, nbytes, folder)


def _group(headers: Mapping[str, TensorHeader], name: str) -> list[str]:
    """The arrays that are loaded with `name`: neighbours up to GROUP_BYTES, the same for each of them."""
    group: list[str] = []
    filled = 0
    for other, header in headers.items():
        if filled and filled + header.nbytes > GROUP_BYTES:
            if name in group:
                break
            group, filled = [], 0
        group.append(other)
        filled += header.nbytes
    return group


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray], directory: Path) -> None:
    full = {name: array for name, array in arrays.items() if array.size}  # the manifest alone says it all of others
    if not full:
        return
    from orbax.checkpoint import v1 as ocp  # two seconds of import, wanted by few programs

    context = ocp.Context()
    saving = context.array.saving
    saving.use_compression = False  # a few percent smaller, five times slower to read
    saving.enable_post_merge_validation = False  # reads all back, and the hashes prove more
    saving.scoped_storage_options_creator = lambda key, value: saving.StorageOptions(shard_axes=_axes_cut(value))
    context.memory.deepcopy_host_arrays = False  # nobody changes them meanwhile; copying 370 MB took a second
    try:
        with context:
            ocp.save(str(path.absolute()), full)
    except OSError:
        raise
    except Exception as error:
        raise ArtifactError(
            f"Orbax cannot save: {printable(str(error), 400)}", path=directory, fix="check space and permissions"
        ) from error


def _axes_cut(array: np.ndarray) -> tuple[int, ...]:
    """The leading axes along which an array is stored in pieces, each contiguous in memory."""
    axes, piece = 0, array.nbytes
    while piece > CHUNK_BYTES and piece // array.shape[axes] >= LEAST_CHUNK_BYTES:
        piece //= array.shape[axes]
        axes += 1
    return tuple(range(axes))


def from_json(kind: Any, value: Any, path: Path, field: str, fix: str = "copy the directory again") -> Any:
    """`value`, out of JSON, as the type `kind`: a dataclass, tuple, dict, Literal, optional or plain type.

    Fields that are left out take their defaults. Raises: ArtifactError for anything that does not fit.
    """
    origin, arguments = get_origin(kind), get_args(kind)

    def wrong() -> ArtifactError:
        return ArtifactError(f"{value!r:.80}", path=path, field=field, expected=str(kind), fix=fix)

    if dataclasses.is_dataclass(kind):
        fields = {entry.name: entry for entry in dataclasses.fields(kind)}
        if not isinstance(value, dict):
            raise wrong()
        for name in value.keys() - fields.keys():
            raise ArtifactError(
                "unknown", path=path, field=f"{field}.{printable(name)}", fix="read it with the jaxrt that wrote it"
            )
        for name in fields.keys() - value.keys():
            if fields[name].default is fields[name].default_factory is dataclasses.MISSING:
                raise ArtifactError("missing", path=path, field=f"{field}.{name}", fix=fix)
        make, hints = cast(type, kind), get_type_hints(kind)
        return make(
            **{name: from_json(hints[name], item, path, f"{field}.{name}", fix) for name, item in value.items()}
        )
    if origin is tuple:
        if not isinstance(value, list):
            raise wrong()
        return tuple(from_json(arguments[0], item, path, field, fix) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong()
        return {
            key: from_json(arguments[1], item, path, f"{field}.{printable(key)}", fix) for key, item in value.items()
        }
    if origin in (Union, UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else from_json(inner, value, path, field, fix)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            raise wrong()
        return value
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind is float or type(value) is not kind:
        raise wrong()
    return value
