"""A state taken apart again with what was known of it is the same as one taken apart anew."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.write.plan import Planner
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.errors import CheckpointError
from slurm_forge.store.identity import CheckpointName
from tests.unit.checkpoint.helpers import no_fence, open_store


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.body[0].weight  # tied
        self.register_buffer("transient", torch.zeros(3), persistent=False)
        self.register_buffer("lasting", torch.ones(3))
        self.register_parameter("nothing", None)
        self.add_module("left", nn.Linear(2, 2))
        self.add_module("right", None)


class Average:
    """An object with tensors of its own, new ones each time."""

    def __init__(self):
        self.values = {"a": torch.ones(2)}

    def state_dict(self):
        return {key: value.clone() for key, value in self.values.items()}

    def load_state_dict(self, state):
        self.values = dict(state)


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.model = Net()
        trained = [*self.model.body.parameters(), *self.model.head.parameters()]
        self.optimizer = torch.optim.AdamW(dict.fromkeys(trained), lr=torch.tensor(0.1))
        self.average = Average()
        self.extra = {"step": 1}
        self.step()

    def step(self):
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self):
        return TrainingState(
            models={"net": self.model},
            optimizers={"adam": self.optimizer},
            objects={"average": self.average},
            extra=self.extra,
            rng={"rng/rank-0/torch": torch.get_rng_state()},
        )


def same(one, other):
    assert list(one.tensors) == list(other.tensors)  # a plan holds for one order only
    for key, tensor in other.tensors.items():
        mine = one.tensors[key]
        assert mine.dtype == tensor.dtype
        assert torch.equal(mine, tensor), key
        if not key.startswith(("objects/", "rng/")):
            assert mine.data_ptr() == tensor.data_ptr(), key
    assert one.document == other.document
    assert (one.alike, one.parts, one.shape) == (other.alike, other.parts, other.shape)


def nothing(t): ...
def another_step(t):
    t.step()


def other_extra(t):
    t.extra = {"step": 7}


def other_rate(t):
    t.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def rate_as_number(t):
    t.optimizer.param_groups[0]["lr"] = 0.5


def other_betas(t):
    t.optimizer.param_groups[0]["betas"] = (0.5, 0.6)


def other_average(t):
    t.average.values["a"] = torch.zeros(2)


def more_average(t):
    t.average.values["b"] = torch.zeros(2)


def other_data(t):
    t.model.head.bias.data = torch.full((4,), 7.0)


def other_shape(t):
    t.model.body[1].running_mean = torch.zeros(9)


def other_buffer(t):
    t.model.body[1].running_mean = torch.full((4,), 5.0)


def more_buffers(t):
    t.model.register_buffer("new", torch.ones(1))


def kept_buffer(t):
    t.model.register_buffer("transient", torch.ones(3), persistent=True)


def renamed(t):
    t.model.tail = t.model._modules.pop("head")


def swapped(t):
    layers = t.model.body._modules
    layers["0"], layers["2"] = layers["2"], layers["0"]


def untied(t):
    t.model.head.weight = nn.Parameter(torch.ones(4, 4))
    t.optimizer.add_param_group({"params": [t.model.head.weight]})


def state_gone(t):
    t.optimizer.state.clear()


def state_replaced(t):
    entry = next(iter(t.optimizer.state.values()))
    entry["exp_avg"] = torch.full_like(entry["exp_avg"], 3.0)


def number_in_state(t):
    next(iter(t.optimizer.state.values()))["note"] = 5


def hooked(t):
    t.model.register_state_dict_post_hook(lambda m, state, *_: state.__delitem__("head.bias"))


def state_in_other_order(t):
    first = next(iter(t.optimizer.state))
    t.optimizer.state[first] = t.optimizer.state.pop(first)


def number_for_tensor(t):
    next(iter(t.optimizer.state.values()))["exp_avg"] = 5


def entry_renamed(t):
    for entries in t.optimizer.state.values():
        entries["other"] = entries.pop("exp_avg_sq")


def optimizer_loaded(t):
    t.optimizer.load_state_dict(t.optimizer.state_dict())


def child_under_another_name(t):
    t.model.left, t.model.right = None, t.model.left


def other_buffer_is_kept(t):
    kept = t.model._non_persistent_buffers_set
    kept.remove("transient")
    kept.add("lasting")


def own_state_dict(t):
    t.model.state_dict = lambda *_, **__: {"only": t.model.lasting}


def own_state_dict_inside(t):
    real = t.model.head._save_to_state_dict
    t.model.head._save_to_state_dict = lambda state, prefix, keep: (
        real(state, prefix, keep), state.pop(prefix + "bias"),
    )  # fmt: skip


def own_state_dict_of_the_optimizer(t):
    real = t.optimizer.state_dict
    t.optimizer.state_dict = lambda: {**real(), "more": 5}


def number_beside_the_parameters(t):
    t.optimizer.state["glob"] = 3


def state_beside_the_parameters(t):
    t.optimizer.state["glob"] = {"n": 1}


CHANGES = [
    nothing, another_step, other_extra, other_rate, rate_as_number, other_betas, other_average,
    more_average, other_data, other_shape, other_buffer, more_buffers, kept_buffer, renamed,
    swapped, untied, state_gone, state_replaced, number_in_state, hooked, state_in_other_order,
    number_for_tensor, entry_renamed, optimizer_loaded, child_under_another_name,
    other_buffer_is_kept, own_state_dict, own_state_dict_inside, own_state_dict_of_the_optimizer,
    number_beside_the_parameters, state_beside_the_parameters,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changed_it_is_as_if_taken_apart_anew(change):
    training = Training()
    known = training.state.capture().known
    assert known is not None
    change(training)
    same(training.state.capture(known), training.state.capture())


@pytest.mark.parametrize("change", [nothing, another_step, other_extra, other_rate, other_data,
                                    other_average, state_replaced, other_betas])  # fmt: skip
def test_names_are_not_made_anew_and_the_plan_holds_while_they_do(change, monkeypatch):
    training = Training()
    first, planner = training.state.capture(), Planner()
    plan = planner.make(first, Ranks(None))
    change(training)
    monkeypatch.setattr(TrainingState, "_anew", lambda *_: pytest.fail("taken apart anew"))
    assert planner.known(training.state.capture(first.known)) == plan.number


def test_a_writer_takes_apart_and_plans_once(tmp_path, monkeypatch):
    training, writer = Training(), CheckpointWriter(open_store(tmp_path), group=None)

    def save(step):
        name = CheckpointName.new(step=step, attempt=1, launch=1)
        return writer.begin(training.state, name=name, reason="test", fence=no_fence).result()

    save(1)
    monkeypatch.setattr(TrainingState, "_anew", lambda *_: pytest.fail("taken apart anew"))
    monkeypatch.setattr(Planner, "make", lambda *_: pytest.fail("planned anew"))
    training.step()
    assert save(2).name.step == 2


@pytest.mark.parametrize("value", [3, {"n": 1}, {"n": torch.zeros(2)}], ids=["3", "dict", "tensor"])
def test_what_an_optimizer_keeps_beside_is_as_it_is_now(value):
    training = Training()
    training.optimizer.state["glob"] = value
    known = training.state.capture().known
    if isinstance(value, dict):
        value["n"] = value["n"] + 1
    else:
        training.optimizer.state["glob"] = value + 1
    same(training.state.capture(known), training.state.capture())


def test_a_scripted_part_is_taken_apart_anew_each_time():
    training = Training()
    training.model.left = torch.jit.script(training.model.left)
    first = training.state.capture()
    with torch.no_grad():
        training.model.left.weight.fill_(8.0)
    again = training.state.capture(first.known)
    assert torch.equal(again.tensors["models/net/left.weight"], torch.full((2, 2), 8.0))


def test_a_parameter_that_the_optimizer_does_not_train_any_more_is_refused_as_ever():
    training = Training()
    known = training.state.capture().known
    training.model.head.bias = nn.Parameter(torch.ones(4))
    with pytest.raises(CheckpointError, match="belongs to no registered model"):
        training.state.capture(known)


def test_what_is_known_keeps_no_tensor_alive():
    training = Training()
    known = training.state.capture().known
    seen, todo = set(), [known]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        assert not isinstance(each, torch.Tensor | DTensor)
        todo += gc.get_referents(each)
