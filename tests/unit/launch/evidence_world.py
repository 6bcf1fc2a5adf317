"""One stop of a run on a fake Slurm that answers late: real conductor, requeuer, claims, journal.

Ranks, srun and the foreign program are scripted; time is virtual.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from signal import Signals

from slurm_forge.control.handshake import Credentials
from slurm_forge.control.hub_events import MessageReceived, RankDisconnected, TargetAgreed
from slurm_forge.control.messages.hub import Request as ChannelRequest
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.rank import Notice, RankFinished, RankStopped
from slurm_forge.control.roster import MemberView
from slurm_forge.errors import FencedError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.journal import RunState, fold, read_journal
from slurm_forge.launch.attempt.attempt import (
    REQUEUEING,
    TAKEN_OVER,
    Attempt,
    StartRefusal,
    begin,
)
from slurm_forge.launch.attempt.attempt_signals import LaunchSignals
from slurm_forge.launch.attempt.evidence import gather_evidence
from slurm_forge.launch.attempt.job_attempt import slurm_kill_patience
from slurm_forge.launch.attempt.stop_explanation import StopExplanation
from slurm_forge.launch.command.conductor import ProgramConductor
from slurm_forge.launch.command.metrics import MetricHistory, MetricJournal
from slurm_forge.launch.command.program_signals import ProgramSignals
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.launch.render.signal_convention import Forwarding
from slurm_forge.launch.requeue.reconcile import reconcile
from slurm_forge.launch.requeue.requeue import JobRequeuer
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.incident.launch_facts import ProgramCheckpoints
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.records import JobRecord
from slurm_forge.spec.launchers import NotifyTo, ProgramSpec
from slurm_forge.testing.cluster.spec import PartitionPreemption, PartitionSpec
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.position import Position
from tests.fake_slurm import (
    BATCH,
    Disturbance,
    FakeSlurm,
    FakeSlurmSpec,
    Request,
    Start,
)
from tests.unit.launch.hub_views import HubViews

BEFORE_S = 30.0
STEP = 70
SAVE_S = 0.4


class End(str, Enum):
    """What befalls the job."""

    PREEMPTION = "preemption"
    SCANCEL = "scancel"
    TIME_LIMIT = "time limit"
    ADMIN_REQUEUE = "admin requeue"
    NODE_DOWN = "node down"
    SUSPEND = "suspend"


class Answers(str, Enum):
    """How the controller answers from the moment of the notice on."""

    AT_ONCE = "0 s"
    AFTER_4_S = "4 s"
    AFTER_20_S = "19 s"
    AFTER_60_S = "60 s"
    NEVER = "never"
    ERROR = "error"
    #: One that was asked before the notice answers after it; the next ones take long.
    FROM_BEFORE = "from before"


class Front(str, Enum):
    RANKS = "ranks"
    EXEC = "exec"


LATENCY_S = {
    Answers.AT_ONCE: 0.0,
    Answers.AFTER_4_S: 4.0,
    Answers.AFTER_20_S: 19.0,
    Answers.AFTER_60_S: 60.0,
    Answers.NEVER: 3600.0,
    Answers.ERROR: 0.0,
    Answers.FROM_BEFORE: 12.0,
}


class Trouble:
    """Whether, and how, the controller is slow now."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.is_on = False

    @property
    def latency(self) -> timedelta:
        return timedelta(seconds=LATENCY_S[self.answers] if self.is_on else 0.0)

    def of(self, request: Request) -> timedelta:
        # A person's scancel and what an administrator types get through.
        return self.latency if request.inside is not None else timedelta(0)

    def check(self, argv: tuple[str, ...] = ("scontrol",)) -> None:
        if self.is_on and self.answers is Answers.ERROR:
            raise SlurmUnreachableError(argv, 1, "Unable to contact slurm controller")


class Watched:
    """The client of a ``JobPoller``: its queries take their time beside the conductor."""

    def __init__(self, world: World, start: Start) -> None:
        self._world, self._start = world, start

    def in_background(self, work: Callable[[], None]) -> None:
        delay = min(self._world.trouble.latency, timedelta(seconds=20))
        self._start.after(delay, work)

    def show_job(self, job: str) -> JobRecord | None:
        trouble = self._world.trouble
        trouble.check()
        if trouble.latency >= timedelta(seconds=20):
            raise SlurmUnreachableError(("scontrol",), 124, "no answer within 20 s")
        if self._world.record_from_before is not None:
            record, self._world.record_from_before = self._world.record_from_before, None
            return record
        return self._world.fake.show_job(job)


class Events(queue.SimpleQueue):  # type: ignore[type-arg]
    """The hub's: whoever waits for one lets time pass for everybody."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self._start = start

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        if self.empty() and timeout:
            self._start.sleep(timeout)
        return self.get_nowait()


class Step(HubViews):
    """srun with two ranks that train until they are told to stop, as hub and as launcher."""

    world_size = 2
    addresses, over = "127.0.0.1:1", False
    credentials = Credentials("n", "s")

    def __init__(self, world: World, start: Start, *, joined: bool) -> None:
        self._world, self._start = world, start
        self.events = Events(start)
        self.status: int | None = None
        self.text = ""
        self._members = dict(enumerate(start.nodes)) if joined else {}

    # -- the hub ------------------------------------------------------------------------------

    def host_of(self, rank: int) -> str | None:
        member = self.members().get(rank)
        return None if member is None else member.host

    def members(self) -> dict[int, MemberView]:
        heard = self._start.clock.monotonic()
        return {
            rank: MemberView(
                rank=rank,
                host=host,
                pid=1,
                last_message_at=heard,
                step=STEP,
                phase="train",
                started=True,
            )
            for rank, host in self._members.items()
        }

    def request(self, kind: RequestKind, reason: str) -> int:
        if kind is RequestKind.STOP:
            request = ChannelRequest(id=1, kind=kind, reason=reason)
            self.events.put(TargetAgreed(request, Position(STEP), 0.01))
            self._start.after(timedelta(seconds=SAVE_S), self._stop)
        return 1

    def abort(self, why: str) -> None:
        self._leave(0)

    def ask_rank(self, *arguments: object) -> bool:
        return False

    def ask_monitors(self, *arguments: object) -> None: ...

    def connections(self) -> tuple[object, ...]:
        return ()

    def publish(self, key: str, value: str) -> None: ...

    def time_left(self, seconds: float) -> None: ...

    def _stop(self) -> None:
        for rank in self._members:
            self.events.put(
                MessageReceived((rank,), RankStopped(step=STEP, checkpoint=f"step-{STEP}"))
            )
        self._start.after(timedelta(seconds=0.1), lambda: self._leave(0))

    def _leave(self, status: int) -> None:
        self.status = status if self.status is None else self.status

    def finish(self) -> None:
        for rank in self._members:
            self.events.put(MessageReceived((rank,), RankFinished(step=STEP)))
        self._leave(0)

    def lose(self, rank: int) -> None:
        """Its node is gone, and srun ends the step."""
        host = self._members.pop(rank, "?")
        self.text += f"srun: error: Node failure on {host}\n"
        self.events.put(RankDisconnected(rank))
        self._leave(1)

    # -- the launcher -------------------------------------------------------------------------

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self._leave(137)

    terminate = kill

    def tail(self) -> str:
        return self.text

    def ends(self) -> tuple[()]:
        return ()

    def launcher_signal(self) -> str:
        return ""

    # -- a foreign program, its sentinel and its progress -----------------------------------------

    printed_done = False
    metrics = MetricHistory()
    found = ProgramCheckpoints()
    printed: int | None = None
    step: int | None = None

    @property
    def alive(self) -> bool:
        return self.status is None

    def forward(self, how: Forwarding, *, steps_know: bool) -> str:
        self._start.after(timedelta(seconds=SAVE_S), lambda: self._leave(0))
        return how.signal

    def has_steps(self) -> bool:
        return False

    def words(self) -> str:
        return self.text

    def news(self) -> tuple[()]:
        return ()

    end = news


@dataclass
class Batch:
    """The batch step of one start, as ``supervise`` and ``execute`` conduct it."""

    world: World
    start: Start
    step: Step | None = None
    attempt: Attempt | None = None
    signals: LaunchSignals = field(default_factory=ProgramSignals)

    def started(self) -> None:
        self.start.after(timedelta(0), self._run)

    def signalled(self, signal: str, to: str) -> None:
        if signal != "SIGTERM":
            return
        if to == BATCH:
            self.signals.batch(Signals.SIGTERM)
            return
        if self.step is None:
            return
        words = "slurmstepd-{0}: error: *** STEP {1}.0 ON {0} CANCELLED AT 2030-01-01T00:00:00 ***"
        self.step.text += words.format(self.start.nodes[0], self.start.job) + "\n"
        if self.world.front is Front.EXEC:
            self.signals.steps("SIGTERM")
            return
        for rank in self.step.members():
            self.step.events.put(MessageReceived((rank,), Notice(what="SIGTERM")))

    def _run(self) -> None:
        try:
            self._conduct()
        except FencedError:
            if self.attempt is not None:
                self.attempt.end(TAKEN_OVER)
            self.start.exit(0)

    def _conduct(self) -> None:
        world, start = self.world, self.start
        program = world.front is Front.EXEC
        begun = begin(
            world.run, job=start.job, restart_count=start.restarts, nodes=start.nodes,
            via="sbatch", slurm=world.fake, command=program, clock=world.fake.clock.seconds,
        )  # fmt: skip
        if isinstance(begun, StartRefusal):
            start.exit(0)
            return
        world.starts += 1
        self.attempt = begun
        self.step = Step(world, start, joined=not program)
        begun.next_launch(self.step, start.nodes)  # type: ignore[arg-type]
        if world.starts > 1:
            self.start.after(timedelta(seconds=5), self._finish)
        elif world.end is End.SUSPEND:
            self.start.after(timedelta(seconds=200), self._finish)
        world.trains(start.job)
        facts = self._watch(begun, self.step)
        facts = gather_evidence(
            replace(facts, grace=world.grace), run=world.run, attempt=begun.claim.attempt,
            launch=begun.launch, job=start.job, slurm=start.slurm, restart_count=start.restarts,
        )  # fmt: skip
        decision = begun.conclude(facts)
        if decision is None:
            begun.end("finished")
            start.exit(0)
            return
        outcome, stay = decision.action.value, timedelta(0)
        if decision.action in REQUEUEING:
            job_requeuer = JobRequeuer(
                start.slurm, job=start.job, script=world.script, journal=begun.journal,
                fence=begun.fence, restart_count=start.restarts, sleep=start.sleep,
                clock=world.fake.clock.monotonic,
                explain=StopExplanation(
                    start.slurm, begun, self.signals.batch_signals_since,
                    lambda: world.fake.clock.now,
                ),
            )  # fmt: skip
            taken = job_requeuer.requeue(decision.reason).outcome
            outcome, stay = taken.value, slurm_kill_patience(taken, decision.cause)
        begun.end(outcome)
        start.sleep(stay.total_seconds())
        start.exit(1 if decision.action is Action.RAISE else 0)

    def _watch(self, begun: Attempt, step: Step) -> LaunchFacts:
        world, start, clock = self.world, self.start, self.world.fake.clock
        slurm = Watched(world, start)
        watch = JobPoller(slurm, start.job, background=slurm.in_background)  # type: ignore[arg-type]
        world.watch = watch
        timing = Timing(
            lead=timedelta(seconds=2), save_every=None, probe_every=None,
            probe_deadline=timedelta(seconds=3), hang=None,
        )  # fmt: skip
        if world.front is Front.RANKS:
            conductor = Conductor(
                step, journal=begun.journal, job_poller=watch, timing=timing,  # type: ignore[arg-type]
                stop_file=world.run.stop_file, save_file=world.run.save_file, launched=step,
                clock=clock.monotonic, now=lambda: clock.now,
            )  # fmt: skip
            with self.signals.go_to(conductor.stops):
                return conductor.watch()
        program = ProgramConductor(
            step, journal=begun.journal, job_poller=watch, timing=timing,  # type: ignore[arg-type]
            program=ProgramSpec(), how=Forwarding("SIGTERM", NotifyTo.CHILD),
            process=step, progress=step, folder=world.run.path,  # type: ignore[arg-type]
            metrics=MetricJournal(0.0, None, None), most_non_finite=3, only_warns=begun.only_warns,
            stop_file=world.run.stop_file, save_file=world.run.save_file,
            sentinel=step, restart_count=start.restarts,  # type: ignore[arg-type]
            clock=clock.monotonic, now=lambda: clock.now,
        )  # fmt: skip
        with self.signals.go_to(program.stops):
            return program.watch()

    def _finish(self) -> None:
        assert self.step is not None
        self.step.finish()


class World:
    """A run, its Slurm, and one thing that befalls it."""

    def __init__(
        self, run: RunDirectory, end: End, answers: Answers, grace: float, front: Front,
        mode: PartitionPreemption = PartitionPreemption.REQUEUE, *,
        cancelled_after: timedelta | None = None, slow_after: timedelta = timedelta(0),
    ) -> None:  # fmt: skip
        self.run, self.end, self.front = run, end, front
        #: How long after it somebody cancels the job as well.
        self.cancelled_after = cancelled_after
        #: How long after it the controller is still quick.
        self.slow_after = slow_after
        self.grace = timedelta(seconds=grace)
        self.trouble = Trouble(answers)
        self.starts = 0
        self.watch: JobPoller | None = None
        self.record_from_before: JobRecord | None = None
        partitions = (
            PartitionSpec(name="top", preempt_mode=PartitionPreemption.OFF, priority_tier=100),
            PartitionSpec(name="low", preempt_mode=mode, grace_time=self.grace, default=True),
        )
        self.fake = FakeSlurm(
            FakeSlurmSpec(partitions=partitions, cred_expire=timedelta(seconds=5),
                          slurmd_timeout=timedelta(seconds=10))
        )  # fmt: skip
        self.fake.network.latency = self.trouble.of
        self.fake.network.disturb = self._disturbed
        self.script = run.submissions / "job.sbatch"
        self.fake.script(self.script.name, self._program)
        self.batches: list[Batch] = []

    def _program(self, start: Start) -> Batch:
        self.batches.append(Batch(self, start))
        return self.batches[-1]

    def _disturbed(self, request: Request) -> Disturbance:
        error = self.trouble.is_on and self.trouble.answers is Answers.ERROR
        return Disturbance.SILENT if error and request.inside else Disturbance.NONE

    @property
    def state(self) -> RunState:
        return fold(read_journal(self.run)[0])

    def live(self) -> None:
        """The run until it is finished, or nothing moves any more; then a watcher looks at it."""
        limit = 2 if self.end is End.TIME_LIMIT else 60
        self.script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2 --time={limit}\n")
        self.fake.submit(self.script)
        self.fake.advance(timedelta(minutes=20))
        for _ in range(3):
            if self.state.open_intent is None or self.run.is_done():
                break
            with suppress(SlurmCommandError):
                reconcile(
                    self.run, self.fake, sleep=lambda _: None,
                    clock=self.fake.clock.seconds, by_person=False,
                )  # fmt: skip
            self.fake.advance(timedelta(minutes=5))

    def trains(self, job: str) -> None:
        """The first start does: what befalls it comes in a while."""
        if self.starts > 1:
            return
        clock = self.fake.clock
        if self.trouble.answers is Answers.FROM_BEFORE:
            clock.after(timedelta(seconds=BEFORE_S - 0.5), lambda: self._ask_before(job))
        clock.after(timedelta(seconds=BEFORE_S), lambda: self._strike(job))
        clock.after(timedelta(minutes=10), self._trouble_is_over)

    def _ask_before(self, job: str) -> None:
        self.record_from_before = self.fake.show_job(job)
        self.trouble.is_on = True
        assert self.watch is not None
        self.watch.ask()

    def _trouble_begins(self) -> None:
        self.trouble.is_on = True

    def _trouble_is_over(self) -> None:
        self.trouble.is_on = False

    def _strike(self, job: str) -> None:
        fake = self.fake
        if self.slow_after:
            fake.clock.after(self.slow_after, self._trouble_begins)
        else:
            self._trouble_begins()
        (record,) = fake.controller.found(job)
        if self.cancelled_after is not None:
            self.fake.clock.after(self.cancelled_after, lambda: self.fake.cancel(job))
        match self.end:
            case End.PREEMPTION:
                fake.preempt(job)
            case End.SCANCEL:
                fake.cancel(job)
            case End.ADMIN_REQUEUE:
                fake.requeue(job)
            case End.NODE_DOWN:
                other, step = record.nodes[-1], self.batches[-1].step
                assert step is not None
                fake.kill_node(other)
                fake.clock.after(timedelta(seconds=10.1), lambda: step.lose(1))
                fake.clock.after(timedelta(seconds=90), lambda: fake.restore_node(other))
            case End.TIME_LIMIT | End.SUSPEND:
                pass
