"""Runs in place of a rank, does nothing, and reports signals: for ``doctor --live``.

The process ``live_rank WAY [--plain] [--workers WAY WAY]``.  It has a rank's own handlers, or with
``--plain`` none; its workers are forked as a data loader forks them, the first one shielded, the
second as torch leaves it.  It ends when its input ends.  No torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Literal

from slurm_forge.control.messages.live import ListenerEvent, format_event
from slurm_forge.knobs import process_environ
from slurm_forge.signals import SignalWatcher
from slurm_forge.slurm.environment import node_name
from slurm_forge.training.data.worker_shield import (
    children_deaf_from_birth,
    shield_worker,
)

_FOREVER_S = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Report its presence, then every signal, until the input ends."""
    way, *rest = sys.argv[1:] if argv is None else argv
    names = rest[rest.index("--workers") + 1 :] if "--workers" in rest else []
    if "--plain" not in rest:
        SignalWatcher(lambda number: _say(way, "saw", number.name))
    workers = _forked(names)
    leaving = threading.Thread(target=_leave_with_input, args=(tuple(workers.values()),))
    leaving.daemon = True
    leaving.start()
    _say(way, "here")
    while True:
        ended_sentinels = (
            wait([each.sentinel for each in workers.values()], _FOREVER_S) if workers else []
        )
        for name in [n for n, worker in workers.items() if worker.sentinel in ended_sentinels]:
            _say(name, "died", _killed_by(workers.pop(name)))
        if not workers:
            time.sleep(_FOREVER_S)


def _forked(names: Sequence[str]) -> dict[str, BaseProcess]:
    workers: dict[str, BaseProcess] = {}
    forking = multiprocessing.get_context("fork")
    for shielded, name in zip((True, False), names, strict=False):
        worker = forking.Process(target=_work, args=(name, shielded), daemon=True)
        if shielded:
            with children_deaf_from_birth():
                worker.start()
        else:
            worker.start()
        workers[name] = worker
    return workers


def _work(name: str, shielded: bool) -> None:
    if shielded:
        shield_worker()
    _say(name, "here")
    while True:
        time.sleep(_FOREVER_S)


def _killed_by(worker: BaseProcess) -> str:
    worker.join()
    code = worker.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _leave_with_input(workers: Sequence[BaseProcess]) -> None:
    while os.read(0, 64):
        pass
    for worker in workers:
        worker.kill()
    os._exit(0)


def _say(way: str, what: Literal["here", "saw", "died"], name: str = "") -> None:
    host = node_name(process_environ())
    event = ListenerEvent(way=way, host=host, what=what, signal=name, at=time.time())
    os.write(1, format_event(event))


if __name__ == "__main__":
    sys.exit(main())
