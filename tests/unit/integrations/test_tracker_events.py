"""Incidents in experiment trackers: in their offline modes, where they are installed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations.tracker_events import (
    TrackerEvent,
    record_incidents,
    tracker_events,
)
from slurm_forge.integrations.trackers import wandb_arguments
from slurm_forge.journal import JournalWriter, read_journal
from slurm_forge.journal.events import DecisionTaken, IncidentSeen
from slurm_forge.run_directory import RunDirectory, claim_attempt
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Change, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.unit.integrations.test_trackers import Tracked


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.at(tmp_path / "run")
    directory.path.mkdir(mode=0o700)
    claim_attempt(directory, job="1", restart_count=0, host="h", pid=1, nodes=(), time=0.0)
    befalls(directory, 1, 36, Change("lr_scale", "1", "0.5"))
    return directory


def befalls(directory: RunDirectory, number: int, step: int, *changes: Change) -> None:
    """An incident of the launch ``number``, and the decision about it."""
    incident = Incident(
        id=f"1.{number}",
        cause=Cause.NON_FINITE,
        confidence=Confidence.CERTAIN,
        evidence=(Evidence("all ranks", "the gradient norm is nan"),),
        step=step,
    )
    decision = Decision(
        incident_id=incident.id,
        cause=incident.cause,
        action=Action.ROLLBACK,
        reason="non_finite: rollback (to step 30); next: look at the data",
        plan=RecoveryPlan(),
        changes=changes,
    )
    writer = JournalWriter(directory, attempt=1, writer="supervisor", launch=number)
    writer.advance_clock(read_journal(directory)[0])
    writer.write(IncidentSeen(incident=incident))
    writer.write(DecisionTaken(decision=decision))
    writer.close()


TEXT = "non_finite at step 36 (the gradient norm is nan): rollback (to step 30); lr_scale 1 to 0.5"


def test_an_incident_is_one_line(run: RunDirectory) -> None:
    (event,) = tracker_events(read_journal(run)[0])
    assert (event.id, event.step, event.text, event.lr_scale) == ("1.1", 36, TEXT, 0.5)


def test_what_is_no_tracker_is_refused(run: RunDirectory) -> None:
    with pytest.raises(UnsupportedError, match=r"can't write to a builtins\.list"):
        record_incidents(Tracked(run.path), [])


def test_mlflow_has_them_as_tags(run: RunDirectory) -> None:
    tags: dict[str, str] = {}
    record_incidents(Tracked(run.path), SimpleNamespace(set_tags=tags.update, active_run=None))
    assert tags == {"slurm_forge.incident.1.1": TEXT}


def test_wandb_has_each_once(run: RunDirectory) -> None:
    points: list[dict[str, Any]] = []
    wandb = SimpleNamespace(summary={}, define_metric=lambda *_, **__: None, log=points.append)
    for _ in range(2):
        record_incidents(Tracked(run.path), wandb)
    befalls(run, 2, 50)
    assert len(record_incidents(Tracked(run.path), wandb)) == 2
    assert points == [
        {"slurm_forge/step": 36, "slurm_forge/incident": 1, "slurm_forge/lr_scale": 0.5},
        {"slurm_forge/step": 50, "slurm_forge/incident": 1},
    ]
    assert wandb.summary["slurm_forge/incident_1_1"] == TEXT


@pytest.mark.slow
def test_real_tensorboard(run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    for purge in (None, 31):  # the second start hides what the first has written behind step 30
        with SummaryWriter(str(tmp_path / "tb"), purge_step=purge) as writer:
            record_incidents(Tracked(run.path), writer)
    shown = EventAccumulator(str(tmp_path / "tb"))
    shown.Reload()
    texts = shown.Tensors("slurm_forge/incidents/text_summary")
    # A text is not hidden: the same one is shown once more.
    assert {(each.step, each.tensor_proto.string_val[0].decode()) for each in texts} == {(36, TEXT)}
    scales = shown.Scalars("slurm_forge/lr_scale")
    assert [(each.step, each.value) for each in scales] == [(36, 0.5)]


@pytest.mark.slow
def test_real_mlflow(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    with mlflow.start_run() as begun:
        record_incidents(Tracked(run.path), mlflow)
    befalls(run, 2, 50)
    with mlflow.start_run(run_id=begun.info.run_id):
        record_incidents(Tracked(run.path), mlflow)
    tags = mlflow.get_run(begun.info.run_id).data.tags
    assert tags["slurm_forge.incident.1.1"] == TEXT
    assert tags["slurm_forge.incident.1.2"].startswith("non_finite at step 50")


@pytest.mark.slow
def test_real_wandb_offline(run: RunDirectory, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    tracked = Tracked(run.path)
    for _ in range(2):
        begun = wandb.init(
            project="p", mode="offline", dir=str(tmp_path), **wandb_arguments(tracked)
        )
        (event,) = record_incidents(tracked, begun)
        assert isinstance(event, TrackerEvent)
        assert begun.id == wandb_arguments(tracked)["id"]
        assert json.loads(json.dumps(dict(begun.summary)))["slurm_forge/incident_1_1"] == TEXT
        begun.finish()
