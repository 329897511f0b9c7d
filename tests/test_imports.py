"""The one-way order of the rooms, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sandbox

ROOM_FLOORS = {  # a room imports from lower floors only; DESIGN's floors, with half steps inside some
    **{"fields": 0, "config": 0.5, "plots": 0, "compare": 0},
    **{"corpus": 1, "tokenizer": 1, "shards": 1, "data": 1.5, "model": 1, "mesh": 1, "record": 1, "optim": 1},
    **{"roles": 1, "rates": 1, "groups": 1.5, "upstream": 1.5, "builder": 2, "environment": 2.5},
    **{"store": 1.2, "world": 1.5, "checkpoint": 1.5, "plan": 3, "train": 3, "worker": 3.2, "executors": 3.4},
    **{"display": 3.6, "driver": 3.8, "launch": 3.1, "sweep": 4, "spec": 4.5, "report": 5, "studies": 5},
    **{"figures": 5.5, "__main__": 6, "__init__": 7},
}
STDLIB_ONLY = ("fields", "config")
NO_TORCH = ("plots", "compare", "record", "store", "report", "corpus", "tokenizer", "shards")

ROOT = Path(sandbox.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def room_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path, top_level):
    """Yield (room or None, top-level package or None) of each import; lazy ones only where asked for."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    depth = len(path.relative_to(ROOT).parts) - 1
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > depth:
                yield from (
                    (name.name if node.module is None else node.module.split(".")[0], None) for name in node.names
                )
        elif isinstance(node, ast.ImportFrom):
            yield None, node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from ((None, name.name.split(".")[0]) for name in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_from_lower_floors(path):
    floor = ROOM_FLOORS[room_of(path)]
    for room, _ in imports(path, top_level=True):
        if room is not None and room != room_of(path):
            assert ROOM_FLOORS[room] < floor, f"{room_of(path)} imports {room}"


def test_only_the_config_reaches_up_and_only_lazily_into_the_builder():
    lazy = {}
    for path in FILES:
        for room, _ in set(imports(path, top_level=False)) - set(imports(path, top_level=True)):
            if room is not None and ROOM_FLOORS[room] >= ROOM_FLOORS[room_of(path)]:
                lazy.setdefault(room_of(path), set()).add(room)
    assert lazy == {"config": {"builder"}}


@pytest.mark.parametrize("room", STDLIB_ONLY)
def test_the_configuration_needs_the_standard_library_only(room):
    packages = {package for _, package in imports(ROOT / f"{room}.py", top_level=True) if package}
    assert packages <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("room", NO_TORCH)
def test_tables_and_figures_do_not_import_torch(room):
    code = f"import sys, sandbox.{room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_upstream_room_names_the_dion_package():
    users = {room_of(path) for path in FILES for _, package in imports(path, top_level=False) if package == "dion"}
    assert users <= {"upstream", "builder"}


def test_importing_the_package_imports_no_room():
    code = "import sys, sandbox; sys.exit(any(m.startswith('sandbox.') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", sandbox.__all__)
def test_every_name_that_the_package_promises_is_there(name):
    assert callable(getattr(sandbox, name))


@pytest.mark.parametrize("room", ["train", "sweep", "compare", "launch", "plan"])
def test_a_function_keeps_its_name_when_its_room_is_imported(room):
    code = f"import sandbox as sb, sandbox.{room}; sb.{room}.__call__"
    subprocess.run([sys.executable, "-c", code], check=True)
