"""Whether the function of ``entry:`` can be found, and takes ``args:``; without importing it.

It may import torch, or do anything.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.documents import nearest
from slurm_forge.errors import ConfigError
from slurm_forge.files import read_bounded, read_named

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
        file = _source_of(where, folder)
        if file is None:
            top = where.partition(".")[0]
            if (folder / top).is_dir():
                raise ConfigError(
                    f"entry: {folder / top} has no module {where!r}",
                    path=job,
                    next_step="Correct entry: it is package.module:function.",
                )
            return (f"entry: no module {where!r} found from {folder}; the ranks will look for it",)
        source = file
    return _check_function(source, function, job, args)


def default_arguments(entry: str, folder: Path) -> dict[str, object]:
    """The defaults that the source of an entry shows as plain values, by the parameter's name."""
    source, function = source_file(entry, folder), entry.rpartition(":")[2]
    known: dict[str, object] = {}
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        body = [] if source is None else ast.parse(read_bounded(source, _SOURCE_LIMIT)).body
        definition = _definition(body, function)
        for name, default in () if definition is None else _defaults(definition.args).items():
            with contextlib.suppress(ValueError):
                known[name] = ast.literal_eval(default)
    return known


def source_file(entry: str, folder: Path) -> Path | None:
    """The file of an entry; None where no module of that name is found."""
    where = entry.rpartition(":")[0]
    return folder / where if where.endswith(".py") else _source_of(where, folder)


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
    spec: importlib.machinery.ModuleSpec | None = None
    for index, name in enumerate(module.split(".")):
        spec = importlib.machinery.PathFinder.find_spec(name, place)
        if spec is None and index == 0:
            spec = importlib.machinery.PathFinder.find_spec(name, None)
        if spec is None:
            return None
        place = list(spec.submodule_search_locations or [])
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _check_function(
    source: Path, function: str, job: Path | None, args: Collection[str]
) -> tuple[str, ...]:
    try:
        tree = ast.parse(read_named(source, _SOURCE_LIMIT))
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL byte, before Python 3.11.4
        line = getattr(error, "lineno", None)
        where = "" if line is None else f", line {line}"
        raise ConfigError(
            f"entry: {source}{where}: {getattr(error, 'msg', error)}",
            path=job,
            next_step="Correct the program: every rank would fail on it.",
        ) from None
    except (RecursionError, MemoryError):  # the last is "nested too deep", too
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
        next_step=f"Correct `entry:`, or define {function}(run) at its top level.",
    )


def _check_arguments(
    body: list[ast.stmt], function: str, job: Path | None, args: Collection[str]
) -> None:
    definition = _definition(body, function)
    problem = None if definition is None else _parameters(definition.args).problem(args)
    if problem is not None:
        raise _misfit(problem, function, job)


def _definition(body: list[ast.stmt], function: str) -> ast.FunctionDef | None:
    """The only one; which of several, or what a decorator makes of it, only running it tells."""
    definitions = [
        line for line in body if isinstance(line, ast.FunctionDef) and line.name == function
    ]
    others = [name for name in _top_level(body) if name == function]
    if len(definitions) != 1 or len(others) != 1 or definitions[0].decorator_list:
        return None
    return definitions[0]


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    first = len(positional) - len(arguments.defaults)
    given = dict(zip(positional[first:], arguments.defaults, strict=True))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        given |= {} if default is None else {each.arg: default}
    return given


def _parameters(arguments: ast.arguments) -> Parameters:
    positional = [*arguments.posonlyargs, *arguments.args]
    names = tuple(a.arg for a in (*positional[1:], *arguments.kwonlyargs))
    return Parameters(
        names,
        frozenset(names) - _defaults(arguments).keys(),
        arguments.kwarg is not None,
        arguments.args[0].arg if arguments.args and not arguments.posonlyargs else None,
        bool(positional) or arguments.vararg is not None,
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


_BY_NAME = frozenset({inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD})


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a training function takes beside the run: by name, or ``anything`` (``**kwargs``).

    A function that takes nothing beside the run finds the arguments in ``run.args``.  ``first`` is
    what it calls the run; ``takes_run`` is false where nothing can be given to it by position.
    """

    names: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    anything: bool = False
    first: str | None = None
    takes_run: bool = True

    @classmethod
    def of(cls, function: Callable[..., object]) -> Parameters:
        """Those of a function that is at hand; its first parameter is the run."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # written in C: it says nothing of its parameters
            return cls()
        rest = parameters[1:]
        place = parameters[0] if parameters and parameters[0].kind not in _BY_NAME else None
        named = [each for each in rest if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        return cls(
            tuple(each.name for each in named),
            frozenset(each.name for each in named if each.default is each.empty),
            any(each.kind is each.VAR_KEYWORD for each in rest),
            place.name if place and place.kind is place.POSITIONAL_OR_KEYWORD else None,
            place is not None,
        )

    @property
    def wanted(self) -> bool:
        """Whether the function is called with the arguments by name."""
        return bool(self.names) or self.anything

    def problem(self, arguments: Collection[str]) -> str | None:
        """Why the function can't be called with arguments of these names, or None."""
        if not self.takes_run:
            return "the function takes nothing by position, and the run is given to it so"
        if self.first is not None and self.first in arguments:
            return f"the function's first parameter is the run, and {self.first!r} is given as well"
        if not self.wanted:
            return None
        for name in arguments:
            if name not in self.names and not self.anything:
                close = nearest(name, list(self.names))
                hint = f' (did you mean "{close}"?)' if close else ""
                return f"the function has no parameter {name!r}{hint}"
        missing = sorted(self.required - set(arguments))
        return f"the function's parameter {missing[0]!r} is not given" if missing else None
