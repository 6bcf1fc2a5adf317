# ruff: noqa: E501  (messages are compared whole)
"""What a site's facts mean for a job, and GPUs in the site's own words."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.launch.render.sbatch_options import (
    GpuOptions,
    asked_options,
    gpu_options,
    job_request,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import PartitionFacts, Site
from slurm_forge.site.parts import GpuOption
from slurm_forge.site.rules import Severity, features_of, findings, longest_run, refuses
from slurm_forge.slurm.sbatch_words import LONG_OPTIONS, long_name, value_of
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.resources import Resources

RUN = RunDirectory(Path("/runs/tiny"))


def told(site: dict[str, Any], machine: str | None = None, **resources: Any) -> list[str]:
    hill = Site.model_validate({"name": "hill", **site})
    job = job_from_mapping({"name": "tiny", "entry": "a.b:f", "resources": resources})
    asked = job_request(job, hill, asked_options(job, hill, RUN), machine=machine)
    return [f"{each.severity.value}: {each.message}" for each in findings(asked, hill)]


JEAN = {
    "accounts": [
        {"accounts": ["*@v100"], "constraint": ["v100-16g", "v100-32g"], "partitions": ["p13"]},
        {"accounts": ["*@a100"], "constraint": ["a100"], "both_ways": True, "why": "rejected."},
    ],
    "gpu_types": {"a100": "a100"},
}
REFUSE = "Slurm will refuse it or never start it."

#: What the site says, what the job asks for, what the user reads.
ROWS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, []),
    # options
    ({"rejected_options": ["--mem"]}, {"mem": "4G"}, ["error: hill refuses the option --mem"]),
    ({"rejected_options": [{"option": "--mem", "why": "One job a node."}]}, {"mem": "4G"}, ["error: hill refuses the option --mem: One job a node"]),
    ({"rejected_options": ["-w"]}, {"nodelist": "n1"}, ["error: hill refuses the option -w"]),
    ({"rejected_options": ["--mem"]}, {}, []),
    ({"rejected_options": ["--qos=debug"]}, {"qos": "normal"}, []),
    ({"rejected_options": ["--qos=debug"]}, {"qos": "debug"}, ["error: hill refuses the option --qos=debug"]),
    ({"rejected_options": ["--licenses"]}, {"extra": {"licenses": "a"}}, ["error: hill refuses the option --licenses"]),
    ({"required_options": ["-t", "--nodes"]}, {}, ["error: hill requires the option -t"]),
    ({"required_options": ["--time"]}, {"time": "1h"}, []),
    ({"required_options": [{"option": "--constraint", "why": "gpu"}]}, {}, ["error: hill requires the option --constraint: gpu"]),
    ({"discouraged_options": [{"option": "--nodelist", "why": "such jobs are deleted"}]}, {"nodelist": "n1"}, ["warning: hill advises against the option --nodelist: such jobs are deleted."]),
    # accounts
    ({"account_required": True}, {}, ["warning: hill requires an account (resources.account)."]),
    ({"account_required": True, "account_example": "<lab>_gpu"}, {}, ["warning: hill requires an account (resources.account), such as <lab>_gpu."]),
    (JEAN, {"constraint": "v100-32g", "account": "x@v100"}, []),
    (JEAN, {"constraint": "a100", "account": "x@v100"}, ["error: hill: with constraint a100 goes an account like *@a100, and the job names x@v100 (rejected)"]),
    (JEAN, {"gpus_per_node": "a100:8", "account": "x@v100"}, ["error: hill: with constraint a100 goes an account like *@a100, and the job names x@v100 (rejected)"]),
    (JEAN, {"gpus_per_node": "a100:8", "account": "x@A100"}, []),
    (JEAN, {"partition": "p13", "account": "x"}, ["error: hill: with partition p13 goes an account like *@v100, and the job names x"]),
    (JEAN, {"account": "x@a100"}, ["error: hill: the account x@a100 goes with constraint: a100, and the job does not ask for that (rejected)"]),
    (JEAN, {"account": "x@v100"}, []),
    # limits
    ({"everywhere": {"max_time": "1h"}}, {"time": "2h"}, [f"warning: hill allows 1 h at most and the job asks for 2 h: {REFUSE}"]),
    ({"everywhere": {"max_time_by_nodes": [{"min_nodes": 1, "max_time": "2h"}, {"min_nodes": 92, "max_time": "6h"}]}}, {"time": "6h", "nodes": 100}, []),
    ({"everywhere": {"max_time_by_nodes": [{"min_nodes": 1, "max_time": "2h"}, {"min_nodes": 92, "max_time": "6h"}]}}, {"time": "6h", "nodes": 91}, [f"warning: hill allows 2 h at most for 91 nodes and the job asks for 6 h: {REFUSE}"]),
    ({"everywhere": {"default_time": "10m"}}, {}, ["warning: hill gives a job that asks for no time limit 10 min (resources.time)."]),
    ({"qos": {"q": {"max_nodes": 2}}}, {"qos": "q", "nodes": 2, "spare_nodes": 1}, [f"warning: hill, QOS q allows 2 nodes at most and the job asks for 3: {REFUSE}"]),
    ({"default_qos": "debug", "qos": {"debug": {"max_nodes": 1}}}, {"nodes": 2}, [f"warning: hill allows 1 nodes at most and the job asks for 2: {REFUSE}", "note: hill: a job that names no QOS gets debug."]),
    ({"partitions": {"p": {"constraint": "a100"}}}, {"partition": "p"}, ["warning: hill, partition p requires a constraint: add resources.constraint: a100."]),
    ({"partitions": {"p": {"constraint": "a100"}}}, {"partition": "p", "constraint": "ib&a100"}, []),
    ({"self_requeue_allowed": False}, {}, ["warning: hill does not let jobs requeue themselves: the run is held instead, and continues with slurm-forge requeue (template: array needs no requeue)."]),
    # GPUs and what goes with them
    ({"everywhere": {"gpus_per_node": 4}}, {"gpus_per_node": 8}, [f"warning: hill has 4 GPUs per node and the job asks for 8: {REFUSE}"]),
    ({"everywhere": {"gpus_per_node": 1}, "gpu_request": "none"}, {"gpus_per_node": 2}, ["error: hill has 1 GPU per node and the job asks for 2"]),
    ({"everywhere": {"gpus_per_node": 0}}, {"gpus_per_task": 1}, [f"warning: hill has no GPUs and the job asks for 1: {REFUSE}"]),
    ({"everywhere": {"gpus_required": True}}, {}, ["warning: hill rejects jobs without GPUs (resources.gpus_per_node)."]),
    ({"everywhere": {"gpus_required": True}}, {"gres": "gpu:1"}, []),
    ({"everywhere": {"max_gpus_per_job": 2}}, {"gpus_per_node": 2, "nodes": 2}, [f"warning: hill allows 2 GPUs per job and the job asks for 4: {REFUSE}"]),
    ({"everywhere": {"exclusive_nodes": True, "gpus_per_node": 4}, "gpu_request": "gres"}, {"gpus_per_node": 1}, ["warning: hill allocates whole nodes: 4 GPUs are charged per node and the job asks for 1."]),
    ({"everywhere": {"cpus_per_gpu": 7}}, {"gpus_per_node": 2}, ["note: hill: 7 CPUs go with each GPU, and the job does not say how many it wants (resources.cpus_per_task)."]),
    ({"everywhere": {"cpus_per_gpu": 7}}, {"gpus_per_node": 2, "tasks_per_node": 2, "cpus_per_task": 8}, ["warning: hill: 7 CPUs go with each GPU, so 14 with those of a node, and the job asks for 16."]),
    ({"everywhere": {"memory_per_gpu": "60G"}}, {"gpus_per_node": 2, "mem": "121G"}, ["warning: hill: 60G of memory go with each GPU, so 120G with those of a node, and the job asks for 121G."]),
    ({"everywhere": {"memory_per_gpu": "60G"}}, {"gpus_per_node": 2, "mem": "120G"}, []),
    ({"everywhere": {"memory_per_gpu": "60G"}}, {"gpus_per_node": 2, "mem": "0"}, []),
    ({"everywhere": {"cpus_per_gpu": 7}}, {"gpus_per_node": 2, "cpus_per_task": 14}, []),
    ({"everywhere": {"max_time": "2h", "max_nodes": 2}}, {"nodes": 2, "time": "2h"}, []),
    # the site as a whole
    ({"internet_on_compute_nodes": False}, {}, ["note: hill: compute nodes can't reach the internet; download before, and let trackers work offline."]),
    ({"architecture": "aarch64"}, {"machine": "x86_64"}, ["warning: hill: the compute nodes are aarch64 and this machine is x86_64: the ranks' Python must be built for theirs."]),
    ({"architecture": "aarch64"}, {"machine": "aarch64"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("site", "resources", "messages"), ROWS)
def test_what_a_user_reads(
    site: dict[str, Any], resources: dict[str, Any], messages: list[str]
) -> None:
    given = dict(resources)
    assert told(site, given.pop("machine", None), **given) == messages


def test_errors_come_first_and_each_sentence_once() -> None:
    site = {"rejected_options": ["--mem"], "account_required": True, "default_qos": "d"}
    messages = told(site, partition="a,b", mem="1G")
    assert [message.split(":")[0] for message in messages] == ["error", "warning", "note"]


COUNTS = st.integers(1, 16)
STYLES = st.sampled_from([None, *GpuOption])


@given(STYLES, COUNTS, COUNTS, st.integers(1, 4), st.booleans(), st.sampled_from([None, "a100"]))
def test_no_gpu_is_lost_or_won_in_translation(
    style: GpuOption | None, count: int, tasks: int, nodes: int, per_task: bool, kind: str | None
) -> None:
    key = "gpus_per_task" if per_task else "gpus_per_node"
    text = str(count) if kind is None else f"{kind}:{count}"
    wanted = Resources.model_validate(
        {"nodes": nodes, "tasks_per_node": tasks, key: text, "gres": "tmp:5", "constraint": "ib"}
    )
    site = Site.model_validate({"name": "hill", "gpu_request": style, "gpu_types": {"a100": "A"}})
    found = gpu_options(wanted, site)
    assert sum(value is not None for value in given_by(found)) == (style is not GpuOption.NONE)
    asked = count * tasks if per_task else count
    assert wanted.gpus_on_node == asked
    for value, times in zip(given_by(found), (1, tasks, 1 / nodes, 1), strict=True):
        if value is not None:
            assert int(value) * times == asked
    assert found.constraint == ("ib" if kind is None else "ib&A")
    assert (found.gres or "").endswith("tmp:5"), "what else the job asks for stays"


def given_by(found: GpuOptions) -> tuple[str | None, ...]:
    """The numbers of GPUs by node, task, job and as a generic resource."""
    gres = (found.gres or "").split(",")[0]
    as_gres = gres.rpartition(":")[2] if gres.startswith("gpu") else None
    return (found.per_node, found.per_task, found.total, as_gres)


def test_a_kind_that_the_site_knows_no_feature_for_stays_in_the_option() -> None:
    site = Site.model_validate({"name": "hill", "gpu_request": "gres", "gpu_types": {"h100": "H"}})
    found = gpu_options(Resources.model_validate({"gpus_per_node": "a100:4"}), site)
    assert found == GpuOptions(gres="gpu:a100:4")


def test_a_feature_is_not_added_to_what_it_can_not_be_added_to() -> None:
    site = Site.model_validate({"name": "hill", "gpu_types": {"h100": "H"}})

    def constraint(given: str) -> str | None:
        wanted = {"gpus_per_node": "h100:4", "constraint": given}
        return gpu_options(Resources.model_validate(wanted), site).constraint

    assert constraint("a|b") == "a|b"
    assert constraint("H&ib") == "H&ib"
    assert constraint("ib") == "ib&H"


def test_gpus_by_task_stay_by_task_unless_that_is_refused() -> None:
    wanted = Resources.model_validate({"gpus_per_task": 1, "tasks_per_node": 4})
    site = Site.model_validate({"name": "hill", "gpu_request": "gres"})
    assert gpu_options(wanted, site) == GpuOptions(per_task="1")
    site = site.model_validate({**site.model_dump(), "rejected_options": ["--gpus-per-task"]})
    assert gpu_options(wanted, site) == GpuOptions(gres="gpu:4")


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:4", 4), ("gpu", 1), ("gpu:a100:2", 2), ("gpu:a100", 1), ("tmp:5", None),
     ("tmp:5,gpu:2,gpu:a100:1", 3), ("gpu:a100:2(S:0-1)", 2), ("gpus:4", None)],
)  # fmt: skip
def test_gpus_in_a_generic_request(gres: str, count: int | None) -> None:
    assert Resources.model_validate({"gres": gres}).gpus_on_node == count


HOURS = st.integers(1, 1000).map(lambda hours: timedelta(hours=hours))
LIMITS = st.lists(st.tuples(st.integers(1, 500), HOURS), max_size=5)


@given(LIMITS, st.none() | HOURS, st.integers(1, 600))
def test_the_longest_run_is_that_of_the_size(
    limits: list[tuple[int, timedelta]], most: timedelta | None, nodes: int
) -> None:
    by_nodes = dict(limits)
    facts = PartitionFacts.model_validate(
        {
            "max_time": most,
            "max_time_by_nodes": [
                {"min_nodes": size, "max_time": time} for size, time in by_nodes.items()
            ],
        }
    )
    fitting = [size for size in by_nodes if size <= nodes]
    wanted = [most] if most is not None else []
    wanted += [by_nodes[max(fitting)]] if fitting else []
    assert longest_run(facts, nodes) == min(wanted, default=None)


OPTIONS = st.sampled_from(sorted(LONG_OPTIONS))


@given(st.lists(OPTIONS, max_size=4), st.lists(OPTIONS, max_size=4))
def test_a_job_is_refused_exactly_for_what_is_rejected_or_missing(
    rejected: list[str], required: list[str]
) -> None:
    site = Site.model_validate(
        {
            "name": "hill",
            "rejected_options": [f"--{name}" for name in rejected],
            "required_options": [f"--{name}" for name in required],
        }
    )
    job = job_from_mapping({"name": "tiny", "entry": "a.b:f", "resources": {"mem": "1G"}})
    lines = asked_options(job, site, RUN)
    given_names = {long_name(line) for line in lines}
    found = findings(job_request(job, site, lines), site)
    errors = {each.option for each in found if each.severity is Severity.ERROR}
    assert errors == (set(rejected) & given_names) | (set(required) - given_names)
    assert all(refuses(site, f"--{name}=1") for name in rejected)


WORDS = st.sampled_from(["gpu", "a100", "GPU_SKU:H100_SXM5", "ib-hdr", "v100.16", "80gb"])


@given(st.lists(WORDS, min_size=1, max_size=4), st.sampled_from("&|,"))
def test_features_are_found_however_they_are_joined(words: list[str], sign: str) -> None:
    assert features_of(sign.join(words)) == set(words)
    assert features_of(f"[{words[0]}*2&{words[-1]}*1]") == {words[0], words[-1]}


@given(OPTIONS, WORDS)
def test_an_option_is_read_however_it_is_typed(name: str, value: str) -> None:
    assert (long_name(f"--{name}"), value_of(f"--{name}")) == (name, None)
    for typed in (f"--{name}={value}", f"--{name} {value}"):
        assert (long_name(typed), value_of(typed)) == (name, value)
    assert (long_name("-p x"), value_of("-p x")) == ("partition", "x")
