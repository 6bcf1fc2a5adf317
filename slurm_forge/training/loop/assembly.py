"""What a run is made of on one rank, put together: every part knows only what it is handed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slurm_forge.control import Member, Request
from slurm_forge.control.messages import protocol as p
from slurm_forge.journal import JournalWriter
from slurm_forge.training.checkpointing.compatibility import Comparing
from slurm_forge.training.checkpointing.resume_check import FirstSteps
from slurm_forge.training.checkpointing.saver import Saver
from slurm_forge.training.core.hooks import Hooks
from slurm_forge.training.core.instability import InForce
from slurm_forge.training.core.process_group import Groups
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.run_state import (
    Progress,
    Registry,
)
from slurm_forge.training.core.step_boundary import Boundaries
from slurm_forge.training.faults.injector import Injecting
from slurm_forge.training.instability.diagnosis import Examiner
from slurm_forge.training.instability.skip_tracker import (
    LaunchGivenUp,
    Skips,
)
from slurm_forge.training.instability.spike_monitor import SpikeWatch
from slurm_forge.training.loop.progress_log import Telling
from slurm_forge.training.loop.recovery import Recovering
from slurm_forge.training.loop.save_schedule import Saves
from slurm_forge.training.loop.step_lifecycle import Stepping
from slurm_forge.training.monitor.collective_probe import Probe
from slurm_forge.training.monitor.pace import Pacing
from slurm_forge.training.step.loss_history import LossTrail
from slurm_forge.vocabulary.cause import Cause

__all__ = ["Parts", "assemble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that a run calls itself.  ``first_steps`` is None on every rank but the first."""

    registry: Registry
    hooks: Hooks
    progress: Progress
    comparing: Comparing
    saver: Saver
    saves: Saves
    first_steps: FirstSteps | None
    stepping: Stepping
    boundaries: Boundaries
    telling: Telling
    probe: Probe | None
    pacing: Pacing | None
    in_force: InForce
    skips: Skips
    recovering: Recovering
    injecting: Injecting
    watch: SpikeWatch | None
    trail: LossTrail


def assemble(
    context: RankContext,
    *,
    device: torch.device,
    groups: Groups,
    member: Member,
    journal: JournalWriter | None,
    act: Callable[[Request], None],
) -> Parts:
    """Make the parts of one rank.  ``act`` is called with what is due at a boundary."""
    registry, hooks, progress = Registry(), Hooks(context.rank), Progress()
    trail, in_force = LossTrail(device), InForce(context.brief.plan)
    comparing = Comparing(
        context.spec,
        device=device,
        folder=context.folder,
        variables=context.variables,
        registry=registry,
        group=groups.cpu,
        journal=journal,
    )
    saver = Saver(
        context,
        group=groups.cpu,
        background=groups.saving,
        journal=journal,
        member=member,
        trail=trail,
        comparing=comparing,
        in_force=in_force,
    )
    boundaries = Boundaries(member, act)
    watch = None
    if saver.keeping is not None:
        watch = SpikeWatch(
            member.send,
            context.spec.recovery,
            noted=saver.keeping.say,
            may_go_back=lambda: saver.keeping is not None and saver.keeping.has_usable,
        )
    injecting = Injecting(
        context.spec.inject,
        rank=context.rank,
        world_size=context.world_size,
        attempt=context.brief.attempt,
        launch=context.brief.launch,
        directory=context.directory.path,
    )
    skips = Skips(
        context.spec.recovery,
        rank=context.rank,
        progress=progress,
        registry=registry,
        examiner=Examiner(registry, device, rank=context.rank, host=context.host, group=groups.cpu),
        journal=journal,
        member=member,
        watch=watch,
        injecting=injecting,
        late=device.type == "cuda",
    )
    first_steps = _first_steps(saver, trail, progress, member, device)
    pacing = _pacing(context, device, groups, member, injecting, registry)
    stepping = Stepping(
        registry=registry,
        progress=progress,
        skips=skips,
        trail=trail,
        member=member,
        device=device,
        world_size=context.world_size,
        in_force=in_force,
        first_steps=first_steps,
        injecting=injecting,
        pacing=pacing,
    )
    saves = Saves(
        saver,
        context.spec.checkpoint,
        registry=registry,
        progress=progress,
        skips=skips,
        hooks=hooks,
        boundaries=boundaries,
        begun=(lambda _: None) if first_steps is None else first_steps.saved,
    )
    recovering = Recovering(
        context,
        in_force=in_force,
        skips=skips,
        saves=saves,
        progress=progress,
        hooks=hooks,
        journal=journal,
        watch=watch,
        member=member,
        group=groups.cpu,
    )
    return Parts(
        registry=registry,
        hooks=hooks,
        progress=progress,
        comparing=comparing,
        saver=saver,
        saves=saves,
        first_steps=first_steps,
        stepping=stepping,
        boundaries=boundaries,
        telling=Telling(journal, progress),
        probe=_probe(context, device, groups, member, injecting),
        pacing=pacing,
        in_force=in_force,
        skips=skips,
        recovering=recovering,
        injecting=injecting,
        watch=watch,
        trail=trail,
    )


def _first_steps(
    saver: Saver, trail: LossTrail, progress: Progress, member: Member, device: torch.device
) -> FirstSteps | None:
    keeping = saver.keeping
    if keeping is None:
        return None

    def wrong(text: str) -> None:
        """Rank 0 alone ends the launch: the others are told by the conductor."""
        if not keeping.doubt(text):
            return
        saver.let_land()
        member.send(p.Recover(cause=Cause.CHECKPOINT_BAD.value, step=progress.step, text=text))
        raise LaunchGivenUp

    return FirstSteps(
        trail,
        # Under autocast, or with TF32, a float32 loss is no better than bfloat16.
        exactness="bfloat16" if device.type == "cuda" else "float32",
        witness=keeping.witnessed,
        told=keeping.say,
        wrong=wrong,
    )


def _probe(
    context: RankContext,
    device: torch.device,
    groups: Groups,
    member: Member,
    injecting: Injecting,
) -> Probe | None:
    if groups.probe is None or not context.spec.probe.enabled:
        return None
    bandwidth = context.spec.probe.bandwidth
    return Probe(
        member=member,
        group=groups.probe,
        device=device,
        rank=context.rank,
        world_size=context.world_size,
        large=bandwidth.size if bandwidth.enabled else None,
        spoilt=injecting.probe_spoilt,
    )


def _pacing(
    context: RankContext,
    device: torch.device,
    groups: Groups,
    member: Member,
    injecting: Injecting,
    registry: Registry,
) -> Pacing | None:
    asked = context.spec.probe
    if groups.probe is None or not asked.enabled or asked.straggler is None:
        return None
    return Pacing(
        member.send,
        device=device,
        every=asked.pace_every,
        injecting=injecting,
        models=registry.models.values,
    )
