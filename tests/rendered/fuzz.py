"""Hostile texts in every field that can reach a batch script, and what became of each script.

A case is a job file, a site and the places of a run with hostile texts in one to three fields.  It
is refused with an error of ours, or rendered; then its options are read as sbatch reads them, and
it is run by a real bash among commands that only take notes (``tests.rendered.bench``).  ``setup``
is shell by design, of a job file and of a site file, and is no field here.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_forge.documents import build_plain
from slurm_forge.errors import ForgeError
from slurm_forge.launch.render.batch_script import payload, render
from slurm_forge.launch.submit.submission import run_file
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.slurm.text.directives import read_directives
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from tests.rendered.bench import Bench
from tests.rendered.hostile import hostile

HARMLESS = "plain"


@dataclass
class Draft:
    """What a script is made of, before anything has been checked."""

    job: dict[str, Any]
    site: dict[str, Any]
    runs: str = "runs"
    submitted_from: str = "/home/me"
    python: str = "python"


Setter = Callable[[Draft, str], None]


def _job(*keys: str, form: str = "{}") -> Setter:
    def put(draft: Draft, text: str) -> None:
        inner = draft.job
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = form.replace("{}", text)

    return put


def _job_list(*keys: str, before: tuple[str, ...] = (), form: str = "{}") -> Setter:
    def put(draft: Draft, text: str) -> None:
        inner = draft.job
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = [*before, form.replace("{}", text)]

    return put


def _job_key(*keys: str, value: Any = HARMLESS) -> Setter:
    def put(draft: Draft, text: str) -> None:
        inner = draft.job
        for key in keys:
            inner = inner.setdefault(key, {})
        inner[text] = value

    return put


def _site(*keys: str, form: str = "{}", listed: bool = False) -> Setter:
    def put(draft: Draft, text: str) -> None:
        inner = draft.site
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        filled = form.replace("{}", text)
        inner[keys[-1]] = [filled] if listed else filled

    return put


def _site_key(*keys: str, value: Any = HARMLESS) -> Setter:
    def put(draft: Draft, text: str) -> None:
        inner = draft.site
        for key in keys:
            inner = inner.setdefault(key, {})
        inner[text] = value

    return put


def _container_of_site(key: str, form: str = "{}", listed: bool = True) -> Setter:
    def put(draft: Draft, text: str) -> None:
        runtime = draft.job.get("container", {}).get("runtime", "apptainer")
        filled = form.replace("{}", text)
        draft.site["containers"] = [{"runtime": runtime, key: [filled] if listed else filled}]

    return put


def _place(name: str, form: str = "{}") -> Setter:
    def put(draft: Draft, text: str) -> None:
        setattr(draft, name, form.replace("{}", text))

    return put


#: Every way in for a text, by the name that a person would know it by.
FIELDS: dict[str, Setter] = {
    "name": _job("name"),
    "entry": _job("entry"),
    "entry (path)": _job("entry", form="{}/train.py:train"),
    "command[0]": _job_list("command"),
    "command[1]": _job_list("command", before=("bash",)),
    "args": _job_key("args"),
    "template": _job("template"),
    "chain": _job("chain"),
    "lead": _job("lead"),
    "seed": _job("seed"),
    "program.notify": _job("program", "notify"),
    "program.resume_arg": _job("program", "resume_arg"),
    **{
        f"resources.{key}": _job("resources", key)
        for key in (
            "partition", "account", "qos", "constraint", "nodelist", "exclude", "gres",
            "reservation", "mem", "time", "nodes", "gpus_per_node", "gpus_per_task",
        )
    },
    "resources.gpus_per_node (kind)": _job("resources", "gpus_per_node", form="{}:4"),
    "resources.constraint (appended)": _job("resources", "constraint", form="a100{}"),
    "resources.gres (appended)": _job("resources", "gres", form="gpu:2{}"),
    "resources.extra (key)": _job_key("resources", "extra"),
    "resources.extra (value)": _job("resources", "extra", "mail-type"),
    "resources.extra.comment": _job("resources", "extra", "comment"),
    "env (name)": _job_key("env"),
    "env (value)": _job("env", "WORD"),
    "container.image": _job("container", "image"),
    "container.image (path)": _job("container", "image", form="/images/{}.sif"),
    "container.python": _job("container", "python"),
    "container.python (path)": _job("container", "python", form="/opt/{}/python3"),
    "container.mounts": _job_list("container", "mounts"),
    "container.mounts (path)": _job_list("container", "mounts", form="/{}"),
    "container.mounts (both)": _job_list("container", "mounts", form="/{}:/{}:ro"),
    "container.options": _job_list("container", "options"),
    "container.options (value)": _job_list("container", "options", form="--env={}"),
    "runs": _place("runs"),
    "submitted_from": _place("submitted_from", form="/home/{}"),
    "python": _place("python"),
    "site.name": _site("name"),
    "site.python": _site("python"),
    "site.modules": _site("modules", listed=True),
    "site.modules (appended)": _site("modules", form="cuda/12.4{}", listed=True),
    "site.partitions.modules": lambda draft, text: draft.site.update(
        partitions={"plain": {"modules": [text]}}
    ),
    "site.sbatch_options": _site("sbatch_options", listed=True),
    "site.sbatch_options (value)": _site("sbatch_options", form="--hint={}", listed=True),
    "site.srun_options": _site("srun_options", listed=True),
    "site.srun_options (value)": _site("srun_options", form="--mpi={}", listed=True),
    "site.env (name)": _site_key("env", "always"),
    "site.env (value)": _site("env", "always", "NCCL_WORD"),
    "site.env.on_hang": _site("env", "on_hang", "NCCL_WORD"),
    "site.host_suffix": _site("host_suffix"),
    "site.socket_interface": _site("socket_interface"),
    "site.gpu_types": _site("gpu_types", "a100"),
    "site.containers.command": _container_of_site(
        "command", form="apptainer exec {} <image>", listed=False
    ),
    "site.containers.srun_options": _container_of_site("srun_options", form="--mpi={}"),
    "site.containers.sbatch_options": _container_of_site("sbatch_options", form="--volume={}"),
}  # fmt: skip

_ENTRY: dict[str, Any] = {"name": "tiny", "entry": "tiny:train"}
_APPTAINER = {"runtime": "apptainer", "image": "/images/torch.sif"}
_PYXIS = {"runtime": "pyxis", "image": "torch"}
#: The templates, and what else makes other words of a job.
STARTS: dict[str, dict[str, Any]] = {
    "srun": _ENTRY,
    "torchrun": {**_ENTRY, "template": "torchrun"},
    "torchrun, command": {"name": "tiny", "command": ["train.py"], "template": "torchrun"},
    "apptainer": {**_ENTRY, "container": _APPTAINER},
    "apptainer, torchrun": {**_ENTRY, "container": _APPTAINER, "template": "torchrun"},
    "apptainer, command": {"name": "tiny", "command": ["python", "a.py"], "container": _APPTAINER},
    "pyxis": {**_ENTRY, "container": _PYXIS},
    "array": {**_ENTRY, "template": "array", "chain": 3},
    "exec": {"name": "tiny", "command": ["srun", "python", "train.py"]},
}
_USUAL = {"nodes": 2, "tasks_per_node": 4, "gpus_per_node": 4, "time": "12:00:00"}


@dataclass(frozen=True)
class Fuzzed:
    """One case: how it starts, and the hostile texts by the names of their fields."""

    start: str
    texts: tuple[tuple[str, str], ...]

    def draft(self, text: str | None = None) -> Draft:
        """What is rendered; with ``text`` that instead of each hostile one."""
        job = {**copy.deepcopy(STARTS[self.start]), "resources": dict(_USUAL)}
        draft = Draft(job, {"name": "hill"})
        for name, own in self.texts:
            if name.startswith("container.") and "container" not in job:
                job["container"] = dict(_APPTAINER)
            if name.startswith("command") and "entry" in job:
                del job["entry"]
            if name.startswith("entry") and "command" in job:
                del job["command"]
            if name == "site.gpu_types":
                job["resources"]["gpus_per_node"] = "a100:4"
            if name in ("resources.gpus_per_task", "resources.gres"):
                job["resources"].pop("gpus_per_node", None)
            if name == "site.partitions.modules":
                job["resources"]["partition"] = "plain"
            FIELDS[name](draft, own if text is None else text)
        return draft


def cases(seed: int, count: int) -> list[Fuzzed]:
    """So many hostile texts, in cases of one to three; every field is met in turn."""
    chance = random.Random(seed)
    names, starts = list(FIELDS), list(STARTS)
    found: list[Fuzzed] = []
    done = 0
    while done < count:
        number = min(chance.choice((1, 1, 1, 1, 2, 3)), count - done)
        chosen = [names[done % len(names)], *chance.sample(names, number)][:number]
        if any(name.startswith("command") for name in chosen):  # one of the two is what is run
            chosen = [name for name in chosen if not name.startswith("entry")]
        texts = tuple((name, hostile(chance)) for name in dict.fromkeys(chosen))
        found.append(Fuzzed(chance.choice(starts), texts))
        done += len(texts)
    return found


@dataclass(frozen=True)
class Case:
    """A case that was rendered."""

    file: RunFile
    site: Site
    run: RunDirectory
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        """What the supervisor is to be given."""
        started = "supervise" if self.file.job.command is None else "execute"
        via = "sbatch" if self.file.job.chain is None else "sbatch array"
        own = ("-m", "slurm_forge.process", started, str(self.run.path), "--via", via, "--")
        return (*own, *(word for line in payload(self.file, self.site, self.run) for word in line))


def rendered_case(draft: Draft, base: Path = Path("/nowhere")) -> Case:
    """As ``submit`` does it, with runs below ``base``; ``ForgeError`` where it refuses."""
    site = build_plain(Site, draft.site)
    job = job_from_mapping(draft.job)
    run = RunDirectory.at(Path(f"{base}/{draft.runs}") / job.name)
    python = None if draft.site.get("python") else draft.python or "python"
    file = run_file(
        job, run=run, site=site, submitted_from=Path(draft.submitted_from), python=python
    )
    return Case(file, site, run, render(file, site, run))


@dataclass
class Tally:
    """What became of the texts of a number of cases."""

    texts: int = 0
    scripts: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    rendered: Counter[str] = field(default_factory=Counter)
    started: int = 0
    not_started: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, case: Fuzzed, bench: Bench) -> None:
        """Try one case."""
        self.texts += len(case.texts)
        names = [name for name, _ in case.texts]
        found = verdict(case, bench)
        if found is None:
            self.refused.update(names)
            return
        self.rendered.update(names)
        self.scripts += 1
        self.started += found == "started"
        self.not_started += found == "not started"
        if found not in ("started", "not started"):
            self.wrong.append(f"{found}: {case}")


def verdict(case: Fuzzed, bench: Bench) -> str | None:
    """None: refused.  ``started``, or ``not started`` (there is no such interpreter): as it has to
    be.  Anything else says what is wrong.
    """
    draft = case.draft()
    try:
        if "\0" in draft.runs + draft.submitted_from + draft.python:
            return None  # the system has no such paths
        made = rendered_case(draft, bench.base)
    except ForgeError as error:
        text = str(error)
        clear = bool(error.message) and all(c.isprintable() or c in "\n\t" for c in text)
        return None if clear else f"not a clear error: {text!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        options = read_directives(made.text)
    except ValueError as error:
        return f"sbatch can't read it: {error}"
    problem = _smuggled(case, options)
    return problem if problem is not None else bench.run(made.text, made.words, made.file, made.run)


#: Fields whose text is the name of an option itself.
_NAMES = frozenset({"resources.extra (key)", "site.sbatch_options"})


def _smuggled(case: Fuzzed, options: tuple[str, ...]) -> str | None:
    """Whether there are other options than with harmless texts in the same fields."""
    here = [option.partition("=")[0] for option in options]
    alone = Fuzzed(case.start, tuple(pair for pair in case.texts if pair[0] not in _SHAPING))
    try:
        usual = [o.partition("=")[0] for o in read_directives(rendered_case(_usual(alone)).text)]
    except ForgeError as error:
        return f"the harmless one was refused: {error}"
    given = {name for name, _ in case.texts}
    extra = [option for option in here if option not in usual]
    if len(here) != len(set(here)) and not _NAMES & given:
        return f"an option twice: {options}"
    allowed = len(_NAMES & given) + 2 * len(_SHAPING & given)
    if len(extra) > allowed or any(option in _DANGEROUS for option in extra):
        return f"options that nobody asked for: {extra}"
    for name, text in case.texts:
        option = _PLAIN_OPTIONS.get(name)
        if option is not None and f"--{option}={text}" not in options:
            return f"{name} did not arrive as it is: {options}"
    return None


#: Texts that change which options there are: numbers, durations, kinds of GPU.
_SHAPING = frozenset(
    {
        "resources.mem", "resources.time", "resources.nodes", "resources.gpus_per_node",
        "resources.gpus_per_task", "resources.gpus_per_node (kind)", "lead", "seed", "template",
        "chain",
        "program.notify", "program.resume_arg", "site.gpu_types", "resources.constraint",
        "resources.constraint (appended)", "resources.gres", "resources.gres (appended)",
        *_NAMES,
    }
)  # fmt: skip
#: What would change what the job is.
_DANGEROUS = frozenset(
    {"--array", "--chdir", "--uid", "--export", "--dependency", "--get-user-env", "--bbf"}
)
_PLAIN_OPTIONS = {
    f"resources.{key}": key
    for key in ("partition", "account", "qos", "nodelist", "exclude", "reservation")
} | {"resources.extra (value)": "mail-type", "resources.extra.comment": "comment"}


def _usual(case: Fuzzed) -> Draft:
    """The same case with texts that are harmless and that their fields take."""
    fitting = {
        "entry": "a:b",
        "container.mounts": "/plain",
        "container.python": "python3",
        "site.sbatch_options": "--plain",
        "site.srun_options": "--plain",
        "env (name)": "PLAIN",
        "site.env (name)": "PLAIN",
    }
    draft = case.draft(HARMLESS)
    for name, _ in case.texts:
        if name in fitting:
            FIELDS[name](draft, fitting[name])
            for inner in (draft.job.get("env"), draft.site.get("env", {}).get("always")):
                if inner is not None:
                    inner.pop(HARMLESS, None)
    return draft
