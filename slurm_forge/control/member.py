"""A rank's end of the control channel.

A reader thread answers requests as they arrive, whatever the main thread is doing; the main thread
calls ``advance`` at every position it passes, which returns what is due there.  Without a pending
request ``advance`` takes a lock and compares two tuples; nothing is sent.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from slurm_forge.control.clock_page import ProgressClock
from slurm_forge.control.gathering import RankAgreement
from slurm_forge.control.handshake import Credentials, Role, dial
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.hub import (
    Abort,
    Publish,
    Request,
    RequestTarget,
    RequestWithdrawn,
    TimeLeft,
)
from slurm_forge.control.messages.links import QueryLinks
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import (
    Heartbeat,
    Hello,
    heartbeat_every_s,
    is_last,
    next_heartbeat,
)
from slurm_forge.control.tcp.links import (
    say_links,
    summarize,
)
from slurm_forge.control.tcp.own_connections import own_connections
from slurm_forge.errors import ControlChannelError
from slurm_forge.vocabulary.position import Position

#: Why a member leaves when its channel ended without a message: the host or the network failed.
HUB_GONE = "the hub is gone"

#: Interval at which the reader marks the process as alive; heartbeats go every one or two of these.
_BEAT_S = 1.0
#: How long a rank that has said how it ended may take to leave once the channel has ended.
_LEAVES_WITHIN_S = 5.0


class Member:
    """Connects a rank to the hub.  ``on_abort`` is called on the reader thread, once.

    Losing the hub counts as an abort: without it ranks can't agree on anything any more.  A rank
    that has sent its last message is given time to leave by itself, with its own exit status.
    Until the hub has welcomed the rank, both raise ``ControlChannelError`` in the constructor.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        credentials: Credentials,
        hosts: Sequence[str],
        port: int,
        host: str,
        pid: int,
        on_abort: Callable[[str], None],
        connect_within_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        progress: ProgressClock | None = None,
    ) -> None:
        self._rank = rank
        self._beat_s = _BEAT_S * heartbeat_every_s(world_size)
        #: Where this rank publishes its progress for observers in other processes.
        self._progress = progress
        self._on_abort = on_abort
        self._clock = clock
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._send_lock = threading.Lock()
        self._agreement = RankAgreement()
        self._started = False
        self._begun = 0
        self._rewound: Position | None = None
        self._phase = "start"
        self._published: dict[str, str] = {}
        self._ends_at: float | None = None
        self._closing = self._leaving = False
        self._lost = ""
        hello = Hello(rank=rank, world=world_size, host=host, pid=pid)
        self._connection = dial(
            hosts,
            port,
            credentials,
            Role.RANK,
            protocol.encode(hello),
            who=f"rank {rank}",
            within_s=connect_within_s,
        )
        self._thread = threading.Thread(target=self._serve, name="forge-channel", daemon=True)
        self._thread.start()

    # -- for the main thread ---------------------------------------------------------------

    def advance(
        self,
        position: Position,
        path: str = "",
        *,
        entering: bool = False,
        phase: str = "",
        wait_s: float = 60.0,
    ) -> tuple[Request, ...]:
        """Pass ``position``; the requests that are due there, in the same order on all ranks.

        ``path`` names the phases since the boundary, such as ``/eval/data``.  Waits while a request
        has no target yet.  ``entering`` a phase with a target behind it asks all ranks again, so
        that a stop need not wait for the end of a long evaluation.  ``phase`` is what the main
        thread does from there on, as for ``enter``.
        """
        if phase and (phase != self._phase or not self._started):
            self._does(phase, started=True)
        self._begun = max(self._begun, position[0])
        if self._progress is not None:
            self._progress.advance(position, phase)
        with self._lock:
            agreement = self._agreement
            if not agreement.pending:  # every ordinary step
                agreement.position, agreement.path = position, path
                return ()
            for answer in agreement.arrive(position, path, entering=entering):
                self.send(answer)
            deadline = self._clock() + wait_s
            while agreement.blocked:
                left = deadline - self._clock()
                if left <= 0 or self._lost:
                    raise ControlChannelError(
                        f"rank {self._rank} waited {wait_s:.0f} s for the others to agree on a "
                        f"step ({self._lost or 'no target came'})",
                        next_step="The launch is ended; the run continues from its last "
                        "checkpoint, or from the start if it has none.",
                    )
                self._condition.wait(min(left, 1.0))
            return agreement.go_on()

    def enter(self, phase: str, *, started: bool = True) -> None:
        """Set what the main thread is doing from now on; the next heartbeat reports it.

        The first ``train`` is sent at once: a stop requested before the conductor knows that
        training has begun would end the launch without a save.
        """
        if self._progress is not None:
            self._progress.enter(phase)
        self._does(phase, started=started)

    def _does(self, phase: str, *, started: bool) -> None:
        self._phase = phase
        if started and not self._started:
            self._started = True
            self.send(self._beat())

    def rewound(self, position: Position) -> None:
        """Training continues from ``position`` after a rollback; sent at once.

        Otherwise the steps begun before would look like steps beyond those of the other ranks.
        """
        self._rewound, self._begun = position, position.step
        if self._progress is not None:
            self._progress.rewound(position)
        self.send(self._beat())

    def begin(self, step: int) -> None:
        """The main thread begins its ``step``th step (for heartbeats; nothing is sent here).

        Called only where the beginning is known; a step whose end is passed has begun.
        """
        self._begun = step
        if self._progress is not None:
            self._progress.begin(step)

    @property
    def pending(self) -> bool:
        """Whether a request is not done yet."""
        return bool(self._agreement.pending)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the launch is ended, if that is known; never below 0."""
        ends_at = self._ends_at
        return None if ends_at is None else max(0.0, ends_at - self._clock())

    def send(self, message: Message) -> None:
        """Send a message to the conductor.  A lost channel is not an error here."""
        self._leaving = self._leaving or is_last(message)
        try:
            self._send(message)
        except OSError:
            self._lost = self._lost or "the channel is closed"

    def published(self, key: str, wait_s: float) -> str:
        """Wait for the value that a rank publishes under ``key``, and return it."""
        deadline = self._clock() + wait_s
        with self._condition:
            while key not in self._published:
                left = deadline - self._clock()
                if left <= 0 or self._lost:
                    raise ControlChannelError(
                        f"rank {self._rank} waited {wait_s:.0f} s for {key} "
                        f"({self._lost or 'rank 0 did not publish it'})",
                        next_step="Check the log of rank 0: it failed or is still starting.",
                    )
                self._condition.wait(min(left, 1.0))
            return self._published[key]

    def close(self) -> None:
        """Leave on purpose: from here on the end of the channel means nothing."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        with contextlib.suppress(OSError):  # already gone
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=2)
        self._connection.close()

    # -- the reader thread -----------------------------------------------------------------

    def _serve(self) -> None:
        try:
            reason = self._read()
        except Exception as error:
            # Any error at all: a rank with a dead reader would never get another message.
            reason = f"the reader of the channel failed: {error!r}"
        self._end(reason)

    def _read(self) -> str:
        """Serve until the channel ends; return why it did."""
        next_turn = next_beat = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while not self._closing:
                now = self._clock()
                if now >= next_turn:
                    next_turn = next_heartbeat(now, _BEAT_S)
                    if self._progress is not None:
                        self._progress.alive()
                if now >= next_beat:
                    next_beat = next_heartbeat(now, self._beat_s)
                    self.send(self._beat())
                if not selector.select(timeout=max(0.0, min(next_turn, next_beat) - now)):
                    continue
                try:
                    lines = self._connection.receive()
                except (OSError, EOFError):
                    return HUB_GONE
                for line in lines:
                    reason = self._take(protocol.decode(self._connection.verify(line)))
                    if reason:
                        return reason
        return "closed"

    def _beat(self) -> Heartbeat:
        position = self._agreement.position
        if self._rewound is not None and self._rewound > position:
            position = self._rewound
        return Heartbeat(
            turn=position.rollbacks,
            step=position.step,
            begun=self._begun,
            phase=self._phase,
            started=self._started,
        )

    def _take(self, message: Message) -> str:
        """Act on a message; return why the channel ends, or nothing."""
        match message:
            case Request():
                with self._condition:
                    answer = self._agreement.on_request(message)
                    if answer is not None:
                        self.send(answer)
                    self._condition.notify_all()
            case RequestTarget():
                with self._condition:
                    answer = self._agreement.on_target(message)
                    if answer is not None:
                        self.send(answer)
                    self._condition.notify_all()
            case RequestWithdrawn():
                with self._condition:
                    self._agreement.withdrawn(message.id)
                    self._condition.notify_all()
            case Publish():
                with self._condition:
                    self._published[message.key] = message.value
                    self._condition.notify_all()
            case TimeLeft():
                self._ends_at = self._clock() + message.seconds
            case QueryLinks():
                connections = own_connections()
                own = tuple(dict.fromkeys(each.local for each in connections))
                self.send(say_links(message.id, own, summarize(connections), how="rank"))
            case Abort():
                return message.reason or "the hub ended the launch"
            case _:
                pass
        return ""

    def _end(self, reason: str) -> None:
        with self._condition:
            self._lost = self._lost or reason
            self._condition.notify_all()
            if self._leaving:
                self._condition.wait_for(lambda: self._closing, _LEAVES_WITHIN_S)
            wanted, self._closing = self._closing, True
        if not wanted:
            self._on_abort(reason)

    def _send(self, message: Message) -> None:
        data = protocol.encode(message)
        with self._send_lock:
            self._connection.send(data)
