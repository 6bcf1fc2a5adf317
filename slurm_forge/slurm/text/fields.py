"""The text forms that Slurm's commands print, taken apart: ``Key=Value`` records and single values.

Functions on single values raise ``ValueError``; ``parsing`` turns it into an error for the user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone, tzinfo

from slurm_forge.units import parse_slurm_duration

# A key begins a line or follows a space: OverSubscribe=, CPUs/Task=, AllocNode:Sid=.
_PAIR = re.compile(r"(?:^|(?<=\s))(?P<key>[A-Za-z][A-Za-z0-9_/:]*)=")

# What users and administrators write freely.  In the form with several lines each of them ends
# its line, so the rest of the line is the value, whatever it holds; in the form with one line
# (scontrol -o) a value ends at the next key of this list.
_FREE = (
    "JobName",
    "Command",
    "SubmitLine",
    "WorkDir",
    "AdminComment",
    "SystemComment",
    "Comment",
    "Extra",
    "StdErr",
    "StdIn",
    "StdOut",
)
_FREE_OF_NODES = re.compile(r"   (?P<key>Reason|Comment|Extra|OS)=(?P<value>.*)")
_FREE_REST_OF_LINE = re.compile(rf"(?:^|(?<=\s))(?P<key>{'|'.join(_FREE)})=(?P<value>.*)", re.S)
_AFTER_NAME = re.compile(r"\s(?=(?:SLUID|HetJobIdSet|UserId)=)")
# In the form with several lines: what comes between the name and the user, and the user.
_BETWEEN = ("   SLUID=", "   HetJobIdSet=")
_USER_LINE = re.compile(r"^   UserId=", re.M)
_TAIL = re.compile(r"\s(?=Command=)")
_TAIL_KEY = re.compile(
    rf"(?:^|(?<=\s))(?P<key>{'|'.join(_FREE[1:])}|"
    r"BurstBuffer|BurstBufferState|MailUser|MailType|NtasksPerTRES|Power|SegmentSize|Switches|"
    r"CpusPerTres|MemPerTres|TresBind|TresFreq|TresPerJob|TresPerNode|TresPerSocket|TresPerTask)="
)

_NOTHING = frozenset({"", "(null)", "N/A", "None", "NONE", "Unknown"})
_EPOCH = re.compile(r"[0-9]{1,11}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}")
_ZONE = re.compile(r"(?P<sign>[+-])(?P<hours>[0-9]{2}):?(?P<minutes>[0-9]{2})")
_SECONDS = re.compile(r"(?P<number>[0-9]{1,9})(?: ?(?:s|secs?|seconds?))?", re.I)
_EXIT = re.compile(r"(?P<code>[0-9]{1,5})(?::(?P<signal>[0-9]{1,5}))?")


def split_job_records(text: str) -> list[dict[str, str]]:
    """Keys and values of every record in the output of ``scontrol show job``, with or without -o.

    Of a key that occurs twice the first one counts.  The form with several lines is exact for
    values with spaces and ``=``; with one line a value that holds ``" WorkDir="`` or the like is
    cut there, which nothing in the text can tell.  Slurm allows line breaks in a job's name: one
    that looks like a record of its own raises ``ValueError``.
    """
    return [
        _several_lines(block) if "\n" in block else _one_line(block)
        for block in _blocks(text, "JobId=")
    ]


def split_partition_records(text: str) -> list[dict[str, str]]:
    """Keys and values of every record in the output of ``scontrol show partition``."""
    return [_pairs(" ".join(block.split())) for block in _blocks(text, "PartitionName=")]


def split_node_records(text: str) -> list[dict[str, str]]:
    """Keys and values of every record in the output of ``scontrol show node``, without -o.

    What administrators write freely (``Reason=``) is the rest of its line.
    """
    records: list[dict[str, str]] = []
    for block in _blocks(text, "NodeName="):
        fields: dict[str, str] = {}
        for line in block.split("\n"):
            free = _FREE_OF_NODES.fullmatch(line)
            _add(fields, _pairs(line) if free is None else {free["key"]: free["value"].strip()})
        records.append(fields)
    return records


def to_optional(text: str | None) -> str | None:
    """``text``, or ``None`` for the ways in which Slurm writes "nothing"."""
    return None if text is None or text.strip() in _NOTHING else text.strip()


def to_time(text: str | None, zone: tzinfo | None = None) -> datetime | None:
    """Aware datetime of seconds since 1970 or of ``2026-11-21T09:17:00``, also with ``+0100``.

    A time without an offset is in ``zone`` (``None``: this machine's own zone).
    """
    stripped = to_optional(text)
    if stripped is None:
        return None
    head, offset = stripped[:19], stripped[19:]
    try:
        if _EPOCH.fullmatch(stripped):
            return datetime.fromtimestamp(int(stripped), timezone.utc).astimezone(zone)
        if not _TIME.fullmatch(head):
            raise ValueError
        naive = datetime.fromisoformat(head)
        if offset:
            match = _ZONE.fullmatch(offset)
            if match is None:
                raise ValueError
            span = timedelta(hours=int(match["hours"]), minutes=int(match["minutes"]))
            return naive.replace(tzinfo=timezone(-span if match["sign"] == "-" else span))
        return naive.astimezone() if zone is None else naive.replace(tzinfo=zone)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{stripped[:40]!r} is not a time") from None


def to_limit(text: str | None) -> timedelta | None:
    """Duration of ``1-00:00:00``; ``None`` for no limit, for "the partition's" and for nothing."""
    value = to_optional(text)
    if value is None or value in {"Partition_Limit", "INVALID", "NOT_SET"}:
        return None
    return parse_slurm_duration(value)


def to_seconds(text: str | None) -> timedelta | None:
    """Duration of a number of seconds, also with its unit: ``30`` or ``30 sec``."""
    value = to_optional(text)
    if value is None:
        return None
    match = _SECONDS.fullmatch(value)
    if match is None:
        raise ValueError(f"{value[:40]!r} is not a number of seconds")
    return timedelta(seconds=int(match["number"]))


def to_exit_code(text: str | None) -> tuple[int, int] | None:
    """Exit status and signal of ``0:15``; one of them is always 0."""
    value = to_optional(text)
    if value is None:
        return None
    match = _EXIT.fullmatch(value)
    if match is None:
        raise ValueError(f"{value[:40]!r} is not an exit code")
    return int(match["code"]), int(match["signal"] or 0)


def _blocks(text: str, first_key: str) -> list[str]:
    starts = [match.start() for match in re.finditer(rf"^{first_key}", text, re.M)]
    return [
        text[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=False)
    ]


def _several_lines(block: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    lines = block.split("\n")
    following = next((line for line in lines[1:] if not line.startswith(_BETWEEN)), "")
    if not following.startswith("   UserId=") or len(_USER_LINE.findall(block)) != 1:
        raise ValueError("the job's name holds a line break, so its record can't be told apart")
    for line in lines:
        free = _FREE_REST_OF_LINE.search(line)
        _add(fields, _pairs(line if free is None else line[: free.start()]))
        if free is not None:
            _add(fields, {free["key"]: free["value"].strip()})
    return fields


def _one_line(block: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    if len(re.findall(r"\sUserId=", block)) != 1:
        raise ValueError("the job's name holds UserId=, so its record can't be told apart")
    cut = _AFTER_NAME.search(block)
    head, rest = (block, "") if cut is None else (block[: cut.start()], block[cut.end() :])
    name = _FREE_REST_OF_LINE.search(head)
    _add(fields, _pairs(head if name is None else head[: name.start()]))
    if name is not None:
        _add(fields, {name["key"]: name["value"].strip()})
    tail = _TAIL.search(rest)
    _add(fields, _pairs(rest if tail is None else rest[: tail.start()]))
    if tail is not None:
        _add(fields, _pairs(rest[tail.end() :], _TAIL_KEY))
    return fields


def _pairs(text: str, key: re.Pattern[str] = _PAIR) -> dict[str, str]:
    fields: dict[str, str] = {}
    matches = list(key.finditer(text))
    for index, match in enumerate(matches):
        end = matches[index + 1].start() if index + 1 < len(matches) else len(text)
        _add(fields, {match["key"]: text[match.end() : end].strip()})
    return fields


def _add(fields: dict[str, str], more: Mapping[str, str]) -> None:
    for key, value in more.items():
        fields.setdefault(key, value)
