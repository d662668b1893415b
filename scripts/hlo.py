"""Reading an optimised HLO module as text: what it copies, converts or transposes."""

import math
import re
from dataclasses import dataclass

MOVES = ("copy", "copy-start", "convert", "transpose")
THROUGH = ("bitcast", "reshape", "tuple")  # an output behind these is still that of a move
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+)[ (].*\{$")
_DIMENSIONS = re.compile(r"\w+\[([\d,]*)\]")
_NAMES = re.compile(r"%?([\w.-]+)")
_CALLED = re.compile(r"calls=%?([\w.-]+)")


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    operation: str
    rest: str  # operands and attributes
    root: bool

    @property
    def elements(self) -> int:
        """Of the largest array among its outputs."""
        return max((math.prod(map(int, filter(None, d.split(",")))) for d in _DIMENSIONS.findall(self.type)), default=0)


def large_moves(text: str, elements: int) -> list[str]:
    """The instructions of an optimised HLO module that copy, convert or transpose into an array of so many elements or
    more, one line each.

    What a fusion does inside itself is never stored, so of a fusion only its outputs count.
    """
    computations = _parse(text)
    every = [(where, one) for where, body in computations.items() for one in body]
    inside = {found[1] for _, one in every if one.operation == "fusion" and (found := _CALLED.search(one.rest))}
    return [
        f"{where}: {one.name} = {one.type[:80]} {one.operation}"
        for where, one in every
        if where not in inside and one.elements >= elements and _moves(one, computations, elements)
    ]


def _parse(text: str) -> dict[str, list[_Instruction]]:
    computations: dict[str, list[_Instruction]] = {}
    body: list[_Instruction] = []
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            root, name, type, operation, rest = found.groups()
            body.append(_Instruction(name, type, operation, rest, bool(root)))
        elif (header := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
            body = computations[header[1]] = []
    return computations


def _moves(one: _Instruction, computations: dict[str, list[_Instruction]], elements: int) -> bool:
    if one.operation in MOVES:
        return True
    called = _CALLED.search(one.rest) if one.operation == "fusion" else None
    if called is None or called[1] not in computations:
        return False
    body = {each.name: each for each in computations[called[1]]}
    waiting = [each for each in body.values() if each.root]
    while waiting:
        each = waiting.pop()
        if each.operation in MOVES and each.elements >= elements:
            return True
        if each.operation in THROUGH:
            operands = each.rest.split(")")[0]
            waiting += [body[name] for name in _NAMES.findall(operands) if name in body]
    return False
