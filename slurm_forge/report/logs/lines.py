"""Facts in a line of output: when it was printed, by which rank, in which launch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo

from slurm_forge.run_directory.last_words import LAUNCH_BEGINS

#: Clocks of nodes differ.
_TOLERANCE_S = 3600.0
_DAY_S = 86400.0
# A time counts where a logger writes it: at the beginning, behind no more than a rank, a level or
# a name.  Slurm writes its own at the end.
_OF_RANK = r"(?:\[rank[0-9]{1,7}\]:|[0-9]{1,7}: )?\s{0,4}"
_FRONT = _OF_RANK + r"(?:[\[(<|]?[A-Za-z_.]{1,40}[\])>|:]?[ :|]{1,3}){0,2}"
_DATE = re.compile(
    rf"(?:{_FRONT}[\[(<]?|slurmstepd[^:\s]{{0,80}}: error: [^\n]{{1,200}} CANCELLED AT )"
    r"(?P<date>[0-9]{4}[-/][0-9]{2}[-/][0-9]{2})[T ]{1,2}(?P<clock>[0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:[.,](?P<fraction>[0-9]{1,9}))?(?P<zone>Z|[+-][0-9]{2}:?[0-9]{2})?"
)
#: glog, as torch, NCCL and vLLM write it: month, day, time.
_GLOG = re.compile(
    rf"{_OF_RANK}\[?(?:[A-Z]{{4,8}} )?[EWIFD]?(?P<month>[0-9]{{2}})-?(?P<day>[0-9]{{2}})"
    r" (?P<clock>[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.(?P<fraction>[0-9]{1,9}))?"
)
_CLOCK = re.compile(
    rf"{_FRONT}[\[(<]?(?P<clock>[0-9]{{2}}:[0-9]{{2}}:[0-9]{{2}})(?:[.,](?P<fraction>[0-9]{{1,9}}))?"
    r"(?=[\])> |,:-])"
)
_RANK = re.compile(r"\[rank(?P<torch>[0-9]{1,7})\]:|\s{0,6}(?P<srun>[0-9]{1,7}): ")
_MARK = re.compile(
    rf"(?:\s{{0,6}}[0-9]{{1,7}}: )?{re.escape(LAUNCH_BEGINS)}([0-9]{{1,9}})\.([0-9]{{1,9}})\s*$"
)


@dataclass(frozen=True, slots=True)
class LaunchSpan:
    """A launch of an attempt, and when it began by the journal."""

    number: int
    started: float
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """An attempt of a run, as far as its output is concerned."""

    number: int
    job: str
    started: float
    launches: tuple[LaunchSpan, ...] = ()

    def launch(self, number: int) -> LaunchSpan | None:
        """The launch of that number."""
        return next((each for each in self.launches if each.number == number), None)


@dataclass(frozen=True, slots=True)
class Source:
    """A file with output: its ``path`` as a person would name it, and whose it is.

    ``attempts`` are those that wrote to it; ``written`` is when anybody last did.
    """

    path: str
    attempts: tuple[AttemptSpan, ...]
    rank: int | None = None
    written: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of output.

    ``time`` is that of the last line up to it that contains one, else when the launch began.
    ``launch`` and ``rank`` are None if unknown.
    """

    text: str
    source: Source
    attempt: int
    launch: int | None
    rank: int | None
    time: float
    dated: bool = False


class Place:
    """Where in a file the reading is: in which launch of which attempt, and at what time."""

    def __init__(
        self, source: Source, attempt: AttemptSpan, *, now: float, zone: tzinfo | None
    ) -> None:
        self._source = source
        self._attempt = attempt
        self._launch = attempt.launches[0] if len(attempt.launches) == 1 else None
        self._now = now
        self._zone = zone
        self._time = attempt.started if self._launch is None else self._launch.started

    @classmethod
    def at_beginning(cls, source: Source, *, now: float, zone: tzinfo | None = None) -> Place:
        """Where the first line of the file is read."""
        return cls(source, source.attempts[0], now=now, zone=zone)

    @classmethod
    def within(
        cls, source: Source, texts: Sequence[str], *, now: float, zone: tzinfo | None = None
    ) -> Place:
        """Where the first of ``texts`` is read, which are the end of the file.

        Lines before the first one that contains a time get that time; if none does, all get that
        of the last write.
        """
        attempt = _attempt_of(source, texts, zone)
        place = cls(source, attempt, now=now, zone=zone)
        time = _first_time(source, texts, attempt, zone)
        place._time = source.written if time is None else min(time, source.written)
        return place

    def know(self, source: Source, now: float) -> None:
        """The same file at a later time, to which more attempts may write."""
        self._source, self._now = source, now

    def read(self, text: str) -> Line | None:
        """The next line; None for the mark that a launch begins with."""
        mark = mark_of(text)
        if mark is not None:
            self._begin(*mark)
            return None
        time = time_of(text, near=self._time, zone=self._zone)
        dated = time is not None and time <= self._now + _TOLERANCE_S
        if dated and time is not None:
            self._time = max(self._time, time)
            self._pass_on(time)
        rank = self._source.rank
        if rank is None:
            rank = rank_in(text, self._launch.world_size if self._launch is not None else 0)
        return Line(
            text=text,
            source=self._source,
            attempt=self._attempt.number,
            launch=None if self._launch is None else self._launch.number,
            rank=rank,
            time=self._time,
            dated=dated,
        )

    def _begin(self, attempt: int, launch: int) -> None:
        spans = self._source.attempts
        self._attempt = next((each for each in spans if each.number == attempt), self._attempt)
        if self._attempt.number == attempt:
            self._launch = self._attempt.launch(launch) or LaunchSpan(launch, self._time)
            self._time = max(self._time, self._launch.started)

    def _pass_on(self, time: float) -> None:
        """Where no launch is marked, the time of a line shows its attempt."""
        for each in self._source.attempts:
            if each.number > self._attempt.number and each.started <= time:
                self._attempt = each
                self._launch = each.launches[0] if len(each.launches) == 1 else None


def _attempt_of(source: Source, texts: Sequence[str], zone: tzinfo | None) -> AttemptSpan:
    spans = source.attempts
    for text in texts:
        mark = mark_of(text)
        index = None if mark is None else _index(spans, mark[0])
        if mark is not None and index is not None:
            # Lines before the first launch of an attempt belong to the previous one.
            return spans[index if mark[1] > 1 else max(0, index - 1)]
    time = _first_time(source, texts, spans[0], zone)
    begun = [each for each in spans if time is not None and each.started <= time]
    return begun[-1] if begun else spans[-1]


def _index(spans: Sequence[AttemptSpan], number: int) -> int | None:
    return next((i for i, each in enumerate(spans) if each.number == number), None)


def _first_time(
    source: Source, texts: Sequence[str], after: AttemptSpan, zone: tzinfo | None
) -> float | None:
    times = (time_of(text, near=source.written, zone=zone) for text in texts)
    earliest = after.started - _TOLERANCE_S
    return next((time for time in times if time is not None and time >= earliest), None)


def mark_of(text: str) -> tuple[int, int] | None:
    """Attempt and launch, where the line is the mark that a rank of ours begins a launch with."""
    match = _MARK.match(text)
    return None if match is None else (int(match[1]), int(match[2]))


def rank_in(text: str, world_size: int) -> int | None:
    """The rank that torch (``[rank3]:``) or ``srun --label`` (``3: ``) puts in front of a line."""
    match = _RANK.match(text)
    if match is None:
        return None
    rank = int(match["torch"] or match["srun"])
    return rank if match["torch"] or rank < world_size else None


def time_of(text: str, *, near: float, zone: tzinfo | None = None) -> float | None:
    """When a logger says that it wrote the line, in seconds since the epoch; else None.

    Args:
        text: The line.
        near: A time not far from it: for the year, or the day, where the line has none.
        zone: That of times without one (None: this machine's).
    """
    text = text[:300]
    match = _DATE.match(text)
    try:
        if match is not None:
            day = match["date"].replace("/", "-")
            date = datetime.fromisoformat(f"{day}T{match['clock']}")
            return _stamp(date, match["zone"], zone) + _fraction(match)
        around = datetime.fromtimestamp(near, zone)
        match = _GLOG.match(text)
        if match is not None:
            day = f"{around.year}-{match['month']}-{match['day']}"
            time = _stamp(datetime.fromisoformat(f"{day}T{match['clock']}"), None, zone)
            if time - near > 180 * _DAY_S:  # December's line, and January's time
                day = f"{around.year - 1}{day[4:]}"
                time = _stamp(datetime.fromisoformat(f"{day}T{match['clock']}"), None, zone)
            return time + _fraction(match)
        match = _CLOCK.match(text)
        if match is not None:
            bare = datetime.fromisoformat(f"{around:%Y-%m-%d}T{match['clock']}")
            days = (bare + timedelta(days=n) for n in (-1, 0, 1))
            times = [_stamp(each, None, zone) for each in days]
            return min(times, key=lambda time: abs(time - near)) + _fraction(match)
    except (ValueError, OverflowError, OSError):
        return None
    return None


def _stamp(date: datetime, offset: str | None, zone: tzinfo | None) -> float:
    if offset is not None:
        if offset == "Z":
            return date.replace(tzinfo=timezone.utc).timestamp()
        minutes = int(offset[1:3]) * 60 + int(offset[-2:])
        ahead = timedelta(minutes=minutes if offset[0] == "+" else -minutes)
        return date.replace(tzinfo=timezone(ahead)).timestamp()
    return (date if zone is None else date.replace(tzinfo=zone)).timestamp()


def _fraction(match: re.Match[str]) -> float:
    return float(f"0.{match['fraction']}") if match["fraction"] else 0.0
