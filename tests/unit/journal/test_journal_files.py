from __future__ import annotations

import dataclasses
import errno
import math
import os
import stat
import typing
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_forge.journal import JournalWriter, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import AppendFile, Record, decode, encode
from slurm_forge.journal.line_reader import read_lines
from slurm_forge.journal.logged import LoggedCurve
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Change, Decision, Incident
from slurm_forge.vocabulary.job_change import ChangeEffect
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust

KINDS = typing.get_args(typing.get_args(ev.Event)[0])

# A text of a dying program may hold anything, the halves of a character too.
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
FLOATS = st.floats(allow_nan=False)


def value_of(annotation: Any) -> st.SearchStrategy[Any]:
    origin, given_ = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return event_of(annotation)
    if origin is typing.Literal:
        return st.just(given_[0])
    if origin is tuple:
        return st.lists(value_of(given_[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(value_of(given_[0]), value_of(given_[1]), max_size=3)
    if given_:  # X | None
        return st.one_of(*(value_of(each) for each in given_))
    if annotation in (Cause, ChangeEffect, Confidence, Action, Trust):
        return st.sampled_from(list(annotation))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**53), 2**53),
        float: FLOATS,
        str: TEXT,
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[annotation]


def event_of(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{f.name: value_of(hints[f.name]) for f in dataclasses.fields(kind)})


def records(events: st.SearchStrategy[Any]) -> st.SearchStrategy[Record]:
    count = st.integers(0, 2**31)
    return st.builds(
        Record,
        attempt=count,
        launch=count,
        sequence=count,
        time=st.floats(0, 4e9),
        writer=st.just("rank0-00000000"),
        event=events,
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_event_comes_back_as_it_was(kind: type) -> None:
    @settings(max_examples=25, deadline=None)
    @given(records(event_of(kind)))
    def back(record: Record) -> None:
        line = encode(record)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert decode(line, record.writer) == record

    back()


def test_a_value_that_is_no_number_survives_too() -> None:
    record = note(0, ev.Logged(step=1, values={"loss": math.nan, "norm": math.inf}))
    found = decode(encode(record), record.writer)
    assert found is not None
    assert isinstance(found.event, ev.Logged)
    assert math.isnan(found.event.values["loss"])
    assert found.event.values["norm"] == math.inf


def note(sequence: int, event: ev.Event, writer: str = "rank0-00000000") -> Record:
    return Record(attempt=1, launch=1, sequence=sequence, time=10.0, writer=writer, event=event)


def lines(*steps: int) -> bytes:
    return b"".join(
        encode(note(number, ev.Progress(step=step))) for number, step in enumerate(steps)
    )


def steps(found: list[Record]) -> list[int]:
    return [record.event.step for record in found if isinstance(record.event, ev.Progress)]


@given(cut=st.integers(0, 400))
def test_wherever_a_write_was_cut_off_the_lines_before_it_are_read(cut: int) -> None:
    content = lines(1, 2, 3)
    found, damage = read_lines(content[:cut], file="f", writer="w")
    assert steps(found) == [1, 2, 3][: content[:cut].count(b"\n")]
    assert damage == []


def test_a_damaged_line_in_the_middle_costs_itself_only() -> None:
    first, second, third = lines(1, 2, 3).splitlines(keepends=True)
    found, damage = read_lines(first + second[:30] + b"\n" + third, file="f.jsonl", writer="w")
    assert steps(found) == [1, 3]
    assert [(each.file, each.line) for each in damage] == [("f.jsonl", 2)]


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 200_000,
        b'{"event": []}',
        b"null",
        b"\xff\xfe\x00",
        b'{"v":1,"attempt":1,"launch":1,"seq":0,"event":{"step":1,"kind":"progress"}}',
        lines(1).strip().replace(b'"time":10.0', b'"time":NaN'),
        lines(1).strip().replace(b'"time":10.0', b'"time":Infinity'),
        lines(1).strip().replace(b'"attempt":1', b'"attempt":1e999'),
        lines(1).strip().replace(b'"step":1', b'"step":"x"'),
        b'{"x":"' + b"y" * (1 << 18) + b'"}',
    ],
    ids=lambda line: repr(line[:40]),
)
def test_damage_of_any_kind_is_reported_and_never_stops_a_reader(line: bytes) -> None:
    found, damage = read_lines(line + b"\n" + lines(7), file="f", writer="w")
    assert steps(found) == [7]
    assert [each.line for each in damage] == [1]


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_fail(content: bytes) -> None:
    read_lines(content, file="f", writer="w")


def test_a_kind_from_a_newer_version_is_kept_as_one() -> None:
    newer = lines(1).replace(b'"kind":"progress"', b'"kind":"teleported"')
    newer = newer.replace(b'"by":"0.1.0"', b'"by":"9.9.9"')
    found, damage = read_lines(newer + lines(2), file="f", writer="w")
    assert (steps(found), damage) == ([2], [])
    assert found[0].event == ev.UnknownEvent(kind="teleported", by="9.9.9")


def test_fields_from_a_newer_version_are_passed_over() -> None:
    newer = lines(1).replace(b'"kind":"progress"', b'"kind":"progress","colour":"red"')
    found, damage = read_lines(newer, file="f", writer="w")
    assert (steps(found), damage) == ([1], [])


def test_a_probe_as_older_versions_wrote_it_is_read() -> None:
    event = b'{"ok":false,"step":9,"latency_s":null,"late_ranks":[4],"late_hosts":["n6"],'
    line = b'{"v":1,"attempt":1,"launch":1,"seq":0,"time":1.0,"event":' + event
    found, damage = read_lines(line + b'"count":1,"kind":"probe"}}\n', file="f", writer="w")
    assert damage == []
    assert found[0].event == ev.ProbeMeasured(ok=False, step=9, late_ranks=(4,), late_hosts=("n6",))


# -- the folder ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.at(tmp_path / "tiny")
    run.create(b"name: tiny\n")
    return run


def test_what_writers_wrote_is_read_back_with_its_place(run: RunDirectory) -> None:
    clock = iter([1.0, 2.0, 3.0])
    supervisor = JournalWriter(run, attempt=1, writer="supervisor", clock=lambda: next(clock))
    supervisor.write(ev.Note(text="a"))
    supervisor.launch = 1
    supervisor.write(ev.Note(text="b"))
    rank0 = JournalWriter(run, attempt=1, writer="rank0", launch=1, clock=lambda: next(clock))
    rank0.write(ev.Progress(step=5))
    found, damage = read_journal(run)
    assert damage == []
    places = {(r.writer.partition("-")[0], r.attempt, r.launch, r.sequence, r.time) for r in found}
    assert places == {
        ("supervisor", 1, 0, 0, 1.0),
        ("supervisor", 1, 1, 1, 2.0),
        ("rank0", 1, 1, 0, 3.0),
    }


def test_a_writer_that_says_nothing_leaves_no_file(run: RunDirectory) -> None:
    JournalWriter(run, attempt=1, writer="rank0").close()
    assert list(run.journal.iterdir()) == []


def test_other_files_in_the_folder_are_not_read(run: RunDirectory) -> None:
    for name in ("notes.txt", "1-rank0.jsonl", "x-rank0-00000000.jsonl", "1-a-0000000g.jsonl"):
        (run.journal / name).write_bytes(lines(9))
    assert read_journal(run) == ([], [])


def test_a_run_without_a_journal_is_new(tmp_path: Path) -> None:
    assert read_journal(RunDirectory.at(tmp_path / "none")) == ([], [])


def test_a_closed_journal_takes_nothing(run: RunDirectory) -> None:
    journal = JournalWriter(run, attempt=1, writer="rank0")
    journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.write(ev.Note(text="late"))


def decision(incident_id: str) -> ev.DecisionTaken:
    return ev.DecisionTaken(
        decision=Decision(
            incident_id=incident_id,
            cause=Cause.CRASH,
            action=Action.RELAUNCH,
            reason="",
            plan=RecoveryPlan(),
            rung=0,
        )
    )


class Disk:
    """Lets the n-th append fail, before or after the bytes are in the file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail: list[str] = []
        real = AppendFile.append

        def append(file: AppendFile, line: bytes, sync: bool = False) -> None:
            how = self.fail.pop(0) if self.fail else ""
            if how == "before":
                raise OSError(errno.ENOSPC, "full")
            real(file, line, sync)
            if how == "after":
                raise OSError(errno.EIO, "fsync failed")

        monkeypatch.setattr(AppendFile, "append", append)


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_disk_that_fails_once_loses_nothing_and_doubles_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    disk = Disk(monkeypatch)
    journal = JournalWriter(run, attempt=1, writer="supervisor")
    journal.write(
        ev.AttemptStarted(job="1", restart_count=0, nodes=("n1",), host="n1", via="sbatch")
    )
    disk.fail = [how]
    journal.write(ev.CheckpointCommitted(name="c", step=3, reason="", seconds=1.0, size=1))
    disk.fail = [how]
    journal.write(decision("1.1"))
    journal.write(ev.Finished(step=4))
    found, damage = read_journal(run)
    assert damage == []
    state = fold(found)
    assert [len(a.checkpoints) for a in state.attempts] == [1]
    assert [len(a.decisions) for a in state.attempts] == [1]
    assert state.times(Cause.CRASH, 0) == 1
    assert state.status.value == "finished"


def test_a_disk_that_stays_full_says_so_and_is_not_filled_with_empty_files(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    journal = JournalWriter(run, attempt=1, writer="rank0")
    for _ in range(50):
        disk.fail = ["before", "before"]
        with pytest.raises(OSError, match="full"):
            journal.write(ev.Progress(step=1))
    assert list(run.journal.iterdir()) == []
    disk.fail = []
    journal.write(ev.Progress(step=2))
    assert steps(read_journal(run)[0]) == [2]


def test_a_disk_that_was_full_for_long_takes_durable_lines_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS a full disk or an exceeded quota shows up in fsync."""
    full, real = [False], os.fsync

    def fsync(descriptor: int) -> None:
        if full[0] and stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EDQUOT, "quota")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    journal = JournalWriter(run, attempt=1, writer="rank0")
    journal.write(ev.Progress(step=1), durable=True)
    full[0] = True
    for _ in range(20):
        with pytest.raises(OSError, match="quota"):
            journal.write(ev.Progress(step=2), durable=True)
    full[0] = False
    journal.write(ev.Progress(step=3), durable=True)
    assert sorted({*steps(read_journal(run)[0])} - {2}) == [1, 3]
    assert len(list(run.journal.iterdir())) == 2


def test_what_decisions_rest_on_is_on_disk_before_write_returns(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = AppendFile.append

    def append(file: AppendFile, line: bytes, sync: bool = False) -> None:
        real(file, line, sync)
        if sync:
            synced.append(line.decode())

    monkeypatch.setattr(AppendFile, "append", append)
    journal = JournalWriter(run, attempt=1, writer="supervisor")
    incident = Incident(
        id="1.1",
        cause=Cause.CRASH,
        confidence=Confidence.LIKELY,
        evidence=(Evidence("srun", "gone"),),
    )
    changes = (Change("lr_scale", "1", "0.5"),)
    durable: list[ev.Event] = [
        ev.RequeueIntended(job="1", method="scontrol requeue", reason="preempted"),
        ev.IncidentSeen(incident=incident),
        ev.DecisionTaken(decision=dataclasses.replace(decision("1.1").decision, changes=changes)),
        ev.CheckpointCommitted(name="c", step=3, reason="", seconds=1.0, size=1),
        ev.Finished(step=4),
    ]
    for event in (*durable, ev.Progress(step=1), ev.Note(text="x")):
        journal.write(event)
    assert len(synced) == len(durable)
    journal.write(ev.Note(text="y"), durable=True)
    assert len(synced) == len(durable) + 1


# -- files of any size ---------------------------------------------------------------------------


def test_a_writer_leaves_a_file_that_is_long_and_what_counts_in_it_remains(
    run: RunDirectory,
) -> None:
    clock = iter(range(1000, 9000))
    journal = JournalWriter(
        run, attempt=1, writer="rank0", launch=1, clock=lambda: next(clock), rotate_at=20_000
    )
    kept = JournalWriter(run, attempt=2, writer="rank0", launch=1, clock=lambda: 1.0)
    written = 0
    for step in range(1, 1001):
        events: list[ev.Event] = [
            ev.Progress(step=step),
            ev.Logged(step=step, values={"loss": 1.0 / step} | ({"lr": 0.1} if step < 3 else {})),
        ]
        if step % 250 == 0:
            name = f"step-{step:08d}.a1.l1-0000abcd"
            events.append(
                ev.CheckpointCommitted(name=name, step=step, reason="", seconds=1.0, size=1)
            )
        for event in events:
            journal.write(event)
            kept.write(event)
    journal.close()
    kept.close()
    (whole,) = run.journal.glob("2-*")
    written = whole.stat().st_size
    files = list(run.journal.glob("1-*"))
    assert len(files) > 5
    assert sum(path.stat().st_size for path in files) < written / 5
    records, damage = read_journal(run)
    assert damage == []
    rotated = [each for each in records if each.attempt == 1]
    assert len(rotated) < 300
    figures = [each.event.values for each in rotated if isinstance(each.event, ev.Logged)]
    assert {name for values in figures for name in values} == {"loss", "lr"}
    one, two = (fold([each for each in records if each.attempt == n]) for n in (1, 2))
    assert (one.high_water, one.committed_step) == (two.high_water, two.committed_step)
    assert [each.name for each in one.known] == [each.name for each in two.known]


def test_what_a_curve_is_drawn_by_outlives_the_file_that_it_was_written_to(
    run: RunDirectory,
) -> None:
    journal = JournalWriter(run, attempt=1, writer="rank0", launch=1, rotate_at=300_000)
    for step in range(5_000):
        loss = 1e9 if step == 600 else 1.0 / (step + 1)
        journal.write(ev.Logged(step=step, values={"loss": loss, "lr": 0.1}))
    journal.close()
    left = sorted(run.journal.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-1]
    assert len(left) > 1
    curve = LoggedCurve()
    for path in left:
        curve.add(path.read_bytes(), "rank0-00000000")
    points = {r.event.step: r.event.values for r in curve.records if isinstance(r.event, ev.Logged)}
    assert points[600]["loss"] == 1e9
    steps = sorted(points)
    assert max(after - before for before, after in pairwise(steps)) <= 256
    assert len(steps) < 200


def test_a_file_is_on_disk_before_it_is_read_back_and_replaced(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel could not write is not read back as if it were there."""
    seen: list[tuple[str, int]] = []
    real = {name: getattr(os, name) for name in ("write", "fsync", "replace")}

    def noted(name: str) -> Callable[..., Any]:
        def act(target: Any, *rest: Any) -> Any:
            number = os.stat(target if name != "replace" else rest[0]).st_ino  # noqa: PTH116
            seen.append((name, number))
            return real[name](target, *rest)

        return act

    for name in real:
        monkeypatch.setattr(os, name, noted(name))
    journal = JournalWriter(run, attempt=1, writer="rank0", launch=1, rotate_at=2000)
    for step in range(40):
        journal.write(ev.Progress(step=step))
    journal.close()
    replaced = [at for at, (name, _) in enumerate(seen) if name == "replace"]
    assert len(replaced) > 1
    for at in replaced:
        own = [name for name, number in seen[:at] if number == seen[at][1]]
        assert own[-1] == "fsync"


@pytest.mark.parametrize("chunk", [64, 200, 1 << 12])
def test_a_file_is_read_in_pieces_as_it_would_be_at_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    long = b'{"x":"' + b"y" * (1 << 18) + b'"}\n'
    content = lines(*range(40)) + long + b"\x00\n\n" + lines(7, 8) + b'{"torn'
    path = run.journal / "1-rank0-00000000.jsonl"
    path.write_bytes(content)
    path.chmod(0o600)
    records, damage = read_lines(content, file=path.name, writer="rank0-00000000")
    monkeypatch.setattr("slurm_forge.journal.line_reader._CHUNK", chunk)
    found, bad = read_journal(run)
    assert found == records
    assert [(each.file, each.line) for each in bad] == [(each.file, each.line) for each in damage]
    assert fold(read_journal(run, skip_superseded=True)[0]) == fold(records)


def test_no_size_makes_a_run_unreadable_and_nothing_advises_to_remove_its_journal(
    run: RunDirectory,
) -> None:
    """A sparse file of 257 MiB, as one launch of a month left it before journals were left."""
    path = run.journal / "1-rank0-00000000.jsonl"
    with path.open("wb") as file:
        file.write(lines(1))
        file.seek(257 << 20)
        file.write(b"\n" + lines(2))
    path.chmod(0o600)
    records, damage = read_journal(run, skip_superseded=True)
    assert steps(records) == [1, 2]
    assert [each.line for each in damage] == [2]
    text = "".join(
        each.read_text() for each in (Path(ev.__file__).parents[1] / "journal").glob("*.py")
    )
    assert "move it away" not in text
