"""The generated pages, and the generated parts of pages that people write.

python -m docsite.pages            write what is not current
python -m docsite.pages --check    exit status 1 where something is not
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from docsite.causes import about_cause, all_causes, page_of
from docsite.events import journal
from docsite.keys import keys_of_model
from docsite.variables import variables
from docsite.verbs import command_line
from slurm_forge.site.model import Site
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.cause import Cause

__all__ = ["DOCS", "Page", "first_paragraph", "missing", "pages", "title_of"]

DOCS = Path(__file__).resolve().parent.parent / "docs"
_NOTE = "<!-- Made by scripts/reference: change the code that it is made of. -->"
_BEGIN = "<!-- scripts/reference: {} -->"
_END = "<!-- end -->"
_HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
_FENCES = re.DOTALL | re.MULTILINE


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
        "line and the nearest right key. The smallest one has `name` and `entry`.",
        keys_of_model(JobSpec, "At the top"),
    )
    yield _reference(
        "site-file",
        "The site file",
        "What a file of `site_configs/` (or of `~/.config/slurm_forge/sites`) may say of a "
        "cluster. What is unknown is left out.",
        keys_of_model(Site, "At the top"),
    )
    yield _reference(
        "command-line",
        "The command line",
        "Exit status: 0 it worked, 1 the run did not finish (or `watch` has news, or a checkpoint "
        "is damaged), 2 it could not be done, 130 interrupted. "
        "`slurm-forge --install-completion` teaches your shell the names of verbs, runs and sites.",
        command_line(),
    )
    yield _reference(
        "journal",
        "The journal",
        "What can stand in `runs/<name>/journal/*.jsonl`: one JSON object per line. Times are "
        "seconds since the epoch, durations seconds, steps optimizer steps done.",
        journal(),
    )
    yield _reference(
        "environment-variables",
        "Environment variables",
        "All of slurm_forge's own. Variables of the job are `env:` in the job file.",
        variables(),
    )
    for cause in Cause:
        yield _filled(docs, page_of(cause), {"policy": about_cause(cause)})
    titles = {cause: title_of(docs / page_of(cause)) for cause in Cause}
    yield _filled(docs, "causes/index.md", {"causes": all_causes(titles)})
    yield _filled(docs, "index.md", {"pages": _map(docs)})


def missing(docs: Path = DOCS) -> list[str]:
    """Causes that have no page yet."""
    return [page_of(cause) for cause in Cause if not (docs / page_of(cause)).is_file()]


def title_of(file: Path) -> str:
    """The first heading of a page; ``LookupError`` where it has none."""
    found = _HEADING.search(file.read_text(encoding="utf-8"))
    if found is None:
        raise LookupError(f"{file} has no heading: begin it with one, # Like this")
    return found[1].strip()


def first_paragraph(file: Path) -> str:
    """The first sentence below the heading, as plain words; empty where there is no prose."""
    _, _, text = _HEADING.split(file.read_text(encoding="utf-8"), maxsplit=1)
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=_FENCES)):
        plain = " ".join(block.split())
        if plain and plain[0] not in "<|#*-" and not block.startswith("    "):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
            return re.split(r"(?<=\.) ", plain)[0].rstrip(".:;")
    return ""


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


#: Folders of docs/ that have a list of their own, and what it is called.
_FOLDERS = {
    "tutorials": "Ways in",
    "causes": "When something happens",
    "": "Topics",
    "sites": "Clusters",
    "reference": "Reference",
    "results": "Measured",
}


def _map(docs: Path) -> list[str]:
    """Every page, by folder: what it is called and how it begins."""
    found = sorted(file.relative_to(docs) for file in docs.rglob("*.md"))
    known = {str(file.parent).lstrip(".") for file in found}
    made = {f"reference/{name}.md" for name in _REFERENCE}
    lines = []
    for folder in [*_FOLDERS, *sorted(known - set(_FOLDERS))]:
        below = [file for file in found if str(file.parent).lstrip(".") == folder]
        below = [file for file in below if file != Path("index.md")]
        begins = Counter(first_paragraph(docs / file) for file in below)
        # Of measurements the titles say enough, and of pages that all begin alike.
        said = {words for words, count in begins.items() if count == 1 and folder != "results"}
        rows = [_row(docs, file, said) for file in below]
        if folder == "reference":
            rows = [_REFERENCE_ROW.format(name, _REFERENCE[name]) for name in _REFERENCE]
            rows += [_row(docs, file, said) for file in below if file.as_posix() not in made]
        if rows:
            lines += [f"## {_FOLDERS.get(folder, folder)}", "", *rows, ""]
    return lines[:-1]


#: Listed by what they are, also before they have been written for the first time.
_REFERENCE = {
    "job-file": "The job file",
    "site-file": "The site file",
    "command-line": "The command line",
    "journal": "The journal",
    "environment-variables": "Environment variables",
}
_REFERENCE_ROW = "* [{1}](reference/{0}.md)"


def _row(docs: Path, file: Path, said: Collection[str]) -> str:
    words = first_paragraph(docs / file)
    told = f": {words}" if words and words in said else ""
    return f"* [{title_of(docs / file)}]({file.as_posix()}){told}"


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
