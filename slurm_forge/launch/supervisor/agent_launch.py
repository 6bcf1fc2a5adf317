"""A launch whose ranks are forked by standing agents, as the conductor sees it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta

from slurm_forge.control import Hub
from slurm_forge.control.agent_hub import (
    AgentEnd,
    AgentsHub,
)
from slurm_forge.launch.supervisor.srun import StepProcess
from slurm_forge.recovery.incident.launch_facts import WorkerEnd

#: A rank that ended badly ends the others, as ``srun --kill-on-bad-exit`` does: they get this long
#: for last words of their own, and to leave by themselves.
_BAD_EXIT_S = 2.0
#: And this long where they may unwind, which they are given up on before.
_UNWIND_S = 4.0
#: Who ends a step kills agents and workers in one go; the agents' end is seen this much later.
_STEP_ENDS_S = 0.3
#: Agents that don't say within this time that their workers are gone are ended with the step.
_CONFIRM_S = 4.0
#: An agent that has gone ends the step by that: srun is waited for no longer.
_SRUN_S = 10.0


class AgentsLaunch:
    """One launch on a standing step.  Over when every agent has said that nothing of it lives."""

    def __init__(
        self,
        step: StepProcess,
        agents: AgentsHub,
        hub: Hub,
        launch: int,
        *,
        unwinds: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step = step
        self._agents = agents
        self._hub = hub
        self._launch = launch
        self._patience_s = _UNWIND_S if unwinds else _BAD_EXIT_S
        self._clock = clock
        self._began = clock()
        self._killed_at: float | None = None
        self._agent_gone_at: float | None = None
        self._status: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether every worker is reaped, with all that it had started, and every agent stands."""
        ends = self._agents.ends(self._launch)
        return (
            len(ends) == self._agents.world_size
            and not any(end.message.left for end in ends)
            and self._agent_gone_at is None
            and self._step.poll() is None
        )

    def poll(self) -> int | None:
        """0 when every worker came out well, else what the first that did not ended with."""
        if self._status is None:
            self._status = self._poll_agents()
        return self._status

    def _poll_agents(self) -> int | None:
        over = self._step.poll()
        if over is not None:
            return over
        now = self._clock()
        agents = self._agents.agents()
        if any(not agent.connected for agent in agents.values()):
            self._agent_gone_at = self._agent_gone_at or now
        ends = self._agents.ends(self._launch)
        bad = [end for end in ends if end.message.signal or end.message.code]
        if self._hub.over and any(agent.begun < self._launch for agent in agents.values()):
            self._agents.end(self._launch)  # who has not begun needs not
        if len(ends) == self._agents.world_size:
            return self._all_ended(ends, bad, now)
        if self._agent_gone_at is not None and now - self._agent_gone_at > _SRUN_S:
            disconnected = [agent for agent in agents.values() if not agent.connected]
            never_begins = any(agent.begun < self._launch for agent in disconnected)
            if never_begins or len(ends) + len(disconnected) >= len(agents):
                self._step.kill()
        elif bad and now - bad[0].at > self._patience_s and self._killed_at is None:
            self.kill()
        if self._killed_at is not None and now - self._killed_at > _CONFIRM_S:
            self._step.kill()
        return None

    def _all_ended(self, ends: tuple[AgentEnd, ...], bad: list[AgentEnd], now: float) -> int | None:
        if any(end.message.left for end in ends):
            self._step.kill()
            return None
        unexplained = [
            end.at for end in bad if end.message.signal == "SIGKILL" and not end.message.ours
        ]
        if unexplained and now - max(unexplained) < _STEP_ENDS_S:
            return None
        if unexplained and self._agent_gone_at is not None:
            # Somebody ended the step: what srun says of that is yet to come.
            return None if now - self._agent_gone_at < _SRUN_S else _status(bad[0])
        return _status(bad[0]) if bad else 0

    def kill(self) -> None:
        """End every worker now; where that can't be had from the agents, the whole step."""
        if self._killed_at is None:
            self._killed_at = self._clock()
            self._agents.end(self._launch)
        agents = self._agents.agents()
        if self._agent_gone_at is not None or len(agents) < self._agents.world_size:
            self._step.kill()

    def tail(self) -> str:
        """The last lines of srun's output."""
        return self._step.tail()

    def launcher_signal(self) -> str:
        """The signal that ended srun, empty where none did or we sent it."""
        return self._step.launcher_signal()

    def ends(self) -> tuple[WorkerEnd, ...]:
        """How workers ended, in the order in which agents said so."""
        return tuple(
            WorkerEnd(
                rank=end.rank,
                host=end.host,
                signal=end.message.signal,
                exit_code=None if end.message.signal else end.message.code,
                after=timedelta(seconds=max(0.0, end.at - self._began)),
                ours=end.message.ours,
                memory=end.message.memory,
            )
            for end in self._agents.ends(self._launch)
        )


def _status(end: AgentEnd) -> int:
    if not end.message.signal:
        return end.message.code
    number = getattr(signal, end.message.signal, None)
    return 128 + int(number or 0)
