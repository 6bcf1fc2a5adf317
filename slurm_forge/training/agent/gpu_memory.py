"""Whether the GPUs of this node still list a process that is gone.

The kernel closes a process's files, and with them its GPU contexts, before it reports the end to
the parent.  So a reaped process has released its memory; this only makes sure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

_DRIVER = Path("/dev/nvidiactl")
_QUERY = ("--query-compute-apps=pid", "--format=csv,noheader,nounits")
_PATIENCE_S = 3.0
_PER_CALL_S = 2.0
_BETWEEN_S = 0.05


def parse_pids(text: str) -> frozenset[int]:
    """Parse ``nvidia-smi --query-compute-apps=pid``: a process id per line."""
    words = (line.strip() for line in text.splitlines())
    return frozenset(int(word) for word in words if word.isascii() and word.isdecimal())


def wait_until_given_back(pid: int) -> str:
    """Wait until no GPU lists the process, for at most 3 s; describe what is still listed.

    Empty if there is no GPU, no nvidia-smi, or no answer from it.
    """
    tool = shutil.which("nvidia-smi", path=os.defpath) if _DRIVER.exists() else None
    until = time.monotonic() + _PATIENCE_S
    while tool is not None:
        try:
            done = subprocess.run(
                [tool, *_QUERY], capture_output=True, text=True, timeout=_PER_CALL_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        if pid not in parse_pids(done.stdout):
            return ""
        if time.monotonic() > until:
            return f"a GPU still lists process {pid}"
        time.sleep(_BETWEEN_S)
    return ""
