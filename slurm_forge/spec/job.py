"""The job file as a value: what to run, on what, how it is kept alive."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from typing import Annotated, ClassVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from slurm_forge.documents import wrong_key
from slurm_forge.spec.faults import Fault, parse_faults, without_repeats
from slurm_forge.spec.launchers import (
    MOST_TASKS,
    ContainerSpec,
    ProgramSpec,
    Template,
    check_chain,
    check_started,
)
from slurm_forge.spec.notifications import NotifySpec
from slurm_forge.spec.recovery import Recovery
from slurm_forge.spec.resources import Resources
from slurm_forge.spec.safeguards import (
    CodeMode,
    CodeSpec,
    EnvironmentSpec,
    PreflightSpec,
    WatchdogSpec,
)
from slurm_forge.spec.sweep import Sweep
from slurm_forge.spec.types import (
    AUTO,
    Arguments,
    Count,
    Environment,
    Factor,
    JobSection,
    Memory,
    Minutes,
    PositiveDuration,
    ShellText,
    Steps,
    SwitchableSection,
    check_printable,
)
from slurm_forge.store.retention import RetentionRules
from slurm_forge.units import format_duration
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action

#: Several heartbeats, and what ranks of one job may be stopped apart.
_LEAST_SILENCE = timedelta(seconds=4)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class BestMode(str, Enum):
    """Whether a smaller or a larger metric is better."""

    MIN = "min"
    MAX = "max"


def _check_folder(text: str) -> str:
    check_printable(text)
    if not text.startswith("/"):
        raise ValueError(f'expected an absolute path, got "{text}"')
    return text


class KeepBest(JobSection):
    """Keep the checkpoint with the best value of a metric that the program logs."""

    metric: str = Field(
        strict=True, min_length=1, description="Name passed to run.log, such as val_loss."
    )
    mode: BestMode = Field(default=BestMode.MIN, description="min: smaller is better.")


class CheckpointSpec(JobSection):
    """When checkpoints are written, and which of them are kept."""

    known_as: ClassVar[Mapping[str, str]] = {
        "every": "every_minutes", "interval": "every_steps", "keep": "keep_last",
        "max_to_keep": "keep_last", "save_total_limit": "keep_last", "best": "keep_best",
        "every_n_steps": "keep_every_steps", "fallback_dir": "fallback",
        "every_n_epochs": "every_epochs",
    }  # fmt: skip

    every_steps: Count | None = Field(
        default=None, description="Save every so many optimizer steps."
    )
    every_epochs: Count | None = Field(
        default=None, description="Save every so many passes over the data."
    )
    every_minutes: Minutes | None = Field(
        default=AUTO,
        description="Save when so many minutes have passed since the last one. auto: from what a "
        "save costs and how often the run is interrupted, both measured (Young and Daly); until "
        "the first interruption, one is assumed to come after 24 more hours.",
    )
    background: bool = Field(
        default=True,
        strict=True,
        description="Training continues while a checkpoint is written; false makes it wait.",
    )
    keep_last: Count = Field(default=3, description="How many of the newest checkpoints are kept.")
    keep_best: KeepBest | None = Field(
        default=None,
        description="Also keep the best one, by a metric that an evaluation logs; a better one is "
        "saved when the evaluation ends.",
    )
    keep_every_steps: Count | None = Field(
        default=None,
        description="Also keep permanently the first checkpoint of every N steps.",
    )
    keep_every_epochs: Count | None = Field(
        default=None,
        description="Also keep permanently the first checkpoint of every N epochs.",
    )
    keep_every_minutes: Factor | None = Field(
        default=None,
        description="Also keep, permanently, the first checkpoint of every so many minutes.",
    )
    fallback: Annotated[str, Field(strict=True), AfterValidator(_check_folder)] | None = Field(
        default=None,
        description="Absolute path of a directory on other storage that all nodes share. Saves go "
        "there, into a folder of the run, for the rest of a launch in which one has failed in the "
        "run directory: no space or quota, or an I/O error.",
    )
    good_after_steps: Steps = Field(
        default=20, description="Healthy steps after which a checkpoint is known to be good."
    )

    @property
    def every(self) -> timedelta | None:
        """Longest time between two checkpoints that the user asked for, or ``None``."""
        if self.every_minutes is None or isinstance(self.every_minutes, str):
            return None
        return timedelta(minutes=self.every_minutes)

    @property
    def rules(self) -> RetentionRules:
        """Which checkpoints stay."""
        minutes, best = self.keep_every_minutes, self.keep_best
        return RetentionRules(
            last=self.keep_last,
            every_steps=self.keep_every_steps,
            every_epochs=self.keep_every_epochs,
            every=None if minutes is None else timedelta(minutes=minutes),
            smaller_is_better=None if best is None else best.mode is BestMode.MIN,
        )

    @property
    def automatic(self) -> bool:
        """Whether the interval is ours to choose."""
        return self.every_minutes == AUTO


#: Steps of so many seconds are one figure of a rank's pace.
_PACE_EVERY = timedelta(seconds=15)


class BandwidthSpec(JobSection):
    """Occasional probes that are large enough to measure the bandwidth of an all-reduce."""

    known_as: ClassVar[Mapping[str, str]] = {
        "interval": "every", "bytes": "size", "message": "size", "on": "enabled", "off": "enabled",
    }  # fmt: skip

    enabled: bool = Field(default=True, strict=True, description="false: small probes only.")
    every: PositiveDuration = Field(
        default=timedelta(minutes=10), description="Time between two probes that measure bandwidth."
    )
    size: Memory = Field(
        default=16 << 20,
        gt=0,
        description="Size of the data that is summed over all ranks, at least 4 bytes per rank; "
        "on CPUs 1M at most.",
    )


class ProbeSpec(SwitchableSection):
    """The regular check that all ranks still answer, with the right values."""

    key: ClassVar[str] = "probe"
    called: ClassVar[str] = "the probe"
    known_as: ClassVar[Mapping[str, str]] = {
        "interval": "every", "timeout": "deadline", "on": "enabled", "off": "enabled",
        "heartbeat": "silence", "heartbeat_timeout": "silence", "large": "bandwidth",
        "slow": "straggler", "stragglers": "straggler", "slower": "straggler",
    }  # fmt: skip

    enabled: bool = Field(default=True, strict=True, description="false switches the probe off.")
    every: PositiveDuration = Field(
        default=timedelta(seconds=60), description="Time between two probes."
    )
    deadline: PositiveDuration = Field(
        default=timedelta(seconds=30),
        description="How long a probe may take once all ranks have arrived, before the network "
        "is queried.",
    )
    silence: PositiveDuration = Field(
        default=timedelta(seconds=5),
        description="A rank that sends no heartbeat for this long, while others do, is examined: "
        "it may be stopped or gone.",
    )
    bandwidth: BandwidthSpec = Field(
        default_factory=BandwidthSpec, description="The probes that measure bandwidth."
    )
    straggler: Factor | None = Field(
        default=1.25,
        gt=1,
        description="A node whose own part of a step takes this many times as long as that of the "
        "others counts as slow; null disables this check.",
    )

    @model_validator(mode="after")
    def _silence_is_longer_than_a_heartbeat(self) -> ProbeSpec:
        if self.silence < _LEAST_SILENCE:
            raise ValueError(
                f"silence ({format_duration(self.silence)}) must be 4s or more: heartbeats come "
                "every second or two, and ranks of a suspended job fall silent one after the other"
            )
        return self

    @property
    def pace_every(self) -> timedelta:
        """How often ranks tell their pace: several times between two probes."""
        return min(_PACE_EVERY, self.every / 4)


def _check_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(
            "a name is 1 to 64 letters, digits, dots, dashes and underscores, "
            "and starts with a letter or a digit"
        )
    return text


def _check_entry(text: str) -> str:
    check_printable(text)
    place, colon, function = text.rpartition(":")
    if not colon:
        raise ValueError('names no function; write "package.module:train" or "path/file.py:train"')
    if not _is_dotted_name(function):
        raise ValueError(f'"{function}" is not the name of a function')
    if place.endswith(".py"):
        if place.startswith("-") or ":" in place:
            raise ValueError(
                f'"{place}" is not a path that can be run: it holds ":" or starts with "-"'
            )
    elif not _is_dotted_name(place):
        raise ValueError(
            f'"{place}" is neither a module ("package.module") nor a path to a .py file'
        )
    return text


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in text.split("."))


def _check_command(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words[0] or words[0].startswith("-"):
        raise wrong_key((0,), "the first word must be the program to run")
    return words


def _command(value: object) -> object:
    if isinstance(value, str):
        raise ValueError('expected a list of words, such as [python, train.py, "--lr=0.1"]')
    # To pydantic this is Python from here on, and strict Python takes no list for a tuple.
    return tuple(value) if isinstance(value, list) else value


def _inject(value: object) -> object:
    """Faults from one text, or a list of texts; each may hold several."""
    if isinstance(value, str):
        return parse_faults(value)
    if not isinstance(value, (list, tuple)):
        raise ValueError('expected faults such as "nan@120", or a list of them')
    faults: list[Fault] = []
    for index, item in enumerate(value):
        if isinstance(item, Fault):
            faults.append(item)
            continue
        try:
            if not isinstance(item, str):
                raise ValueError("expected a fault such as nan@120")
            faults += parse_faults(item)
        except ValueError as error:
            raise wrong_key((index,), str(error)) from None
    return without_repeats(faults)


Inject = Annotated[
    tuple[Fault, ...],
    BeforeValidator(_inject),
    PlainSerializer(lambda faults: [str(fault) for fault in faults], return_type=list[str]),
    WithJsonSchema(
        {
            "type": ["array", "string"],
            "items": {"type": "string"},
            "examples": [["nan@120", "oom@200:rank1"]],
        }
    ),
]


class JobSpec(JobSection):
    """One job file.  Everything has a default but ``name`` and one of ``entry`` and ``command``."""

    known_as: ClassVar[Mapping[str, str]] = {
        "job_name": "name", "script": "command", "cmd": "command", "run": "command",
        "target": "entry", "function": "entry", "module": "entry",
        "arguments": "args", "kwargs": "args", "policy": "recovery", "checkpointing": "checkpoint",
        "before": "setup", "init": "setup", "faults": "inject", "chaos": "inject",
        "launcher": "template", "launch": "template", "sbatch_template": "template",
        "array": "chain", "segments": "chain", "grid": "sweep", "matrix": "sweep",
        "snapshot": "code", "source": "code", "notifications": "notify", "alerts": "notify",
        "html": "report", "html_report": "report",
        "image": "container.image", "mounts": "container.mounts",
        "runtime": "container.runtime",
        **{key: f"resources.{key}" for key in Resources.model_fields},
        **{key: f"resources.{meant}" for key, meant in Resources.known_as.items()},
    }  # fmt: skip

    @property
    def outlives_nodes(self) -> bool:
        """Whether the job is to go on without a node that it loses (``sbatch --no-kill``).

        Where a spare node can take its seat, or fewer nodes may do.
        """
        rungs = self.recovery.ladder(Cause.NODE_FAIL)
        return self.resources.spares > 0 or any(r.do is Action.FEWER_NODES for r in rungs)

    @property
    def starts_once(self) -> bool:
        """Whether it is a command that is started as it is, once, and starts its own ranks."""
        return self.command is not None and self.template in (None, Template.ARRAY)

    name: Annotated[str, Field(strict=True), AfterValidator(_check_name)] = Field(
        description="Name of the run: of its folder, and of the Slurm job."
    )
    entry: Annotated[str, Field(strict=True), AfterValidator(_check_entry)] | None = Field(
        default=None,
        description='Function to call: "package.module:train" or "path/file.py:train".',
    )
    command: (
        Annotated[
            tuple[ShellText, ...],
            Field(min_length=1),
            BeforeValidator(_command),
            AfterValidator(_check_command),
        ]
        | None
    ) = Field(default=None, description="Program and its arguments, instead of entry.")
    program: ProgramSpec = Field(
        default_factory=ProgramSpec,
        description="How a command is stopped and resumed, and how it shows that it is done.",
    )
    template: Template | None = Field(
        default=None,
        description="How the ranks are started: srun (one task per rank; the default of an entry), "
        "torchrun (one task per node) or array. Without it a command is started once, as it is.",
    )
    container: ContainerSpec | None = Field(
        default=None, description="The container that the ranks run in."
    )
    args: Arguments = Field(
        default_factory=dict, description="Arguments of the entry, also in run.args."
    )
    resources: Resources = Field(
        default_factory=Resources, description="What the job requests from Slurm."
    )
    checkpoint: CheckpointSpec = Field(
        default_factory=CheckpointSpec,
        description="When checkpoints are written, and which are kept.",
    )
    recovery: Recovery = Field(
        default_factory=Recovery, description="What is done about each cause, in order."
    )
    probe: ProbeSpec = Field(
        default_factory=ProbeSpec,
        description="Whether and how often all ranks are asked to answer.",
    )
    preflight: PreflightSpec = Field(
        default_factory=PreflightSpec,
        description="Whether nodes are checked before each launch.",
    )
    watchdog: WatchdogSpec = Field(
        default_factory=WatchdogSpec,
        description="When a rank that makes no progress counts as hung.",
    )
    environment: EnvironmentSpec = Field(
        default_factory=EnvironmentSpec,
        description="What is done when something has changed at a resume.",
    )
    notify: NotifySpec = Field(
        default_factory=NotifySpec, description="Messages about the run, and to whom."
    )
    code: CodeSpec = Field(
        default_factory=CodeSpec,
        description="Whether the run keeps the code it was submitted with.",
    )
    seed: int = Field(
        default=0, strict=True, ge=0, lt=2**63, description="Seed of sample order and randomness."
    )
    exact: bool = Field(
        default=True,
        strict=True,
        description="false allows data that can't be resumed where it was (something to iterate "
        "over that has no state_dict): after an interruption it begins anew.",
    )
    batch_coupled: bool = Field(
        default=False,
        strict=True,
        description="true if samples of a micro-batch influence each other (BatchNorm, contrastive "
        "losses): then the micro-batch is never made smaller.",
    )
    report: bool = Field(
        default=True,
        strict=True,
        description="report.html in the folder of the run is kept up to date, every 10 minutes and "
        "at the end of each attempt; false: only slurm-forge report makes one.",
    )
    memory_snapshot: bool = Field(
        default=False,
        strict=True,
        description="Record the allocations of each GPU (some microseconds each), and write them "
        "into the run directory when it runs out of memory: a file for pytorch.org/memory_viz.",
    )
    chain: Annotated[Count, Field(le=MOST_TASKS)] | None = Field(
        default=None,
        description="For template: array, how many attempts are handed to Slurm at once: each "
        "starts when the one before has ended.",
    )
    lead: PositiveDuration | None = Field(
        default=None,
        description="How long before the time limit the last save begins (default: from measured "
        "save times).",
    )
    setup: tuple[ShellText, ...] = Field(
        default=(), description="Shell lines of the batch script before the launch (module load …)."
    )
    env: Environment = Field(default_factory=dict, description="Environment variables of the job.")
    sweep: Sweep | None = Field(
        default=None,
        description='Keys and the values that they take, lists or numbers such as "0-4": each '
        "combination is a run of its own, NAME-0, NAME-1, …. limit: how many of them run at once.",
    )
    inject: Inject = Field(
        default=(),
        description="Faults to inject, to rehearse the run: nan@120, oom@200:rank1, "
        "kill@350:rank0 … (docs/how-to/rehearsing.md).",
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> JobSpec:
        if self.entry is None and self.command is None:
            raise ValueError(
                'nothing to run; add entry ("package.module:train") or command ([python, train.py])'
            )
        if self.entry is not None and self.command is not None:
            raise wrong_key(
                "command", "entry already names what to run; keep one of the two", because="entry"
            )
        if self.command is not None and self.args:
            raise wrong_key(
                "args", "only an entry reads args; put them into command", because="command"
            )
        if self.entry is not None and self.program != ProgramSpec():
            raise wrong_key(
                "program",
                "it is for a command; an entry saves and resumes by itself",
                because="entry",
            )
        if self.command is not None and self.code.mode is CodeMode.SNAPSHOT:
            raise wrong_key(
                "code",
                "a command runs the files in its folder; only an entry is imported from a snapshot",
                because="command",
            )
        check_started(self.template, self.container, self.command)
        check_chain(self.template, self.chain)
        if self.sweep is not None and self.chain is not None:
            raise wrong_key(
                "sweep",
                "a sweep is an array of runs, so none of them can be an array of attempts: leave "
                "template: array and chain out",
                because="chain",
            )
        if self.lead and self.resources.time and self.lead >= self.resources.time:
            raise wrong_key(
                "lead",
                "must be shorter than resources.time, or nothing would be trained",
                because=("resources", "time"),
            )
        return self
