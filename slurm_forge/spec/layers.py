"""A job from several files and the command line: user < project < job file < ``--set``.

The user's file is ``config.yaml`` in their configuration folder.  A project's is
``slurm_forge.yaml`` beside the job file, or in a folder above it as far as the git working tree
reaches.  Nothing is taken from the current folder, and nothing that others can write.  They may say
what a job file may say, but for what makes a job that very job, and they name the site and the
folder of runs.

``combined`` is pure; ``layered_job`` and ``user_setting`` read the files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from slurm_forge.documents import (
    DEFAULT,
    Document,
    KeyPath,
    Mistake,
    SourcePlace,
    build,
    did_you_mean,
    dotted,
    error_of,
    leading,
    load_value,
    merged,
    mistakes,
    paths_in,
    read,
    with_value,
    without,
)
from slurm_forge.documents.reading import MAX_DEPTH
from slurm_forge.documents.writing import shorten
from slurm_forge.errors import ConfigError
from slurm_forge.knobs import Knobs
from slurm_forge.spec.job import JobSpec
from slurm_forge.spec.loading import to_mapping
from slurm_forge.spec.types import JobSection

#: What only a job file (or the command line) says.
OF_THE_JOB = ("name", "entry", "command", "args", "inject", "sweep")
_PLACES = ("site", "runs")
#: What ``slurm-forge exec`` reads of a job; the rest is up to the user's batch script.
_OF_COMMANDS = ("recovery", "notify", "lead", "report")
#: Of a value that is longer nobody wants to read how it is quoted.
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Layer:
    """A file below the job file; ``folder`` is its folder, ``own`` whether it is the user's."""

    document: Document
    folder: Path
    own: bool = False


@dataclass(frozen=True, slots=True)
class PlaceSetting:
    """Which site or which folder of runs a file names (paths from ``/`` on), and where."""

    value: str
    place: SourcePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Layered:
    """A job, and where each of its values comes from.

    ``document`` holds what was written, in all files and options, with its places.  ``files`` are
    the files that were read, lowest first, as people call them.
    """

    job: JobSpec
    document: Document
    files: tuple[str, ...]
    site: PlaceSetting | None = None
    runs: PlaceSetting | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One ``--set KEY=VALUE``."""

    path: KeyPath
    value: Any
    source: str

    @classmethod
    def parsed(cls, text: str) -> Setting:
        """From what was typed; ``ConfigError`` for what is no key, or no value in strict YAML."""
        source = f"--set {shorten(text)}"
        path, rest = leading(text)
        if not path or isinstance(path[0], int) or not rest.startswith("="):
            raise ConfigError(
                "expected a key, = and a value",
                path=source,
                next_step="Write it like --set recovery.cuda_oom.times=2; a part of a key that is "
                "not a plain word is written in brackets and quotes: 'args[\"a.b\"]=1'.",
            )
        if len(path) > MAX_DEPTH:
            raise ConfigError(
                f"a key of more than {MAX_DEPTH} parts",
                path=source,
                next_step="Set the mapping around it as a whole: --set KEY='{a: 1}'.",
            )
        try:
            return cls(path, load_value(rest[1:], path), source)
        except ConfigError as error:
            raise ConfigError(
                error.message,
                path=source,
                next_step=_how_to_quote(path, rest[1:]) if "quote" in error.message else "",
            ) from None


class _Places(JobSection):
    """What the files below a job file say besides the keys of a job."""

    site: str | None = Field(
        default=None, strict=True, description="Site, or the path of its file."
    )
    runs: str | None = Field(default=None, strict=True, description="Folder that holds the runs.")


def combined(
    shared: Sequence[Layer], job: Document | None, settings: Sequence[str] = ()
) -> Layered:
    """The job of a job file (or none) over ``shared``, lowest first, and under the settings.

    One ``ConfigError`` names all mistakes, each by the file and line, or the option, that it stands
    in: also those of values that a higher layer replaces.
    """
    overrides = [Setting.parsed(text) for text in settings]
    problems = [mistake for layer in shared for mistake in _of_shared(layer)]
    layers = [_keys_of_jobs(each.document) for each in shared]
    if job is None:
        layers.append(_nameless(layers, overrides))
    else:
        problems += _places_in_a_job(job)
        layers.append(without(job, *_PLACES))
    whole = merged(*layers)
    for setting in overrides:
        whole = _with(whole, setting)
    spec = build(JobSpec, whole, besides=problems)
    places = {key: value for layer in shared for key, value in place_settings(layer).items()}
    read = [*(layer.document for layer in shared), *([] if job is None else [job])]
    return Layered(
        job=spec,
        document=whole,
        files=tuple(each.path for each in read if each.path is not None),
        site=places.get("site"),
        runs=places.get("runs"),
    )


def place_settings(layer: Layer) -> dict[str, PlaceSetting]:
    """The site and the folder of runs that a file names; ``ConfigError`` where they can't be."""
    wrong = _of_places(layer)
    if wrong:
        raise error_of(wrong)
    places = {key: layer.document.data.get(key) for key in _PLACES}
    return {
        key: PlaceSetting(_from_folder(key, value, layer.folder), layer.document.place_of((key,)))
        for key, value in places.items()
        if value is not None
    }


def _of_shared(layer: Layer) -> Iterator[Mistake]:
    document = layer.document
    for key in OF_THE_JOB:
        if key in document.data:
            text = f"{key}: only a job file or --set may have this key; remove it here"
            yield Mistake(text, document.place_of((key,)))
    known = [*_PLACES, *(key for key in JobSpec.model_fields if key not in OF_THE_JOB)]
    for key in document.data:
        if key not in (*known, *OF_THE_JOB):
            text = f"{dotted((key,))}: unknown key {did_you_mean(key, known, JobSpec.known_as)}"
            yield Mistake(text, document.place_of((key,)))
    yield from _of_places(layer)
    rest = _keys_of_jobs(document)
    # Values that a job file replaces are looked at as well: another job would trip over them.
    named = replace(rest, data={**rest.data, "name": "x"})
    yield from mistakes(JobSpec, named, by_itself=False)


def _keys_of_jobs(document: Document) -> Document:
    """What of a file below the job file is laid under it."""
    fits = set(JobSpec.model_fields) - set(OF_THE_JOB)
    return without(document, *(key for key in document.data if key not in fits))


def _of_places(layer: Layer) -> tuple[Mistake, ...]:
    document = layer.document
    places = {key: document.data[key] for key in _PLACES if key in document.data}
    problems = mistakes(_Places, replace(document, data=places))
    return problems or tuple(
        Mistake(f"{key}: {text}", document.place_of((key,)))
        for key, value in places.items()
        if value is not None and (text := _no_place(key, value, layer))
    )


def _no_place(key: str, value: str, layer: Layer) -> str:
    """Why a site or a folder can't be named so; empty where it can."""
    if not value:
        return "is empty; leave the key out"
    if not value.isprintable():
        return "must be one line of printable text"
    if "$" in value:
        variable = {"site": "SLURM_FORGE_SITE", "runs": "SLURM_FORGE_RUNS"}[key]
        return f"variables are not expanded here; write the path, or set {variable} in your shell"
    try:
        path = Path(value).expanduser()
        homeless = value.startswith("~") and not path.is_absolute()
    except RuntimeError:
        homeless = True
    if homeless:
        return f'there is no home folder for "{shorten(value)}"; write the path from / on'
    if key == "runs" and layer.own and not path.is_absolute():
        return "a folder for all jobs must begin with / or ~"
    return ""


def _from_folder(key: str, value: str, folder: Path) -> str:
    """A path is one from the folder of the file that names it; a site's name stays as it is."""
    if key == "site" and not ("/" in value or value.endswith(".yaml")):
        return value
    return str(folder / Path(value).expanduser())


def _places_in_a_job(job: Document) -> Iterator[Mistake]:
    for key in _PLACES:
        if key in job.data:
            text = (
                f"{key}: not a key of a job file; give it as --{key}, or write it into "
                "slurm_forge.yaml or your own config.yaml"
            )
            yield Mistake(text, job.place_of((key,)))


def _nameless(layers: Sequence[Document], settings: Sequence[Setting]) -> Document:
    """What every job has to say, where there is no job file."""
    keys = {key for layer in layers for key in layer.data} | {each.path[0] for each in settings}
    runs: dict[str, Any] = {"entry": "x:x"}
    if keys & {"program", "command"}:
        runs = {"command": ["x"]}
    data = {"name": "x", **runs}
    return Document(data, sources=dict.fromkeys(paths_in(data), DEFAULT))


def _with(document: Document, setting: Setting) -> Document:
    if setting.path[0] in _PLACES:
        raise ConfigError(
            f"{setting.path[0]}: not a key of a job",
            path=setting.source,
            next_step=f"Give it as a separate option: --{setting.path[0]}.",
        )
    try:
        return with_value(document, setting.path, setting.value, setting.source, default_values())
    except ValueError as error:
        raise ConfigError(
            str(error),
            path=setting.source,
            next_step="To see what can be set: slurm-forge config show JOB.yaml",
        ) from None


@cache
def default_values() -> Mapping[str, Any]:
    """What a job is that says nothing, of each rung only what it has to say."""
    plain = JobSpec(name="x", entry="x:x")
    recovery = plain.recovery
    ladders = {
        key: [rung.model_dump(mode="json", exclude_unset=True) for rung in getattr(recovery, key)]
        for key in type(recovery).model_fields
        if isinstance(getattr(recovery, key), tuple)
    }
    dumped = plain.model_dump(mode="json")
    return {**dumped, "recovery": {**dumped["recovery"], **ladders}}


def _how_to_quote(path: KeyPath, value: str) -> str:
    if value[:1] in ("[", "{", '"', "'"):
        return "In a shell, single quotes around all of it keep those of the value."
    if len(value) > _SHOWN:
        return "In a shell the quotes need some of their own: single ones around all of it."
    quoted = shlex.quote(f'{dotted(path)}="{value}"')
    return f"In a shell the quotes need some of their own: --set {quoted}"


def settings_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the user's and the project's files, for editors."""
    schema = JobSpec.model_json_schema()
    places = _Places.model_json_schema()["properties"]
    keys = {key: each for key, each in schema["properties"].items() if key not in OF_THE_JOB}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **{key: value for key, value in schema.items() if key != "required"},
        "title": "Settings",
        "description": "Keys of a job file that hold for all jobs of a user or a project.",
        "properties": {**places, **keys},
    }


PROJECT_FILE = "slurm_forge.yaml"


def project_file(folder: Path) -> Path | None:
    """The nearest ``slurm_forge.yaml`` for job files in ``folder``, or None.

    Looked for up to the top of the git working tree; outside of one, in the folder alone.
    """
    # Not resolve(), which trips over links that lead in a circle: reading the job says so.
    here = Path(os.path.realpath(folder))
    above = (here, *here.parents)
    top = next((each for each in above if os.path.lexists(each / ".git")), here)
    for each in above:
        candidate = each / PROJECT_FILE
        if os.path.lexists(candidate):
            return candidate
        if each == top:
            return None
    return None


def layered_job(job: Path | None, knobs: Knobs, settings: Sequence[str] = ()) -> Layered:
    """The job of a file, over the project's and the user's settings, under those of ``--set``.

    Without a file it is a job that says nothing but what every one has to.  ``ConfigError`` names
    each mistake by the file (or option) that it stands in, ``UnsafeFileError`` a file of settings
    that others can write.
    """
    return combined(
        tuple(_shared(job, knobs)), None if job is None else read(job), settings=settings
    )


def command_settings(job: Path | None, knobs: Knobs) -> Document:
    """The settings that apply to a command started by ``slurm-forge exec``.

    Args:
        job: The job file, whose project's settings override the user's.
        knobs: Where the user's settings are.

    Returns:
        The merged settings; empty if there are none.

    Raises:
        ConfigError: A file has mistakes; each is named with its line.
        UnsafeFileError: Others can write to a file.
    """
    layers = [each for each in _shared(job, knobs) if each.own or job is not None]
    problems = [mistake for layer in layers for mistake in _of_shared(layer)]
    if problems:
        raise error_of(problems)
    rest = set(JobSpec.model_fields).union(_PLACES) - set(_OF_COMMANDS)
    return merged(Document({}, None), *(without(each.document, *rest) for each in layers))


def with_settings(job: JobSpec, settings: Sequence[str], name: str | None = None) -> Layered:
    """The job of a run that exists, under those of ``--set``; nothing is read.

    ``name`` is that of ``--name``, where the job is for another run.  ``ConfigError`` as for
    ``combined``.
    """
    data = to_mapping(job)
    sources = dict.fromkeys(paths_in(data), "run.yaml")
    if name is not None:
        data["name"] = name
        sources["name",] = "--name"
    whole = Document(data, "run.yaml", sources=sources)
    for setting in map(Setting.parsed, settings):
        if name is not None and setting.path == ("name",):
            raise ConfigError(
                f"the new run is {name} by --name", path=setting.source, next_step="Leave it out."
            )
        whole = _with(whole, setting)
    return Layered(job=build(JobSpec, whole), document=whole, files=("run.yaml",))


def user_setting(knobs: Knobs, key: str) -> PlaceSetting | None:
    """What the user's own file says of ``site`` or ``runs``."""
    path = knobs.settings_file
    if not os.path.lexists(path):
        return None
    return place_settings(_layer(path, own=True)).get(key)


def shown(path: Path) -> str:
    """A path as short as it can be typed here: from the current folder, from ``~``, or whole."""
    with contextlib.suppress(OSError, RuntimeError):
        if path.is_relative_to(Path.cwd()):
            return str(path.relative_to(Path.cwd()))
        if path.is_relative_to(Path.home()):
            return f"~/{path.relative_to(Path.home())}"
    return str(path)


def _shared(job: Path | None, knobs: Knobs) -> Iterator[Layer]:
    """The files below the job file, lowest first."""
    own = knobs.settings_file
    if os.path.lexists(own):
        yield _layer(own, own=True)
    beside = Path() if job is None else job.parent
    itself = None if job is None else Path(os.path.realpath(beside)) / job.name
    project = project_file(beside)
    if project is not None and project != itself:
        yield _layer(project, own=False)


def _layer(path: Path, *, own: bool) -> Layer:
    return Layer(
        read(path, trusted=True, of_group=not own, shown=shown(path), may_be_empty=True),
        path.parent,
        own=own,
    )
