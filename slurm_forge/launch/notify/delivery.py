"""Sends messages, each target in a process of its own: one that hangs or fails holds up nothing."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from slurm_forge.json_codec import dumps
from slurm_forge.launch.notify.apprise_message import OutgoingMessage
from slurm_forge.process import process_words

#: What is made of a target's answer: why it failed, or empty.
Errors = dict[str, str]
_LOOK_EVERY_S = 0.05
_CUT_OFF = "no answer within {:.0f} s"
#: Below any task of the job, and below the users of a login node.
_NICE = 10


def deliver(messages: Mapping[str, OutgoingMessage], within: Callable[[], float]) -> Errors:
    """Send each target its message, all at once; the reason of each failure, empty on success.

    Args:
        messages: By the name of the target.
        within: The seconds that there are from now on; asked again and again, since they may become
            fewer.

    Returns:
        The reasons, with nothing of a target's URL.
    """
    began = time.monotonic()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    errors: Errors = {}
    try:
        for name, message in messages.items():
            processes[name] = _start(name, message)
        while waiting := [name for name in processes if name not in errors]:
            out_of_time = within() <= 0
            for name in waiting:
                process = processes[name]
                if process.poll() is not None:
                    errors[name] = _answer(process)
                elif out_of_time:
                    errors[name] = _CUT_OFF.format(time.monotonic() - began)
            if not out_of_time:
                time.sleep(_LOOK_EVERY_S)
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return errors


def _start(name: str, message: OutgoingMessage) -> subprocess.Popen[bytes]:
    words = [sys.executable, *process_words("send_message", name)]
    process = subprocess.Popen(
        ["nice", "-n", str(_NICE), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    if process.stdin is not None:
        # Less than a pipe holds, so that it is not waited for.
        with contextlib.suppress(OSError), process.stdin as pipe:
            pipe.write(dumps(asdict(message)))
    return process


def _answer(process: subprocess.Popen[bytes]) -> str:
    answer = b"" if process.stdout is None else process.stdout.read()
    if process.returncode:
        return f"its process ended with {process.returncode}"
    return answer.decode(errors="replace")
