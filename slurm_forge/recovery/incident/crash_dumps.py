"""What a dying process leaves in its output: faulthandler dumps, C++ aborts, tracebacks.

Formats: ``faulthandler`` of CPython 3.11 to 3.14, glibc's and libstdc++'s messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Limits on what is read: from the end of a text, from the beginning of a dump, of a line.
_LONGEST = 1 << 20
_LONGEST_DUMP = 1 << 17
_LINE = 300
_MOST_FRAMES = 8
_MOST_TRACEBACKS = 200

_FATAL = "Fatal Python error: "
_TRACEBACK = "Traceback (most recent call last):"
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
}
# Python 3.14 puts the thread's name in brackets.
_CURRENT = re.compile(
    r"(?:Current thread|Thread) 0x[0-9a-f]{1,32}[^\n(]{0,80}\(most recent call fi"
)
_FRAME = re.compile(
    r'  File "(?P<file>[^"\n]{1,1000})", line (?P<line>[0-9]{1,9}),? in (?P<name>.+)'
)
# Libraries, the interpreter and slurm_forge: frames of the user's own code are shown first.
_NOT_THEIRS = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3|^<"
    r"|[/\\]slurm_forge[/\\](?:training|checkpoint|control|launch|signals)\b"
)
#: Compiled on first use, with ``re.M``.
_ABORT = (
    r"terminate called after throwing an instance of '(?P<kind>[^'\n]{1,200})'"
    r"(?:\r?\n[^\n]{0,40}?what\(\): {0,4}(?P<what>[^\n]{0,1000}))?"
    r"|terminate called (?:without an active exception|recursively)"
    r"|pure virtual method called"
    r"|^[^\n]{0,300}?: Assertion [`'\u2018][^\n]{1,300}['\u2019] failed\b"
    r"|\*\*\* stack smashing detected \*\*\*"
    r"|\b(?:free|malloc|realloc|munmap_chunk|malloc_consolidate)\(\): [a-z][^\n]{0,100}"
    r"|\b(?:double free or corruption|corrupted (?:double-linked list|size vs\. prev_size))"
    r"|\bCheck failed: [^\n]{0,300}"
)
# Text before a traceback after which the program continues.
_IN_PASSING = re.compile(
    r"(?:Exception in thread [^\n]{1,200}|Exception ignored in[^\n]{1,200}|--- Logging error ---)"
    r"\r?\n[^\n]{0,40}\Z"
)
_RAISED = re.compile(r"[A-Za-z_][\w.]{0,200}(?:: |:?\r?$)")


@dataclass(frozen=True, slots=True)
class Dump:
    """How a process died by a signal that it raised itself.

    ``error`` is its message, in one line; ``frames`` are the user's own, innermost first (a
    library's if there are none), as ``train.py:12 in step``; ``innermost`` is anybody's.
    """

    error: str
    signal: str
    frames: tuple[str, ...] = ()
    innermost: str = ""
    #: Offset of its beginning in the text.
    at: int = 0


@dataclass(frozen=True, slots=True)
class Traceback:
    """The line of an exception, and the last of the user's own frames that it passed.

    ``innermost`` is the file that raised it, whoever owns it; ``at`` and ``end`` are the offsets of
    the beginning of its first line and the end of its last one.
    """

    error: str
    frame: str = ""
    innermost: str = ""
    at: int = 0
    end: int = 0
    #: It ended only a thread, or was merely printed.
    in_passing: bool = False


def find_dump(text: str) -> Dump | None:
    """The last crash near the end of an output; None if there is none.

    A C++ exception that ended in Python's fault handler is one crash: its words, Python's frames.
    """
    skipped = max(0, len(text) - _LONGEST)
    text = text[skipped:]
    at = text.rfind(_FATAL)
    # An earlier crash belongs to another process or another launch.
    before = text.rfind(_FATAL, 0, max(at, 0)) + 1
    words = [each for each in re.finditer(_ABORT, text, re.M) if each.start() >= before]
    if at < 0:
        last = words[-1] if words else None
        return None if last is None else Dump(_what(last), "SIGABRT", at=skipped + last.start())
    fatal, *lines = text[at : at + _LONGEST_DUMP].splitlines()
    error = fatal.removeprefix(_FATAL).strip()
    signal = _SIGNALS.get(error, "SIGABRT")
    frames = _frames(lines)
    own = _own(frames)
    earlier = [each for each in words if each.start() < at]
    return Dump(
        error=_what(earlier[-1]) if earlier and signal == "SIGABRT" else fatal.strip()[:_LINE],
        signal=signal,
        frames=own or tuple(dict.fromkeys(_short(each) for each in frames))[:_MOST_FRAMES],
        innermost=_short(frames[0]) if frames else "",
        at=skipped + (earlier[-1].start() if earlier else at),
    )


def find_tracebacks(text: str) -> Iterator[Traceback]:
    """The complete Python tracebacks, from the last one backwards."""
    skipped = max(0, len(text) - _LONGEST)
    text = text[skipped:]
    at = len(text)
    for _ in range(_MOST_TRACEBACKS):
        end, at = at, text.rfind(_TRACEBACK, 0, at)
        if at < 0:
            return
        traceback = _traceback_at(text[:end], at, skipped)
        if traceback is not None:
            yield traceback


def _traceback_at(text: str, at: int, skipped: int) -> Traceback | None:
    prefix = text[text.rfind("\n", max(0, at - 40), at) + 1 : at] if at else ""
    prefix = prefix if len(prefix) < 40 else ""
    frames: list[re.Match[str]] = []
    first, *lines = text[at : at + _LONGEST_DUMP].split("\n")
    end = at + len(first)
    for line in lines:
        end += 1 + len(line)
        bare = line.removeprefix(prefix).rstrip("\r")
        frame = _FRAME.match(bare)
        if frame is not None:
            frames.append(frame)
        elif _RAISED.match(bare):
            own = _own(frames[::-1])
            return Traceback(
                bare[:_LINE].strip(),
                own[0] if own else "",
                innermost=frames[-1]["file"] if frames else "",
                at=skipped + at,
                end=skipped + end,
                in_passing=_IN_PASSING.search(text[max(0, at - 300) : at]) is not None,
            )
    return None


def _frames(lines: Sequence[str]) -> list[re.Match[str]]:
    """The frames of the thread that died, innermost first; if none is marked, of the first one."""
    starts = [index for index, line in enumerate(lines) if _CURRENT.match(line)]
    current_threads = [index for index in starts if lines[index].startswith("Current")]
    if not starts:
        return []
    frames = []
    for line in lines[(current_threads or starts)[0] + 1 :]:
        frame = _FRAME.match(line)
        if frame is None:
            break
        frames.append(frame)
    return frames


def _own(frames: Sequence[re.Match[str]]) -> tuple[str, ...]:
    theirs = [each for each in frames if not _NOT_THEIRS.search(each["file"])]
    return tuple(dict.fromkeys(_short(each) for each in theirs))[:_MOST_FRAMES]


def _short(frame: re.Match[str]) -> str:
    file = re.split(r"[/\\]", frame["file"])[-1]
    return f"{file}:{frame['line']} in {frame['name'].strip()}"[:_LINE]


def _what(match: re.Match[str]) -> str:
    if match["kind"]:
        what = (match["what"] or "").strip()
        return f"{match['kind']}: {what}"[:_LINE] if what else match["kind"]
    return " ".join(match[0].split())[:_LINE]
