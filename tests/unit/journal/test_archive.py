from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_forge.errors import FencedError
from slurm_forge.journal import (
    Record,
    compact_journal,
    fold,
    read_journal,
    read_position,
    read_to_fold,
)
from slurm_forge.journal import events as ev
from slurm_forge.journal.archive import JournalFolder
from slurm_forge.journal.file import NO_LAUNCH, encode
from slurm_forge.journal.order import in_order, without_fenced
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust

BLOCK, KEPT = 4, 2


class Writer:
    """A run whose attempts each write what one may, as chance has it."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.run = RunDirectory.at(folder / "long")
        self.run.create(b"{}")
        self.chance = random.Random(seed)
        self.attempt = 0
        self.records: list[Record] = []
        self.logical = 0

    def tell(self, writer: str, *events: ev.Event, launch: int = 1) -> Path:
        """A file of one writer."""
        name = f"{writer}-{self.chance.getrandbits(32):08x}"
        lines = []
        for sequence, event in enumerate(events):
            self.logical += 1
            record = Record(
                attempt=self.attempt,
                launch=launch,
                sequence=sequence,
                time=1000.0 + self.logical,
                writer=name,
                event=event,
                logical_time=self.logical,
            )
            self.records.append(record)
            lines.append(encode(record))
        path = self.run.journal / f"{self.attempt}-{name}.jsonl"
        path.write_bytes(b"".join(lines))
        path.chmod(0o600)
        return path

    def attempts(self, count: int) -> None:
        for _ in range(count):
            read = read_position(read_journal(self.run)[0])
            if self.chance.random() < 0.2:  # fenced: the next attempt has not read it
                self.tell("rank0", ev.Progress(step=999), self.commit(999))
            self.attempt += 1
            self.tell("supervisor", *self.supervised(read))
            self.tell("rank0", *self.trained())
            if self.chance.random() < 0.3:
                asked = ev.UserAsked(verb="requeue", user="ada")
                self.tell("cli", asked, launch=NO_LAUNCH)

    def supervised(self, read: ev.ReadPosition) -> list[ev.Event]:
        step = self.attempt * 10
        job = str(100 + self.attempt)
        cause = self.chance.choice([Cause.PREEMPTED, Cause.NON_FINITE, Cause.HANG])
        incident = Incident(
            id=f"{self.attempt}.1", cause=cause, confidence=Confidence.CERTAIN, step=step - 2
        )
        action = self.chance.choice([Action.REQUEUE, Action.ROLLBACK, Action.HOLD])
        decision = Decision(
            incident_id=incident.id,
            cause=cause,
            action=action,
            reason="",
            plan=RecoveryPlan(exclude_nodes=(f"n{self.attempt}",)),
            rung=0,
            target=None if action is not Action.ROLLBACK else self.name(step - 10),
        )
        return [
            ev.AttemptStarted(
                job=job, restart_count=0, nodes=("n1",), host="n1", via="sbatch", read=read
            ),
            ev.LaunchStarted(world_size=2),
            ev.LaunchEnded(outcome=cause.value, step=step),
            ev.IncidentSeen(incident=incident),
            ev.DecisionTaken(decision=decision),
            ev.RequeueDone(job=job, method="scontrol requeue"),
            ev.AttemptEnded(outcome="requeued"),
        ]

    def trained(self) -> list[ev.Event]:
        step = self.attempt * 10
        events: list[ev.Event] = [ev.Resumed(step=step - 10, checkpoint=None, world_size=2)]
        for each in range(step - 10, step):
            events += [ev.Progress(step=each), ev.Logged(step=each, values={"loss": 1.0})]
        events.append(self.commit(step))
        if self.attempt > 3:
            events.append(
                ev.CheckpointJudged(name=self.name(step - 10), trust=Trust.GOOD, reason="")
            )
            events.append(ev.CheckpointsPruned(names=(self.name(step - 30),), reason=""))
        return events

    def name(self, step: int) -> str:
        return f"step-{max(step, 0):08d}.a{max(step // 10, 1)}.l1-0000abcd"

    def commit(self, step: int) -> ev.CheckpointCommitted:
        return ev.CheckpointCommitted(
            name=self.name(step), step=step, reason="", seconds=1.0, size=1
        )

    def compact(self, fence: Callable[[], None] = lambda: None) -> None:
        compact_journal(self.run, self.attempt, fence, block=BLOCK, kept=KEPT)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.run.journal.iterdir())


@pytest.fixture
def long(tmp_path: Path) -> Writer:
    writer = Writer(tmp_path)
    writer.attempts(12)
    return writer


def telling(run: RunDirectory) -> list[Record]:
    """The records that reports tell of, in their order."""
    records, damage = read_journal(run, skip_superseded=True)
    assert damage == []
    return in_order(without_fenced(records))


@pytest.mark.parametrize("seed", range(8))
def test_an_archive_and_its_state_say_what_the_files_said(tmp_path: Path, seed: int) -> None:
    writer = Writer(tmp_path, seed)
    for _ in range(5):
        writer.attempts(3)
        state, told = fold(read_journal(writer.run)[0]), telling(writer.run)
        writer.compact()
        assert fold(read_to_fold(writer.run)) == state
        assert telling(writer.run) == told
        assert fold(read_journal(writer.run)[0]) == state
        assert read_position(read_to_fold(writer.run)) == read_position(told)
    assert fold(writer.records) == state
    assert [name for name in writer.names() if name.startswith(("archive", "state"))] == [
        "archive-12.jsonl", "archive-4.jsonl", "archive-8.jsonl", "state-12.json",
    ]  # fmt: skip
    assert max(int(name.partition("-")[0]) for name in writer.names() if name[0].isdigit()) == 15
    assert len(writer.names()) < 20


def test_the_state_alone_is_read_to_fold(long: Writer) -> None:
    long.compact()
    for path in long.run.journal.glob("archive-*"):
        path.write_bytes(b"not read")
    assert fold(read_to_fold(long.run)) == fold(long.records)


@pytest.mark.parametrize("spoil", [b"", b"{}\n{}", b"\xff" * 99, None], ids=repr)
def test_any_reader_does_without_the_state(long: Writer, spoil: bytes | None) -> None:
    state = fold(long.records)
    long.compact()
    (path,) = long.run.journal.glob("state-*.json")
    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil)
    assert fold(read_to_fold(long.run)) == state


def test_a_state_of_another_version_is_not_used(
    long: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    long.compact()
    records = read_to_fold(long.run)
    assert not isinstance(records[0].event, ev.AttemptStarted | ev.UserAsked)
    monkeypatch.setattr("slurm_forge.journal.archived_state.PACKAGE_VERSION", "9.9.9")
    older = read_to_fold(long.run)
    assert len(older) > len(records)
    assert fold(older) == fold(long.records)


def test_files_that_were_not_removed_count_once(long: Writer) -> None:
    kept = {path: path.read_bytes() for path in long.run.journal.iterdir()}
    told = telling(long.run)
    long.compact()
    gone = {path: body for path, body in kept.items() if not path.exists()}
    assert len(gone) > 10
    for path, body in gone.items():
        path.write_bytes(body)
        path.chmod(0o600)
    assert fold(read_to_fold(long.run)) == fold(long.records)
    assert telling(long.run) == told
    long.attempts(4)
    long.compact()
    assert not any(path.exists() for path in gone)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99])
def test_an_archive_that_is_half_written_stands_for_nothing(long: Writer, share: float) -> None:
    kept = {path: path.read_bytes() for path in long.run.journal.iterdir()}
    long.compact()
    for path in long.run.journal.glob("state-*"):
        path.unlink()
    for path in long.run.journal.glob("archive-*"):
        body = path.read_bytes()
        path.write_bytes(body[: int(len(body) * share)])
    for path, body in kept.items():
        path.write_bytes(body)
        path.chmod(0o600)
    assert fold(read_to_fold(long.run)) == fold(long.records)
    long.attempts(BLOCK)
    long.compact()
    assert fold(read_to_fold(long.run)) == fold(long.records)
    assert fold(read_journal(long.run)[0]) == fold(long.records)


def test_a_file_that_turns_up_late_counts_as_it_would_have(long: Writer) -> None:
    long.compact()
    long.attempt, now = 2, long.attempt
    late = long.tell("cli", ev.JobChanged(verb="change", user="ada", revision=7), launch=NO_LAUNCH)
    state = fold(long.records)
    assert state.revision == 7
    assert fold(read_to_fold(long.run)) == state
    long.attempt = now
    long.attempts(4)
    long.compact()
    assert not late.exists()
    assert fold(read_to_fold(long.run)) == fold(long.records)
    assert fold(read_journal(long.run)[0]) == fold(long.records)


def test_archives_are_not_read_whole_for_a_late_file(
    long: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays for up to a whole block of attempts, and every listing passes it by."""
    long.compact()
    long.attempt = 2
    long.tell("cli", ev.JobChanged(verb="change", user="ada", revision=7), launch=NO_LAUNCH)
    monkeypatch.setattr("slurm_forge.journal.archive._is_whole", lambda *_: pytest.fail("read"))
    assert [file.attempt for file in JournalFolder.list(long.run.journal).files if file.attempt < 4]


def test_what_a_killed_archiving_left_is_removed_by_the_next_attempt(long: Writer) -> None:
    kept = {path: path.read_bytes() for path in long.run.journal.iterdir()}
    long.compact()
    gone = {path: body for path, body in kept.items() if not path.exists()}
    for path, body in gone.items():
        path.write_bytes(body)
        path.chmod(0o600)
    long.attempts(1)
    assert JournalFolder.list(long.run.journal).through + BLOCK + KEPT > long.attempt
    long.compact()
    assert not any(path.exists() for path in gone)


def test_a_late_file_that_is_archived_behind_a_state_counts_as_well(
    long: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archiving died before it could replace the state that does not know of that file."""
    long.compact()
    assert [name for name in long.names() if name.startswith("state-")]
    long.attempt, now = 2, long.attempt
    # Fenced: attempt 3 did not read it.
    long.tell("rank0", ev.CheckpointsPruned(names=(long.name(now * 10),), reason=""))
    long.attempt = now
    long.attempts(4)
    monkeypatch.setattr("slurm_forge.journal.archive.keep_state", lambda *_: False)
    long.compact()
    assert len([name for name in long.names() if name.startswith("archive-")]) > 1
    assert fold(read_to_fold(long.run)) == fold(read_journal(long.run)[0]) == fold(long.records)


def test_whoever_is_fenced_removes_nothing(long: Writer) -> None:
    def fenced() -> None:
        raise FencedError("a newer attempt has taken over", next_step="")

    before = set(long.names())
    long.compact(fenced)
    assert before < set(long.names())
    assert fold(read_to_fold(long.run)) == fold(long.records)


def test_an_archive_that_is_there_is_not_made_anew(long: Writer) -> None:
    """Two attempts that believe to be the newest: what the first one made stays."""
    (long.run.journal / "archive-4.jsonl").write_bytes(b"of another attempt\n")
    before = long.names()
    listed = JournalFolder.list(long.run.journal)
    assert listed.through == 4
    (long.run.journal / "archive-8.jsonl").write_bytes(b"of another attempt\n")
    long.compact()
    assert long.names() == sorted([*before, "archive-8.jsonl"])


def test_a_damaged_archive_costs_the_line_that_is_damaged_and_is_reported(long: Writer) -> None:
    long.compact()
    path = long.run.journal / "archive-4.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if b'"launch_started"' in line)
    lines[at] = lines[at][:20] + b"\x00" + lines[at][21:]
    path.write_bytes(b"".join(lines))
    records, damage = read_journal(long.run, skip_superseded=True)
    assert [(each.file, each.line) for each in damage] == [(path.name, at + 1), (path.name, 1)]
    kept = [each for each in records if isinstance(each.event, ev.LaunchStarted)]
    assert len(kept) == 11
    names = long.names()
    long.attempts(4)
    long.compact()
    assert set(names) - {"state-8.json"} - set(long.names()) != set(), "it goes on all the same"


def test_what_is_archived_while_it_is_read_is_read_from_the_archive(
    long: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, looks = JournalFolder.list, itertools.count()

    def stale(folder: Path) -> JournalFolder:
        listed = real(folder)
        if next(looks) == 0:
            monkeypatch.setattr(JournalFolder, "list", real)
            long.compact()
            monkeypatch.setattr(JournalFolder, "list", stale)
        return listed

    monkeypatch.setattr(JournalFolder, "list", stale)
    assert fold(read_to_fold(long.run)) == fold(long.records)
    assert next(looks) > 1


def test_readers_beside_it_see_all_of_the_run_at_any_time(long: Writer) -> None:
    state = fold(long.records)
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if fold(read_to_fold(long.run)) != state or fold(read_journal(long.run)[0]) != state:
                wrong.append(long.names())

    thread = threading.Thread(target=read)
    thread.start()
    long.compact()
    stop.set()
    thread.join()
    assert wrong == []


@pytest.mark.parametrize("attempts", [0, 1, BLOCK + KEPT - 1])
def test_a_short_run_is_left_alone(tmp_path: Path, attempts: int) -> None:
    writer = Writer(tmp_path)
    writer.attempts(attempts)
    before = writer.names()
    writer.compact()
    assert writer.names() == before


def test_attempts_that_began_nothing_settle_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.attempts(BLOCK)
    writer.attempt += 10  # claimed, and killed before a line was written
    before = writer.names()
    writer.compact()
    assert writer.names() == before


def test_a_folder_that_can_not_be_written_keeps_no_attempt_from_starting(long: Writer) -> None:
    if os.geteuid() == 0:
        long.run.journal.rename(long.run.path / "elsewhere")
    else:
        long.run.journal.chmod(0o500)
    long.compact()


def calls_of(act: Callable[[], object]) -> int:
    """How many functions are called, and generators resumed: work, whatever the machine does."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def kept_checkpoints(count: int) -> list[Record]:
    story = [
        ev.AttemptStarted(job="1", restart_count=0, nodes=(), host="n1", via="sbatch"),
        *(
            event
            for step in range(1, count)
            for name in (f"step-{step:08d}.a1.l1-0000abcd",)
            for event in (
                ev.Progress(step=step),
                ev.CheckpointCommitted(name=name, step=step, reason="", seconds=1.0, size=1),
                ev.CheckpointJudged(name=name, trust=Trust.GOOD, reason=""),
                ev.CheckpointWitnessed(name=name, loss=1.0),
                ev.IncidentSeen(
                    incident=Incident(
                        id=f"1.{step}", cause=Cause.HANG, confidence=Confidence.CERTAIN
                    )
                ),
            )
        ),
    ]
    return [
        Record(attempt=1, launch=1, sequence=at, time=1.0, writer="rank0-00000000", event=event)
        for at, event in enumerate(story)
    ]


def test_the_work_of_a_fold_grows_with_the_records_alone() -> None:
    few, many = kept_checkpoints(100), kept_checkpoints(400)
    fold(few)
    assert calls_of(lambda: fold(many)) < 4.5 * calls_of(lambda: fold(few))
