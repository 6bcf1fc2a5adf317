"""The table of Slurm's versions, held against what real ones have said."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.versions import (
    CHANGES,
    NEWEST,
    ChangeKind,
    SlurmRelease,
    batch_variables,
    has,
)

DATA = Path(__file__).parent / "data"
RELEASES = [
    SlurmRelease(22, 5),
    SlurmRelease(23, 11),
    SlurmRelease(24, 11),
    SlurmRelease(25, 5),
    SlurmRelease(26, 5),
]


def recorded(release: SlurmRelease, name: str) -> str:
    return (DATA / f"v{release}" / f"{name}.txt").read_text()


def variables(release: SlurmRelease) -> set[str]:
    lines = recorded(release, "batch_environment").splitlines()
    return {line.partition("=")[0] for line in lines}


@pytest.mark.parametrize("release", RELEASES)
def test_the_batch_step_has_what_the_table_says(release: SlurmRelease) -> None:
    assert set(batch_variables(release)) <= variables(release)
    environment = SlurmEnvironment.from_environ(batch_variables(release))
    assert environment is not None
    assert environment.unrecognized == () and not environment.in_srun_step


@pytest.mark.parametrize(("before", "after"), list(pairwise(RELEASES)))
def test_what_is_new_in_the_batch_step_is_in_the_table(
    before: SlurmRelease, after: SlurmRelease
) -> None:
    came = {
        change.name
        for change in CHANGES
        if change.kind is ChangeKind.VARIABLE and before < change.since <= after
    }
    new = variables(after) - variables(before)
    # Set by newer slurmstepd whatever the version; never read here.
    assert new - came <= {"SLURM_JOB_OVERSUBSCRIBE"}
    assert came <= new


@pytest.mark.parametrize("release", RELEASES)
def test_fields_and_words_came_when_the_table_says(release: SlurmRelease) -> None:
    printed = recorded(release, "srun_cancelled") + recorded(release, "srun_killed_task")
    for words in ("DUE to SIGNAL", "DUE TO TASK FAILURE"):
        assert (words in printed) is has(release, words)
    assert ("SubmitLine=" in recorded(release, "job_running")) is has(
        release, "scontrol SubmitLine"
    )
    assert ("MaxBatchRequeue" in recorded(release, "config")) is has(release, "MaxBatchRequeue")


def test_states_of_the_table_are_known() -> None:
    states = {change.name for change in CHANGES if change.kind is ChangeKind.STATE}
    assert states <= {state.value for state in JobState}


def test_every_entry_names_its_source_and_no_release_that_was_never_seen() -> None:
    assert all(change.source.startswith("src/") for change in CHANGES)
    assert max(change.since for change in CHANGES) <= NEWEST == RELEASES[-1]


def test_releases_are_read_from_any_words() -> None:
    assert SlurmRelease.parse("slurm-wlm 22.05.8") == SlurmRelease(22, 5)
    assert SlurmRelease.parse("26.05.3-rc1") == SlurmRelease(26, 5)
    assert SlurmRelease.parse("unknown") is None and SlurmRelease.parse(None) is None
    assert f"{SlurmRelease(25, 5)}" == "25.05"
