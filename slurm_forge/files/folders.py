"""Folders that are ours alone."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from slurm_forge.errors import UnsafeFileError
from slurm_forge.files.atomic import fsync_directory
from slurm_forge.files.trusted import refuse_foreign

__all__ = ["make_missing", "make_private_directory", "private_directory", "refresh_listing"]


def private_directory(path: str | os.PathLike[str]) -> Path:
    """As ``make_private_directory`` for one that is mostly there: then it is only looked at.

    That its name is on disk is left to whoever made it, or claims what it belongs to.
    """
    target = Path(path).absolute()
    if not os.path.lexists(target):
        return make_private_directory(target)
    _refuse_shared_folder(target)
    return target


def make_private_directory(path: str | os.PathLike[str]) -> Path:
    """Make sure that ``path`` is a folder of ours that nobody else can write into.

    It and its missing parents are created with mode 0700.  One that exists must be a real folder
    (not a link), owned by the effective user and not writable for group or others, else
    ``UnsafeFileError``.  Existing parents are left to the site: project folders are shared.
    """
    target = Path(path).absolute()
    missing: list[Path] = []
    here = target
    while not os.path.lexists(here):
        missing.append(here)
        here = here.parent
    for folder in reversed(missing):
        # Somebody else may be as fast as we, so what is there now is looked at in any case.
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)  # noqa: PTH102
        fsync_directory(folder.parent)
        _refuse_shared_folder(folder)
    if not missing:
        _refuse_shared_folder(target)
        # Whoever made it may have died before its name was on disk.
        with contextlib.suppress(PermissionError):
            fsync_directory(target.parent)
    return target


def refresh_listing(folder: str | os.PathLike[str]) -> None:
    """Let the next listing of ``folder`` show what other nodes have made in it; best effort.

    An NFS client may list a folder from memory for up to a minute.  It forgets what it remembers
    when a change of its own tells it that the folder was changed by others before.
    """
    with contextlib.suppress(OSError):
        descriptor, path = tempfile.mkstemp(prefix=".listing-", dir=folder)
        os.close(descriptor)
        os.unlink(path)  # noqa: PTH108


def make_missing(path: str | os.PathLike[str], mode: int) -> tuple[Path, ...]:
    """Make a folder and what is missing above it; those that were made, the deepest first.

    ``mode`` is narrowed by the umask, for all of them: a umask of nothing opens none to others.
    After an ``OSError`` (``NotADirectoryError`` where something else has the name) all are gone
    again.
    """
    target = Path(path)
    missing: list[Path] = []
    for each in (target, *target.parents):
        if os.path.lexists(each):
            break
        missing.append(each)
    made: list[Path] = []
    try:
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else was as fast
                each.mkdir(mode)
                made.insert(0, each)
        if not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
    except OSError:
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()
        raise
    return tuple(made)


def _refuse_shared_folder(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        raise UnsafeFileError(
            f"{path} is {kind}", next_step="Give the real path of the folder, or another name."
        )
    refuse_foreign(path, found, os.geteuid(), root_too=False)
