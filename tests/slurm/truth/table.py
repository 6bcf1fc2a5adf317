"""Runs cells one after the other and prints what came of them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from slurm_forge.testing.cluster import ClusterSpec, SlurmCluster, Tracking
from slurm_forge.testing.cluster.machine import why_not_here
from tests.slurm.truth.cells import CELLS, Cell, cell_named
from tests.slurm.truth.judging import WORDS, Row
from tests.slurm.truth.ours import References, run_ours

#: What ``--json`` holds; a later call goes on from it.
ROWS = TypeAdapter(list[Row])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 where every cell came out right."""
    given = _parser().parse_args(argv)
    reason = why_not_here(os.environ.get("PATH", os.defpath))
    if reason is not None:
        print(f"no Slurm can be started here: {reason}", file=sys.stderr)
        return 2
    cells = [cell_named(name) for name in given.cell] if given.cell else list(CELLS)
    wanted = [Tracking.CGROUP, Tracking.LINUXPROC]
    if given.tracking != "both":
        wanted = [Tracking(given.tracking)]
    warnings.simplefilter("ignore")  # torch, on a checkpoint that one process reads
    rows = _known(given.json)

    def done(row: Row) -> None:
        print(_shown(row), flush=True)
        rows[row.tracking, row.cell] = row
        if given.json is not None:
            given.json.write_bytes(ROWS.dump_json(list(rows.values()), indent=1) + b"\n")

    for tracking in wanted:
        left = [cell for cell in cells if (tracking.value, cell.name) not in rows]
        if left:
            _with_tracking(tracking, left, done, stock=given.stock, keep=given.keep)
    print(_totals(list(rows.values())))
    return 0 if all(row.passed or row.skipped for row in rows.values()) else 1


def _known(file: Path | None) -> dict[tuple[str, str], Row]:
    """What an earlier call came to; what was wrong then is tried again."""
    if file is None or not file.exists():
        return {}
    rows = ROWS.validate_json(file.read_bytes())
    return {(row.tracking, row.cell): row for row in rows if row.passed or row.skipped}


def _with_tracking(
    tracking: Tracking,
    cells: Sequence[Cell],
    done: Callable[[Row], None],
    *,
    stock: bool,
    keep: bool,
) -> None:
    place = Path(tempfile.mkdtemp(prefix="truth-", dir="/tmp"))
    place.chmod(0o755)
    beside = _stock() if stock else None
    try:
        with SlurmCluster(place / "slurm", ClusterSpec(tracking=tracking)) as cluster:
            print(f"processes tracked by {cluster.tracking.value}", flush=True)
            references = References(place)
            for cell in cells:
                row = run_ours(cell, cluster, place / f"ours-{cell.name}", references)
                cluster.reset()
                if beside is not None and not row.skipped:
                    row = replace(row, stock=beside(cell, cluster, place / f"stock-{cell.name}"))
                    cluster.reset()
                done(row)
    finally:
        if keep:
            print(f"the runs are in {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)


def _stock() -> Callable[[Cell, SlurmCluster, Path], str]:
    from tests.slurm.truth.stock import run_stock

    def beside(cell: Cell, cluster: SlurmCluster, folder: Path) -> str:
        folder.mkdir()
        row = run_stock(cell, cluster, folder)
        return f"{row.outcome}: {row.text}"

    return beside


def _shown(row: Row) -> str:
    word = "left out" if row.skipped else "right" if row.passed else "WRONG"
    lines = [f"{word:8}  {row.cell:28} {row.seconds:6.1f} s  {row.title}"]
    lines.append(f"          {row.skipped or row.outcome}")
    lines += [f"          ! {complaint}" for complaint in row.complaints]
    if row.stock:
        lines.append(f"          stock: {row.stock}")
    return "\n".join(lines)


def _totals(rows: Sequence[Row]) -> str:
    right = sum(row.passed for row in rows)
    out = sum(bool(row.skipped) for row in rows)
    wrong = sum(one.startswith(WORDS) for row in rows for one in row.complaints)
    told = sum(row.claims > 0 for row in rows)
    claims = sum(row.claims for row in rows)
    words = f"{claims} claims of the reports in {told} cells, {wrong} contradictions"
    return (
        f"{right} of {len(rows) - out} right" + (f", {out} left out" if out else "") + f"; {words}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/truth-table", description=__doc__)
    parser.add_argument("--cell", nargs="+", metavar="NAME", help="only these")
    parser.add_argument(
        "--tracking",
        choices=["cgroup", "linuxproc", "both", "auto"],
        default="both",
        help="how Slurm finds the processes of a job (default: %(default)s)",
    )
    parser.add_argument("--stock", action="store_true", help="stock submitit beside it")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the table for programs; goes on where it ends"
    )
    parser.add_argument("--keep", action="store_true", help="leave the runs where they are")
    return parser
