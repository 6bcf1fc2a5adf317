"""Finds and reads site files, and tells which site this is.

The places are, in order: what the command line names, what the knob names, what a file of settings
names, the user's own folder, the sites that come with the package.  Where none is named, the one
that claims this cluster is taken (``detect_site``); nothing is executed to find that out.
Nothing is taken from the current directory unless it is named: a folder somebody else can write
into must not decide what our job script runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_forge.documents import Document, build, nearest, read
from slurm_forge.documents.reading import MAX_BYTES
from slurm_forge.errors import ConfigError, ForgeError
from slurm_forge.files import read_bounded
from slurm_forge.site.fields import wholly
from slurm_forge.site.model import Site

#: The site that knows nothing, for clusters that nobody has described.
GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a process can tell of the cluster that it is on, without executing anything."""

    #: ClusterName, from Slurm or from the environment of a job.
    cluster_name: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    #: The name of this host, as ``hostname`` prints it.
    host: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str], host: str | None) -> Surroundings:
        """From the environment of a process: inside a job Slurm says the ClusterName there."""
        return cls(
            cluster_name=environ.get("SLURM_CLUSTER_NAME") or None, variables=environ, host=host
        )


@dataclass(frozen=True, slots=True)
class DetectedSite:
    """A site that was recognised, which of its clusters this is, and by what."""

    name: str
    cluster: str | None
    because: str


def detect_site(here: Surroundings, sites: Iterable[Site]) -> DetectedSite:
    """The site that claims these surroundings, else ``generic``.

    The ClusterName is Slurm's own word and comes first, then the variables that a site sets, then
    the name of the host; of several that claim the same, the first.
    """
    known = tuple(sites)
    if here.cluster_name:
        for site in known:
            if here.cluster_name in site.cluster_names:
                because = f"Slurm's ClusterName is {here.cluster_name}"
                return DetectedSite(site.name, here.cluster_name, because)
    for site in known:
        for name, values in site.detect.variables.items():
            if (value := here.variables.get(name)) is not None and value in values:
                return DetectedSite(site.name, value, f"{name} is {value}")
    if here.host:
        for site in known:
            for pattern in site.detect.hosts:
                if wholly(pattern).fullmatch(here.host):
                    return DetectedSite(site.name, None, f"this host is called {here.host}")
    if here.cluster_name:
        return DetectedSite(GENERIC, None, f"no site describes ClusterName {here.cluster_name}")
    return DetectedSite(GENERIC, None, "no Slurm")


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_SUFFIX = ".yaml"


@dataclass(frozen=True, slots=True)
class LoadedSite:
    """A site, the file it was read from, and why that one (for the user to see).

    Where the file describes several clusters, ``site`` holds the facts of this one.
    """

    site: Site
    path: Path
    because: str
    #: The file's own keys, and the lines that they stand on.
    document: Document = field(default_factory=lambda: Document({}), repr=False, compare=False)
    #: Which one of the clusters that the file describes.
    cluster: str | None = None
    #: What the file says, of all its clusters.
    all_clusters: Site | None = field(default=None, repr=False, compare=False)

    @property
    def whole(self) -> Site:
        """What the file says, whichever of its clusters this is."""
        return self.all_clusters or self.site


@dataclass(frozen=True, slots=True)
class SiteSetting:
    """A site or its file as something other than the command line names it, and what that is."""

    wanted: str
    by: str


def _no_setting() -> SiteSetting | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlaces:
    """Where site files are looked for.

    ``user_folder`` is usually ``~/.config/slurm_forge/sites``; it need not exist.  ``knob`` is
    what the environment names, a site or a file; ``settings`` finds what files of settings name,
    and is asked only where nothing before it names one.  ``here`` is what else tells the cluster.
    """

    packaged: Path
    user_folder: Path | None = None
    knob: str | None = None
    settings: Callable[[], SiteSetting | None] = _no_setting
    here: Surroundings = field(default_factory=Surroundings)

    def preset(self) -> SiteSetting | None:
        """The site that the environment or a file of settings names: the knob comes first."""
        return (
            SiteSetting(self.knob, "SLURM_FORGE_SITE") if self.knob is not None else self.settings()
        )

    def load(self, wanted: str | None = None, *, cluster_name: str | None = None) -> LoadedSite:
        """The site that is ``wanted`` (a name or a file), else ``preset()``, else the detected one.

        Raises ``ConfigError`` for an unknown name or a mistake in the file, ``UnsafeFileError``
        for a file outside the package that others can write.
        """
        here = self.here if not cluster_name else replace(self.here, cluster_name=cluster_name)
        if wanted is not None:
            return self._named(wanted, "it was asked for", here)
        if (setting := self.preset()) is not None:
            return self._named(setting.wanted, f"{setting.by} names it", here)
        claiming = (path for path in self._files() if _may_claim(path, here))
        detected = detect_site(here, (self._read(path)[0] for path in claiming))
        return self._named(detected.name, detected.because, here)

    def named_file(self, wanted: str | None) -> str | None:
        """The absolute path of the file that ``wanted`` or ``preset()`` names; None for a name.

        A run keeps it: it is not found by the name in it.
        """
        setting = self.preset() if wanted is None else None
        name = wanted if setting is None else setting.wanted
        return str(Path(name).absolute()) if name is not None and _is_path(name) else None

    def names(self) -> tuple[str, ...]:
        """Names of all sites that can be found, sorted."""
        return tuple(sorted({path.stem for path in self._files()}))

    def files(self) -> tuple[Path, ...]:
        """All files that are looked into, those that come first in force first."""
        return tuple(self._files())

    def _named(self, wanted: str, because: str, here: Surroundings) -> LoadedSite:
        for path in self._called(wanted):
            site, document = self._read(path)
            cluster = detect_site(here, (site,)).cluster
            cluster = cluster if cluster in site.clusters else None
            return LoadedSite(site.on(cluster), path, because, document, cluster, site)
        known = self.names()
        close = nearest(wanted, known)
        raise ConfigError(
            f"there is no site {wanted[:64]!r}" + (f' (did you mean "{close}"?)' if close else ""),
            next_step=f"Known sites: {', '.join(known)}. For a file of your own, give its path.",
        )

    def _called(self, wanted: str) -> Iterator[Path]:
        if _is_path(wanted):
            yield Path(wanted)
        else:
            yield from (path for path in self._files() if path.stem == wanted)

    def _files(self) -> Iterator[Path]:
        """Site files, the user's own first, each folder in the order of names."""
        for folder in (self.user_folder, self.packaged):
            if folder is not None and folder.is_dir():
                files = (path for path in folder.iterdir() if path.suffix == _SUFFIX)
                yield from sorted(path for path in files if _NAME.fullmatch(path.stem))

    def _read(self, path: Path) -> tuple[Site, Document]:
        packaged = path.parent == self.packaged
        # The package is as trustworthy as the code in it, whoever installed it.
        site = build(Site, document := read(path, trusted=not packaged))
        if site.name != path.stem:
            raise ConfigError(
                f"the site is called {site.name!r} and its file {path.name!r}",
                path=path,
                line=document.line_of(("name",)),
                next_step=f"Rename the file to {site.name}{_SUFFIX}, or change the name in it.",
            )
        return site, document


def _is_path(wanted: str) -> bool:
    return "/" in wanted or wanted.endswith(_SUFFIX)


def _may_claim(path: Path, here: Surroundings) -> bool:
    """Whether a file names this cluster at all, or tells its site in another way.

    Whoever submits waits for this, and a mistake in the file of another cluster is not theirs.
    """
    if not path.is_file():
        return True
    try:
        text = read_bounded(path, MAX_BYTES)
    except (ForgeError, OSError):
        return True  # reading it properly says what is wrong
    return b"detect" in text or (here.cluster_name or "\0").encode() in text


def packaged_folder() -> Path:
    """The folder of the sites that come with the package; in a checkout, the one beside it."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_shipped" / "site_configs"
    return shipped if shipped.is_dir() else package.parent / "site_configs"
