"""Buffers that a forward pass changes (BatchNorm statistics), put back when its step is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

__all__ = ["BufferSnapshot"]


@dataclass(slots=True, eq=False)
class _Place:
    """Where a buffer lives; the tensor there may be exchanged by the program."""

    module: nn.Module
    name: str
    path: str
    #: What was there when the snapshot was taken.  A reference, so that its id is not used again.
    seen: torch.Tensor | None = None
    version: int = 0
    changes: bool = False
    #: Was in a snapshot over a whole step, so that ``changes`` can be relied on.
    observed: bool = False

    def current(self) -> torch.Tensor | None:
        buffer = self.module._buffers.get(self.name)
        return buffer.to_local() if isinstance(buffer, DTensor) else buffer

    def remember(self) -> None:
        self.seen = self.module._buffers[self.name]
        self.version = 0 if self.seen is None else self.seen._version

    def has_changed(self) -> bool:
        now = self.module._buffers.get(self.name)
        return now is not self.seen or (now is not None and now._version != self.version)


@dataclass(slots=True)
class _Copies:
    """The values of buffers of one device and dtype, one after the other in one tensor."""

    places: list[_Place]
    values: torch.Tensor
    shapes: list[torch.Size]


class BufferSnapshot:
    """Copies on the device of the buffers that training changes, taken now and by every ``take``.

    Keep one object for the run and ``take`` before each step's forward: a buffer that stays the
    same object with the same version counter over the first step (a mask, a position table) is left
    out of later snapshots.  Should it change after all, ``unprotected`` names it for that step, and
    it is in from then on.  Normalisation layers are always in: their kernels write without
    counting.  Modules in evaluation mode are not looked at.  A handful of kernels per step, however
    many buffers there are.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        places: dict[tuple[nn.Module, str], _Place] = {}
        for module in modules:
            for path, part in module.named_modules():
                for name in part._buffers:
                    place = _Place(part, name, f"{path}.{name}".lstrip("."))
                    place.changes = isinstance(part, _NormBase)
                    places.setdefault((part, name), place)
        self._places = list(places.values())
        self._copies: list[_Copies] = []
        self.unprotected: tuple[str, ...] = ()
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Remember the values now: before the forward of a step."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[_Place, torch.Tensor]]] = {}
        for place in self._places:
            buffer = place.current()
            if buffer is None or not place.module.training:
                continue
            if place.observed and place.has_changed():
                place.changes = True
            if place.observed and not place.changes:
                continue
            place.remember()
            if buffer.layout is not torch.strided or is_lazy(buffer):
                continue  # an adjacency matrix; a buffer without a shape yet
            by_kind.setdefault((buffer.device, buffer.dtype), []).append((place, buffer))
        self._copies = [
            _Copies(
                [place for place, _ in some],
                torch.cat([buffer.reshape(-1) for _, buffer in some]),
                [buffer.shape for _, buffer in some],
            )
            for some in by_kind.values()
        ]

    @torch.no_grad()
    def restore_where(self, found_inf: torch.Tensor) -> None:
        """Put the values back where ``found_inf`` is 1, without waiting for it on CUDA."""
        for copies in self._copies:
            for place in copies.places:
                # Before anything is written back: that would count as a change.
                place.changes = place.changes or place.has_changed()
                place.observed = True
        self._note_unprotected()
        if found_inf.device.type == "cpu" and not found_inf.item():
            return
        for copies in self._copies:
            buffers, values = _changing(copies)
            if not buffers:
                continue
            if found_inf.device.type != "cpu":
                now = torch.cat([buffer.reshape(-1) for buffer in buffers])
                then = torch.cat([value.reshape(-1) for value in values])
                chosen = torch.where(found_inf.to(now.device) != 0, then, now)
                parts = torch.split(chosen, [buffer.numel() for buffer in buffers])
                values = [part.view(b.shape) for part, b in zip(parts, buffers, strict=True)]
            torch._foreach_copy_(buffers, values)

    def _note_unprotected(self) -> None:
        """What is not in the snapshot and has changed, or has changed its shape."""
        kept = {id(place) for copies in self._copies for place in copies.places}
        self.unprotected = tuple(
            place.path
            for place in self._places
            if place.module.training and id(place) not in kept and place.has_changed()
        )


def _changing(copies: _Copies) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The buffers that this step may have changed, as they are now, and their values before."""
    buffers, values = [], []
    parts = torch.split(copies.values, [shape.numel() for shape in copies.shapes])
    for place, shape, part in zip(copies.places, copies.shapes, parts, strict=True):
        buffer = place.current()
        if place.changes and buffer is not None and buffer.shape == shape:
            buffers.append(buffer)
            values.append(part.view(shape))
    return buffers, values
