"""One rank: a bad gradient leaves no trace; a good one is applied exactly as without the guard."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slurm_forge.errors import UnsupportedError
from slurm_forge.training.step.buffer_snapshot import BufferSnapshot
from slurm_forge.training.step.gradient_guard import (
    LARGEST,
    Reading,
    apply_gradients,
    drop_gradients,
    skips_on_device,
)
from slurm_forge.training.step.gradient_norms import parameter_names

#: The square of 1e30 is more than a float32 can hold, and so is Adam's second moment.
BAD = [float("nan"), float("inf"), float("-inf"), 1e30]


def matrices_only(build):
    """For an optimizer of matrices: nothing else is trained."""

    def built(parameters):
        parameters = list(parameters)
        for parameter in parameters:
            parameter.requires_grad_(parameter.ndim == 2)
        return build([p for p in parameters if p.ndim == 2])

    return built


OPTIMIZERS = {
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, weight_decay=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "fused SGD momentum": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, fused=True
    ),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), capturable=False),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adam foreach amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "SGD for-loop": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OPTIMIZERS["Muon"] = matrices_only(lambda p: torch.optim.Muon(p, lr=1e-2))
ON_DEVICE = {"fused Adam", "fused AdamW", "fused AdamW amsgrad", "fused SGD", "fused SGD momentum"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
#: What is done where the norm is on a device, done on the CPU: nothing on the way looks at a value.
either_way = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def backward(net, step, poison=None):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    net(x).square().mean().backward()
    if poison is not None:
        net[3].weight.grad[1, 2] = poison


def everything(net, optimizer):
    """All that a step may change, as copies."""
    found = {f"model.{name}": value.clone() for name, value in net.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found[f"optimizer.{number}.{name}"] = torch.as_tensor(value).clone()
    for number, group in enumerate(optimizer.param_groups):
        found[f"lr.{number}"] = torch.as_tensor(group["lr"]).clone()
    return found


def same(one, other):
    """Bit for bit; an optimizer may have created an empty state meanwhile."""
    for name in one.keys() | other.keys():
        mine, theirs = one.get(name), other.get(name)
        if mine is None or theirs is None:
            assert name.startswith("optimizer.")
            assert not (theirs if mine is None else mine).any()
        else:
            assert mine.dtype == theirs.dtype
            assert (
                torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
                if (mine.ndim)
                else mine.item() == theirs.item()
            ), name
    return True


def run(name, steps, *, bad=(), poison=None, **how):
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    buffers = BufferSnapshot([net])
    how = {"max_norm": 0.05, **how}
    for step in range(steps):
        buffers.take()
        before = everything(net, optimizer)
        backward(net, step, poison if step in bad else None)
        applied = apply_gradients(optimizer, **how)
        buffers.restore_where(applied.left_out)
        assert applied.skipped() == (step in bad)
        assert applied.found_inf.item() in (0.0, 1.0)
        assert all(p.grad is None for p in net.parameters())
        assert not hasattr(optimizer, "found_inf")
        assert not hasattr(optimizer, "grad_scale")
        if step in bad:
            assert same(everything(net, optimizer), before)
    return everything(net, optimizer)


def bad_gradients():
    """All of them; of each optimizer, either way, two meet in the short run, in turn."""
    every = itertools.product(enumerate(OPTIMIZERS), enumerate(BAD), (0, 2), (False, True))
    for (number, name), (which, poison), bad, on_device in every:
        short = (number + which + bad + 2 * on_device) % len(BAD) == 0
        marks = () if short else pytest.mark.slow
        yield pytest.param(name, poison, bad, on_device, marks=marks)


@pytest.mark.parametrize(("name", "poison", "bad", "on_device"), list(bad_gradients()))
def test_a_bad_gradient_leaves_no_trace(name, poison, bad, on_device):
    skipped = run(name, 5, bad={bad}, poison=poison, on_device=on_device)
    assert all(torch.isfinite(value.double()).all() for value in skipped.values())
    # It goes on like a run that was never given that gradient.
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    for step in range(5):
        if step != bad:
            backward(net, step)
            apply_gradients(optimizer, max_norm=0.05)
    assert same(skipped, everything(net, optimizer))


@either_way
@every_optimizer
@pytest.mark.parametrize("max_norm", [None, 0.05, 1e9])
def test_good_gradients_are_applied_as_clip_and_step_do(name, max_norm, on_device):
    guarded = run(name, 4, max_norm=max_norm, on_device=on_device)
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    for step in range(4):
        backward(net, step)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    assert same(guarded, everything(net, optimizer))


@every_optimizer
def test_which_optimizers_skip_by_themselves(name):
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    backward(net, 0)
    first = skips_on_device(optimizer)
    optimizer.step()
    assert skips_on_device(optimizer) == (name in ON_DEVICE)
    assert first == (name in ON_DEVICE - {"fused SGD momentum"})


def test_a_subclass_may_do_anything_and_is_judged_on_the_host():
    class Mine(torch.optim.AdamW):
        pass

    assert not skips_on_device(Mine(model().parameters(), fused=True))


def test_finite_gradients_with_an_infinite_norm_are_bad_too():
    # 1e25 squared is infinite in Adam's second moment: that weight would never move again.
    run("fused AdamW", 3, bad={1}, poison=1e25)


@every_optimizer
def test_a_norm_that_the_program_computed_decides(name):
    def applied(grad_norm):
        net = model()
        optimizer = OPTIMIZERS[name](net.parameters())
        before = net[3].weight.detach().clone()
        backward(net, 0)
        outcome = apply_gradients(optimizer, grad_norm=grad_norm, max_norm=1e-9)
        return outcome.skipped(), torch.equal(net[3].weight, before), net[3].weight.detach()

    assert applied(torch.tensor(float("nan")))[:2] == (True, True)
    assert applied(float("inf"))[:2] == (True, True)
    skipped, unmoved, weight = applied(2.5)
    assert not skipped
    assert not unmoved
    # It has clipped already: we don't.
    assert torch.equal(weight, applied(torch.tensor(1e9))[2])


@every_optimizer
def test_a_scaled_learning_rate_holds_for_one_step_and_is_put_back_exactly(name):
    def stepped(lr_scale, lr_factor):
        net = model()
        optimizer = OPTIMIZERS[name](net.parameters())
        lrs = [group["lr"] for group in optimizer.param_groups]
        if lr_factor != 1:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * lr_factor
        backward(net, 0)
        apply_gradients(optimizer, lr_scale=lr_scale)
        if lr_factor == 1:
            assert all(
                group["lr"] is lr for group, lr in zip(optimizer.param_groups, lrs, strict=True)
            )
        return {k: v for k, v in everything(net, optimizer).items() if k.startswith("model")}

    assert same(stepped(0.3, 1), stepped(1.0, 0.3))
    assert not torch.equal(stepped(0.3, 1)["model.3.weight"], stepped(1.0, 1)["model.3.weight"])


def test_the_learning_rate_is_put_back_after_an_error_too():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.7)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    backward(net, 0)
    with pytest.raises(ZeroDivisionError):
        apply_gradients(optimizer, lr_scale=0.1)
    assert optimizer.param_groups[0]["lr"] == 0.7


def test_a_factor_for_the_gradients_comes_before_norm_and_clip():
    def stepped(factor, by_hand):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        backward(net, 0)
        for p in net.parameters():
            p.grad *= by_hand
        applied = apply_gradients(optimizer, max_norm=0.05, gradient_factor=factor)
        return applied.norm, net[3].weight.detach().clone()

    norm, weight = stepped(torch.tensor(0.25, dtype=torch.float64), 1)
    expected_norm, expected = stepped(None, 0.25)
    torch.testing.assert_close(norm, expected_norm)
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-8)
    assert not torch.isfinite(stepped(float("inf"), 1)[0])


@pytest.mark.parametrize("name", ["fused AdamW", "AdamW", "fused SGD momentum", "fused Adagrad"])
@pytest.mark.parametrize("poison", BAD)
def test_a_gradient_scaler_sees_the_same_verdict(name, poison):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def steps(numbers, bad=()):
        net, scale = model(), scaler()
        optimizer = OPTIMIZERS[name](net.parameters())
        scales = []
        for step in numbers:
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            scale.scale(net(x).square().mean()).backward()
            if step in bad:
                net[3].weight.grad[1, 2] = poison
            applied = apply_gradients(optimizer, max_norm=0.05, scaler=scale)
            assert applied.skipped() == (step in bad)
            scales.append(scale.get_scale())
        return net, optimizer, scales

    net, optimizer, scales = steps(range(4), bad={1})
    assert scales == [1024.0, 512.0, 512.0, 1024.0]
    other, theirs, _ = steps([0, 2, 3])
    mine = everything(net, optimizer)
    for key, value in everything(other, theirs).items():
        if "running" not in key and "batches" not in key:
            torch.testing.assert_close(mine[key], value, rtol=1e-6, atol=1e-8)


def test_a_scaler_that_saw_finite_gradients_is_told_of_an_infinite_norm():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(net(torch.randn(16, 4)).square().mean()).backward()
    net[3].weight.grad[0, 0] = 1e30
    before = net[3].weight.detach().clone()
    assert apply_gradients(optimizer, scaler=scaler).skipped()
    assert torch.equal(net[3].weight, before)
    assert scaler.get_scale() == 1.0


def test_one_scaler_for_two_optimizers_is_updated_once():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    nets = [model(), model()]
    optimizers = [torch.optim.AdamW(net.parameters(), fused=True) for net in nets]
    for step, net in enumerate(nets):
        x = torch.randn(16, 4)
        scaler.scale(net(x).square().mean()).backward()
        if step == 0:
            net[3].weight.grad[0, 0] = float("inf")
    verdicts = [
        apply_gradients(optimizer, scaler=scaler, update_scaler=optimizer is optimizers[-1])
        for optimizer in optimizers
    ]
    assert [applied.skipped() for applied in verdicts] == [True, False]
    assert scaler.get_scale() == 512.0


def test_a_disabled_scaler_is_none_at_all():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    backward(net, 0, float("nan"))
    assert apply_gradients(optimizer, scaler=scaler).skipped()


@pytest.mark.parametrize("poison", [*BAD, None])
def test_sparse_gradients_are_judged_and_clipped_by_their_values(poison):
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    before = table.weight.detach().clone()
    (table(torch.tensor([1, 1, 4])) * (1.0 if poison is None else poison)).sum().backward()
    applied = apply_gradients(optimizer, max_norm=1.0)
    assert applied.skipped() == (poison is not None)
    moved = (table.weight - before).norm().item()
    assert moved == pytest.approx(0.0 if poison is not None else 1.0, abs=1e-5)


def test_dropping_gradients_is_zero_grad():
    net = model()
    optimizer = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[3].parameters()}])
    backward(net, 0)
    drop_gradients(optimizer)
    assert {name for name, p in net.named_parameters() if p.grad is not None} == {
        "1.weight",
        "1.bias",
    }


def test_without_any_gradient_nothing_is_done():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    applied = apply_gradients(optimizer, max_norm=1.0)
    assert not applied.skipped()
    assert applied.norm == 0
    assert not optimizer.state


class Counting(nn.Module):
    """Buffers of several kinds: changed in place, exchanged, constant, changed late."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("late", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, late=False):
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
            self.count = self.count + 1
            if late:
                self.late += 1
        return self.norm(x * self.mask)


def identical(one, other):
    return one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def buffers_of(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_buffers_of_a_skipped_step_are_as_before_and_those_of_others_stay():
    module = Counting()
    snapshot = BufferSnapshot([module])
    for step in range(4):
        snapshot.take()
        before = buffers_of(module)
        module(torch.full((2, 3), float("nan")) if step % 2 else torch.randn(2, 3))
        snapshot.restore_where(torch.tensor(float(step % 2)))
        after = buffers_of(module)
        unchanged = {name for name in before if torch.equal(before[name], after[name])}
        assert unchanged == (set(before) if step % 2 else {"mask", "late"})
        assert snapshot.unprotected == ()


def test_a_buffer_that_changes_late_is_named_once_and_protected_from_then_on():
    module = Counting()
    snapshot = BufferSnapshot([module])
    for step in range(4):
        snapshot.take()
        before = module.late.clone()
        module(torch.randn(2, 3), late=step >= 2)
        snapshot.restore_where(torch.tensor(1.0))
        assert snapshot.unprotected == (("late",) if step == 2 else ())
        assert torch.equal(module.late, before) == (step != 2)


class Settling(nn.Module):
    """After two steps nothing new is to be found out, until a step does something else."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("nothing", None)
        self.register_buffer("table", torch.eye(3).t()[:, :2])  # not contiguous

    def forward(self, x):
        return self.norm(x * self.mask)


def exchange(module):
    module.norm.running_mean = module.norm.running_mean + 1


def move(module):
    module.norm.running_var.data = module.norm.running_var.data.clone()


def change_a_constant(module):
    module.mask.mul_(2)


def fill_in(module):
    module.nothing = torch.ones(2)


def evaluate(module):
    module.norm.eval()


def train_again(module):
    module.norm.train()


def grow(module):
    module.norm.running_mean = torch.zeros(4)
    module.norm.running_mean = torch.zeros(3)


ACTIONS = [exchange, move, change_a_constant, fill_in, evaluate, train_again, grow]


@pytest.mark.parametrize(
    "flag", [bool, lambda skip: torch.tensor(float(skip))], ids=["bool", "0-1"]
)
@given(
    between=st.dictionaries(st.integers(0, 9), st.sampled_from(ACTIONS)),
    within=st.dictionaries(st.integers(0, 9), st.sampled_from(ACTIONS)),
    skipped=st.sets(st.integers(0, 9)),
)
def test_whatever_happens_to_buffers_they_are_put_back_or_named(flag, between, within, skipped):
    module = Settling()
    snapshot = BufferSnapshot([module])
    for step in range(10):
        between.get(step, lambda _: None)(module)
        snapshot.take()
        before, asleep = buffers_of(module), not module.norm.training
        within.get(step, lambda _: None)(module)
        bad = step in skipped
        module(torch.full((2, 3), math.nan) if bad else torch.randn(2, 3))
        after = buffers_of(module)
        snapshot.restore_where(flag(bad))
        now = buffers_of(module)
        for name, value in now.items():
            if not bad:
                assert identical(value, after[name]), (name, step)
            elif asleep and not module.norm.training and name.startswith("norm."):
                continue  # evaluation mode: nobody's business
            elif name not in snapshot.unprotected and name in before:
                assert identical(value, before[name]), (name, step)


def test_buffers_that_only_batches_change_are_never_named():
    module = Settling()
    snapshot = BufferSnapshot([module])
    for _ in range(5):
        snapshot.take()
        before = buffers_of(module)
        module(torch.full((2, 3), math.nan))
        snapshot.restore_where(True)
        assert snapshot.unprotected == ()
        assert all(torch.equal(value, before[name]) for name, value in buffers_of(module).items())


def taken_and_put_back(module, snapshot, within=lambda _: None):
    """One skipped step; which buffers are not what they were, and which of them are named."""
    snapshot.take()
    before = buffers_of(module)
    within(module)
    module(torch.full((2, 3), math.nan))
    snapshot.restore_where(True)
    changed = {n for n, v in buffers_of(module).items() if not identical(v, before[n])}
    return changed, set(snapshot.unprotected)


def test_a_constant_that_changes_after_all_is_named_once():
    module = Settling()
    snapshot = BufferSnapshot([module])
    for _ in range(3):
        assert taken_and_put_back(module, snapshot) == (set(), set())
    assert taken_and_put_back(module, snapshot, change_a_constant) == ({"mask"}, {"mask"})
    for _ in range(2):
        assert taken_and_put_back(module, snapshot, change_a_constant) == (set(), set())


@pytest.mark.parametrize("settle", [False, True])
def test_training_that_begins_within_a_step_is_named(settle):
    module = Settling()
    snapshot = BufferSnapshot([module])
    for _ in range(3 if settle else 0):
        snapshot.take()
        module(torch.randn(2, 3))
        snapshot.restore_where(False)
    snapshot.take()
    evaluate(module)
    changed, named = taken_and_put_back(module, snapshot, train_again)
    assert {"norm.running_mean", "norm.running_var"} <= changed <= named


def test_after_an_evaluation_buffers_are_in_again_and_named_if_training_began_unseen():
    module = Settling()
    snapshot = BufferSnapshot([module])
    for _ in range(3):
        assert taken_and_put_back(module, snapshot) == (set(), set())
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    evaluate(module)
    assert taken_and_put_back(module, snapshot) == (set(), set())
    assert taken_and_put_back(module, snapshot, train_again) == (statistics, statistics)
    module.norm.reset_running_stats()
    for _ in range(2):
        assert taken_and_put_back(module, snapshot) == (set(), set())


def test_modules_in_evaluation_mode_are_left_alone():
    module = Counting().eval()
    snapshot = BufferSnapshot([module])
    module.mask.fill_(7)
    snapshot.restore_where(torch.tensor(1.0))
    assert module.mask.tolist() == [7, 7, 7]


def test_restoring_where_is_the_same_as_deciding_on_the_host(monkeypatch):
    """What CUDA does, without CUDA: the verdict is never looked at by the host."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("meta")

        def item(self):
            raise AssertionError("the host must not wait")

        def to(self, *_):
            return self.as_subclass(torch.Tensor)

    module = Counting()
    snapshot = BufferSnapshot([module])
    for step in range(5):
        snapshot.take()
        before = buffers_of(module)
        module(torch.full((2, 3), float("nan")) if step % 2 else torch.randn(2, 3))
        mid = buffers_of(module)
        snapshot.restore_where(torch.tensor(float(step % 2)).as_subclass(Elsewhere))
        after = buffers_of(module)
        for name in after:
            assert torch.equal(after[name], (before if step % 2 else mid)[name]), name


def test_the_same_module_twice_and_shared_parts_are_taken_once():
    module = Counting()
    snapshot = BufferSnapshot([module, module, nn.Sequential(module.norm)])
    assert sum(len(copies.places) for copies in snapshot._copies) == 7


def test_buffers_without_numbers_in_a_row_are_only_watched():
    module = nn.LazyBatchNorm1d()
    module.register_buffer("edges", torch.eye(3).to_sparse())
    snapshot = BufferSnapshot([module])
    for _ in range(2):
        snapshot.take()
        snapshot.restore_where(torch.tensor(1.0))
        assert snapshot.unprotected == ()
    module.edges.mul_(2)
    snapshot.restore_where(torch.tensor(1.0))
    assert snapshot.unprotected == ("edges",)


def test_state_of_the_optimizer_can_be_copied_afterwards():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    backward(net, 0)
    apply_gradients(optimizer)
    copy.deepcopy(optimizer)


def test_every_optimizer_of_torch_is_tried_here():
    kinds = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    tried = {type(build(model().parameters())) for build in OPTIMIZERS.values()}
    assert kinds - tried == {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused():
    net = model()
    backward(net, 0)
    with pytest.raises(UnsupportedError, match="several times"):
        apply_gradients(torch.optim.LBFGS(net.parameters()))


@either_way
@pytest.mark.parametrize("poison", BAD)
def test_sparse_adam_is_judged_as_well(poison, on_device):
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for step in range(4):
        before = copy.deepcopy((table.state_dict(), optimizer.state_dict()["state"]))
        (table(torch.tensor([1, 1, step])) * (poison if step == 2 else 1.0)).sum().backward()
        applied = apply_gradients(optimizer, max_norm=1.0, on_device=on_device)
        assert applied.skipped() == (step == 2)
        assert torch.isfinite(table.weight).all()
        assert torch.equal(table.weight, before[0]["weight"]) == (step == 2)
        if step == 2:
            assert torch.equal(
                optimizer.state_dict()["state"][0]["exp_avg"], before[1][0]["exp_avg"]
            )


@either_way
@every_optimizer
def test_a_norm_beyond_the_limit_is_left_out_though_it_is_finite(name, on_device):
    def stepped(limit):
        net = model()
        optimizer = OPTIMIZERS[name](net.parameters())
        backward(net, 0)
        before = everything(net, optimizer)
        applied = apply_gradients(optimizer, max_norm=0.05, limit=limit, on_device=on_device)
        reading = applied.verdict.read()
        assert reading.applied != same_or_not(everything(net, optimizer), before)
        return reading

    def same_or_not(one, other):
        try:
            return same(one, other)
        except AssertionError:
            return False

    norm = stepped(LARGEST).norm
    assert 0.05 < norm < 100
    assert stepped(norm) == (True, True, norm, pytest.approx(math.nan, nan_ok=True))
    beyond = stepped(torch.nextafter(torch.tensor(norm), torch.zeros(())).item())
    assert (beyond.applied, beyond.finite, beyond.norm) == (False, True, norm)


@either_way
@pytest.mark.parametrize("limit", [math.inf, math.nan, 1e300])
@pytest.mark.parametrize("poison", BAD)
def test_no_limit_lets_a_gradient_through_that_is_not_finite(limit, poison, on_device):
    run("fused AdamW", 3, bad={1}, poison=poison, limit=limit, on_device=on_device)


@either_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_limit_means_the_same_in_every_dtype(dtype, on_device):
    # The largest float32 is inf in bfloat16, and inf is not beyond inf.
    for poison, finite in ((math.inf, False), (math.nan, False), (4.0, True)):
        net = nn.Linear(2, 2).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        before = net.weight.detach().clone()
        net.weight.grad = torch.zeros(2, 2, dtype=dtype)
        net.weight.grad[0, 0] = poison
        applied = apply_gradients(optimizer, on_device=on_device)
        assert applied.verdict.read()[:2] == (finite, finite)
        assert torch.equal(net.weight, before) == (not finite)


@either_way
def test_what_the_host_reads(on_device):
    def reading(poison=None, **how):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        backward(net, 0, poison)
        return apply_gradients(optimizer, on_device=on_device, **how).verdict

    verdict = reading(loss=torch.tensor(2.5, dtype=torch.float64))
    assert verdict.is_ready()
    found = verdict.read()
    assert (found.applied, found.finite, found.loss) == (True, True, 2.5)
    assert 0.0 < found.norm < 100.0
    assert verdict.read() == found
    assert math.isnan(reading().read().loss)
    found = reading(math.nan, loss=torch.tensor([math.inf], requires_grad=True)).read()
    assert (found.applied, found.finite, found.loss) == (False, False, math.inf)
    assert math.isnan(found.norm)
    assert reading(grad_norm=3.0, limit=2.0).read()[:3] == Reading(False, True, 3.0, 0.0)[:3]
    assert reading(grad_norm=-math.inf).read()[:2] == (False, False)


@either_way
@pytest.mark.parametrize("near", [-0.03, -1e-3, -1e-6, 0.0, 1e-6, 1e-3, 0.03])
def test_clipping_is_that_of_clip_grad_norm_to_the_last_bit_near_the_norm_too(near, on_device):
    def gradients(clip):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for p in net.parameters():
            p.data.zero_()  # what is left after the step is the gradient
        for number, p in enumerate(net.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        clip(net, optimizer)
        return [p.detach().clone() for p in net.parameters()]

    norms = []
    gradients(
        lambda net, _: norms.append(nn.utils.get_total_norm([p.grad for p in net.parameters()]))
    )
    max_norm = norms[0].item() * (1 + near)

    def theirs(net, optimizer):
        nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()

    def ours(_, optimizer):
        apply_gradients(optimizer, max_norm=max_norm, on_device=on_device)

    for one, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert torch.equal(one, other)


def test_gradients_that_wait_for_their_factor_cant_have_been_clipped():
    net = model()
    backward(net, 0)
    with pytest.raises(UnsupportedError, match="scaled later"):
        apply_gradients(
            torch.optim.SGD(net.parameters()), grad_norm=1.0, gradient_factor=torch.tensor(0.5)
        )


@either_way
def test_groups_that_are_added_and_parameters_that_are_frozen_on_the_way(on_device):
    net = model()
    optimizer = torch.optim.AdamW(net[3].parameters(), lr=1e-2, fused=True)
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": list(net[0].parameters())})
        if step == 4:
            net[3].bias.requires_grad_(False)
        before = net[0].weight.detach().clone()
        backward(net, step, math.nan if step in (3, 5) else None)
        applied = apply_gradients(optimizer, max_norm=0.05, on_device=on_device)
        for p in net[1].parameters():
            p.grad = None  # nobody's
        assert applied.skipped() == (step in (3, 5))
        assert torch.equal(net[0].weight, before) == (step not in (2, 4))
        named = {part.name for part in applied.blame(parameter_names({"model": net}))}
        expected = {"3.weight"} | ({"3.bias"} if step < 4 else set())
        assert named == expected | ({"0.weight", "0.bias"} if step >= 2 else set())


@either_way
def test_after_an_incident_the_parameter_is_named(on_device):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    backward(net, 0, math.nan)
    net[0].bias.grad[1] = 1e15
    norms = {name: p.grad.norm().item() for name, p in net.named_parameters()}
    blamed = apply_gradients(optimizer, max_norm=1.0, on_device=on_device).blame(
        parameter_names({"model": net})
    )
    assert [part.name for part in blamed[:2]] == ["3.weight", "0.bias"]
    assert [part.finite for part in blamed] == [False] + [True] * 5
    assert [part.norm for part in blamed[1:]] == sorted(
        (norms[part.name] for part in blamed[1:]), reverse=True
    )


def test_where_the_program_computed_the_norm_the_parameter_is_named_as_well():
    net = model()
    backward(net, 0, math.inf)
    applied = apply_gradients(torch.optim.SGD(net.parameters()), grad_norm=math.inf)
    assert applied.blame(parameter_names({"model": net}))[0][::2] == ("3.weight", False)


def test_fused_kernels_take_exactly_one_for_a_skip_and_are_never_given_anything_else():
    """Two devices' flags of 1 add up to 2 in GradScaler: that applies the NaN."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    backward(net, 0, math.nan)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(2.0), None
    optimizer.step()
    assert not torch.isfinite(net[3].weight).all()

    for scaled in (False, True):
        net, given = model(), []
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        optimizer.register_step_pre_hook(
            lambda o, *_, given=given: given.append(o.found_inf.item())
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        for step in range(4):
            loss = net(torch.ones(3, 4)).sum()
            (scaler.scale(loss) if scaled else loss).backward()
            if step % 2:
                net[3].weight.grad[0, 0] = math.inf
            apply_gradients(optimizer, scaler=scaler, on_device=True)
        assert given == [0.0, 1.0, 0.0, 1.0]


def test_a_gradient_scaler_overwrites_and_deletes_what_the_optimizer_was_told():
    """Why the verdict is entered into the scaler and not written beside it."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(net(torch.ones(3, 4)).sum()).backward()
    before = net[3].weight.detach().clone()
    optimizer.found_inf = torch.tensor(1.0)
    scaler.step(optimizer)
    assert not torch.equal(net[3].weight, before)
    assert not hasattr(optimizer, "found_inf")


class Looks(TorchDispatchMode):
    """Counts the operations for which the host has to know a value: on CUDA each of them waits."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "_to_copy", "tolist")

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in self.NAMES:
            self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def thousand_steps(net, device, on_device, poisoned, read_late):
    """Clip, fused AdamW, buffers put back, a scheduler, the loss carried; returns the readings."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    buffers = BufferSnapshot([net])
    good = torch.randn(8, 4, device=device)
    bad = torch.full((8, 4), math.nan, device=device)
    verdicts, readings = [], []
    for step in range(1000):
        buffers.take()
        loss = net(bad if step in poisoned else good).square().mean()
        loss.backward()
        applied = apply_gradients(optimizer, max_norm=0.1, loss=loss, on_device=on_device)
        buffers.restore_where(applied.left_out)
        scheduler.step()
        verdicts.append(applied.verdict)
        if read_late and step:
            readings.append(verdicts[-2].read())
    return verdicts if not read_late else [*readings, verdicts[-1].read()]


PLAIN = functools.partial(nn.Sequential, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
NORMALISED = functools.partial(
    nn.Sequential, nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(PLAIN, marks=pytest.mark.slow, id="plain"),
        pytest.param(NORMALISED, id="BatchNorm"),
    ],
)
def test_a_thousand_steps_never_ask_the_device_for_a_value(build):
    net, poisoned = copy.deepcopy(build()), {0, 1, 500, 999}
    with Looks() as looks:
        verdicts = thousand_steps(net, "cpu", True, poisoned, read_late=False)
    assert looks.seen == {}
    # They arrive later, and all is as it should be.
    assert {step for step, each in enumerate(verdicts) if not each.read().applied} == poisoned
    assert all(torch.isfinite(value).all() for value in net.state_dict().values())

    # The counter counts: with an optimizer that can't skip by itself there is one look per step.
    with Looks() as looks:
        optimizer = torch.optim.NAdam(net.parameters())
        net(torch.ones(2, 4)).sum().backward()
        apply_gradients(optimizer, grad_norm=torch.ones(()), on_device=False)
    assert looks.seen["_local_scalar_dense"] >= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("build", [PLAIN, NORMALISED], ids=["plain", "BatchNorm"])
def test_a_thousand_steps_on_cuda_without_a_synchronising_call(build):
    net, poisoned = copy.deepcopy(build()).cuda(), {0, 1, 500, 999}
    thousand_steps(copy.deepcopy(net), "cuda", None, set(), read_late=True)  # everything is loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        readings = thousand_steps(net, "cuda", None, poisoned, read_late=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {step for step, each in enumerate(readings) if not each.applied} == poisoned
    assert all(torch.isfinite(value).all() for value in net.state_dict().values())
    assert all(math.isfinite(each.loss) for n, each in enumerate(readings) if n not in poisoned)
