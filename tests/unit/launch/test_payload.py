"""What a script starts: the words behind ``--``, for each template and container."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.launch.render.batch_script import payload, render, template_name
from slurm_forge.launch.render.containers import into_container
from slurm_forge.launch.render.launch_command import has_shield, step_command
from slurm_forge.launch.render.sbatch_options import asked_options
from slurm_forge.launch.supervisor.job_step import with_agent
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.parts import Container
from slurm_forge.spec import JobSpec, job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.plan import RecoveryPlan, Variable

RUN = RunDirectory(Path("/runs/tiny"))
SITE = Site(name="generic")
PYTHON = "/opt/py/bin/python"
SHIELD = ("-m", "slurm_forge.process", "shield")
WORKER = ("-u", "-m", "slurm_forge.process", "worker", "/runs/tiny")
SRUN = ("srun", "--kill-on-bad-exit=1", "--unbuffered")
MEETING = (
    "--nnodes={nnodes}", "--node-rank={node_rank}", "--master-addr={master_addr}",
    "--master-port={master_port}", "--max-restarts=0",
)  # fmt: skip
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=4")
IMAGE = {"runtime": "apptainer", "image": "/i.sif"}


def job_of(**keys: object) -> JobSpec:
    entry = {} if "command" in keys else {"entry": "a.b:train"}
    return job_from_mapping(
        {"name": "tiny", "resources": {"nodes": 2, "tasks_per_node": 4}, **entry, **keys}
    )


def words(site: Site = SITE, **keys: object) -> list[tuple[str, ...]]:
    file = RunFile(submitted_from="/home/me", python=PYTHON, job=job_of(**keys))
    return list(payload(file, site, RUN))


def test_an_entry_is_started_by_srun_or_by_torchrun_below_the_shield() -> None:
    assert words() == [SRUN, (PYTHON, *WORKER)]
    assert words(template="srun") == words()
    assert words(template="torchrun") == [
        SRUN,
        (PYTHON, *SHIELD, "--"),
        (PYTHON, *TORCHRUN),
        MEETING,
        WORKER[1:],
    ]


def test_what_the_job_file_sets_reaches_a_command_in_a_container_that_forgets() -> None:
    """A worker of ours reads it from the run; a command has nothing but its environment."""
    given = {"WANDB_MODE": "offline", "NCCL_SOCKET_IFNAME": "hsn", "NCCL_DEBUG": "INFO", "OWN": "x"}
    plan = RecoveryPlan(variables=(Variable("NCCL_DEBUG", "INFO"),))
    for template in (None, "srun", "torchrun"):
        for option, forgets in (("--cleanenv", True), ("--writable-tmpfs", False)):
            job = job_of(
                command=["train.py"], template=template, env={"WANDB_MODE": "offline"},
                container={**IMAGE, "options": [option]},
            )  # fmt: skip
            file = RunFile(
                submitted_from="/home/me", python=PYTHON, job=job, env={"NCCL_SOCKET_IFNAME": "hsn"}
            )
            command = [word for line in payload(file, SITE, RUN) for word in line]
            found = into_container(command, file, plan, given)
            more = {f"APPTAINERENV_{name}": given[name] for name in given if name != "OWN"}
            assert found == ({**given, **more} if forgets else given)


def test_a_relative_image_is_found_from_wherever_the_job_is_handed_in_again() -> None:
    """``slurm-forge requeue`` is typed anywhere, and a successor starts where its job did."""
    for given, found in (
        ("images/my torch.sif", "/home/me/images/my torch.sif"),
        ("/i.sif", "/i.sif"),
        ("docker://pytorch/pytorch:2", "docker://pytorch/pytorch:2"),
    ):
        assert found in words(container={**IMAGE, "image": given})[2]


def test_a_container_outside_of_srun_stands_below_the_shield() -> None:
    inside = (
        "apptainer", "exec", "--bind=/runs", "--bind=/home/me", "--bind=/data:/d:ro",
        "--pwd=/home/me", "--cleanenv", "/i.sif",
    )  # fmt: skip
    more = {"mounts": ["/data:/d:ro"], "options": ["--cleanenv"], "python": "/env/bin/python3"}
    found = words(container={**IMAGE, **more})
    assert found == [SRUN, (PYTHON, *SHIELD, "--"), inside, ("/env/bin/python3", *WORKER)]
    flat = [word for line in found[1:] for word in line]
    assert has_shield(flat)
    agent = with_agent(flat, "/runs/tiny")
    assert agent is not None
    assert agent[-4:] == ("-m", "slurm_forge.process", "agent", "/runs/tiny")
    both = words(container=IMAGE, template="torchrun")
    assert both[3:] == [("python3", *TORCHRUN), MEETING, WORKER[1:]]
    assert with_agent([word for line in both for word in line], "/runs/tiny") is None


def test_pyxis_is_options_of_srun_and_its_task_is_ours() -> None:
    options = (
        "--container-image=nvcr.io#a/b", "--container-mounts=/runs:/runs,/home/me:/home/me,/d:/d",
        "--container-workdir=/home/me", "--container-writable",
    )  # fmt: skip
    spec = {"runtime": "pyxis", "image": "nvcr.io#a/b", "mounts": ["/d"]}
    spec["options"] = ["--container-writable"]
    assert words(container=spec) == [SRUN, options, ("python3", *WORKER)]
    # The shield is inside, too: srun has put the whole task there.
    assert words(container=spec, template="torchrun")[2] == ("python3", *SHIELD, "--")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["train.py", "--lr=1"], [(PYTHON, *TORCHRUN), MEETING, ("train.py", "--lr=1")]),
        (["python3", "-u", "train.py"], [("python3", *TORCHRUN), MEETING, ("train.py",)]),
        (["python", "-m", "a.b", "-x"], [("python", *TORCHRUN), MEETING, ("-m", "a.b", "-x")]),
        (
            ["python", "-O", "train.py"],
            [(PYTHON, *TORCHRUN), MEETING, ("--no-python", "python", "-O", "train.py")],
        ),
        (["./train.sh"], [(PYTHON, *TORCHRUN), MEETING, ("--no-python", "./train.sh")]),
    ],
)
def test_a_command_below_torchrun(command: list[str], line: list[tuple[str, ...]]) -> None:
    found = words(command=command, template="torchrun")
    assert found == [SRUN, (PYTHON, *SHIELD, "--pass=SIGTERM", "--"), *line]


def test_a_command_without_a_template_is_started_as_it_is() -> None:
    assert words(command=["./train.sh", "x"]) == [("./train.sh", "x")]
    assert words(command=["./train.sh"], template="srun") == [SRUN, ("./train.sh",)]
    in_image = words(command=["./train.sh"], container=IMAGE)
    assert [line[0] for line in in_image] == ["apptainer", "./train.sh"]
    told = words(
        command=["./train.sh"], container=IMAGE, template="srun", program={"notify": "USR1"}
    )
    assert told[1] == (PYTHON, *SHIELD, "--pass=SIGUSR1", "--")


def test_what_a_site_says_of_its_containers_is_used() -> None:
    hint = Container(
        runtime="singularity", command="singularity run --rocm <image>", modules=("bindings",),
        srun_options=("--network=x", "--image=<image>"), sbatch_options=("--constraint=c",),
    )  # fmt: skip
    site = Site(name="there", containers=(Container(runtime="sarus"), hint))
    found = words(site, container={"image": "/i.sif"})
    assert found[1] == ("--network=x",)
    assert found[3][:3] == ("singularity", "run", "--rocm")
    job = job_of(container={"image": "/i.sif"})
    assert "--constraint=c" in asked_options(job, site, RUN)
    file = RunFile(submitted_from="/home/me", python=PYTHON, job=job)
    assert "module load bindings" in render(file, site, RUN)
    # Where a place in the hint is not known, it is not used.
    strange = Container(runtime="singularity", command="singularity exec --x=<y> <image>")
    plain = words(Site(name="there", containers=(strange,)), container={"image": "/i.sif"})
    assert plain[2][:3] == ("singularity", "exec", "--bind=/runs")


def test_gpus_are_shown_to_a_container_by_the_backend() -> None:
    assert words(Site(name="amd", backend="rccl"), container=IMAGE)[2][2] == "--rocm"
    assert words(container=IMAGE, resources={"gpus_per_node": 2})[2][2] == "--nv"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"container": {"image": "x"}}, "does not say what runs it"),
        (
            {"container": {"runtime": "pyxis", "image": "x"}, "command": ["a"]},
            "pyxis is an option of srun, and the command is started without it",
        ),
    ],
)
def test_what_can_not_be_started_is_refused(keys: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        words(**keys)


def test_a_folder_that_no_mount_can_name_is_refused() -> None:
    file = RunFile(submitted_from="/home/a,b", python=PYTHON, job=job_of(container=IMAGE))
    with pytest.raises(ConfigError, match="/home/a,b can't be mounted"):
        payload(file, SITE, RUN)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "srun"),
        ({"template": "torchrun"}, "torchrun"),
        ({"container": IMAGE}, "apptainer"),
        ({"container": IMAGE, "template": "torchrun"}, "apptainer"),
        ({"container": {"runtime": "pyxis", "image": "x"}}, "pyxis"),
        ({"command": ["a"]}, "exec"),
        ({"command": ["a"], "template": "srun"}, "srun"),
        ({"template": "array", "chain": 3}, "srun"),
        ({"command": ["a"], "template": "array", "chain": 3}, "exec"),
        ({"container": IMAGE, "template": "array", "chain": 3}, "apptainer"),
    ],
)
def test_each_has_its_template(keys: dict, name: str) -> None:
    assert template_name(job_of(**keys), SITE) == f"{name}.sbatch"


def test_torchrun_is_one_task_with_what_its_ranks_need() -> None:
    wanted = {"nodes": 2, "tasks_per_node": 4, "cpus_per_task": 8, "gpus_per_task": "a100:1"}
    options = asked_options(job_of(template="torchrun", resources=wanted), SITE, RUN)
    assert {"--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=a100:4"} <= set(options)
    assert not [each for each in options if each.startswith("--gpus-per-task")]


def test_the_options_in_a_script_are_the_options_of_its_step() -> None:
    """Who edits them there has the last word; submitit's script leaves them to the site."""
    step = step_command(["srun", "--cpu-bind=none", "python"], ["--cpu-bind=cores"])
    assert (step.words, step.options) == (("--cpu-bind=none", "python"), ())
    step = step_command(["--output=x", "python"], ["--cpu-bind=cores"])
    assert (step.words, step.options) == (("--output=x", "python"), ("--cpu-bind=cores",))
