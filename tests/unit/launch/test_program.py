"""A program's end, its newest file, its progress: the pure parts."""

from __future__ import annotations

import errno
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.launch.command.checkpoint_files import (
    ProgressFile,
    find_matches,
    incomplete,
    newest,
)
from slurm_forge.launch.command.program_end import (
    ProgramEnd,
    program_end,
    status_of,
)
from slurm_forge.launch.command.program_process import (
    LineSplitter,
    OutputTail,
    open_stream,
)
from slurm_forge.launch.command.progress import ProgressSample, advanced
from slurm_forge.spec.launchers import Convention, ProgramSpec

FINISHED, STOPPED, ASKED, FAILED = ProgramEnd


@pytest.mark.parametrize(
    ("options", "status", "noticed", "said", "end"),
    [
        ({}, 0, False, False, FINISHED),
        ({}, 1, False, False, FAILED),
        ({}, 137, False, False, FAILED),
        # After a notice nothing but its own word tells that it is through.
        ({}, 0, True, False, STOPPED),
        ({}, 1, True, False, STOPPED),
        ({}, 143, True, False, STOPPED),
        ({}, None, True, False, STOPPED),
        ({"done_file": "d"}, 0, True, True, FINISHED),
        ({"done_file": "d"}, 1, False, True, FINISHED),
        ({"done_file": "d"}, None, True, True, FINISHED),
        ({"done_file": "d"}, 0, True, False, STOPPED),
        ({"done_pattern": "d"}, 1, False, False, FAILED),
        ({"done_exit_code": 9}, 9, True, False, FINISHED),
        ({"done_exit_code": 9}, 9, False, False, FINISHED),
        ({"done_exit_code": 9}, 0, True, False, STOPPED),
        ({"requeue_exit_code": 8}, 8, False, False, ASKED),
        ({"requeue_exit_code": 8}, 8, True, False, STOPPED),
        ({"requeue_exit_code": 8}, 1, False, False, FAILED),
        ({"requeue_exit_code": 8}, 0, False, False, FINISHED),
    ],
)
def test_ended(
    options: dict[str, object], status: int | None, noticed: bool, said: bool, end: ProgramEnd
) -> None:
    program = ProgramSpec.model_validate(options)
    assert program_end(program, status, stop_noticed=noticed, said_done=said) is end


def test_status_as_shells_tell_it() -> None:
    assert [status_of(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_newest(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-20", "checkpoint-best"):
        (tmp_path / "out" / name).mkdir(parents=True)
    os.utime(tmp_path / "out" / "checkpoint-9")
    found = newest(find_matches("out/checkpoint-*", tmp_path))
    assert found is not None
    assert (found.path, found.number) == (tmp_path / "out" / "checkpoint-100", 100)
    assert newest(find_matches("out/nothing*", tmp_path)) is None
    (tmp_path / "out" / "checkpoint-100" / "checkpoint-is-incomplete.txt").touch()
    whole = newest(find_matches(f"{tmp_path}/out/*", Path("/")), but=incomplete(Convention.HF))
    assert whole is not None and whole.number == 20


def test_the_number_of_a_file_is_not_that_of_its_kind(tmp_path: Path) -> None:
    for name in ("m-9.h5", "m-10.h5", "m-best.h5", "m-7.pt2"):
        (tmp_path / name).touch()
    assert {(each.path.name, each.number) for each in find_matches("m-*", tmp_path)} == {
        ("m-9.h5", 9),
        ("m-10.h5", 10),
        ("m-best.h5", 5),
        ("m-7.pt2", 7),
    }


def test_of_too_many_the_furthest_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_forge.launch.command.checkpoint_files._MOST", 3)
    for number in range(40):
        (tmp_path / f"c-{number}").touch()
    numbers = {each.number for each in find_matches("c-*", tmp_path)}
    assert numbers == {37, 38, 39}


def test_what_a_full_disk_did_not_take_is_all_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = os.write, [True]

    def fills(target: int, data: bytes) -> int:
        if target == log and full:
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(target, data)

    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr("slurm_forge.launch.command.program_process.os.write", fills)
    tail = OutputTail()
    stream = open_stream(log, tail)
    program = os.dup(stream.child_end)
    stream.begin()
    write(program, b"lost")
    deadline = time.monotonic() + 10
    while full:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    write(program, b"kept")
    os.close(program)
    stream.reader.join(10)
    os.close(log)
    assert (tmp_path / "log").read_bytes() == b"kept"
    assert tail.text() == "lostkept"


def test_a_folder_with_a_strange_name(tmp_path: Path) -> None:
    folder = tmp_path / "a[b]*?"
    folder.mkdir()
    (folder / "x-1").touch()
    assert [match.path.name for match in find_matches("x-*", folder)] == ["x-1"]


@given(st.lists(st.tuples(st.none() | st.integers(0, 99), st.integers(0, 99)), max_size=8))
def test_the_highest_number_wins(given_: list[tuple[int | None, int]]) -> None:
    matches = [ProgressFile(Path(f"/{n}"), number, at) for n, (number, at) in enumerate(given_)]
    found = newest(matches)
    if found is None:
        assert not matches
        return
    numbers = [match.number for match in matches if match.number is not None]
    if numbers:
        assert found.number == max(numbers)
    else:
        assert found.changed == max(match.changed for match in matches)


def looked(
    number: int | None = None, at: int = 0, printed: int | None = None, s: int = 0
) -> ProgressSample:
    match = ProgressFile(Path("/c"), number, at) if number is not None or at else None
    return ProgressSample(newest=match, printed=printed, ran=timedelta(seconds=s))


BOTH = {"progress_file": "*", "step_pattern": "(.)"}


@pytest.mark.parametrize(
    ("options", "before", "now", "furthest", "told", "step"),
    [
        ({"checkpoint_glob": "*"}, looked(), looked(20), -1, False, 20),
        ({"checkpoint_glob": "*"}, looked(20), looked(20), 20, False, "no"),
        # Written anew with the number of old: it got nowhere.
        ({"checkpoint_glob": "*"}, looked(20, 1), looked(20, 9), 20, False, "no"),
        ({"checkpoint_glob": "*"}, looked(), looked(10), 20, False, "no"),
        ({"checkpoint_glob": "*"}, looked(20), looked(30), 20, True, 30),
        ({"progress_file": "*"}, looked(at=5), looked(at=6), -1, False, None),
        ({"progress_file": "*"}, looked(at=5), looked(at=5), -1, False, "no"),
        # A number in its name is a step only where the output prints none.
        (BOTH, looked(), looked(1_790_000_000, printed=3), 2, False, 3),
        (BOTH, looked(1), looked(2, printed=40), 30, True, 40),
        (BOTH, looked(), looked(1_790_000_000, printed=2), 2, False, "no"),
        (BOTH, looked(), looked(7), -1, False, 7),
        (
            {**BOTH, "progress_file": None, "checkpoint_glob": "*"},
            looked(),
            looked(7, printed=9),
            2,
            False,
            7,
        ),
        ({"step_pattern": "(.)"}, looked(), looked(printed=3), 2, False, 3),
        ({"step_pattern": "(.)"}, looked(), looked(printed=2), 2, False, "no"),
        ({}, looked(), looked(s=599), -1, False, "no"),
        ({}, looked(), looked(s=600), -1, False, None),
        ({}, looked(), looked(s=1200), -1, True, "no"),
    ],
)
def test_advanced(
    options: dict[str, object],
    before: ProgressSample,
    now: ProgressSample,
    furthest: int,
    told: bool,
    step: int | str | None,
) -> None:
    program = ProgramSpec.model_validate(options)
    found = advanced(program, before, now, furthest, is_reported=told)
    if step == "no":
        assert found is None
    else:
        assert found is not None and found.step == step


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(1, 60))
def test_the_tail_is_the_end(parts: list[bytes], most: int) -> None:
    tail = OutputTail(most)
    for part in parts:
        tail.add(part)
    assert tail.text() == b"".join(parts)[-most:].decode(errors="replace")


def test_errors_that_come_with_the_last_of_the_output_are_its_end() -> None:
    now = [0.0]
    tail = OutputTail(clock=lambda: now[0])
    tail.add(b"a warning\n", 2)
    now[0] = 9.0
    tail.add(b"line 1\n")
    now[0] = 10.0
    tail.add(b"no data\n", 2)  # its thread was quicker
    now[0] = 10.1
    tail.add(b"line 2\n")
    assert tail.text() == "a warning\nline 1\nline 2\nno data\n"
    now[0] = 11.0
    tail.add(b"line 3\n")
    assert tail.text() == "a warning\nline 1\nno data\nline 2\nline 3\n"


@given(st.lists(st.sampled_from([b"ab", b"c\n", b"\r", b"\n", b"d"]), max_size=30))
def test_lines_do_not_depend_on_how_they_come(parts: list[bytes]) -> None:
    heard: list[str] = []
    lines = LineSplitter(heard.append)
    for part in parts:
        lines.add(part)
    lines.end()
    whole = b"".join(parts).decode().replace("\r", "\n").split("\n")
    assert [line for line in heard if line] == [line for line in whole if line]
