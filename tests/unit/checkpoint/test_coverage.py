"""What ranks hold adds up to what a checkpoint holds, and who holds copies of what."""

from __future__ import annotations

import pytest

from slurm_forge.checkpoint.content.shard_layout import Shard
from slurm_forge.checkpoint.write.coverage import (
    ReplicaGroups,
    from_rows,
    require_complete,
)
from slurm_forge.errors import CheckpointError

KEY = "models/net/0.weight"


def shard(offsets, sizes, shape=(8, 4), key=KEY, dtype="float32"):
    return Shard(key, dtype, 4, tuple(shape), tuple(offsets), tuple(sizes))


WHOLE = shard((0, 0), (8, 4))
TOP, BOTTOM = shard((0, 0), (4, 4)), shard((4, 0), (4, 4))
NONE = shard((8, 0), (0, 4))


@pytest.mark.parametrize(
    ("everybody", "chosen"),
    [
        ([[WHOLE], [WHOLE]], [[0], []]),
        ([[TOP], [BOTTOM]], [[0], [0]]),
        ([[TOP], [BOTTOM], [TOP], [BOTTOM]], [[0], [], [], [0]]),
        ([[TOP], [BOTTOM], [NONE], [NONE]], [[0], [0], [], []]),
        ([[shard((), (), ())], [shard((), (), ())]], [[], [0]]),
    ],
)
def test_what_is_written_once_is_complete(everybody, chosen):
    require_complete(everybody, chosen)


@pytest.mark.parametrize(
    ("everybody", "chosen", "why"),
    [
        ([[TOP], [BOTTOM]], [[0], []], "what rank 1 holds of it would not be written"),
        ([[TOP], [TOP]], [[0], []], "do not add up"),
        ([[WHOLE], [BOTTOM]], [[0], [0]], "do not add up"),
        ([[TOP], [shard((3, 0), (5, 4))]], [[0], [0]], "do not add up"),
        ([[TOP], [shard((0, 0), (8, 4))]], [[0], []], "what rank 1 holds of it would not be"),
        ([[WHOLE], [WHOLE]], [[0], [0]], "written twice"),
        (
            [[WHOLE], [shard((0, 0), (8, 5), (8, 5))]], [[0], []],
            r"0.weight of model 'net' is float32\[8, 4\] on rank 0 and float32\[8, 5\] on rank 1",
        ),
        ([[WHOLE], [shard((0, 0), (8, 4), dtype="int32")]], [[0], []], r"int32\[8, 4\] on rank 1"),
    ],
)  # fmt: skip
def test_what_is_not_complete_is_refused_and_named(everybody, chosen, why):
    with pytest.raises(CheckpointError, match=why) as caught:
        require_complete(everybody, chosen)
    assert "0.weight of model 'net'" in caught.value.message and caught.value.next_step


def test_who_holds_copies():
    alone, other = shard((0,), (2,), (2,), key="rng/0"), shard((0,), (2,), (2,), key="b")
    groups = ReplicaGroups.of([[TOP, alone, other], [BOTTOM, other], [TOP, other], [BOTTOM]])
    named = [[None if n is None else groups.ranks[n] for n in own] for own in groups.members]
    assert named == [[(0, 2), None, (0, 1, 2)], [(1, 3), (0, 1, 2)], [(0, 2), (0, 1, 2)], [(1, 3)]]


def test_groups_travel_as_runs():
    groups = ReplicaGroups.of([[TOP, shard((0,), (1,), (1,), key="a")], [TOP]])
    assert [from_rows(groups.rows(rank)) for rank in (0, 1)] == list(map(list, groups.members))
