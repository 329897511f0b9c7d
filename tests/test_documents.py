"""README, CONTRIBUTING and CHANGELOG say what is there: links, paths, notebooks, modules."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {path.name: path.read_text() for path in sorted(ROOT.glob("*.md"))}
README = DOCUMENTS["README.md"]


def test_the_readme_is_one_screen():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_local_link_leads_somewhere(name):
    targets = re.findall(r"\]\(([^)\s]+)\)", DOCUMENTS[name])
    assert [t for t in targets if "://" not in t and not (ROOT / t).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_in_backticks_is_there(name):
    paths = re.findall(r"`((?:sandbox|tests|notebooks)/[\w./-]*)`", DOCUMENTS[name])
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_the_table_lists_the_notebooks_in_order():
    rows = re.findall(r"^\| \[([^\]]+)\]\(notebooks/([^)]+)\)", README, re.M)
    assert [path for _, path in rows] == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert all(f"{title}.ipynb" == path for title, path in rows)


def test_the_map_names_each_part_of_the_package():
    block = README.split("```\nsandbox/\n")[1].split("```")[0]
    named = {word.rstrip("/") for line in block.splitlines() if line.startswith("  ") for word in line[2:24].split()}
    there = {p.name for p in (ROOT / "sandbox").iterdir() if p.name not in ("__init__.py", "__pycache__")}
    assert named == there


def test_where_modules_moved_is_where_they_are():
    after = [row.split("|")[2] for row in DOCUMENTS["CHANGELOG.md"].splitlines() if row.startswith("| `sandbox")]
    for cell in after:
        first, *others = re.findall(r"`([\w.]+)`", cell)
        wing = first.rpartition(".")[0]
        for name in (first, *(wing + other for other in others)):
            assert importlib.util.find_spec(name), name
