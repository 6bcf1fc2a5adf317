"""One name, one thing: a person who looks for a class or a module finds one place."""

from __future__ import annotations

import ast
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
    # What every trainer's callback is called; the module is called after the trainer.
    assert twice == {"ForgeCallback"}, "find a name that says what tells it from the other one"


def test_no_module_name_stands_more_than_twice() -> None:
    names = Counter(path.stem for path in modules())
    often = {name for name, times in names.items() if times > 2}
    assert often <= {"__init__", "__main__", "main"}


def test_no_folder_is_too_full_to_be_read() -> None:
    sizes = Counter(path.parent.relative_to(PACKAGE) for path in modules())
    assert [folder for folder, size in sizes.items() if size > MOST_MODULES] == []


#: A module of one kind of device, or a question about one kind.
ONE_KIND = re.compile(r"torch\.(cuda|xpu)\b|\bis_(cuda|xpu)\b|\btype [!=]= \"(cuda|xpu)\"")


def test_only_the_package_of_devices_knows_their_kinds() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in modules()
        if path.relative_to(PACKAGE).parts[0] != "device"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if ONE_KIND.search(line)
    ]
    assert found == [], "ask slurm_forge.device"


#: Names in Slurm, the kernel, submitit and trackers, and keys of job files.
FOREIGN = {
    "TCP_LISTEN", "INET_DIAG_INFO", "RTM_NEWADDR", "__getitems__", "torch.randperm",
    "numpy.random.Generator.permutation", "_task_finish", "_handle_signal_container",
    "get_argument", "job_reason_string", "start_controller", "slurm_x", "forge_x",
    "define_metric", "register_for_checkpointing", "global_step", "DumpPipe", "launch.master",
    "env.always.NCCL_DEBUG", "_new_process_group_helper", "clip_by_global_norm",
}  # fmt: skip
NAME = re.compile(r"``([A-Za-z_]\w*(?:\.\w+)*)(\(\))?``")


def test_names_in_docstrings_and_comments_exist() -> None:
    """A rename takes along what is written about the thing, or a reader searches in vain."""
    identifiers: set[str] = set()
    members: dict[str, set[str]] = {}
    for path in modules():
        in_module = identifiers_of(ast.parse(path.read_text()))
        identifiers |= in_module | {path.stem}
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        for dotted in (".".join(parts[start:]) for start in range(len(parts))):
            members[dotted] = members.get(dotted, set()) | in_module
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    packages = {".".join(path.relative_to(PACKAGE).parent.parts) for path in modules()}

    def exists(word: str) -> bool:
        owner, _, name = word.rpartition(".")
        if owner and word.partition(".")[0] in rooms:
            return word in members or word in packages or name in members.get(owner, ())
        return identifiers.issuperset(word.split("."))

    stale = {
        f"{path.relative_to(PACKAGE)}: {word}"
        for path in modules()
        for word, call in NAME.findall(path.read_text())
        if call or "." in word or "_" in word or re.match("[A-Z].*[a-z]", word)
        if word not in FOREIGN and not exists(word)
    }
    assert not stale, "\n".join(sorted(stale))


def identifiers_of(tree: ast.AST) -> set[str]:
    """Names in the code, and words of its strings; not those of docstrings."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            names.update(str(getattr(node, field, None) or "").split("."))
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            names.update(re.findall(r"\w+", str(node.value)))
    return names
