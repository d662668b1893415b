"""The notebooks run from top to bottom, and show what they promise."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

# At least how many results are HTML, and how many of them pictures; what is in the pictures; what ran without an error.
PROMISED: dict[str, tuple[int, int, tuple[str, ...], tuple[str, ...]]] = {
    "01_quickstart": (3, 0, (), ("plan_model(", "forbid_compile()")),  # the runtime, an answer, a plan
    "02_inside": (
        5,
        5,  # lens, attention, and sweeps of patching, steering and removal
        ("logit lens", "attention, layer", "logit of Paris", "strength", "head"),
        ("Replace(", "Add(", "Zero(", "forbid_compile()"),
    ),
    "03_sessions": (
        4,  # and a state
        3,  # tree, log-probabilities, steps along the gradient
        ("tree of sessions", "log-probability of each token", "along the gradient"),
        (".fork()", "SessionState.restore(", "grad("),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, demo_path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "notebooks are committed without outputs"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    pictures = [html for html in shown if "<svg" in html]
    ran = "\n".join(cell.source for cell in notebook.cells if cell.get("execution_count"))
    results, drawn, words, calls = PROMISED[path.stem]
    assert len(shown) >= results and len(pictures) >= drawn
    assert "<script" not in "".join(shown)
    assert [word for word in words if word not in "".join(pictures)] == []
    assert [call for call in calls if call not in ran] == []
