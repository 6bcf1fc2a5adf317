"""The pictures of reports in the documentation, of real runs on a test cluster.

    scripts/report-screenshots [--folder DIR]

Boots a real Slurm (``slurm_forge.testing.cluster``; needs root), trains the example with two ranks
on two nodes, preempts it by a job of higher priority and spoils three gradients in a row, and has
another run hang until it is held.  What is left in DIR are both reports, ``report.png`` and
``report-held.png``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_forge.documents import dump
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.testing.cluster.spec import ClusterSpec

_ROOT = Path(__file__).resolve().parent.parent
_PICTURES = _ROOT / "docs" / "assets"
_WITHIN_S = 900
_JOB: dict[str, Any] = {
    "entry": f"{_ROOT / 'examples' / 'tiny_gpt.py'}:train",
    "resources": {
        "nodes": 2,
        "tasks_per_node": 1,
        "cpus_per_task": 1,
        "mem": "1G",
        "time": "00:30:00",
    },
    "args": {"max_steps": 2400, "parallel": "ddp", "global_batch": 16, "micro_batch": 8},
    "checkpoint": {"every_steps": 200},
}
#: Preempted after so many steps, then three gradients in a row are not finite.
_PREEMPTED_AT, _SPOILT_AT = 700, 1790


def main() -> None:
    """Boot, train, report, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=_PICTURES)
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch, _cluster(Path(scratch)) as cluster:
        runs = Path(scratch) / "runs"
        environ = {
            **cluster.env,
            "SLURM_FORGE_NODES": "off",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{cluster.env['PATH']}",
        }
        nan = [f"nan@{_SPOILT_AT}x3:rank1"]
        job = _submit(runs, "tiny-gpt", environ, inject=nan, partition="preempt")
        _wait(runs, "tiny-gpt", environ, lambda status: (status["step"] or 0) >= _PREEMPTED_AT)
        cluster.preempt(job, hold=15)
        _wait(runs, "tiny-gpt", environ, lambda status: status["status"] == "finished")
        hang = ["hang@220:rank1:always"]
        watchdog = {"at_least": "4s"}
        _submit(runs, "bad-node", environ, inject=hang, partition="normal", watchdog=watchdog)
        _wait(runs, "bad-node", environ, lambda status: status["status"] == "held")
        pages = {"report": "tiny-gpt", "report-held": "bad-node"}
        for picture, run in pages.items():
            page = Path(scratch) / f"{run}.html"
            _forge(environ, "report", run, "--runs", str(runs), "-o", str(page))
            take_picture(page, folder / f"{picture}.png")
            if folder != _PICTURES:
                shutil.copy(page, folder)


def _cluster(scratch: Path) -> SlurmCluster:
    return SlurmCluster(scratch / "cluster", ClusterSpec(nodes=4))


def _submit(
    runs: Path, name: str, environ: Mapping[str, str], *, partition: str, **keys: object
) -> str:
    """The job of a run that is submitted with these keys of a job file."""
    job = {"name": name, **_JOB, **keys}
    job["resources"] = {**_JOB["resources"], "partition": partition}
    file = runs.parent / f"{name}.yaml"
    file.write_text(dump(job))
    _forge(environ, "submit", str(file), "--runs", str(runs))
    return str(_status(runs, name, environ)["job"])


def _status(runs: Path, name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    told = _forge(environ, "status", name, "--runs", str(runs), "--json")
    status: dict[str, Any] = json.loads(told)
    return status


def _wait(
    runs: Path,
    name: str,
    environ: Mapping[str, str],
    reached: Callable[[dict[str, Any]], bool],
) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not reached(_status(runs, name, environ)):
        if time.monotonic() > deadline:
            sys.exit(f"{name} has not come far enough in {_WITHIN_S} s")
        time.sleep(1)


def _forge(environ: Mapping[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "slurm_forge", *words]
    done = subprocess.run(command, env=dict(environ), check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def take_picture(page: Path, picture: Path) -> None:
    """The first screen of a page, as a PNG."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1180, "height": 1010}, color_scheme="light")
        tab.goto(page.absolute().as_uri())
        tab.wait_for_selector("html[data-ready=yes]", state="attached")
        tab.screenshot(path=str(picture))
        browser.close()
    sys.stdout.write(f"{picture}: {picture.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
