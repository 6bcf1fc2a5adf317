"""The name of a checkpoint: which step, which attempt and launch wrote it, and a nonce.

The name alone says how new a checkpoint is.  Modification times and ``latest`` links are never
asked: clocks differ between nodes, copies get new times, and a link can be torn or stale.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

#: A checkpoint that is being written; published by renaming it.
STAGE_PREFIX = ".stage-"
#: A checkpoint that is being deleted; nobody reads it any more.
TRASH_PREFIX = ".trash-"

_PATTERN = re.compile(r"step-([0-9]{8,18})\.a([0-9]{1,9})\.l([0-9]{1,9})-([0-9a-f]{8})")
_LARGEST_STEP = 10**18 - 1
_LARGEST_COUNT = 10**9 - 1


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """``step-00001200.a2.l1-0123abcd``; ordered by step, then attempt, then launch.

    Several of one step are legal: after a rollback it is reached again.  The nonce orders nothing,
    it makes names unique.
    """

    step: int
    attempt: int
    launch: int
    nonce: str

    def __post_init__(self) -> None:
        if (
            not 0 <= self.step <= _LARGEST_STEP
            or not 0 <= self.attempt <= _LARGEST_COUNT
            or not 0 <= self.launch <= _LARGEST_COUNT
            or not re.fullmatch(r"[0-9a-f]{8}", self.nonce)
        ):
            raise ValueError(
                f"not a checkpoint name: step {self.step}, attempt {self.attempt}, "
                f"launch {self.launch}, nonce {self.nonce!r}"
            )

    @classmethod
    def new(cls, *, step: int, attempt: int, launch: int) -> CheckpointName:
        """Name the checkpoint that is about to be written."""
        return cls(step, attempt, launch, secrets.token_hex(4))

    @classmethod
    def parse(cls, text: str) -> CheckpointName:
        """Read a name; ``ValueError`` for anything that ``str()`` of a name can't have produced."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"not a checkpoint name: {text!r}")
        name = cls(int(match[1]), int(match[2]), int(match[3]), match[4])
        if str(name) != text:
            # 'a02' or a step with nine digits and a leading zero: two spellings of one name.
            raise ValueError(f"not a checkpoint name: {text!r} (would be spelled {name})")
        return name

    def __str__(self) -> str:
        return f"step-{self.step:08d}.a{self.attempt}.l{self.launch}-{self.nonce}"
