"""How fast the command line starts, between ``python -c pass`` and ``python -c 'import torch'``.

    python -m benchmarks.cli [--rounds 9] [--runs 1000] [--only WORD] [--json FILE]

Every round runs each command once; the order changes from round to round.  Ratios are of one round.
Commands over many runs ask a squeue that answers at once: it is our time that is measured.
``--only`` takes the floor and the commands that hold the word.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from benchmarks.journals import write_run
from benchmarks.many_runs import queue_lines, write_many
from benchmarks.tables import Machine, Spread, paired_ratio, spread, table, write_json
from slurm_forge.run_directory import RunDirectory

#: What the supervisor does when an attempt begins, before each launch, and before each decision.
_FOLD = """
import sys
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
run_state(RunDirectory.existing(sys.argv[1]))
"""


class Command(str, Enum):
    """What is started, in the order of the table."""

    FLOOR = "python -c pass"
    IMPORT = "python -c 'import slurm_forge'"
    HELP = "slurm-forge --help"
    STATUS = "slurm-forge status RUN"
    EXPLAIN = "slurm-forge explain RUN"
    STATUS_WEEK = "slurm-forge status RUN, a week long"
    EXPLAIN_WEEK = "slurm-forge explain RUN, a week long"
    STATUS_MANY = "slurm-forge status, many runs"
    STATUS_MANY_FIRST = "slurm-forge status, many runs, for the first time"
    WATCH_MANY = "slurm-forge watch --once, many runs"
    SUPERVISE = "python -c 'import slurm_forge.launch.supervisor.main'"
    FOLD_WEEK = "python -c 'read_journal, fold', a week long"
    CEILING = "python -c 'import torch'"


@dataclass(frozen=True, slots=True)
class Start:
    """One process: seconds on the wall clock, and of the cores."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One command over all rounds."""

    command: str
    wall_s: Spread
    cpu_s: Spread
    to_floor: Spread
    to_ceiling: Spread | None


#: Something new needs a person: the answer of a first look.
_MAY_BE_ONE = (Command.WATCH_MANY,)
_FIRST = (Command.STATUS_MANY_FIRST,)


def command_line(
    command: Command, short: RunDirectory, week: RunDirectory, many: Path
) -> list[str]:
    """The words of a command."""
    python, tool = [sys.executable, "-c"], _tool()
    status, watch = ["status", "--runs", str(many)], ["watch", "--once", "--runs", str(many)]
    return {
        Command.STATUS_MANY: [*tool, *status],
        Command.STATUS_MANY_FIRST: [*tool, *status],
        Command.WATCH_MANY: [*tool, *watch],
        Command.FLOOR: [*python, "pass"],
        Command.IMPORT: [*python, "import slurm_forge"],
        Command.HELP: [*tool, "--help"],
        Command.STATUS: [*tool, "status", str(short.path)],
        Command.EXPLAIN: [*tool, "explain", str(short.path)],
        Command.STATUS_WEEK: [*tool, "status", str(week.path)],
        Command.EXPLAIN_WEEK: [*tool, "explain", str(week.path)],
        Command.SUPERVISE: [*python, "import slurm_forge.launch.supervisor.main"],
        Command.FOLD_WEEK: [*python, _FOLD, str(week.path)],
        Command.CEILING: [*python, "import torch"],
    }[command]


def _tool() -> list[str]:
    """The installed script, which is what people type; else the module."""
    script = Path(sys.executable).with_name("slurm-forge")
    return [str(script)] if script.exists() else [sys.executable, "-m", "slurm_forge.cli.main"]


def start(words: Sequence[str], environment: dict[str, str], accepted: Sequence[int]) -> Start:
    """Run a command to its end, with a status that is accepted."""
    began = time.perf_counter()
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    complaint = process.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode not in accepted:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}: {complaint}")
    return Start(wall, usage.ru_utime + usage.ru_stime)


def pretended(folder: Path, count: int) -> dict[str, str]:
    """The environment with a squeue that knows the runs, and other commands that know nothing."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / "queue").write_text(queue_lines(count))
    texts = {
        "squeue": f"exec cat {folder}/queue",
        "scontrol": "echo 'Configuration data as of now'; echo 'ClusterName = bench'",
        "sacct": "exit 0",
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path, "XDG_STATE_HOME": str(folder / "state")}


def measure(
    rounds: int, folder: Path, count: int, wanted: Sequence[Command]
) -> dict[Command, list[Start]]:
    """All commands, interleaved; the first round fills the page cache and does not count."""
    short = write_run(folder, "short", attempts=3, hours=0.2)
    week = write_run(folder, "week", attempts=14, hours=12)
    many = folder / "many"
    many.mkdir()
    write_many(many, count)
    environment = pretended(folder, count)
    words = {command: command_line(command, short, week, many) for command in wanted}
    found: dict[Command, list[Start]] = {command: [] for command in wanted}
    order = list(wanted)
    for number in range(rounds + 1):
        order = order[1:] + order[:1]
        for command in order:
            state = f"state-{number}-{command.name}" if command in _FIRST else "state"
            taken = start(
                words[command],
                {**environment, "XDG_STATE_HOME": str(folder / state)},
                (0, 1) if command in _MAY_BE_ONE else (0,),
            )
            if number > 0:
                found[command].append(taken)
    return found


def figures(found: dict[Command, list[Start]]) -> list[Figures]:
    """What the rounds come to."""
    wall = {command: [taken.wall_s for taken in starts] for command, starts in found.items()}
    rows = []
    for command, starts in found.items():
        parts = (
            spread(wall[command]),
            spread(taken.cpu_s for taken in starts),
            paired_ratio(wall[command], wall[Command.FLOOR]),
            paired_ratio(wall[command], wall[Command.CEILING]) if Command.CEILING in wall else None,
        )
        walls, cpus, floor, ceiling = parts
        assert walls and cpus and floor, "every command ran in every round"
        rows.append(
            Figures(
                command=command.value,
                wall_s=walls,
                cpu_s=cpus,
                to_floor=floor,
                to_ceiling=ceiling,
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cli", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    load, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as folder:
        wanted = [each for each in Command if given.only in each.value or each is Command.FLOOR]
        rows = figures(measure(given.rounds, Path(folder), given.runs, wanted))
    machine = Machine.measured(load, began)
    header = ("median (least-most)", "wall s", "cpu s", "x python", "share of torch")
    cells = [
        (
            r.command,
            r.wall_s.text(3),
            r.cpu_s.text(3),
            r.to_floor.text(1),
            None if r.to_ceiling is None else r.to_ceiling.text(2),
        )
        for r in rows
    ]
    print(f"{machine.text()}; {given.rounds} rounds\n")
    print(table(header, cells))
    write_json(given.json, {"machine": asdict(machine), "commands": [asdict(r) for r in rows]})


if __name__ == "__main__":
    main()
