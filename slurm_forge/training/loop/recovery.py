"""What is done about an instability, by all ranks together, between two steps.

Rank 0 decides (the program's hook first, then the policy) and writes it down; all ranks hear it in
one exchange, which is issued only after an incident.  A rollback is carried out here where the loop
is ours to rewind; everything else ends the launch, and the supervisor does what was decided.
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
from slurm_forge.control.messages import protocol as p
from slurm_forge.errors import HookError
from slurm_forge.journal import JournalWriter, Known, RunState, fold, read_journal
from slurm_forge.journal.events import DecisionTaken, IncidentSeen, Recovered
from slurm_forge.journal.known import INSTABILITY
from slurm_forge.recovery.monitor.loss_anomaly import (
    announce,
    announced,
)
from slurm_forge.recovery.policy.decide import (
    asks_hook_first,
    decide,
)
from slurm_forge.recovery.policy.instability_hook import answered
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.core.hooks import Hooks
from slurm_forge.training.core.instability import (
    InForce,
    Trouble,
)
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.run_state import Progress
from slurm_forge.training.core.step_verdict import LARGEST
from slurm_forge.training.instability.skip_tracker import (
    LaunchGivenUp,
    Skips,
)
from slurm_forge.training.instability.spike_monitor import SpikeWatch
from slurm_forge.training.loop.save_schedule import Saves
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.json_value import Json

__all__ = ["Recovering"]


@dataclass(frozen=True, slots=True)
class _Owed:
    """A rollback whose cost is known once training is past ``step`` again."""

    incident_id: str
    step: int
    again: int
    since: float


class Recovering:
    """One object per launch and rank.

    ``rewind`` puts everything back to the newest checkpoint that may be used and is None where the
    loop can't be rewound: then the launch is ended for it.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        in_force: InForce,
        skips: Skips,
        saves: Saves,
        progress: Progress,
        hooks: Hooks,
        journal: JournalWriter | None,
        watch: SpikeWatch | None,
        member: Member,
        group: dist.ProcessGroup | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._in_force = in_force
        self._skips = skips
        self._saves = saves
        self._progress = progress
        self._hooks = hooks
        self._journal = journal
        self._watch = watch
        self._member = member
        self._ranks = Ranks(group)
        self._clock = clock
        self._count = 0
        self._owed: list[_Owed] = []
        self.rewind: Callable[[], None] | None = None
        #: A batch was handed out and its step is not over: what comes up is seen to after it.
        self.batch_out = False
        #: A rollback to before this step belongs to an earlier loop of the program.
        self.earliest = 0
        self._known: Known | None = None

    def boundary(self) -> bool:
        """Between two steps: see to what the last ones were; whether training was rewound."""
        if self._owed and self._progress.step > self._owed[0].step:
            self._settle_account(self._owed.pop(0))
        if self.batch_out:
            return False  # it would be trained on after the rollback, in another step's place
        trouble, self._skips.trouble = self._skips.trouble, None
        return trouble is not None and self.act(trouble)

    def act(self, trouble: Trouble) -> bool:
        """Decide about it and do it: on all ranks at this boundary.  Whether it was rewound."""
        since = self._clock()
        # A save in flight may be what is gone back to, and its ranks may be what is given up.
        self._saves.settle()
        self._skips.trouble = None
        self._skips.read_all()
        self._count += 1
        brief = self._context.brief
        incident_id = f"{brief.attempt}.{brief.launch}.{self._count}"
        said = self._ranks.agree(
            None, None, lambda _: self._decide(trouble, incident_id), doing="Deciding"
        )
        if said is None:
            self._give_up(trouble, decided="")
        if "raised" in said:
            raise HookError(
                f"the on_instability hook raised {said['raised']}",
                next_step="Correct the hook; the log of rank 0 has the traceback.",
            )
        decision: Decision = _decisions().validate_python(said)
        if decision.action in (Action.SKIP, Action.WARN):
            self._skips.let_pass()
            self._in_force.plan = decision.plan
            if self._watch is not None and trouble.cause is Cause.LOSS_SPIKE:
                self._watch.tolerate()
            if self._known is not None:
                self._saves.agree_with(self._known)
            return False  # what ``read_all`` has found meanwhile comes up at the next boundary
        rewind = self.rewind
        moves = decision.plan.exclude_nodes != self._in_force.plan.exclude_nodes
        target = None if decision.target is None else CheckpointName.parse(decision.target)
        ours = target is not None and target.step >= self.earliest
        here = decision.action is Action.ROLLBACK and ours and not moves
        if rewind is None or not here:
            self._give_up(trouble, decided=incident_id)
        self._in_force.plan, self._in_force.limit = decision.plan, LARGEST
        self._skips.forget()
        rewind()
        step = self._progress.step
        if self._journal is not None:
            text = f"{decision.reason}, back to step {step}"
            self._member.send(p.Cured(step=step, text=text))
            self._owed.append(_Owed(incident_id, trouble.step, trouble.step - step, since))
        return True

    def ends_well(self) -> bool:
        """After the last step: see to what is not right with it; False if training was rewound.

        A run that is finished is never looked at again, and what only a save would find may have
        come after the last one.
        """
        self._saves.settle()
        self._skips.read_all()
        if self.boundary():
            return False

        def together(found: Sequence[Mapping[str, Any]]) -> Json:
            state = dict.fromkeys(each for one in found for each in one["state"])
            proposals = [one["proposal"] for one in found if one["proposal"]]
            return {"state": "; ".join(state), "proposal": proposals[0] if proposals else ""}

        proposal = self._skips.open_proposal
        mine: dict[str, Json] = {
            "state": list(self._saves.unsound()),
            "proposal": "" if proposal is None else announce(proposal),
        }
        said = self._ranks.agree(None, mine, together, doing="Ending the run")
        if said["proposal"]:
            # Of the very last steps: nobody would hear of it on the channel any more.
            self._skips.announced(announced(said["proposal"]))
        found, self._skips.trouble = self._skips.trouble, None
        if found is not None:
            return not self.act(found)
        text = said["state"]
        if not text:
            return True
        step = self._progress.step
        text = f"in the state after step {step}: {text}"
        return not self.act(
            Trouble(cause=Cause.NON_FINITE, onset=step, step=step, text=text, in_memory=True)
        )

    def shrink(self, text: str, micro_batch: int) -> int | None:
        """The smaller micro-batch to go on with on this one rank; None where that is not decided.

        What is not decided here is journalled nowhere: the launch ends, and then it is.
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
            decision = self._chosen(state, incident)
            smaller = decision.plan.micro_batch
            if decision.action is not Action.SHRINK_MICRO_BATCH or smaller is None:
                return None
            journal.write(IncidentSeen(incident=incident))
            journal.write(DecisionTaken(decision=decision), durable=True)
        except OSError:
            return None
        self._in_force.plan = decision.plan
        self._member.send(p.Cured(step=self._progress.step, text=decision.reason))
        return smaller

    def _decide(self, trouble: Trouble, incident_id: str) -> Any:
        """On rank 0: the decision as JSON; None where it can't be written down."""
        incident = trouble.incident(incident_id)
        journal = self._journal
        if journal is None:
            raise AssertionError("only rank 0 decides")
        self._context.fence()
        try:
            journal.write(IncidentSeen(incident=incident))
            state = self._read(journal)
            self._known = state.known
            decision = self._chosen(state, incident)
            journal.write(DecisionTaken(decision=decision), durable=True)
        except OSError:
            return None  # a budget that is charged nowhere would never be used up
        except HookError as error:
            traceback.print_exception(error.__cause__)
            return {"raised": error.message}
        return _decisions().dump_python(decision, mode="json")

    def _read(self, journal: JournalWriter) -> RunState:
        """The state of the run; what is written from now on comes behind what it rests on."""
        records, _ = read_journal(self._context.directory, thin=True)
        journal.follow(records)
        return fold(records)

    def _chosen(self, state: RunState, incident: Incident) -> Decision:
        """The hook's answer where its place in the ladder is, and else what the policy says."""
        spec = self._context.spec
        coupled = spec.batch_coupled

        def hook(rung: int | None) -> Decision | None:
            try:
                said = self._hooks.instability(incident)
            except Exception as error:  # anything: it is the program's
                raise HookError(f"{type(error).__name__}: {error}", next_step="") from error
            if said is None:
                return None
            return answered(state, incident, said, rung=rung, batch_coupled=coupled)

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

        asked = incident.cause in INSTABILITY and self._hooks.on_instability
        decision = hook(None) if asked and asks_hook_first(spec.recovery, incident.cause) else None
        decision = decision or policy(ask=asked)
        if decision.action is Action.HOOK:
            decision = hook(decision.rung) or policy(ask=False)
        return decision

    def _give_up(self, trouble: Trouble, *, decided: str) -> NoReturn:
        self._saves.let_land()
        self._member.send(
            p.Recover(
                cause=trouble.cause.value, step=trouble.step, text=trouble.text, decided=decided
            )
        )
        raise LaunchGivenUp

    def _settle_account(self, owed: _Owed) -> None:
        if self._journal is not None:
            seconds = self._clock() - owed.since
            with contextlib.suppress(OSError):
                self._journal.write(
                    Recovered(incident_id=owed.incident_id, steps=owed.again, seconds=seconds)
                )


def _decisions() -> TypeAdapter[Decision]:
    return TypeAdapter(Decision)
