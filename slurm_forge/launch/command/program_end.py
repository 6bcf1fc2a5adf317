"""What it means that a program has ended, by the little that it says.  Pure."""

from __future__ import annotations

from enum import Enum

from slurm_forge.spec.launchers import ProgramSpec


class ProgramEnd(str, Enum):
    """How a start of the program has come out."""

    #: It is through: the run is done.
    FINISHED = "finished"
    #: It was told to stop, and has.
    STOPPED = "stopped"
    #: It asks to be started again.
    ASKED = "asked"
    FAILED = "failed"


def program_end(
    program: ProgramSpec, status: int | None, *, stop_noticed: bool, said_done: bool
) -> ProgramEnd:
    """``status`` as a shell tells it, None where it had to be ended.

    ``stop_noticed``: somebody wanted it to stop.  ``said_done``: its done file is there or its done
    pattern was printed, which is believed whatever the status.
    """
    if said_done:
        return ProgramEnd.FINISHED
    if status is not None and status == program.done_exit_code:
        return ProgramEnd.FINISHED
    if status is not None and status == program.requeue_exit_code:
        return ProgramEnd.STOPPED if stop_noticed else ProgramEnd.ASKED
    if stop_noticed or status is None:
        # It may have saved and exited 0, or its launcher exits 1: torchrun does once it was told.
        return ProgramEnd.STOPPED
    return ProgramEnd.FAILED if status else ProgramEnd.FINISHED


def status_of(returncode: int) -> int:
    """As shells tell it: 128 and the number of the signal that ended it."""
    return 128 - returncode if returncode < 0 else returncode
