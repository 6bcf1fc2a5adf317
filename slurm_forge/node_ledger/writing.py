"""Adding lines to a file of the ledger, and leaving out what has faded."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from slurm_forge.errors import ForgeError, UnsafeFileError
from slurm_forge.files import (
    fsync_directory,
    make_private_directory,
    read_trusted,
    refuse_foreign,
    write_atomic,
)
from slurm_forge.files.atomic import write_all
from slurm_forge.node_ledger.lines import Entry, line_of, parse_lines
from slurm_forge.node_ledger.names import is_ours, refuse_folder, safe_file_name
from slurm_forge.recovery.nodes.score import faded
from slurm_forge.recovery.nodes.statements import BY_HAND, NodeRelease, NodeRules

#: A file that is larger is not read at all, nor written to; ours are compacted long before.
MOST_FILE = 1 << 20
#: Of what is left when not enough has faded: the newest, and what people have said.
_MOST_KEPT = 500
#: What is left of a strike that no longer counts for anything.
_NOISE = 0.01
#: What a release speaks of has faded by then, and so has all that a silent host has said.
_OLD_S = 60 * 86_400.0
_READ_BY_OTHERS = stat.S_IRGRP | stat.S_IROTH
_ENTERED_BY_OTHERS = _READ_BY_OTHERS | stat.S_IXGRP | stat.S_IXOTH


def own_folder(folder: Path, cluster: str, *, make: bool) -> Path:
    """Where this user writes, made where it is missing: as readable for others as ``folder`` is."""
    if make and not os.path.lexists(folder):
        make_private_directory(folder)
    shared = folder.stat().st_mode & _ENTERED_BY_OTHERS
    here = folder
    for name in (str(os.geteuid()), safe_file_name(cluster)):
        here = here / name
        try:
            here.mkdir(0o700)
        except FileExistsError:
            refuse_folder(here, os.geteuid())
        else:
            if shared:
                here.chmod(0o700 | shared)  # mkdir narrows the mode by the umask
            fsync_directory(here.parent)
    return here


def append(path: Path, data: bytes) -> int:
    """Add whole lines to a file that only we can have written; its size afterwards."""
    # For reading too: opening a planted FIFO for writing alone would wait for ever.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise _not_plain(path) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise _not_plain(path)
        refuse_foreign(path, status, os.geteuid(), root_too=False, opened=descriptor)
        if status.st_size > MOST_FILE:
            raise UnsafeFileError(
                f"{path} is larger than {MOST_FILE} bytes",
                next_step="slurm_forge writes no such file: check what it is, then remove it.",
            )
        if status.st_size == 0:
            os.fchmod(descriptor, 0o600 | (path.parent.stat().st_mode & _READ_BY_OTHERS))
        # A line that was torn by a full disk spoils itself only.
        torn = status.st_size > 0 and os.pread(descriptor, 1, status.st_size - 1) != b"\n"
        write_all(descriptor, (b"\n" if torn else b"") + data)
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if status.st_size == 0:
        fsync_directory(path.parent)
    return size


def compact(path: Path, now: float, rules: NodeRules) -> None:
    """Write the file anew without what has faded, and the oldest of what is still too much."""
    entries, _ = parse_lines(read_trusted(path, 2 * MOST_FILE, owner=os.geteuid()), now)
    counting = [each for each in entries if _counts(each, now, rules)]
    counting.sort(key=lambda each: (_said_by_people(each), each.time))
    mode = stat.S_IMODE(path.stat().st_mode)
    write_atomic(path, b"".join(map(line_of, counting[-_MOST_KEPT:])), mode=mode)
    path.chmod(mode)


def sweep(folder: Path, clock: Callable[[], float], rules: NodeRules) -> None:
    """Remove our files of hosts that have been silent for so long that nothing in them counts."""
    now = clock()
    for path in folder.iterdir():
        if is_ours(path.name) and path.lstat().st_mtime < now - _OLD_S:
            try:
                entries, _ = parse_lines(read_trusted(path, MOST_FILE), now)
            except (OSError, ForgeError):
                continue  # not ours to judge
            if not any(_counts(each, now, rules) for each in entries):
                path.unlink(missing_ok=True)


def _counts(entry: Entry, now: float, rules: NodeRules) -> bool:
    if isinstance(entry, NodeRelease):
        return now - entry.time < _OLD_S
    return faded(entry, now, rules) >= _NOISE


def _said_by_people(entry: Entry) -> bool:
    return isinstance(entry, NodeRelease) or entry.cause == BY_HAND


def _not_plain(path: Path) -> UnsafeFileError:
    return UnsafeFileError(f"{path} is not a plain file", next_step="Remove it and try again.")
