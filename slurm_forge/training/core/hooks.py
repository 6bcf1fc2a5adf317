"""What a program can hang into a run.  Hooks are called on rank 0 only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slurm_forge.vocabulary.decision import Decision, Incident

__all__ = ["Hooks"]

_Hook = Callable[..., Any]
_F = TypeVar("_F", bound=_Hook)

_NAMES = (
    "on_train_begin",
    "on_resume",
    "on_step_end",
    "on_eval_end",
    "on_save",
    "on_probe",
    "on_stop",
    "on_train_end",
)


@dataclass(slots=True)
class Hooks:
    """Lists of callables by name; each is called with keyword arguments it may ignore.

    A hook that raises ends the launch like any other error of the program: silence would hide it.
    """

    rank: int
    _hooks: dict[str, list[_Hook]] = field(default_factory=dict)
    _on_instability: list[Callable[[Incident], Decision | None]] = field(default_factory=list)

    def add(self, name: str, hook: _F) -> _F:
        """Add a hook by its name (``on_save``); usable as a decorator through ``Run.on``."""
        if name == "on_instability":
            self._on_instability.append(hook)
        elif name in _NAMES:
            self._hooks.setdefault(name, []).append(hook)
        else:
            raise ValueError(
                f"no hook {name!r}; there are {', '.join((*_NAMES, 'on_instability'))}"
            )
        return hook

    def call(self, name: str, /, **given: Any) -> None:
        """Call every hook of that name, on rank 0."""
        if self.rank == 0:
            for hook in self._hooks.get(name, ()):
                hook(**given)

    @property
    def on_instability(self) -> bool:
        """Whether the program wants to be asked."""
        return bool(self._on_instability)

    def instability(self, incident: Incident) -> Decision | None:
        """The first decision that a hook returns, or None: then the policy decides."""
        if self.rank == 0:
            for hook in self._on_instability:
                decision = hook(incident)
                if decision is not None:
                    return decision
        return None
