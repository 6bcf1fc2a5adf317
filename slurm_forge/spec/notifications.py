"""The section ``notify``: which events of a run are sent to whom."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from slurm_forge.run_directory.sent_messages import TARGET_NAME
from slurm_forge.spec.types import Count, JobSection


class NotifyEvent(str, Enum):
    """What is worth a message.  The values are what ``events:`` takes in a job file."""

    #: The run waits for a person.
    HELD = "held"
    FINISHED = "finished"
    ROLLED_BACK = "rolled_back"
    #: As often within an hour as ``requeues_per_hour`` says.
    REQUEUED_OFTEN = "requeued_often"
    #: Ranks make no progress, or no checkpoint has been written for long.
    NO_PROGRESS = "no_progress"
    #: The job has disappeared, or waits for what never comes: only ``watch`` sees that.
    LOST = "lost"

    @property
    def is_last(self) -> bool:
        """Whether the run does nothing more by itself."""
        return self in (NotifyEvent.HELD, NotifyEvent.FINISHED, NotifyEvent.LOST)


def _check_target(name: str) -> str:
    # Of what may be a URL with a password in it nothing is repeated.
    if ":" in name or "/" in name:
        raise ValueError(
            "expected the name of a target; its URL, which may hold a password, belongs into "
            "notify.yaml in your configuration folder (docs/how-to/notifications.md)"
        )
    if not TARGET_NAME.fullmatch(name):
        raise ValueError(
            "a target's name is 1 to 32 letters, digits and underscores, and starts with a letter "
            "or a digit"
        )
    return name


TargetName = Annotated[str, Field(strict=True), AfterValidator(_check_target)]


class NotifySpec(JobSection):
    """Messages about the run; nothing is sent without ``to``."""

    known_as: ClassVar[Mapping[str, str]] = {
        "targets": "to", "target": "to", "recipients": "to", "when": "events",
        "requeues": "requeues_per_hour", "from": "from_job",
    }  # fmt: skip

    to: tuple[TargetName, ...] = Field(
        default=(),
        description="Names of targets; their URLs are in notify.yaml in your configuration folder, "
        "which only you can read.",
    )
    events: tuple[NotifyEvent, ...] = Field(
        default=(
            NotifyEvent.HELD,
            NotifyEvent.FINISHED,
            NotifyEvent.REQUEUED_OFTEN,
            NotifyEvent.NO_PROGRESS,
            NotifyEvent.LOST,
        ),
        description="Events that are sent (docs/how-to/notifications.md).",
    )
    requeues_per_hour: Count = Field(
        default=5, description="requeued_often: so many requeues within an hour."
    )
    from_job: bool = Field(
        default=True,
        strict=True,
        description="The batch step sends. false where compute nodes reach no network: then "
        "slurm-forge watch on a login node does.",
    )
