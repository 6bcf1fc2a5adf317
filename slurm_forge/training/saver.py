"""Saving and resuming a run: what goes into a checkpoint, and what a resume restores, in order."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from slurm_forge.checkpoint.identity import CheckpointName
from slurm_forge.checkpoint.load import find_resumable, load_checkpoint
from slurm_forge.checkpoint.save import save_checkpoint
from slurm_forge.checkpoint.state import TrainingState
from slurm_forge.checkpoint.store import CheckpointStore
from slurm_forge.errors import CheckpointError, CheckpointMissingError, RanksLostError
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import CheckpointCommitted, CheckpointFailed, CheckpointRejected
from slurm_forge.training import rng
from slurm_forge.training.context import RankContext
from slurm_forge.training.registry import Registry

__all__ = ["Progress", "Saver"]


@dataclass(slots=True)
class Progress:
    """How far the run is: everything of a checkpoint that is neither a tensor nor the user's."""

    step: int = 0
    consumed: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "step": self.step,
            "consumed": self.consumed,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "phases": dict(self.phases),
            "extra": dict(self.extra),
        }

    def restore(self, body: Mapping[str, Any]) -> None:
        """In place, because the program may hold a reference."""
        self.step = int(body["step"])
        self.consumed = int(body["consumed"])
        self.skipped = int(body["skipped"])
        self.skipped_in_a_row = int(body["skipped_in_a_row"])
        self.phases = {str(name): int(step) for name, step in body["phases"].items()}
        self.extra.clear()
        self.extra.update(body["extra"])


class Saver:
    """Collective over all ranks.  Only rank 0 has a journal."""

    def __init__(
        self,
        context: RankContext,
        *,
        group: dist.ProcessGroup | None,
        journal: JournalWriter | None,
    ) -> None:
        self._context = context
        self._group = group
        self._journal = journal
        self._store = CheckpointStore(context.directory.checkpoints, context.spec.name)
        #: Name and step of the last commit (or of what was resumed from).
        self.last: CheckpointName | None = None

    def save(
        self, reason: str, registry: Registry, progress: Progress, random: dict[str, torch.Tensor]
    ) -> CheckpointName | None:
        """Save; None when it came to nothing (on every rank alike): the last one is untouched."""
        brief = self._context.brief
        name = CheckpointName(
            step=progress.step,
            attempt=brief.attempt,
            launch=brief.launch,
            nonce=secrets.token_hex(4),  # rank 0's counts
        )
        started = time.monotonic()
        try:
            saved = save_checkpoint(
                self._store,
                self._state(registry, progress, random),
                name=name,
                reason=reason,
                group=self._group,
                fence=self._context.fence,
                clock=time.time,
            )
        except RanksLostError:
            raise  # no collective may follow: this launch is over
        except CheckpointError as error:
            if self._journal is not None:
                self._journal.write(CheckpointFailed(step=progress.step, reason=str(error)))
            return None
        self.last = saved.name
        if self._journal is not None:
            self._journal.write(
                CheckpointCommitted(
                    name=str(saved.name),
                    step=saved.name.step,
                    reason=reason,
                    seconds=time.monotonic() - started,
                    size=saved.size,
                )
            )
            self._prune()
        return saved.name

    def restore(
        self, registry: Registry, progress: Progress, random: dict[str, torch.Tensor]
    ) -> tuple[CheckpointName | None, bool]:
        """Resume from the newest checkpoint that verifies: its name, and whether exactly.

        Restores in place; ``random`` is this rank's state as it would be without a checkpoint.
        """
        manifest = find_resumable(self._store, group=self._group, on_reject=self._rejected)
        if manifest is None:
            history = self._context.brief.committed_step
            if history is not None:
                raise CheckpointMissingError(
                    f"history says that step {history} was saved, and no checkpoint can be used",
                    next_step="The run is held rather than started over.  Bring the folder back, "
                    "or begin a new run under another name.",
                )
            return None, True
        state = self._state(registry, progress, random)
        loaded = load_checkpoint(self._store, manifest, state, group=self._group)
        progress.restore(loaded.extra)
        exact = manifest.world_size == self._context.world_size and not loaded.missing_rng
        if exact:
            prefix = self._rng_prefix
            saved = {key.removeprefix(prefix): value for key, value in loaded.rng.items()}
            exact = not rng.restore(saved)
        else:
            # Another number of ranks: there is no state to continue, only one to derive.
            rng.derive(self._context.spec.seed, progress.step, self._context.rank)
        self.last = manifest.name
        return manifest.name, exact

    def _state(
        self, registry: Registry, progress: Progress, random: dict[str, torch.Tensor]
    ) -> TrainingState:
        return TrainingState(
            models=registry.models,
            optimizers=registry.optimizers,
            objects=registry.others,
            extra=progress.to_json(),
            rng={self._rng_prefix + key: value for key, value in random.items()},
        )

    @property
    def _rng_prefix(self) -> str:
        return f"rng/rank-{self._context.rank}/"

    def _rejected(self, name: CheckpointName, reason: str) -> None:
        if self._journal is not None:
            self._journal.write(CheckpointRejected(name=str(name), reason=reason))

    def _prune(self) -> None:
        brief, keep = self._context.brief, self._context.spec.checkpoint.keep_last
        self._store.prune(
            lambda names: names[:keep],
            self._context.fence,
            current=(brief.attempt, brief.launch),
        )
