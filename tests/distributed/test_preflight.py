"""Nodes are looked at before a launch: real ranks, real process groups, nodes by name only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

import slurm_forge as forge
from slurm_forge.control.messages.preflight import Check
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import PreflightMeasured
from slurm_forge.launch.conductor import preflight_monitor as hub_side
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.preflight import child as preflight_child
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident
from tests.distributed.launches import Gate, Launch, launched, new_run

NODES = ("n1", "n2", "n3", "n4")


def _train(run: forge.Run) -> None:
    run.finish()


def _measured(run: RunDirectory) -> PreflightMeasured:
    records, _ = read_journal(run)
    (found,) = [r.event for r in records if isinstance(r.event, PreflightMeasured)]
    return found


def _incident(launch: Launch) -> Incident:
    ((_, found),) = launch.attempt.state().attempts[-1].incidents
    return found


@pytest.mark.core
def test_good_nodes_try_one_collective_and_train(tmp_path: Path) -> None:
    run = new_run(tmp_path, preflight={"enabled": True})
    with launched(run, 4, _train, hosts=NODES) as launch:
        pass
    assert [told.outcome.value for told in launch.told] == ["finished"] * 4
    measured = _measured(run)
    assert (measured.ok, measured.hosts, measured.rounds, measured.told) == (True, 4, 1, ())
    assert measured.bytes_per_s
    left = [path.name for path in run.attempt(1).iterdir() if "preflight" in path.name]
    assert left == []


def test_a_single_process_is_looked_at_alone(tmp_path: Path) -> None:
    run = new_run(tmp_path, preflight={"enabled": True})
    with launched(run, 1, _train) as launch:
        pass
    assert launch.told[0].outcome.value == "finished"
    assert _measured(run).rounds == 0


@pytest.mark.parametrize(
    ("fault", "cause", "told"),
    [
        ("bad_node:host=n3", Cause.NODE_FAIL, "cpu computes"),
        pytest.param(
            "bad_link:rank0",
            Cause.NODE_FAIL,
            "no collective with it works",
            marks=pytest.mark.slow,  # each round of it waits for its deadline
        ),
        ("bad_sum:rank2", Cause.NODE_FAIL, "wrong sum"),
    ],
)
def test_a_bad_node_is_named_before_anything_is_trained(
    tmp_path: Path, fault: str, cause: Cause, told: str
) -> None:
    run = new_run(tmp_path, preflight={"enabled": True}, inject=[fault])
    bad = {"host=n3": "n3", "rank0": "n1", "rank2": "n3"}[fault.partition(":")[2]]
    quick = (
        mock.patch.object(hub_side, "_ALL_GLOO_S", 4.0),
        mock.patch.object(hub_side, "_FEW_GLOO_S", 4.0),
    )
    with quick[0], quick[1], launched(run, 4, _train, hosts=NODES) as launch:
        pass
    incident = _incident(launch)
    assert (incident.cause, incident.hosts) == (cause, (bad,))
    assert incident.confidence is Confidence.LIKELY
    assert told in incident.evidence[0].text
    assert _measured(run).bad == (bad,)
    assert not run.is_done()


def test_a_stop_in_the_middle_of_a_look_is_no_verdict(tmp_path: Path) -> None:
    """Slurm signals all processes of the step, those that look at the nodes too."""
    run = new_run(tmp_path, preflight={"enabled": True})
    gate = Gate()

    def look(*_: object, **__: object) -> tuple[Check, ...]:
        gate.wait(os.getpid() % 256)
        return ()

    try:
        with (
            mock.patch.object(preflight_child, "run_checks", look),
            launched(run, 4, _train, hosts=NODES, exits=True) as launch,
        ):
            launch.at(gate, 4)
            begun = time.monotonic()
            launch.kill(2, signal.SIGTERM, everything=True)
    finally:
        gate.close()
    assert launch.gone - begun < 30
    assert len(gate.here) == 4, "somebody had to look again"
    incident = _incident(launch)
    assert (incident.hosts, incident.cause in (Cause.HANG, Cause.NODE_FAIL)) == ((), False)
    records, _ = read_journal(run)
    assert not [r for r in records if isinstance(r.event, PreflightMeasured)]
