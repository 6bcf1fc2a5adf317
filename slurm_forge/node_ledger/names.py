"""Names of the ledger's folders and files, and whose they have to be."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from slurm_forge.errors import UnsafeFileError
from slurm_forge.files import refuse_foreign

ENDING = ".jsonl"
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NOT_IN_WORDS = re.compile(r"[^A-Za-z0-9_.-]")
_UID = re.compile(r"0|[1-9][0-9]{0,9}")


def safe_file_name(text: str) -> str:
    """A name that Slurm or the system gave, as the name of a file."""
    plain = _NOT_IN_WORDS.sub("_", text)[:100]
    return plain if _WORD.fullmatch(plain) else f"_{plain[:99]}"


def is_ours(name: str) -> bool:
    """Whether a file is called as the ledger's are."""
    stem = name.removesuffix(ENDING)
    return stem != name and _WORD.fullmatch(stem) is not None


def is_uid(name: str) -> bool:
    """Whether a folder is called as those of users are."""
    return _UID.fullmatch(name) is not None


def refuse_folder(path: Path, owner: int) -> None:
    """``UnsafeFileError`` for anything but a real folder of ``owner`` that only they can fill."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeFileError(
            f"{path} is not a folder", next_step="Check what it is, then remove it."
        )
    refuse_foreign(path, status, owner, root_too=False)
