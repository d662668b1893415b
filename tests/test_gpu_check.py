"""`scripts/gpu_check.sh`: its budget, its report and its reading of HLO; and a tiny run of the whole on this device."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_report import Budget, CheckFailed, Report, Section, Skipped
from scripts.hlo import large_moves

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.sh"

HLO = """\
HloModule jit_decode_1, is_scheduled=true, entry_computation_layout={(f32[64,64]{1,0})->f32[64,64]{1,0}}

%fused_inside (param_0: bf16[64,64]) -> f32[64] {
  %param_0 = bf16[64,64]{1,0} parameter(0)
  %convert.1 = f32[64,64]{1,0} convert(%param_0)
  ROOT %reduce.1 = f32[64]{0} reduce(%convert.1, %constant), dimensions={1}, to_apply=%add
}

%fused_convert (param_0.1: bf16[64,64]) -> (f32[64,64], f32[64]) {
  %param_0.1 = bf16[64,64]{1,0} parameter(0)
  %convert.2 = f32[64,64]{1,0} convert(%param_0.1)
  %bitcast.2 = f32[64,64]{1,0} bitcast(%convert.2)
  %slice.2 = f32[64]{0} slice(%param_0.1), slice={[0:1]}
  ROOT %tuple.2 = (f32[64,64]{1,0}, f32[64]{0}) tuple(%bitcast.2, %slice.2)
}

%fused_write (param_0.2: f32[64,64], param_1.2: f32[1,64]) -> f32[64,64] {
  %param_0.2 = f32[64,64]{1,0} parameter(0)
  %param_1.2 = f32[1,64]{1,0} parameter(1)
  %copy.3 = f32[1,64]{1,0} copy(%param_1.2)
  ROOT %dynamic-update-slice.2 = f32[64,64]{1,0} dynamic-update-slice(%param_0.2, %copy.3)
}

%body (arg: (f32[64,64])) -> (f32[64,64]) {
  %large_copy = f32[64,64]{1,0:T(8,128)} copy(%get-tuple-element.1)
  ROOT %tuple.9 = (f32[64,64]{1,0}) tuple(%large_copy)
}

ENTRY %main (weight: bf16[64,64]) -> f32[64,64] {
  %weight = bf16[64,64]{1,0} parameter(0)
  %small_copy = f32[8,8]{1,0} copy(%weight)
  %fusion.1 = f32[64]{0} fusion(%weight), kind=kInput, calls=%fused_inside
  %fusion.2 = (f32[64,64]{1,0}, f32[64]{0}) fusion(%weight), kind=kLoop, calls=%fused_convert
  %fusion.3 = f32[64,64]{1,0} fusion(%weight, %fusion.1), kind=kLoop, calls=%fused_write
  ROOT %while.1 = (f32[64,64]{1,0}) while(%fusion.3), condition=%cond, body=%body
}
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_a_fusion_does_inside_itself_is_no_move():
    found = large_moves(HLO, 64 * 64)
    assert [line.split(" = ")[0] for line in found] == ["body: large_copy", "main: fusion.2"]
    assert large_moves(HLO, 64 * 64 + 1) == []
    assert "main: small_copy" in [line.split(" = ")[0] for line in large_moves(HLO, 64)]


def test_a_budget_refuses_what_no_longer_fits():
    clock = Clock()
    budget = Budget(270, clock)
    assert budget.refusal(270) is None
    clock.now += 250
    assert budget.spent_s == 250 and budget.left_s == 20
    assert budget.refusal(20) is None
    assert "20 s of 270 s left" in (budget.refusal(30) or "")
    clock.now += 50
    assert "no time: 0 s" in (budget.refusal(0) or "")


def test_a_report_goes_on_after_failures_and_says_what_it_skipped(tmp_path: Path):
    clock = Clock()
    path, budget = tmp_path / "gpu_check.json", Budget(100, clock)

    def ends(error: Exception | None, seconds: float = 0.0) -> Any:
        def look(found: dict[str, Any]) -> None:
            found["seen"] = json.loads(path.read_text())["failed"]  # what a run cut short here would leave
            clock.now += seconds
            if error:
                raise error

        return look

    report = Report(path, budget, {"tiny": True})
    report.run(
        [
            Section("good", 0, ends(None)),
            Section("wrong", 0, ends(CheckFailed("too large"))),
            Section("broken", 0, ends(ValueError("oh"))),
            Section("absent", 0, ends(Skipped("not here"))),
            Section("long", 50, ends(None, 80)),
            Section("late", 50, ends(None)),
        ]
    )
    written = json.loads(path.read_text())
    assert written["tiny"] and written["seconds"] == 80
    assert written["failed"] == ["wrong", "broken"] == report.with_status("failed")
    assert written["skipped"] == ["absent", "late"]
    sections = written["sections"]
    assert list(sections) == ["good", "wrong", "broken", "absent", "long", "late"]
    assert sections["good"]["status"] == "ok" and sections["good"]["seen"] == ["good"]
    assert sections["wrong"]["error"] == "too large" and "seen" in sections["wrong"]
    assert sections["broken"]["error"] == "ValueError: oh"
    assert sections["absent"]["reason"] == "not here"
    assert sections["late"]["reason"].startswith("no time: 20 s")


def test_without_its_first_section_a_report_ends(tmp_path: Path):
    def fails(found: dict[str, Any]) -> None:
        raise CheckFailed("no GPU")

    report = Report(tmp_path / "gpu_check.json", Budget(100), {})
    report.run([Section("device", 0, fails), Section("decode", 0, fails)])
    assert report.with_status("failed") == ["device"] and report.with_status("skipped") == ["decode"]


@pytest.mark.slow
def test_a_tiny_check_finds_nothing_wrong(tmp_path: Path):
    environment = {**os.environ, "OUT": str(tmp_path)}
    ran = subprocess.run([SCRIPT, "--tiny"], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert written["tiny"] and written["failed"] == [] and written["skipped"] == []
    sections = written["sections"]
    parts = ("compile", "copies", "donation", "decode.1", "positions", "prefill", "decode.8", "decode.32", "int8")
    assert set(sections) == {"device", "ceilings", "answers", "start", *(f"tiny.{part}" for part in parts)}
    for rows in (1, 8, 32):
        decode = sections[f"tiny.decode.{rows}"]
        assert decode["rows"] == rows
        assert decode["fraction_of_bandwidth"] > 0 and decode["ms_per_position"] > 0
    assert sections["tiny.prefill"]["tokens"] == 2_048 and sections["tiny.prefill"]["fraction_of_matmul_peak"] > 0
    assert {"1 a call", "8 a call", "several_over_one"} <= set(sections["tiny.positions"])
    donation = sections["tiny.donation"]
    assert donation["warnings"] == [] and donation["1 positions a call"]["calls"] == 100
    assert all(donation[f"{n} positions a call"]["buffers_that_moved"] == 0 for n in (1, 8))
    assert sections["start"]["cold"]["compiled"] > 0 == sections["start"]["warm"]["compiled"]
    for kind in ("int8", "float8_e4m3fn"):
        assert sections["tiny.int8"][kind]["fraction_of_bandwidth"] > 0
        assert sections["tiny.int8"][kind]["weights_bytes"] < sections["tiny.compile"]["weights_bytes"] / 3
