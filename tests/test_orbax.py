"""A converted model comes back bit for bit, or with an error that names what is damaged."""

import asyncio
import hashlib
import json
import resource
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrt.artifacts.load import generation_defaults, load_tokenizer, load_weights, open_checkpoint
from jaxrt.artifacts.orbax import MARKER, open_orbax, save_orbax
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.config import LayerSpec, ModelConfig, RopeSpec
from jaxrt.errors import ArtifactError
from jaxrt.models.reading import read_config
from jaxrt.weights import abstract, named
from tests.files import byte_tokenizer_json

CONFIG = ModelConfig(
    family="llama",
    vocab=258,
    width=32,
    mlp_width=48,
    heads=4,
    kv_heads=2,
    head_width=8,
    layers=(LayerSpec(RopeSpec(5e5, "llama3", 8.0)), LayerSpec(RopeSpec(0.1 + 0.2))),
    context=256,
    norm_eps=9.999999747378752e-06,
    bos_token=256,
    eos_tokens=(257, 3),
)


def arrays(config: ModelConfig = CONFIG, dtype: Any = jnp.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    specs = named(abstract(config, dtype))
    return {name: rng.standard_normal(spec.shape).astype(np.dtype(spec.dtype)) for name, spec in specs.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose data file is too large to be hashed as a whole."""
    directory = tmp_path_factory.mktemp("models") / "large"
    save_orbax(directory, LARGE, arrays(LARGE))
    return directory


LARGE = replace(CONFIG, vocab=12_000)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def read_all(directory: Path) -> dict[str, np.ndarray]:
    checkpoint = open_orbax(directory)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def test_config_weights_and_bits_come_back(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert (checkpoint.format, read_config(checkpoint)) == ("orbax", LARGE)
    expected = arrays(LARGE)
    assert list(checkpoint.tensors) == list(expected)
    for name, array in read_all(saved).items():
        assert array.dtype == np.float32 and array.tobytes() == expected[name].tobytes()
        assert checkpoint.tensors[name].shape == array.shape and checkpoint.tensors[name].nbytes == array.nbytes


def test_bfloat16_and_jax_arrays_are_saved_as_they_are(tmp_path: Path) -> None:
    leaves = arrays(dtype=jnp.bfloat16)
    leaves["final_norm"][0] = np.frombuffer(np.uint32(0x7FC01234).tobytes(), np.float32)[0]  # a NaN with a message
    save_orbax(tmp_path / "m", CONFIG, {name: jnp.asarray(leaf) for name, leaf in leaves.items()})
    loaded = read_all(tmp_path / "m")
    assert loaded["embedding"].dtype == ml_dtypes.bfloat16 and loaded["final_norm"].dtype == np.float32
    for name, leaf in leaves.items():
        assert loaded[name].tobytes() == leaf.tobytes()


def test_tokenizer_and_sampling_come_back(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    tokenizer = Tokenizer.from_files({"tokenizer.json": tmp_path / "tokenizer.json"})
    save_orbax(tmp_path / "m", CONFIG, arrays(), tokenizer, {"do_sample": True, "temperature": 0.5})
    checkpoint = open_orbax(tmp_path / "m")
    again = load_tokenizer(checkpoint)
    assert again is not None and again.encode("héllo") == tokenizer.encode("héllo") and again.json() == tokenizer.json()
    assert generation_defaults(checkpoint, CONFIG).temperature == 0.5


def test_a_model_without_tokenizer_has_none(saved: Path) -> None:
    assert load_tokenizer(open_orbax(saved)) is None
    assert generation_defaults(open_orbax(saved), LARGE).greedy


def test_loading_casts_to_the_wanted_type(saved: Path) -> None:
    checkpoint = open_orbax(saved)
    weights = load_weights(checkpoint, LARGE, dtype=jnp.bfloat16, place=lambda name, spec, array: array)
    assert np.array_equal(weights.embedding, arrays(LARGE)["embedding"].astype(ml_dtypes.bfloat16))


def test_a_config_and_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    leaves = arrays()
    del leaves["layers.1.down"]
    leaves["layers.0.qkv"] = leaves["layers.0.qkv"].T
    save_orbax(tmp_path / "m", CONFIG, leaves)
    with pytest.raises(ArtifactError, match=r"layers.0.qkv has shape \[32, 64\], not \[64, 32\].*layers.1.down"):
        load_weights(open_orbax(tmp_path / "m"), CONFIG, place=lambda name, spec, array: array)


def test_arrays_can_be_read_from_threads_and_inside_an_event_loop(saved: Path) -> None:
    checkpoint, expected = open_orbax(saved), arrays(LARGE)
    same: list[bool] = []

    def read(names: list[str]) -> None:
        same.extend(checkpoint.read(name).tobytes() == expected[name].tobytes() for name in names)

    threads = [threading.Thread(target=read, args=(list(expected)[part::3],)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * len(expected)

    async def notebook() -> np.ndarray:
        return open_orbax(saved).read("final_norm")

    assert np.array_equal(asyncio.run(notebook()), expected["final_norm"])


# Saving is all or nothing --------------------------------------------------------------------------------------------


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="it is there already"):
        save_orbax(tmp_path / "m", CONFIG, arrays())
    assert [path.name for path in tmp_path.rglob("*")] == ["m", "notes.txt"]


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="float64; expected float32 or"):
        save_orbax(tmp_path / "m", CONFIG, {"embedding": np.zeros((2, 2))})
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        save_orbax(tmp_path / "file" / "m", CONFIG, arrays())
    unserialisable: dict[str, Any] = {"temperature": {1, 2}}
    with pytest.raises(TypeError):
        save_orbax(tmp_path / "m", CONFIG, arrays(), generation=unserialisable)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path) -> None:
    """The limit on file sizes stands in for the full disk: a write fails half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(ArtifactError, match="cannot be written: File too large"):
            save_orbax(tmp_path / "m", CONFIG, arrays(), generation={"note": "x" * 200_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


# Damage --------------------------------------------------------------------------------------------------------------


def files(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]


@pytest.mark.parametrize("harm", ["gone", "empty", "half", "longer", "flipped"])
def test_damage_to_any_file_is_named(copy: Path, harm: str) -> None:
    """Every file in turn. A flipped byte of a large one, not hashed whole, is found when its array is read."""
    names = files(copy)
    assert MARKER in names and len(names) > 8
    for name in names:
        path = copy / name
        data = path.read_bytes()
        if harm in ("half", "flipped") and not data:
            continue
        if harm == "gone":
            path.unlink()
        else:
            spoilt = {"empty": b"", "half": data[: len(data) // 2], "longer": data + b" ?"}
            path.write_bytes(flip(data, len(data) // 4) if harm == "flipped" else spoilt[harm])
        if harm == "empty" and not data:
            continue
        with pytest.raises(ArtifactError) as caught:
            read_all(copy)
        large = harm == "flipped" and len(data) > 1 << 20
        assert ("differs from its hash" if large else Path(name).name) in str(caught.value)
        path.write_bytes(data)
    assert len(read_all(copy)) == 2 * 6 + 3


def test_a_flipped_byte_names_its_array(copy: Path) -> None:
    expected = arrays(LARGE)
    for name in ("embedding", "head"):  # the others are in a file that is hashed whole
        middle = expected[name].tobytes()[512:1_024]
        holders = [path for path in map(copy.joinpath, files(copy)) if middle in path.read_bytes()]
        assert len(holders) == 1 and holders[0].stat().st_size > 1 << 20
        data = holders[0].read_bytes()
        holders[0].write_bytes(flip(data, data.index(middle) + 100))
        checkpoint = open_orbax(copy)
        for other in checkpoint.tensors:
            if other != name:
                checkpoint.read(other)
        with pytest.raises(ArtifactError, match=f"{name}: differs from its hash"):
            checkpoint.read(name)
        holders[0].write_bytes(data)


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it the hash that fits."""
    path = directory / MARKER
    body = json.loads(path.read_text())
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(body | {"sha256": digest}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body.update(format=2), "format: 2; expected 1"),
        (lambda body: body.pop("format"), "format: None"),
        (lambda body: body.pop("config"), "config: None"),
        (lambda body: body["config"].update(novel=1), "config.novel: unknown"),
        (lambda body: body["config"].pop("width"), "config.width: missing"),
        (lambda body: body["config"].update(width="32"), "config.width: '32'"),
        (lambda body: body["config"].update(tied_head=0), "config.tied_head: 0"),
        (lambda body: body["config"].update(norm_eps=float("nan")), "config.norm_eps: nan"),
        (lambda body: body["config"]["layers"][0]["rope"].update(scaling="yarn"), "rope.scaling: 'yarn'"),
        (lambda body: body["config"].update(layers={}), "config.layers"),
        (lambda body: body["arrays"]["embedding"].update(dtype="int8"), "embedding.dtype: 'int8'"),
        (lambda body: body["arrays"]["embedding"].update(shape=[2**40, 2**20]), "bytes of files"),
        (lambda body: body["arrays"]["embedding"].update(shape=[-1, -1]), "embedding"),
        (lambda body: body["arrays"]["final_norm"].update(shape=[16]), r"final_norm: shape \[32\]; expected \[16\]"),
        (lambda body: body["files"].update({"../x": {"bytes": 1, "sha256": None}}), "paths inside it"),
        (lambda body: body["files"].update({"/etc/hostname": {"bytes": 1, "sha256": None}}), "paths inside it"),
        (lambda body: body.update(files=[]), "files"),
    ],
)
def test_a_foreign_or_newer_manifest_is_refused(
    copy: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    rewrite(copy, change)
    with pytest.raises(ArtifactError, match=said):
        read_all(copy)


def test_a_config_field_that_is_newer_than_the_file_takes_its_default(copy: Path) -> None:
    rewrite(copy, lambda body: body["config"].pop("bos_token"))
    assert open_orbax(copy).metadata["config"] == replace(LARGE, bos_token=None)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=MARKER):
        open_orbax(tmp_path)
    (tmp_path / MARKER).write_text("[1, 2]")
    with pytest.raises(ArtifactError, match="expected an object"):
        open_checkpoint(tmp_path)


def test_an_unknown_array_names_the_nearest(saved: Path) -> None:
    with pytest.raises(ArtifactError, match="layers.0.qvk: no such array.*layers.0.qkv"):
        open_orbax(saved).read("layers.0.qvk")
