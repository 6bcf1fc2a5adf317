"""Journals as long as those of real runs, written in a moment."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.journal import JournalWriter
from slurm_forge.journal import events as ev
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.run_directory import RunDirectory, claim_attempt
from slurm_forge.spec import job_from_mapping
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

#: Rank 0 writes progress every five seconds.
_PROGRESS_EVERY_S = 5.0
_HOUR_S = 3600.0
_IN_QUEUE_S = 600.0


@dataclass(slots=True)
class _Clock:
    now: float

    def read(self) -> float:
        return self.now


def write_run(folder: Path, name: str, *, attempts: int, hours: float) -> RunDirectory:
    """A run as its journal would be: preempted after each attempt, training all the time."""
    job = job_from_mapping({"name": name, "entry": "train:main", "args": {"max_steps": 10**7}})
    run, _ = create_run(job, runs=folder, site=find_site("generic"), submitted_from=folder)
    clock, step = _Clock(time.time() - attempts * (hours * _HOUR_S + _IN_QUEUE_S)), 0
    for number in range(1, attempts + 1):
        nodes = ("n01", "n02")
        claim_attempt(
            run,
            job="8812301",
            restart_count=number - 1,
            host="n01",
            pid=1,
            nodes=nodes,
            time=clock.now,
        )
        supervisor = JournalWriter(
            run, attempt=number, writer="supervisor", launch=1, clock=clock.read
        )
        rank = JournalWriter(run, attempt=number, writer="rank0", launch=1, clock=clock.read)
        supervisor.write(
            ev.AttemptStarted(
                job="8812301", restart_count=number - 1, nodes=nodes, host="n01", via="sbatch"
            )
        )
        supervisor.write(ev.LaunchStarted(world_size=8, nodes=nodes))
        checkpoint = None if step == 0 else f"step-{step:08d}.a{number - 1}.l1-00000000"
        rank.write(ev.Resumed(step=step, checkpoint=checkpoint, world_size=8, interpreter_s=4.0))
        for tick in range(int(hours * _HOUR_S / _PROGRESS_EVERY_S)):
            clock.now += _PROGRESS_EVERY_S
            step += 10
            rank.write(ev.Progress(step=step, consumed=step * 512))
            if tick % 120 == 119:
                saved = f"step-{step:08d}.a{number}.l1-00000000"
                rank.write(
                    ev.CheckpointCommitted(
                        name=saved, step=step, reason="every_minutes", seconds=4.0, size=10**10
                    ),
                    durable=False,
                )
        _preempted(supervisor, number, step)
        rank.close()
        clock.now += _IN_QUEUE_S
    return run


def _preempted(supervisor: JournalWriter, number: int, step: int) -> None:
    incident = Incident(
        id=f"{number}.1",
        cause=Cause.PREEMPTED,
        confidence=Confidence.CERTAIN,
        evidence=(Evidence("scontrol", "PreemptTime=11:02:10"),),
        step=step,
    )
    decision = Decision(
        incident_id=incident.id,
        cause=incident.cause,
        action=Action.REQUEUE,
        reason="preempted: requeue",
        plan=RecoveryPlan(),
        rung=0,
    )
    for event in (
        ev.NoticeSeen(what="SIGTERM", source="rank 0"),
        ev.LaunchEnded(outcome="preempted", step=step),
        ev.IncidentSeen(incident=incident),
        ev.DecisionTaken(decision=decision),
        ev.RequeueIntended(job="8812301", method="scontrol requeue", reason=decision.reason),
        ev.RequeueDone(job="8812301", method="scontrol requeue"),
        ev.AttemptEnded(outcome="requeued"),
    ):
        supervisor.write(event, durable=False)
    supervisor.close()


def write_progress(run: RunDirectory, hours: float) -> None:
    """Before a run is submitted: the lines of so many hours in which it did not get beyond step 1.

    They change nothing about the run but what it costs to read its journal.
    """
    clock = _Clock(time.time() - hours * _HOUR_S)
    rank = JournalWriter(run, attempt=1, writer="rank0", launch=1, clock=clock.read)
    for _ in range(int(hours * _HOUR_S / _PROGRESS_EVERY_S)):
        clock.now += _PROGRESS_EVERY_S
        rank.write(ev.Progress(step=1, consumed=0))
    rank.close()
