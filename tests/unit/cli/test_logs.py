"""``logs``: which files, in which order, which errors first, and strange files."""

from __future__ import annotations

import gzip
import io
import os
import resource
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from slurm_forge.cli.observe import logs as verb
from slurm_forge.cli.observe.log_printing import Printer
from slurm_forge.report.logs.lines import AttemptSpan, Line, Source
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.cli.conftest import Shell
from tests.unit.report.journals import TUESDAY, Scribe

OOM = """\
Traceback (most recent call last):
  File "train.py", line 12, in step
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""
PEER_GONE = """\
Traceback (most recent call last):
  File "train.py", line 12, in step
    loss.backward()
RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:32156
"""


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")


def at(seconds: float) -> str:
    """How a logger writes a moment after the beginning of the journal."""
    moment = datetime.fromtimestamp(TUESDAY + seconds, timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}"


def write(scribe: Scribe, name: str, text: str, *, written: float = 100.0) -> Path:
    path = scribe.run.submissions / name
    path.write_text(text)
    os.utime(path, (TUESDAY + written, TUESDAY + written))
    return path


def failed(scribe: Scribe, rank: int = 1) -> None:
    """One attempt with two ranks, of which ``rank`` ran out of memory."""
    scribe.begin(job="local-77")
    scribe.incident(Cause.CUDA_OOM, Action.HOLD, step=5, rank=rank)
    scribe.end("held")


def test_the_ranks_of_a_run_are_one_stream_by_time(shell: Shell, scribe: Scribe) -> None:
    scribe.begin(job="local-77")
    write(scribe, "77_0_log.err", f"{at(1)} INFO a\n  more of a\n{at(5)} INFO c\n")
    write(scribe, "77_1_log.err", f"[{at(3)}] INFO b\n")
    write(scribe, "78_0_log.err", f"{at(2)} of another job\n")
    result = shell("logs", "tiny-gpt")
    assert result.stdout.splitlines() == [
        "-- attempt 1, launch 1, job local-77",
        f"0 | {at(1)} INFO a",
        "0 |   more of a",
        f"1 | [{at(3)}] INFO b",
        f"0 | {at(5)} INFO c",
    ]
    assert result.stderr == ""


def test_files_without_times_are_told(shell: Shell, scribe: Scribe) -> None:
    scribe.begin(job="local-77")
    write(scribe, "77_0_log.err", f"{at(1)} INFO a\n{at(9)} INFO b\n")
    write(scribe, "77_1_log.out", "step 1\n", written=5)
    tail = shell("logs", "tiny-gpt")
    assert [line[0] for line in tail.stdout.splitlines()[1:]] == ["0", "1", "0"]
    assert "no times in runs/tiny-gpt/submissions/77_1_log.out" in tail.stderr
    whole = shell("logs", "tiny-gpt", "--tail", "all")
    assert [line[0] for line in whole.stdout.splitlines()[1:]] == ["1", "0", "0"]
    assert "put where the launch begins" in whole.stderr


def test_attempts_and_launches_in_one_file(shell: Shell, scribe: Scribe) -> None:
    scribe.begin()
    scribe.later(50).begin()
    scribe.relaunch()
    write(
        scribe,
        "tiny-gpt-8812301.out",
        "slurm_forge: launch 1.1\nfirst\nslurm_forge: launch 2.1\nsecond\n"
        "slurm_forge: launch 2.2\n[rank1]: third\n[rank0]: fourth\n",
    )
    assert shell("logs", "tiny-gpt").stdout.splitlines() == [
        "-- attempt 2, launch 1, job 8812301",
        "second",
        "-- attempt 2, launch 2, job 8812301",
        "[rank1]: third",
        "[rank0]: fourth",
    ]
    first = shell("logs", "tiny-gpt", "--attempt", "1")
    assert first.stdout.splitlines()[1:] == ["first"]
    rank = shell("logs", "8812301", "--rank", "1")
    assert rank.stdout.splitlines()[1:] == ["[rank1]: third"]
    nobody = shell("logs", "tiny-gpt", "--attempt", "1", "--rank", "1")
    assert nobody.exit_code == 2
    assert "shows that rank 1 printed it\n  All ranks write to this file." in nobody.stderr


def test_attempts_of_a_program_of_its_own_are_told_by_times(shell: Shell, scribe: Scribe) -> None:
    scribe.begin(via="exec")
    scribe.later(50).begin(via="exec")
    write(scribe, "slurm-8812301.out", f"{at(1)} a\n{at(60)} b\nno time\n")
    assert shell("logs", "tiny-gpt").stdout.splitlines()[1:] == [f"{at(60)} b", "no time"]


def test_the_task_of_a_sweep_has_a_file_with_its_own_id(shell: Shell, scribe: Scribe) -> None:
    scribe.begin(job="901_3")
    write(scribe, "sweep-904.out", "of the task\n")
    assert shell("logs", "tiny-gpt").stdout.splitlines()[1:] == ["of the task"]
    assert "output: runs/tiny-gpt/submissions/sweep-904.out" in shell("explain", "tiny-gpt").stdout


def test_the_error_that_began_it_comes_first(shell: Shell, scribe: Scribe) -> None:
    failed(scribe)
    # By the clocks rank 0 failed first: it only lost the other one.
    write(scribe, "77_0_log.err", f"{at(1)} INFO a\n{PEER_GONE}")
    write(scribe, "77_1_log.err", f"{at(2)} INFO b\n{OOM}{at(3)} INFO going\n")
    lines = shell("logs", "tiny-gpt", "--errors").stdout.splitlines()
    assert lines[0].startswith("launch 1.1: cuda_oom on rank 1")
    heads = [line for line in lines if line.startswith("rank ")]
    assert [head.split()[1] for head in heads] == ["1", "0"]
    assert "only lost another rank" in heads[1]
    assert "1 | " + OOM.splitlines()[-1] in lines
    assert not any("INFO" in line for line in lines)


def test_the_same_error_of_many_ranks_is_shown_once(shell: Shell, scribe: Scribe) -> None:
    failed(scribe, rank=2)
    for rank in range(4):
        write(scribe, f"77_{rank}_log.err", f"{at(4 - rank)} INFO a\n{OOM}")
    out = shell("logs", "tiny-gpt", "--errors").stdout
    assert out.count("Traceback") == 1
    assert "\nranks 2, 3, 1, 0  " in out


def test_without_an_error_the_last_lines_are_shown(shell: Shell, scribe: Scribe) -> None:
    scribe.begin()
    write(scribe, "tiny-gpt-8812301.out", "fine\nall is well\n")
    result = shell("logs", "tiny-gpt", "--errors")
    assert "contains no known error" in result.stderr
    assert result.stdout.endswith("fine\nall is well\n")


def test_a_terminal_is_not_controlled_by_what_a_program_prints(
    shell: Shell, scribe: Scribe
) -> None:
    scribe.begin()
    text = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x07bell \u202e\n 5%\r 50%\r100%\n\xff\ttab\n"
    write(scribe, "tiny-gpt-8812301.out", text)
    lines = shell("logs", "tiny-gpt").stdout.splitlines()[1:]
    assert lines == ["red  ?bell ?", "100%", "\xff    tab"]


def test_output_that_was_moved_or_compressed(shell: Shell, scribe: Scribe) -> None:
    scribe.begin()
    name = "tiny-gpt-8812301.out"
    missing = shell("logs", "tiny-gpt")
    assert missing.exit_code == 2
    assert (
        "no output of attempt 1 of tiny-gpt (job 8812301) in runs/tiny-gpt/submissions"
        in missing.stderr
    )
    assert "--from DIR" in missing.stderr
    archive = shell.folder / "archive"
    archive.mkdir()
    (archive / f"{name}.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    for tail in ("1", "all"):
        shown = shell("logs", "tiny-gpt", "--from", "archive", "--tail", tail).stdout
        assert shown.endswith("two\n")
        assert ("one" in shown) == (tail == "all")


def test_a_program_that_was_started_without_slurm(shell: Shell, scribe: Scribe) -> None:
    scribe.begin(job="exec-4711", via="exec")
    result = shell("logs", "tiny-gpt")
    assert result.exit_code == 2
    assert "printed to where it was started, to no file\n  To keep its output" in result.stderr


@pytest.mark.parametrize("colours", [True, False])
def test_ranks_have_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch, colours: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    attempt = AttemptSpan(1, "local-77", 0.0)
    sources = [Source(f"77_{rank}_log.err", (attempt,), rank=rank) for rank in (0, 1)]
    printer = Printer(sources)
    printer.lines(Line(f"[bold]{each.rank}", each, 1, None, each.rank, 0.0) for each in sources)
    *_, first, second = terminal.getvalue().splitlines()
    if colours:
        assert first == "\x1b[36m0 | \x1b[0m[bold]0"
        assert second == "\x1b[33m1 | \x1b[0m[bold]1"
    else:
        assert (first, second) == ("0 | [bold]0", "1 | [bold]1")


def test_an_attempt_that_printed_nothing(shell: Shell, scribe: Scribe) -> None:
    scribe.begin()
    write(scribe, "tiny-gpt-8812301.out", "")
    for words in ((), ("--tail", "all")):
        result = shell("logs", "tiny-gpt", *words)
        assert (result.exit_code, result.stdout) == (0, "")
        assert "attempt 1 printed nothing to runs/tiny-gpt/submissions/tiny" in result.stderr
    assert "output:" not in shell("explain", "tiny-gpt").stdout


def test_where_the_script_sends_the_output(shell: Shell, scribe: Scribe) -> None:
    scribe.begin()
    target = shell.folder / "elsewhere"
    target.mkdir()
    script = f"#!/bin/bash\n#SBATCH --output={target}/%x.%j.%N.txt\n"
    (scribe.run.submissions / "job.sbatch").write_text(script)
    (target / "tiny-gpt.8812301.n01.txt").write_text("found\n")
    assert shell("logs", "tiny-gpt").stdout.splitlines()[1:] == ["found"]


def test_a_job_that_never_began_an_attempt(shell: Shell, scribe: Scribe) -> None:
    scribe.submitted("55")
    write(scribe, "tiny-gpt-55.out", "python: command not found\n")
    assert shell("logs", "tiny-gpt").stdout.endswith("python: command not found\n")


def test_a_run_that_was_not_started_and_a_rank_that_is_not_there(
    shell: Shell, scribe: Scribe
) -> None:
    assert "has not been started yet" in shell("logs", "tiny-gpt").stderr
    scribe.begin(job="local-77")
    write(scribe, "77_0_log.err", "a\n")
    assert "output of these ranks: 0." in shell("logs", "tiny-gpt", "--rank", "3").stderr
    assert "Its attempts: 1." in shell("logs", "tiny-gpt", "--attempt", "9").stderr


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(shell: Shell, scribe: Scribe) -> None:
    scribe.begin(job="local-77")
    write(scribe, "77_0_log.err", "a\n")
    path = write(scribe, "77_1_log.err", "b\n")
    # ``written_logs`` takes files that hold something: a link to a pipe has the size of its name.
    path.unlink()
    os.mkfifo(scribe.run.path / "pipe")
    path.symlink_to(scribe.run.path / "pipe")
    result = shell("logs", "tiny-gpt")
    assert "0 | a" in result.stdout or "\na\n" in result.stdout


@pytest.mark.parametrize("words", [(), ("--errors",), ("--tail", "5000")])
def test_a_file_of_gigabytes_is_not_read_whole(
    shell: Shell, scribe: Scribe, words: tuple[str, ...]
) -> None:
    scribe.begin()
    path = scribe.run.submissions / "tiny-gpt-8812301.out"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # a hole
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"a line of output\n" * 1_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = shell("logs", "tiny-gpt", *words)
    assert result.stdout.endswith("a line of output\n")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 250 << 10  # KiB


def test_following_prints_what_comes_until_the_run_is_over(
    shell: Shell, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    scribe.begin(job="local-77")
    path = write(scribe, "77_0_log.err", f"{at(1)} old\n")

    def first() -> None:
        with path.open("a") as file:
            file.write(f"{at(2)} new\nhalf ")

    def second() -> None:
        with path.open("a") as file:
            file.write("a line\n")
        write(scribe, "77_1_log.err", "another rank\n")
        scribe.later(10).finish(400)
        scribe.run.mark_done(400, 1)

    steps = iter((first, second))
    monkeypatch.setattr(verb, "_rest", lambda seconds: next(steps)())
    result = shell("logs", "tiny-gpt", "--follow")
    shown = [line.split("| ")[-1] for line in result.stdout.splitlines()[1:]]
    assert sorted(shown) == sorted([f"{at(1)} old", f"{at(2)} new", "half a line", "another rank"])
    assert shown.index(f"{at(1)} old") < shown.index(f"{at(2)} new") < shown.index("half a line")


def test_options_that_make_no_sense(shell: Shell, scribe: Scribe) -> None:
    assert "do not go together" in shell("logs", "tiny-gpt", "--errors", "--follow").stderr
    assert "a number of lines" in shell("logs", "tiny-gpt", "--tail", "-3").stderr


@pytest.mark.parametrize("words", [(), ("--tail", "all"), ("--errors",)])
@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_archive_ends_where_it_is_damaged(
    shell: Shell, scribe: Scribe, words: tuple[str, ...], damage: str
) -> None:
    scribe.begin(job="local-77")
    content = gzip.compress("".join(f"{at(1)} {line:x}\n" for line in range(20_000)).encode())
    # A second part that begins as one does, and goes on with what nothing is compressed to.
    cut = content[:-500] if damage == "truncated" else content + content[:10] + b"\xff" * 64
    (scribe.run.submissions / "77_0_log.err.gz").write_bytes(cut)
    write(scribe, "77_1_log.err", f"{at(2)} of another rank\n")
    result = shell("logs", "tiny-gpt", *words)
    assert result.exit_code == 0
    if not words or words[0] == "--tail":
        assert f"0 | {at(1)} 4" in result.stdout
        assert f"1 | {at(2)} of another rank" in result.stdout
    assert "77_0_log.err.gz is damaged, what follows in it" in result.stderr


@pytest.mark.parametrize("tail", ["1", "200", "all"])
def test_following_reads_a_compressed_file_once(
    shell: Shell, scribe: Scribe, monkeypatch: pytest.MonkeyPatch, tail: str
) -> None:
    scribe.begin(job="local-77")
    old = "".join(f"{at(1)} old {number}\n" for number in range(20_000))  # smaller once compressed
    (scribe.run.submissions / "77_0_log.err.gz").write_bytes(gzip.compress(old.encode()))
    path = write(scribe, "77_1_log.err", "")

    def ends(seconds: float) -> None:
        path.write_text(f"{at(2)} new\n")
        (scribe.run.submissions / "77_0_log.out.gz").write_bytes(gzip.compress(b"compressed now\n"))
        scribe.later(10).finish(400)
        scribe.run.mark_done(400, 1)

    monkeypatch.setattr(verb, "_rest", ends)
    result = shell("logs", "tiny-gpt", "--follow", "--tail", tail)
    shown = [line.partition("| ")[2] for line in result.stdout.splitlines()[1:]]
    count = 20_000 if tail == "all" else int(tail)
    assert shown == [f"{at(1)} old {n}" for n in range(20_000 - count, 20_000)] + [f"{at(2)} new"]
