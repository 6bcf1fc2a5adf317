"""torchtitan's own trainer as a run.

    with slurm_forge.attach("my-run") as run:
        train_trainer(run, Trainer(ConfigManager().parse_args()))    # torchtitan.train.Trainer

torchtitan keeps its loop.  The run takes the place of its checkpoint manager, which is asked to
load before the first step and to save behind each; the step of its optimizers is checked.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.train import Trainer

from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations.external_loop import ExternalLoop, replaced
from slurm_forge.training.loop.run import Run

#: The dimensions of torchtitan's meshes along which this is understood.
_DIMENSIONS = ("batch", "cp", "tp")


def train_trainer(run: Run, trainer: Trainer) -> None:
    """Train, in place of ``trainer.train()``: from the run's checkpoint if it has one.

    Every step that torchtitan counts is one of the run, which saves and stops between two of them.
    torchtitan's own checkpoints are neither written nor read.

    Args:
        run: The run, from ``slurm_forge.attach`` or as the argument of a training function.  It
            has joined the ranks before the trainer is made.
        trainer: With its model, optimizers and data; it has not trained yet.

    Raises:
        UnsupportedError: The trainer uses pipeline or expert parallelism, updates weights in the
            backward pass, or loads data by other means than torchdata's ``StatefulDataLoader``.
    """
    _require_supported(trainer)
    loop = ExternalLoop(run)
    with ExitStack() as stack:
        trainer.checkpointer.close()
        trainer.checkpointer = _Checkpoints(trainer, loop)
        for name, wrap in (
            ("forward_backward_step", lambda step: _noted(loop, step)),
            ("train_step", lambda step: _behind_boundary(loop, step)),
        ):
            stack.enter_context(replaced(trainer, name, wrap))
        stack.enter_context(
            replaced(trainer.optimizers, "step", lambda _: lambda: _apply(trainer, loop))
        )
        trainer.train()


class _Checkpoints:
    """What torchtitan calls its checkpoint manager: the run, which decides when to save."""

    def __init__(self, trainer: Trainer, loop: ExternalLoop) -> None:
        self._trainer, self._loop = trainer, loop

    def load(self, step: int = -1) -> bool:
        """Register everything and restore; which step follows from the run."""
        del step
        trainer, run = self._trainer, self._loop.run
        (model,) = trainer.model_parts
        (optimizer,) = trainer.optimizers
        (scheduler,) = trainer.lr_schedulers
        run.register(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            data=_DataPosition(trainer.dataloader),
            progress=_Progress(trainer, run),
        )
        meshes = trainer.parallel_dims
        names = [each for each in _DIMENSIONS if meshes.get_optional_mesh(each) is not None]
        return run.restore(mesh=meshes.get_mesh(names) if names else None)

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Count the step; its boundary is before the next one, behind an evaluation."""
        del curr_step, last_step
        self._loop.count(None)

    def maybe_wait_for_staging(self) -> None:
        """The run waits by itself."""

    def close(self) -> None:
        """The run closes by itself."""


class _DataPosition:
    """The position of a loader as torchdata has it; torchtitan's own is pickled."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = StatefulDataLoader.state_dict(self._loader)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        StatefulDataLoader.load_state_dict(self._loader, state)


class _Progress:
    """What the trainer counts, behind the last step that is done."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self._trainer, self._run = trainer, run

    def state_dict(self) -> dict[str, Any]:
        return {**self._trainer.state_dict(), "step": self._run.step_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(state)


def _noted(loop: ExternalLoop, forward_backward_step: Any) -> Any:
    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = forward_backward_step(*args, **kwargs)
        # A sum over this rank's tokens, divided by those of all ranks.
        loop.add_loss(loss.detach() * loop.run.world_size)
        return loss

    return step


def _behind_boundary(loop: ExternalLoop, train_step: Any) -> Any:
    def step(*args: Any, **kwargs: Any) -> Any:
        loop.boundary()
        return train_step(*args, **kwargs)

    return step


def _apply(trainer: Trainer, loop: ExternalLoop) -> None:
    (optimizer,) = trainer.optimizers
    loop.apply(optimizer)


def _require_supported(trainer: Trainer) -> None:
    meshes = trainer.parallel_dims
    for name, is_used in (
        ("pipeline parallelism", meshes.pp_enabled),
        ("expert parallelism", meshes.ep_enabled),
        ("an optimizer in the backward pass", len(list(trainer.optimizers)) != 1),
    ):
        if is_used:
            raise UnsupportedError(
                f"a torchtitan trainer with {name}",
                next_step="Start it with slurm-forge exec and torchtitan's own checkpoints "
                "(docs/how-to/exec.md), or write the loop with run.step (docs/how-to/meshes.md).",
            )
    if not isinstance(trainer.dataloader, StatefulDataLoader):
        raise UnsupportedError(
            f"a torchtitan trainer whose dataloader is a {type(trainer.dataloader).__name__}: "
            "where it is can't be saved",
            next_step="Make it a ParallelAwareDataloader of torchtitan.components.dataloader.",
        )
