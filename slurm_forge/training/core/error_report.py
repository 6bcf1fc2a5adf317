"""What an exception of a rank means, and its report: type and text into values.  No torch."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from slurm_forge.errors import (
    CheckpointError,
    CheckpointMissingError,
    ConfigError,
    ControlChannelError,
    ForgeError,
    HookError,
    MismatchError,
    RanksLostError,
    UnsupportedError,
)
from slurm_forge.recovery.incident.error_patterns import find_cause
from slurm_forge.recovery.incident.output_tail import (
    MISTAKES,
    even_of_a_mistake,
)
from slurm_forge.recovery.policy.remedies import NEXT
from slurm_forge.training.core.oom import (
    LoaderKilledError,
    Memory,
    memory_that_ran_out,
)
from slurm_forge.vocabulary.cause import Cause

_STORAGE_ERRORS = frozenset(
    {
        errno.EIO,
        errno.ENOSPC,
        errno.EROFS,
        errno.ESTALE,
        errno.EDQUOT,
        errno.ESHUTDOWN,  # a Lustre client that was evicted
        errno.EREMOTEIO,
        errno.EUCLEAN,
    }
)
#: Also raised by sockets: a file system's only if a file is named.
_STORAGE_ERRORS_OF_FILES = frozenset({errno.ENOTCONN, errno.ETIMEDOUT})
#: EXIT_CODE_RESUME_TO_DISAMBIGUATE and EXIT_CODE_FAILED_ON_RESULT_VALIDATION of Megatron-LM's rerun
#: state machine (megatron/core/rerun_state_machine.py).
_MEGATRON = {
    16: "a result differed when it was computed again, and another node has to decide",
    17: "a result that was computed again elsewhere did not agree",
}
#: Limit for chains of causes: programs build no longer ones.
_DEEPEST = 16
_LONGEST = 1 << 16


def in_one_line(error: BaseException) -> str:
    """Its message without line breaks."""
    if isinstance(error, SystemExit):
        if _suspects_hardware(error):
            return (
                f"sys.exit({error.code}): Megatron suspects the hardware of this node "
                f"({_MEGATRON[int(str(error.code))]})"
            )
        return (
            f"sys.exit({error.code!r}) in the training function. Return from it when it is through."
        )
    return _joined(str(error))


def last_words(error: BaseException) -> str:
    """Its type and message, where it was raised, and the next step that it names."""
    step = error.next_step if isinstance(error, ForgeError) else ""
    said = str(error).removesuffix(f"\n  {step}") if step else str(error)
    if said == str(error):
        return f"{type(error).__name__}: {in_one_line(error)}{where(error)}"
    return f"{type(error).__name__}: {_joined(said)}{where(error)}{NEXT}{_joined(step)}"


def _joined(text: str) -> str:
    *lines, last = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return " ".join([*(line if line[-1] in ".:,;!?" else f"{line}." for line in lines), last])


def where(error: BaseException) -> str:
    """The last line of the user's own code that the error passed, if there is one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_theirs(frame.filename):
            return f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
    return ""


def _is_theirs(file: str) -> bool:
    """Whether a file is neither ours, nor torch's, nor the standard library's."""
    package = str(Path(__file__).parents[2])
    standard = sysconfig.get_path("stdlib")
    if file.startswith(("<", package)) or f"{os.sep}site-packages{os.sep}torch{os.sep}" in file:
        return False
    return not file.startswith(standard) or f"{os.sep}site-packages{os.sep}" in file


def cause_of(error: BaseException) -> Cause:
    """What an exception of a rank means, as far as types and texts show.

    The outermost conclusive exception counts.  ``NCCL_ERROR`` is also reported by a rank that was
    only hit by the end of another, or waited for it.
    """
    match memory_that_ran_out(error):
        case Memory.DEVICE:
            return Cause.CUDA_OOM
        case Memory.HOST:
            return Cause.HOST_OOM
        case None if isinstance(error, LoaderKilledError):
            return Cause.CRASH
    causes = (_cause_of_one(each) for each in _chain(error))
    return next((cause for cause in causes if cause is not None), Cause.APP_ERROR)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """It, and what it was raised from; also without a ``from`` in its own ``except``.

    Whole programs may run in an ``except``, too (``except ImportError: train_without_it()``): an
    error there has nothing to do with the exception that was caught.
    """
    current: BaseException | None = error
    for _ in range(_DEEPEST):
        if current is None:
            return
        yield current
        inner = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or (inner if _raised_in_handler(current, inner) else None)


def _raised_in_handler(outer: BaseException, inner: BaseException | None) -> bool:
    if inner is None or inner.__traceback__ is None or outer.__traceback__ is None:
        return False
    last = outer.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_frame is inner.__traceback__.tb_frame


def _cause_of_one(error: BaseException) -> Cause | None:
    """What this one means by itself; None if it is inconclusive."""
    by_type = _by_type(error)
    if by_type is not None:
        return by_type
    if isinstance(error, OSError) and (
        error.errno in _STORAGE_ERRORS
        or (error.errno in _STORAGE_ERRORS_OF_FILES and error.filename is not None)
    ):
        return Cause.STORAGE
    if isinstance(error, ImportError):
        return _of_import(error)
    kind = type(error)
    match = find_cause(_error_text(error))
    if match is None:
        return None
    is_mistake = kind.__module__ == "builtins" and isinstance(error, MISTAKES)
    if is_mistake and not even_of_a_mistake(match):
        return None
    if isinstance(error, ConnectionResetError) and _of_a_process(error):
        return Cause.CRASH
    return Cause.NCCL_ERROR if match.follows else match.cause


def _by_type(error: BaseException) -> Cause | None:
    match error:
        case CheckpointMissingError():
            return Cause.CHECKPOINT_BAD
        case MismatchError():
            return Cause.ENV_MISMATCH
        case RanksLostError() | ControlChannelError():
            return Cause.NCCL_ERROR
        case CheckpointError():
            return Cause.STORAGE
        case ConfigError() | HookError() | UnsupportedError():
            return Cause.APP_ERROR
        case SystemExit():
            return Cause.GPU_ERROR if _suspects_hardware(error) else Cause.APP_ERROR
    return None


def _of_a_process(error: BaseException) -> bool:
    """Whether it came from a pipe to one of the program's own processes."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(f"{os.sep}multiprocessing{os.sep}" in frame.filename for frame in frames)


def _suspects_hardware(error: SystemExit) -> bool:
    reserved = type(error.code) is int and error.code in _MEGATRON
    return reserved and "megatron" in sys.modules


def _error_text(error: BaseException) -> str:
    """Type and text as Python prints them; empty for an exception that can't be printed."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    )
    with contextlib.suppress(Exception):
        return f"{name}: {str(error)[-_LONGEST:]}"
    return name


def _of_import(error: ImportError) -> Cause:
    """A missing module is the environment's fault; a misspelled name of the user's is not."""
    text = _error_text(error)
    if "attempted relative import" in text:
        return Cause.APP_ERROR
    if isinstance(error, ModuleNotFoundError):
        return Cause.APP_ERROR if _mistyped(error) else Cause.ENV_MISMATCH
    theirs = error.path is not None and _is_their_own(error.path)
    return Cause.APP_ERROR if theirs and "cannot import name" in text else Cause.ENV_MISMATCH


def _is_their_own(file: str) -> bool:
    return _is_theirs(file) and f"{os.sep}site-packages{os.sep}" not in file


def _lies_here(top: str) -> bool:
    """Whether a module of that name exists in the folder where the job was submitted."""
    with contextlib.suppress(OSError, ValueError):
        folders = (Path.cwd(), Path.cwd() / "src")
        return any(
            (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()
            for folder in folders
        )
    return False


def _mistyped(error: ModuleNotFoundError) -> bool:
    """Whether a module of the user's own was meant: another one of its package is there, or one of
    nearly that name lies beside the file that imports it."""
    top, _, below = (error.name or "").partition(".")
    if not top:
        return False
    if _lies_here(top):
        return True
    package = sys.modules.get(top)
    if below and package is not None:
        places = [getattr(package, "__file__", None), *getattr(package, "__path__", ())]
        return any(isinstance(place, str) and _is_their_own(place) for place in places)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_their_own(frame.filename):
            with contextlib.suppress(OSError):
                beside = {each.stem for each in Path(frame.filename).parent.iterdir()}
                return bool(difflib.get_close_matches(top, beside, n=1, cutoff=0.8))
            return False
    return False
