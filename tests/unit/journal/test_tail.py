"""Reading a journal as it grows, and leaving out what tells nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.cli.observe.run_reading import RunReader
from slurm_forge.errors import UnsafeFileError
from slurm_forge.journal import JournalWriter, Record, compact_journal, fold
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import blank_superseded, encode
from slurm_forge.journal.line_reader import read_lines
from slurm_forge.journal.tail import JournalTail
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.status.status import take_status
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.report.journals import Scribe


def test_each_look_reads_what_is_new(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    tail = JournalTail(scribe.run)
    assert tail.poll() == ([], [])
    scribe.begin()
    assert {r.event.kind for r in tail.poll()[0]} == {"attempt_started", "launch_started"}
    assert tail.poll() == ([], [])
    scribe.resume(0)
    assert [r.event.kind for r in tail.poll()[0]] == ["resumed"]


def test_half_a_line_is_left_until_it_is_whole(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.begin()
    path = next(scribe.run.journal.iterdir())
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    tail = JournalTail(scribe.run)
    first, damage = tail.poll()
    path.write_bytes(whole)
    second, more = tail.poll()
    assert (damage, more) == ([], [])
    assert len(first) + len(second) == 2


def test_damage_names_the_line_of_the_file_also_in_a_later_look(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.begin()
    tail = JournalTail(scribe.run)
    tail.poll()
    path = next(scribe.run.journal.glob("1-supervisor-*"))
    lines = path.read_bytes().count(b"\n")
    with path.open("ab") as file:
        file.write(b"fine\x00damage\n")
    [damage] = tail.poll()[1]
    assert (damage.file, damage.line) == (path.name, lines + 1)


def test_a_planted_link_is_refused(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    (scribe.run.journal / "1-rank0-00000000.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(UnsafeFileError):
        JournalTail(scribe.run).poll()


def test_other_files_are_nobodys_business(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    (scribe.run.journal / "notes.txt").write_text("mine")
    assert JournalTail(scribe.run).poll() == ([], [])


def test_a_long_training_is_read_as_a_few_lines(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 500)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=500)
    records, damage = JournalTail(scribe.run).poll()
    assert damage == []
    assert [r.event.step for r in records if isinstance(r.event, ev.Progress)] == [500]


def test_the_last_step_before_a_rollback_in_the_same_launch_is_kept(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 9)
    scribe.resume(5)
    scribe.train(6, 20)
    records, _ = JournalTail(scribe.run).poll()
    steps = [r.event.step for r in records if isinstance(r.event, (ev.Resumed, ev.Progress))]
    assert sorted(steps) == [0, 5, 9, 20]


ROWS = st.lists(
    st.one_of(
        st.builds(ev.Progress, step=st.integers(0, 99)),
        st.builds(ev.Logged, step=st.integers(0, 99), values=st.just({"loss": 1.0})),
        st.builds(ev.Note, text=st.sampled_from(["x", '"kind":"progress"'])),
        st.builds(
            ev.CheckpointCommitted,
            name=st.just("c"),
            step=st.integers(0, 99),
            reason=st.just("r"),
            seconds=st.just(1.0),
            size=st.just(1),
        ),
    ),
    max_size=30,
)


@given(ROWS)
def test_nothing_that_counts_is_left_out(events: list[ev.Event]) -> None:
    started = ev.AttemptStarted(job="1", restart_count=0, nodes=(), host="h", via="v")
    steps = sorted(e.step for e in events if isinstance(e, ev.Progress))
    events = [
        # Steps of one launch only grow.
        ev.Progress(step=steps.pop(0)) if isinstance(e, ev.Progress) else e
        for e in events
    ]
    lines = [
        encode(Record(attempt=1, launch=1, sequence=n, time=float(n), writer="w", event=event))
        for n, event in enumerate([started, ev.LaunchStarted(world_size=1), *events])
    ]
    content = b"".join(lines) + b'{"torn'
    thin = blank_superseded(content)
    assert thin.count(b"\n") == content.count(b"\n")
    all_records, _ = read_lines(content, file="f", writer="w")
    kept, damage = read_lines(thin, file="f", writer="w")
    assert damage == []
    assert fold(kept) == fold(all_records)
    frequent = (ev.Progress, ev.Logged)
    assert [r for r in kept if not isinstance(r.event, frequent)] == [
        r for r in all_records if not isinstance(r.event, frequent)
    ]


def test_a_file_that_its_writer_has_left_is_told_once(tmp_path: Path) -> None:
    run = Scribe(tmp_path).run
    journal = JournalWriter(run, attempt=1, writer="rank0", launch=1, rotate_at=4_000)
    tail, told = JournalTail(run), []
    for step in range(300):
        journal.write(ev.Progress(step=step))
        if step % 10 == 0:
            journal.write(ev.Note(text=str(step)))
        if step % 7 == 0:
            records, damage = tail.poll()
            assert damage == []
            told += [each.event.text for each in records if isinstance(each.event, ev.Note)]
    told += [each.event.text for each in tail.poll()[0] if isinstance(each.event, ev.Note)]
    assert len(list(run.journal.iterdir())) > 5
    assert sorted(set(told), key=int) == [str(step) for step in range(0, 300, 10)]
    records, _ = JournalTail(run).poll()
    assert len([each for each in records if isinstance(each.event, ev.Note)]) >= 30


def test_a_run_that_is_archived_is_told_as_before(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.submitted()
    for number in range(1, 10):
        scribe.later(600).begin("n01", "n02")
        scribe.later(14).resume(40 * number - 40)
        scribe.train(40 * number - 40, 40 * number)
        scribe.save(40 * number)
        scribe.preempted(40 * number)
    tell = RunReader(scribe.run, clock=lambda: scribe.now, whole=True)
    tell.poll()
    facts = tell.facts()
    before = (explain(facts), take_status(facts))
    compact_journal(scribe.run, scribe.attempt, block=3, kept=1)
    assert len(list(scribe.run.journal.glob("archive-*"))) == 2
    again = RunReader(scribe.run, clock=lambda: scribe.now, whole=True)
    again.poll()
    assert explain(again.facts()) == before[0]
    brief = RunReader(scribe.run, clock=lambda: scribe.now)
    assert len(brief.poll()) < len(facts.records) / 2
    assert take_status(brief.facts()) == before[1]
    assert brief.poll() == []


def test_events_of_a_later_version_are_counted_once_with_what_to_install(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.begin("n01")
    scribe.resume(0)
    path = next(scribe.run.journal.glob("1-rank0-*"))
    (line,) = path.read_bytes().splitlines()
    later = json.loads(line) | {"by": "9.8.7", "event": {"kind": "teleported", "to": "Mars"}}
    with path.open("ab") as file:
        for number in range(1, 4):
            file.write(json.dumps(later | {"seq": number}).encode() + b"\n")
    facts = scribe.looked()
    for warnings in (take_status(facts).warnings, explain(facts).warnings):
        assert [each for each in warnings if "teleported" in each] == [
            "3 events of kinds that this slurm_forge does not know (teleported) are not shown: a "
            'later version wrote them (pip install "slurm-forge>=9.8.7")'
        ]
