"""The rules by which a job may be preempted, as Slurm's own answers show them.  Pure.

Sources: src/plugins/preempt/{qos,partition_prio} and src/interfaces/preempt.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache

from slurm_forge.errors import ConfigError
from slurm_forge.site.model import Preemption, PreemptionMode
from slurm_forge.slurm.accounts import QosRecord
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord
from slurm_forge.slurm.text.nodelist import expand_nodes

_PRIO, _QOS, _NONE = "partition_prio", "qos", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRules:
    """What happens to a preempted job, and who may preempt it.

    ``preemptors`` are names of partitions or of QOS; ``preemptable`` is whether there are any,
    None where that can't be told.
    """

    preemption: Preemption = field(default_factory=Preemption)
    preemptable: bool | None = None
    preemptors: tuple[str, ...] = ()


def goes_by_qos(config: ConfigRecord | None) -> bool:
    """Whether preemption goes by QOS here, so that partitions say nothing of it."""
    return config is not None and _kind(config) == _QOS


def preemption_of(partition: PartitionRecord, config: ConfigRecord) -> Preemption:
    """How jobs of this partition are preempted, by Slurm's own answers.

    ``mode`` stays unknown where preemption goes by QOS, and where no preemption plugin is named.
    """
    kind = _kind(config)
    if kind == _NONE:
        return Preemption(mode=PreemptionMode.OFF)
    if kind != _PRIO:
        return Preemption()
    exempt = config.preempt_exempt_time
    return _with_times(_mode(partition.preempt_mode), partition.grace_time, exempt)


def preemption_of_qos(
    qos: QosRecord, known: Sequence[QosRecord], config: ConfigRecord
) -> Preemption:
    """How jobs in this QOS are preempted; ``known`` are all QOS that there are.

    Unknown where preemption does not go by QOS: a QOS then changes nothing but the exempt time.
    """
    if _kind(config) != _QOS:
        return Preemption()
    if not _preemptors(qos, known, config):
        return Preemption(mode=PreemptionMode.OFF)
    exempt = config.preempt_exempt_time if qos.exempt_time is None else qos.exempt_time
    return _with_times(_mode(qos.preempt_mode or config.preempt_mode), qos.grace_time, exempt)


def preemption_rules(
    config: ConfigRecord,
    partition: PartitionRecord | None,
    partitions: Sequence[PartitionRecord],
    qos: QosRecord | None,
    known: Sequence[QosRecord] | None,
) -> PreemptionRules:
    """What holds for a job in this partition and QOS; ``known`` None: QOS could not be asked."""
    kind = _kind(config)
    if kind == _NONE:
        return PreemptionRules(preemption=Preemption(mode=PreemptionMode.OFF), preemptable=False)
    if kind == _QOS:
        if qos is None or known is None:
            return PreemptionRules()
        preemptors = _preemptors(qos, known, config)
        return PreemptionRules(
            preemption=preemption_of_qos(qos, known, config),
            preemptable=bool(preemptors),
            preemptors=preemptors,
        )
    if kind != _PRIO or partition is None:
        return PreemptionRules()
    preemption = preemption_of(partition, config)
    if (
        preemption.mode is not PreemptionMode.OFF
        and qos is not None
        and qos.exempt_time is not None
    ):
        preemption = _with_times(preemption.mode, partition.grace_time, qos.exempt_time)
    if preemption.mode is PreemptionMode.OFF:
        return PreemptionRules(preemption=preemption, preemptable=False)
    preemptors = _higher_partitions(partition, partitions)
    preemptable = True if preemptors else None if _may_be_higher(partition, partitions) else False
    return PreemptionRules(preemption=preemption, preemptable=preemptable, preemptors=preemptors)


def _preemptors(
    qos: QosRecord, known: Sequence[QosRecord], config: ConfigRecord
) -> tuple[str, ...]:
    """The QOS whose jobs may preempt those of this one."""
    within = qos.preempts_within or "WITHIN" in _words(config.preempt_mode)
    names = [each.name for each in known if qos.name in each.preempts and each.name != qos.name]
    return tuple([*names, qos.name] if within else names)


def _higher_partitions(
    partition: PartitionRecord, partitions: Sequence[PartitionRecord]
) -> tuple[str, ...]:
    """Partitions of a higher tier that share nodes with this one."""
    tier = partition.priority_tier
    if tier is None:
        return ()
    nodes = _nodes(partition.nodes)
    return tuple(
        each.name
        for each in partitions
        if each.priority_tier is not None
        and each.priority_tier > tier
        and (
            nodes is None or (theirs := _nodes(each.nodes)) is None or not nodes.isdisjoint(theirs)
        )
    )


def _may_be_higher(partition: PartitionRecord, partitions: Sequence[PartitionRecord]) -> bool:
    """Whether too little was said of this one or another to know that nobody is above it."""
    if partition.total_nodes == 0:
        return False
    tier = partition.priority_tier
    if tier is None or partition.nodes is None:
        return True
    return any(
        each.priority_tier is None or (each.priority_tier > tier and each.nodes is None)
        for each in partitions
        if each.total_nodes != 0 and each.name != partition.name
    )


@lru_cache(maxsize=1 << 14)
def _nodes(text: str | None) -> frozenset[str] | None:
    # Each partition is held against every other one: once for each is often enough.
    try:
        return frozenset(expand_nodes(text or ""))
    except ConfigError:
        return None


def _with_times(
    mode: PreemptionMode | None, grace: timedelta | None, exempt: timedelta | None
) -> Preemption:
    # Slurm waits for the grace time before it requeues or cancels, never before it suspends.
    waits = mode in {PreemptionMode.REQUEUE, PreemptionMode.CANCEL}
    return Preemption(
        mode=mode,
        grace=grace if waits else None,
        exempt=exempt if waits and exempt != timedelta(0) else None,
    )


def _kind(config: ConfigRecord) -> str:
    return (config.preempt_type or "").removeprefix("preempt/")


def _mode(text: str | None) -> PreemptionMode | None:
    """The mode in texts such as ``REQUEUE`` or ``GANG,SUSPEND`` (preempt_mode_string)."""
    words = _words(text)
    return next((mode for mode in PreemptionMode if mode.value in words), None)


def _words(text: str | None) -> frozenset[str]:
    return frozenset(word.strip().upper() for word in (text or "").split(","))
