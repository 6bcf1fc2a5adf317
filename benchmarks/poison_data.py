"""Text with a window of batches in which every sample is garbage, and the same text without it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch.utils.data import Dataset

from examples.tiny_gpt import CONTEXT, VOCABULARY, Text
from slurm_forge.training.core.sample_order import SampleOrder

#: Characters to train on, enough for a single pass; those behind them are for the evaluation.
CHARACTERS = 3_000_000
HELD_OUT = 64_000
#: A factor that somebody forgot to divide by.
_FORGOTTEN = 1000.0

#: Characters, the next characters, and how much each of those counts.
Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Garbage(str, Enum):
    """What is wrong with the targets of the window."""

    #: The weights of the targets, float32, are read as float16: some are NaN or infinite.
    DECODED = "decoded"
    #: The targets are random characters.
    RANDOM = "random"
    #: The targets are random characters, and count a thousand times as much.
    SCALED = "scaled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """Garbage in ``batches`` batches from batch ``first`` of the stream on.

    ``garbage`` None: the window is left out, as if it had never been in the data.
    """

    garbage: Garbage | None
    first: int
    batches: int


class Samples(Dataset[Sample]):
    """Samples in whose stream, as ``order`` shuffles it, a window is poisoned or left out."""

    def __init__(self, seed: int, batch: int, poison: Poison) -> None:
        self._text = Text(CHARACTERS)
        self._garbage = poison.garbage
        order = SampleOrder(seed, len(self._text), batch)
        self._stream = [index for _, index in order.indices(0, len(self._text))]
        self._place = {index: place for place, index in enumerate(self._stream)}
        self._first = poison.first * batch
        self._stop = self._first + poison.batches * batch

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, index: int) -> Sample:
        place = self._place[index]
        if self._garbage is None:
            if place >= self._first:
                place += self._stop - self._first
            return self._sample(self._stream[place % len(self._stream)])
        sample = self._sample(index)
        return _spoiled(sample, self._garbage, index) if self._poisoned(place) else sample

    def _poisoned(self, place: int) -> bool:
        return self._first <= place < self._stop

    def _sample(self, index: int) -> Sample:
        tokens, targets = self._text[index]
        random = torch.Generator().manual_seed(index)
        return tokens, targets, 0.5 + torch.rand(CONTEXT, generator=random)


def _spoiled(sample: Sample, garbage: Garbage, index: int) -> Sample:
    """The same garbage whenever the sample comes."""
    tokens, targets, weights = sample
    if garbage is Garbage.DECODED:
        read = torch.frombuffer(bytearray(weights.numpy().tobytes()), dtype=torch.float16)
        return tokens, targets, read[:CONTEXT].float()
    random = torch.Generator().manual_seed(index)
    targets = torch.randint(0, VOCABULARY, (CONTEXT,), generator=random)
    return tokens, targets, weights * (_FORGOTTEN if garbage is Garbage.SCALED else 1.0)
