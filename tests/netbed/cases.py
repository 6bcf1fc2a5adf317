"""One cell of the probe matrix: ranks on hosts of their own, one fault, and who is named for it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import slurm_forge as forge
from slurm_forge.journal import read_journal
from slurm_forge.journal.events import IncidentSeen
from slurm_forge.journal.paces import StragglerSeen
from slurm_forge.launch.conductor import hang_watchdog as watchdog_module
from tests.distributed.launches import Launch, launched, new_run, state_of
from tests.netbed.bed import Netbed

#: Shipped are 60 s and 30 s, and thirty seconds for the watchdog.
SETTINGS = {
    "probe": {"every": "1s", "deadline": "3s", "silence": "4s"},
    "watchdog": {"at_least": "3s", "at_most": "30s"},
}
#: A probe, its deadline, the silence that counts, the network's answers; and a busy machine.
_NAMED_WITHIN_S = 45.0
_BEGINS_WITHIN_S = 40.0
_DELAY_S = 1.5
#: A step has a part of its own of so many seconds where a rank that is slow in it is to be told.
_OWN_S = 0.012


class Fault(str, Enum):
    """What goes wrong."""

    STOPPED = "stopped"
    KILLED = "killed"
    DELAYED = "delayed"
    CUT = "cut"
    WRONG = "wrong"
    SLOW = "slow"


class Who(str, Enum):
    """Whom it strikes: four hosts of one rank each, or three of two."""

    FIRST = "rank 0"
    OTHER = "another rank"
    PAIR = "two ranks of one host"


class Moment(str, Enum):
    """What the ranks are doing then."""

    IDLE = "idle"
    COLLECTIVE = "in training collective"
    EVALUATION = "in evaluation"


@dataclass(frozen=True)
class Case:
    """``number`` varies who exactly, and when."""

    fault: Fault
    who: Who
    moment: Moment
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.fault.value}/{self.who.value}/{self.moment.value}/{self.number}"

    @property
    def ranks_per_host(self) -> int:
        return 2 if self.who is Who.PAIR else 1

    @property
    def hosts(self) -> int:
        return 3 if self.who is Who.PAIR else 4

    @property
    def victim(self) -> int:
        """The host that it strikes."""
        if self.who is Who.FIRST:
            return 0
        if self.who is Who.PAIR:
            return self.number % self.hosts
        return 1 + self.number % (self.hosts - 1)

    @property
    def at_step(self) -> int:
        first = 40 if self.fault is Fault.SLOW else 4  # what is usual must be known
        return random.Random(self.name).randint(first, first + 5)

    @property
    def faults(self) -> list[str]:
        """Those that strike inside of the ranks."""
        at, ranks = self.at_step, self.victims
        if self.fault is Fault.WRONG:
            return [f"wrong@{at}:rank{rank}" for rank in ranks]
        if self.fault is Fault.SLOW:
            return [f"slow@{at}x100000:rank{rank}:factor=3:node" for rank in ranks]
        return []

    @property
    def victims(self) -> list[int]:
        """The ranks that it strikes."""
        first = self.victim * self.ranks_per_host
        return list(range(first, first + self.ranks_per_host))


@dataclass(frozen=True)
class Found:
    """What came of it: ``hosts`` are those that are named, ``after`` seconds since the fault."""

    name: str
    expected: str
    hosts: tuple[str, ...] = ()
    cause: str = ""
    confidence: str = ""
    after: float = 0.0
    took: float = 0.0
    evidence: tuple[str, ...] = ()
    error: str = ""

    @property
    def right(self) -> bool:
        return set(self.hosts) == {self.expected} and not self.error


def all_cases(repeats: int = 4) -> Iterator[Case]:
    """Spread evenly; those of one class are not beside each other."""
    for number in range(repeats):
        for moment in Moment:
            for who in Who:
                for fault in Fault:
                    yield Case(fault, who, moment, number)


class Points(torch.utils.data.Dataset):
    """``pause``: how long the first sample of each batch takes to come."""

    def __init__(self, pause: float) -> None:
        self._pause = pause

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._pause)
        return torch.full((64,), index / 4096)


def _program(case: Case) -> object:
    """A training that spends nearly all of its time in what the case is about."""

    def train(run: forge.Run) -> None:
        torch.manual_seed(1)
        width = 4096 if case.moment is Moment.COLLECTIVE else 64
        slow = case.fault is Fault.SLOW
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, width))
        run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6))
        points = Points(0.0 if case.moment is not Moment.IDLE else 0.03 if slow else 0.2)

        def loss(micro: torch.Tensor) -> torch.Tensor:
            if slow:
                time.sleep(_OWN_S)
            return model(micro).square().mean()

        for batch in run.batches(
            points, global_batch_size=run.world_size, until=forge.Steps(100_000)
        ):
            run.train_step(batch, loss)
            if case.moment is Moment.EVALUATION:
                with run.phase("eval"):
                    for _ in range(3 if slow else 20):
                        time.sleep(0.02)
                        run.poll()

    return train


def play(case: Case) -> Found:
    """Play it in a process of its own, which leaves nothing behind."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forge-cell-") as folder:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                found = _play(case, Path(folder))
                (Path(folder) / "found.json").write_text(json.dumps(asdict(found)))
                code = 0
            except BaseException:
                (Path(folder) / "error").write_text(traceback.format_exc())
            finally:
                sys.stderr.flush()
                os._exit(code)
        _wait(pid, _BEGINS_WITHIN_S + 2 * _NAMED_WITHIN_S)
        try:
            body = json.loads((Path(folder) / "found.json").read_text())
        except (OSError, ValueError):
            error = Path(folder) / "error"
            text = error.read_text() if error.exists() else "it did not come to its end"
            body = asdict(Found(case.name, _name(case.victim), error=text))
    body |= {"took": round(time.monotonic() - began, 1)}
    return found_from(body)


def play_all(cases: Sequence[Case], jobs: int) -> Iterator[Found]:
    """Play so many side by side; in the order in which they come to their ends."""
    waiting = list(reversed(cases))
    running: dict[int, tuple[Case, int, bytes]] = {}  # by the pipe that its result comes through
    while waiting or running:
        while waiting and len(running) < jobs:
            case = waiting.pop()
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                with os.fdopen(writer, "w") as file:
                    file.write(json.dumps(asdict(play(case))))
                os._exit(0)
            os.close(writer)
            running[reader] = case, pid, b""
        for reader in select.select(list(running), [], [])[0]:
            case, pid, text = running[reader]
            data = os.read(reader, 1 << 16)
            running[reader] = case, pid, text + data
            if data:
                continue
            del running[reader]
            os.close(reader)
            os.waitpid(pid, 0)
            broke_off = Found(case.name, _name(case.victim), error="it broke off")
            yield found_from(json.loads(text)) if text else broke_off


def found_from(body: dict[str, Any]) -> Found:
    """What ``asdict`` made of it, back."""
    return Found(**{**body, "hosts": tuple(body["hosts"]), "evidence": tuple(body["evidence"])})


def _wait(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _name(host: int) -> str:
    return f"n{host + 1:02d}"


def _play(case: Case, folder: Path) -> Found:
    watchdog_module._BETWEEN_S = 0.6
    bed = Netbed(case.hosts)
    ranks = case.hosts * case.ranks_per_host

    def enter(rank: int) -> None:
        bed.enter(rank // case.ranks_per_host)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    try:
        # The supervisor sits beside rank 0, as under Slurm.
        bed.enter(0)
        run = new_run(folder, **SETTINGS, inject=case.faults)
        with launched(run, ranks, _program(case), enter=enter) as launch:  # type: ignore[arg-type]
            launch.until(lambda: _there(launch, case), "the moment of the fault", _BEGINS_WITHIN_S)
            struck = time.monotonic()
            _strike(launch, bed, case)
            slow = _slow_hosts(launch, struck) if case.fault is Fault.SLOW else ()
            if not slow:
                launch.conducting.join(max(0.0, struck + _NAMED_WITHIN_S - time.monotonic()))
            after = time.monotonic() - struck
            noticed = not launch.conducting.is_alive()
            for rank in range(ranks):
                with contextlib.suppress(OSError):
                    launch.kill(rank, signal.SIGKILL, everything=True)
    finally:
        bed.close()
    if slow:
        # Told to people, and nothing else: the launch went on.
        error = "the launch was ended for it" if noticed else ""
        found = Found(case.name, _name(case.victim), hosts=slow, cause="straggler", error=error)
        return replace(found, after=round(after, 2))
    records, _ = read_journal(run)
    seen = [each.event for each in records if isinstance(each.event, IncidentSeen)]
    if not noticed or not seen:
        error = f"nobody noticed for {after:.0f} s"
        return Found(case.name, _name(case.victim), error=error, after=round(after, 2))
    return Found(
        case.name,
        _name(case.victim),
        hosts=tuple(dict.fromkeys(seen[-1].incident.hosts)),
        cause=seen[-1].incident.cause.value,
        confidence=seen[-1].incident.confidence.value,
        after=round(after, 2),
        evidence=tuple(f"{each.source}: {each.text}" for each in seen[-1].incident.evidence),
    )


def _there(launch: Launch, case: Case) -> bool:
    """Whether all train, have come far enough, and do what the case is about."""
    members = launch.hub.members()
    wanted = {Moment.IDLE: "data", Moment.EVALUATION: "eval"}.get(case.moment)
    return (
        len(members) == case.hosts * case.ranks_per_host
        and all(member.started and member.step >= case.at_step for member in members.values())
        and all(wanted is None or members[rank].phase == wanted for rank in case.victims)
    )


def _slow_hosts(launch: Launch, struck: float) -> tuple[str, ...]:
    """Who is told to be slow first; nothing where the launch ends, or nobody is told of."""
    while launch.conducting.is_alive() and time.monotonic() < struck + _NAMED_WITHIN_S:
        records, _ = read_journal(launch.run)
        seen = [each.event for each in records if isinstance(each.event, StragglerSeen)]
        if seen:
            return tuple(dict.fromkeys(each.host for each in seen))
        time.sleep(0.1)
    return ()


def _strike(launch: Launch, bed: Netbed, case: Case) -> None:
    pids = [launch.group.pids[rank] for rank in case.victims]
    match case.fault:
        case Fault.STOPPED:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            assert all(state_of(pid) in "TRSD" for pid in pids)
        case Fault.KILLED:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        case Fault.DELAYED:
            bed.delay(case.victim, _DELAY_S)
        case Fault.CUT:
            bed.cut(case.victim)
