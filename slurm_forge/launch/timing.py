"""When a launch is asked to save, to answer a probe, and to stop: from the job and its limit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.slurm.records import JobRecord
from slurm_forge.spec import JobSpec

__all__ = ["Timing", "lead_time", "timing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When to ask for what.  None switches a thing off."""

    lead: timedelta
    save_every: timedelta | None
    probe_every: timedelta | None
    probe_deadline: timedelta
    #: For a stop whose end nobody knows (a signal by hand): then the launch is ended anyway.
    stop_within: timedelta = timedelta(minutes=10)

    def margin(self, given: timedelta) -> timedelta:
        """How long before the end the requeue comes, whether or not a commit did."""
        return min(timedelta(seconds=5), max(timedelta(seconds=1), 0.15 * given))


#: Share of the time limit that is kept for the last save where nothing is known better.
_LEAD_SHARE = 0.2
_LEAD_LEAST = timedelta(seconds=10)
_LEAD_MOST = timedelta(minutes=2)


def lead_time(job: JobSpec, limit: timedelta | None) -> timedelta:
    """How long before the end of the time limit the last save begins."""
    if job.lead is not None:
        return job.lead
    if limit is None:
        return _LEAD_MOST
    return min(_LEAD_MOST, max(_LEAD_LEAST, _LEAD_SHARE * limit))


def timing(job: JobSpec, record: JobRecord | None = None) -> Timing:
    """When to save, probe and stop, from the job file and the job's own limit."""
    limit = job.resources.time if record is None else record.time_limit
    return Timing(
        lead=lead_time(job, limit),
        save_every=job.checkpoint.every,
        probe_every=job.probe.every if job.probe.enabled else None,
        probe_deadline=job.probe.deadline,
    )
