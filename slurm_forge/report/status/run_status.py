"""The state of a run in one word and one sentence, and doubts about what was read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from slurm_forge.format_version import to_install
from slurm_forge.journal import Record, RunState, RunStatus
from slurm_forge.journal.comebacks import GO_ON
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.report.checkpoints import missing_checkpoint, newest_step
from slurm_forge.report.purge import purge_warning
from slurm_forge.report.status.clock_skew import clock_differences
from slurm_forge.report.status.report_facts import (
    NotStarted,
    RunFacts,
)
from slurm_forge.report.story.consequences import (
    in_the_queue,
    without_next,
)
from slurm_forge.report.story.history import (
    History,
)
from slurm_forge.report.story.queue_reason import (
    SlurmContradiction,
    ended_by_signal,
    job_cancelled,
    slurm_contradiction,
    why_waiting,
)
from slurm_forge.report.story.story import (
    AttemptStory,
    FailingSaves,
    WaitingStory,
)
from slurm_forge.report.story.unresolved_failure import (
    UnresolvedFailure,
    unresolved_failure,
)
from slurm_forge.report.text import ago, clean, number, observed, plural, span
from slurm_forge.slurm.states import ACTIVE, PENDING_LIKE, JobState, parse_state
from slurm_forge.vocabulary.cause import Cause

#: Progress is written every few seconds; a running attempt that says nothing for this long is
#: compiling, in a very long step, or gone without a word.
_SILENT_S = 600.0
#: After this long the age of the last sign of life is shown.
_QUIET_S = 60.0
#: What the job of a running run may be doing instead, in Slurm's states.
_PAUSED = {
    JobState.SUSPENDED: "suspended by Slurm until Slurm resumes it",
    JobState.STOPPED: "paused with SIGSTOP until SIGCONT",
    JobState.COMPLETING: "completing on its nodes",
}
_SAVE_REASON = 120
_SHOWN_DAMAGE = 5
#: How a batch script begins a note of a start that failed.
_NOTE = re.compile(r"\S+Z job \S+ on (\S+)")
_LONGEST_WHY = 300
#: Said of a job that waits, as far as the journal knows.
_WAITS = ", waiting"


@dataclass(frozen=True, slots=True)
class Standing:
    """``status`` for programs, ``words`` for people.

    ``doubtful``: the journal says that it runs, and nothing else does.  ``trouble`` is what went
    wrong before somebody stopped the run, and is not over by that.  ``held_job`` waits in the queue
    until it is released, ``waiting`` is what Slurm says of the job that waits, and ``not_started``
    what a batch script said that could not even start us.  ``of_program``: the run is a program's
    that keeps its own checkpoints, of which only it knows from where it goes on.
    ``contradiction``: the journal says that it runs, and Slurm, or its own machine, that it does
    not.  ``failing_saves`` while it is to train.
    """

    status: RunStatus
    words: str
    doubtful: bool = False
    trouble: UnresolvedFailure | None = None
    held_job: str | None = None
    waiting: WaitingStory | None = None
    not_started: NotStarted | None = None
    of_program: bool = False
    contradiction: SlurmContradiction | None = None
    failing_saves: FailingSaves | None = None


def again(reference: str, state: RunState) -> str:
    """The command that starts a run another time."""
    if state.job.startswith("exec-"):
        return "the same slurm-forge exec again"
    if state.job.startswith(("process-", "torchrun-")):
        return "the same script again"
    return f"slurm-forge {'run' if state.is_local else 'requeue'} {reference}"


def jobs_of(state: RunState, history: History) -> tuple[str, ...]:
    """Every job that the run has been, the first one first."""
    told = {attempt.number for attempt in history.attempts}
    archived = (each.job for each in state.attempts if each.number not in told)
    return tuple(dict.fromkeys(job for job in (*archived, *history.jobs, state.job) if job))


def standing(facts: RunFacts, state: RunState, history: History) -> Standing:
    """What the run is doing, according to its files."""
    newest = history.attempts[-1] if history.attempts else None
    status = RunStatus.FINISHED if facts.done else state.status
    not_started = _not_started(facts, status, history)
    contradiction = _ended_by_signal(facts, state, not_started)
    if not_started is not None and not_started.signal is not None:
        not_started = None
    if contradiction is None and not_started is None:
        contradiction = _contradiction_of_machine(
            facts, state, status, history
        ) or _contradiction_of_slurm(facts, state, status, history)
    status = status if contradiction is None else contradiction.status
    doubtful = status is RunStatus.RUNNING and newest is not None and _is_silent(facts, newest)
    words = _words(facts, state, status, newest) if contradiction is None else contradiction.words
    failing = None if status is RunStatus.FINISHED else history.failing_saves()
    if failing is not None and status is RunStatus.RUNNING:
        words += f", but {saves_fail(failing)}"
    if not_started is not None:
        words = f"job {clean(not_started.job, 40)} could not start: {_why(not_started)}"
        doubtful = False
    held = state.held if status is RunStatus.HELD and contradiction is None else None
    held_job = None if held is None else held.job
    waiting = (
        None if contradiction is not None else _waiting(facts, state, status, held_job, newest)
    )
    if waiting is not None and not_started is None and held_job is None:
        silent = facts.queue is not None and not facts.queue.answered
        words = (
            f"{words.partition(_WAITS)[0]}; {waiting.text}"
            if silent
            else f"{words}: {waiting.text}"
        )
    stops = not_started is None and contradiction is None and ends_at_once(facts, status, waiting)
    if stops:
        words += (
            f"; {_who_asked_to_stop(history)}: {turn(waiting)} it ends at once without training"
        )
    if held_job is not None and not_started is None:
        sure = held is not None and held.confirmed
        words += f"; {_in_the_queue(held_job, waiting, sure=sure)}"
    elif status is RunStatus.HELD and not_started is None:
        words += _refused(newest)
    if status not in (RunStatus.STOPPED, RunStatus.CANCELLED):
        return Standing(
            status,
            words,
            doubtful,
            held_job=held_job,
            waiting=waiting,
            not_started=not_started,
            of_program=history.of_program,
            contradiction=contradiction,
            failing_saves=failing,
        )
    trouble = unresolved_failure(history.attempts)
    all_words = words if not_started is not None else words + _before_that(trouble)
    return Standing(
        status,
        all_words,
        doubtful,
        trouble,
        not_started=not_started,
        of_program=history.of_program,
        contradiction=contradiction,
        failing_saves=failing,
    )


def saves_fail(failing: FailingSaves) -> str:
    """``the last 8 saves failed: no room for a checkpoint of 3G``."""
    last = "the last save" if failing.count == 1 else f"the last {failing.count} saves"
    return f"{last} failed: {clean(failing.reason, _SAVE_REASON)}"


def to_go_on(facts: RunFacts, state: RunState, *, of_program: bool) -> str:
    """``to continue from the last checkpoint``, as far as there is one."""
    if of_program:  # from where, it knows itself
        return "to continue"
    none = newest_step(state, facts.on_disk) is None
    return f"to continue from {'the start' if none else 'the last checkpoint'}"


def last_heard(facts: RunFacts, newest: AttemptStory) -> float:
    """When the newest attempt last gave a sign of life: by its files, if they were looked at.

    A node's clock may be hours off, so its times don't show how long ago anything was.
    """
    return newest.last_seen if facts.last_written is None else facts.last_written


def _contradiction_of_machine(
    facts: RunFacts, state: RunState, status: RunStatus, history: History
) -> SlurmContradiction | None:
    """The run's processes on this machine ended before the journal could record it."""
    if status not in (RunStatus.SUBMITTED, RunStatus.RUNNING, RunStatus.REQUEUED):
        return None
    if not facts.gone_here or facts.gone_here != state.job:
        return None
    words = "ended unexpectedly: none of its processes is left on this machine"
    return SlurmContradiction(RunStatus.STOPPED, words, _onward(facts, state, history))


def _onward(facts: RunFacts, state: RunState, history: History) -> str:
    going_on = to_go_on(facts, state, of_program=history.of_program)
    return f"{going_on}: {again(facts.reference, state)}"


def _contradiction_of_slurm(
    facts: RunFacts, state: RunState, status: RunStatus, history: History
) -> SlurmContradiction | None:
    """Slurm's record of the job, where it contradicts the journal."""
    answer, newest = facts.queue, history.attempts[-1] if history.attempts else None
    if status in (RunStatus.SUBMITTED, RunStatus.REQUEUED) and answer is not None:
        if answer.job != state.job or state.open_intent is not None:
            return None
        command = again(facts.reference, state)
        return job_cancelled(answer, again=command, started=newest is not None)
    if status is not RunStatus.RUNNING or answer is None or newest is None:
        return None
    if answer.job != state.job or state.open_intent is not None:
        return None
    return slurm_contradiction(
        answer,
        again=again(facts.reference, state),
        bring_back=_onward(facts, state, history),
        now=facts.now,
        last_seen=last_heard(facts, newest),
    )


def _ended_by_signal(
    facts: RunFacts, state: RunState, note: NotStarted | None
) -> SlurmContradiction | None:
    """What Slurm says of a start that a signal ended; None once the job was started again."""
    if note is None or note.signal is None or state.open_intent is not None:
        return None
    answer = facts.queue
    record = None if answer is None or answer.job != note.job else answer.record
    begun = None if record is None or record.state not in ACTIVE else record.start_time
    if begun is not None and begun.timestamp() > note.time:
        return None
    command = again(facts.reference, replace(state, job=note.job))
    return ended_by_signal(answer, job=note.job, signal=note.signal, again=command, now=facts.now)


def ends_at_once(facts: RunFacts, status: RunStatus, waiting: WaitingStory | None) -> bool:
    """Whether the run waits to be started, and its start will find that it was asked to stop."""
    if not facts.stop_asked or status not in (RunStatus.SUBMITTED, RunStatus.REQUEUED):
        return False
    return waiting is None or waiting.state == "" or parse_state(waiting.state) in PENDING_LIKE


def turn(waiting: WaitingStory | None) -> str:
    """When a job that waits is started."""
    held = waiting is not None and waiting.held
    return "once it is released" if held else "when its turn comes"


def _who_asked_to_stop(history: History) -> str:
    acts = [act for act in history.acts if act.verb == "stop" or act.verb in GO_ON]
    user = acts[-1].user if acts and acts[-1].verb == "stop" else None
    return "a STOP file asks it to stop" if not user else f"{clean(user, 60)} asked it to stop"


def _not_started(facts: RunFacts, status: RunStatus, history: History) -> NotStarted | None:
    """The newest word of a start that failed, if nothing has come after it."""
    newest = max(facts.not_started, key=lambda one: one.time, default=None)
    if newest is None or status is RunStatus.FINISHED:
        return None
    # The time of its file dates it, and also what may have come later.
    begun, requested = facts.claimed, facts.asked
    if begun is None:
        begun = max((attempt.started for attempt in history.attempts), default=-math.inf)
    if requested is None:  # what a person has asked for since is another start
        acts = (act.time for act in history.acts if act.verb in GO_ON)
        requested = max(acts, default=-math.inf)
    return newest if newest.time > max(begun, requested) else None


def _why(note: NotStarted) -> str:
    """The last note of the file, without the inner lines of a traceback."""
    lines = [line.rstrip() for line in note.text.splitlines() if line.strip()]
    begins = [index for index, line in enumerate(lines) if _NOTE.fullmatch(line)]
    where = ""
    if begins:
        match = _NOTE.fullmatch(lines[begins[-1]])
        where = "" if match is None else f"on {match[1]}: "
        lines = lines[begins[-1] + 1 :]
    text = " ".join(line for line in lines if not line.startswith((" ", "Traceback (")))
    return clean(where + text, _LONGEST_WHY) or "no reason was recorded"


def _waiting(
    facts: RunFacts,
    state: RunState,
    status: RunStatus,
    held_job: str | None,
    newest: AttemptStory | None,
) -> WaitingStory | None:
    """Slurm's answer about the job, if that is the one that waits now."""
    waits = status in (RunStatus.SUBMITTED, RunStatus.REQUEUED) or held_job is not None
    answer, job = facts.queue, held_job or state.job
    if answer is None or not waits or answer.job != job or state.open_intent is not None:
        return None
    if held_job is not None and not answer.answered:
        return None  # the journal says that it is held there: the last that is known
    last = newest.launches[-1].incidents[-1:] if newest is not None and newest.launches else ()
    return why_waiting(
        answer,
        again=again(facts.reference, replace(state, job=job)),
        now=facts.now,
        # The id of an array without a task is that of a chain which has not begun, or is held.
        chained="_" not in job or (newest is not None and newest.via == VIA_ARRAY),
        preempted=any(each.cause == Cause.PREEMPTED.value for each in last),
    )


def _refused(newest: AttemptStory | None) -> str:
    """Where it was to wait in the queue, and Slurm did not take that."""
    held = None if newest is None else newest.held
    return "" if held is None or not held.refused else f"; {in_the_queue(held)}"


def _in_the_queue(job: str, waiting: WaitingStory | None, *, sure: bool) -> str:
    if waiting is not None and not waiting.held:
        return waiting.text
    if waiting is None and not sure:
        return f"asked Slurm to hold it in its queue as job {clean(job, 40)}"
    held = f"held in Slurm's queue as job {clean(job, 40)}"
    admin = waiting is not None and waiting.reason == "JobHeldAdmin"
    return f"{held} by an administrator, who alone can release it" if admin else held


def _before_that(trouble: UnresolvedFailure | None) -> str:
    if trouble is None:
        return ""
    incident = trouble.incident
    evidence = "; ".join(observed(e.source, e.text, 160) for e in incident.evidence[:1])
    suffix = f": {evidence}" if evidence else ""
    return f"; before that, in attempt {trouble.attempt}, {clean(incident.cause, 40)}{suffix}"


def _is_silent(facts: RunFacts, newest: AttemptStory) -> bool:
    silent = facts.now - last_heard(facts, newest)
    return newest.ended is not None or (math.isfinite(silent) and silent > _SILENT_S)


def _words(facts: RunFacts, state: RunState, status: RunStatus, newest: AttemptStory | None) -> str:
    if status is RunStatus.FINISHED:
        return "finished"
    if state.open_intent is not None:
        return "waiting for a requeue that Slurm has not confirmed"
    match status:
        case RunStatus.NEW:
            return "not started yet"
        case RunStatus.SUBMITTED:
            return "submitted, waiting to start"
        case RunStatus.REQUEUED:
            since = None if newest is None else _end(newest)
            return f"requeued {ago(since, facts.now)}, waiting to start again"
        case RunStatus.RUNNING if newest is not None:
            return _running(facts, newest)
        case _:
            reason = clean(without_next(state.reason), 300)
            return f"{status.value}: {reason}" if reason else status.value


def _running(facts: RunFacts, newest: AttemptStory) -> str:
    if newest.ended is not None:
        return f"its last attempt ended {ago(newest.ended, facts.now)}" + (
            f" ({clean(newest.outcome, 60)})" if newest.outcome else ""
        )
    silent = facts.now - last_heard(facts, newest)
    answered = facts.queue is not None and facts.queue.answered
    if _is_silent(facts, newest):
        sure = f", although job {clean(newest.job, 40)} is running" if answered else ""
        return f"running, but silent for {span(silent)}{sure}"
    if answered and facts.queue is not None and facts.queue.record is not None:
        paused = _PAUSED.get(facts.queue.record.state)
        if paused is not None:
            return f"{paused} (job {clean(newest.job, 40)})"
    what = _doing(newest)
    if facts.queue is not None and not answered:
        silence = f"last heard from {span(silent)} ago"
        return f"{what} according to its journal, {silence}; Slurm does not answer"
    return f"{what}, last heard from {span(silent)} ago" if silent >= _QUIET_S else what


def _doing(newest: AttemptStory) -> str:
    launch = newest.launches[-1] if newest.launches else None
    if launch is not None and launch.program is not None:
        return "its program is running"
    if launch is None or not launch.resumes:
        return "starting"
    if launch.stop_step is not None:
        return "stopping"
    return "training"


def _end(attempt: AttemptStory) -> float:
    return attempt.last_seen if attempt.ended is None else attempt.ended


def warnings_of(facts: RunFacts, state: RunState, ordered: Iterable[Record]) -> tuple[str, ...]:
    """Sentences about the journal itself, and about files that will not be there for ever."""
    warnings = [clean(problem, 500) for problem in facts.problems]
    purge = purge_warning(facts.purge, facts.oldest_file, facts.now)
    if purge is not None:
        warnings.append(purge)
    missing = missing_checkpoint(state, facts.on_disk)
    if missing is not None:
        newest = newest_step(state, facts.on_disk)
        place = (
            "none is left" if newest is None else f"the newest one left is step {number(newest)}"
        )
        warnings.append(
            f"checkpoint {missing} is in the journal but not on disk: {place}; "
            f"restore its folder, or see slurm-forge checkpoints list {facts.reference}"
        )
    for damage in facts.damage[:_SHOWN_DAMAGE]:
        where = f"{clean(damage.file, 120)}, line {damage.line}"
        warnings.append(f"damaged line ignored: {where}: {clean(damage.reason, 160)}")
    if len(facts.damage) > _SHOWN_DAMAGE:
        warnings.append(f"{plural(len(facts.damage) - _SHOWN_DAMAGE, 'more damaged line')} ignored")
    warnings += fenced_lines(state)
    warnings += later_lines(state)
    warnings += clock_differences(ordered)
    return tuple(warnings)


def later_lines(state: RunState) -> Iterator[str]:
    """A sentence about what a later slurm_forge wrote and this one does not know."""
    if not state.later:
        return
    count = sum(each.count for each in state.later)
    kinds = ", ".join(dict.fromkeys(clean(each.kind, 40) for each in state.later))
    newest = max((each.by for each in state.later), key=_release)
    verb = "is" if count == 1 else "are"
    yield (
        f"{plural(count, 'event')} of kinds that this slurm_forge does not know ({kinds}) {verb} "
        f"not shown: a later version wrote them ({clean(to_install(newest))})"
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"[0-9]+", version)[:4])


def fenced_lines(state: RunState) -> Iterator[str]:
    """A sentence for each attempt that wrote what the next one could not know of any more."""
    for attempt in sorted({each.attempt for each in state.fenced}):
        of_attempt = [each for each in state.fenced if each.attempt == attempt]
        kinds = ", ".join(f"{each.kind} {each.count}" for each in of_attempt)
        count = sum(each.count for each in of_attempt)
        verb = "is" if count == 1 else "are"
        yield (
            f"{plural(count, 'line')} that attempt {attempt} wrote after a newer one had taken "
            f"over {verb} ignored ({kinds})"
        )
