"""The tasks of an array that are all of one run: each is an attempt, one follows the other.

Slurm starts the next one when the one before has ended (``--array=1-N%1``), so that nobody has to
requeue anything; what is left to do is to look which tasks wait, and to change, hold or cancel
them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.client import JobUpdate, Slurm, SubprocessSlurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import PENDING_LIKE
from slurm_forge.slurm.text.array_tasks import (
    fold_tasks,
    parts_of,
    tasks_of,
)

#: ``--via`` of the supervisor in a task of such an array.
VIA_ARRAY = "sbatch array"
_QUICK = timedelta(seconds=5)
_LONGEST_COMMENT = 200


def chain_of(job: str, tasks: int | None, slurm: Slurm) -> Chain | None:
    """The chain that ``job`` is a task of, where its run is one of so many ``tasks``; else None."""
    parts = parts_of(job)
    return None if tasks is None or parts is None else Chain(slurm, parts[0], parts[1], tasks)


def waiting_record(job: str, tasks: int | None, slurm: Slurm) -> JobRecord | None:
    """One record for the tasks that wait beside ``job``, the held ones first; None where none do.

    ``SlurmCommandError`` where Slurm does not answer.
    """
    array = job.partition("_")[0]
    if tasks is None or not array.isdecimal():
        return None
    records = [each for each in slurm.show_tasks(array) if each.state in PENDING_LIKE]
    same = [each for each in records if each.held] or records
    if not same:
        return None
    numbers = fold_tasks(task for each in same for task in _numbers(each))
    return replace(same[0], array_task=numbers) if numbers else same[0]


def tasks_waiting(array: str, slurm: Slurm) -> tuple[int, ...]:
    """The tasks of an array that wait in the queue, in order.

    ``SlurmCommandError`` where Slurm does not answer.
    """
    waiting = (each for each in slurm.show_tasks(array) if each.state in PENDING_LIKE)
    return tuple(sorted({task for each in waiting for task in _numbers(each)}))


def comment_of(reason: str) -> str:
    """What Slurm takes for a job's comment: one line that can be printed, not too long."""
    line = "".join(each if each.isprintable() else " " for each in f"slurm_forge: {reason}")
    return line[:_LONGEST_COMMENT]


@dataclass(frozen=True, slots=True)
class Chain:
    """The array ``array`` of ``tasks`` tasks as its task number ``task`` sees it."""

    slurm: Slurm
    array: str
    task: int
    tasks: int

    def ref(self, task: int) -> str:
        """How to name one of its tasks to Slurm."""
        return f"{self.array}_{task}"

    def waiting(self) -> tuple[int, ...] | None:
        """The other tasks that wait in the queue, in order; None where Slurm does not answer."""
        try:
            tasks = tasks_waiting(self.array, self._quick())
        except SlurmCommandError:
            return None
        return tuple(task for task in tasks if task != self.task)

    def to_come(self) -> tuple[int, ...]:
        """As ``waiting``; where Slurm does not answer, those that have had no turn by their number.

        Slurm starts them without being asked for anything.
        """
        waiting_tasks = self.waiting()
        return (
            tuple(range(self.task + 1, self.tasks + 1)) if waiting_tasks is None else waiting_tasks
        )

    def update(self, tasks: tuple[int, ...], update: JobUpdate) -> None:
        """Change ``tasks``, which wait; ``SlurmCommandError`` where Slurm refuses that.

        The number of nodes is asked of the next task alone: Slurm takes it of one at a time (tried
        on 22.05.8), and each attempt asks anew.
        """
        if not tasks:
            return
        every = replace(update, num_nodes=None, num_tasks=None)
        self.slurm.update_job(self._ref(tasks), every)
        if update.num_nodes is not None:
            only = JobUpdate(num_nodes=update.num_nodes, num_tasks=update.num_tasks)
            self.slurm.update_job(self.ref(tasks[0]), only)

    def hold(self, tasks: tuple[int, ...], reason: str) -> str:
        """Keep ``tasks`` from starting until somebody releases them; Slurm's words if it refuses.

        The reason stands beside them, for whoever looks at the queue.
        """
        with contextlib.suppress(SlurmCommandError):
            self._quick().update_job(self._ref(tasks), JobUpdate(comment=comment_of(reason)))
        try:
            self.slurm.hold(self._ref(tasks))
        except SlurmCommandError as error:
            return " ".join(error.stderr.split()) or "it can't be held"
        return ""

    def cancel_waiting(self) -> None:
        """Take the tasks that wait out of the queue; best effort, nothing rests on it."""
        with contextlib.suppress(SlurmCommandError):
            self._quick().cancel_waiting(self.array)

    def _ref(self, tasks: tuple[int, ...]) -> str:
        return f"{self.array}_[{fold_tasks(tasks)}]"

    def _quick(self) -> Slurm:
        slurm = self.slurm
        return slurm.with_timeout(_QUICK) if isinstance(slurm, SubprocessSlurm) else slurm


def _numbers(record: JobRecord) -> tuple[int, ...]:
    return () if record.array_task is None else tasks_of(record.array_task)
