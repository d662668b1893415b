"""Symbols: the whole numbers that a program reads besides arrays, such as how many tokens a cache holds."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxrt.errors import ReboundSymbol, RequestError, UnboundSymbol, nearest
from jaxrt.requests import is_whole, shown

LOW, HIGH = -(2**31), 2**31 - 1


class SymEnv(Mapping[str, int]):
    """What one pass knows its symbols to be: name -> whole number. Each is written once; being there means bound.

    `SymEnv({"cached_len": 5})` stands wherever an env is taken, and so does the plain dict. It may hold more symbols
    than a program reads: passes of several programs share one. `get` answers None for what is not bound.

    Raises: RequestError for a value that is no whole number of 32 bits; UnboundSymbol on reading, ReboundSymbol on
    binding again to another value.
    """

    def __init__(self, values: Mapping[str, int] | None = None) -> None:
        if values is not None and not isinstance(values, Mapping):
            raise RequestError(f"an env of type {type(values).__name__}", expected="symbol names with whole numbers")
        self._values: dict[str, int] = {}
        for name, value in (values or {}).items():
            self.bind(name, value)

    def bind(self, name: str, value: int) -> None:
        """Bind `name` to `value`. Binding it to the same value again changes nothing.

        Raises: ReboundSymbol for another value, and the first one stays; RequestError as the class says.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"a symbol named {shown(name)}", expected="a text")
        bound = self._values.setdefault(name, _int32(name, value))
        if bound != value:
            raise ReboundSymbol(
                f"{name!r} bound to {value} where it is {bound}", fix="take another SymEnv for another pass, or clear()"
            )

    def is_bound(self, name: str) -> bool:
        return name in self._values

    def is_empty(self) -> bool:
        return not self._values

    def clear(self) -> None:
        """Forget every symbol, for the next pass."""
        self._values.clear()

    def __getitem__(self, name: str) -> int:
        try:
            return self._values[name]
        except KeyError:
            raise unbound(name, self._values) from None

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"SymEnv({self._values})"


def unbound(name: str, env: Mapping[str, object], reader: str = "") -> UnboundSymbol:
    """The error for a symbol that `reader` wants and `env` does not bind."""
    wanted = f"{reader} reads the symbol {name!r}, which is not bound" if reader else f"no symbol {name!r} is bound"
    return UnboundSymbol(wanted, fix=f"bind it in env; {nearest(name, env)}" if env else "bind it in env")


def packed(symbols: Sequence[str], env: Mapping[str, int], reader: str) -> np.ndarray:
    """The values of `symbols` in their order, int32 [len(symbols)]: what an executable takes.

    Raises: UnboundSymbol naming `reader`; RequestError for a value that is no whole number of 32 bits.
    """
    values = []
    for name in symbols:
        if name not in env:
            raise unbound(name, env, reader)
        values.append(_int32(name, env[name]))
    return np.array(values, np.int32)


def _int32(name: str, value: int) -> int:
    if type(value) is int and LOW <= value <= HIGH:  # nearly always; the general question costs ten times as much
        return value
    if not is_whole(value) or not LOW <= value <= HIGH:
        raise RequestError(f"the symbol {name!r} as {shown(value)}", expected=f"a whole number from {LOW} to {HIGH}")
    return int(value)
