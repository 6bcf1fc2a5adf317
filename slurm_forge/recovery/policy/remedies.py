"""What a person can do when the ladder of a cause is exhausted."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_forge.vocabulary.cause import Cause, Evidence

#: Introduces the next step in the reason of a decision and in a rank's last words.
NEXT = "; next: "
_UNSTABLE = (
    "look at the loss, the data and the learning rate around that step; to resume from an earlier "
    "checkpoint: slurm-forge checkpoints --help"
)
_REMEDIES = {
    Cause.CUDA_OOM: "use smaller models or sequences, activation checkpointing, or more GPUs",
    Cause.HOST_OOM: "ask for more memory (slurm-forge requeue RUN --mem 2G), or use fewer "
    "data-loader workers",
    Cause.NON_FINITE: _UNSTABLE,
    Cause.LOSS_SPIKE: _UNSTABLE,
    Cause.TIME_LIMIT: "save more often (checkpoint.every_minutes), or ask for more time "
    "(slurm-forge requeue RUN --time 8:00:00)",
    Cause.PREEMPTED: "save more often (checkpoint.every_minutes), or choose a partition that is "
    "preempted less",
    Cause.ADMIN_REQUEUE: "ask the cluster's support why it is requeued",
    Cause.NODE_FAIL: "exclude the failing nodes (slurm-forge requeue RUN --exclude NODES)",
    Cause.HANG: "look in the output for what the rank named in the evidence was waiting for",
    Cause.STRAGGLER: "exclude the slow node (slurm-forge requeue RUN --exclude NODES), or tolerate "
    "it (recovery: {straggler: [{do: warn}]})",
    Cause.NCCL_ERROR: "look at the network settings of the site (socket_interface)",
    Cause.GPU_ERROR: "report the node to the cluster's support and exclude it "
    "(slurm-forge requeue RUN --exclude NODES)",
    Cause.STORAGE: "check quota and free space of the run's file system",
    Cause.CHECKPOINT_BAD: "see why none is used (slurm-forge checkpoints list): promote one, or "
    "restore its folder",
    Cause.RANK_MISMATCH: "mend what the evidence names (wrap a plain model in "
    "DistributedDataParallel or fully_shard, give each rank samples of its own); exclude the node "
    "of a rank that differs alone (slurm-forge requeue RUN --exclude NODES)",
    Cause.APP_ERROR: "fix the error shown in the evidence",
    Cause.CRASH: "look at the end of the output (of the rank that died, if there are several)",
    Cause.ENV_MISMATCH: "restore what differs (or allow it under environment:), and install what "
    "is missing",
    Cause.EXTERNAL_SERVICE: "check whether the service answers again",
}


def train_further(run: str) -> str:
    """The command to continue beyond the end of a finished run; ``run`` is its name or path."""
    return (
        f"slurm-forge extend {run} --set args.KEY=VALUE (more steps), or in a new run: "
        f"slurm-forge fork {run} --name NEW"
    )


def own_next_step(evidence: Iterable[Evidence]) -> str:
    """The next step that the error in the evidence tells the user; empty if there is none."""
    steps = (each.text.partition(NEXT)[2].rstrip(".") for each in evidence)
    return next(filter(None, steps), "")


def remedy(cause: Cause) -> str:
    """One line, in the imperative; RUN in a command is a placeholder for the run's name."""
    return _REMEDIES.get(cause, "look at the evidence (slurm-forge explain)")
