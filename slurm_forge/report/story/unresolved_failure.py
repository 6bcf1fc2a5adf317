"""What went wrong and has not been shown to be over: a stop by a person does not mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_forge.report.story.story import (
    AttemptStory,
    IncidentStory,
)
from slurm_forge.vocabulary.cause import SLURM_INTERRUPTIONS, USER_REQUESTS

#: Somebody or something wanted the run to stop: nothing is broken.
_INTERRUPTIONS = frozenset(cause.value for cause in SLURM_INTERRUPTIONS | USER_REQUESTS)


@dataclass(frozen=True, slots=True)
class UnresolvedFailure:
    """A fault, and the attempt that it happened in."""

    attempt: int
    incident: IncidentStory


def is_fault(incident: IncidentStory) -> bool:
    """Whether something went wrong, as opposed to somebody wanting the run to stop."""
    return incident.cause not in _INTERRUPTIONS


def unresolved_failure(attempts: Sequence[AttemptStory]) -> UnresolvedFailure | None:
    """The newest fault, unless training has got past it since; None if there is none."""
    for attempt in reversed(attempts):
        for launch in reversed(attempt.launches):
            for incident in reversed(launch.incidents):
                if is_fault(incident):
                    return (
                        None if incident.recovered else UnresolvedFailure(attempt.number, incident)
                    )
    return None
