"""What ``slurm-forge top`` costs: many runs in one folder, of which a fifth trains.

    python -m benchmarks.top [--runs 1000] [--seconds 60] [--json FILE]

Reading is measured in the process, the whole program with Textual in a terminal of 80 x 24 (a
pseudo terminal) while all runs that train write a line every five seconds.  Slurm's squeue answers
at once.
"""

from __future__ import annotations

import argparse
import os
import pty
import select
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fcntl import ioctl
from pathlib import Path

from benchmarks.cli import pretended
from benchmarks.many_runs import Kind, kind_of, write_many
from benchmarks.tables import Machine, Spread, plain, spread, table, write_json
from slurm_forge.cli.monitoring.top_reading import Fleet
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import Record, encode
from slurm_forge.report.top.view import View, sorted_rows
from slurm_forge.run_directory import RunDirectory

_ROUNDS = 9
#: How often a rank writes its progress.
_EVERY_S = 5.0
#: Between two looks, as ``top`` has it by itself.
_LOOK_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Whole:
    """The program in a terminal: seconds of a core per second, and bytes that it sent per look."""

    cpu_share: float
    bytes_per_look: float
    first_picture_s: float


def append(runs: list[RunDirectory], step: int) -> None:
    """A line of progress in each of the runs."""
    for run in runs:
        path = max(run.journal.glob("*-rank0-*.jsonl"))
        attempt = int(path.name.partition("-")[0])
        event = ev.Logged(step=step, values={"loss": 2.5})
        record = Record(
            attempt=attempt,
            launch=1,
            sequence=step,
            time=time.time(),
            writer="rank0-00000000",
            event=event,
        )
        with path.open("ab") as file:
            file.write(encode(record))


def measure_reading(folder: Path, runs: list[RunDirectory]) -> dict[str, Spread | None]:
    """Seconds of a core for each part of a refresh."""
    training = [run for number, run in enumerate(runs) if kind_of(number) is Kind.TRAINS]
    parts: dict[str, list[float]] = {}

    def timed(name: str, began: float) -> None:
        parts.setdefault(name, []).append(time.process_time() - began)

    fleet = Fleet(lambda: runs, folder, None)
    began = time.process_time()
    fleet.poll(1e6)
    timed("read all runs, for the first time", began)
    fleet.close()
    again = Fleet(lambda: runs, folder, None)
    began = time.process_time()
    again.poll(1e6)
    timed("read all runs, a second time", began)
    fleet.poll()
    share = max(1, round(len(training) * _LOOK_S / _EVERY_S))
    for number in range(_ROUNDS):
        began = time.process_time()
        fleet.poll()
        timed("look: nothing has changed", began)
        append(training[:share], 10**6 + number)
        began = time.process_time()
        fleet.poll()
        timed(f"look: {share} runs have written", began)
        began = time.process_time()
        rows = sorted_rows(fleet.rows(), finished=True)
        view = View(80)
        for row in rows[:12]:
            view.row(row, now=time.time(), chosen=False)
        view.detail(rows[0], now=time.time(), height=11)
        timed("rows and lines of a picture", began)
    return {name: spread(values) for name, values in parts.items()}


def measure_program(
    folder: Path, runs: list[RunDirectory], environment: dict[str, str], seconds: float
) -> Whole:
    """Start it, let it show all runs, then measure while the runs write."""
    training = [run for number, run in enumerate(runs) if kind_of(number) is Kind.TRAINS]
    words = [sys.executable, "-m", "slurm_forge", "top", "--runs", str(folder)]
    began = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.execve(words[0], words, {**environment, "TERM": "xterm-256color"})
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    picture = b""
    while b"running" not in picture:
        picture += _received(terminal, 30.0)
    first = time.monotonic() - began
    _drain(terminal, 20.0)
    cpu, sent, step = _cpu_s(child), 0, 2 * 10**6
    start = time.monotonic()
    due = start
    while (now := time.monotonic()) < start + seconds:
        if now >= due:
            due += _EVERY_S
            step += 10
            append(training, step)
        sent += len(_received(terminal, 0.2))
    passed = time.monotonic() - start
    used = _cpu_s(child) - cpu
    os.write(terminal, b"q")
    _drain(terminal, 2.0)
    os.close(terminal)
    os.waitpid(child, 0)
    return Whole(used / passed, sent / (passed / _LOOK_S), first)


def _drain(terminal: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _received(terminal, 0.2)


def _received(terminal: int, seconds: float) -> bytes:
    ready, _, _ = select.select([terminal], [], [], seconds)
    try:
        return os.read(terminal, 1 << 16) if ready else b""
    except OSError:
        return b""


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.top", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(words)
    load, started = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        folder = top / "runs"
        folder.mkdir()
        runs = write_many(folder, arguments.runs)
        environment = pretended(top, arguments.runs) | {"XDG_STATE_HOME": str(top / "state")}
        os.environ["XDG_STATE_HOME"] = str(top / "state")
        parts = measure_reading(folder, runs)
        whole = measure_program(folder, runs, environment, arguments.seconds)
    machine = Machine.measured(load, started)
    rows = [[name, None if s is None else f"{1000 * s.median:.1f}"] for name, s in parts.items()]
    print(table([f"of {arguments.runs} runs", "ms of a core"], rows))
    print(f"\nthe program: {100 * whole.cpu_share:.1f} % of a core, ", end="")
    print(f"{whole.bytes_per_look:.0f} bytes per look, first picture {whole.first_picture_s:.1f} s")
    print(machine.text())
    body = {name: plain(each) for name, each in parts.items()}
    found = {"machine": asdict(machine), "cpu_s": body, "program": asdict(whole)}
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
