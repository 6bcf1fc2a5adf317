"""What the loss behind the checkpoint of a stop costs the stop.

    python -m benchmarks.stop [--rounds 5] [--ranks 2] [--width 1024] [--layers 8] [--json FILE]

A run on this machine is stopped in its steps, in turns with ``run.train_step``, which tells how the
loss is computed, and with a block of ``run.step``, which doesn't.  Seconds are those between lines
of the journal, by one clock.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.tables import Machine, cell, plain, spread, table, write_json
from slurm_forge.journal import Record, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.run_directory import RunDirectory

_STEPS = 20
_PATIENCE_S = 120.0


class Loop(str, Enum):
    """How the program takes its steps."""

    TRAIN_STEP = "train_step"
    BLOCK = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One: how long a step took, and from the commit to the loss and to the end of the launch."""

    loop: Loop
    step_s: float
    loss_s: float | None
    end_s: float


def train(run: Any, *, block: bool, width: int, layers: int) -> None:
    """Trains until it is stopped, and tells when it has warmed up."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    import slurm_forge as forge

    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    model: nn.Module = nn.Sequential(*parts)
    if run.world_size > 1:
        model = DistributedDataParallel(model)
    run.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))

    def loss(micro: Any) -> Any:
        return model(micro[0]).square().mean()

    begun = time.monotonic()
    data = TensorDataset(torch.randn(4096, width))
    for batch in run.batches(
        data, global_batch_size=64 * run.world_size, num_workers=2, until=forge.Steps(1_000_000)
    ):
        if block:
            with run.step(batch) as step:
                for micro in step.micro_batches():
                    step.backward(loss(micro))
                step.apply()
        else:
            run.train_step(batch, loss)
        if run.step_number == _STEPS // 2:
            begun = time.monotonic()
        if run.step_number == _STEPS and run.rank == 0:
            took = (time.monotonic() - begun) / (_STEPS - _STEPS // 2)
            (run.directory / "step_s").write_text(str(took))


def stop_once(folder: Path, loop: Loop, arguments: argparse.Namespace) -> Stop:
    """Start a run, stop it, read its journal."""
    folder.mkdir()
    block = str(loop is Loop.BLOCK).lower()
    (folder / "job.yaml").write_text(
        f"name: stop\nentry: {__file__}:train\n"
        f"args: {{block: {block}, width: {arguments.width}, layers: {arguments.layers}}}\n"
        f"resources: {{tasks_per_node: {arguments.ranks}}}\n"
    )
    run = RunDirectory.at(folder / "runs" / "stop")
    command = [sys.executable, "-m", "slurm_forge", "run", "job.yaml"]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    until, ready = time.monotonic() + _PATIENCE_S, run.path / "step_s"
    while not (ready.exists() and ready.read_text()):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise SystemExit((folder / "output").read_text())
        time.sleep(0.05)
    run.stop_file.touch()
    process.wait(_PATIENCE_S)
    records, _ = read_journal(run)
    saved = _time(records, ev.CheckpointCommitted)
    told = _time(records, ev.CheckpointWitnessed)
    ended = _time(records, ev.LaunchEnded)
    assert saved is not None and ended is not None, (folder / "output").read_text()
    return Stop(
        loop=loop,
        step_s=float(ready.read_text()),
        loss_s=None if told is None else told - saved,
        end_s=ended - saved,
    )


def _time(records: Sequence[Record], kind: type[object]) -> float | None:
    return next((each.time for each in reversed(records) if isinstance(each.event, kind)), None)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    stops: list[Stop] = []
    with tempfile.TemporaryDirectory(prefix="forge-stop-") as place:
        for number in range(arguments.rounds):
            for loop in (*Loop,) if number % 2 else (*reversed(Loop),):
                stops.append(stop_once(Path(place) / f"{loop.value}-{number}", loop, arguments))
                print(stops[-1], flush=True)
    figures = {
        loop.value: {
            "step, s": spread(each.step_s for each in stops if each.loop is loop),
            "commit to loss, s": spread(each.loss_s for each in stops if each.loop is loop),
            "commit to end of launch, s": spread(e.end_s for e in stops if e.loop is loop),
        }
        for loop in Loop
    }
    names = list(figures[Loop.TRAIN_STEP.value])
    rows = [[loop, *(cell(row[name], 3) for name in names)] for loop, row in figures.items()]
    print(table(["steps by", *names], rows))
    machine = Machine.measured(load, began)
    print(f"\n{machine.text()}")
    ways = {
        loop: {name: plain(each) for name, each in row.items()} for loop, row in figures.items()
    }
    data = {"machine": asdict(machine), "ways": ways, "stops": [asdict(each) for each in stops]}
    write_json(arguments.json, data)


if __name__ == "__main__":
    main()
