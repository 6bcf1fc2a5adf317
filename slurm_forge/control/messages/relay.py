"""What the relay of a node and the hub exchange: lines of ranks and monitors, many in one.

A message that several members send is three texts, each after a tab: who they are, the message
without its columns, and the columns::

    lines <TAB> 0,1 <TAB> {"m":"beat",...} <TAB>  <TAB> 2,3 <TAB> {"m":"pulse",...} <TAB> [...]

The text of a message is the same for all nodes that send it, so the hub parses it only once.  An
empty message means that the connections ended.  The relay numbers its members, each connection
anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import GenericAlias
from typing import Any, Literal, NamedTuple, get_type_hints

from pydantic import TypeAdapter

from slurm_forge.control.messages.message import Columns, Int, Message
from slurm_forge.control.messages.protocol import decode_by, decode_text, encode, unreadable
from slurm_forge.control.session import LINE_LIMIT
from slurm_forge.json_codec import dumps

#: Room that the numbers of members take on a line, per message.
_NUMBERS = 24
_LINES = b"lines"
#: Longer texts are rarely sent by many nodes; this many of the shorter ones are cached.
_SHORT, _REMEMBERED = 512, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayHello(Message):
    """First line of a relay after the handshake: its host."""

    m: Literal["relay"] = "relay"
    host: str
    pid: Int


class Said(NamedTuple):
    """What members send together, without columns; None: their connections have ended."""

    numbers: tuple[int, ...]
    message: Message | None
    columns: Columns = ()


@dataclass(frozen=True, slots=True)
class MemberLines(Message):
    """What members sent, each in its order."""

    lines: tuple[Said, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery(Message):
    """The hub's line for members, none if empty; ``close``: they have no place here."""

    m: Literal["deliver"] = "deliver"
    to: tuple[Int, ...]
    line: str
    close: bool = False


@dataclass(slots=True)
class LineBundle:
    """Messages of members that go out as one line; equal ones are joined."""

    _said: list[dict[int, Message | None]] = field(default_factory=list)
    #: The place of each distinct message, and of each member's last one.
    _places: dict[Hashable, int] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    _size: int = 0

    def __bool__(self) -> bool:
        return bool(self._said)

    def add(self, number: int, role: str, message: Message | None) -> bool:
        """Add a member's message.

        Args:
            number: The member's.
            role: What it is: ranks and monitors are never joined.
            message: None for the end of its connection.

        Returns:
            False if it does not fit and belongs on the next line.
        """
        size = _NUMBERS + (0 if message is None else len(encode(message)))
        if self._said and self._size + size > LINE_LIMIT:
            return False
        self._size += size
        key = (role, message and message.common)
        place = self._places.get(key, -1)
        if place <= self._last.get(number, -1):  # else it would overtake an earlier message
            place = self._places[key] = len(self._said)
            self._said.append({})
        self._last[number] = place
        self._said[place][number] = message
        return True

    def encode(self) -> bytes:
        """The line."""
        return b"\t".join((_LINES, *(text for each in self._said for text in _texts(each)))) + b"\n"


def _texts(said: dict[int, Message | None]) -> tuple[bytes, bytes, bytes]:
    """In the order of the numbers, so that the hub meets equal texts again."""
    numbers = sorted(said)
    who = b",".join(b"%d" % number for number in numbers)
    messages = [message for message in map(said.__getitem__, numbers) if message is not None]
    if not messages:
        return who, b"", b""
    first, columns = messages[0], b""
    if first.columns:
        values = [message.values for message in messages]
        columns = dumps([sum(column, ()) for column in zip(*values, strict=True)])
        first = first.with_values(((),) * len(first.columns))
    return who, encode(first).rstrip(b"\n"), columns


def encode_delivery(to: Iterable[int], line: bytes, *, close: bool = False) -> bytes:
    """Encode a ``Delivery`` of a line that is encoded already."""
    numbers = ",".join(map(str, to)).encode()
    end = b"true" if close else b"false"
    return b'{"m":"deliver","to":[%b],"line":%b,"close":%b}\n' % (numbers, _as_text(line), end)


@lru_cache(maxsize=4)
def _as_text(line: bytes) -> bytes:
    """A line as a text inside another line: the same for all relays that it goes to."""
    return dumps(line.decode().rstrip("\n"))


@cache
def _hello() -> TypeAdapter[Message]:
    return TypeAdapter(RelayHello)


@cache
def _to_relay() -> TypeAdapter[Message]:
    return TypeAdapter(Delivery)


def decode_from_relay(line: bytes) -> Message:
    """Decode a relay's line; ``ControlChannelError`` for anything else."""
    word, *texts = line.removesuffix(b"\n").split(b"\t")
    if word != _LINES:
        return decode_by(_hello(), line)
    if len(texts) % 3:
        raise unreadable("a text is missing (lines)")
    parts = iter(texts)
    return MemberLines(tuple(map(_said, parts, parts, parts)))


def _said(who: bytes, text: bytes, columns: bytes) -> Said:
    numbers = _numbers(who)
    if not text:
        return Said(numbers, None)
    message = _same(text) if len(text) <= _SHORT else decode_text(text, 0)
    if not message.columns:
        return Said(numbers, message)
    kind: Any = type(message)
    values = decode_by(_columns(kind), columns)
    for column in values:
        if len(column) != len(numbers):
            why = f"it is not what {len(numbers)} members say ({kind.__name__})"
            raise unreadable(why)
    return Said(numbers, message, values)


@lru_cache(maxsize=_REMEMBERED)
def _same(text: bytes) -> Message:
    return decode_text(text, 0)


@lru_cache(maxsize=_REMEMBERED)
def _numbers(text: bytes) -> tuple[int, ...]:
    return decode_by(_ints(), b"[%b]" % text)


@cache
def _ints() -> TypeAdapter[tuple[int, ...]]:
    return TypeAdapter(tuple[Int, ...], config=Message.__pydantic_config__)


@cache
def _columns(kind: Any) -> TypeAdapter[Columns]:
    """The columns of a message alone."""
    hints = get_type_hints(kind, include_extras=True)
    types: Any = GenericAlias(tuple, tuple(hints[name] for name in kind.columns))
    return TypeAdapter(types, config=Message.__pydantic_config__)


def decode_delivery(line: bytes) -> Delivery:
    """Decode the hub's line to a relay; ``ControlChannelError`` for anything else."""
    delivery = decode_by(_to_relay(), line)
    assert isinstance(delivery, Delivery)  # noqa: S101  there is no other
    return delivery
