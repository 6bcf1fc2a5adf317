"""The map of the code names packages, modules and files that exist, and every package there is."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from docsite.packages import packages
from docsite.pages import DOCS

TOP = DOCS.parent
PAGE = (DOCS / "architecture.md").read_text()
DIAGRAM = (DOCS / "assets" / "architecture.svg").read_text()


def test_every_path_that_is_named_exists() -> None:
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*|\w+\.py)`", PAGE))
    written_by_runs = {"checkpoints/step-…", "submissions/", "notifications/"}
    assert len(named) > 60
    assert {
        path
        for path in named - written_by_runs
        if not any((folder / path).exists() for folder in (TOP, TOP / "slurm_forge"))
        and f"/{path})" not in PAGE  # shown by its last part, and linked
    } == set()


def test_every_package_in_the_diagram_exists() -> None:
    named = set(re.findall(r"\b[a-z]+/[a-z]+\b", re.sub(r"<[^>]+>", " ", DIAGRAM)))
    assert len(named) > 10
    assert {path for path in named if not (TOP / "slurm_forge" / path).is_dir()} == set()


def test_all_modules_with_a_set_of_causes_are_named() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| a cause that is not"))
    package = TOP / "slurm_forge"
    assert set(re.findall(r"`([\w/]+\.py)`", row)) == {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if file != package / "vocabulary" / "cause.py" and _has_set_of_causes(file)
    }


def _has_set_of_causes(file: Path) -> bool:
    """Whether a set at the top of the module names members of ``Cause``."""
    members = (
        member
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for each in ast.walk(node)
        if isinstance(each, ast.Set)
        for member in each.elts
    )
    return any(ast.unparse(member).startswith("Cause.") for member in members)


def test_every_package_is_in_the_table() -> None:
    packages = {
        file.parent.relative_to(TOP / "slurm_forge").as_posix()
        for file in (TOP / "slurm_forge").rglob("__init__.py")
    } - {".", "testing", "testing/cluster"}
    table = (DOCS / "reference" / "packages.md").read_text()
    assert set(re.findall(r"^\| \[`([a-z_/]+)`\]", table, re.MULTILINE)) == packages


def test_every_package_says_what_lives_there_and_who_uses_it() -> None:
    for row in packages()[2:]:
        assert re.search(r"; (called|used|read|started|forked) by ", row), row


def test_a_package_without_an_entry_is_an_error(tmp_path: Path) -> None:
    shutil.copy(TOP / "pyproject.toml", tmp_path)
    package = tmp_path / "slurm_forge" / "cli"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Verbs; called by a person.\n\nEntry: ``main``.\n"""\n')
    with pytest.raises(LookupError, match="`main`` does not exist"):
        packages(tmp_path)
    (package / "main.py").touch()
    assert "| Verbs; called by a person. |" in packages(tmp_path)[-1]
    (package / "__init__.py").write_text('"""Verbs."""\n')
    with pytest.raises(LookupError, match="names no module to begin at"):
        packages(tmp_path)
