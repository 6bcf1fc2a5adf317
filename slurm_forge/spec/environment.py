"""What is done at a resume when something is not as it was when the checkpoint was written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from slurm_forge.documents import did_you_mean, wrong_key
from slurm_forge.spec.types import Section

__all__ = ["EnvironmentSpec", "Policy"]

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


class Policy(str, Enum):
    """What a difference does: nothing, a line in the journal, or the run is held."""

    IGNORE = "ignore"
    WARN = "warn"
    REFUSE = "refuse"


def _policy(value: object) -> Policy | None:
    # Made here: to pydantic this is Python from here on, and strict Python takes no text.
    words = [policy.value for policy in Policy]
    if value is None or value in words:
        return None if value is None else Policy(value)
    if isinstance(value, str):
        raise ValueError(f"unknown value {json.dumps(value)} {did_you_mean(value, words)}")
    raise ValueError(f"expected one of {', '.join(words)}, got {json.dumps(value, default=str)}")


_Choice = Annotated[Policy | None, BeforeValidator(_policy)]


class EnvironmentSpec(Section):
    """Per part of the environment: ignore, warn or refuse.  What is left out is as described."""

    known_as: ClassVar[Mapping[str, str]] = {
        "pytorch": "torch", "gpus": "gpu", "device": "gpu", "nvidia": "driver", "pip": "packages",
        "libraries": "packages", "requirements": "packages", "git": "code", "revision": "code",
        "diff": "code", "source": "code", "args": "job", "entry": "job", "spec": "job",
        "dataset": "data", "files": "data", "order": "sampling", "seed": "sampling",
        "global_batch": "sampling", "samples": "sampling", "env": "variables",
    }  # fmt: skip

    python: _Choice = Field(default=None, description="Version of Python.  Else: warn.")
    torch: _Choice = Field(
        default=None, description="Version of torch.  Else: refuse another major one, warn."
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
        default=None, description="The job's own keys.  Else: refuse another entry, warn."
    )
    sampling: _Choice = Field(
        default=None,
        description="Seed, global batch and number of samples, which the order of the samples "
        "follows from.  Else: refuse.",
    )
    data: _Choice = Field(
        default=None,
        description="What run.data() was given.  Else: refuse, but only warn where nothing but "
        "times of files changed.",
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
        found = getattr(self, part, None)
        return found if isinstance(found, Policy) else None


_KEYS = frozenset(EnvironmentSpec.model_fields)
