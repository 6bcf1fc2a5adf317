"""One world with a real Slurm and one with the fake, so that the same script runs in both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Protocol

from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import TERMINAL, JobState
from slurm_forge.testing.cluster import SlurmCluster
from tests.fake_slurm import FakeSlurm, FakeSlurmSpec, Runs

#: State, Restarts, Reason, held, whether PreemptTime is set; the exit code of what is over.
Seen = tuple[str, int, str | None, bool, bool, tuple[int, int] | None]

#: What a job waits for longer than until the scheduler looks or nodes are free, which is chance.
_WAITS_FOR = ("BeginTime", "Dependency")


class Kind(Enum):
    """What a job does: for bash, and for the fake."""

    SLEEPS = ("sleep 600", Runs())
    SUCCEEDS = ("sleep 1", Runs(seconds=1))
    FAILS = ("sleep 1; exit 3", Runs(seconds=1, status=3))
    #: Batch shell and step take no notice of SIGTERM.
    STUBBORN = (
        "trap '' TERM; srun bash -c \"trap '' TERM; sleep 600 & wait; sleep 600\"; sleep 600",
        Runs(batch_term=None),
    )
    #: The step saves and leaves with 0 when it is told to, and so does the job.
    LEAVES = (
        "srun bash -c \"trap 'sleep 1; exit 0' TERM; touch ready.$SLURM_JOB_ID; sleep 600 & wait\"",
        Runs(steps_term=0, takes=1),
    )


class World(Protocol):
    """A Slurm to act on, in its own time."""

    client: Slurm

    def submit(self, kind: Kind, *args: str) -> str: ...

    def tick(self) -> None: ...

    def time(self) -> float: ...

    def preempt(self, job: str) -> None: ...

    def lose_node(self, node: str) -> None: ...

    def deadline(self, seconds: float) -> float: ...

    def ready(self, job: str) -> bool: ...


class RealWorld:
    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.client: Slurm = SubprocessSlurm(environment=cluster.env)
        self._cluster = cluster
        self._folder = folder

    def submit(self, kind: Kind, *args: str) -> str:
        script = self._folder / f"{kind.name.lower()}.sh"
        script.write_text(f"#!/bin/bash\n#SBATCH --output=/dev/null\n{kind.value[0]}\n")
        return self.client.submit(script, (f"--chdir={self._folder}", *args))

    def tick(self) -> None:
        time.sleep(0.02)

    def time(self) -> float:
        return time.monotonic()

    def preempt(self, job: str) -> None:
        self._cluster.preempt(job)

    def lose_node(self, node: str) -> None:
        self._cluster.kill_node(node)

    def deadline(self, seconds: float) -> float:
        return self._cluster.deadline(seconds)

    def ready(self, job: str) -> bool:
        return (self._folder / f"ready.{job}").exists()


class FakeWorld:
    def __init__(self, cluster: SlurmCluster) -> None:
        spec = cluster.spec
        self._fake = FakeSlurm(
            FakeSlurmSpec(
                nodes=tuple(cluster.nodes),
                partitions=spec.partitions,
                user="root",
                user_id=0,
                kill_wait=spec.kill_wait,
                cred_expire=spec.cred_expire,
                slurmd_timeout=spec.slurmd_timeout,
                min_job_age=spec.min_job_age,
                job_requeue=spec.job_requeue,
            )
        )
        for kind in Kind:
            self._fake.script(f"{kind.name.lower()}.sh", kind.value[1])
        self.client: Slurm = self._fake

    def submit(self, kind: Kind, *args: str) -> str:
        return self._fake.submit(Path(f"{kind.name.lower()}.sh"), args)

    def tick(self) -> None:
        self._fake.advance(timedelta(milliseconds=50))

    def time(self) -> float:
        return self._fake.clock.monotonic()

    def preempt(self, job: str) -> None:
        self._fake.preempt(job)

    def lose_node(self, node: str) -> None:
        self._fake.kill_node(node)

    def deadline(self, seconds: float) -> float:
        return seconds

    def ready(self, job: str) -> bool:
        return True


@dataclass
class Story:
    """What was seen of each job, in order, and what Slurm answered."""

    world: World
    seen: dict[str, list[Seen]] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def submit(self, name: str, kind: Kind, *args: str) -> str:
        """``name`` is what the job is called in both worlds; ``{other}`` becomes its id."""
        filled = [arg.format(**self._names) for arg in args]
        job = self.world.submit(kind, *filled)
        self.watch(name, job)
        return job

    def watch(self, name: str, job: str) -> None:
        self._names[name] = job
        self.seen[name] = []

    def job(self, name: str) -> str:
        return self._names[name]

    def look(self, name: str) -> JobRecord:
        record = self.world.client.show_job(self._names[name])
        assert record is not None, name
        over = record.state in TERMINAL
        now: Seen = (
            record.state.value,
            record.restarts,
            record.reason,
            record.held,
            record.preempt_time is not None,
            record.exit_code if over else None,
        )
        if not self.seen[name] or self.seen[name][-1] != now:
            self.seen[name].append(now)
        return record

    def wait(
        self, name: str, true: Callable[[JobRecord], bool] | JobState, seconds: float = 60
    ) -> JobRecord:
        """Watch every job until this one is as wanted."""
        deadline = self.world.time() + self.world.deadline(seconds)
        while True:
            records = {each: self.look(each) for each in self.seen}
            record = records[name]
            if record.state is true if isinstance(true, JobState) else true(record):
                return record
            assert self.world.time() < deadline, (name, self.seen, self.answers)
            self.world.tick()

    def ready(self, name: str) -> None:
        """Until it runs and has set its traps."""
        self.wait(name, lambda r: r.state is JobState.RUNNING)
        self.wait(name, lambda r: self.world.ready(self._names[name]))

    def watch_for(self, seconds: float) -> None:
        """Watch every job for so long."""
        end = self.world.time() + seconds
        while self.world.time() < end:
            for name in self.seen:
                self.look(name)
            self.world.tick()

    def requeue(self, name: str, *, hold: bool = False) -> None:
        ask = self.world.client.requeue_hold if hold else self.world.client.requeue
        reply = ask(self._names.get(name, name))
        self.answers.append(f"{name} {reply.outcome.value}")
        if name in self.seen:
            self.look(name)

    def ask(self, name: str, request: Callable[[Slurm, str], object]) -> None:
        """Make a request; what Slurm answers, without what differs between worlds."""
        job = self._names.get(name, name)
        try:
            request(self.world.client, job)
            self.answers.append(f"{name} accepted")
        except SlurmCommandError as error:
            self.answers.append(f"{name} {_words(error.stderr, job)}")
        if name in self.seen:
            self.look(name)


def _words(text: str, job: str) -> str:
    return text.splitlines()[0].replace(f" for job {job}", "").rpartition(": ")[2]


def shown(sequence: Sequence[Seen]) -> str:
    return "\n  ".join(str(each) for each in sequence)


def lasting(sequence: Sequence[Seen]) -> list[Seen]:
    """Without what a look now and then may miss."""
    kept: list[Seen] = []
    for each in sequence:
        state, _, reason, held, _, _ = each
        passing = state == "PENDING" and not held and reason not in _WAITS_FOR
        if passing or state in ("COMPLETING", "SIGNALING"):
            continue
        if not kept or kept[-1] != each:
            kept.append(each)
    return kept


def missing(real: Sequence[Seen], fake: Sequence[Seen]) -> Seen | None:
    """The first thing seen on the real one that the fake does not show at that place."""
    rest = iter(fake)
    for each in real:
        state, _, reason, held, _, _ = each
        if state == "SIGNALING" or (state == "PENDING" and not held and reason not in _WAITS_FOR):
            continue
        if each not in rest:
            return each
    return None
