"""Whether what came of a cell is right: a list of complaints, empty where all is well."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.journal import Record, RunStatus, read_journal
from slurm_forge.journal.events import AttemptStarted, CheckpointCommitted, NoticeSeen, Progress
from slurm_forge.slurm.versions import has
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from tests.jobs import consumed
from tests.slurm.harness import Watched
from tests.slurm.truth.cells import Cell, Submission

_ORDER = (Confidence.GUESS, Confidence.LIKELY, Confidence.CERTAIN)
#: How a complaint begins about what the reports say.
WORDS = "words: "
#: How long ranks that nobody wants any more may take to notice.
_LEAVE_S = 60.0

Samples = Mapping[int, list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Uninterrupted:
    """What a training comes to that nothing happens to."""

    digest: str
    samples: Samples


@dataclass(frozen=True, slots=True)
class Ended:
    """A cell's run after its end; ``others`` are those that nothing was done to."""

    cluster: SlurmCluster
    folder: Path
    watched: Watched
    others: tuple[Watched, ...]
    over: contextlib.ExitStack

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(i for a in self.watched.state.attempts for _, i in a.incidents)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(d for a in self.watched.state.attempts for _, d in a.decisions)

    @property
    def records(self) -> list[Record]:
        """The journal's lines by time; a torn one counts as not written."""
        records, _ = read_journal(self.watched.run)
        return sorted(records, key=lambda record: record.time)

    @property
    def jobs(self) -> tuple[str, ...]:
        """The first job and those that were submitted behind it."""
        successors = [
            done.successor
            for attempt in self.watched.state.attempts
            for _, done in attempt.requeues
            if done.successor
        ]
        return tuple(dict.fromkeys([self.watched.job, *successors]))

    @property
    def starts(self) -> int:
        """How often Slurm has started the run, by its own count."""
        records = [self.cluster.job(job) for job in self.jobs]
        held = sum(1 for record in records if record.state == "PENDING")
        return sum(record.restarts + 1 for record in records) - held

    @property
    def repeated(self) -> int:
        """Steps that were computed more than once, on rank 0."""
        folder = self.watched.record / "samples"
        rows = sum(len(file.read_text().splitlines()) for file in folder.glob("*-r0.jsonl"))
        return rows - len(consumed(self.watched.record)) if folder.is_dir() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    cell: str
    title: str
    tracking: str
    passed: bool
    #: Cause and action of each incident, and what became of the run.
    outcome: str
    complaints: tuple[str, ...] = ()
    #: How many numbers and sentences of the reports were held against what was done.
    claims: int = 0
    skipped: str = ""
    seconds: float = 0.0
    #: What stock submitit made of it, where that was tried.
    stock: str = ""


def row_of(
    cell: Cell,
    cluster: SlurmCluster,
    outcome: str = "-",
    *,
    complaints: tuple[str, ...] = (),
    claims: int = 0,
    skipped: str = "",
    seconds: float = 0.0,
) -> Row:
    """What is to be said of a cell."""
    return Row(
        cell=cell.name,
        title=cell.title,
        tracking=cluster.tracking.value,
        passed=not complaints and not skipped,
        outcome=outcome,
        complaints=complaints,
        claims=claims,
        skipped=skipped,
        seconds=round(seconds, 1),
    )


def outcome_of(cell: Cell, ended: Ended) -> str:
    """What came of a cell's run, in one line."""
    pairs = itertools.zip_longest(
        (incident.cause.value for incident in ended.incidents),
        (decision.action.value for decision in ended.decisions),
        fillvalue="?",
    )
    told = ", ".join(f"{cause} -> {action}" for cause, action in pairs) or "no incident"
    state = ended.watched.state
    if not cell.journal:
        record = ended.cluster.job(ended.jobs[-1])
        return f"job {record.state} ({record.reason}): {record.field('Comment') or 'no comment'}"
    last = max((r.event.step for r in ended.records if isinstance(r.event, Progress)), default=0)
    return (
        f"{told}; {state.status.value} after {len(state.attempts)} attempts, "
        f"{ended.repeated} steps twice, step {max(last, state.committed_step or 0)}"
    )


def judge(cell: Cell, ended: Ended, reference: Uninterrupted) -> tuple[str, ...]:
    """Everything that is not as it should be."""
    found = [*_slurm_side(cell, ended)]
    if cell.journal:
        found += [*_verdicts(cell, ended), *_work(cell, ended, reference)]
    found += FURTHER.get(cell.name, _no_more)(ended)
    return tuple(found)


def _verdicts(cell: Cell, ended: Ended) -> Iterator[str]:
    """Cause, confidence, evidence and action."""
    expected = cell.expected
    state = ended.watched.state
    causes = tuple(incident.cause for incident in ended.incidents)
    actions = tuple(decision.action for decision in ended.decisions)
    if causes[:1] and causes[0] in expected.unaware and actions[:1] == (Action.RELAUNCH,):
        causes, actions = causes[1:], actions[1:]
    if causes != expected.causes:
        told = [f"{i.cause.value}: {_evidence(i)}" for i in ended.incidents]
        yield f"causes {_words(causes)}, right is {_words(expected.causes)} ({'; '.join(told)})"
    if actions != expected.actions:
        why = "; ".join(decision.reason for decision in ended.decisions)
        yield f"actions {_words(actions)}, right is {_words(expected.actions)} ({why})"
    for incident in ended.incidents:
        if _ORDER.index(incident.confidence) < _ORDER.index(expected.least):
            yield f"confidence {incident.confidence.value}: {_evidence(incident)}"
    for words in expected.evidence if ended.incidents else ():
        if not re.search(words, _evidence(ended.incidents[0]), re.I):
            yield f"no {words!r} in the evidence: {_evidence(ended.incidents[0])}"
    for words in expected.reason:
        if words not in state.reason:
            yield f"no {words!r} in the reason: {state.reason!r}"
    changed = {change.parameter for d in ended.decisions for change in d.changes}
    for name in expected.changed:
        if name not in changed:
            yield f"{name} was not changed, but {sorted(changed)}"
    if state.status is not expected.status:
        yield f"the run is {state.status.value}, right is {expected.status.value}"


def _work(cell: Cell, ended: Ended, reference: Uninterrupted) -> Iterator[str]:
    """How often ranks were started, what was trained on, what came of it."""
    expected, state = cell.expected, ended.watched.state
    if len(state.attempts) != expected.attempts:
        yield f"{len(state.attempts)} attempts, right is {expected.attempts}"
    launches = sum(len(attempt.launches) for attempt in state.attempts)
    if expected.launches not in (None, launches):
        yield f"{launches} launches, right is {expected.launches}"
    if ended.repeated > expected.repeated:
        yield f"{ended.repeated} steps were computed twice, at most {expected.repeated} are right"
    if expected.status is not RunStatus.FINISHED:
        return
    for watched in (ended.watched, *ended.others):
        if consumed(watched.record) != reference.samples:
            yield f"{watched.run.name}: other samples than those of the uninterrupted run"
        if watched.digest() != reference.digest:
            yield f"{watched.run.name}: another result than that of the uninterrupted run"


def _queued(ended: Ended) -> tuple[str, ...]:
    name = ended.watched.run.name
    lines = ended.cluster.run("squeue", "-a", "-h", "-n", name, "-o", "%i %T").stdout.splitlines()
    return tuple(filter(None, lines))


def _slurm_side(cell: Cell, ended: Ended) -> Iterator[str]:
    """What Slurm itself says: starts, the queue, processes that are left."""
    expected, cluster = cell.expected, ended.cluster
    if cell.journal and cell.submission is not Submission.HETEROGENEOUS:
        starts = ended.starts - idle_starts(cell, ended)
        if starts != expected.attempts:
            yield f"Slurm started it {ended.starts} times, right is {expected.attempts}"
        if len(ended.jobs) - 1 != expected.successors:
            yield f"{len(ended.jobs) - 1} successors, right is {expected.successors}"
    if expected.held_in_queue:
        # It is written by whoever has just put the job there.
        with contextlib.suppress(ForgeError):
            cluster.wait_for(lambda: "slurm_forge:" in _comment(ended), 10, "the comment")
        last, comment = cluster.job(ended.jobs[-1]), _comment(ended)
        if last.state != "PENDING" or "held" not in last.reason.lower():
            yield f"not held in the queue, but {last.state} ({last.reason})"
        if "slurm_forge:" not in comment:
            yield f"why it is held is not in the job's comment: {comment!r}"
    elif cell.journal:
        # From 24.05 on Slurm starts a job that was preempted once more after it has finished.
        with contextlib.suppress(ForgeError):
            cluster.wait_for(lambda: not _queued(ended), 60, "the queue to be empty")
        if _queued(ended):
            yield f"something of it is in the queue: {', '.join(_queued(ended))}"
    with contextlib.suppress(ForgeError):
        cluster.wait_for(lambda: not left_over(ended.watched), _LEAVE_S, "ranks to leave")
        return
    yield f"processes of the run live on: {left_over(ended.watched)}"


def idle_starts(cell: Cell, ended: Ended) -> int:
    """Starts by Slurm that are no attempt, as far as they are right.

    Newer versions start a job once more, as in ``fifty``, that was requeued in its grace time and
    has finished since: that start finds the run done.
    """
    expected = cell.expected
    again = Cause.PREEMPTED in expected.causes and has(
        ended.cluster.state.platform.version, "requeues a job that exits in its grace time"
    )
    more = ended.starts - expected.attempts - expected.idle_starts
    return expected.idle_starts + (max(0, min(more, 1)) if again else 0)


def _comment(ended: Ended) -> str:
    return ended.cluster.job(ended.jobs[-1]).field("Comment") or ""


def left_over(watched: Watched) -> list[int]:
    """Processes that were started for this run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                ours = any(word.startswith(b"slurm_forge.") for word in words)
                if ours and str(watched.run.path).encode() in words:
                    found.append(int(entry.name))
    return found


def _evidence(incident: Incident) -> str:
    return " | ".join(f"{each.source}: {each.text}" for each in incident.evidence)


def _words(values: tuple[object, ...]) -> str:
    return "+".join(getattr(value, "value", str(value)) for value in values) or "none"


# --- what single cells have to show beside ------------------------------------------------------


def _no_more(ended: Ended) -> Iterator[str]:
    del ended
    yield from ()


def _user_signal(ended: Ended) -> Iterator[str]:
    seen = [r.event.what for r in ended.records if isinstance(r.event, NoticeSeen)]
    if "SIGUSR2" not in seen:
        yield f"the warning signal did not come, but {seen}"


def _chain_in_status(ended: Ended) -> Iterator[str]:
    done = subprocess.run(
        [sys.executable, "-m", "slurm_forge.cli.main", "status", str(ended.watched.run.path)],
        env={**os.environ, **ended.cluster.env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    missing = [job for job in ended.jobs if not re.search(rf"\b{job}\b", done.stdout)]
    if missing:
        yield f"status does not name the jobs {missing}: {done.stdout}{done.stderr}"


def _no_second_writer(ended: Ended) -> Iterator[str]:
    """Once a later attempt has begun, nothing of an earlier one is published any more."""
    starts = {r.attempt: r.time for r in ended.records if isinstance(r.event, AttemptStarted)}
    for record in ended.records:
        if not isinstance(record.event, CheckpointCommitted):
            continue
        later = [number for number, time in starts.items() if time < record.time]
        if later and max(later) > record.attempt:
            yield (
                f"attempt {record.attempt} published step {record.event.step} after attempt "
                f"{max(later)} had begun"
            )


def _struck_node(ended: Ended) -> Iterator[str]:
    """The incident names the node, and the next attempt is not on it."""
    hosts = set(ended.incidents[-1].hosts) if ended.incidents else set()
    if len(hosts) != 1:
        yield f"the incident names the nodes {sorted(hosts)}"
    if hosts & set(ended.watched.state.attempts[-1].nodes):
        yield f"the next attempt ran on {sorted(hosts)} again"


def _split_brain(ended: Ended) -> Iterator[str]:
    yield from _struck_node(ended)
    yield from _no_second_writer(ended)


def _refused(ended: Ended) -> Iterator[str]:
    folder = ended.watched.run.submissions
    said = "".join(file.read_text(errors="replace") for file in folder.glob("*.out"))
    if "heterogeneous" not in said:
        yield f"nothing was said of heterogeneous jobs: {said[-500:]!r}"
    record = ended.cluster.job(ended.watched.job)
    if record.state != "FAILED":
        yield f"the job is {record.state}"
    if record.restarts or ended.watched.state.attempts:
        yield "it was started all the same"


def _others_untouched(ended: Ended) -> Iterator[str]:
    for other in ended.others:
        if len(other.state.attempts) != 1 or ended.cluster.job(other.job).restarts:
            yield f"the task {other.job} was started again as well"


def _clear_end(ended: Ended) -> Iterator[str]:
    """No endless loop, and somebody who looks at the job can see what it was."""
    record = ended.cluster.job(ended.jobs[-1])
    if record.restarts > 4:
        yield f"Slurm started it {record.restarts + 1} times"
    comment = _comment(ended)
    if not re.search("storage|read-only|no space|full", comment, re.I):
        yield f"the job's comment does not say what it was: {comment!r} ({record.state})"


FURTHER: Mapping[str, Callable[[Ended], Iterator[str]]] = {
    "preempted-user-signal": _user_signal,
    "preempted-cancel-no-requeue": _chain_in_status,
    "scontrol-missing": _chain_in_status,
    "node-killed": _struck_node,
    "node-set-down": _struck_node,
    "batch-node-killed": _no_second_writer,
    "slurmd-frozen": _split_brain,
    "batch-slurmd-frozen": _split_brain,
    "step-daemon-killed": _no_second_writer,
    "batch-shell-killed": _no_second_writer,
    "heterogeneous": _refused,
    "array-task": _others_untouched,
    "read-only": _clear_end,
    "disk-full-for-good": _clear_end,
}
