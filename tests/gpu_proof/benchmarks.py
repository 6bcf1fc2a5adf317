"""The benchmarks that have figures of the device, each in a process of its own, and their goals."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.gpu_proof.outcomes import Check, Figure, Outcome, last_line, why_not_run

PART = "benchmarks"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module of ``benchmarks``, its arguments, and what is read from its JSON file.

    ``rehearsed`` are arguments for a made-up device, which has 1 GiB and the speed of a CPU.
    """

    module: str
    arguments: Sequence[str]
    read: Callable[[Any], list[Figure]]
    ranks: int = 1
    rehearsed: Sequence[str] = ()


def guard_figures(found: Any) -> list[Figure]:
    """How much longer a guarded step takes than the same step with clipping alone."""
    rounds = [each for part in found["parts"] for each in part["rounds"]]
    shares = [100 * (one["guard on"]["wall"] / one["guard off"]["wall"] - 1) for one in rounds]
    return [Figure("guard, more time per step", statistics.median(shares), "%", 1.0)]


def stall_figures(found: Any) -> list[Figure]:
    """What training loses to a save, beside ``dcp.async_save`` with a kept stager."""
    ours, theirs = (
        "compute: slurm_forge, background",
        "compute: dcp.async_save, thread, kept stager",
    )
    rounds = [each for part in found["parts"] for each in part["rounds"]]
    save = f"a save of {found['parts'][0]['size']['gib']:g} GiB"
    return [
        Figure(f"{save}, lost to training", _median(rounds, ours, "stall_s"), "s"),
        Figure("the same with dcp.async_save", _median(rounds, theirs, "stall_s"), "s"),
        Figure(f"{save}, the call", _median(rounds, ours, "blocked_s"), "s"),
    ]


def probe_figures(found: Any) -> list[Figure]:
    """What a probe costs the thread that trains, and a step beside very many of them."""
    probe = found["probe"]
    issue = statistics.median(probe["issue_us"])
    return [
        Figure("probe, main thread", issue, "us", 1000.0),
        Figure("probe, from issue to its end", statistics.median(probe["latency_us"]), "us"),
        Figure("probe each minute, main thread", 100 * issue * 1e-6 / 60, "%", 0.1),
    ]


def _median(rounds: Sequence[Any], way: str, key: str) -> float:
    return float(statistics.median(one[way][key] for one in rounds))


BENCHMARKS = (
    Benchmark("guard", ("--only", "one", "--seconds", "10"), guard_figures),
    Benchmark(
        "checkpoint",
        ("--only", "stall", "--gib", "1", "--ranks", "1", "--rounds", "3"),
        stall_figures,
        rehearsed=("--only", "stall", "--gib", "0.125", "--ranks", "1", "--rounds", "1"),
    ),
    Benchmark("probe", ("--ranks", "2", "--blocks", "3", "--seconds", "1"), probe_figures, ranks=2),
)


def run_benchmarks(
    folder: Path,
    *,
    devices: int,
    environment: Mapping[str, str],
    seconds_left: Callable[[], float],
    rehearsal: bool = False,
    chosen: Sequence[Benchmark] = BENCHMARKS,
) -> tuple[list[Check], list[Figure]]:
    """Each benchmark on the accelerator; one that fails or has no time left is a check, too.

    A missed goal is a failed check; a rehearsal has none.
    """
    checks: list[Check] = []
    figures: list[Figure] = []
    for each in chosen:
        detail = why_not_run(each.ranks, devices, seconds_left())
        outcome = Outcome.NOT_RUN if detail else Outcome.PASSED
        if not detail:
            file = folder / f"{each.module}.json"
            arguments = (each.rehearsed if rehearsal else ()) or each.arguments
            words = [sys.executable, "-m", f"benchmarks.{each.module}", *arguments]
            words += ["--accelerator", "--json", str(file)]
            try:
                subprocess.run(
                    words,
                    cwd=_ROOT,
                    env=dict(environment),
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=seconds_left(),
                )
                figures += each.read(json.loads(file.read_text()))
            except subprocess.TimeoutExpired:
                outcome, detail = Outcome.FAILED, "it did not end in the time that was left"
            except subprocess.CalledProcessError as error:
                told = last_line(error.stdout, error.stderr, error.returncode)
                outcome, detail = Outcome.FAILED, told
        checks.append(Check(PART, each.module, outcome, detail))
    if rehearsal:
        figures = [replace(figure, goal=None) for figure in figures]
    for figure in figures:
        if figure.met is False:
            checks.append(
                Check(
                    PART,
                    f"goal of {figure.name}",
                    Outcome.FAILED,
                    f"{figure.value:.4g} {figure.unit}, at most {figure.goal:g} was promised",
                )
            )
    return checks, figures
