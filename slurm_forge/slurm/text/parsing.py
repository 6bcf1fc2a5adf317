"""From the output of scontrol, sacct and squeue to records.

Any text may come (a message of the day, half an answer, a newer Slurm).  What is no record, or has
no name or state, raises ``SlurmCommandError`` with the command and the place.  New keys do not
matter; a value that can't be read becomes None and is noted as ``unrecognized``, as is a state that
is not known here: the rest of the record counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, tzinfo
from typing import TypeVar

from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.records import (
    AccountingRecord,
    ConfigRecord,
    JobRecord,
    NodeRecord,
    PartitionRecord,
    QueueRecord,
)
from slurm_forge.slurm.states import JobState, cancelled_by, parse_state
from slurm_forge.slurm.text.fields import (
    split_job_records,
    split_node_records,
    split_partition_records,
    to_exit_code,
    to_limit,
    to_optional,
    to_seconds,
    to_time,
)
from slurm_forge.slurm.versions import Unrecognized
from slurm_forge.units import parse_memory

#: For ``sacct --format``: no column that a user can write, so that "|" always separates.
ACCOUNTING_FIELDS = "JobID,JobIDRaw,State,ExitCode,Submit,Start,End"
#: For ``squeue --format``: without the name, which may hold "|" and line breaks.
QUEUE_FORMAT = "%i|%A|%T|%r|%S"

_T = TypeVar("_T")
_COUNT = re.compile(r"(?P<low>[0-9]{1,10})(?:-[0-9]{1,10})?")
_CONFIG_LINE = re.compile(r"(?P<key>[A-Za-z][A-Za-z0-9_]*)\s*= ?(?P<value>.*)")
#: One line for each of several in newer versions: ``Epilog[0]``.
_EPILOG = re.compile(r"^Epilog(?:Slurmctld)?(?:\[[0-9]+\])?\s*= (?!\(null\))\S", re.M)
#: By the controller's clock as it answers (_fill_ctld_conf in src/slurmctld/proc_req.c).
_CONFIG_TIME = re.compile(r"^Configuration data as of (\S+)$", re.M)
_YES_NO = {"yes": True, "no": False}
_VERSION = re.compile(r"[0-9]+(?:\.[0-9A-Za-z-]+)+")
#: scontrol adds who gave the reason, and when.
_REASON = re.compile(r"(?P<reason>.*?) ?\[[^\s\[\]@]+@[^\s\[\]]+\]")
_SUBMITTED = re.compile(r"(?P<id>[0-9]{1,10})(?:;(?P<cluster>\S+))?")


def parse_jobs(text: str, zone: tzinfo | None = None) -> tuple[JobRecord, ...]:
    """Every record in the output of ``scontrol show job``, in the form with one line or several."""
    try:
        fields = split_job_records(text)
    except ValueError as error:
        raise _not_understood("scontrol show job", str(error), text) from None
    if not fields and "No jobs in the system" not in text:
        raise _not_understood("scontrol show job", "no JobId= in it", text)
    return tuple(_job(_Fields("scontrol show job", values, zone)) for values in fields)


def parse_partitions(text: str) -> tuple[PartitionRecord, ...]:
    """Every record in the output of ``scontrol show partition``."""
    fields = split_partition_records(text)
    if not fields and "No partitions in the system" not in text:
        raise _not_understood("scontrol show partition", "no PartitionName= in it", text)
    return tuple(_partition(_Fields("scontrol show partition", values)) for values in fields)


def parse_nodes(text: str, zone: tzinfo | None = None) -> tuple[NodeRecord, ...]:
    """Every record in the output of ``scontrol show node``, in the form with several lines.

    Nodes that it says are not found are left out.
    """
    fields = split_node_records(text)
    if not fields and not re.search(r"^Node \S+ not found$|No nodes in the system", text, re.M):
        raise _not_understood("scontrol show node", "no NodeName= in it", text)
    return tuple(_node(_Fields("scontrol show node", values, zone)) for values in fields)


def parse_config(text: str) -> ConfigRecord:
    """The record in the output of ``scontrol show config``."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        match = _CONFIG_LINE.fullmatch(line.rstrip())
        if match is not None:
            values.setdefault(match["key"], match["value"].strip())
    fields = _Fields("scontrol show config", values)
    name = fields.text("ClusterName")
    if name is None:
        raise _not_understood(fields.command, "no ClusterName in it", text)
    version = _VERSION.search(values.get("SLURM_VERSION", ""))
    answered = _CONFIG_TIME.search(text)
    return ConfigRecord(
        cluster_name=name,
        controller_time=None if answered is None else _time_or_none(answered[1], None),
        version=None if version is None else version[0],
        preempt_type=fields.text("PreemptType"),
        preempt_mode=fields.text("PreemptMode"),
        preempt_parameters=fields.options("PreemptParameters"),
        preempt_exempt_time=fields.value("PreemptExemptTime", to_limit),
        slurmctld_parameters=fields.options("SlurmctldParameters"),
        scheduler_parameters=fields.options("SchedulerParameters"),
        auth_info=fields.options("AuthInfo"),
        kill_wait=fields.value("KillWait", to_seconds),
        slurmd_timeout=fields.value("SlurmdTimeout", to_seconds),
        min_job_age=fields.value("MinJobAge", to_seconds),
        job_requeue=fields.flag("JobRequeue"),
        max_batch_requeue=fields.number("MaxBatchRequeue"),
        select_type=fields.text("SelectType"),
        proctrack_type=fields.text("ProctrackType"),
        accounting_storage_type=fields.text("AccountingStorageType"),
        has_epilog=_EPILOG.search(text) is not None,
        job_submit_plugins=fields.options("JobSubmitPlugins"),
        accounting_storage_enforce=fields.options("AccountingStorageEnforce"),
        requeue_exit=fields.text("RequeueExit"),
        requeue_exit_hold=fields.text("RequeueExitHold"),
        constrain_ram=_YES_NO.get(fields.raw("ConstrainRAMSpace").lower()),
        unrecognized=fields.unrecognized,
    )


def parse_accounting(text: str, zone: tzinfo | None = None) -> tuple[AccountingRecord, ...]:
    """Rows of ``sacct -n -P --format=ACCOUNTING_FIELDS``, in sacct's order."""
    names = ACCOUNTING_FIELDS.split(",")
    rows: list[AccountingRecord] = []
    for line in filter(str.strip, text.splitlines()):
        columns = line.split("|")
        if len(columns) != len(names):
            raise _not_understood("sacct", f"a row of {len(columns)} columns", line)
        fields = _Fields("sacct", dict(zip(names, columns, strict=True)), zone)
        job_ref, _, step = fields.required("JobID").partition(".")
        rows.append(
            AccountingRecord(
                job_ref=job_ref,
                step=step or None,
                job_id=fields.required_number("JobIDRaw", before="."),
                state=fields.state("State"),
                state_text=columns[2].strip(),
                exit_code=fields.value("ExitCode", to_exit_code),
                submit_time=fields.time("Submit"),
                start_time=fields.time("Start"),
                end_time=fields.time("End"),
                cancelled_by=cancelled_by(columns[2]),
                unrecognized=fields.unrecognized,
            )
        )
    return tuple(rows)


def parse_queue(text: str, zone: tzinfo | None = None) -> tuple[QueueRecord, ...]:
    """Lines of ``squeue --noheader --format=QUEUE_FORMAT``, in squeue's order."""
    names = ("JobRef", "JobId", "State", "Reason", "Start")
    rows: list[QueueRecord] = []
    for line in filter(str.strip, text.splitlines()):
        columns = line.split("|")
        if len(columns) != len(names):
            raise _not_understood("squeue", f"a line of {len(columns)} columns", line)
        fields = _Fields("squeue", dict(zip(names, columns, strict=True)), zone)
        rows.append(
            QueueRecord(
                job_ref=fields.required("JobRef"),
                job_id=fields.required_number("JobId"),
                state=fields.state("State"),
                # With underscores, as scontrol writes it.
                reason=(fields.text("Reason") or "").replace(" ", "_") or None,
                start_time=fields.time("Start"),
                unrecognized=fields.unrecognized,
            )
        )
    return tuple(rows)


def parse_job_id(text: str) -> str:
    """Job id in the output of ``sbatch --parsable`` (``17`` or ``17;cluster``), in its last line.

    A site's submit plugin may print lines of its own before it.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    match = _SUBMITTED.fullmatch(lines[-1]) if lines else None
    if match is None:
        raise _not_understood("sbatch --parsable", "no job id in it", text)
    return match["id"]


def _job(fields: _Fields) -> JobRecord:
    return JobRecord(
        job_id=fields.required_number("JobId"),
        name=fields.raw("JobName"),
        state=fields.state("JobState"),
        state_text=fields.required("JobState"),
        array_job_id=fields.number("ArrayJobId"),
        array_task=fields.text("ArrayTaskId"),
        qos=fields.text("QOS"),
        priority=fields.number("Priority"),
        reason=fields.text("Reason"),
        failed_node=fields.text("FailedNode"),
        dependency=fields.text("Dependency"),
        requeue=fields.flag("Requeue"),
        restarts=fields.number("Restarts") or 0,
        exit_code=fields.value("ExitCode", to_exit_code),
        submit_time=fields.time("SubmitTime"),
        eligible_time=fields.time("EligibleTime"),
        start_time=fields.time("StartTime"),
        end_time=fields.time("EndTime"),
        preempt_time=fields.time("PreemptTime"),
        suspend_time=fields.time("SuspendTime"),
        before_suspension=fields.value("SecsPreSuspend", _seconds),
        time_limit=fields.value("TimeLimit", to_limit),
        partition=fields.text("Partition"),
        nodelist=fields.text("NodeList"),
        excluded_nodes=fields.text("ExcNodeList"),
        num_nodes=fields.number("NumNodes"),
        memory_per_node=fields.value("MinMemoryNode", _memory),
        memory_per_cpu=fields.value("MinMemoryCPU", _memory),
        command=fields.text("Command"),
        submit_line=fields.text("SubmitLine"),
        comment=fields.text("Comment"),
        unrecognized=fields.unrecognized,
    )


def _partition(fields: _Fields) -> PartitionRecord:
    return PartitionRecord(
        name=fields.required("PartitionName"),
        state=fields.text("State"),
        preempt_mode=fields.text("PreemptMode"),
        grace_time=fields.value("GraceTime", to_seconds),
        max_time=fields.value("MaxTime", to_limit),
        default_time=fields.value("DefaultTime", to_limit),
        max_nodes=fields.count("MaxNodes"),
        nodes=fields.text("Nodes"),
        total_nodes=fields.number("TotalNodes"),
        priority_tier=fields.number("PriorityTier"),
        qos=fields.text("QoS"),
        is_default=fields.raw("Default") == "YES",
        allow_groups=_allowed(fields, "AllowGroups"),
        allow_accounts=_allowed(fields, "AllowAccounts"),
        deny_accounts=fields.options("DenyAccounts"),
        allow_qos=_allowed(fields, "AllowQos"),
        deny_qos=fields.options("DenyQos"),
        root_only=fields.raw("RootOnly") == "YES",
        exclusive=fields.raw("OverSubscribe") == "EXCLUSIVE",
        unrecognized=fields.unrecognized,
    )


def _allowed(fields: _Fields, key: str) -> tuple[str, ...] | None:
    names = fields.options(key)
    return None if not names or names == ("ALL",) else names


def _node(fields: _Fields) -> NodeRecord:
    reason = fields.text("Reason")
    match = None if reason is None else _REASON.fullmatch(reason)
    # The short form of older versions: IDLE*+DRAIN.
    state = fields.required("State").upper().replace("*", "+NOT_RESPONDING")
    return NodeRecord(
        name=fields.required("NodeName"),
        state=tuple(flag for flag in state.split("+") if flag),
        reason=reason if match is None else match["reason"],
        unrecognized=fields.unrecognized,
    )


def _time_or_none(text: str, zone: tzinfo | None) -> datetime | None:
    # Of a text that need not hold one: a reason that ends in brackets, a heading.
    try:
        return to_time(text, zone)
    except ValueError:
        return None


class _Fields:
    """Reads single values of a record and names the key when one can't be read."""

    def __init__(self, command: str, values: Mapping[str, str], zone: tzinfo | None = None) -> None:
        self.command = command
        self._values = values
        self._unrecognized: list[Unrecognized] = []
        self.zone = zone

    def raw(self, key: str) -> str:
        return self._values.get(key, "")

    def text(self, key: str) -> str | None:
        return to_optional(self._values.get(key))

    def required(self, key: str) -> str:
        text = self.text(key)
        if text is None:
            raise _not_understood(self.command, f"no {key} in it", str(dict(self._values)))
        return text

    def value(self, key: str, parse: Callable[[str | None], _T | None]) -> _T | None:
        try:
            return parse(self._values.get(key))
        except ValueError:
            self._skip(key)
            return None

    def state(self, key: str) -> JobState:
        text = self.raw(key).strip()
        state = parse_state(text)
        if state is JobState.UNKNOWN and text not in ("", JobState.UNKNOWN.value):
            self._skip(key)
        return state

    @property
    def unrecognized(self) -> tuple[Unrecognized, ...]:
        """What was read until now and could not be understood."""
        return tuple(self._unrecognized)

    def _skip(self, key: str) -> None:
        self._unrecognized.append(Unrecognized(f"{self.command}: {key}", self.raw(key)))

    def time(self, key: str) -> datetime | None:
        return self.value(key, lambda text: to_time(text, self.zone))

    def number(self, key: str) -> int | None:
        return self.value(key, _number)

    def required_number(self, key: str, *, before: str | None = None) -> int:
        text = self.required(key)
        try:
            number = _number(text.partition(before)[0] if before else text)
        except ValueError:
            number = None
        if number is None:
            raise _not_understood(self.command, f"{key} is not a number", text)
        return number

    def count(self, key: str) -> int | None:
        return None if self.raw(key) in {"UNLIMITED", "INFINITE"} else self.number(key)

    def flag(self, key: str) -> bool | None:
        number = self.number(key)
        return None if number is None else number != 0

    def options(self, key: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in (self.text(key) or "").split(",") if part.strip())


def _number(text: str | None) -> int | None:
    value = to_optional(text)
    if value is None:
        return None
    match = _COUNT.fullmatch(value)
    if match is None:
        raise ValueError(f"{value[:40]!r} is not a number")
    return int(match["low"])


def _memory(text: str | None) -> int | None:
    value = to_optional(text)
    return None if value is None else parse_memory(value)


def _seconds(text: str | None) -> timedelta | None:
    value = to_optional(text)
    return None if value is None else timedelta(seconds=int(value))


def _not_understood(command: str, why: str, text: str) -> SlurmCommandError:
    return SlurmCommandError(
        command.split(),
        0,
        f"its answer was not understood ({why}): {text[:200]!r}",
        next_step=f"Run `{command}` by hand; if its answer looks right, please report it to us.",
    )
