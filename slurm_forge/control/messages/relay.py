"""What the relay of a node and the hub tell each other: lines of ranks and monitors, many in one.

Members are numbered by their relay, each connection anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from slurm_forge.control.messages.message import Int, Message
from slurm_forge.control.messages.protocol import ControlMessage, decode_by
from slurm_forge.json_codec import dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayHello(Message):
    """First line of a relay, behind the handshake: where it is."""

    m: Literal["relay"] = "relay"
    host: str
    pid: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLines(Message):
    """What members said, in their order; None: the connection of that one has ended."""

    m: Literal["lines"] = "lines"
    lines: tuple[tuple[Int, ControlMessage | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery(Message):
    """The hub's line for members, none where it is empty; ``close``: they have no place here."""

    m: Literal["deliver"] = "deliver"
    to: tuple[Int, ...]
    line: str
    close: bool = False


def encode_lines(lines: Iterable[tuple[int, bytes | None]]) -> bytes:
    """A ``MemberLines`` out of messages that are encoded already."""
    parts = (
        b"[%d,%b]" % (number, b"null" if line is None else line.rstrip(b"\n"))
        for number, line in lines
    )
    return b'{"m":"lines","lines":[%b]}\n' % b",".join(parts)


def encode_delivery(to: Iterable[int], line: bytes, *, close: bool = False) -> bytes:
    """A ``Delivery`` of a line that is encoded already."""
    text = dumps(line.decode().rstrip("\n"))
    numbers = ",".join(map(str, to)).encode()
    end = b"true" if close else b"false"
    return b'{"m":"deliver","to":[%b],"line":%b,"close":%b}\n' % (numbers, text, end)


@cache
def _from_relay() -> TypeAdapter[Message]:
    return TypeAdapter(Annotated[RelayHello | MemberLines, Field(discriminator="m")])


@cache
def _to_relay() -> TypeAdapter[Message]:
    return TypeAdapter(Delivery)


def decode_from_relay(line: bytes) -> Message:
    """What a relay told the hub; ``ControlChannelError`` for anything else."""
    return decode_by(_from_relay(), line)


def decode_delivery(line: bytes) -> Delivery:
    """What the hub told a relay; ``ControlChannelError`` for anything else."""
    delivery = decode_by(_to_relay(), line)
    assert isinstance(delivery, Delivery)  # noqa: S101  there is no other
    return delivery
