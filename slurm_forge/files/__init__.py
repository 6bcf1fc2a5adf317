"""Atomic writes, and reads that reject files other users could have planted; used by all above.

Standard library only.  ``OSError`` is passed on as it is: only the caller knows what the file was
for.

Entry: ``atomic``; who may have written a file that is read: ``trust``.
"""

from __future__ import annotations

from slurm_forge.files.atomic import (
    create_exclusive,
    exists_on_server,
    fsync_directory,
    make_missing,
    make_private_directory,
    open_trusted,
    private_directory,
    read_bounded,
    read_json,
    read_named,
    read_trusted,
    refresh_listing,
    retry_stale,
    write_atomic,
)
from slurm_forge.files.trust import (
    ANYBODY,
    FOLDERS_OWNER,
    refuse_foreign,
    refuse_readable,
)

__all__ = [
    "ANYBODY",
    "FOLDERS_OWNER",
    "create_exclusive",
    "exists_on_server",
    "fsync_directory",
    "make_missing",
    "make_private_directory",
    "open_trusted",
    "private_directory",
    "read_bounded",
    "read_json",
    "read_named",
    "read_trusted",
    "refresh_listing",
    "refuse_foreign",
    "refuse_readable",
    "retry_stale",
    "write_atomic",
]
