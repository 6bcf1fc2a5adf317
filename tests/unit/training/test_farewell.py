"""A rank without a channel leaves its words in a file; one that crashes, its stack."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import RankFailed
from slurm_forge.errors import UnsupportedError
from slurm_forge.knobs import Knobs
from slurm_forge.recovery.incident.crash_dumps import find_dump
from slurm_forge.recovery.incident.launch_facts import is_usage_error
from slurm_forge.run_directory import RunDirectory, claim_attempt
from slurm_forge.run_directory.last_words import read_last_words
from slurm_forge.spec.run_file import RunFile
from slurm_forge.training.core.rank_info import RankPlace
from slurm_forge.training.rank.error_file import (
    last_words_of,
    leave_behind,
)
from slurm_forge.training.rank.in_process_relaunch import Channel
from slurm_forge.training.rank.rank import Rank
from tests.channel_ends import CREDENTIALS, welcomed
from tests.warm import WarmParent


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A claimed run whose run.yaml can't be read."""
    run = RunDirectory.at(tmp_path / "run")
    run.create(b"job: [damaged\n")
    claim_attempt(run, job="1", restart_count=0, host="n1", pid=1, nodes=(), time=0.0)
    return run


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmParent]:
    """Ranks that don't import torch anew."""
    with WarmParent("slurm_forge.training.rank.main") as parent:
        yield parent


Worker = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start_worker(warm: WarmParent, tmp_path: Path) -> Worker:
    def start(run: RunDirectory, code: str = "", **knobs: int) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(
            f"import ctypes, slurm_forge.training.rank.main as w\n{code}\n"
            f"w.main([{str(run.path)!r}])\n"
        )
        given = Knobs(channel="127.0.0.1:1", **asdict(CREDENTIALS), **knobs).to_environ()
        environment = {**os.environ, **given, "RANK": "3", "WORLD_SIZE": "4"}
        environment.pop("PYTHONFAULTHANDLER", None)
        process = warm.start(str(program), (), cwd=tmp_path, env=environment, text=True)
        out, err = process.communicate()
        return subprocess.CompletedProcess((), process.wait(), out, err)

    return start


def test_a_rank_that_fails_before_it_has_a_channel_leaves_a_file(
    run: RunDirectory, start_worker: Worker
) -> None:
    done = start_worker(run, attempt=1, launch=2)
    assert done.returncode == 1
    assert "run.yaml" in done.stderr
    (words,) = read_last_words(run, 1, 2)
    assert (words.rank, words.phase, words.step) == (3, "start", 0)
    assert words.host == socket.gethostname()
    assert words.text.startswith("ConfigError: ")
    assert words.cause == "app_error"


def test_without_an_attempt_in_the_environment_it_is_the_newest(
    run: RunDirectory, start_worker: Worker
) -> None:
    claim_attempt(run, job="1", restart_count=1, host="n1", pid=1, nodes=(), time=0.0)
    assert start_worker(run).returncode == 1
    assert [words.rank for words in read_last_words(run, 2, 1)] == [3]


def test_any_exception_is_printed_and_left_behind(run: RunDirectory, start_worker: Worker) -> None:
    code = "def no(file): raise OSError(116, 'Stale file handle', str(file))\nw.read_run_file = no"
    done = start_worker(run, code, attempt=1, launch=1)
    assert done.returncode == 1
    assert "OSError: [Errno 116] Stale file handle" in done.stderr
    (words,) = read_last_words(run, 1, 1)
    assert words.cause == "storage"
    assert "Traceback" in words.trace


def test_a_crash_leaves_the_stack_in_the_output(run: RunDirectory, start_worker: Worker) -> None:
    done = start_worker(run, "w.read_run_file = lambda file: ctypes.string_at(0)", attempt=1)
    assert done.returncode == -11
    dump = find_dump(done.stderr)
    assert dump is not None
    assert dump.signal == "SIGSEGV"
    assert dump.innermost.endswith(" in string_at")
    # All threads: the one that hears signals as well.
    assert "signals.py" in done.stderr


def test_the_fault_handler_leaves_notices_alone(run: RunDirectory, start_worker: Worker) -> None:
    code = (
        "import os, signal, threading\n"
        "heard = threading.Event()\n"
        "w.Notices.add = lambda self, number: (print(number.name, flush=True), heard.set())\n"
        "def no(file):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    heard.wait(30)\n"
        "    raise OSError(5, 'Input/output error')\n"
        "w.read_run_file = no"
    )
    done = start_worker(run, code, attempt=1, launch=1)
    assert done.stdout == "SIGTERM\n"
    assert done.returncode == 1
    assert "Fatal Python error" not in done.stderr


@contextlib.contextmanager
def hub_that_welcomes_and_dies() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.closing(welcomed(server)) as connection:
                linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def rank_of(run: RunDirectory, channel: Channel) -> Rank:
    place = RankPlace(rank=2, local_rank=0, world_size=4, job="1", restart_count=0)
    file: RunFile = None  # type: ignore[assignment]
    return Rank(run, place, file, channel, CREDENTIALS.nonce, 0.0)


def channel_at(port: int, gone: threading.Event) -> Channel:
    return Channel(
        rank=2,
        world_size=4,
        credentials=CREDENTIALS,
        hosts=("127.0.0.1",),
        port=port,
        host="n2",
        pid=1,
        on_abort=lambda reason: gone.set(),
    )


def test_words_for_a_hub_that_is_gone_are_left_in_a_file(run: RunDirectory) -> None:
    gone = threading.Event()
    with hub_that_welcomes_and_dies() as port:
        channel = channel_at(port, gone)
        assert gone.wait(30)
    rank_of(run, channel)._last_words(OSError(errno.ENOSPC, "No space left on device"))
    channel.close()
    (words,) = read_last_words(run, 1, 1)
    assert (words.rank, words.cause) == (2, "storage")


def test_words_that_were_said_are_not_written_as_well(run: RunDirectory) -> None:
    gone, said = threading.Event(), list[Message]()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.closing(welcomed(server)) as connection, contextlib.suppress(EOFError):
                while True:
                    lines = map(connection.verify, connection.receive())
                    said.extend(map(protocol.decode, lines))

        thread = threading.Thread(target=serve)
        thread.start()
        channel = channel_at(server.getsockname()[1], gone)
        rank_of(run, channel)._last_words(OSError(errno.ENOSPC, "No space left on device"))
        channel.close()
        thread.join()
    (failed,) = [message for message in said if isinstance(message, RankFailed)]
    assert failed.cause == "storage"
    assert read_last_words(run, 1, 1) == ()


def test_leaving_words_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    words = last_words_of(ValueError("x"), step=0, phase="start", micro_batch=0)
    leave_behind(RunDirectory.at(tmp_path / "nowhere"), words, rank=0, host="n1")
    leave_behind(RunDirectory.at("/proc/nowhere"), words, rank=0, host="n1", attempt=1, launch=1)
    assert list(tmp_path.iterdir()) == []
    assert raised == []


def test_the_next_step_of_an_error_is_apart_from_what_it_says() -> None:
    error = UnsupportedError("run.steps() inside run.steps()", next_step="Use one loop.")
    words = last_words_of(error, step=0, phase="start", micro_batch=0)
    assert words.text == ("UnsupportedError: run.steps() inside run.steps(); next: Use one loop.")
    assert is_usage_error(words.error)
