"""What the pages show, as values: finished text, and numbers for the charts."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.journal import Record
from slurm_forge.report.checkpoints import CheckpointsListed
from slurm_forge.report.page.figures import Figure
from slurm_forge.report.page.waterfall import Waterfall
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.story.time_use import TimeSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFile:
    """The stacks of a hung launch, or as much of them as fits the page."""

    attempt: int
    launch: int
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """A run that this one, or its parent, was forked from, and at which step."""

    run: str
    path: str
    step: int
    checkpoint: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSources:
    """Everything that the page of a run is made of; ``logged`` are all logged figures.

    ``checkpoints`` is None where nobody could look, ``ancestors`` begin with the parent.
    """

    facts: RunFacts
    logged: tuple[Record, ...] = ()
    checkpoints: CheckpointsListed | None = None
    stacks: tuple[StackFile, ...] = ()
    ancestors: tuple[Ancestor, ...] = ()


@dataclass(frozen=True, slots=True)
class Words:
    """A piece of a sentence; ``command``: it is typed as it is."""

    text: str
    command: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """One number that a reader wants first; ``tone`` is ``good``, ``bad``, ``warn`` or empty."""

    label: str
    value: str
    note: str = ""
    tone: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A file of stacks below an incident."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCard:
    """An incident in words: one line, and the details.

    ``tone`` is ``interruption``, ``fault`` or ``held``.
    """

    anchor: str
    cause: str
    tone: str
    at: str
    time: float
    step: int | None
    where: str
    headline: str
    confidence: str
    evidence: tuple[str, ...]
    decision: str
    consequences: tuple[str, ...]
    stacks: tuple[Stack, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A node: how much the run used it, and what speaks against it."""

    name: str
    attempts: int
    held_s: float
    held: str
    notes: tuple[str, ...]
    tone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A checkpoint in the words of ``checkpoints list``."""

    name: str
    step: int
    trust: str
    where: str
    at: str
    size: str
    took: str
    why: str
    next: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """An attempt in a line."""

    number: int
    job: str
    nodes: str
    when: str
    waited: str
    steps: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRow:
    """Something that differs from an undisturbed run."""

    text: str
    science: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveMark:
    """Something that happened at a step, drawn on the curves."""

    kind: str
    step: int
    time: float
    text: str
    to_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMark:
    """Something about a node, from ``start`` to ``end``: slow or struck."""

    kind: str
    node: int
    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """What is drawn.  ``placed`` are the nodes of each attempt and launch, by their index.

    ``hidden_figures`` and ``hidden_nodes`` are how many more there are.
    """

    begin: float
    end: float
    utc_offset_s: float
    spans: tuple[TimeSpan, ...]
    nodes: tuple[str, ...]
    placed: tuple[tuple[int, int, tuple[int, ...]], ...]
    node_marks: tuple[NodeMark, ...]
    figures: tuple[Figure, ...]
    marks: tuple[CurveMark, ...]
    hidden_figures: int = 0
    hidden_nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """The page of one run."""

    name: str
    path: str
    status: str
    tone: str
    generated: str
    zone: str
    progress: float | None
    next: tuple[tuple[Words, ...], ...]
    next_time: tuple[str, ...]
    diagnosis: str
    story: tuple[str, ...]
    key_figures: tuple[KeyFigure, ...]
    warnings: tuple[str, ...]
    waterfall: Waterfall
    units: str
    gpus_per_rank: float | None
    attempts: tuple[AttemptRow, ...]
    hidden_attempts: int
    incidents: tuple[IncidentCard, ...]
    hidden_incidents: int
    skips: tuple[IncidentCard, ...]
    nodes: tuple[NodeRow, ...]
    checkpoints: tuple[CheckpointRow, ...]
    hidden_checkpoints: int
    kept_checkpoints: int
    deleted_checkpoints: int
    changes: tuple[ChangeRow, ...]
    ancestors: tuple[Ancestor, ...]
    charts: Charts


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """One run of an index: its state in a line, and its newest figure.

    ``settings`` are what it does not share with the others, in the order of the page's
    ``settings``.  ``link`` leads to its own report, empty where there is none.
    """

    name: str
    status: str
    tone: str
    settings: tuple[str, ...]
    steps: str
    progress: float | None
    figure: str
    goodput: str
    spent: str
    lost: str
    interruptions: str
    story: tuple[str, ...]
    next: tuple[tuple[Words, ...], ...]
    link: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPage:
    """Several runs, or a sweep, in one table and one plot of the figure that most of them log."""

    title: str
    kind: str
    generated: str
    zone: str
    summary: tuple[str, ...]
    next: tuple[tuple[Words, ...], ...]
    settings: tuple[str, ...]
    figure: str
    rows: tuple[IndexRow, ...]
    curves: tuple[tuple[str, Figure], ...]
