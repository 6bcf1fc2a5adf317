"""Submitting the same training: by an sbatch template, by submitit with us, by stock submitit."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import submitit

from benchmarks.journals import write_progress
from benchmarks.marks import What, read_marks, script_line
from benchmarks.restart_plain import Workload
from benchmarks.restart_stock import StockTraining
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import (
    create_run,
    submit_script,
)
from slurm_forge.launch.submitit.job import ForgeJob
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.spec import JobSpec, job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.testing.cluster import SlurmCluster

_REPOSITORY = Path(__file__).resolve().parents[1]
PARTITION = "preempt"
_MANY_STEPS = 1_000_000
#: From a launch's first checkpoint to its fault: far enough that the checkpoint counts as good.
_FAULT_AFTER = 4


class Way(str, Enum):
    """Who brings the training back; ``…-signal`` where the administrator has user signals sent.

    ``torchrun`` and ``srun`` are for comparison of cold starts alone: the administrator requeues
    them.  ``srun`` is the floor: the ranks with nothing in between.
    """

    TEMPLATE = "template"
    FORGE = "forge"
    STOCK = "stock"
    TEMPLATE_SIGNAL = "template-signal"
    STOCK_SIGNAL = "stock-signal"
    TORCHRUN = "torchrun"
    SRUN = "srun"

    @property
    def cold_only(self) -> bool:
        """Whether only its cold start is measured."""
        return self in (Way.TORCHRUN, Way.SRUN)

    @property
    def signalled(self) -> bool:
        """Whether it needs the cluster to send the signal of ``sbatch --signal``."""
        return self in (Way.TEMPLATE_SIGNAL, Way.STOCK_SIGNAL)

    @property
    def stock(self) -> bool:
        """Without any slurm_forge."""
        return self in (Way.STOCK, Way.STOCK_SIGNAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is trained: seconds of sleep per step, width of the model, steps between two saves.

    Under slurm_forge the run has a journal of ``journal_hours`` already.
    """

    pace: float
    width: int
    save_every: int
    journal_hours: float
    ranks: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A submitted training: its marks are in ``folder``."""

    job: str
    folder: Path
    run: RunDirectory | None

    def steps(self, *, start: int = 0, launch: int = 1) -> int:
        """The last step of a start, 0 before the first."""
        done = [
            mark.step
            for mark in read_marks(self.folder)
            if mark.what is What.STEP and (mark.start, mark.launch) == (start, launch)
        ]
        return max(done, default=0)

    def submitit_log(self) -> str:
        """What submitit said on rank 0."""
        path = self.folder / "submitit" / f"{self.job}_0_log.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def output(self) -> str:
        """The ends of all logs, for the report of a failure."""
        logs = sorted(self.folder.rglob("*.out")) + sorted(self.folder.rglob("*.err"))
        return "\n".join(f"--- {p}\n{p.read_text(errors='replace')[-3000:]}" for p in logs)


@contextlib.contextmanager
def cluster_in(directory: Path | None, work: Path) -> Iterator[SlurmCluster]:
    """The cluster that is up in ``directory``, else one that is booted for us below ``work``."""
    if directory is not None:
        yield SlurmCluster.attach(directory)
        return
    with SlurmCluster(work / "c") as booted:
        yield booted


@contextlib.contextmanager
def clients_of(cluster: SlurmCluster) -> Iterator[None]:
    """Slurm's commands of this process, and its jobs, talk to the cluster and import from here."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(cluster.env)
    os.environ["PYTHONPATH"] = f"{_REPOSITORY}/benchmarks/interpreter_marks:{_REPOSITORY}"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def submit(way: Way, settings: Settings, folder: Path) -> Started:
    """Start the training in a fresh folder, in the partition that is preempted."""
    folder.mkdir(parents=True)
    if way.cold_only:
        return Started(job=_plain(way, settings, folder), folder=folder, run=None)
    if way.stock:
        workload = Workload(
            folder=str(folder),
            pace=settings.pace,
            width=settings.width,
            steps=_MANY_STEPS,
            save_every=settings.save_every,
        )
        return Started(
            job=_executor(folder, "slurm", settings.ranks).submit(StockTraining(), workload).job_id,
            folder=folder,
            run=None,
        )
    run, file = _run(_job(settings, folder), folder)
    if settings.journal_hours:
        write_progress(run, settings.journal_hours)
    if way is Way.FORGE:
        job = _executor(folder, "forge", settings.ranks).submit(ForgeJob(str(run.path))).job_id
    else:
        job = _sbatch(run, file)
    return Started(job=job, folder=folder, run=run)


def _marking(folder: Path) -> str:
    return f"export FORGE_BENCH_MARKS={shlex.quote(str(folder))}"


def _plain(way: Way, settings: Settings, folder: Path) -> str:
    """As somebody writes it who knows all of them: no meeting to be waited for."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    words = [settings.pace, settings.width, _MANY_STEPS, settings.save_every]
    python = shlex.quote(sys.executable)
    launcher = f"{python} -u"
    if way is Way.TORCHRUN:
        launcher += (
            f" -m torch.distributed.run --nnodes={settings.ranks} --nproc-per-node=1 "
            f"--node-rank=$SLURM_PROCID --master-addr=127.0.0.1 --master-port={port} "
            "--max-restarts=0"
        )
    command = (
        f"export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0 "
        f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}; exec {launcher} "
        f"-m benchmarks.restart_plain {shlex.quote(str(folder))} {' '.join(map(str, words))}"
    )
    script = folder / f"{way.value}.sbatch"
    script.write_text(
        f"#!/bin/bash\n{script_line(folder)}\n{_marking(folder)}\n"
        f"exec srun --kill-on-bad-exit=1 --unbuffered bash -c {shlex.quote(command)}\n"
    )
    done = subprocess.run(
        [
            "sbatch", "--parsable", "--requeue", "--open-mode=append", f"--nodes={settings.ranks}",
            "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=1500M", "--time=30",
            f"--partition={PARTITION}", f"--output={folder}/%j.out", str(script),
        ],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def submit_with_faults(settings: Settings, folder: Path) -> Started:
    """Every launch of this one ends in NaNs, soon after its first checkpoint."""
    folder.mkdir(parents=True)
    job = _job(settings, folder, fault_every=settings.save_every + _FAULT_AFTER)
    run, file = _run(job, folder)
    return Started(job=_sbatch(run, file), folder=folder, run=run)


def _job(settings: Settings, folder: Path, *, fault_every: int = 0) -> JobSpec:
    return job_from_mapping(
        {
            "name": "restart",
            "entry": "benchmarks/restart_forge.py:train",
            "args": {
                "folder": str(folder),
                "pace": settings.pace,
                "width": settings.width,
                "steps": _MANY_STEPS,
                "fault_every": fault_every,
            },
            "resources": {
                "nodes": settings.ranks,
                "tasks_per_node": 1,
                "cpus_per_task": 1,
                "mem": "1500M",
                "time": "00:30:00",
                "partition": PARTITION,
            },
            "checkpoint": {
                "every_steps": settings.save_every,
                "every_minutes": None,
                "good_after_steps": 1,
            },
            "recovery": {
                "non_finite": [{"do": "skip", "times": 3}, {"do": "rollback", "times": 1000}]
            },
            "setup": [script_line(folder), _marking(folder)],
        }
    )


def _run(job: JobSpec, folder: Path) -> tuple[RunDirectory, RunFile]:
    site = find_site("generic")
    return create_run(job, runs=folder / "runs", site=site, submitted_from=_REPOSITORY)


def _sbatch(run: RunDirectory, file: RunFile) -> str:
    return submit_script(run, file, find_site("generic"), SubprocessSlurm.of_this_process())


def _executor(folder: Path, cluster: str, ranks: int) -> submitit.AutoExecutor:
    executor = submitit.AutoExecutor(folder / "submitit", cluster=cluster)
    executor.update_parameters(
        # Submitit takes a signal in the last ten minutes of the limit for the limit itself.
        timeout_min=30,
        nodes=ranks,
        tasks_per_node=1,
        cpus_per_task=1,
        slurm_mem="1500M",
        slurm_partition=PARTITION,
        slurm_setup=[script_line(folder), _marking(folder)],
        slurm_additional_parameters={"requeue": True},
    )
    return executor
