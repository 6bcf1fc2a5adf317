"""Whole runs on the device: each is broken on purpose, and compared with one that was not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_forge.testing.digest import digest
from tests.gpu_proof.outcomes import Check, Figure, Outcome, last_line, why_not_run

PART = "runs"
STEPS = 120
_TORCH_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is done to a run, and what has to come of it.

    ``exact``: the last checkpoint equals that of the untouched run bit by bit, random states
    included.  ``causes``: what ``explain`` has to name.
    """

    name: str
    faults: str = ""
    exact: bool = True
    ranks: int = 1
    causes: tuple[str, ...] = ()


SCENARIOS = (
    Scenario("untouched, a second time"),
    Scenario("preempted, then killed", "term@40,kill@80:rank0", causes=("preempted", "crash")),
    Scenario("an exception of the program", "exception@50", causes=("app_error",)),
    Scenario("a rank hangs", "hang@60:rank0", causes=("hang",)),
    Scenario("a collective hangs", "collective@60:rank1", ranks=2, causes=("hang",)),
    Scenario("out of memory in backward", "oom@50:rank0", exact=False, causes=("cuda_oom",)),
    Scenario("three gradients that are NaN", "nan@60x3", exact=False, causes=("non_finite",)),
)


def run_scenarios(
    folder: Path,
    *,
    devices: int,
    environment: Mapping[str, str],
    seconds_left: Callable[[], float],
    fused: bool,
    preflight: bool = True,
    chosen: Sequence[Scenario] = SCENARIOS,
) -> tuple[list[Check], list[Figure]]:
    """Train the untouched run, then each scenario, as ``slurm-forge run`` does it.

    Without ``preflight`` only the untouched run has one: its products take a made-up device long.
    """
    job = folder / "job.yaml"
    job.write_text(job_text(fused))
    runner = _Runner(job, folder / "runs", devices, environment, seconds_left)
    checks, figures = [], []
    try:
        untouched = runner.run("reference", "")
        untouched.check(Scenario("untouched", exact=False), "")
        reference = digest(untouched.path, random=True)
    except _FailedError as error:
        return [Check(PART, "untouched", Outcome.FAILED, str(error))], []
    for number, scenario in enumerate(chosen):
        began = time.monotonic()
        detail = why_not_run(scenario.ranks, devices, seconds_left())
        outcome = Outcome.NOT_RUN if detail else Outcome.PASSED
        if not detail:
            try:
                run = runner.run(f"scenario-{number}", scenario.faults, preflight=preflight)
                run.check(scenario, reference)
                figures += run.figures(scenario)
            except _FailedError as error:
                outcome, detail = Outcome.FAILED, str(error)
        checks.append(Check(PART, scenario.name, outcome, detail, time.monotonic() - began))
    return checks, figures


class _FailedError(Exception):
    """A run did not do what it has to."""


@dataclass(frozen=True, slots=True)
class _Run:
    path: Path
    explained: Mapping[str, Any]

    def check(self, scenario: Scenario, reference: str) -> None:
        """Raise ``_FailedError`` unless it went as the scenario says."""
        if (self.explained["status"], self.explained["step"]) != ("finished", STEPS):
            told = f"{self.explained['words']} at step {self.explained['step']}"
            raise _FailedError(f"{told}: {self.explained['reason']}")
        named = {
            incident["cause"]
            for attempt in self.explained["attempts"]
            for launch in attempt["launches"]
            for incident in launch["incidents"]
        }
        if missing := set(scenario.causes) - named:
            raise _FailedError(f"explain names {sorted(named)}, and not {sorted(missing)}")
        if scenario.exact and digest(self.path, random=True) != reference:
            raise _FailedError("its last checkpoint differs from that of the untouched run")

    def figures(self, scenario: Scenario) -> list[Figure]:
        """What a stop and a relaunch took, where there was one."""
        launches = [each for one in self.explained["attempts"] for each in one["launches"]]
        saved = [each["notice_to_saved_s"] for each in launches if each.get("notice_to_saved_s")]
        found = [Figure(f"{scenario.name}: notice until saved", max(saved), "s")] if saved else []
        starts = [each["start_s"] for one in launches[1:] for each in one["resumes"]]
        if starts:
            name = f"{scenario.name}: relaunch until the first step"
            found.append(Figure(name, max(starts), "s"))
        return found


@dataclass(frozen=True, slots=True)
class _Runner:
    job: Path
    runs: Path
    ranks: int
    environment: Mapping[str, str]
    seconds_left: Callable[[], float]

    def run(self, name: str, faults: str, *, preflight: bool = True) -> _Run:
        """Train until the run is finished, held, or out of time."""
        words = [sys.executable, "-m", "slurm_forge.cli.main", "run", str(self.job), "--json"]
        words += ["--ranks", str(self.ranks), "--runs", str(self.runs), "--set", f"name={name}"]
        if not preflight:
            words += ["--set", "preflight.enabled=false"]
        if faults:
            words += ["--inject", faults]
        with subprocess.Popen(
            words,
            env={**self.environment, **_TORCH_VARIABLES},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=max(self.seconds_left(), 1))
            except subprocess.TimeoutExpired:
                # The second one ends it at once, its ranks included.
                for _ in range(2):
                    process.send_signal(signal.SIGINT)
                    time.sleep(1.5)
                raise _FailedError("it did not end in the time that was left") from None
        try:
            explained = json.loads(out)
        except ValueError:
            raise _FailedError(last_line(out, err, process.returncode)) from None
        return _Run(self.runs / name, explained)


def job_text(fused: bool) -> str:
    """The job file of all runs here."""
    return f"""\
entry: tests/gpu_proof/training.py:train
args: {{steps: {STEPS}, fused: {str(fused).lower()}}}
resources: {{tasks_per_node: 1, cpus_per_task: 1}}
checkpoint: {{every_steps: 25}}
probe: {{every: 2s}}
watchdog: {{at_least: 5s, at_most: 30s}}
"""
