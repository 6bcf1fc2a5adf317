"""One name, one thing: a person who looks for a class or a module finds one place."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "slurm_forge"
MOST_MODULES = 21
CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)


def modules() -> list[Path]:
    """All of the package but what is copied into a user's folder."""
    return [path for path in PACKAGE.rglob("*.py") if "starters" not in path.parts]


def test_no_class_name_stands_twice() -> None:
    texts = (path.read_text() for path in modules())
    names = Counter(name for text in texts for name in CLASS.findall(text))
    twice = {name for name, times in names.items() if times > 1}
    assert twice == set(), "find a name that says what tells it from the other one"


def test_no_module_name_stands_more_than_twice() -> None:
    names = Counter(path.stem for path in modules())
    often = {name for name, times in names.items() if times > 2}
    assert often <= {"__init__", "__main__", "main"}


def test_no_folder_is_too_full_to_be_read() -> None:
    sizes = Counter(path.parent.relative_to(PACKAGE) for path in modules())
    assert [folder for folder, size in sizes.items() if size > MOST_MODULES] == []
