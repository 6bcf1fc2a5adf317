"""The journal: append-only events on shared storage; ``state = fold(read(run))``."""

from slurm_forge.journal.fold import AttemptState, RunState, RunStatus, fold
from slurm_forge.journal.reader import Damage, Record, read_journal
from slurm_forge.journal.writer import JournalWriter

__all__ = [
    "AttemptState",
    "Damage",
    "JournalWriter",
    "Record",
    "RunState",
    "RunStatus",
    "fold",
    "read_journal",
]
