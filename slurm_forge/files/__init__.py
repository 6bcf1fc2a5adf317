"""Atomic writes, and reads that reject files other users could have planted; used by all above.

Standard library only.  ``OSError`` is passed on as it is: only the caller knows what the file was
for.

Entry: ``atomic``, ``trusted_read``; who may have written a file: ``trust``; lookups: ``lookup``.
"""

from __future__ import annotations

from slurm_forge.files.atomic import (
    create_exclusive,
    fsync_directory,
    make_missing,
    make_private_directory,
    private_directory,
    write_atomic,
)
from slurm_forge.files.lookup import (
    exists,
    exists_on_server,
    is_file,
    is_folder,
    refresh_listing,
    refresh_names,
)
from slurm_forge.files.trust import (
    ANYBODY,
    FOLDERS_OWNER,
    refuse_foreign,
    refuse_readable,
)
from slurm_forge.files.trusted_read import (
    open_trusted,
    read_bounded,
    read_json,
    read_named,
    read_trusted,
    retry_stale,
)

__all__ = [
    "ANYBODY",
    "FOLDERS_OWNER",
    "create_exclusive",
    "exists",
    "exists_on_server",
    "fsync_directory",
    "is_file",
    "is_folder",
    "make_missing",
    "make_private_directory",
    "open_trusted",
    "private_directory",
    "read_bounded",
    "read_json",
    "read_named",
    "read_trusted",
    "refresh_listing",
    "refresh_names",
    "refuse_foreign",
    "refuse_readable",
    "retry_stale",
    "write_atomic",
]
