"""The supervisor's end of the agents' channel: a connection per rank, over all launches of a step.

It stores what agents report; the code that starts launches reads it from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slurm_forge.control.handshake import Credentials, Role
from slurm_forge.control.listener import Listener, Peer
from slurm_forge.control.messages.agent import (
    AgentHello,
    AgentNotice,
    AgentReady,
    AgentShutdown,
    KillWorker,
    StartWorker,
    WorkerEnded,
    WorkerStarted,
    decode_agents,
)
from slurm_forge.control.messages.message import Message
from slurm_forge.control.session import AuthenticatedConnection

_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How a rank's worker ended, and when the hub received it (monotonic clock of the hub)."""

    rank: int
    host: str
    at: float
    message: WorkerEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """What is known of a rank's agent; ``begun`` is the last launch that it started."""

    rank: int
    host: str
    pid: int
    connected: bool = True
    ready: bool = False
    begun: int = 0
    worker: int = 0
    how: str = ""


@dataclass(slots=True)
class _Agent(Peer):
    host: str = ""
    pid: int = 0
    ready: bool = False
    begun: int = 0
    worker: int = 0
    how: str = ""
    has_spoken: bool = False


class AgentsHub(Listener[_Agent]):
    """Listens for the agents of one step.  ``on_notice`` is called on its thread.

    ``interface_address`` is the name or address of this node that is tried first.
    """

    def __init__(
        self,
        *,
        world_size: int,
        on_notice: Callable[[int, str], None],
        credentials: Credentials | None = None,
        interface_address: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            world_size=world_size,
            credentials=credentials,
            name="forge-agents",
            tick_s=_TICK_S,
            interface_address=interface_address,
            clock=clock,
        )
        self._on_notice = on_notice
        self._agents: dict[int, _Agent] = {}  # by rank, including those that are gone
        self._ends: list[AgentEnd] = []
        self._order: StartWorker | None = None
        self.start()

    def begin(self, order: StartWorker) -> None:
        """Make every agent start its rank of a launch, including agents that connect later."""
        with self._lock:
            self._order = order
            self._broadcast(order)

    def end(self, launch: int) -> None:
        """Make every agent kill its worker of this launch; agents that never began it ignore it."""
        with self._lock:
            self._order = None
            self._broadcast(KillWorker(launch=launch))

    def leave(self) -> None:
        """No launch follows: every agent kills what is still running and exits."""
        with self._lock:
            self._order = None
            self._broadcast(AgentShutdown())

    def ends(self, launch: int) -> tuple[AgentEnd, ...]:
        """How workers of a launch have ended so far, in the order of arrival."""
        with self._lock:
            return tuple(end for end in self._ends if end.message.launch == launch)

    def agents(self) -> dict[int, AgentView]:
        """What is known of every agent that ever connected."""
        with self._lock:
            return {
                rank: AgentView(
                    rank=rank,
                    host=agent.host,
                    pid=agent.pid,
                    connected=agent.connection.fileno() >= 0,
                    ready=agent.ready,
                    begun=agent.begun,
                    worker=agent.worker,
                    how=agent.how,
                )
                for rank, agent in self._agents.items()
            }

    def _broadcast(self, message: Message) -> None:
        for agent in list(self._agents.values()):
            self._send(agent, message)

    # -- the serving thread --------------------------------------------------------------------

    def _let_in(self, connection: AuthenticatedConnection, address: str) -> _Agent:
        return _Agent(connection, self._clock(), address)

    def _decode(self, peer: _Agent, line: bytes) -> Message:
        return decode_agents(line)

    def _on_closed(self, peer: _Agent) -> None:
        """The connection is closed; ``agents`` shows it."""

    def _tick(self, now: float) -> None:
        """Nothing is scheduled here."""

    def _take(self, peer: _Agent, message: Message) -> None:
        if peer.rank is None:
            self._greet(peer, message)
            return
        peer.has_spoken = True
        match message:
            case AgentReady():
                peer.ready = True
            case WorkerStarted():
                peer.begun, peer.worker, peer.how = message.launch, message.pid, message.how
            case WorkerEnded():
                self._ends.append(AgentEnd(peer.rank, peer.host, self._clock(), message))
            case AgentNotice():
                self._on_notice(peer.rank, message.what)
            case _:
                pass

    def _greet(self, peer: _Agent, message: Message) -> None:
        if not isinstance(message, AgentHello):
            self._drop(peer)
            return
        if not self._accepts(peer, Role.AGENT, message.world, message.rank):
            return
        before = self._agents.get(message.rank)
        # An agent that did not get its welcome in time connects again.
        if before is not None and (before.has_spoken or before.connection.fileno() >= 0):
            self._refuse(peer, f"the agent of rank {message.rank} has connected before")
            return
        if not self._welcome(peer):
            return
        peer.rank, peer.host, peer.pid = message.rank, message.host, message.pid
        self._agents[message.rank] = peer
        if self._order is not None:
            self._send(peer, self._order)
