"""What went wrong in an attempt by its journal, and the rank that it began on."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.journal.state import AttemptState, RunState
from slurm_forge.report.text import clean, observed
from slurm_forge.vocabulary.cause import SLURM_INTERRUPTIONS, USER_REQUESTS

_EVIDENCE = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """An incident that is somebody's fault: ``rank`` is None where it is not known to be one's."""

    launch: int
    rank: int | None
    text: str


def failures_of(state: RunState, attempt: int) -> tuple[Failure, ...]:
    """The failures of an attempt, in their order."""
    chosen = next((each for each in state.attempts if each.number == attempt), None)
    if chosen is None:
        return ()
    failures = []
    for time, incident in chosen.incidents:
        if incident.cause in SLURM_INTERRUPTIONS | USER_REQUESTS:
            continue
        launch = _launch_at(chosen, time)
        evidence = "; ".join(observed(e.source, e.text, _EVIDENCE) for e in incident.evidence[:2])
        rank = "" if incident.rank is None else f" on rank {incident.rank}"
        hosts = f" ({clean(', '.join(incident.hosts), 80)})" if incident.hosts else ""
        failures.append(
            Failure(
                launch,
                incident.rank,
                f"launch {attempt}.{launch}: {incident.cause.value}{rank}{hosts}, "
                f"{incident.confidence.value}" + (f": {evidence}" if evidence else ""),
            )
        )
    return tuple(failures)


def _launch_at(attempt: AttemptState, time: float) -> int:
    begun = [each.number for each in attempt.launches if each.started <= time]
    return begun[-1] if begun else 1
