"""Where a prepared loader of accelerate continues, by the state that a checkpoint has of it.

Where accelerate is installed, as by the extra ``dev``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations.index_order import RandomStates
from slurm_forge.training.loop.run import Run

accelerate = pytest.importorskip("accelerate")

from slurm_forge.integrations.accelerate import LoaderPosition  # noqa: E402

SAMPLES, DONE = 24, 2
RUN = cast(Run, SimpleNamespace(world_size=1, step_number=DONE))


def prepared(*, batch_size: int = 4, stateful: bool = False) -> Any:
    """A loader whose order is drawn from the global generators."""
    configuration = accelerate.DataLoaderConfiguration(
        use_stateful_dataloader=stateful, use_seedable_sampler=False
    )
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    rows = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    loader = torch.utils.data.DataLoader(rows, batch_size=batch_size, shuffle=True)
    return accelerator.prepare(loader)


def samples(batches: Any) -> list[list[int]]:
    return [each.tolist() for (each,) in batches]


@pytest.mark.parametrize("stateful", [False, True])
def test_a_checkpoint_from_before_the_order_had_a_state_continues_at_the_next_sample(
    stateful: bool,
) -> None:
    if stateful:
        pytest.importorskip("torchdata")
    torch.manual_seed(7)
    loader = prepared(stateful=stateful)
    LoaderPosition(loader, RUN)
    began_with = RandomStates([]).capture()
    state: dict[str, Any] = {
        "epoch": 0, "batches": DONE, "is_over": False, "began_with": began_with, "fetch_with": {},
    }  # fmt: skip
    undisturbed = samples(loader)

    torch.manual_seed(7)
    loader = prepared(stateful=stateful)
    torch.manual_seed(8)
    position = LoaderPosition(loader, RUN)
    position.load_state_dict(state)
    assert samples(loader) == undisturbed[DONE:]


def test_batches_of_another_size_are_refused_in_the_middle_of_an_epoch() -> None:
    loader = prepared()
    position = LoaderPosition(loader, RUN)
    batches = iter(loader)
    for _ in range(DONE):
        next(batches)
    state = position.state_dict()

    other = LoaderPosition(prepared(batch_size=6), RUN)
    with pytest.raises(UnsupportedError) as refused:
        other.load_state_dict(state)
    assert "had 4 samples, and now it has 6 (batch_size x ranks)" in str(refused.value)
    assert "begin a run of another name" in str(refused.value)


def test_batches_of_another_size_are_accepted_between_two_epochs() -> None:
    loader = prepared()
    position = LoaderPosition(loader, RUN)
    assert sorted(each for batch in samples(loader) for each in batch) == list(range(SAMPLES))
    loader = prepared(batch_size=6)
    LoaderPosition(loader, RUN).load_state_dict(position.state_dict())
    assert len(samples(loader)) == SAMPLES // 6
