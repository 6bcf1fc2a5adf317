"""Launches through standing agents, without Slurm: a made-up srun starts them as its children.

    with standing(run, 2) as job:
        job.launch()                    # the conductor's thread
        job.until(lambda: ..., "what is waited for")
        facts = job.ended()
        job.conclude(facts)

Agents, workers, channels, conductor and evidence are those of the product.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm_forge.control import Hub
from slurm_forge.control.handshake import Credentials
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    begin,
)
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.render.rank_environment import for_launch
from slurm_forge.launch.render.schedule import timing
from slurm_forge.launch.supervisor.agent_launch import AgentsLaunch
from slurm_forge.launch.supervisor.job_step import (
    JobStep,
    StepOptions,
)
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.policy.start_mode import start_after
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.recovery import trusts_process
from slurm_forge.vocabulary.decision import Decision, Start

REPOSITORY = Path(__file__).resolve().parents[2]
_LONG_S = 240.0

#: What srun does as far as agents can tell: a process per task, and the first bad exit ends all.
_SRUN = """#!{python} -S
import os, signal, subprocess, sys, time
words = sys.argv[1:]
while words and words[0].startswith("-"):
    words.pop(0)
tasks = [
    subprocess.Popen(words, env={{**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}})
    for n in range(int(os.environ["SLURM_NTASKS"]))
]
bad = 0
while any(task.poll() is None for task in tasks):
    for n, task in enumerate(tasks):
        if task.poll() and not bad:
            bad = 143
            code = task.returncode
            what = "Killed" if code == -9 else f"Exited with exit code {{code}}"
            sys.stderr.write(f"srun: error: here: task {{n}}: {{what}}\\n")
            sys.stderr.write("srun: Terminating StepId=1.0\\n")
            for other in tasks:
                other.kill()
    time.sleep(0.005)
sys.exit(bad)
"""


class Job:
    """One attempt, launch after launch."""

    def __init__(self, run: RunDirectory, ranks: int, folder: Path, *, relay: bool = False) -> None:
        self.run, self.ranks = run, ranks
        attempt = begin(run, job="1", restart_count=0, nodes=("here",), via="test")
        assert isinstance(attempt, Attempt), attempt
        self.attempt = attempt
        self.step = JobStep(str(run.path), unwinds=trusts_process(attempt.file.job.recovery))
        self.launched: AgentsLaunch | None = None
        self.facts: LaunchFacts | None = None
        self.began = 0.0
        self._next = Start.COLD
        self.credentials = Credentials.new()
        self._conducting: threading.Thread | None = None
        self.hub: Hub | None = None
        srun = folder / "srun"
        srun.write_text(_SRUN.format(python=sys.executable))
        srun.chmod(0o755)
        self._variables = {
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": str(ranks),
            "SLURMD_NODENAME": "here",
            "OMP_NUM_THREADS": "1",
            "SLURM_FORGE_RELAY": str(int(relay)),
        }

    def launch(self, start: Start | None = None) -> Start:
        """Start one more; how it was started."""
        start = start or self._next
        options = StepOptions(
            payload=(
                sys.executable,
                "-u",
                "-m",
                "slurm_forge.process",
                "worker",
                str(self.run.path),
            ),
            options=(),
            tasks=None,
        )
        plan = self.attempt.state().plan
        variables = for_launch(self.attempt.file, self._variables, plan)
        if not self.step.can_reuse(options, self.ranks, variables):
            start = Start.COLD
        hub = Hub(world_size=self.ranks, credentials=self.credentials.with_new_nonce())
        self.hub = hub
        hub.start()
        self.attempt.next_launch(hub, ("here",), start)
        self.began = time.time()
        knobs = Knobs(
            channel=hub.addresses,
            nonce=hub.credentials.nonce,
            secret=hub.credentials.secret,
            attempt=1,
            launch=self.attempt.launch,
            started=self.began,
        )
        launched = self.step.begin(
            options, start, hub=hub, knobs=knobs, variables=variables, again=False
        )
        assert isinstance(launched, AgentsLaunch)
        self.launched = launched
        watch = JobPoller(None, "1")
        conductor = Conductor(
            hub,
            journal=self.attempt.journal,
            job_poller=watch,
            timing=timing(self.attempt.file.job, state=self.attempt.state(), now=time.time()),
            stop_file=self.run.stop_file,
            save_file=self.run.save_file,
            launched=launched,
        )

        def conduct() -> None:
            self.facts = conductor.watch()
            hub.abort("the launch is over")
            hub.close()
            watch.close()

        self.facts = None
        self._conducting = threading.Thread(target=conduct, daemon=True)
        self._conducting.start()
        return start

    def ended(self) -> LaunchFacts:
        """Wait for the end of the launch."""
        assert self._conducting is not None
        self._conducting.join(_LONG_S)
        assert self.facts is not None, "the launch did not end"
        return self.facts

    def conclude(self, facts: LaunchFacts) -> Decision | None:
        """As the supervisor does; the next launch starts as was decided."""
        decision = self.attempt.conclude(facts)
        if decision is not None:
            self._next = start_after(self.attempt.file.job.recovery, decision, facts)
        return decision

    @property
    def agents(self) -> dict[int, int]:
        """Process ids by rank."""
        assert self.step._agents is not None
        return {rank: view.pid for rank, view in self.step._agents.agents().items()}

    @property
    def workers(self) -> dict[int, int]:
        """Process ids of the workers of the present launch by rank, once all have begun it."""
        assert self.step._agents is not None
        views = self.step._agents.agents()
        return {r: v.worker for r, v in views.items() if v.begun == self.attempt.launch}

    def training(self, step: int = 0) -> bool:
        """Whether every rank has begun to train, and one has come so far."""
        assert self.hub is not None
        members = self.hub.members()
        return (
            len(members) == self.ranks
            and all(member.started for member in members.values())
            and max(member.begun for member in members.values()) > step
        )

    def until(self, condition: Callable[[], object], what: str, seconds: float = _LONG_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.facts is None, f"the launch ended instead of {what}: {self.facts}"
            assert time.monotonic() < deadline, f"never came: {what}"
            time.sleep(0.005)


@contextlib.contextmanager
def standing(run: RunDirectory, ranks: int, folder: Path, *, relay: bool = False) -> Iterator[Job]:
    """An attempt whose agents are gone when the block is left."""
    job = Job(run, ranks, folder, relay=relay)
    try:
        yield job
    finally:
        job.step.leave()
        job.attempt.end("test")


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def below(pid: int) -> list[int]:
    """All descendants of a process."""
    return [each for child in children_of(pid) for each in (child, *below(child))]
