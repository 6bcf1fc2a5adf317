"""DDP sums in the same order before and after an interruption, bit for bit, on four ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurm_forge.training.core import rng
from slurm_forge.training.step.ddp_warmup import (
    Buckets,
    settle_ddp_buckets,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Used in another order than registered, so that the first backward cuts other buckets."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(24, 24) for _ in range(8))
        self.norm = nn.BatchNorm1d(24)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for index in (3, 0, 6, 1, 7, 4, 2, 5):
            x = torch.tanh(self.parts[index](x))
        return self.norm(x)


def wrapped(net, **how):
    return DistributedDataParallel(net, bucket_cap_mb=0.006, **how)


def step(ddp, optimizer, rank, number):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(16, 24, generator=generator)
    ddp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def states(net, optimizer):
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


def bits(net, optimizer):
    found = [value.numpy().tobytes() for value in net.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        found += [torch.as_tensor(value).numpy().tobytes() for value in state.values()]
    return found


def interrupted_is_uninterrupted(rank, settle):
    def begin():
        torch.manual_seed(0)
        net = Net()
        ddp = wrapped(net)
        if settle:
            assert settle_ddp_buckets(ddp) is Buckets.SETTLED
        return net, ddp, torch.optim.AdamW(net.parameters(), lr=1e-2)

    net, ddp, optimizer = begin()
    for number in range(6):
        step(ddp, optimizer, rank, number)
        if number == 2:
            model_state, optimizer_state = states(net, optimizer)
    expected = bits(net, optimizer)

    net, ddp, optimizer = begin()
    net.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    for number in range(3, 6):
        step(ddp, optimizer, rank, number)
    return bits(net, optimizer) == expected


@pytest.mark.core
def test_a_resumed_run_is_bitwise_the_uninterrupted_one():
    assert run_ranks(4, interrupted_is_uninterrupted, True) == [True] * 4


def test_without_settling_it_is_not():
    # The control: if this fails, torch has changed, and settling may have become unnecessary.
    assert not all(run_ranks(4, interrupted_is_uninterrupted, False))


def test_settling_leaves_everything_but_the_buckets_as_it_was():
    def body(rank):
        torch.manual_seed(rank)  # buffers differ between ranks, and stay different
        net = Net()
        net.parts[2].weight.requires_grad_(False)
        with torch.no_grad():
            net.parts[3].bias.fill_(float("inf"))
        ddp = wrapped(net)
        net.norm.running_mean.fill_(rank)
        net.parts[0].weight.grad = torch.full((24, 24), 7.0)
        called = []
        ddp.register_forward_hook(lambda *_: called.append("ddp"))
        net.register_forward_pre_hook(lambda *_: called.append("net"))
        before, random_before = copy.deepcopy(net.state_dict()), rng.capture()
        settled = settle_ddp_buckets(ddp)
        random_after = rng.capture()
        assert all(torch.equal(random_before[k], random_after[k]) for k in random_before)
        for name, value in net.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert called == []
        assert net.calls == 0
        assert ddp.module is net
        assert ddp.broadcast_buffers
        assert net.parts[0].weight.grad.unique().tolist() == [7.0]
        assert all(p.grad is None for p in net.parts[1].parameters())
        return settled, ddp._has_rebuilt_buckets

    assert run_ranks(2, body) == [(Buckets.SETTLED, True)] * 2


def test_settled_modules_train_with_accumulation_and_sparse_tables():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4, sparse=True)
            self.line = nn.Linear(4, 2)

        def forward(self, ids):
            return self.line(self.table(ids))

    def body(rank):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Tables())
        assert settle_ddp_buckets(ddp) is Buckets.SETTLED
        with ddp.no_sync():
            ddp(torch.tensor([rank])).sum().backward()
        ddp(torch.tensor([rank + 1])).sum().backward()
        return (
            ddp.module.line.bias.grad.tolist(),
            ddp.module.table.weight.grad.to_dense().abs().sum(1).sign().tolist(),
        )

    assert run_ranks(2, body) == [([2.0, 2.0], [1.0, 1.0, 1.0, 0.0, 0.0])] * 2


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ({"find_unused_parameters": True}, Buckets.FIXED),
        ({"static_graph": True}, Buckets.LEFT),
        ({"static_graph": True, "find_unused_parameters": True}, Buckets.LEFT),
    ],
)
def test_what_can_t_be_settled_is_left_alone_and_said(how, outcome):
    def body(rank):
        net = Net()
        ddp = wrapped(net, **how)
        outcome = settle_ddp_buckets(ddp)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for number in range(3):
            step(ddp, optimizer, rank, number)
        return outcome

    assert run_ranks(2, body) == [outcome] * 2


def test_an_optimizer_inside_the_backward_does_not_step_on_nothing():
    def body(rank):
        net = Net()
        stepped = []
        net.parts[0].weight.register_post_accumulate_grad_hook(stepped.append)
        return settle_ddp_buckets(wrapped(net)), len(stepped)

    assert run_ranks(2, body) == [(Buckets.LEFT, 0)] * 2
