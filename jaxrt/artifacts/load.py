"""From a path to a config's weights, tokenizer and sampling defaults, whatever the file format."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxrt.artifacts.checkpoint import Checkpoint
from jaxrt.artifacts.files import printable, unreadable
from jaxrt.artifacts.orbax import MARKER, open_orbax
from jaxrt.artifacts.packing import held, read_packed
from jaxrt.artifacts.safetensors import open_safetensors
from jaxrt.artifacts.sealed import KINDS
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.config import ModelConfig
from jaxrt.errors import ArtifactError, RequestError
from jaxrt.models.keys import Keys
from jaxrt.models.reading import Rule, spare_tensors, tensor_rules
from jaxrt.nn.packed import Packed
from jaxrt.nn.scaled import Scaled, scaled
from jaxrt.requests import MAX_TOKENS, SamplingParams
from jaxrt.weights import ArraySpec, Weights, named, nbytes, unnamed

READERS = 2  # threads, and so leaves in memory beyond those that are placed
BLOCK = (128, 1_024)  # elements copied at once: transposing and scanning stay inside the processor's cache
ALIGNMENT = 64  # bytes; XLA's CPU client takes such arrays without copying them
MAX_PROBLEMS = 20  # named in one error


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file, a directory of config.json and safetensors, one written by `save_orbax`, or one that holds one
    GGUF model (in one file or a split set). Headers are checked; no weights are read.

    Raises: ArtifactError saying what was found.
    """
    path = Path(path)
    try:
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else None
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if names is None:
        if path.suffix.lower() == ".gguf":
            return _open_gguf(path)
        fix = "give the directory that holds it" if exists else "check the path"
        raise ArtifactError("not a .gguf file" if exists else "no such file", path=path, expected=EXPECTED, fix=fix)
    if any(kind.marker in names for kind in KINDS.values()):
        return open_orbax(path)
    suffixes = {name.rpartition(".")[2].lower() for name in names}
    if "config.json" in names and any(".safetensors" in name for name in names):
        return open_safetensors(path)
    models = sorted(name for name in names if name.lower().endswith(".gguf"))
    if len({_SPLIT.sub("-split", name) for name in models}) == 1:
        return _open_gguf(path / models[0])
    if len(models) > 1:
        found = f"{len(models)} GGUF files: {printable(', '.join(models), 400)}"
        raise ArtifactError(found, path=path, expected="one model", fix="give the path of one of them")
    if suffixes & {"bin", "pt", "pth", "ckpt", "npz", "pkl"}:
        found, fix = "weights in a format that can run code when read", "convert them to safetensors first"
    else:
        found, fix = f"a directory with {printable(', '.join(names), 200) or 'nothing in it'}", "check the path"
    raise ArtifactError(found, path=path, expected=EXPECTED, fix=fix)


def _open_gguf(path: Path) -> Checkpoint:
    from jaxrt.artifacts.gguf import (
        open_gguf,  # the gguf package takes 25 ms to import, which only its files should cost
    )

    return open_gguf(path)


EXPECTED = f"a .gguf file, or a directory with config.json and *.safetensors, one .gguf, or {MARKER}"
_SPLIT = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: Any = jnp.float32,
    storage: str = "float",
    place: Callable[[str, ArraySpec, Any], Any],
    progress: Callable[[int, int], None] | None = None,
    scan: bool = True,
) -> Weights:
    """Read, fuse, lay out and cast the weights, leaf by leaf, and hand each to `place`.

    Result: the tree of `held(checkpoint, config, dtype, storage)`, holding what `place(name, spec, array)` returned.
    `place` is called on this thread, in the order in which leaves are ready; `array` is of spec's shape and dtype,
    C-contiguous, 64-byte aligned and nobody else's, or a Packed or Scaled whose parts are. `progress(done, total)`
    counts bytes placed. `scan` refuses NaN and infinite weights.

    Raises: ArtifactError naming every tensor that is missing, unexpected or of another shape, before any is read; later
    for data that cannot be read or is not finite.
    """
    specs = held(checkpoint, config, dtype, storage)
    leaves, rules = named(specs), tensor_rules(checkpoint, config)
    _check(checkpoint, rules, spare_tensors(checkpoint, config))
    done, total = 0, nbytes(specs)
    placed: dict[str, Any] = {}

    def read(name: str) -> np.ndarray | Packed | Scaled:
        return _read_leaf(checkpoint, leaves[name], rules[name], scan)

    with ThreadPoolExecutor(READERS, thread_name_prefix="jaxrt-load") as pool:
        for name, array in _ahead(pool, read, leaves):
            placed[name] = place(name, leaves[name], array)
            done += array.nbytes
            if progress:
                progress(done, total)
    return unnamed(specs, placed)


def _ahead(
    pool: ThreadPoolExecutor, read: Callable[[str], np.ndarray | Packed | Scaled], leaves: Mapping[str, ArraySpec]
) -> Iterator[tuple[str, np.ndarray | Packed | Scaled]]:
    """Leaves as they become ready, READERS of them being read at any time."""
    reading: dict[Future[np.ndarray | Packed | Scaled], str] = {}
    for name in leaves:
        reading[pool.submit(read, name)] = name
        if len(reading) == READERS:
            finished = wait(reading, return_when=FIRST_COMPLETED).done.pop()
            yield reading.pop(finished), finished.result()
    while reading:
        finished = wait(reading, return_when=FIRST_COMPLETED).done.pop()
        yield reading.pop(finished), finished.result()


def _check(checkpoint: Checkpoint, rules: Mapping[str, Rule], spare: Mapping[str, str | None]) -> None:
    """Raises: ArtifactError with every difference between the tensors there are and those the rules ask for."""
    wanted = {source.name: source for rule in rules.values() for source in rule.sources}
    problems = []
    for name, source in wanted.items():
        header = checkpoint.tensors.get(name)
        if header is None:
            problems.append(f"{name} {list(source.shape)} is missing")
        elif header.shape != source.shape:
            problems.append(f"{name} has shape {list(header.shape)}, not {list(source.shape)}")
        elif header.dtype in NOT_WEIGHTS:
            problems.append(f"{name} is of type {header.dtype}, not of floating point")
    problems += [
        f"{printable(name)} is unexpected" for name in checkpoint.tensors if name not in wanted and name not in spare
    ]
    for name, twin in spare.items():
        if twin is not None and name in checkpoint.tensors and twin in checkpoint.tensors:
            same = checkpoint.tensors[name].shape == checkpoint.tensors[twin].shape
            if not same or not np.array_equal(checkpoint.read(name), checkpoint.read(twin)):
                problems.append(f"{name} differs from {twin}, to which the config ties it")
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise ArtifactError(
            f"{'; '.join(problems[:MAX_PROBLEMS])}{more}",
            path=checkpoint.path,
            field="tensors",
            expected="the tensors that the config tells of",
            fix="download the model again, or correct its config",
        )


NOT_WEIGHTS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})


def _read_leaf(checkpoint: Checkpoint, spec: ArraySpec, rule: Rule, scan: bool) -> np.ndarray | Packed | Scaled:
    """One leaf, laid out as `spec` says, in memory of its own."""
    if spec.scaled:
        wide = replace(spec, dtype=jnp.dtype(jnp.float32), formats=(), outputs=())
        return scaled(_read_leaf(checkpoint, wide, rule, scan), axis=1, type=spec.formats[0], dtype=spec.dtype)
    if spec.formats:
        packed, bad = read_packed(checkpoint, spec, rule, _halves_in_turn, _aligned)
        if scan and bad is not None:
            raise _not_finite(checkpoint, bad)
        return packed
    array = _aligned(spec.shape, np.dtype(spec.dtype))
    target = array if array.ndim > 1 else array[:, None]
    row = 0
    for source in rule.sources:
        data = checkpoint.read(source.name)
        if source.interleaved:
            data = _halves_in_turn(data, source.interleaved)
        if not _copy(data, target[row : row + len(data)], scan):
            raise _not_finite(checkpoint, source.name)
        row += len(data)
    return array


def _halves_in_turn(rows: np.ndarray, head_width: int) -> np.ndarray:
    """Rows of each head from the order 0, H/2, 1, H/2 + 1, ... back to 0, 1, 2, ...; shape [N H, D]."""
    pairs = rows.reshape(-1, head_width // 2, 2, *rows.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(rows.shape)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = dtype.itemsize * math.prod(shape)
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _copy(data: np.ndarray, target: np.ndarray, scan: bool) -> bool:
    """Copy and cast block by block; whether all is finite, where that is to be looked at."""
    data = data.reshape(target.shape)
    rows, columns = BLOCK
    for top in range(0, data.shape[0], rows):
        for left in range(0, data.shape[1], columns):
            with np.errstate(over="ignore"):  # what a cast makes infinite is seen below
                block = data[top : top + rows, left : left + columns].astype(target.dtype, copy=False)
            if scan and not _finite(block):
                return False
            target[top : top + rows, left : left + columns] = block
    return True


def _finite(block: np.ndarray) -> bool:
    if block.dtype == ml_dtypes.bfloat16:  # numpy's own test takes it element by element
        return bool((block.view(np.uint16) & 0x7FFF).max(initial=0) < 0x7F80)
    return bool(np.isfinite(block).all())


def _not_finite(checkpoint: Checkpoint, tensor: str) -> ArtifactError:
    return ArtifactError(
        "NaN or infinite weights",
        path=checkpoint.path,
        field=tensor,
        expected="finite numbers",
        fix="download or convert the model again",
    )


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None where it has none. Raises: ArtifactError for one that cannot be read."""
    if checkpoint.format == "gguf":
        if "tokenizer.ggml.model" not in checkpoint.metadata:
            return None
        return Tokenizer.from_gguf(checkpoint.metadata, checkpoint.path)
    if "tokenizer.json" not in checkpoint.tokenizer_files:
        return None
    return Tokenizer.from_files(checkpoint.tokenizer_files)


def generation_defaults(checkpoint: Checkpoint, config: ModelConfig) -> SamplingParams:
    """How the checkpoint wants to be sampled, from its generation_config.json; greedy where it does not say.

    Raises: ArtifactError for values that make no sense; UnsupportedModel for ways of sampling that jaxrt does not have.
    """
    path = checkpoint.path / "generation_config.json"
    keys = Keys(checkpoint.generation, path)
    sampled = keys.flag("do_sample", default=False)
    values: dict[str, Any] = {} if sampled else {"temperature": 0.0}
    for theirs, ours in _SAMPLING.items():
        value = keys.read(theirs)
        if value is not None and (sampled or ours not in _ONLY_SAMPLED):
            values[ours] = value
    values["max_tokens"] = keys.count("max_new_tokens", MAX_TOKENS, default=SamplingParams.max_tokens)
    keys.token_ids("eos_token_id", config.vocab)
    keys.close(_NEUTRAL, _IRRELEVANT)
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise ArtifactError(error.found, path=path, expected=error.expected) from error


_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_ONLY_SAMPLED = frozenset({"temperature", "top_k", "top_p", "min_p"})
# Ways of decoding that jaxrt does not have, and the values that switch them off.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "penalty_alpha": (0.0,),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "guidance_scale": (1.0,),
    "dola_layers": (),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "token_healing": (False,),
    "max_time": (),
}
# fmt: off
_IRRELEVANT = frozenset({
    "_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache",
    "max_length", "early_stopping", "length_penalty", "low_memory", "renormalize_logits", "remove_invalid_values",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
    "cache_implementation", "cache_config", "compile_config", "disable_compile", "continuous_batching_config",
    "prefill_chunk_size", "max_cache_len", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
    "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp",
    "trust_remote_code",
})
# fmt: on
