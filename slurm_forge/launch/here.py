"""``train_here``: a training function on this machine, from Python, as local processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_forge.journal import RunState
from slurm_forge.launch.local import ENDED_BY_SIGNAL, run_locally
from slurm_forge.launch.sites import find_site
from slurm_forge.launch.submission import create_run, entry_of
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import read_run_file

__all__ = ["train_here"]


def train_here(
    train: Callable[..., Any] | str,
    spec: Mapping[str, Any],
    *,
    ranks: int = 1,
    runs: Path | str = "runs",
    progress: Callable[[RunState], None] = lambda state: None,
) -> RunDirectory:
    """Train with ``ranks`` local processes until the run is finished or held; continues a run.

    ``spec`` has the keys of a job file.  Look at the state of the returned run to know how it went.
    A signal that would end this process (Ctrl-C, SIGTERM) does so once the run has saved.
    """
    entry = train if isinstance(train, str) else entry_of(train)
    job = job_from_mapping({**spec, "entry": entry})
    run = RunDirectory.at(Path(runs) / job.name)
    if run.spec_file.is_file():
        file = read_run_file(run.spec_file)
    else:
        run, file = create_run(
            job, runs=Path(runs), site=find_site("generic"), submitted_from=Path.cwd()
        )
    code = run_locally(run, file, ranks, progress)
    if code > ENDED_BY_SIGNAL:
        signal.raise_signal(signal.Signals(code - ENDED_BY_SIGNAL))
    return run
