"""What is handed to sbatch at every site, kept in files that a person can read and check.

``sites/<site>.txt`` has the options of the usual job on one node and what the rules say of it,
then, of every other size and template, only what differs; and what the script does beyond that of
the generic site.  ``scripts/`` has some scripts whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from tests.rendered.scripts import Kind, Rendered, rendered
from tests.unit.site.asked import ASKED, NODES

#: Where the scripts of all templates, and of some, are kept whole.
_EVERY, _SOME = "generic", {"lumi_g": (Kind.SRUN, Kind.APPTAINER)}


def rendered_files() -> dict[str, str]:
    """The files and their texts, as they are to be now."""
    files = {f"sites/{name}.txt": golden(name) for name in ASKED}
    for name, kinds in {_EVERY: tuple(Kind), **_SOME}.items():
        for kind in kinds:
            files[f"scripts/{name}-{kind.value}.sbatch"] = rendered(name, kind, 2).text
    return files


def golden(name: str) -> str:
    """All templates and sizes at one site."""
    first = rendered(name, Kind.SRUN, NODES[0])
    asked = {each: tuple(_differences(_asked(first), _asked(each))) for each in _all(name)}
    script = {
        each: tuple(_differences(rendered(_EVERY, each.kind, each.nodes).body, each.body))
        for each in _all(name)
    }
    parts = [["# srun 1: what sbatch is asked for, and what the rules say", *_asked(first)]]
    parts += [[f"# {where}", *lines] for lines, where in _grouped(asked) if lines]
    for lines, where in _grouped(script):
        if lines:
            parts.append([f"# the script, beside that of {_EVERY}: {where}", *lines])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _all(name: str) -> Iterator[Rendered]:
    for nodes in NODES:
        for kind in Kind:
            yield rendered(name, kind, nodes)


def _asked(script: Rendered) -> list[str]:
    told = [f"{each.severity.value}: {each.message}" for each in script.told]
    return [*script.options, *told]


def _grouped(
    found: Mapping[Rendered, tuple[str, ...]],
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each text once, and the templates and sizes that have it: ``srun 2, pyxis 2``."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for each, lines in found.items():
        groups.setdefault(lines, []).append(f"{each.kind.value} {each.nodes}")
    for lines, where in groups.items():
        yield lines, "all" if len(where) == len(found) else ", ".join(where)


def _differences(old: Sequence[str], new: Sequence[str]) -> list[str]:
    lines = []
    for what, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if what != "equal":
            lines += [*(f"- {each}" for each in old[a:b]), *(f"+ {each}" for each in new[c:d])]
    return lines
