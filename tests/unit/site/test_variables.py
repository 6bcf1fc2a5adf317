"""In which order the ranks' environment is made, and what is not as the site says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.site.model import EnvironmentSets
from slurm_forge.site.variables import (
    VariableDifferenceKind,
    differences,
    effective,
    reaches_forks,
    settled,
)
from slurm_forge.vocabulary.plan import Variable

NAMES = st.sampled_from(["NCCL_A", "NCCL_B", "NCCL_C", "PATH"])
VALUES = st.sampled_from(["0", "1", "2"])
SOME = st.dictionaries(NAMES, VALUES)


def test_the_site_then_yours_then_the_job_file() -> None:
    found = settled(
        {"A": "site", "B": "site", "C": "site", "D": "site"},
        {"B": "yours", "C": "yours", "HOME": "/root"},
        {"C": "job"},
    )
    assert found == {"A": "site", "B": "yours", "C": "job", "D": "site", "HOME": "/root"}


def test_what_the_script_exported_for_the_site_gives_way_to_the_set_for_after_a_hang() -> None:
    always, added = {"NCCL_DEBUG": "WARN"}, (Variable("NCCL_DEBUG", "INFO"),)
    assert settled(always, {"NCCL_DEBUG": "WARN"}, {}, added)["NCCL_DEBUG"] == "INFO"
    assert settled(always, {}, {}, added)["NCCL_DEBUG"] == "INFO"
    assert settled(always, {"NCCL_DEBUG": "VERSION"}, {}, added)["NCCL_DEBUG"] == "VERSION"
    assert settled(always, {"NCCL_DEBUG": "WARN"}, {})["NCCL_DEBUG"] == "WARN"


@given(SOME, SOME, SOME, SOME)
def test_what_a_person_has_set_is_never_changed(
    always: dict[str, str], own: dict[str, str], job: dict[str, str], on_hang: dict[str, str]
) -> None:
    added = effective(on_hang, always, own, job)
    found = settled(always, own, job, added)
    assert found.keys() == {*always, *own, *job, *(each.name for each in added)}
    for name, value in found.items():
        if name in job:
            assert value == job[name]
        elif name in own and own[name] != always.get(name):
            assert value == own[name]
    # What is said to be added is what the ranks have.
    assert all(found[each.name] == each.value for each in added)
    # Twice is once: a process that has it already is left as it is.
    assert settled(always, found, job, added) == found


@given(SOME, SOME, SOME)
def test_no_difference_where_everything_was_settled(
    always: dict[str, str], on_hang: dict[str, str], own: dict[str, str]
) -> None:
    sets = EnvironmentSets(always=always, on_hang=on_hang)
    added = tuple(Variable(*each) for each in on_hang.items())
    assert not differences(sets, settled(always, {}, {}, ()))
    assert not differences(sets, settled(always, {}, {}, added), on_hang=True)
    for each in differences(sets, own):
        assert each.wanted == always[each.name]
        assert each.found == own.get(each.name)


def test_each_kind_of_difference_is_told() -> None:
    sets = EnvironmentSets(
        always={"A": "1", "B": "1", "C": "1"}, on_hang={"C": "2"}, never={"SLOW": "it halves it"}
    )
    found = differences(sets, {"B": "7", "C": "1", "SLOW": "1"}, on_hang=True)
    assert [(each.kind, each.name) for each in found] == [
        (VariableDifferenceKind.FORBIDDEN, "SLOW"),
        (VariableDifferenceKind.MISSING, "A"),
        (VariableDifferenceKind.OTHER, "B"),
        (VariableDifferenceKind.OTHER, "C"),
    ]
    assert list(map(str, found)) == [
        "SLOW=1 is set, and must not be here: it halves it",
        "A is not set; the site sets A=1",
        "B=7; the site sets 1",
        "C=1; the site sets 2",
    ]
    assert not differences(sets, {"A": "1", "B": "1", "C": "1"})


def test_only_what_is_read_when_groups_are_made_reaches_a_fork() -> None:
    assert all(map(reaches_forks, ["NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "FI_PROVIDER"]))
    assert not any(
        map(reaches_forks, ["OMP_NUM_THREADS", "LD_PRELOAD", "TORCH_DISTRIBUTED_DEBUG", "X_NCCL_"])
    )


@pytest.mark.parametrize(
    "name",
    [
        "PYTHONPATH", "PYTHONSTARTUP", "LD_LIBRARY_PATH", "LD_AUDIT", "PATH", "BASH_ENV", "",
        "UCX_GDB_COMMAND", "UCX_HANDLE_ERRORS", "UCX_STATS_DEST", "UCX_ERROR_MAIL_TO",
        "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_ENV_PLUGIN",
        "NCCL_CONF_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_DEBUG_FILE", "FI_PROVIDER_PATH",
        "UCX_MODULE_DIR", "UCX_CONFIG_DIR", "UCX_LOG_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
        "NCCL_DEBUG\nPATH", "nccl_debug", "NCCL_COMM_ID",
    ],
)  # fmt: skip
def test_what_makes_a_process_execute_something_is_never_sent_to_one(name: str) -> None:
    assert not reaches_forks(name)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("WANDB_API_KEY", "abc123", "WANDB_API_KEY=... is set"),
        ("HF_TOKEN", "abc123", "HF_TOKEN=... is set"),
        ("HTTPS_PROXY", "http://me:abc123@proxy:3128", "HTTPS_PROXY=http://...@proxy:3128 is set"),
        ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_DISABLE=1 is set"),
    ],
)
def test_a_secret_is_not_told_where_it_is_forbidden(name: str, value: str, shown: str) -> None:
    (found,) = differences(EnvironmentSets(never={name: "not here"}), {name: value})
    assert str(found).startswith(shown)
    assert found.found == value
