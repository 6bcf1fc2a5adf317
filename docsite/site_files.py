"""Which files are made from the site files: their pages, the table of all, the JSON Schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from docsite.site_page import site_index, site_page
from slurm_forge.site.model import Site
from slurm_forge.site.schema import schema_text

__all__ = ["made_from"]

#: Sites of nobody's cluster.
_NO_PAGE = frozenset({"generic", "test_cluster"})


def made_from(sites: Iterable[Site]) -> Iterator[tuple[str, str]]:
    """Path in the repository, and text, of every file that is made from the sites."""
    public = [site for site in sites if site.name not in _NO_PAGE]
    yield "site_configs/site.schema.json", schema_text()
    yield "docs/sites/index.md", site_index(public)
    for site in public:
        yield f"docs/sites/{site.name}.md", site_page(site)
