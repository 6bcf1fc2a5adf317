"""A step follows the mean over its global batch, however that is cut up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import UnsupportedError
from slurm_forge.training.core.loss import (
    BatchLoss,
    Loss,
)

SAMPLES = 24


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    tokens = torch.randint(1, 9, (SAMPLES,), generator=generator)
    return x, tokens


def gradient(loss_of, weight):
    (grad,) = torch.autograd.grad(loss_of(weight), weight)
    return grad


def weight():
    return torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)


def per_sample(x, w):
    return torch.nn.functional.softplus(x @ w)


cuts = st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), st.integers(1, 24))


def ranks_of(ranks, micro):
    """(micro-batches as slices) of every rank."""
    share = SAMPLES // ranks
    for rank in range(ranks):
        first, end = rank * share, (rank + 1) * share
        yield [slice(at, min(at + micro, end)) for at in range(first, end, micro)]


@given(cuts)
def test_means_over_micro_batches_become_the_mean_over_the_global_batch(cut):
    ranks, micro = cut
    x, _ = data()
    total = torch.zeros(5, dtype=torch.float64)
    means = []
    for parts in ranks_of(ranks, micro):
        w, loss = weight(), BatchLoss(global_batch=SAMPLES, ranks=ranks, device="cpu")
        for part in parts:
            loss.begin(part.stop - part.start)
            loss.weigh(per_sample(x[part], w).mean()).backward()
        assert loss.gradient_factor() is None
        total += w.grad / ranks  # what DDP and FSDP do
        means.append(loss.mean())
        assert not means[-1].requires_grad
    expected = gradient(lambda w: per_sample(x, w).mean(), weight())
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        torch.stack(means).mean(), per_sample(x, weight()).mean().detach(), rtol=1e-12, atol=0
    )


@given(cuts)
def test_sums_become_the_mean_over_all_that_was_counted(cut):
    ranks, micro = cut
    x, tokens = data()
    total, factors, rank_totals = torch.zeros(5, dtype=torch.float64), [], []
    for parts in ranks_of(ranks, micro):
        w, loss = weight(), OnOneRank(global_batch=SAMPLES, ranks=ranks, device="cpu")
        for part in parts:
            loss.begin(part.stop - part.start)
            some = (per_sample(x[part], w) * tokens[part]).sum()
            count = tokens[part].sum() if part.start % 2 else int(tokens[part].sum())
            loss.weigh(Loss(some, count)).backward()
        total += w.grad / ranks
        rank_totals.append(loss.own())
        factors.append(ranks / sum(each[1] for each in rank_totals))
    total *= factors[-1]
    expected = gradient(lambda w: (per_sample(x, w) * tokens).sum() / tokens.sum(), weight())
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)


class OnOneRank(BatchLoss):
    """Shows what the rank contributes to the all-reduce, which has a test with real ranks."""

    def own(self):
        return torch.tensor([float(self._sum), float(self._count)], dtype=torch.float64)


def test_on_one_rank_the_factor_and_the_mean_are_those_of_the_counts():
    loss = BatchLoss(global_batch=4, ranks=1, device="cpu")
    loss.weigh(Loss(torch.tensor(6.0, requires_grad=True), 2))
    loss.weigh(Loss(torch.tensor(9.0, requires_grad=True), torch.tensor(3)))
    assert loss.mean() == 3.0
    assert loss.gradient_factor() == pytest.approx(1 / 5)
    assert loss.mean() == 3.0


def test_a_whole_share_at_once_is_not_touched_at_all():
    value = torch.tensor(0.1, requires_grad=True)
    loss = BatchLoss(global_batch=32, ranks=4, device="cpu")
    loss.begin(8)
    assert loss.weigh(value) is value


def test_a_mean_of_an_unknown_number_of_samples_is_refused():
    loss = BatchLoss(global_batch=4, ranks=1, device="cpu")
    with pytest.raises(UnsupportedError, match="of how many samples") as caught:
        loss.weigh(torch.ones((), requires_grad=True))
    assert "s.micro_batches()" in caught.value.next_step


def test_a_batch_that_counts_nothing_is_not_finite_and_so_is_skipped():
    loss = BatchLoss(global_batch=4, ranks=1, device="cpu")
    loss.weigh(Loss(torch.tensor(0.0, requires_grad=True), 0))
    assert not torch.isfinite(torch.zeros(()) * loss.gradient_factor())


@pytest.mark.parametrize("first", [0, 1])
def test_mixed_forms_in_one_step_are_refused(first):
    forms = [torch.tensor(1.0), Loss(torch.tensor(1.0), 1)]
    loss = BatchLoss(global_batch=4, ranks=1, device="cpu")
    loss.begin(4)
    loss.weigh(forms[first])
    with pytest.raises(UnsupportedError):
        loss.weigh(forms[1 - first])
