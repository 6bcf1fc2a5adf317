"""What a node does when it is asked: the code under test, in the folder that all nodes share."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from slurm_forge.checkpoint.write.direct_io import PAGE, round_up
from slurm_forge.checkpoint.write.shard_writer import write_shard_file
from slurm_forge.errors import CheckpointRejectedError, FencedError, ForgeError
from slurm_forge.files import create_exclusive, exists_on_server, read_trusted, write_atomic
from slurm_forge.journal import (
    JournalWriter,
    compact_journal,
    fold,
    read_journal,
    read_to_fold,
)
from slurm_forge.journal.events import AttemptStarted, CheckpointCommitted, Progress
from slurm_forge.lock import exclusive
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.claims import Fence, claim_attempt, list_claims, mark_launch
from slurm_forge.store.blocks import verify_blocks
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import INDEX_NAME, Manifest
from tests.crash.shim import Shim, Strike

_PATIENCE = timedelta(seconds=1)
_CLOCK = 1_750_000_000.0


@dataclass
class Told:
    """What a node was told of its saves and lines: done, or refused and why."""

    saved: list[int] = field(default_factory=list)
    appended: list[int] = field(default_factory=list)
    refused: list[list[str]] = field(default_factory=list)
    next_step: dict[str, int] = field(default_factory=dict)


class Operations:
    """Everything that can be asked; what is begun by one question is ended by another."""

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        self._name = "run"
        self._journals: dict[int, JournalWriter] = {}
        self._held: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._problems: list[str] = []
        self._told = Told()

    @property
    def run(self) -> RunDirectory:
        """The run that all nodes work on."""
        return RunDirectory.at(self._shared / self._name)

    def use(self, name: str) -> None:
        """Work on another run from now on."""
        self.clear()
        self._name = name

    def become(self, user: int) -> None:
        """Be that user from now on, to the server too."""
        os.seteuid(0)
        os.setegid(user)
        os.seteuid(user)

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self.run.checkpoints, "run")

    # -- the run directory -------------------------------------------------------------------------

    def create(self) -> None:
        """Submit the run."""
        self.run.create(b"{}")

    def claim(self, times: int) -> list[int]:
        """Claim so many attempts."""
        return [
            claim_attempt(
                self.run, job="1", restart_count=0, host="n", pid=1, nodes=("n",), time=_CLOCK
            ).attempt
            for _ in range(times)
        ]

    def claims(self) -> list[int]:
        """Which attempts are claimed, as seen from here."""
        return list_claims(self.run)

    def is_fenced(self, attempt: int, launch: int | None = None) -> bool:
        """Whether an attempt, or a launch of it, must not write any more."""
        try:
            Fence(self.run, attempt, launch)()
        except FencedError:
            return True
        return False

    def mark(self, attempt: int, launch: int) -> None:
        """Begin a launch."""
        mark_launch(self.run, attempt, launch)

    def create_once(self, name: str) -> bool:
        """Whether a name is this node's, of which there may be one."""
        return create_exclusive(self.run.path / name, os.uname().nodename.encode())

    def replace(self, name: str, text: str) -> None:
        """Write a file anew."""
        write_atomic(self.run.path / name, text.encode())

    def read(self, name: str) -> str:
        """What a file holds."""
        return read_trusted(self.run.path / name, 1 << 20).decode()

    def mark_done(self) -> None:
        """End the run."""
        self.run.mark_done(1, 1)

    def is_done(self) -> bool:
        """Whether it is seen here that the run has ended."""
        return self.run.is_done()

    def is_asked(self, name: str) -> bool:
        """Whether STOP or SAVE is seen here."""
        return exists_on_server(self.run.path / name)

    def touch(self, name: str) -> None:
        """As a person makes STOP or SAVE."""
        (self.run.path / name).touch()

    # -- the journal -------------------------------------------------------------------------------

    def write(self, attempt: int, first: int, count: int, rotate_at: int = 1 << 24) -> None:
        """Write so many steps, of which every third is a commit."""
        journal = self._journal(attempt, rotate_at)
        for step in range(first, first + count):
            journal.write(Progress(step=step))
            if step % 3 == 0:
                journal.write(_commit(attempt, step))

    def _journal(self, attempt: int, rotate_at: int = 1 << 24) -> JournalWriter:
        journal = self._journals.get(attempt)
        if journal is None:
            journal = JournalWriter(
                self.run, attempt=attempt, writer="rank", launch=1, rotate_at=rotate_at
            )
            self._journals[attempt] = journal
            journal.write(AttemptStarted(job="1", restart_count=0, nodes=(), host="n", via="batch"))
        return journal

    def close_journals(self) -> None:
        """Leave the files."""
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()

    def compact(self, attempt: int) -> list[str]:
        """Archive in small blocks; what lies in the journal then."""
        compact_journal(self.run, attempt, block=2, kept=1)
        return sorted(each.name for each in self.run.journal.iterdir())

    def commits(self, refresh: bool = True) -> list[list[int]]:
        """Attempt and step of every commit, as read here, from lines and from the folded state."""
        records, damage = read_journal(self.run, refresh=refresh)
        if damage:
            raise RuntimeError(f"damaged: {damage}")
        # What is in two files counts once.
        events = [(record.attempt, record.event) for record in records]
        commits = {(a, each.step) for a, each in events if isinstance(each, CheckpointCommitted)}
        found = [list(each) for each in sorted(commits)]
        state = fold(read_to_fold(self.run, refresh=refresh))
        folded = sorted([a.number, each.step] for a in state.attempts for _, each in a.checkpoints)
        if folded[: len(found)] != found:
            raise RuntimeError(f"{len(folded)} in the state, {len(found)} in the lines")
        return found

    # -- checkpoints -------------------------------------------------------------------------------

    def publish(self, step: int, size: int, attempt: int = 1) -> str:
        """Save and publish."""
        store = self._store()
        name = CheckpointName.new(step=step, attempt=attempt, launch=1)
        stage = store.create_stage(name)
        try:
            files = tuple(
                write_shard_file(stage / file, _memory(step, size), size)
                for file in (INDEX_NAME, "rank-00000.data")
            )
            manifest = Manifest(
                run_id="run", name=name, sequence=store.next_sequence(), world_size=1,
                files=files, state={}, torch_version="2", reason="test",
                created_at=datetime.now(timezone.utc),
            )  # fmt: skip
            store.publish(stage, manifest, Fence(self.run, attempt))
        except Exception:
            store.discard_stage(stage)
            raise
        return str(name)

    def steps(self) -> list[int]:
        """Of which steps checkpoints are seen here, the newest first."""
        return [name.step for name in self._store().candidates()]

    def verify(self) -> int:
        """Read the newest checkpoint that is whole, all of it; its step."""
        store = self._store()
        for name in store.candidates():
            with suppress(CheckpointRejectedError, FileNotFoundError):
                manifest = store.verify_manifest(name)
                for file in manifest.files:
                    blocks = range(len(file.block_hashes))
                    for _ in verify_blocks(store.path(name) / file.name, file, blocks):
                        pass
                return name.step
        return -1

    def prune(self, keep: int, attempt: int = 1) -> list[str]:
        """Delete what is old; the problems."""
        fence = Fence(self.run, attempt)
        return list(
            self._store().prune(lambda names: names[:keep], fence, current=(attempt, 1)).problems
        )

    def hidden(self) -> list[str]:
        """Stages and trash, and what NFS keeps of open files."""
        return sorted(each.name for each in self.run.checkpoints.glob(".*"))

    def open_newest(self) -> None:
        """Keep a file of the newest checkpoint open."""
        store = self._store()
        path = store.path(store.candidates()[0]) / "rank-00000.data"
        self._held["file"] = path.open("rb", buffering=0)

    def read_open(self) -> str:
        """Read from the file that is open; what went wrong."""
        try:
            with self._held.pop("file") as file:
                return str(len(file.read(1 << 20)))
        except OSError as error:
            return error.strerror or str(error)

    def train(self, until: int | None) -> list[str]:
        """Train with ranks up to a step, or from there to the end; what went wrong.

        What the ranks print is seen on the console of the machine, as they print it.
        """
        words = [str(self._shared / "training"), "end" if until is None else str(until)]
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        done = subprocess.run(
            [sys.executable, "-u", "-m", "tests.shared_storage.training", *words],
            stdout=subprocess.PIPE, text=True, check=False, env=environment, timeout=3600,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        problems = [each.removeprefix("problem: ") for each in lines if each.startswith("problem")]
        ended = "trained" in lines and not done.returncode
        return problems if ended else [f"exit code {done.returncode}: {done.stdout}"]

    # -- locks -------------------------------------------------------------------------------------

    def lock(self) -> bool:
        """Take the lock; False where another has it."""
        holder = exclusive(self.run.path / "lock", _PATIENCE)
        try:
            holder.__enter__()
        except ForgeError:
            return False
        self._held["lock"] = holder
        return True

    def unlock(self) -> None:
        """Give it back."""
        self._held.pop("lock").__exit__(None, None, None)

    # -- struck ------------------------------------------------------------------------------------

    def struck(self, act: str, strike: int, call: int, **values: Any) -> dict[str, Any]:
        """Do one thing in a process that ``strike`` hits at its ``call``-th change of a file.

        What came of it: "done", "refused", "killed" or, where it makes fewer calls, "over".
        """
        log = Path("/dev/shm/struck")
        log.unlink(missing_ok=True)
        shim = Shim()
        shim.start(log, self._shared)
        child = os.fork()
        if not child:
            shim.be(0)
            shim.arm(0, Strike(strike), call)
            try:
                getattr(self, act)(**values)
                for journal in self._journals.values():
                    journal.close()
            except (OSError, ForgeError):
                os._exit(1)
            except BaseException:
                os._exit(2)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shim.recover()
        shim.disarm()
        site = shim.struck(0)
        shim.stop()
        outcome = {0: "done", 1: "refused", -9: "killed"}.get(code, f"crashed ({code})")
        return {"outcome": outcome if site else "over", "site": site or ""}

    # -- meanwhile ---------------------------------------------------------------------------------

    def save_next(self, size: int = 1_200_000) -> int:
        """Save another step; how many were saved."""
        return self._try("saved", lambda step: self.publish(step, size))

    def append_next(self) -> int:
        """Append another commit to the journal, on disk on return; how many were appended."""
        return self._try("appended", lambda step: self._journal(1).write(_commit(1, step)))

    def _try(self, what: str, act: Callable[[int], Any]) -> int:
        told, done = self._told, getattr(self._told, what)
        step = told.next_step[what] = told.next_step.get(what, 0) + 1
        try:
            act(step)
        except (OSError, ForgeError) as error:
            kind = errno.errorcode.get(getattr(error, "errno", 0) or 0, type(error).__name__)
            call = traceback.extract_tb(error.__traceback__)[-1].line
            told.refused.append([what, f"{kind} at {call}"])
            threading.Event().wait(0.05)
        else:
            done.append(step)
        return len(done)

    def told(self) -> dict[str, Any]:
        """The steps that were saved and appended, and what was refused, why."""
        told = self._told
        return {
            "saved": list(told.saved), "appended": list(told.appended),
            "refused": list(told.refused),
        }  # fmt: skip

    def go_on(self, act: str, **values: Any) -> None:
        """Do one thing again and again, on a thread, until ``pause``."""
        done: Callable[..., Any] = getattr(self, act)
        self._over.clear()

        def repeat() -> None:
            newest: Any = None
            while not self._over.is_set():
                try:
                    found = done(**values)
                except Exception as error:
                    self._problems.append(f"{act}: {type(error).__name__}: {error}")
                    return
                if newest is not None and found is not None and _less(found, newest):
                    self._problems.append(f"{act}: {found} after {newest}")
                newest = found

        self._threads.append(threading.Thread(target=repeat, daemon=True))
        self._threads[-1].start()

    def pause(self) -> list[str]:
        """End that; what went wrong."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            if thread.is_alive():
                self._problems.append("a call does not return")
        self._threads.clear()
        problems, self._problems = self._problems, []
        return problems

    def clear(self) -> None:
        """Forget everything."""
        self.pause()
        self._told = Told()
        self.close_journals()
        for name in list(self._held):
            with suppress(Exception):
                self._held.pop(name).__exit__(None, None, None)


def _less(found: Any, newest: Any) -> bool:
    """Whether something that was seen once is not seen any more."""
    return len(found) < len(newest) if isinstance(found, list) else found < newest


def _commit(attempt: int, step: int) -> CheckpointCommitted:
    name = str(CheckpointName(step, attempt, 1, "0" * 8))
    return CheckpointCommitted(name=name, step=step, reason="test", seconds=0.1, size=1)


def _memory(step: int, size: int) -> memoryview:
    memory = mmap.mmap(-1, round_up(size, PAGE))
    memory.write(bytes([step % 256]) * size)
    return memoryview(memory)
