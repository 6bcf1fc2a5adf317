"""Attempts claim the run; a higher claim fences every lower one.

A claim is one exclusively created file ``attempts/<n>.json`` with a nonce.  It is not a lock: an
older incarnation may still be alive on a node that Slurm has lost sight of.  It learns of the newer
claim the next time it wants to publish, prune or requeue, and then does nothing any more.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_forge.errors import FencedError, RunDirectoryError
from slurm_forge.files import (
    FOLDERS_OWNER,
    create_exclusive,
    exists_on_server,
    make_private_directory,
    read_json,
    refresh_names,
)
from slurm_forge.format_version import PACKAGE_VERSION, FormatVersion, refuse_later
from slurm_forge.run_directory.layout import RunDirectory

_CLAIM_LIMIT = 1 << 20
#: As we write them: a leading zero would make a second name for the same number.
_CLAIM_NAME = re.compile(r"[1-9][0-9]{0,8}\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One attempt's claim on the run.  ``time`` is in seconds since the epoch."""

    attempt: int
    nonce: str
    job: str
    restart_count: int
    host: str
    pid: int
    nodes: tuple[str, ...]
    time: float


#: Version of the file: see ``slurm_forge.format_version``.
_FORMAT = FormatVersion(1)


def _claim_file(run: RunDirectory, attempt: int) -> Path:
    return run.attempts / f"{attempt}.json"


def list_claims(run: RunDirectory) -> list[int]:
    """Numbers of all claimed attempts, ascending.  Reads names only, so it is one listing."""
    numbers = []
    refresh_names(run.attempts)
    try:
        entries = list(run.attempts.iterdir())
    except FileNotFoundError:
        return []
    for entry in entries:
        if _CLAIM_NAME.fullmatch(entry.name):
            numbers.append(int(entry.name.removesuffix(".json")))
    return sorted(numbers)


def claim_attempt(
    run: RunDirectory,
    *,
    job: str,
    restart_count: int,
    host: str,
    pid: int,
    nodes: Sequence[str],
    time: float,
    tries: int = 100,
) -> Claim:
    """Take the next attempt number; fences every older attempt from this moment on."""
    make_private_directory(run.path)  # whoever made it may have died before its name was on disk
    make_private_directory(run.attempts)
    newest = 0
    for _ in range(tries):
        # A listing may be seconds old on network storage: what was found taken counts as well.
        newest = max(newest, *list_claims(run), 0)
        claim = Claim(
            attempt=newest + 1,
            nonce=secrets.token_hex(8),
            job=job,
            restart_count=restart_count,
            host=host,
            pid=pid,
            nodes=tuple(nodes),
            time=time,
        )
        written = {**asdict(claim), "by": PACKAGE_VERSION, "v": str(_FORMAT)}
        body = json.dumps(written, sort_keys=True).encode()
        if create_exclusive(_claim_file(run, claim.attempt), body):
            make_private_directory(run.attempt(claim.attempt))
            return claim
        newest = claim.attempt
    raise RunDirectoryError(
        f"no attempt could be claimed in {run.attempts} after {tries} tries",
        next_step="Is something starting this run in a loop?  See slurm-forge status.",
    )


def _damaged_claim(run: RunDirectory) -> str:
    return (
        "Leave it where it is: its name alone keeps older attempts from writing.  Start the run "
        f"again (slurm-forge requeue {run.name}): the next attempt has a claim of its own."
    )


def newest_claim(run: RunDirectory) -> Claim | None:
    """The claim in force, or None before the first attempt."""
    numbers = list_claims(run)
    if not numbers:
        return None
    path = _claim_file(run, numbers[-1])
    try:
        data = read_json(path, _CLAIM_LIMIT, owner=FOLDERS_OWNER, next_step=_damaged_claim(run))
        refuse_later(str(path), FormatVersion.parse(data.get("v", 1)), _FORMAT, data.get("by"))
        return Claim(
            attempt=numbers[-1],
            nonce=str(data["nonce"]),
            job=str(data["job"]),
            restart_count=int(data["restart_count"]),
            host=str(data["host"]),
            pid=int(data["pid"]),
            nodes=tuple(str(node) for node in data["nodes"]),
            time=float(data["time"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise RunDirectoryError(
            f"the claim {path} can't be read: {error}",
            next_step=_damaged_claim(run),
        ) from error


def mark_launch(run: RunDirectory, attempt: int, launch: int) -> None:
    """Fence the launches of the attempt before this one: their ranks may live on a lost node."""
    if launch > 1:
        make_private_directory(run.attempt(attempt))
        create_exclusive(run.launch_mark(attempt, launch), b"")


@dataclass(frozen=True, slots=True)
class Fence:
    """Asked before every durable act: raises ``FencedError`` once a newer attempt exists.

    With ``launch`` also once a newer launch of the same attempt does: a rank of an older one may
    be alive on a node that was given up.
    """

    run: RunDirectory
    attempt: int
    launch: int | None = None

    def __call__(self) -> None:
        """Raise ``FencedError`` if a newer attempt, or launch, exists."""
        mark = self.run.launch_mark(self.attempt, (self.launch or 0) + 1)
        if self.launch and exists_on_server(mark):
            raise FencedError(
                f"launch {self.launch + 1} of attempt {self.attempt} has taken over "
                f"{self.run.name}; launch {self.launch} writes nothing any more",
                next_step="Nothing to do: this is an old incarnation and it is ending.",
            )
        newest = max(list_claims(self.run), default=0)
        if newest > self.attempt:
            raise FencedError(
                f"attempt {newest} has taken over {self.run.name}; attempt {self.attempt} "
                "writes nothing any more",
                next_step="Nothing to do: this is an old incarnation and it is ending.",
            )
