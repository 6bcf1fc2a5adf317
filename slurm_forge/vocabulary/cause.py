"""Why something happened, how sure we are, and what that rests on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(str, Enum):
    """What went wrong, or what was requested.  The values are the keys of ``recovery:``."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    NODE_FAIL = "node_fail"
    CUDA_OOM = "cuda_oom"
    HOST_OOM = "host_oom"
    NON_FINITE = "non_finite"
    LOSS_SPIKE = "loss_spike"
    NCCL_ERROR = "nccl_error"
    HANG = "hang"
    STRAGGLER = "straggler"
    GPU_ERROR = "gpu_error"
    STORAGE = "storage"
    USER_CANCELLED = "user_cancelled"
    ADMIN_REQUEUE = "admin_requeue"
    STOP_REQUESTED = "stop_requested"
    CRASH = "crash"
    APP_ERROR = "app_error"
    ENV_MISMATCH = "env_mismatch"
    CHECKPOINT_BAD = "checkpoint_bad"
    RANK_MISMATCH = "rank_mismatch"
    EXTERNAL_SERVICE = "external_service"
    UNKNOWN = "unknown"


# Groups that several decisions depend on.

#: Slurm ends the attempt, and announces it where it can.
SLURM_INTERRUPTIONS = frozenset({Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.ADMIN_REQUEUE})
#: A person wants the run to stop.
USER_REQUESTS = frozenset({Cause.USER_CANCELLED, Cause.STOP_REQUESTED})
#: The numbers are bad: what was written last may be, too.
INSTABILITY = frozenset({Cause.NON_FINITE, Cause.LOSS_SPIKE})
#: Reported by a driver or by Slurm, not concluded from how a program ended.
REPORTED_NODE_FAULTS = frozenset({Cause.NODE_FAIL, Cause.GPU_ERROR})


class Confidence(str, Enum):
    """How strong the evidence is: ``certain`` rests on an authority, ``guess`` on little."""

    CERTAIN = "certain"
    LIKELY = "likely"
    GUESS = "guess"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation: where it was seen (``scontrol``, ``rank 3``, ``srun``) and its text."""

    source: str
    text: str
