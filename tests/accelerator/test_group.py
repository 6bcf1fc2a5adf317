"""Collectives as ProcessGroupNCCL has them, on the made-up group: see docs/gpu.md."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurm_forge.device.groups import backends_for, small_group
from slurm_forge.training.core.rank_variables import outlive_peers
from tests.distributed.ranks import start_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("sim_in_ranks")]

LONG = 60.0


def together(
    folder: Path, body: Callable[[int], Any], *, timeout_s: float = LONG, **env: str
) -> list[Any]:
    """Two ranks in a group for both kinds of tensors; how each of them ended."""

    def rank(number: int) -> Any:
        torch.sim.set_device(number)
        dist.init_process_group(
            backends_for(torch.device("sim")),
            store=dist.FileStore(str(folder / "store"), 2),
            rank=number,
            world_size=2,
            timeout=timedelta(seconds=timeout_s),
        )
        return body(number)

    with start_ranks(2, rank, init=False, env=env) as group:
        return group.wait(LONG, grace=LONG / 2)


def test_a_collective_takes_its_place_in_the_order_of_streams(tmp_path: Path) -> None:
    def body(rank: int) -> list[float]:
        torch.sim.set_latency(0.1)
        x = torch.zeros(3, device="sim")
        x.add_(rank + 1)
        with torch.sim.without_waiting():
            work = dist.all_reduce(x, async_op=True)
            done_at_once = work.is_completed()
            work.wait()  # the stream, not the host
            y = x * 10
            dist.all_reduce(y, op=dist.ReduceOp.AVG)
        assert not done_at_once
        torch.sim.synchronize()
        assert work.is_completed()
        return y.tolist()

    assert [each.value for each in together(tmp_path, body)] == [[30.0] * 3] * 2


def test_a_barrier_waits_on_the_host(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        dist.barrier(group=dist.new_group(backend="simccl"))
        return torch.sim.wait_reasons()

    assert [each.value for each in together(tmp_path, body)] == [["barrier"]] * 2


def test_a_peer_that_does_not_come_ends_the_process_from_another_thread(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.zeros(1, device="sim"), async_op=True)
        threading.Event().wait(10 if rank else LONG)

    first, _ = together(tmp_path, body, timeout_s=2)
    assert first.exitcode == -6
    assert "Watchdog caught collective operation timeout" in first.log
    assert "taking the entire process down" in first.log


def test_without_handling_the_work_alone_carries_the_error(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            threading.Event().wait(5)
            return ""
        work = dist.all_reduce(torch.zeros(1, device="sim"), async_op=True)
        until = time.monotonic() + LONG
        while not work.is_completed() and time.monotonic() < until:
            threading.Event().wait(0.01)
        with pytest.raises(dist.DistBackendError) as caught:
            work.wait()
        return str(caught.value)

    first, _ = together(tmp_path, body, timeout_s=2, TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    assert first.ok, first
    assert "collective operation timeout" in first.value


def test_a_rank_that_outlives_its_peers_can_tear_its_group_down(tmp_path: Path) -> None:
    """Behind a collective that has timed out, and without an abort of its own."""

    def body(rank: int) -> bool:
        outlive_peers()
        group = dist.new_group(backend="simccl", timeout=timedelta(seconds=1))
        if rank == 1:
            os._exit(7)
        work = dist.all_reduce(torch.zeros(1, device="sim"), group=group, async_op=True)
        until = time.monotonic() + LONG
        while not work.is_completed() and time.monotonic() < until:
            threading.Event().wait(0.01)
        del work
        dist.destroy_process_group(group)
        del group
        torch.sim.synchronize()
        return torch.ones(2, device="sim").sum().item() == 2

    first, _ = together(tmp_path, body)
    assert first.ok and first.value, first


def test_collectives_keep_the_order_of_their_calls_on_whatever_streams(tmp_path: Path) -> None:
    def body(rank: int) -> list[float]:
        x, y = torch.full((4,), 1.0, device="sim"), torch.full((4,), 10.0, device="sim")
        torch.sim.set_jitter(0.003)
        for _ in range(20):
            work = dist.all_reduce(x, async_op=True)  # on the group's stream
            dist.broadcast(y, src=0)  # on the current one
            work.wait()
            x.div_(2)
        return [*x.tolist(), *y.tolist()]

    assert [each.value for each in together(tmp_path, body)] == [[1.0] * 4 + [10.0] * 4] * 2


def test_what_a_collective_reads_is_kept_until_it_has_read_it(tmp_path: Path) -> None:
    def body(rank: int) -> list[float]:
        torch.sim.set_latency(0.05)
        out = torch.zeros(2 * 1024, device="sim")
        given = torch.full((1024,), float(rank + 1), device="sim")
        work = dist.all_gather_into_tensor(out, given, async_op=True)
        del given
        torch.full((1024,), 9.0, device="sim")  # in the memory that was freed, if it were
        work.wait()
        return out[::1024].tolist()

    assert [each.value for each in together(tmp_path, body)] == [[1.0, 2.0]] * 2


def test_an_abort_ends_the_kernel_that_waits_for_others(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            threading.Event().wait(5)
            return ""
        group = dist.group.WORLD
        assert group is not None
        dist.all_reduce(torch.zeros(1, device="sim"), async_op=True)
        waiting = threading.Thread(target=torch.sim.synchronize, daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        group.abort()
        waiting.join(LONG)
        assert not waiting.is_alive()
        with pytest.raises(dist.DistBackendError, match="communicator was aborted") as caught:
            dist.all_reduce(torch.zeros(1, device="sim"))
        return str(caught.value)

    first, _ = together(tmp_path, body)
    assert first.ok, first


def test_a_group_of_its_own_works_beside_one_that_is_stuck(tmp_path: Path) -> None:
    """What the probe rests on, and that groups of gloo go along with those of the device."""

    def body(rank: int) -> list[float]:
        probe = small_group(
            torch.device("sim"), timeout=timedelta(seconds=LONG), ctas=2, description="probe"
        )
        host = dist.new_group(backend="gloo")
        if rank == 0:
            dist.all_reduce(torch.zeros(1, device="sim"), async_op=True)
        x = torch.ones(2, device="sim")
        dist.all_reduce(x, group=probe)
        found = x.tolist()
        dist.barrier(group=host)
        if rank == 1:
            dist.all_reduce(torch.zeros(1, device="sim"))
        torch.sim.synchronize()
        return found

    assert [each.value for each in together(tmp_path, body)] == [[2.0, 2.0]] * 2


def test_a_device_that_fails_ends_the_process_by_the_watchdog(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.zeros(1, device="sim"), async_op=True)
            with torch.sim.stream(torch.sim.Stream()):
                torch.sim.inject("ecc")
            threading.Event().wait(LONG)

    first, _ = together(tmp_path, body)
    assert first.exitcode == -6
    assert "uncorrectable ECC error" in first.log
