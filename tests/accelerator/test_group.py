"""Collectives as ProcessGroupNCCL has them, on the made-up group: see docs/gpu.md."""

from __future__ import annotations

import contextlib
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
from slurm_forge.training.rank.in_process_relaunch import Unwinding
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


#: What a watchdog has found: ``WorkResult`` of torch.
TIMEOUT, COMM_ERROR = 1, 2


def never() -> None:
    """Be somewhere until this process is ended by another thread, or killed."""
    threading.Event().wait(LONG)


def wait_for_the_other() -> None:
    """Until it is here, or gone."""
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.zeros(1))  # by gloo


def impatient() -> dist.ProcessGroup:
    """A group of both whose collectives may take a second."""
    group: dist.ProcessGroup = dist.new_group(backend="simccl", timeout=timedelta(seconds=1))
    return group


def start_alone(group: dist.ProcessGroup | None = None) -> dist.Work:
    """A collective that the other rank does not join."""
    return dist.all_reduce(torch.zeros(1, device="sim"), group=group, async_op=True)


def found_by_watchdog(work: dist.Work) -> int:
    """Wait for what comes of it."""
    found: int = work.get_future_result().wait()
    return found


def error_of(group: dist.ProcessGroup | None) -> str:
    """Its last error, by torch's name."""
    from simdev import _group

    assert group is not None
    name: str = _group.get_error(group._get_backend(torch.device("sim"))).name
    return name


def test_a_peer_that_does_not_come_ends_the_process_from_another_thread(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        group = impatient()
        if rank == 0:
            start_alone(group)
            never()
        wait_for_the_other()

    first, _ = together(tmp_path, body)
    assert first.exitcode == -6
    assert "Watchdog caught collective operation timeout" in first.log
    assert "taking the entire process down" in first.log


def test_there_is_time_for_dumps_before_a_timeout_is_handled(tmp_path: Path) -> None:
    """Four times the variable, in which the group takes no other collective."""

    def body(rank: int) -> float:
        group = impatient()
        waited = 0.0
        if rank == 0:
            assert found_by_watchdog(start_alone(group)) == TIMEOUT
            found = time.monotonic()
            start_alone(group)
            waited = time.monotonic() - found
        wait_for_the_other()
        return waited

    settings = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "300",
    }
    first, _ = together(tmp_path, body, **settings)
    assert first.value > 0.5, first


@pytest.mark.parametrize("handling", ["0", "2"])
def test_without_teardown_a_timeout_shows_in_no_work_of_the_program(
    tmp_path: Path, handling: str
) -> None:
    """The watchdog has a copy of it.  With 2 the kernel ends, and the sum is whatever it is."""

    def body(rank: int) -> tuple[int, str]:
        group, found = impatient(), 0
        if rank == 0:
            work = start_alone(group)
            found = found_by_watchdog(work)
            work.wait()
            if handling == "2":
                torch.sim.synchronize()
            assert work.is_completed() is (handling == "2")
        wait_for_the_other()
        return found, error_of(group)

    first, _ = together(tmp_path, body, TORCH_NCCL_ASYNC_ERROR_HANDLING=handling)
    assert first.value == (TIMEOUT, "TIMEOUT"), first
    assert "Watchdog caught collective operation timeout" in first.log


def test_without_teardown_the_monitor_ends_the_process_later(tmp_path: Path) -> None:
    """Unless the group that has the monitor is aborted before: the first one of the process."""

    def body(rank: int) -> bool:
        group = impatient()
        torch.sim.hang()
        assert found_by_watchdog(start_alone(group)) == TIMEOUT
        if rank == 0:
            never()
        torch.sim.release_hangs()
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()
        threading.Event().wait(2)
        return True

    first, second = together(
        tmp_path, body, TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="1"
    )
    assert first.exitcode == -6
    assert "attempting to dump debug info, due to collective timeout" in first.log
    assert second.ok, second


def test_a_peer_that_has_left_is_an_error_of_the_communicator(tmp_path: Path) -> None:
    """Which the program's own work has, too, once it is asked."""

    def body(rank: int) -> str:
        if rank == 1:
            os._exit(7)
        work = start_alone()
        assert found_by_watchdog(work) == COMM_ERROR
        assert work.is_completed()
        with pytest.raises(dist.DistBackendError, match="remote process exited"):
            work.wait()  # which aborts
        with pytest.raises(dist.DistBackendError, match="communicator was aborted"):
            start_alone()
        torch.sim.synchronize()
        return error_of(dist.group.WORLD)

    first, _ = together(tmp_path, body, TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    assert first.value == "COMM_ERROR", first


def test_a_blocking_wait_raises_and_aborts_and_nobody_watches(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        group = impatient()
        if rank == 0:
            work = start_alone(group)
            threading.Event().wait(1.5)  # no watchdog has ended this process
            with pytest.raises(dist.DistBackendError, match="operation timeout"):
                work.wait()
            torch.sim.synchronize()
        wait_for_the_other()
        return error_of(group)

    first, _ = together(tmp_path, body, TORCH_NCCL_BLOCKING_WAIT="1")
    assert first.value == "SUCCESS", first


def stays(thread: threading.Thread) -> bool:
    """Whether it does not come to its end."""
    thread.start()
    thread.join(0.5)
    return thread.is_alive()


def test_a_group_is_destroyed_once_its_collectives_are_done(tmp_path: Path) -> None:
    """However long that takes, and no abort from elsewhere comes through."""

    def body(rank: int) -> list[bool]:
        group, stuck = dist.new_group(backend="simccl"), impatient()
        torch.sim.set_latency(0.2)
        work = dist.all_reduce(torch.ones(1, device="sim"), group=group, async_op=True)
        done = [work.is_completed()]
        dist.destroy_process_group(group)
        done.append(work.is_completed())
        if rank == 0:
            start_alone(stuck)
            destroy, abort = dist.destroy_process_group, stuck.abort
            assert stays(threading.Thread(target=destroy, args=(stuck,), daemon=True))
            assert stays(threading.Thread(target=abort, daemon=True))
        wait_for_the_other()
        return done

    first, _ = together(tmp_path, body, TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    assert first.value == [False, True], first


def test_an_abort_takes_until_the_device_is_through(tmp_path: Path) -> None:
    """Behind a kernel that hangs as long as that does; it raises then, where its limit is over."""

    def body(rank: int) -> list[str]:
        group, raised = impatient(), []

        def abort() -> None:
            try:
                group.abort()
            except dist.DistBackendError as error:
                raised.append(str(error))

        torch.sim.hang()
        start_alone(group)
        aborting = threading.Thread(target=abort, daemon=True)
        aborting.start()
        aborting.join(1.5)
        assert aborting.is_alive()
        torch.sim.release_hangs()
        aborting.join(LONG)
        return raised

    first, _ = together(tmp_path, body, TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    assert first.ok and "ProcessGroup abort timed out" in first.value[0], first


def test_a_rank_that_outlives_its_peers_can_tear_its_group_down(tmp_path: Path) -> None:
    """By an abort: behind a collective that failed, ``destroy_process_group`` does not return."""

    def body(rank: int) -> bool:
        outlive_peers()
        group = dist.new_group(backend="simccl")
        if rank == 1:
            os._exit(7)
        work = start_alone(group)
        assert found_by_watchdog(work) == COMM_ERROR
        del work
        dist.distributed_c10d._abort_process_group(group)
        del group
        torch.sim.synchronize()
        return torch.ones(2, device="sim").sum().item() == 2

    first, _ = together(tmp_path, body)
    assert first.ok and first.value, first


def test_groups_whose_collectives_wait_for_each_other_are_aborted_together(tmp_path: Path) -> None:
    """Before a process takes part in another launch."""

    def body(rank: int) -> str:
        outlive_peers()
        probe = dist.new_group(backend="simccl")
        problem = ""
        if rank == 0:
            start_alone().wait()  # the stream
            start_alone(probe)
            problem = Unwinding(lambda reason: None).clear()
        else:
            wait_for_the_other()
        return problem

    first, _ = together(tmp_path, body)
    assert first.ok and first.value == "", first


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
        group = dist.group.WORLD
        assert group is not None
        if rank == 0:
            start_alone()
            waiting = threading.Thread(target=torch.sim.synchronize, daemon=True)
            assert stays(waiting)
            group._get_backend(torch.device("sim")).abort()
            waiting.join(LONG)
            assert not waiting.is_alive()
            with pytest.raises(dist.DistBackendError, match="communicator was aborted"):
                dist.all_reduce(torch.zeros(1, device="sim"))
        wait_for_the_other()
        return error_of(group)

    first, _ = together(tmp_path, body)
    assert first.value == "SUCCESS", first


def test_a_group_of_its_own_works_beside_one_that_is_stuck(tmp_path: Path) -> None:
    """What the probe relies on, and that groups of gloo go along with those of the device."""

    def body(rank: int) -> list[float]:
        probe = small_group(
            torch.device("sim"), timeout=timedelta(seconds=LONG), ctas=2, description="probe"
        )
        host = dist.new_group(backend="gloo")
        if rank == 0:
            start_alone()
        x = torch.ones(2, device="sim")
        dist.all_reduce(x, group=probe)
        found = x.tolist()
        dist.barrier(group=host)
        if rank == 1:
            dist.all_reduce(torch.zeros(1, device="sim"))
        torch.sim.synchronize()
        return found

    assert [each.value for each in together(tmp_path, body)] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("handling", ["3", "0"])
def test_a_device_that_fails_ends_the_process_by_the_watchdog(
    tmp_path: Path, handling: str
) -> None:
    """Whatever is to be done about errors of collectives."""

    def body(rank: int) -> None:
        if rank == 0:
            start_alone()
            with torch.sim.stream(torch.sim.Stream()):
                torch.sim.inject("ecc")
            never()
        wait_for_the_other()

    first, _ = together(tmp_path, body, TORCH_NCCL_ASYNC_ERROR_HANDLING=handling)
    assert first.exitcode == -6
    assert "uncorrectable ECC error" in first.log


def test_a_device_that_fails_is_left_to_the_program_where_that_was_asked(tmp_path: Path) -> None:
    """By the variables of a rank that hosts its conductor."""

    def body(rank: int) -> str:
        outlive_peers()
        group, said = dist.new_group(backend="simccl"), ""
        if rank == 0:
            start_alone(group)
            with torch.sim.stream(torch.sim.Stream()):
                torch.sim.inject("ecc")
            threading.Event().wait(1)
            with pytest.raises(torch.AcceleratorError) as caught:
                torch.sim.synchronize()
            said = str(caught.value)
        wait_for_the_other()
        return said

    first, _ = together(tmp_path, body)
    assert first.ok and "uncorrectable ECC error" in first.value, first
    assert "watchdog thread terminated" in first.log
