from __future__ import annotations

import os

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.starters.own import join
from slurm_forge.training.core.rank_info import place_of_script

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "-5",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "n[1-4]",
}


def test_a_script_in_the_batch_step_of_slurm_26_05_is_alone() -> None:
    place = place_of_script(BATCH)
    assert (place.rank, place.world_size) == (0, 1)


def test_a_script_that_srun_starts_is_a_rank() -> None:
    place = place_of_script({**BATCH, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"})
    assert (place.rank, place.world_size) == (3, 4)


def test_a_script_in_a_step_of_a_kind_not_known_here_does_not_take_itself_to_be_alone() -> None:
    with pytest.raises(ConfigError) as refusal:
        place_of_script({**BATCH, "SLURM_STEP_ID": "-7"})
    assert refusal.value.next_step
    assert place_of_script({**BATCH, "SLURM_STEP_ID": "-7", "SLURM_NTASKS": "1"}).world_size == 1


def test_the_first_program_is_alone_in_the_batch_step_of_slurm_26_05(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", BATCH)
    assert join() == (0, 1)
