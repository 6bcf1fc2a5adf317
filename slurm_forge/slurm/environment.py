"""What Slurm tells a process in its environment, as one value.

Besides ``slurm_forge.knobs`` this is the only module that reads ``os.environ``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from slurm_forge.errors import ConfigError
from slurm_forge.slurm.nodelist import check_node_name, expand_nodes

__all__ = ["SlurmEnvironment", "node_name", "process_environ"]

_NUMBER = re.compile(r"[0-9]{1,18}")
# Some word character first: a leading dash would turn into an option on a command line.
_WORD = re.compile(r"\w[\w.@:+=%/-]{0,254}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmEnvironment:
    """The job, the step and the place in it that this process belongs to.

    ``None`` is "Slurm did not say": a batch script without ``--ntasks`` has no ``ntasks``, and
    start and end are only set by newer versions (23.11 does, 22.05 does not).  Inside a step,
    ``nnodes`` and ``ntasks`` are the step's, ``nodes`` is always the job's whole allocation.
    """

    job_id: int
    array_job_id: int | None = None
    array_task_id: int | None = None
    restart_count: int = 0
    step_id: int | None = None
    procid: int | None = None
    localid: int | None = None
    nodeid: int | None = None
    ntasks: int | None = None
    nnodes: int | None = None
    nodelist: str = ""
    nodes: tuple[str, ...] = ()
    step_nodes: tuple[str, ...] = ()
    node_name: str | None = None
    partition: str | None = None
    cluster_name: str | None = None
    job_name: str = ""
    start_time: datetime | None = None
    end_time: datetime | None = None
    heterogeneous: bool = False

    @property
    def job_ref(self) -> str:
        """How to name this job to Slurm: ``<array>_<task>`` for a task of an array, else the id.

        Requeueing a bare array id requeues every task of the array, finished ones too.
        """
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        return str(self.job_id)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmEnvironment | None:
        """Value of the SLURM_* variables in ``environ``; ``None`` outside a job.

        Nothing is guessed: a variable that is not what Slurm writes raises ``ConfigError``.
        """
        read = _Reader(environ)
        job_id = read.number("SLURM_JOB_ID", "SLURM_JOBID")
        if job_id is None:
            return None
        nodelist = read.text("SLURM_JOB_NODELIST", "SLURM_NODELIST")
        return cls(
            job_id=job_id,
            array_job_id=read.number("SLURM_ARRAY_JOB_ID"),
            array_task_id=read.number("SLURM_ARRAY_TASK_ID"),
            # Slurm sets it only when it is above zero (setup_env in src/common/env.c).
            restart_count=read.number("SLURM_RESTART_COUNT") or 0,
            step_id=read.number("SLURM_STEP_ID", "SLURM_STEPID"),
            procid=read.number("SLURM_PROCID"),
            localid=read.number("SLURM_LOCALID"),
            nodeid=read.number("SLURM_NODEID"),
            ntasks=read.number("SLURM_NTASKS", "SLURM_NPROCS"),
            nnodes=read.number("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
            nodelist=nodelist,
            nodes=expand_nodes(nodelist),
            step_nodes=expand_nodes(read.text("SLURM_STEP_NODELIST")),
            node_name=read.node("SLURMD_NODENAME"),
            partition=read.word("SLURM_JOB_PARTITION"),
            cluster_name=read.word("SLURM_CLUSTER_NAME"),
            job_name=read.text("SLURM_JOB_NAME"),
            start_time=read.moment("SLURM_JOB_START_TIME"),
            end_time=read.moment("SLURM_JOB_END_TIME"),
            heterogeneous=bool(read.text("SLURM_HET_SIZE")),
        )


def process_environ() -> Mapping[str, str]:
    """Copy of this process's environment, for whoever needs to be given one."""
    return dict(os.environ)


def node_name(environ: Mapping[str, str]) -> str:
    """What Slurm calls this node, which may be another name than its own; its own outside a job."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename


class _Reader:
    """Reads single variables by full match; an empty value counts as absent."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str:
        return next((self._environ[name] for name in names if self._environ.get(name)), "")

    def number(self, *names: str) -> int | None:
        text = self.text(*names)
        if text and not _NUMBER.fullmatch(text):
            raise _refused(names[0], text, "a number")
        return int(text) if text else None

    def word(self, name: str) -> str | None:
        text = self.text(name)
        if text and not _WORD.fullmatch(text):
            raise _refused(name, text, "a plain name")
        return text or None

    def node(self, name: str) -> str | None:
        text = self.text(name)
        return check_node_name(text) if text else None

    def moment(self, name: str) -> datetime | None:
        seconds = self.number(name)
        if not seconds:
            return None
        try:
            return datetime.fromtimestamp(seconds, tz=timezone.utc)
        except (OverflowError, ValueError, OSError):
            raise _refused(name, str(seconds), "a time in seconds since 1970") from None


def _refused(name: str, text: str, what: str) -> ConfigError:
    shown = text if len(text) <= 60 else text[:57] + "…"
    return ConfigError(
        f"{name}={shown!r} is not {what}, so it was not written by Slurm",
        path="environment",
        next_step=f"Unset {name} in the job's script, or start the job with sbatch again.",
    )
