"""Job files in and out: YAML, plain mappings, and the JSON Schema that editors use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from slurm_forge.documents import build, build_plain, dump, load, read
from slurm_forge.spec.job import JobSpec


def load_job(path: str | os.PathLike[str], *, trusted: bool = False) -> JobSpec:
    """Job in a file; ``ConfigError`` names file, line and nearest key of every mistake.

    ``trusted`` is for a file that was found rather than named by the user (``run.yaml``): only
    we or root may be able to write it, else ``UnsafeFileError``.
    """
    return build(JobSpec, read(path, trusted=trusted))


def job_from_mapping(values: Mapping[str, Any], source: str | None = None) -> JobSpec:
    """Job from Python values, with the keys of a job file; durations may be ``timedelta``."""
    return build_plain(JobSpec, values, source)


def to_mapping(spec: JobSpec) -> dict[str, Any]:
    """Everything in a job, defaults too, as the plain values that a job file holds."""
    return spec.model_dump(mode="json")


def to_yaml(spec: JobSpec) -> str:
    """Job file that says everything, defaults too, so that later defaults change no old run."""
    return dump(to_mapping(spec))


def from_yaml(text: str, path: str | os.PathLike[str] | None = None) -> JobSpec:
    """Job in a text, equal to the one that ``to_yaml`` was given; ``path`` is for messages."""
    return build(JobSpec, load(text, path))


def job_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a job file, for editors that complete and check YAML."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobSpec.model_json_schema(),
    }
