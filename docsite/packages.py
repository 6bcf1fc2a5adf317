"""The tables of docs/reference/packages.md: from docstrings and the layers contract."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docsite.tables import paragraph, table

_TOP = Path(__file__).resolve().parent.parent
_PACKAGE = "slurm_forge"
_CONTRACT = re.compile(r"^\[\[tool\.importlinter\.contracts\]\]\n(.*?)(?=^\[|\Z)", re.M | re.S)
_ENTRY = re.compile(r"^Entry: (.+)\.$", re.M)


def packages(top: Path = _TOP) -> list[str]:
    """One row per package, highest layer first: what lives there, its entry files.

    ``LookupError`` where a package names no entry file that exists.
    """
    contracts = [
        block
        for block in _CONTRACT.findall((top / "pyproject.toml").read_text(encoding="utf-8"))
        if 'type = "layers"' in block
    ]
    layers = {"": _layers(contracts[0])}
    for contract in contracts[1:]:
        container = re.search(r'containers = \["slurm_forge\.(\w+)"\]', contract)
        if container is not None:
            layers[container[1]] = _layers(contract)
    rows = []
    for name in _packages(top, "", layers[""]):
        number = next(n for n, row in enumerate(reversed(layers[""]), 1) if name in row)
        names = [name, *_packages(top, name, layers.get(name, []))]
        rows += [_row(top, each, str(number)) for each in names]
    return table(("package", "layer", "what lives there, who calls it", "entry"), rows)


def _layers(contract: str) -> list[list[str]]:
    """The packages of each layer, highest first; one whose modules are in several is in each."""
    listed = re.search(r"^layers = \[(.*?)\]", contract, re.M | re.S)
    if listed is None:
        raise LookupError("pyproject.toml: a contract of import-linter has no layers")
    return [
        [name.strip().removeprefix(f"{_PACKAGE}.").split(".")[0] for name in layer.split("|")]
        for layer in re.findall(r'"([^"]+)"', listed[1])
    ]


def _packages(top: Path, parent: str, layers: list[list[str]]) -> Iterator[str]:
    """The packages in ``parent``: those with a layer from the highest, then the others by name.

    At the top only those that have a layer: the testing tools are beside the product.
    """
    folder = top / _PACKAGE / parent
    present = sorted(file.parent.name for file in folder.glob("*/__init__.py"))
    ordered = [name for layer in layers for name in layer if name in present]
    others = [name for name in present if name not in ordered] if parent else []
    for name in dict.fromkeys([*ordered, *others]):
        yield f"{parent}/{name}" if parent else name


def _row(top: Path, name: str, layer: str) -> tuple[str, ...]:
    folder = top / _PACKAGE / name
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    entry = _ENTRY.search(doc)
    modules = [] if entry is None else re.findall(r"``(\w+)``", entry[1])
    if entry is None and not any(folder.glob("*/__init__.py")):
        raise LookupError(f"{folder}/__init__.py names no module to begin at: Entry: ``name``.")
    for module in modules:
        if not (folder / f"{module}.py").is_file():
            raise LookupError(f"{folder}/__init__.py: Entry: ``{module}`` does not exist")
    link = f"../../{_PACKAGE}/{name}"
    return (
        f"[`{name}`]({link})",
        layer,
        paragraph(doc.partition("\n")[0]),
        ", ".join(f"[`{module}.py`]({link}/{module}.py)" for module in modules),
    )
