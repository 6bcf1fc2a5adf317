"""Where recovery in the process meets something else: the end of a run, a stop, an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.journal import RunState, RunStatus, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.launch.attempt.attempt import (
    StartRefusal,
    begin,
)
from slurm_forge.recovery.monitor.loss_anomaly import (
    Anomaly,
    announce,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.loop.batch_loop import BatchLoop
from slurm_forge.training.loop.instability_handler import InstabilityHandler
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.plan import SampleWindow
from slurm_forge.vocabulary.trust import Trust
from tests.distributed.launches import Gate, Launch, launched, new_run
from tests.jobs import FEATURES, Net, Samples, build

pytestmark = [pytest.mark.distributed]

BATCH = 16
#: Good after two steps, so that there is something to go back to.
SAVES = {"every_steps": 4, "good_after_steps": 2}
HALVED = {"do": "rollback", "times": 2, "lr_scale": 0.5, "ramp_steps": 4}
LADDER = [{"do": "skip", "times": 3}, HALVED]

Loss = Callable[[Any], torch.Tensor]


def run_of(folder: Path, **spec: Any) -> RunDirectory:
    spec = {"checkpoint": SAVES, "recovery": {"non_finite": LADDER, "loss_spike": LADDER}, **spec}
    return new_run(folder, **spec)


def loss_of(model: nn.Module) -> Loss:
    return lambda micro: F.cross_entropy(model(micro[0]), micro[1])


def built(run: forge.Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.register(model=model, optimizer=optimizer)
    return model, optimizer


def state_of(run: RunDirectory) -> RunState:
    return fold(read_journal(run)[0])


def resumed_at(run: RunDirectory) -> list[int]:
    return [r.event.step for r in read_journal(run)[0] if isinstance(r.event, ev.Resumed)]


def ended(launch: Launch, outcome: RankOutcome, step: int) -> None:
    assert [(told.outcome, told.step) for told in launch.told] == [
        (outcome, step)
    ] * launch.hub.world_size


# -- the end of a run --------------------------------------------------------------------------


def test_a_loss_that_goes_bad_in_the_very_last_steps_is_rolled_back_before_the_end(
    tmp_path: Path,
) -> None:
    """Nobody would hear of it on the channel any more, and a finished run is not looked at."""

    def train(run: forge.Run) -> None:
        model, _ = built(run)
        for batch in run.batches(Samples(), global_batch_size=8, until=forge.Steps(80)):
            run.train_step(batch, loss_of(model), max_norm=1.0)

    run = run_of(
        tmp_path,
        checkpoint={"every_steps": 20, "good_after_steps": 2},
        inject=["spike@77x3:factor=100"],
        recovery={"loss_spike": [HALVED]},
    )
    with launched(run, 2, train) as launch:
        pass
    ended(launch, RankOutcome.FINISHED, 80)
    state = state_of(run)
    (attempt,) = state.attempts
    assert len(attempt.launches) == 1
    assert [(i.cause, i.onset, i.step) for _, i in attempt.incidents] == [
        (Cause.LOSS_SPIKE, 78, 80)
    ]
    assert [d.action for _, d in attempt.decisions] == [Action.ROLLBACK]
    assert len(resumed_at(run)) == 2
    newest = max(state.known, key=lambda each: each.name)
    assert newest.name.step == 80 and newest.trust is not Trust.SUSPECT


def test_a_loop_that_is_left_and_kept_does_not_hide_what_its_last_steps_were(
    tmp_path: Path,
) -> None:
    """It can't be rewound any more: the program is past it."""
    kept = []

    def train(run: forge.Run) -> None:
        model, _ = built(run)
        loop = run.batches(Samples(), global_batch_size=BATCH, until=forge.Steps(100))
        kept.append(loop)
        for batch in loop:
            run.train_step(batch, loss_of(model))
            if run.step_number == 15:
                break

    run = run_of(tmp_path, inject=["nan@12x3"])
    with launched(run, 1, train) as launch:
        pass
    ended(launch, RankOutcome.GIVEN_UP, 15)
    assert not run.is_done()
    assert launch.decision is not None
    assert (launch.decision.cause, launch.decision.action) == (Cause.NON_FINITE, Action.ROLLBACK)
    assert len(state_of(run).attempts[0].decisions) == 1


def test_an_epoch_whose_last_batches_are_left_out_ends_in_the_same_launch(tmp_path: Path) -> None:
    """It ends at an earlier step than it had come to: no rank is ahead of another for that."""

    def train(run: forge.Run) -> None:
        model, _ = built(run)
        for batch in run.batches(
            Samples(12 * BATCH), global_batch_size=BATCH, until=forge.Epochs(1)
        ):
            run.train_step(batch, loss_of(model))

    first, last = 9 * BATCH, 12 * BATCH
    run = run_of(
        tmp_path,
        checkpoint={"every_steps": 9, "good_after_steps": 2},
        inject=[f"nan:samples={first}-{last - 1}"],
        recovery={
            "non_finite": [
                {"do": "skip", "times": 3},
                {"do": "rollback", "times": 1, "skip_samples": "window"},
            ]
        },
    )
    with launched(run, 2, train) as launch:
        pass
    assert launch.facts is not None and launch.facts.failures == ()
    ended(launch, RankOutcome.FINISHED, 9)
    assert run.is_done()
    state = state_of(run)
    assert [d.action for _, d in state.attempts[0].decisions] == [Action.ROLLBACK]
    assert state.plan.skipped == (SampleWindow(first, last),)


class Masked(nn.Module):
    """With the mask of an attention, as it is made by many: minus infinity above the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, 10)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(features)
        return out


def test_a_mask_of_minus_infinity_is_no_incident_where_a_launch_takes_no_step(
    tmp_path: Path,
) -> None:
    """Stopped at its last step, and started again."""
    gate = Gate()

    def train(run: forge.Run) -> None:
        model = Masked()
        run.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
        for batch in run.batches(Samples(), global_batch_size=BATCH, until=forge.Steps(6)):
            run.train_step(batch, loss_of(model))
            if run.step_number == 6:
                gate.wait(0)

    run = run_of(tmp_path)
    with launched(run, 1, train) as launch:
        launch.at(gate, 1)
        launch.stop_together()
        gate.open()
    ended(launch, RankOutcome.STOPPED, 6)
    with launched(run, 1, train) as launch:
        pass
    ended(launch, RankOutcome.FINISHED, 6)
    assert state_of(run).attempts[-1].incidents == ()
    assert resumed_at(run) == [0, 6]


# -- a stop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True], ids=["by the stop", "a moment before"])
def test_what_is_saved_at_a_stop_is_suspect_where_a_rollback_was_due(
    tmp_path: Path, before: bool
) -> None:
    gate = Gate()

    def train(run: forge.Run) -> None:
        model, _ = built(run)
        for batch in run.batches(Samples(), global_batch_size=BATCH, until=forge.Steps(14)):
            run.train_step(batch, loss_of(model))
            if (run.attempt, run.step_number) == (1, 10):
                if before:
                    run.save()
                gate.wait(0)

    run = run_of(tmp_path)
    found = announce(Anomaly(Cause.LOSS_SPIKE, 9, 9, "the loss is 9, 2 was usual"))
    with launched(run, 1, train) as launch:
        launch.at(gate, 1)
        asked = launch.hub.request(RequestKind.RECOVER, found)
        launch.until(lambda: not launch.hub.unanswered(asked), "an answer")
        launch.stop_together()
        gate.open()
    ended(launch, RankOutcome.STOPPED, 10)
    (saved,) = [each for each in state_of(run).known if each.name.step == 10]
    assert saved.trust is Trust.SUSPECT
    assert "the loss is 9, 2 was usual" in saved.why
    with launched(run, 1, train) as launch:
        pass
    ended(launch, RankOutcome.FINISHED, 14)
    assert resumed_at(run) == [0, 8]


def test_who_wants_the_run_to_stop_is_heard_after_rank_0_has_decided(tmp_path: Path) -> None:
    gate = Gate()
    give_up = InstabilityHandler._give_up

    def waiting(self: InstabilityHandler, *args: Any, **options: Any) -> Any:
        gate.wait(0)  # the decision is in the journal
        give_up(self, *args, **options)

    def train(run: forge.Run) -> None:
        model, _ = built(run)
        mock.patch.object(BatchLoop, "_rewindable", False).start()
        mock.patch.object(InstabilityHandler, "_give_up", waiting).start()
        for batch in run.batches(Samples(), global_batch_size=BATCH, until=forge.Steps(20)):
            run.train_step(batch, loss_of(model))

    run = run_of(tmp_path, inject=["nan@9x3"])
    with launched(run, 1, train) as launch:
        launch.at(gate, 1)
        (_, decided), *_ = state_of(run).attempts[0].decisions
        assert decided.action is Action.ROLLBACK
        run.stop_file.touch()
        launch.asked_to_stop()
        gate.open()
    ended(launch, RankOutcome.GIVEN_UP, 12)
    assert launch.decision is not None
    assert (launch.decision.cause, launch.decision.action) == (Cause.STOP_REQUESTED, Action.STOP)
    assert state_of(run).status is RunStatus.STOPPED
    assert begin(run, job="2", restart_count=0, nodes=("n",), via="test") is StartRefusal.STOP_FILE


# -- what lies around a rollback ---------------------------------------------------------------


def test_an_evaluation_right_before_a_rollback_leaves_none_of_its_weights(tmp_path: Path) -> None:
    """After a forward without a backward the root of FSDP2 still has its parameters whole."""

    def train(run: forge.Run) -> None:
        model, _ = built(run)
        seen: list[tuple[int, float]] = []

        def compute_loss(micro: Any) -> torch.Tensor:
            loss = F.cross_entropy(model(micro[0]), micro[1])
            seen.append((run.step_number, float(loss)))
            return loss

        for batch in run.batches(Samples(), global_batch_size=BATCH, until=forge.Steps(12)):
            run.train_step(batch, compute_loss)
            if run.step_number == 10 and len(seen) == 10:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.to_local().mul_(100.0)  # training went off
                with run.phase("eval"), torch.no_grad():
                    model.eval()
                    model(torch.ones(4, FEATURES))
                    model.train()
                run._skip_tracker.announced(Anomaly(Cause.LOSS_SPIKE, 9, 10, "made up"))
        (run.directory / f"seen-{run.rank}").write_text(json.dumps(seen))

    # With the learning rate as it was.
    again = {"loss_spike": [{"do": "rollback", "times": 1}]}
    run = run_of(tmp_path, args={"parallel": "fsdp2"}, recovery=again)
    with launched(run, 2, train) as launch:
        pass
    ended(launch, RankOutcome.FINISHED, 12)
    _, back = resumed_at(run)
    assert 0 < back < 10
    for rank in range(2):
        seen = json.loads((run.path / f"seen-{rank}").read_text())
        assert [step for step, _ in seen] == [*range(10), *range(back, 12)]
        assert seen[back:10] == seen[10 : 20 - back], "the same weights, samples and dropout"


def test_a_second_loop_is_not_rewound_into_the_samples_of_the_first(tmp_path: Path) -> None:
    def train(run: forge.Run) -> None:
        model, _ = built(run)
        lines = []
        for name, until in (("first", 6), ("second", 12)):
            for batch in run.batches(Samples(), global_batch_size=BATCH, until=forge.Steps(until)):
                lines.append([name, run.step_number])
                run.train_step(batch, loss_of(model))
        (run.directory / "lines").write_text(json.dumps(lines))

    run = run_of(tmp_path, inject=["nan@7x3"])
    with launched(run, 1, train) as launch:
        pass
    ended(launch, RankOutcome.GIVEN_UP, 10)
    assert launch.decision is not None
    assert launch.decision.action is Action.ROLLBACK
    with launched(run, 1, train) as launch:
        pass
    ended(launch, RankOutcome.FINISHED, 12)
    assert resumed_at(run) == [0, 4]
    assert json.loads((run.path / "lines").read_text()) == [
        *(["first", step] for step in range(4, 6)),
        *(["second", step] for step in range(6, 12)),
    ]


def test_a_weight_that_is_nan_is_found_behind_the_search_of_a_gradient_scaler(
    tmp_path: Path,
) -> None:
    """No sample is to blame for it, and none is left out."""

    def train(run: forge.Run) -> None:
        model = build(run)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        run.register(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            scaler=scaler,
        )
        for batch in run.batches(Samples(), global_batch_size=BATCH, until=forge.Steps(20)):
            run.train_step(batch, loss_of(model))

    run = run_of(
        tmp_path,
        # Not by a save: that would find it, too.
        checkpoint={"every_steps": 6, "good_after_steps": 2},
        inject=["corrupt@7:rank0:weight:nan"],
        recovery={},
    )
    with launched(run, 1, train) as launch:
        pass
    ended(launch, RankOutcome.FINISHED, 20)
    state = state_of(run)
    (_, incident), *more = state.attempts[0].incidents
    assert not more
    assert (incident.cause, incident.onset, incident.step) == (Cause.NON_FINITE, 8, 9)
    assert incident.in_memory
    assert "no other batch would help" in incident.evidence[0].text
    (_, decision) = state.attempts[0].decisions[0]
    assert decision.action is Action.ROLLBACK
    assert state.plan.skipped == ()


@pytest.mark.core
def test_a_hook_that_raises_is_the_programs_error_on_every_rank(tmp_path: Path) -> None:
    def train(run: forge.Run) -> None:
        model, _ = built(run)

        @run.on("on_instability")
        def broken(incident: Any) -> None:
            raise ValueError(f"nobody thought of {incident.cause.value}")

        for batch in run.batches(Samples(), global_batch_size=BATCH, until=forge.Steps(12)):
            run.train_step(batch, loss_of(model))

    run = run_of(tmp_path, inject=["nan@5x3"])
    with launched(run, 2, train) as launch:
        pass
    ended(launch, RankOutcome.FAILED, 8)
    assert launch.decision is not None
    assert launch.decision.cause is Cause.APP_ERROR
    assert launch.facts is not None and launch.facts.failures
    for failure in launch.facts.failures:
        assert failure.text.startswith(
            "HookError: the on_instability hook raised ValueError: nobody thought of non_finite"
        )
    assert [d.cause for _, d in state_of(run).attempts[0].decisions] == [Cause.APP_ERROR]


# -- memory that ran out -----------------------------------------------------------------------


def test_out_of_memory_in_the_backward_of_ddp_is_decided_once_and_outside(tmp_path: Path) -> None:
    """A reducer that was broken off waits for its end for ever: there is no second try with it."""

    def train(run: forge.Run) -> None:
        torch.manual_seed(1)
        inner = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 10))
        model = DistributedDataParallel(inner, bucket_cap_mb=0.001)
        run.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

        def full(gradient: torch.Tensor) -> None:
            if run.step_number == 3 and len(gradient) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. (in the midst of a backward)")

        inner[1].register_forward_hook(lambda *given: given[2].register_hook(full) and None)
        for batch in run.batches(Samples(), global_batch_size=8, until=forge.Steps(6)):
            run.train_step(batch, loss_of(model))

    run = run_of(tmp_path, recovery={})
    with launched(run, 1, train) as launch:
        pass
    ended(launch, RankOutcome.FAILED, 3)
    attempt = state_of(run).attempts[0]
    assert [i.cause for _, i in attempt.incidents] == [Cause.CUDA_OOM]
    assert [(d.action, d.plan.micro_batch) for _, d in attempt.decisions] == [
        (Action.SHRINK_MICRO_BATCH, 4)
    ]
    with launched(run, 1, train) as launch:
        pass
    ended(launch, RankOutcome.FINISHED, 6)


def test_the_dropout_of_a_try_that_failed_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    """The same as with smaller micro-batches from that very step on, bit by bit."""

    def train(run: forge.Run) -> None:
        torch.manual_seed(1)
        model = Net()  # its dropout draws in the forward
        run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []

        def compute_loss(micro: Any) -> torch.Tensor:
            loss = F.cross_entropy(model(micro[0]), micro[1])
            if len(micro[1]) == 4 and run.step_number == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. (with an activation in hand)")
            seen.append([run.step_number, len(micro[1]), float(loss)])
            return loss

        for batch in run.batches(
            Samples(), global_batch_size=8, micro_batch_size=4, until=forge.Steps(4)
        ):
            asked = batch
            if run.name == "planned" and run.step_number == 2:
                asked = run._batch_loop.smaller(batch, 2) or batch
            run.train_step(asked, compute_loss)
        (run.directory / "seen").write_text(json.dumps(seen))

    found = {}
    for name in ("surprised", "planned"):
        run = new_run(tmp_path / name, name)  # apart: what was learned is not told
        with launched(run, 1, train) as launch:
            pass
        ended(launch, RankOutcome.FINISHED, 4)
        found[name] = json.loads((run.path / "seen").read_text())
        actions = [d.action for _, d in state_of(run).attempts[0].decisions]
        assert actions == ([] if name == "planned" else [Action.SHRINK_MICRO_BATCH])
    assert [line[:2] for line in found["planned"]] == (
        [[step, 4] for step in (0, 0, 1, 1)] + [[step, 2] for step in (2, 2, 2, 2, 3, 3, 3, 3)]
    )
    assert found["surprised"] == found["planned"]
