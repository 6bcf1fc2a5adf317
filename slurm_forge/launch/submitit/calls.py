"""Which submitted callables are training functions, and what their arguments are called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_forge.errors import SubmissionError
from slurm_forge.spec.entry import require_arguments

#: A first parameter of this name is the run, whatever else would fit.
_RUN = "run"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class TrainingCall:
    """A function that takes the run first, and its other arguments by name."""

    function: Callable[..., Any]
    arguments: dict[str, Any]


def training_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TrainingCall | None:
    """The call of a function that takes a run; None for a callable that needs none.

    A function whose first parameter is called ``run`` takes one, and so does one that lacks nothing
    but its first argument, where that is annotated as a ``Run`` or nothing was given.

    Raises:
        ConfigError: The arguments fit neither way.
        SubmissionError: An argument has no name that the job could store it under.
    """
    while isinstance(function, functools.partial):
        args = (*function.args, *args)
        kwargs = {**function.keywords, **kwargs}
        function = function.func
    if not inspect.isroutine(function):
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it says nothing of its parameters
        return None
    parameters = list(signature.parameters.values())
    first = parameters[0] if parameters and parameters[0].kind in _POSITIONAL else None
    takes_run = first is not None and first.name == _RUN
    if not takes_run and _fits(signature, args, kwargs):
        return None
    if first is not None and not takes_run and (args or kwargs):
        _require_run(function, first)
    arguments = _named(function, parameters[1:], args, kwargs)
    require_arguments(function, arguments)
    return TrainingCall(function, arguments)


def _require_run(function: Callable[..., Any], first: inspect.Parameter) -> None:
    annotation = first.annotation
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if name.strip("'\"").rpartition(".")[2] != "Run":
        called = getattr(function, "__name__", "the function")
        raise SubmissionError(
            f"the arguments do not fit {called}{inspect.signature(function)}",
            next_step=f"Give all of them; or, where {first.name!r} is to be the run, call it "
            "run, or annotate it: forge.Run.",
        )


def _fits(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _named(
    function: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments behind the run by name, as a job stores them."""
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    name = getattr(function, "__name__", "the function")
    if len(args) > len(names):
        raise SubmissionError(
            f"{name} takes {len(names)} arguments behind the run by position, and {len(args)} are "
            "given",
            next_step=f"Declare them: def {name}(run, max_steps, …): the run keeps every argument "
            "under its name.",
        )
    given = dict(zip(names, args, strict=False))
    twice = sorted(given.keys() & kwargs.keys())
    if twice:
        raise SubmissionError(
            f"{name} gets {twice[0]!r} by position and by name", next_step="Give it once."
        )
    return {**given, **kwargs}
