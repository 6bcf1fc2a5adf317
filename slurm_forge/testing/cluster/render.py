"""The configuration files of a test cluster, as text: pure functions of what is asked and found.

Every key is one that Slurm 22.05 to 26.05 knows; the two that differ are chosen by version.
Sources: slurm.conf(5), slurmdbd.conf(5), cgroup.conf(5), gres.conf(5).
"""

from __future__ import annotations

from datetime import timedelta

from slurm_forge.slurm.versions import has
from slurm_forge.testing.cluster.layout import CgroupKind, Layout, Platform, Ports
from slurm_forge.testing.cluster.spec import (
    ClusterSpec,
    PartitionPreemption,
    PartitionSpec,
    Tracking,
)

_QUICK = "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0"
_PREEMPT_PARAMETERS = "PreemptParameters=send_user_signal"
_QOS_MODES = {
    PartitionPreemption.OFF: "cluster",
    PartitionPreemption.REQUEUE: "requeue",
    PartitionPreemption.CANCEL: "cancel",
    PartitionPreemption.SUSPEND: "suspend",
}
_MAX_BATCH_REQUEUE = "MaxBatchRequeue"


def node_names(spec: ClusterSpec, ports: Ports) -> tuple[str, ...]:
    """The names of the nodes, in order."""
    return tuple(f"{ports.node_prefix}{i}" for i in range(1, spec.nodes + 1))


def effective_tracking(spec: ClusterSpec, platform: Platform) -> Tracking:
    """What ``AUTO`` comes to on this machine."""
    if spec.tracking is not Tracking.AUTO:
        return spec.tracking
    return Tracking.LINUXPROC if platform.cgroup is CgroupKind.NONE else Tracking.CGROUP


def slurm_conf(spec: ClusterSpec, layout: Layout, ports: Ports, platform: Platform) -> str:
    """slurm.conf: partitions that preempt for real, and delays short enough for a test."""
    cgroups = effective_tracking(spec, platform) is Tracking.CGROUP
    controller = [
        "preempt_send_user_signal"
        if spec.send_user_signal and not has(platform.version, _PREEMPT_PARAMETERS)
        else ""
    ]
    names = f"{ports.node_prefix}[1-{spec.nodes}]"
    kinds = [f"gpu:{kind}:{spec.gpus}" for kind in spec.gpu_kinds] or [f"gpu:{spec.gpus}"]
    gres = f" Gres={','.join(kinds)}" if spec.gpus else ""
    features = f" Feature={','.join(spec.features)}" if spec.features else ""
    lines = [
        f"ClusterName=forge{ports.slot}",
        f"SlurmctldHost={platform.hostname}(127.0.0.1)",
        f"SlurmctldPort={ports.controller}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        # A requeued job waits cred_expire; the default of 120 s would make every test slow.
        f"AuthInfo=socket={layout.munge_socket},cred_expire={_seconds(spec.cred_expire)}",
        f"StateSaveLocation={layout.controller_state}",
        f"SlurmdSpoolDir={layout.spool('%n')}",
        f"SlurmctldPidFile={layout.run}/slurmctld.pid",
        f"SlurmdPidFile={layout.run}/slurmd.%n.pid",
        f"SlurmctldLogFile={layout.log('slurmctld')}",
        f"SlurmdLogFile={layout.log('slurmd.%n')}",
        "SlurmctldDebug=verbose",
        "SlurmdDebug=verbose",
        "SwitchType=switch/none",
        "MpiDefault=none",
        # What the caller's shell happens to limit is no business of the jobs.
        "PropagateResourceLimits=NONE",
        f"ProctrackType=proctrack/{'cgroup' if cgroups else 'linuxproc'}",
        f"TaskPlugin=task/{'cgroup' if cgroups else 'none'}",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=30",
        # More CPUs and memory than the machine has.
        "SlurmdParameters=config_overrides",
        *(f"SlurmctldParameters={value}" for value in controller if value),
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "SchedulerType=sched/backfill",
        *([_QUICK] if spec.quick_scheduling else []),
        *([f"Epilog={layout.epilog}"] if spec.epilog else []),
        "PriorityType=priority/basic",
        f"PreemptType=preempt/{'qos' if spec.qos else 'partition_prio'}",
        # What a partition or a QOS says of its own wins.
        f"PreemptMode={'SUSPEND,GANG' if spec.suspends else 'REQUEUE'}",
        *(
            [_PREEMPT_PARAMETERS]
            if spec.send_user_signal and has(platform.version, _PREEMPT_PARAMETERS)
            else []
        ),
        f"JobRequeue={int(spec.job_requeue)}",
        *(
            [f"MaxBatchRequeue={spec.max_batch_requeue}"]
            if spec.max_batch_requeue is not None and has(platform.version, _MAX_BATCH_REQUEUE)
            else []
        ),
        f"KillWait={_seconds(spec.kill_wait)}",
        f"MinJobAge={_seconds(spec.min_job_age)}",
        f"SlurmdTimeout={_seconds(spec.slurmd_timeout)}",
        "OverTimeLimit=0",
        "InactiveLimit=0",
        "ReturnToService=2",
        *(_accounting(ports, layout) if spec.accounting else []),
        *(["GresTypes=gpu"] if spec.gpus else []),
        f"NodeName={names} NodeHostname={platform.hostname} NodeAddr=127.0.0.1"
        f" Port=[{ports.node(1)}-{ports.node(spec.nodes)}]"
        f" Sockets=1 CoresPerSocket={spec.cpus} ThreadsPerCore=1"
        f" RealMemory={spec.memory_mib}{gres}{features} State=UNKNOWN",
        *(_partition(partition, names, spec) for partition in spec.partitions),
    ]
    return "\n".join(lines) + "\n"


def slurmdbd_conf(layout: Layout, ports: Ports, platform: Platform, password: str) -> str:
    """slurmdbd.conf; holds the password, so slurmdbd insists on mode 0600."""
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        f"DbdHost={platform.hostname}",
        "DbdAddr=127.0.0.1",
        f"DbdPort={ports.accounting}",
        "SlurmUser=root",
        f"LogFile={layout.log('slurmdbd')}",
        f"PidFile={layout.run}/slurmdbd.pid",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={ports.database}",
        "StorageLoc=slurm_acct_db",
        "StorageUser=slurm",
        f"StoragePass={password}",
    ]
    return "\n".join(lines) + "\n"


def cgroup_conf(platform: Platform) -> str:
    """cgroup.conf: memory is limited; cores and devices are made up, so they are not.

    No CgroupAutomount: newer Slurm refuses to start with it.
    """
    if platform.cgroup is CgroupKind.NONE:
        return ""
    lines = [f"CgroupPlugin={platform.cgroup.value}"]
    if platform.cgroup is CgroupKind.V2:
        lines.append("IgnoreSystemd=yes")
    lines += ["ConstrainCores=no", "ConstrainDevices=no", "ConstrainRAMSpace=yes"]
    if platform.swap_accounting:
        # Otherwise a job over its limit swaps instead of meeting the out-of-memory killer.
        lines += ["ConstrainSwapSpace=yes", "AllowedSwapSpace=0"]
    return "\n".join(lines) + "\n"


def gres_conf(spec: ClusterSpec, layout: Layout, *, devices: bool) -> str:
    """gres.conf: GPUs that exist for the scheduler only.

    Without ``devices`` they are counted and nothing else: jobs get no CUDA_VISIBLE_DEVICES.
    """
    if not spec.gpus:
        return ""
    lines = ["AutoDetect=off"]
    for at, kind in enumerate(spec.gpu_kinds or ("",)):
        low, high = at * spec.gpus, (at + 1) * spec.gpus - 1
        first = layout.gpu(low)
        files = first if spec.gpus == 1 else first.with_name(f"gpu[{low}-{high}]")
        named = f"Name=gpu Type={kind}" if kind else "Name=gpu"
        lines.append(f"{named} {f'File={files}' if devices else f'Count={spec.gpus}'}")
    return "\n".join(lines) + "\n"


def epilog(spec: ClusterSpec) -> str:
    """What slurmd runs on each node after a job, before the node is free again."""
    return f"#!/bin/sh\nsleep {_seconds(spec.epilog)}\n"


def database_conf(layout: Layout, ports: Ports) -> str:
    """MariaDB's option file: small, and without the durability that nobody needs in a test."""
    lines = [
        "[mariadbd]",
        "user=root",
        f"datadir={layout.database}",
        f"socket={layout.run}/db.sock",
        f"pid-file={layout.run}/db.pid",
        f"log-error={layout.log('mariadbd')}",
        f"init-file={layout.database_setup}",
        "bind-address=127.0.0.1",
        f"port={ports.database}",
        "skip-name-resolve",
        "skip-log-bin",
        "performance-schema=OFF",
        "innodb-buffer-pool-size=32M",
        "innodb-log-file-size=16M",
        "innodb-flush-log-at-trx-commit=0",
        "innodb-doublewrite=0",
        "innodb-lock-wait-timeout=900",
    ]
    return "\n".join(lines) + "\n"


def database_setup(password: str) -> str:
    """The SQL that makes slurmdbd's user."""
    return (
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
        f"CREATE OR REPLACE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';\n"
    )


def _accounting(ports: Ports, layout: Layout) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={ports.accounting}",
        # Clients of slurmdbd take munge's socket from here and not from AuthInfo.
        f"AccountingStoragePass={layout.munge_socket}",
        "AccountingStorageTRES=gres/gpu",
    ]


def _partition(partition: PartitionSpec, nodes: str, spec: ClusterSpec) -> str:
    return (
        f"PartitionName={partition.name} Nodes={nodes}"
        f" Default={'YES' if partition.default else 'NO'} State=UP"
        f" MaxTime=INFINITE DefaultTime=00:10:00 OverSubscribe=NO"
        f" DefMemPerCPU={spec.default_memory_per_cpu_mib}"
        f" PriorityTier={partition.priority_tier}"
        f" PreemptMode={partition.preempt_mode.value}"
        f" GraceTime={_seconds(partition.grace_time)}"
    )


def qos_commands(spec: ClusterSpec) -> tuple[tuple[str, ...], ...]:
    """The arguments of sacctmgr that make the cluster's QOS what ``spec`` says, in order."""
    made = [("-i", "add", "qos", each.name) for each in spec.qos]
    changed = [
        (
            *("-i", "modify", "qos", each.name, "set"),
            # Slurm's word for "as the cluster does"; it knows none for never.
            f"PreemptMode={_QOS_MODES[each.preempt_mode]}",
            f"GraceTime={_seconds(each.grace_time)}",
            *([f"Preempt={','.join(each.preempts)}"] if each.preempts else []),
        )
        for each in spec.qos
    ]
    return (*made, *changed)


def _seconds(value: timedelta) -> int:
    return int(value.total_seconds())
