"""A rank that nobody has prepared sees to its own environment."""

from __future__ import annotations

import os

import pytest

from slurm_forge.control.interfaces import interfaces
from slurm_forge.errors import ControlChannelError
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.training.core import rank_variables as variables
from slurm_forge.vocabulary.plan import RecoveryPlan, Variable

NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_CROSS_NIC")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in NAMES})
    monkeypatch.setattr(variables, "interfaces", lambda: ("lo", "eth0", "hsn0", "hsn1"))


def file_of(*, interface: str | None = None, env: dict[str, str] | None = None) -> RunFile:
    through = {} if interface is None else {"NCCL_SOCKET_IFNAME": interface}
    return RunFile(
        submitted_from="/home/me",
        python="python",
        socket_interface=interface,
        env={**through, "NCCL_DEBUG": "WARN", "NCCL_CROSS_NIC": "1"},
        job=job_from_mapping({"name": "x", "entry": "a:f", "env": env or {}}),
    )


def here() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in NAMES}


def test_the_site_and_the_job_file_fill_what_nobody_has_set() -> None:
    os.environ.update(NCCL_DEBUG="VERSION", NCCL_CROSS_NIC="2")
    variables.take_on(file_of(interface="hsn", env={"NCCL_CROSS_NIC": "0"}))
    assert here() == {
        "NCCL_SOCKET_IFNAME": "hsn",
        "GLOO_SOCKET_IFNAME": "hsn0",
        "NCCL_DEBUG": "VERSION",
        "NCCL_CROSS_NIC": "0",
    }


@pytest.mark.parametrize(
    ("site", "own", "gloo"),
    [
        ("hsn", {}, "hsn0"),
        ("=hsn1", {}, "hsn1"),
        ("ib", {}, None),
        ("hsn", {"NCCL_SOCKET_IFNAME": "eth"}, "eth0"),
        ("hsn", {"GLOO_SOCKET_IFNAME": "hsn1"}, "hsn1"),
        (None, {"NCCL_SOCKET_IFNAME": "eth"}, None),
    ],
)
def test_gloo_goes_where_nccl_goes(site: str | None, own: dict[str, str], gloo: str | None) -> None:
    os.environ.update(own)
    variables.take_on(file_of(interface=site))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == gloo
    assert os.environ.get("NCCL_SOCKET_IFNAME") == own.get("NCCL_SOCKET_IFNAME", site)


def test_a_plan_stands_above_the_site_and_below_the_person() -> None:
    plan = RecoveryPlan(variables=(Variable("NCCL_DEBUG", "INFO"), Variable("NCCL_CROSS_NIC", "2")))
    file = file_of(env={"NCCL_CROSS_NIC": "0"})
    variables.take_on(file)
    variables.take_on_plan(file, plan)
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_CROSS_NIC"]) == ("INFO", "0")
    os.environ["NCCL_DEBUG"] = "VERSION"
    variables.take_on_plan(file, plan)
    assert os.environ["NCCL_DEBUG"] == "VERSION"


def test_a_plan_sets_nothing_that_neither_run_yaml_says_nor_may_come_over_a_channel() -> None:
    plan = RecoveryPlan(variables=(Variable("LD_PRELOAD", "/evil.so"),))
    file = file_of()
    with pytest.raises(ControlChannelError, match="sets LD_PRELOAD"):
        variables.take_on_plan(file, plan)
    assert "LD_PRELOAD" not in os.environ
    other = file.model_copy(update={"on_hang": {"LD_PRELOAD": "/ours.so"}})
    with pytest.raises(ControlChannelError, match="sets LD_PRELOAD"):
        variables.take_on_plan(other, plan)
    ours = file.model_copy(update={"on_hang": {"LD_PRELOAD": "/evil.so"}})
    variables.take_on_plan(ours, plan)
    assert os.environ.pop("LD_PRELOAD") == "/evil.so"


@pytest.mark.parametrize("own", [{}, {"GLOO_SOCKET_IFNAME": "hsn1"}])
def test_on_one_node_gloo_listens_where_nobody_outside_can_connect(own: dict[str, str]) -> None:
    os.environ.update(own)
    variables.take_on(file_of(interface="hsn"), one_node=True)
    assert os.environ["GLOO_SOCKET_IFNAME"] == own.get("GLOO_SOCKET_IFNAME", "lo")


def test_the_machine_is_asked() -> None:
    assert all(isinstance(name, str) for name in interfaces())


def test_a_rank_that_is_to_outlive_its_peers_keeps_what_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    variables.outlive_peers()
    assert os.environ == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_XCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    }
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setattr(os, "environ", {name: "1"})
        variables.outlive_peers()
        assert os.environ == {name: "1"}
