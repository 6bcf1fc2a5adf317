"""Strict YAML: plain values with their lines, and every mistake told with file, line and way out.

A subset of YAML on which all readers agree.  What one reader takes for a number and another for
text (``48:00:00``, ``0123``, ``off``, ``2024-01-01``) is an error that says how to write it, and
so are duplicate keys, tags, anchors and merge keys.
"""

from __future__ import annotations

from slurm_forge.documents.building import build, build_plain, wrong_key
from slurm_forge.documents.differences import differences
from slurm_forge.documents.hints import did_you_mean, nearest
from slurm_forge.documents.keypath import KeyPath
from slurm_forge.documents.reading import MAX_BYTES, Document, load, read
from slurm_forge.documents.writing import dump

__all__ = [
    "MAX_BYTES",
    "Document",
    "KeyPath",
    "build",
    "build_plain",
    "did_you_mean",
    "differences",
    "dump",
    "load",
    "nearest",
    "read",
    "wrong_key",
]
