"""The recovery plan: every parameter that recovery may change, as one explicit value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RecoveryPlan", "SampleWindow", "Variable"]


@dataclass(frozen=True, slots=True, order=True)
class SampleWindow:
    """Samples ``first`` to ``stop`` (not included) of the run's sample stream.

    Positions in the stream, over all ranks and epochs: what ``consumed`` counts.
    """

    first: int
    stop: int


@dataclass(frozen=True, slots=True, order=True)
class Variable:
    """A variable of the environment and its value."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """The changed parameters in force.  The default value changes nothing.

    ``lr_factor`` scales the scheduler's own learning rate from step ``lr_from_step`` on and is
    ramped back to 1 over ``lr_ramp_steps`` steps; 0 ramp steps means that it stays.  It is state,
    never multiplied into an optimizer.  ``micro_batch`` is samples per rank and forward pass
    (None: as the program asks); the global batch is not a parameter here because it never changes.
    ``skipped`` are windows of the sample stream that are left out, ordered and apart from each
    other.  ``reseeded`` counts how often random numbers (dropout …) were drawn anew; the
    order of the samples never changes.  ``worker_factor`` scales the data-loader workers,
    ``time_factor`` the time limit; ``nodes`` is how many are asked for (None: as the job says).
    ``variables`` are added to the environment of the ranks; the fold takes them back once a
    checkpoint lies past the step ``variables_past``.
    """

    lr_factor: float = 1.0
    lr_from_step: int = 0
    lr_ramp_steps: int = 0
    micro_batch: int | None = None
    mem_factor: float = 1.0
    exclude_nodes: tuple[str, ...] = ()
    skipped: tuple[SampleWindow, ...] = ()
    reseeded: int = 0
    worker_factor: float = 1.0
    time_factor: float = 1.0
    nodes: int | None = None
    variables: tuple[Variable, ...] = ()
    variables_past: int = 0

    def lr_scale(self, step: int) -> float:
        """Factor on the learning rate of optimizer step ``step`` (counted from 0)."""
        if self.lr_factor == 1.0:
            return 1.0
        if self.lr_ramp_steps <= 0 or step <= self.lr_from_step:
            return self.lr_factor
        done = (step - self.lr_from_step) / self.lr_ramp_steps
        if done >= 1.0:
            return 1.0
        return self.lr_factor + (1.0 - self.lr_factor) * done
