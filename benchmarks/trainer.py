"""What slurm_forge adds to a step of a trainer of another library.

    python -m benchmarks.trainer [--framework lightning] [--rounds 3] [--steps 1000] [--json FILE]

One process trains the same model by the library alone and as a run (every default on: guard,
journal, monitor, checkpoints), each in a thread of its own, by turns, a step of each.  The figures
are of the thread that trains, per step: lower quartiles over blocks of 8 steps, so that what is
done now and then counts; *cpu* is its processor time, which other work on the machine changes less
than *wall*.  In every other round the plain side comes first.  ``--control`` trains without a run
on both sides: what comes out then is the error of the figures.  ``--unguarded`` has the optimizer
make the updates as it does without slurm_forge: the difference to the figures without it is what
the check of the gradients costs.
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

from benchmarks.tables import Machine, cell, spread, table, write_json
from benchmarks.trainer_loops import FRAMEWORKS, SAMPLES, measure

_FIGURES = ("plain_wall", "plain_cpu", "forge_wall", "forge_cpu")


def measured(options: argparse.Namespace, work: Path, number: int) -> dict[str, float]:
    """Seconds per step, in a process of its own."""
    folder = Path(tempfile.mkdtemp(dir=work))
    words = [sys.executable, "-m", "benchmarks.trainer", "--folder", str(folder)]
    for name in ("framework", "steps", "width"):
        words += [f"--{name}", str(getattr(options, name))]
    words += ["--first", ("forge", "plain")[number % 2]]
    words += [f"--{name}" for name in ("unguarded", "control") if getattr(options, name)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environ |= {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    # Freed memory stays: else a step pays for the pages that the other side's has given back.
    environ |= {f"MALLOC_{name}_THRESHOLD_": str(1 << 30) for name in ("MMAP", "TRIM")}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        raise SystemExit(f"failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    found: dict[str, float] = json.loads((folder / "figures.json").read_text())
    return found


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, default="transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=448, help="of the model; 448: about 10 ms")
    parser.add_argument("--unguarded", action="store_true")
    parser.add_argument("--control", action="store_true", help="both sides without a run")
    parser.add_argument("--first", default="forge", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.folder is not None:
        found = measure(
            options.framework, steps=options.steps, width=options.width, folder=options.folder,
            guarded=not options.unguarded, control=options.control, first=options.first,
        )  # fmt: skip
        (options.folder / "figures.json").write_text(json.dumps(found))
        return
    load, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory() as work:
        rounds = [measured(options, Path(work), number) for number in range(options.rounds)]
    machine = Machine.measured(load, began)
    guard = "not guarded" if options.unguarded else "guarded"
    guard = "both sides without a run" if options.control else guard
    print(f"{options.framework}, one rank, {SAMPLES} samples per step, {guard}; {machine.text()}\n")
    rows: list[list[str | None]] = []
    for clock in ("cpu", "wall"):
        plain = statistics.median(each[f"plain_{clock}"] for each in rounds)
        added = [each[f"forge_{clock}"] - each[f"plain_{clock}"] for each in rounds]
        share = [a / each[f"plain_{clock}"] for a, each in zip(added, rounds, strict=True)]
        rows.append(
            [clock, f"{1e3 * plain:.2f}", cell(spread([1e6 * each for each in added]), 0),
             cell(spread([100 * each for each in share]), 2)]
        )  # fmt: skip
    print(table(["clock", "plain, ms", "added, us", "added, %"], rows))
    write_json(options.json, {"machine": asdict(machine), "rounds": rounds})


if __name__ == "__main__":
    main()
