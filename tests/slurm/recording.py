"""``python -m tests.slurm.recording``: what the commands of a real Slurm print, as test data.

One folder per release, ``tests/unit/slurm/data/v26.05``, which the parsers' tests read.  Only the
host's name, the caller's folder and the cluster's are replaced.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.slurm.text.parsing import (
    ACCOUNTING_FIELDS,
    QUEUE_FORMAT,
)
from slurm_forge.slurm.text.sinfo import SINFO_FORMAT
from slurm_forge.testing.cluster import ClusterSpec, SlurmCluster

DATA = Path(__file__).resolve().parents[1] / "unit" / "slurm" / "data"


@dataclass
class Recorder:
    """Writes what a cluster says, each answer into a file of its own."""

    cluster: SlurmCluster
    folder: Path
    shared: Path

    def keep(self, name: str, text: str) -> None:
        for mine, stands_for in (
            (str(self.cluster.layout.directory), "/cluster"),
            (str(self.shared), "/scratch/runs"),
            (self.cluster.state.platform.hostname, "host"),
        ):
            text = text.replace(mine, stands_for)
        (self.folder / f"{name}.txt").write_text(text)

    def answer(self, name: str, *argv: str) -> None:
        done = self.cluster.run(*argv, check=False)
        self.keep(name, done.stdout + done.stderr)

    def job(self, name: str, job: str) -> None:
        self.answer(f"job_{name}", "scontrol", "show", "job", job)

    def past(self, name: str, job: str) -> None:
        argv = ("sacct", "-D", "-n", "-P", "-j", job)
        self.cluster.wait_for(
            lambda: self.cluster.run(*argv, "-o", "State").stdout.count("\n") > 1, 30, "sacct"
        )
        self.answer(f"sacct_{name}", *argv, "-o", ACCOUNTING_FIELDS)

    def submit(self, body: str, *options: str, name: str) -> str:
        words = (f"--job-name={name}", f"--chdir={self.shared}", "--open-mode=append")
        return self.cluster.sbatch(body, *words, f"--output={name}.out", *options)

    def output(self, name: str) -> str:
        return (self.shared / f"{name}.out").read_text()

    def printed(self, name: str) -> None:
        """What srun and slurmstepd printed in a job."""
        self.keep(f"srun_{name}", self.output(name))

    def started(self, name: str, ranks: int) -> None:
        there = f"{name}.*.started"
        self.cluster.wait_for(
            lambda: len(list(self.shared.glob(there))) == ranks, 60, f"{ranks} ranks of {name}"
        )


def ranks(name: str, then: str = "sleep 120") -> str:
    """A script of two ranks which say that they have started."""
    return f"srun --kill-on-bad-exit=1 bash -c 'touch {name}.$SLURM_PROCID.started; {then}'"


def record(cluster: SlurmCluster, folder: Path, shared: Path) -> None:
    """Everything, in one go; some two minutes."""
    to = Recorder(cluster, folder, shared)
    two = ("--partition=preempt", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
    one = ("--partition=normal", "--nodes=1", "--ntasks=1")
    to.answer("config", "scontrol", "show", "config")
    to.answer("partitions", "scontrol", "show", "partition")
    to.answer("sinfo", "sinfo", "-a", "--noheader", f"--format={SINFO_FORMAT}")
    to.answer("sbatch_refused", "sbatch", "--partition=none", "--wrap=true")

    # On a node of its own: what is preempted may share none with it.
    aside = (f"--nodelist={cluster.nodes[-1]}", "--exclusive")
    limited = to.submit(ranks("time_limit"), *one, *aside, "--time=1", name="time_limit")
    cluster.wait_state(limited, "RUNNING", 60)

    variables = "env | grep -E ^SLURM | LC_ALL=C sort"
    body = f"{variables} > batch.env; srun bash -c '{variables} > task.$SLURM_PROCID.env'"
    done = to.submit(body, *two, "--comment=first try", name="completed")
    cluster.wait_state(done, "COMPLETED", 60)
    to.job("completed", done)
    to.past("completed", done)
    to.keep("batch_environment", (shared / "batch.env").read_text())
    to.keep("task_environment", (shared / "task.1.env").read_text())

    # The ranks are deaf, so that the job ends when its grace time does.
    deaf = ranks("preempted", 'trap "" TERM; while true; do sleep 1; done')
    job = to.submit(deaf, *two, "--requeue", name="preempted")
    to.started("preempted", 2)
    to.job("running", job)
    to.answer("job_running_one_line", "scontrol", "show", "job", "-o", job)
    to.answer("squeue", "squeue", "--noheader", f"--format={QUEUE_FORMAT}")
    cluster.preempt(job, hold=20)
    cluster.wait_for(
        lambda: cluster.job(job).field("PreemptTime") not in ("", "None", None), 60, "the notice"
    )
    to.job("preempted_in_grace", job)
    cluster.wait_state(job, "PENDING", 90)
    to.job("pending_requeued", job)
    to.past("preempted", job)
    to.printed("preempted")
    cluster.cancel(job)

    job = to.submit(ranks("killed_task", "kill -SEGV $$"), *two, name="killed_task")
    cluster.wait_state(job, ("FAILED", "COMPLETED"), 60)
    to.job("failed", job)
    to.printed("killed_task")

    job = to.submit(ranks("cancelled_step"), *two, name="cancelled_step")
    to.started("cancelled_step", 2)
    cluster.run("scancel", f"{job}.0")
    cluster.wait_state(job, ("FAILED", "CANCELLED", "COMPLETED"), 60)
    to.printed("cancelled_step")

    job = to.submit(ranks("cancelled"), *two, name="cancelled")
    to.started("cancelled", 2)
    cluster.cancel(job)
    cluster.wait_state(job, "CANCELLED", 60)
    to.job("cancelled", job)
    to.past("cancelled", job)
    to.printed("cancelled")

    job = to.submit("sleep 30", *one, "--array=1-3%1", name="array")
    cluster.wait_for(lambda: any(j.state == "RUNNING" for j in cluster.jobs(job)), 60, "a task")
    to.job("array", job)
    cluster.cancel(job)
    to.past("array", job)

    cluster.wait_state(limited, "TIMEOUT", 180)
    to.past("time_limit", limited)
    to.printed("time_limit")

    job = to.submit(ranks("node_failure"), *two, "--no-requeue", name="node_failure")
    to.started("node_failure", 2)
    lost = cluster.nodes_of(job)[1]
    cluster.kill_node(lost)
    cluster.wait_state(job, "NODE_FAIL", 120)
    to.job("node_fail", job)
    to.answer("node_down", "scontrol", "show", "node", lost)
    to.printed("node_failure")
    cluster.restart_node(lost)


def main(argv: Sequence[str] | None = None) -> None:
    """Record from each Slurm that is named, or from the one on PATH."""
    parser = argparse.ArgumentParser(prog="scripts/record-slurm-words", description=__doc__)
    parser.add_argument("--slurm", nargs="+", type=Path, metavar="PREFIX", default=[None])
    parser.add_argument("--to", type=Path, metavar="DIR", default=DATA, help="default: %(default)s")
    given = parser.parse_args(argv)
    for prefix in given.slurm:
        place = Path(tempfile.mkdtemp(prefix="words-", dir="/tmp"))
        place.chmod(0o755)
        shared = place / "runs"
        shared.mkdir()
        try:
            spec = ClusterSpec(nodes=4, prefix=prefix)
            with SlurmCluster(place / "slurm", spec) as cluster:
                version = cluster.state.platform.version
                folder = given.to / f"v{version.year:02d}.{version.month:02d}"
                folder.mkdir(parents=True, exist_ok=True)
                record(cluster, folder, shared)
                print(f"recorded {folder}", flush=True)
        finally:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"  # Slurm's times are those of its clients' zone
    main()
