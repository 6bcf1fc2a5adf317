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
    records = _records(text, "sacctmgr --json show assoc", "associations", _association)
    return tuple(each for each in records if each.user)


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


def _partition(answer: Mapping[str, Any]) -> PartitionRecord:
    nodes, maximum = answer["nodes"], answer["maximums"]
    oversubscribe = answer["partition"].get("oversubscribe")
    return PartitionRecord(
        name=_text(answer["name"]),
        state="+".join(_words(answer["partition"]["state"])),
        preempt_mode=_partition_mode(answer["preempt_mode"]),
        grace_time=timedelta(seconds=_count(answer["grace_time"])),
        max_time=_minutes(maximum["time"]),
        default_time=_minutes(answer["defaults"]["time"]),
        max_nodes=_number(maximum["nodes"]),
        nodes=_optional(nodes["configured"]),
        total_nodes=_count(nodes["total"]),
        priority_tier=_count(answer["priority"]["tier"]),
        qos=_optional(answer["qos"]["assigned"]),
        is_default="DEFAULT" in _words(answer["flags"]),
        allow_groups=_allowed(answer["groups"]["allowed"]),
        allow_accounts=_allowed(answer["accounts"]["allowed"]),
        deny_accounts=_names(answer["accounts"]["deny"]),
        allow_qos=_allowed(answer["qos"]["allowed"]),
        deny_qos=_names(answer["qos"]["deny"]),
        root_only="ROOT_ONLY" in _words(answer["flags"]),
        exclusive=oversubscribe == "EXCLUSIVE" if oversubscribe is not None else _exclusive(answer),
    )


def _exclusive(answer: Mapping[str, Any]) -> bool:
    return "EXCLUSIVE" in answer["maximums"]["oversubscribe"]["flags"]


def _partition_mode(modes: Sequence[str]) -> str:
    words = ["OFF" if word == "DISABLED" else word for word in _words(modes)]
    return ",".join(sorted(words, key=lambda word: word != "GANG")) or "OFF"


def _qos(answer: Mapping[str, Any]) -> QosRecord:
    limits, preempt = answer["limits"], answer["preempt"]
    modes = [word.lower() for word in _words(preempt["mode"]) if word != "DISABLED"]
    return QosRecord(
        name=_text(answer["name"]),
        grace_time=timedelta(seconds=_count(limits["grace_time"])),
        preempts=tuple(sorted(map(_text, preempt["list"]))),
        exempt_time=_seconds(preempt["exempt_time"]),
        preempt_mode=",".join(sorted(modes, key=lambda word: word != "within")) or None,
        flags=tuple(
            _QOS_FLAGS.get(flag, flag) for flag in _words(answer["flags"]) if flag != "NOT_SET"
        ),
        max_wall=_minutes(limits["max"]["wall_clock"]["per"]["job"]),
    )


def _association(answer: Mapping[str, Any]) -> AssociationRecord:
    return AssociationRecord(
        account=_text(answer["account"]),
        user=_optional(answer["user"]) or "",
        partition=_optional(answer["partition"]),
        qos=tuple(sorted(map(_text, answer["qos"]))),
        default_qos=_optional(answer["default"]["qos"]),
        max_wall=_minutes(answer["max"]["jobs"]["per"]["wall_clock"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{str(value)[:40]!r} is not a name")
    return value


def _optional(value: object) -> str | None:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is not text")
    return value or None


def _words(value: object) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"{str(value)[:40]!r} is not a list of words")
    return [_text(each) for each in value]


def _count(value: object) -> int:
    # true is an int to Python, and nothing that Slurm counts is negative or beyond 64 bits.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _number(value: Mapping[str, Any]) -> int | None:
    if not value["set"] or value["infinite"]:
        return None
    return _count(value["number"])


def _minutes(value: Mapping[str, Any]) -> timedelta | None:
    count = _number(value)
    return None if count is None else timedelta(minutes=count)


def _seconds(value: Mapping[str, Any]) -> timedelta | None:
    count = _number(value)
    return None if count is None else timedelta(seconds=count)


def _allowed(text: str) -> tuple[str, ...] | None:
    names = _names(text)
    return None if not names or names == ("ALL",) else names


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
