"""Where the files of a test cluster lie, which ports it has, and what the machine can do."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import ConfigError
from slurm_forge.slurm.versions import SlurmRelease

# A unix socket's path ends at 107 characters; the longest here is
# <directory>/spool/<node>/<node>_<job id>.4294967291
_LONGEST_DIRECTORY = 62


class CgroupKind(str, enum.Enum):
    """What control groups this machine lets us make."""

    V1 = "cgroup/v1"
    V2 = "cgroup/v2"
    NONE = "none"


#: Such as 22.5 for ``slurm-wlm 22.05.8``.
SlurmVersion = SlurmRelease


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Facts about the machine that the configuration depends on."""

    hostname: str
    version: SlurmVersion
    cgroup: CgroupKind
    swap_accounting: bool = False


@dataclass(frozen=True, slots=True)
class Ports:
    """The block of TCP ports that belongs to one cluster; ``slot`` makes its node names unique."""

    slot: int
    base: int

    @property
    def database(self) -> int:
        """MariaDB."""
        return self.base + 1

    @property
    def accounting(self) -> int:
        """The slurmdbd."""
        return self.base + 2

    @property
    def controller(self) -> int:
        """The slurmctld."""
        return self.base + 3

    def node(self, index: int) -> int:
        """The slurmd of node ``index`` (from 1)."""
        return self.base + 3 + index

    @property
    def node_prefix(self) -> str:
        """``n`` for the first cluster of a machine: cgroups are named after nodes, so no two
        clusters may share a node name."""
        return "n" if self.slot == 0 else f"s{self.slot}n"


@dataclass(frozen=True, slots=True)
class Layout:
    """Every path below the one private directory of a cluster."""

    directory: Path

    @property
    def marker(self) -> Path:
        """Present in every directory that may be wiped."""
        return self.directory / ".slurm-forge-cluster"

    @property
    def state(self) -> Path:
        """Process ids and everything else that ``down`` needs."""
        return self.directory / "state.json"

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF names; cgroup.conf, gres.conf and slurmdbd.conf lie beside it."""
        return self.directory / "etc" / "slurm.conf"

    @property
    def epilog(self) -> Path:
        """What the nodes run after each job, where a cluster is to take its time there."""
        return self.directory / "etc" / "epilog"

    @property
    def logs(self) -> Path:
        """One log per daemon."""
        return self.directory / "log"

    @property
    def munge_socket(self) -> Path:
        """The cluster's own munged."""
        return self.directory / "run" / "munge.sock"

    @property
    def munge_key(self) -> Path:
        """Made fresh for each cluster."""
        return self.directory / "etc" / "munge.key"

    @property
    def database(self) -> Path:
        """MariaDB's data."""
        return self.directory / "db"

    @property
    def database_options(self) -> Path:
        """MariaDB's option file."""
        return self.directory / "etc" / "my.cnf"

    @property
    def jobs(self) -> Path:
        """Where jobs are submitted from, and so where their output lands, unless told."""
        return self.directory / "jobs"

    @property
    def database_setup(self) -> Path:
        """SQL that MariaDB runs when it starts."""
        return self.directory / "etc" / "setup.sql"

    @property
    def run(self) -> Path:
        """Sockets and pid files."""
        return self.directory / "run"

    def gpu(self, index: int) -> Path:
        """A file that stands for a GPU's device (from 0)."""
        return self.directory / "dev" / f"gpu{index}"

    def spool(self, node: str) -> Path:
        """A slurmd's spool; slurmstepd puts its sockets there."""
        return self.directory / "spool" / node

    @property
    def controller_state(self) -> Path:
        """StateSaveLocation."""
        return self.directory / "ctld"

    def log(self, daemon: str) -> Path:
        """What the daemon itself writes."""
        return self.logs / f"{daemon}.log"

    def output(self, daemon: str) -> Path:
        """The daemon's standard output and error."""
        return self.logs / f"{daemon}.out"


def check_directory(directory: Path) -> Path:
    """The absolute form of ``directory``; ConfigError where it can't hold the sockets."""
    absolute = directory.absolute()
    text = str(absolute)
    if len(text.encode()) > _LONGEST_DIRECTORY:
        raise ConfigError(
            f"{text} is too long: unix sockets below it would not fit into 107 bytes",
            next_step=f"Choose a directory of at most {_LONGEST_DIRECTORY} bytes.",
        )
    if any(character.isspace() or character in "\"'#%\\[]," for character in text):
        raise ConfigError(
            f"{text!r} has characters that slurm.conf gives a meaning",
            next_step="Choose a directory of letters, digits, dashes, dots and slashes.",
        )
    return absolute
