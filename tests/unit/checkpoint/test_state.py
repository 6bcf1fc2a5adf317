"""One process, no process group: what is loaded equals what was saved, bit for bit."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from torch import nn

from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.errors import CheckpointError
from tests.unit.checkpoint.helpers import bitwise, open_store, save

ADAM = {"lr": 1e-2, "weight_decay": 0.1}


class Net(nn.Module):
    """Buffers of several dtypes, tied weights, a frozen and an unused parameter."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.last = nn.Linear(8, 6, dtype=dtype)
        self.tied = nn.Linear(6, 8, bias=False, dtype=dtype)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.randn(3, dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 4))

    def forward(self, x):
        return self.tied(self.last(torch.relu(self.norm(self.first(x)))))


def train(model, optimizer, steps, scheduler=None):
    for _ in range(steps):
        optimizer.zero_grad()
        parameter = next(model.parameters())
        model(torch.randn(5, 6, dtype=parameter.dtype)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def through_disk(tmp_path, old: TrainingState, new: TrainingState):
    store = open_store(tmp_path)
    save(store, old)
    return resume(store, new, group=None, on_reject=lambda *why: pytest.fail(f"rejected: {why}"))


def tensors_of(value, path="") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: t for key, v in items for k, t in tensors_of(v, f"{path}.{key}").items()}
    return {}


def without_tensors(value):
    if isinstance(value, dict):
        return {k: without_tensors(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_tensors(v) for v in value)
    return None if isinstance(value, torch.Tensor) else value


def assert_same(a, b):
    x, y = tensors_of(a), tensors_of(b)
    assert list(x) == list(y)
    for key in x:
        assert bitwise(x[key], y[key]), key
    assert without_tensors(a) == without_tensors(b)


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, **ADAM),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, **ADAM),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True, **ADAM),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True, **ADAM),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum-decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, **ADAM),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("live", ["fresh", "stepped", "with gradients"])
def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path, kind, live):
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(model, optimizer, 3, scheduler)
    rng = {"rng/rank-0/torch": torch.get_rng_state()}
    old = TrainingState(
        models={"net": model}, optimizers={"opt": optimizer}, objects={"lr": scheduler}, rng=rng
    )
    expected = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))

    other = Net(seed=9)
    fresh = OPTIMIZERS[kind](other.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(fresh, 2, 0.5)
    if live != "fresh":
        train(other, fresh, 7, schedule)
    if live != "with gradients":
        fresh.zero_grad()
    new = TrainingState(
        models={"net": other}, optimizers={"opt": fresh}, objects={"lr": schedule}, rng=rng
    )
    loaded = through_disk(tmp_path, old, new)

    # Saving changed nothing, loading brought everything.
    now = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
    assert_same(list(now), list(expected))
    assert_same([other.state_dict(), fresh.state_dict(), schedule.state_dict()], list(expected))
    assert loaded.missing_rng == ()

    torch.set_rng_state(loaded.rng["rng/rank-0/torch"])
    train(model, optimizer, 3, scheduler)
    torch.set_rng_state(loaded.rng["rng/rank-0/torch"])
    train(other, fresh, 3, schedule)
    assert_same(other.state_dict(), model.state_dict())
    assert_same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_save_before_the_first_step_leaves_the_optimizer_alone(tmp_path, kind):
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = Net(seed=9)
    stepped = OPTIMIZERS[kind](other.parameters())
    train(other, stepped, 2)
    old = TrainingState(models={"net": model}, optimizers={"opt": optimizer})
    new = TrainingState(models={"net": other}, optimizers={"opt": stepped})
    through_disk(tmp_path, old, new)
    assert_same([model.state_dict(), optimizer.state_dict()], list(before))
    assert_same([other.state_dict(), stepped.state_dict()], list(before))


def test_loading_is_in_place(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    train(model, optimizer, 2)
    state = TrainingState(models={"net": model}, optimizers={"opt": optimizer})
    store = open_store(tmp_path)
    save(store, state)
    wanted = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    lr = optimizer.param_groups[0]["lr"]
    before = tensors_of([model.state_dict(), optimizer.state_dict()])
    resume(store, state, group=None, on_reject=lambda *why: pytest.fail(f"rejected: {why}"))
    now = [model.state_dict(), optimizer.state_dict()]
    assert_same(now, list(wanted))
    for key, tensor in tensors_of(now).items():
        assert tensor.data_ptr() == before[key].data_ptr(), key
    assert optimizer.param_groups[0]["lr"] is lr and lr.item() == torch.tensor(1e-2).item()


def test_moments_of_another_dtype_than_the_weights_are_not_converted(tmp_path):
    class Master(torch.optim.Optimizer):
        """bf16 weights, fp32 state, as mixed-precision optimizers keep it."""

        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    master = state.setdefault("master", p.detach().float().clone())
                    state["count"] = state.get("count", 0) + 1
                    state["seen"] = state.get("seen", torch.zeros((), dtype=torch.int64)) + 1
                    master -= 0.01 * p.grad.float()
                    p.copy_(master)

    model, other = Net(dtype=torch.bfloat16), Net(seed=9, dtype=torch.bfloat16)
    optimizer, fresh = Master(model.parameters()), Master(other.parameters())
    train(model, optimizer, 3)
    through_disk(
        tmp_path,
        TrainingState(models={"net": model}, optimizers={"opt": optimizer}),
        TrainingState(models={"net": other}, optimizers={"opt": fresh}),
    )
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert fresh.state[other.first.weight]["master"].dtype == torch.float32


def test_two_models_and_two_optimizers_with_groups(tmp_path):
    def build(seed):
        g, d = Net(seed), Net(seed + 1)
        og = torch.optim.Adam(g.parameters(), lr=1e-2)
        od = torch.optim.SGD(
            [
                {"params": d.first.parameters(), "lr": 0.1, "label": "first"},
                {"params": [d.unused, *d.last.parameters()], "lr": 0.2, "betas": (1, float("inf"))},
            ],
            momentum=0.9,
        )
        for each, optimizer in ((g, og), (d, od)):
            train(each, optimizer, seed + 1)
        return TrainingState(
            models={"generator": g, "dis/criminator": d},
            optimizers={"g": og, "d": od},
            extra={"plan": {"lr_scale": 0.5, 3: (1, None)}, "loss": float("nan")},
        )

    old, new = build(1), build(5)
    loaded = through_disk(tmp_path, old, new)
    for name in old.models:
        assert_same(new.models[name].state_dict(), old.models[name].state_dict())
    for name in old.optimizers:
        assert_same(new.optimizers[name].state_dict(), old.optimizers[name].state_dict())
    assert loaded.extra["plan"] == old.extra["plan"] and math.isnan(loaded.extra["loss"])


def test_every_kind_of_number_keeps_its_bits(tmp_path):
    torch.manual_seed(0)
    kinds = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int8,
        torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn,
    ]  # fmt: skip

    class Holder(nn.Module):
        def __init__(self, fill):
            super().__init__()
            for number, kind in enumerate(kinds):
                raw = torch.randint(0, 2 if kind == torch.bool else 256, (64,), dtype=torch.uint8)
                values = raw.view(kind)
                self.register_buffer(f"b{number}", values if fill else torch.zeros_like(values))
            special = [float("nan"), float("inf"), -0.0, 1e-45]
            self.register_buffer("special", torch.tensor(special) if fill else torch.zeros(4))
            values = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
            self.register_buffer("image", values if fill else torch.zeros(2, 3, 4, 5))
            self.register_buffer(
                "part", torch.randn(10, 10)[2:4, ::3] if fill else torch.zeros(2, 4)
            )
            self.register_buffer("scalar", torch.tensor(1.5 if fill else 0.0))

    old, new = Holder(True), Holder(False)
    through_disk(tmp_path, TrainingState(models={"m": old}), TrainingState(models={"m": new}))
    assert_same(dict(new.state_dict()), dict(old.state_dict()))


def test_objects_with_tensors_and_odd_values_inside(tmp_path):
    class Ema:
        def __init__(self, value):
            self.state = {
                "shadow": {"a": torch.full((3,), value), "b": [torch.tensor(value), (value, None)]},
                7: torch.full((2,), value, dtype=torch.bfloat16),
                "random": random.Random(int(value)).getstate(),
                "decay": value / 3,
            }

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    old, new = Ema(1.0), Ema(2.0)
    mine = new.state["shadow"]["a"]
    through_disk(tmp_path, TrainingState(objects={"ema": old}), TrainingState(objects={"ema": new}))
    assert_same(new.state, old.state)
    assert torch.equal(mine, torch.full((3,), 2.0)), "what an object shares is its own business"


def test_extra_state_of_modules(tmp_path):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.seen = {"count": 0, "scale": torch.zeros(2)}

        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    old, new = Counting(), Counting()
    old.seen = {"count": 12, "scale": torch.ones(2), "names": ("a",)}
    through_disk(tmp_path, TrainingState(models={"m": old}), TrainingState(models={"m": new}))
    assert_same(new.seen, old.seen)
    assert_same(dict(new.named_parameters()), dict(old.named_parameters()))


def test_generator_states_that_were_not_saved_are_reported(tmp_path):
    old = TrainingState(rng={"rng/rank-0/torch": torch.get_rng_state()})
    asked = {"rng/rank-0/torch": torch.empty(0), "rng/rank-1/torch": torch.empty(0)}
    loaded = through_disk(tmp_path, old, TrainingState(rng=asked))
    assert loaded.missing_rng == ("rng/rank-1/torch",)
    assert bitwise(loaded.rng["rng/rank-0/torch"], old.rng["rng/rank-0/torch"])


def net(**changes):
    module = nn.Sequential(nn.Linear(changes.get("width", 4), 3, bias=changes.get("bias", True)))
    return module.to(changes.get("dtype", torch.float32))


MISMATCHES = {
    "shape": (TrainingState(models={"m": net(width=5)}), "models/m/0.weight: saved as float32"),
    "dtype": (TrainingState(models={"m": net(dtype=torch.bfloat16)}), "here it is bfloat16"),
    "missing": (TrainingState(models={"m": net(bias=False)}), "only in the checkpoint: 0.bias"),
    "unexpected": (
        TrainingState(models={"m": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))}),
        "missing in the checkpoint: 1.bias",
    ),
    "name": (TrainingState(models={"model": net()}), "only here: model"),
    "object": (
        TrainingState(models={"m": net()}, optimizers={"o": torch.optim.SGD(net().parameters())}),
        "only here: o",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_checkpoint_of_something_else_changes_nothing(tmp_path, case):
    new, text = MISMATCHES[case]
    before = {name: copy.deepcopy(module.state_dict()) for name, module in new.models.items()}
    with pytest.raises(CheckpointError, match="Loading step") as caught:
        through_disk(tmp_path, TrainingState(models={"m": net()}), new)
    assert text in caught.value.message and caught.value.next_step
    assert_same({name: module.state_dict() for name, module in new.models.items()}, before)


def test_other_parameter_groups_are_refused(tmp_path):
    def build(order):
        module = net()
        parameters = list(module.parameters())[::order]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        return TrainingState(models={"m": module}, optimizers={"o": optimizer})

    with pytest.raises(CheckpointError, match="parameter groups"):
        through_disk(tmp_path, build(1), build(-1))


class Holding:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"inner": [self.value]}

    def load_state_dict(self, state):
        raise AssertionError


def lone_optimizer():
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


class Raising(Holding):
    """An object that fails in one of its methods."""

    def __init__(self, method):
        super().__init__(1)
        self.method = method

    def state_dict(self):
        return {}["saved"] if self.method == "state_dict" else super().state_dict()

    def load_state_dict(self, state):
        raise ValueError("no room for it")


@pytest.mark.parametrize(
    ("method", "raised"),
    [("state_dict", "KeyError: 'saved'"), ("load_state_dict", "ValueError: no room for it")],
)
def test_an_object_whose_method_raises_is_named(tmp_path, method, raised):
    good, bad = TrainingState(objects={"ema": Holding(1)}), {"ema": Raising(method)}
    with pytest.raises(
        CheckpointError, match=rf"{method}\(\) of 'ema' \(Raising\) raised {raised}"
    ):
        through_disk(tmp_path, good, TrainingState(objects=bad))


def entry_named(name):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight][name] = torch.zeros(2)
    return TrainingState(models={"m": module}, optimizers={"o": optimizer})


REFUSED = {
    "lambda": (TrainingState(objects={"o": Holding(print)}), "objects/o/inner/0"),
    "sparse": (
        TrainingState(objects={"o": Holding(torch.eye(3).to_sparse())}), "objects/o/inner/0",
    ),
    "meta": (TrainingState(models={"m": nn.Linear(2, 2, device="meta")}), "models/m/weight"),
    "extra": (TrainingState(extra={"a": {"b": object()}}), "extra/a/b"),
    "tensor in extra": (TrainingState(extra={"a": torch.zeros(1)}), "extra/a"),
    "entry without a name": (entry_named(3), "optimizers/o/state/m/weight: a tensor has the key"),
    "lone parameter": (TrainingState(optimizers={"opt": lone_optimizer()}), "no registered model"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_saved_is_named_and_leaves_nothing_behind(tmp_path, case):
    state, text = REFUSED[case]
    store = open_store(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        save(store, state)
    assert text in caught.value.message and caught.value.next_step
    assert list(store.directory.iterdir()) == []


def test_compiled_and_checkpointed_wrappers_leave_no_trace(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = Net()
    wrapped = Net(seed=9)
    wrapped.last = checkpoint_wrapper(wrapped.last)
    compiled = torch.compile(wrapped)
    old_optimizer = torch.optim.Adam(plain.parameters())
    new_optimizer = torch.optim.Adam(compiled.parameters())
    train(plain, old_optimizer, 2)
    through_disk(
        tmp_path,
        TrainingState(models={"m": plain}, optimizers={"o": old_optimizer}),
        TrainingState(models={"m": compiled}, optimizers={"o": new_optimizer}),
    )
    assert bitwise(wrapped.last.weight, plain.last.weight)
    assert_same(new_optimizer.state_dict(), old_optimizer.state_dict())
    save(
        open_store(tmp_path), TrainingState(models={"m": compiled}, optimizers={"o": new_optimizer})
    )


def test_a_wrapped_layer_that_is_held_twice_leaves_no_trace_under_either_name(tmp_path):
    old, new = nn.Module(), nn.Module()
    old.a = old.b = torch.compile(nn.Linear(2, 2))
    new.a = new.b = nn.Linear(2, 2)
    state = TrainingState(models={"m": old})
    assert list(state.capture().tensors) == [
        f"models/m/{name}" for name in ("a.weight", "a.bias", "b.weight", "b.bias")
    ]
    through_disk(tmp_path, state, TrainingState(models={"m": new}))
    assert bitwise(new.b.weight, old.b._orig_mod.weight)
    same_names = state.capture(state.capture().known).tensors
    assert list(same_names) == list(state.capture().tensors)
