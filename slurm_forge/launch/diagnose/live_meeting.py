"""The folder in which login node and job meet: its files, and what both sides try with them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.files import exists_on_server, read_json, read_trusted, write_atomic
from slurm_forge.lock import exclusive
from slurm_forge.recovery.live_observations import Meeting

#: What the login node lays out: the nonce, a name that is taken, and a lock that it holds.
CARD, ONCE, LOGIN_LOCK = "card", "once", "login.lock"
#: What it leaves for the job: it is cancelled next, and must not come back.
OVER = "over"
#: What the job leaves: that it is there, or there again, its report, and a name and a lock, too.
HERE, AGAIN, REPORT, NODE_ONCE, NODE_LOCK = "here", "again", "report", "node-once", "node.lock"

_EVERY_S = 0.05
_QUESTIONS = 4
#: How long an answer is waited for: attributes of files are cached for up to a minute on NFS.
_ANSWER_S = 45.0
_LIMIT = 4096


def is_over(folder: Path) -> bool:
    """Whether the login node wants no more of this: it says so, and removes the folder."""
    return exists_on_server(folder / OVER) or not folder.is_dir()


def read_card(folder: Path) -> str:
    """The nonce of this look: in a folder that is the user's alone, never on a command line."""
    return read_trusted(folder / CARD, 256).decode()


def is_taken(path: Path) -> bool | None:
    """Whether a name that the other side has can't be created once more; None: can't be tried."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        return True
    except OSError:
        return None
    return False


def is_locked(path: Path) -> bool | None:
    """Whether a lock that the other side holds is refused here; None where there are no locks."""
    try:
        with exclusive(path, timedelta(0)) as locked:
            return False if locked else None
    except ForgeError:
        return True


def answer(folder: Path) -> None:
    """In the job: answer the login node's files with this node's clock, until it is over."""
    number = 1
    while not is_over(folder):
        with contextlib.suppress(OSError, ForgeError):
            if exists_on_server(folder / f"ask-{number}"):
                words = json.dumps({"at": time.time()}).encode()
                write_atomic(folder / f"answer-{number}", words, durable=False)
                number += 1
                continue
        time.sleep(_EVERY_S)


def meet(
    folder: Path,
    goes_on: Callable[[], bool],
    *,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Meeting:
    """Ask the job a few times: clocks, and how long files take to be seen, there and back.

    Gives up on an answer that does not come, and as soon as nothing ``goes_on``.
    """
    meeting = Meeting()
    for number in range(1, _QUESTIONS + 1):
        started_at = wall()
        write_atomic(folder / f"ask-{number}", b"?", durable=False)
        at = None
        while at is None and wall() < started_at + _ANSWER_S and goes_on():
            sleep(_EVERY_S)
            with contextlib.suppress(OSError, ForgeError, KeyError, TypeError, ValueError):
                if exists_on_server(folder / f"answer-{number}"):
                    at = float(read_json(folder / f"answer-{number}", _LIMIT)["at"])
        if at is None:
            break
        took = wall() - started_at
        meeting = replace(meeting, seen_after_s=max(took, meeting.seen_after_s or 0.0))
        if meeting.clock_give_s is None or took / 2 < meeting.clock_give_s:
            ahead = at - (started_at + took / 2)
            meeting = replace(meeting, clock_ahead_s=ahead, clock_give_s=took / 2)
    return meeting
