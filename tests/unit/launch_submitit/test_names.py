"""Which parameters cluster="forge" takes, and that no other cluster notices."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import submitit

from slurm_forge.errors import SubmissionError

pytestmark = pytest.mark.usefixtures("submitted")


def forge(folder: Path, **given) -> submitit.AutoExecutor:
    return submitit.AutoExecutor(folder / "logs", cluster="forge", **given)


def parameters(executor: submitit.AutoExecutor) -> dict:
    return executor._executor.parameters


@pytest.mark.parametrize("prefix", ["slurm_", "forge_"])
def test_both_prefixes_mean_the_same(tmp_path, prefix):
    executor = forge(tmp_path)
    executor.update_parameters(
        name="gpt", timeout_min=30, **{prefix + "partition": "long", prefix + "cpus_per_task": 4}
    )
    assert parameters(executor) == {
        "job_name": "gpt",
        "time": 30,
        "partition": "long",
        "cpus_per_task": 4,
    }


@pytest.mark.parametrize("prefix", ["slurm_", "forge_"])
def test_its_own_time_wins_over_the_shared_one(tmp_path, prefix):
    executor = forge(tmp_path)
    executor.update_parameters(timeout_min=30, **{prefix + "time": 90})
    assert parameters(executor)["time"] == 90


def test_both_at_once_is_an_error_even_with_equal_values(tmp_path):
    with pytest.raises(SubmissionError, match="slurm_partition and forge_partition"):
        forge(tmp_path).update_parameters(slurm_partition="a", forge_partition="a")


@pytest.mark.parametrize(
    "given", [{"slurm_partitoin": "a"}, {"forge_partitoin": "a"}, {"nope_partition": "a"}]
)
def test_unknown_ones_are_refused(tmp_path, given):
    with pytest.raises(NameError, match=r"nope|partitoin"):
        forge(tmp_path).update_parameters(**given)


def test_those_of_other_executors_are_ignored_as_submitit_does(tmp_path):
    executor = forge(tmp_path)
    executor.update_parameters(timeout_min=3, local_setup=["true"])
    assert parameters(executor) == {"time": 3}


def test_names_without_prefix_are_ours_on_forge(tmp_path):
    executor = forge(tmp_path)
    with pytest.warns(UserWarning, match=r"forge_(partition|setup)"):
        executor.update_parameters(partition="long", setup=["module load x"])
    assert parameters(executor) == {"partition": "long", "setup": ["module load x"]}


@pytest.mark.parametrize("prefix", ["slurm_", "forge_"])
def test_the_constructor_takes_both_prefixes_too(tmp_path, prefix):
    executor = forge(
        tmp_path, **{prefix + "python": "/opt/x/python", prefix + "max_num_timeout": 7}
    )
    assert executor._executor.python == "/opt/x/python"
    assert executor._executor.max_num_timeout == 7
    with pytest.raises(SubmissionError, match="slurm_python and forge_python"):
        forge(tmp_path, slurm_python="a", forge_python="a")


def test_the_first_executor_of_a_process_takes_them_as_well(tmp_path):
    # Submitit loads the plugin while that one is being made.
    program = (
        "import submitit\n"
        f"logs = {str(tmp_path / 'logs')!r}\n"
        "e = submitit.AutoExecutor(logs, cluster='forge', slurm_python='/p')\n"
        "e.update_parameters(slurm_partition='long')\n"
        "assert e._executor.python == '/p', e._executor.python\n"
        "assert e._executor.parameters == {'partition': 'long'}, e._executor.parameters\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ, timeout=60)


# -- other clusters -------------------------------------------------------------------------------


def test_slurm_keeps_its_own_and_leaves_ours_alone(tmp_path):
    executor = submitit.AutoExecutor(tmp_path, cluster="slurm")
    executor.update_parameters(slurm_partition="a", forge_partition="b", timeout_min=7)
    assert parameters(executor) == {"partition": "a", "time": 7}


def test_without_prefix_they_stay_what_they_are_without_us(tmp_path):
    # "setup" is a parameter of slurm and local; in submitit the later one of the two has it.
    expected = {"slurm": {"partition": "a"}, "local": {"setup": ["true"]}}
    for cluster, parts in expected.items():
        executor = submitit.AutoExecutor(tmp_path, cluster=cluster)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            executor.update_parameters(partition="a", setup=["true"])
        assert parameters(executor) == parts
        assert sorted(str(w.message).split("'")[3] for w in told) == [
            "local_setup",
            "slurm_partition",
        ]


def test_local_and_debug_are_as_before(tmp_path):
    local = submitit.AutoExecutor(tmp_path, cluster="local")
    local.update_parameters(timeout_min=2, slurm_partition="x", forge_partition="y")
    assert parameters(local) == {"timeout_min": 2}
    debug = submitit.AutoExecutor(tmp_path, cluster="debug")
    debug.update_parameters(timeout_min=2, slurm_partition="x")
    assert debug.submit(len, "four").result() == 4


def test_it_is_never_chosen_unasked(tmp_path):
    assert submitit.AutoExecutor.which() == "slurm"
    assert submitit.AutoExecutor(tmp_path).cluster == "slurm"


def test_without_slurm_submitit_says_so(tmp_path, no_slurm):
    assert submitit.AutoExecutor.which() == "local"
    with pytest.raises(RuntimeError, match="srun"):
        forge(tmp_path)
