"""The section of the job file about what is looked at before each launch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar

from pydantic import Field, model_validator

from slurm_forge.spec.types import PositiveDuration, Section
from slurm_forge.units import format_duration

__all__ = ["PreflightSpec"]

#: A busy node takes seconds to fork a large process, and its storage to answer.
_LEAST_WITHIN = timedelta(seconds=5)


class PreflightSpec(Section):
    """Whether nodes are looked at before a launch, and how long that may take."""

    known_as: ClassVar[Mapping[str, str]] = {
        "on": "enabled", "off": "enabled", "timeout": "within", "deadline": "within",
        "at_most": "within",
    }  # fmt: skip

    enabled: bool = Field(default=True, strict=True, description="false switches it off.")
    within: PositiveDuration = Field(
        default=timedelta(seconds=60),
        description="How long a node may take to be looked at, and a group of nodes for one "
        "collective; what takes longer has failed.",
    )

    @model_validator(mode="before")
    @classmethod
    def _switched_off_by_its_key(cls, data: object) -> object:
        if data is False:
            raise ValueError('to switch it off, write "preflight: {enabled: false}"')
        return data

    @model_validator(mode="after")
    def _long_enough_for_a_healthy_node(self) -> PreflightSpec:
        if self.within < _LEAST_WITHIN:
            raise ValueError(
                f"within ({format_duration(self.within)}) must be 5s or more: a healthy node that "
                "is busy would be refused"
            )
        return self
