"""The page of the Python API has every public name, and every parameter of it is documented."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import slurm_forge
from docsite.pages import DOCS
from slurm_forge import errors
from slurm_forge.training.core.run_state import _NAMES

griffe = pytest.importorskip("griffe")

PAGE = (DOCS / "reference" / "python-api.md").read_text()
SHOWN = re.findall(r"^::: (\S+)\n((?:    .*\n)*)", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def package() -> Any:
    return griffe.load(
        "slurm_forge",
        search_paths=[str(DOCS.parent)],
        allow_inspection=False,
        docstring_parser="google",
        resolve_aliases=True,
    )


def _item(package: Any, path: str) -> Any:
    return package[path.removeprefix("slurm_forge.")]


def _callables(item: Any, options: str) -> Iterator[Any]:
    """The function itself, or the methods of a class that its entry on the page shows."""
    if item.is_function:
        yield item
        return
    chosen = re.search(r"members: (\[.*?\]|false)", options)
    hidden = re.search(r"\^\(([a-z_|]+)\)\$", options)
    for name, member in item.members.items():
        shown = chosen is None or re.search(rf"\b{name}\b", chosen[1])
        private = name.startswith("_") and chosen is None
        internal = hidden is not None and name in hidden[1].split("|")
        if shown and member.is_function and not private and not internal:
            yield member


def _sections(item: Any, kind: str) -> list[Any]:
    assert item.docstring is not None, item.path
    return [each.value for each in item.docstring.parsed if each.kind.value == kind]


def test_every_public_name_is_on_the_page() -> None:
    shown = {path.removeprefix("slurm_forge.") for path, _ in SHOWN}
    assert set(slurm_forge.__all__) <= shown


def test_every_parameter_of_what_is_public_is_documented(package: Any) -> None:
    methods = 0
    for path, options in SHOWN:
        for function in _callables(_item(package, path), options):
            methods += 1
            named = {
                p.name.lstrip("*") for values in _sections(function, "parameters") for p in values
            }
            wanted = {p.name for p in function.parameters if p.name not in ("self", "cls")}
            assert named == wanted, function.path
            assert function.docstring.parsed[0].kind.value == "text", function.path
    assert methods >= 20


def test_what_a_public_function_returns_and_every_field_is_documented(package: Any) -> None:
    for path, options in SHOWN:
        item = _item(package, path)
        for function in _callables(item, options):
            gives = str(function.returns)
            if gives not in ("None", "Iterator[None]"):
                kinds = [*_sections(function, "returns"), *_sections(function, "yields")]
                assert kinds or "property" in function.labels, function.path
        if item.is_class and "dataclass" in item.labels:
            named = {a.name for values in _sections(item, "attributes") for a in values}
            fields = {
                name
                for name, member in item.members.items()
                if member.is_attribute and "property" not in member.labels and name[0] != "_"
            }
            assert named == fields, item.path


def test_every_hook_is_on_the_page() -> None:
    table = PAGE.partition("## Hooks")[2].partition("\n::: ")[0]
    assert set(re.findall(r"^\| `(on_\w+)`", table, re.MULTILINE)) == {*_NAMES, "on_instability"}


def test_every_error_that_a_public_function_raises_is_documented(package: Any) -> None:
    documented = 0
    for path, options in SHOWN:
        for function in _callables(_item(package, path), options):
            raises = {
                str(each.annotation) for values in _sections(function, "raises") for each in values
            }
            documented += len(raises)
            body = ast.walk(ast.parse(textwrap.dedent(function.source)))
            own = {
                each.exc.func.id
                for each in body
                if isinstance(each, ast.Raise)
                and isinstance(each.exc, ast.Call)
                and isinstance(each.exc.func, ast.Name)
            }
            assert own <= raises, function.path
            for name in raises:
                assert hasattr(errors, name) or hasattr(builtins, name), f"{function.path}: {name}"
    assert documented >= 15


def test_every_error_is_on_the_page() -> None:
    table = PAGE.partition("## Errors")[2]
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.ForgeError)
    }
    shown = set(re.findall(r"::: slurm_forge\.(\w+)", table))
    assert set(re.findall(r"`(\w+Error)`", table)) | shown == kinds


def test_every_public_attribute_has_a_sentence(package: Any) -> None:
    run = _item(package, "slurm_forge.Run")
    own = {a.name for values in _sections(run, "attributes") for a in values}
    for name, member in run.members.items():
        if name.startswith("_") or not member.is_attribute:
            continue
        if "property" in member.labels:
            assert member.docstring is not None and member.docstring.value.endswith("."), name
        else:
            assert name in own, name
