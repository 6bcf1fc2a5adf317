"""What the probe costs: main thread, a step beside it, heartbeats; beside the floor and a rival.

    python -m benchmarks.probe [--ranks 2] [--blocks 12] [--seconds 4] [--accelerator]
                              [--json FILE]

Ranks are processes on this machine that train on gloo (a small MLP under DDP).  Blocks without and
with probes take turns (A B A B), and each pair gives one ratio, so that what slows the machine down
for a while cancels out.  What a probe costs at the default interval follows from the time that the
main thread spends in it, and from steps with very many of them.

The floor is a bare asynchronous all_reduce of a small tensor; the rival's way is an all_reduce on
the training's own group that is waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.tables import Machine, spread, table, write_json
from slurm_forge.control import Hub, Member
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.probe import ProbeArrived, ProbeDone
from slurm_forge.control.messages.rank import Heartbeat
from slurm_forge.device.accelerator import choose_device, synchronize
from slurm_forge.device.groups import backends_for, bound_device, small_group
from slurm_forge.training.monitor.collective_probe import Probe

#: The default interval.
_EVERY_S = 60.0
_CALLS = 200
_BEATS = 2000
_INTERVALS = (1.0, 0.2)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Milliseconds of a step without and with probes, pair by pair: clock and processor."""

    every_s: float
    without_ms: tuple[float, ...]
    with_ms: tuple[float, ...]
    without_cpu_ms: tuple[float, ...]
    with_cpu_ms: tuple[float, ...]
    probes: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds per call unless a name says otherwise."""

    issue_us: tuple[float, ...]
    issue_large_us: tuple[float, ...]
    floor_us: tuple[float, ...]
    rival_us: tuple[float, ...]
    latency_us: tuple[float, ...]
    bandwidth: float
    watcher_cpu_us: float
    beat_us: float
    blocks: tuple[Blocks, ...]


class _Channel:
    """Stands in for the control channel: what the probe says is kept, and sent nowhere."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.last: ProbeDone | None = None

    def send(self, message: Message) -> None:
        if isinstance(message, ProbeDone):
            self.last = message
        if not isinstance(message, ProbeArrived):
            self.done.set()


def main() -> int:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--accelerator", action="store_true", help="train there, not on the CPU")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    costs = measure(asked.ranks, asked.blocks, asked.seconds, asked.accelerator)
    machine = Machine.measured(load, began)
    sys.stdout.write(f"{machine.text()}, {asked.ranks} ranks\n\n{report(costs)}\n")
    write_json(asked.json, {"machine": asdict(machine), "probe": asdict(costs)})
    return 0


def report(costs: Costs) -> str:
    """Three tables: calls, steps, and what follows for the default interval."""

    def us(values: tuple[float, ...]) -> str:
        found = spread(values)
        return "-" if found is None else f"{found.text(1)} us"

    calls = table(
        ("main thread, per call", "median (range)"),
        (
            ("issue of a probe", us(costs.issue_us)),
            ("issue of one that measures bandwidth, 1 MiB", us(costs.issue_large_us)),
            ("floor: bare asynchronous all_reduce", us(costs.floor_us)),
            ("rival: all_reduce on the training's group, waited for", us(costs.rival_us)),
            ("a heartbeat, on the channel's thread", f"{costs.beat_us:.1f} us"),
            ("a probe from issue to its end (nobody waits for it)", us(costs.latency_us)),
            (
                "processor time per probe beside it, watcher and gloo",
                f"{costs.watcher_cpu_us:.0f} us",
            ),
            ("bandwidth as measured by it", f"{costs.bandwidth / 1e9:.2f} GB/s"),
        ),
    )
    rows = []
    for block in costs.blocks:
        for what, without, with_probes in (
            ("time", block.without_ms, block.with_ms),
            ("processor time", block.without_cpu_ms, block.with_cpu_ms),
        ):
            pairs = [100 * (b / a - 1) for a, b in zip(without, with_probes, strict=True)]
            low, more, high = statistics.quantiles(pairs, n=4)
            rows.append(
                (
                    f"{what}, a probe every {block.every_s:g} s ({block.probes} probes)",
                    f"{statistics.median(without):.2f} ms",
                    f"{more:+.2f} % ({low:+.2f} to {high:+.2f})",
                    f"{more * block.every_s / _EVERY_S:+.4f} %",
                )
            )
    head = ("a step's", "without", "more with (quartiles of pairs)", "so at 60 s")
    whole = statistics.median(costs.issue_us) + costs.watcher_cpu_us
    every = 100 * (whole * 1e-6 / _EVERY_S)
    beats = 100 * costs.beat_us * 1e-6
    last = table(
        ("of a rank's time at the default settings", "share"),
        (
            ("a probe every 60 s (main thread and watcher)", f"{every:.5f} %"),
            ("a heartbeat every second", f"{beats:.5f} %"),
            ("together", f"{every + beats:.5f} %"),
            ("allowed", "0.1 %"),
        ),
    )
    return f"{calls}\n\n{table(head, rows)}\n\n{last}"


def measure(ranks: int, blocks: int, seconds: float, on_accelerator: bool = False) -> Costs:
    """All of it, in processes of its own."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        mine, theirs = context.Pipe()
        processes = [
            context.Process(
                target=_rank,
                args=(
                    rank,
                    ranks,
                    f"{folder}/store",
                    blocks,
                    seconds,
                    on_accelerator,
                    theirs if rank == 0 else None,
                ),
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            while not mine.poll(1.0):
                if any(process.exitcode for process in processes):
                    raise SystemExit("a rank failed: its words are above")
            found: dict[str, object] = mine.recv()
        finally:
            for process in processes:
                process.join(30)
                if process.is_alive():
                    process.kill()
    return Costs(beat_us=_beats(), **found)  # type: ignore[arg-type]


def _rank(
    rank: int,
    ranks: int,
    store: str,
    blocks: int,
    seconds: float,
    on_accelerator: bool,
    tell: Connection | None,
) -> None:
    torch.set_num_threads(1)
    device = choose_device(rank) if on_accelerator else torch.device("cpu")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backends_for(device),
        device_id=bound_device(device),
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
    )
    group = small_group(device, timeout=timedelta(minutes=5), ctas=4, description="probe")
    channel = _Channel()
    probe = Probe(
        member=channel,  # type: ignore[arg-type]
        group=group,
        device=device,
        rank=rank,
        world_size=ranks,
        large=1 << 20,
    )
    numbers = iter(range(1, 1 << 30))

    def issue(*, large: bool = False) -> float:
        channel.done.clear()
        begun = time.perf_counter()
        probe.issue(next(numbers), large=large)
        took = time.perf_counter() - begun
        assert channel.done.wait(60)
        return 1e6 * took

    small = torch.zeros(ranks, device=device)

    def floor() -> float:
        begun = time.perf_counter()
        work = dist.all_reduce(small, group=group, async_op=True)
        took = time.perf_counter() - begun
        assert work is not None
        work.wait()
        return 1e6 * took

    def rival() -> float:
        begun = time.perf_counter()
        work = dist.all_reduce(small, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=30))
        return 1e6 * (time.perf_counter() - begun)

    calls: dict[str, list[float]] = {"issue": [], "large": [], "floor": [], "rival": []}
    latencies = []
    cpu = time.process_time()
    for _ in range(_CALLS):  # in turns
        for name, call in (("issue", issue), ("floor", floor), ("rival", rival)):
            dist.barrier()
            calls[name].append(call())
            if name == "issue":
                assert channel.last is not None
                latencies.append(1e6 * channel.last.latency_s[0])
    cpu = time.process_time()
    for _ in range(_CALLS):
        issue()
    watcher = 1e6 * (time.process_time() - cpu) / _CALLS - statistics.median(calls["issue"])
    bandwidth = []
    for _ in range(20):
        dist.barrier()
        calls["large"].append(issue(large=True))
        assert channel.last is not None
        bandwidth.append(channel.last.bandwidth[0])
    step = _step(device)
    found = tuple(
        _blocks(every, blocks, seconds, step, device, probe, channel, numbers)
        for every in _INTERVALS
    )
    probe.close()
    if tell is not None:
        tell.send(
            {
                "issue_us": tuple(calls["issue"]),
                "issue_large_us": tuple(calls["large"]),
                "floor_us": tuple(calls["floor"]),
                "rival_us": tuple(calls["rival"]),
                "latency_us": tuple(latencies),
                "bandwidth": statistics.median(bandwidth),
                "watcher_cpu_us": max(0.0, watcher),
                "blocks": found,
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def _step(device: torch.device) -> Callable[[], None]:
    """One optimizer step of a few milliseconds, with its all-reduce."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model = torch.nn.parallel.DistributedDataParallel(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(64, 256, device=device)
    targets = torch.randint(0, 10, (64,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(30):
        step()
    return step


def _blocks(
    every: float,
    blocks: int,
    seconds: float,
    step: Callable[[], None],
    device: torch.device,
    probe: Probe,
    channel: _Channel,
    numbers: Iterator[int],
) -> Blocks:
    """Steps without and with probes, in turns; all ranks take as many."""
    begun = time.perf_counter()
    for _ in range(50):
        step()
    synchronize(device)
    usual = torch.tensor([(time.perf_counter() - begun) / 50])
    dist.all_reduce(usual)
    usual_s = float(usual) / dist.get_world_size()
    steps, between = max(20, int(seconds / usual_s)), max(1, int(every / usual_s))
    taken: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    probes = 0
    for _ in range(blocks):
        for probing in (False, True):
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            for number in range(steps):
                if probing and number % between == between // 2:
                    probes += 1
                    channel.done.wait(30)  # the hub has one under way at a time
                    channel.done.clear()
                    probe.issue(next(numbers))
                step()
            synchronize(device)
            taken[probing].append(1e3 * (time.perf_counter() - begun) / steps)
            cpu[probing].append(1e3 * (time.process_time() - used) / steps)
            if probing:
                channel.done.wait(30)
    return Blocks(
        every,
        tuple(taken[False]),
        tuple(taken[True]),
        tuple(cpu[False]),
        tuple(cpu[True]),
        probes,
    )


def _beats() -> float:
    """Of making and sending one, to a real hub on this machine."""
    with contextlib.ExitStack() as stack:
        hub = Hub(world_size=1)
        hub.start()
        stack.callback(hub.close)
        hosts, port = parse_addresses(hub.addresses)
        member = Member(
            rank=0,
            world_size=1,
            credentials=hub.credentials,
            hosts=hosts,
            port=port,
            host="here",
            pid=os.getpid(),
            on_abort=lambda _: None,
        )
        stack.callback(member.close)
        begun = time.thread_time()
        for number in range(_BEATS):
            member.send(Heartbeat(turn=0, step=number, begun=number, phase="train", started=True))
        return 1e6 * (time.thread_time() - begun) / _BEATS


if __name__ == "__main__":
    sys.exit(main())
