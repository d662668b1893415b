"""The README's Python and its `jaxrt` commands run as they stand there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("jaxrt ")]


@pytest.mark.slow
def test_the_python_runs_from_top_to_bottom(demo_path: Path):
    code = "\n".join(blocks("python"))
    assert code.count("\n") > 30
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert " Paris." in done.stdout and "(1, 1, 49152)" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str, demo_path: Path, tmp_path: Path):
    arguments = shlex.split(command, comments=True)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "jaxrt", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
def test_the_batch_script_answers_every_line(demo_path: Path, tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("The sky is\n\nThe sea is\n", encoding="utf-8")
    script = [
        sys.executable,
        ROOT / "scripts" / "generate_file.py",
        "prompts.txt",
        "answers.jsonl",
        "--max-tokens",
        "4",
    ]
    subprocess.run(script, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    assert len((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_links_point_at_files():
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
