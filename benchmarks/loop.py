"""What slurm_forge costs a training loop at its defaults, beside the same loop under torchrun.

    python -m benchmarks.loop [--rounds 3] [--ranks 2] [--only start,rows-0,…] [--json FILE]

A round trains the same model on the same kind of samples under ``slurm-forge run`` (guard, probe,
monitor, journal, checkpoints as they are by default) and under torchrun (``DataLoader``,
``DistributedSampler``, ``clip_grad_norm_``), one after the other; another side is first in every
second round.  Ratios are those of a round:

*step* is the median duration of a step over windows of two seconds, *cpu* the processor seconds
per step of all processes of a side (ranks, workers, agents, supervisor, torchrun), *start* the time
from the command to the end of the first step.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.loop_program import Case, Moment, Source
from benchmarks.tables import Machine, cell, spread, table, write_json

_FORGE, _TORCHRUN = "slurm_forge", "torchrun"
#: Of the model, for a step of about 3 and 10 ms on one core of 2025.
_SHORT, _LONG = 192, 400
_SAMPLES, _WINDOWS, _WINDOW_S = 32, 5, 2.0


@dataclass(frozen=True)
class Kind:
    """A training that both sides do."""

    name: str
    width: int
    source: Source
    workers: int


KINDS = [
    Kind(f"{source.value}-{length}-{workers}", width, source, workers)
    for length, width in (("3ms", _SHORT), ("10ms", _LONG))
    for source in Source
    for workers in (0, 4)
]


@dataclass
class Figures:
    """Of one side in one round; seconds."""

    first_step: float
    first_cpu: float
    step: float
    cpu: float
    rank_cpu: float


@dataclass
class Rounds:
    """All figures of one training, by side."""

    sides: dict[str, list[Figures]] = field(default_factory=lambda: {_FORGE: [], _TORCHRUN: []})


def measure(kind: Kind, side: str, ranks: int, work: Path) -> Figures:
    """Train once."""
    folder = Path(tempfile.mkdtemp(dir=work))
    case = Case(
        folder=str(folder),
        width=kind.width,
        source=kind.source,
        workers=kind.workers,
        samples=_SAMPLES,
        windows=_WINDOWS,
        window_s=_WINDOW_S,
        root=os.getpid(),
    )
    args = json.dumps(asdict(case))
    if side == _TORCHRUN:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words += ["-m", "benchmarks.loop_program", args]
    else:
        job = folder / "loop.yaml"
        text = {"name": "loop", "entry": "benchmarks.loop_program:train", "args": asdict(case)}
        resources = {"tasks_per_node": ranks, "cpus_per_task": 1}
        job.write_text(json.dumps({**text, "resources": resources}))
        words = ["-m", "slurm_forge", "run", str(job), "--runs", str(folder / "runs")]
    began = time.time()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    file = folder / "moments.jsonl"
    moments = [Moment(**json.loads(line)) for line in file.read_text().splitlines()]
    if done.returncode or len(moments) != 3 + _WINDOWS:
        raise SystemExit(f"{side} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return figures_of(moments, began)


def figures_of(moments: Sequence[Moment], began: float) -> Figures:
    """From the moments that rank 0 noted."""
    first, _, *edges = moments
    windows = list(pairwise(edges))
    steps = edges[-1].step - edges[0].step
    return Figures(
        first_step=first.time - began,
        first_cpu=first.cpu,
        step=statistics.median((b.time - a.time) / (b.step - a.step) for a, b in windows),
        cpu=(edges[-1].cpu - edges[0].cpu) / steps,
        rank_cpu=(edges[-1].rank_cpu - edges[0].rank_cpu) / steps,
    )


def ratios(rounds: Rounds, figure: str) -> list[float]:
    """Ours by torchrun's, round by round."""
    pairs = zip(rounds.sides[_FORGE], rounds.sides[_TORCHRUN], strict=True)
    return [getattr(ours, figure) / getattr(theirs, figure) for ours, theirs in pairs]


def report(found: dict[str, Rounds]) -> str:
    """The table for people."""
    rows = []
    for name, rounds in found.items():
        plain_step = statistics.median(each.step for each in rounds.sides[_TORCHRUN])
        row: list[str | None] = [name, f"{1e3 * plain_step:.2f}"]
        for figure in ("step", "cpu", "rank_cpu", "first_step", "first_cpu"):
            row.append(cell(spread(ratios(rounds, figure)), 3))
        rows.append(row)
    header = ["training", "torchrun ms", "step", "cpu", "cpu of rank 0", "start", "cpu of start"]
    return table(header, rows)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    names = [kind.name for kind in KINDS]
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default=",".join(names), help=f"some of {', '.join(names)}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    chosen = [kind for kind in KINDS if kind.name in options.only.split(",")]
    load, began = os.getloadavg()[0], time.time()
    found = {kind.name: Rounds() for kind in chosen}
    with tempfile.TemporaryDirectory() as work:
        for number in range(options.rounds):
            for kind in chosen:
                sides = [_FORGE, _TORCHRUN] if number % 2 else [_TORCHRUN, _FORGE]
                for side in sides:
                    figures = measure(kind, side, options.ranks, Path(work))
                    found[kind.name].sides[side].append(figures)
    machine = Machine.measured(load, began)
    print(f"{options.ranks} ranks, {_SAMPLES} samples per rank and step; {machine.text()}\n")
    print(report(found))
    rounds = {name: asdict(each) for name, each in found.items()}
    write_json(options.json, {"machine": asdict(machine), "rounds": rounds})


if __name__ == "__main__":
    main()
