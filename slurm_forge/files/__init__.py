"""Files that are there whole or not at all, and files that nobody else may have planted.

Effects of the ground floor, standard library only.  ``OSError`` is passed on as it is: only the
caller knows what the file was for.
"""

from __future__ import annotations

from slurm_forge.files.append import AppendFile
from slurm_forge.files.atomic import create_exclusive, fsync_directory, write_atomic
from slurm_forge.files.folders import (
    make_missing,
    make_private_directory,
    private_directory,
    refresh_listing,
)
from slurm_forge.files.trusted import open_trusted, read_bounded, read_json, read_trusted

__all__ = [
    "AppendFile",
    "create_exclusive",
    "fsync_directory",
    "make_missing",
    "make_private_directory",
    "open_trusted",
    "private_directory",
    "read_bounded",
    "read_json",
    "read_trusted",
    "refresh_listing",
    "write_atomic",
]
