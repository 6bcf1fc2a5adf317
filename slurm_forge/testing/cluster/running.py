"""A cluster that runs: who its daemons are, and how to break and mend them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter

from slurm_forge.errors import ForgeError
from slurm_forge.testing.cluster import files, lifecycle, lookup, machine, processes, render
from slurm_forge.testing.cluster.clients import SlurmClients
from slurm_forge.testing.cluster.daemons import DaemonStarter
from slurm_forge.testing.cluster.layout import Layout
from slurm_forge.testing.cluster.processes import ProcessRef
from slurm_forge.testing.cluster.spec import ClusterSpec, Tracking
from slurm_forge.testing.cluster.state import ClusterState, Daemon, write_state

_FIXED = attrgetter("nodes", "accounting", "prefix")


class RunningCluster(SlurmClients):
    """The daemons of one cluster by name, with the faults that a test can inject into them."""

    def __init__(self, layout: Layout, spec: ClusterSpec, environment: Mapping[str, str]) -> None:
        super().__init__(layout, _with_slurm_of(spec, environment))
        self.spec = spec
        self._state: ClusterState | None = None
        self._starter: DaemonStarter | None = None

    @property
    def state(self) -> ClusterState:
        """What is known about the running cluster; ForgeError before ``start``."""
        if self._state is None:
            raise ForgeError("the cluster was not started", next_step="Call start() first.")
        return self._state

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes.  Not always n1…: clusters side by side need different names."""
        return render.node_names(self.spec, self.state.ports)

    @property
    def tracking(self) -> Tracking:
        """Cgroup or linuxproc, whichever it came to."""
        return self.state.tracking

    @property
    def limits_memory(self) -> bool:
        """Whether a task that takes more memory than it asked for is killed."""
        return self.tracking is Tracking.CGROUP

    # --- faults ---------------------------------------------------------------------------------

    def kill_node(self, name: str, *, spare_tasks: bool = False) -> None:
        """The node loses power: SIGKILL to its slurmd, its slurmstepds and all their tasks.

        With ``spare_tasks`` the tasks live on without anybody who watches them, as those of a
        node do that only lost its network.  Slurm notices after ``slurmd_timeout``, at its next
        ping.
        """
        watched = (
            lifecycle.step_daemons(self.layout, name)
            if spare_tasks
            else lifecycle.node_processes(self.layout, name)
        )
        for process in (self._daemon(f"slurmd.{name}").process, *watched):
            processes.kill(process, signal.SIGKILL)
        if not spare_tasks:
            self._kill_node_processes(name)
        self._reap()

    def restart_node(self, name: str) -> None:
        """Power the node on again, or restart its slurmd; back when the controller sees it."""
        old = self._daemon(f"slurmd.{name}")
        processes.stop([old.process], patience_s=10.0)
        self._reap()
        self._kill_node_processes(name)
        processes.wait_until(lambda: machine.remove_cgroups(name), timeout_s=5.0)
        self._start_again().nodes((name,))

    def freeze_node(self, name: str) -> None:
        """SIGSTOP to the node's slurmd only: its tasks live on while Slurm gives the node up."""
        processes.kill(self._daemon(f"slurmd.{name}").process, signal.SIGSTOP)

    def thaw_node(self, name: str) -> None:
        """SIGCONT to a frozen slurmd."""
        processes.kill(self._daemon(f"slurmd.{name}").process, signal.SIGCONT)

    def freeze_controller(self) -> None:
        """SIGSTOP to slurmctld: connections are accepted, and nobody answers."""
        processes.kill(self._daemon("slurmctld").process, signal.SIGSTOP)

    def thaw_controller(self) -> None:
        """SIGCONT to a frozen slurmctld."""
        processes.kill(self._daemon("slurmctld").process, signal.SIGCONT)

    @contextlib.contextmanager
    def frozen_controller(self) -> Iterator[None]:
        """The controller is frozen inside the block."""
        self.freeze_controller()
        try:
            yield
        finally:
            self.thaw_controller()

    @contextlib.contextmanager
    def stopped_controller(self) -> Iterator[None]:
        """The controller is down inside the block: connections are refused."""
        processes.stop([self._daemon("slurmctld").process], patience_s=20.0)
        self._reap()
        try:
            yield
        finally:
            self._start_again().controller()

    @contextlib.contextmanager
    def stopped_database(self) -> Iterator[None]:
        """slurmdbd is down inside the block: sacct answers nothing, everything else goes on."""
        processes.stop([self._daemon("slurmdbd").process], patience_s=20.0)
        self._reap()
        try:
            yield
        finally:
            self._start_again().accounting()

    # --- what belongs to a job --------------------------------------------------------------------

    def tasks(self, job_id: str) -> Mapping[int, ProcessRef]:
        """The processes of a job's newest step by rank (``SLURM_PROCID``)."""
        return lookup.tasks(self.layout, self._plain_id(job_id))

    def nodes_of(self, job_id: str) -> tuple[str, ...]:
        """The names of a running job's nodes, the one of the batch script first."""
        record = self.job(job_id)
        names = self.run("scontrol", "show", "hostnames", record.nodes).stdout.split()
        batch = record.field("BatchHost")
        return tuple(sorted(names, key=lambda name: name != batch))

    def batch_script(self, job_id: str) -> ProcessRef | None:
        """What runs as the job's batch script; None while nothing does."""
        return lookup.batch_script(self.layout, self._plain_id(job_id))

    def step_daemons(
        self, job_id: str, step: str | None = None, *, node: str | None = None
    ) -> tuple[ProcessRef, ...]:
        """The slurmstepd of a job, or of one of its steps (``0``, ``batch``), maybe on one node."""
        return lookup.step_daemons(self.layout, self._plain_id(job_id), step, node=node)

    def _plain_id(self, job_id: str) -> str:
        """What the environment of an array's task calls it: ``7_1`` may be 8."""
        return self.job(job_id).job_id if "_" in job_id else job_id

    @contextlib.contextmanager
    def configured(self, spec: ClusterSpec) -> Iterator[None]:
        """The same daemons under another spec (of as many nodes) inside the block."""
        before = self.spec
        self._reconfigure(spec)
        try:
            yield
        finally:
            self._reconfigure(before)

    # --- inside -----------------------------------------------------------------------------------

    def _kill_node_processes(self, name: str) -> None:
        """Until none is left: one that was forking while it was listed has a child."""

        def gone() -> bool:
            remaining = lifecycle.node_processes(self.layout, name)
            for process in remaining:
                processes.kill(process, signal.SIGKILL)
            return not remaining

        processes.wait_until(gone, timeout_s=5.0)

    def _adopt(self, state: ClusterState) -> None:
        self._state = state
        self.spec = state.spec
        self.env = _with_slurm_of(state.spec, self.env)
        self.trivial_job_s = state.trivial_job_s

    def _daemon(self, name: str) -> Daemon:
        for daemon in self.state.daemons:
            if daemon.name == name:
                return daemon
        raise ForgeError(
            f"this cluster has no {name}",
            next_step=f"It has {', '.join(daemon.name for daemon in self.state.daemons)}.",
        )

    def _record(self, daemon: Daemon) -> None:
        others = tuple(d for d in self.state.daemons if d.name != daemon.name)
        self._adopt(replace(self.state, daemons=(*others, daemon)))
        write_state(self.layout, self.state)

    def _start_again(self) -> DaemonStarter:
        children = [] if self._starter is None else self._starter.children
        self._starter = DaemonStarter(
            self.layout, self.state.ports, self.env, self._record, children
        )
        return self._starter

    def _reap(self) -> None:
        if self._starter is not None:
            self._starter.reap()

    def _reconfigure(self, spec: ClusterSpec) -> None:
        if _FIXED(spec) != _FIXED(self.spec):
            raise ValueError("nodes, accounting and prefix can't change while the cluster runs")
        slurm = [
            d.process for d in self.state.daemons if d.name.startswith(("slurmctld", "slurmd."))
        ]
        processes.stop(slurm, patience_s=20.0)
        self._reap()
        state = self.state
        self._adopt(
            replace(state, spec=spec, tracking=render.effective_tracking(spec, state.platform))
        )
        files.write_configuration(spec, self.layout, state.ports, state.platform)
        starter = self._start_again()
        starter.controller()
        starter.nodes(self.nodes)
        self._make_qos()

    def _make_qos(self) -> None:
        """The controller hears of each change from slurmdbd; known is what it prints itself."""
        for arguments in render.qos_commands(self.spec):
            done = self.run("sacctmgr", *arguments, check=False)
            output = done.stdout + done.stderr
            harmless = ("lready existing", "Nothing modified", "Nothing new added")
            if done.returncode != 0 and not any(words in output for words in harmless):
                raise ForgeError(
                    f"sacctmgr {' '.join(arguments)}: {output.strip()}",
                    next_step=f"The log is {self.layout.log('slurmdbd')}.",
                )
        wanted = {each.name for each in self.spec.qos}
        if wanted:
            self.wait_for(lambda: wanted <= self._known_qos(), 30, "the controller to know the QOS")

    def _known_qos(self) -> set[str]:
        text = self.run("scontrol", "show", "assoc_mgr", "flags=qos").stdout
        return set(re.findall(r"^QOS=([^(\s]+)", text, re.MULTILINE))


def _with_slurm_of(spec: ClusterSpec, environment: Mapping[str, str]) -> Mapping[str, str]:
    path = environment.get("PATH", os.defpath)
    return {**environment, "PATH": machine.path_with_prefix(path, spec.prefix)}
