"""Nodes are looked at before a launch: real ranks, real process groups, nodes by name only."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import slurm_forge as forge
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import PreflightMeasured
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause
from tests.distributed.launches import launched, new_run


def _train(run: forge.Run) -> None:
    run.finish()


def _measured(run: RunDirectory) -> PreflightMeasured:
    records, _ = read_journal(run)
    (found,) = [r.event for r in records if isinstance(r.event, PreflightMeasured)]
    return found


def test_good_nodes_train_at_once(tmp_path: Path) -> None:
    run = new_run(tmp_path, preflight={"enabled": True})
    with launched(run, 4, _train, nodes=("n1", "n2", "n3", "n4")) as launch:
        pass
    assert [told.outcome.value for told in launch.told] == ["finished"] * 4
    measured = _measured(run)
    assert measured.ok and measured.hosts == 4 and measured.rounds == 1
    assert measured.bytes_per_s
    print(measured)
