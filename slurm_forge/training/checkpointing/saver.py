"""Save and resume a run: what goes into a checkpoint, and what a resume restores, in order."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.health import NOTES, about_state
from slurm_forge.checkpoint.content.json_state import decode, escape
from slurm_forge.checkpoint.content.rank_states import RankIdentity
from slurm_forge.checkpoint.content.stages import PipelineStages
from slurm_forge.checkpoint.content.tensors import some
from slurm_forge.checkpoint.content.training_state import TrainingState, fresh_parts
from slurm_forge.checkpoint.read.load import newest_manifest, resume
from slurm_forge.checkpoint.write.pending_save import (
    PendingSave,
    Saved,
)
from slurm_forge.checkpoint.write.replicas import RankMismatch
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.checkpoint.write.tensor_keys import in_words
from slurm_forge.control import Member
from slurm_forge.errors import (
    CheckpointError,
    CheckpointMissingError,
    MismatchError,
    RanksLostError,
    UnsupportedError,
)
from slurm_forge.journal import JournalWriter, fold, read_to_fold
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.checkpointing.catalog import (
    CheckpointCatalog,
    CliJudgements,
)
from slurm_forge.training.checkpointing.compatibility import CompatibilityCheck
from slurm_forge.training.checkpointing.rank_comparison import RankComparison
from slurm_forge.training.checkpointing.rank_mismatch import tolerates
from slurm_forge.training.core import rng
from slurm_forge.training.core.instability import ActivePlan
from slurm_forge.training.core.loss import (
    LossHistory,
    doubtful,
    values,
)
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.rank_layout import ActiveLayout
from slurm_forge.training.core.run_state import (
    Registry,
    TrainingProgress,
)
from slurm_forge.training.data.sample_streams import sampler_epoch, set_epoch
from slurm_forge.training.data.source_state import DataState

_WAIT_WITHIN_S = 60.0
_MOST_CANDIDATES = 100
#: Key under which rank 0's losses of the last steps are saved.
_LOSSES = NOTES + "losses"
#: Key of the mesh's dimensions in a checkpoint; missing without a mesh.
_MESH = "mesh"
#: Key of the epochs of registered loaders whose samplers have ``set_epoch``.
_EPOCHS = "sampler_epochs"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a checkpoint continues: the number of completed steps, and the saved ``run.extra``."""

    step: int
    extra: Mapping[str, Any]


class Saver:
    """Collective over all ranks.  Only rank 0 has a journal."""

    def __init__(
        self,
        context: RankContext,
        *,
        group: dist.ProcessGroup | None,
        background: dist.ProcessGroup | None,
        journal: JournalWriter | None,
        member: Member,
        loss_history: LossHistory,
        compatibility: CompatibilityCheck,
        active_plan: ActivePlan,
        layout: ActiveLayout,
        data_state: DataState,
    ) -> None:
        self._context = context
        self._data_state = data_state
        self._journal = journal
        self._active_plan = active_plan
        self._layout = layout
        self._stages: PipelineStages | None = None
        self._compatibility = compatibility
        self._group = group
        parted = group is None or background is not None
        self._background = context.spec.checkpoint.background and parted
        self._loss_history = loss_history
        self._store = CheckpointStore(
            context.directory.checkpoints,
            context.spec.name,
            fallback=context.fallback,
            earlier=context.earlier_fallbacks,
        )
        self._writer = CheckpointWriter(
            self._store, group=group, background=background, host=context.host
        )
        self.comparison = RankComparison(self._writer, Ranks(group), data_state)
        #: Whether the job file tolerates that ranks differ.
        self._tolerant = tolerates(context.spec.recovery)
        #: The pending save, if any.
        self.pending: PendingSave | None = None
        #: How often this launch was rolled back.
        self._turn = 0
        #: On rank 0: the known checkpoints.
        self.catalog = (
            None
            if journal is None
            else CheckpointCatalog(
                self._store,
                context.spec.checkpoint,
                journal=journal,
                current=(context.brief.attempt, context.brief.launch),
                fence=context.fence,
                seconds_left=lambda: member.seconds_left,
                tell=member.send,
                losses_doubtful=lambda: bool(doubtful(values(loss_history.snapshot()))),
                people=CliJudgements(context.directory).known,
            )
        )
        #: On rank 0: the newest ones that existed when this launch resumed.
        self.candidates: tuple[str, ...] = ()
        #: On rank 0: whether the last save failed and the next one may succeed: room was made, or
        #: there is the fallback directory.
        self._may_succeed = False
        #: On rank 0: whether a save of this launch failed in the run directory itself.
        self._uses_fallback = False
        #: Name and step of the last commit that all ranks know (or of the loaded checkpoint).
        self.last: CheckpointName | None = None
        #: The step of the last save that began, whatever its result.
        self.last_save_step: int | None = None

    def save(
        self,
        reason: str,
        registry: Registry,
        progress: TrainingProgress,
        random: dict[str, torch.Tensor],
        *,
        wait: bool,
        use_spare: bool = False,
        doubts: Sequence[str] = (),
    ) -> CheckpointName | None:
        """Save; with ``wait`` until it is on disk: its name, or None if it failed.

        ``use_spare``: also use the disk space that other saves leave free.

        A failure is the same on every rank: the last checkpoint is untouched.  With ``wait`` it is
        tried once more if old checkpoints have made room for it, or if there is a fallback
        directory.
        """
        save = partial(
            self._save,
            reason,
            registry,
            progress,
            random,
            wait=wait,
            use_spare=use_spare,
            doubts=doubts,
        )
        saved = save()
        return save() if saved is None and wait and self._may_succeed_now() else saved

    def _may_succeed_now(self) -> bool:
        """Whether a failed save may succeed now.  Collective."""

        def may_succeed(_: object) -> bool:
            return self._may_succeed

        return bool(Ranks(self._group).agree(None, None, may_succeed, doing="Making room"))

    def _save(
        self,
        reason: str,
        registry: Registry,
        progress: TrainingProgress,
        random: dict[str, torch.Tensor],
        *,
        wait: bool,
        use_spare: bool,
        doubts: Sequence[str],
    ) -> CheckpointName | None:
        """Save, once."""
        self.finish_save()
        self._may_succeed = False
        brief = self._context.brief
        started = time.monotonic()
        self.last_save_step = step = progress.step
        epoch = progress.epoch
        name = CheckpointName(
            step=step,
            attempt=brief.attempt,
            launch=brief.launch,
            # Rank 0's counts.  After a rollback a step is saved again: the later one sorts later.
            nonce=f"{min(self._turn, 255):02x}{secrets.token_hex(3)}",
        )

        def after(end: Saved | CheckpointError) -> None:
            seconds = time.monotonic() - started
            self._note(end, step=step, epoch=epoch, reason=reason, seconds=seconds)

        losses = self._loss_history.on_host()
        unstable = (*self._instability(registry, progress), *doubts)

        def not_trusted() -> Sequence[str]:
            recent = losses()
            if self.catalog is not None:
                return (*unstable, *doubtful(recent))
            # One rank judges outlying losses: with many ranks some always have a strange batch.
            broken = bool(recent) and not math.isfinite(recent[-1])
            return (*unstable, *([f"the loss is {recent[-1]}"] if broken else ()))

        try:
            self.pending = self._writer.begin(
                self._state(registry, progress, random),
                name=name,
                reason=reason,
                fence=self._context.fence,
                background=not wait,
                after=after,
                permit=partial(self._permit, use_spare=use_spare),
                fallback=self._uses_fallback,
                about=self._compatibility.about(),
                doubts=not_trusted,
                # Not on the way out: it takes time proportional to the state.
                all_copies=not wait,
                facts=self.comparison.facts(progress),
                tolerant=self._tolerant,
            )
        except RanksLostError:
            raise  # no collective may follow: this launch is over
        except CheckpointError as error:
            after(error)
            return None
        return self.finish_save() if wait else None

    def prepare(
        self, registry: Registry, progress: TrainingProgress, random: dict[str, torch.Tensor]
    ) -> None:
        """Prepare for saves: the objects have their state by now.  Collective."""
        try:
            self._writer.prepare(self._state(registry, progress, random))
        except RanksLostError:
            raise
        except CheckpointError as error:  # no storage was touched: the program must be corrected
            raise UnsupportedError(error.message, next_step=error.next_step) from error

    def compare_ranks(
        self,
        registry: Registry,
        progress: TrainingProgress,
        random: dict[str, torch.Tensor],
        *,
        ids: bool = False,
    ) -> RankMismatch | None:
        """Compare what ranks hold that should be equal.  Collective; waits for the device."""
        return self.comparison.compare(
            self._state(registry, progress, random),  # as for a save, so that its plan stays valid
            progress,
            unsound=partial(self.unsound, registry),
            ids=ids,
        )

    def _instability(self, registry: Registry, progress: TrainingProgress) -> tuple[str, ...]:
        """What the last steps reveal about their resulting state, apart from the loss."""
        scaler = registry.scaler
        if scaler is not None and scaler.is_enabled():
            scale = scaler.get_scale()
            if not 0.0 < scale < math.inf:
                return (f"the scale of the gradient scaler is {scale}",)
            if scale > 1.0:
                return ()  # it is looking for its scale: skipped steps are part of that
        # Skipped steps have changed nothing.  If there is nothing else to go back to, a state that
        # may be bad is better than none.
        if progress.skipped_in_a_row == 0 or self.catalog is None or not self.catalog.has_usable:
            return ()
        skipped = progress.skipped_in_a_row
        return (f"the last {skipped} steps had a gradient that is not finite",)

    def doubt(self, name: CheckpointName, why: Sequence[str]) -> None:
        """Mark what was saved as no longer trusted."""
        if self.catalog is not None:
            self.catalog.suspect(name, "; ".join(why))

    def unsound(self, registry: Registry) -> tuple[str, ...]:
        """Non-finite or absurd values in what this rank holds.  Not collective."""
        state = TrainingState(
            models=self._models(registry),
            optimizers=registry.optimizers,
            objects=registry.others,
            stages=self._stages,
        )
        return self._writer.unsound_parts(state)

    def evaluated(self, step: int, logged: Mapping[str, Any]) -> bool:
        """After an evaluation: whether this step is the best so far and should be saved.

        Collective, and only if the job keeps the best: rank 0's value counts.
        """

        def better(_: object) -> bool:
            return self.catalog is not None and self.catalog.evaluated(step, logged)

        return bool(Ranks(self._group).agree(None, None, better, doing="Comparing evaluations"))

    def wait_for_save(self) -> None:
        """Before this launch is abandoned: the pending save may be what is resumed from.

        Uses no collective of the main thread; waits a minute at most.
        """
        if self.pending is not None:
            self.pending.wait(_WAIT_WITHIN_S)

    def finish_save(self) -> CheckpointName | None:
        """Wait for the pending save; its name if it was published: the same on all ranks."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        try:
            self.last = pending.result().name
        except RanksLostError:
            raise
        except CheckpointError:
            return None  # it is in the journal
        return self.last

    def _permit(self, size: int, directory: Path, *, use_spare: bool) -> None:
        if self.catalog is not None:
            files = self._context.world_size + 2
            self.catalog.permit(size, directory, files, use_spare=use_spare)

    def _note(
        self,
        end: Saved | CheckpointError,
        *,
        step: int,
        epoch: int | None,
        reason: str,
        seconds: float,
    ) -> None:
        """Rank 0, at the end of a save, possibly on its thread: journal it, and make room."""
        if self.catalog is None or isinstance(end, RanksLostError):
            return
        if isinstance(end, CheckpointError):
            has_room = self.catalog.failed(step, end)
            elsewhere = self._store.fallback is not None and not self._uses_fallback
            self._uses_fallback = self._uses_fallback or elsewhere
            self._may_succeed = has_room or elsewhere
            return
        if end.path.parent == self._store.fallback:
            self.catalog.say_once(f"checkpoints are written into the fallback {end.path.parent}")
        self.catalog.committed(
            end.name,
            reason=reason,
            size=end.size,
            lasted=timedelta(seconds=seconds),
            # If training waits for the disk, that is the cost of a save.
            blocked=end.blocked if self._background else timedelta(seconds=seconds),
            findings=end.findings,
            time=time.time(),
            epoch=epoch,
        )
        self._note_differences(end)
        # Non-finite values make ranks differ, too, and have a remedy: they are the incident then.
        if end.mismatch is not None and not any(map(about_state, end.findings)):
            self.catalog.ranks_differ(end.mismatch, once=self._tolerant)

    def _note_differences(self, end: Saved) -> None:
        """On rank 0: report which parts are saved per rank, and which differ and are not."""
        if self.catalog is None:
            return
        if end.own:
            self.catalog.say_once(
                f"the ranks differ in {some(list(map(in_words, end.own)))}: each rank's own is "
                "saved, and comes back on as many ranks and the same mesh"
            )
        names = [
            "run.extra" if each == "extra/extra" else in_words(each)
            for each in end.disagreeing
            if each == "extra/extra" or each.startswith("models/")
        ]
        if names:
            self.catalog.say_once(
                f"the ranks differ in {some(names)}: the checkpoint of step {end.name.step} has "
                "rank 0's, and a resume gives that to all ranks"
            )

    def resume_point(self) -> ResumePoint | None:
        """Where ``restore`` will continue; only manifests are read.  Collective."""
        if self.catalog is not None:
            self._recall(self.catalog)
        manifest = newest_manifest(
            self._store,
            group=self._group,
            eligible=None if self.catalog is None else self.catalog.eligible,
        )
        if manifest is None or "data" in fresh_parts(manifest.state):
            return None
        extra = decode(manifest.state["extra"])
        return ResumePoint(int(extra["step"]), dict(extra["extra"]))

    def _recall(self, catalog: CheckpointCatalog) -> None:
        """On rank 0: the present checkpoints in the journal."""
        if self._journal is None:
            return
        records = read_to_fold(self._context.directory, refresh=True)
        self._journal.advance_clock(records)
        catalog.recall(fold(records))

    def restore(
        self,
        registry: Registry,
        progress: TrainingProgress,
        random: dict[str, torch.Tensor],
        *,
        again: bool = False,
    ) -> tuple[CheckpointName | None, bool]:
        """Resume from the newest checkpoint that verifies: its name, and whether exactly.

        Restores in place; ``random`` is this rank's state as it would be without a checkpoint.
        ``again``: this launch has resumed before, and its objects are still the same.
        """
        there: Sequence[CheckpointName] = ()
        if self.catalog is not None:
            self._recall(self.catalog)
            there = self._store.candidates()
            self.candidates = tuple(map(str, there[:_MOST_CANDIDATES]))
        if again:
            self._turn += 1
        else:
            self._stages = self._gathered_stages(registry)
            self._compatibility.describe(several_stages=self._stages is not None)
        try:
            loaded = resume(
                self._store,
                self._state(registry, progress, random),
                group=self._group,
                on_reject=self._rejected,
                eligible=None if self.catalog is None else self.catalog.eligible,
            )
        except MismatchError as error:
            raise self._compatibility.misfit(error, self._store) from error
        if self.catalog is not None:
            self.catalog.tell_missing(there, None if loaded is None else loaded.manifest.name)
        if loaded is None:
            history = self._context.brief.committed_step
            if history is not None or again:
                raise CheckpointMissingError(
                    "the journal says that "
                    f"{'checkpoints were' if history is None else f'step {history} was'} saved, "
                    "but no checkpoint can be used",
                    next_step="The run is held rather than started over.  Restore the folder, or "
                    "start a new run under another name.",
                )
            return None, True
        manifest = loaded.manifest
        if not again:
            self._compatibility.compare(manifest)
        self._compatibility.replace_options(manifest, fresh="optimizer" in loaded.fresh)
        progress.restore(loaded.extra)
        if "data" in loaded.fresh:
            progress.restart()
        else:
            self._data_state.restored(progress.step, loaded.extra.get("data"), loaded.data)
            # A loader begins its order when its state is requested: before the program's loop.
            for name, epoch in loaded.extra.get(_EPOCHS, {}).items():
                set_epoch(registry.others.get(name), int(epoch))
        layout = self._layout.now
        # Only on the same mesh does a rank's state belong to the same samples and the same part.
        same = loaded.extra.get(_MESH, []) == layout.to_json()
        same = same and manifest.world_size == self._context.world_size
        exact = same and not loaded.missing_rng
        reseeded = self._active_plan.plan.reseeded
        if reseeded:
            # Requested by the recovery plan; the order of the samples is another matter.
            rng.derive(self._context.spec.seed + reseeded, progress.step, layout.random_stream)
            exact = False
        elif exact:
            prefix = self._rng_prefix
            saved = {key.removeprefix(prefix): value for key, value in loaded.rng.items()}
            exact = not rng.restore(saved)
        else:
            # Another number of ranks: there is no state to continue, only one to derive.
            rng.derive(self._context.spec.seed, progress.step, layout.random_stream)
        if loaded.foreign and self.catalog is not None:
            self.catalog.say(
                "the checkpoint has each rank's own of "
                f"{some(list(map(in_words, loaded.foreign)))}, and there are other ranks now: each "
                "continues with rank 0's"
            )
        self.last = manifest.name
        self.last_save_step = manifest.step
        self._loss_history.restored()
        self.comparison.loaded = manifest
        if self.catalog is not None:
            self.catalog.resumed(manifest.name)
        return manifest.name, exact and self._data_state.continues

    def _state(
        self, registry: Registry, progress: TrainingProgress, random: dict[str, torch.Tensor]
    ) -> TrainingState:
        return TrainingState(
            models=self._models(registry),
            optimizers=registry.optimizers,
            objects=registry.others,
            stages=self._stages,
            extra=self._extra(registry, progress),
            rng={self._rng_prefix + key: value for key, value in random.items()},
            notes={} if self.catalog is None else {_LOSSES: self._loss_history.tensor()},
            data=partial(self._data_state.tensors, progress.step),
            data_prefix=self._data_state.prefix,
            identity=RankIdentity(self._context.rank, self._layout_text),
            exact=self._context.spec.exact,
        )

    def _models(self, registry: Registry) -> dict[str, nn.Module]:
        """The registered models under their names in checkpoints."""
        if self._stages is None:
            return registry.models
        return {self._stages.name(name): model for name, model in registry.models.items()}

    def _gathered_stages(self, registry: Registry) -> PipelineStages | None:
        """What the stages of a pipeline contain; None with a single stage.  Collective."""
        layout = self._layout.now
        if layout.stages == 1:
            return None
        return PipelineStages.gathered(
            Ranks(self._group),
            stage=layout.stage,
            count=layout.stages,
            leads=layout.leads_stage,
            models=registry.models,
            optimizers=registry.optimizers,
        )

    def _extra(self, registry: Registry, progress: TrainingProgress) -> dict[str, Any]:
        shared, mesh = self._data_state.shared(progress.step), self._layout.now.to_json()
        more: dict[str, Any] = {"data": shared} if shared else {}
        epochs = {name: sampler_epoch(item) for name, item in registry.others.items()}
        if told := {name: epoch for name, epoch in epochs.items() if epoch is not None}:
            more[_EPOCHS] = told
        return {**progress.to_json(), **more, **({_MESH: mesh} if mesh else {})}

    @property
    def _layout_text(self) -> str:
        """The layout of the ranks: their number, or the dimensions of the mesh."""
        mesh: Any = self._layout.now.to_json()
        sizes = "-".join(f"{escape(str(name))}_{size}" for name, size in mesh)
        return sizes or str(self._context.world_size)

    @property
    def _rng_prefix(self) -> str:
        return f"rng/rank-{self._context.rank}/"

    def _rejected(self, name: CheckpointName, reason: str) -> None:
        if self.catalog is not None:
            self.catalog.rejected(name, reason)
