"""The loss behind a checkpoint that a stop has written: when it is computed, and what it costs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from slurm_forge.control.messages.rank import RankStopped
from slurm_forge.journal import events as ev
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.checkpointing.resume_check import seconds_for_loss
from slurm_forge.training.core.host_generators import Generators, HostGenerators
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.loop import reference_loss
from slurm_forge.training.loop.loss_calls import LossCalls
from slurm_forge.vocabulary.position import LAST, Position
from tests.unit.training.test_data_sources import lab
from tests.unit.training.test_run import BATCH, Failing, Lab, Numbers, RequestKind, forge

__all__ = ["lab"]


class Rows:
    """An iterable with a state, whose rows are drawn from the training's own generator."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.given += 1
            yield torch.randn(4, 3) + self.given

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


# -- whether there is time ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_s", "left_s", "allowed_s"),
    [
        (0.2, 600.0, 3.0),
        (0.2, 13.0, 3.0),
        (0.2, 12.9, 0.0),  # ranks have to leave, and the job to be requeued
        (0.2, 0.0, 0.0),
        (0.2, None, 0.0),  # nobody has said when the launch ends
        (11.6, 600.0, 60.0),
        (11.7, 600.0, 0.0),  # nobody waits a minute for it
    ],
)
def test_it_is_begun_where_it_may_take_many_times_as_long(
    step_s: float, left_s: float | None, allowed_s: float
) -> None:
    assert seconds_for_loss(step_s, left_s) == pytest.approx(allowed_s)


# -- whether the next step's loss is known --------------------------------------------------------


class Calls:
    """Steps of a loop, each with its own function."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)
        self.calls = LossCalls({"model": self.model}, torch.device("cpu"), HostGenerators())

    def step(self, function: Callable[..., Any] | None, *, before: Callable[[], object]) -> None:
        batch = Batch(micro_batches=[torch.ones(2, 3)])
        self.calls.handed_out(batch)
        before()
        self.begins(batch, function)
        self.calls.handed_out(None)

    def begins(self, batch: Batch, function: Callable[..., Any] | None) -> None:
        self.last = function
        self.calls.step_begins(batch, function, Generators.now(torch.device("cpu")))

    def next(self) -> Callable[..., Any] | None:
        return self.calls.next_function(self.last)

    def known(
        self, *functions: Callable[..., Any] | None, before: Callable[[], object] = lambda: None
    ) -> bool:
        for function in functions:
            self.step(function, before=before)
        return self.next() is not None


def loss(model: nn.Module, micro: torch.Tensor, scale: object = 1.0) -> torch.Tensor:
    return model(micro).square().mean() * scale


class Task:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, micro: torch.Tensor) -> torch.Tensor:
        return loss(self.model, micro)


def made_anew(model: nn.Module, scale: object) -> Callable[..., Any]:
    """As a lambda in the body of a loop is."""
    return lambda micro: loss(model, micro, scale)


def test_two_steps_alike_make_the_next_one_known() -> None:
    made = Calls()
    model, task = made.model, Task(made.model)
    assert not made.known(made_anew(model, 1.0)), "one step says nothing"
    assert made.known(made_anew(model, 1.0)), "another function of the same code and values"
    assert not made.known(task.loss) and made.known(task.loss), "a bound method is made anew, too"
    partial = functools.partial
    assert not made.known(partial(loss, model)) and made.known(partial(loss, model))
    assert not made.known(model) and made.known(model), "an object that is called"
    model.eval()
    assert not made.known(), "the mode has changed since"


def test_values_that_change_from_step_to_step_make_it_unknown() -> None:
    made, model = Calls(), Calls().model
    assert not made.known(made_anew(model, 0.1), made_anew(model, 0.2))
    assert not made.known(made_anew(model, torch.rand(())), made_anew(model, torch.rand(())))
    assert not made.known(*(functools.partial(loss, model, scale=s) for s in (0.1, 0.2)))
    assert not made.known(*(lambda micro, s=s: loss(model, micro, s) for s in (0.1, 0.2)))
    assert not made.known(
        lambda micro: loss(model, micro),  # Python 3.10 tells functions apart by their lines
        lambda micro: loss(model, micro),
    )
    assert not made.known(None, None), "a block of run.step"
    scale = 0.1

    def uses_a_variable_of_the_loop(micro: torch.Tensor) -> torch.Tensor:
        return loss(model, micro, scale)

    made.step(uses_a_variable_of_the_loop, before=lambda: None)
    scale = 0.2
    made.step(uses_a_variable_of_the_loop, before=lambda: None)
    assert made.next() is None


def test_a_step_that_was_not_looked_at_is_compared_with_those_that_were() -> None:
    made, model = Calls(), Calls().model
    assert made.known(made_anew(model, 0.1), made_anew(model, 0.1))
    last = made_anew(model, 0.2)
    assert made.calls.next_function(last) is last, "of the same code: with the last step's values"
    assert made.calls.next_function(functools.partial(loss, model)) is None, "another function"
    assert made.calls.next_function(None) is None, "the last step was a block of run.step"


def test_what_the_body_does_before_the_step_makes_it_unknown() -> None:
    made = Calls()
    same = functools.partial(loss, made.model)
    assert not made.known(same, same, before=lambda: torch.rand(1)), "random numbers are drawn"
    made.known(same)
    batch = Batch(micro_batches=[torch.ones(2, 3)])
    made.calls.handed_out(batch)
    batch.micro_batches[0].mul_(2)
    made.begins(batch, same)
    assert made.next() is None, "the batch is changed"
    made.calls.handed_out(batch)
    made.begins(Batch(micro_batches=batch.micro_batches), same)
    assert made.next() is None, "it is another one"
    with torch.autocast("cpu"):
        made.known(same, same)
    assert made.next() is None, "the step is computed in another type"


class Hostile:
    """What it is can't be asked."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)

    def __call__(self, micro: torch.Tensor) -> torch.Tensor:
        return micro.sum()


def test_what_can_not_be_looked_at_is_not_known_and_no_error_of_the_step() -> None:
    made = Calls()
    assert not made.known(Hostile(), Hostile())
    same = functools.partial(loss, made.model)
    with torch.inference_mode():
        batch = Batch(micro_batches=[torch.ones(2, 3)])
    for _ in range(2):
        made.calls.handed_out(batch)
        made.begins(batch, same)
    assert made.next() is None


# -- a run of one process -------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout, and statistics that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class Training:
    """One attempt; ``losses`` are those of all micro-batches that were computed."""

    def __init__(self, made: Lab, *, left_s: float | None = 600.0, **due: Any) -> None:
        self.run, self.channel = made.start(seconds_left=left_s, **due)
        self.model = Net()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.run.register(model=self.model, optimizer=optimizer)
        self.losses: list[float] = []
        self.fails: Callable[[], object] = lambda: None

    def loss(self, micro: torch.Tensor) -> Any:
        self.fails()
        rows = self.model(micro).square()
        self.losses.append(rows.mean().item())
        return forge.Loss(rows.sum(), rows.numel()) if self.run.args.get("sum") else rows.mean()

    def steps(self, steps: int = 40, source: Any = None, **more: Any) -> Training:
        given = {"global_batch_size": BATCH, "micro_batch_size": 2, **more}
        for batch in self.run.batches(source or Numbers(), until=forge.Steps(steps), **given):
            self.run.train_step(batch, self.loss)
        return self

    def stops(self, steps: int = 40, **more: Any) -> Training:
        with pytest.raises(RunStopped):
            self.steps(steps, **more)
        return self

    def said(self) -> list[RankStopped]:
        return [each for each in self.channel.said if isinstance(each, RankStopped)]


def stop_at(*position: int) -> dict[str, Any]:
    return {"due": {Position(*position): RequestKind.STOP}}


def notes(made: Lab) -> list[str]:
    return [note.text for note in made.events(ev.Note)]


STREAM = {"global_batch_size": None, "micro_batch_size": None, "accumulate": 2}


@pytest.mark.parametrize(
    ("source", "more", "place"),
    [
        (Numbers, {}, (5,)),
        (Numbers, {"num_workers": 1}, (5, 1)),
        (Numbers, {}, (5, 1, LAST)),
        (Rows, STREAM, (5,)),
        (Rows, STREAM, (5, 1, LAST)),
    ],
)
def test_it_is_the_loss_that_the_resumed_run_computes_first(
    lab: Callable[..., Lab], source: Any, more: dict[str, Any], place: tuple[int, ...]
) -> None:
    made = lab(args={"sum": more == {}})
    stopped = Training(made, **stop_at(*place)).stops(source=source(), **more)
    if source is Rows and len(place) == 3:
        assert made.events(ev.CheckpointWitnessed) == [], "its random numbers are drawn already"
        return
    (told,) = made.events(ev.CheckpointWitnessed)
    assert (CheckpointName.parse(told.name).step, told.samples) == (5, 1 if source is Rows else 2)
    assert told.loss == stopped.losses[-1] and len(stopped.losses) == 5 * 2 + 1
    first, last = stopped.said()
    assert first.stays_s > 0 == last.stays_s and first.checkpoint == last.checkpoint == told.name
    resumed = Training(made).steps(12, source=source(), **more)
    assert resumed.losses[0] == told.loss, "bit for bit"
    resumed.run._first_steps.check()
    assert notes(made) == []


def test_nothing_of_the_run_has_changed_with_it(lab: Callable[..., Lab]) -> None:
    """A program may save in its ``finally``, and goes on behind ``attach``."""
    made = lab()
    stopped = Training(made, **stop_at(5)).stops()
    statistics = {name: each.clone() for name, each in stopped.model.named_buffers()}
    random = torch.get_rng_state()
    without = Training(lab(), left_s=None, **stop_at(5)).stops()
    assert statistics and all(
        torch.equal(each, statistics[name]) for name, each in without.model.named_buffers()
    )
    assert torch.equal(random, torch.get_rng_state())


def test_weights_that_changed_behind_the_load_are_noticed_by_it(lab: Callable[..., Lab]) -> None:
    """The digests are of what was loaded: a program that does more to it is not seen by them."""
    made = lab()
    Training(made, **stop_at(5)).stops()
    resumed = Training(made)
    resumed.run.restore()
    with torch.no_grad():
        resumed.model.layers[3].weight.mul_(1.01)
    resumed.steps(12)
    resumed.run._first_steps.check()
    assert made.events(ev.Resumed)[-1].exact
    (text,) = notes(made)
    assert "the first micro-batch after step 5 has the loss" in text


def test_another_micro_batch_holds_other_samples(lab: Callable[..., Lab]) -> None:
    made = lab()
    told = Training(made, **stop_at(5)).stops().losses[-1]
    resumed = Training(made).steps(12, micro_batch_size=4)
    resumed.run._first_steps.check()
    assert resumed.losses[0] != pytest.approx(told) and notes(made) == []


def without_time(made: Lab) -> None:
    Training(made, left_s=9.0, **stop_at(5)).stops()


def at_the_last_step(made: Lab) -> None:
    Training(made, **stop_at(5)).stops(5)


def in_a_phase(made: Lab) -> None:
    training = Training(made, **stop_at(3, 2))
    with pytest.raises(RunStopped):
        for batch in batches_of(training):
            if training.run.due("eval", every=3):
                with training.run.phase("eval"):
                    pass
            training.run.train_step(batch, training.loss)


def in_blocks(made: Lab) -> None:
    training = Training(made, **stop_at(5))
    with pytest.raises(RunStopped):
        for batch in batches_of(training):
            with training.run.step(batch) as step:
                for micro in step.micro_batches():
                    step.backward(training.loss(micro))
                step.apply()


def in_a_loop_of_its_own(made: Lab) -> None:
    training = Training(made, **stop_at(5))
    with pytest.raises(RunStopped):
        for number in training.run.steps(until=forge.Steps(40)):
            training.run.train_step(torch.full((4, 3), float(number)), training.loss)


def behind_a_save_that_failed(made: Lab) -> None:
    training = Training(made, **stop_at(5))
    training.run.register(failing=Failing(training.run, 5))
    training.stops()


def batches_of(training: Training) -> Any:
    return training.run.batches(Numbers(), global_batch_size=BATCH, until=forge.Steps(40))


class Slowing(Numbers):
    """Takes its time once the run has stopped."""

    seconds = 0.0

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().__getitem__(index)


def test_a_batch_that_does_not_come_is_not_waited_for(
    lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_loss, "seconds_for_loss", lambda *_: 0.1)
    made, slowing = lab(), Slowing()
    training = Training(made, **stop_at(5))

    @training.run.on("on_stop")
    def slow_down(**_: Any) -> None:
        slowing.seconds = 0.06

    training.stops(source=slowing)
    assert made.events(ev.CheckpointWitnessed) == [] and len(training.losses) == 5 * 2
    (text,) = notes(made)
    assert text.endswith("rank 0: the batch of the next step did not come in time")


@pytest.mark.parametrize(
    "stop",
    [
        without_time,
        at_the_last_step,
        in_a_phase,
        in_blocks,
        in_a_loop_of_its_own,
        behind_a_save_that_failed,
    ],
)
def test_where_there_is_none_nothing_is_said_and_nothing_computed(
    lab: Callable[..., Lab], stop: Callable[[Lab], None]
) -> None:
    made = lab()
    stop(made)
    assert made.events(ev.CheckpointWitnessed) == []
    assert notes(made) == []


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), SystemExit(3), torch.OutOfMemoryError("full")]
)
def test_what_the_loss_function_raises_costs_nothing_else(
    lab: Callable[..., Lab], error: BaseException
) -> None:
    made = lab()
    training = Training(made, **stop_at(5))

    def fail() -> None:
        if len(training.losses) == 10:
            raise error

    training.fails = fail
    training.stops()
    assert made.saved() == [(5, "stop")] and made.events(ev.CheckpointWitnessed) == []
    assert [each.stays_s > 0 for each in training.said()] == [True, False]
    (text,) = notes(made)
    assert text.startswith("the loss behind the checkpoint of step 5 was not computed at the stop")
    assert Training(made).steps(8).run.step_number == 8
