"""Losses of micro-batches, weighted so that a step follows the mean over its global batch.

With n ranks, a global batch of G samples and micro-batches of m samples, DDP and FSDP average the
ranks' gradients.  A mean loss over a micro-batch therefore counts n * m / G: summed over
micro-batches and averaged over ranks this is the sum of all samples' gradients over G, for any
micro-batch size, a smaller last one included, and any number of ranks.

A loss that is not a mean over samples (tokens, of which each micro-batch has another number) is
given as ``Loss(sum, count)``.  Its gradients are those of the plain sums until the step is applied;
then they are multiplied by n / (count over all micro-batches and ranks).  That number needs one
all-reduce of two floats per step, the only collective of a step besides the program's own.

Ranks that compute one model together have the same samples and count once.  Tensor-parallel ranks
have the same loss, too.  With context parallelism a rank's loss is that of its own tokens, and
gradients are averaged over n * c ranks: the mean of c equally long parts is the mean over all
tokens, hence a mean loss is weighted as above; ``Loss(sum, count)`` counts over n * c ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slurm_forge.device.accelerator import wide_device, widest_float
from slurm_forge.device.streams import copy_to_host
from slurm_forge.errors import UnsupportedError

#: How many steps are remembered.
LENGTH = 64
#: With fewer it is unknown what is usual.
_LEAST = 8
#: This many consecutive losses must be far off.
_RECENT = 3
#: A single loss above everything usual by this factor is enough.
_ABSURD = 1e4
#: No loss in healthy training is this many deviations from the median.
_FAR = 20.0
_NORMAL = 1.4826  # a median deviation times this is a standard deviation, of normal noise


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's summed loss, where the mean is over other items than samples.

    The step follows the mean over the global batch, whatever the number of ranks and micro-batches.
    It costs one all-reduce of two floats per step.

    Attributes:
        sum: The sum of the losses: a scalar tensor (shape ``()``) with a graph.
        count: The number of items (tokens, boxes) in the sum.
    """

    sum: torch.Tensor
    count: torch.Tensor | float


class BatchLoss:
    """The loss of one step on one rank; one object per step.

    ``ranks`` is the number of data-parallel ranks.  DDP and FSDP average gradients over
    ``averaging_ranks``, which are in ``group`` (default: all); with context parallelism, where
    ranks with the same samples have other tokens, these are more.  All ranks use the same form of
    loss; a step that mixes both raises UnsupportedError.
    """

    def __init__(
        self,
        *,
        global_batch: int,
        ranks: int,
        device: torch.device | str,
        averaging_ranks: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._weight_per_sample = ranks / global_batch
        self._averaging_ranks = ranks if averaging_ranks is None else averaging_ranks
        self._group = group
        self._device = torch.device(device)
        self.clear()

    def clear(self) -> None:
        """Forget all losses: the step is computed anew."""
        self._size = 0
        self._mean: torch.Tensor | None = None
        #: Of the first micro-batch alone, as it was passed; detached.
        self.first: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._count: torch.Tensor | float = 0
        self._total: torch.Tensor | None = None

    def begin(self, size: int) -> None:
        """The next loss is that of a micro-batch of ``size`` samples."""
        self._size = size

    def weigh(self, loss: torch.Tensor | Loss) -> torch.Tensor:
        """The tensor to call ``backward`` on.  Several losses of one micro-batch add up."""
        if isinstance(loss, Loss):
            if self._mean is not None:
                raise _mixed()
            count = loss.count.detach() if isinstance(loss.count, torch.Tensor) else loss.count
            own = loss.sum.detach()
            if self.first is None:
                self.first = own / count
            self._sum = own if self._sum is None else self._sum + own
            self._count = self._count + count
            return loss.sum
        if self._sum is not None:
            raise _mixed()
        if not self._size:
            raise UnsupportedError(
                "a mean loss was handed over, and of how many samples can't be told: it would "
                "count for nothing",
                next_step="Call s.backward inside of: for micro_batch in s.micro_batches().",
            )
        own = loss.detach()
        if self.first is None:
            self.first = own
        weight = self._weight_per_sample * self._size
        if weight != 1.0:
            loss = loss * weight
            own = loss.detach()
        self._mean = own if self._mean is None else self._mean + own
        return loss

    def gradient_factor(self) -> torch.Tensor | None:
        """The factor for the gradients before they are clipped; None for 1.

        Collective for ``Loss(sum, count)``, the first time: every rank calls it once the backward
        of the last micro-batch is done.  A batch with a total count of zero gives inf, hence a NaN
        gradient, like a mean over nothing; the step is then skipped like any other such step.
        """
        if self._sum is None:
            return None
        if self._total is None:
            self._total = self._summed_over_ranks(self._sum)
        return self._averaging_ranks / self._total[1]

    @property
    def known(self) -> bool:
        """Whether a loss was passed: some other libraries' loops keep it to themselves."""
        return self._mean is not None or self._sum is not None

    def mean(self) -> torch.Tensor:
        """The mean loss, detached, on the device; without waiting or collectives.

        Over this rank's samples; over the global batch after ``gradient_factor`` was computed for a
        ``Loss(sum, count)``, which provides it for free.
        """
        if self._total is not None:
            return self._total[0] / self._total[1]
        if self._sum is not None:
            return self._sum / self._count
        if self._mean is None:
            return torch.full((), float("nan"), device=self._device)
        return self._mean

    def own_mean(self) -> float:
        """The same over this rank's samples alone.  Waits for the device."""
        if self._sum is not None:
            return float(self._sum / self._count)
        return math.nan if self._mean is None else float(self._mean)

    def _summed_over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Sum and count of the step."""
        total = torch.zeros(2, dtype=widest_float(self._device), device=self._device)
        total[0] += loss
        total[1] += self._count
        if self._averaging_ranks > 1:
            dist.all_reduce(total, group=self._group)
        return total


def _mixed() -> UnsupportedError:
    return UnsupportedError(
        "one step has losses of both forms, a mean and a Loss(sum, count)",
        next_step="Return the same form for every micro-batch, on every rank.",
    )


class LossHistory:
    """A ring of this rank's mean losses, newest last; part of every checkpoint."""

    def __init__(self, device: torch.device) -> None:
        # The last element counts all recorded losses; ``tensor`` keeps it up to date.
        self._ring = torch.zeros(LENGTH + 1, dtype=torch.float64, device=wide_device(device))
        #: Losses known on the host, by their places: written when the ring is read.
        self._unwritten: dict[int, float] = {}
        self._noted = 0

    def note(self, loss: torch.Tensor | float) -> None:
        """Record the loss of one more step, without waiting."""
        place = self._noted % LENGTH
        if not isinstance(loss, torch.Tensor):
            self._unwritten[place] = loss
        elif loss.is_cpu:
            self._unwritten[place] = loss.item()
        else:
            self._unwritten.pop(place, None)
            self._ring[place].copy_(loss.reshape(()), non_blocking=True)
        self._noted += 1

    def tensor(self) -> torch.Tensor:
        """The ring itself, for saving and loading in place."""
        for place, loss in self._unwritten.items():
            self._ring[place].fill_(loss)
        self._unwritten.clear()
        self._ring[LENGTH].fill_(self._noted)
        return self._ring

    def restored(self) -> None:
        """The ring has been read from a checkpoint.  Waits for the device."""
        self._unwritten.clear()
        self._noted = int(self._ring[LENGTH].item())

    def snapshot(self) -> torch.Tensor:
        """A copy of the present ring, to be read later, when it disturbs nobody."""
        return self.tensor().clone()

    def on_host(self) -> Callable[[], list[float]]:
        """Copy the ring as it is now; returns what reads the losses in it, oldest first.

        The reader waits for the copy and for nothing that is queued later.
        """
        ring, arrived = copy_to_host(self.snapshot())

        def read() -> list[float]:
            if arrived is not None:
                arrived.synchronize()
            return values(ring)

        return read

    @property
    def noted(self) -> int:
        """How many losses were ever recorded."""
        return self._noted


def values(ring: torch.Tensor) -> list[float]:
    """The losses in a ring, oldest first.  Waits for the device."""
    *losses, noted = ring.tolist()
    count = int(noted)
    if count < LENGTH:
        return losses[: max(0, count)]
    at = count % LENGTH
    return [*losses[at:], *losses[:at]]


def doubtful(losses: Sequence[float]) -> tuple[str, ...]:
    """Why a state that resulted from steps with the last of these losses is not to be trusted.

    One strange batch is no reason: the last few must be far off, and above all that was usual.
    """
    if not losses:
        return ()
    if not math.isfinite(losses[-1]):
        return (f"the loss is {losses[-1]}",)
    recent = losses[-_RECENT:]
    usual = [loss for loss in losses[:-_RECENT] if math.isfinite(loss)]
    if len(usual) < _LEAST or not all(map(math.isfinite, recent)):
        return ()
    middle, highest = statistics.median(usual), max(abs(loss) for loss in usual)
    spread = _NORMAL * statistics.median(abs(loss - middle) for loss in usual)
    far = middle + _FAR * max(spread, 0.01 * abs(middle))
    off = all(loss > max(far, 2.0 * highest) for loss in recent)
    if off or 0.0 < _ABSURD * highest < losses[-1]:
        text = f"the loss is {losses[-1]:.4g}"
        return (f"{text}, its median over {len(usual)} steps was {middle:.4g}",)
    return ()
