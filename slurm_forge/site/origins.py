"""What a site file says, key by key, and on which line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_forge.documents import Document, KeyPath
from slurm_forge.site.model import Site


@dataclass(frozen=True, slots=True)
class SiteValue:
    """One value: its ``key`` as ``env.always.NCCL_DEBUG``, and its line, None for a default."""

    key: str
    value: str
    line: int | None


def values_of(site: Site, document: Document, cluster: str | None = None) -> tuple[SiteValue, ...]:
    """Everything that is known, in the order of the model; what is unknown or empty is left out.

    ``cluster`` is the one of ``clusters`` whose facts the site has taken over.
    """
    return tuple(
        SiteValue(".".join(map(str, path)), _text(value), _line(document, path, cluster))
        for path, value in _leaves(site.model_dump(mode="json"), ())
        if path != ("name",)
    )


def unknown_keys(site: Site) -> tuple[str, ...]:
    """The keys at the top about which the site says nothing."""
    dumped = site.model_dump(mode="json")
    return tuple(key for key, value in dumped.items() if not any(_leaves(value, (key,))))


def _line(document: Document, path: KeyPath, cluster: str | None) -> int | None:
    own = document.lines.get(path)
    if cluster is not None and path[:1] != ("clusters",):
        return document.lines.get(("clusters", cluster, *path), own)
    if own is None and path[-1] in ("page", "option"):
        return document.lines.get(path[:-1])  # written as plain text
    return own


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    elif value not in (None, [], ""):
        yield path, value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return json.dumps(value)
