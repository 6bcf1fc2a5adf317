"""What srun and slurmstepd print when tasks end and steps are cancelled, as values.

The lines stand among what the ranks print, progress bars without a line's end included, so they
are looked for inside lines too.  Formats: ``_task_finish`` in src/srun/launch.c and
``_handle_signal_container`` in src/slurmd/slurmstepd/req.c, and as printed by 22.05.8 to 26.05.3
(``tests/unit/slurm/data``).  From 25.05 on slurmstepd begins its lines with the time instead of its
name, and says of each cancellation what it is due to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

#: What is read of a text, from its end: a step's end stands there.
_LONGEST = 1 << 20
#: More lines, or tasks in all of them, than any launch has are nothing of srun's.
_MOST_LINES = 10_000
_MOST_TASKS = 1_000_000

# strsignal(3) of glibc; "Out Of Memory" is Slurm's own word for its signal 253.
_SIGNALS = {
    "Hangup": "SIGHUP",
    "Interrupt": "SIGINT",
    "Quit": "SIGQUIT",
    "Illegal instruction": "SIGILL",
    "Trace/breakpoint trap": "SIGTRAP",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Killed": "SIGKILL",
    "User defined signal 1": "SIGUSR1",
    "Segmentation fault": "SIGSEGV",
    "User defined signal 2": "SIGUSR2",
    "Broken pipe": "SIGPIPE",
    "Alarm clock": "SIGALRM",
    "Terminated": "SIGTERM",
    "Stack fault": "SIGSTKFLT",
    "CPU time limit exceeded": "SIGXCPU",
    "File size limit exceeded": "SIGXFSZ",
    "Virtual timer expired": "SIGVTALRM",
    "Profiling timer expired": "SIGPROF",
    "I/O possible": "SIGIO",
    "Power failure": "SIGPWR",
    "Bad system call": "SIGSYS",
    "Out Of Memory": "SIGKILL",
}
_OF_SHELLS = {
    131: "SIGQUIT",
    132: "SIGILL",
    133: "SIGTRAP",
    134: "SIGABRT",
    135: "SIGBUS",
    136: "SIGFPE",
    137: "SIGKILL",
    139: "SIGSEGV",
    143: "SIGTERM",
    159: "SIGSYS",
}
#: Signals that only a fault of the process itself or the kernel's memory killer sends.
_FAULTS = frozenset({"SIGILL", "SIGBUS", "SIGFPE", "SIGSEGV", "SIGSYS", "SIGTRAP"})
_ENDED_BY_OTHERS = frozenset({"SIGTERM", "SIGKILL", "SIGINT", "SIGHUP"})

# Compiled on first use: every command line imports this, hardly any reads what srun printed.
_TASK = (
    r"(?<!['\"`_])srun: error: (?P<host>[\w.\[\],-]{1,1024}): tasks? (?P<tasks>[0-9,-]{1,4096}): "
    r"(?:Exited with exit code (?P<code>[0-9]{1,3})(?![0-9])"
    r"|(?P<signal>[A-Z][A-Za-z0-9/ -]{2,40}?)(?: \(core dumped\))?(?=[\r\n]|$))"
)
_ENDS_STEP = r"(?<!['\"`_])srun: (?:[\w/]{1,40}: [\w]{1,40}: )?Terminating (?:StepId=|job step )"
# From here on srun ends the others: how they end says nothing about them.
_TERMINATING = (
    rf"{_ENDS_STEP}"
    r"|(?<!['\"`_])srun: (?:Job step aborted|Force Terminated |First task exited [0-9]+s ago)"
    r"|\*\*\* (?:JOB|STEP) [\w.+]{1,40} (?:ON [^\s*]{1,255} )?CANCELLED AT "
)
_CANCELLED = (
    r"\*\*\* (?P<what>JOB|STEP) (?P<id>[0-9][\w.+]{0,40}) (?:ON (?P<host>[^\s*]{1,255}) )?"
    r"(?:CANCELLED AT (?P<at>[^\s*]{1,40})(?: DUE TO (?P<reason>[^*,\r\n]{1,80}))?"
    r"|(?P<ume>UNCORRECTABLE MEMORY ERROR) AT (?P<ume_at>[^\s*]{1,40}))[^*\r\n]{0,80} ?\*\*\*"
)
#: What newer versions write where older ones give no reason.
_TASK_FAILURE = "TASK FAILURE"
_SIGNAL = "SIGNAL "
#: Printed where the step is ended from outside, never where a bad exit ends it.
_ABORTED = "srun: Job step aborted: "
_NODE_FAILURE = re.compile(
    r"(?<!['\"`_])srun: error: Node failure on (?P<nodes>[\w.\[\],-]{1,1024})"
)
_RANGE = re.compile(r"(?P<first>[0-9]{1,8})(?:-(?P<last>[0-9]{1,8}))?")


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How some tasks ended, in one line of srun's.

    ``signal`` is ``"SIGSEGV"`` or empty, ``exit_code`` None where a signal ended them.
    ``follows``: srun was ending the step already, so it may be a mere consequence.
    """

    tasks: tuple[int, ...]
    host: str
    signal: str
    exit_code: int | None
    text: str
    out_of_memory: bool = False
    follows: bool = False

    @property
    def died_of(self) -> str:
        """The signal, also where a shell or a container in between made an exit code of it."""
        return self.signal or _OF_SHELLS.get(self.exit_code or 0, "")

    @property
    def ended(self) -> str:
        """In one word: ``SIGSEGV``, ``out of memory``, ``exit 16``."""
        if self.out_of_memory:
            return "out of memory"
        return self.signal or f"exit {self.exit_code}"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A job or a step that slurmstepd (or srun) says was cancelled.

    ``id`` is ``"12"`` of a job and ``"12.0"`` of a step; ``at`` is Slurm's text, in the node's own
    time; ``reason`` is Slurm's, such as ``PREEMPTION``, ``TIME LIMIT``, ``NODE FAILURE``,
    ``JOB REQUEUE``, or empty where somebody cancelled it or a bad exit did: that it is "due to
    signal Terminated" or "due to task failure", as Slurm says from 25.05 on, is no more than that.
    """

    id: str
    is_step: bool
    host: str
    at: str
    reason: str
    text: str


def task_ends(text: str) -> tuple[TaskEnd, ...]:
    """Every abnormal end that srun reports, in its order.

    Where a step is cancelled, Slurm kills all its tasks, and now and then the end of one is printed
    before the cancellation (once in 140 tries on 22.05.8): then, too, none of them began it.
    """
    text = text[-_LONGEST:]
    ending = re.search(_TERMINATING, text)
    ends_from = len(text) if ending is None else ending.start()
    ends = tuple(_ends(text, ends_from))
    killed = all(each.signal == "SIGKILL" and not each.out_of_memory for each in ends)
    if killed and _ABORTED in text:
        return tuple(replace(each, follows=True) for each in ends)
    return ends


def first_end(ends: Sequence[TaskEnd]) -> TaskEnd | None:
    """The end that likely brought about the others; None where nothing is to be seen of one.

    The first one reported before srun began to end the step.  A core file takes its time, so that
    a peer that only lost its connection may be reported first: a fault (a segmentation fault, the
    memory killer) goes before exit codes and signals that anybody may have sent.
    """
    own = [each for each in ends if not each.follows]
    faults = [each for each in ends if each.out_of_memory or each.died_of in _FAULTS]
    unprovoked = [each for each in own if each.died_of not in _ENDED_BY_OTHERS]
    return next(iter(faults or unprovoked or own), None)


def step_cancelled(text: str) -> tuple[Cancelled, ...]:
    """Every job and step that is said to be cancelled, in order."""
    cancellations = []
    for match in re.finditer(_CANCELLED, text[-_LONGEST:], re.I):
        what = match["id"]
        cancellations.append(
            Cancelled(
                id=what,
                is_step=match["what"].upper() == "STEP",
                host=match["host"] or "",
                at=match["at"] or match["ume_at"],
                reason=_reason(match),
                text=match[0],
            )
        )
        if len(cancellations) == _MOST_LINES:
            break
    return tuple(cancellations)


def ended_by_srun(text: str) -> frozenset[str]:
    """Ids (``12.0``) of the steps that srun says it ends itself: a task of theirs ended badly.

    Slurm's "CANCELLED" of such a step, and the signals that its tasks get, follow from that.
    """
    text = text[-_LONGEST:]
    matches = re.finditer(_ENDS_STEP + r"(?P<id>\d+(?:\.\d+)?)", text)
    cancelled = (each for each in re.finditer(_CANCELLED, text, re.I))
    failed = (each["id"] for each in cancelled if _reason_text(each) == _TASK_FAILURE)
    return frozenset((*(match["id"] for match in matches), *failed))


def lost_nodes(text: str) -> tuple[str, ...]:
    """Node expressions (``n2``, ``n[1-2]``) that srun says failed, each once."""
    expressions = (match["nodes"] for match in _NODE_FAILURE.finditer(text[-_LONGEST:]))
    return tuple(dict.fromkeys(expressions))


def _reason_text(match: re.Match[str]) -> str:
    return (match["ume"] or match["reason"] or "").strip().upper()


def _reason(match: re.Match[str]) -> str:
    text = _reason_text(match)
    return "" if text == _TASK_FAILURE or text.startswith(_SIGNAL) else text


def _ends(text: str, ends_from: int) -> Iterator[TaskEnd]:
    tasks_left = _MOST_TASKS
    for count, match in enumerate(re.finditer(_TASK, text, re.M)):
        if count == _MOST_LINES:
            return
        words = match["signal"]
        signal = "" if words is None else _signal(words)
        if words is not None and not signal:
            continue  # "running": how a task is, not how it ended
        tasks = _tasks(match["tasks"], tasks_left)
        tasks_left -= len(tasks)
        yield TaskEnd(
            tasks=tasks,
            host=match["host"],
            signal=signal,
            exit_code=None if match["code"] is None else int(match["code"]),
            text=match[0],
            out_of_memory=words == "Out Of Memory",
            follows=match.start() > ends_from,
        )


def _signal(words: str) -> str:
    name = _SIGNALS.get(words, "")
    if name:
        return name
    kind, _, number = words.rpartition(" ")
    if not number.isdigit():
        return ""
    return {"Real-time signal": f"SIGRTMIN+{number}", "Unknown signal": f"signal {number}"}.get(
        kind, ""
    )


def _tasks(text: str, most: int) -> tuple[int, ...]:
    """Numbers of ``0-1,3``; a range that can't be one, or is too long, is left out."""
    tasks: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            continue  # Slurm cuts long lists anywhere
        first = int(match["first"])
        last = int(match["last"] or first)
        if last - first < most - len(tasks):
            tasks.extend(range(first, last + 1))
    return tuple(tasks)
