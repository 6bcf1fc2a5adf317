"""Facts as they were observed on real Slurms, and the cause that they mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery import LaunchFacts, classify
from slurm_forge.recovery.incident.launch_facts import LostRank, RankFailure
from slurm_forge.recovery.monitor.probe_verdict import ProbeFailure
from slurm_forge.recovery.monitor.stalls import Stall
from slurm_forge.slurm.records import AccountingRecord, JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=timezone.utc)
LIMIT = timedelta(hours=4)
RUNNING = JobRecord(
    job_id=42,
    name="tiny",
    state=JobState.RUNNING,
    state_text="RUNNING",
    start_time=NOW - timedelta(hours=1),
    end_time=NOW + timedelta(hours=3),
    time_limit=LIMIT,
)


def job(state: JobState = JobState.RUNNING, **changes: Any) -> JobRecord:
    return replace(RUNNING, state=state, state_text=state.value, **changes)


def failed(cause: Cause, rank: int = 2, **changes: Any) -> RankFailure:
    made = RankFailure(
        rank=rank, host=f"n{rank}", cause=cause, step=70, text=cause.value, micro_batch=8
    )
    return replace(made, **changes)


LATE = ProbeFailure(
    cause=Cause.HANG,
    ranks=(4, 5),
    hosts=("n6", "n6"),
    step=64,
    confidence=Confidence.LIKELY,
    evidence=(Evidence("probe", "late: rank 4 (n6), rank 5 (n6)"),),
)


@dataclass(frozen=True)
class Case:
    name: str
    cause: Cause
    confidence: Confidence
    facts: dict[str, Any]
    hosts: tuple[str, ...] = ()
    rank: int | None = None
    says: str = ""


IN_GRACE = job(preempt_time=NOW, end_time=NOW + timedelta(seconds=10))
ENDING_NOW = job(JobState.COMPLETING, end_time=NOW)
TERM = {"rank_signals": ("SIGTERM",)}
BOTH = {**TERM, "batch_signals": ("SIGTERM",)}
ENDED_BY_PREEMPTION = (
    "slurmstepd-n1: error: *** JOB 42 ON n1 CANCELLED AT 2026-11-21T12:00:00 DUE TO PREEMPTION ***"
)
KILLED_NODE = "srun: error: Node failure on n2\nsrun: Job step aborted: Waiting up to 7 seconds"
# As Slurm 22.05.8 says it; others write "slurmstepd:" without the node.
OOM = (
    "srun: error: n1: task 0: Out Of Memory\n"
    "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=2.0. Some of your processes may "
    "have been killed by the cgroup out-of-memory handler."
)
OLDER_OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0"
CUDA_TEXT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.\n"

#: As printed by 22.05.8: a task was killed, and srun ends the others.
ENDED_BY_SRUN = (
    "srun: error: n1: task 0: Killed\n"
    "srun: launch/slurm: _step_signal: Terminating StepId=42.1\n"
    "slurmstepd-n2: error: *** STEP 42.1 ON n2 CANCELLED AT 2026-11-22T21:42:34 ***\n"
)
#: And somebody's scancel of a step.
STEP_CANCELLED = "slurmstepd-n2: error: *** STEP 42.1 ON n2 CANCELLED AT 2026-11-22T21:42:34 ***\n"

STALL = Stall(
    cause=Cause.HANG, late_ranks=(3,), late_hosts=("n3",), step=50, since=timedelta(seconds=40),
    limit=timedelta(seconds=30), evidence=(Evidence("watchdog", "rank 3 stands still"),),
)  # fmt: skip


def row(state: JobState) -> AccountingRecord:
    return AccountingRecord(
        job_ref="7", step=None, job_id=7, state=state, state_text=state.value, start_time=NOW
    )


CANCELLED_IN_GRACE = job(JobState.COMPLETING, preempt_time=NOW - timedelta(seconds=1), end_time=NOW)
STEP_TEXT = (
    "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T12:00:00 ***\n"
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
)


CASES = [
    Case(
        "a standstill; ranks that were ended for it lost their peers",
        Cause.HANG,
        Confidence.LIKELY,
        {"stalled": STALL, "failures": (failed(Cause.NCCL_ERROR), failed(Cause.APP_ERROR))},
        hosts=("n3",),
        rank=3,
        says="rank 3 stands still",
    ),
    Case(
        "a standstill in which a file system does not answer",
        Cause.STORAGE,
        Confidence.LIKELY,
        {"stalled": replace(STALL, cause=Cause.STORAGE)},
        hosts=("n3",),
        rank=3,
    ),
    Case(
        "a standstill, and the job is being preempted",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {**TERM, "job_at_notice": IN_GRACE, "stalled": STALL},
    ),
    Case(
        "preempted with grace: the steps got SIGTERM, the job still runs, PreemptTime is set",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {
            **TERM,
            "job_at_start": RUNNING,
            "job_at_notice": IN_GRACE,
            "job_at_end": IN_GRACE,
            "stopped_at": 70,
        },
        says="PreemptTime=12:00:00 EndTime=12:00:10",
    ),
    Case(
        "preempted without grace: requeued by Slurm already, which counts it as a restart",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": job(JobState.COMPLETING, preempt_time=NOW, restarts=1),
        },
    ),
    Case(
        "the preemption is seen only by the second question",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {**TERM, "job_at_notice": RUNNING, "job_at_end": IN_GRACE},
    ),
    Case(
        "preempted, and a rank failed on its way out",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {**TERM, "job_at_notice": IN_GRACE, "failures": (failed(Cause.APP_ERROR),)},
    ),
    Case(
        "scancel: steps and batch step in the same moment, COMPLETING, EndTime now",
        Cause.USER_CANCELLED,
        Confidence.LIKELY,
        {**BOTH, "job_at_start": RUNNING, "job_at_notice": ENDING_NOW},
        says="JobState=COMPLETING",
    ),
    Case(
        "scancel where rank 0 conducts and nobody sees the batch step",
        Cause.USER_CANCELLED,
        Confidence.LIKELY,
        {**TERM, "job_at_start": RUNNING, "job_at_notice": ENDING_NOW},
    ),
    Case(
        "scancel, and Slurm has finished with it",
        Cause.USER_CANCELLED,
        Confidence.CERTAIN,
        {**BOTH, "job_at_start": RUNNING, "job_at_notice": job(JobState.CANCELLED, end_time=NOW)},
    ),
    Case(
        "an administrator's requeue: COMPLETING as after scancel, but Restarts has gone up",
        Cause.ADMIN_REQUEUE,
        Confidence.GUESS,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": job(
                JobState.COMPLETING, restarts=1, start_time=NOW, end_time=NOW + LIMIT
            ),
        },
        says="Restarts from 0 to 1",
    ),
    Case(
        "requeued by somebody, as accounting says",
        Cause.ADMIN_REQUEUE,
        Confidence.CERTAIN,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": job(
                JobState.COMPLETING, restarts=1, start_time=NOW, end_time=NOW + LIMIT
            ),
            "job_rows": (row(JobState.REQUEUED), row(JobState.PENDING)),
        },
        says="sacct",
    ),
    Case(
        "preempted, and requeued by the program itself at its signal",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": IN_GRACE,
            "job_rows": (row(JobState.REQUEUED), row(JobState.PENDING)),
        },
        says="PreemptTime=12:00:00",
    ),
    Case(
        "the end of the time limit, and requeued by the program itself at its signal",
        Cause.TIME_LIMIT,
        Confidence.CERTAIN,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": RUNNING,
            "due_time_limit": True,
            "job_rows": (row(JobState.REQUEUED), row(JobState.PENDING)),
        },
        says="lead",
    ),
    Case(
        "a scancel in the moment of the notice: PreemptTime is set, the grace time is not over",
        Cause.USER_CANCELLED,
        Confidence.LIKELY,
        {
            **BOTH,
            "terminated_after": timedelta(0),
            "job_at_notice": CANCELLED_IN_GRACE,
            "grace": timedelta(seconds=30),
        },
        says="before the end of the grace time of 30 s",
    ),
    Case(
        "the same where only accounting knows",
        Cause.USER_CANCELLED,
        Confidence.CERTAIN,
        {**BOTH, "job_at_notice": CANCELLED_IN_GRACE, "job_rows": (row(JobState.CANCELLED),)},
        says="CANCELLED",
    ),
    Case(
        "the batch step was signalled after a preemption, and Slurm has not answered since",
        Cause.PREEMPTED,
        Confidence.GUESS,
        {**BOTH, "job_at_notice": IN_GRACE, "signalled_since": True, "stopped_at": 70},
        says="not known yet",
    ),
    Case(
        "the same where slurmstepd says that the preemption has ended the job",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {
            **BOTH,
            "job_at_notice": IN_GRACE,
            "signalled_since": True,
            "batch_text": ENDED_BY_PREEMPTION,
        },
    ),
    Case(
        "the time limit came before the grace time was over, and accounting does not answer",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {
            **BOTH,
            "job_at_notice": replace(CANCELLED_IN_GRACE, start_time=NOW - LIMIT),
            "grace": timedelta(seconds=30),
        },
    ),
    Case(
        "a limit of the account, by slurmstepd's words alone",
        Cause.TIME_LIMIT,
        Confidence.LIKELY,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": ENDING_NOW,
            "job_at_end": ENDING_NOW,
            "batch_text": ENDED_BY_PREEMPTION.replace("PREEMPTION", "TIME LIMIT"),
        },
        says="DUE TO TIME LIMIT",
    ),
    Case(
        "no record of a second start, and accounting knows only how the first one ended",
        Cause.ADMIN_REQUEUE,
        Confidence.LIKELY,
        {
            **BOTH,
            "restart_count": 1,
            "job_rows": (row(JobState.PREEMPTED),),
            "batch_text": ENDED_BY_PREEMPTION.replace("PREEMPTION", "JOB REQUEUE"),
        },
    ),
    Case(
        "scancel of a second start, and accounting knows only how the first one ended",
        Cause.USER_CANCELLED,
        Confidence.LIKELY,
        {
            **BOTH,
            "restart_count": 1,
            "job_at_start": job(restarts=1, start_time=NOW - timedelta(seconds=30)),
            "job_at_notice": job(
                JobState.COMPLETING,
                restarts=1,
                start_time=NOW - timedelta(seconds=30),
                end_time=NOW,
            ),
            "job_rows": (
                replace(
                    row(JobState.PREEMPTED),
                    start_time=NOW - timedelta(seconds=80),
                    end_time=NOW - timedelta(seconds=35),
                ),
                replace(row(JobState.RUNNING), start_time=NOW - timedelta(seconds=30)),
            ),
        },
        says="JobState=COMPLETING",
    ),
    Case(
        "the same where Slurm has answered only now, and the row of this start is not there yet",
        Cause.USER_CANCELLED,
        Confidence.LIKELY,
        {
            **BOTH,
            "restart_count": 1,
            "job_at_end": job(
                JobState.COMPLETING,
                restarts=1,
                start_time=NOW - timedelta(seconds=30),
                end_time=NOW,
            ),
            "job_rows": (
                replace(
                    row(JobState.PREEMPTED),
                    start_time=NOW - timedelta(hours=1),
                    end_time=NOW - timedelta(seconds=35),
                ),
                replace(row(JobState.PENDING), start_time=None),
            ),
        },
        says="JobState=COMPLETING",
    ),
    Case(
        "scancel, on a node whose clock is 20 s behind the controller's",
        Cause.USER_CANCELLED,
        Confidence.LIKELY,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": job(JobState.COMPLETING, end_time=NOW + timedelta(seconds=20)),
        },
    ),
    Case(
        "preempted without grace where preemption cancels",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {**BOTH, "job_at_notice": CANCELLED_IN_GRACE, "job_rows": (row(JobState.PREEMPTED),)},
    ),
    Case(
        "the batch step was signalled, ranks are gone, and Slurm does not answer",
        Cause.PREEMPTED,
        Confidence.GUESS,
        {**BOTH, "job_at_start": RUNNING, "lost": (LostRank(1, "n1"),), "launcher_text": STEP_TEXT},
        says="not known yet",
    ),
    Case(
        "the step was cancelled, by its words, and Slurm has said nothing since",
        Cause.PREEMPTED,
        Confidence.GUESS,
        {**TERM, "job_at_start": RUNNING, "launcher_text": STEP_TEXT, "stopped_at": 70},
        says="not known yet",
    ),
    Case(
        "requeued, pending already",
        Cause.ADMIN_REQUEUE,
        Confidence.GUESS,
        {**BOTH, "job_at_notice": job(JobState.PENDING, end_time=None, start_time=None)},
    ),
    Case(
        "the time limit, by our own clock",
        Cause.TIME_LIMIT,
        Confidence.CERTAIN,
        {"due_time_limit": True, "lead": timedelta(minutes=2), "job_at_notice": RUNNING},
        says="lead 120 s",
    ),
    Case(
        "the time limit, by Slurm's warning signal",
        Cause.TIME_LIMIT,
        Confidence.LIKELY,
        {
            "rank_signals": ("SIGUSR1",),
            "job_at_notice": job(
                start_time=NOW - LIMIT + timedelta(seconds=60),
                end_time=NOW + timedelta(seconds=60),
            ),
        },
        says="start plus TimeLimit",
    ),
    Case(
        "the time limit was reached and Slurm noticed some seconds late",
        Cause.TIME_LIMIT,
        Confidence.LIKELY,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": job(
                JobState.COMPLETING,
                start_time=NOW - LIMIT - timedelta(seconds=25),
                end_time=NOW,
            ),
        },
    ),
    Case(
        "the STOP file, whatever else is seen",
        Cause.STOP_REQUESTED,
        Confidence.CERTAIN,
        {
            "stop_file": True,
            **TERM,
            "job_at_notice": IN_GRACE,
            "failures": (failed(Cause.APP_ERROR),),
        },
    ),
    Case(
        "its starter was told to stop, and the ranks were signalled as well",
        Cause.STOP_REQUESTED,
        Confidence.CERTAIN,
        {"stopped_by": "SIGTERM", **TERM, "failures": (failed(Cause.NCCL_ERROR),)},
        says="SIGTERM",
    ),
    Case(
        "a signal where there is no Slurm that could explain it",
        Cause.PREEMPTED,
        Confidence.GUESS,
        {"by_slurm": False, "rank_signals": ("SIGTERM",), "stopped_at": 65},
        says="SIGTERM, of unknown origin",
    ),
    Case(
        "a signal by hand: nothing in Slurm's records explains it",
        Cause.PREEMPTED,
        Confidence.GUESS,
        {
            **TERM,
            "job_at_start": RUNNING,
            "job_at_notice": RUNNING,
            "job_at_end": RUNNING,
            "stopped_at": 70,
        },
        says="SIGTERM, unexplained",
    ),
    Case(
        "a signal, and the controller does not answer",
        Cause.PREEMPTED,
        Confidence.GUESS,
        {**TERM, "stopped_at": 70},
    ),
    Case(
        "the kernel killed a rank for memory",
        Cause.HOST_OOM,
        Confidence.LIKELY,
        {"lost": (LostRank(1, "n1"),), "exit_status": 143, "launcher_text": OOM},
        hosts=("n1",),
        rank=1,
        says="rank 1: on n1: ended without a message",
    ),
    Case(
        "a rank was killed for memory, as another version of Slurm says it",
        Cause.HOST_OOM,
        Confidence.LIKELY,
        {"lost": (LostRank(1, "n1"),), "exit_status": 143, "launcher_text": OLDER_OOM},
        hosts=("n1",),
        rank=1,
        says="oom_kill event",
    ),
    Case(
        "a rank was killed for memory, its peers' connections broke, and they spoke first",
        Cause.HOST_OOM,
        Confidence.LIKELY,
        {
            "lost": (LostRank(1, "n1"),),
            "failures": (failed(Cause.NCCL_ERROR, 0), failed(Cause.NCCL_ERROR, 2)),
            "launcher_text": OOM,
        },
        hosts=("n1",),
        rank=1,
    ),
    Case(
        "a loader worker was killed, and what the rank can't see Slurm says",
        Cause.HOST_OOM,
        Confidence.LIKELY,
        {"failures": (failed(Cause.CRASH, 2),), "launcher_text": OOM},
        hosts=("n2",),
        rank=2,
        says="oom-kill",
    ),
    Case(
        "a rank is gone, and the kernel's counter of killed processes has risen",
        Cause.HOST_OOM,
        Confidence.LIKELY,
        {"lost": (LostRank(1, "n1"),), "killed_for_memory": "oom_kill from 0 to 1 in /g"},
        hosts=("n1",),
        rank=1,
        says="oom_kill from 0 to 1",
    ),
    Case(
        "a rank that printed about its GPU's memory died of something else",
        Cause.CRASH,
        Confidence.LIKELY,
        {"lost": (LostRank(1, "n1"),), "exit_status": 139, "launcher_text": CUDA_TEXT},
        hosts=("n1",),
        rank=1,
    ),
    Case(
        "an exception of the program stays one, whoever was killed after it",
        Cause.APP_ERROR,
        Confidence.LIKELY,
        {"failures": (failed(Cause.APP_ERROR),), "launcher_text": OOM},
        hosts=("n2",),
        rank=2,
    ),
    Case(
        "a rank was killed for memory, and srun's SIGTERM for the others came first",
        Cause.HOST_OOM,
        Confidence.LIKELY,
        {**TERM, "job_at_notice": RUNNING, "exit_status": 143, "launcher_text": OOM},
        hosts=("n1",),
        rank=0,
    ),
    Case(
        "a node died",
        Cause.NODE_FAIL,
        Confidence.LIKELY,
        {"exit_status": 143, "launcher_text": KILLED_NODE},
        hosts=("n2",),
    ),
    Case(
        "a node died, and the job is being ended and requeued: not a cancellation",
        Cause.NODE_FAIL,
        Confidence.LIKELY,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": job(JobState.COMPLETING, end_time=NOW, restarts=1),
            "launcher_text": KILLED_NODE,
        },
        hosts=("n2",),
    ),
    Case(
        "a node died, and only the job's record says so",
        Cause.NODE_FAIL,
        Confidence.CERTAIN,
        {
            **BOTH,
            "job_at_start": RUNNING,
            "job_at_notice": job(JobState.COMPLETING, end_time=NOW, restarts=1, failed_node="n7"),
            "lost": (LostRank(4, "n4"), LostRank(7, "n7")),
        },
        hosts=("n7",),
        rank=7,
        says="FailedNode=n7",
    ),
    Case(
        "several nodes died: no name that could be excluded",
        Cause.NODE_FAIL,
        Confidence.LIKELY,
        {"exit_status": 143, "launcher_text": "srun: error: Node failure on n[2-3]"},
    ),
    Case(
        "the failed node of an earlier attempt is still in the record",
        Cause.CRASH,
        Confidence.LIKELY,
        {
            "job_at_start": job(failed_node="n7"),
            "job_at_end": job(failed_node="n7"),
            "lost": (LostRank(0, "n1"),),
        },
        hosts=("n1",),
        rank=0,
    ),
    Case(
        "NaN, given up",
        Cause.NON_FINITE,
        Confidence.LIKELY,
        {"failures": (failed(Cause.NON_FINITE, 0), failed(Cause.NON_FINITE, 1))},
        hosts=("n0",),
        rank=0,
    ),
    Case(
        "an exception of the program",
        Cause.APP_ERROR,
        Confidence.LIKELY,
        {"failures": (failed(Cause.APP_ERROR),), "exit_status": 1},
        hosts=("n2",),
        rank=2,
        says="rank 2 on n2",
    ),
    Case(
        "the first failure counts",
        Cause.CUDA_OOM,
        Confidence.LIKELY,
        {"failures": (failed(Cause.CUDA_OOM, 3), failed(Cause.APP_ERROR, 1))},
        hosts=("n3",),
        rank=3,
    ),
    Case(
        "a peer's broken connection was heard before the failure that broke it",
        Cause.CUDA_OOM,
        Confidence.LIKELY,
        {"failures": (failed(Cause.NCCL_ERROR, 0), failed(Cause.CUDA_OOM, 3))},
        hosts=("n3",),
        rank=3,
    ),
    Case(
        "a rank was killed and its peers' connections broke",
        Cause.CRASH,
        Confidence.LIKELY,
        {
            "lost": (LostRank(3, "n3"),),
            "failures": (failed(Cause.NCCL_ERROR, 0), failed(Cause.NCCL_ERROR, 1)),
            "exit_status": 143,
        },
        hosts=("n3",),
        rank=3,
    ),
    Case(
        "a rank was killed during a save, and the others could not finish it",
        Cause.CRASH,
        Confidence.LIKELY,
        {
            "lost": (LostRank(3, "n3"),),
            "failures": (failed(Cause.STORAGE, 0, after_loss=True),),
        },
        hosts=("n3",),
        rank=3,
    ),
    Case(
        "a rank failed, and another one went while it said so",
        Cause.APP_ERROR,
        Confidence.LIKELY,
        {"failures": (failed(Cause.APP_ERROR),), "lost": (LostRank(0, "n0"),)},
        hosts=("n2",),
        rank=2,
    ),
    Case(
        "communication failed, and nobody went first",
        Cause.NCCL_ERROR,
        Confidence.LIKELY,
        {"failures": (failed(Cause.NCCL_ERROR, 1), failed(Cause.NCCL_ERROR, 0))},
        hosts=("n1",),
        rank=1,
    ),
    Case(
        "killed by a signal, without a word",
        Cause.CRASH,
        Confidence.LIKELY,
        {"lost": (LostRank(1, "n1"),), "exit_status": 139},
        hosts=("n1",),
        rank=1,
        says="139 (SIGSEGV)",
    ),
    Case(
        "srun failed before any rank came",
        Cause.CRASH,
        Confidence.LIKELY,
        {"exit_status": 1, "launcher_text": "srun: error: Unable to create step"},
        says="Unable to create step",
    ),
    Case(
        "a task was killed before its rank had said anything, and srun signalled the others",
        Cause.CRASH,
        Confidence.LIKELY,
        {
            **TERM,
            "job_at_notice": RUNNING,
            "job_at_end": RUNNING,
            "exit_status": 137,
            "launcher_text": ENDED_BY_SRUN,
            "batch_text": ENDED_BY_SRUN.replace("42.1", "42.0"),
        },
        hosts=("n1",),
        rank=0,
        says="task 0: Killed",
    ),
    Case(
        "somebody cancelled the step, and srun had ended the step before it",
        Cause.USER_CANCELLED,
        Confidence.LIKELY,
        {
            **TERM,
            "job_at_notice": RUNNING,
            "job_at_end": RUNNING,
            "exit_status": 143,
            "batch_text": ENDED_BY_SRUN.replace("42.1", "42.0") + STEP_CANCELLED,
        },
        says="STEP 42.1",
    ),
    Case(
        "preempted, and a task that died of it had srun end the others",
        Cause.PREEMPTED,
        Confidence.CERTAIN,
        {**TERM, "job_at_notice": IN_GRACE, "job_at_end": IN_GRACE, "launcher_text": ENDED_BY_SRUN},
    ),
    Case(
        "all ranks left and nobody said why",
        Cause.UNKNOWN,
        Confidence.GUESS,
        {"exit_status": 0},
    ),
    Case(
        "the probe named a host",
        Cause.HANG,
        Confidence.LIKELY,
        {"probe": LATE},
        hosts=("n6",),
        rank=4,
        says="rank 4 (n6)",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_seen_means(case: Case) -> None:
    facts = LaunchFacts(now=NOW, step=65, **case.facts)
    incident = classify(facts, "3.2")
    assert (incident.cause, incident.confidence) == (case.cause, case.confidence)
    assert (incident.hosts, incident.rank) == (case.hosts, case.rank)
    words = "; ".join(f"{each.source}: {each.text}" for each in incident.evidence)
    assert case.says in words
    assert incident.id == "3.2"


def test_the_step_is_where_all_stopped_else_where_it_failed_else_the_last_heard() -> None:
    failures = (failed(Cause.APP_ERROR),)
    assert classify(LaunchFacts(now=NOW, step=65), "i").step == 65
    assert classify(LaunchFacts(now=NOW, step=65, failures=failures), "i").step == 70
    stopped = LaunchFacts(now=NOW, step=65, failures=failures, stopped_at=68)
    assert classify(stopped, "i").step == 68


def test_the_micro_batch_of_the_rank_that_ran_out_of_memory_is_what_is_shrunk() -> None:
    oom = failed(Cause.CUDA_OOM, 3, micro_batch=4)
    facts = LaunchFacts(now=NOW, failures=(failed(Cause.NCCL_ERROR, 0), oom))
    assert classify(facts, "i").micro_batch == 4


RECORDS = st.none() | st.builds(
    job,
    st.sampled_from(list(JobState)),
    restarts=st.integers(0, 2),
    preempt_time=st.none() | st.just(NOW),
    end_time=st.none() | st.just(NOW) | st.just(NOW + LIMIT),
    failed_node=st.none() | st.just("n1"),
)
CAUSES_OF_RANKS = [Cause.APP_ERROR, Cause.NCCL_ERROR, Cause.CUDA_OOM]


@given(
    first=RECORDS,
    then=RECORDS,
    now=RECORDS,
    signals=st.lists(st.just("SIGTERM"), max_size=1).map(tuple),
    due=st.booleans(),
    failures=st.lists(st.sampled_from(CAUSES_OF_RANKS).map(failed), max_size=2).map(tuple),
    lost=st.lists(st.builds(LostRank, st.integers(0, 3), st.just("n0")), max_size=2).map(tuple),
    text=st.sampled_from(["", OOM, KILLED_NODE, "srun: error"]),
    stopped=st.none() | st.just(5),
)
def test_every_picture_has_a_cause_and_a_cancelled_job_is_never_brought_back(
    first: JobRecord | None,
    then: JobRecord | None,
    now: JobRecord | None,
    signals: tuple[str, ...],
    due: bool,
    failures: tuple[RankFailure, ...],
    lost: tuple[LostRank, ...],
    text: str,
    stopped: int | None,
) -> None:
    facts = LaunchFacts(
        now=NOW,
        job_at_start=first,
        job_at_notice=then,
        job_at_end=now,
        rank_signals=signals,
        due_time_limit=due,
        failures=failures,
        lost=lost,
        launcher_text=text,
        stopped_at=stopped,
    )
    incident = classify(facts, "i")
    assert incident == classify(facts, "i")
    records = [record for record in (then, now) if record is not None]
    speaks_of_others = text == KILLED_NODE or any(
        record.preempt_time or record.failed_node or record.state is JobState.PENDING
        for record in records
    )
    requeued = first is not None and any(record.restarts > first.restarts for record in records)
    cancelled = any(record.state is JobState.CANCELLED for record in records)
    if (signals or due) and cancelled and not speaks_of_others and not requeued:
        assert incident.cause is Cause.USER_CANCELLED


@pytest.mark.parametrize(
    "failures",
    [(), (failed(Cause.NCCL_ERROR, rank=0),), (failed(Cause.NCCL_ERROR, after_loss=True),)],
)
def test_no_node_is_to_blame_where_srun_was_killed(failures: tuple[RankFailure, ...]) -> None:
    # Slurm ends every rank once srun is gone (tried on 22.05.8): which one goes first is luck.
    facts = LaunchFacts(
        now=NOW,
        step=20,
        job_at_start=RUNNING,
        job_at_end=RUNNING,
        lost=(LostRank(1, "n1"), LostRank(0, "n0")),
        failures=failures,
        exit_status=-9,
        launcher_signal="SIGKILL",
    )
    incident = classify(facts, "1.1")
    assert incident.cause is Cause.CRASH
    assert (incident.rank, incident.hosts) == (None, ())
    assert incident.evidence[0].text == "srun was killed by SIGKILL, and with it every rank"


def test_a_rank_that_failed_by_itself_is_told_of_before_the_end_of_srun() -> None:
    facts = LaunchFacts(
        now=NOW, failures=(failed(Cause.APP_ERROR),), exit_status=-9, launcher_signal="SIGKILL"
    )
    assert classify(facts, "1.1").hosts == ("n2",)


def test_last_words_say_how_far_it_was_and_heartbeats_about_how_far() -> None:
    heard = LaunchFacts(now=NOW, step=20, lost=(LostRank(1, "n1"),), exit_status=1)
    assert (heard.furthest, heard.is_furthest_exact) == (20, False)
    follows = failed(Cause.NCCL_ERROR, rank=0, step=24, after_loss=True)
    told = replace(heard, failures=(follows,))
    assert (told.furthest, told.is_furthest_exact) == (24, True)
    assert classify(told, "1.1").step == 24
