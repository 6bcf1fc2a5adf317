"""The base of every message on a control channel, and the numbers that it may hold."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import ConfigDict, Field, GetPydanticSchema
from pydantic_core import core_schema

from slurm_forge.vocabulary.position import Position

#: No counter of slurm_forge exceeds 64 bits, and Python refuses to print very long integers.
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]

#: For each column of a message, the values of all members that send it, in their order.
Columns: TypeAlias = tuple[tuple[Any, ...], ...]

#: Heartbeats of a node are sent at the same time, give or take how its processes are scheduled.
HEARTBEAT_WAITS_S = 0.1
#: What may wait for the next heartbeat, which is sent within this time.
UNTIL_HEARTBEAT_S = 2.0

#: All four numbers are required: a position filled up with defaults would be another place.
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

    Unknown fields, values of other types and non-finite numbers are rejected.  A relay joins
    messages that differ only in their ``columns``.
    """

    #: Fields with a value per member that sends the message, in the order of the members.
    columns: ClassVar[tuple[str, ...]] = ()
    #: How long it may be held back to be sent with others; 0 if somebody waits for it.
    may_wait_s: ClassVar[float] = 0.0

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )

    @property
    def common(self) -> Hashable:
        """The part that joined messages share."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in self.columns)

    @property
    def values(self) -> Columns:
        """Its columns."""
        return tuple(getattr(self, name) for name in self.columns)

    def with_values(self, values: Columns) -> Message:
        """The same with other columns."""
        return replace(self, **dict(zip(self.columns, values, strict=True)))
