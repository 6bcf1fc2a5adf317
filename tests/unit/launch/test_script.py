"""The batch script: what a person would read, and what nobody can smuggle into it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from slurm_forge.errors import ConfigError
from slurm_forge.launch.render.batch_script import render
from slurm_forge.launch.submit.submission import keep_start_file
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.slurm.text.directives import read_directives
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.launchers import Template
from slurm_forge.spec.run_file import RunFile

RUN = RunDirectory(Path("/data/my runs/it's $(here)"))
SITE = Site(name="generic")


def file_of(
    *, python: str = "/opt/py/bin/python", env: dict | None = None, **job: object
) -> RunFile:
    spec = job_from_mapping({"name": "tiny", "entry": "a.b:train", **job})
    return RunFile(submitted_from="/home/me", python=python, env=env or {}, job=spec)


@pytest.mark.parametrize(
    ("job", "nodes", "outlives"),
    [
        ({"resources": {"nodes": 3, "spare_nodes": 2}}, 5, True),
        ({"resources": {"nodes": 3}}, 3, False),
        (
            {
                "resources": {"nodes": 3},
                "recovery": {"node_fail": [{"do": "fewer_nodes", "times": 1}, {"do": "requeue"}]},
            },
            3,
            True,
        ),
    ],
)
def test_spare_nodes_are_asked_for_and_the_job_outlives_a_lost_one(
    job: dict, nodes: int, outlives: bool
) -> None:
    lines = render(file_of(**job), SITE, RUN).splitlines()
    assert f"#SBATCH --nodes={nodes}" in lines
    assert ("#SBATCH --no-kill" in lines) is outlives


def test_the_script_says_what_was_asked_for_and_execs_the_supervisor() -> None:
    resources = {
        "nodes": 2, "tasks_per_node": 4, "gpus_per_node": 4, "cpus_per_task": 8, "mem": "64G",
        "time": "12:00:00", "partition": "preempt", "extra": {"mail-type": "FAIL"},
    }  # fmt: skip
    text = render(
        file_of(resources=resources, setup=["module load cuda"], env={"NCCL_DEBUG": "WARN"}),
        SITE,
        RunDirectory(Path("/data/runs/tiny")),
    )
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "#SBATCH --job-name=tiny",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --mem=64G",
        "#SBATCH --time=12:00:00",
        "#SBATCH --partition=preempt",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=/data/runs/tiny/submissions/%x-%j.out",
        "#SBATCH --mail-type=FAIL",
    ]
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "forge_defaults NCCL_DEBUG=WARN" in lines
    assert "module load cuda" in lines
    assert lines[-3:] == [
        "forge_exec /opt/py/bin/python -m slurm_forge.process supervise "
        "/data/runs/tiny --via sbatch -- \\",
        "    srun --kill-on-bad-exit=1 --unbuffered \\",
        "    /opt/py/bin/python -u -m slurm_forge.process worker /data/runs/tiny",
    ]


def test_a_short_limit_carries_no_early_warning() -> None:
    """Slurm may send it a minute early; the supervisor's own clock is exact."""
    text = render(file_of(resources={"time": "00:02:00"}), SITE, RUN)
    assert "--signal" not in text


def test_what_the_site_rejects_is_refused_before_anything_is_submitted() -> None:
    site = Site(name="vista", rejected_options=("--mem",))
    with pytest.raises(ConfigError, match="vista refuses the option --mem"):
        render(file_of(resources={"mem": "4G"}), site, RUN)


def runs_as(text: str, tmp_path: Path) -> list[str]:
    """The words that the script would exec, run by a real bash with a harmless interpreter."""
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=20
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def written(run: RunDirectory, file: RunFile) -> str:
    """The script, and what it sources in the folder of the run."""
    text = render(file, SITE, run)
    run.submissions.mkdir(parents=True)
    keep_start_file(run.submissions, text)
    return text


def interpreter(tmp_path: Path, name: str = "python") -> Path:
    """Can import what it likes; of a module it prints its arguments, NUL after each."""
    path = tmp_path / name
    path.write_text('#!/bin/bash\n[ "$1" = -c ] || printf \'%s\\0\' "$@"\n')
    path.chmod(0o755)
    return path


def test_a_weird_run_directory_reaches_the_supervisor_as_it_is(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "py thon'$(touch canary)")
    run = RunDirectory(tmp_path / "my runs" / "it's $(touch canary)")
    words = runs_as(written(run, file_of(python=str(python))), tmp_path)
    assert words == [
        *("-m", "slurm_forge.process", "supervise"),
        *(str(run.path), "--via", "sbatch", "--"),
        *("srun", "--kill-on-bad-exit=1", "--unbuffered"),
        *(str(python), "-u", "-m", "slurm_forge.process", "worker", str(run.path)),
    ]
    assert not (tmp_path / "canary").exists()


# Mostly what is allowed in a path and dangerous in a shell; now and then what is never allowed.
NASTY = st.one_of(
    st.text(st.sampled_from(list("ab1 '\"\\$`();&|<>#*!{}[]~=-%é")), max_size=30),
    st.text(st.sampled_from(list("a1 \t\n\r\0'\x1b\u202e#")), max_size=10),
)


@given(NASTY, NASTY, NASTY)
def test_no_text_becomes_a_directive_or_a_command(
    tmp_path_factory: pytest.TempPathFactory, value: str, path: str, option: str
) -> None:
    """Whatever is written into a job: refused, or it arrives as it is and nothing else happens."""
    folder, runs = tmp_path_factory.mktemp("fuzz"), tmp_path_factory.mktemp("runs")
    python = interpreter(folder)
    run = RunDirectory(runs / f"x{path.replace(chr(0), '')}")
    try:
        file = file_of(
            python=str(python),
            env={"WORD": value.replace(chr(0), "")},
            resources={"partition": "p", "extra": {"comment": option}} if option else {},
        )
        text = written(run, file)
    except (ConfigError, ValueError):
        return
    options = [line.split("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    always = ["job-name", "nodes", "ntasks-per-node", "requeue", "open-mode", "output"]
    asked = ["partition", "comment"] if option else []
    assert sorted(options) == sorted(f"#SBATCH --{name}" for name in (*always, *asked))
    event("rendered")
    assert runs_as(text, folder)[3] == str(run.path)
    assert {entry.name for entry in folder.iterdir()} == {"python", "job.sbatch"}


@pytest.mark.parametrize(
    "line",
    [
        "trap 'rm -rf $TMP' EXIT",
        "trap cleanup SIGTERM",
        "mkdir x && trap 'a; b' ERR 0",
        "if true; then trap - TERM; fi",
        "trap EXIT",
        "trap '\n  two lines\n' INT",
        "# it's hard to read\ntrap 'x' USR2",
    ],
)
def test_a_setup_that_takes_our_traps_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a trap on .* replaces that of the batch script"
    ) as told:
        _with_setup(tmp_path, line)
    assert "script of their own" in told.value.next_step


@pytest.mark.parametrize(
    "line",
    [
        "trap 'x' RETURN",
        "echo trap EXIT",
        "trap -p EXIT",
        "# trap 'x' EXIT",
        "trap 'x' RETURN\nexport ERR=1",
        "bash -c 'trap x EXIT; work'",
        "module load trap; echo TERM",
    ],
)
def test_other_traps_are_the_setup_s_own_business(tmp_path: Path, line: str) -> None:
    assert line.splitlines()[0] in _with_setup(tmp_path, line)


def _with_setup(folder: Path, line: str) -> str:
    job = job_from_mapping({"name": "r", "entry": "a:b", "setup": line.splitlines()})
    file = RunFile(submitted_from="/", python="python", job=job)
    return render(file, Site(name="generic"), RunDirectory.at(folder / "r"))


def test_a_value_is_one_option_whatever_it_holds() -> None:
    extra = {"mail-type": "FAIL --array=1-9", "comment": "100 % #1 of 2", "wckey": "a#b"}
    text = render(file_of(resources={"extra": extra, "partition": "p#q"}), SITE, RUN)
    options = read_directives(text)
    assert {f"--{name}={value}" for name, value in extra.items()} <= set(options)
    assert "--partition=p#q" in options
    assert not any(option.startswith("--array") for option in options)


def test_a_percent_sign_in_the_path_of_the_run_is_only_that() -> None:
    text = render(file_of(), SITE, RunDirectory(Path("/data/50%done/%j")))
    assert "--output=/data/50%%done/%%j/submissions/%x-%j.out" in read_directives(text)


def test_a_path_that_slurm_can_not_write_to_is_refused() -> None:
    with pytest.raises(ConfigError, match="the path of the run holds a backslash"):
        render(file_of(), SITE, RunDirectory(Path("/data/a\\b")))


def test_an_array_starts_what_its_job_would_without_it() -> None:
    """A command once, as it is; whatever it is, the attempts are tasks of one array."""
    for more in (
        {"entry": "train:main"},
        {"entry": None, "command": ["srun", "python", "train.py"]},
        {"container": {"runtime": "apptainer", "image": "/x.sif"}},
    ):
        whole = file_of(**more)
        alone = render(whole, SITE, RUN).splitlines()
        job = whole.job.model_copy(update={"template": Template.ARRAY, "chain": 7})
        chained = render(whole.model_copy(update={"job": job}), SITE, RUN).splitlines()
        assert "#SBATCH --array=1-7%1" in chained
        only = [line for line in chained if line not in alone and not line.startswith("#")]
        # A broken environment is found out once for all (tests/slurm/test_chain_faults.py).
        source, start = only
        assert " --chain; }" in source
        assert start.endswith("--via 'sbatch array' -- \\")
        begun = start.partition(" --via ")[0]
        assert [line for line in alone if line.partition(" --via ")[0] == begun]
