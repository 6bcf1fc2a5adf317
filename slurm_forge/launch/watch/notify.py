"""Telling a program of the user's what a watcher has found: JSON on its standard input.

The program is started without a shell and has a time of its own.  Whatever it does, the watch goes
on: how it failed is told, what it prints is not kept.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import IO

from slurm_forge.errors import ConfigError

_KEPT = 2000
_CHUNK = 1 << 16
#: How long the pipes of a program that was killed may take to close, in seconds.
_DRAIN_S = 2.0


def hook_words(text: str) -> tuple[str, ...]:
    """The words of ``--hook``, quoted as in a shell; ``ConfigError`` where nothing can be run."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--hook: {error}", next_step="Close the quotes.") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"--hook: there is no program {words[0] if words else ''!r} that can be run",
            next_step="Give its path, and make it executable: chmod +x.",
        )
    return words


def run_hook(
    words: Sequence[str], body: str, timeout: timedelta, environment: Mapping[str, str]
) -> str | None:
    """Run it with ``body`` on its standard input; why it failed, None where it did not.

    At ``timeout`` it is killed with everything that it started in its group.
    """
    try:
        process = subprocess.Popen(
            list(words),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return f"{words[0]} can't be started: {error.strerror or error}"
    if process.stdin is None or process.stderr is None:
        raise AssertionError("both are pipes")
    errors: list[bytes] = []
    threads = (
        threading.Thread(target=_give, args=(process.stdin, body.encode()), daemon=True),
        threading.Thread(target=_keep_the_beginning, args=(process.stderr, errors), daemon=True),
    )
    for thread in threads:
        thread.start()
    late = False
    try:
        process.wait(timeout.total_seconds())
    except subprocess.TimeoutExpired:
        late = True
    finally:
        # What it has left behind in its group must not hold our pipes, nor live on.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for thread in threads:
        thread.join(_DRAIN_S)
    if late:
        return f"{words[0]} was killed after {timeout.total_seconds():g} s"
    if process.returncode == 0:
        return None
    text = b"".join(errors)[:_KEPT].decode(errors="replace")
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())[:200]
    return f"{words[0]} ended with {process.returncode}" + (f": {line}" if line else "")


def _give(pipe: IO[bytes], body: bytes) -> None:
    """A program that reads nothing is no reason to wait."""
    with contextlib.suppress(OSError, ValueError):
        pipe.write(body)
    with contextlib.suppress(OSError, ValueError):
        pipe.close()


def _keep_the_beginning(pipe: IO[bytes], chunks: list[bytes]) -> None:
    """Read on to the end, so that it never blocks, and keep little."""
    size = 0
    with contextlib.suppress(OSError, ValueError):
        while chunk := os.read(pipe.fileno(), _CHUNK):
            if size < _KEPT:
                chunks.append(chunk[: _KEPT - size])
                size += len(chunks[-1])
