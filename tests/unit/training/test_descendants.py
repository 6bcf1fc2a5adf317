"""What a worker has started is ended for sure: by children alone, whatever changes meanwhile."""

from __future__ import annotations

import subprocess
import sys
import textwrap

_LATE = """
    import os, subprocess, sys, time
    from pathlib import Path
    from slurm_forge import descendants as d

    def state(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    assert d.adopt_orphans()
    parent = subprocess.Popen(
        ["sh", "-c", "setsid sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    orphan = int(parent.stdout.readline())
    looked = d.children

    def looks_too_early():
        # It ends between the look at the children and the look at itself.
        found = looked()
        parent.kill()
        while state(parent.pid) != "Z":
            time.sleep(0.001)
        d.children = looked
        return found

    d.children = looks_too_early
    until = time.monotonic() + 20
    while d.kill_children() and time.monotonic() < until:
        time.sleep(0.001)
    sys.exit(f"{orphan} lives in state {state(orphan)}" if state(orphan) else 0)
"""


def test_who_comes_to_us_while_we_look_is_ended_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_LATE)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
