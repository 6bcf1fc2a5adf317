"""What Slurm prints, and ranks that went without a word: as seen on a real Slurm 22.05.8."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm_forge.recovery import LaunchFacts, classify
from slurm_forge.recovery.incident.attempt_end import is_cancelled
from slurm_forge.recovery.incident.launch_facts import LostRank, WorkerEnd
from slurm_forge.recovery.incident.slurm_evidence import needs_accounting
from slurm_forge.recovery.monitor.probe_verdict import ProbeFailure
from slurm_forge.slurm.records import AccountingRecord, NodeRecord
from slurm_forge.slurm.states import JobState, parse_state
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Incident
from tests.unit.recovery.test_classify import NOW, RUNNING, failed, job

AT = "CANCELLED AT 2026-11-22T02:43:25"
STEP = f"slurmstepd-n1: error: *** STEP 7.0 ON n1 {AT} ***\n"
ABORTED = "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
TERMINATING = "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
ALL_LOST = (LostRank(0, "n1"), LostRank(1, "n2"))


def killed(task: int, how: str = "Killed") -> str:
    return f"srun: error: n{task + 1}: task {task}: {how}\n"


def judged(**facts: Any) -> Incident:
    return classify(LaunchFacts(now=NOW, step=65, **facts), "3.2")


def told(incident: Incident) -> str:
    return "; ".join(f"{each.source}: {each.text}" for each in incident.evidence)


# -- Slurm's printed words, where its records can't be had -----------------------------------------


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (" DUE TO PREEMPTION", Cause.PREEMPTED),
        (" DUE TO TIME LIMIT", Cause.TIME_LIMIT),
        (" DUE TO JOB REQUEUE", Cause.ADMIN_REQUEUE),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", Cause.NODE_FAIL),
        ("", Cause.USER_CANCELLED),
    ],
)
def test_without_scontrol_the_batch_steps_own_output_tells(reason: str, cause: Cause) -> None:
    incident = judged(
        rank_signals=("SIGTERM",),
        batch_signals=("SIGTERM",),
        batch_text=f"step 64\nslurmstepd-n1: error: *** JOB 7 ON n1 {AT}{reason} ***\n",
    )
    assert (incident.cause, incident.confidence) == (cause, Confidence.LIKELY)
    assert "JOB 7 ON n1" in told(incident)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [(" DUE TO PREEMPTION", Cause.PREEMPTED), (" DUE TO JOB REQUEUE", Cause.ADMIN_REQUEUE)],
)
def test_a_preemption_without_grace_is_told_from_a_persons_requeue(
    reason: str, cause: Cause
) -> None:
    """Both put the job back at once; the record says the same of both."""
    incident = judged(
        rank_signals=("SIGTERM",),
        batch_signals=("SIGTERM",),
        restart_count=1,
        job_at_notice=job(restarts=2, end_time=NOW),
        launcher_text=f"slurmstepd-n1: error: *** STEP 7.0 ON n1 {AT}{reason} ***\n",
    )
    assert (incident.cause, incident.confidence) == (cause, Confidence.CERTAIN)
    assert "Restarts from 1 to 2" in told(incident)


def test_records_go_before_what_was_printed() -> None:
    incident = judged(
        rank_signals=("SIGTERM",),
        batch_text=f"slurmstepd: error: *** JOB 7 ON n1 {AT} ***",
        job_at_notice=replace(RUNNING, preempt_time=NOW),
    )
    assert (incident.cause, incident.confidence) == (Cause.PREEMPTED, Confidence.CERTAIN)


def test_the_job_files_limit_serves_where_slurm_does_not_answer() -> None:
    incident = judged(due_time_limit=True, planned_end=NOW + timedelta(seconds=30))
    assert (incident.cause, incident.confidence) == (Cause.TIME_LIMIT, Confidence.LIKELY)


def test_the_grace_time_without_scontrol_is_not_taken_for_a_cancellation() -> None:
    """Its first line is the same as after ``scancel`` of the step."""
    incident = judged(rank_signals=("SIGTERM",), stopped_at=66, launcher_text=STEP)
    assert (incident.cause, incident.confidence) == (Cause.PREEMPTED, Confidence.GUESS)


def test_a_signal_that_came_before_anybody_could_note_it() -> None:
    """Ranks that are starting up die of it; the record at the end says what it was."""
    text = STEP + killed(1, "Terminated") + TERMINATING + killed(0, "Terminated")
    preempted = job(preempt_time=NOW, end_time=NOW + timedelta(seconds=10))
    incident = judged(
        exit_status=143, launcher_text=text, job_at_start=RUNNING, job_at_end=preempted
    )
    assert (incident.cause, incident.confidence) == (Cause.PREEMPTED, Confidence.CERTAIN)
    requeued = job(JobState.COMPLETING, restarts=1)
    incident = judged(
        exit_status=143, launcher_text=text, job_at_start=RUNNING, job_at_end=requeued
    )
    assert incident.cause is Cause.ADMIN_REQUEUE
    undisturbed = judged(
        exit_status=143, launcher_text=text, job_at_start=RUNNING, job_at_end=RUNNING
    )
    assert undisturbed.cause is Cause.CRASH


@pytest.mark.parametrize("due", [True, False])
def test_scancel_right_before_the_limit_or_inside_the_grace_time(due: bool) -> None:
    """Slurm ends the job before the end that was known, and the batch step hears of it."""
    soon = NOW + timedelta(seconds=40)
    noticed = job(end_time=soon, preempt_time=None if due else NOW)
    now = replace(noticed, state=JobState.COMPLETING, end_time=NOW)
    facts = {
        "due_time_limit": due,
        "lead": timedelta(seconds=60),
        "rank_signals": ("SIGTERM",),
        "job_at_notice": noticed,
        "stopped_at": 70,
    }
    cancelled = judged(**facts, batch_signals=("SIGTERM",), job_at_end=now)
    assert cancelled.cause is Cause.USER_CANCELLED
    going_on = judged(**facts, job_at_end=noticed)
    assert going_on.cause is (Cause.TIME_LIMIT if due else Cause.PREEMPTED)


def test_a_job_that_was_requeued_and_then_cancelled_is_cancelled() -> None:
    last = job(JobState.CANCELLED, restarts=1)
    incident = judged(
        rank_signals=("SIGTERM",), job_at_start=RUNNING, job_at_notice=last, job_at_end=last
    )
    assert (incident.cause, incident.confidence) == (Cause.USER_CANCELLED, Confidence.CERTAIN)


def test_the_end_of_another_job_in_the_same_output_is_not_this_ones() -> None:
    incident = judged(
        rank_signals=("SIGTERM",),
        job_at_end=job(),
        batch_text=f"slurmstepd-n1: error: *** JOB 6 ON n1 {AT} DUE TO JOB REQUEUE ***\n",
    )
    assert (incident.cause, incident.confidence) == (Cause.PREEMPTED, Confidence.GUESS)


def test_accounting_knows_that_a_task_was_killed_for_memory() -> None:
    row = AccountingRecord(
        job_ref="7",
        step="0",
        job_id=7,
        state=parse_state("OUT_OF_MEMORY"),
        state_text="OUT_OF_MEMORY",
    )
    incident = judged(lost=(LostRank(1, "n2"),), exit_status=137, rows=(row,))
    assert (incident.cause, incident.confidence) == (Cause.HOST_OOM, Confidence.CERTAIN)


def test_who_reports_a_segmentation_fault_has_not_lost_its_node() -> None:
    silent = NodeRecord(name="n2", state=("ALLOCATED", "NOT_RESPONDING"))
    text = killed(1, "Segmentation fault (core dumped)") + TERMINATING
    lost = (LostRank(1, "n2"),)
    incident = judged(lost=lost, exit_status=139, launcher_text=text, nodes=(silent,))
    assert incident.cause is Cause.CRASH
    alone = judged(lost=lost, exit_status=1, nodes=(silent,))
    assert (alone.cause, alone.confidence) == (Cause.NODE_FAIL, Confidence.LIKELY)


def test_ranks_that_write_about_nodes_have_lost_none() -> None:
    text = "my balancer: node failure on shard 3, retrying\n" + killed(1)
    incident = judged(lost=(LostRank(1, "n2"),), exit_status=137, launcher_text=text)
    assert incident.cause is Cause.CRASH


# -- scancel of a step, a rank that was killed -----------------------------------------------------


def test_scancel_of_the_step_is_told_by_the_order_of_sruns_words() -> None:
    text = ABORTED + STEP + killed(0) + TERMINATING + killed(1)
    incident = judged(lost=ALL_LOST, job_at_end=RUNNING, exit_status=137, launcher_text=text)
    assert (incident.cause, incident.confidence) == (Cause.USER_CANCELLED, Confidence.LIKELY)
    assert "STEP 7.0" in told(incident)


def test_accounting_says_who_cancelled_the_step() -> None:
    row = AccountingRecord(
        job_ref="7",
        step="0",
        job_id=7,
        state=parse_state("CANCELLED by 1000"),
        state_text="CANCELLED by 1000",
        cancelled_by=1000,
    )
    text = ABORTED + STEP + killed(0)
    incident = judged(lost=ALL_LOST, exit_status=137, launcher_text=text, rows=(row,))
    assert (incident.cause, incident.confidence) == (Cause.USER_CANCELLED, Confidence.CERTAIN)
    assert "CANCELLED by 1000" in told(incident)


def test_a_node_that_starts_no_task_is_lost_and_nobody_has_cancelled_anything() -> None:
    """srun ends the step that it can't start, in the user's own name (seen on 22.05.8)."""
    row = AccountingRecord(
        job_ref="7",
        step="1",
        job_id=7,
        state=parse_state("CANCELLED by 1000"),
        state_text="CANCELLED by 1000",
        cancelled_by=1000,
    )
    text = (
        "srun: error: Task launch for StepId=7.1 failed on node n2: Communication connection "
        "failure\nsrun: error: Application launch failed: Communication connection failure\n"
    )
    text += ABORTED + STEP + killed(0) + TERMINATING
    lost = (LostRank(0, "n1"),)
    incident = judged(lost=lost, exit_status=137, launcher_text=text, rows=(row,))
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, ("n2",))
    elsewhere = text.replace("Task launch for StepId=7.1 failed on node n2", "Unable to create it")
    incident = judged(lost=lost, exit_status=137, launcher_text=elsewhere, rows=(row,))
    assert incident.cause is Cause.CRASH


def test_what_the_others_say_of_a_lost_peer_is_not_why_it_went() -> None:
    text = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4\n"
        "srun: error: n1: task 0: Exited with exit code 1\n"
    )
    lost = (LostRank(1, "n2"),)
    peer = failed(Cause.NCCL_ERROR, 0, after_loss=True)
    incident = judged(lost=lost, failures=(peer,), exit_status=1, launcher_text=text)
    assert (incident.cause, incident.rank, incident.hosts) == (Cause.CRASH, 1, ("n2",))


def test_a_rank_that_takes_its_time_to_die_is_no_cancellation() -> None:
    """It dumps its core while srun ends the step for the peer that lost it (seen on 22.05.8)."""
    text = STEP + "srun: error: n1: task 0: Exited with exit code 1\n"
    lost = (LostRank(1, "n2"),)
    peer = failed(Cause.NCCL_ERROR, 0, after_loss=True)
    with_words = judged(lost=lost, failures=(peer,), exit_status=1, launcher_text=text)
    assert (with_words.cause, with_words.rank, with_words.hosts) == (Cause.CRASH, 1, ("n2",))
    assert judged(lost=ALL_LOST, exit_status=1, launcher_text=text).cause is Cause.CRASH


def test_accounting_that_knows_of_nobody_who_cancelled_it_is_believed() -> None:
    row = AccountingRecord(
        job_ref="7",
        step="0",
        job_id=7,
        state=parse_state("CANCELLED"),
        state_text="CANCELLED",
    )
    text = ABORTED + STEP + killed(0) + killed(1)
    incident = judged(lost=ALL_LOST, exit_status=137, launcher_text=text, rows=(row,))
    assert incident.cause is Cause.CRASH


@pytest.mark.parametrize(
    ("how", "shown"),
    [("Killed", "Killed"), ("Segmentation fault (core dumped)", "Segmentation fault")],
)
def test_the_rank_that_went_first_is_told_from_those_that_srun_ended(how: str, shown: str) -> None:
    text = killed(1, how) + TERMINATING + STEP + killed(0)
    # The channel may see the others' end before the first one's.
    incident = judged(lost=ALL_LOST, exit_status=137, launcher_text=text)
    assert incident.cause is Cause.CRASH
    assert (incident.rank, incident.hosts) == (1, ("n2",))
    assert shown in told(incident)


def test_the_stack_of_the_rank_that_crashed_is_told() -> None:
    output = (
        "step 30 loss 2.1\nFatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/home/me/ext.py", line 7 in fused\n'
        '  File "/home/me/train.py", line 31 in train\n'
    )
    lost = (LostRank(1, "n2", output=output),)
    text = killed(1, "Segmentation fault (core dumped)")
    assert "ext.py" in told(judged(lost=lost, exit_status=139, launcher_text=text))


def test_megatrons_own_suspicion_of_the_hardware_is_believed() -> None:
    text = "srun: error: n2: task 1: Exited with exit code 16\n" + TERMINATING + killed(0)
    words = "First rerun: unexpected result is reproducible within the tolerance\n"
    incident = judged(lost=ALL_LOST, exit_status=16, launcher_text=words + text)
    assert (incident.cause, incident.rank, incident.hosts) == (Cause.GPU_ERROR, 1, ("n2",))
    # Any other program may exit with 16 as well.
    incident = judged(lost=ALL_LOST, exit_status=16, launcher_text=text)
    assert (incident.cause, incident.hosts) == (Cause.APP_ERROR, ())


def test_what_a_lost_rank_printed_last_is_looked_through() -> None:
    output = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    lost = (LostRank(1, "n2", output=output),)
    text = "srun: error: n2: task 1: Exited with exit code 1\n"
    incident = judged(lost=lost, exit_status=1, launcher_text=text)
    assert (incident.cause, incident.hosts) == (Cause.GPU_ERROR, ("n2",))


# -- nodes -----------------------------------------------------------------------------------------


def test_a_node_that_slurm_has_given_up_explains_its_lost_ranks() -> None:
    down = NodeRecord(name="n2", state=("DOWN", "NOT_RESPONDING"), reason="Not responding")
    lost = (LostRank(1, "n2"),)
    nodes = (NodeRecord(name="n1", state=("ALLOCATED",)), down)
    incident = judged(lost=lost, exit_status=1, job_at_end=RUNNING, nodes=nodes)
    assert (incident.cause, incident.hosts, incident.rank) == (Cause.NODE_FAIL, ("n2",), 1)
    assert "NOT_RESPONDING" in told(incident)


def test_a_drained_node_is_not_a_lost_one() -> None:
    nodes = (NodeRecord(name="n2", state=("ALLOCATED", "DRAIN"), reason="maintenance"),)
    incident = judged(lost=(LostRank(1, "n2"),), exit_status=1, nodes=nodes)
    assert incident.cause is Cause.CRASH


# -- the probe -------------------------------------------------------------------------------------


def late(cause: Cause = Cause.HANG, confidence: Confidence = Confidence.LIKELY) -> ProbeFailure:
    seen = Evidence("heartbeat", "rank 3 (n4) silent for 9 s")
    return ProbeFailure(
        cause=cause, ranks=(3,), hosts=("n4",), step=40, confidence=confidence, evidence=(seen,)
    )


def test_whom_the_probe_named_is_the_one_whatever_the_others_say_then() -> None:
    followed = failed(Cause.NCCL_ERROR, rank=0)
    incident = judged(probe=late(), failures=(followed,))
    assert (incident.cause, incident.rank, incident.hosts) == (Cause.HANG, 3, ("n4",))
    assert incident.step == 40
    assert "silent for 9 s" in told(incident)
    assert "followers: rank 0" in told(incident)


@pytest.mark.parametrize("all_ranks", [True, False])
def test_who_only_noticed_an_error_of_nccl_is_never_certain_to_be_to_blame(
    all_ranks: bool,
) -> None:
    """Certain counts as enough against a node."""
    incident = judged(failures=(failed(Cause.NCCL_ERROR, rank=0, all_ranks=all_ranks),))
    assert incident.cause is Cause.NCCL_ERROR
    assert incident.confidence is not Confidence.CERTAIN or not incident.hosts


def test_a_value_that_arrived_changed_is_an_error_of_nccl_on_its_sender() -> None:
    incident = judged(probe=late(Cause.NCCL_ERROR, Confidence.CERTAIN))
    assert (incident.cause, incident.confidence) == (Cause.NCCL_ERROR, Confidence.CERTAIN)
    assert (incident.rank, incident.hosts) == (3, ("n4",))


def test_a_host_that_was_named_as_gone_is_the_one_and_not_those_that_it_did_not_hear() -> None:
    probe = late(Cause.NODE_FAIL)
    assert judged(probe=probe).hosts == ("n4",)
    down = NodeRecord(name="n2", state=("DOWN", "NOT_RESPONDING"), reason="Not responding")
    incident = judged(probe=probe, nodes=(down,))
    assert (incident.cause, incident.rank, incident.hosts) == (Cause.NODE_FAIL, 3, ("n4",))
    same = NodeRecord(name="n4", state=("DOWN", "NOT_RESPONDING"), reason="Not responding")
    assert judged(probe=probe, nodes=(same,)).hosts == ("n4",)


@pytest.mark.parametrize("first", [True, False])
def test_the_lost_node_is_named_whoever_speaks_first(first: bool) -> None:
    lines = [
        "srun: error: Node failure on n2\n",
        f"slurmstepd-n1: error: *** STEP 7.0 ON n1 {AT} DUE TO NODE FAILURE, SEE LOG ***\n",
    ]
    text = "".join(lines if first else reversed(lines))
    incident = judged(rank_signals=("SIGTERM",), job_at_notice=job(restarts=1), launcher_text=text)
    assert (incident.cause, incident.hosts) == (Cause.NODE_FAIL, ("n2",))


# -- followers -------------------------------------------------------------------------------------


def test_ranks_that_only_lost_a_peer_are_told_apart() -> None:
    failures = (
        failed(Cause.NCCL_ERROR, 0),
        failed(Cause.APP_ERROR, 2),
        failed(Cause.NCCL_ERROR, 3),
    )
    incident = judged(failures=failures, job_at_notice=job())
    assert (incident.cause, incident.rank) == (Cause.APP_ERROR, 2)
    assert incident.evidence[-1].source == "followers"
    assert "ranks 0, 3" in incident.evidence[-1].text


# -- what agents say of the processes that they have collected -------------------------------------


def end(rank: int, signal: str = "", code: int | None = None, *, ours: bool = False) -> WorkerEnd:
    after = timedelta(seconds=60 + rank)
    return WorkerEnd(
        rank=rank, host=f"n{rank + 1}", signal=signal, exit_code=code, after=after, ours=ours
    )


def test_agents_tell_which_rank_went_first_and_of_what() -> None:
    ends = (end(1, "SIGSEGV"), end(0, code=1))
    incident = judged(lost=ALL_LOST, ends=ends, exit_status=139)
    assert (incident.cause, incident.rank, incident.hosts) == (Cause.CRASH, 1, ("n2",))
    assert "agent: n2: rank 1: SIGSEGV" in told(incident)


def test_a_rank_that_had_last_words_is_not_the_one_that_was_killed() -> None:
    """It may well be collected first: whoever is killed with a large core takes its time."""
    ends = (end(0, code=1), end(1, "SIGKILL"))
    lost = (LostRank(1, "n2"),)
    peer = failed(Cause.NCCL_ERROR, rank=0, after_loss=True)
    incident = judged(lost=lost, failures=(peer,), ends=ends, exit_status=1)
    assert (incident.cause, incident.rank) == (Cause.CRASH, 1)


def test_what_was_ended_on_our_order_began_nothing() -> None:
    ends = (end(0, "SIGKILL", ours=True), end(1, code=7))
    incident = judged(lost=ALL_LOST, ends=ends, exit_status=7)
    assert (incident.cause, incident.rank) == (Cause.CRASH, 1)


def test_a_cancelled_step_is_sruns_to_tell_whatever_agents_saw() -> None:
    ends = (end(0, "SIGKILL"), end(1, "SIGKILL"))
    text = STEP + ABORTED + killed(0) + killed(1)
    incident = judged(lost=ALL_LOST, ends=ends, exit_status=137, launcher_text=text)
    assert incident.cause is Cause.USER_CANCELLED


# -- times ---------------------------------------------------------------------------------------

#: Two hours long, suspended for one of three, and resumed an hour ago.
SUSPENDED = job(
    start_time=NOW - timedelta(hours=2, minutes=30),
    time_limit=timedelta(hours=2),
    suspend_time=NOW - timedelta(hours=1),
    before_suspension=timedelta(minutes=30),
    end_time=NOW + timedelta(minutes=30),
)


def test_the_limit_of_a_job_that_was_suspended_is_later() -> None:
    assert SUSPENDED.limit_ends == SUSPENDED.end_time
    ending = replace(SUSPENDED, state=JobState.COMPLETING, end_time=NOW)
    signals = {"rank_signals": ("SIGTERM",), "batch_signals": ("SIGTERM",)}
    cancelled = judged(**signals, job_at_start=SUSPENDED, job_at_notice=ending)
    assert cancelled.cause is Cause.USER_CANCELLED
    assert is_cancelled(ending)
    late = NOW + timedelta(minutes=30, seconds=20)
    over = replace(ending, end_time=late)
    timed_out = classify(
        LaunchFacts(now=late, **signals, job_at_start=SUSPENDED, job_at_notice=over), "3.2"
    )
    assert timed_out.cause is Cause.TIME_LIMIT
    assert not is_cancelled(over)


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(0), timedelta(hours=-1)])
def test_slurms_times_are_compared_with_slurms_clock(ahead: timedelta) -> None:
    began = NOW - timedelta(hours=3, minutes=10)
    running = job(
        start_time=began, time_limit=timedelta(hours=4), end_time=began + timedelta(hours=4)
    )
    clocks = {"clock_ahead": ahead, "rank_signals": ("SIGTERM",), "job_at_start": running}
    step = LaunchFacts(
        now=NOW + ahead, launcher_text=STEP + ABORTED, job_at_notice=running, **clocks
    )
    assert classify(step, "3.2").cause is Cause.USER_CANCELLED
    end = running.end_time
    assert end is not None
    ending = replace(running, state=JobState.COMPLETING)
    over = LaunchFacts(now=end + ahead, job_at_notice=ending, **clocks)
    assert classify(over, "3.2").cause is Cause.TIME_LIMIT


GRACE = timedelta(seconds=30)


@pytest.mark.parametrize(
    ("answered", "after", "cause"),
    [
        ("never", None, Cause.PREEMPTED),
        ("never", GRACE, Cause.PREEMPTED),
        ("at once", GRACE, Cause.PREEMPTED),
        ("late", GRACE, Cause.PREEMPTED),
        ("never", timedelta(0), Cause.USER_CANCELLED),
        ("late", timedelta(0), Cause.USER_CANCELLED),
    ],
)
def test_the_end_of_a_grace_time_is_no_cancellation(
    answered: str, after: timedelta | None, cause: Cause
) -> None:
    """Slurm sets PreemptTime anew then; a scancel in the moment of the notice looks the same."""
    over = NOW + timedelta(seconds=31)
    ending = job(JobState.COMPLETING, preempt_time=over, end_time=over)
    at_once = job(preempt_time=NOW, end_time=NOW + GRACE)
    notice = {"never": None, "at once": at_once, "late": ending}[answered]
    incident = judged(
        grace=GRACE,
        rank_signals=("SIGTERM",),
        batch_signals=("SIGTERM",),
        terminated_after=after,
        job_at_notice=notice,
        job_at_end=ending,
    )
    assert incident.cause is cause


@pytest.mark.parametrize(
    ("signals", "needed"), [(("SIGTERM",), True), ((), False)], ids=["cancelled", "lost"]
)
def test_accounting_tells_a_scancel_from_a_node_that_srun_could_not_reach(
    signals: tuple[str, ...], needed: bool
) -> None:
    text = "srun: error: Task launch for StepId=7.0 failed on node n2: Connection refused\n"
    facts = LaunchFacts(
        now=NOW,
        rank_signals=signals,
        batch_signals=signals,
        launcher_text=text,
        job_at_start=RUNNING,
        job_at_notice=job(JobState.COMPLETING, end_time=NOW) if signals else RUNNING,
    )
    assert classify(facts, "3.2").cause is Cause.NODE_FAIL
    assert needs_accounting(replace(facts, job_at_end=facts.job_at_notice)) is needed
