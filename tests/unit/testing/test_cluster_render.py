"""The files that the test cluster is configured with, before any Slurm reads them."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError, UnsafeFileError
from slurm_forge.testing.cluster import files, render
from slurm_forge.testing.cluster.layout import (
    CgroupKind,
    Layout,
    Platform,
    Ports,
    SlurmVersion,
    check_directory,
)
from slurm_forge.testing.cluster.spec import (
    ClusterSpec,
    PartitionPreemption,
    PartitionSpec,
    QosSpec,
    Tracking,
)

LAYOUT = Layout(Path("/tmp/c"))
PORTS = Ports(0, 21000)
OLD = Platform(hostname="box", version=SlurmVersion(22, 5), cgroup=CgroupKind.V1)
NEW = replace(OLD, version=SlurmVersion(25, 11))


def keys(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines())


def conf(spec: ClusterSpec | None = None, platform: Platform = OLD) -> dict[str, str]:
    return keys(render.slurm_conf(spec or ClusterSpec(), LAYOUT, PORTS, platform))


def partitions(spec: ClusterSpec) -> dict[str, dict[str, str]]:
    found = {}
    for line in render.slurm_conf(spec, LAYOUT, PORTS, OLD).splitlines():
        if line.startswith("PartitionName="):
            options = dict(word.partition("=")[::2] for word in line.split())
            found[options["PartitionName"]] = options
    return found


def test_the_four_partitions_offer_the_four_contracts() -> None:
    found = partitions(ClusterSpec())
    assert {n: (p["PreemptMode"], p["GraceTime"]) for n, p in found.items()} == {
        "normal": ("OFF", "0"),
        "preempt": ("REQUEUE", "10"),
        "preempt-nograce": ("REQUEUE", "0"),
        "cancel": ("CANCEL", "20"),
    }
    tiers = {name: int(options["PriorityTier"]) for name, options in found.items()}
    assert all(tiers["normal"] > tier for name, tier in tiers.items() if name != "normal")
    assert [n for n, options in found.items() if options["Default"] == "YES"] == ["normal"]
    assert len({options["Nodes"] for options in found.values()}) == 1


def test_what_the_partitions_offer_is_told() -> None:
    assert [each.contract for each in ClusterSpec().partitions] == [
        "normal (the default): not preempted",
        "preempt: requeued after 10 s of notice",
        "preempt-nograce: requeued without notice",
        "cancel: cancelled after 20 s of notice",
    ]


def test_every_daemon_has_a_port_of_its_own() -> None:
    spec = ClusterSpec(nodes=16)
    used = [PORTS.base, PORTS.database, PORTS.accounting, PORTS.controller]
    used += [PORTS.node(i) for i in range(1, spec.nodes + 1)]
    assert len(set(used)) == len(used)
    assert max(used) < Ports(1, 21040).base
    assert f"Port=[{PORTS.node(1)}-{PORTS.node(16)}]" in render.slurm_conf(spec, LAYOUT, PORTS, OLD)


def test_two_clusters_never_share_a_node_name() -> None:
    spec = ClusterSpec()
    names = [set(render.node_names(spec, Ports(slot, 0))) for slot in range(12)]
    assert names[0] == {"n1", "n2", "n3", "n4"}
    assert len(set().union(*names)) == 12 * 4


def test_what_a_test_varies_arrives_in_slurm_conf() -> None:
    changed = conf(
        ClusterSpec(
            kill_wait=timedelta(seconds=30),
            cred_expire=timedelta(seconds=7),
            slurmd_timeout=timedelta(seconds=15),
            job_requeue=False,
        )
    )
    assert changed["KillWait"] == "30"
    assert changed["AuthInfo"].endswith(",cred_expire=7")
    assert changed["SlurmdTimeout"] == "15"
    assert changed["JobRequeue"] == "0"
    assert conf()["JobRequeue"] == "1"


def test_a_delay_that_slurm_would_ignore_is_refused() -> None:
    with pytest.raises(ValueError, match="120"):
        ClusterSpec(cred_expire=timedelta(seconds=4))


def test_the_user_signal_is_asked_for_in_the_words_of_each_version() -> None:
    spec = ClusterSpec(send_user_signal=True)
    old, new = conf(spec), conf(spec, NEW)
    assert old["SlurmctldParameters"] == "preempt_send_user_signal"
    assert "PreemptParameters" not in old
    assert new["PreemptParameters"] == "send_user_signal"
    assert "SlurmctldParameters" not in new
    assert not {"SlurmctldParameters", "PreemptParameters"} & set(conf())


def test_the_limit_of_requeues_is_written_only_where_slurm_knows_it() -> None:
    spec = ClusterSpec(max_batch_requeue=2)
    assert conf(spec, NEW)["MaxBatchRequeue"] == "2"
    assert "MaxBatchRequeue" not in conf(spec, OLD)  # an unknown key is fatal to slurmctld
    assert "MaxBatchRequeue" not in conf(platform=NEW)


@pytest.mark.parametrize(
    ("asked", "machine", "plugin"),
    [
        (Tracking.AUTO, CgroupKind.V1, "cgroup"),
        (Tracking.AUTO, CgroupKind.V2, "cgroup"),
        (Tracking.AUTO, CgroupKind.NONE, "linuxproc"),
        (Tracking.LINUXPROC, CgroupKind.V1, "linuxproc"),
        (Tracking.CGROUP, CgroupKind.V2, "cgroup"),
    ],
)
def test_tracking_follows_the_wish_and_then_the_machine(
    asked: Tracking, machine: CgroupKind, plugin: str
) -> None:
    found = conf(ClusterSpec(tracking=asked), replace(OLD, cgroup=machine))
    assert found["ProctrackType"] == f"proctrack/{plugin}"
    assert found["TaskPlugin"] == ("task/cgroup" if plugin == "cgroup" else "task/none")


def test_memory_is_limited_and_swap_only_where_the_kernel_counts_it() -> None:
    plain = keys(render.cgroup_conf(OLD))
    assert plain["ConstrainRAMSpace"] == "yes"
    assert "ConstrainSwapSpace" not in plain
    assert keys(render.cgroup_conf(replace(OLD, swap_accounting=True)))["AllowedSwapSpace"] == "0"
    assert render.cgroup_conf(replace(OLD, cgroup=CgroupKind.NONE)) == ""


@pytest.mark.parametrize("kind", [CgroupKind.V1, CgroupKind.V2])
def test_nothing_is_written_that_a_newer_slurm_refuses(kind: CgroupKind) -> None:
    assert "CgroupAutomount" not in render.cgroup_conf(replace(NEW, cgroup=kind))


def test_without_accounting_nothing_of_it_is_mentioned() -> None:
    assert not [key for key in conf(ClusterSpec(accounting=False)) if key.startswith("Account")]
    assert conf()["AccountingStorageType"] == "accounting_storage/slurmdbd"


@pytest.mark.parametrize(
    ("gpus", "devices", "expected"),
    [
        (0, True, ""),
        (1, True, "File=/tmp/c/dev/gpu0"),
        (3, True, "File=/tmp/c/dev/gpu[0-2]"),
        (3, False, "Count=3"),
    ],
)
def test_gpus_are_made_up(gpus: int, devices: bool, expected: str) -> None:
    text = render.gres_conf(ClusterSpec(gpus=gpus), LAYOUT, devices=devices)
    assert text.strip().endswith(expected)
    assert ("Gres=gpu" in render.slurm_conf(ClusterSpec(gpus=gpus), LAYOUT, PORTS, OLD)) == bool(
        gpus
    )


def test_kinds_of_gpus_and_features_are_made_up() -> None:
    spec = ClusterSpec(gpus=2, gpu_kinds=("a100", "h100"), features=("big", "nvlink"))
    text = render.slurm_conf(spec, LAYOUT, PORTS, OLD)
    assert " Gres=gpu:a100:2,gpu:h100:2 Feature=big,nvlink " in text
    assert render.gres_conf(spec, LAYOUT, devices=True).splitlines()[1:] == [
        "Name=gpu Type=a100 File=/tmp/c/dev/gpu[0-1]",
        "Name=gpu Type=h100 File=/tmp/c/dev/gpu[2-3]",
    ]


def test_the_accounting_database_listens_to_this_machine_only() -> None:
    text = render.database_conf(LAYOUT, PORTS)
    assert "bind-address=127.0.0.1" in text
    assert "'slurm'@'127.0.0.1' IDENTIFIED BY 'secret'" in render.database_setup("secret")
    assert "StoragePass=secret" in render.slurmdbd_conf(LAYOUT, PORTS, OLD, "secret")


def test_secrets_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    files.claim_directory(layout)
    files.write_credentials(layout, PORTS, OLD)
    files.write_configuration(ClusterSpec(gpus=0), layout, PORTS, OLD)
    secret = {layout.munge_key.name, "slurmdbd.conf", "my.cnf", "setup.sql"}
    for path in layout.slurm_conf.parent.iterdir():
        shared = stat.S_IMODE(path.stat().st_mode) & 0o077
        assert bool(shared) == (path.name not in secret), path
    first = layout.munge_key.read_bytes()
    files.wipe(layout)
    files.write_credentials(layout, PORTS, OLD)
    assert layout.munge_key.read_bytes() != first


def test_a_directory_of_somebody_else_is_never_wiped(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UnsafeFileError, match="not empty"):
        files.claim_directory(Layout(tmp_path))
    files.wipe(Layout(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    for directory in (shared, link):
        with pytest.raises(UnsafeFileError):
            files.claim_directory(Layout(directory))


@pytest.mark.parametrize("name", ["x" * 80, "with space", "with#hash", "with%n", "a,b"])
def test_a_directory_that_slurm_could_not_use_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_directory(Path("/tmp") / name)
    assert "Choose a directory" in caught.value.next_step


def test_the_longest_socket_fits(tmp_path: Path) -> None:
    longest = check_directory(Path("/" + "d" * 61))
    node = render.node_names(ClusterSpec(nodes=16), Ports(63, 0))[-1]
    path = Layout(longest).spool(node) / f"{node}_9999999.4294967291"
    assert len(os.fsencode(path)) <= 107


def test_a_spec_without_a_single_default_partition_is_refused() -> None:
    lone = PartitionSpec(name="a", preempt_mode=PartitionPreemption.OFF)
    with pytest.raises(ValueError, match="default"):
        ClusterSpec(partitions=(lone,))
    with pytest.raises(ValueError, match="differ"):
        ClusterSpec(partitions=(replace(lone, default=True), lone))
    with pytest.raises(ValueError, match="name"):
        replace(lone, name="x\nPartitionName=evil")


def test_suspending_needs_gang_scheduling_and_only_then_is_it_on() -> None:
    low = PartitionSpec(name="low", preempt_mode=PartitionPreemption.SUSPEND)
    top = PartitionSpec(name="normal", preempt_mode=PartitionPreemption.OFF, default=True)
    assert conf(ClusterSpec(partitions=(top, low)))["PreemptMode"] == "SUSPEND,GANG"
    assert conf()["PreemptMode"] == "REQUEUE"


def test_a_cluster_with_qos_preempts_by_them() -> None:
    spec = ClusterSpec(
        qos=(
            QosSpec(
                name="low",
                preempt_mode=PartitionPreemption.CANCEL,
                grace_time=timedelta(seconds=20),
            ),
            QosSpec(name="high", preempts=("low",)),
        )
    )
    assert conf(spec)["PreemptType"] == "preempt/qos"
    assert conf()["PreemptType"] == "preempt/partition_prio"
    words = [" ".join(each) for each in render.qos_commands(spec)]
    assert words == [
        "-i add qos low",
        "-i add qos high",
        "-i modify qos low set PreemptMode=cancel GraceTime=20",
        "-i modify qos high set PreemptMode=cluster GraceTime=0 Preempt=low",
    ]


def test_qos_that_nobody_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="missing"):
        ClusterSpec(qos=(QosSpec(name="high", preempts=("missing",)),))
    with pytest.raises(ValueError, match="database"):
        ClusterSpec(qos=(QosSpec(name="high"),), accounting=False)
    with pytest.raises(ValueError, match="QOS name"):
        QosSpec(name="High; drop")
