"""What every message on a control channel is, and the numbers that it may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, GetPydanticSchema
from pydantic_core import core_schema

from slurm_forge.vocabulary.position import Position

#: No count of slurm_forge goes beyond 64 bits, and Python refuses to print very long integers.
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]

#: All four numbers have to be there: a position with defaults is another place.
WirePosition = Annotated[
    Position,
    GetPydanticSchema(
        lambda _, handler: core_schema.no_info_after_validator_function(
            Position._make, handler.generate_schema(tuple[Int, Int, Int, Int])
        )
    ),
]


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; each has a field ``m``, its word on the wire.

    Unknown fields, values of other types and numbers that are not finite are refused.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )
