"""The same damages on what torch writes by itself: how often is nobody told?"""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.corruption.contents import Contents
from tests.corruption.damage import Damage, Files, file_damages

_MEMORY = 16 << 30


class Outcome(str, Enum):
    """What a load of the damaged files did."""

    REFUSED = "refused"
    UNCHANGED = "right numbers"
    SILENT = "WRONG NUMBERS"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """A way to save and load that is not ours."""

    name: str
    save: Callable[[dict[str, torch.Tensor], Path], None]
    load: Callable[[dict[str, torch.Tensor], Path], None]


def _dcp_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    dcp.save(state, checkpoint_id=str(folder))


def _dcp_load(state: dict[str, torch.Tensor], folder: Path) -> None:
    dcp.load(state, checkpoint_id=str(folder))


def _torch_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir()
    torch.save(state, folder / "state.pt")


def _torch_load(state: dict[str, torch.Tensor], folder: Path) -> None:
    state.update(torch.load(folder / "state.pt", weights_only=True))


FORMATS = (
    PlainFormat("dcp.save", _dcp_save, _dcp_load),
    PlainFormat("torch.save", _torch_save, _torch_load),
)


def plain_damages(
    folder: Path, kind: PlainFormat, floats: int, *, seed: int, flips: int
) -> tuple[list[dict[str, torch.Tensor]], list[Files], list[Damage]]:
    """Save twice (an older one to be stale) and list what is tried on the second."""
    states = [_tensors(Contents(step, floats)) for step in (1, 2)]
    files = []
    for number, state in enumerate(states):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.save(state, folder / str(number))
        files.append({path.name: path.read_bytes() for path in (folder / str(number)).iterdir()})
    return states, files, list(file_damages(files[1], files[0], seed=seed, flips=flips))


def try_all(
    folder: Path, kind: PlainFormat, floats: int, *, seed: int, flips: int
) -> list[tuple[Damage, Outcome]]:
    """Each damage in a process that may die of it."""
    (_, expected), (_, files), damages = plain_damages(folder, kind, floats, seed=seed, flips=flips)
    outcomes: list[tuple[Damage, Outcome]] = []
    while len(outcomes) < len(damages):
        rest = damages[len(outcomes) :]
        for damage, outcome in zip(rest, _forked(kind, folder / "1", files, rest, expected)):  # noqa: B905
            outcomes.append((damage, outcome))
    return outcomes


def _forked(
    kind: PlainFormat,
    folder: Path,
    files: Files,
    damages: Sequence[Damage],
    expected: dict[str, torch.Tensor],
) -> Iterator[Outcome]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            for damage in damages:
                _write(folder, files, dict(damage.changes))
                outcome = _load(kind, folder, expected)
                _write(folder, files, {name: files[name] for name in damage.changes})
                os.write(writing, f"{outcome.name}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    count = 0
    with os.fdopen(reading) as lines:
        for line in lines:
            count += 1
            yield Outcome[line.strip()]
    os.waitpid(child, 0)
    if count < len(damages):
        _write(folder, files, {name: files[name] for name in files})
        yield Outcome.CRASHED


def _write(folder: Path, files: Files, changes: dict[str, Any]) -> None:
    for name, data in changes.items():
        if data is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).write_bytes(data)


def _load(kind: PlainFormat, folder: Path, expected: dict[str, torch.Tensor]) -> Outcome:
    state = {key: torch.full_like(value, -1) for key, value in expected.items()}
    try:
        kind.load(state, folder)
    except (Exception, CheckpointException):  # DCP's own is none of the former
        return Outcome.REFUSED
    same = state.keys() == expected.keys() and all(
        isinstance(state[key], torch.Tensor)
        and state[key].dtype == expected[key].dtype
        and torch.equal(state[key], expected[key])
        for key in expected
    )
    return Outcome.UNCHANGED if same else Outcome.SILENT


def _tensors(contents: Contents) -> dict[str, torch.Tensor]:
    """The same tensors as ours, by flat names."""
    tensors = dict(contents.model.state_dict())
    for number, state in contents.optimizer.state_dict()["state"].items():
        tensors.update({f"adam.{number}.{key}": value for key, value in state.items()})
    return tensors | {"mean": contents.part.mean}
