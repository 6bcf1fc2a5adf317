"""A Slurm in memory, with a clock that only a test moves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from tests.fake_slurm.arguments import parse_sbatch
from tests.fake_slurm.client import FakeClient, Network
from tests.fake_slurm.clock import VirtualClock
from tests.fake_slurm.controller import Controller
from tests.fake_slurm.programs import Programs, Runs
from tests.fake_slurm.spec import FakeSlurmSpec

_PREEMPTOR = Path("preemptor")


class FakeSlurm(FakeClient):
    """A Slurm state machine: what somebody at a login node can ask, and what befalls a cluster.

    Nothing happens but while the clock is moved (``advance``, ``wait_until``) and in the moment of
    a request.  ``script(name, programs)`` says what a batch script of that file name does; others
    run for ten minutes.  Compared with a real 22.05.8 by tests/slurm/test_fake_slurm.py.
    """

    def __init__(self, spec: FakeSlurmSpec | None = None) -> None:
        self.spec = spec or FakeSlurmSpec()
        self.network = Network()
        self.controller = Controller(
            self.spec, lambda start: FakeClient(self.controller, self.network, start)
        )
        super().__init__(self.controller, self.network)
        self._preemptors = 0

    @property
    def clock(self) -> VirtualClock:
        """The time of the whole cluster."""
        return self.controller.clock

    def script(self, name: str, programs: Programs) -> None:
        """Say what a script does whose file has this name."""
        self.controller.scripts[name] = programs

    # -- time --------------------------------------------------------------------------------

    def advance(self, by: timedelta) -> None:
        """Let time pass."""
        self.clock.advance(by)

    def wait_until(
        self,
        true: Callable[[], bool],
        within: timedelta = timedelta(hours=1),
        step: timedelta = timedelta(milliseconds=100),
    ) -> None:
        """Let time pass until something is the case; ``TimeoutError`` where it never is."""
        end = self.clock.now + within
        while not true():
            if self.clock.now >= end:
                raise TimeoutError(f"not the case within {within} of virtual time")
            self.clock.advance(step)

    def wait_state(self, job: str, states: JobState | Collection[JobState]) -> JobRecord:
        """Let time pass until the job is in one of the states; how it was then."""
        wanted = {states} if isinstance(states, JobState) else set(states)
        seen: list[JobRecord] = []

        def reached() -> bool:
            seen[:] = [each.record() for each in self.controller.found(job)][:1]
            return bool(seen) and seen[0].state in wanted

        self.wait_until(reached)
        return seen[0]

    # -- what befalls a cluster ----------------------------------------------------------------

    def preempt(self, job: str, *, hold: timedelta = timedelta(seconds=1)) -> str:
        """Have a job preempted by one of the highest priority that wants all its nodes.

        The id of that job, which runs for ``hold``.
        """
        (victim,) = self.controller.found(job)
        top = max(self.spec.partitions, key=lambda partition: partition.priority_tier)
        self._preemptors += 1
        name = Path(f"{_PREEMPTOR}-{self._preemptors}")
        self.script(name.name, Runs(seconds=hold.total_seconds()))
        asked = parse_sbatch(
            (f"--partition={top.name}", f"--nodelist={','.join(victim.nodes)}", "--no-requeue")
        )
        return self.controller.submit(name, asked)

    def controller_down(self, duration: timedelta) -> None:
        """Nobody gets an answer for so long, counted from now.  Jobs go on."""
        self.network.down_until = self.clock.now + duration

    def kill_node(self, name: str) -> None:
        """Power off: everything on it is gone at once, Slurm finds out after SlurmdTimeout."""
        self.controller.lose_node(name, frozen=False)

    def freeze_node(self, name: str) -> None:
        """Slurm gives the node up after SlurmdTimeout, but what runs there lives on."""
        self.controller.lose_node(name, frozen=True)

    def restore_node(self, name: str) -> None:
        """It answers again; what Slurm had given up there is killed now."""
        self.controller.restore_node(name)

    def drain_node(self, name: str, reason: str) -> None:
        """No new job starts there."""
        node = self.controller.nodes[name]
        node.drained, node.reason = True, reason
