"""What sbatch is asked for at every site, kept in files that a person can read and check.

``python -m tests.unit.site.golden`` writes them.
"""

from __future__ import annotations

from pathlib import Path

from slurm_forge.launch.asking import asked_of
from slurm_forge.launch.script import asked_options
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.loading import SitePlaces, packaged_folder
from slurm_forge.site.rules import findings
from slurm_forge.spec import job_from_mapping
from tests.unit.site.asked import ASKED, NODES

FOLDER = Path(__file__).parent / "golden"


def asked_at(name: str, nodes: int) -> str:
    """The options of the usual job on so many nodes, and what the rules say of it."""
    site = SitePlaces(packaged=packaged_folder()).load(name).site
    job = job_from_mapping(
        {"name": "tiny", "entry": "tiny:train", "resources": {"nodes": nodes, **ASKED[name]}}
    )
    lines = asked_options(job, site, RunDirectory(Path("/runs/tiny")))
    told = [
        f"{each.severity.value}: {each.message}"
        for each in findings(asked_of(job, site, lines), site)
    ]
    return "\n".join([f"# {nodes} node{'s' if nodes > 1 else ''}", *lines, *told]) + "\n"


def golden(name: str) -> str:
    """All sizes at one site."""
    return "\n".join(asked_at(name, nodes) for nodes in NODES)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in ASKED:
        (FOLDER / f"{name}.txt").write_text(golden(name))


if __name__ == "__main__":
    main()
