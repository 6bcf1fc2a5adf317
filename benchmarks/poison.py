"""A window of garbage in the data: what becomes of a training, with slurm_forge and without.

    python -m benchmarks.poison [--quick] [--keep-rate] [--json FILE] [--plot FILE.svg]

Forty batches in a row are garbage.  The same training, from the same weights with the samples in
the same order, is done without those batches (*clean*), with them under slurm_forge's default
recovery (*slurm_forge*), with them in a plain loop (*plain*), and in a loop that skips steps whose
loss is not finite and stops after ten of them (*skips*).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.poison_data import Garbage, Poison
from benchmarks.poison_facts import Ending, read_ending
from benchmarks.poison_figure import figure
from benchmarks.poison_train import Setup, Without, train_without
from benchmarks.tables import Machine, table, write_json
from slurm_forge.launch.local.runner import train_here

_BATCH = 8
_WINDOW = 40
#: Of a run of ten minutes and more it would be minutes; see checkpoint.every_minutes.
_SAVES_EVERY = 25
#: The default ladder without its cut of the learning rate.
_KEEPS_RATE = (
    {"do": "skip", "times": 3},
    {"do": "rollback", "times": 3, "skip_samples": "window"},
)
#: So many standard deviations of clean runs are noise.
_NOISE = 2.0


class Way(str, Enum):
    """How it is trained."""

    CLEAN = "clean"
    FORGE = "slurm_forge"
    PLAIN = "plain"
    SKIPS = "skips"
    #: Under slurm_forge without the window: has to be the same as ``CLEAN``, bit by bit.
    CHECK = "clean, slurm_forge"


@dataclass(frozen=True, slots=True)
class Scene:
    """Which garbage, where (as a share of the steps), and whether the loop clips."""

    title: str
    garbage: Garbage
    where: float
    clips: bool = True

    def setup(self, seed: int, steps: int, garbage: Garbage | None) -> Setup:
        """One training of it."""
        first = round(self.where * steps)
        poison = Poison(garbage=garbage, first=first, batches=_WINDOW)
        return Setup(seed=seed, steps=steps, batch=_BATCH, clips=self.clips, poison=poison)


_SCENES = (
    Scene("weights decoded with the wrong type: the loss is not finite", Garbage.DECODED, 0.5),
    Scene("random targets in the middle", Garbage.RANDOM, 0.5),
    Scene("random targets near the end", Garbage.RANDOM, 0.9),
    Scene("random targets, weighed 1000-fold, no clipping", Garbage.SCALED, 0.5, clips=False),
)
_QUICK = _SCENES[:2]


@dataclass(frozen=True, slots=True)
class Task:
    """One training."""

    scene: int
    way: Way
    seed: int
    setup: Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How slurm_forge's runs are made, and where.  ``keep_rate``: rollbacks leave it alone."""

    folder: Path
    ranks: int
    keep_rate: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Train everything, print the tables, draw."""
    options = _parse(arguments)
    began, load = time.time(), os.getloadavg()[0]
    scenes = _QUICK if options.quick else _SCENES
    tasks = _tasks(scenes, options.steps, options.seeds, check=options.ranks == 1)
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(
            ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn"))
        )
        settings = Settings(folder=folder, ranks=options.ranks, keep_rate=options.keep_rate)
        running = [pool.submit(carry_out, task, settings) for task in tasks]
        found = {task: each.result() for task, each in zip(tasks, running, strict=True)}
    noise = _noise(found)
    for number, scene in enumerate(scenes):
        part = {task: ending for task, ending in found.items() if task.scene == number}
        sys.stdout.write(f"\n{scene.title}\n\n{_finals(part, noise)}\n\n{_recoveries(part)}\n")
    sys.stdout.write(f"\n{_checked(found)}{_verdict(found, noise)}\n")
    machine = Machine.measured(load, began)
    sys.stdout.write(f"{machine.text()}; {time.time() - began:.0f} s\n")
    write_json(options.json, _as_json(machine, scenes, found, noise))
    if options.plot is not None:
        options.plot.write_text(figure(_drawn(scenes, found)))
    return 0


def carry_out(task: Task, settings: Settings) -> Ending:
    """One training, in a process of its own or of several."""
    setup = task.setup
    name = f"{task.scene}-{task.way.name.lower()}-{task.seed}"
    if task.way in (Way.FORGE, Way.CHECK):
        spec: dict[str, Any] = {
            "name": name,
            "seed": setup.seed,
            "args": setup.to_args(),
            "checkpoint": {"every_steps": _SAVES_EVERY},
        }
        if settings.keep_rate:
            spec["recovery"] = {"non_finite": _KEEPS_RATE, "loss_spike": _KEEPS_RATE}
        entry = "benchmarks.poison_train:train"
        run = train_here(entry, spec, ranks=settings.ranks, runs=settings.folder)
        return read_ending(setup, run.path)
    own = settings.folder / name
    own.mkdir(parents=True)
    way = Without.SKIPS if task.way is Way.SKIPS else Without.PLAIN
    ended = train_without(setup, way, own)
    return read_ending(setup, own, ended=ended, skips=way is Without.SKIPS)


def _tasks(scenes: Sequence[Scene], steps: int, seeds: int, *, check: bool) -> list[Task]:
    found = []
    for number, scene in enumerate(scenes):
        for seed in range(1, seeds + 1):
            poisoned = scene.setup(seed, steps, scene.garbage)
            clean = scene.setup(seed, steps, None)
            found.append(Task(number, Way.FORGE, seed, poisoned))
            found.append(Task(number, Way.CLEAN, seed, clean))
            found.append(Task(number, Way.PLAIN, seed, poisoned))
            if scene.garbage is Garbage.DECODED:  # else it would be the plain loop, bit by bit
                found.append(Task(number, Way.SKIPS, seed, poisoned))
    if check:  # several ranks sum in another order
        found.append(Task(0, Way.CHECK, 1, scenes[0].setup(1, steps, None)))
    return found


def _noise(found: Mapping[Task, Ending]) -> float | None:
    """Standard deviation of clean runs over seeds, pooled over the scenes."""
    deviations = [
        statistics.variance(vals)
        for scene in {task.scene for task in found}
        if len(vals := _vals(found, Way.CLEAN, scene)) > 1
    ]
    return statistics.mean(deviations) ** 0.5 if deviations else None


def _vals(found: Mapping[Task, Ending], way: Way, scene: int) -> list[float]:
    return [
        ending.val
        for task, ending in found.items()
        if task.way is way and task.scene == scene and ending.val is not None
    ]


def _finals(part: Mapping[Task, Ending], noise: float | None) -> str:
    seeds = sorted({task.seed for task in part})
    clean = {task.seed: e.val for task, e in part.items() if task.way is Way.CLEAN}
    rows = []
    for way in (Way.CLEAN, Way.FORGE, Way.PLAIN, Way.SKIPS):
        endings = {task.seed: ending for task, ending in part.items() if task.way is way}
        if not endings:
            continue
        vals = [ending.val for ending in endings.values() if ending.val is not None]
        apart = [
            ending.val - before
            for seed, ending in endings.items()
            if ending.val is not None and (before := clean[seed]) is not None
        ]
        whole = len(vals) == len(endings)
        rows.append(
            [
                way.value,
                *(_figure(endings[seed].val) for seed in seeds),
                _figure(statistics.mean(vals)) if whole else None,
                f"{statistics.stdev(vals):.3f}" if whole and len(vals) > 1 else None,
                f"{statistics.mean(apart):+.3f}" if whole else None,
                "/".join(str(ending.poisoned) for ending in endings.values()),
                "; ".join(sorted({ending.ended for ending in endings.values()})),
            ]
        )
    header = [
        "validation loss", *(f"seed {seed}" for seed in seeds), "mean", "sd", "to clean",
        "garbage updates", "ended",
    ]  # fmt: skip
    text = table(header, rows)
    return text if noise is None else f"{text}\nsd of clean runs, pooled: {noise:.4f}"


def _recoveries(part: Mapping[Task, Ending]) -> str:
    rows = []
    for task, ending in part.items():
        if task.way is not Way.FORGE:
            continue
        rows.append(
            [
                f"slurm_forge, seed {task.seed}",
                str(len(ending.incidents)),
                ", ".join(f"{begin}→{end}" for begin, end in ending.rollbacks),
                str(ending.skipped_steps),
                str(task.setup.poison.batches * task.setup.batch),
                str(ending.left_out),
                str(ending.left_out_good),
                f"{ending.repeated} ({ending.repeated / task.setup.steps:.0%})",
                f"{ending.repeated_s:.1f} of {ending.seconds:.1f}",
            ]
        )
    header = [
        "", "incidents", "rollbacks", "steps skipped", "poisoned samples", "left out",
        "good ones of them", "steps repeated", "seconds for that",
    ]  # fmt: skip
    return table(header, rows)


def _verdict(found: Mapping[Task, Ending], noise: float | None) -> str:
    """Whether each poisoned run under slurm_forge ends where clean runs do."""
    forge = {task: ending for task, ending in found.items() if task.way is Way.FORGE}
    ended = sum(ending.val is not None for ending in forge.values())
    garbage = sum(ending.poisoned for ending in forge.values())
    text = (
        f"slurm_forge: {ended} of {len(forge)} runs finished, {garbage} updates of garbage in "
        "their weights"
    )
    if noise is None:
        return f"{text}; one seed tells no noise"
    inside = 0
    for task, ending in forge.items():
        middle = statistics.mean(_vals(found, Way.CLEAN, task.scene))
        inside += ending.val is not None and abs(ending.val - middle) <= _NOISE * noise
    return (
        f"{text}; {inside} of {len(forge)} end within {_NOISE:g} standard deviations "
        f"({_NOISE * noise:.3f}) of the mean of the clean runs"
    )


def _checked(found: Mapping[Task, Ending]) -> str:
    """Without an incident slurm_forge has to change nothing at all."""
    ways: dict[Way, list[float | None]] = {
        task.way: [*(visit.loss for visit in ending.curve), ending.val]
        for task, ending in found.items()
        if task.seed == 1 and task.scene == 0
    }
    if Way.CHECK not in ways:
        return ""
    same = ways[Way.CHECK] == ways[Way.CLEAN]
    said = "bit by bit the plain loop" if same else "NOT the plain loop, bit by bit"
    return f"slurm_forge on clean data: {said} ({len(ways[Way.CLEAN]) - 1} losses)\n"


def _figure(val: float | None) -> str:
    return "not finite" if val is None else f"{val:.3f}"


def _drawn(
    scenes: Sequence[Scene], found: Mapping[Task, Ending]
) -> list[tuple[str, Setup, dict[str, Ending]]]:
    """The first seed of every scene."""
    drawn = []
    for number, scene in enumerate(scenes):
        part = {t.way: e for t, e in found.items() if t.scene == number and t.seed == 1}
        setup = next(t.setup for t in found if t.scene == number and t.way is Way.FORGE)
        drawn.append((scene.title, setup, {way.value: ending for way, ending in part.items()}))
    return drawn


def _as_json(
    machine: Machine, scenes: Sequence[Scene], found: Mapping[Task, Ending], noise: float | None
) -> dict[str, Any]:
    return {
        "machine": asdict(machine),
        "noise": noise,
        "runs": [
            {
                "scene": scenes[task.scene].title,
                "way": task.way.value,
                "setup": task.setup.to_args(),
                **ending.to_json(),
            }
            for task, ending in found.items()
        ],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, two scenes, 240 steps")
    parser.add_argument("--steps", type=int, help="of every training (600)")
    parser.add_argument("--seeds", type=int, help="trainings of each kind (3)")
    parser.add_argument(
        "--keep-rate",
        action="store_true",
        help="slurm_forge's rollbacks leave the learning rate as it is (not the default policy)",
    )
    parser.add_argument("--ranks", type=int, default=1, help="of slurm_forge's runs")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG of the first seed")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (240 if options.quick else 600)
    options.seeds = options.seeds or (1 if options.quick else 3)
    if options.steps < 5 * _WINDOW:
        parser.error(f"--steps {options.steps}: a window of {_WINDOW} needs {5 * _WINDOW} or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
