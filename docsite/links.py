"""Links of the repository's Markdown, as they have to be on the site.  Pure."""

from __future__ import annotations

import posixpath
import re

__all__ = ["OTHERS", "rewritten"]

#: Files that lie elsewhere on the site than in the repository: path in it, page of the site.
OTHERS = {
    "README.md": "index.md",
    "docs/index.md": "map.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
_DOCS = "docs/"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)
_FENCE = re.compile(r"\s*(```|~~~)")


def rewritten(markdown: str, source: str) -> str:
    """``markdown`` of the file ``source`` of the repository, with links to pages of the site.

    A link to what is no page (an example, a script) becomes its text and the path.
    """
    page = _page_of(source) or source
    inside = False
    lines = []
    for line in markdown.splitlines(keepends=True):
        fence = _FENCE.match(line) is not None
        inside = inside is not fence
        code = inside or fence
        lines.append(line if code else _LINK.sub(lambda found: _link(found, source, page), line))
    return "".join(lines)


def _link(found: re.Match[str], source: str, page: str) -> str:
    mark, text, target = found.groups()
    if _ELSEWHERE.match(target):
        return found[0]
    path, hash_, anchor = target.partition("#")
    there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    known = _page_of(there)
    if known is None:
        shown = there in text or there.endswith(f"/{text.strip('`')}")
        return text if shown else f"{text} (`{there}`)"
    here = posixpath.dirname(page) or "."
    return f"{mark}[{text}]({posixpath.relpath(known, here)}{hash_}{anchor})"


def _page_of(path: str) -> str | None:
    """The page of the site that a file of the repository is; None for what is none.

    A folder of pages is its index.
    """
    if path in OTHERS:
        return OTHERS[path]
    if not path.startswith(_DOCS):
        return None
    page = path.removeprefix(_DOCS)
    return page if posixpath.splitext(page)[1] else f"{page}/index.md"
