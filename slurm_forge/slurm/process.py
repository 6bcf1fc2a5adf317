"""Runs one command for at most a given time and never leaves anything of it behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

#: How long the pipes of a killed command may take to drain, in seconds.
_DRAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Completed:
    """What became of a command.  ``returncode`` is ``None`` if it ran out of time and was killed.

    Bytes that are not UTF-8 are shown as ``\\xNN``, so that a message can always be printed.
    """

    argv: tuple[str, ...]
    returncode: int | None
    stdout: str
    stderr: str


class Runner(Protocol):
    """How a command is run: ``run_command``, or what a test puts in its place.

    Raises ``OSError`` if the program can't be started.
    """

    def __call__(
        self, argv: Sequence[str], timeout: timedelta, environment: Mapping[str, str]
    ) -> Completed:
        """Run ``argv`` with exactly ``environment`` and return within about ``timeout``."""
        ...


def run_command(
    argv: Sequence[str], timeout: timedelta, environment: Mapping[str, str]
) -> Completed:
    """Run ``argv`` without a shell and with exactly ``environment``.

    Slurm's clients may retry for ever, so at ``timeout`` the command is killed with SIGKILL,
    together with everything it started.  Raises ``OSError`` if it can't be started.
    """
    with subprocess.Popen(
        list(argv),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A group of its own: the kill reaches its children, our terminal's Ctrl-C does not.
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout.total_seconds())
            returncode: int | None = process.returncode
        except subprocess.TimeoutExpired:
            _kill_group(process)
            out, err = _drain(process)
            returncode = None
        except BaseException:
            _kill_group(process)
            raise
    return Completed(tuple(argv), returncode, _text(out), _text(err))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # It is still our unreaped child here, so the number can't belong to anybody else yet.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _drain(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    try:
        return process.communicate(timeout=_DRAIN_S)
    except subprocess.TimeoutExpired as late:
        # Something left the group and holds the pipes open: what has come must do.
        return late.output or b"", late.stderr or b""


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
