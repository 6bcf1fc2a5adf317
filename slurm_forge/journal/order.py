"""The order of records, and which of them count: by claims and by what was read, not by clocks.

Two attempts are ordered by their numbers, two launches as well.  Within a launch the supervisor's
last lines come behind everything that its ranks wrote, and the rest goes by logical time (Lamport):
a record comes after all that its writer had read.  What an attempt writes that the next one had not
read when it began is fenced: no reader counts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slurm_forge.journal import events as ev
from slurm_forge.journal.file import NO_LAUNCH, Record
from slurm_forge.journal.positions import ReadPosition, WriterPosition
from slurm_forge.journal.state import EarlierState, FencedRecords

_BEGIN, _DURING, _END = range(3)
_STARTS = (ev.AttemptStarted, ev.LaunchStarted)
_ENDS = (
    ev.LaunchEnded,
    ev.AttemptEnded,
    ev.Finished,
    ev.RequeueIntended,
    ev.RequeueDone,
    ev.RequeueFailed,
    ev.Held,
    ev.Submitted,
    ev.UserAsked,
)
#: Last lines that may be on their way while Slurm starts the next attempt.  They only complete
#: the story of the attempt that wrote them.
_LAST_LINES = (ev.AttemptEnded, ev.RequeueDone)
#: Not counted where they are fenced: readers may leave most of them out anyway.
_FREQUENT = (ev.Progress, ev.Logged)


def by_person(record: Record) -> bool:
    """Whether a person's command wrote it, which belongs to no attempt and is never fenced."""
    return record.writer.startswith("cli")


def causal_order(records: Iterable[Record]) -> list[Record]:
    """The order that the state is computed in.  No clock has a part in it.

    Records of older versions have no logical time: within a launch they go by their clocks.
    """
    return _sorted(records, by_time=False)


def in_order(records: Iterable[Record]) -> list[Record]:
    """The order to tell them in: as ``causal_order``, but while a launch goes on by time."""
    return _sorted(records, by_time=True)


_Key = tuple[int, int, int, float, float, str, int]


def _sorted(unsorted: Iterable[Record], *, by_time: bool) -> list[Record]:
    records = list(unsorted)
    by_writer: dict[tuple[int, int, str], list[Record]] = {}
    first = [record for record in records if isinstance(record.event, EarlierState)]
    # Whose copy is kept must not depend on the order that the files were listed in.
    for record in _once(sorted(records, key=lambda r: (r.attempt, r.writer, r.sequence))):
        if isinstance(record.event, EarlierState):
            continue
        by_writer.setdefault((record.attempt, record.launch, record.writer), []).append(record)
    keyed: list[tuple[_Key, Record]] = []
    for (attempt, launch, writer), own in by_writer.items():
        latest, logical = float("-inf"), 0
        for part, record in _parts(own):
            # Never against a writer's own sequence.
            latest, logical = max(latest, record.time), max(logical, record.logical_time)
            timed = by_time and launch != NO_LAUNCH and part == _DURING
            place = (0.0, latest) if timed or not logical else (float(logical), 0.0)
            keyed.append(((attempt, launch, part, *place, writer, record.sequence), record))
    return [*first, *(record for _, record in sorted(keyed, key=lambda pair: pair[0]))]


def _once(records: Iterable[Record]) -> Iterator[Record]:
    """What a writer wrote twice, because the first file could not be synced, is there once."""
    identities: set[tuple[int, int, int, float, str]] = set()
    for record in records:
        key = (record.attempt, record.launch, record.sequence, record.time, _role(record))
        if key not in identities:
            identities.add(key)
            yield record


def _role(record: Record) -> str:
    return record.writer.rpartition("-")[0] or record.writer


def _parts(own: Sequence[Record]) -> Iterator[tuple[int, Record]]:
    """Of what one writer wrote in a launch: what begins it, what goes on in it, what ends it."""
    if own[0].launch == NO_LAUNCH:
        yield from ((_DURING, record) for record in own)
        return
    starts = [at for at, record in enumerate(own) if isinstance(record.event, _STARTS)]
    begun, part = max(starts, default=-1), _DURING
    for at, record in enumerate(own):
        if at > begun and _role(record) != "rank0" and _is_end(record.event):
            part = _END
        yield _BEGIN if at <= begun else part, record


def _is_end(event: object) -> bool:
    """Whether it is only written once the ranks of the launch are gone (rank 0's own aside)."""
    match event:
        case ev.IncidentSeen():
            return ".warning" not in event.incident.id
        case ev.DecisionTaken():
            return ".warning" not in event.decision.incident_id
        case _:
            return isinstance(event, _ENDS)


def earlier_state(records: Iterable[Record]) -> EarlierState | None:
    """What stands in the place of the records of older attempts, if anything does."""
    return next((r.event for r in records if isinstance(r.event, EarlierState)), None)


def newest_attempt_in(records: Iterable[Record]) -> int:
    """The newest attempt that has written anything; 0 before the first one."""
    return max((record.attempt for record in records), default=0)


def read_position(records: Iterable[Record]) -> ReadPosition:
    """How far ``records`` go: what an attempt that begins now tells later readers."""
    valid = without_fenced(records)
    earlier = earlier_state(valid)
    before = () if earlier is None else earlier.state.attempts[-1:]
    since = max(
        (
            *(each.number for each in before),
            *(r.attempt for r in valid if isinstance(r.event, ev.AttemptStarted)),
        ),
        default=0,
    )
    last: dict[str, int] = {}
    for record in valid:
        counts = record.attempt >= since and not isinstance(record.event, EarlierState)
        if counts and not by_person(record):
            last[record.writer] = max(record.sequence, last.get(record.writer, -1))
    writers = tuple(WriterPosition(writer, last[writer]) for writer in sorted(last))
    return ReadPosition(since=since, writers=writers)


def without_fenced(records: Iterable[Record]) -> list[Record]:
    """Leave out what an attempt wrote and the next one had not read when it began."""
    read = list(records)
    fences = _fences(read)
    return [record for record in read if not _is_fenced(record, fences)]


def fenced_records(records: Iterable[Record]) -> tuple[FencedRecords, ...]:
    """What ``without_fenced`` leaves out, counted, but for lines of progress."""
    read = list(records)
    fences = _fences(read)
    counted = Counter(
        (record.attempt, record.event.kind)
        for record in _once(record for record in read if _is_fenced(record, fences))
        if not isinstance(record.event, _FREQUENT)
    )
    return tuple(
        FencedRecords(attempt=attempt, kind=kind, count=count)
        for (attempt, kind), count in sorted(counted.items())
    )


def _fences(records: Sequence[Record]) -> dict[int, dict[str, int]]:
    """By attempt: the last record of each writer that counts; the others have no fence.

    From the newest attempt down each one settles what counts of those back to the one that it knew
    of.  An attempt between them, of which it did not know, settles nothing: it is fenced itself.
    """
    begun: dict[int, ReadPosition | None] = {}
    for record in records:
        if isinstance(record.event, ev.AttemptStarted):
            begun.setdefault(record.attempt, record.event.read)
    written = sorted({record.attempt for record in records}, reverse=True)
    fences: dict[int, dict[str, int]] = {}
    known_of = max(begun, default=0)
    for attempt in sorted(begun, reverse=True):
        read = begun[attempt]
        # An attempt of an older version does not say what it had read, and fences nobody.
        if attempt > known_of or read is None:
            continue
        known_of = read.since
        known = {each.writer: each.sequence for each in read.writers}
        while written and written[0] >= read.since:
            if written[0] < attempt:
                fences[written[0]] = known
            written.pop(0)
    return fences


def _is_fenced(record: Record, fences: Mapping[int, Mapping[str, int]]) -> bool:
    if by_person(record) or isinstance(record.event, (*_LAST_LINES, EarlierState)):
        return False
    known = fences.get(record.attempt)
    return known is not None and record.sequence > known.get(record.writer, -1)
