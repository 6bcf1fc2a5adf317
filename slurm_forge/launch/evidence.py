"""What is still to be found out about a launch once it has ended: files, logs, Slurm's answers.

Only for one that did not finish, and each question with a short timeout: it is evidence, and the
nodes are waiting.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.recovery.launch_facts import LaunchFacts, RankFailure
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.last_words import LAUNCH_AGAIN, read_last_words
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.records import AccountingRecord
from slurm_forge.vocabulary.cause import Cause

__all__ = ["gathered", "tail_of"]

_PATIENCE = timedelta(seconds=4)
_TAIL = 1 << 16
_MOST_LOGS = 8
_NOT_OURS = frozenset({"batch", "extern", "interactive"})


def gathered(
    facts: LaunchFacts,
    *,
    run: RunDirectory,
    attempt: int,
    launch: int,
    job: str = "",
    slurm: Slurm | None = None,
    output_of: Callable[[int], Path | None] = lambda _: None,
    batch_output: Path | None = None,
    restart_count: int | None = None,
) -> LaunchFacts:
    """``facts`` with what else can be had.  ``output_of`` names the log of a rank.

    Nothing is asked of Slurm where its records have explained the end already.
    """
    if facts.finished:
        return facts
    facts = replace(facts, restart_count=restart_count)
    facts = _with_last_words(facts, run, attempt, launch)
    if batch_output is not None and (facts.batch_signals or facts.rank_signals):
        facts = replace(facts, batch_text=tail_of(batch_output))
    if not facts.lost:
        return facts
    facts = _with_output(facts, output_of)
    if slurm is None or facts.killed_for_memory:
        return facts
    asked = slurm.with_timeout(_PATIENCE) if isinstance(slurm, SubprocessSlurm) else slurm
    hosts = tuple(dict.fromkeys(lost.host for lost in facts.lost if lost.host != "?"))
    with contextlib.suppress(ForgeError, ValueError):
        facts = replace(facts, nodes=asked.show_nodes(hosts))
    if not facts.failures and not any(node.is_down for node in facts.nodes):
        with contextlib.suppress(ForgeError):
            facts = replace(facts, rows=_newest_step(asked.accounting(job)))
    return facts


def tail_of(path: Path, most: int = _TAIL) -> str:
    """The end of a regular file, else nothing; without what an earlier launch has written there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ""
        end = os.pread(descriptor, most, max(0, status.st_size - most)).decode(errors="replace")
        return end.rpartition(LAUNCH_AGAIN)[2]
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _with_last_words(
    facts: LaunchFacts, run: RunDirectory, attempt: int, launch: int
) -> LaunchFacts:
    """The words of ranks that could not say them over the channel any more."""
    said = {failure.rank for failure in facts.failures}
    known = {cause.value for cause in Cause}
    hosts = {lost.rank: lost.host for lost in facts.lost}
    found = [
        RankFailure(
            rank=words.rank,
            host=hosts.get(words.rank, words.host),
            cause=Cause(words.cause) if words.cause in known else Cause.UNKNOWN,
            step=words.step,
            text=words.text,
            micro_batch=words.micro_batch or None,
        )
        for words in read_last_words(run, attempt, launch)
        if words.rank not in said
    ]
    if not found:
        return facts
    spoke = {failure.rank for failure in found}
    return replace(
        facts,
        failures=(*facts.failures, *found),
        lost=tuple(lost for lost in facts.lost if lost.rank not in spoke),
    )


def _with_output(facts: LaunchFacts, output_of: Callable[[int], Path | None]) -> LaunchFacts:
    lost = []
    for index, each in enumerate(facts.lost):
        path = output_of(each.rank) if index < _MOST_LOGS else None
        lost.append(each if path is None else replace(each, output=tail_of(path)))
    return replace(facts, lost=tuple(lost))


def _newest_step(rows: tuple[AccountingRecord, ...]) -> tuple[AccountingRecord, ...]:
    """The row of the step that was started last, if there is one."""
    steps = [row for row in rows if row.step is not None and row.step not in _NOT_OURS]
    return tuple(steps[-1:])
