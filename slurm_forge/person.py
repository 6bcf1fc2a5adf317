"""Who a user is, as a name for the journal and for messages."""

from __future__ import annotations

import getpass
import os
import pwd


def person() -> str:
    """The user's name, else the number: a container may know no user by that number."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # which one depends on Python's version
        return str(os.getuid())


def user_name(uid: int) -> str:
    """The name of a user id, and the number where it has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
