"""Children of a test's process, which end with what they are given to do."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(program: Callable[[], None]) -> int:
    """Its exit status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            program()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
