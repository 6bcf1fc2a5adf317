"""The sentinel's process, without Slurm: it tells of signals, and goes when nobody listens."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time

from slurm_forge.launch.command.signal_listener import (
    SentinelStep,
    sentinel_command,
    sentinel_environment,
)


def here() -> tuple[str, ...]:
    """What srun would start."""
    command = sentinel_command(sys.executable, "n1")
    return command[command.index(sys.executable) :]


def test_it_tells_of_every_signal() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    step = SentinelStep(here(), dict(os.environ), told.put)
    try:
        assert step.listens(30), step.failed
        process = step._process
        assert process is not None
        began = time.monotonic()
        for name in ("SIGTERM", "SIGUSR1", "SIGTERM"):
            process.send_signal(signal.Signals[name])
            assert told.get(timeout=30) == name
        assert step.alive, "it died of what it was to tell"
        assert time.monotonic() - began < 60
    finally:
        step.close()
    assert process.returncode == 0, "it did not leave when its input ended"
    assert not step.alive


def test_where_it_can_not_be_started() -> None:
    step = SentinelStep(("no-such-srun",), {}, lambda _: None)
    assert not step.listens()
    assert step.failed == "no-such-srun can't be started: No such file or directory"
    old = SentinelStep(
        (sys.executable, "-c", "import sys; sys.exit('srun: unrecognized option --overlap')"),
        dict(os.environ),
        lambda _: None,
    )
    deadline = time.monotonic() + 30
    while "--overlap" not in old.failed:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    step.close()
    old.close()


def test_it_asks_for_one_small_task() -> None:
    command = sentinel_command("python", "n7")
    assert {"--overlap", "--ntasks=1", "--nodes=1", "--mem=0", "--nodelist=n7"} <= set(command)
    job = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/x", "PATH": "/bin", "SLURM_JOB_PARTITION": "p"}
    asks = {
        "SLURM_NTASKS": "8",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_MEM_PER_CPU": "1000",
        "SLURM_CPUS_PER_TASK": "4",
        "SRUN_CPUS_PER_TASK": "4",
        "SLURM_GPUS_PER_NODE": "8",
        "SLURM_NNODES": "4",
        "SLURM_CPU_BIND": "cores",
    }
    assert sentinel_environment({**job, **asks}) == job
