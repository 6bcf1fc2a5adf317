"""The recovery ladders: for each cause the rungs that are tried in order, then hold.

What each rung does is decided elsewhere; here is what can be asked for, and what is asked for
when the user says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from slurm_forge.documents import did_you_mean, wrong_key
from slurm_forge.spec.safeguards import Limits
from slurm_forge.spec.types import Count, Duration, Factor, JobSection, Steps
from slurm_forge.vocabulary.cause import SLURM_INTERRUPTIONS, Cause
from slurm_forge.vocabulary.decision import Action, Start

__all__ = [
    "LONGEST_WAIT",
    "Ladder",
    "Limits",
    "Recovery",
    "Rung",
    "SkipSamples",
    "VariableSet",
    "cures",
    "default_recovery",
    "keys_of",
    "takes_variables",
    "trusts_process",
]

#: However often a wait is doubled: what is out of order for longer is looked for once an hour.
LONGEST_WAIT = timedelta(hours=1)


class SkipSamples(str, Enum):
    """Which samples a rollback leaves out when it trains again from the good checkpoint."""

    NONE = "none"
    #: Those of the steps between the onset of the instability and the incident.
    WINDOW = "window"


class VariableSet(str, Enum):
    """Which of the site's sets of variables the ranks are started with, beside those for always."""

    NONE = "none"
    #: The site's ``env.on_hang``.
    ON_HANG = "on_hang"


_RUNGS = tuple(action for action in Action if action is not Action.STOP)
_STATE_KEYS = ("lr_scale", "ramp_steps", "skip_samples", "most_skipped", "reseed")

#: The keys that each action takes beside ``do``.
_KEYS: dict[Action, tuple[str, ...]] = {
    Action.WARN: ("times",),
    Action.SKIP: ("times",),
    Action.ROLLBACK: ("times", "depth", *_STATE_KEYS, "exclude_node", "start"),
    Action.SHRINK_MICRO_BATCH: ("times", "factor", "start"),
    Action.RAISE_MEM: ("times", "factor"),
    Action.RAISE_TIME: ("times", "factor"),
    Action.FEWER_NODES: ("times", "factor", "exclude_node", "variables"),
    Action.FEWER_WORKERS: ("times", "factor", "start"),
    Action.HOOK: ("times",),
    Action.RELAUNCH: ("times", "wait", "exclude_node", *_STATE_KEYS, "start", "variables"),
    Action.REQUEUE: ("times", "wait", "exclude_node", "variables"),
    Action.HOLD: (),
    Action.RAISE: (),
}
_DEFAULT_FACTOR = {
    Action.SHRINK_MICRO_BATCH: 0.5,
    Action.RAISE_MEM: 1.5,
    Action.RAISE_TIME: 1.5,
    Action.FEWER_NODES: 0.5,
    Action.FEWER_WORKERS: 0.5,
}
#: Their factor makes something smaller.
_SMALLER = frozenset({Action.SHRINK_MICRO_BATCH, Action.FEWER_NODES, Action.FEWER_WORKERS})
#: Theirs makes something larger.
_LARGER = frozenset({Action.RAISE_MEM, Action.RAISE_TIME})
#: More good checkpoints than this behind the newest are never kept.
_DEEPEST = 100
_FINAL = frozenset({Action.HOLD, Action.RAISE})


def keys_of(action: Action) -> tuple[str, ...]:
    """The keys that a rung takes beside ``do``."""
    return _KEYS.get(action, ())


def _rung_action(value: object) -> Action:
    words = [action.value for action in _RUNGS]
    if value in _RUNGS or value in words:
        # Made here: to pydantic this is Python from here on, and strict Python takes no text.
        return Action(value)
    raise ValueError(f"unknown value {json.dumps(str(value))} {did_you_mean(str(value), words)}")


class Rung(JobSection):
    """One action against a cause, and how often.  Keys that its ``do`` ignores are errors."""

    known_as: ClassVar[Mapping[str, str]] = {
        "action": "do", "count": "times", "retries": "times", "max": "times", "limit": "times",
        "lr_factor": "lr_scale", "lr": "lr_scale", "exclude": "exclude_node",
        "exclude_nodes": "exclude_node", "ramp": "ramp_steps", "skip": "skip_samples",
        "window": "skip_samples", "back": "depth", "further_back": "depth", "seed": "reseed",
        "max_skipped": "most_skipped", "delay": "wait", "backoff": "wait", "back_off": "wait",
        "pause": "wait", "sleep": "wait", "env": "variables", "environment": "variables",
    }  # fmt: skip

    do: Annotated[
        Action,
        BeforeValidator(_rung_action),
        WithJsonSchema({"type": "string", "enum": [action.value for action in _RUNGS]}),
    ] = Field(description="What is done.")
    times: Count | None = Field(
        default=None,
        description="How often, before the next rung (default: without limit). For skip: "
        "consecutive steps.",
    )
    factor: Factor | None = Field(
        default=None,
        description="For shrink_micro_batch, fewer_workers and fewer_nodes (below 1, 0.5), "
        "raise_mem and raise_time (above 1, 1.5). Fewer nodes are fewer ranks with other random "
        "numbers; global batch and samples stay the same. The time limit is raised only if an "
        "attempt ended without a new checkpoint, to at most 16 times the request.",
    )
    wait: Duration = Field(
        default=timedelta(0),
        description="Pause before it; doubles each time without progress, up to an hour.",
    )
    depth: Steps = Field(
        default=0,
        le=_DEEPEST,
        description="How many good checkpoints before the newest one to go back to.",
    )
    lr_scale: Factor = Field(
        default=1.0, le=1, description="Factor on the learning rate afterwards."
    )
    ramp_steps: Steps = Field(
        default=0, description="Steps until the learning rate is back; 0: it stays lowered."
    )
    skip_samples: SkipSamples = Field(
        default=SkipSamples.NONE,
        description="window: skip the samples of the unstable steps, and more of them if the same "
        "place fails again.",
    )
    most_skipped: Count | None = Field(
        default=None,
        description="Never skip more samples than this in all (default: those of 256 steps or 0.1 "
        "% of the samples so far, whichever is more).",
    )
    reseed: bool = Field(
        default=False,
        strict=True,
        description="Draw other random numbers (dropout, ...); the order of samples stays the "
        "same.",
    )
    exclude_node: bool = Field(
        default=False, strict=True, description="Exclude the node that the incident started on."
    )
    start: Start = Field(
        default=Start.WARM,
        description="How ranks are started in the same job: cold (a new srun and interpreter), "
        "warm (forked by the agents on the nodes), in_process (ranks that can unwind continue in "
        "their process); the next colder one if that is impossible.",
    )

    variables: VariableSet | None = Field(
        default=None,
        description="on_hang: the ranks get the site's post-hang variables (env.on_hang) until a "
        "checkpoint is past the incident; none: they do not. Default: on_hang for hang and "
        "nccl_error.",
    )

    @model_validator(mode="after")
    def _keys_belong(self) -> Rung:
        takes = _KEYS[self.do]
        for key in type(self).model_fields:
            if key in self.model_fields_set and key not in ("do", *takes):
                known = f"it takes {', '.join(takes)}" if takes else "it takes nothing else"
                raise wrong_key(key, f'does not belong to "do: {self.do.value}" ({known})')
        if self.factor is None and self.do in _DEFAULT_FACTOR:
            # Frozen for everybody else.  (A validator that runs before would have to be handed
            # plain Python, where strictness means something else.)
            object.__setattr__(self, "factor", _DEFAULT_FACTOR[self.do])
        if self.do in _SMALLER and not (self.factor or 0) < 1:
            raise wrong_key("factor", f"expected less than 1, got {self.factor}")
        if self.do in _LARGER and not 1 < (self.factor or 0) <= 16:
            raise wrong_key("factor", f"expected more than 1 and at most 16, got {self.factor}")
        if self.wait > LONGEST_WAIT:
            raise wrong_key("wait", "expected no more than 1h")
        if self.ramp_steps and self.lr_scale == 1.0:
            raise wrong_key("ramp_steps", "there is nothing to ramp without lr_scale below 1")
        if self.most_skipped is not None and self.skip_samples is SkipSamples.NONE:
            raise wrong_key("most_skipped", "nothing is skipped without skip_samples: window")
        return self

    @model_serializer(mode="wrap")
    def _only_what_counts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written = handler(self)
        fields = type(self).model_fields
        return {
            key: value
            for key, value in written.items()
            if key == "do" or (key in _KEYS[self.do] and getattr(self, key) != fields[key].default)
        }


Ladder = tuple[Rung, ...]

_ENDINGS = frozenset({Action.REQUEUE, Action.HOLD})
_PROCESS = _ENDINGS | {Action.RELAUNCH}
#: What a node or the way between nodes may be to blame for: fewer of them may do.
_FROM_NODES = _PROCESS | {Action.FEWER_NODES}
_WATCHED = _PROCESS | {Action.WARN}
_NUMERIC = _WATCHED | {Action.SKIP, Action.ROLLBACK, Action.HOOK, Action.RAISE}

#: What can cure what.
_CURES: dict[Cause, frozenset[Action]] = {
    Cause.PREEMPTED: _ENDINGS,
    Cause.TIME_LIMIT: _ENDINGS | {Action.RAISE_TIME},
    Cause.ADMIN_REQUEUE: _ENDINGS,
    Cause.NODE_FAIL: _FROM_NODES,
    Cause.CUDA_OOM: _PROCESS | {Action.SHRINK_MICRO_BATCH, Action.RAISE},
    Cause.HOST_OOM: _PROCESS | {Action.RAISE_MEM, Action.FEWER_WORKERS, Action.SHRINK_MICRO_BATCH},
    Cause.NON_FINITE: _NUMERIC,
    Cause.LOSS_SPIKE: _NUMERIC,
    Cause.NCCL_ERROR: _FROM_NODES,
    Cause.HANG: _WATCHED | {Action.FEWER_NODES},
    Cause.STRAGGLER: _WATCHED,
    Cause.GPU_ERROR: _FROM_NODES,
    Cause.STORAGE: _WATCHED,
    Cause.CRASH: _PROCESS,
    Cause.APP_ERROR: _PROCESS,
    Cause.ENV_MISMATCH: _WATCHED,
    Cause.CHECKPOINT_BAD: _PROCESS,
    Cause.RANK_MISMATCH: _WATCHED,
    Cause.EXTERNAL_SERVICE: _WATCHED,
    Cause.UNKNOWN: _PROCESS,
}
#: Where variables for the network may cure anything, and the conductor decides.
_TAKE_VARIABLES = frozenset(
    {
        Cause.HANG, Cause.NCCL_ERROR, Cause.NODE_FAIL, Cause.GPU_ERROR, Cause.CRASH, Cause.UNKNOWN
    }
)  # fmt: skip
#: And where they are used unless the job file says otherwise.
_VARIABLES_BY_DEFAULT = frozenset({Cause.HANG, Cause.NCCL_ERROR})
#: Interruptions that are nobody's fault and may come any number of times.
_UNLIMITED = SLURM_INTERRUPTIONS | {Cause.NODE_FAIL}


def _requeue(times: int | None = None, *, exclude_node: bool = False, wait_s: int = 0) -> Rung:
    wait = timedelta(seconds=wait_s)
    return Rung(do=Action.REQUEUE, times=times, exclude_node=exclude_node, wait=wait)


def _relaunch(times: int, *, wait_s: int = 0) -> Rung:
    return Rung(do=Action.RELAUNCH, times=times, wait=timedelta(seconds=wait_s))


def _rollback(times: int) -> Rung:
    return Rung(
        do=Action.ROLLBACK,
        times=times,
        lr_scale=0.5,
        ramp_steps=200,
        skip_samples=SkipSamples.WINDOW,
    )


@cache
def _default_ladders() -> Mapping[Cause, Ladder]:
    """What is done when the user says nothing: first what costs seconds, then the queue.

    Only what comes back by itself in minutes is waited for, and the nodes are kept for seconds at
    most.  Elsewhere a wait gains nothing: Slurm leaves two minutes between two starts of a job
    anyway, and who has a deadline would only lose time.

    Made on first use: building the model of a rung would slow every start of the command line.
    """
    skip = Rung(do=Action.SKIP, times=3)
    stuck = (_relaunch(2), _requeue(3, exclude_node=True))
    # Three, so that the window that is left out, four times as long each time, outgrows the bad
    # data: 3 bad steps are found at once, 12 and then 48 are left out.
    unstable = (skip, _rollback(3))
    return {
        Cause.PREEMPTED: (_requeue(),),
        Cause.TIME_LIMIT: (_requeue(),),
        Cause.ADMIN_REQUEUE: (_requeue(),),
        Cause.NODE_FAIL: (_requeue(10, exclude_node=True),),
        Cause.CUDA_OOM: (Rung(do=Action.SHRINK_MICRO_BATCH, times=3),),
        Cause.HOST_OOM: (
            Rung(do=Action.RAISE_MEM, times=2),
            Rung(do=Action.FEWER_WORKERS, times=1),
            # Trained on CPUs, what a GPU holds elsewhere lies there, too.
            Rung(do=Action.SHRINK_MICRO_BATCH, times=3),
        ),
        Cause.NON_FINITE: unstable,
        Cause.LOSS_SPIKE: unstable,
        Cause.NCCL_ERROR: stuck,
        Cause.HANG: stuck,
        # Nothing is wrong with what is computed: whether it is worth a start is for people to say.
        Cause.STRAGGLER: (Rung(do=Action.WARN),),
        Cause.GPU_ERROR: (_requeue(3, exclude_node=True),),
        Cause.STORAGE: (_relaunch(1, wait_s=10), _requeue(3, wait_s=180)),
        Cause.CRASH: (_relaunch(1), _requeue(2, exclude_node=True)),
        Cause.APP_ERROR: (_relaunch(1), _requeue(1)),
        # The same environment would differ again, and what differs is for a human to judge.
        Cause.ENV_MISMATCH: (),
        Cause.CHECKPOINT_BAD: (_relaunch(1),),
        # Which of two copies is right is for a person to judge, and a program that does not
        # average its gradients would do the same again.
        Cause.RANK_MISMATCH: (),
        Cause.EXTERNAL_SERVICE: (_relaunch(2, wait_s=30), _requeue(5, wait_s=300)),
        Cause.UNKNOWN: (_requeue(2),),
    }


def _ladder(cause: Cause, description: str) -> Ladder:
    field: Ladder = Field(
        default_factory=lambda: _default_ladders()[cause], description=description
    )
    return field


class Recovery(JobSection):
    """What is done about each cause, in order; after the last rung the run is held."""

    known_as: ClassVar[Mapping[str, str]] = {
        "nan": "non_finite", "inf": "non_finite", "oom": "cuda_oom", "gpu_oom": "cuda_oom",
        "out_of_memory": "host_oom", "timeout": "time_limit", "preemption": "preempted",
        "spike": "loss_spike", "nccl": "nccl_error", "deadlock": "hang", "exception": "app_error",
        "slow_node": "straggler", "slow": "straggler", "replica_mismatch": "rank_mismatch",
        "divergence": "rank_mismatch", "sdc": "rank_mismatch",
        "ceilings": "limits", "ceiling": "limits", "budget": "limits", "budgets": "limits",
    }  # fmt: skip

    preempted: Ladder = _ladder(Cause.PREEMPTED, "A job with higher priority took the nodes.")
    time_limit: Ladder = _ladder(Cause.TIME_LIMIT, "The time limit of the attempt ended.")
    admin_requeue: Ladder = _ladder(Cause.ADMIN_REQUEUE, "An administrator requeued the job.")
    node_fail: Ladder = _ladder(Cause.NODE_FAIL, "Slurm lost a node of the job.")
    cuda_oom: Ladder = _ladder(Cause.CUDA_OOM, "A GPU ran out of memory.")
    host_oom: Ladder = _ladder(Cause.HOST_OOM, "The kernel killed a process for memory.")
    non_finite: Ladder = _ladder(Cause.NON_FINITE, "NaN or infinity in loss or gradient.")
    loss_spike: Ladder = _ladder(Cause.LOSS_SPIKE, "The loss left its band.")
    nccl_error: Ladder = _ladder(Cause.NCCL_ERROR, "Communication between ranks failed.")
    hang: Ladder = _ladder(Cause.HANG, "No progress within the deadline.")
    straggler: Ladder = _ladder(Cause.STRAGGLER, "A node is permanently slower than the others.")
    gpu_error: Ladder = _ladder(Cause.GPU_ERROR, "A GPU reported a fault of its hardware.")
    storage: Ladder = _ladder(Cause.STORAGE, "The file system failed or is full.")
    crash: Ladder = _ladder(Cause.CRASH, "A rank was killed by a signal.")
    app_error: Ladder = _ladder(Cause.APP_ERROR, "The program raised an exception.")
    env_mismatch: Ladder = _ladder(
        Cause.ENV_MISMATCH, "The environment has changed since the start."
    )
    checkpoint_bad: Ladder = _ladder(
        Cause.CHECKPOINT_BAD, "Checkpoints exist, but none can be used."
    )
    rank_mismatch: Ladder = _ladder(
        Cause.RANK_MISMATCH,
        "Ranks that hold copies of the same parameters differ, or train on the wrong samples.",
    )
    external_service: Ladder = _ladder(
        Cause.EXTERNAL_SERVICE, "An external service did not answer."
    )
    unknown: Ladder = _ladder(Cause.UNKNOWN, "It ended for an unknown reason.")
    limits: Limits = Field(
        default_factory=Limits,
        description="How far the run continues by itself, whatever the ladders allow.",
    )

    @model_validator(mode="after")
    def _every_rung_can_be_reached_and_left(self) -> Recovery:
        for cause in _CURES:
            ladder = self.ladder(cause)
            for index, rung in enumerate(ladder):
                _check_rung(cause, ladder, index, rung)
        return self

    def ladder(self, cause: Cause) -> Ladder:
        """The rungs for a cause in order; none for what is not ours to undo (a user's cancel)."""
        return getattr(self, cause.value) if cause in _CURES else ()


def trusts_process(policy: Recovery, cause: Cause | None = None) -> bool:
    """Whether a rung (for that cause) has ranks go on in their process (``start: in_process``)."""
    causes = _CURES if cause is None else (cause,)
    return any(rung.start is Start.IN_PROCESS for each in causes for rung in policy.ladder(each))


def takes_variables(cause: Cause, rung: Rung) -> bool:
    """Whether the launch behind this rung gets the site's variables for after a hang."""
    if "variables" not in _KEYS[rung.do]:
        return False
    if rung.variables is None:
        return cause in _VARIABLES_BY_DEFAULT
    return rung.variables is VariableSet.ON_HANG


def _check_rung(cause: Cause, ladder: Ladder, index: int, rung: Rung) -> None:
    def wrong(key: str, message: str) -> Exception:
        return wrong_key((cause.value, index, key), message)

    if rung.do not in _CURES[cause]:
        cures = ", ".join(action.value for action in Action if action in _CURES[cause])
        raise wrong("do", f'"{rung.do.value}" does nothing about {cause.value} (try: {cures})')
    if rung.variables is VariableSet.ON_HANG and cause not in _TAKE_VARIABLES:
        known = ", ".join(each.value for each in Cause if each in _TAKE_VARIABLES)
        raise wrong("variables", f"the site's post-hang variables are for {known}")
    endless = rung.times is None and rung.do not in _FINAL
    if endless and cause not in _UNLIMITED and rung.do is not Action.WARN:
        limitless = ", ".join(each.value for each in Cause if each in _UNLIMITED)
        raise wrong("do", f'say how often ("times: 2"); only {limitless} may repeat without limit')
    if index + 1 < len(ladder) and (endless or rung.do in _FINAL):
        why = "has no times and repeats without limit" if endless else "ends the ladder"
        raise wrong("do", f'"{rung.do.value}" {why}: remove the rungs after it')


def cures(cause: Cause) -> tuple[Action, ...]:
    """What a ladder for the cause may hold; nothing for what is not ours to undo."""
    return tuple(action for action in Action if action in _CURES.get(cause, ()))


def default_recovery() -> Recovery:
    """The ladders in force for a job file that says nothing about recovery."""
    return Recovery()
