"""The one-way order of the wings, no circle inside a wing, and what importing costs."""

import ast
import graphlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import sandbox

FLOORS = {  # a wing imports from lower floors only
    **{"fields": 0, "config": 0.5, "plots": 0},
    **{"optim": 1},
    **{"data": 2, "model": 2, "groups": 2, "builder": 2.5, "mesh": 2.5},  # the last two: names of the reference
    **{"records": 3, "training": 4, "sweeps": 5, "studies": 6, "__main__": 8, "__init__": 9},
}
STDLIB_ONLY = ("fields", "config")
NO_TORCH = ("config", "plots", "records", "records.report", "records.claims")

ROOT = Path(sandbox.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {path: [*path.relative_to(ROOT).parts[:-1], path.stem] for path in FILES}
NAMES = {".".join(parts).removesuffix(".__init__"): path for path, parts in MODULES.items()}


def wing_of(path):
    return MODULES[path][0]


def imports(path, *, top_level):
    """Yield (module below sandbox or None, top-level package or None) of each import; lazy ones only if asked for."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = MODULES[path][: len(MODULES[path]) - node.level] + (node.module.split(".") if node.module else [])
            for name in node.names:
                whole = ".".join([*base, name.name])
                yield (whole if whole in NAMES else ".".join(base)), None
        elif isinstance(node, ast.ImportFrom):
            yield None, node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from ((None, name.name.split(".")[0]) for name in node.names)


def inner(path, *, top_level):
    return {module for module, _ in imports(path, top_level=top_level) if module}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_wing_imports_only_from_lower_floors(path):
    for module in inner(path, top_level=True):
        other = module.split(".")[0]
        if other != wing_of(path):
            assert FLOORS[other] < FLOORS[wing_of(path)], f"{wing_of(path)} imports {module}"


def test_only_the_config_reaches_up_and_only_lazily_into_the_builder():
    lazy = {}
    for path in FILES:
        for module in inner(path, top_level=False) - inner(path, top_level=True):
            other = module.split(".")[0]
            if other != wing_of(path) and FLOORS[other] >= FLOORS[wing_of(path)]:
                lazy.setdefault(wing_of(path), set()).add(module)
    assert lazy == {"config": {"groups.builder"}}


@pytest.mark.parametrize("wing", sorted({wing_of(path) for path in FILES}))
def test_no_circle_inside_a_wing(wing):
    graph = {}
    for path in FILES:
        if wing_of(path) == wing:
            name = ".".join(MODULES[path]).removesuffix(".__init__")
            graph[name] = {m for m in inner(path, top_level=False) if m.split(".")[0] == wing and m != name}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("room", STDLIB_ONLY)
def test_the_configuration_needs_the_standard_library_only(room):
    packages = {package for _, package in imports(ROOT / f"{room}.py", top_level=True) if package}
    assert packages <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("room", NO_TORCH)
def test_tables_and_figures_do_not_import_torch(room):
    code = f"import sys, sandbox.{room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("room", ["data.corpus", "data.tokenizer", "data.shards"])
def test_text_and_tokenizers_name_no_torch(room):
    assert "torch" not in {package for _, package in imports(NAMES[room], top_level=False)}


def test_a_worker_imports_no_matplotlib():
    code = "import sys, sandbox.sweeps.worker; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_upstream_room_names_the_dion_package():
    users = {".".join(MODULES[path]) for path in FILES for _, p in imports(path, top_level=False) if p == "dion"}
    assert users <= {"groups.upstream", "groups.builder"}


def test_importing_the_package_imports_no_room():
    code = "import sys, sandbox; sys.exit(any(m.startswith('sandbox.') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", sandbox.__all__)
def test_every_name_that_the_package_promises_is_there(name):
    assert callable(getattr(sandbox, name))


@pytest.mark.parametrize("name", sandbox._MODULES)
def test_the_modules_that_notebooks_reach_are_there(name):
    assert getattr(sandbox, name).__name__ == f"sandbox.{sandbox._MODULES[name]}"


def test_a_function_keeps_its_name_whatever_was_imported_before():
    for name in NAMES:
        if name not in ("__init__", "__main__"):
            importlib.import_module(f"sandbox.{name}")
    for name in sandbox.__all__:
        assert callable(getattr(sandbox, name)), name


@pytest.mark.parametrize("wing", sorted({parts[0] for parts in MODULES.values() if len(parts) > 1}))
def test_the_face_of_a_wing_is_what_it_says(wing):
    package = importlib.import_module(f"sandbox.{wing}")
    assert package.__doc__
    assert all(hasattr(package, name) for name in package.__all__)
