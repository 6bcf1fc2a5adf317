"""Who is at the other end of a hub's connection: a rank, a monitor, or a relay with its members."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

from slurm_forge.control.listener import Peer
from slurm_forge.control.messages.monitor import MonitorHeartbeat
from slurm_forge.control.messages.rank import Heartbeat
from slurm_forge.control.messages.relay import encode_delivery
from slurm_forge.control.roster import MemberView, MonitorView, Speakers
from slurm_forge.control.session import AuthenticatedConnection


class HubGroup(NamedTuple):
    """Ranks that share a message, or monitors."""

    ranks: Speakers[Heartbeat, MemberView] | None = None
    monitors: Speakers[MonitorHeartbeat, MonitorView] | None = None


@dataclass(slots=True)
class HubPeer(Peer):
    """A connection to the hub, or a member's part of that of its relay."""

    #: The rank whose monitor it is: it counts for no membership and is asked for nothing else.
    monitor: int | None = None
    #: Of a relay: its members, by its own numbers.
    members: dict[int, HubPeer] | None = None
    #: Of a relay: who of them has said something together lately.
    groups: dict[tuple[int, ...], HubGroup] | None = None
    #: Of a member: the relay that it speaks through, and its number there.
    relay: HubPeer | None = None
    number: int = 0

    @property
    def stranger(self) -> bool:
        """Whether it has not said yet who it is."""
        return self.rank is None and self.monitor is None and self.members is None

    @property
    def speaks_for(self) -> int | None:
        """The rank that it is or watches; of a relay one of its ranks."""
        peer = next(iter((self.members or {}).values()), self)
        return peer.rank if peer.monitor is None else peer.monitor


class RelayedConnection(AuthenticatedConnection):
    """A member's connection, as far as it is the hub's: through that of its relay."""

    __slots__ = ("_number", "_relay")

    def __init__(self, relay: AuthenticatedConnection, number: int) -> None:
        super().__init__(relay.socket)
        self._relay, self._number = relay, number

    def close(self) -> None:
        """The relay ends it; one that is gone has ended it already."""
        with contextlib.suppress(OSError):
            self._relay.send(encode_delivery((self._number,), b"", close=True))

    def send(self, line: bytes) -> None:
        """Send a line of the session; ``OSError`` where the relay is gone."""
        self._relay.send(encode_delivery((self._number,), line))
