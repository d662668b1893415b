"""The report of `gpu_check`: sections that run within a budget of seconds, whatever becomes of those before them."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE_S = 20.0  # past the budget, before a section that does not end is given up with everything after it


class CheckFailed(Exception):
    """Something is measured, and is not as it must be."""


class Skipped(Exception):
    """A section has nothing to look at here."""


@dataclass
class Budget:
    """Seconds for the whole run."""

    total_s: float
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def spent_s(self) -> float:
        return self.clock() - self.started

    @property
    def left_s(self) -> float:
        return self.total_s - self.spent_s

    def refusal(self, needs_s: float) -> str | None:
        """Why a section that takes about `needs_s` seconds is not begun; None where there is time for it."""
        if self.left_s >= needs_s:
            return None
        return (
            f"no time: {max(self.left_s, 0):.0f} s of {self.total_s:.0f} s left, and this takes about {needs_s:.0f} s"
        )


@dataclass(frozen=True)
class Section:
    name: str
    needs_s: float  # about
    look: Callable[[dict[str, Any]], None]  # puts what it finds into the dict, as it finds it


class Report:
    """The JSON file: sections by name, in the order they ran."""

    def __init__(self, path: Path, budget: Budget, facts: dict[str, Any]) -> None:
        self.path, self.budget = path, budget
        self._facts, self._sections = facts, {}
        self._lock = threading.Lock()

    def run(self, sections: Sequence[Section]) -> None:
        """Every section in turn, whatever became of those before it; only the first one's failure ends it all."""
        given_up = threading.Timer(self.budget.left_s + GRACE_S, self._give_up)
        given_up.daemon = True
        given_up.start()
        for section in sections:
            self._sections[section.name] = {"status": "skipped", "reason": "not reached"}
        ended = None
        for section in sections:
            refusal = ended or self.budget.refusal(section.needs_s)
            if refusal:
                self.put(section.name, {"status": "skipped", "reason": refusal})
                continue
            self._run(section)
            if section is sections[0] and self._sections[section.name]["status"] == "failed":
                ended = f"{section.name} failed"
        given_up.cancel()

    def _run(self, section: Section) -> None:
        found: dict[str, Any] = {}
        self.put(section.name, {"status": "failed", "error": "it did not end in time"})  # unless it does
        started = time.monotonic()
        try:
            section.look(found)
            outcome = {"status": "ok"}
        except Skipped as skipped:
            outcome = {"status": "skipped", "reason": str(skipped)}
        except CheckFailed as failed:
            outcome = {"status": "failed", "error": str(failed)}
        except Exception as error:  # whatever it is: the other sections still tell something
            traceback.print_exc()
            outcome = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:2_000]}
        self.put(section.name, {**outcome, "seconds": round(time.monotonic() - started, 2), **found})

    def put(self, name: str, section: dict[str, Any]) -> None:
        """Note a section and write the file."""
        with self._lock:
            self._sections[name] = section
            self._write()
        if "seconds" in section or section["status"] == "skipped":
            why = section.get("error") or section.get("reason") or ""
            print(f"{section['status']:8}{section.get('seconds', 0):7.1f} s  {name}  {why[:200]}", flush=True)

    def with_status(self, status: str) -> list[str]:
        return [name for name, section in self._sections.items() if section["status"] == status]

    def _write(self) -> None:
        facts = {**self._facts, "seconds": round(self.budget.spent_s, 1)}
        summary = {status: self.with_status(status) for status in ("failed", "skipped")}
        text = json.dumps({**facts, **summary, "sections": self._sections}, indent=1)
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text(text + "\n")
        beside.replace(self.path)

    def _give_up(self) -> None:
        """From another thread: XLA cannot be interrupted, and the file is written."""
        print(f"gpu_check: given up after {self.budget.spent_s:.0f} s; see {self.path}", file=sys.stderr, flush=True)
        os._exit(1)
