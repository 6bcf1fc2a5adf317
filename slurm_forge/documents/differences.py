"""What differs between two documents that should be the same, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slurm_forge.documents.keypath import KeyPath, dotted
from slurm_forge.documents.writing import shorten


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """``args.max_steps: was 400, is 800`` for every key, however deep, whose value is another."""
    return tuple(_differ(old, new, ()))


def _differ(old: Any, new: Any, path: KeyPath) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from _differ(old.get(key), new.get(key), (*path, str(key)))
    elif type(old) is not type(new) or old != new:
        yield f"{dotted(path)}: was {_shown(old)}, is {_shown(new)}"


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    return shorten(json.dumps(value, ensure_ascii=False, default=str))
