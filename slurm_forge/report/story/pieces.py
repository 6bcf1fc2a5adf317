"""What the stories of ``explain`` are made of: small values without a story of their own.

Units and the meaning of None are those of ``story``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "ActStory",
    "ComebackStory",
    "FailedSave",
    "FailingSaves",
    "HeldStory",
    "LateProbe",
    "LoggedFigure",
    "NoticeStory",
    "Observation",
    "ParameterChange",
    "PlanInForce",
    "RejectedCheckpoint",
    "SampleRange",
    "ScienceChange",
    "SkipStory",
    "StrikeStory",
    "WaitingStory",
]


@dataclass(frozen=True, slots=True)
class Observation:
    """One piece of evidence: where it was seen, and its text."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """A parameter that a decision changed."""

    parameter: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, order=True)
class SampleRange:
    """Samples of the run's order, first and last one."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInForce:
    """A recovery plan; ``lr_scale`` is the factor on the learning rate where it is told.

    ``lr_back_step`` is where the ramp is back at 1 (None: it stays), ``skipped`` the samples that
    are left out, ``reseeded`` how often random numbers were drawn anew.  ``rolled_back_to`` is the
    step that training went back to, None where it did not, or has long got past the trouble.
    """

    lr_scale: float
    lr_factor: float
    lr_from_step: int
    lr_ramp_steps: int
    micro_batch: int | None
    mem_factor: float
    exclude_nodes: tuple[str, ...]
    lr_back_step: int | None
    skipped: tuple[SampleRange, ...]
    reseeded: int
    worker_factor: float
    rolled_back_to: int | None
    time_factor: float = 1.0
    nodes: int | None = None
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikeStory:
    """Nodes that were noted in the node ledger; ``excluded`` are left out, at least ``until``."""

    nodes: tuple[str, ...]
    cause: str
    excluded: tuple[str, ...]
    until: float | None


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A save that came to nothing."""

    time: float
    step: int
    reason: str

    @property
    def cause(self) -> str:
        """Why, without the advice that the error ended with."""
        return self.reason.partition("\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingSaves:
    """Every save since the last checkpoint has failed: ``count`` of them, the first at ``since``.

    ``reason`` is that of the last one.  ``committed_step`` is the step of the last checkpoint
    (None: there is none); ``at_risk_steps`` are lost if the run stops now.
    """

    count: int
    since: float
    first_step: int
    last_step: int
    reason: str
    committed_step: int | None
    at_risk_steps: int


@dataclass(frozen=True, slots=True)
class RejectedCheckpoint:
    """A checkpoint that was passed over while resuming."""

    time: float
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStory:
    """Steps in a row whose update was not applied, and the samples they consumed (inclusive).

    ``undone``: training went back to before them, so that they are no part of the result.
    ``evidence`` is what was found out about the first of them.
    """

    first_step: int
    last_step: int
    first_sample: int
    last_sample: int
    undone: bool = False
    time: float = math.nan
    evidence: tuple[Observation, ...] = ()

    @property
    def count(self) -> int:
        """How many steps."""
        return self.last_step - self.first_step + 1


@dataclass(frozen=True, slots=True)
class NoticeStory:
    """Somebody wanted something of the run: a signal, a file, the clock."""

    time: float
    what: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LateProbe:
    """A collective probe that failed, and who came late, or whose values were ``wrong``."""

    time: float
    step: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    wrong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFigure:
    """The newest value that ``run.log`` was given under a name."""

    name: str
    value: float
    step: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComebackStory:
    """A request to come back: ``outcome`` is ``intended``, ``done`` or ``failed``.

    ``by`` is who asked: ``supervisor``, ``deputy`` (rank 0 in its place), ``cli`` (a person).
    """

    time: float
    outcome: str
    method: str
    job: str
    successor: str | None
    reason: str
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStory:
    """Slurm was asked to put the job back into the queue, held.

    ``confirmed``: it said that it did; ``refused``: it did not take that, and ``refusal`` says why.
    With neither, its answer was not heard: the hold ends whoever asks for it.
    """

    time: float
    job: str
    reason: str
    refused: bool = False
    confirmed: bool = False
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingStory:
    """Why a job waits, as Slurm said when it was asked: its words, and ours (``text``).

    ``state`` and ``reason`` are empty where Slurm does not know the job; ``expected`` is when it
    may, or is thought to, start.  ``next`` is what to do about it; ``held``: until it is released.
    """

    job: str
    state: str
    reason: str
    text: str
    held: bool
    expected: float | None
    next: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActStory:
    """A person used the command line: submitted the run as ``job``, or used another verb on it."""

    time: float
    verb: str
    user: str | None
    job: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScienceChange:
    """One thing that makes this run differ from an undisturbed one.

    ``science`` is False for what changes only how it is computed (the micro-batch, memory, nodes).
    """

    parameter: str
    text: str
    science: bool
