"""A run imports the code that it was submitted with, whatever is edited meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.cli.observe.run_reading import gather
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.status import take_status
from slurm_forge.run_directory import RunDirectory

pytestmark = [pytest.mark.distributed]

#: Its first start edits the files that its second one is about to import.
PROGRAM = """
from pathlib import Path

import torch

import slurm_forge as forge
from models.net import WIDTH

VERSION = "old"


def train(run):
    with open("starts", "a") as starts:
        starts.write(f"{VERSION} {WIDTH} {Path('data/samples').read_text()} {__file__}\\n")
    for name, old, new in (("train.py", "old", "new"), ("models/net.py", "8", "16")):
        path = Path(name)
        path.write_text(path.read_text().replace(f'= "{old}"', f'= "{new}"'))
    model = torch.nn.Linear(4, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.zeros(64, 4)
    for batch in run.batches(data, global_batch_size=8, until=forge.Steps(4)):
        run.train_step(batch, lambda micro: model(micro).square().mean())
"""


@pytest.mark.parametrize(
    ("code", "second"),
    [("snapshot", "old 8"), pytest.param("live", "new 16", marks=pytest.mark.slow)],
)
def test_both_starts_import_what_was_submitted(tmp_path: Path, code: str, second: str) -> None:
    folder = tmp_path / "work"
    for name in ("models", "data"):
        (folder / name).mkdir(parents=True)
    (folder / "train.py").write_text(PROGRAM)
    (folder / "models" / "net.py").write_text('WIDTH = "8"\n')
    (folder / "data" / "samples").write_text("samples")
    (folder / ".gitignore").write_text("data\nruns\n")
    (folder / "job.yaml").write_text(
        f"name: kept\nentry: train.py:train\ncode: {code}\ninject: [kill@2]\n"
        "probe: {enabled: false}\ncheckpoint: {every_steps: 1}\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    ended = subprocess.run(
        [sys.executable, "-m", "slurm_forge.cli.main", "run", "job.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, again = (folder / "starts").read_text().splitlines()
    assert first.startswith("old 8 samples")
    assert again.startswith(f"{second} samples")
    facts = gather(RunDirectory.at(folder / "runs" / "kept"))
    text = explain_text(explain(facts), now=facts.now, reference=facts.reference)
    assert ("  code: snapshot " in text) is (code == "snapshot")
    assert (take_status(facts).code != "") is (code == "snapshot")
