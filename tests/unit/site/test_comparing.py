"""What a site file says otherwise than Slurm, with its line."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from slurm_forge.documents import build, load
from slurm_forge.site.comparing import SiteDifferenceKind, compare, unchecked
from slurm_forge.site.loading import LoadedSite
from slurm_forge.site.model import Site
from slurm_forge.slurm.accounts import QosRecord
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord
from slurm_forge.slurm.survey import Survey
from slurm_forge.slurm.text.sinfo import (
    GpuKind,
    NodeGroup,
)

CONFIG = ConfigRecord(
    cluster_name="hill", preempt_type="preempt/partition_prio", preempt_mode="REQUEUE",
    scheduler_parameters=("requeue_delay=30",),
)  # fmt: skip
PRIO = PartitionRecord(name="prio", priority_tier=9, preempt_mode="OFF", nodes="n[1-4]")
LONG = PartitionRecord(
    name="long", priority_tier=1, preempt_mode="CANCEL", grace_time=timedelta(seconds=60),
    max_time=timedelta(days=7), nodes="n[1-4]",
)  # fmt: skip
NODES = (NodeGroup(partition="long", gpus=(GpuKind("a100", 4),)),)
SURVEY = Survey(user="ada", config=CONFIG, partitions=(PRIO, LONG), nodes=NODES, qos=())


def told(text: str, survey: Survey = SURVEY, name: str = "hill.yaml") -> list[str]:
    document = load(text)
    found = compare(LoadedSite(build(Site, document), Path(name), "", document), survey)
    return [each.words(name) for each in found]


def test_each_fact_that_differs_is_told_with_its_line() -> None:
    text = """\
name: hill
cluster_names: [hill]
partitions:
  long:
    preemption: {mode: CANCEL, grace: "120s"}
    max_time: "5-00:00:00"
    gpus_per_node: 8
requeue_delay: "121s"
"""
    assert told(text) == [
        'hill.yaml has no partitions.prio; Slurm says {preemption: {mode: "OFF"}}',
        "hill.yaml:5: partitions.long.preemption.grace says 120s, Slurm says 60s",
        "hill.yaml:6: partitions.long.max_time says 5d, Slurm says 7d (MaxTime)",
        "hill.yaml:7: partitions.long.gpus_per_node says 8, Slurm says 4",
        "hill.yaml:8: requeue_delay says 121s, Slurm says 31s (requeue_delay or cred_expire, and a "
        "second)",
    ]


def test_another_mode_is_told_and_not_its_times() -> None:
    lines = told('name: hill\npreemption_default: {mode: REQUEUE, grace: "9s"}\n')
    assert "hill.yaml:2: partitions.long.preemption.mode says REQUEUE, Slurm says CANCEL" in lines
    assert not any("grace" in line for line in lines)


def test_what_is_gone_and_another_cluster() -> None:
    lines = told("name: hill\ncluster_names: [dale]\npartitions: {old: {max_nodes: 4}}\n")
    assert lines[0] == "hill.yaml:2: cluster_names says dale, Slurm says hill"
    assert lines[1] == "hill.yaml:3: partitions.old: Slurm has no partition of that name"


def test_what_agrees_or_is_unknown_is_no_difference() -> None:
    assert told("name: hill\n") == []
    agreed = 'name: hill\npartitions:\n  long: {preemption: {mode: CANCEL, grace: "60s"}}\n'
    assert told(agreed) == [
        'hill.yaml has no partitions.prio; Slurm says {preemption: {mode: "OFF"}}'
    ]
    # Nobody stands above it: OFF is what happens there.
    alone = Survey(user="ada", config=CONFIG, partitions=(LONG,), nodes=())
    assert told('name: hill\npartitions: {long: {preemption: {mode: "OFF"}}}\n', alone) == []


def test_without_slurm_nothing_is_compared() -> None:
    assert told("name: hill\npartitions: {x: {max_nodes: 1}}\n", Survey(user="ada")) == []
    silent = Survey(user="ada", config=CONFIG)
    assert told("name: hill\npartitions: {x: {max_nodes: 1}}\n", silent) == []


def test_qos_are_compared_where_preemption_goes_by_them() -> None:
    by_qos = ConfigRecord(cluster_name="hill", preempt_type="preempt/qos", preempt_mode="REQUEUE")
    low = QosRecord(name="low", grace_time=timedelta(seconds=30), max_wall=timedelta(hours=1))
    high = QosRecord(name="high", preempts=("low",))
    survey = Survey(user="ada", config=by_qos, partitions=(LONG,), qos=(low, high))
    text = """\
name: hill
qos:
  low: {preemption: {mode: REQUEUE, grace: "10s"}, max_time: "2h"}
  gone: {max_time: "1h"}
"""
    assert told(text, survey) == [
        "hill.yaml:4: qos.gone: the accounting database has no QOS of that name",
        "hill.yaml:3: qos.low.preemption.grace says 10s, Slurm says 30s",
        "hill.yaml:3: qos.low.max_time says 2h, Slurm says 1h (MaxWall)",
        'hill.yaml has no qos.high; Slurm says {preemption: {mode: "OFF"}}',
    ]


def test_the_line_is_that_of_the_cluster_of_several() -> None:
    text = """\
name: hill
cluster_names: [hill]
everywhere: {max_nodes: 4}
clusters:
  hill:
    everywhere: {max_nodes: 8}
"""
    document = load(text)
    whole = build(Site, document)
    limited = PartitionRecord(name="long", max_nodes=16)
    survey = Survey(user="ada", config=CONFIG, partitions=(limited,))
    loaded = LoadedSite(whole.on("hill"), Path("hill.yaml"), "", document, "hill", whole)
    (difference,) = compare(loaded, survey)
    assert (difference.line, difference.in_file, difference.kind) == (
        6,
        "8",
        SiteDifferenceKind.DIFFERS,
    )


def test_what_slurm_cannot_tell() -> None:
    site = build(Site, load("name: hill\nsocket_interface: ib0\ngpu_request: gres\n"))
    assert unchecked(site) == ("socket_interface", "gpu_request")
