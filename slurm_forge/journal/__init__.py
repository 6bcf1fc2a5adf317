"""The journal: append-only events on shared storage; ``state = fold(read(run))``."""

from slurm_forge.journal.fold import fold
from slurm_forge.journal.known import INSTABILITY, Known, KnownCheckpoint
from slurm_forge.journal.order import newest_attempt_in, read_position
from slurm_forge.journal.reader import Damage, Record, read_journal
from slurm_forge.journal.state import AttemptState, RunState, RunStatus
from slurm_forge.journal.writer import JournalWriter

__all__ = [
    "INSTABILITY",
    "AttemptState",
    "Damage",
    "JournalWriter",
    "Known",
    "KnownCheckpoint",
    "Record",
    "RunState",
    "RunStatus",
    "fold",
    "newest_attempt_in",
    "read_journal",
    "read_position",
]
