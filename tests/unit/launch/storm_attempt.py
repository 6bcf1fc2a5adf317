"""The batch step of one start in a storm: what ``launch.supervise`` does, without training."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from slurm_forge.errors import FencedError, ForgeError
from slurm_forge.journal import events as ev
from slurm_forge.launch.attempt.attempt import (
    RELAUNCHING,
    REQUEUEING,
    TAKEN_OVER,
    Attempt,
    StartRefusal,
    begin,
)
from slurm_forge.launch.requeue.job_update import (
    arguments_for,
    update_for,
)
from slurm_forge.launch.requeue.requeue import (
    JobRequeuer,
    RequeueOutcome,
    RequeueResult,
)
from slurm_forge.recovery.incident.launch_facts import (
    LaunchFacts,
    LostRank,
    RankFailure,
)
from slurm_forge.recovery.monitor.probe_verdict import ProbeFailure
from slurm_forge.slurm.records import JobRecord
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Decision
from tests.fake_slurm import (
    BATCH,
    Start,
)

if TYPE_CHECKING:
    from tests.unit.launch.storm_life import Life


#: What a rank may say when it fails; the others come from signals, Slurm and the clock.
TOLD = (
    Cause.CUDA_OOM, Cause.HOST_OOM, Cause.NON_FINITE, Cause.LOSS_SPIKE, Cause.NCCL_ERROR,
    Cause.GPU_ERROR, Cause.STORAGE, Cause.APP_ERROR, Cause.ENV_MISMATCH, Cause.CHECKPOINT_BAD,
    Cause.EXTERNAL_SERVICE, Cause.UNKNOWN, Cause.CRASH, Cause.HANG,
)  # fmt: skip
LEAD = timedelta(seconds=60)


def secs(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


class Hub:
    """What an attempt needs of one."""

    world_size = 2

    def publish(self, key: str, value: str) -> None:
        pass


class Supervised:
    """The batch step of one start: what ``launch.supervise`` does, with training left out."""

    def __init__(self, life: Life, start: Start) -> None:
        self._life = life
        self._start = start
        self._random = life.random
        self.attempt: Attempt | None = None
        #: What this attempt ends with.
        self.decision: Decision | None = None
        self._job_requeuer: JobRequeuer | None = None
        self._first: JobRecord | None = None
        self._noticed: JobRecord | None = None
        self._signals: list[tuple[str, str]] = []
        self._launched = self._stopping = False
        #: What Slurm last answered of the job, and when.
        self.told: JobRecord | None = None
        self.told_at = -1.0

    def started(self) -> None:
        self._guarded(self._begin)

    def signalled(self, signal: str, to: str) -> None:
        if signal != "SIGTERM":
            return
        self._signals.append((signal, to))
        if self._launched and not self._stopping:
            self._guarded(self._notice)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except FencedError:
            if self.attempt is not None:
                self.attempt.end(TAKEN_OVER)
            self._start.exit(0)
        except ForgeError:
            self._start.exit(1)

    def _begin(self) -> None:
        life, start = self._life, self._start
        life.has_started(self, start)
        wanted = life.is_wanted(start)
        begun = begin(
            life.run, job=start.job, restart_count=start.restarts, nodes=start.nodes,
            via="sbatch", slurm=start.slurm, clock=life.fake.clock.seconds,
        )  # fmt: skip
        if isinstance(begun, StartRefusal):
            life.refused[begun] += 1
            start.exit(0)
            return
        life.promise(wanted, "nobody has asked for it, and it begins")
        self.attempt = begun
        self._job_requeuer = JobRequeuer(
            start.slurm, job=start.job, restart_count=start.restarts, script=life.script,
            journal=begun.journal, fence=begun.fence, sleep=start.sleep,
            clock=life.fake.clock.monotonic,
        )  # fmt: skip
        if begun.verdict is not None:
            self._go(begun.verdict)
        else:
            self._launch()

    def _launch(self) -> None:
        assert self.attempt is not None
        self.attempt.next_launch(Hub(), self._start.nodes)  # type: ignore[arg-type]
        self._first = self._first or self._ask()
        self._launched, self._stopping = True, False
        if self._signals:
            self._notice()
            return
        draw = self._random
        life = self._life
        number = self.attempt.launch
        if draw.random() < 0.6:
            self._later(draw.uniform(1, 200), number, self._commit)
        if self._first is not None and self._first.end_time is not None and draw.random() < 0.8:
            left = self._first.end_time - LEAD - self._start.clock.now
            self._later(left.total_seconds(), number, lambda: self._end(due_time_limit=True))
        if life.left > 0 and draw.random() < 0.7:
            life.happened("fault")
            self._later(draw.uniform(0, 300), number, self._fault)
        else:
            self._later(draw.uniform(30, 900), number, lambda: self._end(finished=True))

    def _later(self, seconds: float, launch: int, act: Callable[[], None]) -> None:
        """Something of this launch: not once it is over, or is being stopped."""

        def run() -> None:
            mine = self.attempt is not None and self.attempt.launch == launch
            if mine and self._launched and not self._stopping:
                self._guarded(act)

        self._start.after(secs(seconds), run)

    def _ask(self) -> JobRecord | None:
        try:
            record = self._start.slurm.show_job(self._start.job)
        except ForgeError:
            return None
        self.told, self.told_at = record, self._start.clock.monotonic()
        return record

    def _commit(self) -> None:
        """Rank 0 saves; a fenced attempt publishes nothing."""
        assert self.attempt is not None
        self.attempt.fence()
        life = self._life
        life.step += self._random.randint(1, 50)
        name = CheckpointName(
            life.step, self.attempt.claim.attempt, self.attempt.launch, "ab12cd34"
        )
        self.attempt.journal.write(
            ev.CheckpointCommitted(name=str(name), step=life.step, reason="", seconds=1.0, size=1)
        )

    def _notice(self) -> None:
        """Somebody wants the nodes: ask Slurm what it means, save, then conclude."""
        self._stopping = True
        for _ in range(3):
            self._noticed = self._noticed or self._ask()
        self._start.after(
            secs(self._random.choice([0.5, 2.0, 6.0, 40.0])), lambda: self._guarded(self._stopped)
        )

    def _stopped(self) -> None:
        if self._random.random() < 0.8:
            self._commit()
        self._end(stopped=True)

    def _fault(self) -> None:
        cause = self._random.choice(TOLD)
        if cause is Cause.HANG:
            self._end(
                probe=ProbeFailure(
                    cause=Cause.HANG,
                    ranks=(1,),
                    hosts=self._start.nodes[-1:],
                    step=self._life.step,
                    confidence=Confidence.LIKELY,
                    evidence=(Evidence("probe", "late: rank 1"),),
                )
            )
        elif cause is Cause.CRASH:
            self._end(lost=(LostRank(1, self._start.nodes[-1]),), exit_status=139)
        else:
            text = self._random.choice(["one thing", "another thing", "a third thing"])
            step = self._life.step + self._random.randint(0, 3)
            failure = RankFailure(
                rank=1, host=self._start.nodes[-1], cause=cause, step=step, text=text,
                micro_batch=self._random.choice([None, 1, 8]),
            )  # fmt: skip
            self._end(failures=(failure,))

    def _end(self, *, stopped: bool = False, **seen: object) -> None:
        """The launch is over: conclude, and stay, come back or rest."""
        attempt, life = self.attempt, self._life
        assert attempt is not None
        self._stopping = True
        latest = self._ask() if self._random.random() < 0.7 else None
        facts = LaunchFacts(
            now=self._start.clock.now,
            step=life.step,
            stopped_at=life.step if stopped else None,
            job_at_start=self._first,
            job_at_notice=self._noticed,
            job_at_end=latest or self._noticed or self._first,
            lead=LEAD,
            rank_signals=tuple(dict.fromkeys(s for s, to in self._signals if to != BATCH)),
            batch_signals=tuple(dict.fromkeys(s for s, to in self._signals if to == BATCH)),
            stop_file=life.run.stop_file.exists(),
            **seen,  # type: ignore[arg-type]
        )
        decision = attempt.conclude(facts)
        self._launched = False
        if decision is None:
            life.finished_at = life.finished_at or life.fake.clock.monotonic()
            attempt.end("finished")
            self._start.exit(0)
            return
        life.decided[decision.action] += 1
        may_stay = not (self._signals or facts.due_time_limit or facts.stop_file)
        leave = set(self._start.nodes) & set(decision.plan.exclude_nodes)
        if decision.action in RELAUNCHING and may_stay and not leave:
            self._start.after(secs(decision.wait_s), lambda: self._guarded(self._launch))
        else:
            self._go(decision)

    def _go(self, decision: Decision) -> None:
        assert self.attempt is not None and self._job_requeuer is not None
        outcome = decision.action.value
        self.decision = decision
        if decision.action in REQUEUEING:
            if decision.cause is Cause.ADMIN_REQUEUE:
                outcome = RequeueOutcome.REQUEUED.value
            else:
                outcome = self._climb(self._job_requeuer, decision).outcome.value
        elif decision.action is Action.HOLD:
            self._life.holding.add(self._start.job)
            outcome = self._job_requeuer.hold(decision.reason).outcome.value
            self._life.holding.discard(self._start.job)
            if outcome == RequeueOutcome.HELD.value:
                self._life.is_held(self._start.job)
        self._life.outcomes[outcome] += 1
        self.attempt.end(outcome)
        self._start.exit(1 if decision.action is Action.RAISE else 0)

    def _climb(self, job_requeuer: JobRequeuer, decision: Decision) -> RequeueResult:
        job = self._life.file.job
        update = update_for(decision, job, self._noticed or self._first)
        return job_requeuer.requeue(
            decision.reason,
            update,
            wait=timedelta(seconds=decision.wait_s),
            arguments=arguments_for(update, job),
        )
