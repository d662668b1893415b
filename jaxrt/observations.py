"""Observations as data: values read out of a pass, on the host, by path and in a stable order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxrt.errors import RequestError

LOGITS_PATH = "model.logits"


@dataclass(frozen=True, eq=False)
class TensorObservation:
    """A tensor on the host: row-major; half types widened to float32, integers to int64 or uint64."""

    data: np.ndarray

    def __post_init__(self) -> None:
        kind = self.data.dtype.kind
        wide = {"b": np.dtype(bool), "i": np.dtype(np.int64), "u": np.dtype(np.uint64)}.get(kind, np.dtype(np.float32))
        object.__setattr__(self, "data", np.ascontiguousarray(self.data, wide))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


ObservationValue = TensorObservation | float | int | bool | str


class ObservationSet(Mapping[str, ObservationValue]):
    """Observations by path, iterated in path order."""

    def __init__(self, values: Mapping[str, ObservationValue] | None = None) -> None:
        self._values: dict[str, ObservationValue] = {}
        for path, value in (values or {}).items():
            self.insert(path, value)

    def insert(self, path: str, value: ObservationValue) -> None:
        """Add one. Raises: RequestError for an empty path, or one that is there already (which stays as it is)."""
        if not path:
            raise RequestError("an observation with an empty path", expected="a dotted path such as 'model.logits'")
        if path in self._values:
            raise RequestError(f"an observation of {path!r} is already there", fix="use extend() with other paths")
        self._values[path] = value

    def extend(self, others: Mapping[str, ObservationValue]) -> None:
        """Insert all of `others`, in their order; those before a collision stay."""
        for path, value in others.items():
            self.insert(path, value)

    def prefixed(self, prefix: str) -> "ObservationSet":
        """The same values under `prefix.`; an empty prefix changes nothing."""
        return ObservationSet({f"{prefix}.{path}" if prefix else path: v for path, v in self._values.items()})

    def __getitem__(self, path: str) -> ObservationValue:
        return self._values[path]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)
