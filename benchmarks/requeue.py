"""How long it takes until a requeued job's batch script starts again, at Slurm's default delay.

    python -m benchmarks.requeue [--rounds 5] [--ways shortened,plain,watched,successor]
                                 [--epilog 0] [--lasting 0] [--quick] [--user nobody]
                                 [--python FILE] [--json FILE]

As an ordinary user on an idle real Slurm, which is booted for it (root and Slurm's packages are
needed).  Between looks at the queue that Slurm has intervals of its own for (30 to 60 s) is left as
Slurm ships it, unless ``--quick``.  ``--epilog`` is how long the nodes are cleaned up,
``--lasting`` how long a process of the job lives on after it was told to end.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path

from benchmarks.tables import Machine, spread, table, write_json
from slurm_forge.slurm.client import JobUpdate, SubprocessSlurm
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.testing.cluster.spec import DEFAULT_CRED_EXPIRE, ClusterSpec

_TOP = Path(__file__).resolve().parent.parent
_SETTLED_S = 5.0


class Way(str, Enum):
    """How the job comes back."""

    SHORTENED = "shortened"
    WATCHED = "watched"
    PLAIN = "plain"
    SUCCESSOR = "successor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """One round: seconds from the request until the next start, None where it did not come."""

    way: Way
    seconds: float | None
    starts: int
    state: str
    job: str


class Bench:
    """Jobs of an ordinary user on one cluster, one after the other."""

    def __init__(
        self, cluster: SlurmCluster, folder: Path, *, user: str, python: str, lasting: float
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._user = user
        self._python = python
        self._lasting = lasting

    def come_back(self, way: Way, number: int, patience_s: float) -> Came:
        """One job that is requeued once; it must start exactly twice."""
        run = self._folder / f"{way.value}-{number}"
        owner = pwd.getpwnam(self._user)
        for place in (run, run / "submissions", run / "journal", run / "attempts"):
            place.mkdir(mode=0o700)
            os.chown(place, owner.pw_uid, owner.pw_gid)
        script = run / "submissions" / "job.sbatch"
        command = [self._python, "-m", "benchmarks.requeue_job", str(run), way.value]
        script.write_text(
            f"#!/bin/bash\n#SBATCH --requeue --time=10 --output={run}/out\n"
            f"cd {shlex.quote(str(_TOP))}\n"
            f"export PYTHONPATH={shlex.quote(os.pathsep.join(filter(None, sys.path)))}\n"
            f"exec {shlex.join([*command, str(self._lasting)])}\n"
        )
        script.chmod(0o755)
        job = self._cluster.sbatch(script, user=self._user, cwd=run)
        until = time.monotonic() + patience_s
        nudged = way is not Way.WATCHED
        while time.monotonic() < until and len(_marks(run, "start")) < 2:
            asked = _marks(run, "ask")
            if not nudged and asked and time.time() - asked[0] >= _SETTLED_S:
                nudged = self._nudge(job)
            time.sleep(0.1)
        # A second start beside the first, or one after it, would show by now.
        time.sleep(1.0)
        starts, asked = _marks(run, "start"), _marks(run, "ask")
        record = self._cluster.job(job)
        self._cluster.run("scancel", f"--user={self._user}", check=False)
        if len(starts) < 2 and (run / "out").exists():
            print((run / "out").read_text(errors="replace")[-2000:])
        seconds = starts[1] - asked[0] if len(starts) > 1 and asked else None
        return Came(way=way, seconds=seconds, starts=len(starts), state=record.state, job=job)

    def _nudge(self, job: str) -> bool:
        """As the watcher does, once the job waits."""
        record = self._cluster.job(job)
        if record.state != "PENDING" or record.field("Reason") != "BeginTime":
            return False
        self._cluster.run(
            "scontrol",
            "update",
            f"JobId={job}",
            *JobUpdate(start_after=timedelta(0)).assignments(),
            user=self._user,
            cwd=Path("/"),
        )
        return True


def _marks(run: Path, what: str) -> list[float]:
    try:
        lines = (run / "marks").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [float(line.split()[-1]) for line in lines if line.startswith(what)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Boot, measure, print, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.requeue", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default=",".join(way.value for way in Way))
    parser.add_argument("--epilog", type=float, default=0.0)
    parser.add_argument("--lasting", type=float, default=0.0)
    parser.add_argument("--kill-wait", type=float, default=30.0)
    parser.add_argument("--patience", type=float, default=160.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--user", default="nobody")
    parser.add_argument(
        "--python", default=sys.executable, help="one that the user may run, of the same version"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    ways = [Way(each) for each in given.ways.split(",")]
    load, began = os.getloadavg()[0], time.time()
    spec = ClusterSpec(
        nodes=2,
        cred_expire=DEFAULT_CRED_EXPIRE,
        kill_wait=timedelta(seconds=given.kill_wait),
        quick_scheduling=given.quick,
        epilog=timedelta(seconds=given.epilog),
        accounting=False,
    )
    came: list[Came] = []
    with tempfile.TemporaryDirectory(prefix="forge-", dir="/tmp") as short:
        top = Path(short)
        top.chmod(0o755)
        with SlurmCluster(top / "c", spec) as cluster:
            folder = top / "runs"
            folder.mkdir(mode=0o755)
            delay = SubprocessSlurm(environment=cluster.env).show_config().requeue_delay
            bench = Bench(
                cluster, folder, user=given.user, python=given.python, lasting=given.lasting
            )
            for number in range(given.rounds):
                for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                    one = bench.come_back(way, number, given.patience)
                    came.append(one)
                    print(f"round {number + 1}: {one}", flush=True)
    machine = Machine.measured(load, began)
    print(f"\n{machine.text()}; Slurm's delay {delay.total_seconds():.0f} s, {given}\n")
    rows = []
    for way in ways:
        own = [one for one in came if one.way is way]
        times = spread(one.seconds for one in own)
        late = sum(one.seconds is None or one.seconds > 32 for one in own)
        twice = sum(one.starts != 2 for one in own)
        text = None if times is None else times.text(1)
        rows.append((way.value, text, str(len(own)), str(late), str(twice)))
    header = (
        "way",
        "s until it starts: median (least-most)",
        "rounds",
        "over 32 s",
        "not 2 starts",
    )
    print(table(header, rows))
    write_json(given.json, {"machine": asdict(machine), "rounds": [asdict(one) for one in came]})


if __name__ == "__main__":
    main()
