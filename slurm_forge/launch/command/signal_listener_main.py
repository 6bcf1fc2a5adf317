"""A task that does nothing but tell of signals, run by its file.

At the start of a preemption's grace time Slurm signals the tasks of steps and says nothing to the
batch step (SIGCONT and SIGTERM, tried on 22.05.8).  So ``slurm-forge exec`` has this step beside
the program's.  It ends when its standard input does.  Standard library only: it is started on a
node whose memory belongs to the training.
"""

from __future__ import annotations

import os
import select
import signal
import sys

#: The first line: it listens from now on.
HERE = "here"
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def main() -> int:
    """Write the name of every signal on a line of its own, until the input ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for signal_number in _HEARD:
        signal.signal(signal_number, lambda *_: None)
    _say(HERE)
    while True:
        ready, _, _ = select.select([reader, 0], [], [])
        if reader in ready:
            for number in os.read(reader, 64):
                _say(signal.Signals(number).name)
        if 0 in ready and not os.read(0, 64):
            return 0


def _say(word: str) -> None:
    os.write(1, word.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
