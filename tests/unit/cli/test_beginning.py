"""``init``: what it writes is valid whatever was asked for, and nothing is written over."""

from __future__ import annotations

import ast
import errno
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge import files
from slurm_forge.cli.start.first_files import (
    FirstFiles,
    InitOptions,
    StartMethod,
    first_files,
    name_from,
)
from slurm_forge.documents import load
from slurm_forge.errors import ConfigError
from slurm_forge.slurm.text.directives import read_directives
from slurm_forge.spec import JobSpec, load_job
from slurm_forge.spec.loading import from_yaml
from slurm_forge.units import format_memory, format_slurm_duration
from tests.unit.cli.conftest import Shell


def made(**options: object) -> FirstFiles:
    return first_files(InitOptions(**{"name": "demo", **options}))


def job_of(found: FirstFiles) -> JobSpec:
    return from_yaml(found.files[0].text)


#: Those that write a job file.
JOB_FILES = [way for way in StartMethod if way is not StartMethod.HYDRA]
texts = st.text(min_size=1, max_size=12)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
maybe = st.none()


@given(
    way=st.sampled_from(JOB_FILES),
    name=names | st.sampled_from(["null", "0123", "1e3", "off", "2024-01-01"]),
    nodes=maybe | st.integers(1, 4000),
    tasks=maybe | st.integers(1, 64),
    gpus=maybe | st.integers(0, 16).map(str) | st.sampled_from(["a100:4", "h100.80:8"]),
    cpus=maybe | st.integers(1, 256),
    mem=maybe | st.sampled_from(["64G", "1500M", "0", "4096"]),
    limit=maybe | st.sampled_from(["12h", "2-00:00:00", "48:00:00", "90m", "30s"]),
    partition=maybe | names | st.sampled_from(["a,b", "off", "long#1"]),
    account=maybe | names,
    entry=maybe | st.sampled_from(["train.py:main", "my.module:train", "a b/x.py:go"]),
    command=maybe | st.lists(texts, min_size=1, max_size=4).map(shlex.join),
    site=maybe | st.sampled_from(["generic", "my site.yaml"]),
)
def test_every_combination_is_a_valid_job_that_says_what_was_asked(
    way: StartMethod, name: str, nodes, tasks, gpus, cpus, mem, limit, partition, account, entry,
    command, site,
) -> None:  # fmt: skip
    try:
        found = made(
            start_method=way, name=name, nodes=nodes, tasks_per_node=tasks, gpus_per_node=gpus,
            mem=mem, cpus_per_task=cpus, time=limit, partition=partition, account=account,
            entry=entry, command=command, site=site,
        )  # fmt: skip
    except ConfigError as error:
        assert error.next_step
        assert re.search(r"--[a-z]", str(error)), f"names no option: {error}"
        # Nothing but these two can be wrong here.
        assert entry is not None or command is not None
        return
    job = job_of(found)
    wanted = job.resources
    assert job.name == name
    assert wanted.nodes == (nodes or 1)
    assert str(wanted.gpus_per_node) == (gpus if gpus not in (None, "0") else "None")
    if tasks is not None:
        assert wanted.tasks_per_node == tasks
    elif wanted.gpus_per_node is not None:
        assert wanted.tasks_per_node == max(1, wanted.gpus_per_node.count)
    assert (wanted.cpus_per_task, wanted.partition, wanted.account) == (cpus, partition, account)
    assert (wanted.time is None) == (limit is None)
    assert (wanted.mem is None) == (mem is None)
    assert job.entry == (entry or (None if job.command else "train.py:train"))
    if command is not None:
        assert list(job.command or ()) == shlex.split(command)
    if "global_batch" in job.args:
        assert job.args["global_batch"] % wanted.tasks == 0, "no rank may get less than another"
    for file in found.files:
        if file.name.endswith(".py"):
            ast.parse(file.text)
        if file.name == "job.sbatch":
            _is_what_was_asked(file.text, job)
    for line in (found.local_command, found.cluster_command):
        assert shlex.split(line)


def _is_what_was_asked(script: str, job: JobSpec) -> None:
    options = dict(
        option.removeprefix("--").partition("=")[::2] for option in read_directives(script)
    )
    wanted = job.resources
    assert options["job-name"] == job.name
    assert options["nodes"] == str(wanted.nodes)
    assert options["ntasks-per-node"] == str(wanted.tasks_per_node)
    assert options.get("partition") == wanted.partition
    if wanted.time is not None:
        assert options["time"] == format_slurm_duration(wanted.time)
    if wanted.mem is not None:
        assert options["mem"] == format_memory(wanted.mem)
    assert script.splitlines()[-1].startswith("exec slurm-forge exec --job train.yaml")
    assert [line for line in script.splitlines() if line and not line.startswith("#")] == [
        script.splitlines()[-1]
    ], "something else would be run"


@given(text=st.text(max_size=20), key=st.sampled_from(["name", "partition", "account", "time",
       "mem", "gpus_per_node", "entry", "site", "template"]))  # fmt: skip
def test_any_text_is_taken_as_it_is_or_refused_by_name(text: str, key: str) -> None:
    try:
        found = made(**{key: text})
    except ConfigError as error:
        assert f"--{key.replace('_', '-')}" in str(error)
        assert error.next_step
        return
    job = job_of(found)
    known = {"name": job.name, "entry": job.entry, "partition": job.resources.partition,
             "account": job.resources.account}  # fmt: skip
    assert known.get(key, text) == text


def test_a_sweep_of_hydra_asks_for_what_was_asked() -> None:
    files = made(
        start_method=StartMethod.HYDRA, name="off", nodes=2, gpus_per_node="a100:4", mem="64G",
        time="90m", partition="long", account="0123", site="my site.yaml",
    )  # fmt: skip
    assert [each.name for each in files.files] == ["train.py", "config.yaml"]
    body = load(files.files[1].text).data["hydra"]
    assert body["job"] == {"name": "off"}
    assert body["launcher"] == {
        "nodes": 2, "tasks_per_node": 4, "gpus_per_node": "a100:4", "mem": "64G",
        "timeout_min": 90, "partition": "long", "account": "0123", "array_parallelism": 8,
    }  # fmt: skip
    assert files.cluster_command.startswith("SLURM_FORGE_SITE='my site.yaml' python train.py -m ")
    with pytest.raises(ConfigError, match="--template: with --way hydra"):
        made(start_method=StartMethod.HYDRA, template="srun")


@pytest.mark.parametrize("way", JOB_FILES)
def test_what_is_commented_out_can_be_used_too(way: StartMethod) -> None:
    text = (
        made(start_method=way, command="srun python own.py" if way is StartMethod.EXEC else None)
        .files[0]
        .text
    )
    lines = "\n".join(_without_mark(line) for line in text.splitlines())
    job = from_yaml(lines)
    assert job.resources.mem == 64 << 30
    assert job.env == {"OMP_NUM_THREADS": "4"}
    assert "\nrecovery:\n" in lines


@pytest.mark.parametrize(
    ("command", "alone"),
    [
        ("srun torchrun --nproc-per-node=2 train.py --out out",
         "torchrun --nproc-per-node=2 train.py --out out"),
        ("srun -n 4 --unbuffered python -u own.py --lr 0.1", "python -u own.py --lr 0.1"),
        ("srun", "python train.py"),
    ],
)  # fmt: skip
def test_a_program_is_tried_here_with_its_own_options_and_without_srun(
    command: str, alone: str
) -> None:
    assert made(start_method=StartMethod.EXEC, command=command).local_command.endswith(
        f" -- {alone}"
    )


_KEY = re.compile(r"( *)# ((?:gpus_per_node|cpus_per_task|mem|time|partition|account):.*)")
_BLOCK = re.compile(
    r"# ((?:program|recovery|setup|env|args|template|container):.*| {2}[a-z_]+: .*)"
)


def _without_mark(line: str) -> str:
    """What a person types who wants what stands behind the #."""
    found = _KEY.fullmatch(line) or _BLOCK.fullmatch(line)
    return "".join(found.groups()) if found else line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--way", "exce"], "--way: unknown value 'exce' (did you mean \"exec\"?)"),
        (["--entry", "a:b", "--command", "x"], "--entry and --command: a job runs one of the two"),
        (["--way", "exec", "--entry", "a:b"], "--entry: slurm-forge starts a command with --way"),
        (["--way", "job", "--command", "x"], "--command: --way job calls a function"),
        (["--way", "submitit", "--entry", "a:b"], "--entry: submit.py imports"),
        (["--name", "a b"], "--name: a name is 1 to 64 letters"),
        (["--time", "soon"], "--time: "),
        (["--mem", "lots"], "--mem: "),
        (["--gpus-per-node", "some"], "--gpus-per-node: expected a number of GPUs"),
        (["--nodes", "0"], "--nodes: "),
        (["--partition", "a b"], "--partition: holds a space"),
        (["--template", "srn"], '--template: unknown value "srn" (did you mean "srun"?)'),
        (["--command", "'"], "--command: can't be split into words"),
        (["--command", ""], "--command: "),
        (["--entry", "train"], "--entry: names no function"),
    ],
)
def test_wrong_options_are_told_by_name(shell: Shell, words: list[str], expected: str) -> None:
    result = shell("init", "new", "--yes", *words)
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
    assert result.stderr.endswith("nothing was written.\n")
    assert not (shell.folder / "new").exists()


def test_where_one_file_can_not_be_written_none_is(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, room = files.create_exclusive, iter([True])

    def on_a_full_disk(path: Path, data: bytes, mode: int) -> bool:
        if next(room, False):
            return create(path, data, mode=mode)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "create_exclusive", on_a_full_disk)
    result = shell("init", "new", "--yes")
    assert result.exit_code != 0
    assert result.stderr.endswith("nothing was written.\n")
    assert list((shell.folder / "new").iterdir()) == []


def test_nothing_is_written_over(shell: Shell) -> None:
    (shell.folder / "demo").mkdir()
    mine = shell.folder / "demo" / "train.py"
    mine.write_text("mine\n")
    result = shell("init", "demo")
    assert result.exit_code == 2
    assert "demo/train.py: it is there already" in result.stderr
    assert "--force" in result.stderr
    assert [mine] == list(mine.parent.iterdir()), "half of it was written"
    assert mine.read_text() == "mine\n"
    # A link that leads nowhere is somebody's, too.
    mine.unlink()
    mine.symlink_to(shell.folder / "elsewhere.py")
    assert shell("init", "demo").exit_code == 2
    assert not (shell.folder / "elsewhere.py").exists()
    assert shell("init", "demo", "--force").exit_code == 0
    assert "def train(" in mine.read_text()
    assert not (shell.folder / "elsewhere.py").exists()


def test_it_says_what_to_type_next(shell: Shell) -> None:
    out = shell("init", "my runs/demo 1", "--site", "generic").stdout
    assert "cd 'my runs/demo 1'" in out
    assert "slurm-forge run train.yaml --runs tried" in out
    assert "slurm-forge submit train.yaml --site generic" in out
    assert load_job(shell.folder / "my runs/demo 1/train.yaml").name == "demo-1"
    assert "cd " not in shell("init", "--force").stdout


def test_a_folder_without_a_usable_name() -> None:
    assert name_from(Path("/")) == "my-run"
    assert name_from(Path("/x/äöü -1")) == "1"


def test_in_a_terminal_it_asks_and_asks_again(tmp_path: Path) -> None:
    answers = ["", "demo", "two", "2", "a100:4", "soon", "8h", "preempt"]
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "slurm_forge.cli.main", "init", "new"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    os.close(theirs)
    said = ""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if not select.select([ours], [], [], 0.2)[0]:
            continue
        try:
            said += os.read(ours, 4096).decode()
        except OSError:  # its side is closed
            break
        if said.endswith(": ") and answers:
            os.write(ours, answers.pop(0).encode() + b"\n")
    assert process.wait(30) == 0, said
    os.close(ours)
    job = load_job(tmp_path / "new" / "train.yaml")
    assert (job.name, job.resources.nodes, job.resources.tasks_per_node) == ("demo", 2, 4)
    assert (str(job.resources.time), job.resources.partition) == ("8:00:00", "preempt")
    assert "not 'two'" in said
    assert "--time: " in said


def test_an_array_is_begun_with_tasks() -> None:
    found = first_files(InitOptions(name="demo", template="array"))
    job = job_of(found)
    assert job.template is not None
    assert (job.template.value, job.chain) == ("array", 10)
