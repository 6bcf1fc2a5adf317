"""What is looked at on a node, on this one; a process that hangs is ended."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.messages.preflight import Check, CheckVerdict, Thoroughness
from slurm_forge.device import accelerator
from slurm_forge.device.health import (
    GpuFacts,
    GpuProcess,
    parse_gpus,
    parse_processes,
    parse_uncorrected,
    read_amd_gpus,
)
from slurm_forge.site.model import EnvironmentSets
from slurm_forge.training.preflight import child as preflight_child
from slurm_forge.training.preflight import node_checks
from slurm_forge.training.preflight.child import (
    GroupTestRequest,
    Looker,
)
from slurm_forge.training.preflight.node_checks import (
    NodeRequirements,
    run_checks,
)


def wanted(folder: Path | None = None, **more: object) -> NodeRequirements:
    return replace(NodeRequirements(thoroughness=Thoroughness.FULL, folder=folder), **more)  # type: ignore[arg-type]


def found(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_node_is_fine_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    checks = found(run_checks(wanted(tmp_path), {}, may_use_gpu=True))
    assert {"cpu computes", "memory", "storage", "lock", "gpu", "environment"} <= set(checks)
    assert not [check for check in checks.values() if check.verdict is CheckVerdict.BAD]
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_can_not_be_written_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checks = found(run_checks(wanted(tmp_path / "file"), {}, may_use_gpu=False))
    assert checks["storage"].verdict is CheckVerdict.BAD


def test_a_full_storage_is_bad_and_a_nearly_full_one_is_told(tmp_path: Path) -> None:
    real = os.statvfs(tmp_path)
    for blocks, expected in ((1, CheckVerdict.BAD), (512 << 20, CheckVerdict.ODD)):
        room = mock.Mock(f_bavail=blocks // 1, f_frsize=1, f_files=real.f_files, f_favail=9)
        with mock.patch.object(node_checks.os, "statvfs", return_value=room):
            assert (
                found(run_checks(wanted(tmp_path), {}, may_use_gpu=False))["storage"].verdict
                is expected
            )


def test_what_is_free_is_not_rounded_to_nothing(tmp_path: Path) -> None:
    room = mock.Mock(f_bavail=980, f_frsize=1024, f_files=20, f_favail=9)
    with mock.patch.object(node_checks.os, "statvfs", return_value=room):
        checks = found(run_checks(wanted(tmp_path), {}, may_use_gpu=False))
    assert checks["storage"].text == "980K and 9 files free"


def test_a_wrong_product_is_seen(tmp_path: Path) -> None:
    real = torch.matmul

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = real(a, b)
        product[3, 5] += 1
        return product

    with mock.patch.object(torch, "matmul", wrong):
        checks = found(run_checks(wanted(), {}, may_use_gpu=False))
    assert checks["cpu computes"].verdict is CheckVerdict.BAD


def test_gpus_that_were_asked_for_and_are_not_there_are_bad() -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        checks = found(run_checks(wanted(gpus=2), {}, may_use_gpu=True))
    assert (checks["gpu"].verdict, checks["gpu"].text) == (
        CheckVerdict.BAD,
        "0 visible, 2 requested",
    )


def test_variables_are_compared_with_the_site() -> None:
    sets = EnvironmentSets(
        always={"NCCL_A": "1", "NCCL_B": "2"},
        on_hang={"NCCL_DEBUG": "INFO"},
        never={"NCCL_C": "the fabric has none"},
    )
    there = {"NCCL_A": "a person's own", "NCCL_C": "x"}
    checks = found(run_checks(wanted(sets=sets), there, may_use_gpu=False))
    assert checks["environment"].verdict is CheckVerdict.ODD
    assert checks["environment"].text == (
        "NCCL_C=x is set, and must not be here: the fabric has none; "
        "NCCL_B is not set; the site sets NCCL_B=2"
    )
    checks = found(run_checks(wanted(sets=sets, on_hang=True), there, may_use_gpu=False))
    assert "NCCL_DEBUG is not set" in checks["environment"].text


def test_too_little_memory_is_told() -> None:
    checks = found(run_checks(wanted(memory=1 << 50), {}, may_use_gpu=False))
    assert checks["memory"].verdict is CheckVerdict.ODD


def test_too_few_files_for_so_many_ranks_are_bad() -> None:
    for ranks, expected in ((2, CheckVerdict.FINE), (1 << 20, CheckVerdict.BAD)):
        checks = found(run_checks(wanted(ranks=ranks), {}, may_use_gpu=False))
        assert checks["open files"].verdict is expected
    assert "ulimit -Hn" in checks["open files"].text
    assert "open files" not in found(run_checks(wanted(), {}, may_use_gpu=False))


def test_what_nvidia_smi_says() -> None:
    assert parse_gpus("0, 0, No\n1, 3, Yes\n2, [N/A], [N/A]\nError: no\n") == (
        GpuFacts(name="0"),
        GpuFacts(name="1", uncorrected=3, pending=True),
        GpuFacts(name="2"),
    )
    assert parse_processes("412, /usr/bin/python3, 70123\n\nx, y\n7, a, [N/A]\n") == (
        GpuProcess(pid=412, name="python3", mib=70123),
        GpuProcess(pid=7, name="a", mib=0),
    )


@given(st.lists(st.tuples(st.sampled_from(["ue", "ce", "de"]), st.integers(0, 1 << 63))))
def test_what_a_file_of_amdgpu_counts_is_summed(counts: list[tuple[str, int]]) -> None:
    text = "".join(f"{word}: {number}\n" for word, number in counts)
    assert parse_uncorrected(text) == sum(number for word, number in counts if word == "ue")


@given(st.text(alphabet="ue:c 0123456789-²\n\t") | st.text())
def test_a_file_of_amdgpu_may_hold_anything(text: str) -> None:
    assert parse_uncorrected(text) >= 0
    assert parse_uncorrected("Query currently inaccessible\n") == 0


def test_errors_that_amdgpu_counts_are_told(tmp_path: Path) -> None:
    assert read_amd_gpus(tmp_path) == ()
    for card, parts in (("card0", {"umc": 0, "gfx": 2}), ("card1", {"umc": 0}), ("card2", {})):
        folder = tmp_path / card / "device" / "ras"
        folder.mkdir(parents=True)
        for part, count in parts.items():
            (folder / f"{part}_err_count").write_text(f"ue: {count}\nce: 7\n")
    (tmp_path / "card0-DP-1").mkdir()
    gpus = read_amd_gpus(tmp_path)
    assert gpus == (GpuFacts(name="card0", uncorrected=2), GpuFacts(name="card1"))
    with mock.patch.object(node_checks, "read_amd_gpus", lambda: gpus):
        (check, *_) = run_checks(wanted(busy=True), {}, may_use_gpu=False)
    assert (check.name, check.verdict) == ("gpu health", CheckVerdict.ODD)
    assert check.text == "gpu card0: uncorrected memory errors since the driver was loaded"


def test_a_check_that_hangs_is_bad_and_its_processes_are_gone(tmp_path: Path) -> None:
    looker = Looker(wanted(tmp_path), {}, may_use_gpu=False)
    pids: list[int] = []
    real = Looker.begin

    def begin(self: Looker) -> None:
        real(self)
        pids.append(self._pid)

    with (
        mock.patch.object(Looker, "begin", begin),
        mock.patch.object(preflight_child, "run_checks", lambda *_, **__: time.sleep(600)),
    ):
        looker.begin()
        (check,) = looker.checks(0.1)
    assert (check.name, check.verdict) == ("answer", CheckVerdict.BAD)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_check_that_hangs_is_named() -> None:
    looker = Looker(wanted(), {}, may_use_gpu=False)

    def begin() -> None:
        _, looker._asks = os.pipe()
        looker._answers, writer = os.pipe()
        os.write(writer, b'{"begun": "gpu"}\n{"begun": "storage"}\n')

    with mock.patch.object(looker, "begin", begin):
        begin()
        (check,) = looker.checks(0.05)
    assert check.text == "no answer within 0 s, in storage; twice"


def test_a_child_that_hangs_by_bad_luck_is_replaced(tmp_path: Path) -> None:
    looker = Looker(wanted(tmp_path), {}, may_use_gpu=False)
    limits = iter((0.05, 60.0))
    real = Looker._run_checks
    with mock.patch.object(preflight_child, "run_checks", lambda *_, **__: time.sleep(600)):
        looker.begin()
    with mock.patch.object(Looker, "_run_checks", lambda self, _: real(self, next(limits))):
        checks = looker.checks(1.0)
    looker.end()
    assert {"cpu computes", "storage"} <= {check.name for check in checks}


def test_a_collective_that_hangs_fails_and_another_can_be_tried() -> None:
    looker = Looker(wanted(broken="silent"), {}, may_use_gpu=False)
    ports: list[int] = []
    asked = GroupTestRequest(nonce="x", rank=0, size=1, backend="gloo", within_s=0.2)
    try:
        trial = looker.trial(asked, ports.append)
        assert not trial.ok
        assert "no answer" in trial.text
        looker._requirements = wanted()
        ports.clear()
        trial = looker.trial(replace(asked, within_s=60.0), ports.append)
        assert trial.ok, trial.text
    finally:
        looker.end()
    assert len(ports) == 1


def test_a_file_that_a_killed_look_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a container the next one may have the same process id."""
    for what in (".preflight-{}-{}", ".preflight-{}-{}.part", ".preflight-lock-{}-{}"):
        (tmp_path / what.format(socket.gethostname(), os.getpid())).write_text("")
    checks = found(run_checks(wanted(tmp_path), {}, may_use_gpu=False))
    assert (checks["storage"].verdict, checks["lock"].verdict) == (
        CheckVerdict.FINE,
        CheckVerdict.FINE,
    )
    assert len(list(tmp_path.iterdir())) == 3


def test_who_was_forked_after_the_driver_was_asked_anything_says_nothing_of_gpus() -> None:
    """``torch.cuda.is_available()`` in a script before ``attach``: no fault of the node."""
    with (
        mock.patch.object(torch.cuda, "_is_in_bad_fork", lambda: True),
        mock.patch.object(accelerator, "built_for", lambda: (torch.device("cuda"),)),
    ):
        checks = found(run_checks(wanted(gpus=1), {}, may_use_gpu=True))
    assert checks["gpu"].verdict is CheckVerdict.SKIPPED
    assert "gpu memory" not in checks and "gpu computes" not in checks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_all_processes_of_a_step_ends_no_look(number: signal.Signals) -> None:
    looker = Looker(wanted(), {}, may_use_gpu=False)
    looker.begin()
    try:
        pid = looker._pid
        os.kill(pid, number)
        checks = looker.checks(60.0)
        assert "cpu computes" in {check.name for check in checks}
        assert looker._pid == pid
    finally:
        looker.end()
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_look_that_somebody_killed_is_said_to_have_been() -> None:
    looker = Looker(wanted(), {}, may_use_gpu=False)

    def killed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(preflight_child, "run_checks", killed):
        looker.begin()
        (check,) = looker.checks(60.0)
    assert check.text == "the process of the check was killed (SIGKILL), in its start; twice"
    assert check.seconds < 30


def test_a_program_with_more_than_1024_open_files_can_be_looked_at() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if before[1] == resource.RLIM_INFINITY else min(4096, before[1])
    if most < 1200:
        pytest.skip("no process may have so many files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, before[0]), before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    looker = Looker(wanted(), {}, may_use_gpu=False)
    try:
        looker.begin()
        assert looker._answers >= 1024
        assert "cpu computes" in {check.name for check in looker.checks(60.0)}
    finally:
        looker.end()
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
