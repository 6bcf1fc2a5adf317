"""A rank's last words: made from its exception, and written to a file if there is no channel."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback

from slurm_forge.control.messages.rank import RankFailed
from slurm_forge.errors import ForgeError
from slurm_forge.knobs import Knobs
from slurm_forge.run_directory import RunDirectory, list_claims
from slurm_forge.run_directory.last_words import LastWords, write_last_words
from slurm_forge.training.core.error_report import (
    cause_of,
    last_words,
)

_LONGEST_TEXT = 2000
#: How long a failing rank waits for the storage, which may itself be the failure.
_PATIENCE_S = 2.0


def last_words_of(error: BaseException, *, step: int, phase: str, micro_batch: int) -> RankFailed:
    """A rank's report on the exception that ends it."""
    text = last_words(error)
    return RankFailed(
        step=step,
        phase=phase,
        error=f"{type(error).__module__}.{type(error).__qualname__}",
        text=text[:_LONGEST_TEXT],
        trace="".join(traceback.format_exception(error)),
        cause=cause_of(error).value,
        micro_batch=micro_batch,
    )


def leave_behind(
    run: RunDirectory, words: RankFailed, *, rank: int, host: str, attempt: int = 0, launch: int = 0
) -> None:
    """Write them into the run directory; gives up after two seconds and raises nothing.

    Unknown attempt and launch are taken from the environment, else from the newest claim.
    """
    arguments = (run, words, (rank, host), attempt, launch)
    writing = threading.Thread(target=_write, args=arguments, name="forge-words", daemon=True)
    writing.start()
    writing.join(_PATIENCE_S)


def _write(
    run: RunDirectory, words: RankFailed, who: tuple[int, str], attempt: int, launch: int
) -> None:
    rank, host = who
    with contextlib.suppress(OSError, ForgeError, ValueError):
        if not attempt:
            knobs = Knobs.from_environ(os.environ)
            attempt, launch = knobs.attempt, knobs.launch
        if not attempt:
            attempt = max(list_claims(run), default=0)
        if not attempt:
            return
        last_words = LastWords(
            rank=rank,
            host=host,
            time=time.time(),
            step=words.step,
            phase=words.phase,
            error=words.error,
            text=words.text,
            trace=words.trace,
            cause=words.cause,
            micro_batch=words.micro_batch,
        )
        write_last_words(run, attempt, max(launch, 1), last_words)
