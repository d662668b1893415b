"""Reading a config that came with a file: every key asked for by name and type, then closed, so that none goes
unnoticed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrt.errors import ArtifactError, UnsupportedModel


class Keys:
    """A mapping from a file, read key by key and then closed: what nobody asked for raises. A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values = {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}
        self._path, self._prefix, self._read = path, prefix, set[str]()

    def read(self, name: str) -> Any:
        """The value as it stands, or None."""
        self._read.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether it is there with a value; does not count as reading it."""
        return self._values.get(name) is not None

    def count(self, name: str, most: int, *, default: int | None = None, least: int = 1) -> int:
        """A whole number in [least, most]. Raises: ArtifactError."""
        value = self.read(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"a whole number from {least} to {most:,}")
        return value

    def positive(self, name: str, most: float, *, default: float | None = None) -> float:
        """A finite number in (0, most]. Raises: ArtifactError."""
        value = self.read(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise self.wrong(name, value, f"a number above 0 and at most {most:g}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false. Raises: ArtifactError."""
        value = self.read(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string, or None where there is none. Raises: ArtifactError."""
        value = self.read(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def section(self, name: str) -> Mapping[str, Any] | None:
        """A nested mapping, or None where there is none. Raises: ArtifactError."""
        value = self.read(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return value

    def token_ids(self, name: str, vocab: int) -> tuple[int, ...]:
        """One token id or a list of them; empty where there is none. Raises: ArtifactError."""
        value = self.read(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab for i in ids):
            raise self.wrong(name, value, f"token ids from 0 to {vocab - 1:,}")
        return tuple(dict.fromkeys(ids))

    def close(self, fixed: Mapping[str, tuple[Any, ...]], ignored: frozenset[str] = frozenset()) -> None:
        """Raises: UnsupportedModel naming each key not read, not `ignored`, and without one of its `fixed` values."""
        refused = []
        for name, value in sorted(self._values.items()):
            if value is None or name in self._read or name in ignored:
                continue
            if name not in fixed:
                refused.append(f"{self._prefix}{name} = {value!r:.80} (unknown key)")
            elif value not in fixed[name]:
                only = " or ".join(map(repr, fixed[name])) or "no value"
                refused.append(f"{self._prefix}{name} = {value!r:.80} (only {only} is implemented)")
        if refused:
            raise UnsupportedModel(
                f"{self._path}: {'; '.join(refused)}", expected="keys and values that jaxrt implements"
            )

    def wrong(self, name: str, value: Any, expected: str) -> ArtifactError:
        found = "missing" if value is None else f"{value!r:.80}"
        return ArtifactError(found, path=self._path, field=f"{self._prefix}{name}", expected=expected)
