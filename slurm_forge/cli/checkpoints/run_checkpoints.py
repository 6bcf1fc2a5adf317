"""What all verbs on checkpoints need first: the run, its store, and facts of its journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_forge.journal import Record, RunState
    from slurm_forge.journal.events import Event
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.spec.run_file import RunFile
    from slurm_forge.store.directory import CheckpointStore
    from slurm_forge.store.identity import CheckpointName


@dataclass(frozen=True, slots=True)
class Opened:
    """A run whose checkpoints are examined."""

    run: RunDirectory
    file: RunFile
    store: CheckpointStore
    records: tuple[Record, ...]
    state: RunState

    def meant(self, wanted: str) -> CheckpointName:
        """The checkpoint that a person means; CheckpointMissingError where there is none."""
        from slurm_forge.cli.checkpoints.disk import list_stored
        from slurm_forge.cli.checkpoints.names import meant

        stored, _ = list_stored(self.store)
        smaller = self.file.job.checkpoint.rules.smaller_is_better
        return meant(wanted, self.state, stored, smaller_is_better=smaller)


def open_run(run: str, runs: Path | None) -> Opened:
    """The run that a person means."""
    from slurm_forge.cli.run_choice import find_run
    from slurm_forge.journal import fold, read_journal
    from slurm_forge.spec.run_file import read_run_file

    directory = find_run(run, runs)
    file = read_run_file(directory.spec_file)
    store = file.open_store(directory)
    records, _ = read_journal(directory, skip_superseded=True)
    return Opened(directory, file, store, tuple(records), fold(records))


def write_line(opened: Opened, event: Event) -> None:
    """One line of a person's in the journal, on disk on return."""
    from slurm_forge.journal import JournalWriter, newest_attempt_in, read_to_fold

    opened.run.refuse_others()
    records = read_to_fold(opened.run, refresh=True)
    attempt = newest_attempt_in(records)
    launches = [
        launch.number
        for each in opened.state.attempts
        if each.number == attempt
        for launch in each.launches
    ]
    # Among what the run itself writes, behind what was read here: behind all of it, a judgement
    # would bring back to memory what has been deleted since.
    launch = max(launches, default=0)
    journal = JournalWriter(opened.run, attempt=attempt, writer="cli", launch=launch)
    journal.advance_clock(records)
    journal.write(event, durable=True)
    journal.close()
