"""Hugging Face directories: what is written is read, and what is malformed or contradicts itself is refused by name."""

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxrt.artifacts.safetensors import open_safetensors
from jaxrt.errors import ArtifactError, JaxrtError, UnsupportedModel
from tests.files import (
    byte_tokenizer_json,
    safetensors_bytes,
    safetensors_file,
    tiny_config_json,
    tiny_llama_tensors,
    write_hf,
)

SECONDS, BYTES = 2.0, 200_000_000  # what refusing a directory may take
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {name: np.full(4, value, np.float32) for value, name in enumerate("abcd")}


def refusal(directory: Path) -> ArtifactError:
    """The error that opening `directory` gives, within the bounds on time and memory."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(ArtifactError) as caught:
            open_safetensors(directory)
        assert time.perf_counter() - started < SECONDS
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
    assert str(directory) in str(caught.value)
    return caught.value


# Reading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_reads_back_as_written(tmp_path: Path, shards: int) -> None:
    tensors, config = tiny_llama_tensors(np.random.default_rng(0)), tiny_config_json()
    checkpoint = open_safetensors(write_hf(tmp_path, config, tensors, shards))
    assert checkpoint.format == "safetensors" and checkpoint.path == tmp_path
    assert checkpoint.metadata == config
    assert checkpoint.generation == {} and checkpoint.tokenizer_files == {}
    assert set(checkpoint.tensors) == set(tensors)
    assert len({header.file for header in checkpoint.tensors.values()}) == shards
    for name, array in tensors.items():
        header = checkpoint.tensors[name]
        assert (header.shape, header.dtype, header.nbytes) == (array.shape, "F32", array.nbytes)
        np.testing.assert_array_equal(checkpoint.read(name), array)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_tensors_keep_their_dtype_and_shape(tmp_path: Path, dtype: type) -> None:
    rng = np.random.default_rng(1)
    shapes = {"scalar": (), "vector": (5,), "experts": (2, 3, 4), "empty": (0, 4)}
    tensors = {name: np.asarray(rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
    checkpoint = open_safetensors(write_hf(tmp_path, {}, tensors))
    for name, array in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == array.dtype and read.shape == array.shape == checkpoint.tensors[name].shape
        assert read.tobytes() == array.tobytes()


def test_metadata_in_a_header_is_no_tensor(tmp_path: Path) -> None:
    write_hf(tmp_path, {}, TENSORS)
    (tmp_path / SINGLE).write_bytes(file({"__metadata__": {"format": "pt"}, "w": entry()}))
    assert list(open_safetensors(tmp_path).tensors) == ["w"]


def test_generation_config_and_tokenizer_files_are_found(tmp_path: Path) -> None:
    write_hf(
        tmp_path,
        {},
        TENSORS,
        tokenizer_json=byte_tokenizer_json(),
        tokenizer_config={"eos_token": "</s>"},
        generation_config={"temperature": 0.7},
        chat_template="{{ messages }}",
    )
    checkpoint = open_safetensors(tmp_path)
    assert checkpoint.generation == {"temperature": 0.7}
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert checkpoint.tokenizer_files == {name: tmp_path / name for name in names}


def test_a_tensor_that_is_not_there_is_named_with_the_nearest_that_is(tmp_path: Path) -> None:
    checkpoint = open_safetensors(write_hf(tmp_path, {}, {"lm_head.weight": np.ones(2, np.float32)}))
    with pytest.raises(ArtifactError, match="lm_haed.weight: no such tensor; did you mean 'lm_head.weight'"):
        checkpoint.read("lm_haed.weight")


def test_a_file_that_changes_size_after_opening_is_refused_instead_of_killing_the_process(tmp_path: Path) -> None:
    checkpoint = open_safetensors(write_hf(tmp_path, {}, {"w": np.ones(100_000, np.float32)}))
    os.truncate(tmp_path / SINGLE, 4096)
    with pytest.raises(ArtifactError, match="changed"):
        checkpoint.read("w")


def test_quantised_floats_are_refused_at_once_and_integers_when_read(tmp_path: Path) -> None:
    write_hf(tmp_path / "f8", {}, {"w": np.ones(4, ml_dtypes.float8_e4m3fn)})
    with pytest.raises(UnsupportedModel, match="'w' has dtype F8_E4M3"):
        open_safetensors(tmp_path / "f8")
    checkpoint = open_safetensors(write_hf(tmp_path / "int", {}, {"ids": np.arange(4), "w": np.ones(2, np.float32)}))
    np.testing.assert_array_equal(checkpoint.read("w"), np.ones(2))
    with pytest.raises(UnsupportedModel, match="'ids' has dtype I64"):
        checkpoint.read("ids")


# Bad weights --------------------------------------------------------------------------------------------------------


def entry(shape: object = (4,), start: object = 0, end: object = 16, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file(header: object, data: int = 16) -> bytes:
    return safetensors_file(json.dumps(header).encode(), bytes(data))


GOOD = file({"w": entry()})
PAIR = json.dumps({"w": entry()})[1:-1]

# name -> the file, words that must be in the message
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "seven bytes": (b"1234567", "header length"),
    "length 2^64-1": (struct.pack("<Q", 2**64 - 1) + GOOD[8:], "18,446,744,073,709,551,615 bytes"),
    "length 2^63": (struct.pack("<Q", 2**63) + GOOD[8:], "header length"),
    "length past the end": (struct.pack("<Q", len(GOOD) - 7) + GOOD[8:], f"at most {len(GOOD) - 8}"),
    "length 0": (struct.pack("<Q", 0) + GOOD[8:], "header"),
    "not JSON": (safetensors_file(b"{'w': 1}", bytes(16)), "header"),
    "a list": (file([1, 2]), "header"),
    "deep JSON": (safetensors_file(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", bytes(16)), "header"),
    "not UTF-8": (safetensors_file(GOOD[8:-16].replace(b"w", b"\xff"), bytes(16)), "header"),
    "the same name twice": (safetensors_file(f"{{{PAIR}, {PAIR}}}".encode(), bytes(16)), "'w' appears twice"),
    "the same key twice": (
        safetensors_file(b'{"__metadata__": {"a": "1", "a": "2"}, ' + PAIR.encode() + b"}", bytes(16)),
        "'a' appears twice",
    ),
    "data cut": (GOOD[:-1], "header"),
    "trailing bytes": (GOOD + b"PK\3\4", "header"),
    "a hole": (file({"a": entry(), "b": entry(start=20, end=36)}, 36), "header"),
    "overlap": (file({"a": entry(), "b": entry(start=8, end=24)}, 24), "header"),
    "shape larger than bytes": (file({"w": entry((5,))}), "header"),
    "a product of 2^64": (file({"w": entry((2**32, 2**32))}), "header"),
    "a product of 2^64 + 4": (file({"w": entry((2**62 + 1, 4))}), "header"),
    "negative extent": (file({"w": entry((-4,))}), "header"),
    "extent a fraction": (file({"w": entry((4.0,))}), "header"),
    "offsets reversed": (file({"w": entry(start=16, end=0)}), "header"),
    "offsets of 2^64": (file({"w": entry(end=2**64)}), "header"),
    "unknown dtype": (file({"w": entry(dtype="F31")}), "header"),
    "dtype a number": (file({"w": entry(dtype=7)}), "header"),
    "metadata not text": (file({"__metadata__": {"a": 1}, "w": entry()}), "header"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    data, words = BAD[name]
    write_hf(tmp_path, {}, TENSORS)
    (tmp_path / SINGLE).write_bytes(data)
    error = refusal(tmp_path)
    assert error.path == str(tmp_path / SINGLE) and words in str(error)


def test_a_header_above_the_bound_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write_hf(tmp_path, {}, TENSORS)
    with (tmp_path / SINGLE).open("wb") as sparse:
        sparse.write(struct.pack("<Q", 100_000_001))
        sparse.truncate(200_000_000)
    assert "at most 100,000,000" in str(refusal(tmp_path))


def test_flipped_bytes_give_a_model_or_a_jaxrt_error_and_never_anything_else(tmp_path: Path) -> None:
    write_hf(tmp_path, {}, TENSORS)
    path, rng, refused = tmp_path / SINGLE, np.random.default_rng(2), 0
    good = safetensors_bytes({"a": np.ones((2, 2), np.float16), "b": np.ones(1, ml_dtypes.bfloat16)})
    digits = [position for position, byte in enumerate(good[:-10]) if chr(byte).isdigit()]
    started = time.perf_counter()
    for trial in range(300):
        data = bytearray(good)
        if trial % 2:
            data[rng.choice(digits)] = rng.choice(list(b"0123456789"))
        else:
            data[rng.integers(len(good) - 10)] = rng.integers(256)
        path.write_bytes(data)
        try:
            checkpoint = open_safetensors(tmp_path)
            for name, header in checkpoint.tensors.items():
                assert checkpoint.read(name).shape == header.shape
        except JaxrtError as error:
            assert str(path) in str(error)
            refused += 1
    assert 0 < refused < 300
    assert time.perf_counter() - started < 10


# Shards -------------------------------------------------------------------------------------------------------------


def spoil_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def spoil(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        change(index)
        (directory / INDEX).write_text(json.dumps(index))

    return spoil


def points_to(name: object) -> Callable[[Path], object]:
    return spoil_index(lambda index: index["weight_map"].update(a=name))


def rewrite(name: str, tensors: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(safetensors_bytes({key: TENSORS[key] for key in tensors}))


# name -> what is done to a directory of two shards (a, c and b, d), words that must be in the message
BAD_SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (lambda directory: (directory / SECOND).unlink(), f"{SECOND} is not there"),
    "a shard is malformed": (lambda directory: os.truncate(directory / SECOND, 50), SECOND),
    "a tensor is missing": (rewrite(SECOND, "b"), f"{SECOND}: d: not in {SECOND}"),
    "a tensor is in two shards": (rewrite(SECOND, "bda"), f"{SECOND}: a: in this file; {INDEX} says it is in {FIRST}"),
    "a tensor is not in the index": (
        spoil_index(lambda index: index["weight_map"].pop("d")),
        f"{SECOND}: d: in this file; {INDEX} says it is nowhere",
    ),
    "the index names another shard": (points_to(SECOND), f"{SECOND}: a: not in {SECOND}"),
    "parent directory": (points_to("../outside.safetensors"), "same directory"),
    "absolute path": (points_to("/etc/outside.safetensors"), "same directory"),
    "subdirectory": (points_to("sub/inside.safetensors"), "same directory"),
    "backslash": (points_to("..\\outside.safetensors"), "same directory"),
    "NUL": (points_to("a\0.safetensors"), "same directory"),
    "surrogate": (points_to("\ud800.safetensors"), r"\ud800.safetensors is not there"),
    "a name of 5,000 letters": (points_to("a" * 5_000 + ".safetensors"), "is not there"),
    "a pickle": (points_to("pytorch_model.bin"), "expected the name of a .safetensors file"),
    "a number": (points_to(7), "the file is 7"),
    "total size": (spoil_index(lambda index: index["metadata"].update(total_size=65)), "total_size: 65; expected 64"),
    "total size text": (spoil_index(lambda index: index["metadata"].update(total_size="64")), "total_size: '64'"),
    "metadata a list": (spoil_index(lambda index: index.update(metadata=[])), "metadata: list"),
    "no weight_map": (spoil_index(lambda index: index.pop("weight_map")), "weight_map"),
    "weight_map a list": (spoil_index(lambda index: index.update(weight_map=["a"])), "weight_map: list"),
    "weight_map empty": (spoil_index(lambda index: index.update(weight_map={})), "weight_map"),
    "index not JSON": (lambda directory: (directory / INDEX).write_text("{"), "not JSON"),
    "index is a directory": (lambda d: ((d / INDEX).unlink(), (d / INDEX).mkdir()), "is a directory"),
    "index with a key twice": (
        lambda directory: (directory / INDEX).write_text(
            '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'
        ),
        "'a' appears twice",
    ),
    "no index": (lambda directory: (directory / INDEX).unlink(), f"no index: {FIRST} and 1 more"),
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_a_bad_set_of_shards_is_refused_by_name(tmp_path: Path, name: str) -> None:
    spoil, words = BAD_SHARDS[name]
    write_hf(tmp_path, {}, TENSORS, shards=2)
    open_safetensors(tmp_path)
    spoil(tmp_path)
    assert words in str(refusal(tmp_path))


def test_an_index_without_a_total_size_is_read(tmp_path: Path) -> None:
    write_hf(tmp_path, {}, TENSORS, shards=2)
    spoil_index(lambda index: index.pop("metadata"))(tmp_path)
    assert set(open_safetensors(tmp_path).tensors) == set(TENSORS)


# Links --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SINGLE, "config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_link_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    directory = write_hf(
        tmp_path / "model", {}, TENSORS, tokenizer_json=byte_tokenizer_json(), chat_template="{{ messages }}"
    )
    (directory / name).rename(tmp_path / "outside")
    (directory / name).symlink_to("../outside")
    error = refusal(directory)
    assert error.path == str(directory / name) and f"a link to {tmp_path / 'outside'}" in str(error)


def test_a_link_inside_the_directory_and_a_linked_directory_are_read(tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "model", {}, TENSORS)
    (directory / SINGLE).rename(directory / "weights")
    (directory / SINGLE).symlink_to("weights")
    (tmp_path / "link").symlink_to("model")
    assert set(open_safetensors(tmp_path / "link").tensors) == set(TENSORS)


def snapshot(repository: Path) -> Path:
    """A directory as the Hugging Face cache lays it out: links from the snapshot to the repository's blobs."""
    directory = write_hf(repository / "snapshots" / "0123abcd", {}, TENSORS, shards=2)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(directory.iterdir())):
        path.rename(repository / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    return directory


def test_a_snapshot_of_the_hugging_face_cache_is_read(tmp_path: Path) -> None:
    assert set(open_safetensors(snapshot(tmp_path / "models--a--b")).tensors) == set(TENSORS)


def test_a_snapshot_that_links_elsewhere_is_refused(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "models--a--b")
    snapshot(tmp_path / "models--c--d")
    (directory / FIRST).unlink()
    (directory / FIRST).symlink_to("../../../models--c--d/blobs/1")
    assert "a link to" in str(refusal(directory))


def test_a_snapshot_whose_blobs_are_a_link_is_refused(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "models--a--b")
    (tmp_path / "models--a--b" / "blobs").rename(tmp_path / "elsewhere")
    (tmp_path / "models--a--b" / "blobs").symlink_to("../elsewhere")
    assert "a link to" in str(refusal(directory))


@pytest.mark.parametrize("target", [SINGLE, "nowhere"])
def test_a_link_to_itself_or_to_nothing_is_refused(tmp_path: Path, target: str) -> None:
    write_hf(tmp_path, {}, TENSORS)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).symlink_to(target)
    assert refusal(tmp_path).path == str(tmp_path / SINGLE)


# Directories and configs --------------------------------------------------------------------------------------------

BAD_JSON: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "not JSON": (b"{'a': 1}", "not JSON"),
    "cut": (b'{"a": 1', "not JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "not JSON"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not JSON"),
    "a list": (b"[1]", "JSON list; expected an object"),
    "null": (b"null", "expected an object"),
    "deep": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    "deep objects": (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested too deeply"),
    "a key twice": (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' appears twice"),
    "a number of 10,000 digits": (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
    "5 MB": (b'{"a": "' + b"x" * 5_000_000 + b'"}', "expected at most 4,194,304 bytes"),
}


@pytest.mark.parametrize("file_name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("name", BAD_JSON)
def test_a_bad_config_is_refused_by_name(tmp_path: Path, name: str, file_name: str) -> None:
    data, words = BAD_JSON[name]
    write_hf(tmp_path, {}, TENSORS)
    (tmp_path / file_name).write_bytes(data)
    error = refusal(tmp_path)
    assert error.path == str(tmp_path / file_name) and words in str(error)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    (write_hf(tmp_path, {}, TENSORS) / "config.json").unlink()
    assert refusal(tmp_path).field == "config.json"


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for name in ("file", "missing"):
        assert "no such directory" in str(refusal(tmp_path / name))
    assert "no weights" in str(refusal(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.npz", "consolidated.00.pth"])
def test_pickled_weights_are_never_opened_and_the_way_out_is_named(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)  # opening it would block
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="never loaded.*save_pretrained") as caught:
        open_safetensors(tmp_path)
    assert name in str(caught.value)


def test_a_gguf_file_in_a_directory_is_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.gguf; open the .gguf file itself" in str(refusal(tmp_path))


def test_weights_that_are_a_pipe_are_refused_without_being_opened(tmp_path: Path) -> None:
    (write_hf(tmp_path, {}, TENSORS) / SINGLE).unlink()
    os.mkfifo(tmp_path / SINGLE)
    assert "is a pipe" in str(refusal(tmp_path))
