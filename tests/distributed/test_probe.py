"""The probe beside real ranks: who is named, what it leaves alone, and what it never says."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

import slurm_forge as forge
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import ProbeMeasured
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause
from tests.distributed.launches import launched, new_run
from tests.distributed.test_hangs import Net, Points, incident, text_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(100)]

PROBE = {"every": "1s", "deadline": "2s", "silence": "4s"}


def train(run: forge.Run, steps: int = 4000, pace: float = 0.0) -> None:
    net = Net(run)
    for batch in run.batches(Points(), global_batch_size=12, until=forge.Steps(steps)):
        if pace:
            time.sleep(pace)
        run.train_step(batch, net.loss)


def probes(run: RunDirectory) -> list[ProbeMeasured]:
    records, _ = read_journal(run)
    return [r.event for r in records if isinstance(r.event, ProbeMeasured)]


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path, probe=PROBE, inject=["stop@9:rank1"])
    with launched(run, 3, train) as launch:
        launch.until(lambda: [p for p in probes(run) if not p.ok], "the probe to fail")
        launch.kill(1, signal.SIGKILL)
    (failed,) = [p for p in probes(run) if not p.ok]
    assert failed.late_ranks == (1,)
    assert incident(launch).cause is Cause.HANG
    print(text_of(launch))
    assert "its process is stopped (state T)" in text_of(launch)
