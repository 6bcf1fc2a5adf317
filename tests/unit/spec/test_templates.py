"""Words with fields: split once, filled in without ever leaving their word."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.spec.templates import Placeholder, check_template, fields_of, fill

EVERYTHING = {field: f"<{field.value}>" for field in Placeholder}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--resume {latest}", ("--resume", "<latest>")),
        ("--resume={latest} --n {restarts}", ("--resume=<latest>", "--n", "<restarts>")),
        ("'a b' {attempt}.{launch}", ("a b", "<attempt>.<launch>")),
        ("model.ckpt={{x}} {run_dir}/log", ("model.ckpt={x}", "<run_dir>/log")),
        ("$HOME `id` ; rm", ("$HOME", "`id`", ";", "rm")),
    ],
)
def test_filled(text: str, words: tuple[str, ...]) -> None:
    assert fill(check_template(text), EVERYTHING) == words


def test_fields() -> None:
    assert fields_of("--resume {latest} {attempt}") == {Placeholder.LATEST, Placeholder.ATTEMPT}
    assert fields_of("--resume {{latest}}") == frozenset()


@given(st.text(min_size=1), st.text())
def test_a_value_stays_in_its_word(value: str, word: str) -> None:
    quoted = shlex.quote(word.replace("{", "{{").replace("}", "}}"))
    values = {**EVERYTHING, Placeholder.LATEST: value}
    assert fill(f"{quoted} --resume={{latest}} end", values) == (word, f"--resume={value}", "end")


@given(st.text())
def test_whatever_is_written_is_a_template_or_told(text: str) -> None:
    try:
        check_template(text)
    except ValueError:
        return
    assert all(isinstance(word, str) for word in fill(text, EVERYTHING))
