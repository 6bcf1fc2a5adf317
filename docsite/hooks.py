"""What mkdocs calls: the files at the top of the repository as pages, links, and the menu.

Called with mkdocs' own objects, which publish no types of use here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docsite.links import OTHERS, rewritten
from docsite.pages import title_of

__all__ = ["on_config", "on_files", "on_page_markdown"]

_TOP = Path(__file__).resolve().parent.parent
_DOCS = _TOP / "docs"
_SOURCES = {page: source for source, page in OTHERS.items()}
#: Folders, in the order of the menu.
_MENU = {
    "tutorials": "Ways in",
    "causes": "When something happens",
    "": "Topics",
    "sites": "Clusters",
    "reference": "Reference",
    "results": "Measured",
}
_FIRST_TUTORIALS = ("job-file.md", "submitit.md", "sbatch.md", "existing-script.md", "attach.md")
_NOT_A_TOPIC = ("index.md", "architecture.md")


def on_config(config: Any) -> Any:
    """The menu: every page that there is."""
    folders = {
        path.parent.relative_to(_DOCS).as_posix().removeprefix(".") for path in _DOCS.rglob("*.md")
    }
    menu: list[Any] = [{"slurm_forge": "index.md"}, {"Map": "map.md"}]
    for folder in [*_MENU, *sorted(folders - set(_MENU))]:
        found = sorted((_DOCS / folder).glob("*.md"), key=_order)
        names = [path.relative_to(_DOCS).as_posix() for path in found]
        names = [name for name in names if folder or name not in _NOT_A_TOPIC]
        if folder == "results":
            names.insert(0, "results/index.md")
        if names:
            menu.append({_MENU.get(folder, folder): names})
    menu.append(
        {"Development": ["architecture.md", {"Contributing": "contributing.md"}, "changes.md"]}
    )
    config.nav = menu
    return config


def on_files(files: Any, config: Any) -> Any:
    """Pages of files that lie elsewhere; links in them are seen to page by page."""
    from mkdocs.structure.files import File

    taken = files.get_file_from_path("index.md")
    if taken is not None:
        files.remove(taken)
    for source, page in OTHERS.items():
        path = _TOP / source
        text = _contents(path) if path.is_dir() else path.read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Its links as they are on the site."""
    name = page.file.src_uri
    source = _SOURCES.get(name, f"docs/{name}")
    if name == "results/index.md":
        return markdown
    return rewritten(markdown, source)


def _contents(folder: Path) -> str:
    """A page that lists the pages of a folder."""
    rows = [f"* [{title_of(path)}]({path.name})" for path in sorted(folder.glob("*.md"))]
    return "\n".join(["# Measured", "", *rows, ""])


def _order(path: Path) -> tuple[int, str]:
    if path.name == "index.md":
        return (0, "")
    if path.name in _FIRST_TUTORIALS and path.parent.name == "tutorials":
        return (1 + _FIRST_TUTORIALS.index(path.name), "")
    return (99, path.name)
