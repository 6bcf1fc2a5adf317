"""Find the user's training function from ``package.module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_forge.errors import ConfigError
from slurm_forge.files import private_directory
from slurm_forge.source.snapshot import place_in_snapshot
from slurm_forge.spec.entry import Parameters


def call_entry(function: Callable[..., Any], run: Any, args: Mapping[str, Any]) -> None:
    """Call the training function with the run, and with the job's arguments if it takes any.

    Raises ``ConfigError`` if they don't fit.
    """
    parameters = Parameters.of(function)
    problem = parameters.problem(args)
    if problem is not None:
        raise ConfigError(
            f"args: {problem}",
            next_step="Give the function the parameters that the job's args: name, or let it take "
            "the run alone and read run.args.",
        )
    function(run, **(args if parameters.wanted else {}))


def use_snapshot(entry: str, snapshot: Path, *, root: Path, folder: Path) -> tuple[str, Path]:
    """Make Python search a snapshot of the code before the work tree at ``root``.

    Returns the entry and the folder that ``load_entry`` takes.  Raises ``SnapshotError`` if the
    snapshot is gone, ``UnsafeFileError`` if others can write to it.
    """
    placed = place_in_snapshot(entry, snapshot, root=root, folder=folder)
    private_directory(snapshot)
    paths = [Path(path) for path in sys.path if path]
    sys.path[:0] = [str(snapshot / p.relative_to(root)) for p in paths if p.is_relative_to(root)]
    return placed


def load_entry(entry: str, directory: Path) -> Callable[[Any], Any]:
    """Import the function.  ``directory`` is where the job was submitted.

    Raises ``ConfigError`` naming what could not be found; an error inside the user's module is
    propagated unchanged.
    """
    where, _, name = entry.rpartition(":")
    if not where or not name:
        raise ConfigError(
            f"entry {entry!r} is not of the form package.module:function",
            next_step="Write entry: mypackage.train:main or entry: path/to/train.py:main.",
        )
    module = _from_file(where, directory) if where.endswith(".py") else _from_name(where, directory)
    try:
        function = getattr(module, name)
    except AttributeError:
        raise ConfigError(
            f"{where} has no function {name!r}",
            next_step=f"Correct `entry:` in the job file, or define {name}(run) there.",
        ) from None
    if not callable(function):
        raise ConfigError(
            f"{entry} is a {type(function).__name__}, not a function",
            next_step="Name a function that takes one argument, the run.",
        )
    return function  # type: ignore[no-any-return]


def _from_name(name: str, directory: Path) -> Any:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"there is no module {name!r} (looked in {directory} and on Python's path)",
                next_step="Submit from the folder that holds the package, or install it.",
            ) from error
        raise


def _from_file(path: str, directory: Path) -> Any:
    file = (directory / path).resolve()
    if not file.is_file():
        raise ConfigError(f"there is no file {file}", next_step="Correct entry: in the job file.")
    module_name = file.stem
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} can't be imported", next_step="Is it a Python file?")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # data-loader workers unpickle the user's classes by name
    spec.loader.exec_module(module)
    return module
