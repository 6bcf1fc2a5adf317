"""When a launch is asked to save, to answer a probe, and to stop: from the job and its limit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from slurm_forge.journal import RunState
from slurm_forge.launch.render.save_times import lead_time
from slurm_forge.recovery.monitor.phase_durations import HangRules
from slurm_forge.recovery.policy.save_interval import interruptions, measured_interval, seen_between
from slurm_forge.slurm.records import JobRecord
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When to ask for what.  None switches a thing off."""

    lead: timedelta
    save_every: timedelta | None
    probe_every: timedelta | None
    probe_deadline: timedelta
    #: How long a rank may say nothing, and between two probes that measure bandwidth, too.
    probe_silence: timedelta = timedelta(seconds=5)
    bandwidth_every: timedelta | None = None
    #: The mean time between interruptions, where the interval is ours to choose: then every commit
    #: says anew how often to save.
    between: timedelta | None = None
    #: And how many interruptions that rests on; without any it is an assumption.
    interruptions: int = 0
    #: For a stop whose end nobody knows (a signal by hand): then the launch is ended anyway.
    stop_within: timedelta = timedelta(minutes=10)
    #: Between Slurm's SIGTERM and its SIGKILL, once it ends the job.
    kill_wait: timedelta = timedelta(seconds=30)
    #: When the job file's own time limit ends, for where Slurm can't be asked.
    planned_end: datetime | None = None
    #: When a rank counts as hung, and how long earlier attempts stayed in what.
    hang: HangRules | None = None
    stretches: tuple[tuple[str, float], ...] = ()
    #: From how many times as slow a node counts as slow, how often ranks tell their pace.
    straggler: float | None = None
    pace_every: timedelta = timedelta(seconds=15)
    #: Whether more is done about a slow node than to tell of it.
    acts_on_stragglers: bool = False
    #: How long a node may take to be looked at before training begins.
    preflight: timedelta = timedelta(minutes=1)

    def margin(self, lead: timedelta) -> timedelta:
        """How long before the end the requeue comes, whether or not a commit did."""
        return min(timedelta(seconds=5), max(timedelta(seconds=1), 0.15 * lead))


#: slurm.conf's default.
_KILL_WAIT = timedelta(seconds=30)


def timing(
    job: JobSpec,
    record: JobRecord | None = None,
    *,
    state: RunState,
    now: float,
    end: datetime | None = None,
    kill_wait: timedelta | None = None,
    usual_save: timedelta | None = None,
) -> Timing:
    """When to save, probe and stop: from the job file, the job's own limit, and the journal.

    ``usual_save`` is what saves take as far as that is known before the first one.  ``end`` is
    when the job's time is up as far as that can be told without asking Slurm.
    """
    limit = job.resources.time if record is None else record.time_limit
    before = 0.0 if usual_save is None else usual_save.total_seconds()
    slowest = max((each.seconds for each in state.known[-5:] if each.seconds), default=before)
    automatic = job.checkpoint.automatic
    return Timing(
        lead=lead_time(job, limit, timedelta(seconds=slowest)),
        save_every=measured_interval(state, now=now) if automatic else job.checkpoint.every,
        between=seen_between(state, now=now) if automatic else None,
        interruptions=interruptions(state),
        probe_every=job.probe.every if job.probe.enabled else None,
        probe_deadline=job.probe.deadline,
        probe_silence=job.probe.silence,
        bandwidth_every=job.probe.bandwidth.every if job.probe.bandwidth.enabled else None,
        planned_end=end,
        kill_wait=_KILL_WAIT if kill_wait is None else kill_wait,
        hang=_hang_rules(job),
        stretches=state.stretches,
        straggler=job.probe.straggler if job.probe.enabled else None,
        pace_every=job.probe.pace_every,
        acts_on_stragglers=any(
            rung.do is not Action.WARN for rung in job.recovery.ladder(Cause.STRAGGLER)
        ),
        preflight=job.preflight.within,
    )


def _hang_rules(job: JobSpec) -> HangRules | None:
    watchdog = job.watchdog
    return (
        HangRules(watchdog.factor, watchdog.at_least, watchdog.at_most)
        if watchdog.enabled
        else None
    )


def planned_end(job: JobSpec, state: RunState) -> datetime | None:
    """When the time asked for is over.

    By the journal's start of the attempt, a moment later than Slurm's: so a little earlier."""
    limit = job.resources.time
    if limit is None or not state.attempts:
        return None
    began = datetime.fromtimestamp(state.attempts[-1].started, tz=timezone.utc)
    return began + limit * state.plan.time_factor - _STARTED_BEFORE


_STARTED_BEFORE = timedelta(seconds=10)
