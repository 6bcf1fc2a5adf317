"""One message through Apprise, which is imported here and nowhere else.

The process ``send_message TARGET`` reads the message from its standard input, the target's URL from
the user's file, and writes why it failed, if it did, to its standard output.  A process of its own,
because a service that hangs can be killed then.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_forge.errors import ForgeError
from slurm_forge.json_codec import parse
from slurm_forge.knobs import Knobs
from slurm_forge.launch.notify.targets import Target, chosen_targets, read_targets

_LONGEST_ERROR = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    """What is sent: plain text, and an optional file to attach."""

    title: str
    body: str
    attachment: str | None = None


class _Complaints(logging.Handler):
    """What Apprise logs: its calls only return that they failed.

    What a server answered is only in what it logs for debugging.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning or an exception."""
        text = record.getMessage()
        if record.levelno >= logging.WARNING or "Exception:" in text:
            self.lines.append(text)


def send(target: Target, message: OutgoingMessage) -> str:
    """Send a message; the reason why it failed, without any part of the target's URL, or empty.
    It takes as long as the target likes.
    """
    import apprise

    logger = logging.getLogger("apprise")
    # Otherwise its complaints, which quote URLs, would end up in our output.
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    complaints = _Complaints()
    logger.addHandler(complaints)
    try:
        service = apprise.Apprise.instantiate(target.url)
        if service is None:
            return "Apprise does not understand its URL (https://appriseit.com/services)"
        sender = apprise.Apprise()
        sender.add(service)
        sent = sender.notify(
            title=message.title,
            body=message.body,
            body_format=apprise.NotifyFormat.TEXT,
            attach=message.attachment,
        )
        text = "" if sent else "; ".join(complaints.lines) or "the service refused it"
    except Exception as error:  # of whatever library the service needs
        text = f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(complaints)
    text = target.without_secrets(" ".join(text.split()))
    return "".join(c if c.isprintable() else "?" for c in text)[:_LONGEST_ERROR]


def main(argv: Sequence[str] | None = None) -> int:
    """``TARGET``, and a ``OutgoingMessage`` as JSON on standard input."""
    (name,) = sys.argv[1:] if argv is None else argv
    path = Knobs.from_environ(os.environ).targets_file
    message = parse(OutgoingMessage, sys.stdin.buffer.read())
    try:
        (target,) = chosen_targets([name], read_targets(path), path)
        sys.stdout.write(send(target, message))
    except (ForgeError, OSError) as error:
        sys.stdout.write(" ".join(str(error).split()))
    return 0
