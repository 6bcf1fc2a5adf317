"""Recovery inside the process, disturbed at the worst moments: signals, kills, proposals, faults.

The oracle is the same everywhere: the run ends finished, or held with a reason; the ranks of a
launch never part; what a run ends with is finite; nothing suspect was resumed from; and of the
history that survives every sample of the stream was trained on once, but for those left out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import slurm_forge as forge
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.journal import RunState, RunStatus, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import AppendFile
from slurm_forge.journal.fold import in_order
from slurm_forge.recovery.monitor.loss_anomaly import (
    Anomaly,
    announce,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.core.sample_order import (
    SampleOrder,
    Windows,
)
from slurm_forge.training.data.batches import BatchSource
from slurm_forge.training.loop.save_schedule import SaveSchedule
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.trust import Trust
from tests.distributed import launches
from tests.distributed.launches import Gate, Launch, is_alive, launched, new_run
from tests.jobs import Samples, build

pytestmark = [pytest.mark.distributed]

BATCH, LENGTH = 8, 997
#: Not in the background: which checkpoint is good by when must not depend on the disk's pace.
SAVES = {
    "every_steps": 4,
    "every_minutes": None,
    "good_after_steps": 2,
    "keep_last": 99,
    "background": False,
}
HALVED = {"do": "rollback", "times": 2, "lr_scale": 0.5, "ramp_steps": 4}
LADDER = [{"do": "skip", "times": 3}, HALVED]
#: What a stop may take, from the moment the ranks can act to the last process gone.
GRACE_S = 5.0

FINAL = (Action.HOLD, Action.STOP, Action.RAISE)

Body = Callable[[forge.Run], None]


class Loading:
    """Has a state, so that it is called while a checkpoint is loaded."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def state_dict(self) -> dict[str, int]:
        return {"here": 1}

    def load_state_dict(self, _: Any) -> None:
        self._then()


def program(
    steps: int,
    *,
    micro_batch: int | None = None,
    workers: int = 0,
    before: Callable[[forge.Run], None] = lambda run: None,
    loading: Callable[[forge.Run], None] = lambda run: None,
    top: Callable[[forge.Run], None] = lambda run: None,
    until: Any = None,
    length: int = LENGTH,
    data: Any = None,
    spoil: Callable[[forge.Run, torch.Tensor], torch.Tensor] = lambda run, loss: loss,
) -> Body:
    """A training that writes down what it really did: ``top`` at the top of every turn."""

    def train(run: forge.Run) -> None:
        model = build(run)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        pausing = Loading(lambda: loading(run))
        run.register(model=model, optimizer=optimizer, scheduler=scheduler, pausing=pausing)
        before(run)

        def compute_loss(micro: Any) -> torch.Tensor:
            return spoil(run, F.cross_entropy(model(micro[0]), micro[1]))

        name = f"done-{run.attempt:03d}-{run.launch:03d}-{run.rank}.jsonl"
        with (run.directory / name).open("a") as done:
            for batch in run.batches(
                data or Samples(length),
                global_batch_size=BATCH,
                micro_batch_size=micro_batch,
                num_workers=workers,
                until=until or forge.Steps(steps),
            ):
                top(run)
                run.train_step(batch, compute_loss, max_norm=1.0)
                line = [run.step_number - 1, batch.step, [list(one) for one in batch.sample_ids]]
                done.write(json.dumps(line) + "\n")
                done.flush()
        torch.save([part(p) for p in model.parameters()], run.directory / f"end-{run.rank}.pt")

    return train


def part(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def run_of(folder: Path, **spec: Any) -> RunDirectory:
    spec = {"checkpoint": SAVES, "recovery": {"non_finite": LADDER, "loss_spike": LADDER}, **spec}
    return new_run(folder, **spec)


def state_of(run: RunDirectory) -> RunState:
    return fold(read_journal(run)[0])


def events(run: RunDirectory, kind: type) -> list[Any]:
    return [each.event for each in in_order(read_journal(run)[0]) if isinstance(each.event, kind)]


def actions(run: RunDirectory) -> list[Action]:
    return [d.action for attempt in state_of(run).attempts for _, d in attempt.decisions]


# -- the oracle ------------------------------------------------------------------------------


def survived(run: RunDirectory) -> dict[int, list[tuple[int, int]]]:
    """Of each step that counts, the samples of its last execution, over all ranks."""
    launches: dict[str, list[Path]] = {}
    for file in sorted(run.path.glob("done-*.jsonl")):
        launches.setdefault(file.stem[:12], []).append(file)
    kept: dict[int, list[tuple[int, int]]] = {}
    for files in launches.values():
        own: dict[int, list[tuple[int, int]]] = {}
        for file in files:
            mine: dict[int, list[tuple[int, int]]] = {}
            for line in file.read_text().splitlines():
                step, number, samples = json.loads(line)
                assert step == number, f"{file.name}: the batch of step {number} in step {step}"
                mine[step] = [(epoch, index) for epoch, index in samples]
            for step, samples in mine.items():
                own.setdefault(step, []).extend(samples)
        kept.update(own)
    return kept


def check_samples(run: RunDirectory, steps: int, length: int = LENGTH) -> None:
    """Every sample of the stream up to the end, once, but for the windows that are left out."""
    order = SampleOrder(0, length, BATCH)
    without = Windows(state_of(run).plan.skipped)
    kept = survived(run)
    for step in range(steps):
        wanted = order.indices(without.at(step * BATCH), BATCH, without)
        assert sorted(kept[step]) == sorted(wanted), f"the samples of step {step}"


def check_resumes(run: RunDirectory) -> None:
    """Nothing was resumed from that was suspect by then."""
    ordered = list(in_order(read_journal(run)[0]))
    for count, record in enumerate(ordered):
        if isinstance(record.event, ev.Resumed) and record.event.checkpoint is not None:
            name = CheckpointName.parse(record.event.checkpoint)
            assert fold(ordered[:count]).refusal(name) is None, f"resumed from {name}"


def check_launch(launch: Launch) -> None:
    """Ranks that came to an end did so at one step, and left no process behind."""
    ended = [outcome.value for outcome in launch.outcomes if outcome.ok]
    assert len({(told.outcome, told.step) for told in ended}) <= 1, f"apart: {ended}"
    assert not [pid for told in ended for pid in told.children if is_alive(pid)]


def check_finished(run: RunDirectory, steps: int, ranks: int, **given: Any) -> None:
    state = state_of(run)
    assert state.status is RunStatus.FINISHED, state.reason
    check_samples(run, steps, **given)
    check_resumes(run)
    for rank in range(ranks):
        for tensor in torch.load(run.path / f"end-{rank}.pt"):
            assert bool(tensor.isfinite().all()), "what the run ends with"


# -- how a case is made ----------------------------------------------------------------------


class Held:
    """Ranks that are held at a moment of the rollback until the test lets them go."""

    def __init__(self, moment: str) -> None:
        self.moment, self.gate = moment, Gate()
        self.count = 2 if moment == "load" else 1
        self._was = False

    def before(self, run: forge.Run) -> None:
        if self.moment == "decide":
            run.on("on_instability")(lambda incident: self._wait(run))
        if self.moment == "after":
            run.on("on_resume")(lambda **given: self._wait(run))

    def loading(self, run: forge.Run) -> None:
        if self.moment == "load":
            self._wait(run)

    def _wait(self, run: forge.Run) -> None:
        if not self._was:
            self._was = True
            self.gate.wait(run.rank)


def once_at(step: int, gate: Gate) -> Callable[[forge.Run], None]:
    """For ``top``: wait at the gate when that step comes for the first time."""
    been: list[int] = []

    def top(run: forge.Run) -> None:
        if run.step_number == step and not been:
            been.append(step)
            gate.wait(run.rank)

    return top


def bad_visits(visits: dict[int, Sequence[int]]) -> Callable[[forge.Run, torch.Tensor], Any]:
    """For ``spoil``: the loss is NaN on the last rank when a step is come by for that time."""
    count: dict[int, int] = {}
    last: list[int] = [-1]

    def spoil(run: forge.Run, loss: torch.Tensor) -> torch.Tensor:
        step = run.step_number
        if last[0] != step:  # of several micro-batches, and of a replay, it is one visit
            last[0], count[step] = step, count.get(step, 0) + 1
        bad = run.rank == run.world_size - 1 and count[step] in visits.get(step, ())
        return loss * math.nan if bad else loss

    return spoil


def lived(run: RunDirectory, ranks: int | Sequence[int], body: Body) -> list[Launch]:
    """Launches as long as the decisions are to go on."""
    launches: list[Launch] = []
    numbers = [ranks] if isinstance(ranks, int) else list(ranks)
    while len(launches) < 12:
        with launched(run, numbers[min(len(launches), len(numbers) - 1)], body) as launch:
            pass
        launches.append(launch)
        check_launch(launch)
        if launch.decision is None or launch.decision.action in FINAL:
            return launches
    raise AssertionError(f"no end: {[each.decision for each in launches]}")


def ask(launch: Launch, kind: RequestKind, text: str) -> None:
    """Ask all ranks for something, and wait until all of them have said where they are."""
    number = launch.hub.request(kind, text)
    launch.until(lambda: not launch.hub.unanswered(number), "the answers")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# -- signals and requests around a rollback --------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "hit"),
    [
        ("decide", 0),
        ("load", 1),
        ("after", 1),
        slow("decide", 1),
        slow("load", 0),
        slow("after", 0),
    ],
)
def test_a_preemption_around_a_rollback_stops_all_at_the_same_step(
    moment: str, hit: int, tmp_path: Path
) -> None:
    run, held = run_of(tmp_path, inject=["nan@9x3:rank1"]), Held(moment)
    with launched(run, 2, program(16, before=held.before, loading=held.loading)) as launch:
        launch.at(held.gate, held.count)
        launch.kill(hit)
        launch.heard()
        began = time.monotonic()
        held.gate.open()
    assert launch.gone - began < GRACE_S
    check_launch(launch)
    (told,) = {(each.outcome, each.step) for each in launch.told}
    # Of one that has resumed already the next boundary is that of the step it is about to take.
    assert told in [(RankOutcome.STOPPED, 4), (RankOutcome.STOPPED, 5 if moment == "after" else 4)]
    assert launch.facts is not None and launch.facts.checkpoint is not None
    assert CheckpointName.parse(launch.facts.checkpoint).step == told[1]
    assert launch.decision is not None and launch.decision.action is Action.REQUEUE
    (again,) = lived(run, 2, program(16))
    assert again.decision is None
    check_finished(run, 16, 2)
    assert actions(run).count(Action.ROLLBACK) == 1


@pytest.mark.parametrize("moment", ["load", slow("decide"), slow("after")])
def test_saves_asked_for_around_a_rollback_come_in_the_new_turn(
    moment: str, tmp_path: Path
) -> None:
    run, held = run_of(tmp_path, inject=["nan@9x3:rank1"]), Held(moment)
    with launched(run, 2, program(16, before=held.before, loading=held.loading)) as launch:
        launch.at(held.gate, held.count)
        for _ in range(3):
            ask(launch, RequestKind.SAVE, "by hand")
        held.gate.open()
    check_launch(launch)
    check_finished(run, 16, 2)
    saved = [each.step for each in events(run, ev.CheckpointCommitted) if each.reason == "by hand"]
    assert saved == [4 + (moment == "after")] * 3
    assert all(
        each.trust is not Trust.SUSPECT for each in state_of(run).known if each.name.step > 8
    )


@pytest.mark.parametrize(
    ("moment", "hit"),
    [("load", 1), slow("decide", 0), slow("decide", 1), slow("load", 0), slow("after", 0)],
)
@pytest.mark.core
def test_a_rank_killed_in_a_rollback_costs_no_second_decision(
    moment: str, hit: int, tmp_path: Path
) -> None:
    run, held = run_of(tmp_path, inject=["nan@9x3:rank1"]), Held(moment)
    with launched(run, 2, program(16, before=held.before, loading=held.loading)) as launch:
        launch.at(held.gate, held.count)
        launch.kill(hit, signal.SIGKILL)
        launch.until(lambda: not is_alive(launch.group.pids[hit]), "its death")
        held.gate.open()
    assert launch.decision is not None and launch.decision.cause is Cause.CRASH
    (again,) = lived(run, 2, program(16))
    assert again.decision is None
    check_finished(run, 16, 2)
    resumed = [each.step for each in events(run, ev.Resumed)]
    assert resumed[-1] == 4, "from where the rollback was to lead"
    # Rank 0 that is killed while it decides has decided nothing.
    decided = 0 if (moment, hit) == ("decide", 0) else 1
    assert sum(use.times for use in state_of(run).spent if use.cause is Cause.NON_FINITE) == decided
    assert actions(run).count(Action.ROLLBACK) == decided


# -- bad steps where they hurt ---------------------------------------------------------------


def test_bad_steps_among_the_repeated_ones_are_another_rollback(tmp_path: Path) -> None:
    bad = {9: (1,), 10: (1,), 11: (1,), 6: (2,), 7: (2,), 8: (2,)}
    run = run_of(tmp_path)
    (_,) = lived(run, 2, program(20, spoil=bad_visits(bad)))
    check_finished(run, 20, 2)
    assert actions(run) == [Action.ROLLBACK, Action.ROLLBACK]


@pytest.mark.parametrize("ranks", [2, slow(1)])
def test_bad_steps_before_the_first_checkpoint_begin_anew(ranks: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, inject=["nan@0x3"])
    first, _ = lived(run, ranks, program(8))
    assert first.decision is not None and first.decision.action is Action.ROLLBACK
    assert first.decision.target is None
    check_finished(run, 8, ranks)


@pytest.mark.parametrize("fault", [slow("nan@0x3:always"), slow("nan@13x3:always")])
def test_what_is_always_bad_is_held(fault: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, inject=[fault])
    lived(run, 2, program(16))
    check_resumes(run)
    state = state_of(run)
    assert state.status is RunStatus.HELD and "rollback used 2 times" in state.reason


@pytest.mark.parametrize(
    "fault",
    [
        "nan@13x3",
        "corrupt@15:adam_v:inf",
        *map(slow, ("nan@15", "nan@14x2", "nan@12x3", "nan@15:always", "spike@13x3:factor=1e30")),
    ],
)
def test_the_last_steps_are_no_exception(fault: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, inject=[fault])
    (_,) = lived(run, 2, program(16))
    check_finished(run, 16, 2)
    assert state_of(run).high_water == 16


@pytest.mark.parametrize(
    ("at", "parallel"),
    [(7, "fsdp2"), *(slow(at, kind) for at in (5, 6, 8) for kind in ("ddp", "fsdp2"))],
)
def test_a_row_of_bad_steps_across_a_save_with_accumulation(
    at: int, parallel: str, tmp_path: Path
) -> None:
    run = run_of(
        tmp_path,
        inject=[f"nan@{at}x3:rank1"],
        args={"parallel": parallel},
        checkpoint={**SAVES, "background": True},
    )
    (_,) = lived(run, 2, program(16, micro_batch=2))
    check_finished(run, 16, 2)
    assert actions(run) == [Action.ROLLBACK]


@pytest.mark.parametrize("fault", ["nan@9x3:rank0", slow("nan:samples=72-95")])
def test_a_rollback_with_loader_workers_leaves_none_behind(fault: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, inject=[fault], recovery={})
    (_,) = lived(run, 2, program(30, workers=2))
    check_finished(run, 30, 2)
    assert bool(state_of(run).plan.skipped) == ("samples" in fault)


@pytest.mark.parametrize("ranks", [(2, 1), *map(slow, ((1, 2), (2, 4), (4, 1)))])
def test_windows_that_are_left_out_are_so_on_any_number_of_ranks(
    ranks: tuple[int, int], tmp_path: Path
) -> None:
    run = run_of(tmp_path, inject=["nan:samples=72-95", "term@22"], recovery={})
    _, _ = lived(run, ranks, program(30))
    check_finished(run, 30, ranks[1])
    assert state_of(run).plan.skipped


def test_an_end_that_comes_sooner_after_a_rollback_is_no_parting(tmp_path: Path) -> None:
    """What is left out of the last epoch ends the run before what its ranks had begun already."""
    length, gate = 40 * BATCH, Gate()
    loads: list[int] = []

    def loading(run: forge.Run) -> None:
        loads.append(run.step_number)
        if len(loads) == 2:
            gate.wait(run.rank)

    run = run_of(
        tmp_path,
        inject=[f"nan:samples={30 * BATCH}-{length - BATCH}"],
        recovery={},
        checkpoint={**SAVES, "every_steps": 2},
    )
    body = program(0, until=forge.Epochs(1), length=length, loading=loading)
    with mock.patch.object(launches, "_BEAT_S", 2.0), launched(run, 2, body) as launch:
        launch.at(gate, 2)
        members = launch.hub.members
        launch.until(lambda: all(each.begun == 33 for each in members().values()), "heartbeats")
        gate.open()
    assert launch.decision is None, launch.decision
    (window,) = state_of(run).plan.skipped
    steps = (length - (min(window.stop, length) - window.first)) // BATCH
    check_finished(run, steps, 2, length=length)


# -- loops of other kinds --------------------------------------------------------------------


def by_hand(steps: int, *, ours: bool, scale: float = 0.0) -> Body:
    """``run.step`` by hand, in the loop of ``run.batches`` or in one of the program's own."""

    def train(run: forge.Run) -> None:
        model = build(run)
        # SGD does not skip on the device, and is not stepped by the scaler's own verdict.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        run.register(model=model, optimizer=optimizer)
        if scale:
            run.register(scaler=torch.amp.GradScaler("cpu", init_scale=scale))
        name = f"done-{run.attempt:03d}-{run.launch:03d}-{run.rank}.jsonl"
        been = run.directory / "been-bad"
        with (run.directory / name).open("a") as done:
            for batch in batches_of(run, steps) if ours else own_batches(run, steps):
                with run.step(batch) as step:
                    for micro in step.micro_batches():
                        loss = F.cross_entropy(model(micro[0]), micro[1])
                        bad = run.step_number in (9, 10, 11) and not been.exists()
                        step.backward(loss * math.nan if bad else loss)
                    step.apply(max_norm=1.0)
                    # Inside the block: with batches of its own its end is the boundary.
                    if run.step_number == 11:
                        been.touch()
                    line = [run.step_number, batch.step, [list(one) for one in batch.sample_ids]]
                    done.write(json.dumps(line) + "\n")
                    done.flush()
        torch.save([part(p) for p in model.parameters()], run.directory / f"end-{run.rank}.pt")

    return train


def batches_of(run: forge.Run, steps: int) -> Iterator[Any]:
    return run.batches(
        Samples(LENGTH), global_batch_size=BATCH, micro_batch_size=2, until=forge.Steps(steps)
    )


def own_batches(run: forge.Run, steps: int) -> Iterator[Any]:
    run.restore()
    order = SampleOrder(0, LENGTH, BATCH)
    while run.step_number < steps:
        yield BatchSource(
            Samples(LENGTH),
            order,
            rank=run.rank,
            ranks=run.world_size,
            micro_batch=2,
            start_consumed=run.step_number * BATCH,
        ).next_batch()


@pytest.mark.parametrize(
    ("ours", "ranks", "scale"),
    [
        (True, 2, 0.0),
        (False, 2, 0.0),
        *(slow(ours, ranks, 0.0) for ours in (True, False) for ranks in (1,)),
        *(slow(True, 2, scale) for scale in (65536.0, 4.0, 1.0)),
    ],
)
def test_steps_by_hand_are_rolled_back_inside_where_the_loop_is_ours(
    ours: bool, ranks: int, scale: float, tmp_path: Path
) -> None:
    run = run_of(tmp_path)
    launches_of = lived(run, ranks, by_hand(16, ours=ours, scale=scale))
    check_finished(run, 16, ranks)
    if scale > 4.0:  # it looks for its scale: that is no incident
        assert actions(run) == []
    else:
        assert len(launches_of) == (1 if ours else 2)
        assert actions(run) == [Action.ROLLBACK]


# -- what a program's hooks may do -----------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, slow(1)])
def test_a_hook_that_raises_while_it_is_asked_is_the_programs_error(
    ranks: int, tmp_path: Path
) -> None:
    def before(run: forge.Run) -> None:
        @run.on("on_instability")
        def decide(incident: Any) -> None:
            raise KeyError("a mistake in the hook")

    run = run_of(tmp_path, inject=["nan@9x3:rank0"])
    with launched(run, ranks, program(16, before=before)) as launch:
        pass
    check_launch(launch)
    assert launch.decision is not None
    (_, incident) = state_of(run).attempts[0].incidents[-1]
    assert incident.cause is Cause.APP_ERROR
    assert "a mistake in the hook" in incident.evidence[0].text


@pytest.mark.slow
def test_a_hook_that_raises_after_a_rollback_ends_the_launch_and_then_the_run(
    tmp_path: Path,
) -> None:
    def before(run: forge.Run) -> None:
        @run.on("on_resume")
        def look(**given: Any) -> None:
            raise KeyError("a mistake in the hook")

    run = run_of(tmp_path, inject=["nan@9x3:rank0"])
    lived(run, 2, program(16, before=before))
    assert state_of(run).status is RunStatus.HELD
    assert actions(run) == [Action.ROLLBACK, Action.RELAUNCH, Action.HOLD]
    assert [each.step for each in events(run, ev.Resumed)] == [0, 4, 4]


def test_a_hold_that_rank_0_could_not_tell_any_more_is_a_hold(tmp_path: Path) -> None:
    """It was written down; that its rank was killed right then does not make a relaunch of it."""

    def before(run: forge.Run) -> None:
        def killed(self: SaveSchedule) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        mock.patch.object(SaveSchedule, "wait_for_save", killed).start()

    run = run_of(tmp_path, inject=["nan@5x3:rank0"], recovery={"non_finite": [{"do": "hold"}]})
    with launched(run, 2, program(12, before=before)) as launch:
        pass
    assert state_of(run).status is RunStatus.HELD
    assert launch.decision is not None and launch.decision.action is Action.HOLD


# -- proposals at any time -------------------------------------------------------------------


def an_anomaly(onset: int, step: int, cause: Cause = Cause.LOSS_SPIKE, **given: Any) -> str:
    return announce(Anomaly(cause, onset, step, "on purpose", **given))


@pytest.mark.parametrize(("where", "ranks"), [("eval", 2), ("data", 2), slow("eval", 1)])
def test_a_rollback_proposed_while_a_batch_is_out_does_not_train_on_it(
    where: str, ranks: int, tmp_path: Path
) -> None:
    gate = Gate()
    waits = once_at(6, gate)

    class Slow(Samples):
        """Ranks wait for the batch of a step, as each other."""

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if (0, index) in of_step:
                of_step.clear()
                gate.wait(0)
            return super().__getitem__(index)

    order = SampleOrder(0, LENGTH, BATCH)
    of_step = set(order.indices(6 * BATCH, BATCH)) if where == "data" else set()

    def top(run: forge.Run) -> None:
        if where == "eval" and run.due("eval", every=6):
            with run.phase("eval"):
                waits(run)
                for _ in range(200):
                    run.poll()
                    threading.Event().wait(0.002)

    run = run_of(tmp_path)
    with launched(run, ranks, program(12, top=top, data=Slow(LENGTH))) as launch:
        launch.at(gate, ranks)
        ask(launch, RequestKind.RECOVER, an_anomaly(6, 6))
        gate.open()
    check_launch(launch)
    check_finished(run, 12, ranks)
    assert actions(run) == [Action.ROLLBACK]


@pytest.mark.slow
def test_a_rollback_proposed_after_the_last_step_is_done_by_the_next_launch(tmp_path: Path) -> None:
    gate = Gate()
    body = program(12)

    def train(run: forge.Run) -> None:
        body(run)
        with run.phase("eval"):
            if run.attempt == 1:
                gate.wait(run.rank)
            for _ in range(50):
                run.poll()
                threading.Event().wait(0.002)

    run = run_of(tmp_path)
    with launched(run, 2, train) as launch:
        launch.at(gate, 2)
        ask(launch, RequestKind.RECOVER, an_anomaly(11, 12))
        gate.open()
    assert launch.decision is not None and launch.decision.action is Action.ROLLBACK
    (_,) = lived(run, 2, train)
    check_finished(run, 12, 2)
    assert [each.step for each in events(run, ev.Resumed)] == [0, 8]


PROPOSALS = {
    "twice": ([an_anomaly(5, 6)] * 2, [Action.ROLLBACK]),
    "of the future": ([an_anomaly(10**9, 10**9)], []),
    "in memory, and another": (
        [an_anomaly(5, 6, Cause.NON_FINITE, in_memory=True), an_anomaly(2, 2)],
        [Action.ROLLBACK],
    ),
    "nonsense": (["{", "a" * 3000], [Action.RELAUNCH]),
}


@pytest.mark.parametrize("which", ["twice", *map(slow, list(PROPOSALS)[1:])])
def test_proposals_of_all_kinds(which: str, tmp_path: Path) -> None:
    texts, decided = PROPOSALS[which]
    run, gate = run_of(tmp_path), Gate()
    with launched(run, 2, program(12, top=once_at(6, gate))) as launch:
        launch.at(gate, 2)
        for text in texts:
            ask(launch, RequestKind.RECOVER, text)
        gate.open()
    check_launch(launch)
    if launch.decision is not None:
        lived(run, 2, program(12))
    check_finished(run, 12, 2)
    assert actions(run) == decided


@pytest.mark.parametrize("text", ["-1", *map(slow, ("nan", "inf", "-inf", "0", "1e400"))])
def test_no_limit_on_the_norm_can_stop_a_run_for_good(text: str, tmp_path: Path) -> None:
    run, gate = run_of(tmp_path), Gate()
    with launched(run, 2, program(12, top=once_at(6, gate))) as launch:
        launch.at(gate, 2)
        ask(launch, RequestKind.LIMIT, text)
        gate.open()
    check_launch(launch)
    check_finished(run, 12, 2)
    skipped = any(attempt.skipped for attempt in state_of(run).attempts)
    assert not skipped, "a limit that nothing can keep to is none"


@pytest.mark.slow
def test_a_request_of_the_new_turn_is_not_forgotten_for_what_was_heard_in_the_old(
    tmp_path: Path,
) -> None:
    """Ranks that enter an evaluation ask anew for it, and wait a minute for an answer."""
    load, gate = Gate(), Gate()
    been: list[int] = []

    def top(run: forge.Run) -> None:
        if run.step_number == 4 and (run.directory / "rewound").exists() and not been:
            been.append(4)
            gate.wait(run.rank)
            with run.phase("eval"):
                run.poll()

    def loading(run: forge.Run) -> None:
        (run.directory / "rewound").touch()
        load.wait(run.rank)

    run = run_of(tmp_path, inject=["nan@9x3:rank0"])
    with (
        mock.patch.object(launches, "_BEAT_S", 2.0),
        launched(run, 2, program(16, top=top, loading=loading)) as launch,
    ):
        launch.at(load, 2)
        members = launch.hub.members
        launch.until(lambda: all(each.step >= 11 for each in members().values()), "heartbeats")
        load.open()
        launch.at(gate, 2)
        for why in ("one", "another"):
            ask(launch, RequestKind.SAVE, why)
            threading.Event().wait(0.2)  # for the target to be sent
        gate.open()
        launch.until(lambda: launch.doing("train", (0, 1), 4) or run.is_done(), "training", 10)
    check_finished(run, 16, 2)


def test_an_instability_that_a_stop_comes_with_is_not_forgotten(tmp_path: Path) -> None:
    run, gate = run_of(tmp_path), Gate()
    with launched(run, 2, program(12, top=once_at(6, gate))) as launch:
        launch.at(gate, 2)
        ask(launch, RequestKind.RECOVER, an_anomaly(5, 6))
        launch.kill(1)
        launch.heard()
        gate.open()
    check_launch(launch)
    assert {told.outcome for told in launch.told} == {RankOutcome.STOPPED}
    lived(run, 2, program(12))
    check_finished(run, 12, 2)
    # What was saved on the way out is of the spike: it is not what training goes on from.
    assert [each.step for each in events(run, ev.Resumed)][1] == 4


# -- a disk that is full, or has lost what is gone back to -----------------------------------


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("moment", ["decide", slow("load"), slow("after")])
def test_a_journal_that_can_not_be_written_in_a_rollback(moment: str, tmp_path: Path) -> None:
    """The decision is charged once: by rank 0, or by whoever conducts the launch."""

    def fill(run: forge.Run) -> None:
        if run.rank == 0 and run.attempt == 1:
            mock.patch.object(AppendFile, "append", full).start()

    def before(run: forge.Run) -> None:
        if moment == "decide":
            run.on("on_instability")(lambda incident: fill(run))
        if moment == "after":
            run.on("on_resume")(lambda **given: fill(run))

    def loading(run: forge.Run) -> None:
        if moment == "load":
            fill(run)

    run = run_of(tmp_path, inject=["nan@9x3:rank0"])
    lived(run, 2, program(16, before=before, loading=loading))
    check_finished(run, 16, 2)
    assert actions(run).count(Action.ROLLBACK) == 1
    assert sum(use.times for use in state_of(run).spent if use.cause is Cause.NON_FINITE) <= 1


@pytest.mark.parametrize("lost", [slow((8,)), slow((4, 8))])
def test_a_damaged_checkpoint_is_passed_over_by_a_rollback(
    lost: tuple[int, ...], tmp_path: Path
) -> None:
    def before(run: forge.Run) -> None:
        @run.on("on_instability")
        def damage(incident: Any) -> None:
            for folder in run.directory.glob("checkpoints/step-*"):
                if CheckpointName.parse(folder.name).step in lost:
                    for file in folder.glob("rank-*.data"):
                        data = bytearray(file.read_bytes())
                        data[100] ^= 255
                        file.write_bytes(data)

    run = run_of(tmp_path, inject=["nan@13x3:rank0"])
    lived(run, 2, program(20, before=before))
    check_resumes(run)
    if lost == (8,):
        check_finished(run, 20, 2)
        assert [each.step for each in events(run, ev.Resumed)] == [0, 4]
    else:
        state = state_of(run)
        assert state.status is RunStatus.HELD and "checkpoint_bad" in state.reason


# -- whatever may come -----------------------------------------------------------------------

LONG = 24
SHORT_RUN, ALL = 3, 150
FAULTS = (
    "nan@{s}",
    "nan@{s}x3",
    "nan@{s}x{n}",
    "inf@{s}x3",
    "spike@{s}x3:factor=1e30",
    "corrupt@{s}:weight:nan",
    "corrupt@{s}:adam_v:inf",
    "corrupt@{s}:adam_m:1e30",
    "corrupt@{s}:grad:nan",
    "term@{s}",
    "kill@{s}",
    "exception@{s}",
    "nan:samples={a}-{b}",
)


def some_faults(choose: random.Random, ranks: int) -> list[str]:
    found: list[str] = []
    for _ in range(choose.choice((1, 2, 2, 3, 4))):
        first = choose.randrange(LONG * BATCH)
        fault = choose.choice(FAULTS).format(
            s=choose.randrange(LONG),
            n=choose.randrange(2, 6),
            a=first,
            b=first + choose.randrange(1, 5 * BATCH),
        )
        if choose.random() < 0.6 and "samples" not in fault:
            head, _, rest = fault.partition(":")
            fault = ":".join(filter(None, (head, f"rank{choose.randrange(ranks)}", rest)))
        if fault not in found:
            found.append(fault)
    return found


def disturb(launch: Launch, choose: random.Random, ranks: int) -> None:
    """One thing more, at any time, in every other launch."""
    what = choose.choice(("term", "kill", "save", "recover", "", "", "", ""))
    if not what:
        return
    while launch.conducting.is_alive() and not launch.has_begun():
        threading.Event().wait(0.01)  # what comes earlier is another matter
    threading.Event().wait(choose.random() * 0.4)  # for nothing in particular
    with contextlib.suppress(ProcessLookupError):
        if what == "term":
            launch.kill(choose.randrange(ranks))
        elif what == "kill":
            launch.kill(choose.randrange(ranks), signal.SIGKILL)
        elif what == "save":
            launch.hub.request(RequestKind.SAVE, "by hand")
        else:
            step = choose.randrange(1, LONG)
            cause = choose.choice((Cause.LOSS_SPIKE, Cause.NON_FINITE))
            text = an_anomaly(max(1, step - 2), step, cause, in_memory=choose.random() < 0.5)
            launch.hub.request(RequestKind.RECOVER, text)


def evaluating(run: forge.Run) -> None:
    if run.due("eval", every=5):
        with run.phase("eval"):
            for _ in range(5):
                run.poll()
                torch.rand(1)


@pytest.mark.parametrize(
    "number", [n if n < SHORT_RUN else pytest.param(n, marks=pytest.mark.slow) for n in range(ALL)]
)
def test_any_disturbances_end_well(number: int, tmp_path: Path) -> None:
    choose = random.Random(f"under fire {number}")
    ranks = choose.choice((1, 2, 2))
    faults = some_faults(choose, ranks)
    policy = {} if choose.random() < 0.5 else {"recovery": {}}
    run = run_of(
        tmp_path,
        inject=faults,
        args={"parallel": choose.choice(("ddp", "fsdp2"))},
        checkpoint={
            **SAVES,
            "every_steps": choose.choice((2, 3, 4, 5, 7)),
            "background": choose.random() < 0.7,
        },
        **policy,
    )
    body = program(
        LONG,
        workers=choose.choice((0, 0, 0, 1)),
        micro_batch=choose.choice((None, 1, 2)),
        top=evaluating if choose.random() < 0.5 else lambda run: None,
    )
    print(number, ranks, faults)
    now, decision = ranks, None
    for _ in range(20):
        now = ranks if choose.random() < 0.8 else 3 - ranks
        with launched(run, now, body) as launch:
            disturb(launch, choose, now)
        assert not [str(each) for each in launch.outcomes if each.overdue]
        check_launch(launch)
        decision = launch.decision
        if decision is None or state_of(run).status is RunStatus.HELD:
            break
    else:
        raise AssertionError(f"no end: {decision}")
    check_resumes(run)
    state = state_of(run)
    if decision is None:
        check_finished(run, LONG, now)
    else:
        assert state.status is RunStatus.HELD and state.reason
        print(state.reason)
