"""What standing agents train on the made-up accelerator."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from tests.jobs import Net, Samples


def train(run: forge.Run) -> None:
    """``args``: steps; fault, which strikes rank 1 at step 5 of the first launch: its device, or
    its program (``exception``).
    """
    torch.manual_seed(7)
    net = DistributedDataParallel(Net().to(run.device))
    run.register(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True))
    (run.directory / f"device-{run.launch}-{run.rank}").write_text(str(run.device))
    for batch in run.batches(Samples(), global_batch_size=16, until=forge.Steps(run.args["steps"])):
        if (run.launch, run.step_number, run.rank) == (1, 5, 1):
            if run.args["fault"] == "exception":
                raise ValueError("the program has failed")
            torch.sim.inject(run.args["fault"])
        run.train_step(
            batch, lambda it: torch.nn.functional.cross_entropy(net(it[0]), it[1]), max_norm=1.0
        )
