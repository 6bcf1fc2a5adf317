from __future__ import annotations

from datetime import timedelta

import pytest

from slurm_forge.documents import build, load
from slurm_forge.errors import ConfigError
from slurm_forge.site.model import Preemption, PreemptionMode, Site
from slurm_forge.site.parts import GpuOption


def site(text: str) -> Site:
    return build(Site, load(text, "here.yaml"))


MANY = """
name: example
title: An example
cluster_names: [example]
preemption_default: {mode: "OFF"}
partitions:
  long: {preemption: {mode: REQUEUE, grace: "0s"}, max_time: "7-00:00:00", gpus_per_node: 4}
  long-grace: {preemption: {mode: CANCEL, grace: "120s"}}
  batch:
    max_time_by_nodes:
      - {min_nodes: 1, max_time: "02:00:00"}
      - {min_nodes: 92, max_time: "06:00:00"}
qos:
  besteffort: {preemption: {mode: REQUEUE, exempt: "1h"}, max_time: "50-00:00:00"}
  debug: {self_requeue_allowed: false}
self_requeue_allowed: true
gpu_request: gpus_per_task
rejected_options: ["--gres", "--mem"]
srun_options: ["--gres-flags=allow-task-sharing"]
setup: ["module load python", "export X=1"]
env: {always: {NCCL_CROSS_NIC: "1"}, on_hang: {NCCL_SOCKET_IFNAME: hsn0}}
socket_interface: hsn
storage:
  - {role: data, path: "/scratch/$USER", env: SCRATCH, purge_after: "30d", purge_basis: atime}
"""


def test_preemption_goes_by_qos_then_partition_then_default() -> None:
    example = site(MANY)
    no_notice = Preemption(mode=PreemptionMode.REQUEUE, grace=timedelta(0))
    assert example.preemption("long") == no_notice
    assert example.preemption("long", "debug") == no_notice
    best_effort = Preemption(mode=PreemptionMode.REQUEUE, exempt=timedelta(hours=1))
    assert example.preemption("long", "besteffort") == best_effort
    assert example.preemption("batch").mode is PreemptionMode.OFF
    assert example.preemption(None).mode is PreemptionMode.OFF


def test_no_notice_and_unknown_notice_are_told_apart() -> None:
    example = site(MANY)
    assert example.preemption("long").grace == timedelta(0)
    assert example.preemption(None, "besteffort").grace is None


def test_facts_of_a_job_are_those_of_its_partition_and_qos() -> None:
    example = site(MANY)
    facts = example.facts("long", "besteffort")
    assert facts.max_time == timedelta(days=50)
    assert facts.gpus_per_node == 4
    assert facts.self_requeue_allowed is True
    assert example.facts("long", "debug").self_requeue_allowed is False
    assert [limit.min_nodes for limit in example.facts("batch").max_time_by_nodes] == [1, 92]
    assert example.facts("nowhere").max_time is None


def test_values_reach_the_program_as_what_they_are() -> None:
    example = site(MANY)
    assert example.gpu_request is GpuOption.GPUS_PER_TASK
    assert example.storage[0].purge_after == timedelta(days=30)
    assert example.env.on_hang == {"NCCL_SOCKET_IFNAME": "hsn0"}


def test_the_bandwidth_of_a_job_is_its_partitions_else_the_sites() -> None:
    example = site(
        'name: example\nexpected_bandwidth: "20 GB/s"\n'
        'partitions: {fast: {expected_bandwidth: "400 Gbit/s"}, other: {}}\n'
        'qos: {slow: {expected_bandwidth: "1.5 GB/s"}}\n'
    )
    found = [example.facts(*each).expected_bandwidth for each in (("fast",), ("other",), (None,))]
    assert found == [50e9, 20e9, 20e9]
    assert example.facts("fast", "slow").expected_bandwidth == 1.5e9
    assert site("name: example\n").facts("fast").expected_bandwidth is None
    assert Site.model_validate_json(example.model_dump_json(), strict=True) == example


def test_a_site_survives_being_written_and_read() -> None:
    example = site(MANY)
    assert Site.model_validate_json(example.model_dump_json(), strict=True) == example


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("prempt: {}", "prempt"),
        ("socket_ifname: ib0", "socket_interface"),
        ('gpu_request: "gpu"', "gpu_request"),
        ("preemption_default: {mode: off}", "off"),
        ('preemption_default: {mode: REQUEUE, grace: "-1s"}', "grace"),
        ("preemption_default: {grace: 120}", "120s"),
        ("requeue_delay: 2:00", "quote"),
        ('rejected_options: ["gres"]', "dash"),
        ('setup: ["a\\nb"]', "printable"),
        ('env: {always: {"A B": "1"}}', "environment variable"),
        ("env: {always: {A: 1}}", "env"),
        ('cluster_names: ["a b"]', "letters"),
        ("qos: {x: {max_nodes: 0}}", "max_nodes"),
        ("env: {allways: {A: x}}", 'did you mean "always"'),
        ("env: {forbidden: {A: slow}}", 'did you mean "never"'),
        ("env: {never: [A]}", "keys and values"),
        ("env: {always: {A: x}, never: {A: slow}}", "env.always.A: env.never says"),
        ("env: {on_hang: {A: x}, never: {A: slow}}", "env.on_hang.A: env.never says"),
        ("socket_interface: hsn ib", 'socket_interface: separate names by commas: "hsn,ib"'),
        (
            "socket_interface: hsn\nenv: {never: {GLOO_SOCKET_IFNAME: slow}}",
            "socket_interface: env.never says",
        ),
        ("expected_bandwidth: 180", "180 GB/s"),
        ('expected_bandwidth: "180 Gb/s"', "400 Gbit/s"),
        ('partitions: {x: {expected_bandwidth: "0 GB/s"}}', "partitions.x.expected_bandwidth"),
    ],
)
def test_a_mistake_names_file_line_and_what_is_wrong(line: str, hint: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        site(f"name: example\n{line}\n")
    assert hint in str(mistake.value)
    assert mistake.value.path == "here.yaml"
    assert mistake.value.line == 2
