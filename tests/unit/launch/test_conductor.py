"""The conductor with a real hub and scripted ranks; Slurm, launcher and clock are made up."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from signal import Signals
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control import Hub, Member, MemberView
from slurm_forge.control import member as member_module
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.probe import ProbeArrived, ProbeDone
from slurm_forge.control.messages.rank import (
    FunctionReturned,
    Notice,
    RankFailed,
    RankFinished,
    RankStopped,
    RecoveryNeeded,
    SaveFailed,
)
from slurm_forge.errors import ControlChannelError, SlurmUnreachableError
from slurm_forge.journal import JournalWriter, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import AppendFile
from slurm_forge.launch.attempt.attempt_signals import LaunchSignals
from slurm_forge.launch.conductor import job_queries as questions_module
from slurm_forge.launch.conductor import save_timer as pace_module
from slurm_forge.launch.conductor import shutdown as ending_module
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.conductor.observations import Observations
from slurm_forge.launch.conductor.stop_monitor import BATCH_STEP
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.recovery import LaunchFacts, classify
from slurm_forge.recovery.incident import signal_meaning as warning_module
from slurm_forge.recovery.incident.launch_facts import WorkerEnd
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.records import ConfigRecord, JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.position import LAST, Position

WITHIN_S = 20.0
#: Our time runs faster than the wall's, so that deadlines of seconds cost little.
SPEED = 40.0
BEGAN = datetime(2026, 11, 21, 12, 0, 0, tzinfo=timezone.utc)
RUNNING = JobRecord(
    job_id=42,
    name="tiny",
    state=JobState.RUNNING,
    state_text="RUNNING",
    start_time=BEGAN,
    end_time=BEGAN + timedelta(hours=4),
    time_limit=timedelta(hours=4),
)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.002)


class FastClock:
    def __init__(self, speed: float = SPEED) -> None:
        self._speed, self._zero = speed, time.monotonic()

    def __call__(self) -> float:
        return 1000.0 + (time.monotonic() - self._zero) * self._speed

    def now(self) -> datetime:
        return BEGAN + timedelta(seconds=self() - 1000.0)


class Slurm:
    """Answers what it is told to, when it is told to."""

    def __init__(self, answer: JobRecord | Exception | None = RUNNING) -> None:
        self.answer = answer
        self.asked = 0
        self.open = threading.Event()
        self.open.set()
        #: Its clock, and whether it tells what that shows.
        self.clock = FastClock()
        self.tells_time = threading.Event()
        self.tells_time.set()

    def show_job(self, job: str) -> JobRecord | None:
        assert job == "42"
        self.asked += 1
        answer = self.answer
        self.open.wait(WITHIN_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def show_config(self) -> ConfigRecord:
        self.tells_time.wait(WITHIN_S)
        return ConfigRecord(controller_time=self.clock.now().replace(microsecond=0))


@dataclass
class Launcher:
    """An srun that ends when its ranks have, or is killed."""

    ranks: list[Rank] = field(default_factory=list)
    status: int | None = None
    killed: int = 0
    text: str = ""
    deaf: bool = False
    waits_for_ever: bool = False

    def poll(self) -> int | None:
        if self.waits_for_ever:
            return self.status
        if self.status is None and self.ranks and all(rank.left for rank in self.ranks):
            self.status = max(rank.code for rank in self.ranks)
        return self.status

    def kill(self) -> None:
        self.killed += 1
        if not self.deaf:
            for rank in self.ranks:
                rank.die()
            self.status = 137

    def launcher_signal(self) -> str:
        return ""

    def tail(self) -> str:
        return self.text

    def ends(self) -> tuple[WorkerEnd, ...]:
        return ()


class Rank:
    """Trains as told: passes boundaries with the others, acts on requests, says goodbye."""

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage, self.number = stage, number
        self.acted: list[tuple[RequestKind, int]] = []
        self.step = 0
        self.left = False
        self.code = 0
        self.stay = threading.Event()
        self.aborted = ""
        _, port = parse_addresses(stage.hub.addresses)
        self.member = Member(
            rank=number,
            world_size=stage.world,
            credentials=stage.hub.credentials,
            hosts=("127.0.0.1",),
            port=port,
            host=f"n{number}",
            pid=100 + number,
            on_abort=self._abort,
        )
        self.thread = threading.Thread(target=self._live, daemon=True)

    def _abort(self, reason: str) -> None:
        """As a rank: leave at once."""
        self.aborted = reason
        if not self.stage.stubborn:
            self.stage.barrier.abort()
            self.die(1)

    def die(self, code: int = 137) -> None:
        """The process is gone: its end of the channel closes without a word."""
        self.code = max(self.code, code)
        self.left = True
        if threading.current_thread() is not self.member._thread:
            self.member.close()

    def leave(self, *last: Message, code: int = 0) -> None:
        for message in last:
            self.member.send(message)
        self.member.close()
        self.code = max(self.code, code)
        self.left = True

    def _live(self) -> None:
        try:
            self.stage.script(self)
        except (threading.BrokenBarrierError, ControlChannelError):
            self.left = True

    # -- what scripts are made of ----------------------------------------------------------

    def train(self, steps: int = 100_000, *, stop: bool = True) -> bool:
        """Train up to ``steps``; True if it was stopped (and has said so)."""
        while self.step < steps:
            if self.pass_by(Position(self.step)):
                if stop:
                    self.leave(RankStopped(step=self.step, checkpoint=f"step-{self.step}"))
                return True
            self.stage.barrier.wait(WITHIN_S)
            time.sleep(0.001)  # a step: ranks that only loop leave the hub's thread no processor
            self.step += 1
        return False

    def pass_by(self, position: Position, **how: Any) -> bool:
        if self.left:
            raise threading.BrokenBarrierError  # a dead process passes nothing
        self.member.enter("train")
        for request in self.member.advance(position, wait_s=WITHIN_S, **how):
            self.acted.append((request.kind, position.step))
            if request.kind is RequestKind.STOP:
                return True
            if request.kind is RequestKind.PROBE:
                self.member.send(ProbeArrived(id=request.id))
                self.member.send(
                    ProbeDone(
                        id=request.id,
                        latency_s=(0.001,),
                        wrong=(self.stage.wrong,),
                        bandwidth=(0.0,),
                    )
                )
        return False

    def fail(self, cause: str, text: str = "boom", micro_batch: int = 0) -> None:
        failed = RankFailed(
            step=self.step,
            phase="train",
            error="E",
            text=text,
            trace="",
            cause=cause,
            micro_batch=micro_batch,
        )
        self.leave(failed, code=1)


class Stage:
    """Everything around one conductor."""

    def __init__(self, run: RunDirectory, world: int) -> None:
        self.run, self.world = run, world
        self.clock = FastClock()
        self.hub = Hub(world_size=world, clock=self.clock)
        self.slurm = Slurm()
        self.launcher: Launcher | None = Launcher()
        self.timing = Timing(
            lead=timedelta(seconds=60),
            save_every=None,
            probe_every=None,
            probe_deadline=timedelta(seconds=3),
        )
        #: The wall clock of this node, against the controller's.
        self.behind = timedelta(0)
        self.script: Callable[[Rank], object] = lambda rank: rank.train()
        self.barrier = threading.Barrier(world)
        self.stubborn = False
        self.wrong: tuple[int, ...] = ()
        self.absent: tuple[int, ...] = ()
        self.ranks: list[Rank] = []
        self.journal = JournalWriter(run, attempt=1, writer="supervisor", launch=1)
        self.facts: LaunchFacts | None = None
        self.error: BaseException | None = None

    def start(self, *, join: bool = True, trains: bool = True) -> Stage:
        self.hub.start()
        if join:
            there = [number for number in range(self.world) if number not in self.absent]
            self.ranks = [Rank(self, number) for number in there]
        if self.launcher is not None:
            self.launcher.ranks = self.ranks
        self.slurm.clock = self.clock
        self.watch = JobPoller(
            self.slurm,  # type: ignore[arg-type]
            "42",
            clock=self.clock,
            wall=self.node_time,
        )
        self.conductor = Conductor(
            self.hub,
            journal=self.journal,
            job_poller=self.watch,
            timing=self.timing,
            stop_file=self.run.stop_file,
            save_file=self.run.save_file,
            launched=self.launcher,
            clock=self.clock,
            now=lambda: self.clock.now() - self.behind,
        )
        self.thread = threading.Thread(target=self._conduct, daemon=True)
        self.thread.start()
        for rank in self.ranks:
            rank.thread.start()
        if trains:
            until(
                lambda: [m.started for m in self.hub.members().values()] == [True] * self.world,
                "all ranks are training",
            )
            until(
                lambda: self.watch.latest is not None or self.slurm.answer is not RUNNING,
                "scontrol",
            )
        return self

    def node_time(self) -> float:
        return (self.clock.now() - self.behind).timestamp()

    def _conduct(self) -> None:
        try:
            self.facts = self.conductor.watch()
        except BaseException as error:
            self.error = error

    def end(self) -> LaunchFacts:
        self.thread.join(WITHIN_S)
        assert self.error is None, repr(self.error)
        assert self.facts is not None, "the conductor goes on for ever"
        return self.facts

    def cause(self) -> Cause:
        return classify(self.end(), "1.1").cause

    def notice(self, rank: int = 0, what: str = "SIGTERM") -> None:
        self.ranks[rank].member.send(Notice(what=what))

    def journalled(self, kind: type[Any]) -> list[Any]:
        records, _ = read_journal(self.run)
        return [record.event for record in records if isinstance(record.event, kind)]

    def preempt(self, grace: float = 400.0) -> None:
        now = self.clock.now()
        end = now + timedelta(seconds=grace)
        self.slurm.answer = replace(RUNNING, preempt_time=now, end_time=end)

    def close(self) -> None:
        self.stubborn = False
        self.barrier.abort()
        self.slurm.open.set()
        for rank in self.ranks:
            rank.stay.set()
            rank.die()
        self.hub.close()
        self.thread.join(WITHIN_S)
        self.journal.close()
        for rank in self.ranks:  # one that spins on would starve every test after this one
            rank.thread.join(WITHIN_S)
            assert not rank.thread.is_alive(), f"rank {rank.number} outlived its test"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(member_module, "_BEAT_S", 1.0 / SPEED)
    # Leaving goes at the wall's pace, on a machine that may be busy.
    monkeypatch.setattr(ending_module, "_LEAVE_S", 5.0 * SPEED)
    run = RunDirectory.at(tmp_path / "tiny")
    run.create(b"name: tiny\n")
    stage = Stage(run, 2)
    yield stage
    stage.close()


# -- the end of a launch, and signals --------------------------------------------------------------


def test_a_signal_while_slurm_is_asked_for_its_last_word_is_heard(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Slurm is asked again: its answer may be from before."""
    for name in ("LAST_QUERY_S", "LAST_QUERY_OF_STOP_S"):
        monkeypatch.setattr(questions_module, name, WITHIN_S * SPEED)
    stage.start()
    slurm = stage.slurm
    slurm.open.clear()
    asked = slurm.asked
    stage.ranks[1].die()
    until(lambda: slurm.asked > asked, "the last question")
    ending = replace(RUNNING, state=JobState.CANCELLED, end_time=stage.clock.now())
    stage.conductor.stops.add_signal("SIGTERM", BATCH_STEP)
    slurm.answer = ending
    slurm.open.set()
    facts = stage.end()
    assert facts.batch_signals == ("SIGTERM",)
    assert facts.job_at_end == ending


def test_a_signal_that_a_conductor_does_not_hear_is_for_the_next(stage: Stage) -> None:
    stage.start()
    signals = LaunchSignals()
    signals.batch(Signals.SIGUSR1)
    with signals.go_to(stage.conductor.stops):
        assert stage.cause() is not Cause.CRASH
        signals.batch(Signals.SIGTERM)
    signals.batch(Signals.SIGUSR2)
    assert signals.batch_signals_since() == ("SIGTERM", "SIGUSR2")


# -- stopping ------------------------------------------------------------------------------------


def test_a_preempted_launch_saves_together_and_says_why(stage: Stage) -> None:
    stage.start().preempt()
    stage.notice(rank=1)
    facts = stage.end()
    assert len({tuple(rank.acted) for rank in stage.ranks}) == 1
    ((kind, step),) = stage.ranks[0].acted
    assert kind is RequestKind.STOP
    assert (facts.stopped_at, facts.checkpoint) == (step, f"step-{step}")
    assert (facts.rank_signals, facts.deadline_passed, facts.lost) == (("SIGTERM",), False, ())
    assert facts.job_at_notice is not None
    assert facts.job_at_notice.preempt_time is not None
    assert stage.cause() is Cause.PREEMPTED
    assert [seen.source for seen in stage.journalled(ev.NoticeSeen)] == ["rank 1"]
    assert [agreed.step for agreed in stage.journalled(ev.StopAgreed)] == [step]


def test_a_signal_for_the_batch_step_stops_the_ranks_too(stage: Stage) -> None:
    stage.start()
    now = stage.clock.now()
    stage.slurm.answer = replace(RUNNING, state=JobState.COMPLETING, end_time=now)
    stage.script = lambda rank: rank.train()
    stage.conductor.stops.add_signal("SIGTERM", BATCH_STEP)
    stage.conductor.stops.add_signal("SIGTERM", BATCH_STEP)
    facts = stage.end()
    assert facts.batch_signals == ("SIGTERM",)
    assert [seen.source for seen in stage.journalled(ev.NoticeSeen)] == ["batch step"]
    assert stage.cause() is Cause.USER_CANCELLED


@pytest.fixture
def near_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any time counts as near the end, and Slurm's answer is waited for as long as it takes."""
    monkeypatch.setattr(warning_module, "_EARLY", timedelta(hours=24))
    monkeypatch.setattr(warning_module, "patience", lambda lead: timedelta(hours=1))


@pytest.mark.usefixtures("near_the_end")
def test_slurms_warning_of_the_time_limit_stops_nobody(stage: Stage) -> None:
    stage.start()
    for rank in (0, 1):
        stage.notice(rank, "SIGUSR1")
    stage.conductor.stops.add_signal("SIGUSR1", BATCH_STEP)
    until(lambda: stage.journalled(ev.Note), "the note of it")
    step = stage.ranks[0].step
    until(lambda: stage.ranks[0].step > step + 3, "training to go on")
    assert stage.journalled(ev.NoticeSeen) == []
    stage.notice(0, "SIGTERM")
    facts = stage.end()
    assert facts.rank_signals == ("SIGTERM",) and facts.batch_signals == ()
    assert all((RequestKind.STOP, stage.ranks[0].step) in rank.acted for rank in stage.ranks)


@pytest.mark.usefixtures("near_the_end")
def test_the_same_signal_at_a_preemption_stops_everybody(stage: Stage) -> None:
    stage.start()
    stage.preempt()
    stage.notice(1, "SIGUSR1")
    assert stage.cause() is Cause.PREEMPTED
    assert [(e.what, e.source) for e in stage.journalled(ev.NoticeSeen)] == [("SIGUSR1", "rank 1")]


def test_a_warning_that_slurm_does_not_explain_in_time_is_a_stop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warning_module, "_EARLY", timedelta(hours=24))
    stage.start()
    stage.slurm.open.clear()
    stage.notice(0, "SIGUSR2")
    until(lambda: stage.journalled(ev.NoticeSeen), "the notice")
    stage.slurm.open.set()
    assert stage.end().rank_signals == ("SIGUSR2",)


def test_signals_on_every_rank_are_one_stop(stage: Stage) -> None:
    stage.start().preempt()
    for rank in (0, 1, 1, 0):
        stage.notice(rank)
    stage.end()
    assert [rank.acted.count((RequestKind.STOP, rank.step)) for rank in stage.ranks] == [1, 1]
    assert len(stage.journalled(ev.StopAgreed)) == 1


def test_a_rank_in_a_step_that_does_not_end_is_waited_for_until_the_deadline_only(
    stage: Stage,
) -> None:
    stage.script = lambda rank: (
        rank.train() if rank.number else (rank.pass_by(Position(0)), rank.stay.wait(WITHIN_S))
    )
    stage.start().preempt(grace=20)
    asked = stage.clock()
    stage.notice(rank=1)
    facts = stage.end()
    assert facts.deadline_passed
    assert facts.stopped_at is None
    # The clock runs fast: a busy machine adds seconds of it, but never the step that does not end.
    assert 10 < stage.clock() - asked < 60
    assert stage.launcher is not None
    assert stage.launcher.status is None  # whoever comes next ends it, after the requeue
    assert stage.cause() is Cause.PREEMPTED


def test_one_rank_that_has_stopped_does_not_hide_another_that_has_not(stage: Stage) -> None:
    """Rank 0 is stuck in its on_stop hook; the deadline holds all the same."""

    def script(rank: Rank) -> None:
        rank.train(stop=rank.number == 1)
        if rank.number == 0:
            rank.stay.wait(WITHIN_S)

    stage.script = script
    stage.start().preempt(grace=20)
    stage.notice()
    facts = stage.end()
    assert facts.deadline_passed
    assert facts.stopped_at is not None


def test_a_stop_whose_end_nobody_knows_ends_after_a_while(stage: Stage) -> None:
    stage.slurm.answer = SlurmUnreachableError(("scontrol",), 1, "no controller")
    stage.timing = replace(stage.timing, stop_within=timedelta(seconds=8))
    stage.script = lambda rank: (rank.pass_by(Position(0)), rank.stay.wait(WITHIN_S))
    stage.start()
    stage.notice()
    facts = stage.end()
    assert facts.deadline_passed
    assert stage.cause() is Cause.PREEMPTED  # a guess: nothing contradicts it


def test_a_job_that_slurm_ends_already_has_the_time_until_the_kill(stage: Stage) -> None:
    """A preemption without grace: the record names an end far away, of the next start."""
    stage.timing = replace(stage.timing, kill_wait=timedelta(seconds=30))
    stage.script = lambda rank: rank.train(stop=False)
    stage.start()
    far = stage.clock.now() + timedelta(hours=3)
    stage.slurm.answer = replace(
        RUNNING, state=JobState.COMPLETING, restarts=1, preempt_time=None, end_time=far
    )
    began = stage.clock()
    stage.notice()
    facts = stage.end()
    assert facts.deadline_passed
    assert 20 < stage.clock() - began < 60


def test_an_answer_from_before_the_notice_is_not_taken_for_one_after_it(stage: Stage) -> None:
    """A question was under way when the preemption came: its answer knows nothing of it."""
    stage.slurm.open.clear()  # the first question hangs, and will say RUNNING
    stage.script = lambda rank: (rank.pass_by(Position(0)), rank.stay.wait(WITHIN_S))
    stage.start(trains=False)
    until(lambda: stage.slurm.asked == 1, "the first question")
    until(lambda: any(m.started for m in stage.hub.members().values()), "training")
    stage.notice()
    until(lambda: stage.journalled(ev.NoticeSeen), "the notice")
    stage.preempt(grace=20)
    stage.slurm.open.set()
    facts = stage.end()
    assert facts.job_at_notice is not None
    assert facts.job_at_notice.preempt_time is not None
    assert facts.deadline_passed  # of the grace time, not of the time limit


def test_a_question_that_failed_is_asked_again(stage: Stage) -> None:
    stage.script = lambda rank: (rank.pass_by(Position(0)), rank.stay.wait(WITHIN_S))
    stage.start()
    stage.slurm.answer = SlurmUnreachableError(("scontrol",), 1, "busy")
    before = stage.slurm.asked
    stage.notice()
    until(lambda: stage.slurm.asked > before, "the question that fails")
    stage.preempt(grace=20)
    facts = stage.end()
    assert facts.job_at_notice is not None
    assert facts.job_at_notice.preempt_time is not None
    assert facts.deadline_passed


def test_before_anything_was_computed_a_notice_ends_the_launch_at_once(stage: Stage) -> None:
    stage.script = lambda rank: (
        rank.member.enter("load", started=False),
        rank.stay.wait(WITHIN_S),
    )
    stage.start(trains=False)
    stage.preempt(grace=600)
    began = stage.clock()
    stage.notice(rank=1)
    facts = stage.end()
    assert stage.clock() - began < 500  # the grace time was 600
    assert (facts.stopped_at, facts.lost) == (None, ())
    assert [rank.aborted for rank in stage.ranks] == ["the launch is over"] * 2
    assert stage.cause() is Cause.PREEMPTED


def test_the_end_of_the_time_limit_asks_for_the_last_save(stage: Stage) -> None:
    stage.slurm.answer = replace(RUNNING, end_time=BEGAN + timedelta(seconds=75))
    stage.start()
    facts = stage.end()
    assert facts.due_time_limit
    assert not facts.deadline_passed
    assert facts.stopped_at is not None
    assert stage.clock.now() - BEGAN > timedelta(seconds=15)
    assert stage.cause() is Cause.TIME_LIMIT


def test_where_nobody_listens_in_the_batch_step_a_ranks_second_signal_is_the_jobs(
    stage: Stage,
) -> None:
    """Under submitit: somebody cancels a preempted job while its ranks save."""

    def saves(rank: Rank) -> None:
        rank.train(stop=False)
        rank.stay.wait(WITHIN_S)
        rank.leave(RankStopped(step=rank.step, checkpoint=f"step-{rank.step}"))

    stage.launcher = None
    stage.script = saves
    stage.start().preempt(grace=400)
    for number in (0, 1):
        stage.notice(rank=number)
    until(lambda: (stage.watch.latest or RUNNING).preempt_time, "the answer to the notice")
    cancelled = {"state": JobState.COMPLETING, "end_time": stage.clock.now()}
    stage.slurm.answer = replace(stage.slurm.answer, **cancelled)
    before = stage.slurm.asked
    stage.notice(rank=0)
    until(lambda: stage.slurm.asked > before and not stage.watch.asking, "the next answer")
    for rank in stage.ranks:
        rank.stay.set()
    facts = stage.end()
    assert facts.rank_signals == facts.batch_signals == ("SIGTERM",)
    assert facts.job_at_end is not None and facts.job_at_end.state is JobState.COMPLETING
    assert classify(facts, "1.1").cause is Cause.USER_CANCELLED


def test_a_conductor_beside_a_rank_judges_the_end_before_any_rank_is_told_to_leave(
    stage: Stage,
) -> None:
    """A peer that leaves may have the watchdog of a process group end this process, too."""

    def fails(rank: Rank) -> None:
        rank.fail(Cause.GPU_ERROR.value) if rank.number == 1 else rank.train()

    stage.launcher, stage.script = None, fails
    stage.start(trains=False)
    assert stage.cause() is Cause.GPU_ERROR
    assert [rank.aborted for rank in stage.ranks] == [""] * stage.world


# -- ranks that have stopped, and stay for the loss behind their checkpoint ------------------------


def staying(stage: Stage, seconds: float = 1e6, *, supervised: bool = True) -> Stage:
    """A launch whose ranks have stopped and stay, for so many seconds at most."""

    def stays(rank: Rank) -> None:
        rank.train(stop=False)
        checkpoint = f"step-{rank.step}"
        stopped = RankStopped(step=rank.step, checkpoint=checkpoint, stays_s=seconds)
        rank.member.send(stopped)
        rank.stay.wait(WITHIN_S)
        rank.leave(replace(stopped, stays_s=0.0))

    stage.script = stays
    stage.timing = replace(stage.timing, stop_within=timedelta(days=100))
    if not supervised:
        stage.launcher = None
    stage.start().preempt(grace=1e7)
    stage.notice(rank=0)
    observations = stage.conductor.stops.observations
    until(lambda: len(observations.left_ranks) == stage.world, "all to have stopped")
    return stage


def ended(stage: Stage) -> LaunchFacts:
    """The facts of a launch that was waited for no longer: it counts as any that has stopped."""
    facts = stage.end()
    deadline = time.monotonic() + WITHIN_S  # the message may arrive after the conductor's end
    while not all(rank.aborted for rank in stage.ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [rank.aborted for rank in stage.ranks] == ["the launch is over"] * stage.world
    assert facts.stopped_at is not None and facts.checkpoint == f"step-{facts.stopped_at}"
    assert (facts.lost, facts.failures, facts.deadline_passed) == ((), (), False)
    assert stage.cause() is Cause.PREEMPTED
    return facts


@pytest.mark.parametrize("supervised", [True, False])
def test_ranks_that_stay_are_waited_for(stage: Stage, supervised: bool) -> None:
    staying(stage, supervised=supervised)
    stage.ranks[0].stay.set()
    until(lambda: not stage.hub.members()[0].connected, "rank 0 to leave")
    assert stage.thread.is_alive() and not stage.conductor._observations.aborted
    stage.ranks[1].stay.set()
    assert stage.end().stopped_at is not None
    assert [rank.aborted for rank in stage.ranks] == ["", ""]


@pytest.mark.parametrize("supervised", [True, False])
def test_ranks_that_stay_for_longer_than_they_said_are_ended(
    stage: Stage, supervised: bool
) -> None:
    ended(staying(stage, 3.0, supervised=supervised))


@pytest.mark.parametrize("source", [BATCH_STEP, "rank 1"])
def test_a_second_signal_ends_ranks_that_stay_at_once(stage: Stage, source: str) -> None:
    staying(stage).conductor.stops.add_signal("SIGTERM", source)
    ended(stage)


def test_a_person_who_insists_ends_ranks_that_stay_at_once(stage: Stage) -> None:
    stops = staying(stage).conductor.stops
    for _ in range(2):
        stops.add_request("Ctrl-C")
    facts = stage.end()
    assert facts.stopped_by == "Ctrl-C" and facts.stopped_at is not None
    assert [rank.aborted for rank in stage.ranks] == ["the launch is over"] * 2


def test_a_clock_that_is_behind_does_not_lose_the_last_save(stage: Stage) -> None:
    stage.behind = timedelta(minutes=10)
    stage.slurm.answer = replace(RUNNING, end_time=BEGAN + timedelta(seconds=75))
    stage.start()
    facts = stage.end()
    assert facts.due_time_limit and not facts.deadline_passed
    assert facts.stopped_at is not None


@pytest.mark.parametrize("late", [False, True])
def test_a_clock_that_is_ahead_ends_no_run_early(stage: Stage, late: bool) -> None:
    """Also where a busy controller tells of the job, and of its time only later."""
    stage.behind = timedelta(hours=-1)
    # A lead that a busy machine does not use up.
    stage.timing = replace(stage.timing, lead=timedelta(seconds=340))
    stage.slurm.answer = replace(RUNNING, end_time=BEGAN + timedelta(seconds=400))
    if late:
        stage.slurm.tells_time.clear()
    stage.start()
    until(lambda: stage.watch.latest is not None, "the record")
    until(lambda: stage.ranks[0].step >= 3, "steps")
    stage.slurm.tells_time.set()
    facts = stage.end()
    assert facts.due_time_limit and not facts.deadline_passed
    assert facts.stopped_at is not None
    assert timedelta(seconds=60) < stage.clock.now() - BEGAN < timedelta(seconds=400)


def test_a_clock_that_is_ahead_takes_nothing_off_a_grace_time(stage: Stage) -> None:
    stage.behind = timedelta(hours=-1)
    stage.start().preempt()
    stage.notice(rank=1)
    facts = stage.end()
    assert (facts.deadline_passed, facts.lost) == (False, ())
    assert facts.stopped_at is not None


# -- files of a person ---------------------------------------------------------------------------


def test_a_starter_that_wants_it_or_is_gone_stops_the_run(stage: Stage) -> None:
    stage.start()
    stage.conductor.stops.add_request("SIGTERM")
    facts = stage.end()
    assert [rank.acted for rank in stage.ranks] == [[(RequestKind.STOP, stage.ranks[0].step)]] * 2
    assert facts.stopped_at == stage.ranks[0].step
    assert classify(facts, "1.1").cause is Cause.STOP_REQUESTED
    assert [(n.what, n.source) for n in stage.journalled(ev.NoticeSeen)] == [("SIGTERM", "starter")]


def test_a_stop_file_stops_the_run(stage: Stage) -> None:
    stage.start()
    stage.run.stop_file.touch()
    assert stage.cause() is Cause.STOP_REQUESTED
    assert stage.end().stopped_at is not None


def test_a_save_file_is_one_save_on_all_ranks_at_one_step(stage: Stage) -> None:
    stage.start()
    stage.run.save_file.touch()
    until(lambda: all(rank.acted for rank in stage.ranks), "the save")
    assert not stage.run.save_file.exists()
    assert [rank.acted for rank in stage.ranks] == [stage.ranks[0].acted] * 2
    assert [kind for kind, _ in stage.ranks[0].acted] == [RequestKind.SAVE]
    assert [seen.what for seen in stage.journalled(ev.NoticeSeen)] == ["SAVE"]
    stage.notice()
    stage.end()


def test_a_save_file_waits_for_the_training_to_begin(stage: Stage) -> None:
    go = threading.Event()
    stage.script = lambda rank: (go.wait(WITHIN_S), rank.train())
    stage.run.save_file.touch()
    stage.start(trains=False)
    until(lambda: stage.clock() > 1005, "a few looks")
    assert stage.run.save_file.exists()
    go.set()
    until(lambda: all(rank.acted for rank in stage.ranks), "the save")
    stage.notice()
    stage.end()


def test_saves_come_at_their_interval_and_never_pile_up(stage: Stage) -> None:
    """Rank 0 evaluates alone for a long time: one save waits for the end of that, not five."""
    stage.timing = replace(stage.timing, save_every=timedelta(seconds=6))
    evaluating, go_on = threading.Event(), threading.Event()

    def script(rank: Rank) -> None:
        if rank.train(3, stop=False):
            return
        rank.pass_by(Position(3))
        if rank.number == 0:
            rank.member.enter("eval")
            rank.member.advance(Position(3, 1), entering=True)
            evaluating.set()
            go_on.wait(WITHIN_S)
        stage.barrier.wait(WITHIN_S)
        rank.step = 4
        rank.train()

    stage.script = script
    stage.start(trains=False)
    assert evaluating.wait(WITHIN_S)
    began = stage.clock()
    until(lambda: stage.clock() > began + 30, "four intervals")
    go_on.set()
    until(lambda: all(len(rank.acted) > 1 for rank in stage.ranks), "saves")
    stage.notice()
    stage.end()
    at_four = [kind for kind, step in stage.ranks[0].acted if step == 4]
    assert at_four.count(RequestKind.SAVE) == 1, stage.ranks[0].acted
    assert stage.ranks[0].acted == stage.ranks[1].acted


def test_ranks_are_told_how_long_they_have_and_told_again_when_it_changes(stage: Stage) -> None:
    told: dict[int, list[float]] = {0: [], 1: []}

    def script(rank: Rank) -> None:
        rank.pass_by(Position(0))
        while not rank.stay.wait(0.01):
            left = rank.member.seconds_left
            known = told[rank.number]
            if left is not None and (not known or abs(left - known[-1]) > 60):
                known.append(left)

    stage.script = script
    stage.slurm.answer = SlurmUnreachableError(("scontrol",), 1, "busy")
    stage.start(trains=False)
    until(lambda: any(m.started for m in stage.hub.members().values()), "training")
    assert [rank.member.seconds_left for rank in stage.ranks] == [None, None]
    stage.notice()
    until(lambda: all(told.values()), "the ten minutes that a stop has if nobody says more")
    assert all(500 < each[0] <= 600 for each in told.values()), told
    stage.preempt(grace=20)
    until(lambda: all(len(each) > 1 for each in told.values()), "the grace time")
    assert all(each[-1] < 20 for each in told.values()), told
    stage.end()


def test_saves_that_come_to_nothing_again_and_again_end_the_launch(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace_module, "_TRY_AGAIN_S", 0.05)

    def script(rank: Rank) -> None:
        rank.train(1, stop=False)
        if rank.number == 0:
            # Many more than count: those that fail before they were to be tried again do not.
            while not rank.stay.wait(0.01):
                rank.member.send(SaveFailed(step=1, reason="no room"))
        rank.stay.wait(WITHIN_S)

    stage.script = script
    stage.start(trains=False)
    stage.end()
    assert stage.cause() is Cause.STORAGE
    assert "8 saves in a row" in str(stage.facts)


# -- failing -------------------------------------------------------------------------------------


def test_a_rank_that_fails_ends_the_launch_with_its_last_words(stage: Stage) -> None:
    def script(rank: Rank) -> None:
        rank.train(5)
        if rank.number == 1:
            rank.fail("cuda_oom", "out of memory", micro_batch=8)
        rank.stay.wait(WITHIN_S)

    stage.script = script
    stage.start(trains=False)
    facts = stage.end()
    (failure,) = facts.failures
    assert (failure.rank, failure.host, failure.cause) == (1, "n1", Cause.CUDA_OOM)
    assert (failure.step, failure.micro_batch, failure.after_loss) == (5, 8, False)
    assert facts.lost == ()
    assert facts.exit_status == 1
    assert stage.ranks[0].aborted == "the launch is over"


def test_a_rank_that_goes_without_a_word_is_named_and_nobody_else(stage: Stage) -> None:
    def script(rank: Rank) -> None:
        rank.train(5)
        if rank.number == 1:
            rank.die()
        else:
            rank.stay.wait(WITHIN_S)

    stage.script = script
    stage.start(trains=False)
    facts = stage.end()
    assert [(lost.rank, lost.host) for lost in facts.lost] == [(1, "n1")]
    assert stage.cause() is Cause.CRASH


def test_what_follows_from_a_lost_rank_is_marked_so(stage: Stage) -> None:
    def script(rank: Rank) -> None:
        rank.train(5)
        if rank.number == 1:
            rank.die()
            return
        until(lambda: not stage.hub.members()[1].connected, "rank 1 is gone")
        rank.fail("storage", "the save could not be finished")

    stage.script = script
    stage.start(trains=False)
    facts = stage.end()
    assert [failure.after_loss for failure in facts.failures] == [True]
    assert classify(facts, "i").hosts == ("n1",)
    assert stage.cause() is Cause.CRASH


def test_a_cause_that_nobody_knows_does_not_end_the_conductor(stage: Stage) -> None:
    stage.script = lambda rank: rank.fail("teleported") if rank.number else rank.stay.wait(WITHIN_S)
    stage.start(trains=False)
    assert [failure.cause for failure in stage.end().failures] == [Cause.UNKNOWN]


def test_ranks_that_give_up_together_are_one_failure(stage: Stage) -> None:
    def script(rank: Rank) -> None:
        rank.train(5)
        rank.leave(RecoveryNeeded(cause="non_finite", step=5, text="3 steps in a row"))

    stage.script = script
    stage.start(trains=False)
    facts = stage.end()
    assert [failure.cause for failure in facts.failures] == [Cause.NON_FINITE]
    assert facts.exit_status == 0


def test_signals_while_the_launch_is_being_ended_mean_nothing(stage: Stage) -> None:
    """srun ends the others with SIGTERM when one has failed."""
    heard = threading.Event()

    def script(rank: Rank) -> None:
        rank.train(5)
        if rank.number == 1:
            rank.fail("app_error")
            heard.set()
            return
        heard.wait(WITHIN_S)
        until(lambda: not stage.hub.members()[1].connected, "rank 1 is gone")
        rank.member.send(Notice(what="SIGTERM"))
        rank.stay.wait(WITHIN_S)

    stage.script = script
    stage.start(trains=False)
    assert stage.end().rank_signals == ()
    assert stage.cause() is Cause.APP_ERROR


def test_ranks_that_do_not_leave_are_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_module, "_LEAVE_S", 5.0)
    stage.stubborn = True
    stage.script = lambda rank: rank.fail("app_error") if rank.number else rank.stay.wait(WITHIN_S)
    stage.start(trains=False)
    facts = stage.end()
    assert stage.launcher is not None
    assert stage.launcher.killed >= 1
    assert facts.lost == ()
    assert stage.cause() is Cause.APP_ERROR


def test_a_launcher_that_no_kill_ends_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending_module, "_GIVE_UP_S", 8.0)
    stage.stubborn = True
    assert stage.launcher is not None
    stage.launcher.deaf = True
    stage.script = lambda rank: rank.fail("app_error") if rank.number else rank.stay.wait(WITHIN_S)
    stage.start(trains=False)
    assert stage.end().exit_status is None


def test_a_launcher_that_never_hears_of_the_end_of_its_ranks_is_ended(stage: Stage) -> None:
    """Their step daemon was killed: srun would wait for ever, and the run with it."""
    assert stage.launcher is not None
    stage.launcher.waits_for_ever = True

    def script(rank: Rank) -> None:
        rank.train(9)
        rank.leave(RankFinished(step=9))

    stage.script = script
    stage.start(trains=False)
    facts = stage.end()
    assert facts.finished
    assert stage.launcher.killed


def test_ranks_that_never_come_are_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_module, "_JOIN_S", 2.0)
    stage.absent = (1,)
    stage.script = lambda rank: rank.stay.wait(WITHIN_S)
    stage.start(trains=False)
    facts = stage.end()
    assert facts.absent == (1,)
    incident = classify(facts, "1.1")
    assert incident.cause is Cause.HANG
    assert "1 never joined (1)" in incident.evidence[0].text


def test_a_launcher_that_ends_before_any_rank_came_is_told_with_its_words(stage: Stage) -> None:
    assert stage.launcher is not None
    stage.launcher.text = "srun: error: Unable to create step"
    stage.launcher.status = 1
    stage.start(join=False, trains=False)
    facts = stage.end()
    assert (facts.exit_status, facts.step) == (1, None)
    assert "Unable to create step" in facts.launcher_text


# -- finishing -----------------------------------------------------------------------------------


def test_a_run_that_reached_its_end_is_finished(stage: Stage) -> None:
    def script(rank: Rank) -> None:
        rank.train(9)
        rank.leave(RankFinished(step=9))

    stage.script = script
    stage.start(trains=False)
    facts = stage.end()
    assert (facts.finished, facts.step, facts.lost) == (True, 9, ())


def test_a_notice_at_the_very_end_does_not_ask_for_what_the_finished_can_not_do(
    stage: Stage,
) -> None:
    """Rank 1 is through and gone; rank 0 writes its results, and would wait for it in vain."""

    def script(rank: Rank) -> None:
        rank.train(9)
        if rank.number == 1:
            rank.leave(RankFinished(step=9))
            return
        until(lambda: stage.journalled(ev.NoticeSeen), "the notice")
        rank.pass_by(Position(9, 1, LAST))
        rank.leave(RankFinished(step=9))

    stage.script = script
    stage.start(trains=False)
    until(lambda: 1 in stage.conductor.stops.observations.finished, "rank 1 has finished")
    stage.preempt()
    stage.notice()
    facts = stage.end()
    assert (facts.finished, facts.deadline_passed) == (True, False)
    assert stage.ranks[0].acted == []


def test_a_run_whose_rank_0_fails_after_the_last_step_is_not(stage: Stage) -> None:
    """The others had nothing left to do and said that they were through."""

    def script(rank: Rank) -> None:
        rank.train(9)
        if rank.number == 1:
            rank.leave(RankFinished(step=9))
        else:
            until(lambda: not stage.hub.members()[1].connected, "rank 1 has finished")
            rank.fail("app_error", "writing the result failed")

    stage.script = script
    stage.start(trains=False)
    assert not stage.end().finished
    assert stage.cause() is Cause.APP_ERROR


def test_rank_0_alone_waits_for_the_others_to_say_goodbye(stage: Stage) -> None:
    """Without a launcher (rank 0 conducts) the first goodbye is not the end of all."""
    stage.launcher = None
    last = threading.Event()

    def script(rank: Rank) -> None:
        rank.train(9)
        if rank.number == 0:
            rank.member.send(RankFinished(step=9))
            rank.stay.wait(WITHIN_S)
        else:
            last.wait(WITHIN_S)
            rank.fail("app_error", "too early to be glad")

    stage.script = script
    stage.start(trains=False)
    until(lambda: 0 in stage.conductor.stops.observations.finished, "rank 0 has finished")
    began = stage.clock()
    until(lambda: stage.clock() > began + 10 or stage.facts, "several looks")
    last.set()
    facts = stage.end()
    assert not facts.finished
    assert [failure.rank for failure in facts.failures] == [1]


def test_rank_0_alone_is_over_once_all_have_stopped(stage: Stage) -> None:
    stage.launcher = None
    stage.start().preempt()
    stage.notice()
    facts = stage.end()
    assert facts.stopped_at is not None
    assert not facts.deadline_passed


# -- the journal and Slurm misbehave -------------------------------------------------------------


def test_a_full_disk_does_not_end_the_launch_it_is_about(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: AppendFile, line: bytes, sync: bool = False) -> None:
        raise OSError(errno.ENOSPC, "full")

    stage.start().preempt()
    monkeypatch.setattr(AppendFile, "append", full)
    stage.notice()
    assert stage.end().stopped_at is not None


@pytest.mark.parametrize("answer", [None, RuntimeError("unreadable"), ValueError("no date")])
def test_whatever_slurm_says_the_launch_goes_on(stage: Stage, answer: Exception | None) -> None:
    stage.slurm.answer = answer
    stage.script = lambda rank: (rank.train(50), rank.leave(RankFinished(step=50)))
    stage.start(trains=False)
    assert stage.end().finished


def test_a_rank_that_returns_while_another_goes_on_ends_the_launch_at_once(stage: Stage) -> None:
    """Their last words: the one waits at the end, the other in a collective of its next step."""

    def script(rank: Rank) -> None:
        rank.train(5, stop=False)
        if rank.number == 0:
            rank.member.send(FunctionReturned(step=5))
        else:
            rank.member.begin(6)
        rank.stay.wait(WITHIN_S)

    stage.script = script
    stage.start(trains=False)
    (failure,) = stage.end().failures
    assert (failure.rank, failure.cause, failure.step) == (0, Cause.APP_ERROR, 5)
    assert "rank 0 returned after step 5, that of rank 1 continued" in failure.text


def test_ranks_that_return_one_after_the_other_are_waited_for(stage: Stage) -> None:
    together = threading.Barrier(2)

    def script(rank: Rank) -> None:
        rank.member.begin(5)
        rank.train(5, stop=False)
        if rank.number == 1:  # it writes a report first
            until(lambda: stage.clock() > 1000.0 + 2 * SPEED, "two seconds of the wall's")
        rank.member.send(FunctionReturned(step=5))
        together.wait(WITHIN_S)
        rank.leave(RankFinished(step=5))

    stage.script = script
    stage.start(trains=False)
    assert stage.end().finished


# -- probes --------------------------------------------------------------------------------------


def test_probes_go_round_and_the_first_is_written_down(stage: Stage) -> None:
    stage.timing = replace(stage.timing, probe_every=timedelta(seconds=5))
    stage.start()
    until(lambda: all(len(rank.acted) > 3 for rank in stage.ranks), "several probes")
    stage.notice()
    stage.end()
    assert [probe.ok for probe in stage.journalled(ev.ProbeMeasured)] == [True]


def test_a_rank_whose_values_arrive_changed_is_named_and_the_launch_ended(stage: Stage) -> None:
    stage.timing = replace(stage.timing, probe_every=timedelta(seconds=2))
    stage.wrong = (1,)
    stage.start()
    facts = stage.end()
    assert facts.probe is not None
    assert (facts.probe.ranks, facts.probe.hosts) == ((1,), ("n1",))
    assert stage.cause() is Cause.NCCL_ERROR
    (failed,) = [probe for probe in stage.journalled(ev.ProbeMeasured) if not probe.ok]
    assert (failed.late_ranks, failed.wrong) == ((1,), True)
    assert failed.evidence


@given(
    returned=st.dictionaries(st.integers(0, 4), st.integers(0, 3), max_size=5),
    begun=st.lists(st.integers(0, 4), min_size=5, max_size=5),
)
def test_who_has_parted_is_found_as_if_all_were_compared_with_all(
    returned: dict[int, int], begun: list[int]
) -> None:
    members = {
        rank: MemberView(rank=rank, host="n", pid=1, last_message_at=0.0, begun=step)
        for rank, step in enumerate(begun)
    }
    parted = {
        (rank, other)
        for rank, step in returned.items()
        for other in members
        if other != rank and max(begun[other], returned.get(other, 0)) > step
    }
    found = Observations(returned_at=returned).diverged_ranks(members)
    assert found in parted if parted else found is None
