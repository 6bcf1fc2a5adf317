"""What the conductor tells every rank of a launch, once, over the control channel."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from slurm_forge.control.messages.preflight import Thoroughness
from slurm_forge.vocabulary.plan import RecoveryPlan, SampleWindow, Variable

__all__ = ["BRIEF_KEY", "LaunchBrief"]

#: Key under which the conductor publishes the brief.
BRIEF_KEY = "brief"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchBrief:
    """What every rank of a launch must know and agree on, published by the conductor.

    ``committed_step`` is the newest step that history says was committed: resuming from nothing is
    refused where it is not None.  ``resume_step`` is that of the newest one that may be used.
    ``preflight`` is how closely the nodes are looked at before anything else.
    """

    attempt: int
    launch: int
    plan: RecoveryPlan
    committed_step: int | None
    resume_step: int | None = None
    preflight: Thoroughness = Thoroughness.OFF

    def to_text(self) -> str:
        """JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> LaunchBrief:
        """Read what ``to_text`` wrote."""
        body = json.loads(text)
        plan = body["plan"]
        known = {f.name for f in fields(RecoveryPlan)}
        given = {name: value for name, value in plan.items() if name in known}
        given["exclude_nodes"] = tuple(given.get("exclude_nodes", ()))
        given["skipped"] = tuple(SampleWindow(**each) for each in given.get("skipped", ()))
        given["variables"] = tuple(Variable(**each) for each in given.get("variables", ()))
        return cls(
            attempt=int(body["attempt"]),
            launch=int(body["launch"]),
            plan=RecoveryPlan(**given),
            committed_step=body["committed_step"],
            resume_step=body.get("resume_step"),
            preflight=Thoroughness(body.get("preflight", "off")),
        )
