"""The first files of a new run: a commented job file, and a program that runs.  Pure.

The programs themselves are ``slurm_forge/starters/``: ordinary files, checked and tested as such,
which are copied as they are.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from slurm_forge.documents.writing import is_plain_text
from slurm_forge.errors import ConfigError
from slurm_forge.launch.render.sbatch_options import as_directive
from slurm_forge.spec import JobSpec
from slurm_forge.spec.launchers import Template
from slurm_forge.spec.loading import from_yaml, job_from_mapping, to_mapping

JOB_FILE = "train.yaml"
_PROGRAM = "train.py"
#: Where a try on this machine leaves its run, so that the name is free on the cluster.
TRIED = "tried"
_ABOUT = 240
_STARTERS = Path(__file__).resolve().parents[2] / "starters"
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


class StartMethod(str, Enum):
    """How a run is started: the tutorials of docs/tutorials, one each."""

    #: A job file and a function: slurm-forge submit.
    JOB = "job"
    #: A script that submits the function with submitit.
    SUBMITIT = "submitit"
    #: A command that knows nothing of us, as the last line of an sbatch script.
    EXEC = "exec"
    #: A script that srun or torchrun starts, and that makes itself a run.
    ATTACH = "attach"
    #: A job file and a function that trains with Hugging Face's Trainer.
    HF = "hf"
    #: A job file and a function with a loop that uses accelerate.
    ACCELERATE = "accelerate"
    #: A script that Hydra configures, and sweeps of it.
    HYDRA = "hydra"
    #: A job file and a function that trains with Lightning.
    LIGHTNING = "lightning"
    #: A job file and a function that trains with Keras.
    KERAS = "keras"
    #: A job file and a function that hands over to torchtitan's trainer, with its configuration.
    TITAN = "titan"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """What a person wants, as typed and unchecked.  Without entry and command it is a program."""

    name: str
    start_method: StartMethod = StartMethod.JOB
    entry: str | None = None
    command: str | None = None
    site: str | None = None
    template: str | None = None
    nodes: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None


@dataclass(frozen=True, slots=True)
class NewFile:
    """One file, relative to the folder."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFiles:
    """The files to write, and what to type then.

    ``local_command`` without Slurm, ``cluster_command`` with it.
    """

    files: tuple[NewFile, ...]
    local_command: str
    cluster_command: str


def name_from(folder: Path) -> str:
    """A name for a run, from the folder that its files are in."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip("-._")[:64]
    return name or "my-run"


def first_files(options: InitOptions) -> FirstFiles:
    """The files that the options ask for; ``ConfigError`` names the option that is wrong."""
    _check(options)
    job = _job(options)
    if options.start_method is StartMethod.HYDRA:
        return _hydra_files(options, job)
    local_command, cluster_command = _commands(options, job)
    settings = to_mapping(job)
    own = options.start_method is StartMethod.EXEC
    made = options.entry is None and options.command is None
    text = _rendered(
        "job.yaml.j2",
        {
            "name": job.name,
            "entry": job.entry,
            "command": job.command,
            "resources": settings["resources"],
            "template": settings.get("template") if options.template else None,
            "chain": job.chain,
            "made": made,
            "own": own,
            "global_batch": _global_batch(job),
            "file": JOB_FILE,
            "local_command": local_command,
            "cluster_command": cluster_command,
        },
    )
    # What would be refused tomorrow is not written today.
    from_yaml(text, JOB_FILE)
    files = [NewFile(JOB_FILE, text)]
    if made:
        files.append(NewFile(_PROGRAM, _starter(options.start_method, job)))
        if options.start_method is StartMethod.TITAN:
            files.append(NewFile("titan.toml", (_STARTERS / "titan.toml").read_text()))
    if options.start_method is StartMethod.SUBMITIT:
        values = {
            "name": job.name,
            "parameters": _parameters(settings["resources"], job),
            "global_batch": _global_batch(job),
        }
        files.append(NewFile("submit.py", _rendered("submit.py.j2", values)))
    elif job.command is not None:
        values = {"options": _directives(job), "file": JOB_FILE}
        files.append(NewFile("job.sbatch", _rendered("job.sbatch.j2", values)))
    return FirstFiles(
        files=tuple(files), local_command=local_command, cluster_command=cluster_command
    )


def _hydra_files(options: InitOptions, job: JobSpec) -> FirstFiles:
    """A script and its configuration, which says what each job of a sweep asks for."""
    settings = to_mapping(job)["resources"]
    values = {"name": job.name, "parameters": _parameters(settings, job, prefix="")}
    knob = "" if options.site is None else f"SLURM_FORGE_SITE={shlex.quote(options.site)} "
    return FirstFiles(
        files=(
            NewFile(_PROGRAM, (_STARTERS / "hydra_sweep.py").read_text(encoding="utf-8")),
            NewFile("config.yaml", _rendered("config.yaml.j2", values)),
        ),
        local_command=f"python {_PROGRAM}",
        cluster_command=f"{knob}python {_PROGRAM} -m lr=1e-3,3e-3 seed=0,1,2",
    )


def _check(options: InitOptions) -> None:
    if options.entry is not None and options.command is not None:
        raise ConfigError(
            "--entry and --command: a job runs one of the two",
            next_step="--entry is a function of yours that gets the run, --command a program.",
        )
    takes_command = options.start_method in (StartMethod.EXEC, StartMethod.ATTACH)
    if options.entry is not None and takes_command:
        raise ConfigError(
            f"--entry: slurm-forge starts a command with --way {options.start_method.value}",
            next_step="Give --command, or leave --way out: a function is what --way job is for.",
        )
    if options.command is not None and not takes_command:
        raise ConfigError(
            f"--command: --way {options.start_method.value} calls a function",
            next_step="Give --entry package.module:train, or --way exec for a command.",
        )
    if options.start_method is StartMethod.HYDRA and (options.entry or options.template):
        raise ConfigError(
            f"--{'entry' if options.entry else 'template'}: with --way hydra a script is started "
            "by Hydra's launcher",
            next_step="Leave it out, and change train.py and config.yaml.",
        )
    if options.start_method is StartMethod.SUBMITIT and options.entry is not None:
        raise ConfigError(
            "--entry: submit.py imports the function train of train.py",
            next_step="Leave --entry out and change the import in submit.py.",
        )
    if options.site is not None and not (options.site and options.site.isprintable()):
        raise ConfigError("--site: not the name of a site", next_step="slurm-forge init --help")


#: Options of ``init`` that are keys of ``resources:``.
RESOURCES = (
    "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem", "time", "partition",
    "account",
)  # fmt: skip


#: Attempts of an array, where nobody has said how many.
_CHAIN = 10


def _job(options: InitOptions) -> JobSpec:
    resources = {key: getattr(options, key) for key in RESOURCES}
    if resources["gpus_per_node"] == "0":
        resources["gpus_per_node"] = None
    if options.mem is not None and options.mem.isascii() and options.mem.isdigit():
        resources["mem"] = int(options.mem[:18])
    data: dict[str, Any] = {
        "name": options.name,
        "resources": {key: value for key, value in resources.items() if value is not None},
    }
    if options.start_method in (StartMethod.EXEC, StartMethod.ATTACH):
        data["command"] = _words(options.command)
    else:
        data["entry"] = f"{_PROGRAM}:train" if options.entry is None else options.entry
    if options.template is not None:
        data["template"] = options.template
        data["chain"] = _CHAIN if options.template == Template.ARRAY.value else None
    try:
        job = job_from_mapping(data)
    except ConfigError as error:
        raise ConfigError(_as_options(error.message), next_step=_HELP) from None
    gpus = job.resources.gpus_per_node
    if options.tasks_per_node is None and gpus is not None:
        # One rank per GPU, unless somebody says otherwise.
        tasks = job.resources.model_copy(update={"tasks_per_node": max(1, gpus.count)})
        return job.model_copy(update={"resources": tasks})
    return job


_HELP = "Correct the option; slurm-forge init --help has examples."


def _as_options(message: str) -> str:
    """Keys as they are written on the command line: ``--time: …``."""
    return re.sub(
        r"^(?:resources\.)?([a-z_]+)(?:\[\d+\])?: ",
        lambda match: f"--{match[1].replace('_', '-')}: ",
        message,
        flags=re.MULTILINE,
    )


def _words(command: str | None) -> list[str]:
    if command is None:
        return ["srun", "python", _PROGRAM]
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"--command: can't be split into words: {str(error).lower()}", next_step=_HELP
        ) from None
    if not words:
        raise ConfigError("--command: is empty", next_step=_HELP)
    return words


def _commands(options: InitOptions, job: JobSpec) -> tuple[str, str]:
    """What to type locally and on the cluster, from the folder of the files."""
    site = "" if options.site is None else f" --site {shlex.quote(options.site)}"
    knob = "" if options.site is None else f"SLURM_FORGE_SITE={shlex.quote(options.site)} "
    if job.command is None:
        local_command = f"slurm-forge run {JOB_FILE} --runs {TRIED}"
        cluster_command = (
            f"{knob}python submit.py"
            if options.start_method is StartMethod.SUBMITIT
            else f"slurm-forge submit {JOB_FILE}{site}"
        )
        return local_command, cluster_command
    local_command = f"slurm-forge exec --job {JOB_FILE} --runs {TRIED}"
    if job.command[0] == "srun":  # which is not there without Slurm
        local_command += f" -- {shlex.join(_without_srun(job.command))}"
    return local_command, f"{knob}sbatch job.sbatch"


def _without_srun(command: Sequence[str]) -> list[str]:
    """The program with its own options, without srun's before it (``-n 4``, ``--nodes=2``)."""
    alone = list(
        itertools.dropwhile(lambda word: word.startswith("-") or word.isdecimal(), command[1:])
    )
    return alone or ["python", _PROGRAM]


def _starter(start_method: StartMethod, job: JobSpec) -> str:
    names = {
        StartMethod.EXEC: "own.py",
        StartMethod.HF: "trainer.py",
        StartMethod.ACCELERATE: "accelerate.py",
        StartMethod.LIGHTNING: "lightning.py",
        StartMethod.KERAS: "keras_model.py",
        StartMethod.TITAN: "titan.py",
    }
    text = (_STARTERS / names.get(start_method, "entry.py")).read_text(encoding="utf-8")
    text = text.replace("global_batch: int = 240", f"global_batch: int = {_global_batch(job)}")
    return f"{text}{_ATTACHED}" if start_method is StartMethod.ATTACH else text


#: What makes the starter a script that srun or torchrun starts.
_ATTACHED = """

if __name__ == "__main__":
    # The name is that of slurm-forge exec, else that of the Slurm job, else this script's.
    with forge.attach(spec={"args": {"max_steps": 300, "pace": 0.0}}) as run:
        train(run, **run.args)
"""


def _global_batch(job: JobSpec) -> int:
    """About 240 samples, and the same number for every rank."""
    ranks = job.resources.tasks
    return ranks * max(1, round(_ABOUT / ranks))


def _parameters(
    resources: Mapping[str, Any], job: JobSpec, prefix: str = "slurm_"
) -> dict[str, object]:
    """What submitit calls them, with the ``prefix`` for those of one executor."""
    limit = job.resources.time
    named: dict[str, object | None] = {
        "nodes": resources["nodes"],
        "tasks_per_node": resources["tasks_per_node"],
        "cpus_per_task": resources["cpus_per_task"],
        f"{prefix}gpus_per_node": resources["gpus_per_node"],
        f"{prefix}mem": resources["mem"],
        "timeout_min": 60 if limit is None else math.ceil(limit.total_seconds() / 60),
        f"{prefix}partition": resources["partition"],
        f"{prefix}account": resources["account"],
    }
    return {key: value for key, value in named.items() if value is not None}


def _directives(job: JobSpec) -> tuple[str, ...]:
    """The ``#SBATCH`` options; every value has been checked as one by the job file's model."""
    resources = to_mapping(job)["resources"]
    named = {
        "job-name": job.name,
        "nodes": resources["nodes"],
        "ntasks-per-node": resources["tasks_per_node"],
        **{key.replace("_", "-"): resources[key] for key in RESOURCES[2:]},
    }
    return tuple(
        as_directive(f"--{key}={value}") for key, value in named.items() if value is not None
    )


def _rendered(template: str, values: Mapping[str, Any]) -> str:
    return _environment().get_template(template).render(values)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_STARTERS),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  YAML, Python, shell: every value goes through a filter
        keep_trailing_newline=True,
    )
    environment.filters.update(yaml=_yaml, words=_yaml_words, py=repr, sh=shlex.quote)
    return environment


def _yaml(value: object) -> str:
    """A value that our reader and any other YAML reader understand in the same way."""
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and is_plain_text(value)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _yaml_words(words: Sequence[str]) -> str:
    return f"[{', '.join(_yaml(word) for word in words)}]"
