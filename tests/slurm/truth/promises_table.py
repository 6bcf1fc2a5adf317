"""``python -m tests.slurm.truth.promises_table``: each promise on a real Slurm, and its page."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing import Queue, get_context
from pathlib import Path
from types import FrameType

from pydantic import TypeAdapter

from slurm_forge.testing.cluster import ClusterSpec, SlurmCluster, Tracking
from slurm_forge.testing.cluster.machine import why_not_here
from tests.slurm.truth.promises import PROMISES, Kept, keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the rows were seen on."""

    date: str
    slurm: str
    tracking: str
    cpus: int
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What ``--json`` holds; a later call goes on from it."""

    place: Place
    rows: tuple[Kept, ...] = ()


DOCUMENT = TypeAdapter(Document)


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every promise was kept."""
    given = _parser().parse_args(argv)
    reason = why_not_here(os.environ.get("PATH", os.defpath))
    if reason is not None:
        print(f"no Slurm can be started here: {reason}", file=sys.stderr)
        return 2
    wanted = [each for each in PROMISES if not given.only or each.name in given.only]
    rows: dict[str, Kept] = {}
    if given.json is not None and given.json.exists():
        known = DOCUMENT.validate_json(given.json.read_bytes()).rows
        rows = {row.name: row for row in known if row.passed}
    left = [each.name for each in wanted if each.name not in rows]
    folder = Path(tempfile.mkdtemp(prefix="promises-", dir="/tmp"))
    folder.chmod(0o755)
    # Processes of their own: each talks to another cluster, by its environment.
    jobs = max(1, min(given.jobs, len(left)))
    told: Queue[tuple[Place, Kept] | None] = get_context("spawn").Queue()
    started = [
        get_context("spawn").Process(
            target=_several, args=(left[at::jobs], folder / f"{at}", given.tracking, told)
        )
        for at in range(jobs if left else 0)
    ]
    signal.signal(signal.SIGTERM, _leave)
    try:
        for process in started:
            process.start()
        running = len(started)
        while running:
            came = told.get()
            if came is None:
                running -= 1
                continue
            place, row = came
            rows[row.name] = row
            print(_shown(row), flush=True)
            ordered = tuple(rows[each.name] for each in PROMISES if each.name in rows)
            _written(given, Document(place=place, rows=ordered))
        for process in started:
            process.join()
    finally:
        for process in started:
            if process.is_alive():
                process.terminate()  # it takes its cluster down
                process.join()
        if given.keep:
            print(f"the runs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    asked = [rows[each.name] for each in wanted if each.name in rows]
    kept = sum(row.passed for row in asked)
    print(f"{kept} of {len(wanted)} configurations as promised")
    return 0 if kept == len(wanted) else 1


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(1)


def _several(
    names: Sequence[str], folder: Path, tracking: str, told: Queue[tuple[Place, Kept] | None]
) -> None:
    """These configurations one after the other, on a cluster of their own."""
    signal.signal(signal.SIGTERM, _leave)
    warnings.simplefilter("ignore")  # torch, on a checkpoint that one process reads
    folder.mkdir()
    folder.chmod(0o755)
    try:
        with SlurmCluster(folder / "slurm", ClusterSpec(tracking=Tracking(tracking))) as cluster:
            version = cluster.state.platform.version
            place = Place(
                date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
                slurm=f"{version.year:02d}.{version.month:02d}",
                tracking=cluster.tracking.value,
                cpus=os.cpu_count() or 0,
                machine=platform.machine(),
            )
            known = {promise.name: promise for promise in PROMISES}
            for name in names:
                told.put((place, keep(known[name], cluster, folder / name)))
    finally:
        told.put(None)


def _written(given: argparse.Namespace, document: Document) -> None:
    if given.json is not None:
        given.json.write_bytes(DOCUMENT.dump_json(document, indent=1) + b"\n")
    if given.page is not None:
        given.page.write_text(page(document))


def _shown(row: Kept) -> str:
    head = f"{'kept' if row.passed else 'BROKEN':<7} {row.name} ({row.seconds:.0f} s)"
    lines = [f"        {row.problem}"] if row.problem else []
    lines += [
        f"        {each.name}: promised {each.promised}, happened {each.happened}"
        for each in row.fields
        if not each.kept
    ]
    return "\n".join([head, *lines])


def page(document: Document) -> str:
    """The result page, in Markdown."""
    rows, place = document.rows, document.place
    fields = list(dict.fromkeys(each.name for row in rows for each in row.fields))
    shown = [name for name in fields if not name.startswith("a task")]
    lines = [
        "# Does doctor tell the truth?",
        "",
        f"{place.date}, Slurm {place.slurm} on one machine ({place.cpus} CPUs, {place.machine}, "
        f"no GPU needed), processes tracked by {place.tracking}. "
        "Made by `scripts/doctor-truth --page docs/results/doctor.md`.",
        "",
        "For each configuration of the controller `slurm-forge doctor --live` was asked, then a "
        "real run on two nodes was preempted there, beside a job that will not leave. A cell says "
        "what was promised, in brackets what came in other words, in **bold** what came instead. "
        "The notice is from the first signal to SIGKILL, which the stubborn job has measured: "
        "Slurm looks for grace times that are over every 30 s at the latest.",
        "",
        "Not among them: SUSPEND by QOS. With both QOS in one partition that is not shared "
        "(`OverSubscribe=NO`), Slurm 22.05 let the other job wait and suspended nobody in a "
        "minute.",
        "",
        f"{sum(row.passed for row in rows)} of the {len(rows)} configurations that were tried came "
        f"as promised, {sum(len(row.fields) for row in rows)} fields compared.{_not_tried(rows)}",
        "",
        "| configuration | " + " | ".join(shown) + " |",
        "|---|" + "---|" * len(shown),
    ]
    for row in rows:
        cells = {each.name: _cell(each.promised, each.happened, each.kept) for each in row.fields}
        told = [cells.get(name, "") for name in shown]
        lines.append(f"| {row.name} | " + " | ".join(told) + " |")
        if row.problem:
            lines.append(f"| | {row.problem} |")
    return "\n".join(lines) + "\n"


def _not_tried(rows: Sequence[Kept]) -> str:
    """Of the configurations that there are: those that the page says nothing of."""
    tried = {row.name for row in rows}
    others = [each.name for each in PROMISES if each.name not in tried]
    if not others:
        return ""
    return (
        f" Of the {len(PROMISES)} that there are, {len(others)} were not among them: "
        f"{', '.join(others)}. What ran on newer versions of Slurm is in "
        "[the same on every version](versions.md)."
    )


_PLAIN = {"None": "-", "True": "yes", "False": "no"}


def _cell(promised: str, happened: str, kept: bool) -> str:
    promised, happened = _PLAIN.get(promised, promised), _PLAIN.get(happened, happened)
    if promised == happened:
        return promised
    return f"{promised} ({happened})" if kept else f"{promised}, **{happened}**"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/doctor-truth", description=__doc__)
    parser.add_argument("--json", type=Path, help="write every field there, and go on from it")
    parser.add_argument("--page", type=Path, help="write the page there")
    parser.add_argument("--only", action="append", choices=[each.name for each in PROMISES])
    parser.add_argument("--tracking", choices=[t.value for t in Tracking], default="auto")
    parser.add_argument("--jobs", type=int, default=2, help="clusters side by side")
    parser.add_argument("--keep", action="store_true", help="leave the runs behind")
    return parser


if __name__ == "__main__":
    sys.exit(main())
