"""Whether an entry can be found, without importing it: it may import torch, or do anything."""

from __future__ import annotations

import ast
import importlib.machinery
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from slurm_forge.documents import nearest
from slurm_forge.errors import ConfigError
from slurm_forge.files import read_bounded
from slurm_forge.spec.arguments import Parameters

__all__ = ["check_entry", "require_arguments"]

_SOURCE_LIMIT = 1 << 22


def check_entry(
    entry: str, folder: Path, job: Path | None, args: Collection[str] = ()
) -> tuple[str, ...]:
    """Look for the function of ``module:function`` or ``file.py:function`` in its source.

    ``args`` are the names of the arguments that it will be called with.  Raises ``ConfigError``
    (for the file ``job``, if it is one) for what is certainly wrong.  Returns doubts: the ranks may
    have another Python path than this process.
    """
    where, _, function = entry.rpartition(":")
    if where.endswith(".py"):
        source = (folder / where).resolve()
        if not source.is_file():
            raise ConfigError(
                f"entry: there is no file {source}",
                path=job,
                next_step="Paths start at the folder you submit from; correct entry or cd there.",
            )
    else:
        found = _source_of(where, folder)
        if found is None:
            top = where.partition(".")[0]
            if (folder / top).is_dir():
                raise ConfigError(
                    f"entry: {folder / top} has no module {where!r}",
                    path=job,
                    next_step="Correct entry: it is package.module:function.",
                )
            return (f"entry: no module {where!r} found from {folder}; the ranks will look for it",)
        source = found
    return _check_function(source, function, job, args)


def require_arguments(function: Callable[..., object], args: Collection[str]) -> None:
    """Raise ``ConfigError`` unless a function at hand can be called with the run and ``args``."""
    problem = Parameters.of(function).problem(args)
    if problem is not None:
        raise _misfit(problem, getattr(function, "__name__", "the function"), None)


def _misfit(problem: str, function: str, job: Path | None) -> ConfigError:
    return ConfigError(
        f"args: {problem}",
        path=job,
        next_step=f"Write def {function}(run, …): it is called with the run and the job's args by "
        "name; a function that takes the run alone finds them in run.args.",
    )


def _source_of(module: str, folder: Path) -> Path | None:
    """The file of a module, from ``folder`` or this interpreter's path; nothing is imported."""
    place: list[str] | None = [str(folder)]
    found: importlib.machinery.ModuleSpec | None = None
    for index, name in enumerate(module.split(".")):
        found = importlib.machinery.PathFinder.find_spec(name, place)
        if found is None and index == 0:
            found = importlib.machinery.PathFinder.find_spec(name, None)
        if found is None:
            return None
        place = list(found.submodule_search_locations or [])
    origin = None if found is None else found.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _check_function(
    source: Path, function: str, job: Path | None, args: Collection[str]
) -> tuple[str, ...]:
    try:
        tree = ast.parse(read_bounded(source, _SOURCE_LIMIT))
    except SyntaxError as error:
        where = "" if error.lineno is None else f", line {error.lineno}"
        raise ConfigError(
            f"entry: {source}{where}: {error.msg}",
            path=job,
            next_step="Correct the program: every rank would fail on it.",
        ) from None
    except (ValueError, RecursionError, MemoryError):  # the last is "nested too deep", too
        return (f"entry: {source} can't be checked",)
    names = set(_top_level(tree.body))
    if function in names or "*" in names or "__getattr__" in names:
        _check_arguments(tree.body, function, job, args)
        return ()
    close = nearest(function, sorted(names))
    raise ConfigError(
        f"entry: {source} has no function {function!r}"
        + (f' (did you mean "{close}"?)' if close else ""),
        path=job,
        next_step=f"Define def {function}(run): … at its top level, or correct entry.",
    )


def _check_arguments(
    body: list[ast.stmt], function: str, job: Path | None, args: Collection[str]
) -> None:
    found = [line for line in body if isinstance(line, ast.FunctionDef) and line.name == function]
    others = [name for name in _top_level(body) if name == function]
    if len(found) != 1 or len(others) != 1 or found[0].decorator_list:
        return  # which one it is, or what a decorator makes of it, only running it tells
    problem = _parameters(found[0].args).problem(args)
    if problem is not None:
        raise _misfit(problem, function, job)


def _parameters(given: ast.arguments) -> Parameters:
    positional = [*given.posonlyargs, *given.args]
    optional = positional[len(positional) - len(given.defaults) :] if given.defaults else []
    keyword = [a.arg for a in given.kwonlyargs]
    required = {a.arg for a in positional[1:] if a not in optional}
    required |= {
        a.arg
        for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if default is None
    }
    names = (*(a.arg for a in positional[1:]), *keyword)
    return Parameters(
        names,
        frozenset(required),
        given.kwarg is not None,
        given.args[0].arg if given.args and not given.posonlyargs else None,
        bool(positional) or given.vararg is not None,
    )


def _top_level(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module's top level may define, in branches too."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    yield alias.asname or alias.name.partition(".")[0]
            case ast.Assign() | ast.AnnAssign():
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                for target in targets:
                    yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
            case ast.If() | ast.For() | ast.While():
                yield from _top_level([*statement.body, *statement.orelse])
            case ast.With():
                yield from _top_level(statement.body)
            case ast.Try():
                handled = [line for handler in statement.handlers for line in handler.body]
                yield from _top_level(
                    [*statement.body, *handled, *statement.orelse, *statement.finalbody]
                )
            case _:
                pass
