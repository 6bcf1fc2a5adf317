"""Where a user may submit to, and with what limits: from partitions, QOS, associations.  Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.slurm.accounts import AssociationRecord, QosRecord
from slurm_forge.slurm.records import PartitionRecord
from slurm_forge.slurm.survey import Survey

_UP = "UP"
#: Flags by which a QOS overrides limits of the partition, and of the QOS of the partition.
_TIME_OF_QOS = "PartitionTimeLimit"
_OVER_PARTITION = "OverPartQOS"


@dataclass(frozen=True, slots=True)
class Person:
    """Who asks: the user's groups, and the account that was named, if any."""

    groups: frozenset[str] = frozenset()
    account: str | None = None
    is_root: bool = False


def account_of(survey: Survey, person: Person) -> str | None:
    """The account that a job of this user is charged to."""
    return person.account or survey.default_account


def _associations(survey: Survey, person: Person) -> tuple[AssociationRecord, ...]:
    account = account_of(survey, person)
    known = survey.associations or ()
    return tuple(each for each in known if account is None or each.account == account)


def qos_of(
    survey: Survey, person: Person, partition: str | None, named: str | None = None
) -> str | None:
    """The QOS that a job gets: what it names, else the association's default, else ``normal``.

    None where nobody can tell.
    """
    if named is not None:
        return named
    if not survey.associations:
        return None
    of_account = _associations(survey, person)
    for each in sorted(of_account, key=lambda one: one.partition is None):
        if each.partition in (None, partition) and each.default_qos is not None:
            return each.default_qos
    # slurmctld's own rule: the only one that may be named, else "normal" where it may.
    names = {name for each in of_account for name in each.qos}
    return names.pop() if len(names) == 1 else "normal" if "normal" in names else None


def usable_qos(survey: Survey, person: Person) -> tuple[str, ...]:
    """The QOS that this user may name, sorted; all of them where no associations are known."""
    names = {name for each in _associations(survey, person) for name in each.qos}
    known = {each.name for each in survey.qos or ()}
    return tuple(sorted(names & known if names else known))


def why_not(
    partition: PartitionRecord, survey: Survey, person: Person, qos: str | None
) -> str | None:
    """Why a job of this user would not run in this partition; None where nothing is against it."""
    if partition.state is not None and not _state_up(partition.state):
        return f"its state is {partition.state}"
    if partition.root_only and not person.is_root:
        return "only root may submit here (RootOnly)"
    if _shut_out(partition.allow_groups, person.groups) and not person.is_root:
        return f"only groups {_some(partition.allow_groups)} may (AllowGroups)"
    account = account_of(survey, person)
    if account is not None:
        if _shut_out(partition.allow_accounts, {account}):
            return f"account {account} is none of {_some(partition.allow_accounts)} (AllowAccounts)"
        if account in partition.deny_accounts:
            return f"account {account} may not (DenyAccounts)"
    if qos is not None:
        if _shut_out(partition.allow_qos, {qos}):
            return f"QOS {qos} is none of {_some(partition.allow_qos)} (AllowQos)"
        if qos in partition.deny_qos:
            return f"QOS {qos} may not (DenyQos)"
    return None


def longest(
    partition: PartitionRecord | None,
    qos: QosRecord | None,
    of_partition: QosRecord | None,
    survey: Survey,
    person: Person,
) -> timedelta | None:
    """The longest time limit that a job here can have; None where there is none, or nobody says."""
    order = (of_partition, qos)
    if qos is not None and _OVER_PARTITION in qos.flags:
        order = (qos, of_partition)
    name = None if partition is None else partition.name
    # The first that says something counts (resource_limits.html): QOS before associations.
    walls = [each.max_wall for each in order if each is not None]
    walls += [
        each.max_wall
        for each in sorted(_associations(survey, person), key=lambda one: one.partition is None)
        if each.partition in (None, name)
    ]
    limits = [next((each for each in walls if each is not None), None)]
    overrides = qos is not None and qos.max_wall is not None and _TIME_OF_QOS in qos.flags
    if partition is not None and not overrides:
        limits.append(partition.max_time)
    return min((each for each in limits if each is not None), default=None)


def _state_up(state: str) -> bool:
    return state.upper().split("+")[0] == _UP


def _shut_out(allowed: Collection[str] | None, names: Collection[str]) -> bool:
    return allowed is not None and not set(allowed) & set(names)


def _some(names: Collection[str] | None) -> str:
    listed = list(names or ())
    return ", ".join(listed[:4]) + (", …" if len(listed) > 4 else "")
