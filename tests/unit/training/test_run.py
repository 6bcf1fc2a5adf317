"""The run object of a single process: what it saves when, skips, counts, restores and refuses."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import slurm_forge as forge
from slurm_forge.checkpoint.write import save as save_module
from slurm_forge.control import LaunchBrief
from slurm_forge.control.messages.hub import Request, RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import (
    FunctionReturned,
    RankFinished,
    RankStopped,
    RecoveryNeeded,
    SaveCommitted,
    SaveFailed,
)
from slurm_forge.errors import CheckpointError, CheckpointMissingError, UnsupportedError, UsageError
from slurm_forge.journal import JournalWriter, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.training.core import rng
from slurm_forge.training.core.process_group import ProcessGroups
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.instability.skip_tracker import LaunchGivenUp
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.job_change import JobChange
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.position import Position

LENGTH, BATCH = 10, 4


@dataclass
class Channel:
    """Nobody at the other end; ``due`` says what is asked for where."""

    due: dict[Position, RequestKind] = field(default_factory=dict)
    said: list[Message] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    pending: bool = True
    begun: int = 0
    saves: list[Message] = field(default_factory=list)
    #: Nobody has said when the launch will be ended.
    seconds_left: float | None = None

    def advance(
        self, position: Position, path: str, *, entering: bool = False, phase: str = ""
    ) -> tuple[Request, ...]:
        if phase:
            self.enter(phase)
        kind = self.due.get(position)
        return () if kind is None else (Request(id=1, kind=kind, reason="asked"),)

    def enter(self, phase: str, *, started: bool = True) -> None:
        self.phases.append(phase)

    def begin(self, step: int) -> None:
        self.last_save_step = step

    def send(self, message: Message) -> None:
        about_saves = isinstance(message, SaveCommitted | SaveFailed)
        (self.saves if about_saves else self.said).append(message)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


@dataclass
class Lab:
    """Makes one attempt of a run after the other, each in what could be a new process."""

    directory: RunDirectory
    spec: dict[str, Any]
    attempt: int = 0
    plan: RecoveryPlan = field(default_factory=RecoveryPlan)
    committed: int | None = None
    changes: tuple[JobChange, ...] | None = None

    def start(self, **due: Any) -> tuple[forge.Run, Channel]:
        self.attempt += 1
        rng.derive(0, 0, 0)  # as every process of a run begins
        spec = {"name": "run", "entry": "any.thing:train", **self.spec}
        journal = JournalWriter(self.directory, attempt=self.attempt, writer="rank0", launch=1)
        context = RankContext(
            rank=0,
            local_rank=0,
            world_size=1,
            host="here",
            brief=LaunchBrief(
                attempt=self.attempt, launch=1, plan=self.plan, committed_step=self.committed
            ),
            directory=self.directory,
            spec=job_from_mapping(spec),
            changes=self.changes,
        )
        channel = Channel(**due)
        run = forge.Run(
            context,
            device=torch.device("cpu"),
            groups=ProcessGroups(),
            member=channel,  # type: ignore[arg-type]
            journal=journal,
        )
        return run, channel

    def events(self, kind: type) -> list[Any]:
        records, damage = read_journal(self.directory)
        assert not damage
        return [record.event for record in records if isinstance(record.event, kind)]

    def saved(self) -> list[tuple[int, str]]:
        return [(event.step, event.reason) for event in self.events(ev.CheckpointCommitted)]


@pytest.fixture
def lab(tmp_path: Path) -> Callable[..., Lab]:
    def make(**spec: Any) -> Lab:
        directory = RunDirectory.at(tmp_path / "run")
        directory.create(b"")
        # What is saved when is easier to tell where training waits for it.
        checkpoint = {"background": False, **spec.pop("checkpoint", {})}
        return Lab(directory, {"checkpoint": checkpoint, **spec})

    return make


def prepared(run: forge.Run, *, lr: float = 0.1, **more: Any) -> nn.Linear:
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), **more)
    return model


def batches(run: forge.Run, steps: int, **given: Any) -> Iterator[Any]:
    return run.batches(Numbers(), global_batch_size=BATCH, until=forge.Steps(steps), **given)


def train(run: forge.Run, model: nn.Module, steps: int, *, bad: tuple[int, ...] = ()) -> None:
    for batch in batches(run, steps):
        factor = float("nan") if run.step_number in bad else 1.0
        run.train_step(batch, lambda micro, factor=factor: model(micro).square().mean() * factor)


# -- what is saved, and when ----------------------------------------------------------------------


def test_a_checkpoint_at_the_end_of_every_epoch(lab: Callable[..., Lab]) -> None:
    """Ten samples, four a step: epochs end in steps 3, 5, 8 and 10."""
    made = lab(checkpoint={"every_epochs": 2, "keep_last": 9})
    run, _ = made.start()
    train(run, prepared(run), 6)
    assert made.saved() == [(5, "every_epochs")]
    assert [event.epoch for event in made.events(ev.CheckpointCommitted)] == [2]
    made.committed = 5
    run, _ = made.start()
    train(run, prepared(run), 11)
    assert made.saved()[1:] == [(10, "every_epochs")], "not again for what was over before"


def test_saves_by_steps_and_at_the_end(lab):
    made = lab(checkpoint={"every_steps": 2})
    run, channel = made.start()
    train(run, prepared(run), 5)
    assert run.finish() == 5
    assert made.saved() == [(2, "every_steps"), (4, "every_steps"), (5, "final")]
    assert channel.said == [FunctionReturned(step=5), RankFinished(step=5)]


class SlowDisk:
    """Shards are written when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.error: OSError | None = None
        real = save_module.write_shard_file

        def write(*given: Any, **options: Any) -> Any:
            self.reached.set()
            assert self.go_on.wait(20)
            if self.error is not None:
                raise self.error
            return real(*given, **options)

        monkeypatch.setattr(save_module, "write_shard_file", write)


def test_training_goes_on_while_a_checkpoint_is_written(lab, monkeypatch):
    made, disk = lab(checkpoint={"every_steps": 2, "background": True}), SlowDisk(monkeypatch)
    run, _ = made.start()
    model = prepared(run)
    seen = []
    run.on("on_save")(lambda step, name: seen.append((step, run.step_number)))
    for batch in batches(run, 4):
        if run.step_number == 3:
            assert disk.reached.wait(20)
            assert made.saved() == []
            weights = model.weight.detach().clone()
            disk.go_on.set()
        run.train_step(batch, lambda micro: model(micro).square().mean())
    run.finish()
    assert made.saved() == [(2, "every_steps"), (4, "every_steps")]
    assert [step for step, _ in seen] == [2, 4]
    assert not torch.equal(weights, model.weight), "nothing was learned meanwhile"


def test_a_save_that_fails_in_the_background_costs_a_line_and_not_the_run(lab, monkeypatch):
    made, disk = lab(checkpoint={"every_steps": 2, "background": True}), SlowDisk(monkeypatch)
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    disk.go_on.set()
    run, _ = made.start()
    model = prepared(run)
    for batch in batches(run, 5):
        if run.step_number == 3:
            while not made.events(ev.CheckpointFailed):  # the timeout of every test ends this
                time.sleep(0.01)
            disk.error = None
        run.train_step(batch, lambda micro: model(micro).square().mean())
    run.finish()
    assert made.saved() == [(4, "every_steps"), (5, "final")]
    (failed,) = made.events(ev.CheckpointFailed)
    assert failed.step == 2
    assert "No space left" in failed.reason


def test_a_stop_waits_for_the_save_in_flight_and_does_not_repeat_it(lab, monkeypatch):
    made = lab(checkpoint={"every_steps": 2, "background": True})
    disk = SlowDisk(monkeypatch)
    run, channel = made.start(due={Position(2): RequestKind.STOP})
    model = prepared(run)
    threading.Timer(0.2, disk.go_on.set).start()
    with pytest.raises(RunStopped):
        train(run, model, 5)
    assert [step for step, _ in made.saved()] == [2]
    (stopped,) = channel.said
    assert isinstance(stopped, RankStopped)
    assert stopped.checkpoint is not None


def test_what_is_being_written_is_waited_for_before_the_launch_is_given_up(lab, monkeypatch):
    """It may well be what the next launch is resumed from."""
    made, disk = lab(checkpoint={"every_steps": 2, "background": True}), SlowDisk(monkeypatch)
    run, channel = made.start()
    threading.Timer(0.3, disk.go_on.set).start()
    with pytest.raises(LaunchGivenUp):
        train(run, prepared(run), 9, bad=(1, 2, 3))
    assert made.saved() == [(2, "every_steps")]
    assert isinstance(channel.said[-1], RecoveryNeeded)


def test_an_error_of_the_program_lets_it_land_too(lab, monkeypatch):
    made, disk = lab(checkpoint={"every_steps": 2, "background": True}), SlowDisk(monkeypatch)
    run, _ = made.start()
    model = prepared(run)
    for batch in batches(run, 3):
        if run.step_number == 2:
            break  # as an exception leaves the loop
        run.train_step(batch, lambda micro: model(micro).square().mean())
    threading.Timer(0.3, disk.go_on.set).start()
    run.wait_for_save()
    assert made.saved() == [(2, "every_steps")]


def test_damaged_checkpoints_ahead_cost_none_of_the_good_ones(lab):
    made = lab(checkpoint={"every_steps": 2, "keep_last": 2, "good_after_steps": 0})
    run, _ = made.start()
    train(run, prepared(run), 8)
    run.finish()
    store = CheckpointStore(made.directory.checkpoints, "run")
    assert [name.step for name in store.candidates()] == [8, 6]
    (shards,) = store.path(store.candidates()[0]).glob("rank-*.data")
    data = bytearray(shards.read_bytes())
    data[0] ^= 1
    shards.write_bytes(data)
    made.committed = 8
    run, _ = made.start()
    model = prepared(run)
    for _ in batches(run, 7):
        assert run.step_number == 6, "not the older one"
        run.train_step(_, lambda micro: model(micro).square().mean())
    run.finish()
    assert [name.step for name in store.candidates()] == [8, 7, 6]
    run, _ = made.start()
    prepared(run)
    assert run.restore()
    assert run.step_number == 7


def test_what_is_saved_already_is_not_saved_again_at_the_end(lab):
    made = lab(checkpoint={"every_steps": 2})
    run, _ = made.start()
    train(run, prepared(run), 4)
    run.finish()
    assert made.saved() == [(2, "every_steps"), (4, "every_steps")]


def test_a_run_that_was_finished_already_saves_nothing(lab):
    made = lab()
    run, _ = made.start()
    train(run, prepared(run), 3)
    run.finish()
    run, _ = made.start()
    train(run, prepared(run), 3)
    assert run.finish() == 3
    assert made.saved() == [(3, "final")]
    assert made.events(ev.Resumed)[-1].step == 3


class Failing:
    """An object that can't be saved at these steps."""

    def __init__(self, run: forge.Run, *steps: int) -> None:
        self._run, self._steps = run, steps

    def state_dict(self) -> dict[str, Any]:
        if self._run.step_number in self._steps:
            raise OSError(28, "No space left on device")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_save_that_fails_does_not_end_the_training(lab):
    made = lab(checkpoint={"every_steps": 2})
    run, _ = made.start()
    train(run, prepared(run, failing=Failing(run, 2)), 4)
    run.finish()
    assert made.saved() == [(4, "every_steps")]
    (failed,) = made.events(ev.CheckpointFailed)
    assert failed.step == 2
    assert "No space left" in failed.reason


def test_a_run_whose_result_could_not_be_saved_is_not_finished(lab):
    made = lab()
    run, channel = made.start()
    train(run, prepared(run, failing=Failing(run, 3)), 3)
    with pytest.raises(CheckpointError, match="all 3 steps are done"):
        run.finish()
    assert not [said for said in channel.said if isinstance(said, RankFinished)]


def test_a_stop_saves_and_says_where(lab):
    made = lab()
    run, channel = made.start(due={Position(2): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, prepared(run), 5)
    (name,) = CheckpointStore(made.directory.checkpoints, "run").candidates()
    assert channel.said == [RankStopped(step=2, checkpoint=str(name))]
    assert made.saved() == [(2, "stop")]


def test_a_stop_where_everything_is_saved_names_that_checkpoint(lab):
    made = lab(checkpoint={"every_steps": 2})
    run, channel = made.start(due={Position(2, 1): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, prepared(run), 5)
    assert made.saved() == [(2, "every_steps")]
    assert channel.said[0].checkpoint.startswith("step-00000002.")


def test_a_stop_that_could_not_be_saved_names_the_checkpoint_before_it(lab):
    made = lab(checkpoint={"every_steps": 2})
    run, channel = made.start(due={Position(3): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, prepared(run, failing=Failing(run, 3)), 5)
    assert channel.said[0].step == 3
    assert channel.said[0].checkpoint.startswith("step-00000002.")


def test_a_save_that_was_asked_for_changes_nothing_else(lab):
    made = lab()
    run, _ = made.start(due={Position(2, 1, 1): RequestKind.SAVE, Position(3): RequestKind.SAVE})
    train(run, prepared(run), 4)
    assert made.saved()[-1] == (3, "asked")


# -- resuming -------------------------------------------------------------------------------------


def test_an_interrupted_run_is_the_uninterrupted_one(lab, tmp_path):
    whole = Lab(RunDirectory.at(tmp_path / "whole"), {})
    whole.directory.create(b"")
    run, _ = whole.start()
    expected = prepared(run)
    train(run, expected, 7)
    made = lab()
    for stop in (2, 3, 6):
        run, _ = made.start(due={Position(stop): RequestKind.STOP})
        with pytest.raises(RunStopped):
            train(run, prepared(run), 7)
    run, _ = made.start()
    model = prepared(run)
    train(run, model, 7)
    assert run.step_number == 7
    assert torch.equal(model.weight, expected.weight)
    assert [event.step for event in made.events(ev.Resumed)] == [0, 2, 3, 6]


def test_plain_values_come_back(lab):
    made = lab()
    run, _ = made.start(due={Position(2): RequestKind.STOP})
    run.extra["best"] = {"loss": 0.25, "steps": [1, 2]}
    with pytest.raises(RunStopped):
        train(run, prepared(run), 5)
    run, _ = made.start()
    kept = run.extra
    prepared(run)
    assert run.restore()
    assert kept == {"best": {"loss": 0.25, "steps": [1, 2]}}, "not in place"
    assert run.restore(), "asked twice, it forgets"


def test_without_a_checkpoint_that_history_knows_of_the_run_does_not_start_over(lab):
    made = lab()
    made.committed = 40
    run, _ = made.start()
    prepared(run)
    with pytest.raises(CheckpointMissingError, match="step 40"):
        run.restore()


def test_registering_after_the_restore_is_refused(lab):
    run, _ = lab().start()
    prepared(run)
    run.restore()
    with pytest.raises(UnsupportedError, match="after training has begun"):
        run.register(late=nn.Linear(1, 1))


# -- phases ---------------------------------------------------------------------------------------


def draws() -> tuple[float, float]:
    return random.random(), float(torch.rand(1))


@pytest.mark.parametrize("broken", [False, True])
def test_an_evaluation_may_draw_as_it_likes(lab, broken):
    run, _ = lab().start()
    prepared(run)
    run.restore()
    run.poll()
    state = torch.get_rng_state(), random.getstate()
    expected = draws()
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    try:
        with run.phase("eval"):
            draws()
            if broken:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert draws() == expected


def evaluating(run: forge.Run, model: nn.Module, steps: int) -> list[int]:
    done = []
    for batch in batches(run, steps):
        if run.due("eval", every=2):
            with run.phase("eval"):
                for _ in range(3):
                    draws()
                    run.poll()
            done.append(run.step_number)
        run.train_step(batch, lambda micro: model(micro).square().mean() + draws()[1])
    return done


def test_an_evaluation_that_was_cut_off_is_run_again_and_changes_nothing(lab, tmp_path):
    whole = Lab(RunDirectory.at(tmp_path / "whole"), {})
    whole.directory.create(b"")
    run, _ = whole.start()
    assert evaluating(run, prepared(run), 6) == [2, 4]
    expected = draws()
    made = lab()
    run, _ = made.start(due={Position(2, 2, 2): RequestKind.STOP})
    with pytest.raises(RunStopped):
        evaluating(run, prepared(run), 6)
    run, _ = made.start(due={Position(3): RequestKind.STOP})
    with pytest.raises(RunStopped):
        evaluating(run, prepared(run), 6)
    run, _ = made.start()
    assert evaluating(run, prepared(run), 6) == [4], "one that was complete is run again"
    assert draws() == expected
    assert [event.step for event in made.events(ev.Resumed)] == [0, 2, 3]


def test_a_save_in_an_evaluation_keeps_the_random_state_of_the_training(lab):
    made = lab()
    run, channel = made.start(due={Position(2, 2, 2): RequestKind.SAVE})
    evaluating(run, prepared(run), 4)
    expected = draws()
    assert made.saved() == [(2, "asked")]
    saving = channel.phases.index("save", channel.phases.index("eval"))
    assert channel.phases[saving - 1 : saving + 2] == ["eval", "save", "eval"]
    run, _ = made.start()
    assert evaluating(run, prepared(run), 4) == [2]
    assert draws() == expected


def test_due_is_every_so_many_steps_and_never_before_the_first(lab):
    run, _ = lab().start()
    model = prepared(run)
    due = []
    for batch in batches(run, 5):
        if run.due("eval", every=2):
            due.append(run.step_number)
            with run.phase("eval"):
                pass
            assert not run.due("eval", every=2)
        run.train_step(batch, lambda micro: model(micro).mean())
    assert due == [2, 4]


# -- steps ----------------------------------------------------------------------------------------


def test_samples_come_in_the_run_s_order_across_epochs(lab):
    run, _ = lab(seed=5).start()
    model = prepared(run)
    seen = []
    for batch in batches(run, 5):
        run.train_step(batch, lambda micro: model(micro).mean())
        seen += batch.sample_ids
    epochs = [[index for epoch, index in seen if epoch == number] for number in (0, 1)]
    assert [sorted(indices) for indices in epochs] == [list(range(LENGTH))] * 2
    assert epochs[0] != epochs[1]


def test_a_step_that_only_measures_does_not_count(lab):
    run, _ = lab().start()
    model = prepared(run)
    for batch in batches(run, 1):
        with run.step(batch) as step:
            for micro in step.micro_batches():
                model(micro).mean()
        assert run.step_number == 0
        run.train_step(batch, lambda micro: model(micro).mean())
    assert run.step_number == 1


def test_the_plan_makes_the_micro_batch_smaller_and_the_gradient_the_same(lab, tmp_path):
    models = []
    for plan in (RecoveryPlan(), RecoveryPlan(micro_batch=1)):
        made = Lab(RunDirectory.at(tmp_path / f"run-{plan.micro_batch}"), {}, plan=plan)
        made.directory.create(b"")
        run, _ = made.start()
        model = prepared(run, lr=0.001)
        for batch in batches(run, 2, micro_batch_size=2):
            assert batch.micro_sizes == ((2, 2) if plan.micro_batch is None else (1, 1, 1, 1))
            run.train_step(batch, lambda micro, model=model: model(micro).square().mean())
        assert run.micro_batch == (plan.micro_batch or 2)
        models.append(model)
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_the_plan_scales_the_learning_rate_and_not_the_optimizer(lab, tmp_path):
    moved = []
    for plan in (RecoveryPlan(), RecoveryPlan(lr_factor=0.5, lr_from_step=0, lr_ramp_steps=0)):
        made = Lab(RunDirectory.at(tmp_path / f"run-{plan.lr_factor}"), {}, plan=plan)
        made.directory.create(b"")
        run, _ = made.start()
        model = prepared(run)
        before = model.weight.detach().clone()
        train(run, model, 1)
        moved.append(model.weight.detach() - before)
    torch.testing.assert_close(moved[0] * 0.5, moved[1])


def test_a_learning_rate_schedule_goes_on_over_skipped_steps(lab):
    run, _ = lab().start()
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    train(run, model, 3, bad=(1,))
    assert optimizer.param_groups[0]["lr"] == 0.125


# -- gradients that are not finite ----------------------------------------------------------------

POLICY = {"non_finite": [{"do": "skip", "times": 2}, {"do": "rollback", "times": 1}]}


def test_a_bad_step_is_skipped_and_its_samples_are_gone(lab):
    made = lab(recovery=POLICY)
    run, _ = made.start()
    model = prepared(run)
    train(run, model, 4, bad=(1, 3))
    assert run.step_number == 4
    assert torch.isfinite(model.weight).all()
    skipped = made.events(ev.StepSkipped)
    assert [(s.step, s.first_sample, s.samples, s.consecutive) for s in skipped] == [
        (2, BATCH, BATCH, 1),
        (4, 3 * BATCH, BATCH, 1),
    ]


def test_too_many_in_a_row_give_the_launch_up_without_a_save(lab):
    made = lab(recovery={"non_finite": [{"do": "skip", "times": 2}]}, checkpoint={"every_steps": 1})
    run, channel = made.start()
    with pytest.raises(LaunchGivenUp):
        train(run, prepared(run), 9, bad=(2, 3, 4))
    (said,) = [each for each in channel.said if isinstance(each, RecoveryNeeded)]
    assert (said.cause, said.step) == (Cause.NON_FINITE.value, 4)
    assert made.saved()[-1][0] == 3, "what came after the last good step was saved"
    (decided,) = made.events(ev.DecisionTaken)
    assert decided.decision.incident_id == said.decided
    assert decided.decision.action is Action.HOLD


def test_a_hook_may_let_it_go_on(lab):
    made = lab(recovery=POLICY)
    run, _ = made.start()
    asked = []

    @run.on("on_instability")
    def decide(incident: Any) -> Decision:
        asked.append(incident)
        return Decision(
            incident_id=incident.id,
            cause=incident.cause,
            action=Action.SKIP,
            reason="known",
            plan=RecoveryPlan(),
        )

    train(run, prepared(run), 6, bad=(1, 2, 3, 4))
    assert run.step_number == 6
    assert [incident.step for incident in asked] == [3, 5]


# -- epochs ---------------------------------------------------------------------------------------


def test_every_epoch_is_written_down_once_also_over_an_interruption(lab):
    made = lab()
    steps_of_two = 2 * LENGTH // BATCH
    run, _ = made.start(due={Position(steps_of_two - 1): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, prepared(run, lr=0.0), 1000)
    run, _ = made.start()
    train(run, prepared(run, lr=0.0), -(-3 * LENGTH // BATCH))
    ended = made.events(ev.EpochEnded)
    assert [event.epoch for event in ended] == [0, 1, 2]
    assert {event.samples for event in ended} == {LENGTH}
    assert [event.step for event in ended] == [-(-(n + 1) * LENGTH // BATCH) for n in range(3)]


# -- hooks and figures ----------------------------------------------------------------------------


def test_hooks_are_called_in_order(lab):
    made = lab(checkpoint={"every_steps": 2})
    told: list[tuple[Any, ...]] = []

    def listen(run: forge.Run) -> None:
        for name in ("train_begin", "resume", "step_end", "eval_end", "save", "stop", "train_end"):
            run.on(f"on_{name}")(lambda known=name, **given: told.append((known, given["step"])))

    run, _ = made.start(due={Position(3): RequestKind.STOP})
    listen(run)
    with pytest.raises(RunStopped):
        evaluating(run, prepared(run), 9)
    assert told == [
        ("train_begin", 0),
        ("step_end", 1),
        ("step_end", 2),
        ("save", 2),
        ("eval_end", 2),
        ("step_end", 3),
        ("save", 3),
        ("stop", 3),
    ]
    told.clear()
    run, _ = made.start()
    listen(run)
    evaluating(run, prepared(run), 4)
    run.finish()
    assert told == [
        ("resume", 3),
        ("train_begin", 3),
        ("step_end", 4),
        ("save", 4),
        ("train_end", 4),
    ]


def test_a_hook_that_does_not_exist_is_a_mistake(lab):
    run, _ = lab().start()
    with pytest.raises(ValueError, match="on_step_end"):
        run.on("on_stepend")(lambda **given: None)


def test_only_hooks_that_all_ranks_come_to_may_run_on_all(lab):
    run, _ = lab().start()
    run.on("on_resume", all_ranks=True)(lambda **given: None)
    with pytest.raises(ValueError, match="on_save runs on rank 0 only"):
        run.on("on_save", all_ranks=True)(lambda **given: None)


def test_a_validation_at_a_resume_changes_no_random_number(lab):
    made = lab()
    run, _ = made.start(due={Position(2): RequestKind.STOP})
    with pytest.raises(RunStopped):
        train(run, prepared(run), 9)
    drawn = []
    for numbers in (0, 5):
        run, _ = made.start()
        prepared(run)
        run.on("on_resume")(lambda count=numbers, **given: torch.rand(count))
        assert run.restore()
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_figures_are_written_down_and_those_that_are_none_are_not(lab):
    made = lab()
    run, _ = made.start()
    model = prepared(run)
    for batch in batches(run, 1):
        run.log(loss=torch.tensor(0.5), bad=float("nan"), steps=3)
        run.train_step(batch, lambda micro: model(micro).mean())
    run.finish()
    (logged,) = made.events(ev.Logged)
    assert logged.values == {"loss": 0.5, "steps": 3.0}
    assert made.events(ev.Progress)[-1].consumed == BATCH


def test_somebody_else_s_loop_is_stopped_at_its_polls(lab):
    made = lab()
    run, channel = made.start(due={Position(2): RequestKind.STOP})
    model = prepared(run)
    assert not run.restore()
    (optimizer,) = run.registry.optimizers.values()
    batch = Batch(
        step=0,
        consumed=0,
        micro_batches=(torch.ones(2, 3),),
        micro_sizes=(2,),
        sample_ids=((0, 0), (0, 1)),
    )
    with pytest.raises(RunStopped):
        for _ in range(5):
            run.poll()
            with run.step(batch) as step:
                for micro in step.micro_batches():
                    step.backward(model(micro).mean())
                step.apply(optimizer)
    assert channel.said[0].step == 2


def test_a_batch_that_is_passed_over_is_an_error_and_no_endless_loop(lab):
    run, _ = lab().start()
    prepared(run)
    with pytest.raises(UnsupportedError, match="no step was applied"):
        for _ in batches(run, 1):
            pass


def test_a_step_without_any_optimizer_is_an_error(lab):
    run, _ = lab().start()
    run.register(model=torch.nn.Linear(1, 1))
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedError, match="no optimizer"):
        for batch in batches(run, 1):
            run.train_step(batch, lambda micro: (micro * weight).mean())


# -- what run.batches() is given -------------------------------------------------------------------

GIVEN: dict[str, Any] = {
    "dataset": Numbers(), "global_batch_size": 4, "until": forge.Steps(3),
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"until": 60},
            "steps or epochs are meant\n  Write until=forge.Steps(60),",
        ),
        (
            {"until": "60"},
            "whether steps or epochs are meant\n  Write until=forge.Steps(",
        ),
        ({"until": 60.0}, "Write until=forge.Steps("),
        ({"until": True}, "Write until=forge.Steps(1000)"),
        ({"until": None}, "until=None) does not say whether steps or epochs are meant"),
        ({"until": forge.Steps}, "does not say whether steps or epochs are meant"),
        ({"until": forge.Steps(0)}, "until=forge.Steps(0)) is not the length of a run"),
        ({"until": forge.Steps(-3)}, "a whole number of 1 or more"),
        ({"until": forge.Steps("60")}, "until=forge.Steps('60'))"),  # type: ignore[arg-type]
        ({"until": forge.Epochs(0)}, "until=forge.Epochs(0))"),
        ({"until": forge.Epochs(1.5)}, "until=forge.Epochs(1.5))"),  # type: ignore[arg-type]
        ({"global_batch_size": 0}, "global_batch_size=0) is not a whole number of 1 or more"),
        ({"global_batch_size": -1}, "global_batch_size=-1)"),
        ({"global_batch_size": "8"}, "global_batch_size='8')"),
        ({"global_batch_size": 8.0}, "global_batch_size=8.0)"),
        ({"global_batch_size": None}, "Set global_batch_size to the samples of one optimizer step"),
        ({"global_batch_size": True}, "global_batch_size=True)"),
        ({"micro_batch_size": 0}, "micro_batch_size=0) is not a whole number of 1 or more"),
        ({"micro_batch_size": -2}, "micro_batch_size=-2)"),
        ({"micro_batch_size": "2"}, "micro_batch_size='2')"),
        ({"num_workers": -1}, "num_workers=-1) is not a whole number of 0 or more"),
        ({"num_workers": None}, "num_workers=None)"),
        ({"collate_fn": "stack"}, "collate_fn='stack') is not a function"),
        ({"dataset": None}, "the dataset is None"),
        ({"dataset": 7}, "int can't return a single sample by its index"),
        ({"dataset": iter([1, 2])}, "__len__ and __getitem__"),
    ],
)
def test_what_batches_can_not_be_made_of_is_refused_where_it_is_written(lab, given, says):
    run, _ = lab().start()
    prepared(run)
    with pytest.raises(UsageError) as caught:
        run.batches(**{**GIVEN, **given})  # not one batch is asked for
    assert says in str(caught.value)


def test_numbers_of_other_libraries_count_as_well(lab):
    run, _ = lab().start()
    prepared(run)
    numbers = {
        "global_batch_size": np.int64(4),
        "micro_batch_size": torch.tensor(2),
        "until": forge.Steps(np.int64(3)),  # type: ignore[arg-type]
    }
    batch = next(run.batches(**{**GIVEN, **numbers}))
    assert batch.micro_sizes == (2, 2)
