"""Weights arrive the same from every format, laid out and aligned; what does not fit is named all at once."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrt.artifacts.checkpoint import Checkpoint
from jaxrt.artifacts.load import READERS, generation_defaults, load_tokenizer, load_weights, open_checkpoint
from jaxrt.artifacts.orbax import save_orbax
from jaxrt.config import ModelConfig
from jaxrt.errors import ArtifactError, UnsupportedModel
from jaxrt.models.reading import read_config
from jaxrt.requests import SamplingParams
from jaxrt.weights import abstract, named, nbytes
from tests.files import (
    byte_tokenizer_json,
    hf_to_gguf_tensors,
    tiny_config_json,
    tiny_gguf_metadata,
    tiny_llama_tensors,
    write_gguf,
    write_hf,
)

EPS = 2.0**-17  # the same in float32 and float64, so that both headers say the same


def tensors(tied: bool = False) -> dict[str, np.ndarray]:
    return tiny_llama_tensors(np.random.default_rng(0), tied=tied)


def hf(directory: Path, arrays: Mapping[str, np.ndarray], tied: bool = False, **files: Any) -> Path:
    return write_hf(directory, tiny_config_json(tied=tied, norm_eps=EPS), arrays, **files)


def load(path: Path, dtype: Any = jnp.float32, **options: Any) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    return config, named(load_weights(checkpoint, config, dtype=dtype, place=keep, **options))


def keep(name: str, spec: Any, array: np.ndarray) -> np.ndarray:
    return array


def never(name: str, spec: Any, array: np.ndarray) -> np.ndarray:
    raise AssertionError(f"{name} was placed")


def assert_same(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype
        assert array.tobytes() == right[name].tobytes(), name


@pytest.mark.parametrize("tied", [False, True])
def test_every_format_gives_the_same_weights_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    arrays = tensors(tied)
    config, weights = load(hf(tmp_path / "one", arrays, tied))
    save_orbax(tmp_path / "orbax", config, weights)
    others = {
        "shards": hf(tmp_path / "three", arrays, tied, shards=3),
        "gguf": write_gguf(tmp_path / "model.gguf", tiny_gguf_metadata(norm_eps=EPS), hf_to_gguf_tensors(arrays)),
        "orbax": tmp_path / "orbax",
    }
    assert ("head" in weights) is not tied
    for path in others.values():
        other_config, other_weights = load(path)
        assert other_config == config
        assert_same(other_weights, weights)


def test_leaves_are_the_fused_matrices_of_the_file(tmp_path: Path) -> None:
    arrays = tensors()
    _, weights = load(hf(tmp_path, arrays))
    layer = "model.layers.1."
    parts = [arrays[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
    assert np.array_equal(weights["layers.1.qkv"], np.concatenate(parts))
    gate, up = arrays[f"{layer}mlp.gate_proj.weight"], arrays[f"{layer}mlp.up_proj.weight"]
    assert np.array_equal(weights["layers.1.gate_up"], np.concatenate([gate, up]))
    assert np.array_equal(weights["layers.1.output"], arrays[f"{layer}self_attn.o_proj.weight"])
    assert np.array_equal(weights["layers.1.down"], arrays[f"{layer}mlp.down_proj.weight"])
    assert np.array_equal(weights["embedding"], arrays["model.embed_tokens.weight"])
    assert np.array_equal(weights["head"], arrays["lm_head.weight"])
    assert np.array_equal(weights["final_norm"], arrays["model.norm.weight"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arrays_are_cast_contiguous_and_aligned_for_the_device(tmp_path: Path, dtype: Any) -> None:
    arrays = tensors()
    config, weights = load(hf(tmp_path, arrays), dtype)
    for name, spec in named(abstract(config, dtype)).items():
        array = weights[name]
        assert (array.shape, array.dtype) == (spec.shape, np.dtype(spec.dtype)), name
        assert array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % 64 == 0, name
    expected = arrays["model.layers.0.self_attn.o_proj.weight"].astype(np.dtype(dtype))
    assert np.array_equal(weights["layers.0.output"], expected)
    assert weights["layers.0.attention_norm"].dtype == np.float32


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_types_on_disk_become_the_wanted_one(tmp_path: Path, stored: Any) -> None:
    arrays = {name: array.astype(stored) for name, array in tensors().items()}
    _, weights = load(hf(tmp_path, arrays))
    expected = arrays["model.layers.0.self_attn.o_proj.weight"].astype(np.float32)
    assert np.array_equal(weights["layers.0.output"], expected)


def test_blocks_of_a_large_matrix_are_put_together_again(tmp_path: Path) -> None:
    """More rows and columns than are copied at once."""
    sizes = {"vocab": 300, "width": 1_040, "mlp": 1_100, "heads": 2, "kv_heads": 1, "head_width": 64, "layers": 1}
    arrays = tiny_llama_tensors(np.random.default_rng(1), **sizes)
    write_hf(tmp_path, tiny_config_json(**sizes), arrays)
    _, weights = load(tmp_path)
    mlp = "model.layers.0.mlp."
    both = np.concatenate([arrays[f"{mlp}gate_proj.weight"], arrays[f"{mlp}up_proj.weight"]])
    assert np.array_equal(weights["layers.0.gate_up"], both)
    assert np.array_equal(weights["layers.0.down"], arrays[f"{mlp}down_proj.weight"])


def test_all_that_is_wrong_with_the_tensors_is_said_at_once_before_any_is_read(tmp_path: Path) -> None:
    arrays = tensors()
    del arrays["model.layers.1.mlp.up_proj.weight"]
    arrays["model.norm.weight"] = arrays["model.norm.weight"][:16]
    arrays["model.layers.0.self_attn.q_proj.weight"] = arrays["model.layers.0.self_attn.q_proj.weight"].T[:8]
    arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    checkpoint = open_checkpoint(hf(tmp_path, arrays))

    def unreadable(name: str) -> np.ndarray:
        raise AssertionError(f"{name} was read")

    with pytest.raises(ArtifactError) as caught:
        load_weights(replace(checkpoint, read=unreadable), read_config(checkpoint), place=never)
    for problem in (
        "model.layers.1.mlp.up_proj.weight [48, 32] is missing",
        "model.norm.weight has shape [16], not [32]",
        "model.layers.0.self_attn.q_proj.weight has shape [8, 32], not [32, 32]",
        "model.layers.0.self_attn.q_proj.bias is unexpected",
    ):
        assert problem in str(caught.value)
    assert caught.value.path == str(tmp_path)


def test_a_list_of_problems_has_an_end(tmp_path: Path) -> None:
    arrays = tensors() | {f"extra.{number}": np.zeros(1, np.float32) for number in range(50)}
    checkpoint = open_checkpoint(hf(tmp_path, arrays))
    with pytest.raises(ArtifactError, match="and 30 more"):
        load_weights(checkpoint, read_config(checkpoint), place=never)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    arrays = hf_to_gguf_tensors(tensors())
    arrays["blk.0.ffn_up.weight"] = arrays["blk.0.ffn_up.weight"].astype(np.int32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_gguf_metadata(), arrays))
    with pytest.raises(ArtifactError, match="blk.0.ffn_up.weight is of type I32"):
        load_weights(checkpoint, read_config(checkpoint), place=never)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    arrays = tensors(tied=True)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    _, weights = load(hf(tmp_path / "same", arrays, tied=True))
    assert "head" not in weights
    arrays["lm_head.weight"][7, 3] += 1
    with pytest.raises(ArtifactError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load(hf(tmp_path / "other", arrays, tied=True))


def test_frequencies_that_old_checkpoints_store_are_left_alone(tmp_path: Path) -> None:
    arrays = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    load(hf(tmp_path, arrays))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, value: float, stored: Any, wanted: Any
) -> None:
    arrays = {name: array.astype(stored) for name, array in tensors().items()}
    arrays["model.layers.1.mlp.up_proj.weight"][40, 31] = value
    path = hf(tmp_path, arrays)
    with pytest.raises(ArtifactError) as caught:
        load(path, wanted)
    assert caught.value.field == "model.layers.1.mlp.up_proj.weight"
    _, weights = load(path, wanted, scan=False)
    assert not np.isfinite(weights["layers.1.gate_up"][48 + 40, 31])


def test_a_weight_too_large_for_the_wanted_type_is_refused(tmp_path: Path) -> None:
    arrays = {name: array.astype(np.float64) for name, array in tensors().items()}
    arrays["model.norm.weight"][3] = 1e300
    with pytest.raises(ArtifactError, match="model.norm.weight"):
        load(hf(tmp_path, arrays))


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config, _ = load(hf(tmp_path, tensors()), progress=lambda done, total: seen.append((done, total)))
    total = nbytes(abstract(config))
    assert [pair[1] for pair in seen] == [total] * (2 * 6 + 3)
    assert sorted({done for done, _ in seen}) == [done for done, _ in seen]
    assert seen[-1] == (total, total)


def test_few_leaves_are_in_memory_at_once(tmp_path: Path) -> None:
    """Reading waits for placing: a slow device does not fill the host."""
    checkpoint = open_checkpoint(hf(tmp_path, tensors()))
    lock, read_leaves, placed_leaves, most = threading.Lock(), set[str](), set[str](), 0

    def read(name: str) -> np.ndarray:
        with lock:
            read_leaves.add(
                name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
            )
        return checkpoint.read(name)

    def place(name: str, spec: Any, array: np.ndarray) -> np.ndarray:
        nonlocal most
        threading.Event().wait(0.005)
        with lock:
            placed_leaves.add(name)
            most = max(most, len(read_leaves) - len(placed_leaves) + 1)
        return array

    load_weights(replace(checkpoint, read=read), read_config(checkpoint), place=place)
    assert len(read_leaves) == len(placed_leaves) == 2 * 6 + 3
    assert most <= READERS + 1


def test_an_error_while_reading_ends_the_load(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(hf(tmp_path, tensors()))

    def read(name: str) -> np.ndarray:
        if name == "model.layers.1.mlp.down_proj.weight":
            raise ArtifactError("gone", path=tmp_path, field=name)
        return checkpoint.read(name)

    with pytest.raises(ArtifactError, match="down_proj.weight: gone"):
        load_weights(replace(checkpoint, read=read), read_config(checkpoint), place=keep)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxrt-load")]


def test_placed_arrays_can_be_what_place_returns(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(hf(tmp_path, tensors()))
    loaded = load_weights(checkpoint, read_config(checkpoint), place=lambda name, spec, array: jax.device_put(array))
    assert isinstance(loaded.layers[1].qkv, jax.Array)


# What a path may be --------------------------------------------------------------------------------------------------


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(path, tiny_gguf_metadata(), hf_to_gguf_tensors(tensors()))


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = gguf(tmp_path / "model.GGUF")
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).path == path
    assert open_checkpoint(str(path)).format == "gguf"


def test_a_split_set_counts_as_one_model_and_says_what_is_missing(tmp_path: Path) -> None:
    gguf(tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(ArtifactError, match="model-00002-of-00002.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda d: d / "nothing", "no such file"),
        (lambda d: d, "nothing in it"),
        (lambda d: file(d / "model.bin"), "convert them to safetensors"),
        (lambda d: file(d / "notes.txt"), "a directory with notes.txt"),
        (lambda d: (gguf(d / "a.gguf"), gguf(d / "b.gguf"))[0].parent, "2 GGUF files: a.gguf, b.gguf"),
        (lambda d: file(d / "w.safetensors") / "w.safetensors", "give the directory that holds it"),
    ],
)
def test_other_paths_are_described(tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        open_checkpoint(make(tmp_path))


def file(path: Path) -> Path:
    path.write_bytes(b"x")
    return path.parent


def test_the_tokenizer_comes_from_the_checkpoint_or_is_none(tmp_path: Path) -> None:
    with_one = open_checkpoint(hf(tmp_path / "with", tensors(), tokenizer_json=byte_tokenizer_json()))
    tokenizer = load_tokenizer(with_one)
    assert tokenizer is not None and tokenizer.encode("Ab") == [65, 98]
    assert load_tokenizer(open_checkpoint(hf(tmp_path / "without", tensors()))) is None
    assert load_tokenizer(open_checkpoint(gguf(tmp_path / "m.gguf"))) is None


# How the checkpoint wants to be sampled ------------------------------------------------------------------------------


def defaults(generation: dict[str, Any]) -> SamplingParams:
    checkpoint = Checkpoint(Path("model"), "safetensors", tiny_config_json(), {}, lambda name: np.zeros(0), generation)
    return generation_defaults(checkpoint, read_config(checkpoint))


def test_without_word_from_the_checkpoint_decoding_is_greedy() -> None:
    assert defaults({}) == SamplingParams(temperature=0.0)
    assert defaults({"eos_token_id": 257, "temperature": 0.6, "top_k": 50}) == SamplingParams(temperature=0.0)


def test_sampling_follows_generation_config() -> None:
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    asked |= {"repetition_penalty": 1.1, "max_new_tokens": 99, "min_new_tokens": 3, "stop_strings": ["###"]}
    assert defaults(asked) == SamplingParams(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        max_tokens=99,
        min_tokens=3,
        stop=["###"],
    )


def test_what_does_not_matter_or_is_switched_off_is_passed_over() -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "transformers_version": "5", "use_cache": True, "penalty_alpha": None}
    assert defaults(neutral) == SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_beams", 4), ("penalty_alpha", 0.6), ("no_repeat_ngram_size", 3), ("suppress_tokens", [1]), ("novel", 1)],
)
def test_ways_of_decoding_that_jaxrt_lacks_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        defaults({key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1.0), ("top_p", 2), ("top_k", "many"), ("max_new_tokens", 0), ("do_sample", 1)],
)
def test_senseless_sampling_values_are_errors_of_the_file(key: str, value: Any) -> None:
    with pytest.raises(ArtifactError, match="generation_config.json"):
        defaults({"do_sample": True} | {key: value})


def test_the_demo_model_s_header_is_read(demo_path: Path) -> None:
    """Values of SmolLM2-135M's published config.json."""
    config = read_config(open_checkpoint(demo_path))
    assert (config.vocab, config.width, config.mlp_width, len(config.layers)) == (49_152, 576, 1_536, 30)
    assert (config.heads, config.kv_heads, config.head_width, config.context) == (9, 3, 64, 8_192)
    assert config.tied_head and config.layers[0].rope.theta == 100_000 and config.eos_tokens == (2,)
    assert config.norm_eps == pytest.approx(1e-5) and config.parameters == 134_515_008
