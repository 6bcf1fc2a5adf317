"""Do the ``args:`` of a job fit the function that they are meant for?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass

from slurm_forge.documents import nearest

__all__ = ["Parameters"]

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
            given = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # written in C: it says nothing of its parameters
            return cls()
        found = given[1:]
        place = given[0] if given and given[0].kind not in _BY_NAME else None
        named = [each for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        return cls(
            tuple(each.name for each in named),
            frozenset(each.name for each in named if each.default is each.empty),
            any(each.kind is each.VAR_KEYWORD for each in found),
            place.name if place and place.kind is place.POSITIONAL_OR_KEYWORD else None,
            place is not None,
        )

    @property
    def wanted(self) -> bool:
        """Whether the function is called with the arguments by name."""
        return bool(self.names) or self.anything

    def problem(self, given: Collection[str]) -> str | None:
        """Why the function can't be called with arguments of these names, or None."""
        if not self.takes_run:
            return "the function takes nothing by position, and the run is given to it so"
        if self.first is not None and self.first in given:
            return f"the function's first parameter is the run, and {self.first!r} is given as well"
        if not self.wanted:
            return None
        for name in given:
            if name not in self.names and not self.anything:
                close = nearest(name, list(self.names))
                hint = f' (did you mean "{close}"?)' if close else ""
                return f"the function has no parameter {name!r}{hint}"
        missing = sorted(self.required - set(given))
        return f"the function's parameter {missing[0]!r} is not given" if missing else None
