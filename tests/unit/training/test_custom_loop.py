"""Loops that are the program's own: saved, stopped and guarded like those of ``batches``."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slurm_forge as forge
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.rank import RankStopped, RecoveryNeeded, RequestProposal
from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.journal import events as ev
from slurm_forge.recovery.monitor.loss_anomaly import announced
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.training.instability.skip_tracker import LaunchGivenUp
from slurm_forge.training.step.update_report import UpdateReport
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.position import LAST, Position
from tests.unit.training.test_run import Lab

WIDTH = 3


@pytest.fixture
def lab(tmp_path: Path) -> Callable[..., Lab]:
    """Makes the runs of a test, each in a folder of its own."""

    def make(folder: str = "run", **spec: Any) -> Lab:
        directory = RunDirectory.at(tmp_path / folder)
        directory.create(b"")
        checkpoint = {"background": False, **spec.pop("checkpoint", {})}
        return Lab(directory, {"checkpoint": checkpoint, **spec})

    return make


@dataclass
class Stream:
    """Data of somebody else's: an endless iterator that keeps its position."""

    position: int = 0
    fetched: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.fetched.append(self.position)
        self.position += 1
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass
class Program:
    """A model, an optimizer and a stream, registered; and the ways to take a step."""

    run: forge.Run
    seen: list[tuple[int, int]] = field(default_factory=list)
    stream: Any = field(default_factory=Stream)
    registered: bool = True

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(WIDTH, 2), nn.Dropout(0.2), nn.Linear(2, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
        self.run.register(model=self.model, optimizer=self.optimizer)
        if self.registered:
            self.run.register(stream=self.stream)
        else:
            self.run.register(schedule=self.schedule)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def backward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append((self.run.step_number, self.stream.position - 1))
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        return loss.detach(), torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def own_step(self, batch: torch.Tensor) -> None:
        loss, norm = self.backward(batch)
        self.optimizer.step()
        self.run.advance(loss=loss, grad_norm=norm)

    def applied(self, batch: torch.Tensor) -> None:
        loss, norm = self.backward(batch)
        self.run.apply(self.optimizer, grad_norm=norm)
        self.run.advance(loss=loss)

    def block(self, batch: torch.Tensor) -> None:
        self.seen.append((self.run.step_number, self.stream.position - 1))
        with self.run.step(batch) as step:
            for micro in step.micro_batches():
                step.backward(self.model(micro).square().mean())
            step.apply(max_norm=1.0)

    def whole(self, batch: torch.Tensor) -> None:
        self.seen.append((self.run.step_number, self.stream.position - 1))
        self.run.train_step(batch, lambda micro: self.model(micro).square().mean(), max_norm=1.0)

    def train(self, steps: int, take: str = "own_step", loop: str = "plain") -> None:
        """To the ``steps``th step, which a loop of one's own has to know by itself."""
        step = getattr(self, take)
        self.run.restore()
        if loop == "steps":
            for _ in self.run.steps(until=forge.Steps(steps)):
                step(next(self.stream))
        elif loop == "while":
            while self.run.step_number < steps:
                step(next(self.stream))
        elif self.run.step_number < steps:
            for batch in self.stream:
                step(batch)
                if self.run.step_number == steps:
                    break


LOOPS = ["plain", "steps", "while"]
STEPS = ["own_step", "applied", "block", "whole"]
every_way = pytest.mark.parametrize(
    ("loop", "take"), [(loop, take) for loop in LOOPS for take in STEPS]
)


# -- saves and stops ------------------------------------------------------------------------------


@every_way
def test_an_own_loop_saves_and_stops_where_its_data_agree_with_its_steps(lab, loop, take):
    made = lab(checkpoint={"every_steps": 2, "keep_last": 9})
    run, channel = made.start(due={Position(5): RequestKind.STOP})
    program = Program(run)
    with pytest.raises(RunStopped):
        program.train(9, take, loop)
    assert [said.step for said in channel.said if isinstance(said, RankStopped)] == [5]
    assert made.saved() == [(2, "every_steps"), (4, "every_steps"), (5, "stop")]
    assert program.stream.fetched == [0, 1, 2, 3, 4]
    restored, _ = made.start()
    again = Program(restored)
    assert restored.restore()
    assert (restored.step_number, again.stream.position) == (5, 5)


@every_way
def test_an_interrupted_own_loop_is_the_uninterrupted_one(lab, loop, take):
    run, _ = lab("whole").start()
    expected = Program(run)
    expected.train(7, take, loop)
    assert run.finish() == 7
    made = lab()
    seen = []
    for stop in (2, 3, 6, None):
        due = {} if stop is None else {Position(stop): RequestKind.STOP}
        run, _ = made.start(due=due)
        program = Program(run)
        try:
            program.train(7, take, loop)
        except RunStopped:
            assert stop == run.step_number
        seen += program.seen
    assert run.finish() == 7
    assert seen == [(step, step) for step in range(7)]
    assert torch.equal(program.weights, expected.weights)
    assert [event.step for event in made.events(ev.Resumed)] == [0, 2, 3, 6]


@pytest.mark.parametrize("loop", ["plain", "steps"])
@pytest.mark.parametrize("position", ["nowhere", "registered", "extra"])
def test_a_resume_without_a_position_of_the_data_is_told(lab, loop, position):
    """A plain ``for epoch in range(…)`` trains its epochs again then, and for too long."""
    made = lab()
    for stop in (3, None):
        run, _ = made.start(due={} if stop is None else {Position(stop): RequestKind.STOP})
        program = Program(run, registered=position == "registered")
        if position == "extra":
            run.extra.setdefault("epoch", 0)
        with pytest.raises(RunStopped) if stop else contextlib.nullcontext():
            program.train(5, loop=loop)
    told = [event.step for event in made.events(ev.DataPositionMissing)]
    assert told == ([3] if position == "nowhere" else [])


@pytest.mark.parametrize("take", STEPS)
def test_a_stop_before_the_first_step_finds_nothing_consumed(lab, take):
    made = lab()
    run, _ = made.start(due={Position(0): RequestKind.STOP})
    program = Program(run)
    with pytest.raises(RunStopped):
        program.train(5, take, "steps")
    assert program.stream.fetched == []
    run, _ = made.start()
    program = Program(run)
    program.train(2, take, "steps")
    assert program.seen == [(0, 0), (1, 1)]


@pytest.mark.parametrize("stop", [0, 3, None])
def test_a_batch_that_is_fetched_ahead_behind_advance_is_not_behind_a_checkpoint(lab, stop):
    made = lab()
    run, _ = made.start(due={} if stop is None else {Position(stop): RequestKind.STOP})
    program = Program(run)
    run.restore()
    batch = next(program.stream)
    try:
        for _ in run.steps(until=forge.Steps(5)):
            program.own_step(batch)
            batch = next(program.stream)
        run.finish()
    except RunStopped:
        pass
    done = 5 if stop is None else stop
    assert [step for step, _ in made.saved()] == [done]
    run, _ = made.start()
    program = Program(run)
    run.restore()
    assert (run.step_number, program.stream.position) == (done, done)


def test_a_loop_that_is_over_takes_no_more_steps(lab):
    made = lab()
    for expected in ([(0, 0), (1, 1)], []):
        run, _ = made.start()
        program = Program(run)
        program.train(2, loop="steps")
        assert run.finish() == 2
        assert program.seen == expected
    assert [event.until for event in made.events(ev.Resumed)] == [None, None], "restored before"


def test_the_length_of_an_own_loop_is_told_where_it_restores_by_itself(lab):
    made = lab()
    run, _ = made.start()
    program = Program(run)
    for _ in run.steps(until=forge.Steps(2)):
        program.own_step(next(program.stream))
    assert made.events(ev.Resumed)[0].until == 2


def test_samples_and_hooks_are_those_of_every_loop(lab):
    made = lab()
    run, _ = made.start()
    program, told = Program(run), []
    run.on("on_step_end")(lambda **given: told.append(given["step"]))
    for _ in run.steps(until=forge.Steps(3)):
        program.backward(next(program.stream))
        program.optimizer.step()
        run.advance(samples=4)
    run.finish()
    assert told == [1, 2, 3]
    assert made.events(ev.Progress)[-1].consumed == 12


def test_accumulation_is_one_step_and_several_updates_are_one_too(lab):
    run, _ = lab().start()
    program = Program(run)
    run.restore()
    for _ in range(3):
        for _ in range(4):
            program.model(next(program.stream)).square().mean().backward()
        run.apply(max_norm=1.0)
        for _ in range(2):  # as the critic of a GAN
            program.model(next(program.stream)).square().mean().backward()
            run.apply(program.optimizer)
        run.advance()
    assert run.step_number == 3


@pytest.mark.parametrize("take", ["own_step", "applied"])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_a_loop_that_counts_micro_batches_is_refused(lab, take, micro_batches):
    run, _ = lab().start()
    program = Program(run)
    run.restore()

    def one_update() -> None:
        for _ in range(micro_batches - 1):
            loss = program.model(next(program.stream)).square().mean()
            loss.backward()
            run.advance(loss=loss)
        getattr(program, take)(next(program.stream))

    for _ in range(3):
        one_update()
    with pytest.raises(UnsupportedError, match=f"only every {micro_batches}. step") as refused:
        one_update()
    assert "run.advance" in refused.value.next_step


@pytest.mark.parametrize("take", ["own_step", "applied"])
def test_a_step_without_an_update_now_and_then_is_the_program_s_to_count(lab, take):
    run, _ = lab().start()
    program = Program(run)
    run.restore()
    for number in range(40):
        if number in (0, 1, 5, 7, 9, 20, 21, 22, 30):
            run.advance()
        else:
            getattr(program, take)(next(program.stream))
    assert run.step_number == 40


@pytest.mark.parametrize("without_loss", [False, True])
def test_a_step_that_passes_through_few_calls_comes_to_the_same(lab, without_loss):
    """The norm is known on the host, and there is one update, no buffer and no scaler."""
    ends = []
    for folder, in_few in (("few", True), ("many", False)):
        made = lab(folder, checkpoint={"every_steps": 7})
        run, _ = made.start()
        program = Program(run)
        run.restore()
        run._step_lifecycle._is_plain = in_few
        for step in range(30):
            loss, norm = program.backward(next(program.stream))
            if step in (4, 11):
                norm = torch.tensor(math.nan)
            run.apply(program.optimizer, grad_norm=norm)
            run.advance(loss=None if without_loss else loss, samples=4)
        assert run.finish() == 30
        skipped = [event.step for event in made.events(ev.StepSkipped)]
        assert skipped == [5, 12]
        history = run._step_lifecycle._loss_history.tensor().nan_to_num(-1.0).tolist()
        recent = list(run._skip_tracker._recent)
        ends.append((program.weights.tolist(), run._progress.to_json(), history, recent))
    assert ends[0] == ends[1]


def test_gradients_stay_where_the_trainer_clears_them_itself(lab):
    run, _ = lab().start()
    program = Program(run)
    run.restore()
    for keep in (True, False):
        _, norm = program.backward(next(program.stream))
        run.apply(program.optimizer, grad_norm=norm, keep_gradients=keep)
        assert all((p.grad is not None) is keep for p in program.model.parameters())
        run.advance()


# -- batches of one's own -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((torch.ones(4, WIDTH), torch.zeros(4)), 4),
        ([torch.ones(2, WIDTH)], 2),
        ({"x": torch.ones(5, WIDTH), "y": 3}, 5),
        (torch.ones(3, WIDTH), 3),
        ("a text", 1),
        (forge.Batch(micro_batches=[torch.ones(2, WIDTH), torch.ones(1, WIDTH)]), 3),
        (forge.Batch(micro_batches=["a", "b"], micro_sizes=[5, 7]), 12),
    ],
    ids=["tuple", "list", "dict", "tensor", "text", "batch", "sizes"],
)
def test_whatever_a_loop_fetches_is_a_batch(lab, batch, samples):
    made = lab()
    run, _ = made.start()
    program = Program(run)
    run.restore()
    given = []
    with run.step(batch) as step:
        for micro in step.micro_batches():
            given.append(micro)
            step.backward(program.model(torch.ones(1, WIDTH)).mean())
        step.apply()
    assert given == list(batch.micro_batches) if isinstance(batch, forge.Batch) else [batch]
    run.finish()
    assert made.events(ev.Progress)[-1].consumed == samples


def test_micro_batches_of_one_s_own_weigh_what_they_hold(lab):
    """As one batch does, whatever their sizes."""
    weights = []
    data = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    for number, cut in enumerate(([6], [4, 2], [1, 2, 3])):
        run, _ = lab(f"run-{number}").start()
        program = Program(run)
        program.model.eval()
        run.restore()
        run.train_step(
            forge.Batch(micro_batches=data.split(cut)),
            lambda micro, model=program.model: model(micro).square().mean(),
        )
        weights.append(program.weights)
    torch.testing.assert_close(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: forge.Batch(micro_batches=[]), "0 micro-batches and 0 sizes"),
        (lambda: forge.Batch(micro_batches=[1, 2], micro_sizes=[1]), "2 micro-batches and 1 sizes"),
    ],
)
def test_a_batch_of_nothing_is_refused(made, says):
    with pytest.raises(UsageError, match=says):
        made()


# -- what is refused ------------------------------------------------------------------------------


def test_a_loop_that_polls_and_never_advances_is_told_the_line_to_write(lab):
    """Row 1: it was never stopped, never saved, and finished as step 0."""
    run, _ = lab(checkpoint={"every_steps": 2}).start(due={Position(3): RequestKind.STOP})
    program = Program(run)
    run.restore()
    with pytest.raises(UnsupportedError) as caught:
        for _ in range(240):
            program.backward(next(program.stream))
            program.optimizer.step()
            run.poll()
    assert "run.advance(loss=…, grad_norm=…)" in caught.value.next_step
    assert len(program.stream.fetched) <= 11


def test_a_loop_that_never_advances_is_no_finished_run(lab):
    made = lab()
    run, _ = made.start()
    program = Program(run)
    run.restore()
    for _ in range(20):
        program.backward(next(program.stream))
        program.optimizer.step()
    for end in (run.save, run.finish):
        with pytest.raises(UnsupportedError, match="those of step 0"):
            end()
    assert made.saved() == []


def test_polls_of_a_loop_that_advances_do_nothing(lab):
    made = lab()
    run, channel = made.start(due={Position(2): RequestKind.STOP})
    program = Program(run)
    run.restore()
    with pytest.raises(RunStopped):
        for batch in program.stream:
            run.poll()
            program.own_step(batch)
            for _ in range(20):
                run.poll()
    assert made.saved() == [(2, "stop")]
    assert program.stream.fetched == [0, 1]
    assert len(channel.said) == 1


def twice(program: Program) -> None:
    for batch in program.stream:
        program.own_step(batch)
        program.run.advance()


def in_steps(program: Program, *takes: Callable[[Program], None]) -> None:
    for _ in program.run.steps(until=forge.Steps(3)):
        for take in takes:
            take(program)


def one(take: str) -> Callable[[Program], None]:
    return lambda program: getattr(program, take)(next(program.stream))


def applied_alone(program: Program) -> None:
    program.backward(next(program.stream))
    program.run.apply()


def in_block(call: Callable[[forge.Run], None]) -> Callable[[Program], None]:
    def body(program: Program) -> None:
        program.run.restore()
        with program.run.step(next(program.stream)):
            call(program.run)

    return body


def in_phase(call: Callable[[forge.Run], None]) -> Callable[[Program], None]:
    def body(program: Program) -> None:
        program.run.restore()
        with program.run.phase("eval"):
            call(program.run)

    return body


def in_batches(call: Callable[[forge.Run], None]) -> Callable[[Program], None]:
    def body(program: Program) -> None:
        data = torch.ones(4, WIDTH)
        for _ in program.run.batches(data, global_batch_size=2, until=forge.Steps(2)):
            call(program.run)

    return body


def stranger(program: Program) -> torch.optim.Optimizer:
    return torch.optim.SGD(program.model.parameters(), lr=0.1)


def stepped_by_a_stranger(program: Program) -> None:
    optimizer = stranger(program)
    for _ in program.run.steps(until=forge.Steps(3)):
        program.backward(next(program.stream))
        optimizer.step()
        program.run.advance()


def one_step_of(program: Program, batch: Any) -> None:
    with program.run.step(batch):
        pass


def forgetful(program: Program) -> None:
    program.run.restore()
    for batch in program.stream:
        program.backward(batch)
        program.run.apply(program.optimizer)


ADVANCE: Callable[[forge.Run], None] = lambda run: run.advance()  # noqa: E731
APPLY: Callable[[forge.Run], None] = lambda run: run.apply()  # noqa: E731
STEPS_AGAIN: Callable[[forge.Run], None] = lambda run: next(run.steps(until=forge.Steps(3)))  # type: ignore[assignment,return-value]  # noqa: E731


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda p: p.own_step(next(p.stream)), "before the checkpoint is loaded"),
        (lambda p: (next(p.stream), p.run.restore()), "'stream' was iterated over before"),
        (lambda p: (next(p.stream), in_steps(p)), "'stream' was iterated over before"),
        (lambda p: p.applied(next(p.stream)), "before the checkpoint is loaded"),
        (lambda p: p.block(next(p.stream)), "before the checkpoint is loaded"),
        (lambda p: p.whole(next(p.stream)), "before the checkpoint is loaded"),
        (lambda p: in_steps(p, lambda p: None), "came to its end without run.advance()"),
        (lambda p: in_steps(p, applied_alone), "an update that no run.advance() counts"),
        (lambda p: in_steps(p, one("own_step"), one("own_step")), "is counted already"),
        (lambda p: in_steps(p, one("block"), one("own_step")), "is counted already"),
        (lambda p: in_steps(p, one("own_step"), one("whole")), "is counted already"),
        (lambda p: in_steps(p, one("own_step"), applied_alone), "is counted already"),
        (lambda p: in_steps(p, lambda p: STEPS_AGAIN(p.run)), "run.steps() inside run.steps()"),
        (in_block(ADVANCE), "run.advance() in a block of run.step()"),
        (in_block(APPLY), "run.apply() in a block of run.step()"),
        (in_phase(ADVANCE), "run.advance() in the phase 'eval'"),
        (in_phase(APPLY), "run.apply() in the phase 'eval'"),
        (in_phase(STEPS_AGAIN), "run.steps() in the phase 'eval'"),
        (in_batches(ADVANCE), "run.advance() in a loop over run.batches()"),
        (in_batches(APPLY), "run.apply() in a loop over run.batches()"),
        (in_batches(STEPS_AGAIN), "run.steps() in a loop over run.batches()"),
        (lambda p: (p.run.restore(), p.run.apply(stranger(p))), "(SGD) that is not registered"),
        (stepped_by_a_stranger, "(SGD) that is not registered (registered: 'optimizer') steps"),
        (
            lambda p: p.run.train_step(1, lambda micro: micro, optimizer=stranger(p)),
            "run.train_step() was given an optimizer (SGD) that is not registered",
        ),
        (lambda p: (p.run.restore(), p.run.advance(loss=torch.ones(2))), "a tensor of 2 elements"),
        (lambda p: (p.run.restore(), p.run.advance(grad_norm="large")), "grad_norm='large')"),
        (lambda p: (p.run.restore(), p.run.advance(loss=True)), "loss=True)"),
        (lambda p: (p.run.restore(), p.run.advance(samples=-1)), "samples=-1)"),
        (lambda p: (p.run.restore(), p.run.advance(samples=1.5)), "samples=1.5)"),
        (lambda p: p.run.steps(until=3), "until=3)"),
        (lambda p: p.run.steps(until=forge.Epochs(3)), "until=Epochs(count=3))"),
        (lambda p: p.run.steps(until=forge.Steps(0)), "0) is not a whole number of 1 or more"),
        (lambda p: (p.run.restore(), one_step_of(p, None)), "run.step(None)"),
        (forgetful, "101 updates were made since the last step was counted"),
    ],
)
def test_what_is_not_understood_is_refused_before_it_is_trained_through(lab, body, says):
    made = lab()
    run, _ = made.start()
    program = Program(run)
    before = program.weights
    with pytest.raises((UnsupportedError, UsageError)) as caught:
        body(program)
    assert says in str(caught.value)
    assert caught.value.next_step
    if "update" not in says and "steps" not in says and not program.optimizer.state:
        assert torch.equal(program.weights, before)
    assert made.saved() == []


# -- gradients that are not finite ----------------------------------------------------------------


def poisoned(program: Program, batch: torch.Tensor, value: float = math.nan) -> tuple[Any, Any]:
    program.optimizer.zero_grad()
    loss = program.model(batch).square().mean() * value
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in program.model.parameters()])
    return loss.detach(), norm


def test_an_update_that_is_not_finite_is_left_out_and_counted(lab):
    made = lab(recovery={"non_finite": [{"do": "skip", "times": 3}]})
    run, _ = made.start()
    program = Program(run)
    batch_norm = nn.BatchNorm1d(WIDTH, affine=False)
    program.model.insert(0, batch_norm)
    for step in run.steps(until=forge.Steps(4)):
        before, mean = program.weights, batch_norm.running_mean.clone()
        batch = next(program.stream)
        if step == 2:
            poisoned(program, batch)
        else:
            program.backward(batch)
        run.apply(program.optimizer, max_norm=1.0)
        assert torch.equal(before, program.weights) == (step == 2)
        assert torch.equal(mean, batch_norm.running_mean) == (step == 2)
        run.advance(samples=4)
    run.finish()
    (skipped,) = made.events(ev.StepSkipped)
    assert (skipped.step, skipped.first_sample, skipped.samples) == (3, 8, 4)


def test_too_many_in_a_row_give_the_launch_up(lab):
    made = lab(checkpoint={"every_steps": 2}, recovery={"non_finite": [{"do": "skip", "times": 2}]})
    run, channel = made.start()
    program = Program(run)
    with pytest.raises(LaunchGivenUp):
        for step in run.steps(until=forge.Steps(9)):
            batch = next(program.stream)
            poisoned(program, batch) if step >= 3 else program.backward(batch)
            run.apply(program.optimizer)
            run.advance()
    assert torch.isfinite(program.weights).all()
    assert [said.step for said in channel.said if isinstance(said, RecoveryNeeded)] == [5]


@pytest.mark.parametrize("told", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_reached_the_weights_is_proposed_to_all_and_never_good(lab, told, value):
    """Each rank knows its own values only: all hear of it on the channel."""
    made = lab(checkpoint={"every_steps": 3, "good_after_steps": 0})
    run, channel = made.start(due={Position(5): RequestKind.STOP})
    program = Program(run)
    with pytest.raises(RunStopped):
        for step in run.steps(until=forge.Steps(9)):
            program.backward(next(program.stream))
            program.optimizer.step()
            run.advance(**{told: value if step == 3 else 1.0})
    (proposal,) = [said for said in channel.said if isinstance(said, RequestProposal)]
    assert proposal.kind is RequestKind.RECOVER
    anomaly = announced(proposal.reason)
    assert (anomaly.cause, anomaly.onset) == (Cause.NON_FINITE, 4)
    assert "rank 0 reported" in anomaly.text
    saves = {event.step: event.findings for event in made.events(ev.CheckpointCommitted)}
    assert not saves[3]
    assert "so it is in the weights" in saves[5][0], "the stop's"
    run, _ = made.start()
    Program(run)
    made.committed = 5
    assert run.restore()
    assert run.step_number == 3


class OnDevice(torch.Tensor):
    """A tensor that is copied to the host before it is read."""

    is_cpu = False  # type: ignore[assignment]


def test_values_on_a_device_are_copied_now_and_read_later():
    loss, norm = torch.tensor(0.25).as_subclass(OnDevice), torch.ones(1).as_subclass(OnDevice)
    report = UpdateReport(loss, norm)
    assert report.values is None
    loss.fill_(7.0)
    assert report.read() == (0.25, 1.0)
    assert report.values == (0.25, 1.0)
    assert UpdateReport(None, norm).read() == (None, 1.0)
    assert UpdateReport(0.5, norm).read() == (0.5, 1.0)
    assert UpdateReport(torch.tensor([2.0], dtype=torch.bfloat16), None).values == (2.0, None)


def test_a_nan_on_a_device_is_found_too(lab):
    run, channel = lab().start()
    program = Program(run)
    run.restore()
    for value in (1.0, math.nan):
        program.backward(next(program.stream))
        run.advance(grad_norm=torch.tensor(value).as_subclass(OnDevice))
    (proposal,) = [said for said in channel.said if isinstance(said, RequestProposal)]
    assert announced(proposal.reason).onset == 2


def test_a_save_by_steps_of_weights_that_are_in_doubt_is_not_good_either(lab):
    made = lab(checkpoint={"every_steps": 2})
    run, _ = made.start()
    program = Program(run)
    with pytest.raises(LaunchGivenUp):  # at the end, where nobody would hear of it any more
        for step in run.steps(until=forge.Steps(5)):
            program.backward(next(program.stream))
            program.optimizer.step()
            run.advance(grad_norm=math.inf if step == 2 else 1.0)
    saves = {event.step: event.findings for event in made.events(ev.CheckpointCommitted)}
    assert not saves[2]
    assert saves[4]
    (decided,) = made.events(ev.DecisionTaken)
    assert decided.decision.target.startswith("step-00000002")


def test_what_a_gradient_scaler_leaves_out_has_not_reached_the_weights(lab):
    run, channel = lab().start()
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.register(model=model, optimizer=optimizer, scaler=scaler)
    for step in run.steps(until=forge.Steps(4)):
        loss = model(torch.ones(2, WIDTH)).square().mean() * (math.inf if step == 1 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.advance(loss=loss, grad_norm=norm)
    assert not [said for said in channel.said if isinstance(said, RequestProposal)]
    assert torch.isfinite(model.weight).all()
    assert scaler.get_scale() == 512.0, "advance has changed it, too"


def test_a_scaler_goes_with_guarded_updates(lab):
    run, _ = lab().start()
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.register(model=model, optimizer=optimizer, scaler=scaler)
    for step in run.steps(until=forge.Steps(3)):
        loss = model(torch.ones(2, WIDTH)).square().mean() * (math.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        run.apply(max_norm=1.0)
        run.advance(loss=loss)
    assert torch.isfinite(model.weight).all()
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("take", ["apply", "train_step"])
def test_several_updates_of_one_optimizer_in_a_step_go_with_a_scaler(lab, take):
    run, _ = lab().start()
    gan = Gan(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.register(scaler=scaler)
    run.restore()
    for _ in range(2):
        for loss, optimizer in ((gan.d_loss, gan.d), (gan.d_loss, gan.d), (gan.g_loss, gan.g)):
            before = gan.weights()
            if take == "apply":
                gan.d.zero_grad()
                scaler.scale(loss(DATA[:4])).backward()
                run.apply(optimizer)
            else:
                run.train_step(DATA[:4], loss, optimizer=optimizer)
            moved = [not torch.equal(*pair) for pair in zip(before, gan.weights(), strict=True)]
            assert moved == [optimizer is gan.g, optimizer is gan.d]
        if take == "apply":
            run.advance()
    assert run.finish() == 2


SCALED = RecoveryPlan(lr_factor=0.5, lr_from_step=0, lr_ramp_steps=0)


@pytest.mark.parametrize("take", ["own_step", "applied", "block"])
def test_a_scaled_learning_rate_is_applied_or_said(lab, take):
    made = lab()
    made.plan = SCALED
    run, _ = made.start()
    program = Program(run)
    program.train(3, take)
    notes = [note.text for note in made.events(ev.Note)]
    told = [text for text in notes if "run.recovery.lr_scale(run.step_number)" in text]
    assert len(told) == (1 if take == "own_step" else 0)
    assert run.recovery.lr_scale(run.step_number) == 0.5


def test_guarded_updates_use_the_scaled_learning_rate(lab):
    moved = []
    for number, plan in enumerate((RecoveryPlan(), SCALED)):
        made = lab(f"run-{number}")
        made.plan = plan
        run, _ = made.start()
        model = nn.Linear(WIDTH, 1)
        nn.init.ones_(model.weight)
        run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        run.restore()
        model(torch.ones(1, WIDTH)).sum().backward()
        run.apply()
        run.advance()
        moved.append(1 - model.weight.detach())
    torch.testing.assert_close(moved[0] * 0.5, moved[1])


def test_the_first_loss_after_a_resume_is_compared(lab):
    """Data that do not come back as they were are told of."""
    made = lab(checkpoint={"every_steps": 2})
    for value, told in ((1.0, 0), (1.0, 0), (2.0, 1)):
        run, _ = made.start()
        program = Program(run)
        for _ in run.steps(until=forge.Steps(12)):
            program.backward(next(program.stream))
            program.optimizer.step()
            run.advance(loss=value)
            run._now_and_then()
            if run.step_number == 3:
                break  # as if it were killed
        notes = [note.text for note in made.events(ev.Note) if "has the loss" in note.text]
        assert len(notes) == told


# -- several optimizers ---------------------------------------------------------------------------


class Gan:
    """A generator and a discriminator, each with its optimizer and its loss."""

    def __init__(self, run: forge.Run) -> None:
        torch.manual_seed(3)
        self.run = run
        self.generator, self.discriminator = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        self.g = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        self.d = torch.optim.SGD(self.discriminator.parameters(), lr=0.1)
        models = {"generator": self.generator, "discriminator": self.discriminator}
        run.register(**models, g=self.g, d=self.d)

    def fake(self, micro: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.generator(torch.ones(len(micro), 2))
        return out

    def d_loss(self, micro: torch.Tensor) -> torch.Tensor:
        loss = self.discriminator(self.fake(micro).detach()) - self.discriminator(micro)
        return loss.square().mean()

    def g_loss(self, micro: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.discriminator(self.fake(micro)).square().mean()
        return loss

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.generator.weight.detach().clone(), self.discriminator.weight.detach().clone()


DATA = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(5))


def handed_out(run: forge.Run, steps: int = 3) -> Iterator[Any]:
    return run.batches(DATA, global_batch_size=4, until=forge.Steps(steps))


def test_each_optimizer_of_a_gan_is_stepped_by_its_own_loss_and_a_batch_is_one_step(lab):
    """Row 5: the generator's step moved the discriminator, and each batch counted twice."""
    made = lab(checkpoint={"every_steps": 1, "keep_last": 9})
    run, _ = made.start()
    gan = Gan(run)
    for number, batch in enumerate(handed_out(run)):
        before = gan.weights()
        run.train_step(batch, gan.d_loss, optimizer=gan.d)
        middle = gan.weights()
        run.train_step(batch, gan.g_loss, optimizer=gan.g)
        after = gan.weights()
        assert [torch.equal(*pair) for pair in zip(before, middle, strict=True)] == [True, False]
        assert [torch.equal(*pair) for pair in zip(middle, after, strict=True)] == [False, True]
        assert run.step_number == number + 1, "closed once both were stepped"
    assert run.finish() == 3
    assert made.events(ev.Progress)[-1].consumed == 12
    assert made.saved() == [(1, "every_steps"), (2, "every_steps"), (3, "every_steps")]


def test_a_gan_is_the_same_as_spelled_out(lab):
    found = []
    for way in ("calls", "block"):
        run, _ = lab(way).start()
        gan = Gan(run)
        for batch in handed_out(run):
            if way == "calls":
                run.train_step(batch, gan.d_loss, optimizer=gan.d, max_norm=1.0)
                run.train_step(batch, gan.g_loss, optimizer=gan.g, max_norm=1.0)
                continue
            (micro,) = batch.micro_batches
            for loss, optimizer in ((gan.d_loss, gan.d), (gan.g_loss, gan.g)):
                gan.g.zero_grad()
                gan.d.zero_grad()
                loss(micro).backward()
                parameters = optimizer.param_groups[0]["params"]
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
            with run.step(batch) as step:  # counts it; gradients are gone
                step.apply(gan.g)
        found.append(gan.weights())
    torch.testing.assert_close(found[0], found[1])


def test_one_optimizer_alone_is_a_step_too_counted_before_the_next_batch(lab):
    made = lab(checkpoint={"every_steps": 1, "keep_last": 9})
    run, _ = made.start()
    gan, seen = Gan(run), []
    for number, batch in enumerate(handed_out(run, 4)):
        seen.append((run.step_number, batch.first))
        run.train_step(batch, gan.d_loss, optimizer=gan.d)
        if number % 2:
            run.train_step(batch, gan.g_loss, optimizer=gan.g)
    assert run.finish() == 4
    assert seen == [(n, 4 * n) for n in range(4)]
    assert [step for step, _ in made.saved()] == [1, 2, 3, 4]


def test_the_last_step_counts_where_the_loop_is_left(lab):
    run, _ = lab().start()
    gan = Gan(run)
    for batch in handed_out(run, 4):
        run.train_step(batch, gan.d_loss, optimizer=gan.d)
        break
    assert run.finish() == 1


def test_noise_of_the_program_s_own_is_a_part_of_the_batch_s_step(lab):
    run, _ = lab().start()
    gan = Gan(run)
    for number, batch in enumerate(handed_out(run, 2)):
        run.train_step(torch.ones(4, WIDTH), gan.g_loss, optimizer=gan.g)
        run.train_step(batch, gan.d_loss, optimizer=gan.d)
        assert run.step_number == number + 1
    assert run.step_number == 2


def test_what_is_made_of_a_batch_is_that_batch_and_another_one_is_not(lab):
    run, _ = lab().start()
    gan, last = Gan(run), None
    with pytest.raises(UnsupportedError, match="another batch than the one"):
        for batch in handed_out(run):
            halves = batch.micro_batches[0].split(2)
            made = dataclasses.replace(batch, micro_batches=halves, micro_sizes=(2, 2))
            run.train_step(last or made, gan.d_loss)
            last = made
    assert run.step_number == 1


def calls(gan: Gan, *which: str) -> None:
    """One call after the other on each batch: the loss, and with * its optimizer."""
    for batch in handed_out(gan.run):
        for each in which:
            optimizer = getattr(gan, each[0]) if each.endswith("*") else None
            loss = gan.d_loss if each[0] == "d" else gan.g_loss
            gan.run.train_step(batch, loss, optimizer=optimizer)


def own_calls(gan: Gan) -> None:
    gan.run.restore()
    gan.run.train_step((DATA[:4],)[0], gan.d_loss)
    gan.run.train_step((DATA[:4],)[0], gan.d_loss)  # a batch again: nothing wrong with that
    batch = DATA[4:8]
    gan.run.train_step(batch, gan.d_loss)
    gan.run.train_step(batch, gan.g_loss)


@pytest.mark.parametrize(
    ("body", "says", "steps"),
    [
        (lambda gan: calls(gan, "d", "g"), "of a batch whose step is counted already", 1),
        (lambda gan: calls(gan, "d*", "g"), "a call with optimizer= has begun the step", 0),
        (lambda gan: calls(gan, "d", "g*"), "of a batch whose step is counted already", 1),
        (lambda gan: calls(gan, "d*", "g*", "d*"), "of a batch whose step is counted already", 1),
        (own_calls, "another loss of the same batch", 3),
    ],
)
def test_a_second_call_on_one_batch_without_an_optimizer_is_refused(lab, body, says, steps):
    run, _ = lab().start()
    with pytest.raises(UnsupportedError) as caught:
        body(Gan(run))
    assert says in str(caught.value)
    assert "run.train_step(batch, compute_loss, optimizer=…)" in caught.value.next_step
    assert run.step_number == steps


@pytest.mark.parametrize("loop", ["steps", "plain"])
def test_a_gan_on_data_of_its_own(lab, loop):
    made = lab(checkpoint={"every_steps": 1, "keep_last": 9})
    run, _ = made.start()
    gan, stream = Gan(run), Stream()
    run.restore()

    def both(batch: torch.Tensor) -> None:
        run.train_step(batch, gan.d_loss, optimizer=gan.d)
        run.train_step(batch, gan.g_loss, optimizer=gan.g)

    if loop == "steps":
        for _ in run.steps(until=forge.Steps(3)):
            both(next(stream))
    else:
        for _ in range(3):
            both(next(stream))
    assert run.finish() == 3
    assert [step for step, _ in made.saved()] == [1, 2, 3]
    assert made.events(ev.Progress)[-1].consumed == 12


def test_a_step_that_the_body_leaves_open_is_refused_and_named(lab):
    """Where the next batch is fetched behind it, its end is no boundary."""
    run, _ = lab().start()
    gan, stream = Gan(run), Stream()
    with pytest.raises(UnsupportedError, match=r"no run.advance\(\) counts \(g not stepped\)"):
        for _ in run.steps(until=forge.Steps(3)):
            run.train_step(next(stream), gan.d_loss, optimizer=gan.d)


def test_critic_updates_before_one_of_the_generator_are_one_step(lab):
    made = lab(checkpoint={"every_steps": 1, "keep_last": 9})
    run, _ = made.start()
    gan, stream = Gan(run), Stream()
    run.restore()
    for _ in range(2):
        for _ in range(3):
            run.train_step(next(stream), gan.d_loss, optimizer=gan.d)
        run.train_step(next(stream), gan.g_loss, optimizer=gan.g)
    assert run.finish() == 2
    assert [step for step, _ in made.saved()] == [1, 2]
    assert made.events(ev.Progress)[-1].consumed == 24


def test_advance_counts_a_step_of_one_optimizer_alone(lab):
    run, _ = lab().start()
    gan, stream = Gan(run), Stream()
    run.restore()
    for _ in range(3):
        run.train_step(next(stream), gan.d_loss, optimizer=gan.d)
        run.advance()
    assert run.finish() == 3


def test_a_bad_gradient_of_one_loss_leaves_that_update_out(lab):
    made = lab()
    run, _ = made.start()
    gan = Gan(run)
    for number, batch in enumerate(handed_out(run)):
        bad = math.nan if number == 1 else 1.0
        run.train_step(batch, gan.d_loss, optimizer=gan.d)
        middle = gan.weights()
        run.train_step(batch, lambda micro, bad=bad: gan.g_loss(micro) * bad, optimizer=gan.g)
        assert torch.equal(middle[0], gan.generator.weight) == (number == 1)
    assert run.finish() == 3
    (skipped,) = made.events(ev.StepSkipped)
    assert (skipped.step, skipped.first_sample, skipped.samples) == (2, 4, 4)


def test_memory_that_runs_out_in_one_of_two_calls_is_tried_again_smaller(lab):
    made = lab()
    run, _ = made.start()
    gan, sizes = Gan(run), []

    def full(micro: torch.Tensor) -> torch.Tensor:
        sizes.append(len(micro))
        if len(micro) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gan.g_loss(micro)

    for batch in handed_out(run):
        run.train_step(batch, gan.d_loss, optimizer=gan.d)
        run.train_step(batch, full, optimizer=gan.g)
    assert run.finish() == 3
    assert sizes == [4, 2, 2, 2, 2, 2, 2]
    assert run.recovery.micro_batch == 2


# -- phases ---------------------------------------------------------------------------------------


def evaluated(program: Program, steps: int, *, fetch_first: bool, due: bool = True) -> list[int]:
    """An evaluation before every second step, behind the fetch or before it."""
    run, done = program.run, []
    run.restore()
    while run.step_number < steps:
        batch = next(program.stream) if fetch_first else None
        if run.due("eval", every=2) if due else run.step_number % 2 == 0 < run.step_number:
            with run.phase("eval"):
                for _ in range(3):
                    run.poll()
                run.log(loss=float(run.step_number))
            done.append(run.step_number)
        program.own_step(next(program.stream) if batch is None else batch)
    return done


@pytest.mark.parametrize("fetch_first", [True, False])
def test_a_stop_in_a_phase_saves_the_position_of_the_last_step(lab, fetch_first):
    made = lab()
    run, _ = made.start(due={Position(4, 1, 2): RequestKind.STOP})
    with pytest.raises(RunStopped):
        evaluated(Program(run), 9, fetch_first=fetch_first)
    run, _ = made.start()
    program = Program(run)
    assert run.restore()
    assert (run.step_number, program.stream.position) == (4, 4)
    assert evaluated(program, 7, fetch_first=fetch_first) == [4, 6], "the one that was cut off"
    assert program.seen == [(4, 4), (5, 5), (6, 6)]


@pytest.mark.parametrize("fetch_first", [True, False])
def test_the_best_is_kept_with_the_position_of_its_step(lab, fetch_first):
    made = lab(checkpoint={"keep_best": {"metric": "loss", "mode": "max"}, "keep_last": 9})
    run, _ = made.start()
    evaluated(Program(run), 5, fetch_first=fetch_first)
    assert made.saved() == [(2, "best loss"), (4, "best loss")]
    run, _ = made.start()
    program = Program(run)
    run.restore()
    assert program.stream.position == 4


def test_a_phase_that_is_not_due_is_no_place_to_save_until_it_is_known(lab):
    made = lab()
    run, _ = made.start(due={Position(2, 1): RequestKind.STOP, Position(4, 1): RequestKind.STOP})
    program = Program(run)
    with pytest.raises(RunStopped):
        evaluated(program, 9, fetch_first=True, due=False)
    assert made.saved() == [(4, "stop")]
    run, _ = made.start()
    program = Program(run)
    run.restore()
    assert program.stream.position == 4


def test_an_end_phase_behind_batches_can_be_stopped(lab):
    made = lab()
    run, _ = made.start(due={Position(2, 1, LAST): RequestKind.STOP})
    program = Program(run)
    for batch in run.batches(torch.ones(8, WIDTH), global_batch_size=2, until=forge.Steps(2)):
        program.whole(batch)
    with pytest.raises(RunStopped), run.phase("test"):
        pass
    assert made.saved() == [(2, "stop")]


# -- faults on purpose ----------------------------------------------------------------------------


@pytest.mark.parametrize("take", ["applied", "block", "whole"])
@pytest.mark.parametrize("fault", ["nan@1", "inf@1", "corrupt@1:grad:nan"])
def test_a_fault_strikes_what_is_guarded_in_every_way(lab, take, fault):
    made = lab(inject=[fault])
    run, _ = made.start()
    program = Program(run)
    program.train(3, take)
    (skipped,) = made.events(ev.StepSkipped)
    assert skipped.step == 2
    assert torch.isfinite(program.weights).all()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("take", STEPS)
def test_faults_between_steps_strike_in_every_loop(lab, loop, take):
    run, _ = lab(inject=["exception@2"]).start()
    program = Program(run)
    with pytest.raises(RuntimeError, match="an injected fault at step 2"):
        program.train(5, take, loop)
    assert run.step_number == 2


@pytest.mark.parametrize(
    ("take", "fault", "says"),
    [
        ("own_step", "nan@9", "the loop steps its optimizer itself"),
        ("own_step", "oom@9", "the loop steps its optimizer itself"),
        ("own_step", "slow@9:factor=2", "which part of a step is this rank's own"),
        ("applied", "oom@9", "sees the gradients and not the forward pass"),
        ("applied", "nan:samples=4-9", "sees the gradients and not the samples"),
        ("applied", "nan@9:above=4", "sees the gradients and not the samples"),
        ("applied", "slow@9:factor=2", "which part of a step is this rank's own"),
        ("block", "nan:samples=4-9", "only run.batches() knows the positions"),
        ("whole", "nan:samples=4-9", "only run.batches() knows the positions"),
    ],
)
def test_a_fault_that_would_never_strike_is_refused_in_the_first_step(lab, take, fault, says):
    run, _ = lab(inject=[fault]).start()
    with pytest.raises(UnsupportedError) as caught:
        Program(run).train(5, take)
    assert says in str(caught.value)
    assert fault in str(caught.value)
    assert run.step_number == 0


# -- batches that are fetched before their step ---------------------------------------------------


def _behind_the_update(program: Program, take: str) -> None:
    following = next(program.stream)

    def fetch(*_: object) -> None:
        nonlocal following
        following = next(program.stream)

    program.optimizer.register_step_post_hook(fetch)  # ours comes before it, and sees less
    for _ in program.run.steps(until=forge.Steps(4)):
        getattr(program, take)(following)


def _before_the_loop(program: Program, take: str) -> None:
    following = next(program.stream)
    for _ in program.run.steps(until=forge.Steps(4)):
        batch, following = following, next(program.stream)
        getattr(program, take)(batch)


@pytest.mark.parametrize("take", ["own_step", "applied", "block", "whole"])
@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (_behind_the_update, "between the update of the weights and the step's end"),
        (_before_the_loop, "before the loop, and again in the first step"),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_batch_that_is_fetched_ahead_is_refused_before_it_is_lost(
    lab: Callable[..., Lab], loop: Callable[..., None], says: str, take: str, resumed: bool
) -> None:
    made = lab()
    if resumed:
        run, _ = made.start(due={Position(2): RequestKind.STOP})
        with pytest.raises(RunStopped):
            Program(run).train(4, take, "steps")
    saved = made.saved()
    run, _ = made.start()
    program = Program(run)
    run.restore()
    with pytest.raises(UnsupportedError, match=f"'stream' was fetched from {says}"):
        loop(program, take)
    assert made.saved() == saved


def test_a_first_batch_may_be_fetched_before_the_loop_and_trained_on_in_it(
    lab: Callable[..., Lab],
) -> None:
    run, _ = lab().start()
    program = Program(run)
    run.restore()
    first: list[torch.Tensor] = [next(program.stream)]
    for _ in run.steps(until=forge.Steps(5)):
        program.own_step(first.pop() if first else next(program.stream))
    assert program.seen == [(step, step) for step in range(5)]


def test_what_changes_behind_the_update_and_hands_nothing_out_belongs_to_the_step(
    lab: Callable[..., Lab],
) -> None:
    run, _ = lab().start()
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(WIDTH, 1))
    run.register(average=average)
    program = Program(run)
    run.restore()
    for _ in run.steps(until=forge.Steps(5)):
        loss, norm = program.backward(next(program.stream))
        program.optimizer.step()
        average.update_parameters(average.module)
        run.advance(loss=loss, grad_norm=norm)
    assert run.step_number == 5
