"""The order between attempts comes from claims and from what was read, never from clocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal import RunState, RunStatus, fold, newest_attempt_in, read_position
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import Record, decode, encode
from slurm_forge.recovery.policy.attempt_progress import (
    let_go_since,
    outcomes,
)
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Change, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust


@dataclass
class Writer:
    """One process with a journal file of its own, on a node whose clock is ``offset`` s ahead."""

    name: str
    attempt: int
    launch: int
    offset: float
    sequence: int = 0
    logical_time: int = 0


@dataclass
class World:
    """A run as its processes write it; true time goes on by a second per line."""

    offsets: tuple[float, ...] = (0.0,)
    #: As a version wrote that knew neither logical times nor read positions.
    old: bool = False
    now: float = 1_000_000.0
    files: int = 0
    attempt: int = 0
    launch: int = 0
    records: list[Record] = field(default_factory=list)
    supervisors: dict[int, Writer] = field(default_factory=dict)
    ranks: dict[tuple[int, int], Writer] = field(default_factory=dict)

    def writer(self, role: str, attempt: int, launch: int) -> Writer:
        offset = self.offsets[self.files % len(self.offsets)]
        self.files += 1
        return Writer(f"{role}-{self.files:08x}", attempt, launch, offset)

    def read(self, writer: Writer) -> list[Record]:
        newest = max((each.logical_time for each in self.records), default=0)
        writer.logical_time = max(writer.logical_time, newest)
        return list(self.records)

    def write(self, writer: Writer, event: ev.Event) -> None:
        self.now += 1.0
        writer.logical_time += 1
        self.records.append(
            Record(
                attempt=writer.attempt,
                launch=writer.launch,
                sequence=writer.sequence,
                time=self.now + writer.offset,
                writer=writer.name,
                event=event,
                logical_time=0 if self.old else writer.logical_time,
            )
        )
        writer.sequence += 1

    def start(self) -> None:
        """The next attempt claims the run, reads the journal, and begins its first launch."""
        self.attempt, self.launch = self.attempt + 1, 0
        own = self.supervisors[self.attempt] = self.writer("supervisor", self.attempt, 0)
        read = read_position(self.read(own))
        started = ev.AttemptStarted(
            job="42",
            restart_count=self.attempt - 1,
            nodes=("n1",),
            host="n1",
            via="sbatch",
            read=None if self.old else read,
        )
        self.write(own, started)
        self.start_ranks()

    def start_ranks(self) -> None:
        self.launch += 1
        own = self.supervisors[self.attempt]
        own.launch = self.launch
        self.read(own)
        self.write(own, ev.LaunchStarted(world_size=2))
        rank = self.writer("rank0", self.attempt, self.launch)
        self.ranks[self.attempt, self.launch] = rank
        self.read(rank)

    def rank(self) -> Writer:
        return self.ranks[self.attempt, self.launch]

    def commit(self, step: int, *, by: Writer | None = None) -> None:
        writer = by or self.rank()
        self.write(writer, ev.Progress(step=step))
        name = name_of(step, writer)
        self.write(
            writer,
            ev.CheckpointCommitted(name=name, step=step, reason="", seconds=1.0, size=1),
        )

    def judge(self, step: int, trust: Trust) -> None:
        writer = self.rank()
        name = name_of(step, writer)
        self.write(writer, ev.CheckpointJudged(name=name, trust=trust, reason="r"))

    def roll_back(self, step: int, target: int) -> None:
        """What rank 0 does about an instability without ending the launch."""
        writer = self.rank()
        self.trouble(writer, Cause.NON_FINITE, f"{self.attempt}.{self.launch}.{step}", step)
        state = fold(self.read(writer))
        self.decide(
            writer,
            state,
            f"{self.attempt}.{self.launch}.{step}",
            Cause.NON_FINITE,
            Action.ROLLBACK,
            replace(state.plan, lr_factor=state.plan.lr_factor * 0.5),
            target=name_of(target, writer),
        )

    def warn(self, number: int, step: int) -> None:
        """The supervisor of the launch sees a slow node, and lets the launch go on."""
        writer = self.supervisors[self.attempt]
        ident = f"{self.attempt}.{self.launch}.warning{number}"
        state = fold(self.read(writer))
        self.trouble(writer, Cause.STRAGGLER, ident, step)
        self.decide(writer, state, ident, Cause.STRAGGLER, Action.WARN, state.plan)

    def end(self, cause: Cause, step: int) -> None:
        """All ranks are gone: the supervisor decides, and Slurm requeues the job."""
        writer = self.supervisors[self.attempt]
        ident = f"{self.attempt}.{self.launch}"
        self.write(writer, ev.LaunchEnded(outcome=cause.value, step=step))
        self.trouble(writer, cause, ident, step)
        state = fold(self.read(writer))
        oom = cause is Cause.CUDA_OOM
        plan = replace(state.plan, micro_batch=8) if oom else state.plan
        plan = replace(plan, mem_factor=1.5) if cause is Cause.HOST_OOM else plan
        action = Action.SHRINK_MICRO_BATCH if oom else Action.REQUEUE
        self.decide(writer, state, ident, cause, action, plan)
        self.write(writer, ev.RequeueIntended(job="42", method="scontrol requeue", reason="x"))
        self.write(writer, ev.RequeueDone(job="42", method="scontrol requeue"))
        self.write(writer, ev.AttemptEnded(outcome="requeued"))

    def hold(self) -> None:
        writer = self.supervisors[self.attempt]
        ident = f"{self.attempt}.{self.launch}"
        self.trouble(writer, Cause.CRASH, ident, None)
        state = fold(self.read(writer))
        self.decide(writer, state, ident, Cause.CRASH, Action.HOLD, state.plan, rung=None)

    def ask(self, verb: str) -> None:
        """A person asks from a login node for the run to go on."""
        newest = newest_attempt_in(self.records)
        writer = self.writer("cli", newest, 1 << 30)
        self.read(writer)
        self.write(writer, ev.UserAsked(verb=verb, user="mira"))

    def mark(self, step: int, trust: Trust) -> None:
        """A person says from a login node what a checkpoint is worth."""
        newest = newest_attempt_in(self.records)
        writer = self.writer("cli", newest, self.launch)
        self.read(writer)
        self.write(
            writer, ev.CheckpointJudged(name=name_of(step, self.rank()), trust=trust, reason="m")
        )

    def trouble(self, writer: Writer, cause: Cause, ident: str, step: int | None) -> None:
        incident = Incident(id=ident, cause=cause, confidence=Confidence.LIKELY, step=step)
        self.write(writer, ev.IncidentSeen(incident=incident))

    def decide(
        self,
        writer: Writer,
        state: RunState,
        ident: str,
        cause: Cause,
        action: Action,
        plan: RecoveryPlan,
        *,
        rung: int | None = 0,
        target: str | None = None,
    ) -> None:
        changed = () if plan == state.plan else (Change("plan", "before", "after"),)
        decision = Decision(
            incident_id=ident,
            cause=cause,
            action=action,
            reason="r",
            plan=plan,
            changes=changed,
            rung=rung,
            target=target,
        )
        self.write(writer, ev.DecisionTaken(decision=decision))


def name_of(step: int, writer: Writer) -> str:
    return f"step-{step:08d}.a{writer.attempt}.l{writer.launch}-0000abcd"


def what_counts(state: RunState) -> dict[str, Any]:
    """What recovery rests on, without the times that are kept for people."""
    return {
        "status": state.status,
        "reason": state.reason,
        "plan": state.plan,
        "budgets": state.spent,
        "rollback": state.rollback,
        "known": tuple(replace(each, time=0.0) for each in state.known),
        "gone": state.gone,
        "branch": (state.branch, state.next_branch),
        "unstable": state.unstable,
        "steps": (state.high_water, state.committed_step),
        "intent": (state.open_intent, state.held),
        "applied": state.applied,
        "since": let_go_since(state),
        "progress": [(each.mark, each.progress) for each in outcomes(state)],
        "fenced": state.fenced,
    }


def told(world: World) -> World:
    """Attempt 1 cuts the learning rate, shrinks and grows; attempt 2 goes on from there."""
    world.start()
    world.commit(100)
    world.judge(100, Trust.GOOD)
    world.commit(120)
    world.roll_back(125, 100)
    world.end(Cause.CUDA_OOM, 126)
    world.start()
    world.end(Cause.HOST_OOM, 127)
    world.start()
    return world


def test_a_clock_ahead_keeps_the_judgements_the_plan_and_the_budgets() -> None:
    equal = what_counts(fold(told(World()).records))
    assert equal["plan"] == RecoveryPlan(lr_factor=0.5, micro_batch=8, mem_factor=1.5)
    assert [each.trust for each in equal["known"]] == [Trust.GOOD, Trust.SUSPECT]
    for ahead in (120.0, 400.0, 3600.0, -120.0, -3600.0):
        # Files 0 and 1 are those of the first attempt.
        world = World(offsets=(ahead, ahead, *([0.0] * 20)))
        assert what_counts(fold(told(world).records)) == equal


def test_a_run_of_an_older_version_goes_on_with_its_plan_and_its_budgets() -> None:
    plan = RecoveryPlan(lr_factor=0.5, micro_batch=8, mem_factor=1.5)
    for ahead in (0.0, 3600.0, -3600.0):
        world = World(offsets=(ahead, ahead, *([0.0] * 20)), old=True)
        told(world)
        world.old = False
        world.end(Cause.HOST_OOM, 128)
        world.start()
        state = fold(world.records)
        assert (state.plan, state.fenced) == (plan, ())
        assert [each.trust for each in state.known] == [Trust.GOOD, Trust.SUSPECT]
        assert state.times(Cause.HOST_OOM, 0) == 2


def test_what_an_attempt_writes_after_it_was_taken_over_counts_for_nobody_and_is_counted() -> None:
    world = World(offsets=(-3600.0,))
    world.start()
    world.commit(10)
    zombie, supervisor = world.rank(), world.supervisors[1]
    world.start()
    before = what_counts(fold(world.records))
    world.commit(999, by=zombie)
    world.trouble(supervisor, Cause.CRASH, "1.1", 999)
    world.decide(
        supervisor,
        fold(world.records),
        "1.1",
        Cause.CRASH,
        Action.HOLD,
        RecoveryPlan(lr_factor=0.1),
        rung=None,
    )
    state = fold(world.records)
    left_out = {(each.attempt, each.kind): each.count for each in state.fenced}
    assert left_out == {(1, "checkpoint_committed"): 1, (1, "incident"): 1, (1, "decision"): 1}
    assert {**what_counts(state), "fenced": ()} == before


def test_last_lines_that_were_on_their_way_complete_the_story_and_change_nothing_else() -> None:
    world = World()
    world.start()
    world.commit(10)
    supervisor = world.supervisors[1]
    world.write(supervisor, ev.RequeueIntended(job="42", method="scontrol requeue", reason="x"))
    world.start()
    before = what_counts(fold(world.records))
    world.write(supervisor, ev.RequeueDone(job="42", method="scontrol requeue"))
    world.write(supervisor, ev.AttemptEnded(outcome="requeued"))
    state = fold(world.records)
    assert what_counts(state) == before
    assert state.status is RunStatus.RUNNING
    assert (state.attempts[0].outcome, len(state.attempts[0].requeues)) == ("requeued", 1)


def test_an_attempt_that_the_next_one_never_heard_of_settles_nothing() -> None:
    world = World()
    world.start()
    world.commit(10)
    unread = len(world.records)
    world.start()
    world.commit(20)
    lost = world.records[unread:]
    world.records = world.records[:unread]
    world.commit(15, by=world.ranks[1, 1])  # of which only the third attempt has read
    world.start()
    world.records += lost
    state = fold(world.records)
    assert [each.name.step for each in state.known] == [10, 15]
    assert [each.number for each in state.attempts] == [1, 3]


@given(
    offset=st.floats(-36_000, 36_000),
    later=st.floats(-36_000, 36_000),
)
def test_a_person_is_heard_behind_what_they_had_read_whatever_the_clocks(
    offset: float, later: float
) -> None:
    world = World(offsets=(0.0, 0.0, offset, later))
    world.start()
    world.hold()
    assert fold(world.records).status is RunStatus.HELD
    world.ask("requeue")
    state = fold(world.records)
    assert (state.status, let_go_since(state)) == (RunStatus.SUBMITTED, 1)
    world.start()
    assert fold(world.records).status is RunStatus.RUNNING


STEPS = st.integers(1, 60)
ACTS = st.one_of(
    st.tuples(st.just("commit"), STEPS),
    st.tuples(st.just("good"), STEPS),
    st.tuples(st.just("suspect"), STEPS),
    st.tuples(st.just("mark good"), STEPS),
    st.tuples(st.just("mark suspect"), STEPS),
    st.tuples(st.just("roll back"), STEPS),
    st.tuples(st.just("warn"), STEPS),
    st.tuples(st.just("relaunch"), STEPS),
    st.tuples(st.just("out of memory"), STEPS),
    st.tuples(st.just("preempted"), STEPS),
    st.tuples(st.just("killed"), STEPS),
    st.tuples(st.just("held"), STEPS),
    st.tuples(st.just("zombie"), STEPS),
)


def play(acts: list[tuple[str, int]], offsets: tuple[float, ...], *, old: bool = False) -> World:
    world = World(offsets=offsets, old=old)
    world.start()
    for number, (act, step) in enumerate(acts):
        match act:
            case "commit":
                world.commit(step)
            case "good":
                world.judge(step, Trust.GOOD)
            case "suspect":
                world.judge(step, Trust.SUSPECT)
            case "mark good":
                world.mark(step, Trust.GOOD)
            case "mark suspect":
                world.mark(step, Trust.SUSPECT)
            case "roll back":
                world.roll_back(step, step // 2)
            case "warn":
                world.warn(number, step)
            case "relaunch":
                world.start_ranks()
            case "out of memory":
                world.end(Cause.CUDA_OOM, step)
                world.start()
            case "preempted":
                world.end(Cause.PREEMPTED, step)
                world.start()
            case "killed":
                world.start()
            case "held":
                world.hold()
                world.ask("requeue")
                world.start()
            case _ if world.attempt > 1:
                world.commit(step, by=world.ranks[1, 1])
    return world


HOURS = st.lists(st.floats(-36_000, 36_000), min_size=1, max_size=6).map(tuple)


@given(acts=st.lists(ACTS, max_size=25), offsets=HOURS)
def test_no_clock_has_a_part_in_trust_budgets_or_plan(
    acts: list[tuple[str, int]], offsets: tuple[float, ...]
) -> None:
    equal = what_counts(fold(play(acts, (0.0,)).records))
    assert what_counts(fold(play(acts, offsets).records)) == equal


@given(acts=st.lists(ACTS, max_size=25), offsets=HOURS)
def test_every_later_reader_counts_what_an_attempt_counted_when_it_began(
    acts: list[tuple[str, int]], offsets: tuple[float, ...]
) -> None:
    world = play(acts, offsets)
    begun = next(
        at
        for at, record in reversed(list(enumerate(world.records)))
        if isinstance(record.event, ev.AttemptStarted)
    )
    newest = world.records[begun].attempt
    then = fold(world.records[: begun + 1])
    others = [
        record
        for record in world.records[begun + 1 :]
        if record.attempt < newest and not record.writer.startswith("cli")
    ]
    now = fold([*world.records[: begun + 1], *others])
    assert {**what_counts(now), "fenced": ()} == {**what_counts(then), "fenced": ()}


def test_read_position_and_logical_time_survive_the_line_they_are_written_in() -> None:
    world = told(World())
    for record in world.records:
        assert decode(encode(record), record.writer) == record
