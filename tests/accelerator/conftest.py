"""The made-up accelerator, seen by the tests of this folder alone.

A test on it runs in a process of its own, forked from this one: what a test does to the device is
permanent, and a process that has used the device can fork no ranks that do.  A test that takes
``device`` in place of ``sim`` needs nothing that only the made-up one has: marked ``gpu`` it runs
on a real one as well, in this process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

from slurm_forge.device.accelerator import kind
from tests.accelerator.build import installed
from tests.distributed.launches import Gate

_DEADLINE_S = 300


@pytest.fixture(scope="session")
def _registered() -> None:
    folder = str(installed())
    sys.path.insert(0, folder)
    import simdev
    import torch._dynamo  # some kernels for meta tensors would: once, not in every child

    simdev.register()
    sys.path.remove(folder)
    torch.sim.show_devices(0)


@pytest.fixture
def sim(_registered: None) -> torch.device:
    """Its first device, as after a start.  The test runs in a process of its own."""
    return torch.device("sim", 0)


@pytest.fixture(params=["sim", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The first made-up device, and the first one of this machine's own kind."""
    if request.param == "sim":
        made_up: torch.device = request.getfixturevalue("sim")
        return made_up
    found = kind()
    if found is None:
        pytest.skip("torch sees no accelerator here")
    return torch.device(found.type, 0)


@pytest.fixture
def occupy() -> Callable[[torch.device], None]:
    """Keeps the current stream of a device busy for longer than a few calls take."""

    def queue_work(device: torch.device) -> None:
        if device.type == "sim":
            torch.sim.synchronize()
            torch.sim.set_latency(60)  # before an idle stream begins, unless somebody waits
            return
        a = torch.rand(8192, 8192, device=device)
        for _ in range(20):
            a = a @ a / 8192

    return queue_work


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A place in the program at which ranks stay until the test lets them go."""
    one = Gate()
    yield one
    one.close()


@pytest.fixture
def sim_in_ranks(_registered: None) -> Iterator[None]:
    """The ranks that a test forks have two devices; the test itself uses none."""
    torch.sim.show_devices(2)
    yield
    torch.sim.show_devices(0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    callspec = getattr(pyfuncitem, "callspec", None)
    on_sim = callspec is not None and callspec.params.get("device") == "sim"
    if not on_sim and "sim" not in pyfuncitem.fixturenames:
        return None
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os._exit(_in_child(pyfuncitem, writer))
    os.close(writer)
    text = _said(reader, pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        pytest.fail(text or f"its process ended with {status}", pytrace=False)
    return True


def _in_child(item: pytest.Function, writer: int) -> int:
    faulthandler.enable(os.dup(writer))
    faulthandler.register(signal.SIGUSR2, file=os.dup(writer), all_threads=True)
    try:
        torch.sim.show_devices(2)
        torch.set_num_threads(1)
        names = item._fixtureinfo.argnames
        item.obj(**{name: item.funcargs[name] for name in names})
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
        return 1
    return 0


def _said(reader: int, pid: int) -> str:
    """What it says until it is over; its stacks, where it does not end."""
    os.set_blocking(reader, False)
    text, until = b"", time.monotonic() + _DEADLINE_S
    asked = False
    while True:
        try:
            data = os.read(reader, 1 << 16)
            if not data:
                return text.decode(errors="replace")
            text += data
        except BlockingIOError:
            time.sleep(0.002)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL if asked else signal.SIGUSR2)
            asked, until = True, time.monotonic() + 2
