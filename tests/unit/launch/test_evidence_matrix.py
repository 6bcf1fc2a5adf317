"""Whatever ends a job, and however late Slurm answers: never dead, never revived after a scancel.

The causes are right, or not known yet.
"""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.launch.command import conductor as program_module
from slurm_forge.launch.conductor import conductor as conductor_module
from slurm_forge.launch.conductor import job_queries as questions_module
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.testing.cluster.spec import PartitionPreemption
from slurm_forge.vocabulary.cause import Cause, Confidence
from tests.unit.launch import evidence_world
from tests.unit.launch.evidence_world import Answers, End, Front, World

RIGHT = {
    End.PREEMPTION: {Cause.PREEMPTED},
    End.SCANCEL: {Cause.USER_CANCELLED},
    End.TIME_LIMIT: {Cause.TIME_LIMIT},
    End.ADMIN_REQUEUE: {Cause.ADMIN_REQUEUE},
    End.NODE_DOWN: {Cause.NODE_FAIL},
}
REQUEUE, CANCEL = PartitionPreemption.REQUEUE, PartitionPreemption.CANCEL
CELLS = [
    *((end, answers, grace, front, REQUEUE)
      for end, answers, grace, front in itertools.product(End, Answers, (0, 5, 30), Front)),
    *((End.PREEMPTION, answers, grace, front, CANCEL)
      for answers, grace, front in itertools.product(Answers, (0, 5, 30), Front)),
]  # fmt: skip


def every_pair(end: End, answers: Answers, grace: float, front: Front) -> bool:
    """Each end with each answer once; front and grace time alternate, so that each meets both."""
    number = list(End).index(end) * len(Answers) + list(Answers).index(answers)
    return front is list(Front)[number % 2] and grace == (0, 30)[number // 2 % 2]


IN_CI = [
    cell if every_pair(*cell[:4]) else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS
]


class VirtualTime:
    """``time`` for a conductor whose waiting lets virtual time pass."""

    def __init__(self, world: World) -> None:
        self._world = world

    def sleep(self, seconds: float) -> None:
        self._world.batches[-1].start.sleep(seconds)


def played(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: End, answers: Answers, grace: float,
    front: Front, mode: PartitionPreemption = REQUEUE, cancelled_after: timedelta | None = None,
    slow_after: timedelta = timedelta(0),
) -> World:  # fmt: skip
    run = RunDirectory.at(folder / "run")
    what = {"entry": "a.b:train"} if front is Front.RANKS else {"command": ["train"]}
    job = job_from_mapping({"name": "run", "resources": {"nodes": 2}, **what})
    run.create(
        RunFile(submitted_from=str(folder), python=sys.executable, job=job).to_yaml().encode()
    )
    world = World(
        run, end, answers, grace, front, mode, cancelled_after=cancelled_after,
        slow_after=slow_after,
    )  # fmt: skip
    monkeypatch.setattr(questions_module, "time", VirtualTime(world))
    monkeypatch.setattr(program_module, "time", VirtualTime(world))
    for module in (conductor_module, program_module, questions_module):
        monkeypatch.setattr(module, "_TICK_S", 0.25)
    world.live()
    return world


@pytest.mark.parametrize(
    ("end", "answers", "grace", "front", "mode"),
    IN_CI,
    ids=lambda value: str(getattr(value, "value", value)),
)
def test_a_stop_while_slurm_answers_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: End, answers: Answers, grace: float,
    front: Front, mode: PartitionPreemption,
) -> None:  # fmt: skip
    world = played(tmp_path, monkeypatch, end, answers, grace, front, mode)
    state = world.state
    incidents = [incident for attempt in state.attempts for _, incident in attempt.incidents]
    story = [(each.cause.value, each.confidence.value, each.evidence) for each in incidents]
    if end is End.SUSPEND:
        assert world.run.is_done() and world.starts == 1 and not incidents, story
        return
    if end is End.SCANCEL:
        assert world.starts == 1 and not world.run.is_done(), story
        assert state.status.value in ("cancelled", "running") and not state.open_intent, story
    else:
        assert world.run.is_done() and world.starts == 2, (state.status, story)
    for incident in incidents:
        unknown = incident.confidence is Confidence.GUESS
        assert incident.cause in RIGHT[end] or unknown, story
    if end is End.PREEMPTION and answers is Answers.AFTER_4_S and grace > 0:
        assert [each.confidence for each in incidents] == [Confidence.CERTAIN], story


@pytest.mark.parametrize("mode", [REQUEUE, CANCEL])
@pytest.mark.parametrize("front", Front)
@pytest.mark.parametrize("after_s", [0.6, 1.6])
def test_a_scancel_while_the_run_stops_for_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_s: float, front: Front,
    mode: PartitionPreemption,
) -> None:  # fmt: skip
    """Also where the program has ended, and Slurm is asked for the last time."""
    world = played(
        tmp_path, monkeypatch, End.PREEMPTION, Answers.AT_ONCE, 30, front, mode,
        timedelta(seconds=after_s),
    )  # fmt: skip
    assert (world.starts, world.state.status.value) == (1, "cancelled")


@pytest.mark.parametrize("front", Front)
@pytest.mark.parametrize("after_s", [6, 9])
def test_a_scancel_while_the_ladder_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_s: float, front: Front
) -> None:
    """Until the requeue is on its way."""
    world = played(
        tmp_path, monkeypatch, End.PREEMPTION, Answers.AFTER_4_S, 30, front,
        cancelled_after=timedelta(seconds=after_s),
    )  # fmt: skip
    assert (world.starts, world.state.status.value) == (1, "cancelled")


@pytest.mark.parametrize("front", Front)
@pytest.mark.parametrize("after_s", [2.5, 5.2])
def test_a_scancel_after_slurm_has_told_of_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_s: float, front: Front
) -> None:
    """What it said then explains no later signal, and the next answer takes its time."""
    monkeypatch.setattr(evidence_world, "SAVE_S", 5.0)
    world = played(
        tmp_path, monkeypatch, End.PREEMPTION, Answers.AFTER_4_S, 30, front,
        cancelled_after=timedelta(seconds=after_s), slow_after=timedelta(seconds=2),
    )  # fmt: skip
    assert (world.starts, world.state.status.value) == (1, "cancelled")


def test_why_a_program_was_signalled_is_written_down_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may requeue the job itself, which ends the supervisor before it can say why."""
    world = played(
        tmp_path, monkeypatch, End.PREEMPTION, Answers.AT_ONCE, 30, Front.EXEC, REQUEUE
    )  # fmt: skip
    sources = [each.source for _, each in world.state.attempts[0].notices]
    assert sources.count("scontrol") == 1
    assert sources[0] != "scontrol", "it was a signal that was heard first"
