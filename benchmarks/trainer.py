"""What slurm_forge adds to a step of a trainer of another library.

    python -m benchmarks.trainer [--framework lightning] [--seconds 60] [--processes 3]
                                 [--json FILE]

One process trains one model in one loop, as a run (every default on: guard, journal, monitor,
checkpoints).  In blocks of steps, what the run has put into the trainer is there, or is taken out;
the blocks without it are of two kinds that differ in nothing, *plain* and *again*.  A round has two
blocks of each kind in a random order and then in its reverse, so that a machine that gets slower
affects all kinds alike.  Quoted are medians over the rounds of the differences within a round, in
microseconds of the training thread per step, and between what they lie with 95 % certainty.

*Again - plain* is what the benchmark finds where there is nothing: where that is not 0, or is less
certain than the goal, it says that it can't tell.  Threads of the run that work beside the trainer
are there in all blocks: their processor time is told by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.tables import Change, Machine, table, write_json
from benchmarks.trainer_blocks import Differences, Measured
from benchmarks.trainer_loops import FRAMEWORKS, SAMPLES, measure

#: Microseconds that a run may add to a step: 0.5 % of one of 10 ms.
_GOAL_US = 50.0


def verdict(added: Change, control: Change) -> str:
    """Whether the goal is reached, were the method as far off as the control allows for."""
    if added.high - min(0, control.low) <= _GOAL_US:
        return "reached"
    if added.low - max(0, control.high) > _GOAL_US:
        return "missed"
    return "can't be told: the goal lies within the intervals"


def measured(options: argparse.Namespace, work: Path, seed: int) -> Measured:
    """In a process of its own, whose memory is laid out in its own way."""
    folder = Path(tempfile.mkdtemp(dir=work))
    words = [sys.executable, "-m", "benchmarks.trainer", "--folder", str(folder)]
    for name in ("framework", "seconds", "width"):
        words += [f"--{name}", str(getattr(options, name))]
    words += ["--seed", str(seed)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environ |= {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        raise SystemExit(f"failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return Measured.from_json(json.loads((folder / "figures.json").read_text()))


def row(name: str, rounds: list[Differences]) -> tuple[list[str | None], str]:
    """Of the table, and what follows from it."""
    plain = statistics.median(each.plain for each in rounds)
    added = Change.of([each.added for each in rounds])
    control = Change.of([each.control for each in rounds])
    share = f"{100 * added.median / plain:+.2f}"
    cells = [name, str(len(rounds)), f"{plain / 1e3:.2f}", added.text(0), share, control.text(0)]
    return list(cells), verdict(added, control)


def report(processes: list[Measured]) -> str:
    """A row for each process and one for all of them; and whether the goal is reached."""
    rows, closing = [], []
    for clock in ("cpu", "wall"):
        each = [[one.of(clock) for one in process.rounds] for process in processes]
        rows += [row(f"{clock}, process {n}", found)[0] for n, found in enumerate(each, 1)]
        last, told = row(f"{clock}, all", [one for found in each for one in found])
        rows.append(last)
        closing.append(f"goal, at most {_GOAL_US:.0f} us added ({clock}): {told}")
    header = ["us per step", "rounds", "plain, ms", "added by a run", "in %", "again - plain"]
    beside = statistics.median(one.beside for one in processes)
    closing.append(f"threads beside the trainer: {beside:.0f} us of a processor per step")
    return "\n".join([table(header, rows), *closing])


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, default="transformers")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training in each process")
    parser.add_argument("--width", type=int, default=448, help="of the model; 448: about 10 ms")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the blocks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.folder is not None:
        found = measure(
            options.framework, seconds=options.seconds, width=options.width,
            folder=options.folder, seed=options.seed,
        )  # fmt: skip
        (options.folder / "figures.json").write_text(json.dumps(asdict(found)))
        return
    load, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory() as work:
        seeds = range(options.seed, options.seed + options.processes)
        processes = [measured(options, Path(work), seed) for seed in seeds]
    machine = Machine.measured(load, began)
    print(f"{options.framework}, one rank, {SAMPLES} samples per step; {machine.text()}\n")
    print(report(processes))
    write_json(
        options.json,
        {"machine": asdict(machine), "framework": options.framework, "width": options.width,
         "goal_us": _GOAL_US, "processes": [asdict(each) for each in processes]},
    )  # fmt: skip


if __name__ == "__main__":
    main()
