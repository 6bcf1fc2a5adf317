"""Another user swaps files and folders while we look and load: never a byte of theirs (X06)."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_forge.checkpoint.read.load import resume
from slurm_forge.errors import CheckpointError, UnsafeFileError
from slurm_forge.files import read_trusted
from slurm_forge.store.directory import CheckpointStore
from tests.security.bounded import NOBODY
from tests.unit.checkpoint.helpers import save, value_of, weights

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as two users")

SECONDS = 2.0
OURS, THEIRS = b"ours" * 100, b"evil" * 100


@pytest.fixture
def shared():
    """A folder into which everybody may write, as no run directory is."""
    folder = Path(tempfile.mkdtemp(prefix="forge-race-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def attacker(once: Callable[[], None]) -> Iterator[None]:
    """Another user does ``once`` again and again, as fast as it goes."""
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ready_read)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            signal.alarm(60)
            once()
            os.write(ready_write, b"x")
            while True:
                with contextlib.suppress(OSError):
                    once()
        finally:
            os._exit(1)
    os.close(ready_write)
    try:
        assert os.read(ready_read, 1) == b"x", "the attack does not work: this proves nothing"
        yield
    finally:
        os.close(ready_read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def swapping(name: Path, theirs: Path, longest_s: float = 0.0) -> Callable[[], None]:
    """Ours aside, theirs in its place for a moment, and back for another."""
    aside, dice = name.with_name("aside"), random.Random(1)

    def linger() -> None:
        end = time.monotonic() + dice.random() * longest_s
        while time.monotonic() < end:
            pass

    def once() -> None:
        name.rename(aside)
        theirs.rename(name)
        linger()
        name.rename(theirs)
        aside.rename(name)
        linger()

    return once


def look_then_open(path: Path) -> bytes:
    """What everybody does who checks a path: the control."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise UnsafeFileError("foreign")
    return path.read_bytes()


def race(loads: Callable[[], object], seconds: float = SECONDS) -> Counter[object]:
    """What came of as many loads as fit."""
    seen: Counter[object] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(50):
            try:
                seen[loads()] += 1
            except (UnsafeFileError, OSError, CheckpointError) as error:
                seen[type(error).__name__] += 1
            if time.monotonic() > end:
                break
    return seen


@pytest.mark.parametrize("kind", ["a file", "a link to a file"])
def test_a_file_that_is_swapped_while_it_is_read(shared, kind):
    name, evil, theirs = shared / "name", shared / "evil", shared / "theirs"
    name.write_bytes(OURS)
    evil.write_bytes(THEIRS)
    os.chown(evil, NOBODY, NOBODY)
    if kind == "a file":
        evil.rename(theirs)
    else:
        theirs.symlink_to(evil)
        os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    with attacker(swapping(name, theirs)):
        seen = race(lambda: read_trusted(name, 1000))
        control = race(lambda: look_then_open(name))
    print(f"{sum(seen.values())} loads, {seen[THEIRS]} foreign; looked at and then opened: "
          f"{sum(control.values())} loads, {control[THEIRS]} foreign")  # fmt: skip
    assert seen[THEIRS] == 0 and not set(seen) - {
        OURS, "UnsafeFileError", "FileNotFoundError",
    }  # fmt: skip
    assert seen["UnsafeFileError"] > 50, "it was never there to be read"
    assert seen[OURS] > 50


def resumed(store: CheckpointStore) -> object:
    state = weights(-1.0)
    loaded = resume(store, state, group=None, on_reject=lambda *_: None, patience=0.0)
    return None if loaded is None else value_of(state)


def give_away(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o777 if path.is_dir() else 0o644)


@pytest.mark.parametrize("what", ["the whole run", "a link to a whole run"])
def test_a_run_that_is_swapped_while_it_is_resumed(shared, what):
    """Theirs has the same names, and hashes that are right: only its owner is another."""
    name, theirs = shared / "run", shared / "theirs"
    made = save(CheckpointStore(name / "checkpoints", "run"), weights(1.0))
    evil = save(CheckpointStore(shared / "evil" / "checkpoints", "run"), weights(666.0))
    # The very name: our manifest would be looked for and theirs found.
    renamed = evil.path.with_name(made.path.name)
    evil.path.rename(renamed)
    shutil.copy(made.path / "manifest.json", renamed / "manifest.json")
    second = save(CheckpointStore(shared / "evil" / "checkpoints", "run"), weights(666.0), step=2)
    assert second.path.exists()
    give_away(shared / "evil")
    if what == "the whole run":
        (shared / "evil").rename(theirs)
    else:
        theirs.symlink_to(shared / "evil")
        os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    # Opened while it was ours: from then on it is a path like any other.
    store = CheckpointStore(name / "checkpoints", "run")
    with attacker(swapping(name, theirs, longest_s=0.008)):
        seen = race(lambda: resumed(store), seconds=3.0)
    print(f"{sum(seen.values())} resumes, {seen[666.0]} foreign: {dict(seen)}")
    assert seen[666.0] == 0
    assert not set(seen) - {
        1.0, "UnsafeFileError", "CheckpointError", "CheckpointMissingError", "FileNotFoundError",
        "FileExistsError", "NotADirectoryError",
    }, seen  # fmt: skip
    assert sum(seen.values()) > 100 and seen[1.0] > 0 and len(seen) > 1, seen
