"""How long a start takes: from the command to the end of the first step, beside torchrun.

    python -m benchmarks.start [--rounds 5] [--ranks 2] [--json FILE]

A round starts the same small DDP program under ``slurm-forge run`` (all defaults) and under
torchrun, one after the other; another side is first in every second round, and the first round,
which fills the page cache, does not count.  Ratios are those of a round.  *CPU* is that of all
processes of a side until then; processes and threads are those alive at the end of the first step,
*of torch* the threads that torch has named: its store's and those of its process groups.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tables import Machine, cell, paired_ratio, spread, table, write_json

if TYPE_CHECKING:
    import slurm_forge as forge

_FORGE, _TORCHRUN = "slurm-forge run", "torchrun"
_MODULE = "benchmarks.start"
_TORCHS = ("pt_", "gloo_")
_TICKS = os.sysconf("SC_CLK_TCK")


# -- the program, under both -----------------------------------------------------------------------


def train(run: forge.Run) -> None:
    """Two steps under slurm_forge; what lives at the end of the first is noted."""
    import torch

    import slurm_forge

    torch.set_num_threads(1)
    model, optimizer = _model()
    run.register(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16))
    for batch in run.batches(data, global_batch_size=8, until=slurm_forge.Steps(2)):
        run.train_step(batch, lambda micro: model(micro[0]).square().mean())
        if run.rank == 0:
            _note(Path(run.args["note"]), run.args["root"])


def train_plainly(note: Path, root: int) -> None:
    """The same under torchrun."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = _model()
    data = torch.utils.data.TensorDataset(torch.randn(64, 16))
    sampler: torch.utils.data.DistributedSampler[object]
    sampler = torch.utils.data.DistributedSampler(data)
    for number, batch in enumerate(torch.utils.data.DataLoader(data, 4, sampler=sampler)):
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            _note(note, root)
        if number:
            break
    os._exit(0)  # what torch tears down at exit is no part of a start


def _model() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    return model, torch.optim.AdamW(model.parameters())


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of one side: seconds, and the names of the threads of each process."""

    wall_s: float
    cpu_s: float
    threads: tuple[tuple[str, ...], ...]

    def per_rank(self, ranks: int, *, torchs: bool) -> float:
        """Threads of all processes by ranks: torch's, or all others."""
        names = [name for process in self.threads for name in process]
        return sum(name.startswith(_TORCHS) == torchs for name in names) / ranks


def _note(file: Path, root: int) -> None:
    """Write the moment, the processor seconds of all descendants of ``root``, and their threads."""
    if file.exists():
        return
    now = time.time()
    stats = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            words = text.rpartition(")")[2].split()
            stats[int(entry.name)] = words
    cpu, threads = 0.0, []
    for pid, words in stats.items():
        above = int(words[1])
        while above not in (root, 0):
            above = int(stats[above][1]) if above in stats else 0
        if above == root:
            cpu += sum(map(int, words[11:15])) / _TICKS
            tasks = Path(f"/proc/{pid}/task").iterdir()
            threads.append([(task / "comm").read_text().strip() for task in tasks])
    start = {"wall_s": now, "cpu_s": cpu, "threads": threads}
    file.write_text(json.dumps(start))


# -- measuring -------------------------------------------------------------------------------------


def start(side: str, ranks: int, work: Path) -> Start:
    """Start it once, and wait for its end."""
    folder = Path(tempfile.mkdtemp(dir=work))
    note, root = folder / "note.json", os.getpid()
    if side == _TORCHRUN:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words += ["-m", _MODULE, "--program", str(note), str(root)]
    else:
        job, args = folder / "start.yaml", {"note": str(note), "root": root}
        resources = {"tasks_per_node": ranks, "cpus_per_task": 1}
        body = {"name": "start", "entry": f"{_MODULE}:train", "args": args}
        job.write_text(json.dumps({**body, "resources": resources}))
        words = ["-m", "slurm_forge", "run", str(job), "--runs", str(folder / "runs")]
    # As where it is installed, modules are compiled once.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.time()
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode or not note.exists():
        raise SystemExit(f"{side} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    found = json.loads(note.read_text())
    return Start(
        wall_s=found["wall_s"] - began,
        cpu_s=found["cpu_s"],
        threads=tuple(map(tuple, found["threads"])),
    )


def report(sides: dict[str, list[Start]], ranks: int) -> str:
    """The table for people."""
    rows = []
    plain = sides[_TORCHRUN]
    for side, starts in sides.items():
        last = starts[-1]
        rows.append(
            (
                side,
                cell(spread(each.wall_s for each in starts)),
                cell(paired_ratio([e.wall_s for e in starts], [e.wall_s for e in plain])),
                cell(spread(each.cpu_s for each in starts)),
                cell(paired_ratio([e.cpu_s for e in starts], [e.cpu_s for e in plain])),
                str(len(last.threads)),
                f"{last.per_rank(ranks, torchs=False):.1f}",
                f"{last.per_rank(ranks, torchs=True):.1f}",
            )
        )
    head = ("first step after", "wall s", "ratio", "CPU s", "ratio", "processes")
    return table((*head, "threads per rank", "of torch"), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    load, began = os.getloadavg()[0], time.time()
    sides: dict[str, list[Start]] = {_FORGE: [], _TORCHRUN: []}
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as work:
        for number in range(options.rounds + 1):
            for side in [_FORGE, _TORCHRUN] if number % 2 else [_TORCHRUN, _FORGE]:
                taken = start(side, options.ranks, Path(work))
                if number > 0:
                    sides[side].append(taken)
    machine = Machine.measured(load, began)
    sys.stdout.write(f"{options.ranks} ranks; {machine.text()}\n\n{report(sides, options.ranks)}\n")
    starts = {side: [asdict(each) for each in found] for side, found in sides.items()}
    write_json(options.json, {"machine": asdict(machine), "starts": starts})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        train_plainly(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
