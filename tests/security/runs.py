"""Everything a run writes, once: to see where it writes, and what it does not write through."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.files import write_atomic
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import UserAsked
from slurm_forge.launch.attempt.run_lock import hold_run_lock
from slurm_forge.run_directory import Fence, RunDirectory, claim_attempt
from slurm_forge.store.directory import CheckpointStore
from tests.unit.checkpoint.helpers import save, weights


def live(run: RunDirectory, *, steps: int = 3, spec: str = "name: run\n") -> None:
    """Create, claim, tell, save, prune, finish: all of it as the product does it."""
    run.create(spec.encode())
    attempt = claim_attempt(
        run, job="1", restart_count=0, host="n1", pid=1, nodes=["n1"], time=0.0
    ).attempt
    with contextlib.closing(JournalWriter(run, attempt=attempt, writer="rank0")) as journal:
        journal.write(UserAsked(verb="submit", user="me"))
    with hold_run_lock(run):
        write_atomic(run.rendezvous("key"), b"{}")
    store = CheckpointStore(run.checkpoints, run.name)
    for step in range(1, steps + 1):
        save(store, weights(float(step)), step, attempt, fence=Fence(run, attempt))
    store.prune([], Fence(run, attempt), current=(attempt, 2))
    run.mark_done(steps, attempt)


def tolerant(run: RunDirectory) -> BaseException | None:
    """The same, up to the first refusal, which is returned; anything but a refusal is raised."""
    try:
        live(run)
    except (ForgeError, OSError) as error:
        return error
    return None


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything below a folder that an attack could have changed."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_ino, content)
    return found
