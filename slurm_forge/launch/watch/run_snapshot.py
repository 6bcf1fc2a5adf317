"""What a watcher reads of a run's files: thin, and only what has changed since it last looked."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from slurm_forge.journal import Record, RunState, RunStatus, fold
from slurm_forge.journal import events as ev
from slurm_forge.journal.archive import JournalFolder, read_folder
from slurm_forge.journal.fold import in_order, without_fenced
from slurm_forge.journal.line_reader import read_end
from slurm_forge.journal.state import AttemptState
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.recovery.run_watch import RunSnapshot
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.snapshot_file import signature

#: The verb that a watcher's own restarts are noted with: their budget is counted by it.
RESTARTED = "watch --restart"

_CLAIM = re.compile(r"([1-9][0-9]{0,8})\.json")
#: Progress is written every five seconds: some twenty minutes of it.
_TAIL = 1 << 15
_TIME = re.compile(rb'"time":([0-9]{1,11}(?:\.[0-9]+)?)')
_LAUNCH = re.compile(rb'"launch":([0-9]{1,10}),"seq"')
_MOVES = (b'"kind":"progress"', b'"kind":"logged"')
_LAST_SAVES = 6

_Listed = tuple[tuple[str, float], ...]


class SnapshotCache:
    """Runs that are looked at again and again; what has not changed is not read a second time."""

    def __init__(self) -> None:
        self._snapshots: dict[str, tuple[str, RunSnapshot]] = {}

    def read(self, run: RunDirectory, name: str) -> RunSnapshot:
        """The run as its files are now; ``name`` is what a person types to mean it.

        A run with DONE is not read at all.  Errors: those of ``read_trusted``.
        """
        if run.is_done():
            return RunSnapshot(name=name, status=RunStatus.FINISHED)
        key, signed = str(run.path), signature(run)
        known_signature, snapshot = self._snapshots.get(key, ("", None))
        if snapshot is None or known_signature != signed:
            snapshot = _read(run)
            self._snapshots[key] = (signed, snapshot)
        return replace(snapshot, name=name, stop_asked=run.stop_asked())

    def forget(self, run: RunDirectory) -> None:
        """Read it anew the next time."""
        self._snapshots.pop(str(run.path), None)


def _listed(folder: str, name: re.Pattern[str]) -> _Listed:
    """Names and times of the files of that kind, sorted."""
    try:
        with os.scandir(folder) as entries:
            files = [
                (entry.name, entry.stat(follow_symlinks=False).st_mtime)
                for entry in entries
                if name.fullmatch(entry.name)
            ]
    except FileNotFoundError:
        return ()
    return tuple(sorted(files))


def _read(run: RunDirectory) -> RunSnapshot:
    listed, claims = JournalFolder.list(run.journal), _listed(str(run.attempts), _CLAIM)
    records, _ = read_folder(listed, skip_superseded=True, use_state=True)
    tails: dict[bytes, tuple[float, bytes]] = {}
    ahead: dict[str, float] = {}
    changed = [time for _, time in claims]
    newest = max((file.attempt for file in listed.files), default=0)
    for file in listed.files:
        end, written = read_end(file.path, _TAIL)
        changed.append(written)
        ahead[file.writer] = _clock_ahead(end, written)
        if file.attempt == newest and file.writer.startswith("rank0"):
            # What a rank has left of an earlier file tells nothing of how often it writes.
            launch = _LAUNCH.findall(end)[-1:]
            key = launch[0] if launch else b""
            tails[key] = max((written, end), tails.get(key, (0.0, b"")))
    state = fold(records)
    # Every node has a clock of its own, and the files have one for all.
    ordered = [
        replace(record, time=record.time - ahead.get(record.writer, 0.0))
        for record in in_order(without_fenced(records))
    ]
    attempt = state.attempts[-1] if state.attempts else None
    current = 0 if attempt is None else attempt.number
    in_attempt = [record for record in ordered if record.attempt == current]
    return RunSnapshot(
        name=run.name,
        status=state.status,
        job=state.job,
        attempt=current,
        claimed=max((_number(file, _CLAIM) for file, _ in claims), default=0),
        ended=attempt is not None and attempt.ended is not None,
        changed=max(changed, default=0.0),
        usual_silence_s=_usual_silence(end for _, end in tails.values()),
        last_save=_last_save(in_attempt, attempt),
        saves_every_s=_saves_every(ordered),
        intent=_intended(ordered, state),
        requeued=_last_time(ordered, ev.RequeueDone),
        waits_until=_waits_until(in_attempt),
        reason=state.reason,
        restarts=_restarts(ordered),
        noticed=_saw_notice(in_attempt),
        chain=attempt is not None and attempt.via == VIA_ARRAY,
        program=attempt is not None
        and bool(attempt.launches)
        and not attempt.launches[-1].world_size,
    )


def _clock_ahead(content: bytes, written: float) -> float:
    """By how much the writer's clock is ahead of that of its file, which was ``written`` then."""
    end = max(0, content.rfind(b"\n"))
    match = _TIME.search(content, content.rfind(b"\n", 0, end) + 1, end)
    return 0.0 if match is None else float(match[1]) - written


def _saw_notice(in_attempt: Sequence[Record]) -> bool:
    decided = max(_times(in_attempt, ev.DecisionTaken), default=0.0)
    # Times of files are not that fine: what may have come after the decision is taken to have.
    return any(time >= decided for time in _times(in_attempt, ev.NoticeSeen))


def _times(records: Iterable[Record], kind: type) -> list[float]:
    return [record.time for record in records if isinstance(record.event, kind)]


def _number(file: str, pattern: re.Pattern[str]) -> int:
    match = pattern.fullmatch(file)
    return 0 if match is None else int(match[1])


def _usual_silence(tails: Iterable[bytes]) -> float | None:
    """The longest time between two lines while it trained, lately; None before there are two."""
    longest: float | None = None
    for tail in tails:
        lines = tail.split(b"\n")[1:] if len(tail) == _TAIL else tail.split(b"\n")
        last: float | None = None
        for line in lines:
            match = _TIME.search(line)
            if match is None:
                continue
            time = float(match[1])
            moves = any(kind in line for kind in _MOVES)
            if last is not None:
                longest = max(longest or 0.0, time - last)
            last = time if moves or last is not None else None
    return longest


def _last_save(in_attempt: Iterable[Record], attempt: AttemptState | None) -> float | None:
    if attempt is None or not attempt.launches:
        return None
    newest = [each for each in in_attempt if each.launch == attempt.launches[-1].number]
    saves = _times(newest, ev.CheckpointCommitted) or _times(newest, ev.Resumed)
    return max(saves, default=None)


def _saves_every(ordered: Iterable[Record]) -> float | None:
    """The longest of the last intervals between checkpoints, of the newest attempt that has two."""
    by_attempt: dict[int, list[float]] = {}
    for record in ordered:
        if isinstance(record.event, ev.CheckpointCommitted):
            by_attempt.setdefault(record.attempt, []).append(record.time)
    for attempt in sorted(by_attempt, reverse=True):
        times = sorted(by_attempt[attempt])[-_LAST_SAVES:]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        if gaps:
            return max(gaps)
    return None


def _intended(ordered: Sequence[Record], state: RunState) -> float | None:
    if state.open_intent is None:
        return None
    return _last_time(ordered, ev.RequeueIntended)


def _last_time(ordered: Sequence[Record], kind: type) -> float | None:
    return next(reversed(_times(ordered, kind)), None)


def _waits_until(in_attempt: Sequence[Record]) -> float | None:
    for record in reversed(in_attempt):
        if isinstance(record.event, ev.DecisionTaken):
            return record.time + record.event.decision.wait_s
    return None


def _restarts(ordered: Sequence[Record]) -> int:
    """How often a watcher has brought it back since the last checkpoint."""
    count = 0
    for record in ordered:
        if isinstance(record.event, ev.CheckpointCommitted):
            count = 0
        elif isinstance(record.event, ev.UserAsked) and record.event.verb == RESTARTED:
            count += 1
    return count
