"""What srun and slurmstepd print, as recorded from Slurm 22.05.8 (four tasks on four nodes)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.slurm.text.srun_messages import (
    Cancelled,
    TaskEnd,
    first_end,
    lost_nodes,
    step_cancelled,
    task_ends,
)

SEGFAULT = """\
srun: error: s2n3: task 2: Segmentation fault (core dumped)
srun: launch/slurm: _step_signal: Terminating StepId=2.0
srun: error: s2n1: task 0: Terminated
slurmstepd-s2n1: error: *** STEP 2.0 ON s2n1 CANCELLED AT 2026-11-22T02:40:25 ***
srun: error: s2n2: task 1: Terminated
srun: error: s2n4: task 3: Terminated
srun: Force Terminated StepId=2.0
"""
TRAPPED = """\
srun: error: s2n3: task 2: Exited with exit code 16
srun: launch/slurm: _step_signal: Terminating StepId=9.0
slurmstepd-s2n1: error: *** STEP 9.0 ON s2n1 CANCELLED AT 2026-11-22T02:40:34 ***
srun: error: s2n1: task 0: Exited with exit code 7
"""
OUT_OF_MEMORY = """\
srun: error: s2n2: task 1: Out Of Memory
srun: launch/slurm: _step_signal: Terminating StepId=13.0
slurmstepd-s2n1: error: *** STEP 13.0 ON s2n1 CANCELLED AT 2026-11-22T02:40:41 ***
srun: error: s2n1: task 0: Terminated
srun: Force Terminated StepId=13.0
"""
SEVERAL = """\
srun: error: s2n4: tasks 6-7: Exited with exit code 3
srun: launch/slurm: _step_signal: Terminating StepId=7.0
srun: error: s2n2: tasks 2-3: Exited with exit code 3
"""
CANCELLED_STEP = """\
slurmstepd-s2n2: error: *** STEP 16.0 ON s2n2 CANCELLED AT 2026-11-22T02:40:45 ***
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: s2n2: task 0: Killed
"""
NODE_FAILURE = """\
srun: error: Node failure on s3n3
slurmstepd-s3n2: error: *** STEP 5.0 ON s3n2 CANCELLED AT 2026-11-22T02:47:40 DUE TO NODE FAILURE, \
SEE SLURMCTLD LOG FOR DETAILS ***
slurmstepd-s3n2: error: *** JOB 5 ON s3n2 CANCELLED AT 2026-11-22T02:47:40 DUE TO NODE FAILURE, \
SEE SLURMCTLD LOG FOR DETAILS ***
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
"""


def test_the_first_end_is_told_from_those_that_srun_brought_about() -> None:
    ends = task_ends(SEGFAULT)
    assert [(end.tasks, end.host, end.signal, end.follows) for end in ends] == [
        ((2,), "s2n3", "SIGSEGV", False),
        ((0,), "s2n1", "SIGTERM", True),
        ((1,), "s2n2", "SIGTERM", True),
        ((3,), "s2n4", "SIGTERM", True),
    ]
    assert {end.exit_code for end in ends} == {None}
    assert ends[0].text == "srun: error: s2n3: task 2: Segmentation fault (core dumped)"
    assert first_end(ends) == ends[0]
    assert ends[0].ended == "SIGSEGV"


def test_an_exit_code_and_those_that_ended_themselves_on_sigterm() -> None:
    first, second = task_ends(TRAPPED)
    assert (first.exit_code, first.signal, first.ended) == (16, "", "exit 16")
    assert (second.exit_code, second.follows) == (7, True)
    assert first_end((first, second)) == first


def test_memory() -> None:
    first, second = task_ends(OUT_OF_MEMORY)
    assert first.out_of_memory
    assert (first.tasks, first.signal, first.ended) == ((1,), "SIGKILL", "out of memory")
    assert not second.out_of_memory


def test_several_tasks_in_one_line() -> None:
    assert [end.tasks for end in task_ends(SEVERAL)] == [(6, 7), (2, 3)]
    (end,) = task_ends("srun: error: n[1-2]: tasks 0-1,3,10-12: Killed\n")
    assert (end.tasks, end.host) == ((0, 1, 3, 10, 11, 12), "n[1-2]")


@pytest.mark.parametrize(
    ("words", "signal"),
    [
        ("Aborted (core dumped)", "SIGABRT"),
        ("Bus error (core dumped)", "SIGBUS"),
        ("Floating point exception (core dumped)", "SIGFPE"),
        ("Illegal instruction", "SIGILL"),
        ("Killed", "SIGKILL"),
        ("User defined signal 1", "SIGUSR1"),
        ("Real-time signal 3", "SIGRTMIN+3"),
        ("Unknown signal 99", "signal 99"),
    ],
)
def test_words_of_signals(words: str, signal: str) -> None:
    (end,) = task_ends(f"srun: error: n1: task 0: {words}\n")
    assert (end.signal, end.exit_code) == (signal, None)


def test_what_a_shell_in_between_makes_of_a_signal() -> None:
    (end,) = task_ends("srun: error: n1: task 0: Exited with exit code 139")
    assert (end.signal, end.died_of, end.ended) == ("", "SIGSEGV", "exit 139")
    (end,) = task_ends("srun: error: n1: task 0: Exited with exit code 1")
    assert end.died_of == ""


def test_a_fault_goes_before_a_peer_that_was_reported_first() -> None:
    # Writing the core file took longer than the peer's error.
    text = (
        "srun: error: n1: task 0: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=2.0\n"
        "srun: error: n2: task 1: Segmentation fault (core dumped)\n"
    )
    first = first_end(task_ends(text))
    assert first is not None
    assert first.tasks == (1,)


def test_nobody_began_where_the_whole_step_was_cancelled() -> None:
    (end,) = task_ends(CANCELLED_STEP)
    assert end.follows
    assert first_end((end,)) is None
    assert first_end(()) is None


def test_a_cancelled_step_whose_first_end_is_printed_before_the_cancellation() -> None:
    text = (
        "srun: error: s2n4: task 3: Killed\n"
        "slurmstepd-s2n1: error: *** STEP 75.0 ON s2n1 CANCELLED AT 2026-11-22T03:19:08 ***\n"
        "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
        "srun: error: s2n3: task 2: Killed\n"
        "srun: error: s2n2: task 1: Killed\n"
    )
    ends = task_ends(text)
    assert [end.tasks for end in ends] == [(3,), (2,), (1,)]
    assert first_end(ends) is None
    # One that was killed alone: the others heard of it and left by themselves.
    alone = task_ends(text.replace("task 2: Killed", "task 2: Exited with exit code 1"))
    assert [end.follows for end in alone] == [False, True, True]
    # The memory killer is nobody's cancellation.
    (memory,) = task_ends("srun: error: n1: task 3: Out Of Memory\nsrun: Job step aborted: W\n")
    assert first_end((memory,)) == memory


def test_behind_a_progress_bar_without_a_line_s_end() -> None:
    text = "  3%|x  | 10/400 [00:01<00:30, 9.1it/s]srun: error: n3: task 2: Killed\r\nmore"
    assert [end.tasks for end in task_ends(text)] == [(2,)]


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: n3: task 2: running",
        "srun: error: n3: task 2: Exited with exit code",
        "srun: error: n3: task 2: Terminated by the user of the program",
        "he printed 'srun: error: n3: task 2: Exited with exit code 1'",
        "my_srun: error: n3: task 2: Killed",
        "srun: error: Unable to create step for job 12: Invalid",
        "srun: error: timeout waiting for task launch, started 0 of 4 tasks",
        "0: task 2: Killed",
    ],
)
def test_what_is_no_end_of_a_task(line: str) -> None:
    assert task_ends(line) == ()


def test_cancellations_and_their_reasons() -> None:
    step, job = step_cancelled(NODE_FAILURE)
    assert (step.id, step.is_step, step.host, step.reason) == ("5.0", True, "s3n2", "NODE FAILURE")
    assert (job.id, job.is_step, job.at) == ("5", False, "2026-11-22T02:47:40")
    assert lost_nodes(NODE_FAILURE) == ("s3n3",)
    (bare,) = step_cancelled(CANCELLED_STEP)
    line = "*** STEP 16.0 ON s2n2 CANCELLED AT 2026-11-22T02:40:45 ***"
    assert bare == Cancelled("16.0", True, "s2n2", "2026-11-22T02:40:45", "", line)


@pytest.mark.parametrize(
    ("line", "what", "reason"),
    [
        (
            "slurmstepd-s2n1: error: *** JOB 17 ON s2n1 CANCELLED AT 2026-11-22T02:40:51 DUE TO "
            "JOB REQUEUE ***",
            "17",
            "JOB REQUEUE",
        ),
        (
            "slurmstepd: error: *** STEP 2.0 ON s3n1 CANCELLED AT 2026-11-22T02:48:12 DUE TO TIME "
            "LIMIT ***",
            "2.0",
            "TIME LIMIT",
        ),
        (
            "*** JOB 9 ON n1 CANCELLED AT 2026-11-22T02:48:12 DUE TO PREEMPTION ***",
            "9",
            "PREEMPTION",
        ),
        (
            "[2026-11-22T02:48:12.001] error: *** JOB 9 ON n1 CANCELLED AT 2026-11-22T02:48:12 DUE "
            "to SIGNAL Terminated ***",
            "9",
            "",
        ),
        (
            "srun: error: *** STEP 12.0 CANCELLED AT 2026-11-22T02:48:12 DUE TO TIME LIMIT ***",
            "12.0",
            "TIME LIMIT",
        ),
        (
            "slurmstepd: error: *** STEP 1.0 ON n1 UNCORRECTABLE MEMORY ERROR AT 2026-11-22 ***",
            "1.0",
            "UNCORRECTABLE MEMORY ERROR",
        ),
    ],
)
def test_reasons_as_slurm_words_them(line: str, what: str, reason: str) -> None:
    (found,) = step_cancelled(line)
    assert (found.id, found.reason) == (what, reason)
    assert found.is_step == ("." in what)


def test_no_cancellation() -> None:
    assert step_cancelled("*** STEP 3: loss CANCELLED ***  DUE TO PREEMPTION") == ()
    assert lost_nodes("he said: Node failure on n3") == ()


WORDS = st.sampled_from(
    ["srun: error: ", "n1: ", "task 0: ", "tasks 0-99999999,", "Killed", "***", " STEP 1.0 ", "\n",
     "CANCELLED AT ", "DUE TO ", "Exited with exit code 1", "9" * 50, "-", "[", "\r", "\0"]
)  # fmt: skip


@given(st.one_of(st.text(max_size=300), st.lists(WORDS, max_size=60).map("".join)))
def test_any_text_is_read(text: str) -> None:
    for end in task_ends(text):
        assert isinstance(end, TaskEnd)
        assert end.ended
    step_cancelled(text)
    lost_nodes(text)


@pytest.mark.parametrize(
    "piece",
    [
        "srun: error: ",
        "srun: error: n1: task 0-",
        "*** STEP 1",
        "srun: error: n1: tasks 0-9: Killed\n",
        "*** STEP 1.0 ON n1 CANCELLED AT x DUE TO ",
        "a",
    ],
)
def test_a_megabyte_of_nonsense_is_read_in_no_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    began = time.process_time()
    task_ends(text)
    step_cancelled(text)
    lost_nodes(text)
    assert time.process_time() - began < 5


def test_more_tasks_than_there_can_be_are_left_out() -> None:
    ends = task_ends("srun: error: n1: tasks 0-999998: Killed\n" * 5)
    assert [len(end.tasks) for end in ends] == [999_999, 0, 0, 0, 0]
