"""What stock submitit makes of the cells of the truth table: the same jobs, the same faults.

The training is conventional (``stock_training``); submitit's own settings are its defaults, except
for the notice before a time limit, which is the cell's where it has one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import submitit

from slurm_forge.errors import ForgeError
from slurm_forge.testing.cluster import ScontrolJob, SlurmCluster
from slurm_forge.testing.cluster.processes import kill
from tests.slurm.harness import REPOSITORY, environment
from tests.slurm.truth.cells import EVERY, Cell, Submission
from tests.slurm.truth.faults import Fault, Target, commands_without, runs_folder
from tests.slurm.truth.stock_training import Mark, StockTraining, StockWorkload, marks_in

#: How long a cell may take after its fault, on a quiet machine, before it counts as endless.
_PATIENCE_S = 120.0
_CONTROLLER_AWAY_S = 15.0
#: A first start outlasts every grace time with KillWait behind it, as a real training would.
_FIRST_START_S = 60.0
_OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
)
_NO_COUNTERPART = {
    Submission.HETEROGENEOUS: "submitit has no heterogeneous jobs",
}
#: What submitit's logs and Slurm's say that a reader of the table wants to see.
_TELLING = (
    r"Bypassing signal SIGTERM",
    r"this job is (?:timed-out|preempted)",
    r"Job not requeued because: [^\n]*",
    r"Job has timed out",
    r"(?:\w+\.)*\w*(?:Error|Exception|Expired): [^\n]{0,80}",
    r"oom-kill event",
    r"DUE TO PREEMPTION|DUE TO NODE FAILURE|DUE TO TIME LIMIT|DUE TO JOB REQUEUE",
    r"Segmentation fault|Aborted",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRow:
    """What came of a cell: ``outcome`` is finished, lost (over, and nobody starts it again),
    failed (the same, and Slurm calls it the job's own fault), cancelled (as was asked for),
    endless, waits for a person, or - (no counterpart); ``text`` is one line of what happened.
    """

    outcome: str
    starts: int
    repeated_steps: int | None
    text: str


@dataclass
class StockTarget:
    """A job of stock submitit, as a fault sees it."""

    cluster: SlurmCluster
    folder: Path
    job: str
    nodes: int
    over: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def stop(self) -> None:
        """Nothing: stock submitit has no such request."""

    def wait_step(self, step: int, *, start: int = 1) -> None:
        """Until a start from ``start`` on has done ``step`` steps."""
        self._wait(
            lambda: any(m.start >= start and m.step >= step for m in marks_in(self.folder)),
            f"step {step} in start {start}",
        )

    def wait_start(self, start: int = 1) -> None:
        """Until the ``start``-th start runs and its ranks have been started."""
        self._wait(
            lambda: (
                self.cluster.job(self.job).restarts >= start - 1
                and len(self.cluster.tasks(self.job)) == self.nodes
            ),
            f"the ranks of start {start}",
        )

    def wait_reaction(self, seconds: float) -> bool:
        """Until a rank goes; False if none has."""
        before = set(self.cluster.tasks(self.job).values())
        try:
            self.cluster.wait_for(
                lambda: not before <= set(self.cluster.tasks(self.job).values()),
                seconds,
                "ranks to go",
            )
        except ForgeError:
            return False
        return True

    def _wait(self, condition: Any, what: str) -> None:
        def settled() -> bool:
            return condition() or self.cluster.job(self.job).state in _OVER

        self.cluster.wait_for(settled, 60, what)
        if not condition():
            raise ForgeError(f"the job was over before {what}")


def run_stock(cell: Cell, cluster: SlurmCluster, folder: Path) -> StockRow:
    """The cell with stock submitit on this cluster, in an empty folder; leaves an empty queue.

    What can't be tried is told as such, and no error: the table goes on.
    """
    if cell.submission in _NO_COUNTERPART:
        return _not_tried(_NO_COUNTERPART[cell.submission])
    try:
        return _lived_through(cell, cluster, folder)
    except (ForgeError, OSError, AssertionError, submitit.core.utils.FailedJobError) as error:
        return _not_tried(f"could not be tried: {_first_line(error)}")


def _lived_through(cell: Cell, cluster: SlurmCluster, folder: Path) -> StockRow:
    began = time.monotonic()
    strike: Fault = _IN_ITS_WORDS.get(cell.name, cell.strike)
    trouble = ""
    with contextlib.ExitStack() as around:
        # Last of all: whatever a fault has changed is put back to order first.
        around.callback(cluster.reset)
        if cell.prepare is not None:
            around.enter_context(cell.prepare(cluster, folder))
        if cell.cluster is not None:
            around.enter_context(cluster.configured(cell.cluster(cluster.spec)))
        target = _submitted(cell, cluster, folder)
        around.callback(target.over.close)
        try:
            strike(target)
        except (ForgeError, AssertionError, pytest.fail.Exception) as error:
            trouble = _first_line(error)
        over = _wait_end(target, max(_PATIENCE_S, cell.seconds))
        row = _told(cell, target, over, trouble, time.monotonic() - began)
        cluster.cancel(target.job)
    return row


def _not_tried(why: str) -> StockRow:
    return StockRow(outcome="-", starts=0, repeated_steps=None, text=why)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


# --- the same fault, in words that submitit knows -----------------------------------------------


def _noticed_without_controller(target: Target) -> None:
    """The controller goes, the signal that submitit knows comes, and it is back a while later."""
    target.wait_step(15)
    with target.cluster.stopped_controller():
        _notify(target)
        # This is how long it is away, and nothing is waited for.
        time.sleep(_CONTROLLER_AWAY_S)


def _noticed_without_controller_for_good(target: Target) -> None:
    """The same, and it is not back before the batch script has ended."""
    target.wait_step(15)
    with target.cluster.stopped_controller():
        script = target.cluster.batch_script(target.job)
        _notify(target)
        target.cluster.wait_for(
            lambda: script is None or target.cluster.batch_script(target.job) != script,
            _PATIENCE_S,
            "the batch script to give up",
        )


def _notify(target: Target) -> None:
    # Not SIGTERM, as for ours: submitit passes it by, and as nobody kills the ranks here, the
    # fault would be none.
    for process in target.cluster.tasks(target.job).values():
        kill(process, signal.SIGUSR2)


_IN_ITS_WORDS: Mapping[str, Fault] = {
    "controller-away": _noticed_without_controller,
    "controller-gone": _noticed_without_controller_for_good,
}


# --- submitting ---------------------------------------------------------------------------------


def _submitted(cell: Cell, cluster: SlurmCluster, folder: Path) -> StockTarget:
    keep = runs_folder(folder)
    with environment(cluster):
        # The jobs import the training from here.
        os.environ["PYTHONPATH"] = str(REPOSITORY)
        executor = submitit.AutoExecutor(folder / "submitit", cluster="slurm")
        executor.update_parameters(**_parameters(cell, cluster, folder))
        places = [folder]
        if cell.submission is Submission.ARRAY:
            places = [folder / str(index) for index in range(3)]
        work = []
        for place in places:
            kept = keep / place.relative_to(folder)
            kept.mkdir(parents=True, exist_ok=True)
            place.mkdir(parents=True, exist_ok=True)
            work.append(
                StockWorkload(folder=str(place), keep=str(kept), args=_training(cell), every=EVERY)
            )
        if len(work) == 1:
            return StockTarget(
                cluster, folder, executor.submit(StockTraining(), work[0]).job_id, cell.nodes
            )
        jobs = executor.map_array(StockTraining(), work)
        return StockTarget(cluster, places[1], jobs[1].job_id, cell.nodes)


def _training(cell: Cell) -> dict[str, Any]:
    slowly = _FIRST_START_S / cell.training["steps"]
    return {**cell.training, "pace": max(cell.training["pace"], slowly)}


def _parameters(cell: Cell, cluster: SlurmCluster, folder: Path) -> dict[str, Any]:
    more: dict[str, Any] = {name: text or True for name, text in cell.sbatch.items()}
    if "no-requeue" not in more:
        more = {"requeue": True, **more}
    found: dict[str, Any] = {
        "timeout_min": int(cell.minutes),
        "nodes": cell.nodes,
        "tasks_per_node": 1,
        "cpus_per_task": 1,
        "slurm_mem": cell.memory,
        "slurm_partition": cell.partition,
        "slurm_additional_parameters": more,
    }
    lead = cell.job.get("lead")
    if lead is not None:
        found["slurm_signal_delay_s"] = int(str(lead).removesuffix("s"))
    if cell.missing:
        path = cluster.env.get("PATH", os.defpath)
        found["slurm_setup"] = [f"export PATH={commands_without(folder, cell.missing, path)}"]
    if cell.submission is Submission.ARRAY:
        found["slurm_exclusive"] = True
    return found


# --- the end ------------------------------------------------------------------------------------


def _wait_end(target: StockTarget, patience: float) -> bool:
    """Until the job is over and stays so, or waits for a person; False after ``patience``."""
    since: list[float] = []

    def settled() -> bool:
        if not _at_rest(target.cluster.job(target.job)):
            since.clear()
            return False
        since.append(time.monotonic())
        # A requeued job is over for a moment before it is pending.
        return since[-1] - since[0] > 3.0

    try:
        target.cluster.wait_for(settled, patience, "the end of the job")
    except ForgeError:
        return False
    return True


def _at_rest(record: ScontrolJob) -> bool:
    return record.state in _OVER or _held(record)


def _held(record: ScontrolJob) -> bool:
    return record.state == "PENDING" and "held" in record.reason.lower()


def _told(cell: Cell, target: StockTarget, over: bool, trouble: str, seconds: float) -> StockRow:
    marks = marks_in(target.folder)
    record = target.cluster.job(target.job)
    steps = [mark.step for mark in marks if mark.what == "step"]
    starts = record.restarts + 1
    outcome = _outcome(
        record,
        over=over,
        done=max(steps, default=0) >= int(cell.training["steps"]),
        asked=cell.name.startswith("scancel"),
    )
    parts = [f"{starts} start{'s' if starts > 1 else ''}"]
    parts += _resumes(marks)
    if outcome != "finished":
        parts.append(f"{record.state} ({record.reason}) at step {max(steps, default=0)}")
        parts.append(f"newest save at {_saved(marks)}")
    if _ran_twice(marks):
        parts.append("old ranks went on beside the new ones, into the same file")
    parts += _telling(target)
    if trouble:
        parts.append(f"the fault met: {trouble}")
    parts.append(f"{seconds:.0f} s")
    return StockRow(
        outcome=outcome,
        starts=starts,
        repeated_steps=len(steps) - len(set(steps)),
        text="; ".join(parts),
    )


def _outcome(record: ScontrolJob, *, over: bool, done: bool, asked: bool) -> str:
    if _held(record):
        return "waits for a person"
    if not over:
        return "endless"
    if record.state == "COMPLETED" and done:
        return "finished"
    if asked and record.state in ("CANCELLED", "FAILED"):
        return "cancelled"
    return "failed" if record.state in ("FAILED", "OUT_OF_MEMORY") else "lost"


def _resumes(marks: list[Mark]) -> list[str]:
    """Where each later start went on, and how far its predecessor had come."""
    told = []
    for number, mark in enumerate(marks):
        if mark.what == "loaded" and mark.start > 1:
            before = max((m.step for m in marks[:number] if m.what == "step"), default=0)
            told.append(f"went on at {mark.step} of {before}")
    return told if len(told) < 4 else [*told[:2], f"… {len(told)} times"]


def _saved(marks: list[Mark]) -> str:
    return str(next((m.step for m in reversed(marks) if m.what == "saved"), "none"))


def _ran_twice(marks: list[Mark]) -> bool:
    first = {mark.start: mark.time for mark in reversed(marks)}
    return any(mark.time > first.get(mark.start + 1, float("inf")) for mark in marks)


def _telling(target: StockTarget) -> list[str]:
    """Words from the logs of the ranks and of srun, the last of each kind and file, each once."""
    logs = target.folder if (target.folder / "submitit").exists() else target.folder.parent
    texts = [
        # Where in its source a library was when it said so is of no use here.
        re.sub(r"\[/\S+:\d+\] ", "", path.read_text(errors="replace"))
        for path in sorted((logs / "submitit").glob(f"{target.job}_*log.*"))
    ]
    found = [
        match for pattern in _TELLING for text in texts for match in re.findall(pattern, text)[-1:]
    ]
    return [f'"{words.strip()}"' for words in dict.fromkeys(found)]
