"""When a run saves, and what is settled before and after: the main thread's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from slurm_forge.journal import Known
from slurm_forge.spec.job import CheckpointSpec
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.checkpointing.rank_mismatch import instability_of
from slurm_forge.training.checkpointing.saver import Saver
from slurm_forge.training.core import rng
from slurm_forge.training.core.run_state import (
    Hooks,
    Registry,
    TrainingProgress,
)
from slurm_forge.training.core.step_boundary import StepBoundaries
from slurm_forge.training.data.source_state import DataState
from slurm_forge.training.instability.skip_tracker import SkipTracker


class SaveSchedule:
    """Decides at each step boundary whether to save, and saves.

    Every method is called on all ranks at the same place of the program.
    """

    def __init__(
        self,
        saver: Saver,
        spec: CheckpointSpec,
        *,
        registry: Registry,
        progress: TrainingProgress,
        skip_tracker: SkipTracker,
        hooks: Hooks,
        boundaries: StepBoundaries,
        data_state: DataState,
        on_save_started: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._saver = saver
        self._spec = spec
        self._registry = registry
        self._progress = progress
        self._skip_tracker = skip_tracker
        self._hooks = hooks
        self._boundaries = boundaries
        self._data_state = data_state
        self._on_save_started = on_save_started
        self._prepared = False
        self._mismatch_accepted = False
        self._stepped = False
        #: Epochs completed at the last boundary.
        self._epoch: int | None = None
        #: Training's random state, during a phase that has one of its own.
        self.random: dict[str, torch.Tensor] | None = None
        #: The random state of the last save.
        self.random_saved: dict[str, torch.Tensor] | None = None
        #: What is currently saved in place of registered objects that are ahead of the steps.
        self.ahead: Mapping[str, Any] = {}

    def boundary(self, *, stepped: bool) -> None:
        """Between two steps: settle finished saves, begin the one that is due."""
        pending, catalog = self._saver.pending, self._saver.catalog
        if pending is not None and pending.done():
            self.finish_save()
        if stepped and catalog is not None and catalog.unproven:
            tracker = self._skip_tracker
            healthy = self._progress.skipped_in_a_row == 0 and tracker.open_proposal is None
            catalog.stepped(self._progress.step, healthy=healthy)
        self._stepped = stepped
        if stepped:
            self._prepare()
        due = self._due()
        if due is not None and self._saver.last_save_step != self._progress.step:
            self.save(due)

    def _due(self) -> str | None:
        """The reason for a save at this step according to the job file, if any."""
        spec, step, epoch, before = (
            self._spec,
            self._progress.step,
            self._progress.epoch,
            self._epoch,
        )
        self._epoch = epoch
        if spec.every_steps is not None and step > 0 and step % spec.every_steps == 0:
            return "every_steps"
        if spec.every_epochs is not None and epoch is not None and before is not None:
            # One step may end several epochs of a small dataset.
            ended = epoch // spec.every_epochs > before // spec.every_epochs
            return "every_epochs" if ended else None
        return None

    def _prepare(self) -> None:
        """After the first step (optimizers have no state before it), and before any save."""
        if self._prepared:
            return
        self._prepared = self._stepped
        with self._saving():
            self.compare_ranks(ids=self._stepped)
            # After this, state that naturally differs between ranks is part of the plan.
            self._saver.prepare(self._registry, self._progress, rng.capture())

    def compare_ranks(self, *, ids: bool = False) -> None:
        """Compare what ranks hold that should be equal; all ranks must act on a difference."""
        mismatch = self._saver.compare_ranks(self._registry, self._progress, rng.capture(), ids=ids)
        if mismatch is not None and not self._mismatch_accepted:
            self._skip_tracker.found(instability_of(mismatch))

    def accept_mismatch(self) -> None:
        """All ranks have decided that training continues although they differ."""
        self._mismatch_accepted = True

    def save(self, reason: str, *, wait: bool = False, doubts: Sequence[str] = ()) -> None:
        """Save; with ``wait`` (or if the job says so) it is on disk on return, or has failed."""
        self.finish_save()
        self._skip_tracker.read_all()
        doubts = doubts or self._skip_tracker.weights_in_doubt
        self._prepare()
        # With a fetched but unused batch, the random states from before the fetch are saved.
        random = self._data_state.random(self._progress.step) or self.random or rng.capture()
        self.random_saved = random
        # A save that somebody waits for is the last one, or was requested.
        use_spare, wait = wait, wait or not self._spec.background
        with self._saving():
            self._call_hooks(
                self._saver.save(
                    reason,
                    replace(self._registry, others={**self._registry.others, **self.ahead}),
                    self._progress,
                    random,
                    wait=wait,
                    use_spare=use_spare,
                    doubts=doubts,
                )
            )
        self._on_save_started(self._progress.step)

    def evaluated(self, logged: Mapping[str, Any]) -> None:
        """After an evaluation: if the job keeps the best, save a better result.

        Only then is a device waited for, and no collective is issued otherwise.
        """
        if self._spec.keep_best is None:
            return
        step = self._progress.step
        if self._saver.evaluated(step, logged) and self._saver.last_save_step != step:
            self.save(f"best {self._spec.keep_best.metric}")

    def finish_save(self) -> None:
        """Wait for a background save, which is usually over by then."""
        if self._saver.pending is not None:
            with self._saving():
                self._call_hooks(self._saver.finish_save())

    def wait_for_save(self) -> None:
        """Wait for the pending save without a collective: the launch is about to be abandoned."""
        self._saver.wait_for_save()

    def have(self, reason: str, *, doubts: Sequence[str] = ()) -> bool:
        """Save unless this step is on disk already; whether it is now.

        ``doubts`` are reasons not to trust it, on the ranks that have any.
        """
        self.finish_save()
        step = self._progress.step
        if self.last is None or self.last.step != step:
            self.save(reason, wait=True, doubts=doubts)
        elif doubts:
            self._saver.doubt(self.last, doubts)
        return self.last is not None and self.last.step == step

    def agree_with(self, checkpoints: Known) -> None:
        """Adopt what the journal marks as suspect after an incident that training survives."""
        if self._saver.catalog is not None:
            self._saver.catalog.agree_with(checkpoints)

    def unsound(self) -> tuple[str, ...]:
        """Unsound values in this rank's present state.  Not collective."""
        return self._saver.unsound(self._registry)

    @property
    def last(self) -> CheckpointName | None:
        """The last checkpoint that all ranks know."""
        return self._saver.last

    def _saving(self) -> AbstractContextManager[None]:
        return self._boundaries.meanwhile("save")

    def _call_hooks(self, name: CheckpointName | None) -> None:
        if name is not None:
            self._hooks.call("on_save", step=name.step, name=str(name))
