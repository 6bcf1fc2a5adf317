"""A job that comes back by the way it is told, and marks when.

Arguments: the folder of the run, the way, and how long its own processes take to end, in seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import AttemptStarted
from slurm_forge.launch.requeue.requeue import JobRequeuer
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.recovery.policy.requeue_delay import shortened_begin_times
from slurm_forge.run_directory import Fence, RunDirectory, claim_attempt
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment


def mark(folder: Path, what: str) -> None:
    """A line with the time, in one write."""
    descriptor = os.open(folder / "marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{what} {time.time():.3f}\n".encode())
    finally:
        os.close(descriptor)


def main() -> None:
    """Come back once; the second start only marks that it is there."""
    folder, way, lasting = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    environment = SlurmEnvironment.from_environ(os.environ)
    assert environment is not None
    run = RunDirectory.at(folder)
    claim = claim_attempt(
        run,
        job=environment.job_ref,
        restart_count=environment.restart_count,
        host="here",
        pid=os.getpid(),
        nodes=environment.nodes,
        time=time.time(),
    )
    mark(folder, f"start {claim.attempt} {environment.job_ref}")
    if claim.attempt > 1:
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", str(lasting)]) if lasting else None
    slurm = SubprocessSlurm.of_this_process()
    journal = JournalWriter(run, attempt=claim.attempt, writer="supervisor")
    journal.write(
        AttemptStarted(
            job=environment.job_ref, restart_count=0, nodes=environment.nodes, host="h", via="bench"
        )
    )
    config = slurm.show_config()
    mark(folder, "ask")
    job_requeuer = JobRequeuer(
        slurm,
        job=environment.job_ref,
        script=None,
        journal=journal,
        fence=Fence(run, claim.attempt),
    )
    if way == "successor":
        script = run.submissions / "job.sbatch"
        slurm.submit(script, [f"--dependency=afterany:{environment.job_ref}"])
        return
    soon = shortened_begin_times(config, run_state(run).attempts) if way == "shortened" else None

    def ahead() -> timedelta | None:
        return None if soon is None else soon.if_killed

    job_requeuer.requeue("benchmark", soon=ahead)
    journal.close()
    if child is not None:
        child.wait()
    if soon is not None:
        job_requeuer.start_soon(soon.at_exit_after(job_requeuer.requeued_ago))
    mark(folder, "end")


if __name__ == "__main__":
    main()
