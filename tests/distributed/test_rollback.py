"""Instabilities met by real ranks: rolled back in the process, and nothing of it left behind."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slurm_forge as forge
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.rank import RequestProposal
from slurm_forge.journal import RunState, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.recovery.monitor.loss_anomaly import (
    Anomaly,
    announce,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.loop.batch_loop import BatchLoop
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.trust import Trust
from tests.distributed.launches import Launch, launched, new_run
from tests.jobs import Samples, build

pytestmark = [pytest.mark.distributed]

BATCH = 16
#: Good after two steps, so that there is something to go back to.
SAVES = {"every_steps": 4, "good_after_steps": 2}
HALVED = {"do": "rollback", "times": 2, "lr_scale": 0.5, "ramp_steps": 4}
LADDER = [{"do": "skip", "times": 3}, HALVED]


def program(
    steps: int, *, rewindable: bool = True, seen: Callable[..., Any] | None = None
) -> Callable[[forge.Run], None]:
    """Train, in a loop that can be rewound or in one that is said not to be."""

    def train(run: forge.Run) -> None:
        model = build(run)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        if not rewindable:
            mock.patch.object(BatchLoop, "_rewindable", False).start()

        def compute_loss(micro: Any) -> torch.Tensor:
            return F.cross_entropy(model(micro[0]), micro[1])

        lines = []
        for batch in run.batches(
            Samples(), global_batch_size=BATCH, micro_batch_size=4, until=forge.Steps(steps)
        ):
            if seen is not None:
                seen(run, model)
            lines.append([run.step_number, batch.first, [i for _, i in batch.sample_ids]])
            run.train_step(batch, compute_loss, max_norm=1.0)
        (run.directory / f"steps-{run.launch}-{run.rank}").write_text(json.dumps(lines))
        weights = b"".join(p.detach().numpy().tobytes() for p in whole(model))
        (run.directory / f"weights-{run.rank}").write_text(hashlib.sha256(weights).hexdigest())

    return train


def whole(model: nn.Module) -> list[torch.Tensor]:
    """The parameters, or this rank's part of them."""
    return [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]


def run_of(folder: Path, **spec: Any) -> RunDirectory:
    spec = {"checkpoint": SAVES, "recovery": {"non_finite": LADDER, "loss_spike": LADDER}, **spec}
    return new_run(folder, **spec)


def state_of(run: RunDirectory) -> RunState:
    return fold(read_journal(run)[0])


def events(run: RunDirectory, kind: type) -> list[Any]:
    return [r.event for r in read_journal(run)[0] if isinstance(r.event, kind)]


def weights(run: RunDirectory, ranks: int) -> set[str]:
    return {(run.path / f"weights-{rank}").read_text() for rank in range(ranks)}


def steps(run: RunDirectory, launch: int = 1, rank: int = 0) -> list[Any]:
    return json.loads((run.path / f"steps-{launch}-{rank}").read_text())


def finished(launch: Launch, count: int) -> None:
    assert [(told.outcome, told.step) for told in launch.told] == [
        (RankOutcome.FINISHED, count)
    ] * launch.hub.world_size


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(1, "plain"), (2, "ddp"), (2, "fsdp2")], ids=["plain", "ddp", "fsdp2"]
)
@pytest.mark.core
def test_three_bad_steps_are_rolled_back_without_a_restart(
    tmp_path: Path, ranks: int, parallel: str
) -> None:
    run = run_of(tmp_path, args={"parallel": parallel}, inject=[f"nan@9x3:rank{ranks - 1}"])
    with launched(run, ranks, program(16)) as launch:
        pass
    finished(launch, 16)
    state = state_of(run)
    (attempt,) = state.attempts
    assert len(attempt.launches) == 1
    assert [i.cause for _, i in attempt.incidents] == [Cause.NON_FINITE]
    assert [d.action for _, d in attempt.decisions] == [Action.ROLLBACK]
    assert [(r.step, r.checkpoint is not None) for r in events(run, ev.Resumed)] == [
        (0, False),
        (4, True),
    ], "8 was not known to be good yet"
    assert [number for number, *_ in steps(run)] == [*range(12), *range(4, 16)]
    # The same samples as before, since no window was to be left out.
    again = steps(run)
    assert again[4:12] == again[12:20]
    (recovered,) = events(run, ev.Recovered)
    assert (recovered.incident_id, recovered.steps) == (attempt.incidents[0][1].id, 8)
    (_, decision) = attempt.decisions[0]
    assert "fine when computed again" in decision.reason
    assert decision.changes == (), "a fault that does not come again is not the learning rate's"
    assert all(c.trust is not Trust.SUSPECT for c in state.known if c.name.step > 12)


@pytest.mark.core
def test_a_rollback_in_the_process_is_the_same_as_one_by_a_new_launch(tmp_path: Path) -> None:
    """Bit by bit: weights, moments, schedule, samples, dropout."""
    found = {}
    for name, rewindable in (("inside", True), ("outside", False)):
        run = run_of(tmp_path, name=name, inject=["nan@9x3:rank0"])
        body = program(16, rewindable=rewindable)
        with launched(run, 2, body) as launch:
            pass
        if not rewindable:
            assert {told.outcome for told in launch.told} == {RankOutcome.GIVEN_UP}
            assert launch.decision is not None
            assert launch.decision.action is Action.ROLLBACK
            # Decided by rank 0, carried out by whoever conducts, and charged once.
            assert len(state_of(run).attempts[0].decisions) == 1
            assert [use.times for use in state_of(run).spent] == [1]
            with launched(run, 2, body) as launch:
                pass
        finished(launch, 16)
        found[name] = (digest(run.path), weights(run, 2))
    assert found["inside"] == found["outside"]


def test_everything_is_loaded_where_it_was(tmp_path: Path) -> None:
    """What torch.compile and CUDA graphs have seen stays where it is."""
    places: list[tuple[int, ...]] = []

    def seen(run: forge.Run, model: nn.Module) -> None:
        places.append(tuple(p.data_ptr() for p in model.parameters()))
        (run.directory / "places").write_text(str(len(set(places))))

    run = run_of(tmp_path, inject=["nan@9x3"])
    with launched(run, 1, program(14, seen=seen)) as launch:
        pass
    finished(launch, 14)
    assert len(events(run, ev.Resumed)) == 2
    assert (run.path / "places").read_text() == "1"


def test_a_poisoned_window_is_left_out_and_every_other_sample_is_trained_on(
    tmp_path: Path,
) -> None:
    first, last = 9 * BATCH, 21 * BATCH  # twelve batches
    run = run_of(
        tmp_path,
        inject=[f"nan:samples={first}-{last - 1}"],
        recovery={},  # as it comes
    )
    with launched(run, 2, program(60)) as launch:
        pass
    finished(launch, 60)
    state = state_of(run)
    assert all(d.action is Action.ROLLBACK for _, d in state.attempts[0].decisions)
    assert len(state.plan.skipped) == 1
    (window,) = state.plan.skipped
    assert window.first <= first and window.stop >= last, "what was poisoned is left out"
    assert window.stop - window.first <= 5 * (last - first), "and not much more"
    kept: dict[int, int] = {}
    for number, position, _ in steps(run):
        kept[number] = position
    assert [kept[n] for n in range(60)] == [
        position
        for position in range(0, 1000 * BATCH, BATCH)
        if not window.first <= position < window.stop
    ][:60]


def test_what_stays_bad_is_held_and_nothing_bad_is_good(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        inject=["nan@9x1000:always"],
        recovery={"non_finite": [{"do": "skip", "times": 2}, {**HALVED, "times": 2}]},
    )
    with launched(run, 2, program(40)) as launch:
        pass
    assert launch.decision is not None
    assert launch.decision.action is Action.HOLD
    actions = [d.action for _, d in state_of(run).attempts[0].decisions]
    assert actions == [Action.ROLLBACK, Action.ROLLBACK, Action.HOLD]
    assert all(c.trust is not Trust.GOOD for c in state_of(run).known if c.name.step > 9)


def test_a_hook_can_decide_and_is_asked_on_rank_0_only(tmp_path: Path) -> None:
    from slurm_forge.vocabulary.decision import Decision
    from slurm_forge.vocabulary.plan import RecoveryPlan

    inner = program(14)

    def train(run: forge.Run) -> None:
        @run.on("on_instability")
        def decide(incident: Any) -> Decision:
            (run.directory / f"asked-{run.rank}").touch()
            return Decision(
                incident_id=incident.id,
                cause=incident.cause,
                action=Action.SKIP,
                reason="known to pass",
                plan=RecoveryPlan(),
            )

        inner(run)

    run = run_of(tmp_path, inject=["nan@5x4:always"])
    with launched(run, 2, train) as launch:
        pass
    finished(launch, 14)
    assert [path.name for path in run.path.glob("asked-*")] == ["asked-0"]
    (_, decision), *_ = state_of(run).attempts[0].decisions
    assert "known to pass" in decision.reason


def test_a_loss_that_stays_high_is_rolled_back_at_a_step_that_all_agree_on(tmp_path: Path) -> None:
    first, last = 60 * BATCH, 70 * BATCH
    run = run_of(
        tmp_path,
        checkpoint={**SAVES, "every_steps": 10},
        inject=[f"spike:samples={first}-{last - 1}:factor=100"],
        recovery={},
    )
    with launched(run, 2, program(110)) as launch:
        pass
    finished(launch, 110)
    state = state_of(run)
    assert {i.cause for _, i in state.attempts[0].incidents} == {Cause.LOSS_SPIKE}
    assert all(d.action is Action.ROLLBACK for _, d in state.attempts[0].decisions)
    assert steps(run, rank=0) and [s[:2] for s in steps(run, rank=0)] == [
        s[:2] for s in steps(run, rank=1)
    ]
    assert len(weights(run, 2)) == 1
    assert any(w.first <= first < w.stop for w in state.plan.skipped)


def test_what_corrupts_the_state_itself_is_found_by_the_next_save(tmp_path: Path) -> None:
    """Weights and losses stay finite for ever: the second moment of one element is infinite."""
    run = run_of(tmp_path, inject=["corrupt@9:rank0:adam_v:inf"])
    with launched(run, 2, program(24)) as launch:
        pass
    finished(launch, 24)
    (_, incident), *_ = state_of(run).attempts[0].incidents
    assert incident.cause is Cause.NON_FINITE
    assert "exp_avg_sq" in incident.evidence[0].text
    bad = [c for c in events(run, ev.CheckpointCommitted) if c.findings]
    # The live copy is looked at beside the write, so that the save before may see it already.
    assert bad[0].step in (8, 12)
    newest = max(state_of(run).known, key=lambda each: each.name)
    assert newest.name.step == 24 and newest.trust is not Trust.SUSPECT


def test_what_is_proposed_while_a_batch_is_out_waits_for_its_step(tmp_path: Path) -> None:
    """Else that batch would be trained on in the place of another one, after the rollback."""
    inner = program(24)

    def train(run: forge.Run) -> None:
        original = run._batch_loop.batches

        def batches(asked: Any) -> Any:
            for batch in original(asked):
                if run.step_number == 13 and run._boundaries.rollbacks == 0:
                    with run.phase("eval"):
                        if run.rank == 0:
                            run._member.send(
                                RequestProposal(kind=RequestKind.RECOVER, reason=reason)
                            )
                        while not run._member.pending:
                            time.sleep(0.001)
                        run.poll()
                yield batch

        with mock.patch.object(run._batch_loop, "batches", batches):
            inner(run)

    reason = announce(Anomaly(Cause.LOSS_SPIKE, 11, 13, "the loss is 9, 2 was usual"))
    run = run_of(tmp_path)
    with launched(run, 2, train) as launch:
        pass
    finished(launch, 24)
    assert [r.step for r in events(run, ev.Resumed)] == [0, 8]
    numbers = [number for number, *_ in steps(run)]
    assert numbers == [*range(14), *range(8, 24)]
    skipped = state_of(run).plan.skipped
    assert skipped == ()
    assert all(first == number * BATCH for number, first, _ in steps(run))


def test_a_loss_that_is_nan_with_finite_gradients_is_noticed(tmp_path: Path) -> None:
    """A mean over no targets at all: no gradient norm tells of it, on any rank."""

    def train(run: forge.Run) -> None:
        model = build(run)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run.register(model=model, optimizer=optimizer)

        def compute_loss(micro: Any) -> torch.Tensor:
            nothing = (
                run.rank == 1 and 12 <= run.step_number < 20 and run._boundaries.rollbacks == 0
            )
            targets = torch.full_like(micro[1], -100) if nothing else micro[1]
            return F.cross_entropy(model(micro[0]), targets)

        for batch in run.batches(Samples(), global_batch_size=BATCH, until=forge.Steps(24)):
            run.train_step(batch, compute_loss, max_norm=1.0)

    run = run_of(tmp_path)
    with launched(run, 2, train) as launch:
        pass
    finished(launch, 24)
    (_, incident), *_ = state_of(run).attempts[0].incidents
    assert incident.cause is Cause.NON_FINITE
    assert "the loss of rank 1 was nan in 3 steps in a row" in incident.evidence[0].text
    assert incident.onset == 13
