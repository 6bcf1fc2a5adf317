"""What the control channel and the conductor cost the supervisor, with real processes and sockets.

    python -m benchmarks.channel --ranks 256 1024 4096 [--direct] --json channel.json

The conductor of a launch, with its journal and all that it watches at the defaults of a job file,
conducts ranks and monitors that other processes on this machine play, four ranks a node: they join,
pass a preflight, train, answer a probe, save, and stop.  Times are of the supervisor's processor
unless a name says otherwise; its wall times hold what the ranks need of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from benchmarks.channel_members import RANKS_PER_NODE, Members
from benchmarks.tables import Machine, table, write_json
from slurm_forge.control import Hub
from slurm_forge.control.hub_events import HubEvent, TargetAgreed
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.rank import Heartbeat
from slurm_forge.control.session import Session
from slurm_forge.descendants import die_with_parent
from slurm_forge.journal import JournalWriter, RunState
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.render.schedule import timing
from slurm_forge.open_files import raise_open_files_limit
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping

_BEAT = Heartbeat(turn=0, step=1200, begun=1201, phase="train", started=True)
_WITHIN_S = 900.0
_PROCESSES = 4


@dataclass(frozen=True, slots=True)
class LineCosts:
    """Microseconds of one heartbeat."""

    encode_us: float
    decode_us: float
    sign_us: float
    verify_us: float


@dataclass(frozen=True, slots=True)
class ChannelCosts:
    """Of one launch; ``_s`` are seconds of the supervisor's processor, ``_wall_`` of the clock.

    ``steady_percent`` is the share of a core in the steady state, a probe a minute included.
    ``probe_verdict_wall_ms`` is from the last rank's part of the probe to the verdict.
    """

    ranks: int
    connections: int
    join_s: float
    join_wall_s: float
    preflight_s: float
    preflight_wall_s: float
    steady_percent: float
    probe_s: float
    probe_verdict_wall_ms: float
    save_agreed_wall_ms: float
    stop_agreed_wall_ms: float
    stop_s: float
    rss_mib: float


class _WatchedHub(Hub):
    """Keeps when targets were agreed."""

    def __init__(self, *, world_size: int) -> None:
        super().__init__(world_size=world_size)
        self.agreed: dict[RequestKind, float] = {}
        put = self.events.put

        def keep(event: HubEvent) -> None:
            if isinstance(event, TargetAgreed):
                self.agreed[event.request.kind] = 1e3 * event.seconds
            put(event)

        self.events = _Events(keep, self.events.get)  # type: ignore[assignment]


class _Events:
    def __init__(self, put: Callable[..., None], get: Callable[..., HubEvent]) -> None:
        self.put, self.get = put, get

    def get_nowait(self) -> HubEvent:
        return self.get(False)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument(
        "--direct", action="store_true", help="a connection for each rank and each monitor"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of the steady state")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    load, began = os.getloadavg()[0], time.time()
    lines = measure_lines()
    costs = [_in_own_process(ranks, asked.seconds, asked.direct) for ranks in asked.ranks]
    machine = Machine.measured(load, began)
    rows = [(name, f"{value:.4g}") for name, value in asdict(lines).items()]
    columns = [asdict(each) for each in costs]
    names = tuple(columns[0])[1:]
    many = [(name, *(f"{each[name]:.4g}" for each in columns)) for name in names]
    sys.stdout.write(
        f"{machine.text()}\n\n{table(('a heartbeat', 'cost'), rows)}\n\n"
        f"{table(('ranks', *(str(each) for each in asked.ranks)), many)}\n"
    )
    both = {"machine": asdict(machine), "lines": asdict(lines), "channel": columns}
    write_json(asked.json, both)
    return 0


def measure_lines() -> LineCosts:
    """What each line costs whoever says or hears it."""
    line = protocol.encode(_BEAT)
    ours, theirs = Session(b"a" * 32, b"b" * 32), Session(b"b" * 32, b"a" * 32)
    signed = iter([ours.sign(line)[:-1] for _ in range(100_000)])
    return LineCosts(
        encode_us=_each_us(lambda: protocol.encode(_BEAT)),
        decode_us=_each_us(lambda: protocol.decode(line)),
        sign_us=_each_us(lambda: ours.sign(line)),
        verify_us=_each_us(lambda: theirs.verify(next(signed))),
    )


def _in_own_process(ranks: int, seconds: float, direct: bool) -> ChannelCosts:
    """So that memory and processor time are those of this launch alone."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_supervise, args=(ranks, seconds, direct, theirs.send)
    )
    process.start()
    theirs.close()
    costs: ChannelCosts = ours.recv()
    process.join()
    return costs


def _supervise(
    ranks: int, seconds: float, direct: bool, tell: Callable[[ChannelCosts], None]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tell(measure(ranks, seconds, RunDirectory(Path(folder)), direct=direct))


def measure(ranks: int, seconds: float, run: RunDirectory, *, direct: bool) -> ChannelCosts:
    """All of it, with so many ranks and as many monitors."""
    run.journal.mkdir(parents=True)
    job = job_from_mapping({"name": "channel", "entry": "a:b"})
    hub = _WatchedHub(world_size=ranks)
    raise_open_files_limit()
    probed = multiprocessing.Value("d", 0.0)
    with _members(hub, ranks, probed, relayed=not direct) as begin:
        hub.start()
        conductor = Conductor(
            hub,
            journal=JournalWriter(run, attempt=1, writer="supervisor", launch=1),
            job_poller=JobPoller(None, "1"),
            timing=timing(job, state=RunState(), now=time.time()),
            stop_file=run.stop_file,
            save_file=run.save_file,
            launched=None,
        )
        conducting = threading.Thread(target=conductor.watch)
        conducting.start()
        began, cpu = time.monotonic(), time.process_time()
        begin()
        # Not by views of each rank, which cost more than joining does.
        _until(lambda: len(hub._ranks) == ranks == len(hub._monitors))
        join_s, join_wall_s = time.process_time() - cpu, time.monotonic() - began
        _until(lambda: _all_train(hub))
        preflight_s = time.process_time() - cpu - join_s
        preflight_wall_s = time.monotonic() - began - join_wall_s
        time.sleep(3.0)  # what has piled up is heard
        steady_s = _cpu_over(seconds)
        connections, probes = len(hub._peers), conductor._probes
        asked, cpu, good = time.monotonic(), time.process_time(), probes._good
        probes._next = 0.0
        _until(lambda: probes._good > good, 0.002)
        verdict_s = time.monotonic() - probed.value
        # Heartbeats that came meanwhile are counted already.
        probe_s = time.process_time() - cpu - (time.monotonic() - asked) * steady_s
        run.save_file.touch()
        _until(lambda: RequestKind.SAVE in hub.agreed)
        time.sleep(1.0)
        cpu = time.process_time()
        run.stop_file.touch()
        conducting.join()
        stop_s = time.process_time() - cpu
        hub.close()
    return ChannelCosts(
        ranks=ranks,
        connections=connections,
        join_s=join_s,
        join_wall_s=join_wall_s,
        preflight_s=preflight_s,
        preflight_wall_s=preflight_wall_s,
        steady_percent=100 * (steady_s + probe_s / 60),
        probe_s=probe_s,
        probe_verdict_wall_ms=1e3 * verdict_s,
        save_agreed_wall_ms=hub.agreed[RequestKind.SAVE],
        stop_agreed_wall_ms=hub.agreed[RequestKind.STOP],
        stop_s=stop_s,
        rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


@contextlib.contextmanager
def _members(
    hub: Hub, ranks: int, probed: Synchronized[float], *, relayed: bool
) -> Iterator[Callable[[], int]]:
    """Processes that play all ranks, and what lets them begin."""
    begin = os.pipe()
    nodes = range(-(-ranks // RANKS_PER_NODE))
    children, parent = [], os.getpid()
    for number in range(_PROCESSES):
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            try:
                members = Members(hub.addresses, hub.credentials, ranks, probed, relayed=relayed)
                os.read(begin[0], 1)
                first = (node * RANKS_PER_NODE for node in nodes[number::_PROCESSES])
                mine = [r for rank in first for r in range(rank, min(ranks, rank + RANKS_PER_NODE))]
                members.join(mine)
                members.serve()
                os._exit(0)
            except BaseException as error:
                sys.stderr.write(f"{error!r}\n")
                os._exit(1)
        children.append(child)
    try:
        yield lambda: os.write(begin[1], b"x" * _PROCESSES)
    finally:
        hub.close()
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _all_train(hub: Hub) -> bool:
    with hub._lock:
        return all(beat is not None and beat.started for beat in hub._ranks.beats())


def _cpu_over(seconds: float) -> float:
    """Seconds of processor in each of the next seconds."""
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - cpu) / (time.monotonic() - began)


def _until(condition: Callable[[], bool], every_s: float = 0.05) -> None:
    until = time.monotonic() + _WITHIN_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(every_s)


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
