"""What the relay of a node and the hub tell each other: lines of ranks and monitors, many in one.

Members are numbered by their relay, each connection anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from slurm_forge.control.messages.message import Int, Message
from slurm_forge.control.messages.protocol import (
    ControlMessage,
    check_columns,
    decode_by,
    encode,
)
from slurm_forge.control.session import LINE_LIMIT
from slurm_forge.json_codec import dumps

#: What the numbers of members take on a line, for each message.
_NUMBERS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayHello(Message):
    """First line of a relay, behind the handshake: where it is."""

    m: Literal["relay"] = "relay"
    host: str
    pid: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLines(Message):
    """What members said, each in its order; None: the connections of those have ended."""

    m: Literal["lines"] = "lines"
    lines: tuple[tuple[tuple[Int, ...], ControlMessage | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery(Message):
    """The hub's line for members, none where it is empty; ``close``: they have no place here."""

    m: Literal["deliver"] = "deliver"
    to: tuple[Int, ...]
    line: str
    close: bool = False


@dataclass(slots=True)
class _Said:
    """What some members say alike, but for the columns of the message."""

    numbers: list[int]
    messages: list[Message]
    line: bytes

    def encode(self) -> bytes:
        line = self.line
        if len(self.messages) > 1 and self.messages[0].columns:
            line = encode(self.messages[0].joined(self.messages[1:]))
        return b"[[%b],%b]" % (",".join(map(str, self.numbers)).encode(), line.rstrip(b"\n"))


@dataclass(slots=True)
class LineBundle:
    """What members have said and is to be sent as one line: once what several of them say alike."""

    _said: list[_Said] = field(default_factory=list)
    #: Where members say the same, and what each of them has said last.
    _places: dict[Hashable, int] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    _size: int = 0

    def __bool__(self) -> bool:
        return bool(self._said)

    def add(self, number: int, role: str, message: Message | None) -> bool:
        """Take in what a member says.

        Args:
            number: The member's.
            role: What it is: ranks and monitors are never joined.
            message: None for the end of its connection.

        Returns:
            False where it does not fit any more, and belongs to the next line.
        """
        line = b"null" if message is None else encode(message)
        if self._said and self._size + _NUMBERS + len(line) > LINE_LIMIT:
            return False
        self._size += _NUMBERS + len(line)
        key = (role, message and message.common)
        place = self._places.get(key, -1)
        if place <= self._last.get(number, -1):  # else it would overtake what came before
            place = self._places[key] = len(self._said)
            self._said.append(_Said([], [], line))
        self._last[number] = place
        self._said[place].numbers.append(number)
        if message is not None:
            self._said[place].messages.append(message)
        return True

    def encode(self) -> bytes:
        """The line."""
        return b'{"m":"lines","lines":[%b]}\n' % b",".join(each.encode() for each in self._said)


def encode_delivery(to: Iterable[int], line: bytes, *, close: bool = False) -> bytes:
    """A ``Delivery`` of a line that is encoded already."""
    numbers = ",".join(map(str, to)).encode()
    end = b"true" if close else b"false"
    return b'{"m":"deliver","to":[%b],"line":%b,"close":%b}\n' % (numbers, _as_text(line), end)


@lru_cache(maxsize=4)
def _as_text(line: bytes) -> bytes:
    """A line as a text in another one: the same for all relays that it goes to."""
    return dumps(line.decode().rstrip("\n"))


@cache
def _from_relay() -> TypeAdapter[Message]:
    return TypeAdapter(Annotated[RelayHello | MemberLines, Field(discriminator="m")])


@cache
def _to_relay() -> TypeAdapter[Message]:
    return TypeAdapter(Delivery)


def decode_from_relay(line: bytes) -> Message:
    """What a relay told the hub; ``ControlChannelError`` for anything else."""
    message = decode_by(_from_relay(), line)
    if isinstance(message, MemberLines):
        for numbers, said in message.lines:
            if said is not None and said.columns:
                check_columns(said, len(numbers))
    return message


def decode_delivery(line: bytes) -> Delivery:
    """What the hub told a relay; ``ControlChannelError`` for anything else."""
    delivery = decode_by(_to_relay(), line)
    assert isinstance(delivery, Delivery)  # noqa: S101  there is no other
    return delivery
