"""A run directory that can't be used: what is left is Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from slurm_forge.launch.stranded import leave_to_slurm
from slurm_forge.slurm.answers import RequeueOutcome, RequeueReply
from slurm_forge.slurm.client import JobUpdate


@dataclass
class Slurm:
    outcome: RequeueOutcome = RequeueOutcome.REQUEUED
    asked: list[str] = field(default_factory=list)

    def requeue(self, job: str) -> RequeueReply:
        self.asked.append(f"requeue {job}")
        return RequeueReply(self.outcome, "no")

    def requeue_hold(self, job: str) -> RequeueReply:
        self.asked.append(f"requeuehold {job}")
        return RequeueReply(self.outcome, "no")

    def update_job(self, job: str, update: JobUpdate) -> None:
        self.asked.append(f"update {' '.join(update.assignments())}")


@pytest.mark.parametrize("restarts", [0, 19])
def test_it_is_tried_again_later(restarts: int) -> None:
    slurm = Slurm()
    done = leave_to_slurm(slurm, "7", "stale\nhandle", restart_count=restarts)  # type: ignore[arg-type]
    assert done == "requeued"
    assert slurm.asked == [
        "update Comment=slurm_forge: stale handle",
        "requeue 7",
        "update StartTime=now+180",
    ]


def test_and_held_in_the_end() -> None:
    slurm = Slurm()
    assert leave_to_slurm(slurm, "7", "full", restart_count=20) == "held"  # type: ignore[arg-type]
    assert slurm.asked[-1] == "requeuehold 7"


def test_what_slurm_refuses_is_told() -> None:
    slurm = Slurm(RequeueOutcome.DISABLED)
    done = leave_to_slurm(slurm, "7", "full", restart_count=0)  # type: ignore[arg-type]
    assert done == "not requeued: no"
