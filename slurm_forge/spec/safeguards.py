"""The sections of the job file that keep a run safe.

Before a launch: ``preflight``, what is looked at on the nodes.  While it runs: ``watchdog``, when a
rank counts as hung.  At a resume: ``environment``, what a difference to the checkpoint's does.
Over all attempts: ``recovery.limits``, how far a run goes on by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Annotated, ClassVar, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from slurm_forge.documents import did_you_mean, wrong_key
from slurm_forge.spec.types import (
    Count,
    Factor,
    JobSection,
    Memory,
    PositiveDuration,
    SwitchableSection,
)
from slurm_forge.units import format_duration

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_E = TypeVar("_E", bound=Enum)


class Policy(str, Enum):
    """What a difference does: nothing, a line in the journal, or the run is held."""

    IGNORE = "ignore"
    WARN = "warn"
    REFUSE = "refuse"


def _policy(value: object) -> Policy | None:
    return None if value is None else _member(Policy, value)


def _member(kind: type[_E], value: object) -> _E:
    # Made here: to pydantic this is Python from here on, and strict Python takes no text.
    words = [str(member.value) for member in kind]
    if value in words:
        return kind(value)
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        raise ValueError(f"unknown value {json.dumps(value)} {did_you_mean(value, words)}")
    raise ValueError(f"expected one of {', '.join(words)}, got {json.dumps(value, default=str)}")


_Choice = Annotated[Policy | None, BeforeValidator(_policy)]


class EnvironmentSpec(JobSection):
    """Per part of the environment: ignore, warn or refuse.  Each part has its own default."""

    known_as: ClassVar[Mapping[str, str]] = {
        "pytorch": "torch", "gpus": "gpu", "device": "gpu", "nvidia": "driver", "pip": "packages",
        "libraries": "packages", "requirements": "packages", "git": "code", "revision": "code",
        "diff": "code", "source": "code", "args": "job", "entry": "job", "spec": "job",
        "dataset": "data", "files": "data", "order": "sampling", "seed": "sampling",
        "global_batch": "sampling", "samples": "sampling", "env": "variables",
    }  # fmt: skip

    python: _Choice = Field(default=None, description="Version of Python.  Else: warn.")
    torch: _Choice = Field(
        default=None,
        description="Version of torch.  Else: refuse another major version, otherwise warn.",
    )
    cuda: _Choice = Field(default=None, description="CUDA that torch was built for.  Else: warn.")
    cudnn: _Choice = Field(default=None, description="Version of cuDNN.  Else: warn.")
    nccl: _Choice = Field(default=None, description="Version of NCCL.  Else: warn.")
    driver: _Choice = Field(default=None, description="Version of the GPU's driver.  Else: warn.")
    gpu: _Choice = Field(default=None, description="Model of the GPU.  Else: warn.")
    packages: _Choice = Field(default=None, description="Installed packages.  Else: warn.")
    variables: _Choice = Field(
        default=None, description="Variables that change results (NCCL_*, …).  Else: warn."
    )
    code: _Choice = Field(
        default=None, description="Revision of the code, and changes on top of it.  Else: warn."
    )
    job: _Choice = Field(
        default=None, description="The job's own keys.  Else: refuse another entry, otherwise warn."
    )
    sampling: _Choice = Field(
        default=None,
        description="Seed, global batch, data source and sampler, which determine the order of the "
        "samples.  Else: refuse.",
    )
    data: _Choice = Field(
        default=None,
        description="What run.data() was given.  Else: refuse, but only warn if nothing but times "
        "of files changed.",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_variables_here(cls, data: object) -> object:
        for key in data if isinstance(data, Mapping) else ():
            if isinstance(key, str) and _VARIABLE.fullmatch(key) and key.lower() not in _KEYS:
                raise wrong_key(key, 'environment variables of the job are written under "env"')
        return data

    def of(self, part: str) -> Policy | None:
        """What the user wants for a part (``torch``); None for the default, and for unknown."""
        policy = getattr(self, part, None)
        return policy if isinstance(policy, Policy) else None


_KEYS = frozenset(EnvironmentSpec.model_fields)


class CodeMode(str, Enum):
    """Where a run imports its entry from."""

    AUTO = "auto"
    SNAPSHOT = "snapshot"
    LIVE = "live"


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class CodeSpec(JobSection):
    """Which code a run is made of: ``code: snapshot`` and ``code: live`` are short forms."""

    known_as: ClassVar[Mapping[str, str]] = {"ignore": "exclude", "size": "max_size"}

    mode: Annotated[CodeMode, BeforeValidator(partial(_member, CodeMode))] = Field(
        default=CodeMode.AUTO,
        description="snapshot: every attempt imports the entry from a copy of the git work tree, "
        "made at submission. live: from the files as they are then. auto: snapshot for a job that "
        "Slurm starts from a git work tree, else live.",
    )
    exclude: Annotated[
        tuple[Annotated[str, Field(strict=True, min_length=1)], ...], BeforeValidator(_as_tuple)
    ] = Field(
        default=(),
        description="Files and folders (patterns such as data or *.bin) that are linked instead "
        "of copied, as files above 8M and what git ignores are anyway.",
    )
    max_size: Memory = Field(
        default=100 << 20, gt=0, description="Largest size of all copied files together."
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: object) -> object:
        return {"mode": data} if isinstance(data, str) else data


#: A busy node takes seconds to fork a large process, and its storage to answer.
_LEAST_WITHIN = timedelta(seconds=5)


class PreflightSpec(SwitchableSection):
    """Whether nodes are checked before a launch, and how long that may take."""

    key: ClassVar[str] = "preflight"
    known_as: ClassVar[Mapping[str, str]] = {
        "on": "enabled", "off": "enabled", "timeout": "within", "deadline": "within",
        "at_most": "within",
    }  # fmt: skip

    enabled: bool = Field(default=True, strict=True, description="false switches it off.")
    within: PositiveDuration = Field(
        default=timedelta(seconds=60),
        description="How long the check of a node may take, and one collective of a group of "
        "nodes; a longer one has failed.",
    )

    @model_validator(mode="after")
    def _long_enough_for_a_healthy_node(self) -> PreflightSpec:
        if self.within < _LEAST_WITHIN:
            raise ValueError(
                f"within ({format_duration(self.within)}) must be 5s or more: a healthy node that "
                "is busy would be refused"
            )
        return self


class WatchdogSpec(SwitchableSection):
    """When a rank that makes no progress counts as hung: limits are learned within these bounds."""

    key: ClassVar[str] = "watchdog"
    called: ClassVar[str] = "the watchdog"
    known_as: ClassVar[Mapping[str, str]] = {
        "on": "enabled", "off": "enabled", "timeout": "at_most", "deadline": "at_most",
        "max": "at_most", "min": "at_least", "safety_factor": "factor", "times": "factor",
    }  # fmt: skip

    enabled: bool = Field(default=True, strict=True, description="false switches the watchdog off.")
    factor: Factor = Field(
        default=5.0,
        description="How many times as long as usual in this run a rank may stay in one place.",
    )
    at_least: PositiveDuration = Field(
        default=timedelta(seconds=30),
        description="A rank never counts as hung earlier; saves and phases of the program have "
        "four times as long.",
    )
    at_most: PositiveDuration = Field(
        default=timedelta(minutes=10),
        description="How long a step may take while nothing is known about the run; starts, first "
        "steps and new phases have three times as long.",
    )

    @model_validator(mode="after")
    def _bounds_fit(self) -> WatchdogSpec:
        if self.factor < 1:
            raise ValueError(
                "factor must be 1 or more: otherwise every ordinary step would be a hang"
            )
        if self.at_least > self.at_most:
            raise ValueError(
                f"at_least ({format_duration(self.at_least)}) is longer than at_most "
                f"({format_duration(self.at_most)}): raise at_most too"
            )
        return self


class Limits(JobSection):
    """How far a run continues by itself, whatever the ladders allow; then it is held.

    A person who lets the run continue resets all counts.
    """

    known_as: ClassVar[Mapping[str, str]] = {
        "no_progress": "attempts_without_progress", "attempts": "attempts_without_progress",
        "without_progress": "attempts_without_progress",
        "interruptions": "interruptions_without_progress",
        "preemptions": "interruptions_without_progress", "max_starts": "starts",
        "restarts": "starts", "restarts_per_day": "starts_per_day", "per_day": "starts_per_day",
    }  # fmt: skip

    attempts_without_progress: Count = Field(
        default=3,
        description="Attempts in a row that fail or reach the time limit without a newer "
        "checkpoint than before.",
    )
    interruptions_without_progress: Count = Field(
        default=10,
        description="Attempts in a row that end without such a checkpoint, for whatever reason: "
        "preempted, requeued by an administrator, a lost node, an unavailable service, a full "
        "disk.",
    )
    starts_per_day: Count = Field(
        default=200,
        description="Starts of all ranks within 24 hours, in the same job or in the queue.",
    )
    starts: Count = Field(default=5000, description="Starts of all ranks in all.")
    controller_patience: PositiveDuration = Field(
        default=timedelta(minutes=5),
        description="How long the requeue of a run is retried while Slurm does not answer, before "
        "it is left to slurm-forge reconcile.",
    )
