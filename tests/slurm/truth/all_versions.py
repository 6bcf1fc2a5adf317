"""``python -m tests.slurm.truth.all_versions``: the same checks on every Slurm there is here.

Ten preemptions in a row, the truth table and doctor's configurations, each as its own command on
each version; what was done before is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from pydantic import TypeAdapter

from slurm_forge.testing.cluster.machine import path_with_prefix, search_path
from tests.slurm.truth.cells import CELLS
from tests.slurm.truth.judging import Row
from tests.slurm.truth.promises import PROMISES
from tests.slurm.truth.promises_table import DOCUMENT
from tests.slurm.truth.table import ROWS

_PREEMPTIONS, _CELLS, _DOCTOR = "preemptions.json", "truth.json", "doctor.json"
_VERSION = re.compile(r"[0-9]{2}\.[0-9]{2}\.[0-9]+\S*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """One Slurm of this machine, and the PATH on which its programs come first."""

    version: str
    path: str

    def folder(self, results: Path) -> Path:
        return results / self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a folder of results was seen on."""

    version: str
    date: str
    cpus: int
    machine: str


_CHECKED = TypeAdapter(Checked)


def main(argv: Sequence[str] | None = None) -> int:
    """0 where everything that was tried came out right."""
    given = _parser().parse_args(argv)
    found = installations(given.slurm)
    with ThreadPoolExecutor(max_workers=given.jobs) as pool:
        codes = list(pool.map(lambda each: _check(each, given), found))
    if given.page is not None:
        given.page.write_text(page(given.json))
    return max(codes, default=2)


def installations(prefixes: Sequence[Path] | None) -> list[Installation]:
    """The Slurms below ``prefixes``; by default that on PATH and those in /opt, oldest first."""
    asked: list[Path | None] = list(prefixes or ())
    if prefixes is None:
        asked = [None, *sorted(Path("/opt").glob("slurm-[0-9]*"))]
    found = []
    for prefix in asked:
        path = path_with_prefix(os.environ.get("PATH", os.defpath), prefix)
        program = shutil.which("slurmctld", path=search_path(path))
        if program is None:
            continue
        told = subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout
        version = _VERSION.search(told)
        if version is None:
            raise SystemExit(f"{program} -V: {told.strip()}: that is no version")
        found.append(Installation(version=version[0], path=path))
    return sorted(found, key=lambda each: each.version)


def _check(slurm: Installation, given: argparse.Namespace) -> int:
    folder = slurm.folder(given.json)
    folder.mkdir(parents=True, exist_ok=True)
    seen_on = Checked(
        version=slurm.version,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        cpus=os.cpu_count() or 0,
        machine=platform.machine(),
    )
    (folder / "checked.json").write_bytes(_CHECKED.dump_json(seen_on) + b"\n")
    tracking = ("--tracking", given.tracking)
    cells = ("--cell", *given.cell) if given.cell else ()
    only = [word for name in given.promise or () for word in ("--only", name)]
    commands = {
        _PREEMPTIONS: ("tests.slurm.truth.fifty", "--count", str(given.count)),
        _CELLS: ("tests.slurm.truth", *cells),
        _DOCTOR: ("tests.slurm.truth.promises_table", "--jobs", "1", *only),
    }
    worst = 0
    for file, (module, *words) in commands.items():
        result = folder / file
        if file.partition(".")[0] not in given.check or (
            file == _PREEMPTIONS and result.exists() and not _preempted(result)["complaints"]
        ):
            continue
        print(f"{slurm.version}: {module}", flush=True)
        with result.with_suffix(".log").open("a") as log:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", module),
                    *(*words, *tracking, "--json", str(result)),
                ],
                env={**os.environ, "PATH": slurm.path},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        # What has written nothing down has tried nothing.
        right = done.returncode == 0 and result.exists()
        print(f"{slurm.version}: {module}: {'right' if right else 'WRONG'}", flush=True)
        worst = max(worst, int(not right))
    return worst


# --- the page ---------------------------------------------------------------------------------


def page(results: Path) -> str:
    """The result page, in Markdown: a column for each version."""
    folders = sorted(file.parent for file in results.glob("*/checked.json"))
    versions = [_CHECKED.validate_json((each / "checked.json").read_bytes()) for each in folders]
    rows = [
        ("preempted again and again", [_preemptions_cell(each) for each in folders]),
        *_table_rows([_truth(each) for each in folders]),
        *_table_rows([_doctor(each) for each in folders]),
    ]
    lines = [
        "| | " + " | ".join(each.version for each in versions) + " |",
        "|---|" + "---|" * len(versions),
        "| date | " + " | ".join(each.date for each in versions) + " |",
    ]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows if any(cells)]
    return "\n".join(lines) + "\n"


def _table_rows(columns: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def _truth(folder: Path) -> dict[str, str]:
    file = folder / _CELLS
    rows: dict[str, Row] = {}
    if file.exists():
        rows = {row.cell: row for row in ROWS.validate_json(file.read_bytes())}
    return {cell.title: _cell(rows[cell.name]) for cell in CELLS if cell.name in rows}


def _cell(row: Row) -> str:
    if row.skipped:
        return "left out"
    return f"right {row.seconds:.0f} s" if row.passed else f"**wrong**: {row.complaints[0][:120]}"


def _doctor(folder: Path) -> dict[str, str]:
    file = folder / _DOCTOR
    if not file.exists():
        return {}
    rows = {row.name: row for row in DOCUMENT.validate_json(file.read_bytes()).rows}
    named = [promise.name for promise in PROMISES if promise.name in rows]
    return {f"doctor: `{name}`": "kept" if rows[name].passed else "**broken**" for name in named}


def _preemptions_cell(folder: Path) -> str:
    file = folder / _PREEMPTIONS
    if not file.exists():
        return ""
    told = _preempted(file)
    verdict = str(told["verdict"]).partition("\n")[0]
    complaints = told["complaints"]
    first = complaints[0] if isinstance(complaints, list) and complaints else complaints
    return f"**wrong**: {str(first)[:120]}" if complaints else verdict.split(",")[0]


def _preempted(file: Path) -> dict[str, object]:
    told: dict[str, object] = json.loads(file.read_text())
    return told


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/all-versions", description=__doc__)
    parser.add_argument(
        "--slurm",
        nargs="+",
        type=Path,
        metavar="PREFIX",
        help="only these; default: the one on PATH, and each in /opt/slurm-VERSION",
    )
    parser.add_argument(
        "--check",
        nargs="+",
        choices=["preemptions", "truth", "doctor"],
        default=["preemptions", "truth", "doctor"],
    )
    parser.add_argument("--count", type=int, default=10, help="preemptions (default: %(default)s)")
    parser.add_argument("--cell", nargs="+", choices=[each.name for each in CELLS], metavar="NAME")
    parser.add_argument("--promise", nargs="+", choices=[each.name for each in PROMISES])
    parser.add_argument("--tracking", choices=["cgroup", "linuxproc"], default="cgroup")
    parser.add_argument("--jobs", type=int, default=1, help="versions side by side")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="DIR",
        default=Path("build/versions"),
        help="what came of it, by version; goes on where it ends (default: %(default)s)",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
