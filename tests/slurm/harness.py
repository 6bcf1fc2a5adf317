"""A run on the test cluster, started in one of the three ways, watched through its journal."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import submitit

from slurm_forge.journal import RunState, RunStatus, read_journal
from slurm_forge.journal.events import Event
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import (
    create_run,
    run_state,
    submit_script,
)
from slurm_forge.launch.submitit.job import ForgeJob
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.testing.digest import digest
from tests import jobs
from tests.distributed.launches import launched, new_run

REPOSITORY = Path(__file__).resolve().parents[2]


def worker_of(agent: int) -> int:
    """The process that trains below the agent of a rank; without an agent the task itself."""
    words = Path(f"/proc/{agent}/cmdline").read_bytes().split(b"\0")
    if b"slurm_forge.process" not in words or b"agent" not in words:
        return agent
    (worker,) = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
    return worker


class Way(str, Enum):
    """How a run gets onto the cluster."""

    TEMPLATE = "template"
    FORGE = "forge"
    STOCK = "stock"


@dataclass
class Watched:
    """A submitted run and the cluster it is on."""

    cluster: SlurmCluster
    run: RunDirectory
    file: RunFile
    job: str
    handle: Any = None
    _printed: set[str] = field(default_factory=set)

    @property
    def state(self) -> RunState:
        return run_state(self.run)

    def events(self, *kinds: type) -> list[tuple[float, Event]]:
        records, damage = read_journal(self.run)
        assert not damage
        found = [(r.time, r.event) for r in records if isinstance(r.event, kinds)]
        return sorted(found, key=lambda pair: pair[0])

    def wait(self, condition: Callable[[RunState], bool], seconds: float, what: str) -> RunState:
        """Wait until the journal says so; fails with the whole story."""
        deadline = time.monotonic() + self.cluster.deadline(seconds)
        while time.monotonic() < deadline:
            state = self.state
            if condition(state):
                return state
            if state.status is RunStatus.HELD and not condition(state):
                break
            time.sleep(0.1)
        pytest.fail(f"waited for {what}\n{self.story()}")

    def wait_step(self, step: int, *, attempt: int = 1, seconds: float = 60) -> RunState:
        """Until the journal knows of that step (progress is written every few seconds)."""

        def reached(state: RunState) -> bool:
            later = [a for a in state.attempts if a.number >= attempt]
            commits = [event.step for a in later for _, event in a.checkpoints]
            steps = [launch.step or 0 for a in later for launch in a.launches]
            return max([*commits, *steps], default=-1) >= step

        return self.wait(reached, seconds, f"step {step} in attempt {attempt}")

    def wait_finished(self, seconds: float = 120) -> RunState:
        return self.wait(lambda s: s.status is RunStatus.FINISHED, seconds, "the end of the run")

    def story(self) -> str:
        lines = [f"{self.state.status} {self.state.reason}"]
        records, damage = read_journal(self.run)
        lines += [str(d) for d in damage]
        for record in sorted(records, key=lambda r: r.time):
            lines.append(f"{record.time:.2f} {record.attempt}.{record.launch} {record.event}")
        for log in sorted(self.run.submissions.glob("*.out")) + sorted(
            self.run.submissions.glob("*_log.*")
        ):
            lines.append(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        return "\n".join(lines)

    @property
    def record(self) -> Path:
        """Where ranks note which samples they have trained on."""
        return Path(self.file.job.args.get("record", self.run.path))

    def digest(self) -> str:
        return digest(self.run.path, random=True)


def left_of_limit(text: str, *, at: float) -> float:
    """Seconds from ``at`` to the EndTime that a text names."""
    named = re.search(r"EndTime=(\d\d):(\d\d):(\d\d)", text)
    assert named is not None, text
    hour, minute, second = map(int, named.groups())
    then = datetime.fromtimestamp(at, tz=timezone.utc).astimezone()
    end = then.replace(hour=hour, minute=minute, second=second, microsecond=0)
    return ((end - then) % timedelta(days=1)).total_seconds()


@contextlib.contextmanager
def environment(cluster: SlurmCluster, ledger: Path | None = None) -> Iterator[None]:
    """Slurm's clients of this process talk to the cluster.

    Jobs that are submitted inside strike nodes in ``ledger``, or nowhere.
    """
    before = dict(os.environ)
    os.environ.update(cluster.env)
    os.environ["SLURM_FORGE_NODES"] = "off" if ledger is None else str(ledger)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def left_in_peace(folder: Path, *, ranks: int, args: Mapping[str, Any]) -> tuple[str, dict]:
    """Digest and samples of a run of ``tests/jobs.py`` that nothing happens to.

    Its ranks are forked here: what they compute depends neither on Slurm nor on interpreters.
    """
    run = new_run(folder, "peace", args=dict(args), checkpoint={"every_steps": 20})
    with launched(run, ranks, jobs.train):
        pass
    return digest(run.path, random=True), jobs.consumed(run.path)


def job_mapping(
    *,
    name: str,
    args: Mapping[str, Any],
    nodes: int,
    partition: str,
    minutes: float,
    memory: str,
    sbatch: Mapping[str, str],
    job: Mapping[str, Any],
    spare_nodes: int | None = None,
    qos: str | None = None,
) -> dict[str, Any]:
    """A job file of ``tests/jobs.py``, one rank on each node; ``job`` are further keys of it."""
    return {
        "name": name,
        "entry": "tests/jobs.py:train",
        "args": dict(args),
        "resources": {
            "nodes": nodes,
            "spare_nodes": spare_nodes,
            "tasks_per_node": 1,
            "cpus_per_task": 1,
            "mem": memory,
            "time": f"00:{int(minutes):02d}:{int(minutes % 1 * 60):02d}",
            "partition": partition,
            "qos": qos,
            "extra": dict(sbatch),
        },
        "checkpoint": {"every_steps": 20, "every_minutes": None},
        **job,
    }


def submit(
    cluster: SlurmCluster,
    folder: Path,
    *,
    name: str,
    way: Way = Way.TEMPLATE,
    args: Mapping[str, Any] | None = None,
    nodes: int = 4,
    partition: str = "preempt",
    minutes: float = 30,
    memory: str = "1500M",
    sbatch: Mapping[str, str] | None = None,
    spare_nodes: int | None = None,
    site: Site | None = None,
    exclude: Sequence[str] = (),
    qos: str | None = None,
    source: Path = REPOSITORY,
    **job: Any,
) -> Watched:
    """Make a run of ``tests/jobs.py``, or of another entry in ``source``, and start it."""
    spec = job_from_mapping(
        job_mapping(
            name=name,
            args=args or {},
            nodes=nodes,
            partition=partition,
            minutes=minutes,
            memory=memory,
            sbatch=sbatch or {},
            job=job,
            spare_nodes=spare_nodes,
            qos=qos,
        )
    )
    site = site or find_site("generic")
    with environment(cluster, folder / "nodes"):
        run, file = create_run(spec, runs=folder / "runs", site=site, submitted_from=source)
        if way is Way.TEMPLATE:
            slurm = SubprocessSlurm.of_this_process()
            return Watched(
                cluster, run, file, submit_script(run, file, site, slurm, exclude=exclude)
            )
        executor = submitit.AutoExecutor(
            folder / "submitit", cluster="forge" if way is Way.FORGE else "slurm"
        )
        executor.update_parameters(
            timeout_min=int(minutes),
            nodes=nodes,
            tasks_per_node=1,
            cpus_per_task=1,
            slurm_mem=memory,
            slurm_partition=partition,
            slurm_additional_parameters={"requeue": True, **(sbatch or {})},
        )
        handle = executor.submit(ForgeJob(str(run.path)))
        return Watched(cluster, run, file, handle.job_id, handle)
