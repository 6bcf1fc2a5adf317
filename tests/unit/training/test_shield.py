"""Loader workers outlive a signal to the whole group, obey their parent, and die with it.

Each test runs a small training process of its own (in its own group), because what is tested is
what signals do to it and to its children.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_forge.training.data.worker_shield import (
    children_deaf_from_birth,
    shield_worker,
)
from tests.warm import WarmParent

#: What is waited for takes milliseconds: a bound for failures, whatever the load.
WITHIN_S = 90.0
PROGRAM = """
import contextlib, ctypes, os, signal, sys, threading, time
from torch.utils.data import DataLoader
from slurm_forge.training.data.worker_shield import children_deaf_from_birth, shield_worker

METHOD, KIND = sys.argv[1], sys.argv[2]

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Data:
    said = False

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        if not self.said:
            self.said = True
            say("ready")
        if KIND == "sleeping":
            time.sleep(1000)
        if KIND == "in C":
            ctypes.CDLL(None).sleep(1000)   # no interpreter lock, and no Python in between
        if KIND == "holding the lock":
            ctypes.PyDLL(None).sleep(1000)  # no thread of this process can run
        return index

    def __setstate__(self, state):
        # A thread from before the shield, as libraries start them when they are imported.
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

    def __getstate__(self):
        return {"thread": KIND == "bare"} if KIND == "bare" else None

if __name__ == "__main__":
    # As a rank does: signals are noted, nothing is done in the handler.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: say("signalled"))
    loader = DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context=METHOD,
                        worker_init_fn=shield_worker, persistent_workers=KIND == "persistent")
    with contextlib.nullcontext() if KIND == "bare" else children_deaf_from_birth(METHOD):
        batches = iter(loader)
    say("pids", *(worker.pid for worker in batches._workers))
    for line in sys.stdin:
        word = line.strip()
        if word == "next":
            for _ in range(20):
                next(batches)
            say("delivered")
        elif word == "terminate":
            for worker in batches._workers:
                worker.terminate()
            for worker in batches._workers:
                worker.join(60)
            say("ended", *(w.exitcode for w in batches._workers))
        elif word == "exit":
            break
    say("leaving")
"""


class Trainer:
    def __init__(self, path, parent, method, kind):
        script = path / "program.py"
        script.write_text(PROGRAM)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if method == "fork":
            self.process = parent.start(
                str(script), [method, kind], cwd=path, env=environment, stdin=True, new_session=True
            )
        else:  # where workers begin anew, what they begin with is part of it
            self.process = subprocess.Popen(
                [sys.executable, str(script), method, kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=environment,
            )
        self.rest = b""
        said = [self.next_line() for _ in range(3)]
        assert said.count(["ready"]) == 2, said
        (self.workers,) = ([int(pid) for pid in pids] for word, *pids in said if pids)

    def say(self, word):
        os.write(self.process.stdin.fileno(), f"{word}\n".encode())

    def next_line(self):
        """The next line said by the trainer or its workers, as words."""
        while b"\n" not in self.rest:
            output = self.process.stdout
            assert select.select([output], [], [], WITHIN_S)[0], "nothing is said any more"
            self.rest += os.read(output.fileno(), 4096) or b"(closed)\n"
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode().split()

    def heard(self, word):
        line = self.next_line()
        assert line[:1] == [word]
        return line


@pytest.fixture(scope="module")
def parent():
    with WarmParent("torch.utils.data", "slurm_forge.training.data.worker_shield") as warm:
        yield warm


@pytest.fixture
def start(tmp_path, parent):
    with contextlib.ExitStack() as stack:

        def begin(method, kind):
            trainer = Trainer(tmp_path, parent, method, kind)
            stack.callback(kill_group, trainer.process)
            return trainer

        yield begin


def kill_group(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()


def running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids):
    deadline = time.monotonic() + WITHIN_S
    while any(map(running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# Every worker imports torch anew: seconds each.
slow = pytest.mark.slow
spawn, forkserver = (pytest.param(name, marks=slow) for name in ("spawn", "forkserver"))


@pytest.mark.parametrize(
    ("method", "kind"),
    [("fork", "ready"), ("fork", "bare"), pytest.param("spawn", "ready", marks=slow)],
)
def test_a_signal_to_the_whole_group_does_not_cost_a_batch(start, method, kind):
    trainer = start(method, kind)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) * 3:
        os.killpg(trainer.process.pid, number)
        trainer.heard("signalled")
    for _ in range(3):
        trainer.say("next")
        trainer.heard("delivered")
    assert all(map(running, trainer.workers))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *(("fork", kind) for kind in ("ready", "sleeping", "in C")),
        *(pytest.param("spawn", kind, marks=slow) for kind in ("ready", "in C", "bare")),
    ],
)
def test_workers_obey_their_parent_at_once_also_when_stuck(start, method, kind):
    trainer = start(method, kind)
    trainer.say("terminate")
    assert trainer.heard("ended") == ["ended", "0", "0"]


methods = pytest.mark.parametrize("method", ["fork", spawn, forkserver])


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fork", "sleeping"),
        ("fork", "holding the lock"),
        pytest.param("spawn", "holding the lock", marks=slow),
        pytest.param("forkserver", "in C", marks=slow),
    ],
)
def test_workers_die_with_a_killed_parent(start, method, kind):
    trainer = start(method, kind)
    trainer.process.kill()
    assert all_gone(trainer.workers)


@methods
def test_the_parent_can_leave_without_ending_the_loader(start, method):
    trainer = start(method, "persistent")
    trainer.say("exit")
    trainer.heard("leaving")
    trainer.process.wait(WITHIN_S)
    assert all_gone(trainer.workers)


def test_workers_are_protected_while_they_start():
    """A signal between fork and worker_init_fn is held back by the mask they are born with."""
    context = multiprocessing.get_context("fork")
    may_shield, mine, theirs = context.Event(), *context.Pipe()

    def worker():
        may_shield.wait()
        shield_worker()
        theirs.send("alive")
        signal.pause()

    with children_deaf_from_birth():
        process = context.Process(target=worker, daemon=True)
        process.start()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    # Sent by somebody else than the parent.
    numbers = ("TERM", "USR1", "USR2")
    for number in numbers:
        subprocess.run(["kill", f"-{number}", str(process.pid)], check=True)
    may_shield.set()
    assert mine.poll(WITHIN_S)
    assert mine.recv() == "alive"
    # Signals do not queue: ours would merge with a stranger's that is still pending.
    deadline = time.monotonic() + WITHIN_S
    while _term_is_pending(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    process.join(WITHIN_S)
    assert process.exitcode == 0


def _term_is_pending(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd")]
    return bool(int(masks[0], 16) >> (signal.SIGTERM - 1) & 1)
