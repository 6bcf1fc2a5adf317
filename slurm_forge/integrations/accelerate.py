"""A loop of one's own with Hugging Face's accelerate as a run.

    with slurm_forge.attach("my-run") as run:
        accelerator = Accelerator()
        model, optimizer, loader, scheduler = accelerator.prepare(...)
        register_accelerator(run, accelerator)     # and restore
        while run.step_number < steps:
            for batch in loader:
                ...                                # accumulate, backward, clip, optimizer.step()
                run.advance(loss=loss)

Everything that ``prepare`` and ``register_for_checkpointing`` were given is registered.  The update
of a prepared optimizer is ``run.apply``.  A prepared loader keeps its position: accelerate fetches
one batch ahead, so the random states before that batch are kept, too, and those with which the
epoch began, from which its order follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import IterableDataset

from slurm_forge.device.accelerator import in_use
from slurm_forge.device.generators import current_state
from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations.external_loop import (
    ExternalLoop,
    require_same_samples,
    shield_workers,
)
from slurm_forge.integrations.index_order import IndexOrder
from slurm_forge.training.core import rng
from slurm_forge.training.core.host_generators import HostGenerators, HostStates
from slurm_forge.training.core.rng import GlobalStates
from slurm_forge.training.loop.run import Run


def register_accelerator(run: Run, accelerator: Accelerator) -> bool:
    """Register what an accelerator has prepared, and restore the run's checkpoint.

    From then on the step of a prepared optimizer is checked and the same on all ranks, as that of
    ``run.apply``; a ``GradScaler`` leaves such updates out by itself.  ``run.advance`` ends a step.

    Args:
        run: The run, from ``slurm_forge.attach`` or as the argument of a training function.
        accelerator: After its last ``prepare`` and ``register_for_checkpointing``, and before the
            first batch.

    Returns:
        Whether there was a checkpoint.

    Raises:
        UnsupportedError: The accelerator uses DeepSpeed or Megatron-LM, a loader hands out what
            rank 0 reads, or it has an iterable dataset, whose position is not known.
    """
    if accelerator.distributed_type.value in ("DEEPSPEED", "MEGATRON_LM"):
        raise UnsupportedError(
            f"an Accelerator with {accelerator.distributed_type.value}: its engine makes the "
            "updates and keeps the state",
            next_step="Start the script with slurm-forge exec (docs/how-to/exec.md).",
        )
    scaler = accelerator.scaler
    run.register(
        **_named("model", accelerator._models),
        **_named("optimizer", [own_optimizer(each) for each in accelerator._optimizers]),
        **_named(
            "scheduler", [getattr(each, "scheduler", each) for each in accelerator._schedulers]
        ),
        **_named("loader", [LoaderPosition(each, run) for each in accelerator._dataloaders]),
        **_named("custom", accelerator._custom_objects),
        scaler=scaler,
    )
    resumed = run.restore()
    if scaler is None:
        loop = ExternalLoop(run)
        accelerator.clip_grad_norm_ = noted_norm(loop, accelerator.clip_grad_norm_)
        for each in accelerator._optimizers:
            each.step = guarded_step(loop, each)
    return resumed


def own_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer within accelerate's."""
    own: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return own


def noted_norm(loop: ExternalLoop, clip: Callable[..., Any]) -> Callable[..., Any]:
    """In place of an accelerator's ``clip_grad_norm_``: the loop gets what it returns, too."""

    def clip_grad_norm(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        loop.note_norm(norm)
        return norm

    return clip_grad_norm


def guarded_step(loop: ExternalLoop, optimizer: Any) -> Callable[..., None]:
    """In place of an optimizer's ``step``: the run makes the update, or leaves it out everywhere.

    Args:
        loop: Of a run with which the optimizer is registered.
        optimizer: accelerate's around that: while gradients are accumulated there is no update.

    Returns:
        The step, which refuses a closure with UnsupportedError.
    """
    own, gradients = own_optimizer(optimizer), optimizer.gradient_state

    def step(closure: Any = None) -> None:
        if not gradients.sync_gradients:
            return
        if closure is not None:
            raise UnsupportedError(
                "an optimizer step with a closure: there is no single update to check",
                next_step="Use an optimizer that steps without one.",
            )
        loop.apply(own)

    return step


def _named(kind: str, objects: list[Any]) -> dict[str, Any]:
    """One object by its kind alone, several with a number."""
    if len(objects) == 1:
        return {kind: objects[0]}
    return {f"{kind}_{number}": each for number, each in enumerate(objects)}


class LoaderPosition:
    """Where a prepared loader is, with and without workers; a resume fetches nothing twice.

    Args:
        loader: Of ``Accelerator.prepare``, over a dataset with ``__getitem__``.
        run: Whose checkpoints have the position.

    Raises:
        UnsupportedError: It is of another kind.
    """

    def __init__(self, loader: Any, run: Run) -> None:
        _require_indexed(loader)
        self._loader, self._run = loader, run
        base = loader.base_dataloader
        self._begin: Callable[[], Iterator[Any]] = base.__iter__
        self._epoch: weakref.ref[_Epoch] | None = None
        self._resume: dict[str, Any] | None = None
        # Where the sampler draws from one of its own, accelerate keeps it equal on all ranks.
        shared = loader.synchronized_generator
        self._order = IndexOrder(base.batch_sampler, [] if shared is None else [shared])
        # DataLoader refuses the plain assignment.
        object.__setattr__(base, "batch_sampler", self._order)
        self._generators = HostGenerators()
        if hasattr(base, "load_state_dict"):
            base.load_state_dict({})  # forgets the iterator that prepare() made
        shield_workers(base)
        base.__iter__ = self._iterate

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its batches were handed out, and what the rest is drawn with."""
        if self._resume is not None:
            return self._resume
        state: dict[str, Any] = {"epoch": self._loader.iteration, "samples": self._samples}
        if self._loader.synchronized_generator is not None:
            state["generator"] = self._loader.synchronized_generator.get_state()
        epoch = None if self._epoch is None else self._epoch()
        if epoch is not None:  # neither between epochs, nor was a loop left before its end
            state |= {
                "batches": epoch.handed_out,
                "is_over": epoch.is_over,
                "order": self._order.state(),
                "fetch_with": epoch.fetch_with,
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch that begins go on where the state says.

        Raises:
            UnsupportedError: It is of batches of another size.
        """
        if "batches" in state:
            require_same_samples(
                state.get("samples", self._samples), self._samples, each="batch",
                step=self._run.step_number, how="batch_size x ranks",
                otherwise=", or begin a run of another name",
            )  # fmt: skip
            self._resume = state
        else:
            self._resume = None
        self._loader.iteration = state["epoch"]
        if self._loader.synchronized_generator is not None:
            self._loader.synchronized_generator.set_state(state["generator"])

    @property
    def _samples(self) -> int:
        """The samples of a batch over all ranks; batches, where their sampler does not tell."""
        size = getattr(self._order, "batch_size", None)
        ranks = 1 if getattr(self._order, "split_batches", False) else self._run.world_size
        return (size or 1) * ranks

    def _iterate(self) -> Iterator[Any]:
        """In place of ``iter`` of torch's loader, which accelerate calls once per epoch."""
        state, self._resume = self._resume, None
        if state is None:
            epoch = _Epoch(self._begin(), self._generators)
        else:
            if state["is_over"]:  # the end of that epoch follows, as without the interruption
                self._loader.iteration += 1
                return iter(())
            now, batches = GlobalStates.now(), state["batches"]
            # Of an older version: what the order was drawn from when it began.
            self._order.resume(state.get("order") or [state["began_with"], None], batches)
            epoch = _Epoch(self._begin(), self._generators, batches)
            self._order.pass_over()  # the order is drawn from the random states of then
            rng.restore(state["fetch_with"] or now.tensors())
            epoch.then = now if state["fetch_with"] else None
        epoch.draws = not self._loader.base_dataloader.num_workers
        self._epoch = weakref.ref(epoch)
        return epoch


class _Epoch:
    """A counted iterator of torch; accelerate asks it for one batch more than it yields."""

    def __init__(
        self, batches: Iterator[Any], generators: HostGenerators, passed_over: int = 0
    ) -> None:
        self._batches = batches
        self._generators = generators
        self._fetched = passed_over
        self.is_over = False
        #: The random states to have once the first batch is fetched.
        self.then: GlobalStates | None = None
        #: Whether the dataset may draw random numbers in this process.
        self.draws = False
        self._has_device = in_use() is not None
        self._before: tuple[HostStates, tuple[str, torch.Tensor] | None] | None = None

    @property
    def handed_out(self) -> int:
        return self._fetched if self.is_over else max(self._fetched - 1, 0)

    @property
    def fetch_with(self) -> dict[str, torch.Tensor]:
        """The random states before the batch was fetched that was not handed out yet."""
        if self._before is None or self.is_over:
            return {}
        return GlobalStates.of(*self._before).tensors()

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        before = None
        if self.draws:
            before = self._generators.states(), current_state() if self._has_device else None
        try:
            batch = next(self._batches)
        except StopIteration:
            self.is_over = True
            raise
        self._before = before
        self._fetched += 1
        if self.then is not None:  # the first after a resume: fetched a second time
            rng.restore(self.then.tensors())
            self.then = None
        return batch


def _require_indexed(loader: Any) -> None:
    # accelerate's loaders say that they are torch's: only type() tells.
    if type(loader) is not DataLoaderShard:
        raise UnsupportedError(
            f"a {type(loader).__name__}: rank 0 reads for all ranks (dispatch_batches), and where "
            "it is does not follow from the batches of one of them",
            next_step="Use DataLoaderConfiguration(dispatch_batches=False), or take the batches "
            "from run.batches(dataset) in place of the prepared loader.",
        )
    if isinstance(loader.dataset, IterableDataset) or loader.base_dataloader.batch_sampler is None:
        raise UnsupportedError(
            "a prepared loader over an iterable dataset, or without batches: its position is not "
            "known after an interruption",
            next_step="Leave it out of accelerator.prepare(), and take the batches from "
            "run.batches() (docs/how-to/training-loop.md).",
        )
