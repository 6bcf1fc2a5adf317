from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal import RunStatus, fold
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import NO_LAUNCH, Record
from slurm_forge.journal.fold import advance, in_order, without_fenced
from slurm_forge.journal.order import causal_order
from slurm_forge.journal.state import RunState
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.job_change import JobChange
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust


@dataclass
class Story:
    """Tells a run event by event, one second apart."""

    now: float = 1000.0
    attempt: int = 0
    launch: int = 0
    records: list[Record] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)

    def tell(self, event: ev.Event, writer: str = "supervisor") -> Story:
        name = f"{self.attempt}-{writer}"
        number = self.sequences.get(name, 0)
        self.sequences[name] = number + 1
        self.now += 1.0
        record = Record(
            attempt=self.attempt,
            launch=self.launch,
            sequence=number,
            time=self.now,
            writer=f"{writer}-{self.attempt:08x}",
            event=event,
        )
        self.records.append(record)
        return self

    def submitted(self, job: str = "42") -> Story:
        return self.tell(ev.Submitted(job=job, via="sbatch"), "cli")

    def start(self, job: str = "42") -> Story:
        self.attempt, self.launch = self.attempt + 1, 0
        self.tell(
            ev.AttemptStarted(job=job, restart_count=0, nodes=("n1",), host="n1", via="sbatch")
        )
        self.launch = 1
        return self.tell(ev.LaunchStarted(world_size=2))

    def progress(self, step: int) -> Story:
        return self.tell(ev.Progress(step=step), "rank0")

    def name(self, step: int) -> str:
        """That of the checkpoint which this launch writes at that step."""
        return f"step-{step:08d}.a{self.attempt}.l{self.launch}-0000abcd"

    def commit(self, step: int) -> Story:
        committed = ev.CheckpointCommitted(
            name=self.name(step), step=step, reason="", seconds=1.0, size=1
        )
        return self.tell(committed, "rank0")

    def incident(self, cause: Cause, step: int | None = None, ident: str = "") -> Story:
        incident = Incident(
            id=ident or f"{self.attempt}.{self.launch}",
            cause=cause,
            confidence=Confidence.LIKELY,
            step=step,
        )
        return self.tell(ev.IncidentSeen(incident=incident), "rank0")

    def decide(
        self,
        action: Action,
        *,
        cause: Cause = Cause.CRASH,
        rung: int | None = 0,
        plan: RecoveryPlan | None = None,
        ident: str = "",
    ) -> Story:
        decision = Decision(
            incident_id=ident or f"{self.attempt}.{self.launch}",
            cause=cause,
            action=action,
            reason=f"because of {cause.value}",
            plan=plan or RecoveryPlan(),
            rung=rung,
        )
        return self.tell(ev.DecisionTaken(decision=decision), "rank0")

    def intend(self) -> Story:
        return self.tell(ev.RequeueIntended(job="42", method="scontrol requeue", reason="x"))

    def requeued(self, successor: str | None = None) -> Story:
        return self.tell(ev.RequeueDone(job="42", method="x", successor=successor))

    def state(self) -> RunState:
        return fold(self.records)


STATUSES: list[tuple[RunStatus, Callable[[Story], Story]]] = [
    (RunStatus.NEW, lambda s: s),
    (RunStatus.SUBMITTED, lambda s: s.submitted()),
    (RunStatus.RUNNING, lambda s: s.submitted().start()),
    (RunStatus.RUNNING, lambda s: s.start().intend()),
    (RunStatus.REQUEUED, lambda s: s.start().decide(Action.REQUEUE).intend().requeued()),
    (RunStatus.REQUEUED, lambda s: s.start().tell(ev.AttemptEnded(outcome="requeued"))),
    (RunStatus.RUNNING, lambda s: s.start().requeued().start()),
    (RunStatus.HELD, lambda s: s.start().decide(Action.HOLD, rung=None)),
    (RunStatus.HELD, lambda s: s.start().decide(Action.RAISE)),
    (
        RunStatus.HELD,
        lambda s: s.start().decide(Action.HOLD, rung=None).tell(ev.AttemptEnded(outcome="hold")),
    ),
    (RunStatus.SUBMITTED, lambda s: s.start().decide(Action.HOLD, rung=None).submitted("43")),
    (
        RunStatus.STOPPED,
        lambda s: s.start().decide(Action.STOP, cause=Cause.STOP_REQUESTED, rung=None),
    ),
    (
        RunStatus.CANCELLED,
        lambda s: s.start().decide(Action.STOP, cause=Cause.USER_CANCELLED, rung=None),
    ),
    (RunStatus.FINISHED, lambda s: s.start().tell(ev.Finished(step=9))),
    (
        RunStatus.FINISHED,
        lambda s: s.start().tell(ev.Finished(step=9)).tell(ev.AttemptEnded(outcome="finished")),
    ),
    (RunStatus.RUNNING, lambda s: s.start().decide(Action.RELAUNCH)),
]


@pytest.mark.parametrize("number", range(len(STATUSES)))
def test_the_status_is_what_happened_last(number: int) -> None:
    status, told = STATUSES[number]
    assert told(Story()).state().status is status


def test_a_person_who_submits_again_after_a_hold_is_heard() -> None:
    """The command line writes beside the newest attempt, after everything in it."""
    story = Story().start().decide(Action.HOLD, rung=None).tell(ev.AttemptEnded(outcome="hold"))
    story.launch = 1 << 30
    state = story.submitted("43").state()
    assert (state.status, state.reason, state.job) == (RunStatus.SUBMITTED, "", "43")


def test_a_job_that_is_over_before_sbatch_has_answered_stays_over() -> None:
    story = Story().start().tell(ev.Finished(step=9)).tell(ev.AttemptEnded(outcome="finished"))
    story.launch = 1 << 30
    assert story.submitted("42").state().status is RunStatus.FINISHED


def test_asking_for_a_held_run_to_go_on_is_heard_before_slurm_has_answered() -> None:
    story = Story().start().decide(Action.HOLD, rung=None)
    story.launch = 1 << 30
    asked = ev.UserAsked(verb="requeue", user="somebody")
    assert story.tell(asked, "cli").state().status is RunStatus.SUBMITTED


def test_the_successor_is_the_job_from_then_on() -> None:
    assert Story().start().intend().requeued("77").state().job == "77"


def test_an_intent_stays_open_until_it_is_done_or_overtaken() -> None:
    story = Story().start().intend()
    failed = ev.RequeueFailed(job="42", method="scontrol requeue", reason="no answer")
    assert story.tell(failed).state().open_intent is not None
    assert replace(story).start().state().open_intent is None
    assert Story().start().intend().requeued().state().open_intent is None
    finished = Story().start().intend().tell(ev.Finished(step=3))
    assert finished.state().open_intent is None


def test_what_was_left_open_is_settled_by_a_person_and_not_by_a_late_answer() -> None:
    story = Story().start().intend().tell(ev.AttemptEnded(outcome="open"))
    story.launch = 1 << 30
    late = story.submitted("42").state()  # of the start that has left it open
    assert late.open_intent is not None and late.status is RunStatus.REQUEUED
    again = story.submitted("999").state()
    assert (again.status, again.open_intent, again.job) == (RunStatus.SUBMITTED, None, "999")
    asked = Story().start().intend().tell(ev.UserAsked(verb="requeue", user="x"), "cli").state()
    assert (asked.status, asked.open_intent) == (RunStatus.SUBMITTED, None)


def test_nothing_runs_once_the_attempt_has_ended() -> None:
    story = Story().start().progress(5).intend()
    assert story.state().status is RunStatus.RUNNING
    state = story.tell(ev.AttemptEnded(outcome="open")).state()
    assert state.status is RunStatus.REQUEUED and state.open_intent is not None
    (launch,) = state.attempts[0].launches
    assert launch.ended == story.now


def test_a_job_that_is_found_cancelled_while_it_is_brought_back_stays_cancelled() -> None:
    story = Story().submitted().start()
    story.tell(ev.RequeueIntended(job="42", method="scontrol requeue", reason="crash: requeue"))
    story.tell(ev.RequeueFailed(job="42", method="scontrol requeue", reason="it was cancelled"))
    state = fold(story.tell(ev.AttemptEnded(outcome="cancelled")).records)
    assert (state.status, state.open_intent) == (RunStatus.CANCELLED, None)


def test_only_a_refused_hold_means_that_nothing_is_held() -> None:
    held = ev.Held(job="42", restart_count=0, reason="x")
    story = Story().start().decide(Action.HOLD, rung=None).tell(held)
    sure = story.tell(replace(held, confirmed=True)).state().held
    assert sure is not None and sure.confirmed
    update = ev.RequeueFailed(job="42", method="scontrol update", reason="x")
    assert story.tell(update).state().held is not None
    refused = ev.RequeueFailed(job="42", method="scontrol requeuehold", reason="x")
    assert story.tell(refused).state().held is None


def test_an_attempt_remembers_what_it_went_through() -> None:
    story = Story().start().progress(5).commit(5)
    story.tell(ev.NoticeSeen(what="SIGTERM", source="rank 1"))
    story.tell(ev.StepSkipped(step=6, first_sample=0, samples=8, consecutive=1), "rank0")
    story.tell(ev.ProbeMeasured(ok=True, step=6, latency_s=0.1, count=30))
    story.incident(Cause.PREEMPTED, 7).decide(Action.REQUEUE, cause=Cause.PREEMPTED)
    story.tell(ev.LaunchEnded(outcome="preempted", step=7))
    story.requeued().tell(ev.AttemptEnded(outcome="requeued"))
    (attempt,) = story.state().attempts
    assert (attempt.number, attempt.job, attempt.outcome) == (1, "42", "requeued")
    assert [len(part) for part in (attempt.checkpoints, attempt.notices, attempt.skipped)] == [
        1
    ] * 3
    assert [len(part) for part in (attempt.incidents, attempt.decisions, attempt.requeues)] == [
        1
    ] * 3
    assert attempt.probes == 30
    (launch,) = attempt.launches
    assert (launch.world_size, launch.step, launch.outcome) == (2, 7, "preempted")


def test_progress_is_the_furthest_step_ever_seen() -> None:
    story = Story().start().progress(100)
    story.incident(Cause.CRASH, 104)
    assert story.state().high_water == 104
    story.start().progress(50)
    assert (story.state().high_water, story.state().committed_step) == (104, None)
    assert story.commit(60).state().committed_step == 60


# -- budgets -------------------------------------------------------------------------------------


def test_a_budget_is_charged_per_cause_and_rung() -> None:
    story = Story().start()
    for number, (cause, rung) in enumerate(
        [(Cause.CRASH, 0), (Cause.CRASH, 0), (Cause.CRASH, 1), (Cause.HANG, 0)]
    ):
        story.decide(Action.RELAUNCH, cause=cause, rung=rung, ident=f"i{number}")
    state = story.state()
    uses = [(Cause.CRASH, 0), (Cause.CRASH, 1), (Cause.HANG, 0), (Cause.HANG, 1)]
    assert [state.times(cause, rung) for cause, rung in uses] == [2, 1, 1, 0]


def test_a_commit_that_will_not_be_resumed_from_frees_no_budget() -> None:
    story = Story().start().progress(100)
    story.decide(Action.RELAUNCH, cause=Cause.CRASH, rung=0)
    suspect = ev.CheckpointCommitted(
        name=story.name(150), step=150, reason="", seconds=1, size=1, findings=("NaN",)
    )
    assert story.tell(suspect, "rank0").state().times(Cause.CRASH, 0) == 1
    assert story.commit(151).state().times(Cause.CRASH, 0) == 0


def test_only_a_commit_past_the_old_high_water_step_frees_a_budget() -> None:
    story = Story().start().progress(100).decide(Action.RELAUNCH)
    for step in (50, 99, 100):
        assert story.commit(step).state().times(Cause.CRASH, 0) == 1, step
    assert story.progress(150).state().times(Cause.CRASH, 0) == 1
    assert story.commit(101).state().times(Cause.CRASH, 0) == 0


def test_the_step_of_the_incident_counts_as_reached() -> None:
    """Heartbeats lag: what failed at step 104 was last heard of at 100."""
    story = Story().start().progress(100).incident(Cause.NON_FINITE, 104)
    story.decide(Action.ROLLBACK, cause=Cause.NON_FINITE).commit(103)
    assert story.state().times(Cause.NON_FINITE, 0) == 1


def test_a_second_charge_moves_the_mark() -> None:
    story = Story().start().progress(100).decide(Action.RELAUNCH, ident="a")
    story.progress(200).decide(Action.RELAUNCH, ident="b").commit(150)
    assert story.state().times(Cause.CRASH, 0) == 2
    assert story.commit(201).state().times(Cause.CRASH, 0) == 0


@pytest.mark.parametrize("cause", [Cause.NON_FINITE, Cause.LOSS_SPIKE])
def test_after_an_instability_only_a_good_checkpoint_past_it_frees_the_budget(cause: Cause) -> None:
    """Training may get one step further each time, and never get over it."""
    story = Story().start().progress(100).decide(Action.ROLLBACK, cause=cause)
    assert story.commit(101).state().times(cause, 0) == 1
    older, newer = story.name(100), story.name(101)
    for name, left in ((older, 1), (newer, 0)):
        story.tell(ev.CheckpointJudged(name=name, trust=Trust.GOOD, reason=""), "rank0")
        assert story.state().times(cause, 0) == left


def test_what_a_hook_decided_beside_the_ladder_is_charged_too() -> None:
    story = Story().start().progress(100)
    for number in range(3):
        story.decide(Action.WARN, cause=Cause.LOSS_SPIKE, rung=None, ident=f"h{number}")
    assert story.state().times(Cause.LOSS_SPIKE, None) == 3
    assert story.state().times(Cause.LOSS_SPIKE, 0) == 0


def test_where_the_last_rollback_led_to_is_remembered_until_training_is_past_it() -> None:
    story = Story().start().commit(50).incident(Cause.NON_FINITE, 100, "i")
    target = story.name(50)
    story.tell(
        ev.DecisionTaken(
            decision=Decision(
                incident_id="i",
                cause=Cause.NON_FINITE,
                action=Action.ROLLBACK,
                reason="",
                plan=RecoveryPlan(),
                rung=1,
                target=target,
            )
        ),
        "rank0",
    )
    rollback = story.state().rollback
    assert rollback is not None
    assert (rollback.place, str(rollback.target)) == (100, target)
    story.commit(101)
    assert story.state().rollback == rollback
    story.tell(ev.CheckpointJudged(name=story.name(101), trust=Trust.GOOD, reason=""), "rank0")
    assert story.state().rollback is None


def test_what_was_decided_is_found_by_the_incident() -> None:
    story = Story().start().decide(Action.RELAUNCH, ident="a").decide(Action.REQUEUE, ident="b")
    story.decide(Action.HOLD, ident="a")
    state = story.state()
    found = [state.decided_on(ident) for ident in ("a", "b", "c")]
    assert [each and each.action for each in found] == [Action.RELAUNCH, Action.REQUEUE, None]


def test_a_state_can_be_carried_on_record_by_record() -> None:
    state = RunState()
    for record in in_order(long_story()):
        state = advance(state, record)
    assert state == fold(long_story())


def test_a_decision_that_is_read_twice_is_applied_once() -> None:
    plan = RecoveryPlan(lr_factor=0.5)
    story = Story().start().decide(Action.ROLLBACK, plan=plan, ident="same")
    story.decide(Action.ROLLBACK, plan=RecoveryPlan(lr_factor=0.25), ident="same")
    state = story.state()
    assert state.plan.lr_factor == 0.5
    assert state.times(Cause.CRASH, 0) == 1


def test_the_plan_in_force_is_the_last_ones() -> None:
    story = Story().start().decide(Action.ROLLBACK, plan=RecoveryPlan(lr_factor=0.5), ident="a")
    story.start().decide(Action.RELAUNCH, plan=RecoveryPlan(micro_batch=4), ident="b")
    assert story.state().plan == RecoveryPlan(micro_batch=4)


# -- order and fences ----------------------------------------------------------------------------


def long_story() -> list[Record]:
    story = Story().submitted().start().progress(10).commit(10)
    story.incident(Cause.CRASH, 12).decide(Action.RELAUNCH)
    story.launch = 2
    story.tell(ev.LaunchStarted(world_size=2)).progress(20).commit(20)
    story.incident(Cause.PREEMPTED, 21).decide(Action.REQUEUE, cause=Cause.PREEMPTED)
    story.intend().requeued().tell(ev.AttemptEnded(outcome="requeued"))
    story.start().progress(30).incident(Cause.CUDA_OOM, 31)
    story.decide(Action.SHRINK_MICRO_BATCH, cause=Cause.CUDA_OOM, plan=RecoveryPlan(micro_batch=4))
    story.start().commit(40).tell(ev.Finished(step=41))
    return story.records


@given(seed=st.integers(0, 2**32), kept=st.integers(1, 40))
def test_the_order_of_the_files_makes_no_difference(seed: int, kept: int) -> None:
    told = long_story()[:kept]
    shuffled = list(told)
    random.Random(seed).shuffle(shuffled)
    assert fold(shuffled) == fold(told)


@given(
    order=st.permutations(range(12)),
    times=st.lists(st.floats(0, 100), min_size=12, max_size=12),
    places=st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 2), st.sampled_from(["rank0", "supervisor"])),
        min_size=12,
        max_size=12,
    ),
)
def test_any_records_in_any_order_fold_to_the_same_state(
    order: list[int], times: list[float], places: list[tuple[int, int, str]]
) -> None:
    events: list[ev.Event] = [
        ev.Progress(step=3),
        ev.CheckpointCommitted(name="c", step=4, reason="", seconds=1.0, size=1),
        ev.Finished(step=5),
        ev.AttemptStarted(job="1", restart_count=0, nodes=(), host="n1", via="x"),
        ev.Submitted(job="1", via="x"),
        ev.RequeueDone(job="1", method="x"),
    ]
    records = [
        Record(
            attempt=attempt,
            launch=launch,
            sequence=number,
            time=times[number],
            writer=f"{writer}-{attempt:08x}",
            event=events[number % len(events)],
        )
        for number, (attempt, launch, writer) in enumerate(places)
    ]
    assert fold(records[number] for number in order) == fold(records)
    ordered = in_order(records)
    for writer in {record.writer for record in records}:
        for attempt in (1, 2):
            own = [r for r in ordered if (r.writer, r.attempt) == (writer, attempt)]
            by_launch = [[r.sequence for r in own if r.launch == n] for n in (0, 1, 2)]
            assert all(numbers == sorted(numbers) for numbers in by_launch)


@st.composite
def trainings(draw: st.DrawFn) -> list[Record]:
    """Records of a few launches, mostly of progress, as different writers leave them."""
    steps = st.integers(0, 6)
    events = st.one_of(
        *[st.builds(ev.Progress, step=steps)] * 4,
        st.builds(ev.Logged, step=steps, values=st.just({"loss": 1.0})),
        st.builds(
            ev.Resumed,
            step=steps,
            checkpoint=st.none(),
            world_size=st.just(2),
            candidates=st.sampled_from([(), ("step-00000002.a1.l1-00000000",)]),
        ),
        st.builds(ev.LaunchStarted, world_size=st.just(2)),
        st.builds(ev.LaunchEnded, outcome=st.just("crash"), step=st.none() | steps),
        st.builds(ev.Advanced, step=steps, what=st.just("x")),
        st.builds(
            ev.CheckpointCommitted,
            name=steps.map(lambda step: f"step-{step:08d}.a1.l1-00000000"),
            step=steps,
            reason=st.just(""),
            seconds=st.just(1.0),
            size=st.just(1),
        ),
        st.just(ev.AttemptStarted(job="1", restart_count=0, nodes=(), host="n1", via="x")),
    )
    places = st.tuples(st.integers(1, 2), st.integers(0, 2), st.sampled_from(["rank0", "cli"]))
    told = draw(st.lists(st.tuples(places, events), max_size=30))
    return [
        Record(
            attempt=attempt,
            launch=launch,
            sequence=number,
            time=float(number),
            writer=f"{writer}-{attempt:08x}",
            event=event,
        )
        for number, ((attempt, launch, writer), event) in enumerate(told)
    ]


@given(records=trainings())
def test_progress_that_is_passed_over_would_have_changed_nothing(records: list[Record]) -> None:
    state = RunState()
    for record in causal_order(without_fenced(records)):
        state = advance(state, record)
    assert fold(records) == state


def test_a_clock_that_jumps_back_does_not_reorder_a_writer() -> None:
    records = [
        Record(attempt=1, launch=1, sequence=n, time=time, writer="supervisor-0", event=event)
        for n, (time, event) in enumerate(
            [
                (100.0, ev.RequeueIntended(job="1", method="x", reason="")),
                (40.0, ev.RequeueDone(job="1", method="x")),
            ]
        )
    ]
    assert fold(records).open_intent is None


def test_a_person_is_never_fenced() -> None:
    story = Story().start()
    person = replace(story, records=story.records, sequences=story.sequences)
    story.start().decide(Action.HOLD, rung=None)
    person.attempt, person.launch = 2, 1 << 30
    person.now = story.now - 3600.0
    assert person.submitted("43").state().status is RunStatus.SUBMITTED


def test_what_was_written_twice_counts_once() -> None:
    records = long_story()
    doubled = [replace(r, writer=r.writer.partition("-")[0] + "-ffffffff") for r in records]
    assert fold([*doubled, *records]) == fold(records) == fold([*records, *doubled])


def test_an_attempt_whose_start_was_lost_still_counts_its_commits() -> None:
    records = [r for r in long_story() if not isinstance(r.event, ev.AttemptStarted)]
    state = fold(records)
    assert (state.committed_step, state.status) == (40, RunStatus.FINISHED)


def job_changed(*keys: str, reopened: bool = False) -> ev.JobChanged:
    changes = tuple(JobChange(key=key, old="1", new="2") for key in keys)
    return ev.JobChanged(verb="extend", user="ada", revision=1, changes=changes, reopened=reopened)


def test_a_finished_run_that_is_extended_rests_until_it_is_asked_for() -> None:
    story = Story().submitted().start().tell(ev.Finished(step=9))
    assert fold(story.records).status is RunStatus.FINISHED
    story.launch = NO_LAUNCH
    story.tell(job_changed("args.max_steps", reopened=True), "cli")
    state = fold(story.records)
    assert state.status is RunStatus.STOPPED
    assert "its job was changed (extend)" in state.reason
    assert fold(story.submitted("43").records).status is RunStatus.SUBMITTED


def test_a_change_of_a_run_that_is_not_finished_leaves_its_status() -> None:
    story = Story().submitted().start().tell(job_changed("args.lr"), "cli")
    assert fold(story.records).status is RunStatus.RUNNING


def test_what_is_asked_of_slurm_anew_replaces_what_recovery_had_raised() -> None:
    plan = RecoveryPlan(nodes=3, mem_factor=2.0, time_factor=1.5, micro_batch=4)
    state = RunState(plan=plan)
    record = Story().tell(job_changed("resources.nodes", "resources.mem"), "cli").records[0]
    assert advance(state, record).plan == replace(plan, nodes=None, mem_factor=1.0)
    record = Story().tell(job_changed("args.lr"), "cli").records[0]
    assert advance(state, record).plan == plan


def test_a_fork_begins_with_what_it_inherits() -> None:
    plan = RecoveryPlan(micro_batch=4)
    event = ev.Forked(
        parent="/runs/base",
        checkpoint="step-00000008.a1.l1-00000000",
        digest="d",
        step=8,
        base="step-00000008.a0.l0-00000000",
        user="ada",
        plan=plan,
    )
    assert fold(Story().tell(event, "cli").records).plan == plan
