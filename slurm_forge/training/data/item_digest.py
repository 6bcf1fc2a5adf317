"""A short text that distinguishes items of a data source by their content."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

#: Objects refer to each other: limits on the depth and the number examined per item.
_DEEPEST, _MOST = 8, 4096
#: Of a long tensor, its beginning and its end.
_BYTES = 1 << 16


def item_digest(item: Any) -> str:
    """Equal for equal items; empty if nothing in it can be compared."""
    digest = _Digest()
    try:
        return digest.hash.hexdigest() if digest.add(item, 0) else ""
    except Exception:  # of the program's own objects
        return ""


class _Digest:
    def __init__(self) -> None:
        self.hash = xxhash.xxh3_64()
        self._left = _MOST

    def add(self, value: Any, depth: int) -> bool:
        """Whether anything in the value can be compared."""
        self._left -= 1
        self.hash.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            return self._add_array(value)
        if isinstance(value, str | bytes | bytearray | bool | int | float | complex):
            self.hash.update(
                value if isinstance(value, bytes | bytearray) else repr(value).encode()
            )
            return True
        if depth == _DEEPEST or isinstance(value, type):
            return False
        # All of them: what follows the first may be what differs.
        found = [self.add(each, depth + 1) for each in _parts(value) if self._left > 0]
        return any(found)

    def _add_array(self, value: torch.Tensor | np.ndarray[Any, Any] | np.generic) -> bool:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_meta or value.is_quantized:
                return False
            flat = value.detach().reshape(-1)
            most = _BYTES // value.element_size()
            ends = [flat[:most], flat[-most:]]
            # Bytes: numpy knows no bfloat16.
            raw = [each.cpu().contiguous().view(torch.uint8).numpy() for each in ends]
        else:
            array = np.ascontiguousarray(value).reshape(-1)
            if array.dtype == object:
                found = [self.add(each, _DEEPEST) for each in array.tolist()[: self._left]]
                return any(found)
            most = _BYTES // max(1, array.itemsize)
            raw = [array[:most], array[-most:]]
        self.hash.update(f"{value.dtype} {tuple(value.shape)}".encode())
        for each in raw:
            self.hash.update(each.tobytes())
        return len(raw[0]) > 0


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        return [*value]
    if dataclasses.is_dataclass(value):
        return [getattr(value, each.name) for each in dataclasses.fields(value)]
    return [*getattr(value, "__dict__", {}).values()]
