"""Launches the jobs of a Hydra sweep as runs of slurm_forge, one task of an array each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

# Hydra finds the launcher by what this registers.
from hydra_plugins.hydra_forge_launcher import config as _config  # noqa: F401

_LOG = logging.getLogger(__name__)
#: Parameters that every executor of submitit has, without a prefix.
_SHARED = frozenset({
    "name", "timeout_min", "nodes", "tasks_per_node", "cpus_per_task", "mem_gb", "stderr_to_stdout",
})  # fmt: skip


class ForgeLauncher(Launcher):
    """``hydra/launcher=forge``: a sweep whose jobs come back, and which can be resumed."""

    def __init__(self, **parameters: Any) -> None:
        self._parameters = {
            name: OmegaConf.to_container(value, resolve=True)
            if OmegaConf.is_config(value)
            else value
            for name, value in parameters.items()
        }
        self._context: HydraContext | None = None
        self._function: TaskFunction | None = None
        self._config = DictConfig({})

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Hydra's protocol: what is to be launched.

        Args:
            hydra_context: The loader of configurations.
            task_function: The function below ``@hydra.main``.
            config: The configuration of the sweep.
        """
        self._context, self._function, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Hydra's protocol: run the jobs, and wait for all of them.

        In a folder (``hydra.sweep.dir``) where this sweep was begun before, finished jobs are not
        run again, held and stopped ones are requeued, and running ones are waited for.

        Args:
            job_overrides: The overrides of each job.
            initial_job_idx: The number of the first.

        Returns:
            What each job has returned, in order.

        Raises:
            SubmissionError: A job can't be submitted, or did not finish.
        """
        # Only here: Hydra loads its launchers whatever is launched.
        import submitit

        from slurm_forge.launch.submit.importing import (
            module_of,
            modules_beside_script,
            path_of_job,
            refuse_not_importable,
        )
        from slurm_forge.launch.submitit.resumable_sweep import ResumableSweep, SweptCall

        if self._function is not None:
            module, path = module_of(self._function), path_of_job(Path.cwd())
            beside = modules_beside_script(self._function)
            for each in beside if module is None else (module, *beside):
                refuse_not_importable(each, path, Path.cwd())
        parameters: dict[str, Any] = dict(self._parameters)
        parameters.pop("max_num_timeout", None)
        folder = Path(str(parameters.pop("submitit_folder"))).absolute()
        executor = submitit.AutoExecutor(folder, cluster="forge")
        executor.update_parameters(
            **{
                key if key in _SHARED else f"forge_{key}": value
                for key, value in parameters.items()
                if value is not None
            }
        )
        calls = []
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            words = filter_overrides(overrides)
            _LOG.info("\t#%s : %s", number, " ".join(words))
            settings = dict(_setting(word) for word in words)
            calls.append(SweptCall(settings, (list(overrides), number, Singleton.get_state())))
        sweep = ResumableSweep(
            executor._executor, str(parameters["name"]), parameters.get("array_parallelism")
        )
        jobs = sweep.submit(self, calls)
        _LOG.info("slurm-forge status %s", sweep.folder)
        return sweep.results(
            jobs, again=f"hydra.sweep.dir={Path(str(self._config.hydra.sweep.dir)).absolute()}"
        )

    def __call__(
        self, overrides: list[str], number: int, singletons: dict[type, Singleton]
    ) -> JobReturn:
        """Run one job, in a rank of its run.

        Args:
            overrides: Those of the job.
            number: Its number in the sweep.
            singletons: Hydra's state where the sweep was launched.

        Returns:
            What Hydra makes of the job.

        Raises:
            Exception: What the function has raised, for the run to learn its cause.
        """
        import submitit

        if self._context is None or self._function is None:
            raise TypeError("a launcher is called by its jobs, after setup and launch")
        Singleton.set_state(singletons)
        setup_globals()
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config.hydra.job) as job:
            job["id"] = submitit.JobEnvironment().job_id
            job["num"] = number
        done = run_job(
            hydra_context=self._context,
            task_function=self._function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        _ = done.return_value  # raises what the function has raised
        return done


def _setting(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value
