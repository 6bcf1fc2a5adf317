"""What CUDA and torch document of a GPU, on the made-up one: a test for each row of docs/gpu.md."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

from slurm_forge.device.accelerator import module_of, synchronize
from slurm_forge.device.generators import put_state, state_of
from slurm_forge.device.memory import allocator_counters
from tests.accelerator.children import in_child

Device = torch.device
Busy = Callable[[Device], None]


def late(seconds: float = 0.05) -> None:
    """An idle stream begins so much later, where nobody waits for it."""
    torch.sim.set_latency(seconds)


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def reasons() -> list[str]:
    return torch.sim.wait_reasons()


# -- asynchronous execution --------------------------------------------------------------------


def test_it_is_the_accelerator_of_this_process(sim: Device) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module("sim") is torch.sim
    assert torch.zeros(1, device="sim").device == sim


def test_work_is_queued_and_what_is_read_too_early_is_old(device: Device, occupy: Busy) -> None:
    host, there = pinned(-1.0), torch.full((1,), 2.0, device=device)
    occupy(device)
    host.copy_(there, non_blocking=True)
    assert host.item() == -1
    synchronize(device)
    assert host.item() == 2


def test_nothing_waits_but_what_needs_values(sim: Device) -> None:
    with torch.sim.held():
        x = torch.ones(4, 4, device=sim, requires_grad=True)
        (x @ x).relu().sum().backward()
        for _ in range(100):
            y = x.detach() * 2 + 1
    assert torch.sim.counts().waits == 0
    assert y.sum().item() == 48
    assert reasons() == ["aten::_local_scalar_dense"]


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("item", lambda x: x[0].item()),
        ("cpu", lambda x: x.cpu()),
        ("nonzero", lambda x: x.nonzero()),
        ("a mask", lambda x: x[x > 1]),
        ("if", lambda x: bool(x[0] == 0)),
        ("equal", lambda x: torch.equal(x, x)),
        ("tolist", lambda x: x.tolist()),
    ],
)
def test_what_needs_values_waits_and_is_counted(
    sim: Device, what: str, call: Callable[[torch.Tensor], object]
) -> None:
    x = torch.arange(4.0, device=sim)
    call(x)
    assert torch.sim.counts().waits >= 1
    with torch.sim.without_waiting(), pytest.raises(RuntimeError, match="the host waits"):
        call(x)


def test_a_scalar_of_the_host_is_read_when_the_kernel_is_launched(
    device: Device, occupy: Busy
) -> None:
    factor = torch.tensor(3.0)
    occupy(device)
    x = torch.ones(2, device=device) * factor
    factor.fill_(5)
    assert x.tolist() == [3, 3]


def test_tensors_on_two_devices_are_refused(sim: Device) -> None:
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device=sim) + torch.ones(2)


# -- copies ------------------------------------------------------------------------------------


def test_a_copy_from_pinned_memory_is_not_waited_for(sim: Device) -> None:
    host, there = pinned(1.0, 2.0), torch.empty(2, device=sim)
    with torch.sim.held():
        there.copy_(host, non_blocking=True)
        back = torch.empty(2, pin_memory=True)
        back.copy_(there, non_blocking=True)
    counts = torch.sim.counts()
    assert (counts.waits, counts.copies_async, counts.copies_waiting) == (0, 2, 0)
    torch.sim.synchronize()
    assert back.tolist() == [1, 2]


def test_what_is_copied_from_pinned_memory_later_is_what_it_holds_then(sim: Device) -> None:
    host = pinned(1.0)
    with torch.sim.held():
        there = host.to(sim, non_blocking=True)
        host.fill_(9)
    assert there.item() == 9


def test_pinned_memory_is_not_used_again_while_it_is_copied(device: Device, occupy: Busy) -> None:
    first = pinned(1.0)
    occupy(device)
    there = first.to(device, non_blocking=True)
    del first
    second = pinned(2.0)
    assert (there.item(), second.item()) == (1, 2)


def test_a_copy_of_pageable_memory_waits_whatever_it_is_asked_for(sim: Device) -> None:
    host = torch.tensor([1.0])
    there = host.to(sim, non_blocking=True)
    assert reasons() == ["copy of pageable memory to the device"]
    host.fill_(9)
    assert there.item() == 1
    torch.sim.reset_counts()
    torch.empty(1).copy_(there, non_blocking=True)
    assert reasons() == ["copy to the host"]


def test_a_blocking_copy_is_there_when_it_returns(device: Device, occupy: Busy) -> None:
    occupy(device)
    assert torch.full((3,), 7.0, device=device).cpu().tolist() == [7, 7, 7]
    occupy(device)
    assert torch.arange(6, device=device).view(2, 3).t().to("cpu", torch.float64).sum() == 15


def test_between_devices_both_streams_are_in_order(sim: Device) -> None:
    late()
    x = torch.zeros(2, device="sim:0")
    x.add_(3)
    y = torch.zeros(2, device="sim:1")
    y.copy_(x, non_blocking=True)
    x.fill_(8)  # behind the copy
    assert y.tolist() == [3, 3]


# -- streams and events ------------------------------------------------------------------------


def test_a_stream_is_in_order_and_waits_for_no_other(sim: Device) -> None:
    late(10)
    x = torch.zeros(1, device=sim)
    torch.sim.synchronize()
    x.add_(1)  # not begun: the default stream is late
    with torch.sim.stream(torch.sim.Stream()):
        early = x.clone()
        assert early.item() == 0
    torch.sim.synchronize()
    assert x.item() == 1


def test_a_stream_waits_for_an_event_and_the_host_does_not(device: Device, occupy: Busy) -> None:
    module = module_of(device)
    side, event = module.Stream(), module.Event()
    x = torch.zeros(1, device=device)
    occupy(device)
    x.add_(1)
    event.record()
    side.wait_event(event)
    with module.stream(side):
        y = x * 10
    assert not event.query()
    side.synchronize()
    assert event.query()
    assert y.item() == 10


def test_an_event_that_was_never_recorded_is_complete(device: Device) -> None:
    event = module_of(device).Event()
    assert event.query()
    event.synchronize()


def test_events_measure_time_on_the_device(device: Device) -> None:
    begin, end = (module_of(device).Event(enable_timing=True) for _ in range(2))
    begin.record()
    a = torch.ones(256, 256, device=device)
    for _ in range(5):
        a = a @ a * 0.01
    end.record()
    end.synchronize()
    assert 0 < begin.elapsed_time(end) < 60_000


def test_memory_freed_while_another_stream_uses_it_is_used_again(sim: Device) -> None:
    """Nobody but ``record_stream`` tells the allocator."""

    def read_beside(record: bool) -> float:
        x = torch.ones(1000, device=sim)
        side = torch.sim.Stream()
        torch.sim.synchronize()
        with torch.sim.held():
            with torch.sim.stream(side):
                torch.sim.hang()
                y = x * 1
            if record:
                x.record_stream(side)
            del x
            z = torch.full((1000,), 5.0, device=sim)
        z.sum().item()
        torch.sim.release_hangs()
        side.synchronize()
        return y[0].item()

    assert read_beside(record=True) == 1
    assert read_beside(record=False) == 5


def test_streams_are_those_of_a_thread(sim: Device) -> None:
    mine, others = torch.sim.Stream(), []

    def look() -> None:
        others.append((torch.sim.current_stream().stream_id, torch.sim.current_device()))

    torch.sim.set_device(1)
    with torch.sim.stream(mine):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert others == [(0, 0)]


# -- memory ------------------------------------------------------------------------------------


def test_memory_that_runs_out_is_torchs_error_and_leaves_the_device_usable(device: Device) -> None:
    size = 2 * module_of(device).mem_get_info()[1]
    if device.type == "sim":
        torch.sim.empty_cache()
        torch.sim.set_budget(torch.sim.memory_reserved() + (1 << 20))
        size = 2 << 20
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate [0-9.]+ "):
        torch.empty(size, dtype=torch.uint8, device=device)
    assert torch.ones(4, device=device).sum().item() == 4
    assert allocator_counters(device)["num_ooms"] >= 1


def test_the_allocator_keeps_memory_and_gives_it_back_where_it_lacks_it(sim: Device) -> None:
    torch.sim.empty_cache()
    before = torch.sim.memory_reserved()
    x = torch.empty(1 << 20, dtype=torch.uint8, device=sim)
    del x
    assert torch.sim.memory_reserved() == before + (1 << 20)
    retries = torch.sim.memory_stats()["num_alloc_retries"]
    torch.sim.set_budget(before + (1 << 20) + (1 << 19))
    y = torch.empty(3 << 19, dtype=torch.uint8, device=sim)
    assert torch.sim.memory_stats()["num_alloc_retries"] == retries + 1
    del y
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() == before
    free, total = torch.sim.mem_get_info()
    assert total - free == before


def test_memory_is_not_zero_when_it_is_new(sim: Device) -> None:
    assert torch.empty(3, 7, 11, device=sim).isnan().all().item()


# -- random numbers ----------------------------------------------------------------------------


def test_each_device_has_a_generator_of_its_own(sim: Device) -> None:
    host = torch.get_rng_state()
    torch.sim.manual_seed(5)
    state = torch.sim.get_rng_state()
    first = torch.rand(4, device=sim).tolist()
    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(torch.sim.get_rng_state(1), torch.sim.get_rng_state(1))
    torch.sim.set_rng_state(state)
    with torch.sim.held():  # neither reading nor setting it waits
        torch.sim.set_rng_state(torch.sim.get_rng_state())
        drawn = torch.rand(4, device=sim)
    assert drawn.tolist() == first
    assert torch.rand(4, device=sim).tolist() != first
    assert torch.rand(4, device=sim, generator=torch.Generator("sim").manual_seed(1)).tolist() == (
        torch.rand(4, device=sim, generator=torch.Generator("sim").manual_seed(1)).tolist()
    )
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(4, device=sim, generator=torch.Generator())


def test_torch_seeds_it_with_all_others(device: Device) -> None:
    torch.manual_seed(3)
    first = torch.nn.functional.dropout(torch.ones(64, device=device)).tolist()
    torch.manual_seed(3)
    assert torch.nn.functional.dropout(torch.ones(64, device=device)).tolist() == first


def test_a_generator_that_is_put_back_draws_the_same_again(device: Device) -> None:
    """By what checkpoints and rollbacks keep of it."""
    torch.rand(3, device=device)
    state = state_of(device)
    assert state is not None
    drawn = torch.rand(64, device=device).tolist()
    put_state(device, state)
    assert torch.rand(64, device=device).tolist() == drawn


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ecc", "uncorrectable ECC error encountered"),
        ("lost", "unknown error"),
        ("launch", "unspecified launch failure"),
    ],
)
def test_a_fault_is_reported_late_and_spoils_the_context_for_good(
    sim: Device, fault: str, words: str
) -> None:
    x = torch.ones(2, device=sim)
    with torch.sim.held():
        torch.sim.inject(fault)
        y = x + 1  # the device has not come to it
    for call in (torch.sim.synchronize, y.cpu, lambda: x + 1, torch.sim.mem_get_info):
        with pytest.raises(torch.AcceleratorError, match=words):
            call()
    assert torch.ones(2, device="sim:1").sum().item() == 2


def test_what_a_kernel_finds_wrong_is_an_assertion_of_the_device(sim: Device) -> None:
    x, at = torch.ones(2, device=sim), torch.tensor([7], device=sim)
    with torch.sim.held():
        x[at]
    with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
        torch.sim.synchronize()


def test_a_kernel_that_hangs_holds_its_stream_and_no_other(sim: Device) -> None:
    x = torch.ones(2, device=sim)
    torch.sim.synchronize()
    torch.sim.hang()
    event = torch.sim.Event()
    event.record()
    with torch.sim.stream(torch.sim.Stream()):
        assert (x + 1).sum().item() == 4
    assert not event.query()
    waiting = threading.Thread(target=torch.sim.synchronize, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()  # it blocks in C, and no exception of Python's reaches it
    torch.sim.release_hangs()
    waiting.join()
    assert event.query()


# -- forks -------------------------------------------------------------------------------------


def use() -> None:
    assert not torch.sim._is_in_bad_fork()
    assert torch.ones(3, device="sim").sum().item() == 3


def is_refused(device: Device) -> None:
    assert module_of(device)._is_in_bad_fork()
    assert not module_of(device).is_initialized()
    with pytest.raises(RuntimeError, match=r"Cannot re-initialize \w+ in forked subprocess"):
        torch.ones(1, device=device)


def test_a_child_can_not_use_what_its_parent_has_begun_to_use(device: Device) -> None:
    if device.type == "sim" and not torch.sim.is_initialized():
        assert torch.sim.device_count() == 2
        assert in_child(use) == 0
    x = torch.ones(1, device=device)
    assert in_child(partial(is_refused, device)) == 0
    assert x.item() == 1


def test_to_ask_whether_it_is_available_is_to_begin(sim: Device) -> None:
    torch.manual_seed(0)
    assert in_child(use) == 0
    assert torch.sim.is_available()
    assert not torch.sim.is_initialized()
    assert in_child(partial(is_refused, sim)) == 0
