"""Every example in the help is a command line that can be typed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from slurm_forge.cli.examples import examples_of, without_examples, words_for_us
from slurm_forge.cli.main import application

#: Verbs with a single example are fine elsewhere; these have shown more than one way.
SEVERAL = {
    "init", "submit", "render", "run", "exec", "status", "explain", "watch", "requeue",
    "reconcile", "stop", "save", "export", "checkpoints list", "checkpoints verify",
    "checkpoints promote", "checkpoints suspect", "checkpoints prune", "nodes list",
    "nodes release", "nodes strike", "policy test", "probe", "sites list", "sites show",
    "config show", "config schema",
}  # fmt: skip
ROOT = typer.main.get_command(application())


def verbs(command=ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    for name, below in getattr(command, "commands", {}).items():
        if hasattr(below, "commands"):
            yield from verbs(below, (*path, name))
        else:
            yield " ".join((*path, name)), below


VERBS = dict(verbs())
#: The same verb in two places, whose examples show the shorter one.
NAMES = {"checkpoints export": "export"}


def parse(words: list[str]) -> str:
    """The verb that would be run; fails as the command line would."""
    context = ROOT.make_context("slurm-forge", list(words))
    command, path = ROOT, []
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        path.append(name)
        context = command.make_context(name, rest, parent=context)
    return " ".join(path)


def test_no_verb_was_lost() -> None:
    assert set(VERBS) >= SEVERAL


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_can_be_typed(verb: str) -> None:
    examples = examples_of(VERBS[verb].help)
    assert len(examples) >= (2 if verb in SEVERAL else 1)
    for line in examples:
        words = words_for_us(line)
        assert words is not None, line
        assert parse(words) == NAMES.get(verb, verb), f"{line}: an example of something else"


@pytest.mark.parametrize("line", ["slurm-forge status --folow x", "slurm-forge policy test a.yaml"])
def test_a_wrong_line_does_not_pass(line: str) -> None:
    with pytest.raises(Exception, match=r"--folow|cause"):
        parse(words_for_us(line))


def test_examples_are_found_beside_and_below() -> None:
    text = "Do it.\n\nExample:  slurm-forge a\n\n\b\nExamples:\n  slurm-forge b | sbatch\n\nEnd."
    assert examples_of(text) == ("slurm-forge a", "slurm-forge b | sbatch")
    assert without_examples(text).split() == ["Do", "it.", "End."]
    assert words_for_us("X=1 slurm-forge render a.yaml | sbatch") == ["render", "a.yaml"]
    assert words_for_us("sbatch job.sbatch") is None
