"""What Slurm said in a way that is not known here: noted in the journal, once for each name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from slurm_forge.journal import read_to_fold
from slurm_forge.journal.events import Note
from slurm_forge.launch.attempt.attempt import Attempt
from slurm_forge.slurm.versions import Unrecognized

_LONGEST = 400
#: How a note begins; and how it began in journals of 0.1.0.
_WORDS = ("not understood, ignored", "not understood, and done without")


def note_unrecognized(attempt: Attempt, fields: Iterable[Unrecognized]) -> None:
    """Best effort: a journal that can't be written keeps nothing from going on."""
    by_name = {each.name: each for each in reversed(tuple(fields))}
    if not by_name:
        return
    with contextlib.suppress(OSError):
        records = read_to_fold(attempt.run)
        texts = [record.event.text for record in records if isinstance(record.event, Note)]
        for name, each in by_name.items():
            begins = tuple(f"{words}: {name}=" for words in _WORDS)
            if not any(text.startswith(begins) for text in texts):
                text = f"{_WORDS[0]}: {each}"
                attempt.journal.write(Note(text=text[:_LONGEST]))
