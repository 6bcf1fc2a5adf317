"""A site file written from what Slurm says: it can be read, and says what Slurm says."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_forge.documents import build, load
from slurm_forge.site.checking import check_site
from slurm_forge.site.comparing import SiteDifferenceKind, compare
from slurm_forge.site.drafting import draft_site
from slurm_forge.site.loading import LoadedSite
from slurm_forge.site.model import PreemptionMode, Site
from slurm_forge.slurm.accounts import QosRecord
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord
from slurm_forge.slurm.survey import Survey
from slurm_forge.slurm.text.sinfo import (
    GpuKind,
    NodeGroup,
)

TODAY = date(2026, 11, 22)
ANY = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=20)
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}", fullmatch=True) | st.sampled_from(
    ["on", "off", "no", "null", "1e3", "0123", "48", "true"]
)
TIMES = st.none() | st.integers(0, 10**8).map(lambda count: timedelta(seconds=count))
MODES = st.sampled_from(["OFF", "REQUEUE", "CANCEL", "GANG,SUSPEND", "GANG,REQUEUE", None])
PARTITIONS = st.builds(
    PartitionRecord,
    name=NAMES | ANY,
    preempt_mode=MODES,
    grace_time=TIMES,
    max_time=TIMES,
    default_time=TIMES,
    max_nodes=st.none() | st.integers(0, 9999),
    nodes=st.sampled_from([None, "n[1-4]", "n[3-8]", "x[1-"]),
    priority_tier=st.none() | st.integers(0, 3),
    qos=st.none() | NAMES,
    exclusive=st.booleans(),
)
ALL_QOS = st.builds(
    QosRecord,
    name=NAMES | ANY,
    grace_time=TIMES.map(lambda value: value or timedelta(0)),
    preempts=st.lists(NAMES, max_size=2).map(tuple),
    exempt_time=TIMES,
    preempt_mode=st.sampled_from([None, "cancel", "requeue", "within,requeue", "suspend"]),
    max_wall=TIMES,
)
NODES = st.builds(
    NodeGroup,
    partition=NAMES,
    gpus=st.lists(st.builds(GpuKind, st.none() | ANY, st.integers(1, 9)), max_size=2).map(tuple),
    features=st.lists(ANY, max_size=3).map(tuple),
)
CONFIGS = st.builds(
    ConfigRecord,
    cluster_name=NAMES | ANY,
    version=st.none() | ANY,
    preempt_type=st.sampled_from([None, "preempt/none", "preempt/qos", "preempt/partition_prio"]),
    preempt_mode=MODES,
    preempt_exempt_time=TIMES,
    scheduler_parameters=st.sampled_from([(), ("requeue_delay=10",), ("requeue_delay=99999999",)]),
    job_submit_plugins=st.lists(ANY, max_size=1).map(tuple),
    select_type=st.sampled_from([None, "select/cons_tres", "select/linear"]),
    accounting_storage_enforce=st.sampled_from([(), ("associations",)]),
)
SURVEYS = st.builds(
    Survey,
    user=ANY,
    config=CONFIGS,
    partitions=st.none() | st.lists(PARTITIONS, max_size=3, unique_by=lambda p: p.name).map(tuple),
    nodes=st.none() | st.lists(NODES, max_size=3).map(tuple),
    qos=st.none() | st.lists(ALL_QOS, max_size=3, unique_by=lambda q: q.name).map(tuple),
    default_account=st.none() | ANY,
    architecture=st.none() | ANY | st.just("aarch64"),
)


def loaded(text: str) -> LoadedSite:
    document = load(text)
    return LoadedSite(build(Site, document), Path("hill.yaml"), "", document)


@given(SURVEYS)
def test_what_is_written_can_be_read_and_says_what_slurm_says(survey: Survey) -> None:
    draft = draft_site(survey, TODAY)
    assert draft is not None
    found = loaded(draft.text)
    assert found.site.name == draft.name
    assert [each for each in check_site(found.site, TODAY) if each.mistake] == []
    differences = [
        each for each in compare(found, survey) if each.kind is not SiteDifferenceKind.NOT_IN_FILE
    ]
    assert differences == []


def survey(**changes: Any) -> Survey:
    below = PartitionRecord(
        name="off", priority_tier=1, preempt_mode="REQUEUE", grace_time=timedelta(seconds=90),
        max_time=timedelta(days=2), nodes="n[1-4]",
    )  # fmt: skip
    above = PartitionRecord(name="prio", priority_tier=2, preempt_mode="REQUEUE", nodes="n[4-5]")
    gpus = NodeGroup(partition="off", gpus=(GpuKind("a100", 4),))
    config = ConfigRecord(
        cluster_name="hill", version="24.05.1", preempt_type="preempt/partition_prio",
        preempt_mode="REQUEUE", select_type="select/cons_tres",
    )  # fmt: skip
    facts: dict[str, Any] = {
        "user": "ada", "config": config, "partitions": (below, above), "nodes": (gpus,)
    } | changes  # fmt: skip
    return Survey(**facts)


def test_a_cluster_in_its_own_words() -> None:
    draft = draft_site(survey(), TODAY)
    assert draft is not None and draft.name == "hill"
    site = loaded(draft.text).site
    assert site.cluster_names == ("hill",) and site.sources[0].seen == "2026-11-22"
    off = site.partitions["off"]
    assert off.preemption.mode is PreemptionMode.REQUEUE
    assert off.preemption.grace == timedelta(seconds=90) and off.max_time == timedelta(days=2)
    assert off.gpus_per_node == 4 and off.gpu == "a100"
    # Slurm's word is REQUEUE, and nobody stands above it.
    assert site.partitions["prio"].preemption.mode is PreemptionMode.OFF
    assert "no partition of a higher tier" in draft.text
    assert site.requeue_delay == timedelta(seconds=121)
    assert site.gpu_request is not None and site.gpu_request.value == "gpus_per_node"


def test_how_gpus_are_asked_for_is_not_guessed() -> None:
    plugin = ConfigRecord(
        cluster_name="hill", select_type="select/cons_tres", job_submit_plugins=("lua",)
    )
    for facts in ({"config": plugin}, {"nodes": ()}, {"nodes": None}):
        draft = draft_site(survey(**facts), TODAY)
        assert draft is not None and loaded(draft.text).site.gpu_request is None


def test_nothing_is_written_where_slurm_said_nothing() -> None:
    assert draft_site(Survey(user="ada"), TODAY) is None


@given(ANY)
@example("#\n- {x: y}")
@example("a: b\nsetup: [rm]")
def test_a_name_smuggles_nothing_in(text: str) -> None:
    hostile = survey(
        user=text,
        default_account=text,
        nodes=(NodeGroup(partition="off", features=(text,)),),
        partitions=(PartitionRecord(name=text, preempt_mode=text),),
    )
    draft = draft_site(hostile, TODAY)
    assert draft is not None
    site = loaded(draft.text).site
    assert site.setup == () and site.env.always == {} and not site.sbatch_options


@pytest.mark.parametrize(
    ("cluster", "name"),
    [("..", "__"), ("a/../../b", "a_______b"), ("-rf", "rf"), ("generic", "cluster"), ("/", "_")],
)
def test_whatever_a_cluster_is_called_its_file_is_one_of_its_own(cluster: str, name: str) -> None:
    """``generic`` is what other clusters fall back on, and must not be replaced."""
    draft = draft_site(Survey(user="ada", config=ConfigRecord(cluster_name=cluster)), TODAY)
    assert draft is not None and draft.name == name
    known = build(Site, load(draft.text)).cluster_names
    assert known == ((cluster,) if cluster == "generic" else ())
