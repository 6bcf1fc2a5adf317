"""Which messages about a run were sent: a file for each try, created exclusively before it.

So the batch step, the next attempt and any number of watchers send a message once between them.
Who dies while sending leaves a claim behind that another sender may repeat after a while: a message
that comes twice is better than none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.files import FOLDERS_OWNER, create_exclusive, read_json, write_atomic
from slurm_forge.json_codec import from_json
from slurm_forge.run_directory.layout import RunDirectory

#: What a target may be called.
TARGET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]{0,31}")
_LIMIT = 1 << 16
_NAME = re.compile(
    r"(?P<target>[A-Za-z0-9][A-Za-z0-9_]*)-(?P<digest>[0-9a-f]{16})-(?P<number>[1-9])\.json"
)
#: A sender that has not reported for so long is gone: none takes half as long.
_GONE_AFTER_S = 120.0
#: Between two tries, the first time; then twice as long each time.
_FIRST_PAUSE_S = 60.0
#: So often a message is tried in all, and by the run's own jobs: a watcher elsewhere may reach
#: what they can't.
MOST_TRIES = 9
MOST_TRIES_OF_JOB = 4


class Outcome(str, Enum):
    """What became of a try."""

    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTry:
    """A try to send the message of an event to a target.

    Attributes:
        target: The name of the target.
        digest: Stands for the key of the event.
        number: Which try it is, from 1.
        time: When it began, in seconds since the epoch.
        outcome: What became of it.
        error: Why it failed, without anything of the target's URL.
    """

    target: str
    digest: str
    number: int
    time: float
    outcome: Outcome = Outcome.SENDING
    error: str = ""


@dataclass(frozen=True, slots=True)
class SentMessages:
    """The newest try of each event and target, as far as the files of a run tell."""

    tries: dict[tuple[str, str], SendTry] = field(default_factory=dict)

    def next_try(
        self, target: str, key: str, now: float, most: int = MOST_TRIES, *, at_once: bool = False
    ) -> SendTry | None:
        """The try that is due; None where it was sent, is being sent, or has to wait.

        ``most`` is how often it is tried at all; ``at_once``: a failed one is repeated without a
        pause.
        """
        digest = digest_of(key)
        last = self.tries.get((target, digest))
        if last is None:
            return SendTry(target=target, digest=digest, number=1, time=now)
        if last.outcome is Outcome.SENT or last.number >= most:
            return None
        pause = _FIRST_PAUSE_S * 2 ** (last.number - 1)
        if last.outcome is Outcome.SENDING:
            pause = _GONE_AFTER_S
        elif at_once:
            pause = 0.0
        # The other sender's clock may be ahead by seconds; one that is hours off holds nobody up.
        if abs(now - last.time) < pause:
            return None
        return replace(last, number=last.number + 1, time=now, outcome=Outcome.SENDING, error="")

    def times(self, target: str) -> tuple[float, ...]:
        """When messages of the run were sent to a target."""
        sent = (each for each in self.tries.values() if each.outcome is Outcome.SENT)
        return tuple(sorted({each.time for each in sent if each.target == target}))

    def failures(self) -> tuple[SendTry, ...]:
        """The newest failed try for each target that nothing was sent to since."""
        newest: dict[str, SendTry] = {}
        for each in sorted(self.tries.values(), key=lambda one: one.time):
            newest[each.target] = each
        return tuple(each for each in newest.values() if each.outcome is Outcome.FAILED)


def digest_of(key: str) -> str:
    """What stands for the key of an event in the name of a file."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:16]


def failure_text(target: str, error: str) -> str:
    """A message that could not be sent, and what a person can do."""
    return f"notification to {target} failed: {error}; next: slurm-forge notify --test {target}"


def claim(run: RunDirectory, wanted: SendTry) -> bool:
    """Begin a try; False where somebody else is as fast, or nothing can be written."""
    try:
        return create_exclusive(_path(run, wanted), _content(wanted))
    except OSError:
        return False


def settle(run: RunDirectory, tries: Iterable[SendTry]) -> None:
    """Write down what became of tries; a file that can't be written is a try that is repeated."""
    for each in tries:
        with contextlib.suppress(OSError):
            write_atomic(_path(run, each), _content(each))


def read_sent(run: RunDirectory) -> SentMessages:
    """The newest try of each event and target; a file that can't be read is a sender that died.

    ``OSError`` where the folder can't be listed; nothing where it is not there.
    """
    newest: dict[tuple[str, str], int] = {}
    try:
        names = [_NAME.fullmatch(entry.name) for entry in run.notifications.iterdir()]
    except FileNotFoundError:
        return SentMessages()
    for name in filter(None, names):
        key = (name["target"], name["digest"])
        newest[key] = max(newest.get(key, 0), int(name["number"]))
    return SentMessages(
        {key: _read(run, *key, number=number) for key, number in newest.items()},
    )


def _read(run: RunDirectory, target: str, digest: str, number: int) -> SendTry:
    unread = SendTry(target=target, digest=digest, number=number, time=0.0)
    with contextlib.suppress(OSError, ForgeError, ValueError):
        path = _path(run, unread)
        body = read_json(path, _LIMIT, owner=FOLDERS_OWNER)
        return replace(from_json(SendTry, body), target=target, digest=digest, number=number)
    return unread


def _path(run: RunDirectory, each: SendTry) -> Path:
    return run.notifications / f"{each.target}-{each.digest}-{each.number}.json"


def _content(each: SendTry) -> bytes:
    return json.dumps(asdict(each), sort_keys=True).encode()
