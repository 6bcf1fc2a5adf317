"""The helper that every test with several ranks stands on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RanksFailedError, run_ranks, start_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.core
def test_results_come_in_rank_order_and_closures_work():
    word = "closure"

    def body(rank, factor):
        total = torch.ones(1) * rank
        dist.all_reduce(total)
        return word, rank * factor, total.item(), dist.get_world_size()

    assert run_ranks(3, body, 10) == [(word, 10 * r, 3.0, 3) for r in range(3)]


def test_without_a_group():
    assert run_ranks(2, lambda rank: dist.is_initialized(), init=False) == [False, False]


def test_the_error_shows_every_rank():
    def body(rank):
        print(f"rank {rank} was here")
        if rank == 1:
            raise ValueError("broken on purpose")
        dist.barrier()

    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, body)
    text = str(caught.value)
    assert "ValueError: broken on purpose" in text
    assert "rank 0 was here" in text and "rank 1 was here" in text
    assert isinstance(caught.value.outcomes[1].exception, ValueError)


def test_a_hang_ends_at_the_deadline_with_stacks_and_nothing_left():
    def hang_here(rank):
        if rank == 0:
            time.sleep(600)
        return os.getpid()

    begin = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, hang_here, timeout=1.0)
    assert time.monotonic() - begin < 60
    assert "hang_here" in str(caught.value) and "still running" in str(caught.value)
    for outcome in caught.value.outcomes:
        with pytest.raises(ProcessLookupError):
            os.kill(outcome.pid, 0)


def test_a_killed_and_a_stopped_rank_are_reported_not_waited_for():
    def body(rank):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return rank

    with start_ranks(3, body, init=False) as group:
        outcomes = group.wait(20, grace=0.5)
    assert outcomes[0].exitcode == -signal.SIGKILL and not outcomes[0].ok
    assert outcomes[1].overdue and not outcomes[1].ok
    assert outcomes[2].ok and outcomes[2].value == 2


def test_signals_reach_a_rank_with_its_default_handlers():
    def body(rank):
        time.sleep(600)

    with start_ranks(1, body, init=False) as group:
        group.kill(0, signal.SIGTERM)
        (outcome,) = group.wait(20)
    assert outcome.exitcode == -signal.SIGTERM


def test_children_of_a_rank_are_killed_too():
    def body(rank):
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        return pid

    (pid,) = run_ranks(1, body, init=False)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
    pytest.fail("the grandchild is still running")


def test_forks_after_the_parent_used_its_thread_pools():
    torch.randn(600, 600) @ torch.randn(600, 600)
    x = torch.randn(2000, 2000, requires_grad=True)
    x.exp().sum().backward()

    def body(rank):
        y = torch.randn(2000, 2000, requires_grad=True)
        (y.exp() @ y).sum().backward()
        return True

    assert run_ranks(2, body, timeout=20) == [True, True]
