"""The reference of the command line: every verb with its options and examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from docsite.tables import code, default_words, table
from slurm_forge.cli.examples import examples_of, without_examples
from slurm_forge.cli.main import application

__all__ = ["command_line", "verbs"]


def command_line() -> list[str]:
    """One section per verb, in the order of ``--help``."""
    lines = []
    for name, command in verbs():
        lines += [f"## slurm-forge {name}", "", *_section(name, command), ""]
    return lines[:-1]


def verbs() -> Iterator[tuple[str, Any]]:
    """Every verb and its command, those of groups by both words."""
    yield from _below(typer.main.get_command(application()), ())


def _below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, found in command.commands.items():
        if getattr(found, "hidden", False):
            continue
        if hasattr(found, "commands"):
            yield from _below(found, (*path, name))
        else:
            yield " ".join((*path, name)), found


def _section(name: str, command: Any) -> Iterator[str]:
    context = typer.Context(command)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [
        each for each in command.params if each.param_type_name != "argument" and not each.hidden
    ]
    words = [_usage(each) for each in arguments]
    yield "```"
    yield " ".join(["slurm-forge", name, "[OPTIONS]", *words])
    yield "```"
    yield ""
    yield from _text(without_examples(command.help))
    examples = examples_of(command.help)
    if examples:
        yield from ("", "```", *examples, "```")
    rows = [(code(_usage(each)), each.help or "", _default(each)) for each in arguments]
    rows += [(_names(each, context), each.help or "", _default(each)) for each in options]
    yield ""
    yield from table(("argument, option", "description", "default"), rows)


def _text(text: str) -> Iterator[str]:
    """Paragraphs; lines that begin with a dash are a list."""
    for line in text.splitlines():
        found = re.match(r"(--\S+ \S+) {2,}(.*)", line)
        yield f"* `{found[1]}`: {found[2]}" if found else line


def _usage(parameter: Any) -> str:
    word = parameter.metavar or parameter.name.upper()
    return word if parameter.required else f"[{word}]"


def _names(option: Any, context: Any) -> str:
    names, _ = option.get_help_record(context)
    return code(str(names))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if callable(value) or value in (None, False, ()) or type(value).__name__ == "Sentinel":
        return default_words(None)
    return default_words(str(getattr(value, "value", value)))
