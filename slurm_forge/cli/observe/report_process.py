"""The process ``report RUN``: writes report.html of a run beside a job that trains it.

It yields to everything else on the node, asks Slurm nothing, and ends itself after a while.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from slurm_forge.errors import ForgeError
from slurm_forge.process import yield_to_others
from slurm_forge.run_directory import RunDirectory

_NICEST = 19
#: Whoever wants the report of an extreme run makes it by hand.
_LONGEST_S = 60


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN``: write its report unless the journal has not changed since the last one."""
    (path,) = sys.argv[1:] if argv is None else argv
    # Slurm tells all processes of a job that it ends; this one is done soon, and the last report
    # is the one that people read.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(_LONGEST_S)
    yield_to_others(_NICEST)
    run = RunDirectory.at(path)
    try:
        write_report(run)
    except (ForgeError, OSError, MemoryError) as error:
        sys.stderr.write(f"slurm_forge: no report of {run.name}: {error}\n")
        return 1
    return 0


def write_report(run: RunDirectory) -> bool:
    """Write the report of a run into its folder; whether there was anything new to tell."""
    run.refuse_others()
    if _is_current(run):
        return False
    from datetime import datetime, timedelta

    from slurm_forge.cli.observe.report_sources import read_sources
    from slurm_forge.files import write_atomic
    from slurm_forge.report.page.html import run_html
    from slurm_forge.report.page.run_page import run_page

    offset = datetime.now().astimezone().utcoffset() or timedelta(0)
    page = run_page(read_sources(run, ask=lambda _: None), utc_offset=offset)
    write_atomic(run.report_file, run_html(page).encode(), durable=False)
    return True


def _is_current(run: RunDirectory) -> bool:
    """Whether nothing has been written since the last report, by the clock of the files."""
    try:
        made = run.report_file.stat().st_mtime
        with os.scandir(run.journal) as entries:
            return all(entry.stat().st_mtime < made for entry in entries)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
