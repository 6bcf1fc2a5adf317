"""One attempt, whoever conducts it: begin (or refuse to), decide after a launch, end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum

from slurm_forge.control import BRIEF_KEY, Hub, LaunchBrief
from slurm_forge.errors import (
    CheckpointRejectedError,
    FencedError,
    ForgeError,
    RunDirectoryError,
    UnsafeFileError,
)
from slurm_forge.journal import (
    JournalWriter,
    RunState,
    compact_journal,
    fold,
    read_position,
    read_to_fold,
)
from slurm_forge.journal.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    DecisionTaken,
    Event,
    Finished,
    IncidentSeen,
    LaunchEnded,
    LaunchStarted,
    Note,
    UserAsked,
)
from slurm_forge.knobs import process_environ
from slurm_forge.launch.attempt.next_decision import next_decision
from slurm_forge.launch.attempt.post_mortem import post_mortem
from slurm_forge.launch.attempt.stop_between_attempts import (
    keep_stopped,
    stop_decision,
    stopped_before_start,
)
from slurm_forge.launch.render.rank_environment import (
    effective_on_hang,
    forbidden,
    with_suspects,
)
from slurm_forge.launch.render.save_times import remember_saves
from slurm_forge.launch.requeue.change import report_revisions
from slurm_forge.recovery import LaunchFacts, classify, decide
from slurm_forge.recovery.incident.classify import is_unexplained
from slurm_forge.recovery.incident.launch_facts import ProgramCheckpoints
from slurm_forge.recovery.monitor.preflight_verdict import thoroughness
from slurm_forge.recovery.nodes.placement import AllocationState
from slurm_forge.run_directory import Claim, Fence, RunDirectory, claim_attempt, mark_launch
from slurm_forge.site.variables import VariableDifference
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.spec.recovery import Recovery
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident, Start
from slurm_forge.vocabulary.plan import Variable

#: How an attempt ends that was fenced: nothing was wrong with it, and nothing is to be done.
TAKEN_OVER = "taken over"
#: What a run does not come back from by itself.
_ENDS = frozenset({Action.HOLD, Action.RAISE, Action.STOP})


class StartRefusal(str, Enum):
    """Why an attempt is not begun.  Each one exits 0: starting again would change nothing."""

    DONE = "done"
    STOP_FILE = "stop_file"
    AT_REST = "at_rest"


@dataclass(slots=True)
class Attempt:
    """A claimed attempt with its journal; made by ``begin``."""

    run: RunDirectory
    file: RunFile
    claim: Claim
    journal: JournalWriter
    launch: int = 0
    #: What was decided about the attempt before, where that keeps this one from training.
    verdict: Decision | None = None
    #: The site's variables for after a hang, and what is set that must not be.
    on_hang: tuple[Variable, ...] = ()
    forbidden: tuple[VariableDifference, ...] = ()
    #: What was seen of the last launch, and the incident that was made of it.
    facts: LaunchFacts | None = None
    incident: Incident | None = None
    #: When the last launch began, by this node's clock.
    launched_at: datetime | None = None
    _warnings: int = 0

    @classmethod
    def abandoned(cls, run: RunDirectory, claim: Claim, *, writer: str, launch: int) -> Attempt:
        """An attempt whose process is gone, for whoever writes down how its ``launch`` ended."""
        file = read_run_file(run.spec_file)
        journal = JournalWriter(run, attempt=claim.attempt, writer=writer, launch=launch)
        journal.advance_clock(read_to_fold(run))
        on_hang = effective_on_hang(file, process_environ())
        return cls(run, file, claim, journal, launch, on_hang=on_hang)

    @property
    def fence(self) -> Fence:
        """Raises once a newer attempt has taken the run over."""
        return Fence(self.run, self.claim.attempt)

    @property
    def incident_id(self) -> str:
        """The id of the incident that ended the last launch."""
        return f"{self.claim.attempt}.{self.launch}"

    def state(self) -> RunState:
        """The state of the run, read anew; what the attempt writes next comes behind it."""
        records = read_to_fold(self.run)
        self.journal.advance_clock(records)
        return fold(records)

    def next_launch(self, hub: Hub, nodes: tuple[str, ...] = (), start: Start = Start.COLD) -> None:
        """Number the launch, brief the ranks that will join ``hub``.

        ``FencedError`` if another attempt has taken over since the launch before.
        """
        if self.launch > 0:
            self.fence()
        self.launch += 1
        mark_launch(self.run, self.claim.attempt, self.launch)
        self.journal.launch = self.launch
        state = self.state()
        refusal = state.refusals()
        brief = LaunchBrief(
            attempt=self.claim.attempt,
            launch=self.launch,
            plan=state.plan,
            committed_step=state.committed_step,
            resume_step=max(
                (each.name.step for each in state.known if refusal(each.name) is None),
                default=None,
            ),
            preflight=thoroughness(self.file.job.preflight.enabled, start, state),
        )
        hub.publish(BRIEF_KEY, brief.to_text())
        self.launched_at = datetime.now(timezone.utc)
        self.journal.write(
            LaunchStarted(
                world_size=hub.world_size,
                nodes=nodes,
                start=start.value,
                variables=tuple(map(str, state.plan.variables)),
            )
        )

    def note_published(self) -> None:
        """Journal what the launch published last, where rank 0 was ended before it could.

        For a launch none of whose ranks is left.  How long that save took nobody knows.
        """
        journaled = {each.name for each in fold(read_to_fold(self.run, refresh=True)).known}
        launch = (self.claim.attempt, self.launch)
        with contextlib.suppress(OSError, UnsafeFileError):
            store = self.file.open_store(self.run)
            for name in reversed(store.candidates()):
                if (name.attempt, name.launch) != launch or name in journaled:
                    continue
                with contextlib.suppress(CheckpointRejectedError):
                    manifest = store.verify_manifest(name)
                    self._write(
                        CheckpointCommitted(
                            name=str(name),
                            step=name.step,
                            reason="stop",
                            seconds=0.0,
                            size=manifest.size,
                            findings=tuple(manifest.findings),
                        )
                    )

    def conclude(self, facts: LaunchFacts) -> Decision | None:
        """Journal how the launch ended; the decision, or None when the run is finished.

        ``FencedError`` if another attempt has taken over: then it is not ours to judge.
        """
        if facts.finished:
            step = facts.step or 0
            self.journal.write(LaunchEnded(outcome="finished", step=facts.step, exact=True))
            self.fence()
            self.run.mark_done(step, self.claim.attempt)
            self.journal.write(Finished(step=step))
            return None
        with contextlib.suppress(OSError):  # a storage that fails is what is to be decided about
            self.fence()
        incident = with_suspects(classify(facts, self.incident_id), self.forbidden)
        self.facts, self.incident = facts, incident
        # Whoever wants the run to stop has said so after rank 0 decided how it should go on.
        by_request = incident.cause in (Cause.USER_CANCELLED, Cause.STOP_REQUESTED)
        decided = None if by_request else self._decision_of_rank_0(facts)
        if decided is not None:
            return decided
        end_event = LaunchEnded(
            outcome=incident.cause.value,
            step=max((s for s in (facts.furthest, incident.step) if s is not None), default=None),
            exact=facts.is_furthest_exact,
        )
        decision, full = self.decide_on(
            incident,
            end_event,
            record=facts.job_at_end or facts.job_at_notice or facts.job_at_start,
            now=facts.now,
            allocation_state=facts.allocation_state,
            program=facts.program_checkpoints,
        )
        if full is not None and not _is_unlimited(self.file.job.recovery, decision):
            # A budget that is charged nowhere would never be used up.
            raise RunDirectoryError(
                f"the journal of {self.run.name} can't be written ({full}), so "
                f"that '{decision.reason}' can't be charged to its budget: the run is held",
                next_step=f"Make room or check the quota of {self.run.path}, then: "
                f"slurm-forge requeue {self.run.name}",
            ) from full
        return decision

    def decide_on(
        self,
        incident: Incident,
        end_event: LaunchEnded,
        *,
        record: JobRecord | None,
        now: datetime,
        allocation_state: AllocationState | None = None,
        allocation: bool = True,
        program: ProgramCheckpoints | None = None,
    ) -> tuple[Decision, OSError | None]:
        """Journal how the launch ended and what is done about it; an error where that failed.

        Args:
            incident: What ended the launch.
            end_event: How far it came.
            record: What Slurm says of the job.
            now: The wall clock.
            allocation_state: What is left of the allocation, where the job outlives nodes that it
                loses.
            allocation: Whether the job still has its nodes.
            program: What a program with checkpoints of its own could go back to.
        """
        full = self._write(end_event, IncidentSeen(incident=incident))
        decision = next_decision(
            self.file,
            self.state(),
            incident,
            record=record,
            now=now.timestamp(),
            on_hang=self.on_hang,
            allocation_state=allocation_state,
            allocation=allocation,
            program=program,
        )
        return decision, self._write(DecisionTaken(decision=decision)) or full

    def learn(self, incident: Incident) -> None:
        """Journal what is better known by now about the end of the last launch, if anything is.

        A run whose job somebody has cancelled stops there, whatever was decided before.
        """
        before = self.incident
        cancelled = incident.cause is Cause.USER_CANCELLED
        if before is not None and is_unexplained(before):
            if is_unexplained(incident):
                return
        elif not cancelled or (before is not None and before.cause is incident.cause):
            return  # a signal that follows from what was decided
        else:
            incident = replace(incident, id=f"{incident.id}.cancelled")
        self.incident = incident
        self._write(IncidentSeen(incident=incident))
        if cancelled:
            decision = decide(self.file.job.recovery, self.state(), incident)
            self._write(DecisionTaken(decision=decision))

    def only_warns(self, facts: LaunchFacts) -> bool:
        """Whether the ladder has nothing but a warning for it: then that is written down.

        For what the launch goes on with all the same, as it may with a standstill.  A slow node is
        never what a run is held for, unless the job file says just that.
        """
        self._warnings += 1
        incident = classify(facts, f"{self.incident_id}.warning{self._warnings}")
        policy = self.file.job.recovery
        slow = incident.cause is Cause.STRAGGLER
        if not slow and all(rung.do is not Action.WARN for rung in policy.ladder(incident.cause)):
            return False
        decision = decide(policy, self.state(), incident, in_process=True)
        if slow and decision.action is Action.HOLD and decision.rung is None:
            return True  # the ladder is used up
        if decision.action is not Action.WARN:
            return False
        return not self._write(IncidentSeen(incident=incident), DecisionTaken(decision=decision))

    def _decision_of_rank_0(self, facts: LaunchFacts) -> Decision | None:
        """What rank 0 has decided on and written down before it gave the launch up, if it has.

        Deciding twice would charge two budgets for one incident.  An end that it could not tell of
        any more is one all the same: a held run does not go on because rank 0 was killed as well.
        """
        attempts = self.state().attempts
        decisions = attempts[-1].decisions if attempts else ()
        prefix = f"{self.claim.attempt}.{self.launch}."
        matching = [
            each
            for _, each in decisions
            if each.incident_id == facts.decided
            or (each.action in _ENDS and each.incident_id.startswith(prefix))
        ]
        if matching:
            self._write(
                LaunchEnded(outcome=matching[-1].cause.value, step=facts.furthest, exact=True)
            )
        return matching[-1] if matching else None

    def hold(self, error: ForgeError) -> Decision:
        """Journal that a launch could not be started or conducted, and that the run is held for it.

        ``FencedError`` if another attempt has taken over: then it is not ours to judge.
        """
        self.fence()
        text = f"a launch failed: {error.message}"
        step = (Evidence(source="next step", text=error.next_step),) if error.next_step else ()
        incident = Incident(
            id=f"{self.incident_id}.error",
            cause=Cause.UNKNOWN,
            confidence=Confidence.CERTAIN,
            evidence=(Evidence(source="slurm_forge", text=text), *step),
        )
        decision = Decision.about(incident, Action.HOLD, plan=self.state().plan, reason=text)
        self._write(IncidentSeen(incident=incident), DecisionTaken(decision=decision))
        return decision

    @contextlib.contextmanager
    def held_on_error(self) -> Iterator[None]:
        """End the attempt with a hold if the block, which prepares it, raises a ForgeError."""
        try:
            yield
        except ForgeError as error:
            if not isinstance(error, FencedError):
                with contextlib.suppress(OSError, ForgeError):
                    self.hold(error)
                    self.end("held")
            raise

    def stop(self, why: str) -> None:
        """A person wants the run to stop before it is started again: journal that."""
        self._write(stop_decision(self.claim.attempt, self.state(), why))

    def _write(self, *events: Event) -> OSError | None:
        try:
            for event in events:
                self.journal.write(event)
        except OSError as error:
            return error
        return None

    def end(self, outcome: str) -> None:
        """The last line of this attempt.  What the attempt came to is settled by now."""
        with contextlib.suppress(OSError):
            self.journal.write(AttemptEnded(outcome=outcome), durable=True)
        self.journal.close()
        with contextlib.suppress(OSError, ForgeError):
            remember_saves(self.run, self.file.job, self.state())


def _is_unlimited(policy: Recovery, decision: Decision) -> bool:
    """Whether the decision may be taken any number of times (a requeue after a preemption)."""
    if decision.rung is None:
        return decision.action is Action.STOP
    return policy.ladder(decision.cause)[decision.rung].times is None


def begin(
    run: RunDirectory,
    *,
    job: str,
    restart_count: int,
    nodes: tuple[str, ...],
    via: str,
    slurm: Slurm | None = None,
    command: bool = False,
    unwanted: str = "",
    clock: Callable[[], float] = time.time,
) -> Attempt | StartRefusal:
    """Claim the run for a new attempt, unless there is nothing to do or nobody wants it.

    Where the attempt before it ended without a message, ``slurm`` is asked how; ``FencedError``
    where somebody else has claimed the run by then.  ``command``: the caller starts the run's
    command.
    ``unwanted``: why whoever started this wants no attempt any more, empty where they do.
    """
    run.refuse_others()
    if run.is_done():
        return StartRefusal.DONE
    records = read_to_fold(run, refresh=True)
    state = fold(records)
    if run.stop_asked():
        keep_stopped(run, state, records, "the file STOP exists")
        return StartRefusal.STOP_FILE
    if unwanted:
        keep_stopped(run, state, records, stopped_before_start(unwanted))
        return StartRefusal.AT_REST
    file = read_run_file(run.spec_file)
    released = _is_released(state, job, restart_count)
    if state.status.is_at_rest and not released:
        return StartRefusal.AT_REST
    if file.job.entry is None and not command:
        raise ForgeError(
            f"{run.name} has a command, not an entry",
            next_step="Start it as it was started first: slurm-forge exec, or its own script.",
        )
    if file.job.command is None and command:
        raise ForgeError(
            f"{run.name} has an entry, not a command",
            next_step="Start it with slurm-forge submit or slurm-forge run; or name another run: "
            "slurm-forge exec --name OTHER -- …",
        )
    with contextlib.suppress(OSError):
        report_revisions(run, file, state)
    claim = claim_attempt(
        run,
        job=job,
        restart_count=restart_count,
        host=socket.gethostname(),
        pid=os.getpid(),
        nodes=nodes,
        time=clock(),
    )
    verdict = None
    if not released:
        verdict = post_mortem(run, state, file, claim, slurm=slurm, now=clock())
    journal = JournalWriter(run, attempt=claim.attempt, writer="supervisor", clock=clock)
    # Whoever is fenced by the claim, and does not know it yet, may have written until now.
    records = read_to_fold(run, refresh=True)
    journal.advance_clock(records)
    if verdict is not None and (verdict.action in _ENDS or _needs_another_job(verdict)):
        return Attempt(run, file, claim, journal, verdict=verdict)  # it does not begin
    if released:
        journal.write(UserAsked(verb="release", user=""))
    journal.write(
        AttemptStarted(
            job=job,
            restart_count=restart_count,
            nodes=nodes,
            host=claim.host,
            via=via,
            read=read_position(records),
            code="" if file.code is None else str(file.code),
        ),
        durable=True,
    )
    own = process_environ()
    compact_journal(run, claim.attempt, Fence(run, claim.attempt))
    attempt = Attempt(
        run,
        file,
        claim,
        journal,
        on_hang=effective_on_hang(file, own),
        forbidden=forbidden(file, own),
    )
    with contextlib.suppress(OSError):
        for each in attempt.forbidden:
            journal.write(Note(text=f"{each}"[:400]))
    return attempt


def _needs_another_job(decision: Decision) -> bool:
    """Whether the job has to go back into the queue for what was decided."""
    return any(change.parameter in _OF_THE_JOB for change in decision.changes)


_OF_THE_JOB = frozenset({"mem_factor", "time_factor", "nodes"})


def _is_released(state: RunState, job: str, restart_count: int) -> bool:
    """Whether this start is one that we had put into the queue, held, and somebody released.

    Nothing else starts a held job: it is a person's wish that the run goes on.  Of a chain of array
    tasks those were held that waited, not the one that held them.
    """
    hold = state.held
    if hold is None or not hold.confirmed:
        return False
    if job.startswith(f"{hold.job}_"):
        return not state.attempts or job != state.attempts[-1].job
    return hold.job == job and restart_count > hold.restart_count


#: What a decision means for somebody who can't start ranks again in the same job.
REQUEUEING = frozenset(
    {
        Action.REQUEUE,
        Action.RELAUNCH,
        Action.ROLLBACK,
        Action.SHRINK_MICRO_BATCH,
        Action.RAISE_MEM,
        Action.FEWER_WORKERS,
        Action.RAISE_TIME,
        Action.FEWER_NODES,
        Action.WARN,
        Action.SKIP,
    }
)
#: What the supervisor cures without giving the nodes back.
RELAUNCHING = frozenset(
    {Action.RELAUNCH, Action.ROLLBACK, Action.SHRINK_MICRO_BATCH, Action.FEWER_WORKERS}
)
