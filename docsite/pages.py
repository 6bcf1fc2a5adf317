"""The generated pages, and the generated parts of pages that people write.

python -m docsite.pages            write what is not current
python -m docsite.pages --check    exit status 1 where something is not
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from docsite.causes import about_cause, all_causes, page_of
from docsite.events import journal
from docsite.keys import keys_of_model
from docsite.packages import packages
from docsite.variables import variables
from docsite.verbs import command_line
from slurm_forge.site.model import Site
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.cause import Cause

__all__ = ["DOCS", "Page", "missing", "pages", "title_of"]

DOCS = Path(__file__).resolve().parent.parent / "docs"
_NOTE = "<!-- Made by scripts/reference: change the code that it is made of. -->"
_BEGIN = "<!-- scripts/reference: {} -->"
_END = "<!-- end -->"
_HEADING = re.compile(r"^# (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Page:
    """A page below ``docs/`` as it has to be."""

    name: str
    text: str

    def is_current(self, docs: Path) -> bool:
        """Whether it is so on disk."""
        file = docs / self.name
        return file.is_file() and file.read_text(encoding="utf-8") == self.text


def pages(docs: Path = DOCS) -> Iterator[Page]:
    """Every page that is generated, or has a part that is; read from and compared with ``docs``.

    ``LookupError`` where a page that people write is not there, or has no mark.
    """
    yield _reference(
        "job-file",
        "The job file",
        "Every key that a job file may have. Unknown keys and wrong types are errors that name the "
        "line and the nearest valid key. Only `name`, and `entry` or `command`, are required.",
        keys_of_model(JobSpec, "At the top"),
    )
    yield _reference(
        "site-file",
        "The site file",
        "Every key of a file in `site_configs/` (or in `~/.config/slurm_forge/sites`). Unknown "
        "facts are omitted.",
        keys_of_model(Site, "At the top"),
    )
    yield _reference(
        "command-line",
        "The command line",
        "Exit status: 0 success, 1 the run did not finish (or `watch` has news, or a checkpoint is "
        "damaged), 2 the command could not be carried out, 130 interrupted. "
        "`slurm-forge --install-completion` enables completion of commands, runs and sites.",
        command_line(),
    )
    yield _reference(
        "journal",
        "The journal",
        "The events in `runs/<name>/journal/*.jsonl`: one JSON object per line. Times are "
        "seconds since the epoch, durations seconds, steps optimizer steps done.",
        journal(),
    )
    yield _reference(
        "environment-variables",
        "Environment variables",
        "The variables of slurm_forge itself. Variables of the job are `env:` in the job file.",
        variables(),
    )
    yield _reference(
        "packages",
        "The packages",
        "What lives in each package of `slurm_forge/`, who calls it, and the module to begin at. A "
        "package imports only lower layers. [Architecture](../architecture.md) says where to find "
        "and add things.",
        packages(),
    )
    for cause in Cause:
        yield _filled(docs, page_of(cause), {"policy": about_cause(cause)})
    titles = {cause: title_of(docs / page_of(cause)) for cause in Cause}
    yield _filled(docs, "causes/index.md", {"causes": all_causes(titles)})


def missing(docs: Path = DOCS) -> list[str]:
    """Causes that have no page yet."""
    return [page_of(cause) for cause in Cause if not (docs / page_of(cause)).is_file()]


def title_of(file: Path) -> str:
    """The first heading of a page; ``LookupError`` where it has none."""
    found = _HEADING.search(file.read_text(encoding="utf-8"))
    if found is None:
        raise LookupError(f"{file} has no heading: begin it with one, # Like this")
    return found[1].strip()


def _reference(name: str, title: str, said: str, lines: Iterable[str]) -> Page:
    text = "\n".join([_NOTE, "", f"# {title}", "", said, "", *lines])
    return Page(f"reference/{name}.md", text.rstrip() + "\n")


def _filled(docs: Path, name: str, parts: Mapping[str, list[str]]) -> Page:
    """The page as it is, with what stands between its marks made anew."""
    file = docs / name
    if not file.is_file():
        raise LookupError(f"docs/{name} is not there: write it, see docs/causes/preempted.md")
    text = file.read_text(encoding="utf-8")
    for part, lines in parts.items():
        begin = _BEGIN.format(part)
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(_END)
        if not (found and closed):
            raise LookupError(f"docs/{name}: there is no {begin} … {_END}")
        text = "\n".join([f"{before}{begin}", "", *lines, "", f"{_END}{after}"])
    return Page(name, text)


def main() -> None:
    """Write, or with ``--check`` only look."""
    parser = argparse.ArgumentParser(prog="scripts/reference", description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    try:
        old = [page for page in pages() if not page.is_current(DOCS)]
    except LookupError as error:
        sys.exit(f"scripts/reference: {error.args[0]}")
    for page in old:
        if not check:
            (DOCS / page.name).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / page.name).write_text(page.text, encoding="utf-8")
        print(f"docs/{page.name} {'is not current' if check else 'written'}")
    if check and old:
        sys.exit("Run scripts/reference.")


if __name__ == "__main__":
    main()
