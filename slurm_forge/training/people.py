"""What people have said of checkpoints from the command line while the run goes on."""

from __future__ import annotations

import contextlib

from slurm_forge.errors import ForgeError
from slurm_forge.journal import Known, fold, read_journal
from slurm_forge.run_directory import RunDirectory

__all__ = ["PeopleHeard"]


class PeopleHeard:
    """Reads the journal only when a file of the command line's has grown."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._seen = self._sizes()

    def known(self) -> Known | None:
        """The checkpoints as the journal knows them; None where nobody has said anything new."""
        sizes = self._sizes()
        if sizes == self._seen:
            return None
        with contextlib.suppress(OSError, ForgeError):
            known = fold(read_journal(self._run, thin=True)[0]).known
            self._seen = sizes
            return known
        return None

    def _sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for path in self._run.journal.glob("*-cli-*.jsonl"):
                found[path.name] = path.stat().st_size
        return found
