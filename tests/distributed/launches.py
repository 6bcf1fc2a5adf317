"""Launches of a run with real ranks under the real conductor, without Slurm and in milliseconds.

    run = new_run(tmp_path, checkpoint={"every_steps": 4})
    with launched(run, 4, train) as launch:      # train(run: forge.Run), a closure if you like
        launch.until(lambda: ..., "what is waited for")
        launch.kill(2, signal.SIGTERM)
    assert {told.step for told in launch.told} == {12}

Hub and conductor live in this process, the ranks are forked from it and go through ``run_rank``:
channel, rendezvous, process groups, checkpoints and journal are those of the product.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import slurm_forge as forge
from slurm_forge.control import Hub
from slurm_forge.control import member as member_module
from slurm_forge.control.handshake import Credentials
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    begin,
)
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.render.schedule import timing
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.recovery import LaunchFacts
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.manifest import Manifest
from slurm_forge.training.rank.main import (
    RankOutcome,
    RankPlace,
    run_rank,
)
from slurm_forge.training.rank.main import main as worker_main
from slurm_forge.vocabulary.decision import Decision
from tests.distributed.ranks import Outcome as HowItEnded
from tests.distributed.ranks import RankGroup, start_ranks

Program = Callable[[forge.Run], None]

#: Ranks say every second what they are doing; tests wait for it too often for that.
_BEAT_S = 0.05
_LONG_S = 240.0

_program: Program | None = None


def train(run: forge.Run) -> None:
    """The entry of every run that is made here: what ``launched`` was given."""
    assert _program is not None, "only ranks that were forked by launched() know what to train"
    _program(run)


def new_run(folder: Path, name: str = "run", **spec: Any) -> RunDirectory:
    """A run directory below ``folder``; ``spec`` has the keys of a job file."""
    job = job_from_mapping(
        {
            "name": name,
            "entry": f"{__name__}:train",
            "probe": {"enabled": False},
            "watchdog": {"enabled": False},
            "preflight": {"enabled": False},
            **spec,
        }
    )
    here = Path(__file__).resolve().parents[2]
    run, _ = create_run(job, runs=folder, site=find_site("generic"), submitted_from=here)
    return run


def newest_manifest(run: RunDirectory) -> Manifest | None:
    """Of the newest published checkpoint, every file of which is there in full size."""
    store = CheckpointStore(run.checkpoints, run.name)
    names = store.candidates()
    return store.verify_manifest(names[0]) if names else None


class Gate:
    """A place in the program at which ranks, or their loader workers, stay until let go.

    Made of pipes: whoever is killed at the gate takes no lock along.
    """

    def __init__(self) -> None:
        self._arrivals = os.pipe()
        self._leave = os.pipe()
        self.here: list[int] = []

    def wait(self, who: int) -> None:
        """In the program: say that ``who`` is here, and stay."""
        self.tell(who)
        os.read(self._leave[0], 1)

    def tell(self, who: int) -> None:
        """In the program: say that ``who`` came by, and go on."""
        os.write(self._arrivals[1], bytes([who]))

    def arrived(self) -> int:
        """In the test: how many have come so far; ``here`` says who."""
        while select.select([self._arrivals[0]], [], [], 0)[0]:
            self.here += os.read(self._arrivals[0], 64)
        return len(self.here)

    def open(self) -> None:
        """In the test: let everybody go, now and later."""
        os.write(self._leave[1], b"x" * 4096)

    def close(self) -> None:
        """Free the pipes."""
        for end in (*self._arrivals, *self._leave):
            os.close(end)


@dataclass(frozen=True)
class Told:
    """What one rank returned: how, after how many steps, when (monotonic), and what it left.

    ``children`` are the processes (data-loader workers) that it still had.
    """

    outcome: RankOutcome
    step: int
    returned: float
    children: tuple[int, ...]


@dataclass
class Launch:
    """A running launch, and once the block is left how it went."""

    run: RunDirectory
    attempt: Attempt
    hub: _ListenedHub
    group: RankGroup
    conducting: threading.Thread
    outcomes: list[HowItEnded] = field(default_factory=list)
    facts: LaunchFacts | None = None
    decision: Decision | None = None
    #: When the processes of all ranks were gone (monotonic).
    gone: float = 0.0

    @property
    def told(self) -> list[Told]:
        """What the ranks returned; fails where one did not."""
        bad = "".join(str(outcome) for outcome in self.outcomes if not outcome.ok)
        assert not bad, bad
        return [outcome.value for outcome in self.outcomes]

    @property
    def exitcodes(self) -> list[int | None]:
        return [outcome.exitcode for outcome in self.outcomes]

    def kill(self, rank: int, number: int = signal.SIGTERM, *, everything: bool = False) -> None:
        """Signal a rank, or ``everything`` of it: its data-loader workers too."""
        if everything:
            os.killpg(self.group.pids[rank], number)
        else:
            os.kill(self.group.pids[rank], number)

    def freeze(self, rank: int) -> None:
        """Stop a rank, all its threads, until SIGCONT; returns when it has stopped."""
        self.kill(rank, signal.SIGSTOP)
        self.until(lambda: state_of(self.group.pids[rank]) == "T", f"rank {rank} to be frozen")

    def until(self, condition: Callable[[], Any], what: str, seconds: float | None = None) -> None:
        """Wait for a condition; looks a hundred times a second, and not once the launch is over."""
        seconds = _LONG_S if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.conducting.is_alive():
                self.outcomes = self.group.wait(1, grace=1)
                ends = "".join(map(str, self.outcomes))
                raise AssertionError(f"the launch ended instead of {what}:\n{ends}")
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:.0f} s for {what}: {self.hub.members()}")
            threading.Event().wait(0.01)

    def at(self, gate: Gate, count: int) -> None:
        """Wait until so many have come to the gate."""
        self.until(lambda: gate.arrived() >= count, f"{count} at the gate")

    def kill_at(self, gate: Gate, count: int) -> None:
        """Kill rank 1 once so many have come to the gate, and let the others go without it."""
        self.at(gate, count)
        self.kill(1, signal.SIGKILL)
        self.until(lambda: not is_alive(self.group.pids[1]), "rank 1 to be gone")
        gate.open()

    def gone_within(self, processes: Sequence[int], seconds: float) -> None:
        """Wait until these processes are gone; a zombie is."""
        deadline = time.monotonic() + seconds
        while left := [pid for pid in processes if is_alive(pid)]:
            assert time.monotonic() < deadline, f"{left} run after {seconds:.0f} s"
            threading.Event().wait(0.01)

    def has_begun(self) -> bool:
        """Whether a rank has said that it trains."""
        return any(member.started for member in self.hub.members().values())

    def doing(self, phase: str, ranks: Sequence[int], step: int) -> bool:
        """Whether these ranks have said that they are in that phase of that step."""
        members = self.hub.members()
        return all(
            rank in members and (members[rank].phase, members[rank].step) == (phase, step)
            for rank in ranks
        )

    def stop_together(self) -> None:
        """Ask for a stop as the conductor does; returns when every rank has said where it is."""
        self.hub.request(RequestKind.STOP, "test")
        self.heard()

    def asked_to_stop(self) -> int:
        """Wait until a stop was asked for, or all were told to leave (0); the request's number."""
        assert self.hub.spoke.wait(_LONG_S), "nobody asked for a stop"
        return next((n for n, kind in self.hub.asked if kind is RequestKind.STOP), 0)

    def heard(self) -> None:
        """Wait until a stop was asked for and all ranks have answered, or were told to leave."""
        number = self.asked_to_stop()
        self.until(lambda: not number or not self.hub.unanswered(number), "the ranks' answers")


class _ListenedHub(Hub):
    """Says when the ranks were asked for something, or told to leave."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size=world_size)
        self.spoke = threading.Event()
        self.asked: list[tuple[int, RequestKind]] = []

    def request(self, kind: RequestKind, reason: str, *, within_s: float | None = None) -> int:
        number = super().request(kind, reason, within_s=within_s)
        self.asked.append((number, kind))
        if kind is RequestKind.STOP:
            self.spoke.set()
        return number

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self.spoke.set()


@contextlib.contextmanager
def launched(
    run: RunDirectory,
    ranks: int,
    program: Program,
    *,
    exits: bool = False,
    conclude: bool = True,
    enter: Callable[[int], None] = lambda rank: None,
    hosts: Sequence[str] = (),
) -> Iterator[Launch]:
    """One attempt with one launch.  Leaving the block waits for its end and concludes it.

    ``enter`` is what a rank does first of all: going to its host, for one.  ``exits``: ranks end
    as the worker's own processes do, and return nothing.  ``conclude=False`` leaves the
    attempt as a power cut does.  ``hosts`` are the ranks' own, if they are to have any.
    """
    attempt = begin(run, job="test", restart_count=0, nodes=("here",), via=f"test, {ranks} ranks")
    assert isinstance(attempt, Attempt), attempt
    hub = _ListenedHub(ranks)
    attempt.next_launch(hub)
    watch = JobPoller(None, "test")
    conductor = Conductor(
        hub,
        journal=attempt.journal,
        job_poller=watch,
        timing=timing(attempt.file.job, state=attempt.state(), now=time.time()),
        stop_file=run.stop_file,
        save_file=run.save_file,
        launched=None,
    )
    arguments = (program, ranks, run.path, hub.addresses, hub.credentials, enter, tuple(hosts))
    facts: list[LaunchFacts] = []

    def conduct() -> None:
        facts.append(conductor.watch())
        if conductor._observations.ending_since is not None:  # what the front ends do
            hub.abort("the launch is over")

    conducting = threading.Thread(target=conduct, name="conductor", daemon=True)
    with contextlib.ExitStack() as stack:
        stack.callback(watch.close)
        stack.callback(hub.close)
        with mock.patch.object(member_module, "_BEAT_S", _BEAT_S):
            # The hub's thread starts after the forks: no rank gets a copy of another's connection.
            body = _be_a_process if exits else _be_a_rank
            group = stack.enter_context(start_ranks(ranks, body, *arguments, init=False))
        hub.start()
        conducting.start()
        launch = Launch(run, attempt, hub, group, conducting)
        yield launch
        launch.outcomes = group.wait(_LONG_S, grace=10)
        launch.gone = time.monotonic()
        conducting.join(_LONG_S)
        if facts:
            launch.facts = facts[0]
    if not conclude:
        attempt.journal.close()
        return
    assert launch.facts is not None, "the conductor did not come to an end"
    launch.decision = attempt.conclude(launch.facts)
    attempt.end("test")


def _be_a_rank(
    rank: int,
    program: Program,
    ranks: int,
    path: Path,
    channel: str,
    credentials: Credentials,
    enter: Callable[[int], None],
    hosts: tuple[str, ...] = (),
) -> Told:
    global _program  # noqa: PLW0603  of this forked process; the worker finds it by name
    enter(rank)
    _program = program
    place = RankPlace(
        rank=rank,
        local_rank=rank,
        world_size=ranks,
        job="test",
        restart_count=0,
        node=hosts[rank] if hosts else "",
    )
    result = run_rank(RunDirectory.existing(path), place, channel=channel, credentials=credentials)
    return Told(result.outcome, result.step, time.monotonic(), children_of(os.getpid()))


def _be_a_process(
    rank: int,
    program: Program,
    ranks: int,
    path: Path,
    channel: str,
    credentials: Credentials,
    enter: Callable[[int], None],
    hosts: tuple[str, ...] = (),
) -> None:
    global _program  # noqa: PLW0603
    enter(rank)
    _program = program
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
    os.environ.update(Knobs(channel=channel, **asdict(credentials)).to_environ())
    worker_main([str(path)])


def children_of(pid: int) -> tuple[int, ...]:
    """Living child processes (Linux); none where the process is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return tuple(pid for pid in found if is_alive(pid))


def loader_workers_of(pid: int) -> tuple[int, ...]:
    """Living children that were forked for data: not the witness."""
    return tuple(
        child
        for child in children_of(pid)
        if b"slurm_forge.process\0witness\0" not in argv_of(child)
    )


def argv_of(pid: int) -> bytes:
    """The words that a process was started with; empty where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """The kernel's letter for it: R, S, T, Z, …; empty where there is no such process (Linux)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
