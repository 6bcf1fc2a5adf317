"""Every error that a user can see ends with what to do now."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from slurm_forge import errors
from slurm_forge.errors import ForgeError, SlurmCommandError

PACKAGE = Path(errors.__file__).parent
#: A mistake in a document names its line and what is expected there.
BY_LINE = {"documents/building.py", "documents/reading.py"}
#: One line of a message whose end is the next step.
LINES = {("cli/preparation.py", "refuse")}


def kinds(trees: dict[str, ast.Module]) -> dict[str, bool]:
    """The names of all errors of the tree, and whether each brings a next step of its own."""
    known = {
        name: issubclass(value, SlurmCommandError)
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ForgeError)
    }
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(base, ast.Name) and base.id in known for base in node.bases
            ):
                known.setdefault(node.name, False)
    return known


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """All calls by name, with the function that holds each."""

    def inside(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
                yield function, child
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from inside(child, child.name if is_function else function)

    return inside(tree, "")


def has_next_step(call: ast.Call) -> bool:
    for keyword in call.keywords:
        if keyword.arg is None:
            return True
        if keyword.arg == "next_step":
            value = keyword.value
            return not (isinstance(value, ast.Constant) and not value.value)
    return False


def test_every_error_names_the_next_step() -> None:
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    known = kinds(trees)
    mute, seen = [], 0
    for place, tree in trees.items():
        for function, call in calls(tree):
            assert isinstance(call.func, ast.Name)
            if call.func.id not in known:
                continue
            seen += 1
            excused = known[call.func.id] or place in BY_LINE or (place, function) in LINES
            if not excused and not has_next_step(call):
                mute.append(f"{place}:{call.lineno}")
    assert seen > 100
    assert mute == []
