"""Journals as long as those of real runs, written in a moment; and what a year in one run costs.

    python -m benchmarks.journals [--attempts 10000] [--progress 6] [--kept] [--rounds 3]
        [--json FILE] [--dir DIR]

The year: 10^8 steps in so many attempts, 30 logged values, a checkpoint and an incident in each.
``--progress`` is how many lines of progress, and as many of figures, an attempt writes: a real one
writes 630 in its 53 minutes, of which compaction keeps the last.  ``--kept``: no checkpoint is ever
pruned.  Printed for a fold, ``status`` and ``explain``: seconds and the peak of memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from benchmarks.tables import Machine, Spread, spread, table, write_json
from slurm_forge.journal import JournalWriter, compact_journal
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import Record, encode
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.run_directory import RunDirectory, claim_attempt
from slurm_forge.spec import job_from_mapping
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust

#: Rank 0 writes progress every five seconds.
_PROGRESS_EVERY_S = 5.0
_HOUR_S = 3600.0
_IN_QUEUE_S = 600.0


@dataclass(slots=True)
class _Clock:
    now: float

    def read(self) -> float:
        return self.now


def write_run(folder: Path, name: str, *, attempts: int, hours: float) -> RunDirectory:
    """A run as its journal would be: preempted after each attempt, training all the time."""
    job = job_from_mapping({"name": name, "entry": "train:main", "args": {"max_steps": 10**7}})
    run, _ = create_run(job, runs=folder, site=find_site("generic"), submitted_from=folder)
    clock, step = _Clock(time.time() - attempts * (hours * _HOUR_S + _IN_QUEUE_S)), 0
    for number in range(1, attempts + 1):
        nodes = ("n01", "n02")
        claim_attempt(
            run,
            job="8812301",
            restart_count=number - 1,
            host="n01",
            pid=1,
            nodes=nodes,
            time=clock.now,
        )
        supervisor = JournalWriter(
            run, attempt=number, writer="supervisor", launch=1, clock=clock.read
        )
        rank = JournalWriter(run, attempt=number, writer="rank0", launch=1, clock=clock.read)
        supervisor.write(
            ev.AttemptStarted(
                job="8812301", restart_count=number - 1, nodes=nodes, host="n01", via="sbatch"
            )
        )
        supervisor.write(ev.LaunchStarted(world_size=8, nodes=nodes))
        checkpoint = None if step == 0 else f"step-{step:08d}.a{number - 1}.l1-00000000"
        rank.write(ev.Resumed(step=step, checkpoint=checkpoint, world_size=8, interpreter_s=4.0))
        for tick in range(int(hours * _HOUR_S / _PROGRESS_EVERY_S)):
            clock.now += _PROGRESS_EVERY_S
            step += 10
            rank.write(ev.Progress(step=step, consumed=step * 512))
            if tick % 120 == 119:
                saved = f"step-{step:08d}.a{number}.l1-00000000"
                rank.write(
                    ev.CheckpointCommitted(
                        name=saved, step=step, reason="every_minutes", seconds=4.0, size=10**10
                    ),
                    durable=False,
                )
        _preempted(supervisor, number, step)
        rank.close()
        clock.now += _IN_QUEUE_S
    return run


def _preempted(supervisor: JournalWriter, number: int, step: int) -> None:
    for event in (ev.NoticeSeen(what="SIGTERM", source="rank 0"), *_ending(number, step)):
        supervisor.write(event, durable=False)
    supervisor.close()


def _ending(number: int, step: int) -> tuple[ev.Event, ...]:
    incident = Incident(
        id=f"{number}.1",
        cause=Cause.PREEMPTED,
        confidence=Confidence.CERTAIN,
        evidence=(Evidence("scontrol", "PreemptTime=11:02:10"),),
        step=step,
    )
    decision = Decision(
        incident_id=incident.id,
        cause=incident.cause,
        action=Action.REQUEUE,
        reason="preempted: requeue",
        plan=RecoveryPlan(),
        rung=0,
    )
    return (
        ev.LaunchEnded(outcome="preempted", step=step),
        ev.IncidentSeen(incident=incident),
        ev.DecisionTaken(decision=decision),
        ev.RequeueIntended(job="8812301", method="scontrol requeue", reason=decision.reason),
        ev.RequeueDone(job="8812301", method="scontrol requeue"),
        ev.AttemptEnded(outcome="requeued"),
    )


def write_progress(run: RunDirectory, hours: float) -> None:
    """Before a run is submitted: the lines of so many hours in which it did not get beyond step 1.

    They change nothing about the run but what it costs to read its journal.
    """
    clock = _Clock(time.time() - hours * _HOUR_S)
    rank = JournalWriter(run, attempt=1, writer="rank0", launch=1, clock=clock.read)
    for _ in range(int(hours * _HOUR_S / _PROGRESS_EVERY_S)):
        clock.now += _PROGRESS_EVERY_S
        rank.write(ev.Progress(step=1, consumed=0))
    rank.close()


# -- a year ----------------------------------------------------------------------------------------

_YEAR_S = 365 * 24 * _HOUR_S
_STEPS = 10**8
_VALUES = 30
_KEEP_LAST = 3
_FOLD = """
import sys
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
run_state(RunDirectory.existing(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Year:
    """How long the run is: ``progress`` lines of progress, and of figures, in each attempt."""

    attempts: int = 10_000
    progress: int = 6
    kept: bool = False


def write_year(folder: Path, name: str, year: Year) -> RunDirectory:
    """A run that is preempted in each attempt, compacted by each attempt as a real one would be."""
    job = job_from_mapping({"name": name, "entry": "train:main", "args": {"max_steps": _STEPS}})
    run, _ = create_run(job, runs=folder, site=find_site("generic"), submitted_from=folder)
    now = time.time() - _YEAR_S
    lasts, steps = _YEAR_S / year.attempts, _STEPS // year.attempts
    saved: list[str] = []
    for attempt in range(1, year.attempts + 1):
        files = {name: f"{name}-{attempt:08x}" for name in ("supervisor", "rank0")}
        lines: dict[str, list[bytes]] = {name: [] for name in files}
        numbered = enumerate(_attempt(attempt, steps, year, saved))
        for logical, (writer, share, event) in numbered:
            record = Record(
                attempt=attempt,
                launch=0 if isinstance(event, ev.AttemptStarted) else 1,
                sequence=len(lines[writer]),
                time=round(now + share * lasts, 3),
                writer=files[writer],
                event=event,
                logical_time=attempt * 10_000 + logical,
            )
            lines[writer].append(encode(record))
        write_files(run, attempt, {files[writer]: each for writer, each in lines.items()})
        now += lasts
        compact_journal(run, attempt)
    return run


def write_files(run: RunDirectory, attempt: int, files: Mapping[str, Sequence[bytes]]) -> None:
    """Write the journal files of an attempt, by the names that their writers have."""
    for name, lines in files.items():
        path = run.journal / f"{attempt}-{name}.jsonl"
        path.write_bytes(b"".join(lines))
        path.chmod(0o600)


def _attempt(
    attempt: int, steps: int, year: Year, saved: list[str]
) -> Iterator[tuple[str, float, ev.Event]]:
    """Who writes what, and after which share of the attempt."""
    first, last = (attempt - 1) * steps, attempt * steps
    job, nodes = "8812301", (f"n{attempt % 64:02d}", f"n{attempt % 63:02d}")
    began = ev.AttemptStarted(
        job=job, restart_count=attempt - 1, nodes=nodes, host=nodes[0], via="sbatch"
    )
    yield "supervisor", 0.0, began
    yield "supervisor", 0.01, ev.LaunchStarted(world_size=8, nodes=nodes)
    checked = ev.PreflightMeasured(ok=True, hosts=2, seconds=1.5)
    yield "supervisor", 0.02, checked
    candidates = tuple(saved[-_KEEP_LAST:])
    newest = candidates[-1] if candidates else None
    resumed = ev.Resumed(
        step=first, checkpoint=newest, world_size=8, until=_STEPS, candidates=candidates
    )
    yield "rank0", 0.03, resumed
    for tick in range(1, year.progress + 1):
        share, step = 0.03 + 0.9 * tick / year.progress, first + steps * tick // (year.progress + 1)
        yield "rank0", share, ev.Progress(step=step, consumed=step * 512)
        values = {f"layer{number}/loss": 2.5 + number / step for number in range(_VALUES)}
        yield "rank0", share, ev.Logged(step=step, values=values)
    yield "supervisor", 0.94, ev.NoticeSeen(what="SIGTERM", source="rank 0")
    yield "supervisor", 0.95, ev.StopAgreed(step=last, seconds=0.1)
    name = f"step-{last:08d}.a{attempt}.l1-{attempt:08x}"
    saved.append(name)
    committed = ev.CheckpointCommitted(
        name=name, step=last, reason="stop", seconds=4.0, size=10**10, blocked_s=0.2
    )
    yield "rank0", 0.96, committed
    if newest is not None:
        good = ev.CheckpointJudged(name=newest, trust=Trust.GOOD, reason="1,000 steps", step=last)
        yield "rank0", 0.97, good
    if not year.kept and len(saved) > _KEEP_LAST:
        removed = (saved[-_KEEP_LAST - 1],)
        yield "rank0", 0.98, ev.CheckpointsPruned(names=removed, reason="keep_last")
    for event in _ending(attempt, last):
        yield "supervisor", 0.99, event


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one command costs: seconds on the wall clock and of the cores, peak of memory."""

    command: str
    wall_s: Spread
    cpu_s: Spread
    peak_mib: float


def measure(run: RunDirectory, rounds: int) -> list[Cost]:
    """Each command in a process of its own, round by round."""
    forge = [sys.executable, "-m", "slurm_forge"]
    commands = {
        "fold": [sys.executable, "-c", _FOLD, str(run.path)],
        "status": [*forge, "status", str(run.path)],
        "explain": [*forge, "explain", str(run.path)],
    }
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, argv in commands.items():
            taken[name].append(_run(argv))
    return [
        Cost(
            command=name,
            wall_s=cast("Spread", spread(each[0] for each in figures)),
            cpu_s=cast("Spread", spread(each[1] for each in figures)),
            peak_mib=max(each[2] for each in figures),
        )
        for name, figures in taken.items()
    ]


def _run(argv: Sequence[str]) -> tuple[float, float, float]:
    started = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, argv
    wall = time.perf_counter() - started
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Write the year, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attempts", type=int, default=10_000)
    parser.add_argument("--progress", type=int, default=6)
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    year = Year(attempts=arguments.attempts, progress=arguments.progress, kept=arguments.kept)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        started = time.perf_counter()
        # Elsewhere: the peak of a process counts that of the one that has started it.
        with ProcessPoolExecutor(1) as pool:
            run = pool.submit(write_year, Path(folder), "year", year).result()
        written_s = time.perf_counter() - started
        files = [path.stat().st_size for path in run.journal.iterdir()]
        costs = measure(run, arguments.rounds)
    head = ("command", "seconds", "CPU s", "peak MiB")
    rows = [
        (each.command, each.wall_s.text(), each.cpu_s.text(), f"{each.peak_mib:.0f}")
        for each in costs
    ]
    sys.stdout.write(
        f"{year.attempts} attempts, written in {written_s:.0f} s: {len(files)} files, "
        f"{sum(files) / (1 << 20):.1f} MiB\n{table(head, rows)}\n"
    )
    if arguments.json:
        body = {
            "machine": asdict(Machine.measured(load, began)),
            "year": asdict(year),
            "files": len(files),
            "bytes": sum(files),
            "costs": [asdict(each) for each in costs],
        }
        write_json(arguments.json, body)


if __name__ == "__main__":
    main()
