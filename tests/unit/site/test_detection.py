from __future__ import annotations

from datetime import timedelta

import pytest

from slurm_forge.site.detection import fill_from_slurm
from slurm_forge.site.model import PartitionFacts, Preemption, PreemptionMode, Site
from slurm_forge.site.preemption import preemption_of
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord

BY_PARTITION = ConfigRecord(cluster_name="test", preempt_type="preempt/partition_prio")
GRACE = timedelta(seconds=10)
PREEMPT = PartitionRecord(
    name="preempt", preempt_mode="REQUEUE", grace_time=GRACE, max_time=timedelta(hours=1)
)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("REQUEUE", PreemptionMode.REQUEUE),
        ("CANCEL", PreemptionMode.CANCEL),
        ("GANG,SUSPEND", PreemptionMode.SUSPEND),
        ("OFF", PreemptionMode.OFF),
        ("A_NEW_WORD", None),
        (None, None),
    ],
)
def test_slurm_tells_the_mode_of_a_partition(text: str | None, mode: PreemptionMode | None) -> None:
    partition = PartitionRecord(name="p", preempt_mode=text)
    assert preemption_of(partition, BY_PARTITION).mode is mode


def test_grace_counts_only_where_slurm_waits() -> None:
    assert preemption_of(PREEMPT, BY_PARTITION).grace == GRACE
    suspended = PartitionRecord(name="p", preempt_mode="SUSPEND,GANG", grace_time=GRACE)
    assert preemption_of(suspended, BY_PARTITION).grace is None


def test_without_preemption_no_partition_preempts() -> None:
    never = ConfigRecord(cluster_name="test", preempt_type="preempt/none")
    assert preemption_of(PREEMPT, never).mode is PreemptionMode.OFF


def test_where_the_qos_decides_the_partition_says_nothing() -> None:
    by_qos = ConfigRecord(cluster_name="test", preempt_type="preempt/qos")
    assert preemption_of(PREEMPT, by_qos) == Preemption()


def test_slurm_fills_what_the_site_does_not_know_and_nothing_else() -> None:
    told = Preemption(mode=PreemptionMode.CANCEL, grace=timedelta(seconds=120))
    site = Site(
        name="s",
        partitions={
            "preempt": PartitionFacts(gpus_per_node=4),
            "told": PartitionFacts(preemption=told, max_time=timedelta(hours=2)),
        },
    )
    asked = PartitionRecord(name="told", preempt_mode="REQUEUE", grace_time=GRACE)
    filled = fill_from_slurm(site, BY_PARTITION, [PREEMPT, asked])
    assert filled.preemption("preempt") == Preemption(mode=PreemptionMode.REQUEUE, grace=GRACE)
    assert filled.partitions["preempt"].gpus_per_node == 4
    assert filled.partitions["preempt"].max_time == timedelta(hours=1)
    assert filled.preemption("told") == told
    assert filled.partitions["told"].max_time == timedelta(hours=2)
    assert filled.requeue_delay == timedelta(seconds=121)
    assert site.requeue_delay is None


def test_an_unknown_grace_is_asked_for_only_if_slurm_agrees_on_the_mode() -> None:
    known = PartitionFacts(preemption=Preemption(mode=PreemptionMode.REQUEUE))
    other = PartitionFacts(preemption=Preemption(mode=PreemptionMode.CANCEL))
    for facts, grace in ((known, GRACE), (other, None)):
        site = Site(name="s", partitions={"preempt": facts})
        filled = fill_from_slurm(site, BY_PARTITION, [PREEMPT])
        assert filled.preemption("preempt").grace == grace
