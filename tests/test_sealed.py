"""What a sealed directory gives back is bit for bit what was sealed, or an error that names what is damaged."""

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jaxrt.artifacts.orbax import open_orbax, save_orbax
from jaxrt.artifacts.sealed import DTYPES, KINDS, Kind, Sealed, seal, unseal
from jaxrt.config import LayerSpec, ModelConfig, RopeSpec
from jaxrt.errors import ArtifactError

MARKER = KINDS["session"].marker
BODY = {"model": "tiny", "lengths": [3, 0], "seed": 2**63, "temperature": 0.1 + 0.2, "stop": None}
CONFIG = ModelConfig("llama", 8, 4, 4, 1, 1, 4, (LayerSpec(RopeSpec(1e4)),), 16)


def bits(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any pattern of bits is a value of these types, NaNs with payloads among them; of bool only 0 and 1 are."""
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == np.bool_ else 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype).reshape(shape)


def session_arrays() -> dict[str, np.ndarray]:
    arrays = {name: bits(dtype, (3, 5)) for name, dtype in DTYPES.items()}
    arrays["keys"] = bits(np.dtype(np.float32), (30, 2, 70, 137))  # in a file too large to be hashed whole
    arrays["values"] = bits(np.dtype(ml_dtypes.bfloat16), (2, 1, 300, 1_009), seed=1)
    arrays["nothing"] = np.empty((2, 0, 8), np.float32)
    arrays["one"] = np.array(7, np.uint32)
    return arrays


ARRAYS = session_arrays()


def save(directory: Path, arrays: dict[str, Any] = ARRAYS, kind: Kind = "session", **options: Any) -> Path:
    seal(directory, **{"kind": kind, "format": 3, "body": BODY, "arrays": arrays} | options)
    return directory


def open_session(directory: Path) -> Sealed:
    return unseal(directory, kind="session", format=3)


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return list(found) == list(expected) and all(
        (found[name].dtype, found[name].shape, found[name].tobytes()) == (array.dtype, array.shape, array.tobytes())
        for name, array in expected.items()
    )


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"notes.txt": "ä\n", "large.txt": "x" * (1 << 20) + "yz"}
    return save(tmp_path_factory.mktemp("sealed") / "state", files=files)


@pytest.fixture
def copy(sealed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sealed, tmp_path / "copy"))


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


# What was sealed comes back -------------------------------------------------------------------------------------------


def test_body_files_and_bits_of_every_type_come_back(sealed: Path) -> None:
    opened = open_session(sealed)
    assert opened.body == BODY and opened.parse(tuple[int, ...], "lengths") == (3, 0)
    assert opened.files["notes.txt"].read_text(encoding="utf-8") == "ä\n"
    assert {name: header.nbytes for name, header in opened.headers.items()} == {
        name: array.nbytes for name, array in ARRAYS.items()
    }
    assert np.isnan(ARRAYS["values"].astype(np.float32)).any()
    assert same(opened.read_all(), ARRAYS)


def test_arrays_come_back_one_by_one_and_again(sealed: Path) -> None:
    opened = open_session(sealed)
    assert same({name: opened.read(name) for name in ARRAYS}, ARRAYS)
    assert opened.read("keys").tobytes() == ARRAYS["keys"].tobytes()
    with pytest.raises(ArtifactError, match="kesy: no such array.*'keys'"):
        opened.read("kesy")


@pytest.mark.parametrize("arrays", [{}, {"keys": np.empty((30, 1, 0, 64), np.float16)}], ids=["none", "empty"])
def test_a_session_that_holds_nothing_comes_back(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    opened = open_session(save(tmp_path / "state", arrays))
    assert same(opened.read_all(), arrays)
    assert files(tmp_path / "state") == [tmp_path / "state" / MARKER]


def test_arrays_in_any_order_of_memory_come_back(tmp_path: Path) -> None:
    turned = {"keys": ARRAYS["keys"].T, "every_second": ARRAYS["values"][:, :, ::2]}
    assert same(open_session(save(tmp_path / "state", turned)).read_all(), turned)


def test_a_body_comes_back_as_json_has_it(tmp_path: Path) -> None:
    opened = open_session(save(tmp_path / "state", {}, body={"by row": {2: (1, 2), 10: ()}}))
    assert opened.body == {"by row": {"2": [1, 2], "10": []}}


@pytest.mark.parametrize(("tokens", "piece"), [(1_009, (1, 1, 3, 64, 1_009)), (16, (30, 1, 3, 64, 16))])
def test_a_cache_is_stored_layer_by_layer(tmp_path: Path, tokens: int, piece: tuple[int, ...]) -> None:
    arrays = {"keys": bits(np.dtype(np.float32), (30, 1, 3, 64, tokens))}
    save(tmp_path / "state", arrays)
    stored = ocp.metadata(str(tmp_path / "state" / "arrays")).metadata
    assert stored["keys"].storage_metadata.chunk_shape == piece
    assert same(open_session(tmp_path / "state").read_all(), arrays)


def test_a_model_of_the_first_writer_is_read(tmp_path: Path) -> None:
    """Written out here as format 1 was written before sealed directories: Orbax's own chunks, large files unhashed."""
    arrays = {"embedding": bits(np.dtype(np.float32), (4_000, 80)), "norm": bits(np.dtype(np.float16), (4,))}
    ocp.save(str(tmp_path / "weights"), dict(arrays))
    (tmp_path / "tokenizer.json").write_text("x" * 1_500_000)
    body = {
        "format": 1,
        "config": dataclasses.asdict(CONFIG),
        "arrays": {
            name: {
                "shape": list(array.shape),
                "dtype": array.dtype.name,
                "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            }
            for name, array in arrays.items()
        },
        "files": {
            path.relative_to(tmp_path).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": None if path.stat().st_size > 1 << 20 else hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in files(tmp_path)
        },
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (tmp_path / "jaxrt.json").write_text(json.dumps(body | {"sha256": digest}, indent=1))
    checkpoint = open_orbax(tmp_path)
    assert checkpoint.metadata["config"] == CONFIG and list(checkpoint.tokenizer_files) == ["tokenizer.json"]
    assert same({name: checkpoint.read(name) for name in checkpoint.tensors}, arrays)
    save_orbax(tmp_path / "now", CONFIG, arrays)
    now = json.loads((tmp_path / "now" / "jaxrt.json").read_text())
    assert list(now) == ["format", "config", "arrays", "files", "sha256"]
    assert {name: now[name] for name in ("format", "config", "arrays")} == {
        name: json.loads(json.dumps(body))[name] for name in ("format", "config", "arrays")
    }


# What cannot be sealed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arrays": {"a": np.zeros(2)}}, "a: float64; expected float32 or"),
        ({"arrays": {"a": np.zeros(2, ">f4")}}, "a: >f4; expected float32 or"),
        ({"arrays": {"a": np.zeros(2, np.complex64)}}, "a: complex64"),
        ({"arrays": {"a": np.array(["x"])}}, "a: str"),
        ({"arrays": {"../a": np.zeros(2, np.int32)}}, "cannot name an array"),
        ({"arrays": {"": np.zeros(2, np.int32)}}, "cannot name an array"),
        ({"files": {"../a": ""}}, "cannot name a file"),
        ({"files": {"a/b": ""}}, "cannot name a file"),
        ({"files": {MARKER: ""}}, "cannot name a file"),
        ({"body": {"arrays": {}}}, "the manifest's own field"),
        ({"body": {"text": "x" * (1 << 26)}}, "a manifest of 67,"),
    ],
)
def test_what_cannot_be_sealed_is_refused_and_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ArtifactError, match=said):
        save(tmp_path / "state", **{"arrays": {}} | options)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ocp, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "state", {"a": np.ones(2, np.int32)})
    assert list(tmp_path.iterdir()) == []


# Damage ---------------------------------------------------------------------------------------------------------------


def read_all(directory: Path) -> dict[str, np.ndarray]:
    return open_session(directory).read_all()


def test_a_flipped_byte_is_never_read(copy: Path) -> None:
    """Sampled over all files. Orbax's large files may hold bytes that nothing reads: then all bits are still there."""
    rng = random.Random(0)
    unread = 0
    for path in files(copy):
        size = path.stat().st_size
        for position in sorted({rng.randrange(size) for _ in range(3)} | {0, size - 1}) if size else []:
            with path.open("r+b") as file:
                file.seek(position)
                byte = file.read(1)[0]
                file.seek(position)
                file.write(bytes([byte ^ (1 << rng.randrange(8))]))
            try:
                assert same(read_all(copy), ARRAYS), f"byte {position} of {path}"
                assert size > 1 << 20 and path.suffix != ".txt", f"byte {position} of {path}"
                unread += 1
            except ArtifactError as error:
                assert str(copy) in str(error)
            with path.open("r+b") as file:
                file.seek(position)
                file.write(bytes([byte]))
    assert unread < 5 and same(read_all(copy), ARRAYS)


@pytest.mark.parametrize("harm", ["gone", "empty", "half", "one byte less", "one byte more", "a pipe", "a directory"])
def test_a_file_that_is_torn_or_gone_is_named(copy: Path, harm: str) -> None:
    for path in files(copy):
        size, kept = path.stat().st_size, copy.parent / "kept"
        path.rename(kept)
        if harm == "a pipe":
            os.mkfifo(path)
        elif harm == "a directory":
            path.mkdir()
        elif harm != "gone":
            shutil.copy(kept, path)
            os.truncate(path, {"empty": 0, "half": size // 2, "one byte less": max(size - 1, 0)}.get(harm, size + 1))
        if path.exists() and path.is_file() and path.stat().st_size == size:
            continue
        with pytest.raises(ArtifactError, match=re.escape(path.name)) as caught:
            open_session(copy)
        if path.name != MARKER:
            assert caught.value.fix == "copy the directory again, or take the snapshot again"
        path.rmdir() if harm == "a directory" else path.unlink(missing_ok=True)
        kept.rename(path)
    assert same(read_all(copy), ARRAYS)


def test_foreign_files_do_no_harm(copy: Path) -> None:
    (copy / ".DS_Store").write_bytes(b"\0")
    (copy / "arrays" / "more").mkdir()
    (copy / "arrays" / "more" / "zarr.json").write_text("{")
    (copy / "jaxrt.json").write_text("{")
    assert same(read_all(copy), ARRAYS)


def test_a_directory_of_another_kind_says_what_it_is(sealed: Path, tmp_path: Path) -> None:
    save_orbax(tmp_path / "model", CONFIG, {"norm": np.ones(4, np.float32)})
    with pytest.raises(ArtifactError, match="a converted model; expected a saved session; load it with jaxrt.load"):
        open_session(tmp_path / "model")
    with pytest.raises(ArtifactError, match="a saved session; expected a converted model; restore it"):
        open_orbax(sealed)
    with pytest.raises(ArtifactError, match=MARKER):
        open_session(tmp_path)


@pytest.mark.parametrize(("kind", "other"), [("session", "model"), ("model", "session")])
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, kind: Kind, other: Kind) -> None:
    arrays = {"a": np.ones(4, np.float32)}
    save(tmp_path / "one", arrays, kind)
    (tmp_path / "one" / KINDS[kind].marker).rename(tmp_path / "one" / KINDS[other].marker)
    with pytest.raises(ArtifactError, match=f"kind: '{kind}'; expected {other}"):
        unseal(tmp_path / "one", kind=other, format=3)


def rewrite(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and give it the hash that fits."""
    body = json.loads((directory / MARKER).read_text())
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (directory / MARKER).write_text(json.dumps(body | {"sha256": digest}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body.update(format=4), "format: 4; expected 3; .*take the snapshot again"),
        (lambda body: body.update(format=True), "format: True"),
        (lambda body: body.update(format=3.0), "format: 3.0"),
        (lambda body: body.update(kind=["session"]), "kind: "),
        (lambda body: body.pop("kind"), "kind: 'model'; expected session"),
        (lambda body: body.pop("files"), "files: None"),
        (lambda body: body.update(arrays=[]), "arrays: "),
        (lambda body: body["arrays"]["keys"].update(dtype="float64"), "arrays.keys.dtype: 'float64'"),
        (lambda body: body["arrays"]["keys"].update(dtype="int32"), "arrays: keys: differs from its hash"),
        (lambda body: body["arrays"]["keys"].update(more=1), "arrays.keys.more: unknown"),
        (lambda body: body["arrays"]["keys"].update(shape=[2**40]), "bytes in .* bytes of files"),
        (lambda body: body["arrays"]["keys"].update(shape=[2**62, 2**62]), "keys: shape .*expected a shape"),
        (lambda body: body["arrays"]["keys"].update(shape=[10**4000]), "keys: shape .*expected a shape"),
        (lambda body: body["arrays"]["keys"].update(shape=[1] * 100), "keys: shape .*expected a shape"),
        (lambda body: body["arrays"]["keys"].update(shape=[0, -1]), "keys: shape .*expected a shape"),
        (lambda body: body["arrays"]["nothing"].update(shape=[0, 2**62]), "nothing: shape .*expected a shape"),
        (lambda body: body["arrays"]["nothing"].update(shape=[1]), "Orbax cannot read it"),
        (lambda body: body["arrays"]["keys"].update(shape=[30, 140, 137]), "keys: shape .30, 2, 70, 137.; expected"),
        (lambda body: body["arrays"].update(more=body["arrays"]["one"]), "Orbax cannot read it"),
        (lambda body: body["arrays"].pop("one"), "Orbax cannot read it"),
        (lambda body: body["files"].update({"../x": {"bytes": 1, "sha256": None}}), "files: ../x; expected paths"),
        (lambda body: body["files"].update({"/etc/hostname": {"bytes": 1, "sha256": None}}), "expected paths inside"),
        (lambda body: body["files"].update({"./notes.txt": body["files"]["notes.txt"]}), "expected paths inside"),
        (lambda body: body["files"].update({"a\0b": {"bytes": 1, "sha256": None}}), "cannot be opened"),
        (lambda body: body["files"]["notes.txt"].update(sha256=None), "notes.txt: another content"),
        (lambda body: body["files"]["notes.txt"].update(bytes=-1), "notes.txt: 3 bytes"),
    ],
)
def test_a_manifest_that_claims_what_is_not_so_is_refused(
    copy: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    rewrite(copy, change)
    with pytest.raises(ArtifactError, match=said) as caught:
        read_all(copy)
    assert len(str(caught.value)) < 1_000


def test_another_session_array_or_manifest_does_not_pass(copy: Path, tmp_path: Path) -> None:
    """Two directories that are each whole, mixed."""
    arrays = ARRAYS | {"keys": bits(np.dtype(np.float32), (30, 2, 70, 137), seed=2)}
    other = save(tmp_path / "other", arrays)
    shutil.rmtree(copy / "arrays")
    shutil.copytree(other / "arrays", copy / "arrays")
    with pytest.raises(ArtifactError, match="take the snapshot again"):
        read_all(copy)
