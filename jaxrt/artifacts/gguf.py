"""GGUF files, version 2 and 3: a bounded header reader over a memory map, and tensors as numpy arrays.

Block layouts come from the gguf package. Its reader trusts the file, so the header is read here.
"""

import math
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from jaxrt.artifacts.checkpoint import Checkpoint, TensorHeader
from jaxrt.artifacts.files import printable, regular_size, unreadable
from jaxrt.errors import ArtifactError, UnsupportedModel, nearest

# Bounds on what a header may ask for. The largest vocabularies in use (262,144 tokens, 514,906 merges) take
# 16 MiB and 1.3 million array elements.
MAX_HEADER_BYTES = 1 << 26
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ELEMENTS = 1 << 21  # of all arrays together
MAX_STRING_BYTES = 1 << 24
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own bound
MAX_NAME_BYTES = 1024  # the format says 64; longer names are in circulation and do no harm
MAX_DIMENSIONS = 4

DEFAULT_ALIGNMENT = 32
MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # key length, key, type, value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, dimensions, one extent, type, offset

# Elements dequantised at a time: temporaries of 512 KB stay in the second-level cache, and malloc keeps their pages
# (all of the 135M demo model: 0.65 s of one core, against 1.4 s for whole tensors).
DEQUANTIZE_ELEMENTS = 1 << 17

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("<u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_FLOATS = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
}
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass
class _Cursor:
    """A position in a mapped header. Every read is checked against `end`; errors name `field`."""

    path: Path
    data: mmap.mmap
    size: int  # bytes of the file
    position: int = 0
    elements: int = 0  # array elements read so far
    field: str = "header"

    @property
    def end(self) -> int:
        return min(self.size, MAX_HEADER_BYTES)

    def fail(self, found: str, expected: str = "", fix: str = "") -> NoReturn:
        raise ArtifactError(found, path=self.path, field=self.field, expected=expected, fix=fix)

    def need(self, count: int, what: str) -> None:
        """Refuses unless `count` more bytes are there."""
        if count <= self.end - self.position:
            return
        if self.size > MAX_HEADER_BYTES and count <= self.size - self.position:
            self.fail(f"{what} lies past the first {MAX_HEADER_BYTES:,} bytes", expected="a smaller header")
        left = self.size - self.position
        self.fail(f"{what} takes {count:,} bytes, the file has {left:,} more", fix="copy or download it again")

    def number(self, form: struct.Struct, what: str) -> int:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return value

    def strings(self, count: int, what: str, most: int = MAX_STRING_BYTES) -> list[str]:
        """`count` strings: a length of 64 bits, then UTF-8. A vocabulary takes this path, so the loop is kept bare."""
        data, position, end, length_of = self.data, self.position, self.end, _U64.unpack_from
        texts = []
        for _ in range(count):
            start = position + 8
            if start > end:
                break
            (length,) = length_of(data, position)
            if length > most or length > end - start:
                break
            position = start + length
            try:
                texts.append(str(data[start:position], "utf-8"))
            except UnicodeDecodeError as error:
                self.fail(f"{what} is not UTF-8 ({error.reason})", expected="valid UTF-8")
        self.position = position
        if len(texts) < count:  # the next one did not fit: say how
            length = self.number(_U64, f"the length of {what}")
            if length > most:
                self.fail(f"{what} of {length:,} bytes", expected=f"at most {most:,}")
            self.need(length, what)
        return texts

    def scalars(self, kind: GGUFValueType, count: int, what: str) -> list[Any]:
        dtype = _SCALARS[kind]
        self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype, count, self.position)
        self.position += values.nbytes
        if kind is GGUFValueType.BOOL:
            if count and values.max() > 1:
                self.fail(f"{what} has a boolean of value {values.max()}", expected="0 or 1")
            values = values.astype(bool)
        return values.tolist()

    def kind(self, what: str) -> GGUFValueType:
        number = self.number(_U32, what)
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"unknown value type {number}", expected=f"0 to {max(GGUFValueType).value}")

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.ARRAY:
            return self.array()
        return self.strings(1, "its text")[0] if kind is GGUFValueType.STRING else self.scalars(kind, 1, "its value")[0]

    def array(self) -> list[Any]:
        kind, count = self.kind("its element type"), self.number(_U64, "its length")
        if kind is GGUFValueType.ARRAY:
            self.fail("an array of arrays", expected="an array of numbers or strings")
        is_text = kind is GGUFValueType.STRING
        self.need(count * (8 if is_text else _SCALARS[kind].itemsize), f"an array of {count:,} elements")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            self.fail(f"arrays of {self.elements:,} elements so far", expected=f"at most {MAX_ELEMENTS:,} in a file")
        return self.strings(count, "a string of the array") if is_text else self.scalars(kind, count, "its elements")


@dataclass(frozen=True)
class _File:
    """One opened file: a part of a split checkpoint, or all of it."""

    path: Path
    data: mmap.mmap
    metadata: dict[str, Any]
    tensors: dict[str, TensorHeader]
    starts: dict[str, int]  # byte position of each tensor in the file

    def blocks(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8 [outputs, bytes of a row]: a view of the file."""
        header, start = self._there(name)
        return np.frombuffer(self.data, np.uint8, header.nbytes, start).reshape(math.prod(header.shape[:-1]), -1)

    def read(self, name: str) -> np.ndarray:
        header, start = self._there(name)
        if dtype := _FLOATS.get(header.dtype):
            return np.frombuffer(self.data, dtype, math.prod(header.shape), start).reshape(header.shape)
        try:
            return _dequantize(self.blocks(name).reshape(-1), GGMLQuantizationType[header.dtype]).reshape(header.shape)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{self.path}: tensor {printable(name)!r} is of type {header.dtype}",
                expected="a floating-point type or a quantised one that the gguf package can dequantise",
            ) from None

    def _there(self, name: str) -> tuple[TensorHeader, int]:
        header, start = self.tensors[name], self.starts[name]
        if self.data.size() < start + header.nbytes:  # touching pages that are gone would kill the process
            raise ArtifactError(
                "the file has shrunk since it was opened", path=self.path, field=printable(name), fix="load it again"
            )
        return header, start


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file, or all files of the split set (`name-00001-of-0000N.gguf`) that it is one of.

    Headers are validated before any tensor is touched. `read` returns F32, F16, BF16 and F64 tensors as read-only
    views of the memory map, quantised ones as new float32 arrays; shapes are row-major, so a linear map is
    [outputs, inputs]. It may be called from several threads.

    Raises: ArtifactError for a file that is no valid GGUF, naming file and field, and from `read` for a name that is
    not there; UnsupportedModel from `read` for integer tensors and block types that cannot be dequantised.
    """
    files = [_open_file(part) for part in _split_set(Path(path))]
    _check_split(files)
    owners: dict[str, _File] = {}
    for file in files:
        for name in file.tensors:
            if name in owners:
                raise ArtifactError(
                    f"also in {owners[name].path.name}",
                    path=file.path,
                    field=printable(name),
                    expected="unique tensor names",
                )
            owners[name] = file

    def owner(name: str) -> _File:
        if name not in owners:
            raise ArtifactError("no such tensor", path=path, field=printable(name), fix=nearest(name, owners))
        return owners[name]

    tensors = {name: file.tensors[name] for name, file in owners.items()}
    return Checkpoint(
        path=Path(path),
        format="gguf",
        metadata=files[0].metadata,
        tensors=tensors,
        read=lambda name: owner(name).read(name),
        read_packed=lambda name: owner(name).blocks(name),
    )


def _open_file(path: Path) -> _File:
    size = regular_size(path)
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: it shrank in between
        raise unreadable(path, error) from error
    cursor = _Cursor(path, data, size)
    n_tensors, n_pairs = _read_preamble(cursor)
    metadata = _read_metadata(cursor, n_pairs)
    tensors, offsets = _read_tensors(cursor, n_tensors)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    starts = _place(cursor, tensors, offsets, alignment)
    return _File(path, data, metadata, tensors, starts)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and counts."""
    cursor.field = "magic"
    cursor.need(4, "the magic number")
    magic = cursor.data[:4]
    cursor.position = 4
    if magic == b"FUGG":
        cursor.fail("big-endian GGUF", expected="little-endian", fix="convert it with gguf-convert-endian")
    if magic != b"GGUF":
        cursor.fail(f"the file begins with {magic!r}", expected="b'GGUF'", fix="check that this is a GGUF file")
    cursor.field = "version"
    version = cursor.number(_U32, "the version")
    if version and version & 0xFFFF == 0:  # a small number, bytes swapped
        cursor.fail("big-endian GGUF", expected="little-endian", fix="convert it with gguf-convert-endian")
    if version not in (2, 3):
        cursor.fail(f"GGUF version {version}", expected="2 or 3", fix="convert the model with a current llama.cpp")
    counts = []
    for field, most, least_bytes in (("n_tensors", MAX_TENSORS, MIN_TENSOR_BYTES), ("n_kv", MAX_PAIRS, MIN_PAIR_BYTES)):
        cursor.field = field
        count = cursor.number(_U64, "the count")
        if count > most:
            cursor.fail(f"{count:,}", expected=f"at most {most:,}")
        cursor.need(count * least_bytes, f"a header of {count:,} entries")
        counts.append(count)
    return counts[0], counts[1]


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.field = f"key {index}"
        (key,) = cursor.strings(1, "the key", MAX_KEY_BYTES)
        if not key:
            cursor.fail("an empty key", expected="a name")
        cursor.field = printable(key)
        if key in metadata:
            cursor.fail("the key appears twice", expected="unique keys")
        kind = cursor.kind("its value type")
        metadata[key] = cursor.value(kind)
        if key == "general.alignment":
            alignment = metadata[key]
            if kind is not GGUFValueType.UINT32:
                cursor.fail(f"of type {kind.name}", expected="UINT32")
            if alignment < 8 or alignment & (alignment - 1):
                cursor.fail(f"{alignment}", expected="a power of two, at least 8")
    return metadata


def _read_tensors(cursor: _Cursor, count: int) -> tuple[dict[str, TensorHeader], dict[str, int]]:
    """Tensor headers, and the offsets the file gives them in its data section."""
    tensors: dict[str, TensorHeader] = {}
    offsets: dict[str, int] = {}
    for index in range(count):
        cursor.field = f"tensor {index}"
        (name,) = cursor.strings(1, "the name", MAX_NAME_BYTES)
        if not name:
            cursor.fail("an empty name", expected="a name")
        cursor.field = printable(name)
        if name in tensors:
            cursor.fail("the tensor appears twice", expected="unique tensor names")
        rank = cursor.number(_U32, "the number of dimensions")
        if not 1 <= rank <= MAX_DIMENSIONS:
            cursor.fail(f"{rank} dimensions", expected=f"1 to {MAX_DIMENSIONS}")
        extents = [cursor.number(_U64, "the shape") for _ in range(rank)]  # innermost first
        kind = cursor.number(_U32, "the type")
        offsets[name] = cursor.number(_U64, "the offset")
        if 0 in extents:
            cursor.fail(f"shape {extents[::-1]}", expected="no empty dimension")
        try:
            dtype = GGMLQuantizationType(kind)
        except ValueError:
            cursor.fail(
                f"unknown tensor type {kind}",
                expected=f"one of the {len(GGMLQuantizationType)} types the gguf package knows",
                fix="update the gguf package, or quantise the model to a current type",
            )
        block, block_bytes = GGML_QUANT_SIZES[dtype]
        if extents[0] % block:
            cursor.fail(f"rows of {extents[0]:,} values", expected=f"a multiple of {block}, the block of {dtype.name}")
        nbytes = math.prod(extents) // block * block_bytes
        tensors[name] = TensorHeader(name, tuple(extents[::-1]), dtype.name, nbytes, cursor.path)
    return tensors, offsets


def _place(
    cursor: _Cursor, tensors: dict[str, TensorHeader], offsets: dict[str, int], alignment: int
) -> dict[str, int]:
    """Byte positions in the file: aligned, inside it, and of no two tensors the same."""
    base = -(-cursor.position // alignment) * alignment
    starts: dict[str, int] = {}
    previous, free = "", base
    for name, offset in sorted(offsets.items(), key=lambda item: item[1]):
        cursor.field = printable(name)
        start, nbytes = base + offset, tensors[name].nbytes
        if offset % alignment:
            cursor.fail(f"offset {offset:,}", expected=f"a multiple of the alignment, {alignment}")
        if start + nbytes > cursor.size:
            cursor.fail(
                f"data at bytes {start:,} to {start + nbytes:,}",
                expected=f"the end within the file's {cursor.size:,} bytes",
                fix="copy or download it again: it may be incomplete",
            )
        if start < free:
            cursor.fail(f"its data overlaps that of {printable(previous)!r}", expected="tensors apart from each other")
        starts[name] = start
        previous, free = name, start + nbytes
    return starts


def _split_set(path: Path) -> list[Path]:
    """The files to open for `path`: itself, or every part of the set its name says it belongs to."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count:
        raise ArtifactError(f"part {number} of {count}", path=path, field="file name", expected=f"1 to {count}")
    regular_size(path)  # what keeps the named part from being opened is said first
    parts = [path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    missing = [part.name for part in parts if not os.path.exists(part)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ArtifactError(
            f"missing of {count} parts: {', '.join(missing[:3])}{more}",
            path=path,
            fix="put all parts into one directory",
        )
    return parts


def _check_split(files: list[_File]) -> None:
    """What each part says of the set must agree with the parts that are there."""
    total = sum(len(file.tensors) for file in files)
    for number, file in enumerate(files):
        known = {"split.count": len(files), "split.no": number, "split.tensors.count": total}
        for key, expected in known.items():
            found = file.metadata.get(key)
            if len(files) == 1 and found is None:
                continue
            if found != expected:
                raise ArtifactError(
                    f"{found}",
                    path=file.path,
                    field=key,
                    expected=f"{expected}, by the files opened",
                    fix="keep the parts of a split model together under the names they were written with",
                )


def _dequantize(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks of bytes as float32, both flat."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count = len(blocks) // block_bytes
    values = np.empty(count * block, np.float32)
    step = max(1, DEQUANTIZE_ELEMENTS // block)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite scales; weights are checked where they are loaded
        for first in range(0, count, step):
            last = min(first + step, count)
            part = blocks[first * block_bytes : last * block_bytes]
            values[first * block : last * block] = dequantize(part[None], kind)[0]
    return values
