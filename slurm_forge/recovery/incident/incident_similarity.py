"""Whether two incidents are the same problem, judged by their evidence.  Pure.

A launch never fails twice with identical text: addresses, processes, ports, times and the names of
ranks, hosts and scratch files differ every time.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.decision import Incident

_HERE = "#"
_DATE = r"\d{4}-\d\d-\d\d"
_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,]\d+)?"
_ZONE = r"(?:Z|[+-]\d\d:?\d\d)?"
_UNITS = r"(?:ns|us|µs|ms|msecs?|milliseconds?|s|secs?|seconds?|min|minutes?|h|hours?)"

#: Applied in this order: what one of them matched is not examined again.
_PASSING = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_DATE}(?:[T ]{_CLOCK}{_ZONE})?|{_CLOCK}{_ZONE}",
        r"\b0x[0-9a-f]+\b",
        r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b",
        # A word of hexadecimal digits; a word of letters or digits alone may have a meaning.
        r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b",
        r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b",
        r"\[[0-9a-f:]*:[0-9a-f:]*\](?::\d{1,5})?",
        r"\b(?:local[_ ]?)?ranks? ?[=:]? ?\[?\d+(?:(?:, ?| and | to |-)\d+)*\]?",
        r"\b(?:cuda|gpu|device|worker)[ :=#]*\d+\b",
        r"\b(?:pid|process|tid|thread|ppid)(?:\(s\)| id)?[ :=#]*\[?\d+\]?",
        r"\bport[ :=]*\d{1,5}\b",
        r"\blocalhost:\d{1,5}\b",
        r"\b(?:job(?: ?id)?|step ?id)[ :=]*\d+(?:[_.+]\w+)*\b",
        rf"\b\d+(?:\.\d+)? ?{_UNITS}\b",
        r"\(ms\) ?= ?\d+",
    )
)
#: A word containing a slash; the line number after a file name is kept.
_PATH = re.compile(r"[^\s\"'(),;=]*/[^\s\"'(),;]*")
_LINE = re.compile(r":\d+(?::\d+)?$")
_NUMBER = re.compile(r"\d+")
#: As Python's tempfile and mktemp name things.
_SCRATCH = re.compile(r"\btmp[.\w]{6,}")


def alike(one: Incident, other: Incident, nodes: Collection[str] = ()) -> bool:
    """Same cause, same step, and the same evidence; ``nodes`` are names of hosts.

    The first piece of evidence counts.  For a crash, which reveals little, nothing else may differ
    either: if one of the two was observed in more detail, it contains the evidence of the other.
    """
    if (one.cause, one.step) != (other.cause, other.step) or not (one.evidence and other.evidence):
        return False
    names = {*nodes, *one.hosts, *other.hosts}
    texts = [_comparable(each, names) for each in one.evidence]
    theirs = [_comparable(each, names) for each in other.evidence]
    if texts[0] != theirs[0]:
        return False
    if one.cause is not Cause.CRASH:
        return True
    return set(texts) <= set(theirs) or set(theirs) <= set(texts)


def essence(text: str, hosts: Collection[str] = ()) -> str:
    """A text without the parts that change between launches, the names of ``hosts`` included."""
    text = " ".join(text.split())
    for host in sorted({each for each in hosts if each}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?:\.[\w.-]*\w)?(?![\w-])", _HERE, text)
    text = _SCRATCH.sub(_HERE, _PATH.sub(_without_numbers, text))
    for pattern in _PASSING:
        text = pattern.sub(_HERE, text)
    # A host, and the port on it.
    return re.sub(rf"{_HERE}(?::\d{{1,5}}\b)?(?:[ ,]*{_HERE})*", _HERE, text)


def _comparable(evidence: Evidence, hosts: Collection[str]) -> tuple[str, str]:
    source = re.sub(r"\bon \S+", "on #", evidence.source)
    return essence(source, hosts), essence(evidence.text, hosts)


def _without_numbers(match: re.Match[str]) -> str:
    path = match[0]
    line = _LINE.search(path)
    end = len(path) if line is None else line.start()
    return _NUMBER.sub(_HERE, _SCRATCH.sub(_HERE, path[:end])) + path[end:]
