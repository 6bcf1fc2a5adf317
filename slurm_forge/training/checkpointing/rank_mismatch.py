"""A mismatch between ranks as an incident that all ranks act on."""

from __future__ import annotations

from slurm_forge.checkpoint.write.replicas import RankMismatch
from slurm_forge.recovery.monitor.loss_anomaly import Anomaly
from slurm_forge.spec.recovery import Recovery
from slurm_forge.training.core.instability import Instability
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action

_SOURCE = "comparison of the ranks"


def tolerates(policy: Recovery) -> bool:
    """Whether the job continues if ranks differ: no checkpoint is suspect then."""
    ladder = policy.ladder(Cause.RANK_MISMATCH)
    return bool(ladder) and ladder[0].do is Action.WARN


def anomaly_of(mismatch: RankMismatch) -> Anomaly:
    """Convert it for ranks that learn of it over the control channel."""
    return Anomaly(
        Cause.RANK_MISMATCH,
        _onset(mismatch),
        mismatch.step,
        mismatch.text,
        in_memory=True,
        rank=mismatch.rank,
        hosts=(mismatch.host,) if mismatch.host else (),
    )


def instability_of(mismatch: RankMismatch) -> Instability:
    """Convert it for ranks that took part in the comparison."""
    return Instability(
        cause=Cause.RANK_MISMATCH,
        onset=_onset(mismatch),
        step=mismatch.step,
        text=mismatch.text,
        rank=mismatch.rank,
        hosts=(mismatch.host,) if mismatch.host else (),
        in_memory=True,
        source=_SOURCE,
    )


def _onset(mismatch: RankMismatch) -> int:
    """Return the first step that may have caused the difference, counted from 1."""
    return min(mismatch.step, (mismatch.equal_at or 0) + 1)
