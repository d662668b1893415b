"""Converting a checkpoint of any format to an Orbax directory, on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxrt.artifacts.load import load_tokenizer, load_weights, open_checkpoint
from jaxrt.artifacts.orbax import check_free, save_orbax
from jaxrt.models.reading import read_config
from jaxrt.weights import ArraySpec, named

DTYPES = {"auto": jnp.float32, "float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class Written:
    arrays: int
    nbytes: int


def convert_artifact(
    source: Path, directory: str | Path, *, dtype: str = "auto", progress: Callable[[int, int], None] | None = None
) -> Written:
    """Write the checkpoint at `source` as an Orbax directory. dtype "auto" is float32, which loses nothing.

    progress: called with the bytes of weights read and their total. Raises: ArtifactError, UnsupportedModel.
    """
    directory = Path(directory)
    check_free(directory)  # before minutes are spent on reading
    checkpoint = open_checkpoint(source)
    config = read_config(checkpoint)

    def keep(name: str, spec: ArraySpec, array: np.ndarray) -> np.ndarray:
        return array

    loaded = load_weights(checkpoint, config, dtype=DTYPES[dtype], place=keep, progress=progress)
    arrays = named(loaded)
    save_orbax(directory, config, arrays, load_tokenizer(checkpoint), dict(checkpoint.generation))
    return Written(len(arrays), sum(array.nbytes for array in arrays.values()))
