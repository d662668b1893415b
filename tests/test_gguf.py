"""GGUF: what is written is read, quantised blocks mean what their layout says, and a bad file is refused by name."""

import os
import struct
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType, GGUFValueType

from jaxrt.artifacts.gguf import MAX_ELEMENTS, MAX_NAME_BYTES, open_gguf
from jaxrt.errors import ArtifactError, JaxrtError, UnsupportedModel
from tests.files import (
    gguf_bytes,
    gguf_pair,
    gguf_start,
    gguf_string,
    gguf_tensor,
    hf_to_gguf_tensors,
    tiny_gguf_metadata,
    tiny_llama_tensors,
    write_gguf,
)

F32, Q8_0, Q4_1 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1
SECONDS, BYTES = 2.0, 200_000_000  # what refusing a file may take


def refusal(path: Path) -> ArtifactError:
    """The error that opening `path` gives, within the bounds on time and memory."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(ArtifactError) as caught:
            open_gguf(path)
        assert time.perf_counter() - started < SECONDS
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    return caught.value


# Reading ------------------------------------------------------------------------------------------------------------


def test_metadata_of_every_type_reads_back_as_python_values(tmp_path: Path) -> None:
    written = {
        "text": "na\u00efve \U0001f389",
        "empty text": "",
        "yes": True,
        "small": np.uint8(255),
        "negative": np.int8(-3),
        "short": np.uint16(65535),
        "int16": np.int16(-32768),
        "count": 7,
        "below zero": -7,
        "large": np.uint64(2**64 - 1),
        "int64": np.int64(-(2**63)),
        "float": 0.5,
        "double": np.float64(0.1),
        "texts": ["a", "", "\u65e5\u672c"],
        "flags": [True, False],
        "numbers": [1, 2, 3],
        "floats": np.array([1.5, -2.0], np.float32),
        "none": np.array([], np.uint32),
    }
    read = open_gguf(write_gguf(tmp_path / "m.gguf", written, {})).metadata
    expected = {
        key: value.tolist() if isinstance(value, np.ndarray | np.generic) else value for key, value in written.items()
    }
    assert dict(read) == expected
    assert {key: type(value) for key, value in read.items()} == {key: type(value) for key, value in expected.items()}
    assert [type(flag) for flag in read["flags"]] == [bool, bool]


@pytest.mark.parametrize("alignment", [8, 32, 64])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_float_tensors_read_back_as_written_with_the_shape_numpy_had(
    tmp_path: Path, dtype: type, alignment: int
) -> None:
    rng = np.random.default_rng(0)
    shapes = {"vector": (5,), "map": (3, 7), "experts": (2, 3, 5), "four": (2, 1, 3, 1)}
    written = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", {"a": 1}, written, alignment))
    assert checkpoint.format == "gguf" and list(checkpoint.tensors) == list(shapes)
    for name, array in written.items():
        header, read = checkpoint.tensors[name], checkpoint.read(name)
        assert header.shape == read.shape == array.shape and read.dtype == array.dtype
        assert header.nbytes == array.nbytes and header.file == tmp_path / "m.gguf"
        assert read.tobytes() == array.tobytes()


def test_float32_tensors_are_read_only_views_that_outlive_the_checkpoint(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    read = open_gguf(write_gguf(tmp_path / "m.gguf", {}, {"a": array})).read("a")
    assert not read.flags.owndata and not read.flags.writeable
    np.testing.assert_array_equal(read, array)


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({"a": "b"}, {"t": np.ones(4, np.float32)}, version=2))
    assert open_gguf(path).metadata == {"a": "b"}
    np.testing.assert_array_equal(open_gguf(path).read("t"), np.ones(4))


def test_q8_0_blocks_are_a_scale_and_32_signed_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    scales = np.array([[0.5, -0.125], [2.0, 0.0]], np.float16)
    quants = rng.integers(-128, 128, (2, 2, 32)).astype(np.int8)
    data = b"".join(scales[r, b].tobytes() + quants[r, b].tobytes() for r in range(2) for b in range(2))
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", {}, {"w": (data, (2, 64), Q8_0)}))
    assert checkpoint.tensors["w"].dtype == "Q8_0" and checkpoint.tensors["w"].nbytes == 4 * 34
    read = checkpoint.read("w")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, (scales[..., None].astype(np.float32) * quants).reshape(2, 64))


def test_q4_1_blocks_are_a_scale_a_minimum_and_16_bytes_low_halves_first(tmp_path: Path) -> None:
    rows, blocks = 3_000, 2  # more than one piece of dequantisation
    rng = np.random.default_rng(2)
    scales = rng.standard_normal((rows, blocks, 1)).astype(np.float16)
    minima = rng.standard_normal((rows, blocks, 1)).astype(np.float16)
    packed = rng.integers(0, 256, (rows, blocks, 16)).astype(np.uint8)
    data = np.concatenate([scales.view(np.uint8), minima.view(np.uint8), packed], axis=-1).tobytes()
    quants = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)
    expected = scales.astype(np.float32) * quants + minima.astype(np.float32)
    read = open_gguf(write_gguf(tmp_path / "m.gguf", {}, {"w": (data, (rows, 64), Q4_1)})).read("w")
    np.testing.assert_array_equal(read, expected.reshape(rows, 64))


def test_blocks_with_infinite_scales_read_without_a_warning(tmp_path: Path) -> None:
    data = np.float16(np.inf).tobytes() + bytes(32)
    read = open_gguf(write_gguf(tmp_path / "m.gguf", {}, {"w": (data, (32,), Q8_0)})).read("w")
    assert np.isnan(read).all()


def test_the_tiny_model_reads_back_under_gguf_names(tmp_path: Path) -> None:
    tensors = hf_to_gguf_tensors(tiny_llama_tensors(np.random.default_rng(3)))
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", tiny_gguf_metadata(), tensors))
    assert checkpoint.metadata["llama.block_count"] == 2
    assert checkpoint.tensors["blk.1.ffn_down.weight"].shape == (32, 48)  # [outputs, inputs]
    for name, array in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), array)


@pytest.mark.parametrize("kind", ["I32", "Q8_1", "Q8_K"])
def test_types_that_are_no_weights_are_refused_when_read_and_named(tmp_path: Path, kind: str) -> None:
    tensors = {"w": (bytes(1024), (256,), GGMLQuantizationType[kind]), "ok": np.ones(3, np.float32)}
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", {}, tensors))
    np.testing.assert_array_equal(checkpoint.read("ok"), np.ones(3))
    with pytest.raises(UnsupportedModel, match=f"'w' is of type {kind}"):
        checkpoint.read("w")


def test_a_tensor_that_is_not_there_is_named_with_the_nearest_that_is(tmp_path: Path) -> None:
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", {}, {"output.weight": np.ones(3, np.float32)}))
    with pytest.raises(ArtifactError, match="outptu.weight: no such tensor; did you mean 'output.weight'"):
        checkpoint.read("outptu.weight")


def test_a_file_that_shrinks_after_opening_is_refused_instead_of_killing_the_process(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"w": np.ones(100_000, np.float32)})
    checkpoint = open_gguf(path)
    os.truncate(path, 4096)
    with pytest.raises(ArtifactError, match="shrunk"):
        checkpoint.read("w")


# Refusing -----------------------------------------------------------------------------------------------------------

HUGE = 1 << 40
ARRAY, STRING, UINT32 = GGUFValueType.ARRAY, GGUFValueType.STRING, GGUFValueType.UINT32
GOOD = gguf_bytes({"a": 1}, {"w": np.ones(16, np.float32)})


def pairs(*encoded: bytes, padding: int = 4096) -> bytes:
    """A file of metadata alone, with room behind it so that counts and lengths meet their own checks."""
    return gguf_start(0, len(encoded)) + b"".join(encoded) + bytes(padding)


def typed(key: str | bytes, kind: int, value: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return typed("key", ARRAY, struct.pack("<IQ", kind, count) + data)


def tensors(*encoded: bytes, data: int = 4096, metadata: tuple[bytes, ...] = ()) -> bytes:
    """A file of tensor headers and `data` zero bytes."""
    header = gguf_start(len(encoded), len(metadata)) + b"".join(metadata) + b"".join(encoded)
    return header + bytes(-len(header) % 32) + bytes(data)


def nested(depth: int) -> bytes:
    return typed("key", ARRAY, struct.pack("<IQ", ARRAY, 1) * depth)


# name -> the file, the field that must be named, words that must be in the message
BAD: dict[str, tuple[bytes, str, str]] = {
    "three bytes": (b"GGU", "magic", "the file has 3 more"),
    "bad magic": (b"GGML" + GOOD[4:], "magic", "begins with b'GGML'"),
    "magic reversed": (b"FUGG" + GOOD[4:], "magic", "big-endian"),
    "version big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version", "big-endian"),
    "version 0": (gguf_start(0, 0, version=0), "version", "version 0"),
    "version 1": (gguf_start(0, 0, version=1), "version", "version 1; expected 2 or 3"),
    "version 4": (gguf_start(0, 0, version=4), "version", "version 4"),
    "version cut": (b"GGUF\3\0", "version", "the file has 2 more"),
    "counts cut": (gguf_start(0, 0)[:-3], "n_kv", "the file has 5 more"),
    "n_tensors -1": (gguf_start(2**64 - 1, 0), "n_tensors", "18,446,744,073,709,551,615"),
    "n_tensors more than bytes": (gguf_start(50_000, 0) + bytes(4096), "n_tensors", "50,000 entries"),
    "n_tensors more than allowed": (gguf_start(70_000, 0) + bytes(4096), "n_tensors", "at most 65,536"),
    "n_kv -1": (gguf_start(0, 2**64 - 1), "n_kv", "18,446,744,073,709,551,615"),
    "n_kv more than bytes": (gguf_start(0, 50_000) + bytes(4096), "n_kv", "50,000 entries"),
    "n_kv more than written": (gguf_start(0, 3) + gguf_pair("a", "b" * 100), "key 1", "the file has 0 more"),
    "key length huge": (pairs(struct.pack("<Q", HUGE)), "key 0", "1,099,511,627,776 bytes"),
    "key length -1": (pairs(struct.pack("<Q", 2**64 - 1)), "key 0", "at most 65,535"),
    "key past the end": (pairs(struct.pack("<Q", 5000)), "key 0", "takes 5,000 bytes"),
    "key empty": (pairs(gguf_pair("", 1)), "key 0", "empty key"),
    "key not UTF-8": (pairs(gguf_pair(b"\xff\xfe", 1)), "key 0", "not UTF-8"),
    "key twice": (pairs(gguf_pair("a.b", 1), gguf_pair("a.b", 1)), "a.b", "twice"),
    "type unknown": (pairs(typed("key", 13, bytes(8))), "key", "unknown value type 13"),
    "type -1": (pairs(typed("key", 2**32 - 1, bytes(8))), "key", "unknown value type 4294967295"),
    "type cut": (gguf_start(0, 1) + gguf_string("abcdefg"), "abcdefg", "its value type takes 4 bytes"),
    "value cut": (gguf_start(0, 1) + typed("key", UINT32, b"\1\0"), "key", "its value takes 4 bytes"),
    "string past the end": (pairs(typed("key", STRING, struct.pack("<Q", 5000) + b"x")), "key", "takes 5,000 bytes"),
    "string huge": (pairs(typed("key", STRING, struct.pack("<Q", HUGE))), "key", "1,099,511,627,776 bytes"),
    "string not UTF-8": (pairs(gguf_pair("key", "x")[:-1] + b"\xc3"), "key", "not UTF-8"),
    "string of a surrogate": (pairs(typed("key", STRING, gguf_string(b"\xed\xa0\x80"))), "key", "not UTF-8"),
    "boolean of 2": (pairs(typed("key", GGUFValueType.BOOL, b"\2")), "key", "boolean of value 2"),
    "array of 2^40 bytes": (pairs(array(GGUFValueType.UINT8, HUGE)), "key", "1,099,511,627,776 elements"),
    "array of 2^40 strings": (pairs(array(STRING, HUGE)), "key", "1,099,511,627,776 elements"),
    "array of 2^64-1": (pairs(array(GGUFValueType.FLOAT64, 2**64 - 1)), "key", "elements"),
    "array of unknown type": (pairs(array(77, 1)), "key", "unknown value type 77"),
    "array with a long string": (pairs(array(STRING, 2, gguf_string("a") + struct.pack("<Q", 9000))), "key", "9,000"),
    "array with bad UTF-8": (pairs(array(STRING, 1, gguf_string(b"\x80"))), "key", "not UTF-8"),
    "array cut": (gguf_start(0, 1) + array(UINT32, 4, bytes(15)), "key", "4 elements takes 16 bytes"),
    "array of arrays": (pairs(nested(2)), "key", "array of arrays"),
    "arrays 5,000 deep": (pairs(nested(5_000)), "key", "array of arrays"),
    "array of more than allowed": (
        pairs(array(GGUFValueType.UINT8, MAX_ELEMENTS + 1), padding=MAX_ELEMENTS + 4096),
        "key",
        "at most 2,097,152",
    ),
    "arrays of more than allowed": (
        pairs(
            *(
                typed(f"key{n}", ARRAY, struct.pack("<IQ", GGUFValueType.UINT8, 1 << 20) + bytes(1 << 20))
                for n in range(3)
            )
        ),
        "key2",
        "at most 2,097,152",
    ),
    "alignment 0": (tensors(metadata=(gguf_pair("general.alignment", 0),)), "general.alignment", "power of two"),
    "alignment 4": (tensors(metadata=(gguf_pair("general.alignment", 4),)), "general.alignment", "at least 8"),
    "alignment 48": (tensors(metadata=(gguf_pair("general.alignment", 48),)), "general.alignment", "power of two"),
    "alignment a string": (tensors(metadata=(gguf_pair("general.alignment", "32"),)), "general.alignment", "STRING"),
    "alignment of 64 bits": (
        tensors(metadata=(gguf_pair("general.alignment", np.uint64(32)),)),
        "general.alignment",
        "expected UINT32",
    ),
    "alignment past the end": (
        tensors(gguf_tensor("w", (4,), F32, 0), metadata=(gguf_pair("general.alignment", 1 << 31),)),
        "w",
        "data at bytes",
    ),
    "name length huge": (tensors(struct.pack("<Q", HUGE), bytes(64)), "tensor 0", "1,099,511,627,776 bytes"),
    "name too long": (
        tensors(gguf_tensor("w" * (MAX_NAME_BYTES + 1), (4,), F32, 0)),
        "tensor 0",
        "1,025 bytes; expected at most 1,024",
    ),
    "name empty": (tensors(gguf_tensor("", (4,), F32, 0), bytes(8)), "tensor 0", "empty name"),
    "name not UTF-8": (tensors(gguf_tensor(b"\xfe", (4,), F32, 0)), "tensor 0", "not UTF-8"),
    "name twice": (tensors(gguf_tensor("w", (4,), F32, 0), gguf_tensor("w", (4,), F32, 32)), "w", "twice"),
    "no dimensions": (tensors(gguf_tensor("w", (), F32, 0)), "w", "0 dimensions"),
    "five dimensions": (tensors(gguf_tensor("w", (1,) * 5, F32, 0)), "w", "5 dimensions"),
    "2^32-1 dimensions": (tensors(gguf_string("w") + struct.pack("<I", 2**32 - 1) + bytes(64)), "w", "dimensions"),
    "an empty dimension": (tensors(gguf_tensor("w", (4, 0), F32, 0)), "w", r"[4, 0]"),
    "a dimension of 2^64-1": (tensors(gguf_tensor("w", (2**64 - 1,), F32, 0)), "w", "data at bytes"),
    "a product of 2^64": (tensors(gguf_tensor("w", (2**32, 2**32), F32, 0)), "w", "data at bytes"),
    "a product of 2^64 + 16": (tensors(gguf_tensor("w", (2**62 + 4, 4), F32, 0)), "w", "data at bytes"),
    "tensor type unknown": (tensors(gguf_tensor("w", (32,), 4, 0)), "w", "unknown tensor type 4"),
    "tensor type -1": (tensors(gguf_tensor("w", (32,), 2**32 - 1, 0)), "w", "unknown tensor type 4294967295"),
    "row not whole blocks": (tensors(gguf_tensor("w", (32, 33), Q4_1, 0)), "w", "multiple of 32, the block of Q4_1"),
    "rows whole blocks only together": (tensors(gguf_tensor("w", (32, 16), Q8_0, 0)), "w", "rows of 16 values"),
    "offset past the end": (tensors(gguf_tensor("w", (4,), F32, 1 << 20)), "w", "expected the end within the file"),
    "offset 2^64-32": (tensors(gguf_tensor("w", (4,), F32, 2**64 - 32)), "w", "expected the end within the file"),
    "offset not aligned": (tensors(gguf_tensor("w", (4,), F32, 8)), "w", "offset 8; expected a multiple"),
    "overlap": (tensors(gguf_tensor("a", (16,), F32, 0), gguf_tensor("b", (4,), F32, 32)), "b", "overlaps that of 'a'"),
    "same place": (
        tensors(gguf_tensor("a", (4,), F32, 0), gguf_tensor("b", (4,), F32, 0)),
        "b",
        "overlaps that of 'a'",
    ),
    "header of a tensor cut": (
        gguf_start(1, 0) + gguf_tensor("w" * 40, (4,), F32, 0)[:-2],
        "w" * 40,
        "the offset takes 8 bytes",
    ),
    "data cut": (GOOD[:-1], "w", "may be incomplete"),
    "data not there": (GOOD[:-64], "w", "may be incomplete"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_file_and_field(tmp_path: Path, name: str) -> None:
    data, field, words = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    error = refusal(path)
    assert error.field == field
    assert words in str(error)


def test_a_header_longer_than_the_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    value = struct.pack("<Q", 1 << 24)
    with path.open("wb") as file:  # sparse: 80 MiB of zeros in five strings
        file.write(gguf_start(0, 5))
        for number in range(5):
            file.write(typed(f"key{number}", STRING, value))
            file.seek(1 << 24, os.SEEK_CUR)
        file.write(b"end")
    error = refusal(path)
    assert error.field == "key3" and "first 67,108,864 bytes" in str(error)


@pytest.mark.parametrize("length", range(len(GOOD) - 1, 0, -7))
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(GOOD[:length])
    refusal(path)


def test_flipped_bytes_give_a_model_or_a_jaxrt_error_and_never_anything_else(tmp_path: Path) -> None:
    weights = {"a.weight": np.ones((2, 16), np.float32), "b.weight": (bytes(34), (32,), Q8_0)}
    good = gguf_bytes({"text": "word", "texts": ["a", "bc"], "numbers": [1, 2], "flag": True, "real": 0.5}, weights, 64)
    path, rng, refused = tmp_path / "bad.gguf", np.random.default_rng(4), 0
    started = time.perf_counter()
    for _ in range(300):
        data = bytearray(good)
        for position in rng.integers(0, len(good) - 128, rng.integers(1, 4)):
            data[position] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))])
        path.write_bytes(data)
        try:
            checkpoint = open_gguf(path)
            for name, header in checkpoint.tensors.items():
                assert checkpoint.read(name).shape == header.shape
        except JaxrtError as error:
            assert str(path) in str(error)
            refused += 1
    assert 0 < refused < 300
    assert time.perf_counter() - started < 10


def test_a_name_in_an_error_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(pairs(gguf_pair("\x1b[2J" + "k" * 500, 1), gguf_pair("\x1b[2J" + "k" * 500, 1)))
    message = str(refusal(path))
    assert message.isprintable() and len(message) < len(str(path)) + 300


# Paths --------------------------------------------------------------------------------------------------------------


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "directory.gguf").mkdir()
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it would block
    reasons = {
        "empty.gguf": "the file is empty",
        "directory.gguf": "is a directory",
        "missing.gguf": "No such file",
        "loop.gguf": "symbolic links",
        "pipe.gguf": "is a pipe",
    }
    for name, reason in reasons.items():
        assert reason in str(refusal(tmp_path / name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {})
    path.chmod(0)
    assert "Permission denied" in str(refusal(path))
    (tmp_path / "closed").mkdir(mode=0)
    assert "Permission denied" in str(refusal(tmp_path / "closed" / "model-00001-of-00002.gguf"))


# Split models -------------------------------------------------------------------------------------------------------


def write_split(directory: Path, parts: list[dict[str, np.ndarray]], **changes: int) -> list[Path]:
    total = sum(map(len, parts))
    paths = []
    for number, part in enumerate(parts):
        split = {"split.no": number, "split.count": len(parts), "split.tensors.count": total} | changes
        metadata = {key: np.int32(value) if "tensors" in key else np.uint16(value) for key, value in split.items()}
        first = {"general.architecture": "llama"} if number == 0 else {}
        path = directory / f"model-{number + 1:05d}-of-{len(parts):05d}.gguf"
        paths.append(write_gguf(path, first | metadata, part))
    return paths


PARTS = [{"a": np.full(4, 1, np.float32)}, {"b": np.full(4, 2, np.float32)}, {"c": np.full(4, 3, np.float32)}]


@pytest.mark.parametrize("opened", [0, 2])
def test_opening_one_part_opens_all_of_a_split_model(tmp_path: Path, opened: int) -> None:
    paths = write_split(tmp_path, PARTS)
    checkpoint = open_gguf(paths[opened])
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert {name: header.file for name, header in checkpoint.tensors.items()} == dict(zip("abc", paths, strict=True))
    assert [checkpoint.read(name)[0] for name in "abc"] == [1, 2, 3]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path, PARTS)
    paths[1].unlink()
    assert "missing of 3 parts: model-00002-of-00003.gguf" in str(refusal(paths[0]))


def test_a_part_opened_alone_under_another_name_is_refused(tmp_path: Path) -> None:
    path = write_split(tmp_path, PARTS)[0].rename(tmp_path / "renamed.gguf")
    assert refusal(path).field == "split.count"


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_parts_that_contradict_each_other_are_refused(tmp_path: Path, key: str) -> None:
    paths = write_split(tmp_path, PARTS, **{key: 7})
    assert refusal(paths[0]).field == key


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path, [PARTS[0], PARTS[0]])
    with pytest.raises(ArtifactError, match="model-00002-of-00002.gguf: a: also in model-00001-of-00002.gguf"):
        open_gguf(paths[0])


def test_a_part_number_beyond_the_count_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model-00004-of-00003.gguf", {}, {})
    assert "part 4 of 3" in str(refusal(path))
