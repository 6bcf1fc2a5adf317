"""The loss of the first micro-batch after a checkpoint that was written for a stop.

No step follows a stop.  So once the checkpoint is on disk and the conductor knows that this rank
has stopped, the next step is begun only for its first loss: its batch is fetched, and the function
of the last steps is called with the random state of the checkpoint.  A failure from there on costs
that loss and nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.control import Member
from slurm_forge.training.checkpointing.catalog import CheckpointCatalog
from slurm_forge.training.checkpointing.resume_check import seconds_for_loss
from slurm_forge.training.core import rng
from slurm_forge.training.core.error_report import in_one_line
from slurm_forge.training.core.run_state import Registry, TrainingProgress
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.instability.replay import StateGuard
from slurm_forge.training.loop.loss_calls import LossFunction
from slurm_forge.training.loop.save_schedule import SaveSchedule
from slurm_forge.training.loop.step_lifecycle import StepLifecycle

#: Fetches the batch of the next step; calls its argument while waiting.
FetchBatch: TypeAlias = Callable[[Callable[[], None]], Batch]
_DOING = "Computing the loss behind the checkpoint"


class ReferenceLoss:
    """One object per launch and rank.  ``catalog`` is rank 0's: its loss is the one that counts."""

    def __init__(
        self,
        *,
        registry: Registry,
        progress: TrainingProgress,
        save_schedule: SaveSchedule,
        step_lifecycle: StepLifecycle,
        member: Member,
        group: dist.ProcessGroup | None,
        catalog: CheckpointCatalog | None,
    ) -> None:
        self._registry = registry
        self._progress = progress
        self._save_schedule = save_schedule
        self._lifecycle = step_lifecycle
        self._member = member
        self._group = group
        self._catalog = catalog
        #: Set during a loop over ``run.batches``: returns what fetches the batch of its next step,
        #: None if there is no such batch.
        self.next_fetch: Callable[[], FetchBatch | None] | None = None
        #: How long the last batch was waited for.
        self.fetch_s = 0.0

    def seconds_allowed(self) -> float:
        """How long ``compute`` may take after the save of a stop; 0 if this rank can't.

        Returns without waiting.
        """
        last, lifecycle = self._save_schedule.last, self._lifecycle
        saved = last is not None and last.step == self._progress.step and lifecycle.stepped
        if not saved or self._fetch is None or lifecycle.next_loss_function is None:
            return 0.0
        return seconds_for_loss(self.fetch_s + lifecycle.step_s, self._member.seconds_left)

    def compute(self, allowed_s: float) -> None:
        """Compute it and record it for the checkpoint, if all ranks are allowed to.

        Collective in a loop over ``run.batches``.  Exceptions are recorded in a note.
        """
        if self.next_fetch is None:
            return
        guard: StateGuard | None = None
        batch: Batch | None = None
        function, problem = self._lifecycle.next_loss_function, ""
        try:
            if allowed_s:
                guard = StateGuard(self._registry.models.values())
                # In time for all ranks to learn that this one has none.
                batch = self._fetched(time.monotonic() + allowed_s / 2)
        except (Exception, SystemExit) as error:
            problem = in_one_line(error)
        try:
            ready = batch is not None
            ranks = Ranks(self._group)
            problem = ranks.agree(None, [ready, problem], _first_problem, doing=_DOING)
            if problem is None and batch is not None and function is not None:
                self._note(batch, function)
                with contextlib.suppress(Exception):  # a forward may still need the other ranks
                    ranks.agree(None, None, lambda _: None, doing=_DOING)
        except (Exception, SystemExit) as error:
            problem = in_one_line(error)
        if guard is not None:
            with contextlib.suppress(Exception):  # code that saves on exit finds the old state
                guard.put_back()
        if problem and self._catalog is not None:
            self._catalog.say(
                f"the loss behind the checkpoint of step {self._progress.step} was not computed at "
                f"the stop: {problem}"
            )

    @property
    def _fetch(self) -> FetchBatch | None:
        return None if self.next_fetch is None else self.next_fetch()

    def _fetched(self, until: float) -> Batch | None:
        fetch, random = self._fetch, self._save_schedule.random_saved
        if fetch is None or random is None:
            return None

        def require_time() -> None:
            if time.monotonic() > until:
                raise TimeoutError("the batch of the next step did not come in time")

        rng.restore(random)
        return fetch(require_time)

    def _note(self, batch: Batch, function: LossFunction) -> None:
        loss = float(self._lifecycle.first_loss_of(batch, function))  # waits for the device
        if self._catalog is not None:
            self._catalog.note_reference_loss(self._progress.step, loss, batch.micro_sizes[0])


def _first_problem(reports: Sequence[Any]) -> str | None:
    """None if every rank has its batch; else the reason, empty if nothing failed."""
    if all(ready for ready, _ in reports):
        return None
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(reports) if text]
    return problems[0] if problems else ""
