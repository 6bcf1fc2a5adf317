"""What ``hydra.launcher.*`` may say; names are those of submitit and of Hydra's own launcher.

Hydra executes this before it is in ``sys.modules``, so that annotations can't be looked up later.
"""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional  # noqa: UP035  OmegaConf reads these at run time

from hydra.core.config_store import ConfigStore


@dataclass
class ForgeLauncherConf:
    """The job of each run; what is None is left to Slurm."""

    _target_: str = "hydra_plugins.hydra_forge_launcher.launcher.ForgeLauncher"
    #: Pickles, logs and the folder of runs.
    submitit_folder: str = "${hydra.sweep.dir}/.forge"
    name: str = "${hydra.job.name}"
    timeout_min: int = 60
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: Optional[int] = None  # noqa: UP045
    gpus_per_node: Any = None
    gpus_per_task: Optional[int] = None  # noqa: UP045
    cpus_per_gpu: Optional[int] = None  # noqa: UP045
    mem: Optional[str] = None  # noqa: UP045
    mem_gb: Optional[float] = None  # noqa: UP045
    mem_per_gpu: Optional[str] = None  # noqa: UP045
    mem_per_cpu: Optional[str] = None  # noqa: UP045
    partition: Optional[str] = None  # noqa: UP045
    qos: Optional[str] = None  # noqa: UP045
    account: Optional[str] = None  # noqa: UP045
    constraint: Optional[str] = None  # noqa: UP045
    exclude: Optional[str] = None  # noqa: UP045
    gres: Optional[str] = None  # noqa: UP045
    comment: Optional[str] = None  # noqa: UP045
    #: Nodes beyond those of the ranks.
    spare_nodes: Optional[int] = None  # noqa: UP045
    signal_delay_s: int = 120
    #: How many runs at once.
    array_parallelism: int = 256
    stderr_to_stdout: bool = False
    #: Not used: how often a run comes back is decided by its recovery policy.
    max_num_timeout: int = 0
    setup: Optional[List[str]] = None  # noqa: UP006, UP045
    additional_parameters: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006


ConfigStore.instance().store(
    group="hydra/launcher", name="forge", node=ForgeLauncherConf, provider="slurm_forge"
)
