"""The host's side of rows: what each holds, and what was submitted for it and not read yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrt.errors import RequestError
from jaxrt.requests import is_list, is_whole, shown
from jaxrt.sessions.outputs import XlaOutput


@dataclass(eq=False)
class Row:
    """The host's mirror of one row: always a prefix of what the device holds."""

    cached: list[int] = field(default_factory=list)  # tokens in the cache
    pending: int | None = None  # sampled or given last; not in the cache yet
    ahead: int = 0  # positions submitted and not read yet

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.cached, *(() if self.pending is None else (self.pending,)))

    def push(self, token: int) -> None:
        if self.pending is not None:
            self.cached.append(self.pending)
        self.pending = token

    def keep(self, length: int) -> None:
        if length <= len(self.cached):
            self.cached, self.pending = self.cached[:length], None

    def copy(self) -> "Row":
        return Row([*self.cached], self.pending)


@dataclass(frozen=True, eq=False)
class Unread:
    """A submission whose tokens the mirror does not have yet."""

    output: XlaOutput
    rows: tuple[int, ...]  # whose tokens they are, in the output's order
    positions: int
    forced: tuple[int, ...] = ()


def per_row(tokens: Any, rows: int, vocab: int) -> list[list[int]]:
    """Token ids as one list a row. Raises: RequestError for another number of lists, or ids outside the vocabulary."""
    if not is_list(tokens):
        raise RequestError(f"tokens of type {type(tokens).__name__}", expected="token ids, or one list of them a row")
    nested = [isinstance(entry, Sequence | np.ndarray) for entry in tokens]
    if all(nested) and nested:
        prompts = [list(entry) for entry in tokens]
    elif rows == 1 and not any(nested):
        prompts = [list(tokens)]
    else:
        raise RequestError("token ids that are not one list a row", expected=f"{rows} lists of token ids")
    if len(prompts) != rows:
        raise RequestError(f"{len(prompts)} lists of tokens", expected=f"one for each of {rows} rows")
    for prompt in prompts:
        check_tokens(prompt, vocab)
    return prompts


def check_tokens(tokens: Sequence[int], vocab: int) -> None:
    """XLA clamps ids outside the table without a word, so they are refused here. Raises: RequestError."""
    for token in tokens:
        if not is_whole(token) or not 0 <= token < vocab:
            raise RequestError(f"token id {shown(token)}", expected=f"a whole number from 0 to {vocab - 1}")
