"""The process ``report RUN``: writes report.html of a run beside a job that trains it.

It has the lowest priority on the node, does not query Slurm, and ends after a limited time.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.journal.line_reader import read_end
from slurm_forge.launch.attempt.report_refresh import EVERY_S
from slurm_forge.process import yield_to_others
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.snapshot_file import signature

_NICEST = 19
#: Processor time; the report of an extreme run is left to the command line.
_MOST_CPU_S = 60
#: At nice 19 beside busy ranks these may take long: until the next report is due.
_LONGEST_S = int(EVERY_S) - 30


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN``: write its report unless nothing has changed since the last one."""
    (path,) = sys.argv[1:] if argv is None else argv
    # Slurm signals all processes of a job that it ends; this one is done soon, and the last report
    # is the one that people read.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(_LONGEST_S)
    yield_to_others(_NICEST)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    run = RunDirectory.at(path)
    try:
        write_report(run)
    except (ForgeError, OSError, MemoryError) as error:
        sys.stderr.write(f"slurm_forge: no report of {run.name}: {error}\n")
        return 1
    return 0


def write_report(run: RunDirectory) -> bool:
    """Write the report of a run into its folder; whether there was anything new."""
    run.refuse_others()
    # From before anything is read: what is written meanwhile may be missing in the page.
    signed = f"<!-- {signature(run)} -->\n".encode()
    if _ends_with(run.report_file, signed):
        return False
    from datetime import datetime, timedelta

    from slurm_forge.cli.observe.report_sources import read_sources
    from slurm_forge.files import write_atomic
    from slurm_forge.report.page.html import run_html
    from slurm_forge.report.page.run_page import run_page

    offset = datetime.now().astimezone().utcoffset() or timedelta(0)
    page = run_page(read_sources(run, ask=lambda _: None), utc_offset=offset)
    write_atomic(run.report_file, run_html(page).encode() + signed, durable=False)
    return True


def _ends_with(path: Path, end: bytes) -> bool:
    try:
        return read_end(path, len(end))[0] == end
    except (ForgeError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())
