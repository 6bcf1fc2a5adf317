"""The reference of the environment: which variables are ours, and what they say."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from docsite.tables import code, paragraph, table
from slurm_forge.knobs import Knobs

__all__ = ["variables"]

#: What a person sets; everything else is handed from process to process.
_PEOPLE = {
    "site": "Name or file of the site, as `--site`; above `site:` of settings.",
    "runs": "Folder of runs, as `--runs`; else `runs:` of settings, else `./runs`.",
    "nodes": "Folder of the node ledger, or `off` (docs/how-to/nodes.md).",
    "config_home": "Where your settings and site files are (XDG): the folder `slurm_forge` in it; "
    "else `~/.config`.",
    "state_home": "Folder for the state of your programs (XDG); else `~/.local/state`.",
}


def variables() -> list[str]:
    """Those that a person sets, and those that our own processes hear."""
    named = _named()
    said = _said()
    ours = [field for field in named if field not in _PEOPLE]
    rows = [(code(named[field]), text) for field, text in _PEOPLE.items() if field in named]
    lines = ["## Variables that you set", "", *table(("variable", "what"), rows), ""]
    rows = [(code(named[field]), said.get(field, "")) for field in ours]
    lines += [
        "## Set by slurm_forge for the processes that it starts",
        "",
        "Programs may read them (under `exec`: `SLURM_FORGE_LATEST`, `SLURM_FORGE_RESTARTS`).",
        "",
        *table(("variable", "what"), rows),
    ]
    return lines


def _named() -> dict[str, str]:
    """The variable of every field, found by setting it."""
    plain = set(Knobs().to_environ().items())
    found = {}
    for field in dataclasses.fields(Knobs):
        value: Any = {"int": 7, "float": 7.5, "bool": True}.get(str(field.type).split()[0], "seven")
        changed = set(dataclasses.replace(Knobs(), **{field.name: value}).to_environ().items())
        names = [name for name, _ in changed - plain]
        if len(names) == 1:
            found[field.name] = names[0]
    return found


def _said() -> dict[str, str]:
    """The part of the docstring of ``Knobs`` about each field; a field may have none."""
    text = " ".join(inspect.cleandoc(Knobs.__doc__ or "").splitlines()[1:])
    fields = {field.name for field in dataclasses.fields(Knobs)}
    found = {}
    for part in re.split(r"(?:; |\. +|, (?=``\w+`` (?:the|how)))", text):
        subject = re.match(r"\s*((?:``\w+``(?: and |, )?)+)", part)
        for name in re.findall(r"``(\w+)``", subject[1]) if subject else ():
            if name in fields:
                said = paragraph(part).rstrip(".")
                said = re.sub(r"^(`\w+`(, | and )?)+:? ?(is|are)? ?", "", said)
                found[name] = f"{said[:1].upper()}{said[1:]}."
    return found
