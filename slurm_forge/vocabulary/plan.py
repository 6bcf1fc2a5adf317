"""The recovery plan: every parameter that recovery may change, as one explicit value."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True, order=True)
class AbandonedCheckpoints:
    """Of a program's own checkpoints, those that a rollback to ``target`` leaves behind.

    A checkpoint is known by the number in its name (-1: none) and by when it was changed last, in
    nanoseconds.  Left behind are those after ``number`` and ``changed_ns``, the target's own, that
    nobody has written since ``until_ns``.  An empty ``target`` is the start.
    """

    target: str
    number: int
    changed_ns: int
    until_ns: int

    def covers(self, number: int, changed_ns: int) -> bool:
        """Whether a checkpoint is one of them."""
        behind = (number, changed_ns) > (self.number, self.changed_ns)
        return changed_ns <= self.until_ns and (not self.target or behind)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """The changed parameters in force.  The default value changes nothing.

    The global batch is not a parameter because it never changes, nor does the order of the samples.

    Attributes:
        lr_factor: Scales the scheduler's own learning rate from step ``lr_from_step`` on; it is
            state, never multiplied into an optimizer.
        lr_from_step: The optimizer step, from 0, where ``lr_factor`` begins.
        lr_ramp_steps: Steps over which the factor returns to 1; 0 keeps it.
        micro_batch: Samples per rank and forward pass; None is what the program asks for.
        mem_factor: Scales the memory that the job asks for.
        exclude_nodes: Nodes that the job does not run on.
        skipped: Windows of the sample stream that are skipped, in order, without overlap.
        reseeded: How often random numbers (dropout, …) were drawn anew.
        worker_factor: Scales the number of data-loader workers.
        time_factor: Scales the time limit.
        nodes: The number of nodes to ask for; None is what the job file says.
        variables: Added to the environment of the ranks.
        variables_past: The step that a checkpoint must pass for ``variables`` to be removed.
        abandoned: Checkpoints of a program's own that rollbacks have left behind.
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
    abandoned: tuple[AbandonedCheckpoints, ...] = ()

    def lr_scale(self, step: int) -> float:
        """The factor on the learning rate of an optimizer step.

        Args:
            step: The optimizer step, from 0.

        Returns:
            The factor: 1 where the plan changes nothing.
        """
        if self.lr_factor == 1.0:
            return 1.0
        if self.lr_ramp_steps <= 0 or step <= self.lr_from_step:
            return self.lr_factor
        done = (step - self.lr_from_step) / self.lr_ramp_steps
        if done >= 1.0:
            return 1.0
        return self.lr_factor + (1.0 - self.lr_factor) * done
