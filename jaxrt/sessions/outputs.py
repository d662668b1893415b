"""What goes into a session's submissions and what comes out: inputs, device outputs, completions."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.errors
import numpy as np

from jaxrt.contracts import Submission
from jaxrt.errors import ExecutionError


@dataclass(frozen=True)
class PrefillInput:
    """Tokens to append to the cache. For a session of several rows: one list a row, an empty one leaving its row
    alone."""

    tokens: Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class DecodeInput:
    """Positions to decode: those of given `tokens` (for several rows, one list a row and all of one length), or
    `positions` tokens sampled greedily from where the session stands."""

    tokens: Sequence[int] | Sequence[Sequence[int]] | None = None
    positions: int = 1


@dataclass(frozen=True, eq=False)
class XlaOutput:
    """What a submission leaves on the device; nothing here is ever donated."""

    logits: tuple[jax.Array, ...]  # float32 [b, V] each: of one position, or of one row
    packed: tuple[jax.Array, ...]  # int32 [b, n, C] each: sampled tokens and what was asked about them
    scores: tuple[tuple[jax.Array, int], ...] = ()  # int32 [T, C] each, with the number of real tokens among T
    # of each chunk or position: {path: array}, with the number of real tokens among its T
    observed: tuple[tuple[dict[str, jax.Array], int], ...] = ()
    by_row: bool = False  # the tuples hold one entry a row (a prefill) rather than one a position

    def read(self) -> np.ndarray:
        """The packed columns on the host, int32 [B, n, C]. Blocks. Raises: ExecutionError when the device failed."""
        return np.concatenate(_to_host(self.packed), axis=0 if self.by_row else 1)

    def read_logits(self) -> np.ndarray:
        """float32 [B, T, V]. Blocks. Raises: ExecutionError when the device failed."""
        parts = _to_host(self.logits)
        return np.concatenate(parts)[:, None] if self.by_row else np.stack(parts, axis=1)

    def read_scores(self) -> np.ndarray:
        """int32 [tokens, C], padding left out. Blocks. Raises: ExecutionError when the device failed."""
        parts = _to_host(tuple(array for array, _ in self.scores))
        return np.concatenate([part[:count] for part, (_, count) in zip(parts, self.scores, strict=True)])


@dataclass(frozen=True, eq=False)
class XlaCompletion:
    """Of one submission: holds arrays that nobody donates, and waits for those alone."""

    arrays: tuple[jax.Array, ...]

    def is_complete(self) -> bool:
        return all(array.is_ready() for array in self.arrays)

    def wait(self) -> None:
        try:
            jax.block_until_ready(self.arrays)
        except jax.errors.JaxRuntimeError as error:
            raise _failed(error) from error


def submitted(output: XlaOutput) -> Submission[XlaOutput]:
    return Submission(output, XlaCompletion((*output.logits, *output.packed)))


def _to_host(arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
    try:
        return [np.array(array) for array in arrays]  # copies: a view would keep the device's buffer
    except jax.errors.JaxRuntimeError as error:
        raise _failed(error) from error


def _failed(error: Exception) -> ExecutionError:
    return ExecutionError(f"the device failed: {error}", fix="free device memory, then call session.reset()")
