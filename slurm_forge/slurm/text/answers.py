"""What Slurm's commands mean by the messages on their standard error.

Their exit status is 1 for nearly everything, so the text is all there is.  The texts are those of
src/common/slurm_errno.c, the same from 22.05 to 26.05 unless a version is named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from slurm_forge.slurm.process import Completed

_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Communication connection failure",
    "Communication shutdown failure",
    "Message send failure",
    "Message receive failure",
    "Connection refused",
    "Connection timed out",
    "Connection reset by peer",
    "No route to host",
    "Network is unreachable",
    "Transport endpoint is not connected",
    "Socket timed out on send/recv operation",
    "Zero Bytes were transmitted or received",
    "Kernel reported delayed socket error",
    "Slurm backup controller in standby mode",
    "Controller is in standby mode",
    "Rate limit exceeded",
    "Could not establish a configuration source",
    "Protocol authentication error",
    "Unable to process configuration file",
    # All that `scontrol requeue` and `update` say when the controller is down (tried, 22.05.8).
    "Unexpected message received",
    "Problem talking to the database",
)
_UNKNOWN_JOB = ("Invalid job id specified",)
# Of an array task, and on the standard output.
_UNKNOWN_TASK = re.compile(r"^Job [0-9_+]+ not found$", re.M)


class RequeueAnswer(str, Enum):
    """What became of a request to requeue."""

    #: Slurm took it: the job ends now and waits to be started again.
    REQUEUED = "requeued"
    #: It is in the queue already, so what was wanted is the case.
    ALREADY_PENDING = "already_pending"
    #: ``--no-requeue``, JobRequeue=0 or a removed partition: it will never work for this job.
    DISABLED = "disabled"
    #: Not our job.
    DENIED = "denied"
    #: Slurm does not know the job, or has forgotten it (MinJobAge after its end).
    UNKNOWN_JOB = "unknown_job"
    #: Not started by sbatch.
    NOT_BATCH = "not_batch"
    #: A component of a heterogeneous job; only the leader can be requeued.
    NOT_LEADER = "not_leader"
    #: Slurm asks for a later attempt.
    TRY_AGAIN = "try_again"
    #: Refused with a message that is in none of the lists.
    REFUSED = "refused"
    #: The command does not exist here.
    NO_COMMAND = "no_command"
    #: No answer: it may or may not have happened.
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class RequeueReply:
    """A requeue's outcome and Slurm's own words."""

    outcome: RequeueAnswer
    stderr: str

    @property
    def in_queue(self) -> bool:
        """Whether the job now waits to be started again."""
        return self.outcome in {RequeueAnswer.REQUEUED, RequeueAnswer.ALREADY_PENDING}


_REQUEUE_TEXTS = (
    ("Job is pending execution", RequeueAnswer.ALREADY_PENDING),
    ("Requested operation is presently disabled", RequeueAnswer.DISABLED),
    ("Access/permission denied", RequeueAnswer.DENIED),
    ("Invalid user id", RequeueAnswer.DENIED),
    ("Only batch jobs are accepted or processed", RequeueAnswer.NOT_BATCH),
    ("Job not heterogeneous job leader", RequeueAnswer.NOT_LEADER),
    ("Job can not be altered now, try again later", RequeueAnswer.TRY_AGAIN),
)


def is_unreachable(completed: Completed) -> bool:
    """Whether the command did not get an answer: killed at its timeout, or no controller."""
    if completed.returncode is None:
        return True
    return completed.returncode != 0 and _has(completed.stderr, _UNREACHABLE)


def is_unknown_job(completed: Completed) -> bool:
    """Whether Slurm answered that it does not know the job."""
    if not completed.returncode:
        return False
    if _UNKNOWN_TASK.search(completed.stdout + completed.stderr):
        return True
    return _has(completed.stderr, _UNKNOWN_JOB)


def requeue_outcome(completed: Completed) -> RequeueAnswer:
    """What ``scontrol requeue`` or ``requeuehold`` answered for one job."""
    if completed.returncode == 0:
        return RequeueAnswer.REQUEUED
    if is_unreachable(completed):
        return RequeueAnswer.UNREACHABLE
    if is_unknown_job(completed):
        return RequeueAnswer.UNKNOWN_JOB
    for text, outcome in _REQUEUE_TEXTS:
        if _has(completed.stderr, (text,)):
            return outcome
    return RequeueAnswer.REFUSED


def _has(text: str, phrases: tuple[str, ...]) -> bool:
    lowered = text.lower()
    return any(phrase.lower() in lowered for phrase in phrases)
