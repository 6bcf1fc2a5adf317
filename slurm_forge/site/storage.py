"""Which of a site's storages a path lies on, and so when the centre deletes what is there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurm_forge.site.model import Site, Storage

__all__ = ["storage_at"]

#: Site files write what differs from user to user as <lab>, $USER or ${USER}.
_OPEN = re.compile(r"<[^<>/]+>|\$\{?[A-Za-z_][A-Za-z0-9_]*\}?")


def storage_at(site: Site, path: Path, variables: Mapping[str, str]) -> Storage | None:
    """The storage that ``path`` lies on, the innermost of several; None where the site knows none.

    ``variables`` are the environment: a site names places by ``$SCRATCH`` and the like.
    """
    places = {os.path.abspath(path), os.path.realpath(path)}  # noqa: PTH100 (links are both)
    found: tuple[int, Storage] | None = None
    for storage in site.storage:
        for pattern, depth in _patterns(storage, variables):
            lies_there = any(pattern.match(place) for place in places)
            if lies_there and (found is None or depth > found[0]):
                found = (depth, storage)
    return None if found is None else found[1]


def _patterns(
    storage: Storage, variables: Mapping[str, str]
) -> Iterator[tuple[re.Pattern[str], int]]:
    """What paths on the storage begin with, and how deep that is."""
    if storage.path is not None:
        # Each open part is one folder.
        parts = [re.escape(part) for part in _OPEN.split(storage.path.rstrip("/"))]
        yield re.compile("[^/]+".join(parts) + "(/|$)"), storage.path.count("/")
    value = variables.get(storage.env or "", "").rstrip("/")
    if value.startswith("/"):
        yield re.compile(re.escape(value) + "(/|$)"), value.count("/")
