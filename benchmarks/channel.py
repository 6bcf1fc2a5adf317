"""What the control channel costs the process that hosts it: joining, messages, their codes.

    python -m benchmarks.channel --ranks 1024 --json channel.json

Ranks and monitors are connections of one other process; processor time is that of the hub's thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.tables import Machine, table, write_json
from slurm_forge.control import Hub
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import AuthenticatedConnection, Role, Session, dial
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.monitor import MonitorHello
from slurm_forge.control.messages.rank import Heartbeat, Hello
from slurm_forge.open_files import raise_open_files_limit

_BEAT = Heartbeat(turn=0, step=1200, begun=1201, phase="train", since_s=0.125, started=True)
_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class ChannelCosts:
    """Microseconds of the hub's processor time, but for ``join_s`` and ``join_wall_s``."""

    ranks: int
    encode_us: float
    decode_us: float
    sign_us: float
    verify_us: float
    join_s: float
    join_wall_s: float
    beat_us: float
    broadcast_us_per_peer: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--beats", type=int, default=20, help="heartbeats of each rank")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    load, began = os.getloadavg()[0], time.time()
    costs = measure(asked.ranks, asked.beats)
    machine = Machine.measured(load, began)
    rows = tuple((name, f"{value:.4g}") for name, value in asdict(costs).items())
    sys.stdout.write(f"{machine.text()}\n\n{table(('what', 'cost'), rows)}\n")
    write_json(asked.json, {"machine": asdict(machine), "channel": asdict(costs)})
    return 0


def measure(ranks: int, beats: int) -> ChannelCosts:
    """All of it, with so many ranks and as many monitors."""
    line = protocol.encode(_BEAT)
    ours, theirs = Session(b"a" * 32, b"b" * 32), Session(b"b" * 32, b"a" * 32)
    signed = iter([ours.sign(line)[:-1] for _ in range(100_000)])
    hub = Hub(world_size=ranks)
    hub.start()
    raise_open_files_limit()
    begin, ended = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _clients(hub, ranks, beats, begin[0], ended[1])
    started, cpu = time.monotonic(), _cpu(hub)
    _until(lambda: len(hub.members()) == ranks and len(hub.monitors()) == ranks)
    join_s, wall_s = _cpu(hub) - cpu, time.monotonic() - started
    cpu = _cpu(hub)
    os.write(begin[1], b"x")
    os.read(ended[0], 1)  # all is sent; what has come last is heard a moment later
    time.sleep(1.0)
    beat_s = _cpu(hub) - cpu
    publishing = time.thread_time()
    for number in range(5):
        hub.publish(f"key{number}", "value")
    broadcast_s = (time.thread_time() - publishing) / 5
    hub.close()
    os.waitpid(child, 0)
    return ChannelCosts(
        ranks=ranks,
        encode_us=_each_us(lambda: protocol.encode(_BEAT)),
        decode_us=_each_us(lambda: protocol.decode(line)),
        sign_us=_each_us(lambda: ours.sign(line)),
        verify_us=_each_us(lambda: theirs.verify(next(signed))),
        join_s=join_s,
        join_wall_s=wall_s,
        beat_us=1e6 * beat_s / (ranks * beats),
        broadcast_us_per_peer=1e6 * broadcast_s / ranks,
    )


def _clients(hub: Hub, ranks: int, beats: int, begin: int, ended: int) -> None:
    """In the child: all of them, one after the other; ends with the hub."""
    _, port = parse_addresses(hub.addresses)
    line = protocol.encode(_BEAT)

    def connected(role: Role, hello: bytes) -> AuthenticatedConnection:
        return dial(
            ("127.0.0.1",), port, hub.credentials, role, hello, who="it", within_s=_WITHIN_S
        )

    try:
        members, monitors = [], []
        for rank in range(ranks):
            me = {"rank": rank, "world": ranks, "host": f"n{rank}", "pid": 1}
            members.append(connected(Role.RANK, protocol.encode(Hello(**me))))  # type: ignore[arg-type]
            monitors.append(connected(Role.MONITOR, protocol.encode(MonitorHello(**me))))  # type: ignore[arg-type]
        os.read(begin, 1)
        for _ in range(beats):
            for member in members:
                member.send(line)
        os.write(ended, b"x")
        for member in members:
            while member.socket.recv(1 << 16):
                pass
    finally:
        os._exit(0)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def _cpu(hub: Hub) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(hub._thread.ident or 0))


def _each_us(call: Callable[[], object], times: int = 10_000) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            call()
        best = min(best, time.perf_counter() - began)
    return 1e6 * best / times


if __name__ == "__main__":
    sys.exit(main())
