"""Why a process ended, judged by the end of its output: the last words, not the worst.

Programs print much that only looks like an error: missing optional parts, failed alternatives.  So
an uncaught exception counts as such, a crash is explained by the lines right before it, and
otherwise the last known text counts.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slurm_forge.recovery.incident.crash_dumps import (
    Dump,
    Traceback,
    find_dump,
    find_tracebacks,
)
from slurm_forge.recovery.incident.error_patterns import (
    ErrorMatch,
    find_cause,
    find_last,
)
from slurm_forge.vocabulary.cause import Cause, Confidence

#: Types that Python and programs raise for mistakes: their texts may contain anything.
MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
)
#: Causes that hold a job or exclude a node: an old line is not enough for them.
_HOLDS_OR_STRIKES = frozenset(
    {Cause.ENV_MISMATCH, Cause.CHECKPOINT_BAD, Cause.GPU_ERROR, Cause.NODE_FAIL}
)
#: Missing or mismatched files never make a process crash later.
_NO_CRASH = frozenset({Cause.ENV_MISMATCH, Cause.CHECKPOINT_BAD})
#: Numbers of lines: what counts as right before an end, what may follow an exception (closing
#: messages of libraries, the rest of its text), and how much of a crash is read.
_NEAR = 20
_STILL_THE_END = 60
_OF_A_DUMP = 40
_MOST_OF_A_TEXT = 6

# From 25.05 on slurmstepd prints the time instead of its name.
_OF_SLURM = re.compile(r"(?:(?:srun|slurmstepd)[^:\s]{0,80}:|\[[0-9T:.-]{19,30}\] error:) ")
#: Launchers report that a process failed: the reason is printed before that.
_OF_A_STARTER = re.compile(r"(?:[\w.]{1,100}\.)?(?:ChildFailedError|SignalException)\b")
_OURS = re.compile(r"slurm_forge\.errors\.(\w{1,60})")
_OUR_CAUSES = {
    "MismatchError": Cause.ENV_MISMATCH,
    "CheckpointMissingError": Cause.CHECKPOINT_BAD,
    "CheckpointError": Cause.STORAGE,
}
_OUR_FOLLOWERS = frozenset({"RanksLostError", "ControlChannelError"})
_MISSING_IN = re.compile(r"ModuleNotFoundError: No module named '\w{1,100}\.")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3")
#: megatron/core/rerun_state_machine.py, of Megatron-LM.
_RERUNS = re.compile(
    r"rerun_state_machine|unexpected result is (?:not )?reproducible"
    r"|Possible (?:transient|persistent) error!"
)


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The verdict on the end of an output: a cause, its confidence, and the words behind it."""

    cause: Cause
    confidence: Confidence
    text: str


def judge_end(
    text: str, *, shared: bool, by_signal: bool, aborted: bool, quoted: Sequence[str] = ()
) -> OutputEnd | None:
    """Why a process with this output ended without last words; None if the text does not show it.

    ``shared``: other ranks print there too, including how the loss of this one affected them.
    ``quoted``: ranks' own error reports, as ``Type: text``.  ``by_signal``, ``aborted``: how it
    ended.
    """
    trace, behind = _uncaught(text, shared=shared, quoted=quoted)
    dump = find_dump(text)
    if dump is not None and (trace is None or dump.at >= trace.at):
        error_match = _of_a_dump(text, dump, shared=shared, aborted=aborted)
        if error_match is not None:
            return OutputEnd(error_match.cause, Confidence.LIKELY, error_match.text)
        # An uncaught exception often ends in an abort of what it left behind.
        if trace is None or _lines(text[trace.end : dump.at]) > _NEAR:
            return None
    if trace is not None and behind <= _STILL_THE_END:
        verdict = _of_an_exception(text, trace)
        crashed = by_signal or (dump is not None and dump.at >= trace.at)
        return None if crashed and verdict.cause in _NO_CRASH else verdict
    for error_match in _last_words(text, shared=shared, aborted=aborted):
        near = error_match.behind <= _NEAR
        if near or error_match.cause not in _HOLDS_OR_STRIKES:
            sure = Confidence.LIKELY if near else Confidence.GUESS
            return OutputEnd(error_match.cause, sure, error_match.text)
    return None


def _uncaught(text: str, *, shared: bool, quoted: Sequence[str]) -> tuple[Traceback | None, int]:
    """The last relevant traceback, and the number of lines after it.

    Tracebacks of ranks that only lost another one are skipped, and their lines are not counted.
    """
    end, behind = len(text), 0
    for trace in find_tracebacks(text):
        behind += _lines(text[trace.end : end])
        end = trace.at
        if trace.in_passing or _OF_A_STARTER.match(trace.error):
            continue
        if shared and (is_follower(trace.error) or _has_been_said(trace.error, quoted)):
            continue
        return trace, behind
    return None, 0


def is_follower(error: str) -> bool:
    """Whether the process that raised this exception had only lost another rank."""
    match = _OURS.match(error)
    if match is not None:
        return match[1] in _OUR_FOLLOWERS
    error_match = find_cause(error)
    return error_match is not None and error_match.follows


def _has_been_said(error: str, quoted: Sequence[str]) -> bool:
    kind, _, words = error.partition(": ")
    bare = f"{kind.rpartition('.')[2]}: {words}".rstrip(" .:,;")[:80]
    return any(each.startswith(bare) for each in quoted)


def _of_an_exception(text: str, trace: Traceback) -> OutputEnd:
    """By the exception's line alone, as a rank judges its own exception by type and text."""
    shown = f"{trace.error} ({trace.frame})" if trace.frame else trace.error
    return OutputEnd(_cause_of(text, trace), Confidence.LIKELY, shown)


def _cause_of(text: str, trace: Traceback) -> Cause:
    error = trace.error
    match = _OURS.match(error)
    if match is not None:
        return _OUR_CAUSES.get(match[1], Cause.APP_ERROR)
    error_match = find_cause(error)
    if error_match is None:
        return Cause.APP_ERROR
    kind = getattr(builtins, error.partition(":")[0], None)
    if isinstance(kind, type) and issubclass(kind, MISTAKES) and not even_of_a_mistake(error_match):
        return Cause.APP_ERROR
    if _MISSING_IN.match(error) and not _INSTALLED.search(trace.innermost):
        return Cause.APP_ERROR  # the package exists: the user's own import is wrong
    if error.startswith("ConnectionResetError") and "multiprocessing" in trace.innermost:
        return Cause.CRASH  # another process of the same program
    if error_match.cause is Cause.NCCL_ERROR:
        # NCCL only forwards CUDA's message, which follows a few lines later.
        rest = "\n".join(text[trace.end :].split("\n")[1 : 1 + _MOST_OF_A_TEXT])
        inner = find_cause(rest)
        if inner is not None and inner.cause in {Cause.CUDA_OOM, Cause.GPU_ERROR, Cause.APP_ERROR}:
            return inner.cause
    return error_match.cause


def even_of_a_mistake(error_match: ErrorMatch) -> bool:
    """Whether a text is so specific to a library that it counts with any exception type."""
    return (
        error_match.cause is Cause.NON_FINITE or "memory for the cache blocks" in error_match.text
    )


def _last_words(text: str, *, shared: bool, aborted: bool) -> Iterator[ErrorMatch]:
    """Known texts from the end backwards; in a shared output not those of ranks that lost another.

    An abort is attributed to a watchdog's timeout if a watchdog reported one.
    """
    for error_match in find_last(text, followers=not shared or aborted):
        if (
            not shared
            or not is_follower(error_match.text)
            or (aborted and error_match.cause is Cause.HANG)
        ):
            yield error_match


def _of_a_dump(text: str, dump: Dump, *, shared: bool, aborted: bool) -> ErrorMatch | None:
    """The crash's own message, or else the lines right before it."""
    own = "\n".join(text[dump.at :].split("\n")[:_OF_A_DUMP])
    before = "\n".join(text[: dump.at].splitlines()[-_NEAR:])
    # The watchdog's abort reveals nothing about what it had detected before.
    last_word = next(_last_words(own, shared=shared, aborted=aborted), None)
    if last_word is not None and last_word.cause is not Cause.NCCL_ERROR:
        return last_word
    weak = _NO_CRASH | {Cause.NCCL_ERROR}
    earlier = _last_words(before, shared=shared, aborted=aborted)
    return next((each for each in earlier if each.cause not in weak), last_word)


def _lines(text: str) -> int:
    lines = text.split("\n")[1:]
    return sum(1 for line in lines if line.strip() and not _OF_SLURM.match(line))


def reruns_of_megatron(text: str) -> bool:
    """Whether Megatron recomputed a result: then its exit codes 16 and 17 have its own meaning."""
    return _RERUNS.search(text) is not None
