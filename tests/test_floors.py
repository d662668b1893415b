"""The house stands: every module has a floor and imports from its own floor, without cycles, or from floors above it
in the list (smaller numbers); floor 0 knows no device; no file is too long to read; importing jaxrt stays light."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_LINES = 500

# The longest prefix that fits says a module's floor.
FLOORS = {
    # 0 contracts: host only
    "jaxrt.errors": 0,
    "jaxrt.config": 0,
    "jaxrt.requests": 0,
    "jaxrt.observations": 0,
    "jaxrt.interventions": 0,
    "jaxrt.contracts": 0,
    "jaxrt.markup": 0,
    # 1 mathematics: pure jax
    "jaxrt.native": 1,
    "jaxrt.nn": 1,
    "jaxrt.cache": 1,
    "jaxrt.weights": 1,
    "jaxrt.sampling": 1,
    "jaxrt.taps": 1,
    # 2 models
    "jaxrt.models": 2,
    # 3 artifacts: disk to arrays, text to tokens
    "jaxrt.artifacts": 3,
    # 4 execution: who owns device memory and executables
    "jaxrt.symbols": 4,
    "jaxrt.explain": 4,
    "jaxrt.program": 4,
    "jaxrt.realize": 4,
    "jaxrt.placement": 4,
    "jaxrt.context": 4,
    "jaxrt.buckets": 4,
    "jaxrt.plans": 4,
    "jaxrt.decode_session": 4,
    "jaxrt.planning": 4,
    "jaxrt.compile_cache": 4,
    "jaxrt.knobs": 4,
    "jaxrt.edits": 4,
    # 5 sessions
    "jaxrt.sessions": 5,
    "jaxrt.backend": 5,
    # 6 runtime
    "jaxrt.text": 6,
    "jaxrt.prompts": 6,
    "jaxrt.generation": 6,
    "jaxrt.scoring": 6,
    "jaxrt.functional": 6,
    "jaxrt.runtime": 6,
    # 7 programs
    "jaxrt.bench": 7,
    "jaxrt.explain_decode": 7,
    "jaxrt.cli": 7,
    "jaxrt.display": 7,
    "jaxrt.doctor": 7,
    "jaxrt.terminal": 7,
    "jaxrt.__main__": 7,
}
NAMES_OF_THE_HOUSE = "jaxrt"  # the package itself is above the floors: a facade, for users and for the programs
NOT_ON_FLOOR_0 = {"jax", "jaxlib", "flax"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "jaxrt").rglob("*.py"))}


def floor(module: str) -> int:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in FLOORS:
            return FLOORS[".".join(parts[:end])]
    pytest.fail(f"{module} has no floor: give it one in FLOORS, and a line in docs/architecture.md")


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and all below it, functions too, but for what only type checkers read."""
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        children = iter(node.orelse)
    for child in children:
        yield from executed(child)


def imports(source: str, package: str = "jaxrt") -> set[str]:
    """Absolute names of the modules that `source`, a module of `package`, imports anywhere."""
    found: set[str] = set()
    for node in executed(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            named = {f"{origin}.{alias.name}" for alias in node.names}
            found |= named & MODULES.keys()
            if named - MODULES.keys():
                found.add(origin)
    return found


def package_of(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def inside(module: str) -> set[str]:
    """The modules of the house that `module` imports; the empty `__init__` of a folder is none."""
    found = imports(MODULES[module].read_text(), package_of(module))
    named = {name for name in found if name.split(".")[0] == "jaxrt"}
    return {name for name in named if MODULES[name].stat().st_size > 0 or name == NAMES_OF_THE_HOUSE} - {module}


FLOORED = [name for name in MODULES if name != NAMES_OF_THE_HOUSE and MODULES[name].stat().st_size > 0]


@pytest.mark.parametrize("module", FLOORED)
def test_a_module_imports_only_from_its_floor_and_those_above(module: str):
    here = floor(module)
    for name in inside(module):
        if name == NAMES_OF_THE_HOUSE:
            assert here == 7, f"{module} imports the facade `jaxrt`; only the programs may"
        else:
            assert floor(name) <= here, f"{module} (floor {here}) imports {name} (floor {floor(name)})"


def test_no_imports_run_in_a_circle():
    graph = {module: inside(module) - {NAMES_OF_THE_HOUSE} for module in FLOORED}
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"imports run in a circle: {' -> '.join(error.args[1])}")
    assert set(order) == set(FLOORED)


@pytest.mark.parametrize("module", [name for name in FLOORED if floor(name) == 0])
def test_floor_0_knows_no_device(module: str):
    roots = {name.split(".")[0] for name in imports(MODULES[module].read_text(), package_of(module))}
    assert not roots & NOT_ON_FLOOR_0


def test_every_row_of_the_table_is_there():
    for prefix in FLOORS:
        assert prefix in MODULES, f"{prefix} has a floor but no file"


@pytest.mark.parametrize(
    "path",
    [p for folder in ("jaxrt", "tests", "scripts") for p in sorted((ROOT / folder).rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_file_is_too_long_to_read(path: Path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_importing_jaxrt_stays_light_and_touches_no_device():
    heavy = ["orbax", "transformers", "torch", "matplotlib", "IPython", "huggingface_hub", "ray", "lm_eval"]
    code = (
        "import sys, jaxrt\n"
        f"print(sorted(set({heavy}) & {{name.split('.')[0] for name in sys.modules}}))\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["[]", "False"]


def test_the_reader_of_imports_sees_functions_and_skips_types():
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from jaxrt.runtime import ModelRuntime\n"
        "def late():\n    from jaxrt import errors, weights\n    import flax.struct\n"
        "from . import config\nfrom .config import ModelConfig\n"
    )
    assert imports(source) == {"typing", "jaxrt.errors", "jaxrt.weights", "flax.struct", "jaxrt.config"}
