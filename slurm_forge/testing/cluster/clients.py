"""Talking to a test cluster with Slurm's own commands, under deadlines."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from slurm_forge.errors import ForgeError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.testing.cluster.layout import Layout
from slurm_forge.testing.cluster.processes import wait_until
from slurm_forge.testing.cluster.records import (
    SACCT_FORMAT,
    SacctRow,
    ScontrolJob,
    parse_accounting,
    parse_job,
)

# A shell that runs inside a Slurm job, or is set up for another cluster, must not leak in.
_FOREIGN = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_", "SACCT_", "SQUEUE_", "SINFO_", "SCANCEL_")
# From sbatch to COMPLETED for a job that does nothing, on a quiet machine of two cores.
NOMINAL_JOB_S = 1.0


def client_environment(base: Mapping[str, str], slurm_conf: Path) -> Mapping[str, str]:
    """``base`` without anything of another Slurm, and with SLURM_CONF."""
    variables = {name: value for name, value in base.items() if not name.startswith(_FOREIGN)}
    return {**variables, "SLURM_CONF": str(slurm_conf)}


class SlurmClients:
    """Slurm's commands against one cluster.  Times are in seconds on a quiet machine.

    Every wait is stretched by how slow the machine was when the cluster started, and by its load.
    SlurmCommandError where a command says no, SlurmUnreachableError where it says nothing in
    time, ForgeError where a condition did not come true.
    """

    def __init__(
        self, layout: Layout, environment: Mapping[str, str], *, trivial_job_s: float | None = None
    ) -> None:
        self.layout = layout
        self.env = client_environment(environment, layout.slurm_conf)
        self.trivial_job_s = trivial_job_s

    @property
    def startup_factor(self) -> float:
        """How much slower than a quiet machine this one was when the cluster started (from 1)."""
        return max(1.0, (self.trivial_job_s or 0.0) / NOMINAL_JOB_S)

    def deadline(self, seconds: float) -> float:
        """``seconds`` on a quiet machine, as a time limit for this one with its present load."""
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        return seconds * max(self.startup_factor, load)

    def run(
        self,
        *argv: str,
        timeout: float = 30.0,
        check: bool = True,
        stdin: str | None = None,
        cwd: Path | None = None,
        settings: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that talks to this cluster; ``settings`` are added to its environment.

        ``user`` (a name) runs it as somebody else, who must be able to enter the cluster's
        directory; ``cwd`` should then be a folder of theirs.
        """
        who = None if user is None else pwd.getpwnam(user)
        try:
            done = subprocess.run(
                argv,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                cwd=cwd or self.layout.jobs,
                env={**self.env, **(settings or {})},
                timeout=self.deadline(timeout),
                check=False,
                user=None if who is None else who.pw_uid,
                group=None if who is None else who.pw_gid,
                extra_groups=None if who is None else (),
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmUnreachableError(
                argv, -1, f"no answer within {error.timeout:.0f} s"
            ) from None
        except FileNotFoundError as error:
            raise SlurmUnreachableError(argv, 127, str(error)) from None
        if check and done.returncode != 0:
            raise SlurmCommandError(argv, done.returncode, done.stderr or done.stdout)
        return done

    def sbatch(
        self,
        script: str | Path,
        *args: str,
        cwd: Path | None = None,
        settings: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> str:
        """Submit a script (its text, or its path) with options ``args``; the job's id.

        Text without a ``#!`` line is run by bash.  The output is <cwd>/slurm-<id>.out.
        """
        text: str | None = None
        path: tuple[str, ...] = ()
        if isinstance(script, Path):
            path = (str(script),)
        else:
            text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        argv = ("sbatch", "--parsable", *args, *path)
        done = self.run(*argv, stdin=text, cwd=cwd, settings=settings, user=user)
        return done.stdout.strip().partition(";")[0]

    def jobs(self, job_id: str) -> tuple[ScontrolJob, ...]:
        """The job, or each task of an array, as the controller knows it now."""
        text = self.run("scontrol", "show", "job", "-o", job_id).stdout
        return tuple(parse_job(line) for line in text.splitlines() if line.strip())

    def job(self, job_id: str) -> ScontrolJob:
        """The job as the controller knows it now (it forgets after ``min_job_age``)."""
        return self.jobs(job_id)[0]

    def sacct(self, job_id: str) -> tuple[SacctRow, ...]:
        """All that accounting has on a job and its steps, each start of them; may lag a second."""
        argv = ("sacct", "-D", "-n", "-P", "-j", job_id, "-o", SACCT_FORMAT)
        return parse_accounting(self.run(*argv).stdout)

    def output(self, job_id: str) -> str:
        """What a job that was submitted from the usual directory has printed so far."""
        path = self.layout.jobs / f"slurm-{job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def cancel(self, job_id: str) -> None:
        """scancel; a job that is over already is no error."""
        self.run("scancel", job_id, check=False)

    def wait_for(self, predicate: Callable[[], bool], timeout: float, what: str) -> float:
        """Wait until it is true; the seconds it took.  ``what`` completes "waited 5 s for …"."""
        began = time.monotonic()
        limit = self.deadline(timeout)
        if not wait_until(predicate, timeout_s=limit, every_s=0.05):
            raise ForgeError(
                f"waited {limit:.0f} s for {what}\n{self.queue()}",
                next_step=f"The daemons' logs are in {self.layout.logs}.",
            )
        return time.monotonic() - began

    def wait_state(
        self, job_id: str, states: str | Collection[str], timeout: float = 30.0
    ) -> ScontrolJob:
        """Wait until the job is in one of the states (``RUNNING``, …); how it was then."""
        wanted = {states} if isinstance(states, str) else set(states)
        records: list[ScontrolJob] = []

        def arrived() -> bool:
            records[:] = [self.job(job_id)]
            return records[0].state in wanted

        self.wait_for(arrived, timeout, f"job {job_id} to be {' or '.join(sorted(wanted))}")
        return records[0]

    def queue(self) -> str:
        """squeue and sinfo, for a person to read; never an error."""
        parts = []
        for argv in (("squeue", "-a", "-o", "%i %P %T %N %r"), ("sinfo", "-o", "%N %T %E")):
            try:
                parts.append(self.run(*argv, check=False, timeout=10.0).stdout.strip())
            except SlurmUnreachableError as error:
                parts.append(error.message)
        return "\n".join(parts)
