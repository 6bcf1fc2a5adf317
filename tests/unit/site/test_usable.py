"""Where a user may submit to, which QOS a job gets, and how long it may run."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from slurm_forge.site.usable import Person, longest, qos_of, usable_qos, why_not
from slurm_forge.slurm.accounts import AssociationRecord, QosRecord
from slurm_forge.slurm.records import PartitionRecord
from slurm_forge.slurm.survey import Survey

HOUR = timedelta(hours=1)
OPEN = PartitionRecord(name="long", state="UP", max_time=48 * HOUR)
LAB = AssociationRecord(account="lab", user="ada", qos=("low", "normal"), default_qos="low")
SURVEY = Survey(
    user="ada",
    associations=(LAB,),
    default_account="lab",
    qos=(QosRecord(name="low"), QosRecord(name="normal"), QosRecord(name="secret")),
)
ADA = Person(frozenset({"phys"}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"state": "DRAIN"}, "its state is DRAIN"),
        ({"root_only": True}, "only root"),
        ({"allow_groups": ("bio",)}, "only groups bio"),
        ({"allow_groups": ("bio", "phys")}, None),
        ({"allow_accounts": ("other",)}, "account lab is none of other"),
        ({"deny_accounts": ("lab",)}, "DenyAccounts"),
        ({"allow_qos": ("normal",)}, "QOS low is none of normal"),
        ({"deny_qos": ("low",)}, "DenyQos"),
    ],
)
def test_why_a_partition_is_not_for_this_user(change: dict, words: str | None) -> None:
    found = why_not(replace(OPEN, **change), SURVEY, ADA, "low")
    assert (found is None) if words is None else (found is not None and words in found)


def test_the_qos_of_a_job_that_names_none() -> None:
    assert qos_of(SURVEY, ADA, "long") == "low"
    assert qos_of(SURVEY, ADA, "long", "normal") == "normal"
    plain = replace(SURVEY, associations=(replace(LAB, default_qos=None),))
    assert qos_of(plain, ADA, "long") == "normal"
    special = replace(LAB, partition="long", default_qos="normal")
    assert qos_of(replace(SURVEY, associations=(LAB, special)), ADA, "long") == "normal"
    assert qos_of(replace(SURVEY, associations=(LAB, special)), ADA, "short") == "low"
    assert qos_of(Survey(user="ada"), ADA, "long") is None, "not known is not normal"


def test_the_qos_that_may_be_named() -> None:
    assert usable_qos(SURVEY, ADA) == ("low", "normal")
    assert usable_qos(replace(SURVEY, associations=()), ADA) == ("low", "normal", "secret")


def test_the_longest_run() -> None:
    day, short = QosRecord(name="day", max_wall=24 * HOUR), QosRecord(name="s", max_wall=HOUR)
    nobody = Survey(user="ada")
    assert longest(OPEN, None, None, nobody, ADA) == 48 * HOUR
    assert longest(OPEN, day, None, nobody, ADA) == 24 * HOUR
    assert longest(OPEN, day, short, nobody, ADA) == HOUR
    strong = replace(day, flags=("OverPartQOS",))
    assert longest(OPEN, strong, short, nobody, ADA) == 24 * HOUR
    week = QosRecord(name="week", max_wall=168 * HOUR)
    assert longest(OPEN, week, None, nobody, ADA) == 48 * HOUR
    beyond = replace(week, flags=("PartitionTimeLimit",))
    assert longest(OPEN, beyond, None, nobody, ADA) == 168 * HOUR
    mine = replace(SURVEY, associations=(replace(LAB, max_wall=12 * HOUR),))
    assert longest(OPEN, None, None, mine, ADA) == 12 * HOUR
    assert longest(OPEN, day, None, mine, ADA) == 24 * HOUR, "a QOS counts before the user"
    assert longest(replace(OPEN, max_time=None), None, None, nobody, ADA) is None
