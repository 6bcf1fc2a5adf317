"""The jobs and nodes of a fake Slurm, and how jobs get there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.text.array_tasks import tasks_of
from tests.fake_slurm.arguments import Asked, Refused
from tests.fake_slurm.clock import Timer, VirtualClock
from tests.fake_slurm.job import FakeJob
from tests.fake_slurm.programs import Program, Programs, Start
from tests.fake_slurm.spec import FakeSlurmSpec

_SUBMISSION = "sbatch: error: Batch job submission failed: "


@dataclass(slots=True)
class FakeNode:
    """One node; ``job`` has it until its epilog is over.  ``lost``: processes that live on."""

    name: str
    job: FakeJob | None = None
    responds: bool = True
    down: bool = False
    drained: bool = False
    reason: str | None = None
    lost: list[Start] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether a job may start there now."""
        return self.job is None and self.responds and not self.down and not self.drained


class Registry:
    """What there is."""

    def __init__(self, spec: FakeSlurmSpec, client: Callable[[Start], Slurm]) -> None:
        self.spec = spec
        self.clock = VirtualClock(spec.start)
        self.jobs: dict[int, FakeJob] = {}
        self.nodes = {name: FakeNode(name) for name in spec.nodes}
        self.scripts: dict[str, Programs] = {}
        self._client = client
        self._programs: dict[int, Program] = {}
        self._limits: dict[int, list[Timer]] = {}
        self._pass: Timer | None = None
        self._last_number = 0

    def found(self, ref: str) -> list[FakeJob]:
        """What goes by this id: one job, one task, several (``7_[2-4]``), or all of an array."""
        known = [job for job in self.jobs.values() if self._remembered(job)]
        array, several, tasks = ref.partition("_[")
        if several:
            wanted = tasks_of(tasks)
            return [job for job in known if str(job.array) == array and job.task in wanted]
        if "_" in ref:
            return [job for job in known if job.ref == ref]
        return [job for job in known if str(job.array or job.number) == ref] or [
            job for job in known if str(job.number) == ref
        ]

    def _remembered(self, job: FakeJob) -> bool:
        forgotten = job.over and not job.completing and job.ended is not None
        return not forgotten or self.clock.now - (job.ended or self.clock.now) < (
            self.spec.min_job_age
        )

    def submit(self, script: Path, asked: Asked) -> str:
        """The id of a new job or array; ``Refused`` in Slurm's words."""
        partition = asked.partition or self.spec.default_partition
        if self.spec.partition(partition) is None:
            raise Refused(_SUBMISSION + "invalid partition specified: " + partition)
        self.check_nodes((*asked.excluded, *asked.nodelist), _SUBMISSION)
        first = self._last_number + 1
        for task in asked.array or (None,):
            self._last_number += 1
            number = self._last_number
            self.jobs[number] = FakeJob(
                number=number,
                script=script,
                partition=partition,
                asked=asked,
                user=self.spec.user,
                requeue=self.spec.job_requeue if asked.requeue is None else asked.requeue,
                submitted=self.clock.now,
                array=None if task is None else first,
                task=task,
                held=asked.hold,
                reason="JobHeldUser" if asked.hold else None,
                begin=self.clock.now + asked.begin if asked.begin else None,
                num_nodes=max(asked.nodes, len(asked.nodelist)),
                excluded=asked.excluded,
                time_limit=asked.time_limit or self.spec.default_time,
                memory=asked.memory,
                comment=asked.comment,
            )
        self.kick(asked.begin)
        return str(first)

    def check_nodes(self, names: Iterable[str], words: str = "") -> None:
        """``Refused`` if one of them is no node."""
        if any(name not in self.nodes for name in names):
            raise Refused(f"{words}Invalid node name specified")

    def kick(self, delay: timedelta = timedelta(0)) -> None:
        """Look at the queue soon, and once more after ``delay``."""
        if self._pass is None:
            self._pass = self.clock.after(self.spec.schedule_every, self._schedule)
        if delay > timedelta(0):
            self.clock.after(delay, self.kick)

    def _schedule(self) -> None:
        raise NotImplementedError
