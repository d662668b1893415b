"""Models whose weights stay packed: the same answers as from unpacked ones, in the bytes that the plan told."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

import jaxrt
from jaxrt import native
from jaxrt.nn.packed import FORMATS, Packed
from jaxrt.planning import plan_artifact
from jaxrt.weights import named
from tests.files import (
    hf_to_gguf_tensors,
    random_blocks,
    tiny_config_json,
    tiny_gguf_metadata,
    tiny_llama_tensors,
    write_gguf,
    write_hf,
)

SHAPE: dict[str, int] = {"width": 256, "mlp": 256, "heads": 4, "kv_heads": 2, "head_width": 64}
TOKENS = [1, 7, 200, 33, 5, 90, 12]


def packed_file(path: Path, choose: Any) -> Path:
    """A tiny GGUF model; choose(name) is the format of a tensor, or None for float32."""
    tensors: dict[str, Any] = hf_to_gguf_tensors(
        tiny_llama_tensors(np.random.default_rng(3), **SHAPE), heads=4, kv_heads=2
    )
    for index, (name, array) in enumerate(tensors.items()):
        format = choose(name) if array.ndim == 2 else None
        if format is None:
            continue
        kind = GGMLQuantizationType[format]
        if format.endswith("_K"):  # the gguf package does not make these
            data = random_blocks(format, *array.shape, seed=index)
            values = dequantize(data, kind)
            data = random_blocks(format, *array.shape, seed=index, scale=1 / 16 / 16 / float(values.std()))
        else:
            data = quantize(array, kind)
        tensors[name] = (data.tobytes(), array.shape, kind)
    return write_gguf(path, tiny_gguf_metadata(**SHAPE), tensors)


def logits(path: Path, **options: Any) -> np.ndarray:
    with jaxrt.load(path, **options) as rt:
        seen = rt.inspect(TOKENS, ["model.logits"])["model.logits"].data
        session = rt.new_session()
        session.prefill(jaxrt.PrefillInput(TOKENS[:4])).wait()
        steps = [session.decode(jaxrt.DecodeInput(tokens=[token])).wait() for token in TOKENS[4:]]
        last = session.observe_output(steps[-1])["model.logits"].data
    return np.concatenate([seen[0], last.reshape(1, -1)])


@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_give_the_logits_of_unpacked_ones(tmp_path, format):
    path = packed_file(tmp_path / "tiny.gguf", lambda name: format)
    plain, kept = logits(path, quantize="none"), logits(path, quantize="keep")
    assert np.abs(plain - kept).max() <= 1e-4 * np.abs(plain).max()  # DESIGN's "equivalent"
    assert not np.array_equal(plain, kept) or native.missing()


def test_without_the_kernels_too(tmp_path, monkeypatch):
    path = packed_file(tmp_path / "tiny.gguf", lambda name: "Q4_1")
    plain = logits(path, quantize="none")
    monkeypatch.setattr(native, "missing", lambda: "left out")
    jax.clear_caches()
    try:
        assert np.abs(plain - logits(path, quantize="keep")).max() <= 1e-4 * np.abs(plain).max()
        with jaxrt.load(path) as rt:  # on their own they are not kept packed: XLA would unpack them at every step
            assert rt.session.model.key.dtype == "float32"
            assert rt.generate(TOKENS, jaxrt.SamplingParams(max_tokens=2)).stats.kernels == "XLA"
    finally:
        jax.clear_caches()


@pytest.mark.skipif(bool(native.missing()), reason="no native kernels")
def test_fused_matrices_may_mix_formats(tmp_path):
    mixed = {"attn_v": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K", "ffn_gate": "Q5_0", "ffn_up": None}
    path = packed_file(tmp_path / "tiny.gguf", lambda name: mixed.get(name.split(".")[-2], "Q8_0"))
    assert np.abs(logits(path, quantize="none") - (kept := logits(path))).max() <= 1e-4 * np.abs(kept).max()
    with jaxrt.load(path) as rt:
        held = named(rt.session.model.weights)
        assert held["layers.0.qkv"].formats == ("Q4_K", "Q6_K") and held["layers.0.qkv"].shape == (512, 256)
        assert held["layers.0.gate_up"].dtype == jnp.float32 and not isinstance(held["layers.0.gate_up"], Packed)


@pytest.mark.parametrize("quantize", ["keep", "none", "int8", "int4"])
def test_the_plan_tells_the_bytes_that_are_held(tmp_path, quantize):
    path = packed_file(tmp_path / "tiny.gguf", lambda name: "Q5_1" if "ffn" in name else None)
    plan = plan_artifact(path, rows=1, capacity=64, quantize=quantize, platform="cpu")
    with jaxrt.load(path, quantize=quantize) as rt:
        assert plan.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(rt.session.model.weights))
        assert plan.dtype == rt.session.model.key.dtype


@pytest.mark.parametrize(("quantize", "within"), [("int8", 0.02), ("int4", 0.31)])
def test_any_checkpoint_can_be_packed_at_load(tmp_path, quantize, within):
    write_hf(tmp_path, tiny_config_json(**SHAPE), tiny_llama_tensors(np.random.default_rng(3), **SHAPE))
    plain, found = logits(tmp_path), logits(tmp_path, quantize=quantize)
    error = np.sqrt(np.mean((plain - found) ** 2) / np.mean(plain**2))
    # 32 normal weights span 4.1 deviations, the largest is 2.2: rounding to 16 steps of the one, or 127 of the other,
    # is off by 0.079 or 0.005 deviations in the mean square; some fifteen such roundings meet in a logit
    assert 0 < error < within


def test_scales_that_are_not_finite_are_refused(tmp_path):
    tensors: dict[str, Any] = hf_to_gguf_tensors(tiny_llama_tensors(np.random.default_rng(3), **SHAPE), 4, 2)
    name = "blk.1.ffn_up.weight"
    data = quantize(tensors[name], GGMLQuantizationType.Q4_1)
    data[3, 22:24] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)  # the minimum of row 3's second block
    tensors[name] = (data.tobytes(), tensors[name].shape, GGMLQuantizationType.Q4_1)
    path = write_gguf(tmp_path / "tiny.gguf", tiny_gguf_metadata(**SHAPE), tensors)
    with pytest.raises(jaxrt.ArtifactError, match=f"{name}.*NaN or infinite weights"):
        jaxrt.load(path, quantize="keep")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"quantize": "int3"}, "int3"), ({"quantize": "int8", "dtype": "bfloat16"}, "leave one of them out")],
)
def test_what_cannot_be_done_is_refused(tmp_path, options, message):
    path = packed_file(tmp_path / "tiny.gguf", lambda name: "Q4_0")
    with pytest.raises(jaxrt.RequestError, match=message):
        jaxrt.load(path, **options)


def test_packed_sessions_are_values_and_rows_agree(tmp_path):
    path = packed_file(tmp_path / "tiny.gguf", lambda name: "Q4_0")
    params = jaxrt.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with jaxrt.load(path, quantize="keep") as rt:
        alone = [rt.generate(TOKENS[:n], params).tokens for n in (3, 5, 7)]
        assert [answer.tokens for answer in rt.generate([TOKENS[:n] for n in (3, 5, 7)], params)] == alone
        rt.generate(TOKENS, params)
        branch = rt.session.fork()
        branch.snapshot().save(tmp_path / "state")
        again = jaxrt.SessionState.restore(tmp_path / "state", rt)
        step = jaxrt.DecodeInput(tokens=[5])
        one, two = (each.observe_output(each.decode(step).wait())["model.logits"].data for each in (branch, again))
        assert np.array_equal(one, two)


def test_the_functional_door_unpacks_weights_to_be_differentiated(tmp_path):
    path = packed_file(tmp_path / "tiny.gguf", lambda name: "Q4_0")
    with jaxrt.load(path, quantize="keep") as rt:
        model = rt.functional
        gradient = jax.grad(lambda w: model.apply(w, jnp.array(TOKENS))[0][0, -1, 3])(model.weights)
        assert gradient.layers[0].qkv.shape == (512, 256) and float(jnp.abs(gradient.layers[0].qkv).max()) > 0
        held, _, _ = model.apply(rt.session.model.weights, jnp.array(TOKENS))
        plain, _, _ = model.apply(model.weights, jnp.array(TOKENS))
        assert np.abs(np.asarray(held) - np.asarray(plain)).max() <= 1e-4 * np.abs(np.asarray(plain)).max()
