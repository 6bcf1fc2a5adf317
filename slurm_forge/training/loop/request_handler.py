"""What a rank does when a request is due: stop, save, probe, limit, recover."""

from __future__ import annotations

from slurm_forge.control import Member
from slurm_forge.control.messages.hub import Request, RequestKind
from slurm_forge.control.messages.probe import ABANDON, BANDWIDTH
from slurm_forge.control.messages.rank import RankStopped
from slurm_forge.recovery.monitor.loss_anomaly import announced
from slurm_forge.training.core.instability import ActivePlan
from slurm_forge.training.core.run_state import (
    Hooks,
    ProgressLogger,
    TrainingProgress,
)
from slurm_forge.training.core.step_boundary import RunStopped, StepBoundaries
from slurm_forge.training.instability.skip_tracker import SkipTracker
from slurm_forge.training.instability.spike_monitor import SpikeMonitor, limit_in
from slurm_forge.training.loop.reference_loss import ReferenceLoss
from slurm_forge.training.loop.save_schedule import SaveSchedule
from slurm_forge.training.loop.step_lifecycle import StepLifecycle
from slurm_forge.training.monitor.collective_probe import Probe
from slurm_forge.training.monitor.step_timer import StepTimer
from slurm_forge.training.step.gradient_guard import LARGEST


class RequestHandler:
    """``act`` is called on all ranks at the same position of the program."""

    def __init__(
        self,
        *,
        member: Member,
        progress: TrainingProgress,
        progress_log: ProgressLogger,
        hooks: Hooks,
        boundaries: StepBoundaries,
        save_schedule: SaveSchedule,
        skip_tracker: SkipTracker,
        spike_monitor: SpikeMonitor | None,
        active_plan: ActivePlan,
        step_lifecycle: StepLifecycle,
        reference_loss: ReferenceLoss,
        probe: Probe | None,
        step_timer: StepTimer | None,
    ) -> None:
        self._member = member
        self._progress = progress
        self._progress_log = progress_log
        self._hooks = hooks
        self._boundaries = boundaries
        self._save_schedule = save_schedule
        self._skip_tracker = skip_tracker
        self._spike_monitor = spike_monitor
        self._active_plan = active_plan
        self._step_lifecycle = step_lifecycle
        self._reference_loss = reference_loss
        self._probe = probe
        self._step_timer = step_timer

    def act(self, request: Request) -> None:
        """Carry out a request; raises ``RunStopped`` if it is a stop."""
        match request.kind:
            case RequestKind.STOP:
                self.stop_here()
                raise RunStopped
            case RequestKind.SAVE:
                self._save_schedule.save(request.reason)
            case RequestKind.PROBE if self._probe is not None and request.reason == ABANDON:
                self._probe.abandon()
            case RequestKind.PROBE if self._probe is not None:
                if self._step_timer is not None:
                    self._step_timer.try_out()
                self._probe.issue(request.id, large=request.reason == BANDWIDTH)
                self._hooks.call("on_probe", step=self._progress.step)
            case RequestKind.LIMIT:
                # A limit from before a rollback does not apply to the steps after it.
                stale = self._boundaries.rollbacks > 0 and not self._step_lifecycle.stepped
                self._active_plan.limit = LARGEST if stale else limit_in(request.reason)
                if self._spike_monitor is not None:
                    self._spike_monitor.set_active_limit(self._active_plan.limit)
            case RequestKind.RECOVER:
                self._skip_tracker.announced(announced(request.reason))
            case _:
                pass

    def stop_here(self) -> None:
        """Save, and report to the conductor: the run stops on all ranks at this step."""
        step = self._progress.step
        self._skip_tracker.read_all()
        self._save_schedule.have("stop", doubts=self._skip_tracker.doubts)
        self._progress_log.write(now=True)
        last = self._save_schedule.last
        self._hooks.call("on_stop", step=step)
        name = None if last is None else str(last)
        stays_s = self._reference_loss.seconds_allowed()
        self._member.send(RankStopped(step=step, checkpoint=name, stays_s=stays_s))
        self._reference_loss.compute(stays_s)
        if stays_s:
            self._member.send(RankStopped(step=step, checkpoint=name))
