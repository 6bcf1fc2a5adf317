"""Looks after many runs at once: one question to Slurm per round, and what follows from it.

What it knows is in the runs' journals; what it does is done by the same code as ``reconcile`` and
``requeue``, under the same locks and fences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from slurm_forge.errors import ForgeError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.journal import RunState, RunStatus
from slurm_forge.journal.events import UserAsked
from slurm_forge.launch.watch.run_snapshot import (
    RESTARTED,
    SnapshotCache,
)
from slurm_forge.person import person
from slurm_forge.recovery.run_watch import (
    FindingKind,
    JobInQueue,
    Remedy,
    RunSnapshot,
    WatchFinding,
    WatchLimits,
    assess_run,
    has_question,
)
from slurm_forge.run_directory import RunDirectory, list_claims
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import JobUpdate, Slurm
from slurm_forge.slurm.records import JobRecord, QueueRecord
from slurm_forge.slurm.states import TERMINAL, JobState
from slurm_forge.slurm.text.array_tasks import tasks_of

if TYPE_CHECKING:
    from slurm_forge.launch.requeue.reconcile import ReconcileResult

#: Jobs that are asked about one by one in a round; the others have their turn in the next.
_MOST_QUESTIONS = 20
_MOST_ACTS = 10
_MINUTE_S = 60.0
#: An answer about a job whose run has not changed since is good for so long, in seconds.
_ANSWER_KEEPS_S = 600.0


@dataclass(frozen=True, slots=True)
class HandledFinding:
    """A finding, where its run lies, and what the watcher has done about it (else empty)."""

    path: str
    finding: WatchFinding
    done: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One look at all runs.  Not ``answered``: the queue could not be asked (``why``), and what a
    person can do about that (``next_step``).

    ``left`` is how many runs wait for their turn to be asked about, or to be acted on.
    """

    time: float
    runs: int
    answered: bool
    why: str
    asked_s: float
    left: int
    findings: tuple[HandledFinding, ...]
    next_step: str = ""


class Watcher:
    """Looks at the runs of one user, round after round.

    ``name_of`` is what a person types to mean a run, ``site_of`` finds a site by its name.

    """

    def __init__(
        self,
        slurm: Slurm,
        *,
        limits: WatchLimits,
        name_of: Callable[[RunDirectory], str],
        site_of: Callable[[str], Site],
        user: str | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slurm = slurm
        self._limits = limits
        self._name_of = name_of
        self._site_of = site_of
        self._user = user or person()
        self._clock = clock
        self._sleep = sleep
        self._snapshots = SnapshotCache()
        self._answers: dict[str, tuple[float, float, JobInQueue]] = {}

    def round(self, runs: Sequence[RunDirectory]) -> Round:
        """Look at each of them once, and do what is to be done.  Raises no ``ForgeError``."""
        began = time.perf_counter()
        queue, why, next_step = self._queue()
        asked_s = time.perf_counter() - began
        questions, acts = _MOST_QUESTIONS, _MOST_ACTS
        findings: list[HandledFinding] = []
        runs_left = 0
        # Whoever looks only once starts elsewhere each minute: each has its turn to be asked about.
        first = int(self._clock() // _MINUTE_S) * _MOST_QUESTIONS % max(1, len(runs))
        for run in (*runs[first:], *runs[:first]):
            name = self._name_of(run)
            try:
                snapshot = self._snapshots.read(run, name)
                now = self._clock()
                line = None if queue is None else _line_of(snapshot, queue)
                in_queue = JobInQueue(answered=queue is not None, line=line)
                if has_question(snapshot, in_queue, now, self._limits):
                    answer = self._recent_answer(snapshot, in_queue, now)
                    if answer is None and questions > 0:
                        questions -= 1
                        answer = self._ask(snapshot, in_queue)
                    if answer is None:
                        runs_left += 1
                        continue
                    in_queue = answer
                finding = assess_run(snapshot, in_queue, now, self._limits)
            except Exception as error:  # whatever is wrong with one run, the others are looked at
                findings.append(HandledFinding(str(run.path), _unreadable(name, error)))
                continue
            if finding is None:
                continue
            if finding.remedy is Remedy.NONE or not run.is_own():
                findings.append(HandledFinding(str(run.path), finding))
            elif acts <= 0:
                runs_left += 1
            else:
                acts -= 1
                handled = self._act(run, snapshot, finding)
                if handled is not None:
                    findings.append(handled)
                self._snapshots.forget(run)

        return Round(
            time=self._clock(),
            runs=len(runs),
            answered=queue is not None,
            why=why,
            asked_s=asked_s,
            left=runs_left,
            findings=tuple(sorted(findings, key=lambda one: one.path)),
            next_step=next_step,
        )

    # -- asking -------------------------------------------------------------------------------

    def _queue(self) -> tuple[dict[str, QueueRecord] | None, str, str]:
        """All jobs of the user by what they are called, else why not, and what to do about it."""
        try:
            return _by_job(self._slurm.queue(self._user)), "", ""
        except SlurmCommandError as error:
            return None, error.message, error.next_step

    def _recent_answer(
        self, snapshot: RunSnapshot, in_queue: JobInQueue, now: float
    ) -> JobInQueue | None:
        """What Slurm said of the job before, if nothing has changed since."""
        answered_at, changed, answer = self._answers.get(snapshot.job, (0.0, 0.0, in_queue))
        if changed != snapshot.changed or now - answered_at > _ANSWER_KEEPS_S:
            return None
        same = (answer.line is None) == (in_queue.line is None)
        return replace(answer, line=in_queue.line) if same and answer.asked else None

    def _ask(self, snapshot: RunSnapshot, in_queue: JobInQueue) -> JobInQueue | None:
        """The job itself; of one that Slurm has forgotten, whether it was cancelled."""
        try:
            record = self._slurm.show_job(snapshot.job)
        except SlurmCommandError:
            return None
        cancelled = forgotten = False
        if record is None:
            try:
                rows = [row for row in self._slurm.accounting(snapshot.job) if row.step is None]
            except SlurmUnreachableError:
                return None  # without it a cancelled run could be brought back
            except SlurmCommandError:
                rows = []
            cancelled = bool(rows) and rows[-1].state is JobState.CANCELLED
            forgotten = not rows
        answer = replace(
            in_queue, asked=True, record=record, cancelled=cancelled, forgotten=forgotten
        )
        self._answers[snapshot.job] = (self._clock(), snapshot.changed, answer)
        return answer

    # -- doing --------------------------------------------------------------------------------

    def _act(
        self, run: RunDirectory, snapshot: RunSnapshot, finding: WatchFinding
    ) -> HandledFinding | None:
        """Carry the remedy out; None where it was not needed any more."""
        # Most looks find nothing to do, and what is needed for it takes longer to load than they.
        from slurm_forge.launch.requeue.reconcile import reconcile
        from slurm_forge.spec.run_file import read_run_file

        path = str(run.path)
        try:
            if finding.remedy is Remedy.SHORTEN:
                if not read_run_file(run.spec_file).shorten_requeue:
                    return None
                self._slurm.update_job(finding.job, JobUpdate(start_after=timedelta(0)))
                return HandledFinding(path, finding, f"job {finding.job} may start now")
            if finding.remedy is Remedy.RECONCILE:
                brought = reconcile(
                    run, self._slurm, sleep=self._sleep, clock=self._clock, by_person=False
                )
            else:
                brought = self._restart(run, snapshot)
        except (ForgeError, OSError) as error:
            message = getattr(error, "message", str(error))
            failed = replace(finding, words=f"{finding.words}; tried: {message}", person=True)
            return HandledFinding(path, replace(failed, key=f"{finding.key}|failed"))
        return HandledFinding(path, finding, brought.text) if brought.changed else None

    def _restart(self, run: RunDirectory, snapshot: RunSnapshot) -> ReconcileResult:
        """As ``slurm-forge requeue``, unless anything has changed since it was looked at."""
        from slurm_forge.launch.requeue.reconcile import bring_back
        from slurm_forge.launch.submit.submission import note
        from slurm_forge.spec.run_file import read_run_file

        def unless(state: RunState, record: JobRecord | None) -> str | None:
            if state.status not in _LIVE or state.open_intent is not None:
                return f"it is {state.status.value} meanwhile"
            if run.stop_asked() or run.is_done():
                return "it was asked to stop"
            if max(list_claims(run), default=0) != snapshot.claimed or state.job != snapshot.job:
                return "another attempt has taken it over"
            if record is not None and record.state not in TERMINAL:
                return f"job {record.job_ref} is {record.state.value}"
            if record is not None and record.state is JobState.CANCELLED:
                return "it was cancelled"
            # The budget is spent before anything is asked, whatever comes of it.
            note(run, UserAsked(verb=RESTARTED, user=self._user))
            return None

        file = read_run_file(run.spec_file)
        site = self._site_of(file.site_file or file.site)
        return bring_back(run, self._slurm, site=site, file=file, unless=unless)


_LIVE = frozenset({RunStatus.SUBMITTED, RunStatus.RUNNING, RunStatus.REQUEUED})


def _by_job(lines: Iterable[QueueRecord]) -> dict[str, QueueRecord]:
    """By id, by ``<array>_<task>``, and any of its tasks by that of the array.

    Tasks that wait together share a line.
    """
    records: dict[str, QueueRecord] = {}
    for line in lines:
        records[line.job_ref] = line
        records.setdefault(str(line.job_id), line)
        array, _, tasks = line.job_ref.partition("_")
        records.setdefault(array, line)
        if tasks.startswith("["):
            for task in tasks_of(tasks):
                records.setdefault(f"{array}_{task}", line)
    return records


def _line_of(snapshot: RunSnapshot, queue: Mapping[str, QueueRecord]) -> QueueRecord | None:
    """The line of its job; where that is over, of a task of its chain that is not."""
    line = queue.get(snapshot.job)
    if line is None and snapshot.chain:
        line = queue.get(snapshot.job.partition("_")[0])
    return line


def _unreadable(name: str, error: Exception) -> WatchFinding:
    words = getattr(error, "message", None) or str(error)
    return WatchFinding(
        run=name,
        kind=FindingKind.UNREADABLE,
        job="",
        words=words,
        next=getattr(error, "next_step", None) or f"slurm-forge status {name}",
        person=True,
        key=f"{FindingKind.UNREADABLE.value}|{words}",
    )
