"""The site that a submission from this process is for."""

from __future__ import annotations

from pathlib import Path

from slurm_forge.knobs import Knobs
from slurm_forge.site.loading import SitePlaces, packaged_folder
from slurm_forge.site.model import Site
from slurm_forge.slurm.environment import process_environ

__all__ = ["find_site"]


def find_site(wanted: str | None = None) -> Site:
    """By name or file, else by ``SLURM_FORGE_SITE``, else ``generic``: everything unknown."""
    knobs = Knobs.from_environ(process_environ())
    places = SitePlaces(
        packaged=packaged_folder(),
        user_folder=Path("~/.config/slurm_forge/sites").expanduser(),
        knob=knobs.site,
    )
    return places.load(wanted).site
