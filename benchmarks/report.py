"""What the report of an extreme run costs to make and to open.

    python -m benchmarks.report [--attempts 1000] [--rounds 3] [--json FILE] [--keep FILE]
        [--no-browser]

The run: a month of training, 10^6 steps in so many attempts on 8 of 64 nodes, an incident in each,
of every tenth one stacks, progress and figures every five seconds, compacted by each attempt as a
real one would be.  Printed: seconds and the peak of memory of ``slurm-forge report``, the size of
the file, and how long Chromium takes until its charts are drawn.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.journals import _run as measured
from benchmarks.journals import write_files
from benchmarks.tables import Machine, cell, plain, spread, table, write_json
from slurm_forge.journal import compact_journal
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import Record, encode
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Change, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

_MONTH_S = 30 * 86400.0
_STEPS = 10**6
_EVERY_S = 5.0
_SAVES = 4
_NODES, _OF = 8, 64
_WORLD = 64
_CAUSES = (Cause.PREEMPTED, Cause.NON_FINITE, Cause.HANG, Cause.CRASH, Cause.NODE_FAIL)
_DRAWN = """new Promise((done) => requestAnimationFrame(() =>
    requestAnimationFrame(() => done(performance.now()))))"""
_STACK = 'Thread 0x01 (most recent call first):\n  File "train.py", line 12 in forward\n' * 40


def write_month(folder: Path, attempts: int) -> RunDirectory:
    """The run directory, with a journal as long as that of a month."""
    job = {
        "name": "month",
        "entry": "train:main",
        "args": {"max_steps": _STEPS},
        "resources": {"nodes": _NODES, "tasks_per_node": _WORLD // _NODES, "gpus_per_task": 1},
    }
    run, _ = create_run(
        job_from_mapping(job), runs=folder, site=find_site("generic"), submitted_from=folder
    )
    chance = random.Random(1)
    now = time.time() - _MONTH_S
    lasts = _MONTH_S / attempts
    step, saved = 0, ""
    for attempt in range(1, attempts + 1):
        files = {name: f"{name}-{attempt:08x}" for name in ("supervisor", "rank0")}
        lines: dict[str, list[bytes]] = {name: [] for name in files}
        reach = _STEPS * attempt // attempts
        for at, writer, event in _attempt(run, attempt, step, reach, saved, lasts, chance):
            record = Record(
                attempt=attempt,
                launch=0 if isinstance(event, ev.AttemptStarted) else 1,
                sequence=len(lines[writer]),
                time=round(now + at, 3),
                writer=files[writer],
                event=event,
                logical_time=attempt * 10**7 + sum(map(len, lines.values())),
            )
            lines[writer].append(encode(record))
            if isinstance(event, ev.CheckpointCommitted):
                saved, step = event.name, event.step
        write_files(run, attempt, {files[writer]: each for writer, each in lines.items()})
        now += lasts
        compact_journal(run, attempt)
    return run


def _attempt(
    run: RunDirectory,
    attempt: int,
    first: int,
    last: int,
    saved: str,
    lasts: float,
    chance: random.Random,
) -> Iterator[tuple[float, str, ev.Event]]:
    """After how many seconds who writes what."""
    nodes = tuple(f"gpu{(attempt + each) % _OF:03d}" for each in range(_NODES))
    job = str(880_000 + attempt)
    began = ev.AttemptStarted(
        job=job, restart_count=attempt - 1, nodes=nodes, host=nodes[0], via="sbatch"
    )
    yield 0.0, "supervisor", began
    yield 2.0, "supervisor", ev.LaunchStarted(world_size=_WORLD, nodes=nodes)
    resumed = ev.Resumed(
        step=first, checkpoint=saved or None, world_size=_WORLD, until=_STEPS, global_batch=512
    )
    yield 20.0, "rank0", resumed
    ticks = int((lasts * 0.9 - 20.0) / _EVERY_S)
    for tick in range(1, ticks + 1):
        at, step = 20.0 + tick * _EVERY_S, first + (last - first) * tick // ticks
        yield at, "rank0", ev.Progress(step=step, consumed=step * 512)
        loss = 2.0 + 6.0 * math.exp(-step / 2e5) + chance.gauss(0, 0.05)
        values = {"loss": loss, "lr": 3e-4, "grad_norm": 1 + chance.random()}
        yield at, "rank0", ev.Logged(step=step, values=values)
        if tick % (ticks // _SAVES + 1) == 0:
            name = f"step-{step:08d}.a{attempt}.l1-{attempt:08x}"
            committed = ev.CheckpointCommitted(
                name=name, step=step, reason="x", seconds=9.0, size=10**10, blocked_s=1.5
            )
            yield at + 1, "rank0", committed
    yield from _end(run, attempt, last, nodes, lasts)


def _end(
    run: RunDirectory, attempt: int, last: int, nodes: tuple[str, ...], lasts: float
) -> Iterator[tuple[float, str, ev.Event]]:
    cause = _CAUSES[attempt % len(_CAUSES)]
    bad = nodes[attempt % _NODES]
    at = lasts * 0.91
    if attempt % 10 == 0:
        folder = run.stacks(attempt, 1)
        folder.mkdir(parents=True, mode=0o700)
        (folder / "rank3.txt").write_text(_STACK)
        (folder / "rank3.txt").chmod(0o600)
        yield (
            at,
            "supervisor",
            ev.StallSeen(
                step=last,
                late_ranks=(3,),
                late_hosts=(bad,),
                since_s=60.0,
                limit_s=30.0,
                files=(f"attempts/{attempt}/stacks/1/rank3.txt",),
            ),
        )
    yield at, "supervisor", ev.LaunchEnded(outcome=cause.value, step=last, exact=True)
    incident = Incident(
        id=f"{attempt}.1",
        cause=cause,
        confidence=Confidence.LIKELY,
        evidence=tuple(
            Evidence(f"rank {rank} on {bad}", f"the connection to rank {rank + 8} was lost" * 3)
            for rank in range(6)
        ),
        step=last,
        rank=3,
        hosts=(bad,),
    )
    yield at, "supervisor", ev.IncidentSeen(incident=incident)
    changes = (Change("lr_scale", "1", "0.5"),) if cause is Cause.NON_FINITE else ()
    decision = Decision(
        incident_id=incident.id,
        cause=cause,
        action=Action.REQUEUE,
        reason=f"{cause.value}: requeue (attempt {attempt} of any number)",
        plan=RecoveryPlan(lr_factor=0.5, lr_from_step=last, lr_ramp_steps=500)
        if changes
        else RecoveryPlan(),
        changes=changes,
        rung=0,
    )
    yield at, "supervisor", ev.DecisionTaken(decision=decision)
    struck = ev.NodesStruck(nodes=(bad,), cause=cause.value, incident_id=incident.id)
    yield at, "supervisor", struck
    yield at + 1, "supervisor", ev.RequeueDone(job="8812301", method="scontrol requeue")
    yield at + 1, "supervisor", ev.AttemptEnded(outcome="requeued")


def opened(page: Path) -> float:
    """Seconds until Chromium has drawn the page: its own clock, from the start of the load."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "apt-get install chromium, or --no-browser"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        tab.goto(page.absolute().as_uri())
        tab.wait_for_selector("html[data-ready=yes]", state="attached")
        # Two frames later everything that was laid out is on the screen.
        milliseconds = float(tab.evaluate(_DRAWN))
        browser.close()
    return milliseconds / 1000


def main() -> None:
    """Write the month, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attempts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="where to leave the report")
    parser.add_argument("--no-browser", action="store_true")
    arguments = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory() as folder:
        # Elsewhere: the peak of a process counts that of the one that has started it.
        with ProcessPoolExecutor(1) as pool:
            run = pool.submit(write_month, Path(folder), arguments.attempts).result()
        journal = sum(path.stat().st_size for path in run.journal.iterdir())
        page = Path(folder) / "report.html"
        command = [sys.executable, "-m", "slurm_forge", "report", str(run.path), "-o", str(page)]
        costs = [measured(command) for _ in range(arguments.rounds)]
        size = page.stat().st_size
        drawn = [] if arguments.no_browser else [opened(page) for _ in range(arguments.rounds)]
        if arguments.keep:
            shutil.copy(page, arguments.keep)
    wall, cpu = spread(each[0] for each in costs), spread(each[1] for each in costs)
    peak = max(each[2] for each in costs)
    rows = [
        ("made, seconds", cell(wall)),
        ("made, CPU seconds", cell(cpu)),
        ("peak, MiB", f"{peak:.0f}"),
        ("file, MB", f"{size / 1e6:.2f}"),
        ("opened in Chromium, seconds", cell(spread(drawn))),
    ]
    head = f"{arguments.attempts} attempts, journal of {journal / (1 << 20):.1f} MiB"
    sys.stdout.write(f"{head}\n{table(('report', ''), rows)}\n")
    write_json(
        arguments.json,
        {
            "machine": asdict(Machine.measured(load, began)),
            "attempts": arguments.attempts,
            "journal_bytes": journal,
            "wall_s": plain(wall),
            "cpu_s": plain(cpu),
            "peak_mib": peak,
            "bytes": size,
            "opened_s": plain(spread(drawn)),
        },
    )


if __name__ == "__main__":
    main()
