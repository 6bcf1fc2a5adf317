"""A run to which things happen; every decision goes through the journal, as in real life."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import strategies as st
from pydantic import ValidationError

from slurm_forge.journal import events as ev
from slurm_forge.journal.file import Record
from slurm_forge.journal.fold import advance
from slurm_forge.journal.state import RunState
from slurm_forge.recovery import decide
from slurm_forge.recovery.nodes.placement import AllocationState
from slurm_forge.spec.recovery import Recovery, default_recovery, keys_of
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import SampleWindow
from slurm_forge.vocabulary.trust import Trust

GIB = 1 << 30
CAUSES = st.sampled_from(list(Cause))
UNSTABLE = (Cause.NON_FINITE, Cause.LOSS_SPIKE)


def incident(cause: Cause, number: int = 1, **changes: object) -> Incident:
    made = Incident(
        id=f"1.{number}",
        cause=cause,
        confidence=Confidence.LIKELY,
        step=100,
        hosts=("n3",),
        micro_batch=8,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


class Life:
    """Tells events one after the other; ``twice`` writes every one of them two times."""

    def __init__(
        self, policy: Recovery | None = None, *, via: str = "x", twice: bool = False
    ) -> None:
        self.policy = policy or default_recovery()
        self.records: list[Record] = []
        self.decisions: list[Decision] = []
        self.state = RunState()
        self._copies = 2 if twice else 1
        self._names = self._told = 0
        self._via = via
        self.now = 0.0
        self.number, self.launch = 0, 1
        self.attempt()

    def attempt(self, nodes: tuple[str, ...] = ()) -> None:
        """Another start of the job."""
        self.number, self.launch = self.number + 1, 1
        count = self.number - 1
        self.tell(
            ev.AttemptStarted(job="1", restart_count=count, nodes=nodes, host="n1", via=self._via)
        )

    def launched(self, *, begin: int | None = None, end: int | None = None, why: str = "") -> None:
        """A launch that resumes at step ``begin``, if it comes to that, and ends at ``end``."""
        self.tell(ev.LaunchStarted(world_size=2))
        if begin is not None:
            self.tell(ev.Resumed(step=begin, checkpoint=None, world_size=2))
        self.tell(ev.LaunchEnded(outcome=why, step=end))

    def asked(self, verb: str = "requeue") -> None:
        """A person lets the run go on."""
        self.tell(ev.UserAsked(verb=verb, user="me"), "cli-0")

    def tell(self, event: ev.Event, writer: str = "s-0") -> None:
        self._told += 1
        self.now += 1.0
        for _ in range(self._copies):
            record = Record(
                attempt=self.number,
                launch=self.launch,
                sequence=len(self.records),
                time=self.now,
                writer=writer,
                event=event,
            )
            self.records.append(record)
            self.state = advance(self.state, record)

    def happens(
        self,
        cause: Cause,
        *,
        coupled: bool = False,
        mem: int | None = 4 * GIB,
        time: timedelta | None = None,
        nodes: int | None = None,
        in_process: bool = False,
        room: AllocationState | None = None,
        **changes: object,
    ) -> Decision:
        """An incident; each one differs in its id unless ``id`` is given."""
        named = f"{self.number}.{len(self.decisions)}"
        seen = incident(cause, **{"id": named, **changes})
        self.tell(ev.IncidentSeen(incident=seen))
        decision = decide(
            self.policy,
            self.state,
            seen,
            batch_coupled=coupled,
            mem=mem,
            time=time,
            nodes=nodes,
            now=self.now,
            in_process=in_process,
            allocation_state=room,
        )
        self.tell(ev.DecisionTaken(decision=decision))
        self.decisions.append(decision)
        return decision

    def commit(
        self, step: int, *, good: bool = False, findings: tuple[str, ...] = ()
    ) -> CheckpointName:
        """A checkpoint of a name of its own; ``good``: healthy steps have followed it."""
        self._names += 1
        name = CheckpointName(step, self.number, self.launch, f"{self._names:08x}")
        committed = ev.CheckpointCommitted(
            name=str(name), step=step, reason="", seconds=1.0, size=1, findings=findings
        )
        self.tell(committed)
        if good:
            self.judge(name, Trust.GOOD)
        return name

    def prune(self, names: list[str]) -> None:
        self.tell(ev.CheckpointsPruned(names=tuple(names), reason="keep_last"))

    def judge(self, name: CheckpointName, trust: Trust, *, by_person: bool = False) -> None:
        judged = ev.CheckpointJudged(name=str(name), trust=trust, reason="")
        self.tell(judged, "cli-0" if by_person else "s-0")


def window(first: int, stop: int) -> SampleWindow:
    return SampleWindow(first, stop)


@st.composite
def policies(draw: st.DrawFn) -> Recovery:
    """Any policy that the spec accepts, from ladders of random rungs."""
    ladders: dict[str, list[dict[str, object]]] = {}
    for cause in draw(st.lists(CAUSES, unique=True, max_size=5)):
        rungs: list[dict[str, object]] = []
        for _ in range(draw(st.integers(0, 4))):
            rung = draw(rungs_of_any_kind())
            if _accepted({cause.value: [*rungs, rung]}):
                rungs.append(rung)
        if _accepted({cause.value: rungs}):
            ladders[cause.value] = rungs
    return Recovery.model_validate(ladders)


@st.composite
def rungs_of_any_kind(draw: st.DrawFn) -> dict[str, object]:
    """Keys for a rung, half of which the spec refuses."""
    values: dict[str, st.SearchStrategy[object]] = {
        "times": st.integers(1, 4),
        "lr_scale": st.sampled_from([0.1, 0.5, 1.0]),
        "ramp_steps": st.sampled_from([0, 50]),
        "factor": st.sampled_from([0.01, 0.5, 0.9, 1.5, 4.0]),
        "exclude_node": st.just(True),
        "wait": st.sampled_from(["0s", "30s", "20m", "1h"]),
        "depth": st.integers(0, 3),
        "skip_samples": st.just("window"),
        "most_skipped": st.sampled_from([1, 500, 10**6]),
        "reseed": st.booleans(),
    }
    do = draw(st.sampled_from([action for action in Action if action is not Action.STOP]))
    belonging = [key for key in values if key in keys_of(do)]
    keys = draw(st.lists(st.sampled_from(belonging), unique=True)) if belonging else []
    return {"do": do.value, **{key: draw(values[key]) for key in keys}}


def _accepted(ladders: dict[str, list[dict[str, object]]]) -> bool:
    try:
        Recovery.model_validate(ladders)
    except ValidationError:
        return False
    return True
