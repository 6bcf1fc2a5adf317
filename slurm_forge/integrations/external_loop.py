"""What the trainers of other libraries have in common, as far as their run is concerned.

A trainer keeps its loop.  Its callback tells here what becomes of each step: the loss, the norm,
the update, the count, and the place behind it where the run may save and stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from slurm_forge.errors import UnsupportedError
from slurm_forge.training.core import rng
from slurm_forge.training.data.loader import WorkerStart
from slurm_forge.training.loop.positions import KeptState
from slurm_forge.training.loop.run import Run


class ExternalLoop:
    """The loop of a trainer, between its run and its callback.

    Args:
        run: The run that the trainer trains as.
        keeps_gradients: Whether the trainer clears gradients itself, and lets its callbacks look at
            them before it does.
    """

    def __init__(self, run: Run, *, keeps_gradients: bool = False) -> None:
        self.run = run
        self.keeps_gradients = keeps_gradients
        #: Whether an evaluation goes on.
        self.evaluating = False
        #: Whether a step is counted whose boundary is still to be passed.
        self.counted = False
        self._loss: torch.Tensor | None = None
        self._grad_norm: torch.Tensor | float | None = None
        self._applied = False
        self._random: dict[str, torch.Tensor] | None = None

    def add_loss(self, loss: Any) -> None:
        """Add the loss of a micro-batch, which is divided by their number already."""
        if isinstance(loss, torch.Tensor):
            self._loss = loss if self._loss is None else self._loss + loss

    def note_norm(self, norm: torch.Tensor | float | None) -> None:
        """Remember the gradient norm over all ranks, before clipping, of the coming update.

        Of several parts that were clipped one by one, the norm of all of them.
        """
        if norm is not None and self._grad_norm is not None:
            norm = (self._grad_norm**2 + norm**2) ** 0.5
        self._grad_norm = norm

    def apply(self, optimizer: Optimizer) -> None:
        """Make an update that is checked, and the same on all ranks."""
        self.run.apply(optimizer, grad_norm=self._grad_norm, keep_gradients=self.keeps_gradients)
        self._grad_norm, self._applied = None, True

    def count(self, samples: int | None) -> None:
        """Count a step; what the run has applied is judged already."""
        norm = None if self._applied else self._grad_norm
        self.run.count_step(self._loss, grad_norm=norm, samples=samples)
        self._loss = self._grad_norm = None
        self.counted, self._applied = True, False

    def boundary(self) -> None:
        """Save and stop here if that is due, behind a step; else nothing happens."""
        if self.counted:
            self.counted = False
            self.run.boundary()

    @contextmanager
    def evaluation(self, *, stops: bool = True) -> Iterator[None]:
        """An evaluation, in which the run may stop at ``poll``; it is done again then.

        Not in the middle of a step: gradients that are accumulated are in no checkpoint.
        """
        self.evaluating = True
        try:
            with self.run.phase("eval", stops=stops):
                yield
        finally:
            self.evaluating = False

    def poll(self) -> None:
        """Pass another batch of an evaluation."""
        if self.evaluating:
            self.run.poll()

    def hold_random(self) -> None:
        """Keep the random states that the checkpoint has until ``release_random``."""
        self._random = rng.capture()

    def release_random(self) -> None:
        """Begin the first step with the states of the checkpoint: what led there has drawn."""
        if self._random is not None:
            rng.restore(self._random)
            self._random = None

    def log(self, figures: dict[str, Any]) -> None:
        """Hand the figures of a trainer on to the run: those that are one number."""
        numbers = {name: value for name, value in figures.items() if _is_number(value)}
        if numbers:
            self.run.log(**numbers)


class TakenState(KeptState):
    """What a trainer has besides what is registered, once a checkpoint asks for it.

    Args:
        take: Takes the state; where ``state`` is set, that is the state instead.
    """

    def __init__(self, take: Callable[[], Any]) -> None:
        super().__init__(None)
        self._take = take

    def state_dict(self) -> Any:
        """The state that is kept, or that of now."""
        return self._take() if self.state is None else self.state


def require_same_samples(
    before: int, now: int, *, each: str, step: int, how: str, otherwise: str = ""
) -> None:
    """Refuse a resume that would take other samples for those that are done.

    Args:
        before: The samples of a step or batch, over all ranks, when the checkpoint was saved.
        now: The samples of one now.
        each: Whether they are those of a ``step`` or a ``batch``.
        step: The steps that are done.
        how: What makes up ``now``, in the words of the library.
        otherwise: What else the user may do, as the end of a sentence.

    Raises:
        UnsupportedError: The numbers differ.
    """
    if before != now:
        raise UnsupportedError(
            f"each {each} up to step {step} had {before} samples, and now it has {now} ({how}): "
            "the trainer would continue at the wrong sample",
            next_step=f"Choose them so that their product is {before}{otherwise}.",
        )


@contextmanager
def replaced(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a method of one object for a while."""
    method = getattr(owner, name)
    setattr(owner, name, wraps(method)(wrap(method)))
    try:
        yield
    finally:
        delattr(owner, name)


def nothing(method: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a method: nothing is done."""
    del method
    return lambda *_, **__: None


def shield_workers(loader: Any) -> None:
    """Let loader workers outlive a signal that all processes of a step get: the save needs them."""
    if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, WorkerStart):
        loader.worker_init_fn = WorkerStart(loader.worker_init_fn)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
