"""Everything a report is made of, as one value."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_forge.journal import Damage, Record, RunState, fold
from slurm_forge.journal.state import EarlierState
from slurm_forge.report.purge import PurgeRule
from slurm_forge.report.story.queue_reason import QueueAnswer
from slurm_forge.run_directory.layout import NEXT_STEP
from slurm_forge.store.identity import CheckpointName

#: How a batch script notes that a signal ended it (sbatch_templates/start.bash).
_ENDED_BY = re.compile(r"Slurm ended it \((SIG[A-Z0-9]{2,5})\) before it had begun\b")
_NOTE_BEGINS = re.compile(r"^\S+Z job \S+ on \S+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class NotStarted:
    """What a start that came to nothing left behind at ``time``, we or the script; foreign text."""

    job: str
    time: float
    text: str

    @property
    def next_step(self) -> str:
        """What a person is to do first, where the last note of the file says that."""
        _, _, step = self.text.rstrip("\n").rpartition("\n")[2].partition(NEXT_STEP)
        return step

    @property
    def signal(self) -> str | None:
        """The signal that ended the start, by the last note of the file: nothing was broken."""
        last = _NOTE_BEGINS.split(self.text)[-1].lstrip()
        match = _ENDED_BY.match(last)
        return None if match is None else match[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run directory as it was read at ``now`` (seconds since the epoch).

    ``reference`` is what a person types to mean this run on the command line; ``problems`` are
    sentences about what could not be read.  ``logs`` are the files that the ranks' output went to,
    as a person would name them from the current folder; only those that hold something.
    ``memory`` is what the job asks for per node, in bytes, and ``global_batch`` the samples of one
    step, where that is known.
    """

    name: str
    path: str
    reference: str
    now: float
    records: tuple[Record, ...] = ()
    #: The state after attempts that are archived: ``records`` are without theirs, or with them.
    earlier: Record | None = None
    damage: tuple[Damage, ...] = ()
    total_steps: int | None = None
    done: bool = False
    stop_asked: bool = False
    save_asked: bool = False
    problems: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    purge: PurgeRule | None = None
    #: What the age of the oldest file that the run needs counts from.
    oldest_file: float | None = None
    memory: int | None = None
    global_batch: int | None = None
    #: GPUs of each rank; None where the job asks for none, or nobody knows.
    gpus_per_rank: float | None = None
    #: How many nodes the job file asks for.
    nodes_asked: int | None = None
    not_started: tuple[NotStarted, ...] = ()
    #: What Slurm says of the job, where it was asked.
    queue: QueueAnswer | None = None
    #: The published checkpoints in the run's folder; None where nobody has looked.
    on_disk: frozenset[CheckpointName] | None = None
    #: Times of files, which are all on one clock, unlike those that nodes write into them: the
    #: last line of the newest attempt, its claim, and the last time that a person asked for the
    #: run to continue.  None if nobody has looked.
    last_written: float | None = None
    claimed: float | None = None
    asked: float | None = None
    #: The job that was started on this machine and has no process left there.
    gone_here: str = ""

    @property
    def records_to_fold(self) -> tuple[Record, ...]:
        """The records, the state after archived attempts in the place of theirs."""
        if self.earlier is None:
            return self.records
        through = self.earlier.attempt
        return (self.earlier, *(each for each in self.records if each.attempt > through))

    @property
    def earlier_state(self) -> RunState | None:
        """The state after archived attempts; None where none are."""
        event = None if self.earlier is None else self.earlier.event
        return event.state if isinstance(event, EarlierState) else None

    def state(self) -> RunState:
        """What the records come to."""
        return fold(self.records_to_fold)
