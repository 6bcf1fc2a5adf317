"""How the ranks are started: the template of the batch script, and the container around them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from slurm_forge.documents import wrong_key
from slurm_forge.site.parts import ContainerRuntime
from slurm_forge.spec.types import Section, ShellText

__all__ = ["RUNTIMES", "ContainerSpec", "Runtime", "Template", "check_started"]


class Template(str, Enum):
    """How the ranks of a run are started, and how it comes back (docs/how-to/templates.md)."""

    #: One task per rank, started by srun: the direct child of Slurm is ours.
    SRUN = "srun"
    #: One task per node, in which torchrun starts the ranks.
    TORCHRUN = "torchrun"
    #: As without a template, in a job array whose tasks run one after the other (``chain``).
    ARRAY = "array"


class Runtime(str, Enum):
    """What runs the container of the ranks."""

    APPTAINER = "apptainer"
    SINGULARITY = "singularity"
    PYXIS = "pyxis"

    @property
    def outside(self) -> bool:
        """Whether a program of its own stands between Slurm and the ranks."""
        return self is not Runtime.PYXIS


#: The runtimes of site files that templates know.
RUNTIMES: Mapping[ContainerRuntime, Runtime] = {
    ContainerRuntime.APPTAINER: Runtime.APPTAINER,
    ContainerRuntime.SINGULARITY: Runtime.SINGULARITY,
    ContainerRuntime.PYXIS: Runtime.PYXIS,
}
_TORCHRUNS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})


def _image(text: str) -> str:
    if not text or text != text.strip():
        raise ValueError("expected the path or the address of an image")
    if text.startswith("-"):
        raise ValueError('starts with "-", which the runtime would read as an option')
    return text


def _python(text: str) -> str:
    if not PurePath(text).name.startswith("python") or text != text.strip():
        raise ValueError(
            f'"{text}" is not a Python interpreter: the name of its file begins with "python"'
        )
    return text


def _mount(text: str) -> str:
    source, _, rest = text.partition(":")
    target, _, flags = rest.partition(":")
    if "," in text or '"' in text:
        raise ValueError("a path in a mount can't hold commas or quotes; mounts are a list")
    unsaid = text.endswith(":")
    if unsaid or not source.startswith("/") or (rest and not target.startswith("/")):
        raise ValueError('expected absolute paths: "/data", "/data:/mnt" or "/data:/mnt:ro"')
    if flags and flags not in ("ro", "rw"):
        raise ValueError(f'unknown flag "{flags}" (one of: ro, rw)')
    return text


def _option(text: str) -> str:
    if not text:
        raise ValueError("is empty; leave it out")
    return text


class ContainerSpec(Section):
    """The container that the ranks run in; slurm_forge has to be installed in its image, too."""

    known_as: ClassVar[Mapping[str, str]] = {
        "engine": "runtime", "type": "runtime", "path": "image", "sif": "image", "file": "image",
        "interpreter": "python", "binds": "mounts", "bind": "mounts", "volumes": "mounts",
        "mount": "mounts", "args": "options", "flags": "options", "extra": "options",
    }  # fmt: skip

    runtime: Runtime | None = Field(
        default=None,
        description="apptainer, singularity or pyxis; without it, the first that the site has.",
    )
    image: Annotated[ShellText, AfterValidator(_image)] = Field(
        description='The image: "/images/torch.sif", "docker://…", for pyxis also "nvcr.io#…".'
    )
    python: Annotated[ShellText, AfterValidator(_python)] = Field(
        default="python3", description="The interpreter in the image that has torch."
    )
    mounts: tuple[Annotated[ShellText, AfterValidator(_mount)], ...] = Field(
        default=(),
        description='More folders to see inside: "/data", "/data:/mnt" or "/data:/mnt:ro". The '
        "run's folder and the one that it was submitted from are always seen.",
    )
    options: tuple[Annotated[ShellText, AfterValidator(_option)], ...] = Field(
        default=(),
        description="Further words for the runtime before the image; for pyxis options of srun.",
    )


def check_started(
    template: Template | None, container: ContainerSpec | None, command: tuple[str, ...] | None
) -> None:
    """``ValueError`` for what can't be started so."""
    if command is None:
        return
    first = PurePath(command[0]).name
    torchrun = first in _TORCHRUNS or (
        first.startswith("python") and bool(_TORCHRUNS.intersection(command[1:4]))
    )
    if template is Template.TORCHRUN and torchrun:
        raise wrong_key(
            "template", "torchrun adds torchrun itself: write the script alone as the command"
        )
    if template not in (None, Template.ARRAY) and first == "srun":
        raise wrong_key("template", "the command starts with srun already; keep one of the two")
    if container is not None and first == "srun":
        raise wrong_key(
            "container",
            'the command starts with srun, which no container has: write "template: srun" and the '
            "program alone as the command",
        )
