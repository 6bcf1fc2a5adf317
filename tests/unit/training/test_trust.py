"""Which checkpoints of a run are trusted, resumed from, kept, and not even begun."""

from __future__ import annotations

import errno
import math
import shutil
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from slurm_forge.checkpoint.write import save as save_module
from slurm_forge.errors import CheckpointMissingError
from slurm_forge.journal import JournalWriter, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.store import room as room_module
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.training.instability.skip_tracker import LaunchGivenUp
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident
from slurm_forge.vocabulary.position import Position
from tests.unit.training.test_run import RequestKind, batches, lab, train

__all__ = ["lab"]

EACH = {"every_steps": 1, "good_after_steps": 3, "keep_last": 100}


def trusts(made) -> dict[int, str]:
    records, _ = read_journal(made.directory)
    return {each.name.step: each.trust.value for each in fold(records).known}


def on_disk(made) -> list[int]:
    return sorted(int(path.name[5:13]) for path in made.directory.checkpoints.glob("step-*"))


def resumed_at(made) -> int:
    run, _ = made.start()
    adam(run)
    run.restore()
    return run.step_number


# -- earning trust -------------------------------------------------------------------------------


def test_a_checkpoint_is_good_after_enough_healthy_steps(lab):
    made = lab(checkpoint=EACH)
    run, _ = made.start()
    train(run, adam(run), 6)
    assert (
        trusts(made)
        == {1: "good", 2: "good", 3: "written", 4: "written", 5: "written"} | {6: "written"}
        or trusts(made)[1] == "good"
    )
    judged = [(e.name[5:13], e.step) for e in made.events(ev.CheckpointJudged)]
    assert judged == [("00000001", 4), ("00000002", 5), ("00000003", 6)]


def test_a_bad_step_begins_the_count_anew(lab):
    made = lab(
        checkpoint={**EACH, "every_steps": 2}, recovery={"non_finite": [{"do": "skip", "times": 3}]}
    )
    run, _ = made.start()
    train(run, adam(run), 9, bad=(3,))
    judged = [(int(e.name[5:13]), e.step) for e in made.events(ev.CheckpointJudged)]
    assert judged == [(2, 7), (6, 9)], "the fourth step, behind 2, was skipped"
    assert trusts(made)[4] == "suspect", "its last step was skipped"


def test_what_was_resumed_from_is_verified_and_then_good(lab):
    made = lab(checkpoint={**EACH, "every_steps": 4})
    run, _ = made.start(due={Position(4): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, adam(run), 9)
    assert trusts(made) == {4: "written"}
    run, _ = made.start()
    train(run, adam(run), 6)
    assert trusts(made) == {4: "verified"}
    run, _ = made.start()
    train(run, adam(run), 8)
    assert trusts(made)[4] == "good"


# -- what is not healthy --------------------------------------------------------------------------


def adam(run, *, lr: float = 1e-30) -> torch.nn.Linear:
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1)
    run.register(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=lr))
    return model


def test_a_huge_gradient_never_reaches_the_second_moment(lab):
    made = lab(checkpoint={**EACH, "every_steps": 5})
    run, _ = made.start()
    model = adam(run)
    for batch in batches(run, 6):
        factor = 1e25 if run.step_number == 3 else 1.0
        loss = run.train_step(batch, lambda micro, f=factor: model(micro).square().mean() * f)
        assert torch.isfinite(loss), "the loss does not show it"
    assert [event.step for event in made.events(ev.StepSkipped)] == [4]
    (event,) = made.events(ev.CheckpointCommitted)
    assert event.findings == ()


def poisons():
    """Each value in each place; the short run has each place once, and each value."""
    values = (math.nan, math.inf, -math.inf)
    for number, where in enumerate(("weight", "exp_avg", "exp_avg_sq", "buffer")):
        for value in values:
            marks = () if value is values[number % 3] else pytest.mark.slow
            yield pytest.param(where, value, marks=marks)


@pytest.mark.parametrize(("where", "value"), list(poisons()))
def test_a_poisoned_state_is_suspect_and_never_resumed_from(lab, where: str, value: float):
    made = lab(checkpoint={**EACH, "every_steps": 2, "good_after_steps": 0}, recovery={})
    run, _ = made.start()
    model = adam(run)
    model.register_buffer("seen", torch.zeros(3))
    optimizer = next(iter(run._registry.optimizers.values()))

    def poison() -> None:
        state = optimizer.state[model.weight]
        target = {"weight": model.weight.data, "buffer": model.seen, **state}[where]
        target.view(-1)[0] = value

    for batch in batches(run, 4):
        run.train_step(batch, lambda micro: model(micro).square().mean())
    poison()
    run.save()
    last = made.events(ev.CheckpointCommitted)[-1]
    assert last.findings
    assert where in " ".join(last.findings) or where == "buffer"
    run, _ = made.start()
    model = adam(run)
    model.register_buffer("seen", torch.zeros(3))
    run.restore()
    assert run.step_number in (2, 4)
    assert torch.isfinite(model.weight).all()
    assert torch.isfinite(model.seen).all()


def test_a_mask_of_infinities_is_no_poison(lab):
    made = lab(checkpoint={**EACH, "every_steps": 2})
    run, _ = made.start()
    model = adam(run)
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    train(run, model, 5)
    assert all(event.findings == () for event in made.events(ev.CheckpointCommitted))


def test_a_loss_far_off_makes_the_checkpoint_suspect(lab):
    made = lab(checkpoint={**EACH, "every_steps": 12})
    run, _ = made.start()
    model = adam(run)
    for batch in batches(run, 12):
        factor = 1e30 if run.step_number == 11 else 1.0
        loss = run.train_step(batch, lambda micro, f=factor: (model(micro) * 0 + f).mean())
        assert torch.isfinite(loss)
    (event,) = made.events(ev.CheckpointCommitted)
    assert "the loss is 1e+30" in event.findings[0]


# -- resuming -------------------------------------------------------------------------------------


def test_after_an_instability_the_newest_good_one_is_resumed_from(lab):
    made = lab(checkpoint={**EACH, "every_steps": 2}, recovery={"non_finite": []})
    run, _ = made.start()
    with pytest.raises(LaunchGivenUp):
        train(run, adam(run), 20, bad=(9, 10, 11, 12, 13))
    assert trusts(made)[6] == "good"
    assert on_disk(made)[-1] >= 8
    incident = Incident(
        id="1.1", cause=Cause.NON_FINITE, confidence=Confidence.CERTAIN, step=run.step_number
    )
    journal = JournalWriter(made.directory, attempt=1, writer="supervisor", launch=1)
    journal.write(ev.AttemptStarted(job="1", restart_count=0, nodes=(), host="h", via="t"))
    journal.write(ev.IncidentSeen(incident=incident))
    journal.close()
    assert resumed_at(made) == 6
    passed_over = {event.name[5:13]: event.reason for event in made.events(ev.CheckpointRejected)}
    assert "not known to be good yet" in passed_over["00000008"]


def test_where_all_are_suspect_the_run_is_held_rather_than_started_over(lab):
    made = lab(checkpoint={**EACH, "every_steps": 5})
    run, _ = made.start()
    model = adam(run)
    train(run, model, 4)
    model.weight.data[:] = math.nan
    run.save()
    run, _ = made.start()
    adam(run)
    with pytest.raises(CheckpointMissingError):
        run.restore()


# -- keeping --------------------------------------------------------------------------------------


def scored(run, model, steps: int, scores: dict[int, float]) -> None:
    for batch in batches(run, steps):
        if run.due("eval", every=2):
            with run.phase("eval"):
                run.log(score=scores[run.step_number])
        run.train_step(batch, lambda micro: model(micro).square().mean())


def test_the_best_one_by_a_metric_is_saved_when_it_is_found_and_stays(lab):
    best = {"keep_best": {"metric": "score", "mode": "max"}, "keep_last": 1}
    made = lab(checkpoint={**EACH, "every_steps": 3, "good_after_steps": 1000, **best})
    run, _ = made.start()
    scored(run, adam(run), 13, {2: 1.0, 4: 7.0, 6: 2.0, 8: 7.0, 10: 6.0, 12: 5.0})
    reasons = dict(made.saved())
    assert (reasons[2], reasons[4]) == ("best score", "best score")
    assert 10 not in reasons, "it was not better"
    assert 4 in on_disk(made)
    assert on_disk(made)[-1] == 12
    measured = [(int(e.name[5:13]), e.value) for e in made.events(ev.CheckpointMeasured)]
    assert measured == [(2, 1.0), (4, 7.0)]
    # The next launch knows what the best one was.
    run, _ = made.start()
    scored(run, adam(run), 17, {12: 5.0, 14: 6.9, 16: 7.5})
    assert dict(made.saved())[16] == "best score"
    assert 14 not in dict(made.saved())
    assert {16} <= set(on_disk(made))
    assert 4 not in on_disk(made)


def test_an_evaluation_without_the_metric_is_told_once(lab):
    made = lab(checkpoint={**EACH, "keep_best": {"metric": "accuracy", "mode": "max"}})
    run, _ = made.start()
    scored(run, adam(run), 7, {2: 1.0, 4: 1.0, 6: 1.0})
    (note,) = made.events(ev.Note)
    assert "'accuracy'" in note.text


def test_the_first_of_every_so_many_steps_stay_for_good(lab):
    made = lab(checkpoint={**EACH, "keep_every_steps": 4, "keep_last": 2, "good_after_steps": 1})
    run, _ = made.start()
    train(run, adam(run), 14)
    assert on_disk(made) == [1, 4, 8, 12, 13, 14]
    gone = {int(name[5:13]) for event in made.events(ev.CheckpointsPruned) for name in event.names}
    assert gone == {2, 3, 5, 6, 7, 9, 10, 11}
    assert set(trusts(made)) == set(on_disk(made))


# -- room and time --------------------------------------------------------------------------------


class Disk:
    """What statvfs says of a disk that the checkpoints of a run fill."""

    def __init__(self, made, monkeypatch: pytest.MonkeyPatch, *, places: float) -> None:
        self.made, self.places = made, places
        self.asked_files = 0
        monkeypatch.setattr(room_module.os, "statvfs", self)

    def __call__(self, path) -> SimpleNamespace:
        per_save = 64 << 20
        free = int((self.places - len(on_disk(self.made))) * per_save) + (64 << 20)
        return SimpleNamespace(
            f_bavail=max(0, free), f_frsize=1, f_blocks=1 << 40, f_favail=10**6, f_files=10**7
        )


def test_on_a_full_disk_old_ones_make_room_and_training_goes_on(lab, monkeypatch):
    made = lab(checkpoint=EACH)
    Disk(made, monkeypatch, places=4.9)
    run, _ = made.start()
    train(run, adam(run), 10)
    assert [step for step, _ in made.saved()] == list(range(1, 11)), "every save had room"
    assert any("to make room" in event.reason for event in made.events(ev.CheckpointsPruned))
    assert len(on_disk(made)) >= 2


class Quota:
    """So many checkpoints, of which statvfs knows nothing: the write of one more fails."""

    def __init__(self, made, monkeypatch: pytest.MonkeyPatch, *, places: int) -> None:
        real = save_module.write_shard_file

        def write(*given, **options):
            if len(on_disk(made)) >= places:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            return real(*given, **options)

        monkeypatch.setattr(save_module, "write_shard_file", write)


THREE = {"keep_last": 3, "good_after_steps": 1}


def test_under_a_quota_old_ones_make_room_and_no_save_is_lost(lab, monkeypatch):
    made = lab(checkpoint={**EACH, **THREE})
    Quota(made, monkeypatch, places=3)
    run, _ = made.start()
    train(run, adam(run), 8)
    assert [step for step, _ in made.saved()] == list(range(1, 9))
    assert on_disk(made) == [6, 7, 8]
    (failed,) = made.events(ev.CheckpointFailed)
    assert failed.step == 4, "from then on room was made beforehand"
    assert "Disk quota exceeded" in failed.reason
    assert any("no space or quota" in event.reason for event in made.events(ev.CheckpointsPruned))


def test_under_a_quota_what_did_not_fit_in_the_background_makes_room_for_the_next(lab, monkeypatch):
    made = lab(checkpoint={**EACH, **THREE, "background": True})
    Quota(made, monkeypatch, places=3)
    run, _ = made.start()
    train(run, adam(run), 8)
    run.finish()
    assert [step for step, _ in made.saved()] == [1, 2, 3, 5, 6, 7, 8]
    assert on_disk(made) == [6, 7, 8]


@pytest.mark.parametrize("seconds_left", [None, 30.0])
def test_under_a_quota_the_last_save_makes_room_for_itself(lab, monkeypatch, seconds_left):
    made = lab(checkpoint={**EACH, **THREE})
    run, _ = made.start()
    train(run, adam(run), 3)
    Quota(made, monkeypatch, places=3)
    due = {} if seconds_left is None else {Position(4): RequestKind.STOP}
    made.spec["checkpoint"]["every_steps"] = 100
    run, channel = made.start(due=due)
    channel.seconds_left = seconds_left
    model = adam(run)
    if seconds_left is None:
        train(run, model, 5)
        assert run.finish() == 5
        assert on_disk(made) == [2, 3, 5]
    else:
        with pytest.raises(RunStopped):
            train(run, model, 5)
        assert channel.said[-1].checkpoint.startswith("step-00000004")
        assert on_disk(made) == [2, 3, 4]


def test_where_nothing_may_go_what_did_not_fit_is_not_tried_twice(lab, monkeypatch):
    made = lab(checkpoint={**EACH, **THREE})
    Quota(made, monkeypatch, places=2)
    run, _ = made.start()
    train(run, adam(run), 5)
    assert [event.step for event in made.events(ev.CheckpointFailed)] == [3, 4, 5]
    assert on_disk(made) == [1, 2]


def test_what_must_stay_stays_however_full_the_disk_is(lab, monkeypatch):
    made = lab(checkpoint=EACH)
    disk = Disk(made, monkeypatch, places=3.5)
    run, _ = made.start()
    train(run, adam(run), 5)
    there = on_disk(made)
    disk.places = 0.5
    train(run, run._registry.models["model"], 9)
    assert len(on_disk(made)) >= 2
    assert set(on_disk(made)) <= set(there)
    failed = made.events(ev.CheckpointFailed)
    assert failed
    assert "no room for a checkpoint" in failed[0].reason
    assert run.step_number == 9


def test_a_save_that_cannot_be_through_in_time_is_not_begun(lab, monkeypatch):
    made = lab(checkpoint={**EACH, "every_steps": 2})
    run, channel = made.start(due={Position(5): RequestKind.STOP})
    model = adam(run)
    for batch in batches(run, 4):
        run.train_step(batch, lambda micro: model(micro).square().mean())
    catalog = run._saver.catalog
    # As if the disk took many minutes for each of them.
    records = catalog._records
    records.checkpoints = tuple(replace(each, seconds=6000.0) for each in records.checkpoints)
    channel.seconds_left = 40.0
    with pytest.raises(RunStopped):
        train(run, model, 9)
    (failed,) = made.events(ev.CheckpointFailed)
    assert "s at least" in failed.reason
    assert "40 s are left" in failed.reason
    assert channel.said[-1].checkpoint.startswith("step-00000004"), "and the one before counts"
    assert resumed_at(made) == 4


def test_a_save_that_fits_is_begun(lab):
    made = lab(checkpoint={**EACH, "every_steps": 100})
    run, channel = made.start(due={Position(5): RequestKind.STOP})
    channel.seconds_left = timedelta(seconds=30).total_seconds()
    with pytest.raises(RunStopped):
        train(run, adam(run), 9)
    assert [step for step, _ in made.saved()] == [5]
    assert made.events(ev.Resumed)[0].step == 0


def test_a_newest_checkpoint_that_is_gone_is_told_of(lab):
    made = lab(checkpoint={**EACH, "every_steps": 2})
    run, _ = made.start()
    train(run, adam(run), 8)
    (newest,) = made.directory.checkpoints.glob("step-00000008.*")
    shutil.rmtree(newest)
    assert resumed_at(made) == 6
    (gone,) = made.events(ev.CheckpointRejected)
    assert gone.name == newest.name
    assert gone.reason.startswith("it was saved, but its folder is gone: step-00000006.")
    assert gone.reason.endswith(" was used instead")
