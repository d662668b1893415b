"""Observations as data: where a pass can be looked into, what to look at, and the values read, on the host."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from jaxrt.errors import RequestError, nearest
from jaxrt.markup import table_html
from jaxrt.requests import is_whole, shown

Output = TypeVar("Output")

EMBEDDINGS_PATH, FINAL_NORM_PATH, LOGITS_PATH = "model.embeddings", "model.final_norm", "model.logits"
WEIGHTS = "attention.weights"
# The places of a layer, in the order of the pass, with the dimensions of what stands there (docs/architecture.md).
# Queries and keys are as projected, before their rotation.
LAYER_SITES: Mapping[str, str] = {
    "input": "BTD",
    "attention.query": "BTNH",
    "attention.key": "BTKH",
    "attention.value": "BTKH",
    WEIGHTS: "BNTS",
    "attention.heads": "BTNH",
    "attention.output": "BTD",
    "mlp.output": "BTD",
    "output": "BTD",
}
MODEL_SITES: Mapping[str, str] = {EMBEDDINGS_PATH: "BTD", FINAL_NORM_PATH: "BTD", LOGITS_PATH: "BTV"}
BUDGET_BYTES = 1 << 30  # of one request's observations


def layer_path(layer: int, site: str) -> str:
    return f"model.layers.{layer}.{site}"


def known_paths(layers: int) -> tuple[str, ...]:
    """Every path of a model with so many layers, in the order of the pass."""
    inner = (layer_path(layer, site) for layer in range(layers) for site in LAYER_SITES)
    return (EMBEDDINGS_PATH, *inner, FINAL_NORM_PATH, LOGITS_PATH)


def dimensions(path: str) -> str:
    """The dimensions of what stands at a known path, or at a site of a layer, a letter each."""
    return MODEL_SITES.get(path) or LAYER_SITES[path.split(".", 3)[-1] if path.startswith("model.") else path]


@dataclass(frozen=True)
class ObservationSelector:
    """A path, and unless it is `exact` all that lies below it. `*` stands for one layer's number."""

    path: str
    exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path or "" in self.path.split("."):
            raise RequestError(f"an observation path {shown(self.path)}", expected="a path such as 'model.layers.3'")

    def matches(self, path: str) -> bool:
        """Whether `path` is meant: compared between dots, so that layer 2 is not layer 20."""
        wanted, found = self.path.split("."), path.split(".")
        long_enough = len(found) == len(wanted) if self.exact else len(found) >= len(wanted)
        return long_enough and all(a == b or (a == "*" and b.isdecimal()) for a, b in zip(wanted, found, strict=False))


@dataclass(frozen=True)
class ObservationRequest:
    """What to look at: everything, or what any of the selectors matches. budget_bytes: most that it may take on the
    host."""

    selectors: tuple[ObservationSelector, ...] = ()
    budget_bytes: int = BUDGET_BYTES

    def __post_init__(self) -> None:
        if not is_whole(self.budget_bytes) or self.budget_bytes < 1:
            raise RequestError(f"budget_bytes={shown(self.budget_bytes)}", expected="a whole number, one or more")

    @classmethod
    def all(cls, *, budget_bytes: int = BUDGET_BYTES) -> "ObservationRequest":
        """Everything there is."""
        return cls((), budget_bytes)

    @classmethod
    def selected(
        cls, selectors: Iterable[str | ObservationSelector], *, budget_bytes: int = BUDGET_BYTES
    ) -> "ObservationRequest":
        """What any selector matches; a string means that path and all below it.

        Raises: RequestError for no selector: everything is not what an empty list should mean.
        """
        if isinstance(selectors, str | ObservationSelector):
            selectors = (selectors,)
        made = tuple(s if isinstance(s, ObservationSelector) else ObservationSelector(s) for s in selectors)
        if not made:
            raise RequestError(
                "a request to observe nothing",
                expected="one path or more",
                fix="ask for everything by ObservationRequest.all()",
            )
        return cls(made, budget_bytes)

    def matches(self, path: str) -> bool:
        return not self.selectors or any(selector.matches(path) for selector in self.selectors)

    def paths(self, known: Iterable[str]) -> tuple[str, ...]:
        """Those of the `known` paths that are meant, in their order. Raises: RequestError for a selector that matches
        none."""
        known = tuple(known)
        for selector in self.selectors:
            if not any(selector.matches(path) for path in known):
                raise RequestError(f"no observation at {selector.path!r}", fix=nearest(selector.path, known))
        return tuple(path for path in known if self.matches(path))


@dataclass(frozen=True, eq=False)
class TensorObservation:
    """A tensor on the host: row-major; half types widened to float32, integers to int64 or uint64."""

    data: np.ndarray

    def __post_init__(self) -> None:
        kind = self.data.dtype.kind
        wide = {"b": np.dtype(bool), "i": np.dtype(np.int64), "u": np.dtype(np.uint64)}.get(kind, np.dtype(np.float32))
        object.__setattr__(self, "data", np.asarray(self.data, wide, order="C"))

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

    def by_layer(self, site: str) -> dict[int, np.ndarray]:
        """What was seen at one site of each layer, such as "output", by the layer's number, lowest first."""
        found = {}
        for path, value in self._values.items():
            layer = path.removeprefix("model.layers.").partition(".")[0]
            if layer.isdecimal() and path == layer_path(int(layer), site) and isinstance(value, TensorObservation):
                found[int(layer)] = value.data
        return dict(sorted(found.items()))

    def __getitem__(self, path: str) -> ObservationValue:
        return self._values[path]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"ObservationSet({', '.join(f'{path}: {_summary(value)[0]}' for path, value in self.items())})"

    def _repr_html_(self) -> str:
        rows = [(path, *_summary(value)) for path, value in self.items()]
        return table_html(("path", "shape", "lowest", "mean", "highest"), rows, f"{len(self)} observations")


def _summary(value: ObservationValue) -> tuple[str, ...]:
    """Shape, lowest, mean and highest of a tensor's finite entries; or the value."""
    if not isinstance(value, TensorObservation):
        return str(value), "", "", ""
    finite = value.data[np.isfinite(value.data)]
    shape = str(list(value.shape))
    return (shape, *(f"{f(finite):.4g}" for f in (np.min, np.mean, np.max))) if finite.size else (shape, "", "", "")


@dataclass(frozen=True, eq=False)
class InspectedOutput(Generic[Output]):
    """What a pass gave, and what was seen inside it."""

    output: Output
    observations: ObservationSet
