"""The loops of the how-to, as they are written there: uninterrupted, and stopped in between."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slurm_forge as forge
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.vocabulary.position import Position
from tests.unit.training.test_run import Lab

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "training-loop.md"
STEPS = 20
WIDTH = 4


def examples() -> dict[str, str]:
    """Every whole training function below these headings, by the heading that it stands under."""
    found: dict[str, str] = {}
    for section in re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        if heading not in ("Several optimizers", "Your own loop", "Steps on your own batches"):
            continue
        blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        found.update({f"{heading} {number}": text for number, text in enumerate(blocks, 1)})
    return found


class Data:
    """Pairs of inputs and labels, and where in them the loop is."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.position += 1
        generator = torch.Generator().manual_seed(self.position)
        return torch.randn(8, WIDTH, generator=generator), torch.ones(8, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def names() -> dict[str, Any]:
    """What the examples take for granted."""
    torch.manual_seed(3)
    model, discriminator, generator = (nn.Linear(WIDTH, n) for n in (1, 1, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "forge": forge,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        "average": torch.optim.swa_utils.AveragedModel(model),
        "data": Data(),
        "loss_function": nn.functional.mse_loss,
        "dataset": torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1)),
        "generator": generator,
        "discriminator": discriminator,
        "g": torch.optim.SGD(generator.parameters(), lr=0.01),
        "d": torch.optim.SGD(discriminator.parameters(), lr=0.01),
        "generator_loss": lambda micro: discriminator(generator(torch.ones_like(micro))).mean(),
        "discriminator_loss": lambda micro: (
            discriminator(generator(torch.ones_like(micro)).detach()) - discriminator(micro)
        ).mean(),
    }


def ended(folder: Path, text: str, stops: tuple[int, ...]) -> dict[str, Any]:
    """The names of the example after a run that was stopped at these steps."""
    directory = RunDirectory.at(folder)
    directory.create(b"")
    made = Lab(directory, {"checkpoint": {"background": False, "every_steps": 6}})
    for stop in (*stops, None):
        run, _ = made.start(due={} if stop is None else {Position(stop): RequestKind.STOP})
        known = names()
        exec(compile(text, str(PAGE), "exec"), known)
        train: Callable[[forge.Run], None] = known["train"]
        if stop is None:
            train(run)
            assert run.finish() == STEPS
        else:
            with pytest.raises(RunStopped):
                train(run)
            assert run.step_number == stop
    return known


@pytest.mark.parametrize("name", examples())
def test_a_documented_loop_trains_and_an_interruption_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    text = examples()[name]
    whole = ended(tmp_path / "whole", text, ())
    again = ended(tmp_path / "again", text, (3, 7, 16))
    for part in ("model", "average", "generator", "discriminator"):
        states = [each[part].state_dict() for each in (whole, again)]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), part
    assert whole["data"].position == again["data"].position
    trained = "generator" if "optimizers" in name else "model"
    before = names()[trained].state_dict()
    assert not torch.equal(before["weight"], whole[trained].weight)


def test_every_example_of_the_page_is_a_whole_function() -> None:
    assert len(examples()) == 4
    assert all(text.startswith("def train(run: forge.Run)") for text in examples().values())
