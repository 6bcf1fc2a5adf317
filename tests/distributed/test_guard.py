"""Several ranks: a bad gradient on one of them leaves no trace on any, and nobody is asked."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from slurm_forge.training.core.loss import (
    BatchLoss,
    Loss,
)
from slurm_forge.training.step.buffer_snapshot import BufferSnapshot
from slurm_forge.training.step.gradient_guard import (
    apply_gradients,
    skips_on_device,
)
from slurm_forge.training.step.gradient_norms import parameter_names
from tests.distributed.ranks import run_ranks
from tests.fsdp import fully_shard

pytestmark = pytest.mark.distributed

BAD = [float("nan"), float("inf"), float("-inf")]

OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "fused SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}


def model(wrap):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    if wrap == "DDP":
        return DistributedDataParallel(net)
    for part in (net[0], net[3], net):
        fully_shard(part)
    return net


def backward(net, rank, step, poison):
    """One rank's gradient, bad in all of it (DDP) or in one number of this rank's shard (FSDP2)."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = net(x).square().mean()
    spread = poison is not None and isinstance(net, DistributedDataParallel)
    (loss * poison if spread else loss).backward()
    if poison is not None and not spread:
        net[3].weight.grad.to_local()[-1, 0] = poison


def local(tensor):
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else torch.as_tensor(tensor)).clone()


def everything(net, optimizer):
    found = {name: local(value) for name, value in net.state_dict().items()}
    for number, parameter in enumerate(net.parameters()):
        for name, value in optimizer.state[parameter].items():
            found[f"{number}.{name}"] = local(value)
    return found


def same(one, other):
    """Bit for bit; a skipped first step may have created states of zero."""
    for name in one.keys() | other.keys():
        mine, theirs = one.get(name), other.get(name)
        if mine is None or theirs is None:
            assert not (theirs if mine is None else mine).any(), name
        else:
            assert mine.numpy().tobytes() == theirs.numpy().tobytes(), name
    return True


def train(rank, wrap, name, bad, poison):
    """Five steps; the one numbered ``bad`` is poisoned on the last rank, or left out (None)."""
    net = model(wrap)
    optimizer = OPTIMIZERS[name](net.parameters())
    snapshot = BufferSnapshot([net])
    verdicts, norms = [], []
    for step in range(5):
        if step == bad and poison is None:
            continue
        snapshot.take()
        before = everything(net, optimizer)
        is_bad = step == bad
        backward(net, rank, step, poison if is_bad and rank == dist.get_world_size() - 1 else None)
        applied = apply_gradients(optimizer, max_norm=0.1)
        snapshot.restore_where(applied.found_inf)
        verdicts.append(applied.skipped())
        norms.append(applied.norm.item())
        if is_bad:
            assert same(everything(net, optimizer), before)
    return verdicts, norms, everything(net, optimizer)


def possible(*names):
    """Ways to wrap and optimizers; torch 2.13's fused SGD knows no sharded tensors.

    Each optimizer is in the short run, wrapped in turn in one way and in the other.
    """
    pairs = [
        pytest.param(wrap, name, marks=() if number % 2 == turn else pytest.mark.slow)
        for turn, wrap in enumerate(("FSDP2", "DDP"))
        for number, name in enumerate(names)
        if (wrap, name) != ("FSDP2", "fused SGD momentum")
    ]
    return pytest.mark.parametrize(("wrap", "name"), pairs)


@possible(*OPTIMIZERS)
def test_a_bad_gradient_on_one_rank_leaves_no_trace_on_any(wrap, name):
    def body(rank):
        for bad in (0, 3):
            _, norms, never_saw_it = train(rank, wrap, name, bad, None)
            for poison in BAD:
                verdicts, _, skipped = train(rank, wrap, name, bad, poison)
                assert verdicts == [step == bad for step in range(5)]
                assert same(skipped, never_saw_it)
        net = model(wrap)
        backward(net, rank, 0, None)
        return norms, skips_on_device(OPTIMIZERS[name](net.parameters()))

    (norms, on_device), (norms_of_other, _) = run_ranks(2, body)
    assert norms == norms_of_other
    # The common optimizer of large runs is not waited for, with sharded parameters neither.
    assert on_device == (name == "fused AdamW")


@possible("fused AdamW", "SGD momentum", "fused SGD momentum")
def test_ranks_with_a_gradient_scaler_skip_and_scale_together(wrap, name):
    def body(rank):
        scales = []
        net = model(wrap)
        optimizer = OPTIMIZERS[name](net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(4):
            before = everything(net, optimizer)
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
            factor = float("inf") if step == 1 and rank == 1 else 1.0
            scaler.scale(net(x).square().mean() * factor).backward()
            applied = apply_gradients(optimizer, max_norm=0.1, scaler=scaler)
            assert applied.skipped() == (step == 1)
            after = everything(net, optimizer)
            weights = [key for key in before if key.endswith("weight")]
            assert all(torch.equal(before[k], after[k]) for k in weights) == (step == 1)
            scales.append(scaler.get_scale())
        return scales

    assert run_ranks(2, body) == [[1024.0, 512.0, 512.0, 1024.0]] * 2


@pytest.mark.parametrize("scaled", [False, True])
def test_ranks_with_different_parameters_share_one_verdict_over_their_group(scaled):
    def body(rank):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        torch.manual_seed(rank)
        stage = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
        norms = []
        for step in range(2):
            loss = stage(torch.ones(3)).sum() * (float("nan") if step and rank else 2.0)
            (scaler.scale(loss) if scaled else loss).backward()
            own = torch.nn.utils.get_total_norm([p.grad for p in stage.parameters()])
            own /= scaler.get_scale() if scaled else 1
            before = stage.weight.detach().clone()
            applied = apply_gradients(
                optimizer, max_norm=1.0, norm_group=dist.group.WORLD, scaler=scaler
            )
            assert not scaled or scaler.get_scale() == (4.0 if step else 8.0)
            assert applied.skipped() == bool(step)
            assert torch.equal(stage.weight, before) == bool(step)
            norms.append((own.item(), applied.norm.item()))
        return norms

    (mine, theirs) = run_ranks(2, body)
    assert mine[0][1] == theirs[0][1] == pytest.approx((mine[0][0] ** 2 + theirs[0][0] ** 2) ** 0.5)


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
@pytest.mark.core
def test_tokens_count_alike_on_all_ranks_whatever_each_of_them_has(wrap):
    samples, width = 12, 4
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, width, dtype=torch.float64, generator=generator)
    tokens = torch.randint(1, 9, (samples,), generator=generator)

    def summed(net, part):
        return (net(x[part]).squeeze(-1).square() * tokens[part]).sum()

    def line():
        torch.manual_seed(0)
        return nn.Linear(width, 1).double()

    def body(rank):
        net = line()
        net = DistributedDataParallel(net) if wrap == "DDP" else fully_shard(net)
        loss = BatchLoss(global_batch=samples, ranks=2, device="cpu")
        for at in range(rank * 6, rank * 6 + 6, 2):  # synchronised every time: sums are linear
            part = slice(at, at + 2)
            loss.begin(2)
            loss.weigh(Loss(summed(net, part), tokens[part].sum())).backward()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        apply_gradients(optimizer, gradient_factor=loss.gradient_factor())
        weight = next(net.parameters())
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return weight.detach().tolist(), loss.mean().item()

    net = line()
    expected = summed(net, slice(None)) / tokens.sum()
    expected.backward()
    weight = (net.weight - net.weight.grad).detach().tolist()[0]
    for found, mean in run_ranks(2, body):
        assert found[0] == pytest.approx(weight, rel=1e-12)
        assert mean == pytest.approx(expected.item(), rel=1e-12)


def collectives():
    """What this rank has issued so far, by the flight recorder."""
    trace = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    return [entry["profiling_name"] for entry in trace["entries"]]


RECORDED = {"TORCH_FR_BUFFER_SIZE": "2000"}


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_the_guard_issues_no_collective_beyond_that_of_the_norm(wrap, on_device):
    def body(rank):
        net = model(wrap)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        snapshot = BufferSnapshot([net])
        issued = []
        for step in range(4):
            snapshot.take()
            backward(net, rank, step, float("nan") if step == 2 and rank else None)
            before = len(collectives())
            applied = apply_gradients(
                optimizer, max_norm=0.1, loss=torch.ones(()), limit=1e4, on_device=on_device
            )
            snapshot.restore_where(applied.left_out)
            applied.verdict.read()
            applied.blame(parameter_names({"model": net}))
            issued.append(collectives()[before:])
        return issued

    expected = [] if wrap == "DDP" else ["gloo:all_reduce"]
    assert run_ranks(2, body, env=RECORDED) == [[expected] * 4] * 2


def test_the_recorder_records():
    def body(rank):
        before = len(collectives())
        dist.all_reduce(torch.ones(1))
        return collectives()[before:]

    assert run_ranks(2, body, env=RECORDED) == [["gloo:all_reduce"]] * 2


def sharded(how):
    """Sharded over all ranks; in two ways; over one of two dimensions of ranks; some not at all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    if how == "hybrid":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(net, mesh=mesh)
    if how == "other dimension":
        return fully_shard(net, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    if how == "some":
        fully_shard(net[0])
        return net
    return fully_shard(net)


@pytest.mark.parametrize("how", ["all", "hybrid", "other dimension", "some"])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_sharded_gradients_are_clipped_as_clip_grad_norm_does(how, max_norm):
    def body(rank):
        def stepped(apply):
            net = sharded(how)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            torch.manual_seed(rank)
            net(torch.randn(5, 4)).square().mean().backward()
            if how == "some":
                for p in net[2].parameters():
                    dist.all_reduce(p.grad)
            norm = apply(net, optimizer)
            return norm, [local(p) for p in net.parameters()]

        def theirs(net, optimizer):
            if how == "some":  # torch has no norm over plain and sharded ones
                parts = [
                    nn.utils.get_total_norm([p.grad for p in net[i].parameters()]) for i in (0, 2)
                ]
                norm = nn.utils.get_total_norm([parts[0].full_tensor(), parts[1]])
                nn.utils.clip_grads_with_norm_(net[0].parameters(), max_norm, norm)
                nn.utils.clip_grads_with_norm_(net[2].parameters(), max_norm, norm)
            else:
                norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm).full_tensor()
            optimizer.step()
            return norm

        def ours(net, optimizer):
            return apply_gradients(optimizer, max_norm=max_norm).norm

        (mine, weights), (expected, others) = stepped(ours), stepped(theirs)
        assert torch.equal(mine, expected)
        assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
        return mine.item()

    one, other = run_ranks(2, body)
    assert one == other


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_the_parameter_is_named_and_with_shards_the_rank(wrap):
    def body(rank):
        net = model(wrap)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        if wrap == "DDP":
            # In the last layer only: its own weight, and all that is before it stays finite.
            net.module[3].weight.register_hook(lambda g: g * float("nan") if rank else g)
        backward(net, rank, 0, None if wrap == "DDP" else (float("inf") if rank else None))
        inner = net.module if wrap == "DDP" else net
        blamed = apply_gradients(optimizer).blame(parameter_names({"model": inner}))
        return [part.name for part in blamed if not part.finite], len(blamed)

    zero, one = run_ranks(2, body)
    assert one == (["3.weight"], 6)
    # Reduced gradients are everybody's; a shard is its rank's.
    assert zero == ((["3.weight"], 6) if wrap == "DDP" else ([], 6))
