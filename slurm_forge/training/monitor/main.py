"""The monitor of a rank: a process beside the worker that reports its progress to the hub.

The process ``witness RUN …``, started by the worker (``training.monitor.client``).  It needs
neither the lock of the worker's interpreter nor torch, and ends with the worker or the launch.

``RankMonitor`` itself takes part in its caller's loop: descriptors to wait for, and a tick.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.clock_page import ClockReader
from slurm_forge.control.handshake import Credentials, Role, dial
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.links import PortReport, QueryLinks
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import (
    MonitorHeartbeat,
    MonitorHello,
    PhaseDuration,
    StackReport,
    TakeStacks,
)
from slurm_forge.control.messages.rank import heartbeat_every_s, next_heartbeat
from slurm_forge.control.session import AuthenticatedConnection
from slurm_forge.control.stack_text import essence
from slurm_forge.control.tcp.links import (
    say_links,
    summarize,
)
from slurm_forge.control.tcp.own_connections import connection_of
from slurm_forge.errors import ControlChannelError, ForgeError
from slurm_forge.files import make_private_directory, write_atomic
from slurm_forge.knobs import Knobs
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.last_words import LastWords, write_last_words
from slurm_forge.signals import signal_name
from slurm_forge.slurm.kernel import killed_since, read_oom_kills
from slurm_forge.training.monitor.flight_recorder import (
    dump_into,
    forget,
)
from slurm_forge.training.monitor.netlink import (
    connections_of,
    own_addresses,
)
from slurm_forge.training.monitor.port_counters import PortCounters
from slurm_forge.training.monitor.procfs import (
    exit_status,
    read_process,
)
from slurm_forge.training.monitor.stacks import StackDumper
from slurm_forge.vocabulary.cause import Cause

_TICK_S = 1.0
#: A tick this late means that the monitor was stopped, too, usually with the whole job.
_GAP_S = 1.5
_COLD = frozenset({"start", "load"})
_CONNECT_WITHIN_S = 10.0
_SEND_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What to watch: the worker's process, its clock page, where it dumps stacks.

    ``alone_after`` is set for the rank that hosts the conductor: after this many seconds without a
    running Python thread in it, the monitor ends it, since nobody else is left who could.
    """

    pid: int
    page: int
    dump: int | None
    pidfd: int | None
    rank: int
    world_size: int
    host: str
    credentials: Credentials
    hosts: tuple[str, ...]
    port: int
    run: RunDirectory
    attempt: int
    launch: int
    alone_after: float | None = None
    #: Only the monitor can report how that rank ended: there is no Slurm to query.
    tells_end: bool = False
    #: The directory of NCCL's flight recorder, if there is one.
    recorder: str = ""


class RankMonitor:
    """Reads once a second, and reports.  ``over`` once the worker or the channel is gone."""

    def __init__(self, subject: Subject, clock: Callable[[], float] = time.monotonic) -> None:
        self._subject = subject
        self._clock = clock
        self._reader = ClockReader(subject.page)
        self._taker = StackDumper(
            subject.pid, subject.dump, thread=lambda: self._reader.alive().thread
        )
        self._connection: AuthenticatedConnection | None = None
        self._ticked = self._next = self._next_beat = clock()
        #: When the monitor itself was last stopped: (until, for how long).
        self._pauses: list[tuple[float, float]] = []
        self._ports = PortCounters()
        self._kills = read_oom_kills()
        self._has_told = False
        self.over = False
        hello = MonitorHello(
            rank=subject.rank, world=subject.world_size, host=subject.host, pid=subject.pid
        )
        try:
            self._connection = dial(
                subject.hosts,
                subject.port,
                subject.credentials,
                Role.MONITOR,
                protocol.encode(hello),
                who=f"the monitor of rank {subject.rank}",
                within_s=_CONNECT_WITHIN_S,
            )
        except ControlChannelError:
            self.over = subject.alone_after is None
            return
        self._connection.socket.settimeout(_SEND_WITHIN_S)
        self._say_links(0)

    def descriptors(self) -> tuple[int, ...]:
        """The descriptors to wait for."""
        own = () if self._connection is None else (self._connection.fileno(),)
        return own if self._subject.pidfd is None else (*own, self._subject.pidfd)

    def ready(self, descriptor: int) -> None:
        """One of the descriptors is readable.  May take a few seconds: stacks are taken here."""
        if descriptor == self._subject.pidfd:
            self.over = True
        elif self._connection is not None and descriptor == self._connection.fileno():
            self._receive(self._connection)

    def tick(self) -> float:
        """Do what is due; seconds until the next call."""
        now = self._clock()
        if now < self._next:
            return self._next - now
        late = now - self._ticked - _TICK_S
        if late > _GAP_S:
            self._pauses = [*self._pauses[-31:], (now, late)]
        self._ticked, self._next = now, next_heartbeat(now, _TICK_S)
        facts = read_process(self._subject.pid)
        if facts.state in ("", "X"):
            self.over = True
            return 0.0
        self._report(now)
        counted = self._ports.counted()
        if counted is not None:
            self._send(PortReport(id=counted.number, lines=counted.lines))
        self._judge_alone(now, facts.state)
        return self._next - now

    # -- telling -----------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        record = self._reader.moved()
        if record is None:
            return
        for each in self._reader.lasted():
            self._send(PhaseDuration(kind=each.kind, seconds=round(each.seconds, 3)))
        if now < self._next_beat:
            return
        self._next_beat = next_heartbeat(now, heartbeat_every_s(self._subject.world_size))
        facts = read_process(self._subject.pid)
        place = record.position
        self._send(
            MonitorHeartbeat(
                turn=place.rollbacks,
                step=place.step,
                begun=record.begun,
                phase_no=place.phase,
                poll=place.poll,
                phase=record.phase,
                kind=record.kind,
                since_s=(round(self._since(record.at, now), 3),),
                mute_s=(round(self._mute(now), 3),),
                state=(facts.state,),
            )
        )

    def _since(self, then: float, now: float) -> float:
        """The age of that time, without the time in which the monitor itself was stopped."""
        stopped = sum(min(gap, until - then) for until, gap in self._pauses if until > then)
        return max(0.0, now - then - stopped)

    def _mute(self, now: float) -> float:
        alive = self._reader.alive()
        return self._since(alive.at, now) if alive.thread else 0.0

    def _send(self, message: Message) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(protocol.encode(message))
        except OSError:
            self._lose()

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        # The host of the conductor takes the channel with it: then only its monitor is left.
        self.over = self.over or self._subject.alone_after is None

    def _receive(self, connection: AuthenticatedConnection) -> None:
        try:
            messages = [protocol.decode(connection.verify(line)) for line in connection.receive()]
        except (OSError, EOFError, ControlChannelError):
            self._lose()
            return
        for message in messages:
            if isinstance(message, TakeStacks):
                self._take(message.id, message.attempt, message.launch)
            elif isinstance(message, QueryLinks):
                self._say_links(message.id)
                self._ports.read_again(message.id)

    def _say_links(self, number: int) -> None:
        """Report the worker's connections, and ours; 0: only this host's addresses."""
        here = self._connection
        own = None if here is None else connection_of(here.socket)
        connections = connections_of(self._subject.pid) if number else ()
        addresses = own_addresses() or (() if own is None else (own.local,))
        links = summarize((*(connections or ()), *(() if own is None else (own,))))
        how = "refused" if connections is None else "witness"
        self._send(say_links(number, addresses, links, how=how))

    def _take(self, number: int, attempt: int, launch: int) -> None:
        dump = self._taker.take()
        # Sent before it is stored: a file system that does not answer may be the problem.
        self._send(
            StackReport(
                id=number,
                how=dump.how,
                state=dump.facts.state,
                cpu_s=dump.facts.cpu_s,
                file=str(self._file(attempt, launch).relative_to(self._subject.run.path)),
                text=essence(dump.stacks),
            )
        )
        self._write(dump.whole, attempt, launch)
        self._ticked = self._clock()  # the time this took is no pause

    def _file(self, attempt: int, launch: int) -> Path:
        return self._subject.run.stacks(attempt, launch) / f"rank-{self._subject.rank:05d}.txt"

    def _write(self, text: str, attempt: int, launch: int) -> str:
        """Store the stacks with the attempt; the path relative to the run, or an empty text."""
        run, rank = self._subject.run, self._subject.rank
        path = self._file(attempt, launch)
        head = f"rank {rank} on {self._subject.host}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n"
        try:
            if not path.parent.is_dir():
                for folder in (run.attempt(attempt), path.parent.parent, path.parent):
                    make_private_directory(folder)
            write_atomic(path, (head + text).encode(errors="replace"), durable=False)
            if self._subject.recorder:
                dump_into(self._subject.recorder, rank, path.with_name(f"nccl-{rank:05d}"))
        except (OSError, ForgeError) as error:
            sys.stderr.write(f"slurm_forge: stacks of rank {rank} can't be kept: {error}\n")
            return ""
        return str(path.relative_to(run.path))

    # -- alone -------------------------------------------------------------------------------

    def _judge_alone(self, now: float, state: str) -> None:
        """End a worker whose conductor is as dead as itself, so that its starter can continue.

        Not if a debugger holds it: a person is examining it.
        """
        after, subject = self._subject.alone_after, self._subject
        if after is None or state in ("t", "Z") or self._mute(now) < after:
            return
        record = self._reader.moved()
        # Libraries are loaded with the lock held, possibly from a slow file system.
        if record is not None and record.kind in _COLD and self._mute(now) < 3 * after:
            return
        dump = self._taker.take()
        file = self._write(dump.whole, subject.attempt, subject.launch)
        text = (
            f"no Python thread of it ran for {self._mute(now):.0f} s (state {dump.facts.state}): "
            f"stopped, or C code holds the interpreter's lock; ended by its monitor ({file})"
        )
        sys.stderr.write(f"slurm_forge: rank {subject.rank}: {text}\n")
        self._leave_words("hang", text, dump.stacks, Cause.HANG)
        with contextlib.suppress(OSError):
            os.kill(subject.pid, signal.SIGKILL)
        self.over = True

    def tell_end(self) -> None:
        """The worker ended without a report: leave one on how it ended, and its last step."""
        if not self._subject.tells_end or self._has_told:
            return
        status, cause = exit_status(self._subject.pid), Cause.CRASH
        text = "ended without a message" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            text = f"killed by {signal_name(-status)}"
            memory = killed_since(self._kills, read_oom_kills())
            if -status == signal.SIGKILL and memory:
                text, cause = f"{text}: {memory}", Cause.HOST_OOM
        self._leave_words("killed", text, "", cause)

    def _leave_words(self, error: str, text: str, trace: str, cause: Cause) -> None:
        self._has_told = True
        subject, record = self._subject, self._reader.moved()
        with contextlib.suppress(OSError, ForgeError):
            write_last_words(
                subject.run,
                subject.attempt,
                subject.launch,
                LastWords(
                    rank=subject.rank,
                    host=subject.host,
                    time=time.time(),
                    step=0 if record is None else max(0, record.position.step),
                    phase="start" if record is None else record.phase,
                    error=error,
                    text=text,
                    trace=trace,
                    cause=cause.value,
                    micro_batch=0,
                ),
            )


def main(argv: Sequence[str] | None = None) -> None:
    """``RUN`` and the arguments that ``MonitorClient.start`` adds."""
    # The worker answers signals to the whole group; this process ends with the worker.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    words = list(sys.argv[1:] if argv is None else argv)
    run, pid, page, dump, pidfd, rank, world, host, attempt, launch, recorder, *words = words
    alone, channel = words
    hosts, port = parse_addresses(channel)
    # From standard input: everybody can read an argument list.
    nonce, secret = (sys.stdin.readline().strip() for _ in range(2))
    subject = Subject(
        pid=int(pid),
        page=int(page),
        dump=_descriptor(dump),
        pidfd=_descriptor(pidfd),
        rank=int(rank),
        world_size=int(world),
        host=host,
        credentials=Credentials(nonce, secret),
        hosts=hosts,
        port=port,
        run=RunDirectory.at(run),
        attempt=int(attempt),
        launch=int(launch),
        alone_after=float(alone) or None,
        tells_end=bool(float(alone)) and Knobs.from_environ(os.environ).lifeline,
        recorder=recorder,
    )
    monitor = RankMonitor(subject)
    with selectors.DefaultSelector() as selector:
        registered: tuple[int, ...] = ()
        while not monitor.over and os.getppid() == subject.pid:
            if monitor.descriptors() != registered:
                for descriptor in registered:
                    with contextlib.suppress(KeyError, ValueError, OSError):
                        selector.unregister(descriptor)
                registered = monitor.descriptors()
                for descriptor in registered:
                    selector.register(descriptor, selectors.EVENT_READ)
            for key, _ in selector.select(timeout=monitor.tick()):
                monitor.ready(key.fd)
    monitor.tell_end()
    if recorder:
        forget(recorder)


def _descriptor(text: str) -> int | None:
    return int(text) if text != "-" else None


if __name__ == "__main__":
    main()
