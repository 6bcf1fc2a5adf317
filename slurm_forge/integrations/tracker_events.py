"""Incidents, rollbacks and changes of the learning rate as events of an experiment tracker.

``record_incidents(run, tracker)`` writes what the journal holds into W&B, MLflow or TensorBoard.
It may be called at every start and whenever a program evaluates: what is there already is not
written twice (TensorBoard may show the same text once more).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations.trackers import TrackedRun
from slurm_forge.journal import Record, read_journal
from slurm_forge.journal.events import DecisionTaken, IncidentSeen
from slurm_forge.journal.fold import in_order, without_fenced
from slurm_forge.recovery.policy.remedies import NEXT
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.decision import Change, Decision, Incident

_LONGEST = 480  # MLflow takes 500 characters in a tag of older servers
_PREFIX = "slurm_forge"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerEvent:
    """One incident and what was done about it.

    Attributes:
        id: Of the incident; unique within the run.
        step: Optimizer steps done when it happened; 0 where that is not known.
        time: Seconds since the epoch.
        text: Cause, evidence, decision and what that changed, in one line.
        lr_scale: The factor on the learning rate from then on; None where it did not change.
    """

    id: str
    step: int
    time: float
    text: str
    lr_scale: float | None = None


def tracker_events(records: Iterable[Record]) -> tuple[TrackerEvent, ...]:
    """What a tracker should show of a run, in order.

    Args:
        records: Of the run's journal.

    Returns:
        One event for each incident that something was decided about; the last word counts.
    """
    incidents: dict[str, Incident] = {}
    events: dict[str, TrackerEvent] = {}
    for record in in_order(without_fenced(records)):
        if isinstance(record.event, IncidentSeen):
            incidents[record.event.incident.id] = record.event.incident
        elif isinstance(record.event, DecisionTaken):
            decision = record.event.decision
            events[decision.incident_id] = _event(
                decision, incidents.get(decision.incident_id), record.time
            )
    return tuple(events.values())


def _event(decision: Decision, incident: Incident | None, time: float) -> TrackerEvent:
    step = None if incident is None else incident.step
    seen = "" if incident is None or not incident.evidence else f" ({incident.evidence[0].text})"
    where = "" if step is None else f" at step {step}"
    reason = decision.reason.partition(NEXT)[0].removeprefix(f"{decision.cause.value}: ")
    changed = ", ".join(f"{each.parameter} {each.old} to {each.new}" for each in decision.changes)
    text = f"{decision.cause.value}{where}{seen}: {reason}{f'; {changed}' if changed else ''}"
    return TrackerEvent(
        id=decision.incident_id,
        step=step or 0,
        time=time,
        text=" ".join(text.split())[:_LONGEST],
        lr_scale=next((_scale(each) for each in decision.changes if each.parameter == _LR), None),
    )


_LR = "lr_scale"


def _scale(change: Change) -> float | None:
    try:
        return float(change.new)
    except ValueError:  # of a journal that somebody has edited
        return None


def record_incidents(run: TrackedRun, tracker: Any) -> tuple[TrackerEvent, ...]:
    """Write the run's incidents into its tracker; on rank 0, after the tracker's run has begun.

    Args:
        run: The run, which continues under the same id in the tracker (``trackers``).
        tracker: What ``wandb.init`` returned, the module ``mlflow`` with an active run, or a
            ``SummaryWriter``.

    Returns:
        What was written.

    Raises:
        UnsupportedError: It is none of these.
    """
    events = tracker_events(read_journal(RunDirectory.at(run.directory))[0])
    if hasattr(tracker, "add_text") and hasattr(tracker, "add_scalar"):
        _to_tensorboard(tracker, events)
    elif hasattr(tracker, "set_tags") and hasattr(tracker, "active_run"):
        tracker.set_tags({f"{_PREFIX}.incident.{each.id}": each.text for each in events})
    elif hasattr(tracker, "summary") and hasattr(tracker, "define_metric"):
        _to_wandb(tracker, events)
    else:
        kind = type(tracker)
        raise UnsupportedError(
            f"record_incidents() can't write to a {kind.__module__}.{kind.__qualname__}",
            next_step="Pass what wandb.init() returned, the module mlflow, or a SummaryWriter.",
        )
    return events


def _to_tensorboard(writer: Any, events: Iterable[TrackerEvent]) -> None:
    """All of them: ``purge_step`` hides those that earlier starts wrote behind the resumed step."""
    for each in events:
        writer.add_text(f"{_PREFIX}/incidents", each.text, each.step, walltime=each.time)
        if each.lr_scale is not None:
            writer.add_scalar(f"{_PREFIX}/lr_scale", each.lr_scale, each.step, walltime=each.time)
    writer.flush()


def _to_wandb(run: Any, events: Iterable[TrackerEvent]) -> None:
    """New ones as points over the step that they happened at, and all in the summary."""
    summary = f"{_PREFIX}/incident."
    run.define_metric(f"{_PREFIX}/step", hidden=True)
    for name in ("incident", "lr_scale"):
        run.define_metric(f"{_PREFIX}/{name}", step_metric=f"{_PREFIX}/step", summary="none")
    known = set(dict(run.summary))
    for each in events:
        key = f"{summary}{each.id}".replace(".", "_")
        if key in known:
            continue
        point: dict[str, float] = {f"{_PREFIX}/step": each.step, f"{_PREFIX}/incident": 1}
        if each.lr_scale is not None:
            point[f"{_PREFIX}/lr_scale"] = each.lr_scale
        run.log(point)
        run.summary[key] = each.text
