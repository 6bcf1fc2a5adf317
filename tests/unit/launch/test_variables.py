"""What ranks and commands are started with, and what a person hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.launch.render.launch_command import master_address
from slurm_forge.launch.render.rank_environment import (
    as_submitted,
    effective_on_hang,
    for_command,
    for_launch,
    forbidden,
    with_suspects,
)
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.site.model import EnvironmentSets, PartitionFacts, Site
from slurm_forge.site.variables import forbidden_notes
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.plan import RecoveryPlan, Variable
from tests.unit.recovery.life import incident

PLAN = RecoveryPlan()
AFTER = RecoveryPlan(variables=(Variable("NCCL_DEBUG", "INFO"),))
SITE = Site(
    name="hill",
    env=EnvironmentSets(
        always={"NCCL_DEBUG": "WARN", "NCCL_CROSS_NIC": "1"},
        on_hang={"NCCL_DEBUG": "INFO", "NCCL_IB_TIMEOUT": "23"},
        never={"NCCL_P2P_DISABLE": "it halves the bandwidth"},
    ),
    socket_interface="hsn",
    host_suffix="-hsn0",
    partitions={"fast": PartitionFacts(expected_bandwidth=180e9)},
)


def file_of(folder: Path, site: Site = SITE, **job: object) -> RunFile:
    spec = job_from_mapping(
        {"name": "x", "entry": "a:f", "resources": {"partition": "fast"}, **job}
    )
    run, file = create_run(spec, runs=folder, site=site, submitted_from=Path("/home/me"))
    assert read_run_file(run.spec_file) == file
    return file


def test_the_run_file_holds_the_sites_word(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    assert file.sets.always == {**SITE.env.always, "NCCL_SOCKET_IFNAME": "hsn"}
    assert (file.sets.on_hang, file.sets.never) == (SITE.env.on_hang, SITE.env.never)
    assert (file.expected_bandwidth, file.host_suffix) == (180e9, "-hsn0")
    nothing = file_of(tmp_path / "other", Site(name="generic"))
    assert nothing.sets == EnvironmentSets()
    assert nothing.expected_bandwidth is None


def test_the_order_of_a_launch(tmp_path: Path) -> None:
    file = file_of(tmp_path, env={"NCCL_CROSS_NIC": "0"})
    own = {"HOME": "/root", "NCCL_SOCKET_IFNAME": "eth0"}
    found = for_launch(file, own, PLAN)
    assert found == {**own, "NCCL_CROSS_NIC": "0", "NCCL_DEBUG": "WARN"}
    # The batch script has exported what the site says always: that is no word of the user's.
    assert for_launch(file, found, AFTER)["NCCL_DEBUG"] == "INFO"
    assert for_launch(file, {"NCCL_DEBUG": "VERSION"}, AFTER)["NCCL_DEBUG"] == "VERSION"


@pytest.mark.parametrize("given", ["NONE", "NIL", "HOME,LANG", "ALL"])
def test_what_sbatch_took_along_is_not_what_ranks_get(tmp_path: Path, given: str) -> None:
    file = file_of(tmp_path)
    assert for_launch(file, {"SLURM_EXPORT_ENV": given}, PLAN)["SLURM_EXPORT_ENV"] == "ALL"
    assert "SLURM_EXPORT_ENV" not in for_launch(file, {}, PLAN)
    own = file_of(tmp_path / "own", env={"SLURM_EXPORT_ENV": given})
    assert for_launch(own, {}, PLAN)["SLURM_EXPORT_ENV"] == given


def test_a_command_is_told_of_the_fast_network(tmp_path: Path) -> None:
    file = file_of(tmp_path)

    def told(own: dict[str, str], *present: str, of: RunFile = file) -> tuple[str | None, ...]:
        master = master_address(of, "n1", this_node="n1")
        found = for_command(of, own, PLAN, master=master, interfaces=present)
        return tuple(found.get(name) for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"))

    assert told({}) == ("n1-hsn0", None)
    # A beginning may mean another interface on another node; a whole name does not.
    assert told({}, "lo", "hsn0") == ("n1-hsn0", None)
    assert told({}, "lo", "hsn") == ("n1-hsn0", "hsn")
    own = {"MASTER_ADDR": "n9", "GLOO_SOCKET_IFNAME": "eth0"}
    assert told(own, "hsn") == ("n9", "eth0")
    assert told({}, "eth0", of=file_of(tmp_path / "g", Site(name="generic"))) == (None, None)


def test_the_first_node_is_told_as_the_site_has_it(tmp_path: Path) -> None:
    file = file_of(tmp_path)

    def told(rule: str | None, suffix: str | None = "i", *, here: str = "n1") -> str | None:
        site = Site.model_validate(
            {"name": "s", "master_address": rule, "host_suffix": suffix, "socket_interface": "ib0"}
        )
        return master_address(
            file_of(tmp_path / f"{rule}{suffix}{here}", site),
            "n1",
            this_node=here,
            address={"n1i": "10.0.0.1", "n1": "10.9.0.1"}.get,
            through=lambda interface, _: {"ib0": "10.1.0.1"}.get(interface or ""),
        )

    assert (told(None), told(None, None)) == ("n1i", None)
    assert (told("name"), told("name", None)) == ("n1i", "n1")
    assert (told("address"), told("address", None)) == ("10.0.0.1", "10.9.0.1")
    assert told("address", "-nowhere") == "n1-nowhere", "a name is better than nothing"
    assert (told("interface"), told("interface", here="n2")) == ("10.1.0.1", "n1i")
    assert master_address(file, None, this_node="n1") is None


def test_only_what_would_change_something_is_part_of_a_plan(tmp_path: Path) -> None:
    file = file_of(tmp_path, env={"NCCL_IB_TIMEOUT": "20"})
    assert effective_on_hang(file, {}) == AFTER.variables
    assert effective_on_hang(file, {"NCCL_DEBUG": "WARN"}) == AFTER.variables
    assert effective_on_hang(file, {"NCCL_DEBUG": "VERSION"}) == ()


def test_what_must_not_be_set_is_told_at_submission_and_beside_the_evidence(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    assert forbidden(file, {"NCCL_DEBUG": "VERSION"}) == ()
    found = forbidden(file, {"NCCL_P2P_DISABLE": "1"})
    text = "NCCL_P2P_DISABLE=1 is set, and must not be here: it halves the bandwidth"
    hang = with_suspects(incident(Cause.HANG), found)
    assert [(e.source, e.text) for e in hang.evidence[-1:]] == [("environment", text)]
    assert with_suspects(incident(Cause.HANG), ()) == incident(Cause.HANG)
    assert with_suspects(incident(Cause.CUDA_OOM), found) == incident(Cause.CUDA_OOM)

    job = job_from_mapping({"name": "x", "entry": "a:f", "env": {"NCCL_P2P_DISABLE": "1"}})
    why = "NCCL_P2P_DISABLE=1, which must not be set here: it halves the bandwidth"
    assert forbidden_notes(SITE.name, SITE.env, {}, job.env) == (f"hill: the job file sets {why}",)
    plain = job_from_mapping({"name": "x", "entry": "a:f"})
    own = {"NCCL_P2P_DISABLE": "1"}
    assert forbidden_notes(SITE.name, SITE.env, own, plain.env) == (
        f"hill: your environment has {why}",
    )
    assert forbidden_notes(SITE.name, SITE.env, {}, plain.env) == ()


def test_a_successor_that_a_rank_submits_begins_without_what_its_launch_was_given(
    tmp_path: Path,
) -> None:
    own = {"HOME": "/root", "NCCL_SOCKET_IFNAME": "hsn"}
    after = RecoveryPlan(
        variables=(Variable("NCCL_DEBUG", "INFO"), Variable("NCCL_IB_TIMEOUT", "23"))
    )
    file = file_of(tmp_path)
    rank = {**for_launch(file, own, after), "GLOO_SOCKET_IFNAME": "hsn1"}
    assert (rank["NCCL_DEBUG"], rank["NCCL_IB_TIMEOUT"]) == ("INFO", "23")
    left = as_submitted(file, rank, after, interfaces=("lo", "hsn1", "hsn2"))
    assert left == for_launch(file, own, PLAN)
    # And what is a person's own stays.
    mine = {"NCCL_IB_TIMEOUT": "20", "GLOO_SOCKET_IFNAME": "eth0"}
    rank = for_launch(file, mine, after)
    assert as_submitted(file, rank, after, interfaces=("hsn1",)).items() >= mine.items()
