"""What a plan takes, makes and costs, as text, HTML and JSON."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxrt.markup import bytes_text, table_html

if TYPE_CHECKING:
    from jaxrt.program import Plan


@dataclass(frozen=True)
class Explanation:
    """Facts about one plan. `as_json()` has them all, `str()` and notebooks show them as tables; None is what XLA does
    not say."""

    program: str
    inputs: tuple[dict[str, Any], ...]  # name, leaves, bytes, donated
    targets: tuple[dict[str, Any], ...]  # name, bytes, replaces
    symbols: tuple[str, ...]
    constants: tuple[dict[str, Any], ...]  # name, bytes, captured
    memory: dict[str, int | None]  # bytes of arguments, outputs, temporaries, and outputs in place of arguments
    flops: float | None
    bytes_accessed: float | None
    compile_s: float
    from_cache: bool

    def as_json(self) -> dict[str, Any]:
        """A dict of plain values, as `json.dumps` takes it."""
        return {
            "program": self.program,
            "inputs": [dict(row) for row in self.inputs],
            "targets": [dict(row) for row in self.targets],
            "symbols": list(self.symbols),
            "constants": [dict(row) for row in self.constants],
            "memory": dict(self.memory),
            "flops": self.flops,
            "bytes_accessed": self.bytes_accessed,
            "compile_s": self.compile_s,
            "from_cache": self.from_cache,
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, name, bytes, note) for each value and each figure."""
        found = []
        for row in self.inputs:
            arrays = "1 array" if row["leaves"] == 1 else f"{row['leaves']:,} arrays"
            note = f"{arrays}, donated" if row["donated"] else arrays
            found.append(("input", row["name"], bytes_text(row["bytes"]), note))
        found += [("symbol", name, "", "int32") for name in self.symbols]
        for row in self.constants:
            how = "captured" if row["captured"] else "uploaded where the context has none"
            found.append(("constant", row["name"], bytes_text(row["bytes"]), how))
        for row in self.targets:
            note = f"in place of {row['replaces']}" if row["replaces"] else ""
            found.append(("target", row["name"], bytes_text(row["bytes"]), note))
        found += [("memory", name, _bytes(count), "") for name, count in self.memory.items()]
        found.append(("cost", "flops", "", _count(self.flops)))
        found.append(("cost", "bytes accessed", _bytes(self.bytes_accessed), ""))
        note = "from the compile cache" if self.from_cache else "not in the compile cache"
        found.append(("cost", "compile", "", f"{self.compile_s:.2f} s, {note}"))
        return found

    def __str__(self) -> str:
        rows = self.rows()
        what, name, size = (max(len(row[column]) for row in rows) for column in range(3))
        lines = [f"{w:<{what}}  {n:<{name}}  {s:>{size}}  {note}".rstrip() for w, n, s, note in rows]
        return "\n".join([f"plan of {self.program}", *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        return table_html(("", "name", "bytes", ""), self.rows(), f"plan of {self.program}")


def explain(plan: "Plan") -> Explanation:
    """The facts of `plan`, read from its shapes and from XLA's analyses."""
    sizes = {slot.name: slot.nbytes for slot in plan.inputs}
    memory, cost = plan.executable.memory_analysis(), plan.executable.cost_analysis() or {}
    return Explanation(
        program=plan.name,
        inputs=tuple(
            {"name": slot.name, "leaves": len(slot.leaves), "bytes": slot.nbytes, "donated": slot.name in plan.donated}
            for slot in plan.inputs
        ),
        targets=tuple(
            {"name": slot.name, "bytes": slot.nbytes, "replaces": plan.updates.get(slot.name)} for slot in plan.targets
        ),
        symbols=plan.symbols,
        constants=tuple(
            {"name": name, "bytes": sizes[name], "captured": name in plan.captured} for name in plan.constants
        ),
        memory={
            "argument": getattr(memory, "argument_size_in_bytes", None),
            "output": getattr(memory, "output_size_in_bytes", None),
            "temporary": getattr(memory, "temp_size_in_bytes", None),
            "aliased": getattr(memory, "alias_size_in_bytes", None),
        },
        flops=_known(cost.get("flops")),
        bytes_accessed=_known(cost.get("bytes accessed")),
        compile_s=plan.seconds,
        from_cache=plan.from_cache,
    )


def _known(figure: float | None) -> float | None:
    return figure if figure is not None and figure >= 0 else None  # XLA says -1 where it cannot tell


def _bytes(count: float | None) -> str:
    return "not said" if count is None else bytes_text(int(count))


def _count(figure: float | None) -> str:
    return "not said" if figure is None else f"{figure:,.0f}"
