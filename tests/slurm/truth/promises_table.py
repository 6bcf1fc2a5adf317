"""``python -m tests.slurm.truth.promises_table``: each promise on a real Slurm, and its page."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from slurm_forge.testing.cluster import ClusterSpec, SlurmCluster, Tracking
from slurm_forge.testing.cluster.machine import why_not_here
from tests.slurm.truth.promises import PROMISES, Kept, keep

__all__ = ["main", "page"]


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every promise was kept."""
    given = _parser().parse_args(argv)
    reason = why_not_here(os.environ.get("PATH", os.defpath))
    if reason is not None:
        print(f"no Slurm can be started here: {reason}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")  # torch, on a checkpoint that one process reads
    wanted = [each for each in PROMISES if not given.only or each.name in given.only]
    place = Path(tempfile.mkdtemp(prefix="promises-", dir="/tmp"))
    place.chmod(0o755)
    rows: list[Kept] = []
    try:
        spec = ClusterSpec(tracking=Tracking(given.tracking))
        with SlurmCluster(place / "slurm", spec) as cluster:
            tracked = cluster.tracking.value
            version = cluster.state.platform.version
            slurm = f"{version.year:02d}.{version.month:02d}"
            for promise in wanted:
                row = keep(promise, cluster, place / promise.name)
                print(_shown(row), flush=True)
                rows.append(row)
                _written(given, rows, slurm, tracked)
    finally:
        if given.keep:
            print(f"the runs are in {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)
    kept = sum(row.passed for row in rows)
    print(f"{kept} of {len(rows)} configurations as promised")
    return 0 if rows and kept == len(rows) else 1


def _written(given: argparse.Namespace, rows: list[Kept], slurm: str, tracked: str) -> None:
    if given.json is not None:
        document = {
            "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
            "slurm": slurm,
            "tracking": tracked,
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "rows": [asdict(row) for row in rows],
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    if given.page is not None:
        given.page.write_text(page(rows, slurm=slurm, tracked=tracked))


def _shown(row: Kept) -> str:
    head = f"{'kept' if row.passed else 'BROKEN':<7} {row.name} ({row.seconds:.0f} s)"
    lines = [f"        {row.problem}"] if row.problem else []
    lines += [
        f"        {each.name}: promised {each.promised}, happened {each.happened}"
        for each in row.fields
        if not each.kept
    ]
    return "\n".join([head, *lines])


def page(rows: Sequence[Kept], *, slurm: str, tracked: str) -> str:
    """The result page, in Markdown."""
    fields = list(dict.fromkeys(each.name for row in rows for each in row.fields))
    shown = [name for name in fields if not name.startswith("a task")]
    lines = [
        "# Does doctor tell the truth?",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, Slurm {slurm} on one machine "
        f"({os.cpu_count()} CPUs, {platform.machine()}, no GPU), processes tracked by {tracked}. "
        "Made by `scripts/doctor-truth --page docs/results/doctor.md`.",
        "",
        "For each configuration of the controller `slurm-forge doctor --live` was asked, then a "
        "real run on two nodes was preempted there, beside a job that will not leave. A cell says "
        "what was promised; where something else came, that follows in **bold**. The notice is "
        "from the first signal to SIGKILL, which the stubborn job has measured: Slurm looks for "
        "grace times that are over every 30 s at the latest.",
        "",
        f"{sum(row.passed for row in rows)} of {len(rows)} configurations as promised, "
        f"{sum(len(row.fields) for row in rows)} fields compared.",
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


def _cell(promised: str, happened: str, kept: bool) -> str:
    if promised == happened:
        return promised
    return f"{promised} ({happened})" if kept else f"{promised}, **{happened}**"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/doctor-truth", description=__doc__)
    parser.add_argument("--json", type=Path, help="write every field there")
    parser.add_argument("--page", type=Path, help="write the page there")
    parser.add_argument("--only", action="append", choices=[each.name for each in PROMISES])
    parser.add_argument("--tracking", choices=[t.value for t in Tracking], default="auto")
    parser.add_argument("--keep", action="store_true", help="leave the runs behind")
    return parser


if __name__ == "__main__":
    sys.exit(main())
