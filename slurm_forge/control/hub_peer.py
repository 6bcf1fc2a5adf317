"""The other end of a hub's connection: a rank, a monitor, or a relay with its members."""

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
    """Ranks, or monitors, that share a message."""

    ranks: Speakers[Heartbeat, MemberView] | None = None
    monitors: Speakers[MonitorHeartbeat, MonitorView] | None = None


@dataclass(slots=True)
class HubPeer(Peer):
    """A connection to the hub, or a member's share of its relay's connection."""

    #: The rank whose monitor it is: it is no member and gets only requests for monitors.
    monitor: int | None = None
    #: For a relay: its members, by its own numbers.
    members: dict[int, HubPeer] | None = None
    #: For a relay: the groups of members that sent a message together lately.
    groups: dict[tuple[int, ...], HubGroup] | None = None
    #: For a member of a relay: that relay, and its number there.
    relay: HubPeer | None = None
    number: int = 0

    @property
    def stranger(self) -> bool:
        """Whether it has not identified itself yet."""
        return self.rank is None and self.monitor is None and self.members is None

    @property
    def speaks_for(self) -> int | None:
        """The rank that it is or watches; for a relay, one of its ranks."""
        peer = next(iter((self.members or {}).values()), self)
        return peer.rank if peer.monitor is None else peer.monitor


class RelayedConnection(AuthenticatedConnection):
    """The connection of a relay's member, as the hub uses it: through the relay."""

    __slots__ = ("_number", "_relay")

    def __init__(self, relay: AuthenticatedConnection, number: int) -> None:
        super().__init__(relay.socket)
        self._relay, self._number = relay, number

    def close(self) -> None:
        """Have the relay close it; a relay that is gone has done so."""
        with contextlib.suppress(OSError):
            self._relay.send(encode_delivery((self._number,), b"", close=True))

    def send(self, line: bytes) -> None:
        """Send a line of the session; ``OSError`` where the relay is gone."""
        self._relay.send(encode_delivery((self._number,), line))
