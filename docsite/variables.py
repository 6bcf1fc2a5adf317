"""The reference of the environment: which variables are ours, and what they say."""

from __future__ import annotations

from docsite.tables import code, table
from slurm_forge.knobs import KNOBS

__all__ = ["variables"]


def variables() -> list[str]:
    """Those that a person sets, and those that our own processes hear."""
    return [
        "## Variables that you set",
        "",
        *table(("variable", "description"), _rows(for_users=True)),
        "",
        "## Set by slurm_forge for the processes that it starts",
        "",
        "Programs may read them (under `exec`: `SLURM_FORGE_LATEST`, `SLURM_FORGE_RESTARTS`).",
        "",
        *table(("variable", "description"), _rows(for_users=False)),
    ]


def _rows(*, for_users: bool) -> list[tuple[str, str]]:
    knobs = [each for each in KNOBS.values() if each.for_users is for_users]
    return [(code(each.name), each.meaning) for each in knobs]
