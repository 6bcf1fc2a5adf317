"""Who may preempt whom, and what happens then: Slurm's own rules, by partition and by QOS."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm_forge.site.detection import fill_from_slurm
from slurm_forge.site.model import Preemption, PreemptionMode, Site
from slurm_forge.site.preemption import PreemptionRules, preemption_of_qos, preemption_rules
from slurm_forge.slurm.accounts import QosRecord
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord

MINUTE = timedelta(minutes=1)
BY_QOS = ConfigRecord(
    cluster_name="hill", preempt_type="preempt/qos", preempt_mode="REQUEUE",
    preempt_exempt_time=timedelta(0),
)  # fmt: skip
BY_TIER = replace(BY_QOS, preempt_type="preempt/partition_prio")
LOW = QosRecord(name="low", grace_time=MINUTE, exempt_time=10 * MINUTE)
HIGH = QosRecord(name="high", preempts=("low",))
NORMAL = QosRecord(name="normal", grace_time=MINUTE)
ALL = (LOW, HIGH, NORMAL)
ABOVE = PartitionRecord(name="prio", priority_tier=10, preempt_mode="OFF", nodes="n[1-4]")
BELOW = PartitionRecord(
    name="long", priority_tier=1, preempt_mode="REQUEUE", grace_time=MINUTE, nodes="n[3-8]"
)


def test_a_qos_is_preempted_by_those_that_list_it() -> None:
    assert preemption_rules(BY_QOS, None, (), LOW, ALL) == PreemptionRules(
        preemption=Preemption(mode=PreemptionMode.REQUEUE, grace=MINUTE, exempt=10 * MINUTE),
        preemptable=True,
        preemptors=("high",),
    )


def test_a_qos_in_nobodys_list_is_not_preempted() -> None:
    found = preemption_rules(BY_QOS, BELOW, (ABOVE, BELOW), NORMAL, ALL)
    assert found.preemptable is False and found.preemption == Preemption(mode=PreemptionMode.OFF)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("cancel", PreemptionMode.CANCEL),
        ("within,cancel", PreemptionMode.CANCEL),
        ("suspend", PreemptionMode.SUSPEND),
        (None, PreemptionMode.REQUEUE),  # the cluster's
        ("within", None),  # Slurm itself prints no mode there
    ],
)
def test_its_mode_is_the_qos_own_or_the_clusters(text: str | None, mode: PreemptionMode) -> None:
    found = preemption_of_qos(replace(LOW, preempt_mode=text), ALL, BY_QOS)
    assert found.mode is mode
    waits = mode in (PreemptionMode.CANCEL, PreemptionMode.REQUEUE)
    assert found.grace == (MINUTE if waits else None)


def test_within_is_preempted_by_its_own() -> None:
    own = replace(NORMAL, preempt_mode="within,requeue")
    assert preemption_rules(BY_QOS, None, (), own, (own,)).preemptors == ("normal",)
    everywhere = replace(BY_QOS, preempt_mode="WITHIN,REQUEUE")
    assert preemption_rules(everywhere, None, (), NORMAL, ALL).preemptors == ("normal",)


def test_qos_that_could_not_be_asked_for_are_unknown_and_not_off() -> None:
    assert preemption_rules(BY_QOS, BELOW, (BELOW,), None, None) == PreemptionRules()
    assert preemption_rules(BY_QOS, BELOW, (BELOW,), LOW, None) == PreemptionRules()


def test_a_partition_is_preempted_from_a_higher_tier_on_the_same_nodes() -> None:
    found = preemption_rules(BY_TIER, BELOW, (ABOVE, BELOW), None, None)
    assert found.preemptors == ("prio",) and found.preemptable and found.preemption.grace == MINUTE
    elsewhere = replace(ABOVE, nodes="n[11-14]")
    assert preemption_rules(BY_TIER, BELOW, (elsewhere, BELOW), None, None).preemptable is False
    assert preemption_rules(BY_TIER, ABOVE, (ABOVE, BELOW), None, None).preemption.mode is (
        PreemptionMode.OFF
    )


def test_the_exempt_time_of_a_qos_counts_before_the_clusters() -> None:
    exempt = replace(BY_TIER, preempt_exempt_time=5 * MINUTE)
    assert (
        preemption_rules(exempt, BELOW, (ABOVE, BELOW), LOW, ALL).preemption.exempt == 10 * MINUTE
    )
    assert (
        preemption_rules(exempt, BELOW, (ABOVE, BELOW), NORMAL, ALL).preemption.exempt == 5 * MINUTE
    )


def test_without_a_plugin_nobody_is_preempted() -> None:
    never = replace(BY_TIER, preempt_type="preempt/none")
    found = preemption_rules(never, BELOW, (ABOVE, BELOW), LOW, ALL)
    assert found.preemptable is False and found.preemption.mode is PreemptionMode.OFF


def test_a_site_that_knows_nothing_takes_over_what_qos_do() -> None:
    site = fill_from_slurm(Site(name="hill"), BY_QOS, [BELOW], ALL, "low")
    assert site.default_qos == "low"
    assert site.preemption("long").grace == MINUTE, "of the QOS that jobs get"
    assert site.preemption("long", "normal").mode is PreemptionMode.OFF


def test_what_a_site_knows_of_a_qos_stays() -> None:
    known = Site.model_validate(
        {"name": "hill", "qos": {"low": {"preemption": {"mode": "CANCEL", "grace": "5s"}}}}
    )
    assert fill_from_slurm(known, BY_QOS, [BELOW], ALL).qos["low"] == known.qos["low"]
    partly = Site.model_validate(
        {"name": "hill", "qos": {"low": {"preemption": {"mode": "REQUEUE"}}}}
    )
    assert fill_from_slurm(partly, BY_QOS, [], ALL).qos["low"].preemption.grace == MINUTE


def test_where_preemption_goes_by_partition_qos_change_nothing() -> None:
    assert fill_from_slurm(Site(name="hill"), BY_TIER, [BELOW], ALL).qos == {}


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"priority_tier": None}, {}),  # the answer was cut, or is of another Slurm
        ({"nodes": None}, {}),
        ({}, {"priority_tier": None}),
        ({}, {"nodes": None}),
    ],
)
def test_what_slurm_did_not_say_is_no_promise_that_nobody_preempts(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    below, preemptable = replace(BELOW, **mine), replace(ABOVE, **theirs)
    found = preemption_rules(BY_TIER, below, (preemptable, below), None, ())
    assert found.preemptable is None and found.preemption.mode is PreemptionMode.REQUEUE
    empty = replace(below, total_nodes=0)
    assert preemption_rules(BY_TIER, empty, (preemptable, empty), None, ()).preemptable is False


def test_hundreds_of_partitions_with_thousands_of_nodes_are_told_at_once() -> None:
    many = tuple(
        replace(BELOW, name=f"p{number}", priority_tier=number % 7, nodes="n[1-5000]")
        for number in range(200)
    )
    began = time.process_time()
    found = [preemption_rules(BY_TIER, each, many, None, ()) for each in many]
    # Each list of nodes read for each pair takes minutes.
    assert time.process_time() - began < 5
    assert found[0].preemptable is True and found[6].preemptable is False
