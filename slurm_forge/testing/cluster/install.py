"""Installing what a test cluster needs, from Debian's or Ubuntu's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from slurm_forge.errors import SlurmCommandError, UnsupportedError
from slurm_forge.testing.cluster import machine

# Plugins that no program stands for; apt does nothing where they are installed.
_PLUGINS = ("slurm-wlm-basic-plugins",)
_APT_TIMEOUT_S = 900


def install_packages(environment: Mapping[str, str], *, accounting: bool = True) -> tuple[str, ...]:
    """Install the missing packages by apt-get, through sudo where we are not root; which ones.

    UnsupportedError without apt-get, SlurmCommandError where it fails.
    """
    path = environment.get("PATH", "")
    missing = machine.missing_packages(path, accounting=accounting)
    if not missing:
        return ()
    if shutil.which("apt-get", path=path) is None:
        raise UnsupportedError(
            f"apt-get is not here, and these are missing: {', '.join(missing)}",
            next_step="Install Slurm (slurmctld, slurmd, slurmdbd, the clients), munge and"
            " MariaDB by your system's own means.",
        )
    prefix = () if os.geteuid() == 0 else ("sudo", "-n")
    packages = (*missing, *_PLUGINS)
    quiet = {**environment, "DEBIAN_FRONTEND": "noninteractive"}
    for argv in (
        (*prefix, "apt-get", "update", "-q"),
        (*prefix, "apt-get", "install", "-q", "-y", "--no-install-recommends", *packages),
    ):
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=quiet,
                timeout=_APT_TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError as error:
            raise UnsupportedError(
                f"packages can't be installed: {error}", next_step="Run this as root."
            ) from None
        if done.returncode != 0:
            raise SlurmCommandError(argv, done.returncode, done.stderr[-500:])
    return packages
