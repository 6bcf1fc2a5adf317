"""One cell with a run of ours: submit, let the fault strike, wait for the end, judge."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import submitit

from slurm_forge.errors import ForgeError
from slurm_forge.journal import RunState
from slurm_forge.launch.render.batch_script import render
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.requeue.reconcile import reconcile
from slurm_forge.launch.submit.submission import create_run, job_script, keep_successor
from slurm_forge.launch.submitit.job import ForgeJob
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.spec import job_from_mapping
from slurm_forge.testing.cluster import SlurmCluster
from tests.slurm.harness import (
    REPOSITORY,
    Watched,
    environment,
    job_mapping,
    left_in_peace,
    submit,
    worker_of,
)
from tests.slurm.truth.cells import EVERY, Cell, Submission
from tests.slurm.truth.faults import commands_without, runs_folder
from tests.slurm.truth.judging import (
    WORDS,
    Ended,
    Row,
    Uninterrupted,
    judge,
    outcome_of,
    row_of,
)
from tests.slurm.truth.told import claims_of
from tests.slurm.truth.words import Claim

#: Jobs in these states are over, and nobody starts them again.
_OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
)
_AFTERWARDS_S = 30.0


@dataclass
class OurTarget:
    """A run of ours, as a fault sees it."""

    cluster: SlurmCluster
    folder: Path
    watched: Watched
    over: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def job(self) -> str:
        return self.watched.state.job or self.watched.job

    def stop(self) -> None:
        self.watched.run.stop_file.touch()

    def wait_step(self, step: int, *, start: int = 1) -> None:
        self.watched.wait_step(step, attempt=start)

    def wait_start(self, start: int = 1) -> None:
        self.watched.wait(lambda s: len(s.attempts) >= start, 60, f"start {start}")
        world = self.watched.file.job.resources.nodes
        self.cluster.wait_for(
            lambda: len(self.cluster.tasks(self.job)) == world, 60, f"the ranks of start {start}"
        )

    def wait_reaction(self, seconds: float) -> bool:
        before = self._ranks()
        try:
            self.cluster.wait_for(
                lambda: not before <= self._ranks(),
                seconds,
                "ranks to go",
            )
        except ForgeError:
            return False
        return True

    def _ranks(self) -> set[int]:
        """Processes that train: agents outlive them."""
        found = set()
        for task in self.cluster.tasks(self.job).values():
            with contextlib.suppress(OSError, ValueError):  # it has just gone
                found.add(worker_of(task.pid))
        return found


@dataclass
class References:
    """What runs come to that nothing happens to, each trained once: by steps and nodes."""

    folder: Path
    _known: dict[tuple[int, int], Uninterrupted] = field(default_factory=dict)

    def of(self, cell: Cell) -> Uninterrupted:
        """Samples and digest of the cell's training without the fault."""
        steps = int(cell.training["steps"])
        key = steps, cell.nodes
        if key not in self._known:
            folder = self.folder / f"reference-{steps}-{cell.nodes}"
            args = {"steps": steps}
            self._known[key] = Uninterrupted(*left_in_peace(folder, ranks=cell.nodes, args=args))
        return self._known[key]


def run_ours(cell: Cell, cluster: SlurmCluster, folder: Path, references: References) -> Row:
    """The cell on this cluster, in a new folder; a row of the table, whatever comes of it."""
    if cell.tracking not in (None, cluster.tracking):
        return row_of(cell, cluster, skipped=f"needs {cell.tracking.value} tracking")
    began = time.monotonic()
    folder.mkdir(parents=True)
    complaints: Sequence[str]
    ended: Ended | None = None
    outcome = "-"
    claims: tuple[Claim, ...] = ()
    with contextlib.ExitStack() as around:
        try:
            reference = references.of(cell)
            if cell.prepare is not None:
                around.enter_context(cell.prepare(cluster, folder))
            if cell.cluster is not None:
                around.enter_context(cluster.configured(cell.cluster(cluster.spec)))
            ended = _lived_through(cell, cluster, folder)
            claims = claims_of(cell, ended)
            complaints = judge(cell, ended, reference)
            complaints += tuple(f"{WORDS}{one}" for one in claims if not one.holds)
            outcome = outcome_of(cell, ended)
        except (ForgeError, AssertionError, KeyError, OSError, pytest.fail.Exception) as error:
            first, _, story = f"{type(error).__name__}: {error}".partition("\n")
            (folder / "story.txt").write_text(story)
            complaints = (first,)
        finally:
            if ended is not None:
                ended.over.close()
            if cell.cluster is not None or cell.prepare is not None:
                cluster.reset()
    seconds = time.monotonic() - began
    return row_of(
        cell,
        cluster,
        outcome,
        complaints=tuple(complaints),
        claims=len(claims),
        seconds=seconds,
    )


def _lived_through(cell: Cell, cluster: SlurmCluster, folder: Path) -> Ended:
    watched, others = _submitted(cell, cluster, folder)
    target = OurTarget(cluster, folder, watched)
    try:
        cell.strike(target)
        if cell.name == "controller-gone":
            _reconciled(watched)
        _wait_end(cell, target)
        for other in others:
            other.wait_finished()
    except BaseException:
        target.over.close()
        raise
    return Ended(cluster, folder, watched, tuple(others), target.over)


def _wait_end(cell: Cell, target: OurTarget) -> None:
    watched, cluster = target.watched, target.cluster
    wanted = cell.expected.status

    def arrived(state: RunState) -> bool:
        return state.status is wanted

    if cell.journal and cell.submission is not Submission.HETEROGENEOUS:
        watched.wait(arrived, cell.seconds, f"the run to be {wanted.value}")
    ends = frozenset({"held"}) if cell.expected.held_in_queue else _OVER
    if not cell.journal:
        ends |= {"held"}

    def at_rest() -> bool:
        record = cluster.job(target.job)
        held = record.state == "PENDING" and "held" in record.reason.lower()
        return ("held" if held else record.state) in ends

    cluster.wait_for(
        at_rest,
        _AFTERWARDS_S if cell.journal else cell.seconds,
        f"job {target.job} to be {' or '.join(sorted(ends))}",
    )


def _reconciled(watched: Watched) -> None:
    """The controller is back, and a person carries out what was left open."""
    assert watched.state.open_intent is not None, "no open intent"
    watched.cluster.wait_state(watched.job, _OVER, 60)
    with environment(watched.cluster):
        slurm = SubprocessSlurm.of_this_process()
        assert reconcile(watched.run, slurm).changed, "reconcile did nothing"
        assert not reconcile(watched.run, slurm).changed, "reconcile requeued it twice"


# --- submitting -----------------------------------------------------------------------------------


def _submitted(cell: Cell, cluster: SlurmCluster, folder: Path) -> tuple[Watched, list[Watched]]:
    """The run that the fault strikes, and those beside it."""
    job: dict[str, Any] = {"checkpoint": {"every_steps": EVERY, "every_minutes": None}, **cell.job}
    if cell.missing:
        path = cluster.env.get("PATH", os.defpath)
        job["setup"] = [f"export PATH={commands_without(folder, cell.missing, path)}"]
    training = dict(cell.training)
    if cell.prepare is not None:
        # The disk is for the run: what the test notes must not fail with it.
        training["record"] = str(folder / "record")
    match cell.submission:
        case Submission.JOB:
            common = {
                "partition": cell.partition,
                "minutes": cell.minutes,
                "nodes": cell.nodes,
                "memory": cell.memory,
                "sbatch": cell.sbatch,
                "args": training,
            }
            return submit(cluster, folder, name=cell.name, **common, **job), []
        case Submission.ARRAY:
            with environment(cluster):
                found = list(_array(cell, cluster, folder, job))
            return found[1], [found[0], found[2]]
        case Submission.HETEROGENEOUS:
            return _heterogeneous(cell, cluster, folder, job), []


def _runs(
    cell: Cell, cluster: SlurmCluster, folder: Path, job: dict[str, Any], count: int
) -> list[Watched]:
    made = []
    for index in range(count):
        spec = job_from_mapping(
            job_mapping(
                name=f"{cell.name}-{index}",
                partition=cell.partition,
                minutes=cell.minutes,
                nodes=cell.nodes,
                memory=cell.memory,
                sbatch=cell.sbatch,
                args=cell.training,
                job=job,
            )
        )
        run, file = create_run(
            spec,
            runs=runs_folder(folder),
            site=find_site("generic"),
            submitted_from=REPOSITORY,
        )
        made.append(Watched(cluster, run, file, ""))
    return made


def _array(
    cell: Cell, cluster: SlurmCluster, folder: Path, job: dict[str, Any]
) -> Iterator[Watched]:
    executor = submitit.AutoExecutor(folder / "submitit", cluster="forge")
    executor.update_parameters(
        timeout_min=int(cell.minutes),
        nodes=cell.nodes,
        tasks_per_node=1,
        cpus_per_task=1,
        slurm_mem=cell.memory,
        slurm_partition=cell.partition,
        # A node of its own for each task, so that one can be preempted without the others.
        slurm_exclusive=True,
    )
    made = _runs(cell, cluster, folder, job, 3)
    with executor.batch():
        handles = [executor.submit(ForgeJob(str(each.run.path))) for each in made]
    for watched, handle in zip(made, handles, strict=True):
        watched.job, watched.handle = handle.job_id, handle
        yield watched


def _heterogeneous(cell: Cell, cluster: SlurmCluster, folder: Path, job: dict[str, Any]) -> Watched:
    with environment(cluster):
        (watched,) = _runs(cell, cluster, folder, job, 1)
        keep_successor(watched.run, render(watched.file, find_site("generic"), watched.run))
    component = ["--nodes=1", "--ntasks=1", "--partition=normal", "--time=5", "--mem=500M"]
    watched.job = cluster.sbatch(job_script(watched.run), *component, ":", *component)
    return watched
