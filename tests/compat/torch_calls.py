"""What the package calls in torch, read from its source: names, arguments, attributes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "slurm_forge"
#: Before the name of a function of a device module: ``torch.cuda``, ``torch.xpu``.
DEVICE = "device"
#: Private names that the package gives to its own classes, functions and attributes.
_DEFINED = re.compile(r"(?:\bdef |\bclass |\bself\.|^ *)(_[a-z]\w*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class TorchUse:
    """A name of torch, and how it is called; ``positional`` is None where it is not called."""

    name: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()
    is_partial: bool = False
    """Whether ``*args`` or ``**kwargs`` add arguments that the source does not show."""

    def __str__(self) -> str:
        if self.positional is None:
            return self.name
        shown = ["…"] * self.positional + [f"{word}=…" for word in self.keywords]
        return f"{self.name}({', '.join([*shown, '*'] if self.is_partial else shown)})"


@dataclass(frozen=True, slots=True, order=True)
class PrivateUse:
    """A private attribute of an object that another class than the user's made."""

    attribute: str
    where: str


def uses_in(text: str) -> Iterator[TorchUse]:
    """Every use of torch in a module's source whose name its imports resolve."""
    yield from _uses_in(ast.parse(text))


@functools.cache
def uses_of_package() -> dict[TorchUse, str]:
    """The uses, each with one place where it is."""
    found: dict[TorchUse, str] = {}
    for path, tree in _trees().items():
        for use in _uses_in(tree):
            found.setdefault(use, str(path.relative_to(PACKAGE)))
    return found


def private_uses() -> set[PrivateUse]:
    """Private attributes that modules with torch take from objects they did not make.

    Not those that the package itself defines, and not those of trainers and trackers.
    """
    own = {name for path in _paths() for name in _DEFINED.findall(path.read_text())}
    imported = {
        path: _imported(tree)
        for path, tree in _trees().items()
        if path.relative_to(PACKAGE).parts[0] != "integrations"
    }
    return {
        PrivateUse(node.attr, str(path.relative_to(PACKAGE)))
        for path, names in imported.items()
        if names
        for node in ast.walk(_trees()[path])
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
        and _dotted(node, names) is None
    }


def asked_names(text: str) -> set[str]:
    """Names that ``device/memory.py`` asks a device module for, by ``_function(device, "…")``."""
    return {
        str(call.args[1].value)
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "_function"
        and isinstance(call.args[1], ast.Constant)
    }


def _paths() -> list[Path]:
    """Modules of the package, what is copied to users included."""
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    """Those that import torch."""
    texts = {path: path.read_text() for path in _paths()}
    return {
        path: ast.parse(text)
        for path, text in texts.items()
        if "import torch" in text or "from torch" in text
    }


def _uses_in(tree: ast.Module) -> Iterator[TorchUse]:
    names = _imported(tree)
    if not names:
        return
    yield from (TorchUse(name) for name in _import_statements(tree))
    for scope in _scopes(tree):
        yield from _uses(scope, names | _assigned(scope, names))


def _imported(tree: ast.AST) -> dict[str, str]:
    """What each name of a module stands for in torch, whatever function imports it."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if _is_torch(each.name):
                    names[each.asname or "torch"] = each.name if each.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def _import_statements(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if _is_torch(each.name))
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _scopes(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """The statements of the module, and of each outermost function in it."""
    outer: list[ast.stmt] = []
    stack: list[ast.stmt] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield [node]
        elif isinstance(node, ast.ClassDef):
            outer += [ast.Expr(each) for each in [*node.bases, *node.decorator_list]]
            stack += node.body
        else:
            outer.append(node)
    yield outer


def _assigned(scope: Iterable[ast.stmt], names: dict[str, str]) -> dict[str, str]:
    """Local names of a device module, or of something of torch's."""
    assigned: dict[str, str] = {}
    for statement in scope:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = _dotted(node.value, names)
                if value is not None and not isinstance(node.value, ast.Name):
                    assigned[node.targets[0].id] = value
    return assigned


def _uses(scope: Iterable[ast.stmt], names: dict[str, str]) -> Iterator[TorchUse]:
    for statement in scope:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                name = _dotted(node.func, names)
                if name is not None and name != DEVICE:
                    yield _call(name, node)
            elif isinstance(node, ast.Attribute):
                name = _dotted(node, names)
                if name is not None:
                    yield TorchUse(name)


def _call(name: str, node: ast.Call) -> TorchUse:
    starred = [each for each in node.args if isinstance(each, ast.Starred)]
    keywords = [each.arg for each in node.keywords if each.arg is not None]
    return TorchUse(
        name=name,
        positional=len(node.args) - len(starred),
        keywords=tuple(keywords),
        is_partial=bool(starred) or len(keywords) < len(node.keywords),
    )


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return DEVICE if node.func.id == "module_of" else None
    return None
