"""Nodes looked at outside of a run: processes started on them, heard, and a verdict.  No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Empty

from slurm_forge.control import Hub
from slurm_forge.control.hub_events import MessageReceived
from slurm_forge.control.messages.preflight import NodeReport
from slurm_forge.journal.events import PreflightMeasured
from slurm_forge.knobs import Knobs
from slurm_forge.launch.conductor.preflight_monitor import PreflightMonitor
from slurm_forge.process import process_words
from slurm_forge.recovery.monitor.isolation import Isolated
from slurm_forge.recovery.monitor.preflight_verdict import PreflightRefusal

_TICK_S = 0.05
#: After the verdict: how long the processes may take to leave by themselves.
_LEAVE_S = 3.0
_TAIL = 2000
_EXPORT = "SLURM_EXPORT_ENV"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """Where to look: commands that start ``world`` processes of ours in all.

    ``nodes`` are the names that are expected, empty where nobody knows them before.
    """

    commands: tuple[tuple[str, ...], ...]
    world: int
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What was found.  ``measured`` is None where there was no verdict: ``problem`` says why."""

    reports: tuple[NodeReport, ...] = ()
    ahead: Mapping[int, float]
    measured: PreflightMeasured | None = None
    refused: PreflightRefusal | None = None
    isolated: Isolated | None = None
    silent: tuple[str, ...] = ()
    problem: str = ""
    seconds: float = 0.0


def node_words(folder: Path, within: timedelta, *more: str) -> tuple[str, ...]:
    """The command of one process of ours."""
    seconds = f"--within={within.total_seconds():g}"
    return (sys.executable, "-u", *process_words("preflight_node", str(folder), seconds, *more))


def srun_words(payload: Sequence[str], nodes: int, options: Sequence[str]) -> tuple[str, ...]:
    """The step: one process on each node, beside whatever runs there, ended by nobody's failure."""
    return (
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--unbuffered",
        *options,
        *payload,
    )


def look_at(
    place: ProbeTarget,
    *,
    within: timedelta,
    start_within: timedelta,
    environ: Mapping[str, str],
    expected: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ProbeResult:
    """Start what ``place`` says, and hear it until there is a verdict, or nobody is left to hear.

    ``start_within`` is how long the processes may take to be there: a step may wait for its nodes.
    """
    started_at = clock()
    hub = Hub(world_size=place.world)
    hub.start()
    judge = PreflightMonitor(hub, within, clock, expected=expected)
    knobs = Knobs(channel=hub.addresses, nonce=hub.credentials.nonce, secret=hub.credentials.secret)
    variables = {**environ, **knobs.to_environ()}
    if _EXPORT in variables:  # left by sbatch --export=NONE, which is not about what is ours
        variables[_EXPORT] = "ALL"
    processes = [
        subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for command in place.commands
    ]
    measured, problem = None, ""
    try:
        while measured is None and not problem:
            _receive(hub, judge)
            now = clock()
            measured = judge.poll(now)
            if measured is None:
                problem = _problem(hub, judge, processes, now - started_at, start_within)
        answered = {report.host for report in judge.reports.values()}
        silent = tuple(node for node in place.nodes if node not in answered)
        return ProbeResult(
            reports=tuple(judge.reports[rank] for rank in sorted(judge.reports)),
            ahead=dict(judge.ahead),
            measured=measured,
            refused=judge.refused,
            isolated=judge.isolated,
            silent=silent,
            problem=problem and f"{problem}{_words(processes)}",
            seconds=clock() - started_at,
        )
    finally:
        hub.abort("the check is over")
        _end(processes)
        hub.close()


def _receive(hub: Hub, judge: PreflightMonitor) -> None:
    with suppress(Empty):
        event = hub.events.get(timeout=_TICK_S)
        while True:
            if isinstance(event, MessageReceived):
                for rank in event.ranks:
                    judge.on_message(rank, event.message)
            event = hub.events.get_nowait()


def _problem(
    hub: Hub,
    judge: PreflightMonitor,
    processes: Sequence[subprocess.Popen[bytes]],
    since: float,
    start_within: timedelta,
) -> str:
    """Why there will be no verdict, if there won't."""
    members = hub.members()
    if processes and all(process.poll() is not None for process in processes):
        connected = any(member.connected for member in members.values())
        if not connected:
            return "the processes on the nodes ended before they reported"
    disconnected = [m.host for r, m in members.items() if not m.connected and not judge.over]
    if disconnected:
        return f"the process on {', '.join(sorted(set(disconnected)))} has ended"
    if since > start_within.total_seconds() and len(judge.reports) < hub.world_size:
        return f"after {since:.0f} s {len(judge.reports)} of {hub.world_size} nodes have answered"
    return ""


def _words(processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """The last that those which have ended wrote."""
    for process in processes:
        if process.poll() is not None and process.stderr is not None:
            os.set_blocking(process.stderr.fileno(), False)
            text = (process.stderr.read() or b"").decode(errors="replace").strip()
            if text:
                return f": {text[-_TAIL:]}"
    return ""


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + _LEAVE_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
