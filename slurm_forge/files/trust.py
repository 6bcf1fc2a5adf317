"""Who may have written a file: the one rule about owners, modes and ACLs of all that is trusted.

It is described for users in ``docs/explanation/security.md``.  Whoever calls it has opened the file
and looked at what was opened.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import struct
from dataclasses import dataclass
from enum import IntEnum

from slurm_forge.errors import UnsafeFileError

#: As an owner: whoever owns the folder that the file lies in.  To read a run, whoever's it is: what
#: starts or changes one has made sure that its folders are one's own.
FOLDERS_OWNER = -1
#: As an owner: anybody, for a file that a person has named.
ANYBODY = -2


class _Tag(IntEnum):
    """Of the entries of a POSIX ACL, as the kernel has them (linux/posix_acl_xattr.h)."""

    USER = 0x02
    GROUP_OBJ = 0x04
    GROUP = 0x08
    MASK = 0x10


@dataclass(frozen=True, slots=True)
class _Writers:
    """Who may write a file beside its owner and root."""

    users: tuple[int, ...]
    groups: tuple[int, ...]


def refuse_foreign(
    path: str | os.PathLike[str],
    status: os.stat_result,
    owner: int,
    *,
    root_too: bool = True,
    opened: int | None = None,
    of_group: bool = False,
) -> None:
    """``UnsafeFileError`` for a file or folder that others than those who may can have written.

    Args:
        path: Its name.
        status: What ``stat`` says of it, itself and not where it points.
        owner: Whose it must be, or ``FOLDERS_OWNER`` or ``ANYBODY``.
        root_too: Whether it may be root's instead.
        opened: Its descriptor, where it is open.
        of_group: Whether it may belong to another user in a folder that is shared with a group of
            this process: they could as well replace it.
    """
    name = os.fspath(path)
    allowed = {owner, 0} if root_too else {owner}
    if owner == FOLDERS_OWNER:
        owner = _folder_of(name).st_uid
        allowed = {owner, 0, os.geteuid()}
    elif owner == ANYBODY:
        allowed = {status.st_uid}
    if status.st_uid not in allowed and not (
        of_group and status.st_gid in os.getgroups() and _is_shared(name, status, status.st_gid)
    ):
        raise UnsafeFileError(
            f"{name} belongs to uid {status.st_uid}, not to uid {owner}",
            next_step="Use a path of your own, or ask its owner.",
        )
    who = _others(name, status, opened)
    if who:
        mode = stat.S_IMODE(status.st_mode)
        raise UnsafeFileError(
            f"{name} can be written by other users: {who} (mode {mode:04o})",
            next_step=f"Check that its content is yours, then: chmod go-w {name}",
        )


def refuse_readable(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """``UnsafeFileError`` for a file of secrets that others than its owner can read.

    With an ACL the bits of the group are its mask: nobody whom it names may read more than these.
    """
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UnsafeFileError(
            f"{os.fspath(path)} can be read or written by other users (mode {mode:04o}), and it "
            "holds passwords",
            next_step=f"chmod 600 {os.fspath(path)}; whoever could read it may know what is in it: "
            "consider new passwords and tokens.",
        )


def _others(name: str, status: os.stat_result, opened: int | None) -> str:
    """Who may write it and must not, in words; empty if there is nobody."""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if not status.st_mode & stat.S_IWGRP:
        return ""  # with an ACL these bits are its mask: nobody whom it names may write either
    writers = _writers(status, name if opened is None else opened)
    users = [each for each in writers.users if each not in (status.st_uid, 0)]
    if users:
        return f"uid {users[0]} by its ACL"
    for group in writers.groups:
        if not _is_private(group, status.st_uid) and not _is_shared(name, status, group):
            return f"group {_group_name(group) or group}"
    return ""


def _writers(status: os.stat_result, at: str | int) -> _Writers:
    acl = b""
    with contextlib.suppress(OSError):  # the file system has none, or the file
        acl = os.getxattr(at, "system.posix_acl_access")
    if len(acl) < 4:
        return _Writers((), (status.st_gid,))
    write = 2
    entries = [
        (tag, who) for tag, allowed, who in struct.iter_unpack("<HHI", acl[4:]) if allowed & write
    ]
    return _Writers(
        tuple(who for tag, who in entries if tag == _Tag.USER),
        tuple(
            status.st_gid if tag == _Tag.GROUP_OBJ else who
            for tag, who in entries
            if tag in (_Tag.GROUP_OBJ, _Tag.GROUP)
        ),
    )


def _is_private(group: int, user: int) -> bool:
    """Whether the group is the user's own, as distributions make one for each user.

    It has the user's name, or number where one of them has no name, and nobody else as a member.
    """
    try:
        account = pwd.getpwuid(user)
    except KeyError:
        account = None
    try:
        entry = grp.getgrgid(group)
    except KeyError:
        entry = None
    if account is None or entry is None:
        return group == user and (entry is None or not entry.gr_mem)
    is_theirs = account.pw_gid == group and entry.gr_name == account.pw_name
    return is_theirs and set(entry.gr_mem) <= {account.pw_name}


def _is_shared(name: str, status: os.stat_result, group: int) -> bool:
    """Whether the folder was given to the group on purpose: setgid, and writable for the group."""
    if not stat.S_ISDIR(status.st_mode):
        try:
            status = _folder_of(name)
        except OSError:
            return False
    given = stat.S_ISGID | stat.S_IWGRP
    return status.st_gid == group and status.st_mode & given == given


def _group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return ""


def _folder_of(name: str) -> os.stat_result:
    return os.stat(os.path.dirname(os.path.abspath(name)))  # noqa: PTH100, PTH116, PTH120
