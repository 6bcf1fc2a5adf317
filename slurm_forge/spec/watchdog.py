"""The hang watchdog's section of the job file."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar

from pydantic import Field, model_validator

from slurm_forge.spec.types import Factor, PositiveDuration, Section
from slurm_forge.units import format_duration

__all__ = ["WatchdogSpec"]


class WatchdogSpec(Section):
    """The limits of the hang watchdog, which are learned in between these bounds."""

    """When a rank that gets no further counts as hung."""

    known_as: ClassVar[Mapping[str, str]] = {
        "on": "enabled", "off": "enabled", "timeout": "at_most", "deadline": "at_most",
        "max": "at_most", "min": "at_least", "safety_factor": "factor", "times": "factor",
    }  # fmt: skip

    enabled: bool = Field(default=True, strict=True, description="false switches the watchdog off.")
    factor: Factor = Field(
        default=5.0,
        description="How many times what was usual in this run a rank may stay where it is.",
    )
    at_least: PositiveDuration = Field(
        default=timedelta(seconds=30),
        description="A rank is never taken for hung before; saves and phases of the program have "
        "four times as long.",
    )
    at_most: PositiveDuration = Field(
        default=timedelta(minutes=10),
        description="How long a step may take while nothing is known of the run; starts, first "
        "steps and phases that were never seen have three times as long.",
    )

    @model_validator(mode="before")
    @classmethod
    def _switched_off_by_its_key(cls, data: object) -> object:
        if data is False:
            raise ValueError('to switch the watchdog off, write "watchdog: {enabled: false}"')
        return data

    @model_validator(mode="after")
    def _bounds_fit(self) -> WatchdogSpec:
        if self.factor < 1:
            raise ValueError("factor is 1 or more: else every ordinary step would be a hang")
        if self.at_least > self.at_most:
            raise ValueError(
                f"at_least ({format_duration(self.at_least)}) is longer than at_most "
                f"({format_duration(self.at_most)}): raise at_most too"
            )
        return self
