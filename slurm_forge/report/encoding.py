"""Report values as JSON: the field names of the dataclasses are the keys."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

__all__ = ["SCHEMA", "to_json"]

#: Value of the key ``schema`` of every document.  Keys are only added under one number.
SCHEMA = 1


def to_json(value: Any) -> str:
    """Indented JSON of a dataclass.  Times are seconds since the epoch, durations end in ``_s``.

    Control characters of journal texts are escaped; NaN and infinity, which JSON lacks, are null.
    """
    body = _finite(dataclasses.asdict(value))
    return json.dumps({"schema": SCHEMA, **body}, indent=2, ensure_ascii=True, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
