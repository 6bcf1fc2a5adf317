"""What a running cluster writes down, so that ``down`` and ``exec`` find it again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from slurm_forge.testing.cluster.layout import Layout, Platform, Ports
from slurm_forge.testing.cluster.processes import ProcessRef
from slurm_forge.testing.cluster.spec import ClusterSpec, Tracking


@dataclass(frozen=True, slots=True)
class Daemon:
    """One daemon: its name in the logs (``slurmctld``, ``slurmd.n1``) and its process."""

    name: str
    process: ProcessRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Everything about a cluster that can't be seen from its configuration.

    ``tracking`` is what AUTO came to.  ``trivial_job_s`` is how long a job that does nothing took
    from sbatch to COMPLETED when the cluster was started; None until it was measured.
    ``without_cgroups`` is why AUTO gave control groups up after it had tried them, if it did.
    """

    boot_id: str
    spec: ClusterSpec
    platform: Platform
    ports: Ports
    tracking: Tracking
    daemons: tuple[Daemon, ...] = ()
    boot_s: float | None = None
    without_cgroups: str = ""
    trivial_job_s: float | None = None


_ADAPTER = TypeAdapter(ClusterState)


def write_state(layout: Layout, state: ClusterState) -> None:
    """Replace the state file in one step, so that a crash leaves the old or the new one."""
    staged = layout.state.with_suffix(".new")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_ADAPTER.dump_json(state, indent=1))
    staged.replace(layout.state)


def read_state(layout: Layout) -> ClusterState | None:
    """The recorded state; None where there is none or it can't be read."""
    try:
        return _ADAPTER.validate_json(Path(layout.state).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None
