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
from datetime import datetime, timedelta
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.launch.render.outputs import Output
from slurm_forge.recovery.incident.launch_facts import (
    LaunchFacts,
    RankFailure,
    is_usage_error,
)
from slurm_forge.recovery.incident.slurm_evidence import needs_accounting
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.last_words import LAUNCH_BEGINS, read_last_words
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.records import AccountingRecord
from slurm_forge.vocabulary.cause import Cause

_PATIENCE = timedelta(seconds=4)
#: Slurm is about to kill us.
_LITTLE_PATIENCE = timedelta(seconds=2)
_TAIL = 1 << 16
_MOST_LOGS = 8
#: Slurm's clock is in whole seconds, and another machine's.
_CLOCKS = timedelta(seconds=5)
_NOT_OURS = frozenset({"batch", "extern", "interactive"})


def gather_evidence(
    facts: LaunchFacts,
    *,
    run: RunDirectory,
    attempt: int,
    launch: int,
    job: str = "",
    slurm: Slurm | None = None,
    output_of: Callable[[int], Path | None] = lambda _: None,
    batch_output: Output | None = None,
    restart_count: int | None = None,
    since: datetime | None = None,
) -> LaunchFacts:
    """``facts`` with what else can be had.  ``output_of`` names the log of a rank.

    ``since`` is when the launch began, by this node's clock.  Where somebody wants the nodes, Slurm
    is asked for no more than what tells a preemption from a person's wish: there is no time to
    lose.
    """
    if facts.finished:
        return facts
    facts = replace(facts, restart_count=restart_count)
    facts = _with_last_words(facts, run, attempt, launch)
    if batch_output is not None and (facts.batch_signals or facts.rank_signals):
        facts = replace(facts, batch_text=tail_of(batch_output.path, since=batch_output.since))
    if slurm is not None and job:
        facts = with_accounting(facts, job, slurm, since)
    missed = (*facts.lost, *(facts.unresponsive if facts.outlives_nodes else ()))
    if not missed:
        return facts
    facts = _with_output(facts, output_of, f"{attempt}.{launch}")
    urgent = facts.rank_signals or facts.batch_signals or facts.due_time_limit
    if _agents_know(facts):
        return facts
    if slurm is None or facts.killed_for_memory or urgent or facts.deadline_passed:
        return facts
    client = _limited(slurm, _PATIENCE)
    hosts = tuple(dict.fromkeys(each.host for each in missed if each.host != "?"))
    with contextlib.suppress(ForgeError, ValueError):
        facts = replace(facts, nodes=client.show_nodes(hosts))
    if not facts.failures and not any(node.is_down for node in facts.nodes):
        with contextlib.suppress(ForgeError):
            facts = replace(facts, rows=_newest_step(client.accounting(job), since, facts))
    return facts


def with_accounting(
    facts: LaunchFacts, job: str, slurm: Slurm, since: datetime | None = None
) -> LaunchFacts:
    """What tells a person's wish from an end by Slurm, where the job's record does not."""
    if not needs_accounting(facts):
        return facts
    with contextlib.suppress(ForgeError):
        rows = _limited(slurm, _LITTLE_PATIENCE).accounting(job)
        starts = tuple(row for row in rows if row.step is None)
        return replace(facts, rows=_newest_step(rows, since, facts), job_rows=starts)
    return facts


def _limited(slurm: Slurm, timeout: timedelta) -> Slurm:
    return slurm.with_timeout(timeout) if isinstance(slurm, SubprocessSlurm) else slurm


def _agents_know(facts: LaunchFacts) -> bool:
    """Whether the parents of all lost ranks are there to say how each ended: their nodes live, and
    the step goes on, so that Slurm has nothing to add.
    """
    ended_ranks = {end.rank for end in facts.ends}
    return "Job step aborted" not in facts.launcher_text and all(
        lost.rank in ended_ranks for lost in facts.lost
    )


def tail_of(path: Path, *, since: int = 0, most: int = _TAIL) -> str:
    """The end of a regular file, from byte ``since`` on, else nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ""
        begin = max(since, status.st_size - most)
        return os.pread(descriptor, most, begin).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _output_of_launch(text: str, which: str) -> str:
    """What a rank has printed in that launch: logs go on over launches and attempts."""
    before, mark, after = text.rpartition(LAUNCH_BEGINS)
    if not mark:
        return before + after
    which_launch, _, output = after.partition("\n")
    return output if which_launch.strip() == which else ""


def read_rank_failures(run: RunDirectory, *, attempt: int, launch: int) -> tuple[RankFailure, ...]:
    """The words of ranks that could not say them over the channel any more."""
    causes = {cause.value for cause in Cause}
    return tuple(
        RankFailure(
            rank=words.rank,
            host=words.host,
            cause=Cause(words.cause) if words.cause in causes else Cause.UNKNOWN,
            step=words.step,
            text=words.text,
            micro_batch=words.micro_batch or None,
            usage_error=is_usage_error(words.error),
        )
        for words in read_last_words(run, attempt, launch)
    )


def _with_last_words(
    facts: LaunchFacts, run: RunDirectory, attempt: int, launch: int
) -> LaunchFacts:
    reported = {failure.rank for failure in facts.failures}
    hosts = {lost.rank: lost.host for lost in facts.lost}
    failures = [
        replace(words, host=hosts.get(words.rank, words.host))
        for words in read_rank_failures(run, attempt=attempt, launch=launch)
        if words.rank not in reported
    ]
    if not failures:
        return facts
    spoke = {failure.rank for failure in failures}
    return replace(
        facts,
        failures=(*facts.failures, *failures),
        lost=tuple(lost for lost in facts.lost if lost.rank not in spoke),
    )


def _with_output(
    facts: LaunchFacts, output_of: Callable[[int], Path | None], which: str
) -> LaunchFacts:
    lost_ranks = []
    for index, each in enumerate(facts.lost):
        path = output_of(each.rank) if index < _MOST_LOGS else None
        lost_ranks.append(
            each if path is None else replace(each, output=_output_of_launch(tail_of(path), which))
        )
    return replace(facts, lost=tuple(lost_ranks))


def _newest_step(
    rows: tuple[AccountingRecord, ...], since: datetime | None, facts: LaunchFacts
) -> tuple[AccountingRecord, ...]:
    """The row of the launch's own step, if it is there: the last one, begun with the launch."""
    steps = [row for row in rows if row.step is not None and row.step not in _NOT_OURS]
    if since is not None:
        earliest = since - facts.clock_ahead - _CLOCKS
        steps = [row for row in steps if row.start_time is not None and row.start_time >= earliest]
    return tuple(steps[-1:])
