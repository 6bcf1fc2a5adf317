"""The batch script of a run: options, setup, and what is started, in ``sbatch_templates/``.

What is started stands behind ``--``, whole, as words that a person can read and edit: srun with its
options where there is one, the shield where a launcher stands between Slurm and the ranks, the
container, torchrun, and the program.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path, PurePath

import jinja2

from slurm_forge.errors import ConfigError
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.launch.render.containers import facts_of, inside, runtime_of, step_options
from slurm_forge.launch.render.save_times import save_note_of_run
from slurm_forge.launch.render.sbatch_options import as_directive, options, options_of_array
from slurm_forge.launch.render.signal_convention import forwarding
from slurm_forge.process import process_words
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.spec import JobSpec
from slurm_forge.spec.launchers import Template
from slurm_forge.spec.run_file import RunFile

_ARRAY = "array.sbatch"
#: The names of ``start_file``, as scripts hold them.
START_FILE = re.compile(r"start-[0-9a-f]{8}\.bash")
_START, _PARTS = "start.bash", "parts.j2"
#: Of the lines that hold the site's variables.
_WIDTH = 90


def template_folder() -> Path:
    """Shipped inside the wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "_shipped" / "sbatch_templates", package.parent / "sbatch_templates"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        "the sbatch templates are missing from this installation",
        next_step="Install slurm_forge again: pip install --force-reinstall slurm_forge.",
    )


def render(file: RunFile, site: Site, run: RunDirectory) -> str:
    """The script that ``submit`` hands to sbatch; ``ConfigError`` for a setup that undoes it."""
    refuse_traps(site.setup, f"the setup of the site {site.name}")
    refuse_traps(file.job.setup, "setup")
    started = "supervise" if file.job.command is None else "execute"
    started_by = template_name(file.job, site)
    via = "sbatch" if file.job.chain is None else VIA_ARRAY
    own = (file.python, *process_words(started, str(run.path), "--via", via, "--"))
    lines = (own, *payload(file, site, run))
    return (
        _templates()
        .get_template(started_by if file.job.chain is None else _ARRAY)
        .render(
            chain=file.job.chain,
            started_by=started_by,
            options=options(file.job, site, run, save=_save(file, run)),
            env=_assignments(file.env),
            setup=(*module_lines(file.job, site), *site.setup, *file.job.setup),
            by_torchrun=file.job.template is Template.TORCHRUN,
            start=str(start_file(run.submissions)),
            command=" \\\n    ".join(shlex.join(line) for line in lines),
        )
    )


def sweep_script(
    name: str, count: int, limit: int | None, *, site: Site, first: RunFile, runs: Path
) -> str:
    """The script of an array whose task N becomes the script of the run ``runs/NAME-N``.

    ``first`` is the first of the ``count`` runs; they ask for the same, at most ``limit`` at once.
    """
    run = RunDirectory.at(runs / first.job.name)
    lines = options(first.job, site, run, save=_save(first, run))
    script = run.submissions / "job.sbatch"
    before, after = f"{run.path.parent / name}-", str(script).removeprefix(str(run.path))
    return (
        _templates()
        .get_template("sweep.sbatch")
        .render(
            options=options_of_array(lines, name, run, count=count, limit=limit),
            scripts=f'{shlex.quote(before)}"$SLURM_ARRAY_TASK_ID"{shlex.quote(after)}',
        )
    )


def _assignments(env: Mapping[str, str]) -> str:
    """Words of shell, in lines that are not too long."""
    lines: list[str] = []
    for word in (f"{name}={shlex.quote(value)}" for name, value in env.items()):
        if lines and len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return " \\\n    ".join(lines)


def _save(file: RunFile, run: RunDirectory) -> timedelta:
    """What saves of the run have taken, else those of an earlier one; 0 where nobody knows."""
    note = save_note_of_run(run)
    if note is not None:
        return timedelta(seconds=note.seconds)
    return file.usual_save or timedelta(0)


def template_name(job: JobSpec, site: Site) -> str:
    """The file in ``sbatch_templates/`` that a job's script is made of; of an array, each task's.

    ``array.sbatch`` adds what is different about a job that is an array of attempts.
    """
    if job.container is not None:
        outside = runtime_of(job.container, site).outside
        return "apptainer.sbatch" if outside else "pyxis.sbatch"
    if job.template is Template.TORCHRUN:
        return "torchrun.sbatch"
    return "exec.sbatch" if job.starts_once else "srun.sbatch"


def module_lines(job: JobSpec, site: Site) -> tuple[str, ...]:
    """Commands that load what the site, and its partition, want loaded."""
    facts = site.facts(job.resources.partition, job.resources.qos)
    container = None if job.container is None else facts_of(job.container, site)
    more = () if container is None else container.modules
    modules = dict.fromkeys((*site.modules, *facts.modules, *more))
    return (f"module load {shlex.join(modules)}",) if modules else ()


def start_file(folder: Path) -> Path:
    """Where in ``folder`` the shell that a script of ours sources is kept.

    Its name holds its digest, so that another version never takes the place of what jobs that are
    in the queue rely on.
    """
    return folder / start_name(start_text().encode())


def start_name(text: bytes) -> str:
    """The name of a start file with this content."""
    return f"start-{hashlib.sha256(text).hexdigest()[:8]}.bash"


@cache
def start_text() -> str:
    """The shell that a script of ours sources: it reports a start that fails."""
    return (template_folder() / _START).read_text()


def begin_lines(start: str) -> str:
    """What comes before a script's own commands: source ``start``, or report that it is missing.

    Args:
        start: The path of the start file, as shell text.
    """
    return _part("begin", start)


def start_lines(command: str, *, teardown: bool) -> str:
    """Check the interpreter of ``command``, which is shell text, then become it.

    With ``teardown`` the shell stays, for the commands that follow.
    """
    return f"{'forge_run' if teardown else 'forge_exec'} {command}"


def submitted_lines(folder: Path) -> str:
    """Lay what was submitted out in submitit's ``folder``, unless whoever submitted it has."""
    return _part("submitted", shlex.quote(str(folder)))


def successor_lines(submitted: Path, folder: Path, *, first: str, tasks: int) -> str:
    """Lay the pickle ``submitted`` out in submitit's ``folder`` under the id of this job.

    The results of its ``tasks`` will be found under the ``first`` job's id too.
    """
    words = (shlex.quote(word) for word in (str(submitted), str(folder), first))
    return _part("succeed", *words, f"{{0..{tasks - 1}}}")


def _part(macro: str, *arguments: object) -> str:
    text: str = getattr(_templates().get_template(_PARTS).module, macro)(*arguments)
    return text


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  shell, not HTML: every value goes through shellquote
        keep_trailing_newline=True,
    )
    environment.filters["shellquote"] = shlex.quote
    environment.filters["directive"] = as_directive
    return environment


#: By name or number, as bash takes them; 0 is EXIT.
_RESERVED_TRAPS = {
    "EXIT": "EXIT", "0": "EXIT", "ERR": "ERR", "HUP": "HUP", "1": "HUP", "INT": "INT", "2": "INT",
    "TERM": "TERM", "15": "TERM", "USR1": "USR1", "10": "USR1", "USR2": "USR2", "12": "USR2",
}  # fmt: skip
#: After these a command begins.
_BEFORE = frozenset({"then", "do", "else", "{", "!", "builtin", "command", "time"})
_ENDS = ";|&()\n"
_PLAIN = re.compile(r"^(?:[^#]*[;&|({]\s*)?(?:builtin\s+)?trap\s+(.*)$", re.MULTILINE)


def refuse_traps(lines: Iterable[str], where: str) -> None:
    """``ConfigError`` for a ``trap`` on what the batch script itself has to hear of.

    Whatever the setup sources is not looked into: the script sets its traps again after it.
    """
    names = sorted(set(_trapped("\n".join(lines))))
    if names:
        raise ConfigError(
            f"{where}: a trap on {', '.join(names)} replaces that of the batch script, by which a "
            "failed start is reported",
            next_step="Leave the trap out: put the commands that need it into a script of their "
            "own, and run that from the setup.",
        )


def _trapped(text: str) -> list[str]:
    words = _words(text)
    if words is None:  # quotes that only bash understands
        parts = [word for rest in _PLAIN.findall(text) for word in re.split(r"[\s;&|)}]+", rest)]
        return [name for word in parts if (name := _name(word)) and not word.isdigit()]
    names: list[str] = []
    first, at = True, 0
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith("#"):
            while at < len(words) and words[at] != "\n":
                at += 1
        elif first and word == "trap":
            arguments = []
            while at < len(words) and words[at].strip(_ENDS):
                arguments.append(words[at])
                at += 1
            names += [name for each in _signals(arguments) if (name := _name(each))]
        first = not word.strip(_ENDS) or word in _BEFORE
    return names


def _signals(arguments: list[str]) -> list[str]:
    operands = [each for each in arguments if each != "--"]
    if operands and operands[0] in ("-p", "-l"):
        return []  # only shown
    # With one word alone it is the signal, and its trap is taken away.
    return operands[1:] if len(operands) > 1 else operands


def _name(word: str) -> str | None:
    return _RESERVED_TRAPS.get(word.upper().removeprefix("SIG"))


def _words(text: str) -> list[str] | None:
    """Words and what stands between commands; None where the text can't be split like that."""
    reader = shlex.shlex(text, posix=True, punctuation_chars=_ENDS)
    reader.whitespace, reader.commenters = " \t\r", ""
    try:
        tokens = list(reader)
    except ValueError:
        return None
    words: list[str] = []
    for word in tokens:
        # Runs of punctuation come as one word.
        words += ["\n"] if word and not word.strip(_ENDS) else [word]
    return words


_TORCHRUN = "torch.distributed.run"


#: The shield fills in what is another on each node.  Whether and where ranks are started again is
#: not torchrun's to decide.
_RENDEZVOUS_ARGS = (
    "--nnodes={nnodes}",
    "--node-rank={node_rank}",
    "--master-addr={master_addr}",
    "--master-port={master_port}",
    "--max-restarts=0",
)


def payload(file: RunFile, site: Site, run: RunDirectory) -> tuple[tuple[str, ...], ...]:
    """The words, in the lines of the script; ``ConfigError`` for what can't be started here."""
    job = file.job
    container, template = job.container, job.template
    around = () if container is None else inside(container, file, site, run)
    if job.starts_once and job.command is not None:
        return tuple(line for line in (around, job.command) if line)
    python = file.python if container is None else container.python
    if job.command is None:
        program: tuple[str, ...] = process_words("worker", str(run.path))
        if template is not Template.TORCHRUN:
            program = (python, "-u", *program)
    else:
        program = job.command
        if template is Template.TORCHRUN:
            python, program = _script(job.command, python)
    lines = [("srun", "--kill-on-bad-exit=1", "--unbuffered", *file.srun_options)]
    if container is not None:
        lines.append(step_options(container, file, site, run))
    torchrun = template is Template.TORCHRUN
    if torchrun or around:
        # Outside of a container, but for one that srun itself has put the task into.
        own = file.python if around or container is None else container.python
        lines.append((own, *process_words("shield", *_passes(file)), "--"))
    lines.append(around)
    if torchrun:
        lines.append((python, "-m", _TORCHRUN, f"--nproc-per-node={job.resources.tasks_per_node}"))
        lines.append(_RENDEZVOUS_ARGS)
    return tuple(line for line in (*lines, program) if line)


def _passes(file: RunFile) -> tuple[str, ...]:
    """What the shield passes on: ranks of ours hear of signals over their channel."""
    if file.job.command is None:
        return ()
    return (f"--pass={forwarding(file.job.program, ('srun',)).signal}",)


def _script(command: tuple[str, ...], python: str) -> tuple[str, tuple[str, ...]]:
    """The interpreter for torchrun, and the script with its words as torchrun takes them."""
    first, rest = command[0], command[1:]
    if first.endswith(".py"):
        return python, command
    if PurePath(first).name.startswith("python") and rest:
        while rest[:1] == ("-u",):  # torchrun adds it
            rest = rest[1:]
        if rest and (rest[0] == "-m" or not rest[0].startswith("-")):
            return first, rest
    return python, ("--no-python", *command)
