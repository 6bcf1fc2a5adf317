"""The ranks of a run as Lightning's cluster environment, and the package that the program uses.

``lightning`` or ``pytorch_lightning``: the one that it has imported.
"""

from __future__ import annotations

import inspect
import sys
from importlib.util import find_spec
from typing import Any

from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.training.loop.run import Run

if "lightning.pytorch" not in sys.modules and (
    "pytorch_lightning" in sys.modules or find_spec("lightning") is None
):
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from pytorch_lightning import Callback
else:
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch import Callback

__all__ = ["Callback", "ForgeEnvironment", "require_supported"]

#: Strategies of which every rank has the whole model, and whose optimizers are torch's.
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class ForgeEnvironment(ClusterEnvironment):
    """The ranks of a run, for ``Trainer(plugins=[ForgeEnvironment(run)])``.

    Lightning takes them as they are: it starts no processes, and requeues no job.

    Args:
        run: The run, from ``slurm_forge.attach`` or as the argument of a training function.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        for fabric in ("lightning.fabric", "lightning_fabric"):  # a program may use both
            module = sys.modules.get(f"{fabric}.plugins.environments")
            if module is not None:
                module.ClusterEnvironment.register(ForgeEnvironment)

    @property
    def creates_processes_externally(self) -> bool:
        """The ranks run already."""
        return True

    @property
    def main_address(self) -> str:
        """Where a single rank meets itself; several have met before."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Any port that is free."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Never by itself: a run is given."""
        return False

    def world_size(self) -> int:
        """The ranks of the run."""
        return self._run.world_size

    def set_world_size(self, size: int) -> None:
        """The run has its ranks."""

    def global_rank(self) -> int:
        """The rank in the run."""
        return self._run.rank

    def set_global_rank(self, rank: int) -> None:
        """The rank has its number."""

    def local_rank(self) -> int:
        """The place of this rank's device among those that Lightning sees."""
        index = self._run.device.index
        return self._run.local_rank if index is None else index

    def node_rank(self) -> int:
        """The node, as far as its ranks are numbered one after the other."""
        return 0 if self._run.rank == self._run.local_rank else 1

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare what the Trainer was given with the ranks there are.

        Raises:
            UsageError: They do not fit.
        """
        _require_ranks(num_devices * num_nodes, self._run)


def _require_ranks(count: int, run: Run) -> None:
    """``UsageError`` where a Trainer has another number of ranks than the run."""
    if count != run.world_size:
        raise UsageError(
            f"the Trainer has {count} ranks (devices x num_nodes), and the run has "
            f"{run.world_size}",
            next_step="Trainer(devices=…, num_nodes=…, plugins=[ForgeEnvironment(run)]): devices "
            "is the number of ranks per node, and their product is the number of ranks.",
        )


def require_supported(trainer: Any, model: Any, run: Run) -> None:
    """``UsageError`` or ``UnsupportedError`` where a Trainer can't train as the run."""
    _require_ranks(trainer.world_size, run)
    strategy = type(trainer.strategy).__name__
    if strategy not in _STRATEGIES:
        raise UnsupportedError(
            f"a Trainer with {strategy}: its checkpoints, or its updates, are its own",
            next_step='Use strategy="ddp", or start the script with slurm-forge exec '
            "(docs/how-to/exec.md).",
        )
    if "dataloader_iter" in inspect.signature(model.training_step).parameters:
        raise UnsupportedError(
            "training_step(dataloader_iter) fetches as many batches as it likes: there is no "
            "position to resume at",
            next_step="Use training_step(batch, batch_idx).",
        )
