"""What the shell offers at the tab key: runs, sites, causes.  Quick, and silent about trouble."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

#: Of more than these nobody chooses with the tab key.
_MOST = 500


def run_names(ctx: Any, incomplete: str) -> list[str]:
    """Runs in the folder that ``--runs`` names, or in the usual one."""
    from slurm_forge.cli.run_choice import run_names as names
    from slurm_forge.cli.run_choice import runs_folder

    matches: list[str] = []
    # A shell that waits for an answer has no use for a complaint.
    with contextlib.suppress(Exception):
        folder = ctx.params.get("runs")
        matches = names(runs_folder(None if folder is None else Path(folder)))
    return [name for name in matches if name.startswith(incomplete)][:_MOST]


def site_names(incomplete: str) -> list[str]:
    """Sites of the package and of the user."""
    from slurm_forge.cli.run_choice import site_places

    sites: tuple[str, ...] = ()
    with contextlib.suppress(Exception):
        sites = site_places().names()
    return [name for name in sites if name.startswith(incomplete)]


def cause_names(incomplete: str) -> list[str]:
    """Keys of ``recovery:``."""
    from slurm_forge.vocabulary.cause import Cause

    return [cause.value for cause in Cause if cause.value.startswith(incomplete)]


def setting_keys(incomplete: str) -> list[str]:
    """Keys of a job as ``--set`` takes them; the value after ``=`` is not completed."""
    from slurm_forge.spec.layers import combined
    from slurm_forge.spec.origins import job_values

    keys = [f"{value.key}=" for value in job_values(combined((), None))]
    return [key for key in keys if key.startswith(incomplete)][:_MOST]
