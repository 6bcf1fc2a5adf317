from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import ConfigError
from slurm_forge.knobs import Knobs, LocalRanks

WORD = st.none() | st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=20)


@given(
    channel=WORD,
    nonce=st.text(max_size=20),
    attempt=st.integers(0, 10**9),
    launch=st.integers(0, 10**9),
    started=st.none() | st.floats(1, 4e9),
    agents=WORD,
    agents_nonce=st.text(st.characters(exclude_characters="\0"), max_size=20),
    lifeline=st.booleans(),
    site=WORD,
    runs=WORD,
    nodes=WORD,
    state_home=WORD,
    config_home=WORD,
)
def test_a_child_reads_what_its_parent_handed_down(
    channel: str | None,
    nonce: str,
    attempt: int,
    launch: int,
    started: float | None,
    agents: str | None,
    agents_nonce: str,
    lifeline: bool,
    site: str | None,
    runs: str | None,
    nodes: str | None,
    state_home: str | None,
    config_home: str | None,
) -> None:
    knobs = Knobs(
        channel=channel,
        nonce=nonce,
        attempt=attempt,
        launch=launch,
        started=started,
        agents=agents,
        agents_nonce=agents_nonce,
        lifeline=lifeline,
        site=site,
        runs=runs,
        nodes=nodes,
        state_home=state_home,
        config_home=config_home,
    )
    assert Knobs.from_environ(knobs.to_environ()) == knobs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_FORGE_ATTEMPT", "one"),
        ("SLURM_FORGE_LAUNCH", "-1"),
        ("SLURM_FORGE_LAUNCH", "٣"),
        ("SLURM_FORGE_STARTED", "noon"),
        ("SLURM_FORGE_STARTED", "nan"),
    ],
)
def test_a_number_that_is_none_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as raised:
        Knobs.from_environ({name: value})
    assert raised.value.next_step


def test_nothing_set_is_nothing_asked() -> None:
    assert Knobs.from_environ({"PATH": "/bin", "SLURM_FORGE_CHANNEL": ""}) == Knobs()


def test_ranks_outside_slurm_come_from_submitit_then_torchrun_then_are_alone() -> None:
    submitit = {
        "SUBMITIT_LOCAL_JOB_ID": "77",
        "SUBMITIT_LOCAL_GLOBALID": "3",
        "SUBMITIT_LOCAL_LOCALID": "1",
        "SUBMITIT_LOCAL_NTASKS": "4",
        "RANK": "9",
        "WORLD_SIZE": "10",
    }
    place = LocalRanks.from_environ(submitit)
    assert (place.rank, place.local_rank, place.world_size, place.job) == (3, 1, 4, "local-77")
    place = LocalRanks.from_environ({"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "10"})
    assert (place.rank, place.local_rank, place.world_size) == (9, 1, 10)
    assert LocalRanks.from_environ({}).world_size == 1
