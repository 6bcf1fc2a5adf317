"""The reaction to an instability, by all ranks together, between two steps.

Rank 0 decides (the program's hook first, then the policy) and journals the decision; all ranks get
it in one exchange, which happens only after an incident.  A rollback is carried out here if the
loop can be rewound; everything else ends the launch, and the supervisor carries out the decision.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from pydantic import TypeAdapter

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.control import Member
from slurm_forge.control.messages.rank import RecoveryNeeded, RolledBack
from slurm_forge.errors import HookError
from slurm_forge.journal import JournalWriter, Known, RunState, fold, read_to_fold
from slurm_forge.journal.events import DecisionTaken, IncidentSeen, Recovered
from slurm_forge.recovery.monitor.loss_anomaly import (
    announce,
    announced,
)
from slurm_forge.recovery.policy.decide import (
    asks_hook_first,
    decide,
)
from slurm_forge.recovery.policy.instability_hook import apply_answer
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.core.instability import (
    ActivePlan,
    Instability,
)
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.run_state import Hooks, TrainingProgress
from slurm_forge.training.instability.skip_tracker import (
    LaunchGivenUp,
    SkipTracker,
)
from slurm_forge.training.instability.spike_monitor import SpikeMonitor
from slurm_forge.training.loop.save_schedule import SaveSchedule
from slurm_forge.training.step.gradient_guard import LARGEST
from slurm_forge.vocabulary.cause import INSTABILITY, Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.json_value import Json

_AFTER_REFUSAL = (
    "correct what it found and let the run go on (slurm-forge requeue RUN), or choose another "
    "checkpoint (slurm-forge checkpoints --help)"
)
_CORRECT_THE_HOOK = "Correct the hook; the log of rank 0 has the traceback."


@dataclass(frozen=True, slots=True)
class _UnfinishedRollback:
    """A rollback whose cost is known once training has passed ``step`` again."""

    incident_id: str
    step: int
    repeated_steps: int
    since: float


class InstabilityHandler:
    """One object per launch and rank.

    ``rewind`` restores the newest usable checkpoint, and is None if the loop can't be rewound: then
    the launch ends instead.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        active_plan: ActivePlan,
        skip_tracker: SkipTracker,
        save_schedule: SaveSchedule,
        progress: TrainingProgress,
        hooks: Hooks,
        journal: JournalWriter | None,
        spike_monitor: SpikeMonitor | None,
        member: Member,
        group: dist.ProcessGroup | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._active_plan = active_plan
        self._skip_tracker = skip_tracker
        self._save_schedule = save_schedule
        self._progress = progress
        self._hooks = hooks
        self._journal = journal
        self._spike_monitor = spike_monitor
        self._member = member
        self._ranks = Ranks(group)
        self._clock = clock
        self._count = 0
        #: Rollbacks whose cost is not known yet.
        self.unfinished_rollbacks: list[_UnfinishedRollback] = []
        self.rewind: Callable[[], None] | None = None
        #: A batch was handed out and its step is not over: incidents are handled after it.
        self.batch_in_progress = False
        #: A rollback to before this step belongs to an earlier loop of the program.
        self.earliest = 0
        self._known_checkpoints: Known | None = None

    def boundary(self) -> bool:
        """Between two steps: handle what happened in the last ones; whether it was rewound."""
        if self.unfinished_rollbacks and self._progress.step > self.unfinished_rollbacks[0].step:
            self._journal_rollback_cost(self.unfinished_rollbacks.pop(0))
        if self.batch_in_progress:
            return False  # the batch would be trained on after the rollback, as another step
        trouble, self._skip_tracker.trouble = self._skip_tracker.trouble, None
        return trouble is not None and self.act(trouble)

    def act(self, trouble: Instability) -> bool:
        """Decide and act, on all ranks at this boundary.  Whether training was rewound."""
        since = self._clock()
        # A pending save may be the rollback's target, and its ranks may be about to be given up.
        self._save_schedule.finish_save()
        self._skip_tracker.trouble = None
        self._skip_tracker.read_all()
        self._count += 1
        brief = self._context.brief
        incident_id = f"{brief.attempt}.{brief.launch}.{self._count}"
        decided = self._ranks.agree(
            None, None, lambda _: self._decide(trouble, incident_id), doing="Deciding"
        )
        if decided is None:
            self._give_up(trouble, decided="")
        if "raised" in decided:
            raise HookError(
                f"the on_instability hook raised {decided['raised']}",
                next_step=_CORRECT_THE_HOOK,
            )
        decision: Decision = _decisions().validate_python(decided)
        if decision.action in (Action.SKIP, Action.WARN):
            self._skip_tracker.accept_and_continue()
            self._active_plan.plan = decision.plan
            if self._spike_monitor is not None and trouble.cause is Cause.LOSS_SPIKE:
                self._spike_monitor.tolerate()
            if trouble.cause is Cause.RANK_MISMATCH:
                self._save_schedule.accept_mismatch()
            if self._known_checkpoints is not None:
                self._save_schedule.agree_with(self._known_checkpoints)
            return False  # what ``read_all`` found meanwhile is handled at the next boundary
        rewind = self.rewind
        moves = decision.plan.exclude_nodes != self._active_plan.plan.exclude_nodes
        target = None if decision.target is None else CheckpointName.parse(decision.target)
        reachable = target is not None and target.step >= self.earliest
        here = decision.action is Action.ROLLBACK and reachable and not moves
        if rewind is None or not here:
            self._give_up(trouble, decided=incident_id)
        self._active_plan.plan, self._active_plan.limit = decision.plan, LARGEST
        self._skip_tracker.forget()
        rewind()
        step = self._progress.step
        if self._journal is not None:
            text = f"{decision.reason}, back to step {step}"
            self._member.send(RolledBack(step=step, text=text))
            self.unfinished_rollbacks.append(
                _UnfinishedRollback(incident_id, trouble.step, trouble.step - step, since)
            )
        return True

    def final_check(self) -> bool:
        """After the last step: handle what is wrong with it; False if training was rewound.

        A finished run is never examined again, and a problem that only a save would find may have
        occurred after the last one.
        """
        self._save_schedule.finish_save()
        self._skip_tracker.read_all()
        if self.boundary():
            return False
        self._save_schedule.compare_ranks()

        def together(trouble: Sequence[Mapping[str, Any]]) -> Json:
            state = dict.fromkeys(each for one in trouble for each in one["state"])
            proposals = [one["proposal"] for one in trouble if one["proposal"]]
            return {"state": "; ".join(state), "proposal": proposals[0] if proposals else ""}

        proposal = self._skip_tracker.open_proposal
        report: dict[str, Json] = {
            "state": list(self._save_schedule.unsound()),
            "proposal": "" if proposal is None else announce(proposal),
        }
        answer = self._ranks.agree(None, report, together, doing="Ending the run")
        if answer["proposal"]:
            # For the very last steps, nobody would hear of it on the channel any more.
            self._skip_tracker.announced(announced(answer["proposal"]))
        trouble, self._skip_tracker.trouble = self._skip_tracker.trouble, None
        text = answer["state"]
        # Non-finite values make ranks differ, too, and have a remedy.
        if trouble is not None and not (text and trouble.cause is Cause.RANK_MISMATCH):
            return not self.act(trouble)
        if not text:
            return True
        step = self._progress.step
        text = f"in the state after step {step}: {text}"
        return not self.act(
            Instability(cause=Cause.NON_FINITE, onset=step, step=step, text=text, in_memory=True)
        )

    def shrink(self, text: str, micro_batch: int) -> int | None:
        """The smaller micro-batch to continue with on this one rank; None if undecided.

        What is not decided here is not journalled: the launch ends, and the decision follows then.
        """
        journal, brief = self._journal, self._context.brief
        if journal is None or self._context.world_size != 1:
            return None
        self._context.fence()
        self._count += 1
        incident = Incident(
            id=f"{brief.attempt}.{brief.launch}.{self._count}",
            cause=Cause.CUDA_OOM,
            confidence=Confidence.CERTAIN,
            evidence=(Evidence(f"rank 0 on {self._context.host}", text),),
            step=self._progress.step,
            rank=0,
            hosts=(self._context.host,),
            micro_batch=micro_batch,
        )
        try:
            state = self._read(journal)
            decision = self._choose_decision(state, incident)
            smaller = decision.plan.micro_batch
            if decision.action is not Action.SHRINK_MICRO_BATCH or smaller is None:
                return None
            journal.write(IncidentSeen(incident=incident))
            journal.write(DecisionTaken(decision=decision), durable=True)
        except OSError:
            return None
        self._active_plan.plan = decision.plan
        self._member.send(RolledBack(step=self._progress.step, text=decision.reason))
        return smaller

    def refuse(self, text: str) -> NoReturn:
        """The program refuses to continue from the loaded checkpoint: the run is held.

        Called on all ranks.
        """
        self._count += 1
        brief, step = self._context.brief, self._progress.step
        trouble = Instability(
            cause=Cause.CHECKPOINT_BAD, onset=step, step=step, text=text, source="on_resume"
        )
        incident_id = f"{brief.attempt}.{brief.launch}.{self._count}"

        def hold(_: object) -> bool:
            journal = self._journal
            if journal is None:
                raise AssertionError("only rank 0 decides")
            self._context.fence()
            incident = trouble.incident(incident_id)
            try:
                journal.write(IncidentSeen(incident=incident))
                decision = Decision(
                    incident_id=incident_id,
                    cause=incident.cause,
                    action=Action.HOLD,
                    reason=f"{incident.cause.value}: {text}; next: {_AFTER_REFUSAL}",
                    plan=self._active_plan.plan,
                )
                journal.write(DecisionTaken(decision=decision), durable=True)
            except OSError:
                return False
            return True

        written = self._ranks.agree(None, None, hold, doing="Deciding")
        self._give_up(trouble, decided=incident_id if written else "")

    def _decide(self, trouble: Instability, incident_id: str) -> Any:
        """On rank 0: the decision as JSON; None if it can't be journalled."""
        incident = trouble.incident(incident_id)
        journal = self._journal
        if journal is None:
            raise AssertionError("only rank 0 decides")
        self._context.fence()
        try:
            journal.write(IncidentSeen(incident=incident))
            state = self._read(journal)
            self._known_checkpoints = state.known
            decision = self._choose_decision(state, incident)
            journal.write(DecisionTaken(decision=decision), durable=True)
        except OSError:
            return None  # a budget that is not charged would never be exhausted
        except HookError as error:
            traceback.print_exception(error.__cause__)
            return {"raised": error.message}
        return _decisions().dump_python(decision, mode="json")

    def _read(self, journal: JournalWriter) -> RunState:
        """The state of the run; records written from now on follow those that it is based on."""
        records = read_to_fold(self._context.directory)
        journal.advance_clock(records)
        return fold(records)

    def _choose_decision(self, state: RunState, incident: Incident) -> Decision:
        """The hook's answer if it is its turn in the ladder, otherwise the policy's decision."""
        spec = self._context.spec
        coupled = spec.batch_coupled

        def hook(rung: int | None) -> Decision | None:
            try:
                answer = self._hooks.instability(incident)
            except Exception as error:  # any exception: it is the program's code
                raise HookError(
                    f"{type(error).__name__}: {error}", next_step=_CORRECT_THE_HOOK
                ) from error
            if answer is None:
                return None
            return apply_answer(state, incident, answer, rung=rung, batch_coupled=coupled)

        def policy(*, ask: bool) -> Decision:
            return decide(
                spec.recovery,
                state,
                incident,
                batch_coupled=coupled,
                mem=spec.resources.mem,
                time=spec.resources.time,
                now=time.time(),
                in_process=True,
                hook=ask,
            )

        has_hook = incident.cause in INSTABILITY and self._hooks.on_instability
        decision = (
            hook(None) if has_hook and asks_hook_first(spec.recovery, incident.cause) else None
        )
        decision = decision or policy(ask=has_hook)
        if decision.action is Action.HOOK:
            decision = hook(decision.rung) or policy(ask=False)
        return decision

    def _give_up(self, trouble: Instability, *, decided: str) -> NoReturn:
        self._save_schedule.wait_for_save()
        self._member.send(
            RecoveryNeeded(
                cause=trouble.cause.value, step=trouble.step, text=trouble.text, decided=decided
            )
        )
        raise LaunchGivenUp

    def _journal_rollback_cost(self, rollback: _UnfinishedRollback) -> None:
        if self._journal is not None:
            seconds = self._clock() - rollback.since
            with contextlib.suppress(OSError):
                self._journal.write(
                    Recovered(
                        incident_id=rollback.incident_id,
                        steps=rollback.repeated_steps,
                        seconds=seconds,
                    )
                )


def _decisions() -> TypeAdapter[Decision]:
    return TypeAdapter(Decision)
