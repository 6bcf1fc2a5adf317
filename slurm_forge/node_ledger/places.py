"""Where the node ledger lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import ConfigError
from slurm_forge.knobs import Knobs

_OFF = "off"


@dataclass(frozen=True, slots=True)
class LedgerPlace:
    """The folder (None: no ledger is kept), and whether it is ``shared``: the site's.

    A group makes its folder itself: made by us, nobody else could write into it.
    """

    folder: Path | None
    shared: bool


def ledger_place(knobs: Knobs, of_site: str | None) -> LedgerPlace:
    """``SLURM_FORGE_NODES`` (a folder, or ``off``), else the site's, else the user's own state.

    ``ConfigError`` for a path that begins at whatever folder the command was started in.
    """
    if knobs.nodes == _OFF:
        return LedgerPlace(None, shared=False)
    if knobs.nodes is not None:
        return LedgerPlace(_absolute(knobs.nodes, "SLURM_FORGE_NODES"), shared=False)
    if of_site is not None:
        return LedgerPlace(_absolute(of_site, "node_ledger of the site"), shared=True)
    # The base directory specification: a relative path there is to be ignored.
    state = knobs.state_home
    home = state if state is not None and state.startswith("/") else "~/.local/state"
    return LedgerPlace(_absolute(f"{home}/slurm_forge/nodes", "the home directory"), shared=False)


def _absolute(text: str, what: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        path = Path(text)  # no home is known for "~"
    if not path.is_absolute():
        raise ConfigError(
            f"{what}: {text[:200]!r} is not the path of a folder",
            next_step="Give a path that begins with / or ~, or SLURM_FORGE_NODES=off.",
        )
    return path
