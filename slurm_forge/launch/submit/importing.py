"""Whether a job will find a module that the process which submits it has imported."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.machinery
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_forge.errors import SubmissionError

_WITHIN_S = 60.0


def module_of(function: Callable[..., Any]) -> str | None:
    """The module that the job has to import; None where the callable travels whole or as a file."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    module: str | None = getattr(named, "__module__", None)
    return None if module in (None, "__main__", "builtins") else module


def modules_beside_script(function: Callable[..., Any]) -> tuple[str, ...]:
    """The modules in the folder of the script under way that ``function``, which is the script's
    and travels whole, refers to.

    A module that another module of these imports is not among them.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return ()
    folder = Path(script).resolve().parent
    names: set[str] = set()
    _collect(function, names, set())
    return tuple(sorted(name for name in names if _lies_in(folder, name.partition(".")[0])))


def _lies_in(folder: Path, module: str) -> bool:
    return (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file()


def _collect(value: object, names: set[str], seen: set[int]) -> None:
    """Add the modules that a pickle of ``value`` names, or that its functions import."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.ModuleType):
        names.add(value.__name__)
        return
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    else:
        described = value if isinstance(value, type | types.FunctionType) else type(value)
        if described.__module__ != "__main__":
            names.add(described.__module__)
            return
        parts = _parts(described, names)
    for part in parts:
        _collect(part, names, seen)


def _parts(described: type | types.FunctionType, names: set[str]) -> tuple[object, ...]:
    """What a class or function of the script refers to."""
    if isinstance(described, type):
        return (*described.__bases__, *vars(described).values())
    cells: list[object] = []
    for cell in described.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            cells.append(cell.cell_contents)
    return (*cells, *_globals_of(described.__code__, described.__globals__, names))


def _globals_of(
    code: types.CodeType, variables: Mapping[str, object], names: set[str]
) -> Iterator[object]:
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME":
            names.add(str(each.argval))
        elif each.opname == "LOAD_GLOBAL" and each.argval in variables:
            yield variables[each.argval]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant, variables, names)


def path_of_job(folder: Path) -> tuple[str, ...]:
    """Where Python looks for modules in a job that is submitted from ``folder``, in order.

    The folder comes first there, not that of the script which submits, and what a program has added
    to its own ``sys.path`` is not part of it.
    """
    words = (sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))")
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, check=True, timeout=_WITHIN_S
        )
        path = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise SubmissionError(
            f"{sys.executable} can't say where it looks for modules: {error}",
            next_step=f"Try it by hand in {folder}: {sys.executable} -c 'import sys; "
            "print(sys.path)'",
        ) from error
    return (str(folder), *(str(each) for each in path if each))


def refuse_not_importable(module: str, path: Sequence[str], folder: Path) -> None:
    """``SubmissionError`` where a job submitted from ``folder`` would not find ``module``."""
    place: Sequence[str] | None = path
    for name in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(name, place)
        if spec is None and place is path and _found_otherwise(name):
            return
        if spec is None:
            where = getattr(sys.modules.get(module), "__file__", None)
            there = "" if where is None else f": here it is {where}"
            raise SubmissionError(
                f"the job can't import {module}{there}, which is in no folder that Python looks "
                "into there",
                next_step=f"Submit from the folder that holds it (this is {folder}), install it, "
                "or add its folder to PYTHONPATH before you submit.",
            )
        place = list(spec.submodule_search_locations or ())


def _found_otherwise(name: str) -> bool:
    """Whether a finder that the installation has added knows the module (an editable install)."""
    others = (each for each in sys.meta_path if each is not importlib.machinery.PathFinder)
    finders = (getattr(each, "find_spec", None) for each in others)
    # pytest's own rewrites what the path has, and is not there in a job.
    return any(
        find is not None
        and type(getattr(find, "__self__", None)).__module__[:7] != "_pytest"
        and find(name, None) is not None
        for find in finders
    )
