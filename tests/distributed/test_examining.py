"""Several ranks: a bad step names its rank and samples, and nobody trains on otherwise after it."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from slurm_forge.training.core.host_generators import Generators
from slurm_forge.training.core.loss import (
    BatchLoss,
    Loss,
)
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.instability.diagnosis import StepDiagnoser
from slurm_forge.training.step.buffer_snapshot import BufferSnapshot
from slurm_forge.training.step.gradient_guard import apply_gradients
from tests.distributed.ranks import RanksFailedError, run_ranks
from tests.fsdp import fully_shard

pytestmark = pytest.mark.distributed

NAN = float("nan")
CPU = torch.device("cpu")
PER_MICRO, MICROS, RANKS = 2, 3, 2
SHARE = PER_MICRO * MICROS


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(4, 4), norm(4), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        # A buffer that the forward reads: under DDP all ranks see that of rank 0.
        y = x + self.drop(torch.tanh(self.norm(self.up(x)))) + 0.1 * self.seen.to(x.dtype)
        self.seen = 0.9 * self.seen + 0.1 * y.detach().float().mean(0)
        return y


class Net(nn.Module):
    def __init__(self, *, checkpointed=None, norm=nn.BatchNorm1d):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(norm) for _ in range(3))
        self.head, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)
        self.checkpointed = checkpointed
        self.uses_spare = False

    def forward(self, x):
        for block in self.layers:
            if self.checkpointed is None:
                x = block(x)
            else:
                x = x if x.requires_grad else x.clone().requires_grad_()
                x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
        head = self.spare if self.uses_spare else self.head
        return head(x).squeeze(-1)


def without_spare(net):
    del net.spare
    return net


def sharded(net, **more):
    for block in net.layers:
        fully_shard(block, **more)
    return fully_shard(net, **more)


def with_zeros(net):
    """Gradients of what was not used are reduced too, as zeros: whenever gradients are."""
    if hasattr(net, "set_reduce_scatter_unused_params"):  # torch 2.13
        net.set_reduce_scatter_unused_params(True)
    return net


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WRAPS = {
    "DDP": lambda: DistributedDataParallel(without_spare(Net())),
    "DDP views": lambda: DistributedDataParallel(
        without_spare(Net()), gradient_as_bucket_view=True
    ),
    "DDP unused": lambda: DistributedDataParallel(Net(), find_unused_parameters=True),
    "DDP static": lambda: DistributedDataParallel(Net(), static_graph=True),
    "DDP reentrant": lambda: DistributedDataParallel(
        without_spare(Net(checkpointed="reentrant")), broadcast_buffers=False
    ),
    "FSDP2": lambda: sharded(without_spare(Net())),
    "FSDP2 low": lambda: sharded(without_spare(Net(norm=nn.LayerNorm)), mp_policy=LOW),
    "FSDP2 kept": lambda: sharded(without_spare(Net()), reshard_after_forward=False),
    "FSDP2 unused": lambda: sharded(Net()),
    "FSDP2 zeros": lambda: with_zeros(sharded(Net())),
    "FSDP2 checkpointed": lambda: sharded(without_spare(Net(checkpointed="yes"))),
    "FSDP2 reentrant": lambda: sharded(
        without_spare(Net(checkpointed="reentrant", norm=nn.LayerNorm)), mp_policy=LOW
    ),
}

SOME = ["DDP", "DDP reentrant", "FSDP2", "FSDP2 low", "FSDP2 checkpointed", "FSDP2 reentrant"]
ALL = [each if each in SOME else pytest.param(each, marks=pytest.mark.slow) for each in WRAPS]


def inner(net):
    return net.module if isinstance(net, DistributedDataParallel) else net


def make_batch(rank, step=0, poison=None):
    """This rank's samples of the stream from 100 on; ``poison`` is (rank, row)."""
    x = torch.randn(SHARE, 4, generator=torch.Generator().manual_seed(1000 * rank + step))
    if poison is not None and poison[0] == rank:
        x[poison[1], 1] = NAN
    first = 100 + step * SHARE * RANKS
    return Batch(
        step=step,
        first=first,
        consumed=first + SHARE * RANKS,
        micro_batches=x.split(PER_MICRO),
        micro_sizes=(PER_MICRO,) * MICROS,
        sample_ids=tuple((0, 7000 + rank * SHARE + row) for row in range(SHARE)),
    )


class Training:
    """A loop as ``run.train_step`` has it, with its bad steps examined, or not."""

    def __init__(self, rank, wrap):
        self.rank, self.net = rank, WRAPS[wrap]()
        self.always_synchronised = "static" in wrap  # torch allows nothing else at first
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.registry = Registry()
        self.registry.add("model", self.net)
        self.registry.add("optimizer", self.optimizer)
        self.snapshot = BufferSnapshot([self.net])
        self.group = dist.new_group(backend="gloo")
        self.examiner = StepDiagnoser(
            self.registry, CPU, rank=rank, host=f"n0{rank}", group=self.group
        )
        self.found = []
        torch.manual_seed(100 + rank)

    def loss(self, micro):
        return self.net(micro).float().square().mean()

    def step(self, batch, compute_loss=None, *, examined=True):
        compute_loss = compute_loss or self.loss
        self.snapshot.take()
        generators = Generators.now(CPU)
        weights = BatchLoss(global_batch=SHARE * RANKS, ranks=RANKS, device="cpu")
        for at, micro in enumerate(batch.micro_batches):
            last = at == len(batch.micro_batches) - 1 or self.always_synchronised
            if isinstance(self.net, DistributedDataParallel):
                self.net.require_backward_grad_sync = last
            else:
                self.net.set_requires_gradient_sync(last)
            weights.begin(PER_MICRO)
            weights.weigh(compute_loss(micro)).backward()
        mine = float(weights.mean())
        applied = apply_gradients(
            self.optimizer, max_norm=1.0, gradient_factor=weights.gradient_factor()
        )
        skipped = applied.skipped()
        self.snapshot.restore_where(torch.tensor(float(skipped)))
        if skipped and examined:
            self.found.append(
                self.examiner.examine(
                    batch=batch,
                    compute_loss=compute_loss,
                    loss=mine,
                    generators=generators,
                )
            )
        return skipped

    def digest(self):
        """All that training goes on from, bit for bit."""
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        for value in [*self.net.state_dict().values(), *states]:
            own = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
            digest.update(own.detach().float().numpy().tobytes())
        return digest.hexdigest()


def texts(found):
    return {each.source: each.text for each in found.evidence()}


@pytest.mark.parametrize("wrap", ALL)
def test_a_run_with_examined_steps_goes_on_bit_for_bit_as_one_without(wrap):
    def body(rank):
        digests = []
        for examined in (True, False):
            training = Training(rank, wrap)
            trace = []
            for step in range(6):
                # What a bad step has used must not count as used in the next.
                inner(training.net).uses_spare = "unused" in wrap and step in (0, 3)
                poison = (1, 3) if step in (0, 3) else None
                assert training.step(make_batch(rank, step, poison), examined=examined) == bool(
                    poison
                )
                assert all(p.grad is None for p in training.net.parameters())
                trace.append(training.digest())
            digests.append(trace)
        assert digests[0] == digests[1]
        return digests[0]

    traces = run_ranks(RANKS, body, timeout=60)
    # Something was learnt at all, and bad steps changed nothing but the random state.
    assert all(len(set(trace)) == 6 for trace in traces)


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_gradients_are_synchronised_again_afterwards(wrap):
    def body(rank):
        training = Training(rank, wrap)
        assert training.step(make_batch(rank, 0, poison=(1, 3)))
        training.loss(make_batch(rank).micro_batches[0]).backward()
        gradient = next(training.net.parameters()).grad
        return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).tolist()

    one, other = run_ranks(RANKS, body)
    assert one == other


@pytest.mark.parametrize(
    "wrap", [each for name, each in zip(WRAPS, ALL, strict=True) if name != "DDP static"]
)
def test_the_replay_computes_what_the_step_computed_bit_for_bit(wrap):
    def body(rank):
        training = Training(rank, wrap)
        training.step(make_batch(rank))
        losses = []

        def compute_loss(micro):
            loss = training.loss(micro)
            losses.append(loss.item())
            return loss * (NAN if rank == 1 and len(losses) == 2 else 1.0)

        assert training.step(make_batch(rank, 1), compute_loss)
        assert losses[:MICROS] == losses[MICROS:]
        return len(losses)

    assert run_ranks(RANKS, body) == [2 * MICROS] * RANKS


@pytest.mark.parametrize("wrap", SOME)
def test_nan_in_the_data_of_one_rank_names_rank_and_samples(wrap):
    def body(rank):
        training = Training(rank, wrap)
        training.step(make_batch(rank))
        assert training.step(make_batch(rank, 1, poison=(1, 5)))
        return training.found

    everybody = run_ranks(RANKS, body)
    assert everybody[0] == everybody[1]
    (found,) = everybody[0]
    assert found.repeats is True
    assert (found.rank, found.hosts) == (1, ("n01",))
    assert found.data == ((0, 7000 + SHARE + 5),)
    start = 100 + SHARE * RANKS + SHARE
    assert found.positions == ((start + 4, start + 5),)
    assert texts(found)["rank 1 (n01)"].startswith("loss is NaN; micro-batch 3")
    assert f"data; samples {start + 4}-{start + 5}" in texts(found)["replay"]


@pytest.mark.parametrize("wrap", SOME)
def test_what_is_bad_once_on_one_rank_is_transient_and_its_node_suspect(wrap):
    def body(rank):
        training = Training(rank, wrap)
        calls = []

        def compute_loss(micro):
            calls.append(1)
            return training.loss(micro) * (NAN if rank == 1 and len(calls) == 2 else 1.0)

        assert training.step(make_batch(rank), compute_loss)
        return training.found

    (found,), _ = run_ranks(RANKS, body)
    assert (found.repeats, found.rank, found.hosts) == (False, 1, ("n01",))
    assert texts(found) == {
        "rank 1 (n01)": "its loss was not finite in the step",
        "replay": "the same step computed again is finite: transient; suspect n01",
    }


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2 low", "FSDP2 unused"])
def test_the_layer_that_makes_nan_of_good_numbers_is_named(wrap):
    def body(rank):
        training = Training(rank, wrap)
        if rank == 1:
            norm = inner(training.net).layers[1].norm
            norm.register_forward_hook(lambda module, args, output: output * NAN)
        assert training.step(make_batch(rank))
        return training.found

    (found,), _ = run_ranks(RANKS, body)
    assert (found.repeats, found.rank) == (True, 1)
    assert found.layer == "layers.1.norm"


@pytest.mark.parametrize("wrap", SOME)
def test_the_parameter_at_which_a_bad_gradient_begins_is_named(wrap):
    def body(rank):
        training = Training(rank, wrap)
        if rank == 1:
            # d sqrt(0) is infinite: bad gradients for what lies before, and a good loss.
            inner(training.net).layers[2].register_forward_pre_hook(
                lambda module, args: (args[0] + (args[0] - args[0]).abs().sqrt(),)
            )
        assert training.step(make_batch(rank))
        return training.found

    (found,), _ = run_ranks(RANKS, body)
    assert (found.repeats, found.rank, found.layer) == (True, 1, "")
    assert found.parameters[0].startswith("layers.1.")
    assert f"gradient of {found.parameters[0]} is NaN (" in texts(found)["rank 1 (n01)"]


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
@pytest.mark.core
def test_losses_given_as_sum_and_count_accuse_the_rank_of_the_replay(wrap):
    def body(rank):
        training = Training(rank, wrap)

        def compute_loss(micro):
            return Loss(training.net(micro).float().square().sum(), float(len(micro)))

        assert training.step(make_batch(rank, poison=(0, 5)), compute_loss)
        return training.found

    (found,), _ = run_ranks(RANKS, body)
    assert (found.repeats, found.rank) == (True, 0)
    assert found.positions == ((104, 105),)


@pytest.mark.parametrize("wrap", ["DDP", "DDP unused", "DDP static"])
def test_an_error_on_one_rank_leaves_no_other_waiting_and_training_goes_on(wrap):
    def body(rank):
        training = Training(rank, wrap)
        calls = []

        def compute_loss(micro):
            calls.append(1)
            if rank == 1 and len(calls) > MICROS:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return training.loss(micro) * (NAN if rank == 0 and len(calls) == 1 else 1.0)

        assert training.step(make_batch(rank), compute_loss)
        assert not training.step(make_batch(rank, 1))
        (found,) = training.found
        assert found.repeats is None
        return texts(found)["rank 1 (n01)"], training.digest()

    def undisturbed(rank):
        training = Training(rank, wrap)
        training.step(
            make_batch(rank),
            lambda micro: training.loss(micro) * NAN,
            examined=False,
        )
        training.step(make_batch(rank, 1))
        return training.digest()

    found = run_ranks(RANKS, body)
    assert "can't allocate memory" in found[0][0]
    assert [digest for _, digest in found] == run_ranks(RANKS, undisturbed)


def test_an_error_where_the_others_wait_for_this_rank_is_raised():
    def body(rank):
        training = Training(rank, "FSDP2")
        calls = []

        def compute_loss(micro):
            calls.append(1)
            if rank == 1 and len(calls) == MICROS + 2:
                raise RuntimeError("out of memory, more or less")
            return training.loss(micro) * NAN

        training.step(make_batch(rank), compute_loss)

    with pytest.raises(RanksFailedError) as caught:
        run_ranks(RANKS, body, timeout=20, grace=0.5)
    assert "out of memory, more or less" in caught.value.outcomes[1].error


def test_a_rank_that_can_not_keep_its_state_keeps_all_from_computing_again():
    def body(rank):
        training = Training(rank, "FSDP2")
        calls = []
        if rank == 1:
            from slurm_forge.training.instability import replay

            replay.HostGenerators = None

        def compute_loss(micro):
            calls.append(1)
            return training.loss(micro) * NAN

        assert training.step(make_batch(rank), compute_loss)
        assert len(calls) == MICROS
        return training.found

    (found,), _ = run_ranks(RANKS, body)
    assert found.repeats is None
    assert "failed" in texts(found)["rank 1 (n01)"]
    assert texts(found)["replay"] == "the same step could not be computed again"
