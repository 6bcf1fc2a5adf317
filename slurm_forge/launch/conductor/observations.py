"""What was seen of a launch so far, and the facts that are left of it at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from slurm_forge.control import MemberView
from slurm_forge.control.messages.rank import RankFinished, RankStopped
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.recovery.incident.launch_facts import (
    LaunchFacts,
    LostRank,
    RankFailure,
    WorkerEnd,
)
from slurm_forge.recovery.monitor.preflight_verdict import PreflightRefusal
from slurm_forge.recovery.monitor.probe_verdict import ProbeFailure
from slurm_forge.recovery.monitor.stalls import Stall
from slurm_forge.recovery.monitor.straggler_reports import Straggler
from slurm_forge.slurm.records import JobRecord

#: Heartbeats come every second.
_MUTE_S = 4.0


class Launched(Protocol):
    """A started launch as the conductor sees it: a process that ends, and its last output."""

    def poll(self) -> int | None:
        """Exit status, or None while ranks run."""

    def kill(self) -> None:
        """End every rank now."""

    def tail(self) -> str:
        """The last lines of the launcher's own output."""

    def launcher_signal(self) -> str:
        """The signal that ended the launcher itself, empty where none did or we sent it."""

    def ends(self) -> tuple[WorkerEnd, ...]:
        """How ranks ended, where somebody but the launcher's output tells; in that order."""


@dataclass(slots=True)
class Observations:
    """What has happened so far."""

    rank_signals: list[str] = field(default_factory=list)
    batch_signals: list[str] = field(default_factory=list)
    failures: list[RankFailure] = field(default_factory=list)
    lost: list[LostRank] = field(default_factory=list)
    left_ranks: set[int] = field(default_factory=set)
    stopped: RankStopped | None = None
    #: After how many steps a rank's program has returned.
    returned_at: dict[int, int] = field(default_factory=dict)
    finished: dict[int, RankFinished] = field(default_factory=dict)
    given_up: bool = False
    #: The incident that rank 0 has decided on already.
    decided: str = ""
    #: What the kernel's counters say of processes that it ended for memory.
    killed_for_memory: str = ""
    stop_asked: float | None = None
    #: The first query to Slurm that was begun after the stop was asked for.
    stop_query: int = 0
    #: The first query that was begun after the newest signal or the launch's end: Slurm's earlier
    #: answers say nothing about either.
    evidence_query: int = 0
    #: The first query that was begun after the newest signal for the batch step.
    batch_query: int = 0
    #: When its first SIGTERM came, on the conductor's clock, and the first query after that.
    terminated: float | None = None
    terminated_query: int = 0
    #: The last save asked for, until it is agreed, and then the step at which it comes.
    save_request: int | None = None
    save_step: int = 0
    stop_file: bool = False
    stopped_by: str = ""
    due_time_limit: bool = False
    deadline_passed: bool = False
    ending_since: float | None = None
    aborted: bool = False
    #: What the look at the nodes before training came to, where the launch is ended for it.
    refused: PreflightRefusal | None = None
    #: The watchdog's verdict.
    stalled: Stall | None = None
    #: The slow node that the launch is stopped for.
    straggler: Straggler | None = None
    #: Ranks that had not joined when they were waited for no longer.
    absent: tuple[int, ...] = ()
    first_record: JobRecord | None = None
    notice_record: JobRecord | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the run is: rank 0 said so, which has committed the last checkpoint, and nobody
        failed in what the program does after its last step.
        """
        return 0 in self.finished and not self.failures

    def _unresponsive(
        self, members: Mapping[int, MemberView], last_heard: Mapping[int, float], clock: float
    ) -> Iterator[LostRank]:
        """Ranks whose connection is there still, with nobody at the other end of it.

        A node that loses power closes none.  ``last_heard`` is when monitors spoke last: that of a
        frozen rank does.
        """
        for rank, member in sorted(members.items()):
            silent = clock - max(member.last_message_at, last_heard.get(rank, 0.0)) > _MUTE_S
            if member.connected and silent and rank not in self.left_ranks:
                yield LostRank(rank, member.host)

    def job_at_end(self, job_poller: JobPoller) -> JobRecord | None:
        """What Slurm has said of the job since the end, or else since the batch step's signal."""
        since_end = job_poller.since(self.evidence_query)
        return since_end or (job_poller.since(self.batch_query) if self.batch_signals else None)

    def note_batch_signal(self, name: str, job_poller: JobPoller, now: float) -> None:
        """The batch step got a signal: what Slurm said before does not explain it."""
        self.batch_query = job_poller.next_query
        self.batch_signals.append(name)
        if name == "SIGTERM" and self.terminated is None:
            self.terminated, self.terminated_query = now, self.batch_query

    @property
    def terminated_after(self) -> timedelta | None:
        """How long after the stop was asked for the batch step got its first SIGTERM."""
        if self.stop_asked is None or self.terminated is None:
            return None
        return timedelta(seconds=max(0.0, self.terminated - self.stop_asked))

    def signalled_since(self, job_poller: JobPoller) -> bool:
        """Whether the batch step was signalled after all that Slurm has answered."""
        return job_poller.latest_query < self.batch_query

    def diverged_ranks(self, members: Mapping[int, MemberView]) -> tuple[int, int] | None:
        """A rank whose program has returned, and one that has begun a step beyond that, if any.

        They can't meet again: the second waits for the first in a collective that never comes.
        """
        # Who returned first has parted from whoever any other has; nobody parts from itself.
        earliest = sorted(self.returned_at.items(), key=lambda each: each[1])[:2]
        for rank, step in earliest:
            for other, member in members.items():
                if other != rank and max(member.begun, self.returned_at.get(other, 0)) > step:
                    return rank, other
        return None

    def facts(
        self,
        members: Mapping[int, MemberView],
        *,
        now: datetime,
        clock_ahead: timedelta,
        lead: timedelta,
        planned_end: datetime | None,
        probe: ProbeFailure | None,
        job_poller: JobPoller,
        launched: Launched | None,
        clock: float | None = None,
        monitors: Mapping[int, float] | None = None,
    ) -> LaunchFacts:
        """Everything that classification rests on, as one value.

        ``clock`` is the hub's now, ``monitors`` when that of each rank was last heard on it.
        """
        step = max((member.step for member in members.values()), default=None)
        if self.stopped is not None:
            step = self.stopped.step
        if 0 in self.finished:
            step = self.finished[0].step
        return LaunchFacts(
            now=now,
            by_slurm=job_poller.has_slurm,
            clock_ahead=clock_ahead,
            step=step,
            finished=self.is_finished,
            stopped_at=None if self.stopped is None else self.stopped.step,
            checkpoint=None if self.stopped is None else self.stopped.checkpoint,
            job_at_start=self.first_record,
            job_at_notice=self.notice_record,
            job_at_end=self.job_at_end(job_poller),
            terminated_after=self.terminated_after,
            signalled_since=self.signalled_since(job_poller),
            lead=lead,
            planned_end=planned_end,
            stop_file=self.stop_file,
            stopped_by=self.stopped_by,
            due_time_limit=self.due_time_limit,
            deadline_passed=self.deadline_passed,
            rank_signals=tuple(dict.fromkeys(self.rank_signals)),
            batch_signals=tuple(dict.fromkeys(self.batch_signals)),
            failures=tuple(self.failures),
            lost=tuple(self.lost),
            absent=self.absent,
            unresponsive=()
            if clock is None
            else tuple(self._unresponsive(members, monitors or {}, clock)),
            refused=self.refused,
            stalled=self.stalled,
            probe=probe,
            straggler=self.straggler,
            exit_status=None if launched is None else launched.poll(),
            ends=() if launched is None else launched.ends(),
            launcher_text="" if launched is None else launched.tail(),
            launcher_signal="" if launched is None else launched.launcher_signal(),
            decided=self.decided,
            killed_for_memory=self.killed_for_memory or _memory_of(launched),
        )


def _memory_of(launched: Launched | None) -> str:
    ends = () if launched is None else launched.ends()
    return next((f"{end.memory} on {end.host}" for end in ends if end.memory), "")
