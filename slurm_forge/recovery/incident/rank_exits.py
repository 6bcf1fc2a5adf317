"""The cause of a launch in which ranks ended without last words, or nobody reported anything."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

from slurm_forge.recovery.incident.crash_dumps import find_dump
from slurm_forge.recovery.incident.last_lines import exit_code_of_worker
from slurm_forge.recovery.incident.launch_facts import (
    OF_PROGRAM,
    LaunchFacts,
    LostRank,
    RankFailure,
)
from slurm_forge.recovery.incident.output_tail import (
    judge_end,
    reruns_of_megatron,
)
from slurm_forge.recovery.incident.slurm_evidence import (
    Judged,
    killed_for_memory,
    launcher_words,
    node_lost,
)
from slurm_forge.slurm.states import TERMINAL, JobState
from slurm_forge.slurm.text.srun_messages import (
    TaskEnd,
    first_end,
    step_cancelled,
    task_ends,
)
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence

#: With these exit codes Megatron reports that its own check of a result points to the hardware of
#: that rank (EXIT_CODE_RESUME_TO_DISAMBIGUATE and EXIT_CODE_FAILED_ON_RESULT_VALIDATION of its
#: rerun state machine): another node may tell.
SUSPECTED_HARDWARE = frozenset({16, 17})
_MOST_TEXT = 400
_OWN_FAULTS = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"})
_FAULTS = (_OWN_FAULTS - {"SIGABRT"}) | {"SIGKILL"}
#: 128 plus the number of SIGSEGV, SIGBUS, SIGILL, SIGFPE.
_FAULT_STATUS = frozenset({139, 135, 132, 136})
_ABORTED = 134
_ABORTED_STEP = "srun: Job step aborted"


def judge_silent_end(facts: LaunchFacts) -> Judged:
    """The launch ended, and no rank whose words count had left any."""
    evidence = tuple(
        Evidence(f"rank {lost.rank}", f"on {lost.host}: ended without a message")
        for lost in facts.lost
    )
    killed = killed_for_memory(facts)
    if killed:
        return Cause.HOST_OOM, Confidence.LIKELY, (*evidence, *killed)
    row = next(iter(facts.rows), None)
    if row is not None and row.state is JobState.OUT_OF_MEMORY:
        step_state = Evidence("sacct", f"step {row.step}: State={row.state_text}")
        return Cause.HOST_OOM, Confidence.CERTAIN, (*evidence, step_state)
    ends = _ends(facts)
    first = _first(facts, ends)
    # Whoever saw a rank die of its own fault was there: that node is not lost.
    lost_node = None if first is not None and first.died_of in _OWN_FAULTS else node_lost(facts)
    if lost_node is not None:
        cause, confidence, words = lost_node
        return cause, confidence, (*evidence, *words)
    verdict = _cancelled(facts, ends) or _by_end(facts, first)
    if verdict is not None:
        cause, confidence, words = verdict
        return cause, confidence, (*evidence, *words)
    words = launcher_words(facts)
    if facts.absent:
        ranks = ", ".join(map(str, facts.absent[:8]))
        text = f"{len(facts.absent)} never joined ({ranks}{', …' if len(facts.absent) > 8 else ''})"
        return Cause.HANG, Confidence.LIKELY, (Evidence("ranks", text), *words)
    status = facts.exit_status
    if status not in (None, 0):
        worker = exit_code_of_worker(facts.launcher_text) if facts.launcher == OF_PROGRAM else ""
        words = (*words, Evidence("exit status", f"{_exit_status(status)}{worker}"))
    if status not in (None, 0) or facts.lost:
        return Cause.CRASH, Confidence.LIKELY, (*evidence, *words)
    return Cause.UNKNOWN, Confidence.GUESS, words


def launcher_killed(facts: LaunchFacts) -> Judged | None:
    """srun itself was killed and Slurm ended the ranks for that: no node is to blame."""
    if not facts.launcher_signal:
        return None
    text = f"{facts.launcher} was killed by {facts.launcher_signal}, and with it every rank"
    killed = killed_for_memory(facts)
    if killed:
        return Cause.HOST_OOM, Confidence.LIKELY, (Evidence(facts.launcher, text), *killed)
    return Cause.CRASH, Confidence.LIKELY, (Evidence(facts.launcher, text),)


def _exit_status(status: int | None) -> str:
    """``137 (SIGKILL)``: shells, launchers and slurm_forge add 128 to the signal's number."""
    number = (status or 0) - 128
    signal_name = next((each.name for each in signal.Signals if each.value == number), "")
    return f"{status} ({signal_name})" if signal_name else str(status)


def _cancelled(facts: LaunchFacts, ends: tuple[TaskEnd, ...]) -> Judged | None:
    """A ``scancel`` of the step: SIGKILL for every rank at once, while the job keeps running.

    Slurm's records of the job do not mention it (tried on 22.05.8).  srun's order of messages shows
    it: no task had ended, and nothing had failed, before the step was aborted; accounting names the
    user.  A rank that could still report, or ended otherwise, was not killed by it.
    """
    if facts.failures or any(each.signal != "SIGKILL" for each in ends):
        return None
    row = next(iter(facts.rows), None)
    if row is not None and row.cancelled_by is None and row.state in TERMINAL:
        return None  # accounting knows how the step ended, and it was not cancelled
    before, aborted, _ = facts.launcher_text.partition(_ABORTED_STEP)
    if (
        not aborted
        or "srun: error:" in before
        or not ends
        or any(not each.follows for each in ends)
    ):
        return None
    printed = [each for each in step_cancelled(facts.launcher_text) if each.is_step]
    text = printed[-1].text if printed else "the step was aborted before any task had ended"
    words = Evidence("srun", text)
    if row is None or row.cancelled_by is None:
        return Cause.USER_CANCELLED, Confidence.LIKELY, (words,)
    # No proof on its own: srun cancels a step that it can't start, in the user's name.
    who = Evidence("sacct", f"step {row.step}: State={row.state_text}")
    return Cause.USER_CANCELLED, Confidence.CERTAIN, (who, words)


def _ends(facts: LaunchFacts) -> tuple[TaskEnd, ...]:
    """srun's reports on the ends of its tasks, by the ranks of these tasks."""
    each = facts.ranks_per_task
    return tuple(
        replace(end, tasks=tuple(task * each + rank for task in end.tasks for rank in range(each)))
        for end in task_ends(facts.launcher_text)
    )


def _first(facts: LaunchFacts, ends: tuple[TaskEnd, ...]) -> TaskEnd | None:
    """The end that likely caused the others.

    Reports of agents on the processes that they reaped take precedence over srun's text, which is
    about the agents.  An agent ends only with its step, and srun gives the reason.
    """
    printed = first_end(ends)
    if printed is not None or _ABORTED_STEP in facts.launcher_text:
        return printed
    lost = {each.rank for each in facts.lost}
    bad = [each for each in facts.ends if each.signal or each.exit_code]
    # A rank with last words has given its own reason.
    candidates = [each for each in bad if each.rank in lost] or bad
    return first_end(
        [
            TaskEnd(
                tasks=(each.rank,),
                host=each.host,
                signal=each.signal,
                exit_code=each.exit_code,
                text=f"{each.host}: rank {each.rank}: {each.signal or f'exit {each.exit_code}'}",
                follows=each.ours,
            )
            for each in candidates
        ]
    )


def first_lost(facts: LaunchFacts) -> LostRank | None:
    """The rank that was lost first: by srun's order if it names one, else by the channel's."""
    end = _first(facts, _ends(facts))
    if end is not None:
        matching = [lost for lost in facts.lost if lost.rank in end.tasks]
        if matching:
            return matching[0]
        if not facts.lost and end.tasks:
            return LostRank(end.tasks[0], end.host)
    return facts.lost[0] if facts.lost else None


def told_by_output(failure: RankFailure, output: str) -> RankFailure:
    """What a rank's own output adds to its monitor's word that it went without a message.

    A process that aborts has often said why, such as the watchdog of a group of NCCL's.  That one
    names a rank that waited in vain, which says nothing against it.
    """
    dump = find_dump(output)
    if failure.cause is not Cause.CRASH or dump is None or dump.signal != "SIGABRT":
        return failure
    verdict = judge_end(output, shared=False, by_signal=True, aborted=True)
    if verdict is None:
        return failure
    waited = verdict.cause is Cause.HANG
    return replace(failure, cause=verdict.cause, text=_short(verdict.text), all_ranks=waited)


def _by_end(facts: LaunchFacts, end: TaskEnd | None) -> Judged | None:
    """By how the first task ended, and by what it had printed before."""
    source = "srun" if "srun" in (end.text if end else "") else "agent"
    quoted = () if end is None else (Evidence(source, _short(end.text)),)
    lost = first_lost(facts)
    own = "" if lost is None else lost.output
    printed = own or facts.launcher_text
    suspects = end is not None and end.exit_code in SUSPECTED_HARDWARE
    if end is not None and suspects and reruns_of_megatron(printed):
        text = f"exit {end.exit_code}: Megatron suspects the hardware that this rank ran on"
        return Cause.GPU_ERROR, Confidence.LIKELY, (*quoted, Evidence("exit status", text))
    source = "output" if lost is None else f"output of rank {lost.rank}"
    dump = find_dump(printed)
    if dump is not None:
        dump_text = f"{dump.error}; {', '.join(dump.frames[:3])}" if dump.frames else dump.error
        quoted = (*quoted, Evidence(source, _short(dump_text)))
    died_of = "" if end is None else end.died_of
    fault = died_of in _FAULTS or (end is None and facts.exit_status in _FAULT_STATUS)
    # Text printed before a fault of the process, or before a kill, need not be the reason.
    verdict = None
    if not fault:
        verdict = judge_end(
            printed,
            shared=not own,
            by_signal=bool(died_of),
            aborted=died_of == "SIGABRT" or (end is None and facts.exit_status == _ABORTED),
            quoted=[each.text for each in facts.failures],
        )
    if verdict is not None:
        return verdict.cause, verdict.confidence, (*quoted, Evidence(source, _short(verdict.text)))
    if dump is None and end is None:
        return None
    if facts.launcher == OF_PROGRAM and dump is None:
        quoted = (*quoted, *launcher_words(facts))
    if suspects:
        return Cause.APP_ERROR, Confidence.LIKELY, quoted
    return Cause.CRASH, Confidence.LIKELY, quoted


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()[:_MOST_TEXT]
