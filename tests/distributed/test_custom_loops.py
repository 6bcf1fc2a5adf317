"""Loops that are the program's own, on real ranks: signals, kills and NaN leave no trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import slurm_forge as forge
from slurm_forge.journal import RunState, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.launch.conductor import hang_watchdog
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.trust import Trust
from tests.distributed.launches import Launch, launched, new_run
from tests.jobs import FEATURES, build

pytestmark = [pytest.mark.distributed]

RANKS, STEPS = 2, 14
SAVES = {"every_steps": 4, "good_after_steps": 2, "keep_last": 9}


class Stream:
    """Somebody else's data: an iterator with a position, each rank its own samples."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        number, self.position = self.position, self.position + 1
        generator = torch.Generator().manual_seed(RANKS * number + self.rank)
        features = torch.randn(4, FEATURES, generator=generator)
        return number, features, torch.arange(4) % 10

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def program(way: str, bad: Callable[[forge.Run, int], bool] | None = None) -> Any:
    """``for`` and ``while`` fetch at the top and take the step by hand; ``steps`` is guarded.

    Where ``bad`` says so the loss of a step is NaN.
    """

    def train(run: forge.Run) -> None:
        model = build(run)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        stream = Stream(run.rank)
        run.register(model=model, optimizer=optimizer, stream=stream)
        record = (run.directory / f"seen-{run.rank}-{run.attempt:03d}-{run.launch}").open("a")

        def step(batch: tuple[int, torch.Tensor, torch.Tensor]) -> None:
            number, features, labels = batch
            loss = torch.nn.functional.cross_entropy(model(features), labels)
            if bad is not None and bad(run, number):
                loss = loss * float("nan")
            loss.backward()
            record.write(json.dumps([run.step_number, number]) + "\n")
            record.flush()  # before the boundary, which may be the end of this process
            if way == "steps":
                run.apply(optimizer, max_norm=1.0)
                run.advance(loss=loss, samples=8)
                return
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.advance(loss=loss, grad_norm=norm, samples=8)

        if way == "steps":
            for _ in run.steps(until=forge.Steps(STEPS)):
                step(next(stream))
        else:
            run.restore()
            while run.step_number < STEPS:
                step(next(stream))

    return train


def lived(run: RunDirectory, body: Any) -> list[Launch]:
    """The launches of a run, to its end."""
    launches: list[Launch] = []
    while len(launches) < 6:
        with launched(run, RANKS, body) as launch:
            pass
        launches.append(launch)
        if launch.decision is None:
            return launches
        assert launch.decision.action is not Action.HOLD, launch.decision
    raise AssertionError(f"no end: {[each.decision for each in launches]}")


def trained_on(run: RunDirectory) -> list[dict[int, int]]:
    """For each rank: what the last execution of every step was trained on."""
    found = []
    for rank in range(RANKS):
        steps: dict[int, int] = {}
        for file in sorted(run.path.glob(f"seen-{rank}-*")):
            steps.update(dict(map(json.loads, file.read_text().splitlines())))
        found.append(steps)
    return found


def state_of(run: RunDirectory) -> RunState:
    return fold(read_journal(run)[0])


def events(run: RunDirectory, kind: type) -> list[Any]:
    return [r.event for r in read_journal(run)[0] if isinstance(r.event, kind)]


@pytest.mark.parametrize(
    ("way", "parallel", "faults"),
    [
        ("while", "ddp", ["term@6:rank1", "kill@11:rank0"]),
        ("steps", "fsdp2", ["kill@5:rank1", "term@9:rank0"]),
        pytest.param("while", "fsdp2", ["kill@3:rank0", "term@5:rank1"], marks=pytest.mark.slow),
        pytest.param("steps", "ddp", ["term@0:rank1", "term@13:rank0"], marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_loop_ends_as_an_uninterrupted_one(
    tmp_path: Path, way: str, parallel: str, faults: list[str]
) -> None:
    args = {"parallel": parallel}
    whole = new_run(tmp_path, "whole", checkpoint=SAVES, args=args)
    assert len(lived(whole, program(way))) == 1
    run = new_run(tmp_path, "run", checkpoint=SAVES, args=args, inject=faults)
    launches = lived(run, program(way))
    assert len(launches) == 1 + len(faults)
    assert {told.outcome for told in launches[-1].told} == {RankOutcome.FINISHED}
    assert trained_on(run) == [{step: step for step in range(STEPS)}] * RANKS
    assert digest(run.path) == digest(whole.path)
    stops = {event.step for event in events(run, ev.CheckpointCommitted) if event.reason == "stop"}
    assert len(stops) == sum(fault.startswith("term") for fault in faults)


def test_a_nan_in_a_guarded_loop_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    run = new_run(tmp_path, checkpoint=SAVES, inject=["nan@6"])
    (launch,) = lived(run, program("steps"))
    assert {told.step for told in launch.told} == {STEPS}
    (skipped,) = events(run, ev.StepSkipped)
    assert (skipped.step, skipped.first_sample, skipped.samples) == (7, 48, 8)
    assert state_of(run).attempts[0].incidents == ()


def test_a_nan_that_has_reached_the_weights_is_rolled_back_by_another_launch(
    tmp_path: Path,
) -> None:
    """On one rank: the others have a finite loss, and a norm that is none."""

    def bad(run: forge.Run, number: int) -> bool:
        return (run.attempt, run.rank, number) == (1, 1, 9)

    run = new_run(tmp_path, checkpoint=SAVES)
    first, second = lived(run, program("while", bad))
    assert {told.outcome for told in first.told} == {RankOutcome.GIVEN_UP}
    assert first.decision is not None
    assert first.decision.action is Action.ROLLBACK
    (_, incident), *_ = state_of(run).attempts[0].incidents
    assert (incident.cause, incident.onset) == (Cause.NON_FINITE, 10)
    assert "the loop applied that update itself" in incident.evidence[0].text
    assert [event.step for event in events(run, ev.Resumed)] == [0, 4], "8 was not known as good"
    assert {told.step for told in second.told} == {STEPS}
    assert trained_on(run) == [{step: step for step in range(STEPS)}] * RANKS
    late = [each for each in state_of(run).known if each.name.attempt == 1 and each.name.step > 9]
    assert all(each.trust is Trust.SUSPECT for each in late)
    notes = [event.text for event in events(run, ev.Note) if "run.recovery.lr_scale" in event.text]
    assert len(notes) == (state_of(run).plan.lr_factor != 1.0)


def test_a_rank_that_hangs_in_a_loop_of_its_own_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watchdog, "_BETWEEN_S", 0.6)
    watchdog = {"at_least": "1s", "at_most": "10s"}
    run = new_run(tmp_path, checkpoint=SAVES, watchdog=watchdog, inject=["lock@9:rank1"])
    with launched(run, RANKS, program("while")) as launch:
        launch.until(lambda: events(run, ev.StallSeen), "the stall")
    assert events(run, ev.StallSeen)[0].late_ranks == (1,)
    (_, incident), *_ = state_of(run).attempts[0].incidents
    assert (incident.cause, incident.rank, incident.step) == (Cause.HANG, 1, 9)
