"""Many runs on a Slurm with a virtual clock: found, carried out, brought back, and never twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from slurm_forge.journal import JournalWriter, RunStatus, read_journal
from slurm_forge.journal.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    DecisionTaken,
    LaunchStarted,
    NoticeSeen,
    Progress,
    RequeueDone,
    RequeueIntended,
    UserAsked,
)
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import (
    create_run,
    run_state,
    submit_script,
)
from slurm_forge.launch.watch.run_snapshot import RESTARTED, SnapshotCache
from slurm_forge.launch.watch.watcher import (
    HandledFinding,
    Round,
    Watcher,
)
from slurm_forge.recovery.run_watch import (
    FindingKind,
    Remedy,
    WatchLimits,
)
from slurm_forge.run_directory import RunDirectory, claim_attempt
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.fake_slurm import FakeSlurm, FakeSlurmSpec, Runs

SITE = find_site("generic")
LIMITS = WatchLimits()
RESTART = WatchLimits(restart=True)


@dataclass
class World:
    fake: FakeSlurm
    folder: Path

    def submit(self, name: str = "r", seconds: float = 60.0) -> tuple[RunDirectory, str]:
        spec = {"name": name, "entry": "train:main", "resources": {"time": "2-00:00:00"}}
        job = job_from_mapping(spec)
        run, file = create_run(job, runs=self.folder, site=SITE, submitted_from=self.folder)
        self.fake.script("job.sbatch", Runs(seconds=seconds))
        return run, submit_script(run, file, SITE, self.fake)

    def watcher(self, limits: WatchLimits = LIMITS) -> Watcher:
        return Watcher(
            self.fake,
            limits=limits,
            name_of=lambda run: run.name,
            site_of=lambda name: SITE,
            user="user",
            clock=self.now,
            sleep=lambda seconds: self.fake.advance(timedelta(seconds=seconds)),
        )

    def now(self) -> float:
        return self.fake.clock.now.timestamp()

    def asked(self, *words: str) -> int:
        return sum(each.argv[: len(words)] == words for each in self.fake.network.asked)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("slurm_forge.launch.requeue.reconcile.person", lambda: "user")
    start = datetime.now(timezone.utc).replace(microsecond=0)
    return World(FakeSlurm(FakeSlurmSpec(start=start)), tmp_path)


def begins(
    run: RunDirectory,
    job: str,
    number: int = 1,
    via: str = "sbatch",
    clock: Callable[[], float] = time.time,
) -> JournalWriter:
    claim_attempt(run, job=job, restart_count=0, host="n1", pid=1, nodes=("n1",), time=clock())
    journal = JournalWriter(run, attempt=number, writer="supervisor", launch=1, clock=clock)
    journal.write(AttemptStarted(job=job, restart_count=0, nodes=("n1",), host="n1", via=via))
    return journal


def kinds(round_: Round) -> list[tuple[FindingKind, str]]:
    return [(one.finding.kind, one.done) for one in round_.findings]


def only(round_: Round) -> HandledFinding:
    (found,) = round_.findings
    return found


def test_one_question_for_many_runs(world: World) -> None:
    runs = [world.submit(f"r{number}", seconds=5000)[0] for number in range(30)]
    world.fake.advance(timedelta(seconds=300))
    before = len(world.fake.network.asked)
    round_ = world.watcher().round(runs)
    assert round_.findings == () and round_.answered
    asked = [each.argv[0] for each in world.fake.network.asked[before:]]
    assert asked == ["squeue"]


def test_a_dead_run_is_found_and_left_alone(world: World) -> None:
    run, job = world.submit()
    begins(run, job)
    world.fake.wait_state(job, JobState.COMPLETED)
    world.fake.advance(timedelta(seconds=200))
    watcher = world.watcher()
    found = only(watcher.round([run]))
    assert (found.finding.kind, found.finding.remedy) == (FindingKind.DEAD, Remedy.NONE)
    assert found.finding.person and not found.done
    before = len(world.fake.network.asked)
    assert only(watcher.round([run])).finding.key == found.finding.key
    asked = [each.argv[0] for each in world.fake.network.asked[before:]]
    assert asked == ["squeue"], "what Slurm said of it is still good"


def saves(run: RunDirectory, attempt: int, clock: Callable[[], float]) -> JournalWriter:
    """A checkpoint, by the clock of rank 0's node."""
    journal = JournalWriter(run, attempt=attempt, writer="rank0", launch=1, clock=clock)
    journal.advance_clock(read_journal(run)[0])
    name = f"step-{attempt:08d}.a{attempt}.l1-00000000"
    journal.write(CheckpointCommitted(name=name, step=attempt, reason="every", seconds=1.0, size=1))
    return journal


@pytest.mark.parametrize("ahead", [0, 3600, -3600])
def test_a_dead_run_is_brought_back_so_often_and_no_more(world: World, ahead: int) -> None:
    run, job = world.submit()
    begins(run, job)
    saves(run, 1, lambda: time.time() + ahead)
    jobs = [job]
    for _ in range(3):
        world.fake.wait_state(jobs[-1], JobState.COMPLETED)
        world.fake.advance(timedelta(seconds=200))
        found = only(world.watcher(RESTART).round([run]))
        assert found.done.startswith("submitted as job")
        assert not found.finding.person
        jobs.append(run_state(run).job)
        assert world.watcher(RESTART).round([run]).findings == (), "it waits, or runs"
    assert len(set(jobs)) == 4
    world.fake.wait_state(jobs[-1], JobState.COMPLETED)
    world.fake.advance(timedelta(seconds=200))
    found = only(world.watcher(RESTART).round([run]))
    assert found.finding.person and "3 times without a new checkpoint" in found.finding.words
    assert world.asked("sbatch") == 4
    asked = [r.event for r in read_journal(run)[0] if isinstance(r.event, UserAsked)]
    assert sum(event.verb == RESTARTED for event in asked) == 3
    # A checkpoint is progress, which frees the budget.
    begins(run, jobs[-1], number=2)
    saves(run, 2, lambda: time.time() + ahead)
    assert only(world.watcher(RESTART).round([run])).done.startswith("submitted as job")


@pytest.mark.parametrize("ahead", [0, 3600, -3600])
def test_a_checkpoint_is_overdue_by_the_time_of_the_files(world: World, ahead: int) -> None:
    """Whatever the clock of its node says."""
    run, job = world.submit(seconds=100_000)
    now = time.time() - 1800
    begins(run, job, clock=lambda: now + ahead).write(LaunchStarted(world_size=2))
    world.fake.wait_state(job, JobState.RUNNING)
    journal = saves(run, 1, lambda: now + ahead)
    for minutes in range(5, 31, 5):
        now += 300
        name = f"step-{minutes:08d}.a1.l1-00000000"
        if minutes <= 20:
            journal.write(
                CheckpointCommitted(name=name, step=minutes, reason="every", seconds=1.0, size=1)
            )
        journal.write(Progress(step=minutes))
    world.fake.advance(timedelta(seconds=30))
    assert world.watcher().round([run]).findings == ()
    found = only(world.watcher(WatchLimits(overdue_s=500.0, overdue_times=1.9)).round([run]))
    assert found.finding.kind is FindingKind.CHECKPOINT_OVERDUE
    assert found.finding.words.startswith(
        "no checkpoint for 10 min; usually there is one every 5 min"
    )


@pytest.mark.parametrize("purged", [False, True])
def test_what_was_cancelled_stays_so(world: World, purged: bool) -> None:
    run, job = world.submit(seconds=5000)
    begins(run, job)
    world.fake.wait_state(job, JobState.RUNNING)
    world.fake.cancel(job)
    world.fake.wait_state(job, JobState.CANCELLED)
    world.fake.advance(timedelta(seconds=200 if not purged else 4000))
    if purged:
        assert world.fake.show_job(job) is None, "Slurm has forgotten it; accounting has not"
    found = only(world.watcher(RESTART).round([run]))
    assert (found.finding.kind, found.done) == (FindingKind.CANCELLED, "")
    assert world.asked("sbatch") == 1


def test_stopped_between_the_look_and_the_act(world: World) -> None:
    run, job = world.submit()
    begins(run, job)
    world.fake.wait_state(job, JobState.COMPLETED)
    world.fake.advance(timedelta(seconds=200))
    watcher = world.watcher(RESTART)
    ask = world.fake.show_job

    def show_job(wanted: str) -> object:
        run.stop_file.touch()  # somebody is faster
        return ask(wanted)

    world.fake.show_job = show_job  # type: ignore[method-assign,assignment]
    assert watcher.round([run]).findings == ()
    assert world.asked("sbatch") == 1


def test_an_open_intent_is_carried_out_once_by_two_watchers(world: World) -> None:
    run, job = world.submit(seconds=30)
    journal = begins(run, job)
    world.fake.wait_state(job, JobState.RUNNING)
    journal.write(RequeueIntended(job=job, method="scontrol requeue", reason="preempted"))
    journal.write(AttemptEnded(outcome="open"))
    world.fake.wait_state(job, JobState.COMPLETED)
    world.fake.advance(timedelta(seconds=120))
    first, second = world.watcher(), world.watcher()
    assert kinds(first.round([run])) == [(FindingKind.OPEN_INTENT, "requeued")]
    assert second.round([run]).findings == ()
    assert world.asked("scontrol", "requeue") == 1
    assert run_state(run).status is RunStatus.REQUEUED
    assert run_state(run).open_intent is None


@pytest.mark.parametrize("limits", [LIMITS, RESTART])
def test_a_run_of_another_user_is_reported_and_never_submitted(
    world: World, limits: WatchLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch script would be executed as whoever watches."""
    run, job = world.submit()
    journal = begins(run, job)
    if limits is LIMITS:
        journal.write(RequeueIntended(job=job, method="scontrol requeue", reason="preempted"))
    world.fake.wait_state(job, JobState.COMPLETED)
    world.fake.advance(timedelta(seconds=200))
    monkeypatch.setattr(RunDirectory, "is_own", lambda run: False)
    before = read_journal(run)
    found = only(world.watcher(limits).round([run]))
    assert found.finding.remedy is not Remedy.NONE and not found.done
    assert world.asked("sbatch") == 1
    assert read_journal(run) == before


def test_a_dead_controller_costs_one_question_and_nothing_is_done(world: World) -> None:
    runs = []
    for number in range(3):
        run, job = world.submit(f"r{number}")
        journal = begins(run, job)
        journal.write(RequeueIntended(job=job, method="scontrol requeue", reason="preempted"))
        journal.write(AttemptEnded(outcome="open"))
        runs.append(run)
    world.fake.advance(timedelta(seconds=600))
    world.fake.controller_down(timedelta(hours=1))
    before = len(world.fake.network.asked)
    watcher = world.watcher(RESTART)
    round_ = watcher.round(runs)
    assert not round_.answered and round_.why
    assert {one.finding.remedy for one in round_.findings} == {Remedy.NONE}
    assert len(world.fake.network.asked) - before == 1
    world.fake.advance(timedelta(hours=1, seconds=1))
    assert all(done for _, done in kinds(watcher.round(runs))), "and then they are carried out"


@pytest.mark.parametrize("allowed", [True, False])
def test_slurms_delay_is_given_away_where_the_site_lets_us(world: World, allowed: bool) -> None:
    run, job = world.submit(seconds=3)
    file = read_run_file(run.spec_file).model_copy(update={"shorten_requeue": allowed})
    run.spec_file.write_text(file.to_yaml())
    journal = begins(run, job)
    world.fake.wait_state(job, JobState.RUNNING)
    world.fake.requeue(job)
    journal.write(RequeueDone(job=job, method="scontrol requeue"))
    journal.write(AttemptEnded(outcome="requeued"))
    world.fake.wait_until(lambda: world.fake.queue("user")[0].reason == "BeginTime")
    world.fake.advance(timedelta(seconds=6))
    record = world.fake.show_job(job)
    assert record is not None and record.start_time is not None
    assert record.start_time - world.fake.clock.now > timedelta(seconds=60)
    limits = WatchLimits(delay_s=121.0)
    found = world.watcher(limits).round([run])
    if not allowed:
        assert found.findings == ()
        assert world.fake.show_job(job) == record
        return
    world.fake.wait_state(job, JobState.RUNNING)
    assert kinds(found) == [(FindingKind.DELAYED, f"job {job} may start now")]


def test_many_dead_runs_have_their_turn(world: World) -> None:
    runs = []
    for number in range(45):
        run, job = world.submit(f"r{number:02d}", seconds=1)
        begins(run, job)
        runs.append(run)
    world.fake.wait_until(lambda: not world.fake.queue("user"))
    world.fake.advance(timedelta(seconds=200))
    watcher, seen = world.watcher(), set()
    for _ in range(4):
        before = world.asked("scontrol", "show", "job")
        round_ = watcher.round(runs)
        assert world.asked("scontrol", "show", "job") - before <= 20
        seen |= {one.path for one in round_.findings}
        world.fake.advance(timedelta(seconds=60))
    assert len(seen) == 45


def test_a_run_that_can_not_be_read_does_not_hide_the_others(world: World) -> None:
    run, _ = world.submit("good", seconds=5000)
    bad, job = world.submit("bad", seconds=5000)
    begins(bad, job)
    (file,) = bad.journal.glob("1-*")
    file.chmod(0o666)
    found = only(world.watcher().round([bad, run]))
    assert found.finding.kind is FindingKind.UNREADABLE
    assert "chmod" in found.finding.next


def test_what_nobody_has_thought_of_does_not_hide_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, job = world.submit("dead")
    begins(run, job)
    odd, other = world.submit("odd")
    begins(odd, other)
    world.fake.wait_state(other, JobState.COMPLETED)
    world.fake.advance(timedelta(seconds=200))
    watcher = world.watcher()
    ask = world.fake.show_job

    def show_job(wanted: str) -> object:
        if wanted == other:
            raise OverflowError("a time beyond all times")
        return ask(wanted)

    monkeypatch.setattr(world.fake, "show_job", show_job)
    found = {each.finding.run: each.finding.kind for each in watcher.round([odd, run]).findings}
    assert found == {"odd": FindingKind.UNREADABLE, "dead": FindingKind.DEAD}


def test_a_command_that_says_nothing_is_not_stuck(world: World) -> None:
    run, job = world.submit(seconds=100_000)
    begins(run, job).write(LaunchStarted(world_size=0))
    world.fake.wait_state(job, JobState.RUNNING)
    world.fake.advance(timedelta(hours=20))
    assert world.watcher().round([run]).findings == ()


@pytest.mark.parametrize("ahead", [0, 3600])
def test_forgotten_after_a_notice_it_is_left_to_a_person(
    world: World, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    run, job = world.submit(seconds=5000)
    supervisor = begins(run, job)
    # What rank 0 has decided before is no answer to it, whatever its clock says.
    warned = Decision(
        incident_id="1.1.warning",
        cause=Cause.NON_FINITE,
        action=Action.WARN,
        reason="",
        plan=RecoveryPlan(),
    )
    rank = saves(run, 1, lambda: time.time() + ahead)
    rank.write(DecisionTaken(decision=warned))
    supervisor.write(NoticeSeen(what="SIGTERM", source="batch step"))
    world.fake.wait_state(job, JobState.RUNNING)
    world.fake.cancel(job)
    world.fake.advance(timedelta(seconds=4000))
    monkeypatch.setattr(world.fake, "accounting", lambda job: [])
    found = only(world.watcher(RESTART).round([run]))
    assert (found.finding.kind, found.done) == (FindingKind.DEAD, "")
    assert world.asked("sbatch") == 1


def test_a_chain_whose_task_died_goes_on_by_itself(world: World) -> None:
    """The next task is in the queue: nobody has to bring anything back."""
    spec = {"name": "r", "entry": "train:main", "template": "array", "chain": 3}
    job = job_from_mapping({**spec, "resources": {"time": "2-00:00:00"}})
    run, file = create_run(job, runs=world.folder, site=SITE, submitted_from=world.folder)
    world.fake.script("job.sbatch", Runs(seconds=60))
    array = submit_script(run, file, SITE, world.fake)
    begins(run, f"{array}_1", via=VIA_ARRAY)
    world.fake.update_job(f"{array}_[2-3]", JobUpdate(start_after=timedelta(hours=1)))
    world.fake.wait_state(f"{array}_1", JobState.COMPLETED)
    world.fake.advance(timedelta(seconds=200))
    assert world.watcher().round([run]).findings == ()
    assert world.watcher(RESTART).round([run]).findings == ()
    world.fake.cancel_waiting(array)
    world.fake.advance(timedelta(seconds=200))
    (found,) = world.watcher().round([run]).findings
    assert found.finding.kind is FindingKind.DEAD


def test_what_a_rank_left_of_a_long_file_is_not_taken_for_silence(tmp_path: Path) -> None:
    run = RunDirectory.at(tmp_path / "long")
    run.create(b"{}")
    now = 1000.0
    supervisor = JournalWriter(run, attempt=1, writer="supervisor", launch=1, clock=lambda: now)
    supervisor.write(
        AttemptStarted(job="1", restart_count=0, nodes=("n1",), host="n1", via="sbatch")
    )
    rank = JournalWriter(
        run, attempt=1, writer="rank0", launch=1, clock=lambda: now, rotate_at=20_000
    )
    for step in range(1, 401):
        now += 5.0
        rank.write(Progress(step=step))
        if step % 100 == 0:
            name = f"step-{step:08d}.a1.l1-0000abcd"
            rank.write(CheckpointCommitted(name=name, step=step, reason="", seconds=1.0, size=1))
    assert len(list(run.journal.glob("1-rank0-*"))) > 2
    assert SnapshotCache().read(run, "long").usual_silence_s == 5.0
