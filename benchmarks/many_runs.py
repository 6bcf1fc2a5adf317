"""A folder of a thousand runs as a year of work leaves it: journals of some lines to thousands.

Of twenty runs eleven are finished, four train, two wait after a requeue, one is held, one was never
started and one is dead.  Written without fsync, which only a real run needs.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from enum import Enum
from pathlib import Path

from slurm_forge.journal import events as ev
from slurm_forge.journal.file import Record, encode
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.run_directory import Claim, RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

_FIRST_JOB = 8_000_000
#: Every fiftieth run is a long one.
_LONG_EVERY = 50
_LONG_LINES = 6_000
_EVERY_S = 5.0


class Kind(str, Enum):
    """What a run is doing."""

    FINISHED = "finished"
    TRAINS = "trains"
    WAITS = "waits"
    HELD = "held"
    NEW = "new"
    DEAD = "dead"


_OF_TWENTY = (
    *[Kind.FINISHED] * 11,
    *[Kind.TRAINS] * 4,
    *[Kind.WAITS] * 2,
    Kind.HELD,
    Kind.NEW,
    Kind.DEAD,
)


def kind_of(number: int) -> Kind:
    """Spread over the folder."""
    return _OF_TWENTY[number * 7 % len(_OF_TWENTY)]


def queue_lines(count: int) -> str:
    """What squeue would print of them, in the format that is asked for."""
    lines = []
    for number in range(count):
        job, kind = _FIRST_JOB + number, kind_of(number)
        if kind is Kind.TRAINS:
            lines.append(f"{job}|{job}|RUNNING|None|2026-01-01T00:00:00")
        elif kind in (Kind.WAITS, Kind.NEW):
            lines.append(f"{job}|{job}|PENDING|Priority|N/A")
        elif kind is Kind.HELD:
            lines.append(f"{job}|{job}|PENDING|JobHeldUser|N/A")
    return "\n".join(lines) + "\n"


def write_many(folder: Path, count: int) -> list[RunDirectory]:
    """Make the runs ``run-0000`` … in ``folder``."""
    made = []
    template: str | None = None
    for number in range(count):
        run = RunDirectory.at(folder / f"run-{number:04d}")
        if template is None:
            args = {"name": run.name, "entry": "train:main", "args": {"max_steps": 10**7}}
            first, _ = create_run(
                job_from_mapping(args),
                runs=folder,
                site=find_site("generic"),
                submitted_from=folder,
            )
            template = first.spec_file.read_text()
        else:
            run.create(template.replace("run-0000", run.name).encode())
        _write(run, number)
        made.append(run)
    return made


def _write(run: RunDirectory, number: int) -> None:
    kind, job = kind_of(number), str(_FIRST_JOB + number)
    lines = _LONG_LINES if number % _LONG_EVERY == 0 else 20 + number % 200
    attempts = 0 if kind is Kind.NEW else 1 + number % 4
    now = time.time() - (3600.0 if kind is Kind.DEAD else 1.0)
    clock = now - max(1, attempts) * lines * _EVERY_S
    cli = _File(run, 0, "cli", 1)
    cli.add(clock, ev.UserAsked(verb="submit", user="user"))
    cli.add(clock, ev.Submitted(job=job, via="sbatch"))
    cli.close()
    step = 0
    for attempt in range(1, attempts + 1):
        last = attempt == attempts
        nodes = ("n01", "n02")
        claim = Claim(
            attempt=attempt,
            nonce="0" * 16,
            job=job,
            restart_count=attempt - 1,
            host="n01",
            pid=1,
            nodes=nodes,
            time=clock,
        )
        body = json.dumps(asdict(claim), sort_keys=True)
        (run.attempts / f"{attempt}.json").write_text(body)
        supervisor = _File(run, attempt, "supervisor", 1)
        rank = _File(run, attempt, "rank0", 1)
        supervisor.add(
            clock,
            ev.AttemptStarted(
                job=job, restart_count=attempt - 1, nodes=nodes, host="n01", via="sbatch"
            ),
        )
        supervisor.add(clock, ev.LaunchStarted(world_size=8, nodes=nodes))
        rank.add(clock, ev.Resumed(step=step, checkpoint=None, world_size=8, until=10**7))
        for tick in range(lines):
            clock += _EVERY_S
            step += 10
            if tick % 3 == 2:
                rank.add(clock, ev.Logged(step=step, values={"loss": 2.5, "lr": 3e-4}))
            else:
                rank.add(clock, ev.Progress(step=step, consumed=step * 512))
            if tick % 120 == 119:
                name = f"step-{step:08d}.a{attempt}.l1-00000000"
                rank.add(
                    clock,
                    ev.CheckpointCommitted(
                        name=name, step=step, reason="every_minutes", seconds=4.0, size=10**10
                    ),
                )
        _end(run, kind, last, supervisor, rank, attempt, job, step, clock)


def _end(
    run: RunDirectory,
    kind: Kind,
    last: bool,
    supervisor: _File,
    rank: _File,
    attempt: int,
    job: str,
    step: int,
    clock: float,
) -> None:
    if last and kind is Kind.FINISHED:
        rank.add(clock, ev.Finished(step=step))
        supervisor.add(clock, ev.AttemptEnded(outcome="finished"))
        run.done_file.write_text("{}\n")
    elif not last or (kind is not Kind.TRAINS and kind is not Kind.DEAD):
        held = last and kind is Kind.HELD
        cause = Cause.HANG if held else Cause.PREEMPTED
        incident = Incident(
            id=f"{attempt}.1",
            cause=cause,
            confidence=Confidence.CERTAIN,
            evidence=(Evidence("scontrol", "PreemptTime=11:02:10"),),
            step=step,
        )
        action = Action.HOLD if held else Action.REQUEUE
        decision = Decision(
            incident_id=incident.id,
            cause=cause,
            action=action,
            reason=f"{cause.value}: {action.value}",
            plan=RecoveryPlan(),
            rung=0,
        )
        supervisor.add(clock, ev.LaunchEnded(outcome=cause.value, step=step))
        supervisor.add(clock, ev.IncidentSeen(incident=incident))
        supervisor.add(clock, ev.DecisionTaken(decision=decision))
        if not held:
            supervisor.add(
                clock, ev.RequeueIntended(job=job, method="scontrol requeue", reason="preempted")
            )
            supervisor.add(clock, ev.RequeueDone(job=job, method="scontrol requeue"))
        supervisor.add(clock, ev.AttemptEnded(outcome="held" if held else "requeued"))
    supervisor.close()
    rank.close()


class _File:
    """One writer's file."""

    def __init__(self, run: RunDirectory, attempt: int, writer: str, launch: int) -> None:
        self._path = run.journal / f"{attempt}-{writer}-00000000.jsonl"
        self._writer = f"{writer}-00000000"
        self._attempt = attempt
        self._launch = launch
        self._lines: list[bytes] = []

    def add(self, moment: float, event: ev.Event) -> None:
        record = Record(
            attempt=self._attempt,
            launch=self._launch,
            sequence=len(self._lines),
            time=moment,
            writer=self._writer,
            event=event,
        )
        self._lines.append(encode(record))

    def close(self) -> None:
        self._path.write_bytes(b"".join(self._lines))
        self._path.chmod(0o600)
