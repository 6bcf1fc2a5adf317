"""What mkdocs calls: files at the top of the repository become pages, and links are rewritten.

Called with mkdocs' own objects, which publish no types of use here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docsite.links import OTHERS, rewritten

__all__ = ["on_files", "on_page_markdown"]

_TOP = Path(__file__).resolve().parent.parent
_COMMENT = re.compile(r"\A\s*<!--.*?-->\s*", re.DOTALL)
_HEADING = re.compile(r"\A# .*\n")
_SOURCES = {page: source for source, page in OTHERS.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose files lie elsewhere in the repository."""
    from mkdocs.structure.files import File

    taken = files.get_file_from_path("index.md")
    if taken is not None:
        files.remove(taken)
    for source, page in OTHERS.items():
        text = (_TOP / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links as they are on the site.

    Without the comment that a generated page begins with: mkdocs takes a title from the first line.
    With a way back from a measurement, which has no entry of its own in the menu.
    """
    name = page.file.src_uri
    text = _COMMENT.sub("", markdown)
    if name.startswith("results/") and name != "results/index.md":
        text = _HEADING.sub(r"\g<0>\n[All measurements](index.md)\n", text, count=1)
    return rewritten(text, _SOURCES.get(name, f"docs/{name}"))
