"""The workload as submitit's documentation shows it: a callable that checkpoints itself."""

from __future__ import annotations

from typing import Any

import submitit

from benchmarks.restart_plain import PlainTraining, Workload

__all__ = ["StockTraining", "Workload"]


class StockTraining(PlainTraining):
    """``executor.submit(StockTraining(), workload)``."""

    def __call__(self, workload: Workload) -> int:
        """Every task."""
        environment = submitit.helpers.TorchDistributedEnvironment()
        # The names of a test cluster's nodes, all on this machine, do not resolve.
        environment.master_addr = "127.0.0.1"
        environment.export(set_cuda_visible_devices=False)
        return self.train(workload, environment.rank)

    def checkpoint(self, workload: Workload) -> Any:
        """Called by submitit, on rank 0 only, from its signal handler."""
        self._save(workload)
        return submitit.helpers.DelayedSubmission(StockTraining(), workload)
