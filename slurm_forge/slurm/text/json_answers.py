"""The same records from ``--json`` (data_parser v0.0.40 on, Slurm 23.11): where text fails.

The text form says more, and is the same from 20.11 to 26.05: in JSON a QOS of 26.05.3 with
``PreemptMode=WITHIN,REQUEUE`` reads ``["REQUEUE"]`` (tried), and older ones leave out more.  A
document that lacks what is needed raises ``SlurmCommandError``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.accounts import AssociationRecord, QosRecord
from slurm_forge.slurm.records import PartitionRecord

__all__ = ["json_associations", "json_partitions", "json_qos"]

_Record = TypeVar("_Record")

#: data_parser's words for flags of a QOS (v0.0.40 to v0.0.45) and sacctmgr's.
_QOS_FLAGS = {
    "DENY_LIMIT": "DenyOnLimit",
    "OVERRIDE_PARTITION_QOS": "OverPartQOS",
    "PARTITION_TIME_LIMIT": "PartitionTimeLimit",
    "PARTITION_MAXIMUM_NODE": "PartitionMaxNodes",
    "PARTITION_MINIMUM_NODE": "PartitionMinNodes",
    "ENFORCE_USAGE_THRESHOLD": "EnforceUsageThreshold",
    "NO_RESERVE": "NoReserve",
    "NO_DECAY": "NoDecay",
    "REQUIRED_RESERVATION": "RequiresReservation",
    "USAGE_FACTOR_SAFE": "UsageFactorSafe",
    "RELATIVE": "Relative",
}


def json_partitions(text: str) -> tuple[PartitionRecord, ...]:
    """Records in the output of ``scontrol show partition --json``."""
    return _records(text, "scontrol show partition --json", "partitions", _partition)


def json_qos(text: str) -> tuple[QosRecord, ...]:
    """Records in the output of ``sacctmgr --json show qos``."""
    return _records(text, "sacctmgr --json show qos", "qos", _qos)


def json_associations(text: str) -> tuple[AssociationRecord, ...]:
    """Records in the output of ``sacctmgr --json show assoc``; those of whole accounts left out."""
    found = _records(text, "sacctmgr --json show assoc", "associations", _association)
    return tuple(each for each in found if each.user)


def _records(
    text: str, command: str, key: str, make: Callable[[Any], _Record]
) -> tuple[_Record, ...]:
    try:
        body = json.loads(text)
        if body.get("errors"):
            raise ValueError(f"errors: {str(body['errors'])[:120]}")
        return tuple(make(each) for each in body[key])
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as why:
        raise SlurmCommandError(
            command.split(),
            0,
            f"its answer was not understood ({type(why).__name__}: {str(why)[:100]})",
            next_step=f"Run `{command}` by hand; if it looks right, please report it to us.",
        ) from None


def _partition(given: Mapping[str, Any]) -> PartitionRecord:
    nodes, maximum = given["nodes"], given["maximums"]
    oversubscribe = given["partition"].get("oversubscribe")
    return PartitionRecord(
        name=_text(given["name"]),
        state="+".join(_words(given["partition"]["state"])),
        preempt_mode=_partition_mode(given["preempt_mode"]),
        grace_time=timedelta(seconds=_count(given["grace_time"])),
        max_time=_minutes(maximum["time"]),
        default_time=_minutes(given["defaults"]["time"]),
        max_nodes=_number(maximum["nodes"]),
        nodes=_optional(nodes["configured"]),
        total_nodes=_count(nodes["total"]),
        priority_tier=_count(given["priority"]["tier"]),
        qos=_optional(given["qos"]["assigned"]),
        is_default="DEFAULT" in _words(given["flags"]),
        allow_groups=_allowed(given["groups"]["allowed"]),
        allow_accounts=_allowed(given["accounts"]["allowed"]),
        deny_accounts=_names(given["accounts"]["deny"]),
        allow_qos=_allowed(given["qos"]["allowed"]),
        deny_qos=_names(given["qos"]["deny"]),
        root_only="ROOT_ONLY" in _words(given["flags"]),
        exclusive=oversubscribe == "EXCLUSIVE" if oversubscribe is not None else _exclusive(given),
    )


def _exclusive(given: Mapping[str, Any]) -> bool:
    return "EXCLUSIVE" in given["maximums"]["oversubscribe"]["flags"]


def _partition_mode(given: Sequence[str]) -> str:
    words = ["OFF" if word == "DISABLED" else word for word in _words(given)]
    return ",".join(sorted(words, key=lambda word: word != "GANG")) or "OFF"


def _qos(given: Mapping[str, Any]) -> QosRecord:
    limits, preempt = given["limits"], given["preempt"]
    of_jobs = limits["max"]["jobs"]
    modes = [word.lower() for word in _words(preempt["mode"]) if word != "DISABLED"]
    return QosRecord(
        name=_text(given["name"]),
        priority=_number(given["priority"]),
        grace_time=timedelta(seconds=_count(limits["grace_time"])),
        preempts=tuple(sorted(map(_text, preempt["list"]))),
        exempt_time=_seconds(preempt["exempt_time"]),
        preempt_mode=",".join(sorted(modes, key=lambda word: word != "within")) or None,
        flags=tuple(
            _QOS_FLAGS.get(flag, flag) for flag in _words(given["flags"]) if flag != "NOT_SET"
        ),
        max_wall=_minutes(limits["max"]["wall_clock"]["per"]["job"]),
        max_tres=_tres(limits["max"]["tres"]["per"]["job"]),
        max_tres_per_user=_tres(limits["max"]["tres"]["per"]["user"]),
        max_jobs_per_user=_number(of_jobs["active_jobs"]["per"]["user"]),
        max_submit_per_user=_number(of_jobs["per"]["user"]),
    )


def _association(given: Mapping[str, Any]) -> AssociationRecord:
    most, of_jobs = given["max"], given["max"]["jobs"]
    return AssociationRecord(
        cluster=_text(given["cluster"]),
        account=_text(given["account"]),
        user=_optional(given["user"]) or "",
        partition=_optional(given["partition"]),
        qos=tuple(sorted(map(_text, given["qos"]))),
        default_qos=_optional(given["default"]["qos"]),
        max_wall=_minutes(of_jobs["per"]["wall_clock"]),
        max_tres=_tres(most["tres"]["per"]["job"]),
        max_jobs=_number(of_jobs["active"]),
        max_submit=_number(of_jobs["total"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{str(value)[:40]!r} is no name")
    return value


def _optional(value: object) -> str | None:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is no text")
    return value or None


def _words(value: object) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"{str(value)[:40]!r} is no list of words")
    return [_text(each) for each in value]


def _count(value: object) -> int:
    # true is an int to Python, and nothing that Slurm counts is negative or beyond 64 bits.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f"{str(value)[:40]!r} is no number of anything")
    return value


def _number(given: Mapping[str, Any]) -> int | None:
    if not given["set"] or given["infinite"]:
        return None
    return _count(given["number"])


def _minutes(given: Mapping[str, Any]) -> timedelta | None:
    count = _number(given)
    return None if count is None else timedelta(minutes=count)


def _seconds(given: Mapping[str, Any]) -> timedelta | None:
    count = _number(given)
    return None if count is None else timedelta(seconds=count)


def _allowed(text: str) -> tuple[str, ...] | None:
    names = _names(text)
    return None if not names or names == ("ALL",) else names


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _tres(given: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    found = []
    for each in given:
        name = f"{each['type']}/{each['name']}".rstrip("/")
        found.append((name, f"{each['count']}M" if name == "mem" else str(each["count"])))
    return tuple(sorted(found))
