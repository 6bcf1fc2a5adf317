"""Events about runs that change on purpose: another job file, and a beginning in another run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slurm_forge.vocabulary.job_change import JobChange
from slurm_forge.vocabulary.plan import RecoveryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChanged:
    """A person changed the job of the run, or which code it uses.

    ``verb`` is ``extend``, ``change``, ``fork`` or ``requeue --code new``.

    ``revision`` numbers the changes of a run from 1; the ``run.yaml`` before it is kept under that
    number.  ``step`` is that of the newest checkpoint at that time.  ``reopened``: the run was
    finished and is not any more.
    """

    verb: str
    user: str
    revision: int
    changes: tuple[JobChange, ...] = ()
    step: int | None = None
    reopened: bool = False
    kind: Literal["job_changed"] = "job_changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The run begins at a checkpoint of another run.

    ``parent`` is the path of that run, ``digest`` the SHA-256 of the manifest of its
    ``checkpoint``; ``base`` is the name of the copy in this run.  ``fresh`` names what is not taken
    over: ``optimizer``, ``data``, ``rng``.  ``global_batch`` is the batch size of the parent, where
    it is known, and ``plan`` the part of its recovery plan that stays in force.  ``local``: the
    parent was trained without Slurm.
    """

    parent: str
    checkpoint: str
    digest: str
    step: int
    base: str
    user: str
    fresh: tuple[str, ...] = ()
    global_batch: int | None = None
    plan: RecoveryPlan = field(default_factory=RecoveryPlan)
    local: bool = False
    kind: Literal["forked"] = "forked"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPositionMissing:
    """A loop of the program's own resumes at ``step`` without a registered data position."""

    step: int
    kind: Literal["data_position_missing"] = "data_position_missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionsReplaced:
    """Optimizer options and schedules of the program won over those of the checkpoint.

    Because the run was changed on purpose since the checkpoint was written.
    """

    checkpoint: str
    step: int
    options: tuple[str, ...] = ()
    kind: Literal["options_replaced"] = "options_replaced"
