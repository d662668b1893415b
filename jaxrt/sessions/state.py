"""`SessionState`: all that a session holds, on the host, as a value that can be saved and resumed bit for bit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrt.artifacts.orbax import from_json
from jaxrt.artifacts.sealed import seal, unseal
from jaxrt.cache import KEY_SLOTS, VALUE_SLOTS, KVCache, is_scaled
from jaxrt.errors import ArtifactError, RequestError
from jaxrt.markup import bytes_text, table_html
from jaxrt.nn.scaled import Scaled
from jaxrt.requests import is_whole, shown
from jaxrt.sampling import SamplerState
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.rows import Row

if TYPE_CHECKING:
    from jaxrt.sessions.session import XlaSession

KIND, FORMAT = "session", 1


@dataclass(frozen=True)
class _Header:
    """What a saved session says beside its arrays."""

    fingerprint: str
    tokens: tuple[tuple[int, ...], ...]
    pending: tuple[int | None, ...]
    capacity: int


@dataclass(frozen=True, eq=False)
class SessionState:
    """Tokens, the used part of the cache, the sampler's state. Random keys follow from a request's seed and a token's
    position, so there is none to keep.

    arrays: keys [L, B, K, H, U] and values [L, B, K, U, H] of the U slots in use, key_scales [L, B, K, 1, U] and
    value_scales [L, B, K, U, 1] of a cache that has them; counts, recent and generated of the sampler. None for a
    session that never ran.
    """

    fingerprint: str  # of the model: its config and weights
    tokens: tuple[tuple[int, ...], ...]  # of each row, those in the cache
    pending: tuple[int | None, ...]  # of each row, the last sampled token that is not in the cache yet
    capacity: int
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(
        cls, model: XlaModel, mirror: Sequence[Row], capacity: int, kv: KVCache | None, sampler: SamplerState | None
    ) -> "SessionState":
        """The state of rows with that cache and sampler. Copies: no view of a device buffer stays alive."""
        tokens = tuple(tuple(row.cached) for row in mirror)
        arrays: dict[str, np.ndarray] = {}
        if kv is not None and sampler is not None:
            used = max(map(len, tokens))
            arrays["keys"] = np.stack([np.asarray(leaf)[..., :used] for leaf in map(_numbers, kv.keys)])
            arrays["values"] = np.stack([np.asarray(leaf)[..., :used, :] for leaf in map(_numbers, kv.values)])
            if isinstance(kv.keys[0], Scaled):
                arrays["key_scales"] = np.stack([np.asarray(leaf.scales)[..., :used] for leaf in kv.keys])
                arrays["value_scales"] = np.stack([np.asarray(leaf.scales)[..., :used, :] for leaf in kv.values])
            for name in ("counts", "recent", "generated"):
                arrays[name] = np.array(getattr(sampler, name))
        return cls(model.fingerprint, tokens, tuple(row.pending for row in mirror), capacity, arrays)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in the cache, int [B]."""
        return np.array([len(tokens) for tokens in self.tokens])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def mirror(self) -> list[Row]:
        return [Row([*tokens], pending) for tokens, pending in zip(self.tokens, self.pending, strict=True)]

    def check(self, model: XlaModel, rows: int) -> None:
        """Raises: RequestError when it is no state of `model`, or has more rows than `rows`."""
        if self.fingerprint != model.fingerprint:
            raise RequestError(
                "the state of a session of another model", expected="the same config and weights", fix="load that model"
            )
        if self.arrays and self.arrays["keys"].dtype != np.dtype(model.cache_dtype):
            raise RequestError(
                f"a state with a cache of {self.arrays['keys'].dtype}",
                expected=f"{np.dtype(model.cache_dtype)}",
                fix=f"load the model with kv_dtype={self.arrays['keys'].dtype.name!r}",
            )
        if len(self.tokens) > rows:
            raise RequestError(f"a state of {len(self.tokens)} rows", expected=f"at most {rows}")

    def cache(self, rows: int, capacity: int) -> KVCache:
        """The cache of `rows` rows and that capacity, zeros where nothing was."""

        def spread(name: str, scales: str, axis: int) -> tuple[Any, ...]:
            leaves = [_spread(leaf, rows, capacity, axis) for leaf in self.arrays[name]]
            if scales not in self.arrays:
                return tuple(leaves)
            factors = [_spread(leaf, rows, capacity, axis) for leaf in self.arrays[scales]]
            return tuple(Scaled(*pair, np.float32) for pair in zip(leaves, factors, strict=True))

        return KVCache(spread("keys", "key_scales", KEY_SLOTS), spread("values", "value_scales", VALUE_SLOTS))

    def sampler(self, rows: int) -> SamplerState:
        """The sampler's state of `rows` rows; further ones are as at the start."""
        counts, recent, generated = (self.arrays[name] for name in ("counts", "recent", "generated"))
        return SamplerState(_rows(counts, rows, 0), _rows(recent, rows, -1), _rows(generated, rows, 0))

    def save(self, directory: str | Path) -> None:
        """Write it, all or nothing, with hashes of everything. Raises: ArtifactError when `directory` is there
        already."""
        body = {name: getattr(self, name) for name in _Header.__dataclass_fields__}
        seal(directory, kind=KIND, format=FORMAT, body=body, arrays=self.arrays)

    @classmethod
    def read(cls, directory: str | Path) -> "SessionState":
        """What `save` wrote. Raises: ArtifactError naming what is damaged, or what it is instead."""
        sealed = unseal(directory, kind=KIND, format=FORMAT)
        header = from_json(_Header, dict(sealed.body), sealed.manifest, "session", sealed.again)
        state = cls(**vars(header), arrays=sealed.read_all())
        state._check_arrays(Path(directory))
        return state

    @classmethod
    def restore(
        cls, directory: str | Path, runtime: Any, *, rows: int | None = None, capacity: int | None = None
    ) -> "XlaSession":
        """A new session of `runtime` that goes on from what was saved, bit for bit in the same buckets.

        rows: of the new session; None: as many as were saved. capacity: tokens to make room for; None: as before.
        Raises: ArtifactError for a damaged or foreign directory; RequestError for another model's; CapacityError.
        """
        return cls.read(directory).open(runtime, rows=rows, capacity=capacity)

    def open(self, runtime: Any, *, rows: int | None = None, capacity: int | None = None) -> "XlaSession":
        """`restore`, of a state in memory."""
        if capacity is not None and (not is_whole(capacity) or capacity < 1):
            raise RequestError(f"capacity={shown(capacity)}", expected="a whole number, one or more")
        session = runtime.new_session(rows=len(self.tokens) if rows is None else rows)
        try:
            session.resume(self, capacity)
        except BaseException:
            session.close()
            raise
        return session

    def _check_arrays(self, directory: Path) -> None:
        """Raises: ArtifactError where arrays and tokens do not belong together."""
        rows, used = len(self.tokens), max(map(len, self.tokens), default=0)
        wanted = {"keys": (5, 1, rows, 4, used), "values": (5, 1, rows, 3, used), "counts": (2, 0, rows, 0, rows)}
        wanted |= {"recent": (2, 0, rows, 0, rows), "generated": (1, 0, rows, 0, rows)}
        if "keys" in self.arrays and is_scaled(self.arrays["keys"].dtype):
            wanted |= {"key_scales": wanted["keys"], "value_scales": wanted["values"]}
        if not self.arrays and not self.capacity and not used:
            return
        if self.arrays.keys() != wanted.keys() or not rows or len(self.pending) != rows or self.capacity < used:
            raise ArtifactError("arrays that do not fit its tokens", path=directory, expected=", ".join(wanted))
        for name, (ndim, row_axis, row_count, axis, count) in wanted.items():
            shape = self.arrays[name].shape
            if len(shape) != ndim or shape[row_axis] != row_count or shape[axis] != count:
                raise ArtifactError(f"shape {list(shape)}", path=directory, field=name, expected="that of its tokens")

    def __repr__(self) -> str:
        return f"SessionState(lengths={self.lengths.tolist()}, {bytes_text(self.nbytes)})"

    def _repr_html_(self) -> str:
        facts = [
            ("tokens in the cache", ", ".join(f"{length:,}" for length in self.lengths)),
            ("capacity", f"{self.capacity:,}"),
            ("bytes", bytes_text(self.nbytes)),
            ("model", self.fingerprint[:12]),
        ]
        return table_html(("", "session state"), facts)


def _numbers(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, Scaled) else leaf


def _spread(leaf: np.ndarray, rows: int, capacity: int, axis: int) -> np.ndarray:
    shape = [rows, *leaf.shape[1:]]
    shape[axis] = capacity
    full = np.zeros(shape, leaf.dtype)
    full[tuple(slice(extent) for extent in leaf.shape)] = leaf
    return full


def _rows(array: np.ndarray, rows: int, fill: int) -> np.ndarray:
    return np.concatenate([array, np.full((rows - len(array), *array.shape[1:]), fill, array.dtype)])
