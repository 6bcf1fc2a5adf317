"""Strict YAML: values with their lines, errors with file and line; used by ``spec`` and ``site``.

A subset of YAML on which all readers agree.  What one reader takes for a number and another for
text (``48:00:00``, ``0123``, ``off``, ``2024-01-01``) is an error that says how to write it, and so
are duplicate keys, tags, anchors and merge keys.

Entry: ``reading``.
"""

from __future__ import annotations

from slurm_forge.documents.building import (
    Mistake,
    build,
    build_plain,
    error_of,
    mistakes,
    wrong_key,
)
from slurm_forge.documents.differences import differences
from slurm_forge.documents.hints import did_you_mean, nearest
from slurm_forge.documents.keypath import KeyPath, dotted, leading
from slurm_forge.documents.layers import merged, paths_in, with_value, without
from slurm_forge.documents.reading import (
    DEFAULT,
    MAX_BYTES,
    Document,
    SourcePlace,
    load,
    load_value,
    read,
)
from slurm_forge.documents.writing import dump, flow

__all__ = [
    "DEFAULT",
    "MAX_BYTES",
    "Document",
    "KeyPath",
    "Mistake",
    "SourcePlace",
    "build",
    "build_plain",
    "did_you_mean",
    "differences",
    "dotted",
    "dump",
    "error_of",
    "flow",
    "leading",
    "load",
    "load_value",
    "merged",
    "mistakes",
    "nearest",
    "paths_in",
    "read",
    "with_value",
    "without",
    "wrong_key",
]
