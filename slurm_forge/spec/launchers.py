"""What is started, and how: the template of the batch script, the container, the array of attempts.

And how a program that knows nothing of slurm_forge is stopped, resumed, and known to be done.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from slurm_forge.documents import wrong_key
from slurm_forge.site.parts import ContainerRuntime
from slurm_forge.spec.metric_patterns import (
    as_list,
    check_metric_pattern,
    compiled_pattern,
    metric_patterns,
)
from slurm_forge.spec.templates import check_template
from slurm_forge.spec.types import JobSection, PositiveDuration, ShellText


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


class ContainerSpec(JobSection):
    """The container that the ranks run in; slurm_forge has to be installed in its image, too."""

    known_as: ClassVar[Mapping[str, str]] = {
        "engine": "runtime", "type": "runtime", "path": "image", "sif": "image", "file": "image",
        "interpreter": "python", "binds": "mounts", "bind": "mounts", "volumes": "mounts",
        "mount": "mounts", "args": "options", "flags": "options", "extra": "options",
    }  # fmt: skip

    runtime: Runtime | None = Field(
        default=None,
        description="apptainer, singularity or pyxis (default: the first that the site has).",
    )
    image: Annotated[ShellText, AfterValidator(_image)] = Field(
        description='The image: "/images/torch.sif", "docker://…", for pyxis also "nvcr.io#…".'
    )
    python: Annotated[ShellText, AfterValidator(_python)] = Field(
        default="python3", description="The interpreter in the image that has torch."
    )
    mounts: tuple[Annotated[ShellText, AfterValidator(_mount)], ...] = Field(
        default=(),
        description='More folders to mount: "/data", "/data:/mnt" or "/data:/mnt:ro". The '
        "run's folder and the one that it was submitted from are always mounted.",
    )
    options: tuple[Annotated[ShellText, AfterValidator(_option)], ...] = Field(
        default=(),
        description="Further options of the runtime, before the image; for pyxis, of srun.",
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


#: Slurm's own default (MaxArraySize 1001); nobody needs that many segments of one run.
MOST_TASKS = 1000


def check_chain(template: Template | None, chain: int | None) -> None:
    """``ValueError`` for an array without tasks, and for tasks without an array."""
    if template is Template.ARRAY and chain is None:
        raise wrong_key(
            "template",
            'how many tasks the array has is missing: "chain: 10" (each is an attempt as long as '
            "resources.time)",
        )
    if chain is not None and template is not Template.ARRAY:
        raise wrong_key("chain", 'only an array has tasks: write "template: array", too')


class Convention(str, Enum):
    """Whose habits the program has; docs/how-to/exec.md says what each really does."""

    PLAIN = "plain"
    TORCHRUN = "torchrun"
    LIGHTNING = "lightning"
    HF = "hf"
    SUBMITIT = "submitit"
    ACCELERATE = "accelerate"


class NotifyTo(str, Enum):
    """Which processes hear that the time is up."""

    #: The command itself.
    CHILD = "child"
    #: The command and everything in its process group.
    GROUP = "group"
    #: The tasks of the job's steps, through Slurm.
    RANKS = "ranks"
    #: What launchers and shells below the command have started; steps of srun through Slurm.
    TREE = "tree"


#: What can't be caught, or means something else to a process.
_NO_NOTICE = frozenset({"SIGKILL", "SIGSTOP", "SIGCONT", "SIGCHLD", "SIGTSTP"})
_EXIT_CODES = (1, 255)


def signal_name(text: str) -> str:
    """``TERM`` or ``SIGTERM`` as ``SIGTERM``; ``ValueError`` for what is no notice."""
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name not in signal.Signals.__members__:
        raise ValueError(f'"{text}" is not the name of a signal; write TERM, USR1, USR2 or INT')
    if name in _NO_NOTICE:
        raise ValueError(f"{name} can't be a notice: a program can't act on it")
    return name


def _signal(value: object) -> object:
    return signal_name(value) if isinstance(value, str) else value


def _pattern(text: str) -> str:
    compiled_pattern(text)
    return text


def _step_pattern(text: str) -> str:
    if compiled_pattern(text).groups != 1:
        raise ValueError(
            r'needs exactly one group, which is the step number: "step (\d+)" or "Iter: (\d+)/"'
        )
    return text


def _word(kind: type[Enum]) -> BeforeValidator:
    def made(value: object) -> object:
        known = {each.value: each for each in kind}
        if isinstance(value, str) and not isinstance(value, kind):
            if value not in known:
                raise ValueError(f'unknown value "{value}" (one of: {", ".join(known)})')
            return known[value]
        return value

    return BeforeValidator(made)


def _exit_code(value: int) -> int:
    low, high = _EXIT_CODES
    if not low <= value <= high:
        raise ValueError(f"an exit status that means something is {low} to {high}, got {value}")
    return value


Pattern = Annotated[ShellText, AfterValidator(_pattern)]
ExitCode = Annotated[int, Field(strict=True), AfterValidator(_exit_code)]


class ProgramSpec(JobSection):
    """What slurm_forge needs to know about a ``command``; everything has a default."""

    known_as: ClassVar[Mapping[str, str]] = {
        "signal": "notify", "notify_signal": "notify", "to": "notify_to", "resume": "resume_arg",
        "resume_args": "resume_arg", "checkpoints": "checkpoint_glob", "glob": "checkpoint_glob",
        "progress": "progress_file", "metrics": "metric_pattern",
        "metric_patterns": "metric_pattern", "metric": "metric_pattern", "steps": "step_pattern",
        "done": "done_file",
        "preset": "convention", "framework": "convention",
    }  # fmt: skip

    convention: Annotated[Convention, _word(Convention)] = Field(
        default=Convention.PLAIN,
        description="Framework whose signal convention the program follows.",
    )
    notify: Annotated[ShellText, BeforeValidator(_signal)] | None = Field(
        default=None, description="Signal that makes the program save (default: the convention's)."
    )
    notify_to: Annotated[NotifyTo, _word(NotifyTo)] | None = Field(
        default=None,
        description="Who gets it: child, group, ranks or tree (default: the convention's).",
    )
    notify_again: bool = Field(
        default=False,
        strict=True,
        description="Signal the tasks of steps even if Slurm has already sent them the same "
        "signal.",
    )
    resume_arg: Annotated[ShellText, AfterValidator(check_template)] | None = Field(
        default=None,
        description="Arguments that are added from the second start on, if there is something to "
        'resume from: "--resume_from_checkpoint {latest}".',
    )
    checkpoint_glob: ShellText | None = Field(
        default=None, description='Checkpoints of the program: "out/checkpoint-*".'
    )
    progress_file: ShellText | None = Field(
        default=None,
        description="Files, the newest of which shows how far the program is (default: its "
        "checkpoints).",
    )
    step_pattern: Annotated[ShellText, AfterValidator(_step_pattern)] | None = Field(
        default=None, description=r'Finds the step in its output: "step (\d+)".'
    )
    metric_pattern: Annotated[
        tuple[Annotated[ShellText, AfterValidator(check_metric_pattern)], ...],
        BeforeValidator(as_list),
    ] = Field(
        default=(),
        description="Finds step, loss and gradient norm in its output: a preset (hf, lightning, "
        "keras, torchtitan, kempnerforge, plain), NAME=REGEX (step, loss, grad_norm), or several.",
    )
    progress_after: PositiveDuration = Field(
        default=timedelta(minutes=10),
        description="If nothing else shows progress: a start that ran this long has made some.",
    )
    done_file: ShellText | None = Field(
        default=None,
        description="File that exists once the program is done, whatever its exit status.",
    )
    done_pattern: Pattern | None = Field(
        default=None, description="Output that says that the program is done."
    )
    done_exit_code: ExitCode | None = Field(
        default=None, description="Exit status that says that the program is done."
    )
    requeue_exit_code: ExitCode | None = Field(
        default=None, description="Exit status that requests a restart."
    )

    @property
    def reads_steps(self) -> bool:
        """Whether steps are looked for in the output."""
        patterns = metric_patterns(self.metric_pattern, self.step_pattern)
        return patterns is not None and patterns.step is not None

    @model_validator(mode="after")
    def _parts_fit(self) -> ProgramSpec:
        if "{latest}" in (self.resume_arg or "") and self.checkpoint_glob is None:
            raise wrong_key("resume_arg", "{latest} is the newest match of checkpoint_glob: add it")
        if self.done_exit_code is not None and self.done_exit_code == self.requeue_exit_code:
            raise wrong_key(
                "requeue_exit_code",
                f"{self.done_exit_code} already means that the program is done (done_exit_code): "
                "choose another",
            )
        return self
