"""The node ledger on disk: shared, appended to by many, and believed only where that is safe."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import ConfigError, ForgeError, UnsafeFileError
from slurm_forge.knobs import Knobs
from slurm_forge.node_ledger import LedgerReading, NodeLedger, ledger_place
from slurm_forge.node_ledger import reading as ledger_reading
from slurm_forge.node_ledger.lines import line_of, parse_line
from slurm_forge.recovery.nodes.statements import BY_HAND, Ledger, NodeRelease, Strike
from tests.security.bounded import NOBODY, as_nobody

NOW = 1_800_000_000.0
DAY = 86_400.0
MINE = os.geteuid()
needs_root = pytest.mark.skipif(MINE != 0, reason="needs root to act as two users")


def strike(node: str = "n06", time: float = NOW - 60, **more: object) -> Strike:
    values = {"weight": 0.75, "cause": "hang", "run": "/runs/a", "incident_id": "1.1", "by": "ann"}
    return Strike(node=node, time=time, **{**values, **more})  # type: ignore[arg-type]


def open_ledger(folder: Path, **more: object) -> NodeLedger:
    values = {"clock": lambda: NOW, "host": "login1", **more}
    return NodeLedger(folder=folder / "nodes", cluster="hill", **values)  # type: ignore[arg-type]


@pytest.fixture
def ledger(tmp_path: Path) -> NodeLedger:
    return open_ledger(tmp_path)


def file_of(ledger: NodeLedger, uid: int = MINE, host: str = "login1") -> Path:
    assert ledger.folder is not None
    return ledger.folder / str(uid) / ledger.cluster / f"{host}.jsonl"


def nodes(ledger: NodeLedger) -> list[str]:
    return sorted(each.node for each in ledger.read().ledger.strikes)


# What is written is read


def test_what_is_written_is_read_by_the_next_run(ledger: NodeLedger) -> None:
    said = (strike(), NodeRelease(node="n07", time=NOW - 5, why="new cable"))
    by_hand = strike("n08", cause=BY_HAND, weight=1.0, until=NOW + DAY, why="x 4711")
    ledger.add([said[0]])
    ledger.add([said[1], by_hand])
    reading = ledger.read()
    assert reading.ledger.strikes == (said[0], by_hand)
    assert reading.ledger.releases == (said[1],)
    assert (reading.problems, reading.skipped) == ((), 0)


def test_nothing_there_is_nothing_known(ledger: NodeLedger) -> None:
    reading = ledger.read()
    assert (reading.ledger.strikes, reading.problems) == ((), ())
    off = replace(ledger, folder=None)
    off.add([strike()])
    assert off.read().ledger.strikes == ()


def test_clusters_and_hosts_are_kept_apart_and_hosts_are_read_together(ledger: NodeLedger) -> None:
    ledger.add([strike("n01")])
    replace(ledger, host="n17").add([strike("n02")])
    replace(ledger, cluster="other").add([strike("n03")])
    assert nodes(ledger) == ["n01", "n02"]
    assert file_of(ledger).is_file()
    assert file_of(ledger, host="n17").is_file()


@pytest.mark.parametrize("name", ["../../up", "a b", "-x", "", "n" * 300, "\n", "…"])
def test_odd_names_of_clusters_and_hosts_stay_inside(tmp_path: Path, name: str) -> None:
    ledger = NodeLedger(folder=tmp_path / "nodes", cluster=name, host=name, clock=lambda: NOW)
    ledger.add([strike()])
    assert nodes(ledger) == ["n06"]
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.parent.parent == tmp_path / "nodes" / str(MINE) for path in made)
    assert [path.name for path in tmp_path.iterdir()] == ["nodes"]


def test_it_is_private_where_its_folder_is_and_readable_where_that_is(tmp_path: Path) -> None:
    private = open_ledger(tmp_path)
    private.add([strike()])
    for path in (tmp_path / "nodes").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    group = NodeLedger(
        folder=tmp_path / "group", cluster="hill", host="h", shared=True, clock=lambda: NOW
    )
    with pytest.raises(FileNotFoundError):
        group.add([strike()])
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o2770)
    umask = os.umask(0o077)
    try:
        group.add([strike()])
    finally:
        os.umask(umask)
    mine = file_of(group, host="h")
    assert stat.S_IMODE(mine.stat().st_mode) == 0o640
    assert stat.S_IMODE(mine.parent.stat().st_mode) & 0o777 == 0o750
    assert nodes(group) == ["n06"]


# Many at once


def _write(folder: Path, writer: int, count: int, begin) -> None:
    ledger = open_ledger(folder)
    begin.wait()
    for number in range(count):
        ledger.add([strike(f"n{number:03d}", run=f"/runs/{writer}", why="x" * 250)])


def test_writers_of_one_host_lose_nothing_while_the_file_is_compacted(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(3)
    # What has faded makes the file large, so that some writer leaves it out under the others.
    faded = [strike("n999", time=NOW - 50 * DAY, incident_id=str(i)) for i in range(1700)]
    ledger = open_ledger(tmp_path)
    ledger.add(faded)
    large = file_of(ledger).stat().st_size
    assert large > 200_000
    writers = [
        context.Process(target=_write, args=(tmp_path, writer, 100, begin)) for writer in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    reading = ledger.read()
    found = {(each.run, each.node) for each in reading.ledger.strikes}
    assert found == {(f"/runs/{w}", f"n{n:03d}") for w in range(3) for n in range(100)}
    assert reading.skipped == 0
    assert file_of(ledger).stat().st_size < large


def test_without_locks_lines_are_still_added(
    ledger: NodeLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import fcntl

    def missing(*args: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    ledger.add([strike("n01")])
    ledger.add([strike("n02")])
    assert nodes(ledger) == ["n01", "n02"]


def test_a_file_that_grows_keeps_what_counts(ledger: NodeLedger) -> None:
    pinned = strike("pinned", time=NOW - 300 * DAY, cause=BY_HAND, weight=1.0)
    expired = strike("expired", cause=BY_HAND, weight=1.0, until=NOW - 1)
    fresh = [strike(f"n{i:04d}", time=NOW - i, incident_id=str(i)) for i in range(2100)]
    ledger.add([pinned, expired])
    ledger.add(fresh)
    found = ledger.read().ledger.strikes
    assert len(found) == 500
    kept = {each.node for each in found}
    assert {"pinned", "n0000", "n0100"} <= kept
    assert not {"expired", "n1599"} & kept


def test_files_of_hosts_that_are_long_silent_go_away(ledger: NodeLedger) -> None:
    old, pinned = replace(ledger, host="old"), replace(ledger, host="pinned")
    old.add([strike(time=NOW - 90 * DAY)])
    pinned.add([strike("n07", time=NOW - 90 * DAY, cause=BY_HAND, weight=1.0)])
    for host in ("old", "pinned"):
        os.utime(file_of(ledger, host=host), (NOW - 90 * DAY, NOW - 90 * DAY))
    ledger.add([strike("n01")])
    assert not file_of(ledger, host="old").exists()
    assert nodes(ledger) == ["n01", "n07"]


# Damaged


def test_a_torn_line_spoils_itself_only(ledger: NodeLedger) -> None:
    ledger.add([strike("n01")])
    path = file_of(ledger)
    path.write_bytes(path.read_bytes() + line_of(strike("n02"))[:40])
    ledger.add([strike("n03")])
    assert nodes(ledger) == ["n01", "n03"]
    assert ledger.read().skipped == 1


GOOD = json.loads(line_of(strike()))


@pytest.mark.parametrize(
    "change",
    [
        {"node": "--all"}, {"node": "a b"}, {"node": "n1\nn2"}, {"node": ""}, {"node": 7},
        {"node": "n[1-9]"}, {"node": "n1,n2"}, {"node": "n" * 300}, {"node": "../n1"},
        {"time": NOW + DAY}, {"time": -1}, {"time": "noon"}, {"time": True}, {"time": None},
        {"time": float("nan")}, {"time": float("inf")}, {"time": 10**400},
        {"weight": 1e9}, {"weight": 0}, {"weight": -1}, {"weight": float("nan")}, {"weight": "1"},
        {"cause": "bad luck"}, {"cause": None}, {"cause": ["hang"]}, {"v": 2}, {"kind": "praise"},
        {"run": "x" * 5000}, {"by": "\x1b[31mred"}, {"why": "two\nlines"}, {"incident": {}},
        {"until": "soon", "cause": BY_HAND},
    ],
    ids=str,
)  # fmt: skip
def test_lines_that_can_not_be_believed_are_counted_and_left_out(
    ledger: NodeLedger, change: dict[str, object]
) -> None:
    ledger.add([strike("n01")])
    path = file_of(ledger)
    path.write_bytes(path.read_bytes() + json.dumps({**GOOD, **change}).encode() + b"\n")
    reading = ledger.read()
    assert [each.node for each in reading.ledger.strikes] == ["n01"]
    assert reading.skipped == 1


def test_a_strike_of_a_run_can_not_claim_to_last(ledger: NodeLedger) -> None:
    line = json.dumps({**GOOD, "until": NOW + 900 * DAY}).encode()
    found = parse_line(line, NOW)
    assert isinstance(found, Strike)
    assert found.until is None


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_no_line_raises(line: bytes) -> None:
    parse_line(line, NOW)


@given(
    st.builds(
        Strike,
        node=st.from_regex(r"\A[a-z0-9][a-z0-9.-]{0,20}\Z"),
        time=st.floats(1, NOW),
        weight=st.floats(0.01, 2.0),
        cause=st.sampled_from(["hang", "crash", BY_HAND]),
        run=st.text(max_size=2000),
        incident_id=st.text(max_size=200),
        by=st.text(max_size=200),
        why=st.text(max_size=500),
    )
)
def test_whatever_is_written_can_be_read(said: Strike) -> None:
    line = line_of(said)
    assert line.count(b"\n") == 1
    found = parse_line(line[:-1], NOW)
    assert isinstance(found, Strike)
    assert (found.node, found.time, found.weight) == (said.node, said.time, said.weight)


def test_long_texts_are_cut_and_bend_no_line() -> None:
    long = strike(run="/" + "a" * 5000, by="b" * 500, why="c\n\x1b" * 500, incident_id="1" * 500)
    found = parse_line(line_of(long), NOW)
    assert isinstance(found, Strike)
    assert len(found.run) == 1024
    assert len(found.why) == 300
    assert found.why.isprintable()


def test_a_deeply_nested_line_is_one_damaged_line(ledger: NodeLedger) -> None:
    ledger.add([strike("n01")])
    path = file_of(ledger)
    path.write_bytes(path.read_bytes() + b"[" * 8000 + b"\n" + b"9" * 8000 + b"\n")
    assert nodes(ledger) == ["n01"]
    assert ledger.read().skipped == 2


# Planted


def plant(path: Path, said: bytes, uid: int = MINE, mode: int = 0o600) -> Path:
    """A file of somebody's, in folders of theirs."""
    for folder in (path.parent.parent.parent, path.parent.parent, path.parent):
        if not folder.is_dir():
            folder.mkdir(0o755, parents=True)
            if folder != path.parent.parent.parent:
                os.chown(folder, uid, uid) if MINE == 0 else None
    path.write_bytes(said)
    path.chmod(mode)
    if MINE == 0:
        os.chown(path, uid, uid)
    return path


@needs_root
def test_what_others_say_counts_where_a_site_shares_its_ledger(ledger: NodeLedger) -> None:
    plant(file_of(ledger, NOBODY), line_of(strike("n09")), uid=NOBODY)
    assert ledger.read() == LedgerReading(ledger=Ledger())
    reading = replace(ledger, shared=True).read()
    assert reading.problems == ()
    assert [each.node for each in reading.ledger.strikes] == ["n09"]


@needs_root
def test_nobody_speaks_in_anothers_name(ledger: NodeLedger) -> None:
    ledger = replace(ledger, shared=True)
    # A file of nobody's in root's folder, and in the folder of a third one.
    plant(file_of(ledger), line_of(strike("n01")))
    os.chown(file_of(ledger), NOBODY, NOBODY)
    plant(file_of(ledger, 4242), line_of(strike("n02")), uid=4242)
    os.chown(file_of(ledger, 4242), NOBODY, NOBODY)
    # A whole folder that is nobody's, with the number of a third one.
    plant(file_of(ledger, 4243), line_of(strike("n03")), uid=NOBODY)
    # A folder of the third one's, moved into such a one.
    plant(file_of(ledger, 4244), line_of(strike("n04")), uid=4244)
    os.chown(file_of(ledger, 4244).parent.parent, NOBODY, NOBODY)
    reading = ledger.read()
    assert reading.ledger.strikes == ()
    assert len(reading.problems + reading.of_others) == 4
    assert len(reading.problems) == 1
    with pytest.raises(UnsafeFileError):
        ledger.add([strike("n04")])


@pytest.mark.parametrize("mode", [0o602, 0o606, 0o666])
def test_what_others_can_write_is_not_believed(ledger: NodeLedger, mode: int) -> None:
    ledger.add([strike("n01")])
    file_of(ledger).chmod(mode)
    assert nodes(ledger) == []
    assert "can be written by other users" in ledger.read().problems[0]
    with pytest.raises(UnsafeFileError):
        ledger.add([strike("n02")])


def test_a_folder_that_others_can_write_is_not_believed(ledger: NodeLedger) -> None:
    ledger.add([strike("n01")])
    file_of(ledger).parent.chmod(0o777)
    assert nodes(ledger) == []
    with pytest.raises(UnsafeFileError):
        ledger.add([strike("n02")])


def test_links_lead_nowhere(ledger: NodeLedger, tmp_path: Path) -> None:
    ledger.add([strike("n01")])
    path, victim = file_of(ledger), tmp_path / "victim"
    victim.write_bytes(line_of(strike("n02")))
    victim.chmod(0o600)
    path.unlink()
    path.symlink_to(victim)
    assert nodes(ledger) == []
    with pytest.raises((UnsafeFileError, OSError)):
        ledger.add([strike("n03")])
    path.unlink()
    path.hardlink_to(victim)
    with pytest.raises(UnsafeFileError):
        ledger.add([strike("n03")])
    assert victim.read_bytes() == line_of(strike("n02"))


def test_a_linked_folder_leads_nowhere(ledger: NodeLedger, tmp_path: Path) -> None:
    ledger.add([strike("n01")])
    folder = file_of(ledger).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert nodes(ledger) == []
    with pytest.raises(UnsafeFileError):
        ledger.add([strike("n02")])


def test_a_fifo_holds_up_nobody(ledger: NodeLedger) -> None:
    ledger.add([strike("n01")])
    file_of(ledger).unlink()
    os.mkfifo(file_of(ledger), 0o600)
    done: list[str] = []

    def use() -> None:
        done.append(f"{len(ledger.read().problems)} problem")
        with pytest.raises((ForgeError, OSError)):
            ledger.add([strike("n02")])
        done.append("refused")

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(20)
    assert done == ["1 problem", "refused"]


def test_a_huge_file_is_not_read(ledger: NodeLedger) -> None:
    ledger.add([strike("n01")])
    replace(ledger, host="other").add([strike("n02")])
    os.truncate(file_of(ledger), 10 << 20)
    assert nodes(ledger) == ["n02"]
    assert "is larger than" in ledger.read().problems[0]
    with pytest.raises(UnsafeFileError):
        ledger.add([strike("n03")])
    assert file_of(ledger).stat().st_size == 10 << 20


@needs_root
def test_what_is_read_is_bounded_and_our_own_comes_first(
    ledger: NodeLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_of(strike("flood"))
    for number, host in enumerate("abcdef"):
        path = plant(file_of(ledger, 4000, host), line_of(strike(f"{host}aaaa")) * 3, uid=4000)
        os.utime(path, (NOW - number, NOW - number))
    plant(file_of(ledger, 4001), line_of(strike("late1")), uid=4001)
    ledger.add([strike("ours1")] * 5)
    shared = replace(ledger, shared=True)
    assert nodes(shared)[:2] == ["aaaaa"] * 2
    monkeypatch.setattr(ledger_reading, "_MOST_BYTES", 11 * len(line))
    assert nodes(shared) == [*["aaaaa"] * 3, *["baaaa"] * 3, *["ours1"] * 5], "the newest files"
    assert (ledger.read().problems, len(shared.read().of_others)) == ((), 1)
    monkeypatch.setattr(ledger_reading, "_MOST_USERS", 0)
    assert nodes(shared) == ["ours1"] * 5


def test_a_flood_of_our_own_is_weighed_in_little_time(ledger: NodeLedger) -> None:
    ledger.add([strike("n01")])
    for host in range(6):
        lines = [
            line_of(strike(f"n{i % 40}", time=NOW - 1 - i / 100, by=f"u{host}_{i}", run=str(i)))
            for i in range(6000)
        ]
        path = file_of(ledger, host=f"h{host}")
        path.write_bytes(b"".join(lines))
        path.chmod(0o600)
    found = ledger.read()
    assert len(found.ledger.strikes) == 20_000
    assert "more than 20000 lines" in found.problems[0]


@needs_root
def test_a_flood_of_others_pushes_out_nothing_of_ours(
    ledger: NodeLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_reading, "_MOST_ENTRIES", 5)
    ledger.add([strike("n01", time=NOW - 90)] * 3)
    plant(file_of(ledger, NOBODY), line_of(strike("flood", time=NOW - 1)) * 9, uid=NOBODY)
    answer = replace(ledger, shared=True).read()
    assert [each.node for each in answer.ledger.strikes] == ["n01"] * 3 + ["flood"] * 2
    assert answer.problems == ()
    assert "more than 5 lines" in answer.of_others[0]


@needs_root
def test_what_others_have_planted_is_not_told_as_ours(ledger: NodeLedger) -> None:
    ledger.add([strike("n01")])
    assert ledger.folder is not None
    (ledger.folder / "4242").symlink_to("/etc")
    (ledger.folder / "4243").write_text("no folder")
    found = replace(ledger, shared=True).read()
    assert [each.node for each in found.ledger.strikes] == ["n01"]
    assert found.problems == ()
    assert len(found.of_others) == 2


def test_files_with_other_names_are_not_looked_at(ledger: NodeLedger) -> None:
    ledger.add([strike("n01")])
    folder = file_of(ledger).parent
    for name in ("notes.txt", "-rf.jsonl", ".jsonl", "a b.jsonl", "x.jsonl.tmp"):
        (folder / name).write_bytes(line_of(strike("n66")))
    assert ledger.folder is not None
    for name in ("ann", "01", "-1", "1" * 20, "..."):
        (ledger.folder / name).mkdir(exist_ok=True)
    assert nodes(ledger) == ["n01"]
    assert ledger.read().problems == ()


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that another user can get to (those of pytest are closed)."""
    folder = Path(tempfile.mkdtemp(prefix="forge-two-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_a_group_shares_one_ledger(open_to_all: Path) -> None:
    group = NodeLedger(
        folder=open_to_all / "nodes", cluster="hill", host="h", shared=True, clock=lambda: NOW
    )
    (open_to_all / "nodes").mkdir()
    (open_to_all / "nodes").chmod(0o1777)
    umask = os.umask(0o077)
    try:
        group.add([strike("n01", by="root")])
        theirs = as_nobody(lambda: [group.add([strike("n02", by="nobody")]), nodes(group)][1])
    finally:
        os.umask(umask)
    assert theirs == nodes(group) == ["n01", "n02"]


@needs_root
def test_a_folder_that_can_not_be_read_is_told_and_empty(open_to_all: Path) -> None:
    ledger = open_ledger(open_to_all)
    ledger.add([strike("n01")])

    def theirs() -> tuple[int, str, str]:
        reading = ledger.read()
        try:
            ledger.add([strike("n02")])
        except (OSError, ForgeError) as error:
            return len(reading.ledger.strikes), reading.problems[0], type(error).__name__
        return 0, "", "written"

    count, problem, error = as_nobody(theirs)
    assert (count, error) == (0, "PermissionError")
    assert "Permission denied" in problem


# Where it lies


def test_where_the_ledger_lies() -> None:
    def folder(site: str | None = None, **knobs: str) -> str:
        place = ledger_place(Knobs(**knobs), site)  # type: ignore[arg-type]
        return f"{place.folder} {'shared' if place.shared else 'own'}"

    home = Path.home()
    assert folder() == f"{home}/.local/state/slurm_forge/nodes own"
    assert folder(state_home="/state") == "/state/slurm_forge/nodes own"
    assert folder(state_home="state") == f"{home}/.local/state/slurm_forge/nodes own"
    assert folder("/group/nodes") == "/group/nodes shared"
    assert folder("/group/nodes", nodes="~/mine") == f"{home}/mine own"
    assert folder("/group/nodes", nodes="off") == "None own"
    with pytest.raises(ConfigError, match="SLURM_FORGE_NODES"):
        folder(nodes="mine")
