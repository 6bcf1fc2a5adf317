"""What a checkpoint costs: held up, and until it is on disk, beside DCP, torch.save and the floors.

    python -m benchmarks.checkpoint [--state 1GiB|4GiB|5000] [--ranks N] [--rounds 7] [--json FILE]

The state is parameters and Adam's moments, sharded over the ranks as FSDP2 does.  Every round runs
every way once, in another order; the first round (which touches memory for the first time) is not
counted.  Ratios are of one round, so that what slows a whole round down cancels out; the A/A row
is our way once more, and shows what the noise is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.tables import Machine, paired_ratio, spread, table, write_json

_STATES = {"1GiB": (1 << 30, 48), "4GiB": (4 << 30, 48), "64MiB": (64 << 20, 48), "5000": (0, 1667)}
#: Elements of a small tensor: what biases and norms have.
_SMALL = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, collect their rounds, print the table."""
    options = _parse(arguments)
    began, load = time.time(), os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.dir))
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    store = folder / "store"
    try:
        ranks = [
            context.Process(target=_rank, args=(rank, options, folder, store, results))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.stderr.write("a rank failed: see above\n")
            return 1
        rounds = results.get()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _print(options, rounds, Machine.measured(load, began))
    write_json(
        options.json,
        {
            "state": options.state,
            "ranks": options.ranks,
            "machine": asdict(Machine.measured(load, began)),
            "rounds": rounds,
        },
    )
    return 0


def _rank(rank: int, options: Any, folder: Path, store: Path, results: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from benchmarks.checkpoint_ways import Way, Ways

    torch.manual_seed(rank)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    dist.init_process_group(  # also for one rank: DCP's process wants one
        "gloo",
        store=FileStore(str(store), options.ranks),
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=10),
    )
    state = _state(options.state, rank, options.ranks)
    ways = Ways(folder, state, rank=rank, world=options.ranks, direct=True)
    chosen = [way for way in Way if not options.ways or way.name.lower() in options.ways]
    order = random.Random(0)
    rounds: list[dict[str, list[float]]] = []
    for number in range(options.rounds + 1):
        order.shuffle(chosen)
        found: dict[str, list[float]] = {}
        for way in chosen:
            timing = ways.run(way)
            both = torch.tensor([timing.blocked_s, timing.durable_s], dtype=torch.float64)
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            found[way.value] = both.tolist()
        if number:
            rounds.append(found)
        if rank == 0:
            sys.stderr.write(f"round {number} of {options.rounds}\n")
    if rank == 0:
        results.put(rounds)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # DCP's process and its threads have nothing left to say


def _state(kind: str, rank: int, ranks: int) -> Any:
    """Parameters with Adam's moments, ``Shard(0)`` over the ranks where there are several."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from slurm_forge.checkpoint.state import TrainingState

    size, count = _STATES[kind]
    elements = size // 12 // count if size else _SMALL  # a parameter and two moments of 4 bytes
    rows = max(ranks, elements // 1024 // ranks * ranks) if size else 4
    shape = (rows // ranks, 1024 if size else elements // 4)
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None

    def parameter() -> nn.Parameter:
        local = torch.randn(shape)
        if mesh is None:
            return nn.Parameter(local)
        return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))

    model = nn.Module()
    for number in range(count):
        model.register_parameter(f"p{number}", parameter())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.zero_grad()
    rng = {f"rng/rank-{rank}/torch": torch.get_rng_state()}
    return TrainingState(
        models={"model": model}, optimizers={"optimizer": optimizer}, extra={"step": 1}, rng=rng
    )


def _print(options: Any, rounds: list[dict[str, list[float]]], machine: Machine) -> None:
    from benchmarks.checkpoint_ways import Way

    def column(way: str, which: int) -> list[float | None]:
        return [each.get(way, [None, None])[which] for each in rounds]

    def ratio(way: str, which: int, to: str) -> str | None:
        found = paired_ratio(column(way, which), column(to, 1))
        return None if found is None else found.text()

    rows: list[list[str | None]] = []
    for way in rounds[0]:
        blocked, durable = spread(column(way, 0)), spread(column(way, 1))
        rows.append(
            [
                way,
                None if blocked is None else blocked.text(3),
                ratio(way, 0, Way.COPY.value),
                None if durable is None else durable.text(3),
                ratio(way, 1, Way.WRITE.value),
                ratio(way, 1, Way.OURS.value),
            ]
        )
    rows.sort(key=lambda row: [way.value for way in Way].index(row[0] or ""))
    header = ["way", "held up s", "/ copy", "on disk s", "/ direct write", "/ ours"]
    sys.stdout.write(f"{options.state} of state, {options.ranks} ranks, {len(rounds)} rounds\n")
    sys.stdout.write(f"{machine.text()}\n\n{table(header, rows)}\n")


def _parse(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", choices=sorted(_STATES), default="1GiB")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[])
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="a folder on the disk")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
