"""Reading what the page of a run is made of: its journal, checkpoints, stacks, ancestors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from slurm_forge.cli.checkpoints.disk import list_stored
from slurm_forge.cli.observe.run_reading import gather
from slurm_forge.cli.observe.surroundings import surrounded, with_queue
from slurm_forge.errors import ForgeError
from slurm_forge.files import FOLDERS_OWNER, read_trusted
from slurm_forge.journal import events as ev
from slurm_forge.journal import fold, read_to_fold
from slurm_forge.journal.logged import LoggedCurve
from slurm_forge.report.checkpoints import CheckpointsListed, list_checkpoints
from slurm_forge.report.page.values import Ancestor, RunSources, StackFile
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.story.queue_reason import QueueAnswer
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file

#: Stacks of so many bytes are embedded, of a file and of a run: the rest is named.
_OF_A_FILE, _OF_A_RUN = 24_000, 150_000
_MOST_ANCESTORS = 8


def read_sources(
    run: RunDirectory,
    *,
    brief: bool = False,
    ask: Callable[[str], QueueAnswer | None] | None = None,
) -> RunSources:
    """Read everything that the page of a run shows.

    Args:
        run: The run.
        brief: Only what an index needs: no checkpoints, no stacks, no ancestors.
        ask: Asks Slurm about a job; None is how every report asks.

    Returns:
        What was read.
    """
    curve = LoggedCurve()

    def read() -> RunFacts:
        curve.records.clear()
        return surrounded(gather(run, logs=False, whole=True, curve=curve), run)

    facts = with_queue(read, ask)
    sources = RunSources(facts=facts, logged=tuple(curve.records))
    if brief:
        return sources
    return replace(
        sources,
        checkpoints=_checkpoints(run, facts),
        stacks=tuple(_stacks(run, facts)),
        ancestors=tuple(_ancestors(facts)),
    )


def _checkpoints(run: RunDirectory, facts: RunFacts) -> CheckpointsListed | None:
    """As ``checkpoints list`` shows them; None where nobody can look."""
    try:
        stored, leftovers = list_stored(read_run_file(run.spec_file).open_store(run))
    except (ForgeError, OSError):
        return None
    return list_checkpoints(run.name, str(run.path), facts.state(), stored, leftovers)


def _stacks(run: RunDirectory, facts: RunFacts) -> Iterator[StackFile]:
    """The files that a standstill left behind, the newest ones first, as far as they fit."""
    left = _OF_A_RUN
    files = [
        (record, name)
        for record in sorted(facts.records, key=lambda each: each.time, reverse=True)
        if isinstance(record.event, ev.StallSeen)
        for name in record.event.files
    ]
    for record, name in files:
        path = run.path / name
        if left <= 0 or not path.resolve().is_relative_to(run.path.resolve()):
            continue
        with contextlib.suppress(OSError, ForgeError):
            content = read_trusted(path, 1 << 24, owner=FOLDERS_OWNER)
            text = content[:_OF_A_FILE].decode(errors="replace")
            if len(content) > _OF_A_FILE:
                text += f"\n… all {len(content)} bytes: {path}"
            left -= len(text)
            yield StackFile(attempt=record.attempt, launch=record.launch, name=name, text=text)


def _ancestors(facts: RunFacts) -> Iterator[Ancestor]:
    """The runs that it was forked from, as far as they are still there."""
    forked = facts.state().forked
    for _ in range(_MOST_ANCESTORS):
        if forked is None:
            return
        parent, words, next_ = RunDirectory.at(forked.parent), "", None
        try:
            state = fold(read_to_fold(RunDirectory.existing(parent.path)))
            words, next_ = state.status.value, state.forked
        except (ForgeError, OSError):
            words = "can't be read any more"
        fresh = f", fresh: {', '.join(forked.fresh)}" if forked.fresh else ""
        yield Ancestor(
            run=parent.name,
            path=str(parent.path),
            step=forked.step,
            checkpoint=forked.checkpoint,
            words=f"{words}{fresh}; {parent.path}",
        )
        forked = next_
