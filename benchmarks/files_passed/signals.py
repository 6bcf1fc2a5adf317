"""A signal: under how many names its way leads from the operating system to ``explain``.

Two ranks of a run of this machine; one gets SIGTERM.  In every process of the run, and in the one
that explains it, each call into the package is looked at: a name is the class of a value that is
passed or returned and quotes the signal in one of its fields.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import slurm_forge as forge
from benchmarks.files_passed import signal_trace
from benchmarks.files_passed.counting import Passage
from slurm_forge.launch.local.runner import train_here

_STEPS = 40


def measure() -> Passage:
    """Class by class, how many processes had a value of it; in the order of the first one."""
    with TemporaryDirectory() as folder:
        names = Path(folder) / "names"
        # Python imports it at the start of every process that inherits this.
        hook = Path(folder) / "sitecustomize.py"
        hook.write_text("from benchmarks.files_passed import signal_trace\nsignal_trace.start()\n")
        paths = [folder, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ[signal_trace.VARIABLE] = str(names)
        spec = {"name": "signal", "inject": ["term@20:rank1"]}
        train_here(f"{__name__}:train", spec, ranks=2, runs=folder)
        signal_trace.start()
        _explain(f"{folder}/signal")
        found = names.read_text().split()
        return Passage({name: found.count(name) for name in dict.fromkeys(found)}, 0)


def train(run: forge.Run) -> None:
    """The entry: some steps of nearly nothing."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    samples = [torch.full((4,), index / 64) for index in range(64)]
    for batch in run.batches(samples, global_batch_size=8, until=forge.Steps(_STEPS)):
        run.train_step(batch, lambda micro: model(micro).square().mean())


def _explain(run: str) -> None:
    import contextlib
    import io
    import sys

    from slurm_forge.cli.main import main

    sys.argv = ["slurm-forge", "explain", run]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main()
    if "SIGTERM" not in printed.getvalue():
        raise RuntimeError("explain does not mention the signal: run it by hand to see why")
