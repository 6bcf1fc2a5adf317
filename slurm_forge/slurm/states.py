"""The states of a Slurm job, with Slurm's own words, and the sets that callers ask about."""

from __future__ import annotations

import re
from enum import Enum


class JobState(str, Enum):
    """One word of ``scontrol show job``, squeue or sacct (job_state_string in Slurm's sources).

    Slurm keeps a base state and flags and prints one word: while the flag COMPLETING is set, the
    base can't be seen (a requeued job that is still cleaning up reads COMPLETING, not PENDING).
    """

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    EXPEDITING = "EXPEDITING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    #: Slurm's own "?", and any word that a newer Slurm may bring: never an error by itself.
    UNKNOWN = "?"


#: Holds resources now.
ACTIVE = frozenset(
    {
        JobState.RUNNING,
        JobState.SUSPENDED,
        JobState.COMPLETING,
        JobState.CONFIGURING,
        JobState.RESIZING,
        JobState.SIGNALING,
        JobState.STAGE_OUT,
        JobState.STOPPED,
    }
)

#: Waits, and starts only when somebody releases it.
HELD = frozenset({JobState.REQUEUE_HOLD, JobState.RESV_DEL_HOLD, JobState.SPECIAL_EXIT})

#: Is in the queue and holds no resources (a held one too).
PENDING_LIKE = HELD | {
    JobState.PENDING,
    JobState.EXPEDITING,
    JobState.REQUEUED,
    JobState.REQUEUE_FED,
}

#: Over.  Slurm may still start it again: a requeue by anybody moves it back to PENDING.
TERMINAL = frozenset(
    {
        JobState.BOOT_FAIL,
        JobState.CANCELLED,
        JobState.COMPLETED,
        JobState.DEADLINE,
        JobState.FAILED,
        JobState.NODE_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.PREEMPTED,
        JobState.REVOKED,
        JobState.TIMEOUT,
    }
)

_BY_WORD = {state.value: state for state in JobState}
_CANCELLED_BY = re.compile(r"CANCELLED by ([0-9]{1,10})")


def parse_state(text: str) -> JobState:
    """State that ``text`` names; of ``CANCELLED by 1000`` and ``CANCELLED+`` the first word."""
    words = text.split(maxsplit=1)
    return _BY_WORD.get(words[0].rstrip("+"), JobState.UNKNOWN) if words else JobState.UNKNOWN


def cancelled_by(text: str) -> int | None:
    """User id in sacct's ``CANCELLED by 1000``, else ``None``."""
    match = _CANCELLED_BY.fullmatch(text.strip())
    return None if match is None else int(match[1])
