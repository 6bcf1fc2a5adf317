"""How numbers, times and foreign text are written for people."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, tzinfo

from slurm_forge.errors import ConfigError
from slurm_forge.recovery.policy.remedies import NEXT
from slurm_forge.slurm.text.nodelist import fold_nodes

_UNKNOWN = "?"
_CUT = " … "
#: Jobs of a chain that are named at either end of a long one.
_SHOWN_JOBS = 3
#: A list of nodes that is longer than this is cut where people read it.
_NODES_WIDTH = 80
#: Less than a week, so that a weekday names one day only.
_WEEK_S = 6 * 86400.0
#: What colours a terminal and moves its cursor.
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)|[@-Z\\^_])"
)
#: What we write into the output ourselves where a launch begins.
_OUR_OWN = re.compile(r"slurm_forge: launch \d+\.\d+\s*")


def clean(text: object, limit: int = 0) -> str:
    """Text from a journal, safe for a terminal: one line, no control or invisible characters.

    Text longer than ``limit`` characters (0: any length) is cut and ends with an ellipsis.
    """
    one_line = " ".join(str(text).split())
    shown = "".join(c if c.isprintable() else "?" for c in one_line)
    return shown[: limit - 1] + "…" if 0 < limit < len(shown) else shown


def shortened(text: object, limit: int = 0) -> str:
    """As ``clean``, but what is longer loses its middle: exceptions end with where they come from.

    Args:
        text: Foreign text.
        limit: The most characters; 0 is any number.

    Returns:
        The text, or its beginning and its last third or so, each cut between words.
    """
    whole = clean(text)
    if not 0 < limit < len(whole):
        return whole
    end = whole[-(limit // 3) :]
    end = end[end.find(" ") + 1 :]
    begin = whole[: limit - len(end) - len(_CUT)]
    return f"{begin.rpartition(' ')[0] or begin}{_CUT}{end}"


def first_line(reason: str) -> str:
    """Why, without the advice that the error ended with."""
    return reason.partition("\n")[0]


def observed(source: str, text: str, limit: int = 0) -> str:
    """Evidence with where it was seen, said once, and without what we have printed ourselves.

    ``limit`` applies to what precedes the next step of an error.
    """
    shown = _OUR_OWN.sub("", text).strip().removeprefix(f"{source}: ")
    shown, then, step = shown.partition(NEXT)
    text = f"{shortened(shown, limit)}{then}{clean(step)}"
    if source == "exit status":
        return f"exit code {text}"
    return f"{clean(source, 60)}: {text}"


def paragraph(text: str) -> str:
    """As ``clean``, but line breaks stay: for our own messages that quote foreign text."""
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in _lines(text))


def printed(line: str) -> str:
    """A line of a program's output as a terminal shows it in the end, safe to print.

    Escape sequences are removed, and all but the last state of a progress bar.
    """
    parts = [part for part in _ESCAPES.sub("", line).split("\r") if part.strip()]
    return paragraph(parts[-1].rstrip().replace("\n", " ")) if parts else ""


def _lines(text: str) -> list[str]:
    return text.replace("\t", "    ").split("\n")


def number(value: int) -> str:
    """``20000``: as it is typed, searched for and copied."""
    try:
        return str(value)
    except ValueError:  # more digits than Python is willing to write
        return _UNKNOWN


def steps(first: int, last: int) -> str:
    """``812`` or ``812-814``."""
    return number(first) if first == last else f"{number(first)}-{number(last)}"


def plural(count: int, word: str, words: str = "") -> str:
    """``1 attempt``, ``4 launches``."""
    return f"{number(count)} {word if count == 1 else words or word + 's'}"


def share(value: float | None) -> str:
    """``96.8 %``."""
    return _UNKNOWN if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def span(seconds: float | None) -> str:
    """A duration with about two digits that count: ``12 ms``, ``6.1 s``, ``5 h 42 min``."""
    if seconds is None or not math.isfinite(seconds) or abs(seconds) > 1e11:
        return _UNKNOWN
    seconds = max(0.0, seconds)
    if 0 < seconds < 0.0995:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def chain(jobs: Sequence[str]) -> str:
    """``jobs 12 → 15 → 18``; of many the first and the last ones."""
    shown = [clean(job, 40) for job in jobs]
    if len(shown) > 2 * _SHOWN_JOBS + 1:
        more = f"({number(len(shown) - 2 * _SHOWN_JOBS)} more)"
        shown = [*shown[:_SHOWN_JOBS], more, *shown[-_SHOWN_JOBS:]]
    return f"jobs {' → '.join(shown)}"


def rank_time(rank_seconds: float, gpus_per_rank: float | None = None) -> str:
    """``3.3 GPU-hours``; where it is not known that ranks have GPUs, ``42 rank-minutes``."""
    amount = rank_seconds * (gpus_per_rank or 1.0)
    if not math.isfinite(amount) or amount > 1e15:
        return _UNKNOWN
    what, size = "seconds", 1.0
    for name, longer in (("minutes", 60.0), ("hours", 3600.0)):
        if amount >= 99.5 * size:
            what, size = name, longer
    value = max(0.0, amount) / size
    shown = f"{value:.1f}" if value < 9.95 else number(round(value))
    return f"{shown} {'GPU' if gpus_per_rank else 'rank'}-{what}"


def ago(time: float | None, now: float) -> str:
    """``3 min ago``; ``just now`` also where another node's clock is ahead."""
    if time is None or not math.isfinite(time):
        return "at an unknown time"
    return "just now" if now - time < 1 else f"{span(now - time)} ago"


def clock(time: float | None, zone: tzinfo | None = None) -> str:
    """``11:02:10`` in ``zone`` (None: this machine's)."""
    date = _datetime(time, zone)
    return "??:??:??" if date is None else f"{date:%H:%M:%S}"


def moment(time: float | None, now: float, zone: tzinfo | None = None) -> str:
    """``Tue 11 Aug 09:14``, with the year where it is not this one."""
    date, today = _datetime(time, zone), _datetime(now, zone)
    if date is None:
        return _UNKNOWN
    year = "" if today is not None and today.year == date.year else f" {date:%Y}"
    return f"{date:%a} {date.day} {date:%b}{year} {date:%H:%M}"


def weekday(time: float | None, now: float, zone: tzinfo | None = None) -> str:
    """``Thu 14:00``, with the date unless it is within a week."""
    date = _datetime(time, zone)
    if date is None or time is None or not 0 <= time - now < _WEEK_S:
        return moment(time, now, zone)
    return f"{date:%a %H:%M}"


def period(start: float | None, end: float | None, now: float, zone: tzinfo | None = None) -> str:
    """``Tue 11 Aug 09:14 → 11:02``; the day of the end only where it is another one."""
    begun, over = _datetime(start, zone), _datetime(end, zone)
    left = moment(start, now, zone)
    if over is None:
        return left
    same_day = begun is not None and begun.date() == over.date()
    return f"{left} → {over:%H:%M}" if same_day else f"{left} → {moment(end, now, zone)}"


def nodes(names: Iterable[str]) -> str:
    """``n[01-04]``, or the plain names where they can't be folded; all of them."""
    hosts = tuple(names)
    try:
        return fold_nodes(hosts)
    except ConfigError:
        return ",".join(clean(name, 64) for name in hosts)


def some_nodes(names: Iterable[str]) -> str:
    """As ``nodes``; of what is longer than a line the first ones, and how many there are more."""
    hosts = tuple(names)
    text, count = nodes(hosts), len(hosts)
    while len(text) > _NODES_WIDTH and count > 1:
        count = max(1, count * _NODES_WIDTH // len(text))
        text = nodes(hosts[:count])
    more = len(hosts) - count
    return f"{text} and {plural(more, 'more node')}" if more else text


def _datetime(time: float | None, zone: tzinfo | None) -> datetime | None:
    if time is None or not math.isfinite(time):
        return None
    try:
        return datetime.fromtimestamp(time, tz=zone).astimezone(zone)
    except (OverflowError, OSError, ValueError):
        return None
