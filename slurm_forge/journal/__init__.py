"""The journal: append-only events, ``state = fold(read(run))``; used by all packages above.

Attempts are ordered by their claims, launches by their numbers, and records within a launch by
logical time: a writer's records come after everything that it had read.  Wall clocks have no part
in it.  ``AttemptStarted.read`` names the last record of each file that an attempt read when it
began; what older attempts wrote beyond that is fenced, and no reader counts it
(``RunState.fenced``). ``RequeueDone`` and ``AttemptEnded`` count even when they come late, because
they only complete the story of the attempt that wrote them, and a person's requests are never
fenced.  Before an attempt or a command reads, it creates a file in the folder, which makes an NFS
client list the folder anew.

Entry: ``events``.
"""

from slurm_forge.journal.archive import compact_journal, read_journal, read_to_fold
from slurm_forge.journal.file import JournalWriter, Record
from slurm_forge.journal.fold import fold
from slurm_forge.journal.known import Known, KnownCheckpoint
from slurm_forge.journal.line_reader import Damage
from slurm_forge.journal.order import newest_attempt_in, read_position
from slurm_forge.journal.state import AttemptState, RunState, RunStatus

__all__ = [
    "AttemptState",
    "Damage",
    "JournalWriter",
    "Known",
    "KnownCheckpoint",
    "Record",
    "RunState",
    "RunStatus",
    "compact_journal",
    "fold",
    "newest_attempt_in",
    "read_journal",
    "read_position",
    "read_to_fold",
]
