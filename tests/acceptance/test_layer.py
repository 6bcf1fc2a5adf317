"""These tests know the package as a user does: by its command line and its public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_forge

HERE = Path(__file__).parent


def imported(text: str) -> Iterator[str]:
    """Every module, or public name of the package, that a source imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module == "slurm_forge":
                yield from (f"slurm_forge.{each.name}" for each in node.names)
            else:
                yield module


def not_public(text: str) -> list[str]:
    """What of it is internal."""
    public = {f"slurm_forge.{name}" for name in slurm_forge.__all__}
    return [
        name
        for name in imported(text)
        if (name.startswith("slurm_forge.") and name not in public)
        or (name.startswith("tests") and not name.startswith("tests.acceptance"))
        or name.startswith(".")
    ]


def test_nothing_here_imports_what_is_internal() -> None:
    found = {path.name: not_public(path.read_text()) for path in HERE.rglob("*.py")}
    assert not {name: names for name, names in found.items() if names}


def test_no_text_here_names_a_module_but_the_stable_ones() -> None:
    """Command lines are texts: only what is documented may be in them."""
    known = {"slurm_forge.testing.cluster", "slurm_forge.process"}
    for path in HERE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                word = node.value
                if word.startswith("slurm_forge.") and " " not in word and path.name != __file__:
                    assert word in known | {"slurm_forge."}, f"{path.name}: {word}"


@pytest.mark.parametrize(
    "text",
    [
        "import slurm_forge.journal",
        "from slurm_forge.journal import fold",
        "from slurm_forge import journal",
        "from tests.jobs import train",
        "from . import helper",
    ],
)
def test_the_check_sees_what_is_internal(text: str) -> None:
    assert not_public(text)


def test_the_check_lets_public_names_pass() -> None:
    assert not_public("import slurm_forge as forge\nfrom slurm_forge import Run, attach") == []
