"""Who has started this process, as a name for the journal."""

from __future__ import annotations

import getpass
import os


def person() -> str:
    """The user's name, else the number: a container may know no user by that number."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # which one depends on Python's version
        return str(os.getuid())
