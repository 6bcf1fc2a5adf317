"""The newest checkpoint is deleted by hand: the journal tells of it, and the disk does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.status import take_status
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.report.journals import Scribe


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


def without(facts: RunFacts, step: int) -> RunFacts:
    """As read where every checkpoint but those of ``step`` is on disk."""
    events = [record.event for record in facts.records]
    saved = [each for each in events if isinstance(each, ev.CheckpointCommitted)]
    names = frozenset(CheckpointName.parse(each.name) for each in saved if each.step != step)
    return replace(facts, on_disk=names)


def stopped(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 83)
    scribe.save(83)
    scribe.train(84, 300)
    scribe.save(300)
    scribe.train(301, 369)
    scribe.incident(Cause.USER_CANCELLED, Action.STOP, source="sacct", text="CANCELLED", step=369)
    scribe.end("stop")


def test_a_deleted_checkpoint_is_not_the_newest(scribe: Scribe) -> None:
    stopped(scribe)
    status = take_status(without(scribe.facts(), 300))
    assert status.checkpoint is not None
    assert status.checkpoint.step == 83
    assert any("00000300" in line and "not on disk" in line for line in status.warnings)
    assert explain(without(scribe.facts(), 300)).committed_step == 83
    assert explain(scribe.facts()).committed_step == 300, "where nobody has looked"


def test_without_any_checkpoint_the_run_goes_on_from_the_start(scribe: Scribe) -> None:
    stopped(scribe)
    status = take_status(replace(scribe.facts(), on_disk=frozenset()))
    assert status.checkpoint is None
    assert any("from the start" in line for line in status.next)


def test_saves_that_could_not_be_used_are_not_to_be_made_more_often(scribe: Scribe) -> None:
    stopped(scribe)
    scribe.begin()
    scribe.resume(83)
    scribe.train(84, 400)
    scribe.finish(400)
    story = explain(scribe.facts())
    assert story.repeated_steps == 286
    assert not any("save more often" in line for line in story.next_time)
