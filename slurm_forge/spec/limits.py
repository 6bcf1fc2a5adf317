"""How far a run goes on by itself, whatever the ladders of its causes allow."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar

from pydantic import Field

from slurm_forge.spec.types import Count, PositiveDuration, Section

__all__ = ["Limits"]


class Limits(Section):
    """How far a run goes on by itself, whatever the ladders allow; then it is held.

    A person who lets it go on starts every count anew.
    """

    known_as: ClassVar[Mapping[str, str]] = {
        "no_progress": "attempts_without_progress", "attempts": "attempts_without_progress",
        "without_progress": "attempts_without_progress",
        "interruptions": "interruptions_without_progress",
        "preemptions": "interruptions_without_progress", "max_starts": "starts",
        "restarts": "starts", "restarts_per_day": "starts_per_day", "per_day": "starts_per_day",
    }  # fmt: skip

    attempts_without_progress: Count = Field(
        default=3,
        description="Attempts in a row that fail or reach the time limit without a checkpoint "
        "past the ones before.",
    )
    interruptions_without_progress: Count = Field(
        default=10,
        description="Attempts in a row that end without such a checkpoint, whatever for: "
        "preempted, requeued by an administrator, with a lost node, a silent service or a full "
        "disk.",
    )
    starts_per_day: Count = Field(
        default=200,
        description="Starts of all ranks within 24 hours, in the same job or in the queue.",
    )
    starts: Count = Field(default=5000, description="Starts of all ranks in all.")
    controller_patience: PositiveDuration = Field(
        default=timedelta(minutes=5),
        description="How long a Slurm that does not answer is asked to take the run back, before "
        "that is left to slurm-forge reconcile.",
    )
