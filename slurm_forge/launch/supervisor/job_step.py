"""The job steps of one attempt: agents that stand over launches, or workers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from slurm_forge.control import Hub
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.agent_hub import AgentsHub
from slurm_forge.control.hub_events import MessageReceived
from slurm_forge.control.messages.agent import StartWorker
from slurm_forge.control.messages.rank import Notice
from slurm_forge.control.relay import RELAYED_FROM
from slurm_forge.knobs import Knobs
from slurm_forge.launch.conductor.observations import Launched
from slurm_forge.launch.render.launch_command import has_shield
from slurm_forge.launch.supervisor.agent_launch import AgentsLaunch
from slurm_forge.launch.supervisor.srun import (
    StepProcess,
    srun_command,
)
from slurm_forge.process import old_process_words, process_words
from slurm_forge.recovery.nodes.placement import Placement
from slurm_forge.site.variables import reaches_forks
from slurm_forge.vocabulary.decision import Start

#: After Leave, or after the last words, srun returns a moment later.
_SRUN_RETURNS_S = 5.0
#: Modules that an agent can run in a worker that it has forked, beside our own worker.
_KNOWN_MODULES = frozenset({"submitit.core._submit"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What the step of a launch is started with; agents stand only for launches of the same."""

    payload: tuple[str, ...]
    options: tuple[str, ...]
    tasks: int | None
    #: The nodes of the ranks in order, and whether srun has to be told.
    nodes: tuple[str, ...] = ()
    placed: bool = False
    #: How many ranks each of its tasks starts, by torchrun.
    ranks_per_task: int = 1

    def command(
        self, *, again: bool, placement: Placement | None = None, hosts_file: Path | None = None
    ) -> tuple[str, ...]:
        """srun's arguments."""
        each = self.ranks_per_task
        if placement is not None:
            placement = replace(placement, tasks_per_node=placement.tasks_per_node // each)
        return srun_command(
            self.payload,
            options=self.options,
            placement=placement if self.placed else None,
            hosts_file=hosts_file,
            tasks=None if self.tasks is None else self.tasks // each,
            again=again,
        )


def with_agent(payload: Sequence[str], run: str) -> tuple[str, ...] | None:
    """The payload with an agent that runs it; None for one that can't be forked.

    ``[srun options…] python -u -m MODULE ARGUMENTS…`` is what can, for modules that are known, in a
    container too: but not what torchrun starts.
    """
    words = list(payload)
    # What stands in front (a shield) may be a module itself.
    for at in (number for number, word in enumerate(words) if word == "-m"):
        module, arguments = (words[at + 1 : at + 2] or [""])[0], words[at + 2 :]
        python = next((word for word in reversed(words[:at]) if not word.startswith("-")), "")
        if not PurePath(python).name.startswith("python"):
            continue
        # A script of an earlier version may start the ranks of that version, in a container of it.
        for words_of in (process_words, old_process_words):
            if tuple(words[at:]) == words_of("worker", run):
                return (*words[:at], *words_of("agent", run))
        if module in _KNOWN_MODULES:
            agent = process_words("agent", run)
            return (*words[:at], *agent, "--", "-m", module, *arguments)
    return None


class JobStep:
    """Starts launches: on the agents that stand already, or with a new step.

    ``run`` is the run directory as the payload names it; ``unwinds``: ranks may go on in their
    process, and take a while to get that far.
    """

    def __init__(self, run: str, *, unwinds: bool = False) -> None:
        self._run = run
        self._unwinds = unwinds
        self._step: StepProcess | None = None
        self._agents: AgentsHub | None = None
        self._shields: AgentsHub | None = None
        self._options: StepOptions | None = None
        self._current: AgentsLaunch | None = None
        self._hub: Hub | None = None
        #: What the agents were started with, and what the ranks of the last launch had.
        self._variables: Mapping[str, str] = {}
        self._rank_variables: Mapping[str, str] = {}
        #: Signals that agents got while no launch was on: the next one on them hears of it.
        self._early: list[MessageReceived] = []

    def can_reuse(
        self, options: StepOptions, world_size: int, variables: Mapping[str, str] | None = None
    ) -> bool:
        """Whether the agents of the launch before can start another one with these options.

        Not where ``variables`` differ in what an interpreter or torch reads when it starts.
        """
        agents, launch = self._agents, self._current
        return (
            agents is not None
            and launch is not None
            and launch.has_ended
            and options == self._options
            and agents.world_size == world_size
            and (variables is None or all(map(reaches_forks, self._other(variables))))
            and all(agent.connected for agent in agents.agents().values())
        )

    def _other(self, variables: Mapping[str, str]) -> list[str]:
        """Names of the variables that are not as the agents have them."""
        here = self._variables
        return [
            name for name in sorted({*here, *variables}) if here.get(name) != variables.get(name)
        ]

    def begin(
        self,
        options: StepOptions,
        start: Start,
        *,
        placement: Placement | None = None,
        hosts_file: Path | None = None,
        hub: Hub,
        knobs: Knobs,
        variables: Mapping[str, str],
        again: bool,
    ) -> Launched:
        """Start every rank of a launch, ``hub`` being its control channel.

        ``placement`` and ``hosts_file`` place the ranks of a new step, where that has to be said.
        ``hub`` has the secret of the ones before: agents that stand know no other.
        """
        self._hub = hub
        # What a process has read of its environment it does not read again.
        going_on = start is Start.IN_PROCESS and variables == self._rank_variables
        self._rank_variables = dict(variables)
        order = StartWorker(
            attempt=knobs.attempt,
            launch=knobs.launch,
            channel=hub.addresses,
            nonce=hub.credentials.nonce,
            started=knobs.started or 0.0,
            in_process=going_on,
        )
        if start is Start.COLD or self._agents is None or self._step is None:
            self.leave()
            if has_shield(options.payload):
                each = options.ranks_per_task
                self._shields = shields = AgentsHub(
                    world_size=hub.world_size // each,
                    credentials=hub.credentials.with_new_nonce(),
                    on_notice=lambda task, what: self._on_notice(task * each, what),
                    interface_address=parse_addresses(hub.addresses)[0][0],
                )
                nonce = shields.credentials.nonce
                knobs = replace(knobs, shields=shields.addresses, shields_nonce=nonce)
            payload = with_agent(options.payload, self._run)
            if payload is None:
                self._step = StepProcess(
                    options.command(again=again, placement=placement, hosts_file=hosts_file),
                    {**variables, **knobs.to_environ()},
                )
                return self._step
            agents = AgentsHub(
                world_size=hub.world_size,
                credentials=hub.credentials.with_new_nonce(),
                on_notice=self._on_notice,
                interface_address=parse_addresses(hub.addresses)[0][0],
            )
            self._variables = dict(variables)
            agents.begin(order)
            nonce = agents.credentials.nonce
            relay = hub.world_size >= RELAYED_FROM or Knobs.from_environ(variables).relay
            knobs = replace(knobs, agents=agents.addresses, agents_nonce=nonce, relay=relay)
            command = replace(options, payload=payload).command(
                again=again, placement=placement, hosts_file=hosts_file
            )
            self._step = StepProcess(command, {**variables, **knobs.to_environ()})
            self._agents, self._options = agents, options
            self._current = AgentsLaunch(
                self._step, agents, hub, knobs.launch, unwinds=self._unwinds
            )
            return self._current
        other = self._other(variables)
        order = replace(
            order,
            variables=tuple(f"{name}={variables[name]}" for name in other if name in variables),
            without=tuple(name for name in other if name not in variables),
        )
        self._step.forget_tail()
        self._current = AgentsLaunch(
            self._step, self._agents, hub, knobs.launch, unwinds=self._unwinds
        )
        self._agents.begin(order)
        early, self._early = self._early, []
        for notice in early:
            hub.events.put(notice)
        return self._current

    def leave(self) -> None:
        """Every rank and every agent is gone before another step, or another attempt, may begin."""
        step, agents, shields = self._step, self._agents, self._shields
        self._step = self._agents = self._current = self._options = self._shields = None
        self._early = []  # the end of a step is a signal for its agents, too
        if agents is not None:
            agents.leave()
        if step is not None and step.wait(_SRUN_RETURNS_S) is None:
            step.kill()
            step.wait(_SRUN_RETURNS_S)
        for listening in (agents, shields):
            if listening is not None:
                listening.close()

    def _on_notice(self, rank: int, what: str) -> None:
        """Slurm signals direct children only: what an agent got is what its rank is told of."""
        hub, event = self._hub, MessageReceived((rank,), Notice(what=what))
        if hub is None or hub.over:
            self._early.append(event)
        else:
            hub.events.put(event)
