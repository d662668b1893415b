"""What the command line shows beside its answers: progress and tables, on stderr unless a table is the answer."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

errors = Console(stderr=True, highlight=False)


class Progress:
    """Bars on stderr while something takes time; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        text = TextColumn("{task.description}")
        columns = (text, BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("{task.fields[detail]}"))
        self._bars = Bars(*columns, console=errors, transient=True, disable=not errors.is_terminal)

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def fetching(self, message: str) -> None:
        """A line about what is being fetched, and its licence."""
        errors.print(message, style="dim", markup=False)

    def bytes(self, what: str) -> Callable[[int, int], None]:
        """A bar of bytes done of all."""
        task = self._bars.add_task(what, total=None, detail="")

        def update(done: int, total: int) -> None:
            self._bars.update(task, completed=done, total=total, detail=f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

        return update

    def steps(self, what: str) -> Callable[[int, int, str], None]:
        """A bar of named steps done of all."""
        task = self._bars.add_task(what, total=None, detail="")

        def update(done: int, total: int, name: str) -> None:
            self._bars.update(task, completed=done, total=total, detail=f"{done}/{total} {name}")

        return update


def show_table(
    title: str,
    rows: Sequence[Sequence[str]],
    *,
    to_stdout: bool = False,
    marks: Mapping[str, str] | None = None,
) -> None:
    """Rows of text as a table without headings; `marks` says how certain cells are drawn."""
    table = Table(title=title or None, show_header=False, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for row in rows:
        table.add_row(*((marks or {}).get(cell, _literal(cell)) for cell in row))
    (Console(highlight=False) if to_stdout else errors).print(table)


def _literal(cell: str) -> str:
    return cell.replace("[", r"\[")
