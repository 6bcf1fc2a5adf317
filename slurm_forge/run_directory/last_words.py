"""Last words of ranks that could not say them over the control channel: one small file each.

Written by the rank that failed, read by whoever decides about the launch afterwards.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass

from slurm_forge.errors import ForgeError
from slurm_forge.files import FOLDERS_OWNER, private_directory, read_json, write_atomic
from slurm_forge.json_codec import from_json
from slurm_forge.run_directory.layout import RunDirectory

#: With this, attempt and launch a rank begins its output: what stands before it was another's.
LAUNCH_BEGINS = "slurm_forge: launch "

_LIMIT = 1 << 17
_TEXT = 2000
_TRACE = 12_000
#: More than that nobody reads, and a launch that large has other worries.
_MOST = 1024
_NAME = re.compile(r"last-words-l(?P<launch>[0-9]{1,9})-r(?P<rank>[0-9]{1,9})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What a rank would have said over the channel, and when (seconds since the epoch).

    ``cause`` is a word of ``Cause``, or of a later version; ``step`` is the last one done, or 0
    before the first; ``micro_batch`` is 0 where it was not known yet.
    """

    rank: int
    host: str
    time: float
    step: int
    phase: str
    error: str
    text: str
    trace: str
    cause: str
    micro_batch: int


def write_last_words(run: RunDirectory, attempt: int, launch: int, words: LastWords) -> None:
    """Write the file; ``OSError`` or ``ForgeError`` where that can't be done."""
    body = asdict(words)
    for key, most in (("text", _TEXT), ("trace", _TRACE), ("error", _TEXT), ("host", _TEXT)):
        body[key] = body[key][-most:]
    path = run.last_words(attempt, launch, words.rank)
    private_directory(path.parent)
    write_atomic(path, json.dumps(body, sort_keys=True).encode())


def read_last_words(run: RunDirectory, attempt: int, launch: int) -> tuple[LastWords, ...]:
    """All words left behind in a launch, those that were written first first.

    Never raises: a file that is damaged or not to be trusted says nothing.
    """
    words: list[LastWords] = []
    with contextlib.suppress(OSError):
        names = (_NAME.fullmatch(entry.name) for entry in run.attempt(attempt).iterdir())
        ranks = {int(name["rank"]) for name in names if name and int(name["launch"]) == launch}
        for rank in sorted(ranks)[:_MOST]:
            with contextlib.suppress(OSError, ForgeError, ValueError):
                words.append(_read(run, attempt, launch, rank))
    return tuple(sorted(words, key=lambda each: (each.time, each.rank)))


def _read(run: RunDirectory, attempt: int, launch: int, rank: int) -> LastWords:
    words = from_json(
        LastWords, read_json(run.last_words(attempt, launch, rank), _LIMIT, owner=FOLDERS_OWNER)
    )
    if words.rank != rank or words.step < 0 or words.micro_batch < 0:
        raise ValueError("numbers out of range")
    return words
