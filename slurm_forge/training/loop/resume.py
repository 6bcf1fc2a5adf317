"""Start from a checkpoint: once per launch, and again after every rollback in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.control import Member
from slurm_forge.errors import RefuseResume
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import DataPositionMissing, Resumed
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.checkpointing.supported_state import (
    OptimizerWatch,
    require_supported,
)
from slurm_forge.training.core import rng
from slurm_forge.training.core.loss import values
from slurm_forge.training.core.process_group import ProcessGroups
from slurm_forge.training.core.rank_consistency import require_identical
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.rank_layout import refuse_without_mesh
from slurm_forge.training.data.source_kinds import refuse_own_sources
from slurm_forge.training.loop.assembly import Parts
from slurm_forge.training.step.ddp_warmup import (
    Buckets,
    settle_ddp_buckets,
)
from slurm_forge.vocabulary.position import Position


class Resumer:
    """Collective over all ranks."""

    def __init__(
        self,
        context: RankContext,
        parts: Parts,
        *,
        groups: ProcessGroups,
        member: Member,
        journal: JournalWriter | None,
        timings: Callable[[], tuple[float, float]],
    ) -> None:
        self._context = context
        self._parts = parts
        self._groups = groups
        self._member = member
        self._journal = journal
        self._timings = timings
        #: Returns the step at which the program ends, once its beginning is known.
        self.until: Callable[[], int] | None = None
        #: Samples per forward pass, if known.
        self.micro_batch = 0
        self.restored = self._resumed = False
        self._resumed_at = 0
        self._optimizer_watch = OptimizerWatch(parts.registry, lambda: parts.progress.step)

    @property
    def own_updates(self) -> int:
        """How often registered optimizers were stepped in this launch."""
        return self._optimizer_watch.updates

    def leave(self) -> None:
        """The launch is over for this rank."""
        self._optimizer_watch.end()

    def restore(self) -> bool:
        """Resume from the newest usable checkpoint; True if there was one."""
        if self.restored:
            return self._resumed
        self.restored = True
        parts = self._parts
        layout = parts.layout.now
        if not layout.dimensions:
            refuse_without_mesh(parts.registry.models, self._context.world_size)
        self._member.enter("load", started=False)
        require_supported(parts.registry)
        own_sources_exact = refuse_own_sources(
            parts.registry.others, exact=self._context.spec.exact
        )
        require_identical(
            Ranks(self._groups.cpu),
            {
                "what is registered": parts.registry.names(kinds=layout.stages == 1),
                "the mesh": layout.to_json(),
            },
            next_step="Register the same objects under the same names on every rank, and pass the "
            "same mesh.",
        )
        # DDP fixes its buckets in the first backward; doing that here, with nothing, makes a
        # resumed run sum in the same order as an uninterrupted one.
        buckets = [settle_ddp_buckets(model) for model in parts.registry.ddp()]
        left = Buckets.LEFT in buckets and self._context.world_size > 2
        inexact = "" if own_sources_exact else "a registered loader does not keep all of its order"
        # A pipeline schedule drives DDP's reducer itself: its first step sums in another order.
        if left or (layout.stages > 1 and buckets):
            inexact = "DDP sums the gradients of the first step in another order"
        self._resumed = self._load(inexact=inexact, again=False) is not None
        self._resumed_at = parts.progress.step
        parts.skip_tracker.begin()
        self._optimizer_watch.begin()
        parts.saver.comparison.watch_inputs(parts.registry, parts.progress)
        faults, catalog = self._context.spec.inject, parts.saver.catalog
        if faults and catalog is not None:
            catalog.say(f"injected faults: {', '.join(map(str, faults))}")
        parts.hooks.call("on_train_begin", step=parts.progress.step)
        parts.step_lifecycle.note_buffers()
        return self._resumed

    def note_missing_position(self) -> None:
        """A loop of the program's own begins: report if no data position was restored.

        A program may derive its batches from ``step_number`` alone, so this is no error.
        """
        parts = self._parts
        if not self._resumed or parts.registry.may_hold_position or parts.progress.extra:
            return
        if self._journal is not None:
            self._journal.write(DataPositionMissing(step=self._resumed_at))

    def rewind(self) -> None:
        """Restore everything, in place, from the newest checkpoint that is still usable."""
        parts = self._parts
        for model in parts.registry.models.values():
            for part in model.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()  # after an evaluation the root is unsharded, with old weights
        with parts.boundaries.meanwhile("load"):
            self._load(inexact="", again=True)
        parts.boundaries.rewound()
        self._member.rewound(Position(parts.progress.step, rollbacks=parts.boundaries.rollbacks))
        parts.step_lifecycle.stepped = False

    def _load(self, *, inexact: str, again: bool) -> CheckpointName | None:
        parts = self._parts
        started = time.monotonic()
        name, exact = parts.saver.restore(
            parts.registry, parts.progress, rng.capture(), again=again
        )
        # What follows may draw random numbers: requesting a loader's state begins its iterator, and
        # the program's validation may be random.  Training continues as if it had not happened.
        random = rng.capture()
        if name is not None:
            parts.save_schedule.compare_ranks()
            if parts.saver.comparison.load_differs:
                inexact = "the state in memory is not what was saved"
        inexact = inexact if exact and name is not None else ""
        interpreter_s, rendezvous_s = (0.0, 0.0) if again else self._timings()
        if self._journal is not None:
            self._journal.write(
                Resumed(
                    step=parts.progress.step,
                    checkpoint=None if name is None else str(name),
                    world_size=self._context.world_size,
                    until=None if self.until is None else self.until(),
                    exact=exact and not inexact,
                    inexact=inexact,
                    interpreter_s=interpreter_s,
                    rendezvous_s=rendezvous_s,
                    load_s=time.monotonic() - started,
                    candidates=parts.saver.candidates,
                    global_batch=parts.step_lifecycle.global_batch or None,
                    data_restarted=name is not None and not parts.data_state.continues,
                )
            )
        if name is not None:
            load_differs = parts.saver.comparison.load_differs
            self._watch_first_steps(name, exact=exact and not load_differs)
            self._ask_program(name)
            if parts.spike_monitor is not None:
                parts.spike_monitor.restarted(
                    values(parts.loss_history.snapshot()),
                    name.step,
                    highest_usual_loss=parts.progress.highest_usual_loss,
                )
        rng.restore(random)
        return name

    def _ask_program(self, name: CheckpointName) -> None:
        """Call the hooks; if one refuses on any rank, all ranks leave and the run is held."""
        parts, words = self._parts, ""
        try:
            parts.hooks.call("on_resume", step=parts.progress.step)
        except RefuseResume as refusal:
            words = f"rank {self._context.rank}: {refusal.message}"
        refused = Ranks(self._groups.cpu).agree(None, words, _first_words, doing="Resuming")
        if refused:
            parts.instability.refuse(f"the on_resume hook refused {name}: {refused}")

    def _watch_first_steps(self, name: CheckpointName, *, exact: bool) -> None:
        parts = self._parts
        catalog = parts.saver.catalog
        if parts.first_steps is None or catalog is None:
            return
        expected = catalog.reference_loss(name)
        at = parts.progress.consumed
        # If samples are skipped right here, the next micro-batch is another one.
        other = any(window.first <= at < window.stop for window in parts.active_plan.plan.skipped)
        if not exact or parts.compatibility.changed or other:
            expected = None
        parts.first_steps.resumed(
            parts.progress.step, expected=expected, load_differs=parts.saver.comparison.load_differs
        )


def _first_words(reports: Sequence[Any]) -> str:
    return next((str(words) for words in reports if words), "")
