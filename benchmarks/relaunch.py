"""What a killed rank costs, from SIGKILL to the first new step, on a real Slurm.

    python -m benchmarks.relaunch [--rounds 5] [--json FILE] [--dir CLUSTER] [--ways warm,cold,…]

The same training (2 ranks, one per node, DDP) is brought back in each of five ways; in every round
the process that trains rank 1 is killed from outside.  ``requeue-default`` waits for the two
minutes that Slurm leaves between two starts of a job as it comes, once only.  Without ``--dir`` a
cluster is booted, which needs root and Slurm's packages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.marks import Mark, What, earliest, read_marks
from benchmarks.restart_jobs import clients_of, cluster_in
from benchmarks.tables import Machine, cell, paired_ratio, plain, spread, table, write_json
from slurm_forge.errors import ForgeError
from slurm_forge.journal import Record, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import (
    create_run,
    run_state,
    submit_script,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.spec import job_from_mapping
from slurm_forge.testing.cluster import SlurmCluster

_REPOSITORY = Path(__file__).resolve().parents[1]
_PATIENCE_S = 240.0
_NODES = 2
_SAVE_EVERY = 10


class Way(str, Enum):
    """How the run comes back."""

    REQUEUE_DEFAULT = "requeue-default"
    REQUEUE = "requeue"
    COLD = "cold"
    WARM = "warm"
    IN_PROCESS = "in_process"

    @property
    def requeues(self) -> bool:
        """Through the queue."""
        return self in (Way.REQUEUE, Way.REQUEUE_DEFAULT)

    @property
    def rung(self) -> dict[str, Any]:
        """The only rung of the ladder for a crash."""
        if self.requeues:
            return {"do": "requeue", "times": 1000}
        return {"do": "relaunch", "times": 1000, "start": self.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comeback:
    """The moments of one, in seconds since the epoch; ``all_gone`` is when the launch was over."""

    killed: float
    all_gone: float
    started: float
    imported: float
    met: float
    built: float
    loaded: float
    stepped: float
    load_average: float


METRICS: tuple[tuple[str, str, Callable[[Comeback], float]], ...] = (
    ("all_gone", "SIGKILL to noticed and all ranks gone", lambda c: c.all_gone - c.killed),
    ("started", "… to decided and started again", lambda c: c.started - c.all_gone),
    ("imported", "… to interpreter and imports", lambda c: c.imported - c.started),
    ("met", "… to process groups joined", lambda c: c.met - c.imported),
    ("built", "… to model built", lambda c: c.built - c.met),
    ("loaded", "… to state loaded", lambda c: c.loaded - c.built),
    ("stepped", "… to first new step done", lambda c: c.stepped - c.loaded),
    ("fresh", "start to model built", lambda c: c.built - c.started),
    ("total", "SIGKILL to first new step", lambda c: c.stepped - c.killed),
    (
        "but_load",
        "SIGKILL to first new step, without load",
        lambda c: c.stepped - c.killed - (c.loaded - c.built),
    ),
)


class Bench:
    """One job per way, a kill per round."""

    def __init__(self, cluster: SlurmCluster, work: Path, pace: float) -> None:
        self._cluster = cluster
        self._work = work
        self._pace = pace

    def rounds(self, way: Way, number: int) -> list[Comeback]:
        """Kill a rank so many times, and see the run come back."""
        folder = self._work / way.value
        folder.mkdir(parents=True)
        run, job = self._submit(way, folder)
        found = []
        attempt, launch = 1, 1
        for _ in range(number):
            first = self._trained(folder, run, attempt, launch, 0)
            self._trained(folder, run, attempt, launch, first + _SAVE_EVERY + 3)
            killed = self._kill(job)
            attempt, launch = (attempt + 1, 1) if way.requeues else (attempt, launch + 1)
            self._trained(folder, run, attempt, launch, 0)
            found.append(_read(folder, run, killed, attempt, launch))
            total = found[-1].stepped - killed
            print(f"{way.value}: {total:.2f} s, load {os.getloadavg()[0]:.1f}", flush=True)
        self._cluster.reset()
        return found

    def _submit(self, way: Way, folder: Path) -> tuple[RunDirectory, str]:
        spec = job_from_mapping(
            {
                "name": way.value.replace("_", "-"),
                "entry": "benchmarks/restart_forge.py:train",
                "args": {
                    "folder": str(folder),
                    "pace": self._pace,
                    "width": 256,
                    "steps": 1_000_000,
                    "fault_every": 0,
                },
                "resources": {
                    "nodes": _NODES,
                    "tasks_per_node": 1,
                    "cpus_per_task": 1,
                    "mem": "1500M",
                    "time": "00:30:00",
                    "partition": "normal",
                },
                "checkpoint": {"every_steps": _SAVE_EVERY, "every_minutes": None},
                "recovery": {"crash": [way.rung], "nccl_error": [way.rung]},
            }
        )
        site = find_site("generic")
        run, file = create_run(spec, runs=folder / "runs", site=site, submitted_from=_REPOSITORY)
        return run, submit_script(run, file, site, SubprocessSlurm.of_this_process())

    def _trained(
        self, folder: Path, run: RunDirectory, attempt: int, launch: int, beyond: int
    ) -> int:
        """Wait until that launch has done more than ``beyond`` steps; the number of its first."""

        def steps() -> list[int]:
            return [m.step for m in _marks(folder, attempt, launch) if m.what is What.STEP]

        try:
            self._cluster.wait_for(
                lambda: max(steps(), default=0) > beyond, _PATIENCE_S, f"step {beyond + 1}"
            )
        except ForgeError:
            print(f"the run is {run_state(run).status.value} {run_state(run).reason}")
            raise
        return min(steps())

    def _kill(self, job: str) -> float:
        """SIGKILL for what trains rank 1: the worker below its agent."""
        agent = self._cluster.tasks(job)[1].pid
        (worker,) = (Path(f"/proc/{agent}/task/{agent}") / "children").read_text().split()[:1]
        now = time.time()
        os.kill(int(worker), signal.SIGKILL)
        return now


def _marks(folder: Path, attempt: int, launch: int) -> list[Mark]:
    return [m for m in read_marks(folder) if (m.start + 1, m.launch) == (attempt, launch)]


def _read(folder: Path, run: RunDirectory, killed: float, attempt: int, launch: int) -> Comeback:
    records, _ = read_journal(run)
    ended = _first(records, ev.LaunchEnded, lambda r: r.time >= killed)
    here = _first(records, ev.LaunchStarted, lambda r: (r.attempt, r.launch) == (attempt, launch))
    back = _first(records, ev.Resumed, lambda r: (r.attempt, r.launch) == (attempt, launch))
    assert isinstance(back.event, ev.Resumed)
    imported = here.time + back.event.interpreter_s
    marks = _marks(folder, attempt, launch)
    return Comeback(
        killed=killed,
        all_gone=ended.time,
        started=here.time,
        imported=imported,
        met=imported + back.event.rendezvous_s,
        built=earliest(marks, What.BUILT).time,
        loaded=back.time,
        stepped=earliest(marks, What.STEP).time,
        load_average=os.getloadavg()[0],
    )


def _first(records: Sequence[Record], kind: type, wanted: Callable[[Record], bool]) -> Record:
    found = [r for r in records if isinstance(r.event, kind) and wanted(r)]
    return min(found, key=lambda record: record.time)


# -- the command line ------------------------------------------------------------------------------


def report(found: Mapping[Way, Sequence[Comeback]]) -> str:
    """The table, and what the goals are about."""
    ways = list(found)
    rows = [
        (title, *(cell(spread(of(each) for each in found[way])) for way in ways))
        for _, title, of in METRICS
    ]
    lines = [table(("seconds: median (least-most)", *(way.value for way in ways)), rows), ""]
    warm = found.get(Way.WARM, [])
    for other in (Way.REQUEUE_DEFAULT, Way.REQUEUE, Way.COLD):
        against = found.get(other, [])
        if warm and against:
            pairs = min(len(warm), len(against))
            whole = paired_ratio(
                [c.stepped - c.killed for c in warm[:pairs]],
                [c.stepped - c.killed for c in against[:pairs]],
            )
            fresh = paired_ratio(
                [c.built - c.started for c in warm[:pairs]],
                [c.built - c.started for c in against[:pairs]],
            )
            lines.append(
                f"warm as a share of {other.value}: whole {cell(whole)}, start to model built "
                f"{cell(fresh)}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.relaunch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dir", type=Path, metavar="CLUSTER", help="attach, do not boot")
    parser.add_argument("--ways", default=",".join(way.value for way in Way))
    parser.add_argument("--pace", type=float, default=0.1, help="seconds per step (0.1)")
    given = parser.parse_args(arguments)
    ways = [Way(word) for word in given.ways.split(",") if word]
    load, began = os.getloadavg()[0], time.time()
    work = Path(tempfile.mkdtemp(prefix="forge-bench-", dir="/tmp"))
    work.chmod(0o755)
    print(f"logs, kept if something fails: {work}", flush=True)
    found: dict[Way, list[Comeback]] = {}
    with cluster_in(given.dir, work) as cluster, clients_of(cluster):
        cluster.reset()
        # Killed so often, a node would be left out, and the run with it go back into the queue.
        os.environ["SLURM_FORGE_NODES"] = "off"
        bench = Bench(cluster, work, given.pace)
        for way in ways:
            if way is Way.REQUEUE_DEFAULT:
                slow = replace(cluster.spec, cred_expire=timedelta(seconds=120))
                with cluster.configured(slow):
                    found[way] = bench.rounds(way, 1)
            else:
                found[way] = bench.rounds(way, given.rounds)
        machine = Machine.measured(load, began)
        delay = cluster.spec.cred_expire.total_seconds() + 1
    print(f"\n{machine.text()}")
    print(
        f"{_NODES} ranks, {given.pace} s of sleep per step; a requeued job waits {delay:.0f} s "
        f"({Way.REQUEUE_DEFAULT.value}: 121 s)\n"
    )
    print(report(found))
    ways_found = {
        way.value: {
            "seconds": {key: plain(spread(of(c) for c in each)) for key, _, of in METRICS},
            "rounds": [asdict(c) for c in each],
        }
        for way, each in found.items()
    }
    write_json(given.json, {"machine": asdict(machine), "ways": ways_found})
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
