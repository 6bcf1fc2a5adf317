"""Which ranks differ, in which tensors, since when, and which rank is to blame.  No processes."""

from __future__ import annotations

import torch
from torch import nn

from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.write.plan import Plan, SharedShards
from slurm_forge.checkpoint.write.replicas import (
    RankMismatch,
    StateDigest,
    differing,
    differing_parts,
    explained,
    same_state,
)

GROUP = 0


def digests(models, *, alike=True, step=8, buffers=False):
    """What each rank of one group would take of its copy of a model."""
    found = []
    for rank, model in enumerate(models):
        captured = TrainingState(models={"net": model}).capture()
        keys = tuple(sorted(captured.tensors))
        size = sum(tensor.nbytes for tensor in captured.tensors.values())
        object.__setattr__(captured, "alike", frozenset(captured.tensors if alike else ()))
        copies = (SharedShards(GROUP, keys, size, buffers),)
        plan = Plan(1, (), (), (), 0, b"", copies=copies, layout="x")
        found.append(StateDigest(captured, plan, step, f"n{rank}"))
    return found


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def mismatch(models, *, equal_at=4, alike=True):
    taken = digests(models, alike=alike)
    groups = differing([each.report() for each in taken])
    assert groups == [str(GROUP)]
    found, buffers = explained([each.details(groups) for each in taken], step=8, equal_at=equal_at)
    assert buffers == []
    return found


def flipped(bit=3):
    model = net()
    with torch.no_grad():
        model[1].weight.view(torch.int32)[0, 0] ^= 1 << bit
    return model


def test_equal_copies_are_equal():
    assert differing([each.report() for each in digests([net(), net(), net()])]) == []


def test_one_of_three_is_named_with_its_host_and_the_parameter():
    found = mismatch([net(), net(), flipped()])
    assert (found.rank, found.host, found.step, found.equal_at) == (2, "n2", 8, 4)
    assert found.text == (
        "1.weight of model 'net' differs on rank 2 (n2) from the 2 other ranks after step 8; they "
        "were equal after step 4: a fault of that rank's memory or GPU (silent data corruption) "
        "is likely"
    )
    assert RankMismatch.from_json(found.to_json()) == found


def test_of_two_nobody_can_tell_which_is_wrong():
    found = mismatch([net(), flipped()], equal_at=None)
    assert found.rank is None and found.host == ""
    assert found.text == (
        "1.weight of model 'net' differs between ranks 0 and 1 after step 8, the first comparison"
    )


def test_a_plain_model_is_to_be_wrapped():
    torch.manual_seed(2)
    found = mismatch([net(), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))], alike=False)
    assert found.text.startswith(
        "0.bias of model 'net', 0.weight of model 'net', 1.bias of model 'net' and 1 more differ "
        "between ranks 0 and 1 after step 8"
    )
    assert "wrap the model in DistributedDataParallel or fully_shard" in found.text


def test_buffers_that_differ_are_each_rank_s_own_and_no_part_of_what_has_to_be_equal():
    taken = digests([net(), flipped()], buffers=True)
    groups = differing([each.report() for each in taken])
    found = explained([each.details(groups) for each in taken], step=8, equal_at=None)
    assert found == (None, ["models/net/1.weight"])
    assert taken[0].state == taken[1].state


def test_an_option_that_differs_is_named():
    taken = digests([net(), net(), net()])
    for rank, each in enumerate(taken):
        each._common = {"optimizers/adam": f"{rank // 2:064x}"[::-1], "objects/warmup": "0" * 64}
    reports = [each.report() for each in taken]
    text = differing_parts(reports, step=8, equal_at=4)
    assert text.startswith(
        "an option (such as the learning rate) of optimizer 'adam' differs between ranks 0 and 2 "
        "after step 8; they were equal after step 4"
    )
    assert differing_parts(reports[:2], step=8, equal_at=4) == ""


def test_two_odd_ones_are_no_single_fault():
    assert mismatch([net(), flipped(3), flipped(5), net()]).rank is None
    assert mismatch([net(), net(), flipped(3), flipped(3)]).rank is None


def test_all_different_names_some_ranks():
    found = mismatch([flipped(bit) for bit in range(12)])
    assert "between ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in found.text


def test_what_was_saved_is_what_was_loaded():
    saved = [each.state for each in digests([net(), flipped()])]
    assert same_state(saved, [each.state for each in digests([net(), flipped()])]) is True
    assert same_state(saved, [each.state for each in digests([net(), net()])]) is False
    assert same_state(saved, saved[:1]) is None
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    assert (
        same_state(saved, [each.state.replace(":", "0:") for each in digests([other] * 2)]) is None
    )
