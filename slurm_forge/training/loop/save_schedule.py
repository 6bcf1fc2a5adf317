"""When a run saves, and what has to be settled before and after: the main thread's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from slurm_forge.journal import Known
from slurm_forge.spec.job import CheckpointSpec
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.checkpointing.saver import Saver
from slurm_forge.training.core import rng
from slurm_forge.training.core.hooks import Hooks
from slurm_forge.training.core.run_state import (
    Progress,
    Registry,
)
from slurm_forge.training.core.step_boundary import Boundaries
from slurm_forge.training.instability.skip_tracker import Skips

__all__ = ["Saves"]


class Saves:
    """Every method is called on all ranks at the same place of the program."""

    def __init__(
        self,
        saver: Saver,
        asked: CheckpointSpec,
        *,
        registry: Registry,
        progress: Progress,
        skips: Skips,
        hooks: Hooks,
        boundaries: Boundaries,
        begun: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._saver = saver
        self._asked = asked
        self._registry = registry
        self._progress = progress
        self._skips = skips
        self._hooks = hooks
        self._boundaries = boundaries
        self._begun = begun
        self._prepared = False
        self._stepped = False
        #: The random state of the training, while a phase goes on with one of its own.
        self.random: dict[str, torch.Tensor] | None = None

    def boundary(self, *, stepped: bool) -> None:
        """Between two steps: what is over is settled, what is due is begun."""
        if self._saver.landed:
            self.settle()
        if stepped and self._saver.keeping is not None:
            healthy = self._progress.skipped_in_a_row == 0
            self._saver.keeping.stepped(self._progress.step, healthy=healthy)
        self._stepped = stepped
        if stepped:
            self._prepare()
        every, step = self._asked.every_steps, self._progress.step
        if every is not None and step > 0 and step % every == 0 and self._saver.begun != step:
            self.save("every_steps")

    def _prepare(self) -> None:
        """After the first step (optimizers have no state before it), and before any save."""
        if self._prepared:
            return
        self._prepared = self._stepped
        with self._saving():
            self._saver.prepare(self._registry, self._progress, rng.capture())

    def save(self, reason: str, *, wait: bool = False, doubts: Sequence[str] = ()) -> None:
        """Save; with ``wait`` (or where the job wants it so) it is on disk on return, or failed."""
        self.settle()
        self._skips.read_all()
        self._prepare()
        random = rng.capture() if self.random is None else self.random
        # What somebody waits for is the last save, or one that was asked for.
        use_spare, wait = wait, wait or not self._asked.background
        with self._saving():
            self._tell(
                self._saver.save(
                    reason,
                    self._registry,
                    self._progress,
                    random,
                    wait=wait,
                    use_spare=use_spare,
                    doubts=doubts,
                )
            )
        self._begun(self._progress.step)

    def evaluated(self, logged: Mapping[str, Any]) -> None:
        """An evaluation is over: where the job keeps the best, a better one is saved.

        A device is waited for only there, and no collective is issued anywhere else.
        """
        if self._asked.keep_best is None:
            return
        step = self._progress.step
        if self._saver.evaluated(step, logged) and self._saver.begun != step:
            self.save(f"best {self._asked.keep_best.metric}")

    def settle(self) -> None:
        """Wait for a save in the background, which is over if it was begun long ago."""
        if self._saver.flying:
            with self._saving():
                self._tell(self._saver.settle())

    def let_land(self) -> None:
        """Wait for a save in flight without a collective: the launch is about to be given up."""
        self._saver.let_land()

    def have(self, reason: str, *, doubts: Sequence[str] = ()) -> bool:
        """Save unless this step is on disk already; whether it is now.

        ``doubts`` are why it is not to be trusted, on the ranks that have any.
        """
        self.settle()
        step = self._progress.step
        if self.last is None or self.last.step != step:
            self.save(reason, wait=True, doubts=doubts)
        elif doubts:
            self._saver.doubt(self.last, doubts)
        return self.last is not None and self.last.step == step

    def agree_with(self, known: Known) -> None:
        """What the journal makes suspect after an incident that training goes on from."""
        if self._saver.keeping is not None:
            self._saver.keeping.agree_with(known)

    def unsound(self) -> tuple[str, ...]:
        """What is not sound in this rank's state as it is now.  Not collective."""
        return self._saver.unsound(self._registry)

    @property
    def last(self) -> CheckpointName | None:
        """The last checkpoint that all ranks know of."""
        return self._saver.last

    def _saving(self) -> AbstractContextManager[None]:
        return self._boundaries.meanwhile("save")

    def _tell(self, name: CheckpointName | None) -> None:
        if name is not None:
            self._hooks.call("on_save", step=name.step, name=str(name))
