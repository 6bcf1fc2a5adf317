"""What was done to a cell's run on a real Slurm, for ``words`` to hold the reports against."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from slurm_forge.errors import ForgeError
from slurm_forge.journal.events import CheckpointCommitted, CheckpointFailed, LaunchStarted
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.states import JobState, parse_state
from tests.slurm.harness import environment
from tests.slurm.truth.cells import Cell, Submission
from tests.slurm.truth.judging import Ended, idle_starts
from tests.slurm.truth.words import Claim, Deeds, claims, deeds_on_disk, told_now

#: The rank, of one on each node, that the fault of a cell strikes: no other node may be blamed.
_BLAMED_RANK = {
    "node-killed": 1,
    "batch-node-killed": 0,
    "node-set-down": 1,
    "slurmd-frozen": 1,
    "batch-slurmd-frozen": 0,
    "host-oom": 1,
    "segfault": 1,
    "abort": 1,
    "rank-killed": 1,
}


def claims_of(cell: Cell, ended: Ended) -> tuple[Claim, ...]:
    """Every claim of the reports about this run; none where it never began."""
    if cell.submission is Submission.HETEROGENEOUS:
        return ()
    with environment(ended.cluster):
        told = told_now(ended.watched.run)
        for name, text in (("status", told.screen), ("explain", told.text)):
            (ended.folder / f"{name}.txt").write_text(text)
        return claims(told, _deeds(cell, ended))


def _deeds(cell: Cell, ended: Ended) -> Deeds:
    run, records = ended.watched.run, ended.records
    last = ended.cluster.job(ended.jobs[-1])
    saved = max((r.time for r in records if isinstance(r.event, CheckpointCommitted)), default=0.0)
    failed = [r.time for r in records if isinstance(r.event, CheckpointFailed)]
    found = deeds_on_disk(ended.watched.record, run.checkpoints)
    expected = cell.expected
    launched = {(r.attempt, r.launch) for r in records if isinstance(r.event, LaunchStarted)}
    found = replace(
        found,
        starts=ended.starts - idle_starts(cell, ended) if cell.journal else None,
        launches=len(launched) if cell.journal else None,
        state=parse_state(last.state),
        held=last.state == "PENDING" and "held" in last.reason.lower(),
        finished=run.is_done(),
        blamed=_blamed(cell, ended),
        failing=sum(time > saved for time in failed),
        failed_saves=len(failed),
    )
    if cell.journal and not expected.unaware:
        found = replace(found, causes=expected.causes)
    return replace(found, waited_s=_waited(ended))


def _blamed(cell: Cell, ended: Ended) -> frozenset[str]:
    """The nodes of the job that may be struck for what was done to it."""
    rank, attempts = _BLAMED_RANK.get(cell.name), ended.watched.state.attempts
    return frozenset() if rank is None or not attempts else frozenset([attempts[0].nodes[rank]])


def _waited(ended: Ended) -> float | None:
    """Seconds that its jobs were in the queue, by accounting; None where there is none."""
    slurm, waited = SubprocessSlurm.of_this_process(), 0.0
    for job in ended.jobs:
        rows = []
        with contextlib.suppress(ForgeError):
            rows = [row for row in slurm.accounting(job) if row.step is None]
        before = None
        for row in rows:
            if row.start_time is None or row.submit_time is None:
                return None
            begun = row.submit_time if before is None else max(row.submit_time, before)
            waited += max(0.0, (row.start_time - begun).total_seconds())
            before = row.end_time
        if not rows or rows[-1].state in (JobState.PENDING, JobState.REQUEUED):
            return None
    return waited
