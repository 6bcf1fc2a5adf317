"""What Slurm tells a process in its environment, as one value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum

from slurm_forge.errors import ConfigError
from slurm_forge.slurm.text.nodelist import (
    check_node_name,
    expand_nodes,
)
from slurm_forge.slurm.versions import Unrecognized

_NUMBER = re.compile(r"[0-9]{1,18}")
_STEP = re.compile(r"-?[0-9]{1,10}")
# Some word character first: a leading dash would turn into an option on a command line.
_WORD = re.compile(r"\w[\w.@:+=%/-]{0,254}")


class SpecialStep(Enum):
    """A step that Slurm starts by itself, by the name it has in sacct.

    Its id is reserved (SLURM_BATCH_SCRIPT and others in slurm/slurm.h): a 32-bit number above
    SLURM_MAX_NORMAL_STEP_ID, which is written with a sign (setup_env in src/common/env.c) or
    without one (env_array_for_step, there).  Before 26.05 the batch step has no SLURM_STEP_ID.
    """

    BATCH = "batch"
    EXTERN = "extern"
    INTERACTIVE = "interactive"
    PENDING = "TBD"
    #: An id that is reserved, and for a kind of step that is not known here.
    UNKNOWN = "?"


_SPECIAL_STEPS = {
    -3: SpecialStep.PENDING,
    -4: SpecialStep.EXTERN,
    -5: SpecialStep.BATCH,
    -6: SpecialStep.INTERACTIVE,
}
_MAX_NORMAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmEnvironment:
    """The job, the step and the place in it that this process belongs to.

    ``None`` is "Slurm did not say": a batch script without ``--ntasks`` has no ``ntasks``, and
    the end is only set by newer versions (23.11 does, 22.05 does not).  Inside a step, ``ntasks``
    is the step's, ``nodes`` is always the job's whole allocation.
    ``step`` is the number of a step that srun started, or one of Slurm's own steps.
    ``unrecognized`` are variables whose value could not be read and that a run can do without.
    """

    job_id: int
    array_job_id: int | None = None
    array_task_id: int | None = None
    restart_count: int = 0
    step: int | SpecialStep | None = None
    procid: int | None = None
    localid: int | None = None
    nodeid: int | None = None
    ntasks: int | None = None
    nodes: tuple[str, ...] = ()
    node_name: str | None = None
    partition: str | None = None
    cluster_name: str | None = None
    job_name: str = ""
    end_time: datetime | None = None
    heterogeneous: bool = False
    unrecognized: tuple[Unrecognized, ...] = ()

    @property
    def in_srun_step(self) -> bool:
        """Whether srun started this process; Slurm itself starts batch scripts and shells."""
        return isinstance(self.step, int)

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

        Nothing is guessed.  What names the job and its nodes, and the place of a rank in a step of
        srun's, raises ``ConfigError`` where it can't be read; anything else becomes ``None`` and is
        ``unrecognized``.
        """
        reader = _VariableReader(environ)
        job_id = reader.required_number("SLURM_JOB_ID", "SLURM_JOBID")
        if job_id is None:
            return None
        step = reader.step("SLURM_STEP_ID", "SLURM_STEPID")
        # A rank that takes itself for another one, or for the only one, trains a model of its own.
        place = reader.required_number if isinstance(step, int) else reader.number
        return cls(
            job_id=job_id,
            # Without its number, a task would be requeued by the id of the whole array.
            array_job_id=reader.required_number("SLURM_ARRAY_JOB_ID"),
            array_task_id=reader.required_number("SLURM_ARRAY_TASK_ID"),
            # Slurm sets it only when it is above zero (setup_env in src/common/env.c).
            restart_count=reader.number("SLURM_RESTART_COUNT") or 0,
            step=step,
            procid=place("SLURM_PROCID"),
            localid=place("SLURM_LOCALID"),
            nodeid=place("SLURM_NODEID"),
            ntasks=place("SLURM_NTASKS", "SLURM_NPROCS"),
            nodes=expand_nodes(reader.text("SLURM_JOB_NODELIST", "SLURM_NODELIST")),
            node_name=reader.node("SLURMD_NODENAME"),
            partition=reader.word("SLURM_JOB_PARTITION"),
            cluster_name=reader.word("SLURM_CLUSTER_NAME"),
            job_name=reader.text("SLURM_JOB_NAME"),
            end_time=reader.moment("SLURM_JOB_END_TIME"),
            heterogeneous=bool(reader.text("SLURM_HET_SIZE")),
            unrecognized=reader.unrecognized,
        )


def node_name(environ: Mapping[str, str]) -> str:
    """What Slurm calls this node, which may be another name than its own; its own outside a job."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename


def job_named_in(environ: Mapping[str, str]) -> str | None:
    """The job's name to Slurm, even where the rest of the environment can't be read; else None."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID")
    array, task, job = (environ.get(name, "") for name in names)
    words = [array, task] if array or task else [job]
    return "_".join(words) if all(_NUMBER.fullmatch(word) for word in words) else None


class _VariableReader:
    """Reads single variables by full match; an empty value counts as absent."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._unrecognized: list[Unrecognized] = []

    @property
    def unrecognized(self) -> tuple[Unrecognized, ...]:
        return tuple(self._unrecognized)

    def text(self, *names: str) -> str:
        return next((self._environ[name] for name in names if self._environ.get(name)), "")

    def required_number(self, *names: str) -> int | None:
        text = self.text(*names)
        if text and not _NUMBER.fullmatch(text):
            raise _refused(names[0], text, "a number")
        return int(text) if text else None

    def number(self, *names: str) -> int | None:
        text = self.text(*names)
        if text and not _NUMBER.fullmatch(text):
            self._skip(names[0], text)
            return None
        return int(text) if text else None

    def step(self, *names: str) -> int | SpecialStep | None:
        text = self.text(*names)
        if not text:
            return None
        if not _STEP.fullmatch(text):
            self._skip(names[0], text)
            return SpecialStep.UNKNOWN
        number = int(text)
        if 0 <= number <= _MAX_NORMAL_STEP:
            return number
        signed = number if number < 0 else number - (1 << 32)
        special = _SPECIAL_STEPS.get(signed, SpecialStep.UNKNOWN)
        if special is SpecialStep.UNKNOWN:
            self._skip(names[0], text)
        return special

    def word(self, name: str) -> str | None:
        text = self.text(name)
        if text and not _WORD.fullmatch(text):
            self._skip(name, text)
            return None
        return text or None

    def node(self, name: str) -> str | None:
        text = self.text(name)
        try:
            return check_node_name(text) if text else None
        except ConfigError:
            self._skip(name, text)
            return None

    def moment(self, name: str) -> datetime | None:
        seconds = self.number(name)
        if not seconds:
            return None
        try:
            return datetime.fromtimestamp(seconds, tz=timezone.utc)
        except (OverflowError, ValueError, OSError):
            self._skip(name, str(seconds))
            return None

    def _skip(self, name: str, text: str) -> None:
        self._unrecognized.append(Unrecognized(name, text))


def _refused(name: str, text: str, what: str) -> ConfigError:
    excerpt = text if len(text) <= 60 else text[:57] + "…"
    return ConfigError(
        f"{name}={excerpt!r} is not {what}, so it was not written by Slurm",
        path="environment",
        next_step=f"Unset {name} in the job's script, or start the job with sbatch again.",
    )
