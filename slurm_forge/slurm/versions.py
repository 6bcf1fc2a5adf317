"""What came with which version of Slurm, as far as anything here depends on it: one table.

The parsers, ``doctor``, the fake Slurm and the test cluster ask it.  What is not in it is no error:
a value that is not understood is kept as ``Unrecognized``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

_RELEASE = re.compile(r"\b([0-9]{2})\.([0-9]{2})\b")


@dataclass(frozen=True, slots=True)
class Unrecognized:
    """A variable, field or state of Slurm's whose value is not understood here."""

    name: str
    value: str

    def __str__(self) -> str:
        shown = self.value if len(self.value) <= 60 else self.value[:57] + "…"
        return f"{self.name}={shown!r}"


@dataclass(frozen=True, slots=True, order=True)
class SlurmRelease:
    """A major release, such as 24.11; what came later in it counts as having come with it."""

    year: int
    month: int

    @classmethod
    def parse(cls, text: str | None) -> SlurmRelease | None:
        """Of ``24.11.7`` or ``slurm-wlm 22.05.8``; None where no version can be read."""
        match = _RELEASE.search(text or "")
        return None if match is None else cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.year:02d}.{self.month:02d}"


class ChangeKind(Enum):
    """What has changed."""

    VARIABLE = "environment variable of the batch step"
    STATE = "job state"
    REASON = "reason of a waiting job"
    FIELD = "field"
    WORDS = "printed words"
    SETTING = "setting"
    BEHAVIOUR = "behaviour"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmChange:
    """One thing that a release brought, and where in Slurm's sources that is to be seen.

    ``value`` is what Slurm writes there, of a variable.
    """

    kind: ChangeKind
    name: str
    since: SlurmRelease
    source: str
    value: str = ""


def _change(kind: ChangeKind, name: str, since: str, source: str, value: str = "") -> SlurmChange:
    year, month = since.split(".")
    return SlurmChange(
        kind=kind,
        name=name,
        since=SlurmRelease(int(year), int(month)),
        source=source,
        value=value,
    )


_JOB_MGR, _ENV = "src/slurmctld/job_mgr.c", "src/common/env.c"
_REASONS = "src/common/slurm_protocol_defs.c, src/common/job_state_reason.c"

#: Compared in the sources of 22.05.8, 23.02.0 and each .0 release after it; variables, states and
#: words also on builds of 22.05.8, 23.11.11, 24.11.7, 25.05.8 and 26.05.3.
CHANGES: tuple[SlurmChange, ...] = (
    _change(ChangeKind.VARIABLE, "SLURM_JOB_START_TIME", "23.02", _ENV, "1795407286"),
    _change(ChangeKind.VARIABLE, "SLURM_JOB_END_TIME", "23.02", _ENV, "1795407886"),
    _change(ChangeKind.VARIABLE, "SLURM_OOM_KILL_STEP", "24.11", _ENV, "0"),
    _change(ChangeKind.VARIABLE, "SLURM_JOB_SLUID", "26.05", _ENV, "sDZNM839T30K00"),
    _change(ChangeKind.VARIABLE, "SLURM_JOB_EXCLUSIVE", "26.05", _ENV, "NO"),
    # Reserved numbers with a sign: SLURM_BATCH_SCRIPT in slurm/slurm.h.
    _change(ChangeKind.VARIABLE, "SLURM_STEP_ID", "26.05", f"{_ENV}, setup_env", "-5"),
    _change(ChangeKind.VARIABLE, "SLURM_STEPID", "26.05", f"{_ENV}, setup_env", "-5"),
    _change(ChangeKind.STATE, "EXPEDITING", "25.11", "src/common/slurm_protocol_defs.c"),
    _change(ChangeKind.REASON, "RaisedSignal", "23.02", _REASONS),
    _change(ChangeKind.REASON, "ReservationInvalid", "23.02", _REASONS),
    _change(ChangeKind.REASON, "Constraints", "23.11", _REASONS),
    _change(ChangeKind.REASON, "MaxPoweredUpNodes", "24.05", _REASONS),
    _change(ChangeKind.REASON, "MpiPortsBusy", "24.05", _REASONS),
    _change(ChangeKind.REASON, "NvidiaImexChannels", "25.11", _REASONS),
    _change(ChangeKind.FIELD, "sacct Restarts", "24.11", "src/sacct/sacct.c"),
    # Where it is, Command is the script without its arguments (tried on 26.05.3).
    _change(ChangeKind.FIELD, "scontrol SubmitLine", "25.11", "src/scontrol/info_job.c"),
    _change(ChangeKind.WORDS, "DUE to SIGNAL", "25.05", "src/slurmd/slurmstepd/req.c"),
    _change(ChangeKind.WORDS, "DUE TO TASK FAILURE", "25.05", "src/slurmd/slurmstepd/req.c"),
    # Before: SlurmctldParameters=preempt_send_user_signal.
    _change(
        ChangeKind.SETTING,
        "PreemptParameters=send_user_signal",
        "23.02",
        "src/interfaces/preempt.c",
    ),
    # Before: a constant, 5.
    _change(ChangeKind.SETTING, "MaxBatchRequeue", "23.02", "src/common/read_config.c"),
    _change(ChangeKind.SETTING, "SchedulerParameters=requeue_delay", "25.11", _JOB_MGR),
    # Tried on 22.05.8 and 26.05.3.
    _change(ChangeKind.BEHAVIOUR, "requeues a job that exits in its grace time", "24.05", _JOB_MGR),
)

#: The newest release that this was written for, and tried on.
NEWEST = SlurmRelease(26, 5)

_SINCE = {change.name: change.since for change in CHANGES}
_OF_EVERY_VERSION = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_PARTITION": "normal",
    "SLURM_CLUSTER_NAME": "cluster",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "n1",
}


def has(release: SlurmRelease, name: str) -> bool:
    """Whether that release has what ``CHANGES`` calls by this name; KeyError for another name."""
    return release >= _SINCE[name]


def batch_variables(release: SlurmRelease) -> Mapping[str, str]:
    """What that release sets in a batch step, as far as anything here reads it, or it is new."""
    new = {
        change.name: change.value
        for change in CHANGES
        if change.kind is ChangeKind.VARIABLE and release >= change.since
    }
    return {**_OF_EVERY_VERSION, **new}
