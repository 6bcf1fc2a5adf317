"""What cluster="forge" hands to sbatch, and what it leaves for the job to find."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import pickletools
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import submitit
from submitit.core.utils import DelayedSubmission

import slurm_forge
from slurm_forge.errors import ConfigError, ForgeError, SubmissionError, UnsafeFileError
from slurm_forge.launch.render.batch_script import submitted_lines
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import (
    create_run,
    run_state,
)
from slurm_forge.launch.submitit.job import CALL_AGAIN, ForgeCall, ForgeJob
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import read_run_file
from tests.unit.launch_submitit.programs import Countdown, Trainer, add, learn, train


def forge(folder: Path, **parameters) -> submitit.AutoExecutor:
    executor = submitit.AutoExecutor(folder, cluster="forge")
    executor.update_parameters(**{"timeout_min": 60, **parameters})
    executor._executor._throttling = 0.0
    return executor


def new_run(folder: Path, name: str = "run", **resources: int) -> RunDirectory:
    entry = "tests.unit.launch_submitit.programs:train"
    job = job_from_mapping({"name": name, "entry": entry, "resources": resources})
    return create_run(job, runs=folder, site=find_site("generic"), submitted_from=Path.cwd())[0]


def options(script: str) -> dict[str, str]:
    """As sbatch reads them."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    return {name: "".join(shlex.split(value)) for name, value in found}


def started(script: str) -> str:
    """The line that starts the supervisor."""
    (line,) = (line for line in script.splitlines() if " slurm_forge.process supervise " in line)
    return line


def command(script: str) -> list[str]:
    """The words of that line."""
    return shlex.split(started(script))


def checked(script: str) -> str:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    return script


# -- the script -----------------------------------------------------------------------------------


def test_a_user_without_a_name_can_submit(tmp_path, submitted, monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert forge(tmp_path / "logs").submit(ForgeJob(str(new_run(tmp_path).path))).job_id == "4000"


def test_the_whole_script(tmp_path, submitted):
    logs = tmp_path / "logs"
    run = new_run(tmp_path)
    executor = forge(
        logs,
        name="gpt",
        nodes=2,
        tasks_per_node=4,
        slurm_partition="long",
        slurm_setup=["module load cuda"],
        slurm_srun_args=["--cpu-bind=none"],
    )
    job = executor.submit(ForgeJob(str(run.path)))
    assert job.job_id == "4000"
    python = shlex.quote(sys.executable)
    expected = f"""#!/bin/bash

# Parameters
#SBATCH --error={logs}/%j_0_log.err
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output={logs}/%j_0_log.out
#SBATCH --partition=long
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=60
#SBATCH --wckey=submitit

# setup
GUARD
module load cuda
LAID OUT

# command
export SUBMITIT_EXECUTOR=slurm
forge_exec {python} -m slurm_forge.process supervise {run.path} --via 'submitit forge' -- \
--open-mode=append --output {logs}/%j_%t_log.out --error {logs}/%j_%t_log.err --cpu-bind=none \
{python} -u -m submitit.core._submit {logs}
"""
    script = checked((submitted / "0").read_text())
    for name, first, last in (
        ("GUARD", "# A start that fails", "exit 1\nfi"),
        ("LAID OUT", "# Whoever submitted", "not_started"),
    ):
        begin = script.index(first)
        end = script.index(last, begin) + len(last)
        script = script[:begin] + name + script[script.index("\n", end) :]
    assert script == expected


@pytest.mark.parametrize(("task", "name"), [("", "7"), ("3", "7_3")])
def test_a_job_lays_out_what_its_killed_submitter_has_not(tmp_path, task, name):
    logs, kept = tmp_path / "the logs", tmp_path / "kept"
    logs.mkdir()
    kept.mkdir()
    (kept / "submitted.pkl").write_text("kept")
    job = {"SLURM_JOB_ID": "7"}
    if task:
        job = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": task}
    script = f"sleep() {{ :; }}\nforge={kept}/start.bash\n{submitted_lines(logs)}"

    def start() -> str:
        subprocess.run(["bash", "-euc", script], env=job, check=True)
        return (logs / f"{name}_submitted.pkl").read_text()

    assert start() == "kept"
    (logs / f"{name}_submitted.pkl").write_text("what a preempted start has saved")
    assert start() == "what a preempted start has saved"


WEIRD = [
    "with spaces",
    "it's",
    'say "so"',
    "$(touch owned)",
    "`touch owned`",
    "semi;colon & more",
    "ünï→code",
    "-dash",
    "#hash $HOME *",
]


@pytest.mark.parametrize("name", WEIRD)
def test_paths_are_quoted_for_sbatch_and_for_the_shell(tmp_path, submitted, name):
    folder = tmp_path / name
    run = new_run(folder)
    forge(folder / "logs").submit(ForgeJob(str(run.path)))
    script = checked((submitted / "0").read_text())
    assert options(script)["output"] == f"{folder}/logs/%j_0_log.out"
    words = command(script)
    assert words[words.index("supervise") + 1] == str(run.path)
    assert words[words.index("--output") + 1] == f"{folder}/logs/%j_%t_log.out"
    assert words[-1] == f"{folder}/logs"
    # The shell agrees: what it would run is this list of words and nothing else.
    last = started(script).replace("forge_exec ", "printf '%s\\n' ", 1)
    told = subprocess.check_output(["bash", "-c", last], text=True, cwd=tmp_path)
    assert told.splitlines() == words[1:]
    assert not (tmp_path / "owned").exists()


def test_ranks_are_started_by_the_supervisor_and_by_nobody_else(tmp_path, submitted):
    forge(tmp_path / "logs").submit(train)
    words = command((submitted / "0").read_text())
    assert words[0] == "forge_exec"
    assert "srun" not in words


def test_a_teardown_is_run_after_the_supervisor(tmp_path, submitted):
    forge(tmp_path / "logs", slurm_teardown=["rm -rf /scratch/x"]).submit(train)
    lines = checked((submitted / "0").read_text()).splitlines()
    supervisor = next(
        i for i, line in enumerate(lines) if " -m slurm_forge.process supervise " in line
    )
    assert not lines[supervisor].startswith("exec"), "the teardown would never come"
    assert lines.index("rm -rf /scratch/x") > supervisor


def test_setup_and_names_may_hold_anything(tmp_path, submitted):
    setup = ["cat <<'END'\nslurm_forge_payload\n#SBATCH --signal=USR1@1\x0c\u2028x\nEND"]
    forge(tmp_path / "logs", slurm_setup=setup, name="a b/c").submit(train)
    script = checked((submitted / "0").read_text())
    assert setup[0] in script
    assert script.count(" slurm_forge.process supervise /") == 1
    assert options(script)["job-name"] == "a b/c"
    (run,) = (tmp_path / "logs" / "runs").glob("[!.]*")
    assert re.fullmatch("a-b-c-[0-9a-f]{6}", run.name)


def test_a_line_break_in_an_option_is_refused(tmp_path, submitted):
    executor = forge(tmp_path / "logs", slurm_comment="x\nrm -rf ~")
    with pytest.raises(SubmissionError, match="one line of printable text"):
        executor.submit(train)
    assert list(submitted.iterdir()) == []


@pytest.mark.parametrize(
    ("limit", "warned"),
    [
        (9, False),
        (10, True),
        ("00:09:59", False),
        ("1-00:00:00", True),
        ("30", True),
        ("UNLIMITED", True),
    ],
)
def test_short_jobs_get_no_early_signal(tmp_path, submitted, limit, warned):
    executor = forge(tmp_path / "logs")
    executor.update_parameters(slurm_time=limit)
    executor.submit(train)
    assert ("signal" in options((submitted / "0").read_text())) is warned


def test_a_signal_that_was_asked_for_stays(tmp_path, submitted):
    extra = {"signal": "USR1@30"}
    forge(tmp_path / "logs", timeout_min=5, slurm_additional_parameters=extra).submit(train)
    assert options((submitted / "0").read_text())["signal"] == "USR1@30"


def test_a_time_that_is_none_is_refused(tmp_path, submitted):
    executor = forge(tmp_path / "logs")
    executor.update_parameters(slurm_time="tomorrow")
    with pytest.raises(SubmissionError, match="no time limit"):
        executor.submit(train)


def test_jobs_are_requeueable_unless_the_user_says_no(tmp_path, submitted):
    forge(tmp_path / "logs").submit(train)
    extra = {"no_requeue": True}
    forge(tmp_path / "logs", slurm_additional_parameters=extra).submit(train)
    asked = [options((submitted / str(number)).read_text()) for number in (0, 1)]
    assert "requeue" in asked[0]
    assert "requeue" not in asked[1]
    assert "no-requeue" in asked[1]


def test_one_log_for_both_streams_where_that_is_asked_for(tmp_path, submitted):
    forge(tmp_path / "logs", stderr_to_stdout=True).submit(train)
    script = (submitted / "0").read_text()
    assert "error" not in options(script)
    assert "--error" not in command(script)


def test_without_srun_there_is_nothing_to_start_ranks_with(tmp_path, submitted):
    executor = forge(tmp_path / "logs", slurm_use_srun=False)
    with pytest.raises(SubmissionError, match="needs srun"):
        executor.submit(train)


def test_another_interpreter_starts_supervisor_and_ranks(tmp_path, submitted):
    executor = submitit.AutoExecutor(
        tmp_path / "logs", cluster="forge", slurm_python="apptainer exec image.sif python"
    )
    executor.submit(train)
    line = started((submitted / "0").read_text())
    assert line.startswith(
        "forge_exec apptainer exec image.sif python -m slurm_forge.process supervise "
    )
    assert " apptainer exec image.sif python -u -m submitit.core._submit " in line


# -- what is submitted ----------------------------------------------------------------------------


def pickled(job: submitit.Job) -> DelayedSubmission:
    return DelayedSubmission.load(job.paths.submitted_pickle)


def test_a_training_function_becomes_a_run(tmp_path, submitted, monkeypatch):
    monkeypatch.chdir(tmp_path)
    executor = forge(tmp_path / "logs", nodes=2, tasks_per_node=3, name="gpt")
    job = executor.submit(train, lr=0.1, layers=[1, 2])
    pointer = pickled(job).function
    run = RunDirectory.existing(pointer.run)
    assert run.path.parent == tmp_path / "logs" / "runs"
    file = read_run_file(run.spec_file)
    assert file.job.entry == "tests.unit.launch_submitit.programs:train"
    assert file.job.args == {"lr": 0.1, "layers": [1, 2]}
    assert (file.job.resources.nodes, file.job.resources.tasks_per_node) == (2, 3)
    assert file.submitted_from == str(tmp_path)
    assert run_state(run).job == job.job_id == "4000"


def test_a_pickle_is_a_pointer_and_nothing_else(tmp_path, submitted):
    job = forge(tmp_path / "logs").submit(train, text="x" * 10_000)
    data = job.paths.submitted_pickle.read_bytes()
    assert len(data) < 1000
    names = {arg for op, arg, _ in pickletools.genops(data) if op.name.endswith("UNICODE")}
    assert {"slurm_forge", "ForgeJob"} <= names, "the public name: modules move"
    assert not {name for name in names if isinstance(name, str) and "programs" in name}


def test_checkpoint_gives_the_same_pointer(tmp_path):
    pointer = ForgeJob(str(tmp_path))
    again = pointer.checkpoint()
    assert (again.function, again.args, again.kwargs) == (pointer, (), {})
    assert pickle.loads(pickle.dumps(pointer)) == pointer
    assert len(pickle.dumps(pointer)) < 1000


def test_a_relative_pointer_is_made_absolute(tmp_path, submitted, monkeypatch):
    run = new_run(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    job = forge(tmp_path / "logs").submit(ForgeJob("mine/run"))
    assert pickled(job).function == ForgeJob(str(run.path))


def closure():
    def inner(run):
        pass

    return inner


@pytest.mark.parametrize(
    "function",
    [lambda run: None, closure(), Trainer().train],
    ids=["lambda", "closure", "method"],
)
def test_what_a_later_attempt_can_t_find_is_refused(tmp_path, submitted, function):
    with pytest.raises(ConfigError, match="at the top of a module"):
        forge(tmp_path / "logs").submit(function)
    assert list(submitted.iterdir()) == []


def job_of(job):
    return read_run_file(RunDirectory.existing(pickled(job).function.run).spec_file).job


def test_arguments_by_position_and_of_partial_have_the_names_of_the_function(tmp_path, submitted):
    executor = forge(tmp_path / "logs")
    jobs = [executor.submit(learn, 0.1, steps=7), executor.submit(partial(learn, 0.2), 8)]
    with executor.batch():
        jobs.append(executor.submit(partial(learn, steps=9), 0.3))
    jobs += executor.map_array(learn, [0.4, 0.5], [10, 11])
    args = [job_of(job).args for job in jobs]
    assert args == [{"lr": round(0.1 * n, 1), "steps": 6 + n} for n in range(1, 6)]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1, 2, 3), {}, "learn takes 2 arguments behind the run by position, and 3 are given"),
        ((1,), {"lr": 2}, "learn gets 'lr' by position and by name"),
        ((1,), {"step": 2}, r"no parameter 'step' \(did you mean \"steps\"\?\)"),
        ((object(),), {}, "args.lr"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path, submitted, args, kwargs, message):
    with pytest.raises(ForgeError, match=message):
        forge(tmp_path / "logs").submit(learn, *args, **kwargs)
    assert list(submitted.iterdir()) == []


def test_a_callable_that_takes_no_run_is_conducted_as_a_command(tmp_path, submitted):
    logs = tmp_path / "logs"
    job = forge(logs).submit(Countdown(3), "by", step=1)
    call = pickled(job)
    assert (call.function.function.left, call.args, call.kwargs) == (3, ("by",), {"step": 1})
    spec = job_of(job)
    assert spec.name.startswith("Countdown-")
    assert spec.command == (sys.executable, "-u", "-m", "submitit.core._submit", str(logs))
    assert spec.program.requeue_exit_code == CALL_AGAIN
    script = checked((submitted / "0").read_text())
    (line,) = (each for each in script.splitlines() if " slurm_forge.process execute " in each)
    words = shlex.split(line)
    step = words[words.index("--") + 1 :]
    assert step[:3] == ["srun", "--kill-on-bad-exit=1", "--unbuffered"]
    assert step[-5:] == [sys.executable, "-u", "-m", "submitit.core._submit", str(logs)]


def test_what_checkpoint_returns_is_called_next_and_kept_for_a_successor(tmp_path, submitted):
    job = forge(tmp_path / "logs").submit(Countdown(3), "by", step=1)
    call = pickled(job)
    again = call._checkpoint_function()
    assert isinstance(again.function, ForgeCall)
    assert (again.function.run, again.function.function.left) == (call.function.run, 2)
    assert (again.args, again.kwargs) == (("by",), {"step": 1})
    plain = pickled(forge(tmp_path / "logs").submit(add, 1, 2))._checkpoint_function()
    assert (plain.function.function, plain.args) == (add, (1, 2))


def test_both_kinds_in_one_array_are_refused(tmp_path, submitted):
    executor = forge(tmp_path / "logs")
    with pytest.raises(SubmissionError, match="can't be tasks of one array"), executor.batch():
        executor.submit(learn, 0.1, 2)
        executor.submit(add, 1, 2)
    assert list(submitted.iterdir()) == []


def test_a_module_that_the_job_would_not_find_is_refused(tmp_path, submitted, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "faraway.py").write_text("def train(run):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    faraway = importlib.import_module("faraway")
    with pytest.raises(SubmissionError, match=r"can't import faraway: here it is .*faraway\.py"):
        forge(tmp_path / "logs").submit(faraway.train)
    with pytest.raises(SubmissionError, match="can't import faraway"):
        slurm_forge.submit(faraway.train, {"name": "far"}, runs=tmp_path / "runs", site="generic")
    assert list(submitted.iterdir()) == []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    assert forge(tmp_path / "logs").submit(faraway.train).job_id == "4000"


SCRIPT = """\
import functools, os
import slurm_forge.errors
import submitit
import beside, unused
from beside import helper

class Work:
    def __call__(self):
        return helper()

def inner():
    import beside.deeper
    return os.getpid()

def work():
    return inner()

def plain():
    return os.getpid()

executor = submitit.AutoExecutor("logs", cluster="forge")
executor.update_parameters(timeout_min=60)
def take(call):
    return call

for each in (Work(), work, functools.partial(take, helper), plain):
    try:
        print(executor.submit(each).job_id)
    except slurm_forge.errors.SubmissionError as error:
        print(error.message.partition(":")[0].partition(",")[0])
"""


def test_what_a_script_imports_from_its_own_folder_is_checked(tmp_path, submitted):
    (tmp_path / "scripts" / "beside").mkdir(parents=True)
    for name, text in (
        ("x", SCRIPT), ("beside/__init__", "def helper():\n    pass\n"), ("unused", ""),
        ("beside/deeper", ""),
    ):  # fmt: skip
        (tmp_path / f"scripts/{name}.py").write_text(text)
    words = [sys.executable, "scripts/x.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = ["the job can't import beside", "the job can't import beside.deeper"]
    assert done.stdout.splitlines() == [told[0], told[1], told[0], "4000"], done.stderr


def test_a_pointer_to_no_run_is_refused(tmp_path, submitted):
    with pytest.raises(ForgeError, match="holds no run"):
        forge(tmp_path / "logs").submit(ForgeJob(str(tmp_path / "nothing")))


def test_a_folder_that_others_can_write_into_is_refused(tmp_path, submitted):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs").chmod(0o777)
    with pytest.raises(UnsafeFileError):
        forge(tmp_path / "logs")


def test_a_folder_whose_logs_slurm_would_not_find_is_refused(tmp_path, submitted):
    with pytest.raises(SubmissionError, match="backslashes"):
        forge(tmp_path / "back\\slash")


# -- arrays ---------------------------------------------------------------------------------------


def index_of(script: str) -> tuple[Path, list[str]]:
    words = command(script)
    index = Path(words[words.index("--array") + 1])
    return index, json.loads(index.read_text())


def test_an_array_tells_each_task_its_run(tmp_path, submitted):
    folder = tmp_path / "it's logs"
    runs = [new_run(tmp_path, f"run-{number}") for number in range(3)]
    executor = forge(folder, slurm_array_parallelism=2)
    jobs = executor.submit_array([ForgeJob(str(run.path)) for run in runs])
    assert [job.job_id for job in jobs] == ["4000_0", "4000_1", "4000_2"]
    script = checked((submitted / "0").read_text())
    assert options(script)["array"] == "0-2%2"
    assert options(script)["output"] == f"{folder}/%A_%a_0_log.out"
    words = command(script)
    assert words[words.index("--output") + 1] == f"{folder}/%A_%a_%t_log.out"
    index, told = index_of(script)
    assert told == [str(run.path) for run in runs]
    assert index.stat().st_mode & 0o077 == 0, "who can write there can name another run"
    for number, (job, run) in enumerate(zip(jobs, runs, strict=True)):
        assert pickled(job).function == ForgeJob(str(run.path))
        assert run_state(run).job == f"4000_{number}"
        (begin,) = [line for line in script.splitlines() if line.startswith("forge=")]
        shown = subprocess.run(
            ["bash", "-c", f'{begin}; echo "$forge"'],
            env={"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": str(number)},
            capture_output=True,
            text=True,
            check=True,
        )
        start = shown.stdout.strip()
        assert Path(start).parent == run.submissions, "what requeue renews"
        assert Path(start).is_file()


def test_a_batch_of_functions_makes_a_run_for_each(tmp_path, submitted):
    executor = forge(tmp_path / "logs", tasks_per_node=2)
    with executor.batch():
        jobs = [executor.submit(train, lr=rate) for rate in (0.1, 0.2)]
    _, told = index_of((submitted / "0").read_text())
    rates = [read_run_file(RunDirectory.existing(run).spec_file).job.args["lr"] for run in told]
    assert rates == [0.1, 0.2]
    assert [len(job._tasks) for job in jobs] == [2, 2]


def test_the_next_single_job_is_none_of_the_array(tmp_path, submitted):
    executor = forge(tmp_path / "logs")
    executor.submit_array([ForgeJob(str(new_run(tmp_path, f"run-{n}").path)) for n in range(2)])
    executor.submit(train)
    script = (submitted / "1").read_text()
    assert "array" not in options(script)
    assert "--array" not in command(script)
    assert command(script)[command(script).index("--output") + 1].endswith("/%j_%t_log.out")


def test_a_refused_array_leaves_the_executor_as_it_was(tmp_path, submitted, monkeypatch):
    executor = forge(tmp_path / "logs")
    runs = [ForgeJob(str(new_run(tmp_path, f"run-{n}").path)) for n in range(2)]
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no' >&2\nexit 1\n")
    with pytest.raises(submitit.core.utils.FailedJobError, match="no"):
        executor.submit_array(runs)
    assert "map_count" not in executor._executor.parameters


# -- a run is one job, and goes on in another ------------------------------------------------------


def successor(run: RunDirectory) -> str:
    path = run.submissions / "job.sbatch"
    assert path.stat().st_mode & 0o077 == 0
    return checked(path.read_text())


def test_a_successor_has_the_same_options_and_payload(tmp_path, submitted):
    logs = tmp_path / "it's logs"
    run = new_run(tmp_path)
    executor = forge(
        logs,
        nodes=2,
        tasks_per_node=2,
        slurm_setup=["module load cuda"],
        slurm_dependency="afterok:3",
        slurm_additional_parameters={"begin": "now+1hour", "hint": "nomultithread"},
    )
    job = executor.submit(ForgeJob(str(run.path)))
    first, second = (submitted / "0").read_text(), successor(run)
    only_once = {"dependency", "begin"}
    wanted = {name: value for name, value in options(first).items() if name not in only_once}
    assert only_once <= set(options(first))
    assert options(second) == wanted
    assert command(second) == command(first)
    assert "module load cuda" in second.splitlines()
    assert "_submitted.pkl" in second
    assert pickle.loads((run.submissions / "submitted.pkl").read_bytes()).function == ForgeJob(
        str(run.path)
    )
    assert job.paths.submitted_pickle.read_bytes()


def test_a_folder_with_the_job_s_id_in_it_stays_that_of_the_first_job(tmp_path, submitted):
    run = new_run(tmp_path)
    forge(tmp_path / "logs" / "%j").submit(ForgeJob(str(run.path)))
    script = successor(run)
    assert options(script)["output"] == f"{tmp_path}/logs/4000/%j_0_log.out"
    assert command(script)[-1] == f"{tmp_path}/logs/4000"


def test_each_task_of_an_array_has_a_successor_of_its_own(tmp_path, submitted):
    runs = [new_run(tmp_path, f"run-{number}") for number in range(3)]
    executor = forge(tmp_path / "logs", tasks_per_node=2)
    executor.submit_array([ForgeJob(str(run.path)) for run in runs])
    for number, run in enumerate(runs):
        script = successor(run)
        assert "array" not in options(script)
        assert "--array" not in command(script)
        words = command(script)
        assert words[words.index("supervise") + 1] == str(run.path)
        assert options(script)["output"] == f"{tmp_path}/logs/%j_0_log.out"
        assert f"4000_{number}" in script
        assert "{0..1}" in script


@pytest.mark.parametrize(
    "given",
    [
        {"slurm_additional_parameters": {"hetjob": True}},
        {"slurm_additional_parameters": {"array": "0-3"}},
        {"slurm_additional_parameters": {"licenses": "a : b"}},
        {"slurm_srun_args": ["--het-group=0,1"]},
        {"slurm_srun_args": [":"]},
    ],
)
def test_a_run_is_one_job_and_of_one_kind(tmp_path, submitted, given):
    with pytest.raises(ConfigError, match="a run is one job"):
        forge(tmp_path / "logs", **given).submit(train)
    assert list(submitted.iterdir()) == []


def test_what_the_site_refuses_or_requires(tmp_path, submitted, monkeypatch):
    rules = tmp_path / "vista.yaml"
    rules.write_text('name: vista\nrejected_options: ["--mem"]\nrequired_options: ["--nodes"]\n')
    monkeypatch.setenv("SLURM_FORGE_SITE", str(rules))
    executor = forge(tmp_path / "logs", name="a", nodes=1, mem_gb=4)
    with pytest.raises(SubmissionError, match="vista refuses the option --mem"):
        executor.submit(train)
    assert not list(submitted.iterdir()), "nothing was handed to sbatch"
    assert forge(tmp_path / "logs", name="b", nodes=1).submit(train).job_id == "4000"


def test_what_holds_of_the_partition_holds_of_the_run(tmp_path, submitted, monkeypatch):
    rules = tmp_path / "hill.yaml"
    rules.write_text("name: hill\npartitions: {debug: {self_requeue_allowed: false}}\n")
    monkeypatch.setenv("SLURM_FORGE_SITE", str(rules))
    for partition, held in (("debug", True), ("long", False)):
        folder = tmp_path / partition
        forge(folder, name="a", slurm_partition=partition).submit(train)
        (made,) = (folder / "runs").glob("*/run.yaml")
        file = read_run_file(made)
        assert (file.only_hold is not None) is held
