"""Restore buffers that a forward pass changes (BatchNorm statistics) when its step is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy


@dataclass(slots=True, eq=False)
class _Place:
    """The place of a buffer; the program may exchange the tensor there."""

    module: nn.Module
    name: str
    path: str
    #: The tensor at the time of the snapshot.  A reference, so that its id is not reused.
    tensor: torch.Tensor | None = None
    version: int = 0
    changes: bool = False
    #: Whether its module was in evaluation mode at the time of the snapshot.
    asleep: bool = False
    #: Whether it was in a snapshot over a whole step, which makes ``changes`` reliable.
    observed: bool = False

    def current(self) -> torch.Tensor | None:
        buffer = self.module._buffers.get(self.name)
        return buffer.to_local() if isinstance(buffer, DTensor) else buffer

    def remember(self) -> None:
        self.tensor = self.module._buffers[self.name]
        self.version = 0 if self.tensor is None else self.tensor._version

    def has_changed(self) -> bool:
        now = self.module._buffers.get(self.name)
        return now is not self.tensor or (now is not None and now._version != self.version)


@dataclass(slots=True)
class _Copies:
    """The values of buffers of one device and dtype, concatenated in one tensor."""

    places: list[_Place]
    shapes: list[torch.Size]
    #: The buffers themselves, flattened, at their present addresses.
    rows: list[torch.Tensor]
    values: torch.Tensor


@dataclass(slots=True, frozen=True)
class _Settled:
    """What a whole step has shown; valid as long as nothing is exchanged.

    The next snapshot then makes the same calls on the same tensors; examining each module again is
    the expensive part.
    """

    #: Every buffer with the place where its module keeps it, and every module's mode.
    places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]]
    modules: list[nn.Module]
    modes: list[bool]
    #: Buffers that are not copied because they don't change.
    constant: list[tuple[torch.Tensor, int]]
    #: Addresses of the copied ones: ``buffer.data = …`` moves them.
    copied: list[torch.Tensor]
    addresses: list[int]

    def holds(self) -> bool:
        """Whether everything is unchanged."""
        for buffers, name, buffer in self.places:
            if buffers.get(name) is not buffer:
                return False
        if [module.training for module in self.modules] != self.modes:
            return False
        if [buffer.data_ptr() for buffer in self.copied] != self.addresses:
            return False
        return all(buffer._version == version for buffer, version in self.constant)


class BufferSnapshot:
    """Copies on the device of the buffers that training changes, taken now and by every ``take``.

    Keep one object for the run and call ``take`` before each step's forward: a buffer that stays
    the same object with the same version counter over the first step (a mask, a position table) is
    omitted from later snapshots.  If it changes after all, ``unprotected`` names it for that step,
    and it is included from then on.  Normalization layers are always included: their kernels write
    without counting.  Modules in evaluation mode are ignored.  A handful of kernels per step,
    however many buffers there are.
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
        self._left_out: list[_Place] = []
        self._settled: _Settled | None = None
        self.unprotected: tuple[str, ...] = ()
        self.take()

    def take(self) -> None:
        """Remember the present values, before the forward of a step."""
        if self._places:
            with torch.no_grad():
                self._take()

    def changed(self) -> tuple[str, ...]:
        """Buffers that may have changed since the last ``take``: for a step without one."""
        return tuple(
            place.path
            for place in self._places
            if place.module.training and (place.changes or place.has_changed())
        )

    def restore_where(self, skipped: torch.Tensor | bool) -> None:
        """Restore the values if ``skipped`` is 1; never waits for a tensor."""
        if self._places:
            with torch.no_grad():
                self._restore_where(skipped)

    def _take(self) -> None:
        if self._settled is not None and self._settled.holds():
            for copies in self._copies:
                copies.values = torch.cat(copies.rows)
            return
        by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[_Place, torch.Tensor]]] = {}
        copied = set()
        for place in self._places:
            buffer = place.current()
            place.asleep = not place.module.training
            if buffer is None or place.asleep:
                continue
            if place.observed and place.has_changed():
                place.changes = True
            if place.observed and not place.changes:
                continue
            place.remember()
            if buffer.layout is not torch.strided or is_lazy(buffer):
                continue  # an adjacency matrix, or a buffer without a shape yet
            by_kind.setdefault((buffer.device, buffer.dtype), []).append((place, buffer))
            copied.add(id(place))
        self._copies = []
        for some in by_kind.values():
            rows = [buffer.reshape(-1) for _, buffer in some]
            self._copies.append(
                _Copies(
                    [place for place, _ in some],
                    [buffer.shape for _, buffer in some],
                    rows,
                    torch.cat(rows),
                )
            )
        self._left_out = [place for place in self._places if id(place) not in copied]
        self._settled = self._settle()

    def _restore_where(self, skipped: torch.Tensor | bool) -> None:
        if self._settled is None:
            for copies in self._copies:
                for place in copies.places:
                    # Before anything is restored, which would count as a change.
                    place.changes = place.changes or place.has_changed()
                    place.observed = True
        self.unprotected = tuple(
            place.path
            for place in self._left_out
            if place.module.training and (place.asleep or place.has_changed())
        )
        if skipped is False:
            return
        as_they_were = self._settled is not None and self._settled.holds()
        for copies in self._copies:
            buffers, then = copies.rows, copies.values
            if not as_they_were:
                buffers, then = _changing(copies)
            if not buffers:
                continue
            if isinstance(skipped, torch.Tensor):
                now = torch.cat([buffer.reshape(-1) for buffer in buffers])
                then = torch.where(skipped.to(now.device) != 0, then, now)
            values = list(torch.split(then, [buffer.numel() for buffer in buffers]))
            if not as_they_were:
                values = [part.view(b.shape) for part, b in zip(values, buffers, strict=True)]
            torch._foreach_copy_(buffers, values)

    def _settle(self) -> _Settled | None:
        """What is reliable from now on; None while something is still unknown."""
        copied = []
        for copies in self._copies:
            for place, row in zip(copies.places, copies.rows, strict=True):
                buffer = place.module._buffers[place.name]
                if not place.observed or buffer is None or isinstance(buffer, DTensor):
                    return None
                if row.data_ptr() != buffer.data_ptr():
                    return None  # not contiguous: the row is a copy by itself
                copied.append(buffer)
        constant = []
        for place in self._left_out:
            buffer = place.module._buffers.get(place.name)
            if buffer is None or not place.module.training:
                continue
            if not place.observed:
                return None
            constant.append((buffer, place.version))
        modules = list(dict.fromkeys(place.module for place in self._places))
        return _Settled(
            [(p.module._buffers, p.name, p.module._buffers.get(p.name)) for p in self._places],
            modules,
            [module.training for module in modules],
            constant,
            copied,
            [buffer.data_ptr() for buffer in copied],
        )


def _changing(copies: _Copies) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The buffers that this step may have changed, now, and their earlier values."""
    buffers, values = [], []
    parts = torch.split(copies.values, [row.numel() for row in copies.rows])
    for place, shape, part in zip(copies.places, copies.shapes, parts, strict=True):
        buffer = place.current()
        if place.changes and buffer is not None and buffer.shape == shape:
            buffers.append(buffer)
            values.append(part)
    return buffers, torch.cat(values) if values else copies.values
