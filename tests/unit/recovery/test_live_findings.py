"""What a live look means, and what to do about it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from slurm_forge.recovery.live_findings import LiveFinding, Mark, findings
from slurm_forge.recovery.live_observations import (
    Fate,
    JobSeen,
    LiveSeen,
    Meeting,
    NodeSeen,
    NodeStorage,
    Reach,
    Receiver,
    RoundKind,
    Sighting,
    SignalRound,
)
from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    JobConditions,
    Prediction,
    predict,
)
from slurm_forge.site.model import Site

FINE = NodeStorage(
    visible=True, writable=True, exclusive=True, renamed_s=0.001, synced_s=0.002, lock_refused=True
)
NODE = NodeSeen(
    host="n1",
    storage=FINE,
    commands=("scontrol", "squeue", "sacct"),
    may_submit=True,
    python="/usr/bin/python3",
    package=True,
    torch="2.8",
    torch_s=2.0,
    internet=False,
    memory_free=1 << 34,
    shm_free=1 << 34,
    memory_limit=1 << 33,
    memory_asked=1 << 33,
    interfaces=("lo", "hsn0"),
)
MEETING = Meeting(
    clock_ahead_s=0.01,
    clock_give_s=0.02,
    seen_after_s=0.1,
    lock_refused=True,
    exclusive=True,
    content_right=True,
)
SITE = Site.model_validate({"name": "here"})
RUN = predict(JobConditions())


def sighting(way: Receiver, fate: Fate) -> Sighting:
    after = None if fate in (Fate.NOTHING, Fate.ABSENT) else 0.1
    return Sighting(way=way, host="n1", fate=fate, after_s=after)


def steps(kind: RoundKind = RoundKind.STEPS_TERM, **fates: Fate) -> SignalRound:
    usual = {
        Receiver.BATCH: Fate.NOTHING,
        Receiver.TASK: Fate.HEARD,
        Receiver.TASK_PLAIN: Fate.DIED,
        Receiver.SHELL: Fate.CARRIED_OFF,
        Receiver.TORCHRUN: Fate.HEARD,
        Receiver.WORKER: Fate.NOTHING,
        Receiver.WORKER_PLAIN: Fate.NOTHING,
    }
    found = {**usual, **{Receiver[name]: fate for name, fate in fates.items()}}
    return SignalRound(
        kind=kind,
        signal="SIGTERM" if kind is RoundKind.STEPS_TERM else "SIGUSR2",
        sightings=tuple(sighting(way, fate) for way, fate in found.items()),
        sent_at=1.0,
    )


def warning(before_end_s: float | None, asked_s: float = 200.0) -> SignalRound:
    heard = Fate.NOTHING if before_end_s is None else Fate.HEARD
    return SignalRound(
        kind=RoundKind.WARNING,
        signal="SIGUSR2",
        sightings=(sighting(Receiver.TASK, heard),),
        before_end_s=before_end_s,
        asked_s=asked_s,
        problem="it did not arrive" if before_end_s is None else "",
    )


def seen(
    *rounds: SignalRound, node: NodeSeen = NODE, meeting: Meeting = MEETING, **more: object
) -> LiveSeen:
    report = JobSeen(
        nonce="x",
        job="7",
        host="n1",
        started_at=0.0,
        ended_at=50.0,
        end_time=240.0,
        rounds=rounds or (steps(),),
        nodes=(node,),
    )
    return replace(LiveSeen(job="7", report=report, meeting=meeting), **more)  # type: ignore[arg-type]


def found(
    look: LiveSeen, prediction: Prediction | None = RUN, site: Site = SITE
) -> tuple[LiveFinding, ...]:
    return findings(look, prediction, site)


def problems(look: LiveSeen, prediction: Prediction | None = RUN) -> list[str]:
    return [each.text for each in found(look, prediction) if each.mark is Mark.PROBLEM]


def test_a_cluster_where_all_is_well_has_no_problem() -> None:
    assert problems(seen()) == []
    assert any("would have died" in each.text for each in found(seen()))


def test_every_problem_says_what_to_do() -> None:
    broken = replace(
        NODE,
        storage=NodeStorage(problem="No such file or directory"),
        commands=(),
        missing=("scontrol", "sacct", "sbatch"),
        may_submit=None,
        torch=None,
        internet=True,
        shm_free=1 << 20,
        reaches=(Reach(address="n1", problem="Connection timed out"),),
    )
    look = seen(
        steps(TASK=Fate.NOTHING, WORKER=Fate.DIED),
        node=broken,
        meeting=Meeting(exclusive=False, content_right=False, clock_ahead_s=90.0, clock_give_s=1.0),
        requeue_tried=True,
    )
    claims = {"internet_on_compute_nodes": False, "socket_interface": "ib"}
    told = found(look, site=SITE.model_copy(update=claims))
    assert any("no interface of the nodes is called ib" in each.text for each in told)
    bad = [each for each in told if each.mark in (Mark.PROBLEM, Mark.WARNING)]
    assert len(bad) >= 10
    assert [each.text for each in bad if not each.advice] == []


def test_a_limit_of_open_files_is_told_where_it_is_one() -> None:
    told = found(seen(node=replace(NODE, open_files=1024)))
    assert any("enough for a launch of 224 ranks" in each.text for each in told)
    assert not [each for each in found(seen(node=replace(NODE, open_files=1 << 19)))
                if each.about == "open files"]  # fmt: skip


def test_a_task_that_hears_nothing_is_a_problem() -> None:
    assert "does not reach the tasks" in problems(seen(steps(TASK=Fate.NOTHING)))[0]


def test_torchrun_that_dies_of_the_user_signal_is_told() -> None:
    look = seen(steps(RoundKind.STEPS_USER, TORCHRUN=Fate.CARRIED_OFF))
    (torchrun,) = (each for each in found(look) if "torchrun" in each.text)
    assert "SIGUSR2 ends torchrun" in torchrun.text and torchrun.advice


@pytest.mark.parametrize(
    ("came", "mark"),
    [(200.0, Mark.OK), (229.0, Mark.OK), (260.0, Mark.OK), (280.0, Mark.WARNING),
     (150.0, Mark.WARNING), (None, Mark.WARNING)],
)  # fmt: skip
def test_slurms_warning_may_be_a_minute_early_and_not_late(came: float | None, mark: Mark) -> None:
    told = next(each for each in found(seen(warning(came))) if "own warning" in each.text)
    assert told.mark is mark


@pytest.mark.parametrize(
    ("back_by", "mark"), [(BroughtBack.RUN, Mark.PROBLEM), (BroughtBack.PERSON, Mark.WARNING)]
)
def test_a_missing_scontrol_counts_where_the_run_requeues_itself(
    back_by: BroughtBack, mark: Mark
) -> None:
    promised = replace(RUN, back_by=back_by, limit_back_by=back_by)
    node = replace(NODE, commands=("squeue", "sacct"), missing=("scontrol",))
    told = next(e for e in found(seen(node=node), promised) if "scontrol does not work" in e.text)
    assert told.mark is mark and "slurm-forge watch" in told.advice


def test_a_node_that_can_submit_nothing_counts_where_a_successor_is_needed() -> None:
    node = replace(NODE, may_submit=False)
    needed = replace(RUN, limit_back_by=BroughtBack.SUCCESSOR)
    assert problems(seen(node=node)) == []
    assert "no successor" in problems(seen(node=node), needed)[0]


def test_locks_that_do_not_hold_are_a_note_and_exclusive_creation_a_problem() -> None:
    assert problems(seen(meeting=replace(MEETING, lock_refused=False))) == []
    node = replace(NODE, storage=replace(FINE, exclusive=False))
    assert "exclusively" in problems(seen(node=node))[0]


@pytest.mark.parametrize(
    ("ahead", "give", "bad"), [(1.0, 0.1, False), (5.0, 4.0, False), (-5.0, 0.1, True)]
)
def test_a_clock_is_off_beyond_what_can_be_measured(ahead: float, give: float, bad: bool) -> None:
    meeting = replace(MEETING, clock_ahead_s=ahead, clock_give_s=give)
    told = next(each for each in found(seen(meeting=meeting)) if each.about == "clock")
    assert (told.mark is Mark.WARNING) is bad


def test_a_requeue_that_takes_longer_than_predicted_is_told_with_both_figures() -> None:
    promised = replace(RUN, delay=timedelta(seconds=25))
    late = found(seen(requeue_tried=True, requeued_s=400.0), promised)
    assert any("400 s later" in e.text and "25 s" in e.text for e in late)
    soon = found(seen(requeue_tried=True, requeued_s=30.0), promised)
    assert any("30 s later" in e.text and e.mark is Mark.OK for e in soon)
    assert problems(seen(requeue_tried=True))


def test_a_second_node_that_does_not_answer_is_a_problem() -> None:
    assert "only 1 of 2" in problems(seen(nodes=2))[0]


def test_without_a_report_nothing_is_claimed() -> None:
    assert findings(LiveSeen(job="7", problem="it did not start"), RUN, SITE) == ()
