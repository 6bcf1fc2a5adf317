"""Slurm's commands against the fake: they refuse in Slurm's own words, and may get no answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TypeVar

from slurm_forge.errors import SlurmCommandError, SlurmUnreachableError
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.process import Completed
from slurm_forge.slurm.records import (
    AccountingRecord,
    ConfigRecord,
    JobRecord,
    NodeRecord,
    PartitionRecord,
    QueueRecord,
)
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
    requeue_outcome,
)
from slurm_forge.slurm.text.nodelist import fold_nodes
from slurm_forge.testing.cluster.spec import PartitionSpec
from tests.fake_slurm.arguments import Refused, parse_sbatch, sbatch_lines
from tests.fake_slurm.controller import Controller
from tests.fake_slurm.job import FakeJob
from tests.fake_slurm.programs import Start
from tests.fake_slurm.registry import FakeNode

_T = TypeVar("_T")
_UNKNOWN = "Invalid job id specified"
#: What a shell says of a command that is not there, and the real client, too.
_NOT_THERE = 127


class Disturbance(str, Enum):
    """What may befall one request."""

    NONE = "none"
    #: It never arrives.
    SILENT = "silent"
    #: It is carried out, and the answer is lost.
    LOST_ANSWER = "lost_answer"
    #: Too many requests: the client waits for its turn until somebody's patience ends.
    RATE_LIMIT = "rate_limit"
    #: The controller asks for a later attempt.
    BUSY = "busy"
    #: The command is not installed where it is run.
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Request:
    """One command: when, inside which start (None: by a person elsewhere), and its words."""

    time: datetime
    inside: Start | None
    argv: tuple[str, ...]


class Network:
    """What lies between clients and controller.

    ``disturb`` is asked before each request; ``down_until`` is when the controller answers again.
    A request without an answer takes ``patience`` of virtual time.  ``latency`` is how long the
    controller takes before it carries a request out: where that is ``timeout`` or more, the client
    gives up by then.
    """

    def __init__(self) -> None:
        self.disturb: Callable[[Request], Disturbance] = lambda request: Disturbance.NONE
        self.down_until: datetime | None = None
        self.patience = timedelta(0)
        self.latency: Callable[[Request], timedelta] = lambda request: timedelta(0)
        self.timeout = timedelta(seconds=20)
        #: Everything that was asked, whether or not it arrived.
        self.asked: list[Request] = []


class FakeClient:
    """Implements ``slurm_forge.slurm.client.Slurm``; ``inside`` is the start that it runs in."""

    def __init__(
        self, controller: Controller, network: Network, inside: Start | None = None
    ) -> None:
        self._controller = controller
        self._network = network
        self._inside = inside

    # -- jobs --------------------------------------------------------------------------------

    def submit(self, script: Path, args: Sequence[str] = ()) -> str:
        """See ``Slurm``.  The script's own ``#SBATCH`` lines count where the file exists."""

        def carry_out() -> str:
            text = script.read_text(encoding="utf-8") if script.is_file() else ""
            return self._controller.submit(script, parse_sbatch([*sbatch_lines(text), *args]))

        return self._ask(carry_out, "sbatch", "--parsable", *args, str(script))

    def show_job(self, job: str) -> JobRecord | None:
        """See ``Slurm``."""
        records = self.show_tasks(job)
        return next((each for each in records if job in {each.job_ref, str(each.job_id)}), None)

    def show_tasks(self, job: str) -> tuple[JobRecord, ...]:
        """See ``Slurm``.  Tasks of an array that wait have a record each."""
        return self._ask(
            lambda: tuple(each.record() for each in self._controller.found(job)),
            "scontrol", "show", "job", job,
        )  # fmt: skip

    def requeue(self, job: str) -> RequeueReply:
        """See ``Slurm``."""
        return self._requeue(job, "requeue")

    def requeue_hold(self, job: str) -> RequeueReply:
        """See ``Slurm``."""
        return self._requeue(job, "requeuehold")

    def hold(self, job: str) -> None:
        """See ``Slurm``."""
        self._change(job, self._controller.hold, "scontrol", "hold", job)

    def release(self, job: str) -> None:
        """See ``Slurm``."""
        self._change(job, self._controller.release, "scontrol", "release", job)

    def cancel(self, job: str, *, signal: str | None = None, batch: bool = False) -> None:
        """See ``Slurm``."""

        def carry_out() -> None:
            for each in self._controller.found(job):
                if signal is None:
                    self._controller.cancel(each)
                else:
                    self._controller.send(each, f"SIG{signal}", batch=batch)

        words = () if signal is None else (f"--signal={signal}",)
        self._ask(carry_out, "scancel", *words, *(("--batch",) if batch else ()), job)

    def cancel_waiting(self, job: str) -> None:
        """See ``Slurm``."""

        def carry_out() -> None:
            for each in self._controller.found(job):
                if each.base is JobState.PENDING:
                    self._controller.cancel(each)

        self._ask(carry_out, "scancel", "--state=PENDING", job)

    def update_job(self, job: str, update: JobUpdate) -> None:
        """See ``Slurm``."""
        words = update.assignments()
        if words:
            self._change(
                job,
                lambda each: self._update(each, update),
                "scontrol", "update", f"JobId={job}", *words,
            )  # fmt: skip

    # -- looking -----------------------------------------------------------------------------

    def accounting(self, job: str) -> tuple[AccountingRecord, ...]:
        """See ``Slurm``.  Jobs only, no steps."""

        def carry_out() -> tuple[AccountingRecord, ...]:
            if not self._controller.spec.accounting:
                return ()
            rows: list[AccountingRecord] = []
            for each in self._controller.jobs.values():
                if job in {each.ref, str(each.number), str(each.array)}:
                    rows += each.history
                    if not each.over or each.completing:
                        rows.append(each.row(each.state))
            return tuple(rows)

        return self._ask(carry_out, "sacct", "--duplicates", "--jobs", job)

    def queue(self, user: str) -> tuple[QueueRecord, ...]:
        """See ``Slurm``."""
        return self._ask(
            lambda: tuple(
                each.queued()
                for each in self._controller.jobs.values()
                if each.user == user and (not each.over or each.completing)
            ),
            "squeue", f"--user={user}",
        )  # fmt: skip

    def show_partition(self, name: str) -> PartitionRecord | None:
        """See ``Slurm``."""
        return next((each for each in self.show_partitions() if each.name == name), None)

    def show_partitions(self) -> tuple[PartitionRecord, ...]:
        """See ``Slurm``."""
        spec = self._controller.spec
        return self._ask(
            lambda: tuple(self._partition(each) for each in spec.partitions),
            "scontrol", "show", "partition",
        )  # fmt: skip

    def show_nodes(self, names: Sequence[str]) -> tuple[NodeRecord, ...]:
        """See ``Slurm``."""
        known = self._controller.nodes
        return self._ask(
            lambda: tuple(self._node(known[name]) for name in names if name in known),
            "scontrol", "show", "node", ",".join(names),
        )  # fmt: skip

    def show_config(self) -> ConfigRecord:
        """See ``Slurm``."""
        spec = self._controller.spec
        record = ConfigRecord(
            cluster_name="fake",
            version=spec.version,
            preempt_type="preempt/partition_prio",
            preempt_mode="REQUEUE",
            preempt_parameters=("send_user_signal",) if spec.send_user_signal else (),
            auth_info=(f"cred_expire={spec.cred_expire.total_seconds():.0f}",),
            kill_wait=spec.kill_wait,
            slurmd_timeout=spec.slurmd_timeout,
            min_job_age=spec.min_job_age,
            job_requeue=spec.job_requeue,
            max_batch_requeue=spec.max_batch_requeue,
            select_type="select/linear",
            proctrack_type="proctrack/cgroup",
            accounting_storage_type="accounting_storage/slurmdbd" if spec.accounting else None,
        )
        return self._ask(lambda: record, "scontrol", "show", "config")

    # -- how ---------------------------------------------------------------------------------

    def _ask(self, carry_out: Callable[[], _T], *argv: str) -> _T:
        """The answer, or the error that the real client would raise."""
        network, clock = self._network, self._controller.clock
        request = Request(clock.now, self._inside, argv)
        network.asked.append(request)
        disturbance = network.disturb(request)
        if network.down_until is not None and clock.now < network.down_until:
            disturbance = Disturbance.SILENT
        if disturbance is Disturbance.MISSING:
            text = f"{argv[0]} can't be started: No such file or directory"
            raise SlurmUnreachableError(argv, _NOT_THERE, text)
        if disturbance is Disturbance.BUSY:
            raise SlurmCommandError(argv, 1, "Job can not be altered now, try again later")
        if disturbance in (Disturbance.SILENT, Disturbance.RATE_LIMIT):
            self._wait(network.patience)
            raise SlurmUnreachableError(argv, 124, _SILENCE[disturbance])
        latency = network.latency(request)
        self._wait(min(latency, network.timeout))
        if latency >= network.timeout:
            raise SlurmUnreachableError(argv, 124, _SILENCE[Disturbance.SILENT])
        try:
            answer = carry_out()
        except Refused as error:
            if disturbance is Disturbance.NONE:
                raise SlurmCommandError(argv, 1, str(error)) from None
        else:
            if disturbance is Disturbance.NONE:
                if self._inside is not None:
                    self._inside.check()
                return answer
        self._wait(network.patience)
        raise SlurmUnreachableError(argv, 1, "Message receive failure")

    def _wait(self, time: timedelta) -> None:
        if not time:
            return
        if self._inside is None:
            self._controller.clock.advance(time)
        else:
            self._inside.sleep(time.total_seconds())

    def _found(self, job: str) -> list[FakeJob]:
        found = self._controller.found(job)
        if not found:
            raise Refused(f"{_UNKNOWN} for job {job}")
        return found

    def _requeue(self, job: str, verb: str) -> RequeueReply:
        def carry_out() -> None:
            refusals: list[str] = []
            found = self._found(job)
            for each in found:
                try:
                    self._controller.requeue(each, hold=verb == "requeuehold")
                except Refused as error:
                    refusals.append(f"{error} for job {each.ref}")
            if len(refusals) == len(found):
                raise Refused("\n".join(refusals))

        argv = ("scontrol", verb, job)
        try:
            self._ask(carry_out, *argv)
        except SlurmCommandError as error:
            if isinstance(error, SlurmUnreachableError):
                missing = error.returncode == _NOT_THERE
                outcome = RequeueAnswer.NO_COMMAND if missing else RequeueAnswer.UNREACHABLE
                return RequeueReply(outcome, error.stderr)
            told = Completed(argv, error.returncode, "", error.stderr)
            return RequeueReply(requeue_outcome(told), error.stderr)
        return RequeueReply(requeue_outcome(Completed(argv, 0, "", "")), "")

    def _change(self, job: str, change: Callable[[FakeJob], None], *argv: str) -> None:
        def carry_out() -> None:
            for each in self._found(job):
                if each.over:
                    raise Refused(f"Job has already finished for job {job}")
                change(each)

        self._ask(carry_out, *argv)

    def _update(self, job: FakeJob, update: JobUpdate) -> None:
        waits = job.base is JobState.PENDING
        only_waiting = (update.exclude_nodes, update.memory_per_node, update.start_after)
        if not waits and any(each is not None for each in only_waiting):
            raise Refused(f"Job is no longer pending execution for job {job.ref}")
        if not waits and update.num_nodes is not None:
            raise Refused(f"Requested operation not supported on this system for job {job.ref}")
        longer = update.time_limit is not None and update.time_limit > job.time_limit
        if not waits and longer:
            raise Refused(f"Access/permission denied for job {job.ref}")
        self._controller.check_nodes(update.exclude_nodes or ())
        if update.exclude_nodes is not None:
            job.excluded = tuple(update.exclude_nodes)
        job.num_nodes = update.num_nodes or job.num_nodes
        if update.memory_per_node is not None:
            job.memory = update.memory_per_node
        job.requeue = job.requeue if update.requeue is None else update.requeue
        job.comment = job.comment if update.comment is None else update.comment
        if update.time_limit is not None:
            job.time_limit = update.time_limit
            self._controller.arm_limit(job)
        if update.start_after is not None:
            job.begin = self._controller.clock.now + max(update.start_after, timedelta(0))
            self._controller.kick(update.start_after)
        self._controller.kick()

    def _partition(self, partition: PartitionSpec) -> PartitionRecord:
        return PartitionRecord(
            name=partition.name,
            state="UP",
            preempt_mode=partition.preempt_mode.value,
            grace_time=partition.grace_time,
            default_time=self._controller.spec.default_time,
            nodes=fold_nodes(self._controller.spec.nodes),
            total_nodes=len(self._controller.spec.nodes),
            priority_tier=partition.priority_tier,
            is_default=partition.default,
        )

    def _node(self, node: FakeNode) -> NodeRecord:
        base = "DOWN" if node.down else "IDLE" if node.job is None else "ALLOCATED"
        flags = (("DRAIN",) if node.drained else ()) + (
            () if node.responds else ("NOT_RESPONDING",)
        )
        return NodeRecord(name=node.name, state=(base, *flags), reason=node.reason)


_SILENCE = {
    Disturbance.SILENT: "no answer within the time limit",
    Disturbance.RATE_LIMIT: "no answer within the time limit. Rate limit exceeded, waiting",
}
