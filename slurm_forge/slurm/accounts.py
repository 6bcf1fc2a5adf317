"""What the accounting database says of QOS, and of what one user may ask for.

From ``sacctmgr --noheader --parsable2``, whose columns are the same from 20.11 to 26.05; no column
that is asked for can hold ``|``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from slurm_forge.errors import SlurmCommandError
from slurm_forge.units import parse_slurm_duration

_Record = TypeVar("_Record")

QOS_FIELDS = "Name,GraceTime,Preempt,PreemptExemptTime,PreemptMode,Flags,MaxWall"
ASSOCIATION_FIELDS = "Account,User,Partition,QOS,DefaultQOS,MaxWall"
USER_FIELDS = "User,DefaultAccount"


@dataclass(frozen=True, slots=True, kw_only=True)
class QosRecord:
    """One QOS.  ``preempt_mode`` is Slurm's text, such as ``within,requeue``.

    ``preempt_mode`` None is the cluster's own, also where somebody has written OFF: a QOS is kept
    from preemption by being in nobody's ``preempts``.  ``grace_time`` and ``exempt_time`` are those
    of jobs *in* this QOS.
    """

    name: str
    grace_time: timedelta = timedelta(0)
    preempts: tuple[str, ...] = ()
    exempt_time: timedelta | None = None
    preempt_mode: str | None = None
    flags: tuple[str, ...] = ()
    max_wall: timedelta | None = None

    @property
    def preempts_within(self) -> bool:
        """Whether jobs of this QOS may preempt others of it that have less priority."""
        return "within" in (self.preempt_mode or "").lower().split(",")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssociationRecord:
    """What a user may ask for with one account; ``partition`` None is every one.

    ``qos`` are the QOS that may be named, ``default_qos`` the one of jobs that name none.
    """

    account: str
    user: str
    partition: str | None = None
    qos: tuple[str, ...] = ()
    default_qos: str | None = None
    max_wall: timedelta | None = None


def parse_qos(text: str) -> tuple[QosRecord, ...]:
    """Rows of ``sacctmgr show qos format=QOS_FIELDS``."""
    return _read("sacctmgr show qos", QOS_FIELDS, text, _qos)


def parse_associations(text: str) -> tuple[AssociationRecord, ...]:
    """Rows of ``sacctmgr show assoc format=ASSOCIATION_FIELDS``; those of accounts left out."""
    records = _read("sacctmgr show assoc", ASSOCIATION_FIELDS, text, _association)
    return tuple(each for each in records if each.user)


def parse_default_account(text: str) -> str | None:
    """The default account in a row of ``sacctmgr show user format=USER_FIELDS``; None without."""
    names = _read("sacctmgr show user", USER_FIELDS, text, lambda row: row["DefaultAccount"])
    return (names[0] or None) if names else None


def _qos(row: Mapping[str, str]) -> QosRecord:
    return QosRecord(
        name=row["Name"],
        grace_time=_duration(row["GraceTime"]) or timedelta(0),
        preempts=tuple(sorted(_names(row["Preempt"]))),
        exempt_time=_duration(row["PreemptExemptTime"]),
        preempt_mode=_mode(row["PreemptMode"]),
        flags=_names(row["Flags"]),
        max_wall=_duration(row["MaxWall"]),
    )


def _association(row: Mapping[str, str]) -> AssociationRecord:
    return AssociationRecord(
        account=row["Account"],
        user=row["User"],
        partition=row["Partition"] or None,
        qos=tuple(sorted(_names(row["QOS"]))),
        default_qos=row["DefaultQOS"] or None,
        max_wall=_duration(row["MaxWall"]),
    )


def _read(
    command: str, fields: str, text: str, make: Callable[[Mapping[str, str]], _Record]
) -> tuple[_Record, ...]:
    names = fields.split(",")
    records = []
    for line in filter(str.strip, text.splitlines()):
        columns = [part.strip() for part in line.split("|")]
        if len(columns) != len(names) or not columns[0]:
            raise _not_understood(command, f"a row of {len(columns)} columns", line)
        try:
            records.append(make(dict(zip(names, columns, strict=True))))
        except ValueError as error:
            raise _not_understood(command, str(error), line) from None
    return tuple(records)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _mode(text: str) -> str | None:
    return None if text.lower() in {"", "cluster", "off", "disabled"} else text


def _duration(text: str) -> timedelta | None:
    return parse_slurm_duration(text) if text else None


def _not_understood(command: str, why: str, text: str) -> SlurmCommandError:
    return SlurmCommandError(
        command.split(),
        0,
        f"its answer was not understood ({why}): {text[:200]!r}",
        next_step=f"Run `{command}` by hand; if its answer looks right, please report it to us.",
    )
