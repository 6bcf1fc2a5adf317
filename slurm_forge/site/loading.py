"""Finds and reads site files.

The places are, in order: what the command line names, what the knob names, the user's own folder,
the sites that come with the package.  Nothing is taken from the current directory unless it is
named: a folder somebody else can write into must not decide what our job script runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_forge.documents import Document, build, nearest, read
from slurm_forge.errors import ConfigError
from slurm_forge.site.detection import GENERIC, detect_site
from slurm_forge.site.model import Site

__all__ = ["LoadedSite", "SitePlaces", "packaged_folder"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_SUFFIX = ".yaml"


@dataclass(frozen=True, slots=True)
class LoadedSite:
    """A site, the file it was read from, and why that one (for the user to see)."""

    site: Site
    path: Path
    because: str
    #: The file's own keys, and the lines that they stand on.
    document: Document = field(default_factory=lambda: Document({}), repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlaces:
    """Where site files are looked for.

    ``user_folder`` is usually ``~/.config/slurm_forge/sites``; it need not exist.  ``knob`` is
    what the environment names, a site or a file.
    """

    packaged: Path
    user_folder: Path | None = None
    knob: str | None = None

    def load(self, wanted: str | None = None, *, cluster_name: str | None = None) -> LoadedSite:
        """The site that is ``wanted`` (a name or a file), else the knob's, else the detected one.

        Raises ``ConfigError`` for an unknown name or a mistake in the file, ``UnsafeFileError``
        for a file outside the package that others can write.
        """
        if wanted is not None:
            return self._named(wanted, "it was asked for")
        if self.knob is not None:
            return self._named(self.knob, "SLURM_FORGE_SITE names it")
        name = detect_site(cluster_name, (self._read(path)[0] for path in self._files()))
        if name != GENERIC:
            return self._named(name, f"Slurm's ClusterName is {cluster_name}")
        because = f"no site describes ClusterName {cluster_name}" if cluster_name else "no Slurm"
        return self._named(GENERIC, because)

    def names(self) -> tuple[str, ...]:
        """Names of all sites that can be found, sorted."""
        return tuple(sorted({path.stem for path in self._files()}))

    def files(self) -> tuple[Path, ...]:
        """All files that are looked into, those that come first in force first."""
        return tuple(self._files())

    def _loaded(self, path: Path, because: str) -> LoadedSite:
        site, document = self._read(path)
        return LoadedSite(site, path, because, document)

    def _named(self, wanted: str, because: str) -> LoadedSite:
        if "/" in wanted or wanted.endswith(_SUFFIX):
            path = Path(wanted)
            return self._loaded(path, because)
        for path in self._files():
            if path.stem == wanted:
                return self._loaded(path, because)
        known = self.names()
        close = nearest(wanted, known)
        raise ConfigError(
            f"there is no site {wanted[:64]!r}" + (f' (did you mean "{close}"?)' if close else ""),
            next_step=f"Known sites: {', '.join(known)}. For a file of your own, give its path.",
        )

    def _files(self) -> Iterator[Path]:
        """Site files, the user's own first, each folder in the order of names."""
        for folder in (self.user_folder, self.packaged):
            if folder is not None and folder.is_dir():
                files = (path for path in folder.iterdir() if path.suffix == _SUFFIX)
                yield from sorted(path for path in files if _NAME.fullmatch(path.stem))

    def _read(self, path: Path) -> tuple[Site, Document]:
        ours = path.parent == self.packaged
        # The package is as trustworthy as the code in it, whoever installed it.
        site = build(Site, document := read(path, trusted=not ours))
        if site.name != path.stem:
            raise ConfigError(
                f"the site is called {site.name!r} and its file {path.name!r}",
                path=path,
                line=document.line_of(("name",)),
                next_step=f"Rename the file to {site.name}{_SUFFIX}, or change the name in it.",
            )
        return site, document


def packaged_folder() -> Path:
    """The folder of the sites that come with the package; in a checkout, the one beside it."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_shipped" / "site_configs"
    return shipped if shipped.is_dir() else package.parent / "site_configs"
