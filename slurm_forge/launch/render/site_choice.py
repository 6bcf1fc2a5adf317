"""The site that a submission from this process, or a job that it is in, is for."""

from __future__ import annotations

import os
from datetime import timedelta

from slurm_forge.errors import ConfigError, ForgeError
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.site.loading import SitePlaces, SiteSetting, Surroundings, packaged_folder
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.spec.layers import PlaceSetting, user_setting

#: sbatch is asked next: who does not answer this will not take a job either.
_PATIENCE = timedelta(seconds=10)


def find_site(
    name_or_file: str | None = None, slurm: Slurm | None = None, *, run_exists: bool = False
) -> Site:
    """By name or file, else by ``SLURM_FORGE_SITE``, else by the user's ``site:``, else by Slurm's
    ClusterName, else ``generic``.

    The ClusterName is that of the job that this process is in, else what ``slurm`` says.  For a run
    that has ``run_exists`` the user's file is not read: it keeps what it has.
    """
    places = site_places(run_exists=run_exists)
    if name_or_file is not None or places.preset() is not None:
        return places.load(name_or_file).site
    return places.load(cluster_name=_cluster(slurm)).site


def site_places(setting: PlaceSetting | None = None, *, run_exists: bool = False) -> SitePlaces:
    """Where site files are looked for, and what tells this process which one is meant.

    ``setting`` is what the files of settings of a job say; without it, the user's own is asked, but
    not for a run that has ``run_exists``.
    """
    environ = process_environ()
    knobs = Knobs.from_environ(environ)

    def settings() -> SiteSetting | None:
        in_force = setting or (None if run_exists else user_setting(knobs, "site"))
        return None if in_force is None else SiteSetting(in_force.value, str(in_force.place))

    return SitePlaces(
        packaged=packaged_folder(),
        user_folder=knobs.config_folder / "sites",
        knob=knobs.site,
        settings=settings,
        here=Surroundings.of(environ, os.uname().nodename or None),
    )


def _cluster(slurm: Slurm | None) -> str | None:
    try:
        environment = SlurmEnvironment.from_environ(process_environ())
    except ConfigError:
        environment = None  # whoever begins the run says so
    if environment is not None and environment.cluster_name is not None:
        return environment.cluster_name
    if slurm is None:
        return None
    try:
        if isinstance(slurm, SubprocessSlurm):
            slurm = slurm.with_timeout(_PATIENCE)
        return slurm.show_config().cluster_name
    except ForgeError:
        return None
