"""Assemble the parts of a run on one rank: every part knows only what it is given here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slurm_forge.control import Member
from slurm_forge.control.messages.hub import Request
from slurm_forge.control.messages.rank import RecoveryNeeded
from slurm_forge.device.accelerator import exactness_of, is_accelerator
from slurm_forge.journal import JournalWriter
from slurm_forge.training.checkpointing.compatibility import CompatibilityCheck
from slurm_forge.training.checkpointing.resume_check import FirstSteps
from slurm_forge.training.checkpointing.saver import Saver
from slurm_forge.training.core.instability import ActivePlan
from slurm_forge.training.core.loss import LossHistory
from slurm_forge.training.core.process_group import ProcessGroups
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.rank_layout import ActiveLayout
from slurm_forge.training.core.run_state import (
    Hooks,
    ProgressLogger,
    Registry,
    TrainingProgress,
)
from slurm_forge.training.core.step_boundary import StepBoundaries
from slurm_forge.training.data.source_state import DataState
from slurm_forge.training.faults.injector import FaultInjector
from slurm_forge.training.instability.diagnosis import StepDiagnoser
from slurm_forge.training.instability.skip_tracker import (
    LaunchGivenUp,
    SkipTracker,
)
from slurm_forge.training.instability.spike_monitor import SpikeMonitor
from slurm_forge.training.loop.instability_handler import InstabilityHandler
from slurm_forge.training.loop.reference_loss import ReferenceLoss
from slurm_forge.training.loop.request_handler import RequestHandler
from slurm_forge.training.loop.save_schedule import SaveSchedule
from slurm_forge.training.loop.step_lifecycle import StepLifecycle
from slurm_forge.training.monitor.collective_probe import Probe
from slurm_forge.training.monitor.step_timer import StepTimer
from slurm_forge.vocabulary.cause import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that a run calls directly.  ``first_steps`` is None on every rank but the first."""

    layout: ActiveLayout
    registry: Registry
    hooks: Hooks
    progress: TrainingProgress
    compatibility: CompatibilityCheck
    saver: Saver
    save_schedule: SaveSchedule
    first_steps: FirstSteps | None
    step_lifecycle: StepLifecycle
    reference_loss: ReferenceLoss
    boundaries: StepBoundaries
    progress_log: ProgressLogger
    probe: Probe | None
    requests: RequestHandler
    active_plan: ActivePlan
    skip_tracker: SkipTracker
    instability: InstabilityHandler
    fault_injector: FaultInjector
    spike_monitor: SpikeMonitor | None
    loss_history: LossHistory
    data_state: DataState


def assemble(
    context: RankContext,
    *,
    device: torch.device,
    groups: ProcessGroups,
    member: Member,
    journal: JournalWriter | None,
    on_counted: Callable[[], None],
) -> Parts:
    """Create the parts of one rank.  ``on_counted`` is called after each step."""
    registry, hooks, progress = Registry(), Hooks(context.rank), TrainingProgress()
    loss_history, active_plan = LossHistory(device), ActivePlan(context.brief.plan)
    layout = ActiveLayout(context.rank, context.world_size)
    data_state = DataState(layout)
    compatibility = CompatibilityCheck(
        context.spec,
        device=device,
        folder=context.folder,
        variables=context.variables,
        code=context.code,
        changes=context.changes,
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
        loss_history=loss_history,
        compatibility=compatibility,
        active_plan=active_plan,
        layout=layout,
        data_state=data_state,
    )

    def act(request: Request) -> None:
        requests.act(request)  # created last: it saves, and a save notifies the boundaries

    boundaries = StepBoundaries(member, act)
    spike_monitor = None
    if saver.catalog is not None:
        spike_monitor = SpikeMonitor(
            member.send,
            context.spec.recovery,
            noted=saver.catalog.say,
            may_go_back=lambda: saver.catalog is not None and saver.catalog.has_usable,
        )
    fault_injector = FaultInjector(
        context.spec.inject,
        rank=context.rank,
        world_size=context.world_size,
        attempt=context.brief.attempt,
        launch=context.brief.launch,
        directory=context.directory.path,
    )
    skip_tracker = SkipTracker(
        context.spec.recovery,
        rank=context.rank,
        progress=progress,
        registry=registry,
        examiner=StepDiagnoser(
            registry,
            device,
            rank=context.rank,
            host=context.host,
            group=groups.cpu,
            layout=layout,
        ),
        journal=journal,
        member=member,
        spike_monitor=spike_monitor,
        fault_injector=fault_injector,
        read_one_step_late=is_accelerator(device),
    )
    first_steps = _first_steps(saver, loss_history, progress, member, device)
    step_timer = _step_timer(context, device, groups, member, fault_injector, registry)
    step_lifecycle = StepLifecycle(
        registry=registry,
        progress=progress,
        skip_tracker=skip_tracker,
        loss_history=loss_history,
        member=member,
        device=device,
        layout=layout,
        active_plan=active_plan,
        first_steps=first_steps,
        fault_injector=fault_injector,
        step_timer=step_timer,
        on_counted=on_counted,
    )
    save_schedule = SaveSchedule(
        saver,
        context.spec.checkpoint,
        registry=registry,
        progress=progress,
        skip_tracker=skip_tracker,
        hooks=hooks,
        boundaries=boundaries,
        data_state=data_state,
        on_save_started=(lambda _: None) if first_steps is None else first_steps.saved,
    )
    instability = InstabilityHandler(
        context,
        active_plan=active_plan,
        skip_tracker=skip_tracker,
        save_schedule=save_schedule,
        progress=progress,
        hooks=hooks,
        journal=journal,
        spike_monitor=spike_monitor,
        member=member,
        group=groups.cpu,
    )
    reference_loss = ReferenceLoss(
        registry=registry,
        progress=progress,
        save_schedule=save_schedule,
        step_lifecycle=step_lifecycle,
        member=member,
        group=groups.cpu,
        catalog=saver.catalog,
    )
    progress_log = ProgressLogger(journal, progress)
    probe = _probe(context, device, groups, member, fault_injector)
    requests = RequestHandler(
        member=member,
        progress=progress,
        progress_log=progress_log,
        hooks=hooks,
        boundaries=boundaries,
        save_schedule=save_schedule,
        skip_tracker=skip_tracker,
        spike_monitor=spike_monitor,
        active_plan=active_plan,
        step_lifecycle=step_lifecycle,
        reference_loss=reference_loss,
        probe=probe,
        step_timer=step_timer,
    )
    return Parts(
        layout=layout,
        registry=registry,
        hooks=hooks,
        progress=progress,
        compatibility=compatibility,
        saver=saver,
        save_schedule=save_schedule,
        first_steps=first_steps,
        step_lifecycle=step_lifecycle,
        reference_loss=reference_loss,
        boundaries=boundaries,
        progress_log=progress_log,
        probe=probe,
        requests=requests,
        active_plan=active_plan,
        skip_tracker=skip_tracker,
        instability=instability,
        fault_injector=fault_injector,
        spike_monitor=spike_monitor,
        loss_history=loss_history,
        data_state=data_state,
    )


def _first_steps(
    saver: Saver,
    loss_history: LossHistory,
    progress: TrainingProgress,
    member: Member,
    device: torch.device,
) -> FirstSteps | None:
    catalog = saver.catalog
    if catalog is None:
        return None

    def wrong(text: str) -> None:
        """Rank 0 alone ends the launch: the conductor informs the others."""
        if not catalog.doubt(text):
            return
        saver.wait_for_save()
        member.send(RecoveryNeeded(cause=Cause.CHECKPOINT_BAD.value, step=progress.step, text=text))
        raise LaunchGivenUp

    return FirstSteps(
        loss_history,
        # Under autocast, or with TF32, a float32 loss is no more exact than bfloat16.
        exactness=exactness_of(device),
        note_reference=catalog.note_reference_loss,
        report=catalog.say,
        wrong=wrong,
    )


def _probe(
    context: RankContext,
    device: torch.device,
    groups: ProcessGroups,
    member: Member,
    fault_injector: FaultInjector,
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
        spoilt=fault_injector.probe_spoilt,
    )


def _step_timer(
    context: RankContext,
    device: torch.device,
    groups: ProcessGroups,
    member: Member,
    fault_injector: FaultInjector,
    registry: Registry,
) -> StepTimer | None:
    probe = context.spec.probe
    if groups.probe is None or not probe.enabled or probe.straggler is None:
        return None
    return StepTimer(
        member.send,
        device=device,
        every=probe.pace_every,
        fault_injector=fault_injector,
        models=registry.models.values,
    )
