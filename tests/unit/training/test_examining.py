"""One rank: what is found out about a bad step, and that finding it out changes nothing."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slurm_forge.json_codec import parse
from slurm_forge.training.core.host_generators import Generators
from slurm_forge.training.core.loss import (
    BatchLoss,
    Loss,
)
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.instability.diagnosis import StepDiagnoser
from slurm_forge.training.instability.diagnosis_report import (
    Examination,
    RankFindings,
    merge_findings,
)
from slurm_forge.training.step.buffer_snapshot import BufferSnapshot
from slurm_forge.training.step.gradient_guard import apply_gradients

NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")
PER_MICRO, MICROS = 4, 3
SHARE = PER_MICRO * MICROS


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """Dropout, BatchNorm, a mask that is infinite by design, and a place to break it at."""

    def __init__(self, wrap=lambda block, x: block(x)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)
        self.register_buffer("mask", torch.tensor([0.0, -INF]))
        self.wrap = wrap

    def forward(self, x):
        for block in self.layers:
            x = self.wrap(block, x)
        return self.head(x).squeeze(-1)


def make_batch(step=0, poison=None, share=SHARE):
    """Samples of the stream from 100 on; ``poison`` is (row, value)."""
    x = torch.randn(share, 4, generator=torch.Generator().manual_seed(step))
    if poison is not None:
        x[poison[0], 1] = poison[1]
    first = 100 + step * share
    return Batch(
        step=step,
        first=first,
        consumed=first + share,
        micro_batches=x.split(PER_MICRO),
        micro_sizes=(PER_MICRO,) * (share // PER_MICRO),
        sample_ids=tuple((2, 7000 + step * share + row) for row in range(share)),
    )


class Training:
    """A loop as ``run.train_step`` has it, with its bad steps examined, or not."""

    def __init__(self, net=None, scaler=None):
        self.net = Net() if net is None else net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.registry = Registry()
        self.registry.add("model", self.net)
        self.registry.add("optimizer", self.optimizer)
        self.registry.add("scaler", scaler)
        self.snapshot = BufferSnapshot([self.net])
        self.examiner = StepDiagnoser(self.registry, CPU, rank=0, host="n01", group=None)
        self.found = []

    def loss(self, micro):
        return self.net(micro).square().mean()

    def step(self, batch, compute_loss=None, *, examined=True, blame=()):
        compute_loss = compute_loss or self.loss
        self.snapshot.take()
        generators = Generators.now(CPU)
        scaler = self.registry.scaler
        weights = BatchLoss(global_batch=batch.size, ranks=1, device="cpu")
        for micro, size in zip(batch.micro_batches, batch.micro_sizes, strict=True):
            weights.begin(size)
            loss = weights.weigh(compute_loss(micro))
            (loss if scaler is None else scaler.scale(loss)).backward()
        applied = apply_gradients(
            self.optimizer,
            max_norm=1.0,
            gradient_factor=weights.gradient_factor(),
            scaler=scaler,
        )
        skipped = applied.skipped()
        self.snapshot.restore_where(torch.tensor(float(skipped)))
        if skipped and examined:
            self.found.append(
                self.examiner.examine(
                    batch=batch,
                    compute_loss=compute_loss,
                    loss=weights.mean().item(),
                    blame=blame,
                    generators=generators,
                )
            )
        return skipped

    def everything(self):
        """All that training goes on from, bit for bit."""
        found = [value.numpy().tobytes() for value in self.net.state_dict().values()]
        found += [
            value.numpy().tobytes()
            for state in self.optimizer.state.values()
            for value in state.values()
        ]
        found += [torch.get_rng_state().numpy().tobytes(), random.getstate()]
        found += [str(np.random.get_state()), [part.training for part in self.net.modules()]]
        return found


def texts(found):
    return {each.source: each.text for each in found.evidence()}


def test_nan_in_a_sample_is_named_with_its_place_in_the_stream():
    training = Training()
    assert training.step(make_batch(poison=(5, NAN)))
    (found,) = training.found
    assert found.repeats is True
    assert found.data == ((2, 7005),)
    assert found.positions == ((104, 107),)
    assert found.samples == tuple((2, 7000 + row) for row in range(4, 8))
    assert (found.rank, found.hosts) == (0, ("n01",))
    told = texts(found)
    assert told["rank 0 (n01)"] == "loss is NaN; micro-batch 2"
    assert told["data"] == "NaN or infinity in dataset[7005] of epoch 2"
    assert told["replay"].startswith(
        "the same step computed again is not finite either: data; samples 104-107"
    )


def test_a_module_that_makes_nan_of_good_numbers_is_named():
    training = Training()
    handle = training.net.layers[1].norm.register_forward_hook(lambda *a: a[2] * NAN)
    training.step(make_batch())
    handle.remove()
    (found,) = training.found
    assert found.repeats is True
    assert found.layer == "layers.1.norm"
    assert not found.data
    assert "first in the output of layers.1.norm" in texts(found)["rank 0 (n01)"]
    assert "data or model" in texts(found)["replay"]


def test_the_code_of_a_module_between_its_parts_is_named_by_the_module():
    class Between(Block):
        def forward(self, x):
            return super().forward(x) + torch.log(-x.abs() - 1)

    training = Training()
    training.net.layers[2] = Between()
    training.step(make_batch())
    assert training.found[0].layer == "layers.2"


def test_minus_infinity_that_is_meant_does_not_hide_what_is_not():
    class Masked(Block):
        broken = False

        def forward(self, x, mask):
            weights = torch.softmax(torch.zeros(2) + mask, 0)  # the second one is 0
            x = super().forward(x) * weights[0]
            return x / 0.0 if self.broken else x

    training = Training(Net(lambda block, x: block(x, training.net.mask)))
    for at in range(3):
        training.net.layers[at] = Masked()
    training.net.layers[1].broken = True
    training.snapshot = BufferSnapshot([training.net])
    training.step(make_batch())
    assert training.found[0].layer == "layers.1"
    assert not training.found[0].state


def test_a_module_that_is_used_in_two_places_does_not_confuse_the_rest():
    training = Training()
    training.net.layers[1] = training.net.layers[0]
    training.snapshot = BufferSnapshot([training.net])
    training.net.layers[2].norm.register_forward_hook(lambda *a: a[2] * NAN)
    training.step(make_batch())
    assert training.found[0].layer == "layers.2.norm"


def test_a_gradient_that_is_bad_behind_a_good_loss_names_where_it_began():
    training = Training()

    def compute_loss(micro):
        x = training.net.layers[0](micro)
        x = training.net.layers[1](x + torch.sqrt((x - x).abs()))  # d sqrt(0) is infinite
        return training.net.head(training.net.layers[2](x)).square().mean()

    training.step(make_batch(), compute_loss)
    (found,) = training.found
    assert found.repeats is True and not found.layer
    # Backward came to layers.1 with good gradients, and to layers.0 with bad ones.
    assert found.parameters[0].startswith("layers.0.norm.")
    assert "gradient of layers.0.norm." in texts(found)["rank 0 (n01)"]
    assert "(4 of 14 gradients)" in texts(found)["rank 0 (n01)"]


def test_what_is_finite_the_second_time_is_transient_and_points_at_the_node():
    training = Training()
    calls = []

    def compute_loss(micro):
        calls.append(1)
        return training.loss(micro) * (NAN if len(calls) == 2 else 1.0)

    training.step(make_batch(), compute_loss)
    (found,) = training.found
    assert found.repeats is False
    assert found.hosts == ("n01",)
    assert len(calls) == 2 * MICROS
    assert texts(found) == {
        "rank 0 (n01)": "its loss was not finite in the step",
        "replay": "the same step computed again is finite: transient; suspect n01",
    }


def test_the_replay_draws_the_random_numbers_of_the_step():
    training = Training()
    drawn = []

    def compute_loss(micro):
        drawn.append(torch.rand(()).item())
        return training.loss(micro) * (NAN if len(drawn) == 1 else 1.0)

    training.step(make_batch(), compute_loss)
    assert drawn[:MICROS] == drawn[MICROS:]
    assert "other random numbers" not in texts(training.found[0])["replay"]


def test_random_numbers_that_can_not_be_had_again_are_said():
    training = Training()
    calls = []

    def compute_loss(micro):
        calls.append(random.random())
        return training.loss(micro) * (NAN if len(calls) == 1 else 1.0)

    training.step(make_batch(), compute_loss)
    assert training.found[0].repeats is False
    assert "with other random numbers: probably transient" in texts(training.found[0])["replay"]


def test_finite_gradients_too_large_for_a_finite_norm_are_no_transient_fault():
    training = Training()
    assert training.step(make_batch(), lambda micro: training.loss(micro) * 1e30)
    (found,) = training.found
    assert found.repeats is True
    assert "too large for its norm to be finite" in texts(found)["rank 0 (n01)"]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_weights_that_are_bad_already_are_named(bad):
    training = Training()
    training.step(make_batch())
    with torch.no_grad():
        training.net.layers[1].up.weight[2, 3] = bad
    training.optimizer.state[training.net.head.weight]["exp_avg"].fill_(NAN)
    training.step(make_batch(1))
    (found,) = training.found
    word = "NaN" if math.isnan(bad) else "infinity"
    assert found.repeats is True
    assert found.state == (
        f"{word} in layers.1.up.weight",
        "NaN in exp_avg of head.weight",
    )
    assert "the state is bad already, whatever the data" in texts(found)["replay"]


def test_a_buffer_that_was_made_of_nan_is_not_held_against_the_state():
    for meant in (True, False):
        training = Training()
        training.net.register_buffer("not_yet", torch.full((3,), NAN))
        if meant:
            training.examiner.take_as_meant()
        training.step(make_batch(poison=(5, NAN)))
        assert training.found[0].state == (() if meant else ("NaN in not_yet",))


def test_parameters_of_several_models_carry_the_name_of_theirs():
    training = Training()
    other = nn.Linear(4, 4)
    training.registry.add("other", other)
    training.step(make_batch(), lambda micro: training.loss(other(micro) * NAN))
    (found,) = training.found
    assert any(name.startswith("model.") for name in found.parameters)


def test_a_batch_that_counts_nothing_is_told_as_that():
    training = Training()

    def compute_loss(micro):
        return Loss((training.net(micro) * 0.0).sum(), torch.zeros(()))

    assert training.step(make_batch(), compute_loss)
    assert training.found[0].repeats is True
    assert "Loss.count is 0" in texts(training.found[0])["replay"]


def test_a_micro_batch_that_counts_nothing_is_not_held_against_its_step():
    training = Training()
    counts, calls = [3.0, 0.0, 2.0] * 2, []

    def compute_loss(micro):
        calls.append(1)
        count = counts[len(calls) - 1]
        bad = NAN if len(calls) == 1 else 1.0
        return Loss(training.net(micro).square().sum() * count * bad, count)

    assert training.step(make_batch(), compute_loss)
    assert training.found[0].repeats is False


def test_without_a_replay_the_gradients_of_the_step_speak():
    class Norm:
        def __init__(self, name, norm):
            self.name, self.norm, self.finite = name, norm, math.isfinite(norm)

    training = Training()
    found = training.examiner.examine(
        batch=make_batch(),
        compute_loss=None,
        loss=1.0,
        blame=[Norm("model.a", NAN), Norm("model.b", INF), Norm("model.c", 1.0)],
        no_replay="the weights have moved on",
    )
    assert found.repeats is None
    assert found.parameters == ("model.a", "model.b")
    assert texts(found) == {
        "gradients": "not finite: model.a and 1 more",
        "replay": "not computed again: the weights have moved on",
    }
    found = training.examiner.examine(
        batch=make_batch(), compute_loss=None, loss=1.0, blame=[Norm("model.c", 1234.5)]
    )
    assert texts(found) == {
        "gradients": "the largest in the step: model.c, norm 1234",
        "replay": "not computed again",
    }


def test_an_error_in_the_replay_is_told_and_changes_nothing():
    training, other = Training(), Training()
    calls = []

    def compute_loss(micro):
        calls.append(1)
        if len(calls) > MICROS + 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return training.loss(micro) * NAN

    def nan_loss(micro):
        return other.loss(micro) * NAN

    torch.manual_seed(1)
    training.step(make_batch(), compute_loss)
    after = training.everything()
    torch.manual_seed(1)
    other.step(make_batch(), nan_loss, examined=False)
    assert after == other.everything()
    (found,) = training.found
    assert found.repeats is True  # the first micro-batch was bad again: that is enough
    assert "can't allocate memory" in str(found.evidence())

    def fails(micro):
        calls.append(1)
        if len(calls) % 2 == 0:
            raise ValueError("no such file")
        return training.loss(micro) * NAN

    calls.clear()
    training.step(make_batch(share=PER_MICRO), fails)
    assert training.found[1].repeats is None
    assert "could not be computed again" in texts(training.found[1])["replay"]


def reentrant(block, x):
    return checkpoint(block, x.requires_grad_(), use_reentrant=True)


WRAPS = {
    "plain": Net,
    "checkpointed": lambda: Net(lambda block, x: checkpoint(block, x, use_reentrant=False)),
    "reentrant": lambda: Net(reentrant),
    "compiled": lambda: torch.compile(Net(), backend="aot_eager"),
    "compiled in place": lambda: _compiled_in_place(Net()),
}


def _compiled_in_place(net):
    for block in net.layers:
        block.compile(backend="aot_eager")
    return net


# What is compiled in place is represented by what is compiled; the tests below have both.
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(wrap, marks=pytest.mark.slow) if wrap == "compiled in place" else wrap
        for wrap in WRAPS
    ],
)
def test_a_run_with_an_examined_step_goes_on_bit_for_bit_as_one_without(wrap):
    def run(examined):
        training = Training(WRAPS[wrap]())
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        for step in range(5):
            if step == 3:
                training.net.eval().train()
                training.net.layers[1].norm.eval()
            bad = step in (0, 2, 3)
            skipped = training.step(make_batch(step, (5, NAN) if bad else None), examined=examined)
            assert skipped == bad
            assert all(p.grad is None for p in training.net.parameters())
            hooks = [h for part in training.net.modules() for h in part._forward_hooks]
            assert not hooks
        return training, training.everything()

    training, with_it = run(True)
    _, without = run(False)
    assert with_it == without
    assert [found.repeats for found in training.found] == [True] * 3
    assert all(found.data for found in training.found)


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradients_are_looked_at_however_the_model_is_wrapped(wrap):
    training = Training(WRAPS[wrap]())

    def compute_loss(micro):
        loss = training.loss(micro)
        loss.register_hook(lambda grad: grad * NAN)
        return loss

    training.step(make_batch(), compute_loss)
    (found,) = training.found
    assert found.repeats is True
    assert found.parameters[0].startswith(("layers.", "head."))
    # With reentrant checkpointing the input has a gradient of its own.
    count = 15 if wrap == "reentrant" else 14
    assert f"({count} of {count} gradients)" in texts(found)["rank 0 (n01)"]


def test_hooks_that_step_in_the_backward_do_not_run_at_the_replay():
    training = Training()
    ran = []
    for parameter in training.net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: ran.append(1))
    training.step(make_batch(poison=(0, NAN)))
    assert len(ran) == MICROS * 14
    assert training.found[0].repeats is True


def test_a_gradient_scaler_is_left_alone_and_its_scale_is_taken_into_account():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    training = Training(scaler=scaler)

    def compute_loss(micro):  # infinite with the scale that the step had, finite with half of it
        return training.loss(micro) + 4e8 * training.net.head.bias.sum()

    assert training.step(make_batch(share=PER_MICRO), compute_loss)
    assert scaler.get_scale() == 2.0**99
    assert training.found[0].repeats is True
    # A large scale alone is no large gradient.
    ran = []

    def once(micro):
        ran.append(1)
        return training.loss(micro) * (NAN if len(ran) == 1 else 1.0)

    assert training.step(make_batch(1), once)
    assert training.found[1].repeats is False


def test_a_module_that_the_replay_leaves_in_another_mode_is_put_back():
    training = Training()
    calls = []

    def compute_loss(micro):
        calls.append(1)
        training.net.layers[0].drop.train(len(calls) <= MICROS)
        return training.loss(micro) * NAN

    training.step(make_batch(), compute_loss)
    assert len(calls) == 2 * MICROS
    assert training.net.layers[0].drop.training


def test_a_buffer_that_no_step_changes_is_still_left_out_of_the_copies_afterwards():
    training = Training()
    training.step(make_batch())
    version = training.net.mask._version
    training.step(make_batch(1, (0, NAN)))
    assert training.net.mask._version == version


def test_a_batch_of_the_programs_own_has_no_samples_to_name():
    training = Training()
    batch = make_batch(poison=(0, NAN))
    own = Batch(
        step=0,
        consumed=SHARE,
        micro_batches=batch.micro_batches,
        micro_sizes=batch.micro_sizes,
        sample_ids=(),
    )
    found = training.examiner.examine(batch=own, compute_loss=training.loss, loss=NAN)
    assert found.repeats is True
    assert (found.samples, found.positions, found.data) == ((), (), ())


# -- many ranks, without any ---------------------------------------------------------------------


def bad_rank(rank, **more):
    return RankFindings(
        rank=rank,
        host=f"node-with-a-long-name-{rank // 8}" * 5,
        replayed=True,
        loss="NaN",
        parameters=("model." + "x" * 200,) * 3,
        layer="model." + "y" * 500,
        state=("NaN in model." + "z" * 300,),
        samples=tuple((0, rank * 10**9 + index) for index in range(8)),
        data=tuple((0, rank * 10**9 + index) for index in range(8)),
        positions=((rank * 64, rank * 64 + 63),),
        micro_batches=tuple(range(1, 9)),
        failed="RuntimeError: " + "w" * 500 if rank % 3 == 0 else "",
        **more,
    )


@pytest.mark.parametrize("every", [1, 2])
def test_the_answer_is_small_whatever_the_number_of_ranks(every):
    ranks = [bad_rank(r) if r % every == 0 else RankFindings(rank=r, host="") for r in range(4096)]
    found = merge_findings(ranks)
    assert len(found.evidence()) <= 8
    assert all(len(each.text) <= 300 and len(each.source) <= 80 for each in found.evidence())
    assert len(json.dumps(asdict(found))) < 8000
    assert found.positions == ((0, 4096 * 64 - 1 if every == 1 else 4094 * 64 + 63),)
    assert f"{4096 // every - 3} more ranks likewise" in str(found.evidence())
    assert parse(Examination, json.dumps(asdict(found))) == found


def test_what_a_rank_says_is_small():
    told = json.dumps(bad_rank(4095).to_json())
    assert len(told) < 4000
    assert parse(RankFindings, told) == bad_rank(4095)


def test_a_loss_that_is_the_same_on_all_ranks_accuses_none_of_them():
    ranks = [RankFindings(rank=r, host=f"n{r}", was_bad=True, replayed=True) for r in range(4)]
    found = merge_findings(ranks)
    assert (found.repeats, found.rank, found.hosts) == (False, None, ())
    assert texts(found) == {
        "replay": "the same step computed again is finite: transient; no node stands out"
    }


def test_one_rank_of_four_is_accused():
    ranks = [RankFindings(rank=r, host=f"n{r}", was_bad=r == 2, replayed=True) for r in range(4)]
    found = merge_findings(ranks)
    assert (found.repeats, found.rank, found.hosts) == (False, 2, ("n2",))
    assert "suspect n2" in texts(found)["replay"]


def test_nothing_is_called_transient_while_one_rank_does_not_know():
    ranks = [RankFindings(rank=r, host="n", was_bad=r == 2, replayed=r != 1) for r in range(4)]
    assert merge_findings(ranks).repeats is None
