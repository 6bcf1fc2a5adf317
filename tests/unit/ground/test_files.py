from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_forge import files
from slurm_forge.errors import RunDirectoryError, UnsafeFileError


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# write_atomic


def test_replaces_whole_content_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "state"
    target.write_bytes(b"old and longer")
    files.write_atomic(target, b"new")
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert names(tmp_path) == ["state"]


def test_a_planted_link_is_replaced_and_its_target_untouched(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "state").symlink_to(victim)
    files.write_atomic(tmp_path / "state", b"new")
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "state").is_symlink()


def test_a_hard_link_to_somebodys_file_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    os.link(victim, tmp_path / "state")
    files.write_atomic(tmp_path / "state", b"new")
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_the_old_file_survives_an_error_at_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    target = tmp_path / "state"
    target.write_bytes(b"old")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no space"):
        files.write_atomic(target, b"new")
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["state"]


def test_a_rename_that_was_done_but_reported_as_failed_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def retransmitted(source: Any, target: Any) -> None:
        real(source, target)
        raise FileNotFoundError(errno.ENOENT, "lost reply")

    monkeypatch.setattr(os, "replace", retransmitted)
    files.write_atomic(tmp_path / "state", b"new")
    assert (tmp_path / "state").read_bytes() == b"new"


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    files.write_atomic(tmp_path / "state", b"0123456789")
    assert (tmp_path / "state").read_bytes() == b"0123456789"


def test_content_and_name_are_synced_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        seen.append("fsync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
        real_fsync(fd)

    def replace(source: Any, target: Any) -> None:
        seen.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    files.write_atomic(tmp_path / "state", b"new")
    assert seen == ["fsync file", "rename", "fsync folder"]


# create_exclusive


def test_only_the_first_creates_and_the_content_stays(tmp_path: Path) -> None:
    target = tmp_path / "1.json"
    assert files.create_exclusive(target, b"first") is True
    assert files.create_exclusive(target, b"second") is False
    assert target.read_bytes() == b"first"
    assert names(tmp_path) == ["1.json"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "1.json").symlink_to(tmp_path / "elsewhere")
    assert files.create_exclusive(tmp_path / "1.json", b"mine") is False
    assert not (tmp_path / "elsewhere").exists()


def test_equal_content_from_another_writer_is_not_ours(tmp_path: Path) -> None:
    assert files.create_exclusive(tmp_path / "DONE", b"same") is True
    assert files.create_exclusive(tmp_path / "DONE", b"same") is False


def _race(path: str, number: int, start: Any, results: Any) -> None:
    start.wait(30)
    results.put((number, files.create_exclusive(path, b"%d" % number * 1000)))


def test_eight_racing_processes_have_one_winner(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for turn in range(5):
        start, results = context.Barrier(8), context.Queue()
        target = tmp_path / f"{turn}.json"
        racers = [
            context.Process(target=_race, args=(str(target), n, start, results)) for n in range(8)
        ]
        for racer in racers:
            racer.start()
        outcome = dict(results.get(timeout=30) for _ in racers)
        for racer in racers:
            racer.join(30)
        winners = [number for number, won in outcome.items() if won]
        assert len(winners) == 1
        assert target.read_bytes() == b"%d" % winners[0] * 1000
    assert len(names(tmp_path)) == 5


def test_a_link_that_was_done_but_reported_as_existing_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def retransmitted(source: Any, target: Any, **kwargs: Any) -> None:
        real(source, target, **kwargs)
        raise FileExistsError(errno.EEXIST, "lost reply")

    monkeypatch.setattr(os, "link", retransmitted)
    assert files.create_exclusive(tmp_path / "1.json", b"mine") is True
    assert (tmp_path / "1.json").read_bytes() == b"mine"


def test_an_error_of_link_that_left_nothing_is_raised_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "io")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(OSError, match="io"):
        files.create_exclusive(tmp_path / "1.json", b"mine")
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_it_is_still_exclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def unsupported(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, "no links here")

    monkeypatch.setattr(os, "link", unsupported)
    assert files.create_exclusive(tmp_path / "1.json", b"first") is True
    assert files.create_exclusive(tmp_path / "1.json", b"second") is False
    assert (tmp_path / "1.json").read_bytes() == b"first"
    assert names(tmp_path) == ["1.json"]


def test_without_hard_links_a_torn_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.write, []

    def unsupported(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    def write(fd: int, data: Any) -> int:
        calls.append(fd)
        if len(calls) == 2:  # the first is the temporary file
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data)

    monkeypatch.setattr(os, "link", unsupported)
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="full"):
        files.create_exclusive(tmp_path / "1.json", b"mine")
    assert names(tmp_path) == []


# make_private_directory


def test_missing_parents_are_private_too_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = files.make_private_directory(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    for folder in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert files.make_private_directory(made) == made


@pytest.mark.parametrize("mode", [0o702, 0o703, 0o777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    with pytest.raises(UnsafeFileError, match=f"mode 0{mode:o}.*\n.*chmod go-w"):
        files.make_private_directory(shared)


def test_a_folder_that_others_can_only_read_is_fine(tmp_path: Path) -> None:
    readable = tmp_path / "readable"
    readable.mkdir()
    readable.chmod(0o755)
    assert files.make_private_directory(readable) == readable


def test_links_and_files_in_its_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for name, kind in (("link", "link"), ("dangling", "link"), ("file", "not a folder")):
        with pytest.raises(UnsafeFileError, match=kind):
            files.make_private_directory(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


def test_a_parent_planted_while_we_create_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def overtaken(path: Any, mode: int = 0o777) -> None:
        real(path, mode)
        Path(path).chmod(0o777)
        raise FileExistsError(errno.EEXIST, "planted")

    monkeypatch.setattr(os, "mkdir", overtaken)
    with pytest.raises(UnsafeFileError, match=r"/a can be written by other users"):
        files.make_private_directory(tmp_path / "a" / "b")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12345, 12345)
    with pytest.raises(UnsafeFileError, match="belongs to uid 12345"):
        files.make_private_directory(foreign)


# open_trusted and what is built on it


def test_a_plain_file_of_ours_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100)
    assert files.read_trusted(tmp_path / "f", 100) == b"x" * 100
    with pytest.raises(UnsafeFileError, match="larger than 99 bytes"):
        files.read_trusted(tmp_path / "f", 99)


def test_a_file_above_the_limit_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 40)  # sparse
    for read in (files.read_trusted, files.read_bounded):
        with pytest.raises(UnsafeFileError, match="larger than 1024 bytes"):
            read(tmp_path / "huge", 1024)


def test_a_planted_link_is_refused_even_to_a_good_file(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"x")
    (tmp_path / "f").symlink_to(tmp_path / "good")
    with pytest.raises(UnsafeFileError, match="symbolic link"):
        files.open_trusted(tmp_path / "f")


@pytest.mark.parametrize("mode", [0o602, 0o606, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "f").chmod(mode)
    with pytest.raises(UnsafeFileError, match="can be written by other users: everybody"):
        files.read_trusted(tmp_path / "f", 10)


def test_fifos_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(UnsafeFileError, match="not a regular file"):
            files.open_trusted(path)


def test_the_owner_can_be_somebody_else_when_the_caller_says_so(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    if os.geteuid() != 0:
        with pytest.raises(UnsafeFileError, match="belongs to uid"):
            files.open_trusted(tmp_path / "f", owner=os.geteuid() + 1)
        return
    os.chown(tmp_path / "f", 12345, 12345)
    with pytest.raises(UnsafeFileError, match="belongs to uid 12345, not to uid 0"):
        files.open_trusted(tmp_path / "f")
    os.close(files.open_trusted(tmp_path / "f", owner=12345))


def test_a_refused_file_leaks_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "f").chmod(0o666)
    before = len(names(Path("/proc/self/fd")))
    for _ in range(20):
        with pytest.raises(UnsafeFileError):
            files.open_trusted(tmp_path / "f")
    assert len(names(Path("/proc/self/fd"))) == before


def test_a_folder_that_a_server_gives_to_another_user_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does with root's (root_squash)."""
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(UnsafeFileError, match="root_squash") as caught:
        files.make_private_directory(tmp_path / "runs" / "run")
    assert "not as root" in caught.value.next_step
    assert names(tmp_path) == []


def test_a_stale_handle_is_tried_again_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"x")
    real, left = os.fstat, [2]

    def stale(fd: int) -> os.stat_result:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "stale")
        return real(fd)

    monkeypatch.setattr(os, "fstat", stale)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert files.read_trusted(tmp_path / "f", 10) == b"x"
    left[0] = 4
    with pytest.raises(OSError, match="stale"):
        files.read_trusted(tmp_path / "f", 10)


class NfsClient:
    """What Linux remembers of a folder on NFS: which file a name is, and that there is none.

    It is asked anew once the folder was opened, as ``tests/shared_storage`` shows.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._open, self._stat = folder, os.open, os.stat
        self.remembered: dict[str, int | None] = {}
        patch.setattr(os, "open", self.open)
        patch.setattr(os, "stat", self.stat)
        method = lambda path, **options: self.stat(path, **options)  # noqa: E731, PLW0108
        patch.setattr(Path, "stat", method)

    def ask(self, path: Any) -> int | None:
        found = None
        if os.path.lexists(path):
            found = os.lstat(path).st_ino
        return self.remembered.setdefault(os.fspath(path), found)

    def stat(self, path: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and self.ask(path) is None:
            raise FileNotFoundError(errno.ENOENT, "remembered", str(path))
        return self._stat(path, **options)

    def open(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if Path(path) == self.folder:
            self.remembered.clear()
        elif self.ask(path) != (os.lstat(path).st_ino if os.path.lexists(path) else None):
            raise OSError(errno.ESTALE, "stale", str(path))
        return self._open(path, flags, *rest, **options)


def test_a_name_that_another_node_has_made_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NfsClient(tmp_path, monkeypatch)
    assert not files.exists_on_server(tmp_path / "STOP")
    (tmp_path / "STOP").mkdir()
    assert not (tmp_path / "STOP").exists()
    assert files.exists_on_server(tmp_path / "STOP")
    assert not files.exists_on_server(tmp_path / "gone" / "STOP")


def test_what_another_node_has_replaced_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    NfsClient(tmp_path, monkeypatch)
    assert files.read_trusted(tmp_path / "f", 10) == b"old"
    (tmp_path / "new").replace(tmp_path / "f")
    assert files.read_trusted(tmp_path / "f", 10) == b"new"


def test_json_objects_are_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_text('{"attempt": 3, "nodes": ["n1"]}')
    assert files.read_json(tmp_path / "f", 1000) == {"attempt": 3, "nodes": ["n1"]}


@pytest.mark.parametrize(
    "text",
    ["", '{"a": 1', "[1]", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": -Infinity}', '{"a":' * 50_000],
)
def test_damaged_json_is_reported_as_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(RunDirectoryError, match="is damaged"):
        files.read_json(tmp_path / "f", 1 << 20)


def test_json_that_is_not_utf8_is_damage(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(RunDirectoryError, match="is damaged"):
        files.read_json(tmp_path / "f", 100)
