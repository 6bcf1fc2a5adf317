"""Saving and resuming a run: what goes into a checkpoint, and what a resume restores, in order."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from slurm_forge.checkpoint.flight import Flight, Saved
from slurm_forge.checkpoint.load import resume
from slurm_forge.checkpoint.save import CheckpointWriter
from slurm_forge.checkpoint.state import TrainingState
from slurm_forge.errors import (
    CheckpointError,
    CheckpointMissingError,
    FencedError,
    RanksLostError,
    UnsupportedError,
)
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import CheckpointCommitted, CheckpointFailed, CheckpointRejected
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training import rng
from slurm_forge.training.context import RankContext
from slurm_forge.training.registry import Registry

__all__ = ["Progress", "Saver"]

#: Checkpoints of its own after which a launch needs the one it was resumed from no more.
_TRUSTED = 2
_LAND_WITHIN_S = 60.0


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
        background: dist.ProcessGroup | None,
        journal: JournalWriter | None,
    ) -> None:
        self._context = context
        self._group = group
        self._journal = journal
        self._store = CheckpointStore(context.directory.checkpoints, context.spec.name)
        self._writer = CheckpointWriter(self._store, group=group, background=background)
        self._flight: Flight | None = None
        #: On rank 0: what was read and found damaged.
        self._distrusted: set[CheckpointName] = set()
        self._resumed_from: CheckpointName | None = None
        #: Name and step of the last commit that all ranks know of (or of what was resumed from).
        self.last: CheckpointName | None = None
        #: The step of the last save that was begun, whatever came of it.
        self.begun: int | None = None

    def save(
        self,
        reason: str,
        registry: Registry,
        progress: Progress,
        random: dict[str, torch.Tensor],
        *,
        wait: bool,
    ) -> CheckpointName | None:
        """Save; with ``wait`` until it is on disk: its name, or None when it came to nothing.

        What came to nothing did so on every rank alike: the last checkpoint is untouched.
        """
        self.settle()
        brief = self._context.brief
        started = time.monotonic()
        self.begun = step = progress.step
        name = CheckpointName(
            step=step,
            attempt=brief.attempt,
            launch=brief.launch,
            nonce=secrets.token_hex(4),  # rank 0's counts
        )

        def after(end: Saved | CheckpointError) -> None:
            self._note(end, step=step, reason=reason, seconds=time.monotonic() - started)

        try:
            self._flight = self._writer.begin(
                self._state(registry, progress, random),
                name=name,
                reason=reason,
                fence=self._context.fence,
                background=not wait,
                after=after,
            )
        except RanksLostError:
            raise  # no collective may follow: this launch is over
        except CheckpointError as error:
            after(error)
            return None
        return self.settle() if wait else None

    def prepare(
        self, registry: Registry, progress: Progress, random: dict[str, torch.Tensor]
    ) -> None:
        """Get ready for saves: the objects have their state by now.  Collective."""
        try:
            self._writer.prepare(self._state(registry, progress, random))
        except RanksLostError:
            raise
        except CheckpointError as error:  # no storage has been touched: the program is to be mended
            raise UnsupportedError(error.message, next_step=error.next_step) from error

    def let_land(self) -> None:
        """Before this launch is given up: what is being written may well be what is resumed from.

        No collective of the main thread's; waits a minute at most.
        """
        if self._flight is not None:
            self._flight.wait(_LAND_WITHIN_S)

    @property
    def flying(self) -> bool:
        """Whether a save was begun that has not been settled yet."""
        return self._flight is not None

    @property
    def landed(self) -> bool:
        """Whether the save in flight is over on this rank: ``settle`` won't wait."""
        return self._flight is not None and self._flight.done()

    def settle(self) -> CheckpointName | None:
        """Wait for the save in flight; its name if it was published: the same on all ranks."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        try:
            self.last = flight.result().name
        except RanksLostError:
            raise
        except CheckpointError:
            return None  # is in the journal
        return self.last

    def _note(
        self, end: Saved | CheckpointError, *, step: int, reason: str, seconds: float
    ) -> None:
        """Rank 0, at the end of a save, maybe on its thread: tell, and make room."""
        if self._journal is None or isinstance(end, RanksLostError):
            return
        if isinstance(end, CheckpointError):
            self._write(CheckpointFailed(step=step, reason=str(end)))
            return
        self._write(
            CheckpointCommitted(
                name=str(end.name),
                step=end.name.step,
                reason=reason,
                seconds=seconds,
                blocked_s=end.blocked.total_seconds(),
                size=end.size,
            )
        )
        with contextlib.suppress(OSError, FencedError):  # the next save asks again
            self._prune()

    def _write(self, event: CheckpointCommitted | CheckpointFailed | CheckpointRejected) -> None:
        # What happened is the same on all ranks: rank 0 alone must not fail over a line about it.
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.write(event)

    def restore(
        self, registry: Registry, progress: Progress, random: dict[str, torch.Tensor]
    ) -> tuple[CheckpointName | None, bool]:
        """Resume from the newest checkpoint that verifies: its name, and whether exactly.

        Restores in place; ``random`` is this rank's state as it would be without a checkpoint.
        """
        state = self._state(registry, progress, random)
        loaded = resume(self._store, state, group=self._group, on_reject=self._rejected)
        if loaded is None:
            history = self._context.brief.committed_step
            if history is not None:
                raise CheckpointMissingError(
                    f"history says that step {history} was saved, and no checkpoint can be used",
                    next_step="The run is held rather than started over.  Bring the folder back, "
                    "or begin a new run under another name.",
                )
            return None, True
        manifest = loaded.manifest
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
        self.begun = manifest.step
        self._resumed_from = manifest.name
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
        self._distrusted.add(name)
        self._write(CheckpointRejected(name=str(name), reason=reason))

    def _prune(self) -> None:
        brief, keep = self._context.brief, self._context.spec.checkpoint.keep_last
        own = (brief.attempt, brief.launch)

        def wanted(names: Sequence[CheckpointName]) -> list[CheckpointName]:
            kept = list(names[:keep])
            # What this launch was resumed from is known to load; its own are not yet.
            mine = [name for name in names if (name.attempt, name.launch) == own]
            if self._resumed_from is not None and len(mine) < _TRUSTED:
                kept.append(self._resumed_from)
            return kept

        self._store.prune(
            wanted, self._context.fence, current=own, distrusted=frozenset(self._distrusted)
        )
