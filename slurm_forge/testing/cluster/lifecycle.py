"""From nothing to a cluster that answers, and back, whatever an earlier one left behind."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

from slurm_forge.errors import ForgeError, UnsupportedError
from slurm_forge.testing.cluster import files, machine, processes, render
from slurm_forge.testing.cluster.daemons import MARKER, DaemonStarter
from slurm_forge.testing.cluster.layout import CgroupKind, Layout, Platform
from slurm_forge.testing.cluster.processes import ProcessRef
from slurm_forge.testing.cluster.spec import ClusterSpec, Tracking
from slurm_forge.testing.cluster.state import ClusterState, Daemon, read_state, write_state

# Nothing they would save is kept; a slurmd that lost its munged takes ten seconds to see it.
_STOP_PATIENCE_S = 2.0


def boot(
    spec: ClusterSpec, layout: Layout, environment: Mapping[str, str]
) -> tuple[ClusterState, DaemonStarter]:
    """Start every daemon in ``layout.directory``, which is wiped first; their state.

    ``environment`` is what clients run with.  With ``AUTO``, a machine whose control groups turn
    out not to serve gets a cluster without them.
    """
    files.claim_directory(layout)
    tear_down(layout)
    platform = machine.detect_platform(environment.get("PATH", ""))
    if spec.tracking is Tracking.CGROUP and platform.cgroup is CgroupKind.NONE:
        raise UnsupportedError(
            "control groups can't be made here, or not those that Slurm needs",
            next_step="Use --tracking linuxproc; memory limits are then not enforced.",
        )
    try:
        return _boot_once(spec, layout, environment, platform)
    except ForgeError as error:
        if spec.tracking is not Tracking.AUTO or platform.cgroup is CgroupKind.NONE:
            raise
        without = replace(platform, cgroup=CgroupKind.NONE)
        state, starter = _boot_once(spec, layout, environment, without)
        return replace(state, without_cgroups=error.message), starter


def _boot_once(
    spec: ClusterSpec, layout: Layout, environment: Mapping[str, str], platform: Platform
) -> tuple[ClusterState, DaemonStarter]:
    files.wipe(layout)
    try:
        return _start_daemons(spec, layout, environment, platform)
    except BaseException:  # an interrupt must leave no daemons behind either
        tear_down(layout)
        raise


def _start_daemons(
    spec: ClusterSpec, layout: Layout, environment: Mapping[str, str], platform: Platform
) -> tuple[ClusterState, DaemonStarter]:
    with machine.claimed_ports(spec.nodes) as ports:
        state = ClusterState(
            boot_id=processes.boot_id(),
            spec=spec,
            platform=platform,
            ports=ports,
            tracking=render.effective_tracking(spec, platform),
        )

        def record(daemon: Daemon) -> None:
            nonlocal state
            state = replace(state, daemons=(*state.daemons, daemon))
            write_state(layout, state)

        files.write_credentials(layout, ports, platform)
        files.write_configuration(spec, layout, ports, platform)
        starter = DaemonStarter(layout, ports, environment, record)
        starter.munged()
        if spec.accounting:
            starter.database()
            starter.accounting()
        starter.controller()
        starter.nodes(render.node_names(spec, ports))
    return state, starter


def living_daemons(state: ClusterState) -> tuple[Daemon, ...]:
    """Those recorded daemons that still run."""
    if state.boot_id != processes.boot_id():
        return ()
    return tuple(d for d in state.daemons if processes.is_alive(d.process))


def tear_down(layout: Layout) -> None:
    """End every process of the cluster in this directory and remove its control groups.

    Only processes that carry this directory in their environment, hold its logs open, or are
    recorded in its state with their start time are touched.  Safe to call again.
    """
    state = read_state(layout)
    recorded = living_daemons(state) if state is not None else ()
    _kill_job_side(layout)
    # In reverse: what depends on others goes first, so that nobody waits for a dead one.
    ordered = [daemon.process for daemon in reversed(recorded)]
    slurm = [d.process for d in recorded if d.name.startswith(("slurmctld", "slurmd."))]
    processes.stop(slurm, patience_s=_STOP_PATIENCE_S)
    for process in ordered:
        processes.stop([process], patience_s=_STOP_PATIENCE_S)
    orphans = tuple(processes.with_environment(f"{MARKER}={layout.directory}"))
    processes.stop(orphans, patience_s=_STOP_PATIENCE_S)
    _kill_job_side(layout)  # a slurmd may have started one more while it was being stopped
    # The name of a node of a cluster that crashed may have been taken by another since.
    for name in set(files.nodes_with_spool(layout)) - _nodes_elsewhere(layout):
        # A group is busy for a moment after its last process was killed.
        processes.wait_until(partial(machine.remove_cgroups, name), timeout_s=5.0)


def _kill_job_side(layout: Layout) -> None:
    steps = step_daemons(layout)
    for process in (*steps, *processes.descendants(steps), *job_processes(layout)):
        processes.kill(process, signal.SIGKILL)


def _nodes_elsewhere(layout: Layout) -> set[str]:
    """The names of the nodes that run for clusters in other directories."""
    own = set(processes.with_environment(f"{MARKER}={layout.directory}"))
    names: set[str] = set()
    for process in set(processes.with_environment(f"{MARKER}=")) - own:
        words = processes.command_line(process)
        names.update(name for flag, name in pairwise(words) if flag == "-N")
    return names


def step_daemons(layout: Layout, node: str | None = None) -> tuple[ProcessRef, ...]:
    """The slurmstepd of this cluster, or of one node of it."""
    log = str(layout.log(f"slurmd.{node}")) if node else f"{layout.logs}/"
    return tuple(processes.with_file_below("slurmstepd", log))


def job_processes(layout: Layout, node: str | None = None) -> tuple[ProcessRef, ...]:
    """What jobs have started on this cluster, or on one node of it."""
    marks = [f"SLURM_CONF={layout.slurm_conf}", f"SLURMD_NODENAME={node or ''}"]
    return tuple(processes.with_environment(*marks))


def node_processes(layout: Layout, node: str) -> tuple[ProcessRef, ...]:
    """Everything that would die with a node but its slurmd: slurmstepds and all below them."""
    steps = step_daemons(layout, node)
    in_groups = (processes.refer(pid) for pid in machine.processes_in_cgroups(node))
    own = {
        *steps,
        *processes.descendants(steps),
        *job_processes(layout, node),
        *(process for process in in_groups if process is not None),
    }
    return tuple(own)
