"""A real Slurm on this machine, as an object for tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slurm_forge.errors import ForgeError, SlurmUnreachableError, UnsupportedError
from slurm_forge.testing.cluster import lifecycle, machine, processes
from slurm_forge.testing.cluster.daemons import tail
from slurm_forge.testing.cluster.layout import Layout, check_directory
from slurm_forge.testing.cluster.running import RunningCluster
from slurm_forge.testing.cluster.spec import ClusterSpec
from slurm_forge.testing.cluster.state import read_state, write_state


class SlurmCluster(RunningCluster):
    """Slurm's own daemons in one private directory; as many clusters as there are directories.

    ``start`` needs root and the packages (UnsupportedError says which), wipes the directory, and
    returns when a job has run.  All that ``SlurmClients`` offers works from then on.
    ``environment`` is what clients run with; the caller's own by default.
    """

    def __init__(
        self,
        directory: Path,
        spec: ClusterSpec | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # The one place where the tests' cluster looks at the caller's environment.
        base = os.environ if environment is None else environment
        super().__init__(Layout(check_directory(directory)), spec or ClusterSpec(), base)

    @classmethod
    def attach(
        cls, directory: Path, *, environment: Mapping[str, str] | None = None
    ) -> SlurmCluster:
        """The cluster that another process started in ``directory``; ForgeError where none runs."""
        cluster = cls(directory, environment=environment)
        state = read_state(cluster.layout)
        if state is None or not lifecycle.living_daemons(state):
            raise ForgeError(
                f"no cluster runs in {cluster.layout.directory}",
                next_step="Start one: python -m slurm_forge.testing.cluster up"
                f" --dir {cluster.layout.directory}",
            )
        cluster._adopt(state)
        return cluster

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Boot, and run one job that does nothing to see how fast this machine is now."""
        reason = machine.why_not_here(self.env.get("PATH", ""), accounting=self.spec.accounting)
        if reason is not None:
            raise UnsupportedError(
                f"no test cluster can be started: {reason}",
                next_step="As root: python -m slurm_forge.testing.cluster up --install",
            )
        running = read_state(self.layout)
        if running is not None and len(lifecycle.living_daemons(running)) == len(running.daemons):
            raise ForgeError(
                f"a cluster runs in {self.layout.directory} already",
                next_step="Stop it with 'down', or choose another directory.",
            )
        began = time.monotonic()
        state, self._starter = lifecycle.boot(self.spec, self.layout, self.env)
        booted = time.monotonic()
        self._adopt(replace(state, boot_s=booted - began))
        self._make_qos()
        job_id = self.sbatch("true", "--output=/dev/null", "--job-name=hello")
        self.wait_state(job_id, "COMPLETED", timeout=60.0)
        self._adopt(replace(self.state, trivial_job_s=time.monotonic() - booted))
        write_state(self.layout, self.state)

    def stop(self) -> None:
        """End exactly the processes of this cluster.  The directory stays, for its logs."""
        lifecycle.tear_down(self.layout)
        if self._starter is not None:
            self._starter.reap()

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- preemption -----------------------------------------------------------------------------

    def preempt(self, job_id: str, *, hold: float = 1.0) -> str:
        """Have a job preempted for real, by one of higher priority that wants all its nodes.

        Returns the id of that job, which runs for ``hold`` seconds once the victim is gone.
        """
        victim = self.job(job_id)
        if not victim.nodes:
            raise ForgeError(
                f"job {job_id} has no nodes to take away: it is {victim.state}",
                next_step="Wait until it is RUNNING.",
            )
        top = max(self.spec.partitions, key=lambda p: p.priority_tier)
        count = (victim.field("NumNodes") or "1").partition("-")[0]
        return self.sbatch(
            f"sleep {hold}",
            f"--partition={top.name}",
            *(f"--qos={each.name}" for each in self.spec.qos if each.preempts),
            f"--nodelist={victim.nodes}",
            f"--nodes={count}",
            "--exclusive",
            "--time=10",
            "--job-name=preemptor",
            "--output=/dev/null",
        )

    def cancel_preemptor(self, job_id: str, timeout: float = 20.0) -> None:
        """Take the preemptor away, so that its nodes are free again."""
        self.cancel(job_id)
        over = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")
        self.wait_state(job_id, over, timeout)

    # --- between tests ----------------------------------------------------------------------------

    def reset(self, timeout: float = 60.0) -> None:
        """Cancel all jobs, bring back what was killed or frozen, wait until all nodes are idle."""
        self.thaw_controller()
        for name in self.nodes:
            self.thaw_node(name)
            if not processes.is_alive(self._daemon(f"slurmd.{name}").process):
                self.restart_node(name)
        self.run(
            "scontrol", "update", f"NodeName={','.join(self.nodes)}", "State=RESUME", check=False
        )

        def quiet() -> bool:
            # Again and again: a job that was being requeued may have slipped through.
            ids = self.run("squeue", "-a", "-h", "-o", "%A").stdout.split()
            if ids:
                self.run("scancel", *sorted(set(ids)), check=False)
                # They are cancelled already; without KillWait the next test starts sooner.
                for process in lifecycle.job_processes(self.layout):
                    processes.kill(process, signal.SIGKILL)
                return False
            states = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
            return all(line.split()[1] == "idle" for line in states)

        self.wait_for(quiet, timeout, "an empty queue and idle nodes")

    def logs(self, lines: int = 40) -> str:
        """The ends of the daemons' logs, for the report of a failure."""
        parts = []
        for path in sorted(self.layout.logs.glob("slurm*.log")):
            parts.append(f"--- {path}\n{tail(path, lines)}")
        return "\n".join(parts)

    def is_healthy(self) -> bool:
        """Whether every daemon runs and the controller answers."""
        state = read_state(self.layout)
        if state is None or len(lifecycle.living_daemons(state)) != len(state.daemons):
            return False
        try:
            return self.run("scontrol", "ping", timeout=10.0, check=False).returncode == 0
        except SlurmUnreachableError:
            return False
