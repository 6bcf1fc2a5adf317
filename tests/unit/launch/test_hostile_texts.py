"""Hostile texts in every field: a part of what ``scripts/fuzz-templates`` tries."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_forge.spec.run_file import RunFile
from tests.rendered.bench import Bench
from tests.rendered.fuzz import FIELDS, STARTS, Fuzzed, Tally, cases, rendered_case, verdict

#: Of these no text that is hostile is taken: they are names, numbers, durations and the like.
CLOSED = frozenset(
    {
        "template", "chain", "seed", "program.notify", "lead", "entry", "resources.mem",
        "resources.time",
        "resources.nodes", "resources.gpus_per_node", "resources.gpus_per_task", "container.python",
        "site.sbatch_options", "site.srun_options", "program.resume_arg", "site.name",
        "container.mounts",
    }
)  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("count", [200, pytest.param(600, marks=pytest.mark.slow)])
def test_they_are_refused_or_do_nothing(bench: Bench, count: int) -> None:
    tally = Tally()
    for case in cases(seed=7, count=count):
        tally.add(case, bench)
    assert tally.wrong == []
    assert tally.texts == count
    assert tally.started > count / 10, "hardly anything was rendered and run"
    tried = {*tally.refused, *tally.rendered}
    assert tried == set(FIELDS)


def test_each_field_reaches_a_script() -> None:
    """With a text that it takes; else its row in the table tries nothing."""
    chance = random.Random(1)
    for name in FIELDS:
        if name not in CLOSED:
            start = "srun" if not name.startswith(("command", "container")) else "exec"
            start = "apptainer" if name.startswith(("container", "site.containers")) else start
            found = Fuzzed(start, ((name, f"plain{chance.randint(10, 99)}"),))
            assert rendered_case(found.draft()).text, name


@pytest.mark.parametrize("start", STARTS)
def test_each_way_of_starting_runs(start: str, bench: Bench) -> None:
    assert verdict(Fuzzed(start, ()), bench) == "started"


def _spoiled(change: Callable[[str], str], bench: Bench) -> str:
    made = rendered_case(Fuzzed("srun", (("site.modules", "cuda"),)).draft(), bench.base)
    file: RunFile = made.file
    return bench.run(change(made.text), made.words, file, made.run)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("forge_exec", "touch owned\nforge_exec", 1), "commands"),
        (lambda text: text.replace("forge_exec", "> owned\nforge_exec", 1), "files"),
        (lambda text: text.replace("--via sbatch", "--via other"), "other words"),
        (lambda text: text.replace("module load cuda", "module load cuda; module load x"), "other"),
        (
            lambda text: text.replace("forge_exec", "forge_starting=; exit 0; forge_exec"),
            "did not start",
        ),
    ],
)
def test_what_goes_wrong_would_be_seen(
    change: Callable[[str], str], told: str, bench: Bench
) -> None:
    assert _spoiled(lambda text: text, bench) == "started"
    assert _spoiled(change, bench).startswith(told)
