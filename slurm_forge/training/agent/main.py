"""The standing agent of a rank: the process ``agent RUN [-- -m MODULE …]``.

The direct child of slurmstepd.  It imports what a rank needs, once, and forks the worker of each
launch, so that a relaunch costs neither an srun nor an interpreter nor an import.  It records the
signals that Slurm sends to direct children only, reliably ends a worker with everything that it
started, and reports how it ended.  One thread; it never trains, never touches a GPU, and outlives
every worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import Credentials, Role, dial
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.agent import (
    AgentHello,
    AgentNotice,
    AgentReady,
    AgentShutdown,
    KillWorker,
    StartWorker,
    WorkerEnded,
    WorkerStarted,
    decode_agents,
)
from slurm_forge.control.messages.message import Message
from slurm_forge.control.relay import relay_path, start_relay
from slurm_forge.descendants import (
    adopt_orphans,
    children,
    die_with_parent,
    kill_children,
    what_is_left,
)
from slurm_forge.errors import ControlChannelError, ForgeError
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.site.variables import reaches_forks
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.kernel import read_oom_kills
from slurm_forge.training.agent.event_loop import AgentLoop
from slurm_forge.training.agent.gpu_memory import wait_until_given_back
from slurm_forge.training.agent.worker import (
    ForkedWorker,
    Program,
    program_of,
)
from slurm_forge.training.rank.in_process_relaunch import (
    ParkedWorker,
    ParkingPlace,
)
from slurm_forge.training.rank.preload import (
    give_threads_back,
    preload,
    why_not_forkable,
)

_CONNECT_S = 30.0
_TICK_S = 1.0
#: Polling interval while something is to end: nothing signals the end of an adopted process.
_ENDING_TICK_S = 0.005
#: A process that survives SIGKILL this long is stuck in the kernel: the supervisor is informed.
_END_WITHIN_S = 3.0
#: After the supervisor is gone: rank 0 may have become its deputy, whose queries take less time.
_ALONE_S = 60.0
#: The first rank of the second node may be the deputy of a lost node, who waits until Slurm has
#: marked that one as down (``launch.supervisor.deputy``: 20 minutes), and then queries it.
_ALONE_SECOND_S = 22 * 60.0


class Agent:
    """Serves one rank until it is told to leave.

    ``serve`` returns in a forked child, with the order that names the launch to join.
    """

    def __init__(
        self,
        program: Program,
        *,
        rank: int,
        world: int,
        host: str,
        channel: str,
        credentials: Credentials,
        variables: Mapping[str, str],
        leads_second_node: bool = False,
        relay: Path | None = None,
    ) -> None:
        self._program = program
        #: The socket of this node's relay, if there is to be one.
        self._relay = relay
        self._alone_s = _ALONE_SECOND_S if leads_second_node else _ALONE_S
        self._variables = variables
        self._credentials = credentials
        self._loop = AgentLoop(self._signalled)
        self._parking: ParkingPlace | None = None
        self._orders: list[StartWorker] = []
        self._worker: ForkedWorker | None = None
        self._last_launch = 0
        self._why_not = ""
        self._leaving = False
        self._alone_since: float | None = None
        hosts, port = parse_addresses(channel)
        hello = AgentHello(rank=rank, world=world, host=host, pid=os.getpid())
        self._connection = dial(
            hosts,
            port,
            credentials,
            Role.AGENT,
            protocol.encode(hello),
            who=f"the agent of rank {rank}",
            within_s=_CONNECT_S,
        )
        self._loop.add_reader(self._connection.fileno(), self._on_hub_message)

    # -- the loop ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Import what a rank needs, while a thread handles signals and orders."""
        began = time.monotonic()
        over = threading.Event()
        listening = threading.Thread(target=self._listen, args=(over,), name="forge-agent")
        listening.start()
        try:
            more = (self._program.module,) if self._program.module else ()
            problem = preload(self._variables, tuple(name for name in more if "." in name))
        finally:
            over.set()
            listening.join()
        if problem:
            sys.stderr.write(f"slurm_forge: imported less than a rank needs ({problem})\n")
        self._why_not = why_not_forkable()
        self._say(AgentReady(seconds=time.monotonic() - began, why_not=self._why_not))

    def _listen(self, over: threading.Event) -> None:
        while not over.is_set():
            self._loop.run_once(0.02)

    def serve(self) -> StartWorker:
        """Serve until the agent ends; returns in the child that becomes the rank."""
        while True:
            if self._orders and (self._worker is None or self._worker.parked):
                order = self._orders[0]
                if self._worker is not None:
                    self._go_on(self._worker, order)
                elif self._begin(self._orders.pop(0)):
                    return order
            ending = self._worker is not None and self._worker.ending_since is not None
            self._loop.run_once(_ENDING_TICK_S if ending else _TICK_S)
            self._look_after_worker()
            if self._worker is None and not self._orders and self._is_over():
                self._exit()

    def _is_over(self) -> bool:
        return self._leaving or self._alone_since is not None

    def _exit(self) -> NoReturn:
        # Skip torch's teardown: this process has only imported it.
        kill_children()
        os._exit(0)

    # -- orders --------------------------------------------------------------------------------

    def _on_hub_message(self) -> None:
        try:
            lines = [self._connection.verify(line) for line in self._connection.receive()]
        except (OSError, EOFError, ControlChannelError):
            # The supervisor, or the path to it, is gone.  The worker notices on its own channel and
            # leaves; rank 0 may become the deputy, whose parent this is: it is left alone.
            self._loop.forget(self._connection.fileno())
            self._alone_since = time.monotonic()
            self._orders.clear()
            return
        for line in lines:
            try:
                self._take(decode_agents(line))
            except ControlChannelError as error:
                sys.stderr.write(f"slurm_forge: {error}\n")

    def _take(self, message: Message) -> None:
        if self._leaving:
            return
        match message:
            case StartWorker():
                if self._relay is not None:  # without it workers try the hub's own addresses
                    message = replace(message, channel=f"{self._relay},{message.channel}")
                self._orders = [message]
            case KillWorker():
                self._cancel(message.launch)
                if self._worker is not None and not self._worker.parked:
                    self._end_worker(message.launch)
            case AgentShutdown():
                self._leaving = True
                self._orders.clear()
                if self._worker is not None:
                    self._end_worker(self._worker.launch)
            case _:
                pass

    def _cancel(self, launch: int) -> None:
        """Answer an order that was not begun: nothing of that launch is alive."""
        has_worker = self._worker is not None and self._worker.launch == launch
        self._orders = [each for each in self._orders if each.launch != launch]
        if not has_worker and self._last_launch < launch:
            self._last_launch = launch
            self._say(
                WorkerEnded(
                    launch=launch, pid=0, signal="", code=0, ours=True, memory="", others=0,
                    left="", parked=False,
                )
            )  # fmt: skip

    def _begin(self, order: StartWorker) -> bool:
        """Fork; whether this process is the child."""
        if order.launch <= self._last_launch:
            return False
        self._last_launch = order.launch
        kills = read_oom_kills()
        agent = os.getpid()
        parent_end, child_end = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._loop.leave_in_child()
            self._connection.close()
            parent_end.close()
            self._parking = ParkingPlace(child_end)
            die_with_parent(agent)
            return True
        child_end.close()
        worker = ForkedWorker(pid, order.launch, kills, ParkedWorker(parent_end))
        self._worker = worker
        self._loop.add_reader(parent_end.fileno(), lambda: self._on_worker_message(worker))
        how = "exec" if self._why_not else "fork"
        self._say(WorkerStarted(launch=order.launch, pid=pid, how=how))
        return False

    def _go_on(self, worker: ForkedWorker, order: StartWorker) -> None:
        """The worker has unwound: it continues with the order, or makes room for another one."""
        if not worker.goes_on(order):
            worker.parked = False
            self._end_worker(worker.launch)
            return
        self._orders.remove(order)
        self._last_launch = order.launch
        self._say(WorkerStarted(launch=order.launch, pid=worker.pid, how="in_process"))

    # -- the worker ----------------------------------------------------------------------------

    def _on_worker_message(self, worker: ForkedWorker) -> None:
        if not worker.parking.read():
            self._loop.forget(worker.parking.fileno())
        if worker.has_unwound:
            worker.park()
            self._say(worker.ended(""))

    def _end_worker(self, launch: int) -> None:
        worker = self._worker
        if worker is None or worker.launch != launch or worker.status is not None:
            return
        worker.kill(time.monotonic())

    def _look_after_worker(self) -> None:
        worker = self._worker
        if worker is None:
            return
        now = time.monotonic()
        if worker.status is None:
            worker.collect(now)
        alone = self._alone_since
        if alone is not None and (worker.parked or now - alone > self._alone_s):
            self._end_worker(worker.launch)
        if worker.ending_since is None:
            return
        processes_left = 0
        if worker.status is not None:
            processes_left = kill_children()
            worker.others = max(worker.others, processes_left)
        late = now - worker.ending_since > _END_WITHIN_S
        if (worker.status is None or processes_left) and not late:
            return
        self._tell_end(worker, what_is_left(children()) if late else "")

    def _tell_end(self, worker: ForkedWorker, left: str) -> None:
        if not left:
            left = wait_until_given_back(worker.pid)
        self._worker = None
        self._loop.forget(worker.parking.fileno())
        worker.parking.close()
        if worker.end_reported and left:
            sys.stderr.write(f"slurm_forge: {left} can't be ended: this step is given up\n")
            os._exit(1)  # nothing may be started beside it
        if not worker.end_reported:
            self._say(worker.ended(left))

    # -- saying --------------------------------------------------------------------------------

    def _signalled(self, received: signal.Signals) -> None:
        self._say(AgentNotice(what=received.name))

    def _say(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # a closed connection is noticed on reading
            self._connection.send(protocol.encode(message))

    def take_environment(self, order: StartWorker) -> None:
        """In the child: adopt the launch's variables; ``ForgeError`` for one that is never sent."""
        variables = dict(each.partition("=")[::2] for each in order.variables)
        refused = sorted(name for name in {*variables, *order.without} if not reaches_forks(name))
        if refused:
            raise ControlChannelError(
                f"the order for launch {order.launch} sets {', '.join(refused)}, which no "
                "supervisor sends to a running agent",
                next_step="Is the supervisor of another version of slurm_forge?  End the job and "
                "submit the run again.",
            )
        knobs = Knobs(
            channel=order.channel,
            nonce=order.nonce,
            secret=self._credentials.secret,
            attempt=order.attempt,
            launch=order.launch,
            started=order.started,
        )
        _forget_agents()
        os.environ.update(knobs.to_environ())
        for name in order.without:
            os.environ.pop(name, None)
        os.environ.update(variables)

    def become(self) -> None:
        """In the child: become the rank of the launch whose variables it has adopted."""
        if self._why_not:
            os.execve(self._program.command[0], self._program.command, process_environ())  # noqa: S606
        give_threads_back(self._variables)
        assert self._parking is not None  # noqa: S101  made with the fork
        self._program.go(self._parking)


def _forget_agents() -> None:
    """Disconnect the worker from the agents' channel."""
    for name in Knobs(agents="x", agents_nonce="x").to_environ():
        if name.endswith(("_AGENTS", "_AGENTS_NONCE")):
            os.environ.pop(name, None)


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN [-- -m MODULE ARGUMENTS…]``, in a step that the supervisor started."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    variables = process_environ()
    try:
        program = program_of(arguments)
        knobs = Knobs.from_environ(variables)
        environment = SlurmEnvironment.from_environ(variables)
        if knobs.agents is None or environment is None or environment.procid is None:
            raise ForgeError(
                "the agent is started by slurm_forge itself, in a job step",
                next_step="Start a run with slurm-forge submit.",
            )
        host = environment.node_name or socket.gethostname()
        relay = relay_path(knobs.agents_nonce, host) if knobs.relay else None
        if relay is not None and environment.localid == 0:
            start_relay(relay, secret=knobs.secret, host=host)
        adopt_orphans()
        agent = Agent(
            program,
            rank=environment.procid,
            world=environment.ntasks or 1,
            host=host,
            channel=knobs.agents,
            credentials=Credentials(knobs.agents_nonce, knobs.secret),
            variables=variables,
            leads_second_node=environment.nodeid == 1 and environment.localid == 0,
            relay=relay,
        )
    except ForgeError as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 1
    agent.prepare()
    order = agent.serve()
    # After this line the process is the worker.
    try:
        agent.take_environment(order)
    except ForgeError as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 1
    agent.become()  # its exceptions and exit status are the worker's own
    return 0


if __name__ == "__main__":
    sys.exit(main())
