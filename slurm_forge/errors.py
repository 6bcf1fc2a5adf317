"""Every error that slurm_forge raises on purpose: one tree, each message ends with the next step.

Errors carry their data as attributes, survive pickling (submitit pickles them), and are for the
user to act on.  Mistakes of a programmer stay ``TypeError`` and ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ForgeError(Exception):
    """The base of every error that slurm_forge raises on purpose.

    Args:
        message: What is wrong.
        next_step: A sentence that tells the user what to do now.
    """

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return _visible(f"{self.message}\n  {self.next_step}" if self.next_step else self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments defeat the default reduction; rebuild without calling __init__.
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _visible(text: str) -> str:
    """What somebody has written may hold what a terminal obeys: it is shown, and not sent."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _rebuild(kind: type[ForgeError], args: tuple[Any, ...], state: dict[str, Any]) -> ForgeError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(ForgeError):
    """What the user wrote can't be used: names the file, the line (from 1) and the nearest key."""

    def __init__(
        self,
        message: str,
        *,
        path: Path | str | None = None,
        line: int | None = None,
        next_step: str = "",
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.path = None if path is None else str(path)
        self.line = line

    def __str__(self) -> str:
        where = "" if self.path is None else self.path
        if self.line is not None:
            where += f":{self.line}"
        text = f"{where}: {self.message}" if where else self.message
        return _visible(f"{text}\n  {self.next_step}" if self.next_step else text)


class UsageError(ConfigError):
    """The program calls slurm_forge with values that can't work: no other start changes that."""


class SlurmCommandError(ForgeError):
    """A Slurm command answered, and the answer was no."""

    def __init__(
        self, argv: Sequence[str], returncode: int, stderr: str, *, next_step: str = ""
    ) -> None:
        command = argv[0] if argv else "?"
        text = " ".join(stderr.split())[:500] or "no message"
        super().__init__(
            f"{command} failed with exit status {returncode}: {text}",
            next_step=next_step or f"Run it by hand to see more: {' '.join(argv)}",
        )
        self.argv = tuple(argv)
        self.returncode = returncode
        self.stderr = stderr


class SlurmUnreachableError(SlurmCommandError):
    """A Slurm command did not answer: not installed here, timed out, or no controller."""


class SubmissionError(ForgeError):
    """Nothing was submitted, and why."""


class UnrecordedJobError(ForgeError):
    """Slurm has taken the ``job``, and this could not be written down."""

    def __init__(self, message: str, *, job: str, next_step: str = "") -> None:
        super().__init__(message, next_step=next_step)
        self.job = job


class RunDirectoryError(ForgeError):
    """The run directory is missing, damaged, or belongs to somebody else."""


class FormatError(RunDirectoryError):
    """A later version of slurm_forge wrote it, in a format that this one must not read."""


class SnapshotError(ForgeError):
    """The code of a run could not be copied, or is not there."""


class FencedError(ForgeError):
    """A newer attempt has claimed the run: this one writes nothing any more."""


class AlreadyFinishedError(ForgeError):
    """The run has a DONE marker: there is nothing left to do."""


class UnsafeFileError(ForgeError):
    """A file or folder has an owner or a mode that lets others plant things in it."""


class FileTooLargeError(UnsafeFileError):
    """A file is larger than any of its kind can be."""


class ControlChannelError(ForgeError):
    """The control channel broke, or somebody spoke on it who does not know the nonce."""


class CheckpointError(ForgeError):
    """A checkpoint could not be written or read."""


class StorageFullError(CheckpointError):
    """A checkpoint could not be written: a write found no space or quota left."""


class CheckpointRejectedError(CheckpointError):
    """A checkpoint failed verification; ``reason`` says what was wrong with it."""

    def __init__(self, message: str, *, reason: str = "", next_step: str = "") -> None:
        super().__init__(message, next_step=next_step)
        self.reason = reason or message


class RanksLostError(CheckpointError):
    """A rank went away in the middle of a save or a load: no collective may follow."""


class CheckpointMissingError(CheckpointError):
    """The history says that a checkpoint existed, and none can be used: we do not start over."""


class MismatchError(CheckpointError):
    """What a run is resumed with is not what its checkpoint was written with."""


class UnsupportedError(ForgeError):
    """Asked for something that can't keep its promise here (an iterable without state, …)."""


class RefuseResume(ForgeError):  # noqa: N818  what a program says, as StopIteration is
    """Raise it in an ``on_resume`` hook: the run is held instead of going on from there.

    Args:
        message: Why, in your own words; ``explain`` shows it.
    """


class HookError(ForgeError):
    """A hook of the program raised while all ranks waited for its answer."""
