"""What a preemption costs, from Slurm's signal to the first new step, on a real Slurm.

    python -m benchmarks.restart [--rounds 5] [--json FILE] [--dir CLUSTER] [--ways template,stock]

The same training (4 ranks, one per node, DDP) under slurm_forge and under stock submitit, each
preempted for real in every round, in turn.  ``--dir`` attaches to a cluster that runs already;
without it one is booted, which needs root and Slurm's packages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks.restart_jobs import (
    PARTITION,
    Settings,
    Started,
    Way,
    clients_of,
    cluster_in,
    submit,
    submit_with_faults,
)
from benchmarks.restart_phases import (
    ColdStart,
    phases_as_json,
    print_phases,
    read_cold_start,
)
from benchmarks.restart_report import (
    print_relaunches,
    print_ways,
    relaunches_as_json,
    ways_as_json,
)
from benchmarks.restart_timeline import (
    Relaunch,
    Timeline,
    read_queued,
    read_relaunch,
    read_timeline,
)
from benchmarks.tables import Machine, write_json
from slurm_forge.errors import ForgeError
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.testing.cluster import SlurmCluster

#: Nobody waits longer for a start, nor for a preemption with its grace time and KillWait.
_PATIENCE_S = 90.0


# -- measuring ----------------------------------------------------------------------------------


class Bench:
    """Rounds on one cluster.  Every round is a fresh job, so none is longer for those before it."""

    def __init__(self, cluster: SlurmCluster, settings: Settings, work: Path) -> None:
        self._cluster = cluster
        self._settings = settings
        self._work = work
        #: Beside the timeline of a preemption: where each second of the start after it went.
        self.cold: dict[str, list[ColdStart]] = {}

    def requeue(self, way: Way, number: int) -> ColdStart:
        """A cold start without slurm_forge, which the administrator has requeued."""
        started = submit(way, self._settings, self._work / f"{way.value}-{number}")
        every = self._settings.save_every
        self._until(started, lambda: started.steps() > every, "a first checkpoint")
        said = self._said_meanwhile(
            started,
            lambda: self._cluster.run("scontrol", "requeue", started.job),
            lambda: started.steps(start=1) > 0,
        )
        found = self._add_cold(way, started, said)
        self._cluster.reset()
        return found

    def _said_meanwhile(
        self, started: Started, act: Callable[[], object], condition: Callable[[], bool]
    ) -> str:
        """What slurmctld writes from the act until the condition holds."""
        log = self._cluster.layout.log("slurmctld")
        size = log.stat().st_size
        act()
        self._until(started, condition, "new steps after the start")
        with log.open(errors="replace") as text:
            text.seek(size)
            return text.read()

    def _add_cold(self, way: Way, started: Started, said: str) -> ColdStart:
        found = read_cold_start(
            started.folder,
            started.run,
            queued=read_queued(started.job, said),
            load_average=os.getloadavg()[0],
        )
        self.cold.setdefault(way.value, []).append(found)
        return found

    def preempt(self, way: Way, number: int, rounds: int) -> Timeline:
        """One preemption.  The rounds are spread evenly over the interval between two saves."""
        every = self._settings.save_every
        phase = round((number + 0.5) / rounds * every)
        started = submit(way, self._settings, self._work / f"{way.value}-{number}")
        self._until(started, lambda: started.steps() >= every + phase, "the first steps")
        since = time.time()
        load = os.getloadavg()[0]
        # Rank 0 has done steps again, and some that it had not done before.
        said = self._said_meanwhile(
            started,
            lambda: self._cluster.preempt(started.job),
            lambda: started.steps(start=1) > started.steps() > 0,
        )
        if way is Way.TEMPLATE:
            self._add_cold(way, started, said)
        found = read_timeline(
            job=started.job,
            since=since,
            controller_log=said,
            marks_in=started.folder,
            run=started.run,
            submitit_log=started.submitit_log(),
            save_every=every,
            load_average=load,
        )
        self._cluster.reset()
        return found

    def relaunch(self, rounds: int) -> list[Relaunch]:
        """One job that goes NaN in every launch and is rolled back in its allocation."""
        started = submit_with_faults(self._settings, self._work / "relaunch")
        assert started.run is not None
        found = []
        for launch in range(2, rounds + 2):
            self._until(started, partial(_trains, started, launch), f"a step in launch {launch}")
            found.append(read_relaunch(started.folder, started.run, launch, os.getloadavg()[0]))
        self._cluster.reset()
        return found

    def _until(self, started: Started, condition: Callable[[], bool], what: str) -> None:
        # The journal is not looked at while waiting: reading a long one would disturb.
        try:
            self._cluster.wait_for(condition, _PATIENCE_S, what)
        except ForgeError:
            if started.run is not None:
                state = run_state(started.run)
                print(f"the run is {state.status.value} {state.reason}")
            print(started.output())
            raise


def _trains(started: Started, launch: int) -> bool:
    return started.steps(launch=launch) > 0


def measure_ways(bench: Bench, ways: Sequence[Way], rounds: int) -> dict[Way, list[Timeline]]:
    """All ways in every round, another one first each time."""
    found: dict[Way, list[Timeline]] = {way: [] for way in ways if not way.cold_only}
    for number in range(rounds):
        turn = number % max(1, len(ways))
        for way in (*ways[turn:], *ways[:turn]):
            if way.cold_only:
                start = bench.requeue(way, number)
                print(
                    f"round {number + 1}: {way.value}: {start.own:.1f} s from batch script to "
                    f"first new step, load {start.load_average:.1f}",
                    flush=True,
                )
                continue
            timeline = bench.preempt(way, number, rounds)
            found[way].append(timeline)
            print(
                f"round {number + 1}: {way.value}: {timeline.stepped - timeline.sent:.1f} s from "
                f"signal to first new step, {timeline.steps_lost} steps lost, "
                f"load {timeline.load_average:.1f}",
                flush=True,
            )
    return found


def _versions(cluster: SlurmCluster) -> dict[str, str]:
    slurm = cluster.run("sinfo", "--version").stdout.strip().rpartition(" ")[2]
    return {"slurm": slurm, **{name: version(name) for name in ("submitit", "torch")}}


def _contract(cluster: SlurmCluster) -> str:
    spec = cluster.spec
    grace = next(p.grace_time for p in spec.partitions if p.name == PARTITION)
    return (
        f"GraceTime {grace.total_seconds():.0f} s, KillWait {spec.kill_wait.total_seconds():.0f} s "
        f"(Slurm's default: 30 s), a requeued job waits {spec.cred_expire.total_seconds() + 1:.0f} "
        "s (Slurm's default: 121 s)"
    )


def _torch_alone() -> float:
    """How long ``import torch`` takes by itself, at best: a yardstick for all other seconds."""
    found = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch, os; os._exit(0)"], check=True)
        found.append(time.monotonic() - began)
    return min(found)


@contextlib.contextmanager
def _busy(number: int) -> Iterator[None]:
    """Processes that do nothing but compute, and never for longer than half an hour."""
    spin = "import time\nend = time.monotonic() + 1800\nwhile time.monotonic() < end: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(number)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


# -- the command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.restart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dir", type=Path, metavar="CLUSTER", help="attach, do not boot")
    parser.add_argument(
        "--ways",
        default=",".join(way.value for way in Way if not way.cold_only),
        help="which, separated by commas (default: %(default)s); none: only the relaunch",
    )
    parser.add_argument("--no-relaunch", action="store_true")
    parser.add_argument("--ranks", type=int, default=4, help="one per node (%(default)s)")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="keep that many cores busy meanwhile (0)"
    )
    parser.add_argument("--pace", type=float, default=0.1, help="seconds per step (0.1)")
    parser.add_argument("--width", type=int, default=256, help="of the model's layers (256)")
    parser.add_argument("--save-every", type=int, default=20, help="steps between saves (20)")
    parser.add_argument(
        "--journal-hours", type=float, default=0.0, help="how long our run has been going on (0)"
    )
    given = parser.parse_args(arguments)
    ways = [Way(word) for word in given.ways.split(",") if word and word != "none"]
    settings = Settings(
        pace=given.pace,
        width=given.width,
        save_every=given.save_every,
        journal_hours=given.journal_hours,
        ranks=given.ranks,
    )
    load, began = os.getloadavg()[0], time.time()
    alone = _torch_alone()
    # Short: Slurm's sockets lie below.  Open to all: another user may be the one who runs jobs.
    work = Path(tempfile.mkdtemp(prefix="forge-bench-", dir="/tmp"))
    work.chmod(0o755)
    print(f"logs, kept if something fails: {work}", flush=True)
    found: dict[Way, list[Timeline]] = {}
    relaunches: list[Relaunch] = []
    with (
        cluster_in(given.dir, work) as cluster,
        clients_of(cluster),
        contextlib.ExitStack() as processes,
    ):
        cluster.reset()
        bench = Bench(cluster, settings, work)
        processes.enter_context(_busy(given.busy))
        found |= measure_ways(bench, [w for w in ways if not w.signalled], given.rounds)
        if not given.no_relaunch:
            relaunches = bench.relaunch(given.rounds)
        signalled = [w for w in ways if w.signalled]
        if signalled:
            with cluster.configured(replace(cluster.spec, send_user_signal=True)):
                found |= measure_ways(bench, signalled, given.rounds)
                cluster.reset()
        machine = Machine.measured(load, began)
        versions, contract = _versions(cluster), _contract(cluster)
    _print(machine, settings, versions, found, relaunches, contract, given.busy)
    print(
        f"\nimport torch takes {alone:.2f} s by itself on this machine, before anything else runs"
    )
    if bench.cold:
        print("\nWhere each second goes: the start after a requeue, rank 0\n")
        print_phases(bench.cold)
    write_json(
        given.json,
        {
            "machine": asdict(machine),
            "settings": asdict(settings),
            "busy": given.busy,
            "torch_alone": alone,
            "cold": phases_as_json(bench.cold),
            "versions": versions,
            "slurm": contract,
            "ways": ways_as_json(found),
            "relaunch": relaunches_as_json(relaunches),
        },
    )
    shutil.rmtree(work, ignore_errors=True)


def _print(
    machine: Machine,
    settings: Settings,
    versions: dict[str, str],
    found: dict[Way, list[Timeline]],
    relaunches: list[Relaunch],
    contract: str,
    busy: int,
) -> None:
    print(f"\n{machine.text()}; " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    print(
        f"{settings.ranks} ranks, {busy} cores kept busy, {settings.pace} s of sleep per step, "
        f"a checkpoint every {settings.save_every} steps, {settings.journal_hours:g} h in the "
        f"journal; {contract}"
    )
    for title, signalled in (
        ("Preempted, Slurm as it comes (SIGTERM)", False),
        ("Preempted, administrator has the user signal sent (SIGUSR2)", True),
    ):
        block = {way: rounds for way, rounds in found.items() if way.signalled is signalled}
        if block:
            print(f"\n{title}\n")
            print_ways(block)
    if relaunches:
        print("\nThree NaNs in a row: rolled back by a relaunch in the same allocation\n")
        print_relaunches(relaunches, found.get(Way.TEMPLATE, []))


if __name__ == "__main__":
    main()
