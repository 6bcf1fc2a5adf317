"""What the package makes of a device that fails, is full, or was begun with too early."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch

from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.preflight import (
    NodeReport,
    PreflightReport,
    PreflightRound,
    Thoroughness,
)
from slurm_forge.device.accelerator import built_for
from slurm_forge.json_codec import parse
from slurm_forge.training.core.error_report import cause_of, last_words
from slurm_forge.training.core.rank_info import RankPlace
from slurm_forge.training.preflight.main import Preflight
from slurm_forge.training.preflight.node_checks import NodeRequirements, run_checks
from slurm_forge.training.rank.in_process_relaunch import Unwinding
from slurm_forge.training.rank.preload import why_not_forkable
from slurm_forge.vocabulary.cause import Cause
from tests.accelerator.children import in_child

Device = torch.device


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("ecc", Cause.GPU_ERROR),
        ("lost", Cause.GPU_ERROR),
        ("assert", Cause.APP_ERROR),
        ("launch", Cause.APP_ERROR),
        ("memory", Cause.CUDA_OOM),
    ],
)
def test_an_error_of_the_device_has_its_cause(sim: Device, fault: str, cause: Cause) -> None:
    with pytest.raises(RuntimeError) as caught:
        if fault == "memory":
            torch.empty(2 << 30, dtype=torch.uint8, device=sim)
        torch.sim.inject(fault)
        torch.sim.synchronize()
    assert cause_of(caught.value) is cause
    # Of a rank that had no last words its output is all there is.
    assert cause_of(RuntimeError(last_words(caught.value))) is cause


def test_a_process_whose_context_is_spoilt_takes_part_in_no_other_launch(sim: Device) -> None:
    unwinding = Unwinding(lambda reason: None)
    assert unwinding.clear() == ""
    torch.ones(2, device=sim)
    assert Unwinding(lambda reason: None).clear() == ""
    torch.sim.inject("ecc")
    problem = Unwinding(lambda reason: None).clear()
    assert "can't be used any more" in problem
    assert "uncorrectable ECC error" in problem


def names(checks: object) -> dict[str, str]:
    return {each.name: each.verdict.value for each in checks}  # type: ignore[attr-defined]


def test_a_worker_is_not_forked_from_who_has_asked_for_a_device(sim: Device) -> None:
    assert why_not_forkable() == ""
    assert torch.sim.is_available()  # as modules of users do when they are imported
    assert "asked the driver for a device" in why_not_forkable()


def test_a_check_that_may_not_use_the_device_does_not_blame_the_node(sim: Device) -> None:
    asked = NodeRequirements(thoroughness=Thoroughness.FULL, gpus=2, local_rank=1)

    def looks() -> None:
        found = names(run_checks(asked, {}, may_use_gpu=True))
        assert found["gpu"] == "fine"
        assert found["gpu memory"] == "fine"
        assert found["gpu computes"] == "fine"

    def is_late() -> None:
        found = names(run_checks(asked, {}, may_use_gpu=True))
        assert found["gpu"] == "skipped"
        assert "gpu memory" not in found

    assert in_child(looks) == 0
    assert torch.sim.is_available()
    assert in_child(is_late) == 0


class Hub:
    """What a rank reports to; it asks for no collective."""

    reported: NodeReport

    def send(self, message: Message) -> None:
        """The report."""
        assert isinstance(message, PreflightReport)
        self.reported = parse(NodeReport, message.body)

    def published(self, key: str, wait_s: float) -> str:
        """No round."""
        return PreflightRound(groups=(), within_s=1.0).to_text()


def test_of_several_kinds_that_torch_is_built_for_the_one_that_is_there_is_reported(
    sim: Device,
) -> None:
    hub = Hub()
    with (
        mock.patch.object(torch.cuda, "_is_compiled", lambda: True),
        mock.patch.object(torch.cuda, "is_available", lambda: False),
    ):
        assert [each.type for each in built_for()] == ["cuda", "sim"]
        Preflight(
            hub,  # type: ignore[arg-type]
            RankPlace(rank=0, local_rank=0, world_size=2, job="1", restart_count=0, node="n1"),
            NodeRequirements(thoroughness=Thoroughness.CHEAP),
            nonce="x",
            environ={},
            within=timedelta(seconds=60),
        ).run()
    assert (hub.reported.device, hub.reported.backend) == ("sim", "simccl")


def test_a_check_finds_a_device_that_is_broken_or_full(sim: Device) -> None:
    asked = NodeRequirements(thoroughness=Thoroughness.CHEAP, gpus=2)

    def broken() -> None:
        torch.sim.inject("ecc")
        with pytest.raises(torch.AcceleratorError):
            torch.sim.synchronize()
        assert names(run_checks(asked, {}, may_use_gpu=True))["gpu memory"] == "bad"

    def full() -> None:
        x = torch.empty(900 << 20, dtype=torch.uint8, device=sim)
        assert names(run_checks(asked, {}, may_use_gpu=True))["gpu memory"] == "bad"
        del x

    assert in_child(broken) == 0
    assert in_child(full) == 0
