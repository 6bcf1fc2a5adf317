"""One rank: a bad gradient leaves no trace; a good one is applied exactly as without the guard."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from slurm_forge.training.guard import BufferSnapshot, apply_gradients, skips_on_device

BAD = [float("nan"), float("inf"), float("-inf")]

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
}
ON_DEVICE = {"fused Adam", "fused AdamW", "fused AdamW amsgrad", "fused SGD", "fused SGD momentum"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


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
        buffers.restore_where(applied.found_inf)
        assert applied.skipped() == (step in bad)
        assert applied.found_inf.item() in (0.0, 1.0)
        assert all(p.grad is None for p in net.parameters())
        assert not hasattr(optimizer, "found_inf")
        assert not hasattr(optimizer, "grad_scale")
        if step in bad:
            assert same(everything(net, optimizer), before)
    return everything(net, optimizer)


@every_optimizer
@pytest.mark.parametrize("poison", BAD)
@pytest.mark.parametrize("bad", [0, 2])
def test_a_bad_gradient_leaves_no_trace(name, poison, bad):
    skipped = run(name, 5, bad={bad}, poison=poison)
    assert all(torch.isfinite(value.double()).all() for value in skipped.values())
    # It goes on like a run that was never given that gradient.
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    for step in range(5):
        if step != bad:
            backward(net, step)
            apply_gradients(optimizer, max_norm=0.05)
    assert same(skipped, everything(net, optimizer))


@every_optimizer
@pytest.mark.parametrize("max_norm", [None, 0.05, 1e9])
def test_good_gradients_are_applied_as_clip_and_step_do(name, max_norm):
    guarded = run(name, 4, max_norm=max_norm)
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
