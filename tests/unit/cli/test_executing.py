# ruff: noqa: E501  (messages are compared whole)
"""``slurm-forge exec``: wrong command lines, and programs that really run, without Slurm."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.journal import RunState, RunStatus, read_journal
from slurm_forge.journal.events import (
    Advanced,
    DecisionTaken,
    Event,
    Finished,
    IncidentSeen,
    LaunchEnded,
    Note,
    Resumed,
)
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory, claim_attempt
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.vocabulary.cause import Cause
from tests.unit.cli.conftest import Shell
from tests.warm import Process, WarmParent

FIELDS = "{latest}, {attempt}, {launch}, {restarts}, {run_dir}"

WRONG = [
    ("", "no command to start\n  Write it after two dashes: slurm-forge exec --name big -- srun python train.py"),
    ("--name x", "no command to start\n  Write it after two dashes: slurm-forge exec --name big -- srun python train.py"),
    ("-- true", "the run has no name\n  Give it one: slurm-forge exec --name big -- …  A run continues under its name in every job."),
    ("--name x -- --lr 3", "'--lr' is not a program\n  Options of slurm-forge exec go before the two dashes, the program after them: slurm-forge exec --name big -- srun python train.py"),
    ("--name x -- no-such-program a", "there is no program 'no-such-program' here\n  Write the command after -- as you would type it; your own script needs its path (./train.sh), and shell syntax needs a shell: -- bash -c '…'"),
    ("--name ../x -- true", "--name: a name is 1 to 64 letters, digits, dots, dashes and underscores, and starts with a letter or a digit\n  See slurm-forge exec --help."),
    ("--name x --lead soon -- true", '--lead: "soon" is not a duration; write it like "60s", "10m", "1h30m", "2d" or "48:00:00"\n  See slurm-forge exec --help.'),
    ("--name x --lead 0s -- true", "--lead: must be longer than 0\n  See slurm-forge exec --help."),
    ("--name x --notify FOO -- true", '--notify: "FOO" is not the name of a signal; write TERM, USR1, USR2 or INT\n  See slurm-forge exec --help.'),
    ("--name x --notify KILL -- true", "--notify: SIGKILL can't be a notice: a program can't act on it\n  See slurm-forge exec --help."),
    ("--name x --notify-to everybody -- true", '--notify-to: unknown value "everybody" (one of: child, group, ranks, tree)\n  See slurm-forge exec --help.'),
    ("--name x --convention horovod -- true", '--convention: unknown value "horovod" (one of: plain, torchrun, lightning, hf, submitit, accelerate)\n  See slurm-forge exec --help.'),
    ("--name x --resume-arg '--resume {newest}' -- true", f"--resume-arg: unknown field {{newest}} (known: {FIELDS})\n  See slurm-forge exec --help."),
    ("--name x --resume-arg '--resume {latest.__class__}' -- true", f"--resume-arg: unknown field {{latest.__class__}} (known: {FIELDS})\n  See slurm-forge exec --help."),
    ("--name x --resume-arg '--resume {attempt!r}' -- true", f"--resume-arg: unknown field {{attempt!r}} (known: {FIELDS})\n  See slurm-forge exec --help."),
    ("--name x --resume-arg '--resume {' -- true", "--resume-arg: '{': single '{' encountered in format string; write a literal brace twice\n  See slurm-forge exec --help."),
    ("--name x --resume-arg \"--resume 'half\" -- true", "--resume-arg: can't be split into words: no closing quotation\n  See slurm-forge exec --help."),
    ("--name x --resume-arg '' -- true", "--resume-arg: is empty; leave it out\n  See slurm-forge exec --help."),
    ("--name x --resume-arg '--from {latest}' -- true", "--resume-arg: {latest} is the newest match of --checkpoint-glob: add it\n  See slurm-forge exec --help."),
    ("--name x --metric-pattern 'los=loss (.*)' -- true", '--metric-pattern: there is no metric "los" (did you mean "loss"?)' + "\n  See slurm-forge exec --help."),
    ("--name x --metric-pattern 'train_loss=loss (.*)' -- true", '--metric-pattern: there is no metric "train_loss" (did you mean "loss"?)' + "\n  See slurm-forge exec --help."),
    ("--name x --metric-pattern lightening -- true", '--metric-pattern: "lightening" is neither NAME=REGEX nor a preset (did you mean "lightning"?); a pattern is written "loss=loss: (\\S+)"' + "\n  See slurm-forge exec --help."),
    ("--name x --metric-pattern 'loss=loss (' -- true", "--metric-pattern: \"loss (\" is no regular expression: missing ), unterminated subpattern at position 5\n  See slurm-forge exec --help."),
    ("--name x --metric-pattern 'loss=loss' -- true", '--metric-pattern: "loss=loss" needs exactly one group, which is the number: "loss=loss: (\\S+)"' + "\n  See slurm-forge exec --help."),
    (r"--name x --step-pattern 'step \d+' -- true", r'--step-pattern: needs exactly one group, which is the step number: "step (\d+)" or "Iter: (\d+)/"' + "\n  See slurm-forge exec --help."),
    ("--name x --done-pattern 'a(' -- true", "--done-pattern: \"a(\" is no regular expression: missing ), unterminated subpattern at position 1\n  See slurm-forge exec --help."),
    (r"--name x --step-pattern '(?:\w+\s*)+ (\d+)' -- true", r'--step-pattern: "(?:\w+\s*)+ (\d+)" repeats a repetition, which can take forever on a long line: write each repetition once, as in "loss: (\S+)"' + "\n  See slurm-forge exec --help."),
    ("--name x --done-pattern '(a+)+b' -- true", '--done-pattern: "(a+)+b" repeats a repetition, which can take forever on a long line: write each repetition once, as in "loss: (\\S+)"' + "\n  See slurm-forge exec --help."),
    ("--name x --done-exit-code 0 -- true", "--done-exit-code: an exit status that means something is 1 to 255, got 0\n  See slurm-forge exec --help."),
    ("--name x --done-exit-code 3 --requeue-exit-code 3 -- true", "--requeue-exit-code: 3 already means that the program is done (--done-exit-code): choose another\n  See slurm-forge exec --help."),
    ("--name x --progress-after 10 -- true", '--progress-after: "10" has no unit; write "10s" for seconds or "10m" for minutes\n  See slurm-forge exec --help.'),
    ("--job entry.yaml -- true", "entry.yaml:2: entry: slurm-forge exec starts a command\n  Submit this file with slurm-forge submit, or give one without entry: to slurm-forge exec."),
    ("--job wrong.yaml -- true", 'wrong.yaml:2: program.notfy: unknown key (did you mean "notify"?)'),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_wrong_command_line(shell: Shell, line: str, message: str) -> None:
    (shell.folder / "entry.yaml").write_text("name: x\nentry: a.b:f\n")
    (shell.folder / "wrong.yaml").write_text("name: x\nprogram: {notfy: TERM}\n")
    result = shell("exec", *shlex.split(line))
    assert result.exit_code == 2
    told = result.stderr.removesuffix("nothing was started.\n")
    assert told != result.stderr
    assert " ".join(told.split()) == " ".join(message.split())
    assert not (shell.folder / "runs").exists(), "something was made of it"


# -- programs that run -----------------------------------------------------------------------------


class Exec:
    """``slurm-forge exec`` as a process of its own."""

    def __init__(self, folder: Path, parent: WarmParent) -> None:
        self.folder = folder
        self.parent = parent
        self.run = RunDirectory.at(folder / "runs" / "x")
        # A report of each of them would double what the tests take.
        self.quiet = folder / "quiet.yaml"
        self.quiet.write_text("name: x\nreport: false\n")

    def start(self, *words: str, **settings: str) -> Process:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        given = any(word.startswith(("--job", "--name")) for word in words)
        job = ("--name", "x") if given else ("--job", str(self.quiet))
        return self.parent.start(
            "slurm_forge.cli.main",
            ["exec", *job, *words],
            cwd=self.folder,
            env={**environment, "SLURM_FORGE_NODES": "off", **settings},
            text=True,
        )

    def __call__(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **settings)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    @property
    def state(self) -> RunState:
        return run_state(self.run)

    def told(self, verb: str) -> str:
        """What a subcommand prints of the run."""
        words = [sys.executable, "-m", "slurm_forge.cli.main", verb, "x"]
        done = subprocess.run(
            words, cwd=self.folder, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    def events(self, kind: type) -> list[Event]:
        return [r.event for r in read_journal(self.run)[0] if isinstance(r.event, kind)]


@pytest.fixture(scope="module")
def parent() -> Iterator[WarmParent]:
    with WarmParent("slurm_forge.cli.main", "slurm_forge.launch.command.local") as warm:
        yield warm


@pytest.fixture
def execute(tmp_path: Path, parent: WarmParent) -> Exec:
    return Exec(tmp_path, parent)


def wait_for(there: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_done_is_done(execute: Exec) -> None:
    done = execute("--", "bash", "-c", "echo out; echo err >&2; echo once >> ran")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "err\n")
    assert execute.run.is_done()
    again = execute("--", "bash", "-c", "echo out; echo err >&2; echo once >> ran")
    assert again.returncode == 0
    assert "finished already" in again.stderr
    assert (execute.folder / "ran").read_text() == "once\n", "it was started again"
    other = execute("--", "true")
    assert other.returncode == 2
    assert "was started with another command" in other.stderr
    assert not execute.run.report_file.exists(), "its job says so"


def test_a_report_tells_how_it_ended(execute: Exec) -> None:
    done = execute("--name=x", "--", "bash", "-c", "echo KeyError: 3 >&2; exit 7")
    assert done.returncode != 0
    assert "x: held" in execute.run.report_file.read_text()


def test_a_run_without_a_job_file_keeps_the_user_s_settings_of_its_creation(execute: Exec) -> None:
    home = execute.folder / "config"
    file = home / "slurm_forge" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("report: false\nresources: {account: abc}\nrecovery: {crash: [{do: hold}]}\n")
    words = ("--name=x", "--", "bash", "-c", "echo once >> ran; exit 7")
    execute(*words, XDG_CONFIG_HOME=str(home))
    assert (execute.folder / "ran").read_text() == "once\n", "the user's ladder holds at once"
    assert not execute.run.report_file.exists()
    assert read_run_file(execute.run.spec_file).job.resources.account is None
    file.write_text("sead: 1\n")
    execute(*words, XDG_CONFIG_HOME=str(home))
    assert (execute.folder / "ran").read_text() == "once\nonce\n"
    fresh = execute("--name=y", *words[1:], XDG_CONFIG_HOME=str(home))
    assert fresh.returncode == 2 and "config.yaml:1: sead: unknown key" in fresh.stderr


def test_a_job_file_overrides_the_settings_of_its_project_and_of_the_user(execute: Exec) -> None:
    home = execute.folder / "config"
    file = home / "slurm_forge" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("lead: 10s\nrecovery: {app_error: [{do: hold}]}\n")
    (execute.folder / "slurm_forge.yaml").write_text("lead: 20s\nreport: false\n")
    job = execute.folder / "x.yaml"
    job.write_text("name: x\nlead: 30s\n")
    execute("--job", str(job), "--", "true", XDG_CONFIG_HOME=str(home))
    made = read_run_file(execute.run.spec_file).job
    assert (made.lead, made.report) == (timedelta(seconds=30), False)
    assert [each.do for each in made.recovery.app_error] == ["hold"]
    execute("--name=z", "--", "true", XDG_CONFIG_HOME=str(home))
    alone = read_run_file(execute.run.path.with_name("z") / "run.yaml").job
    assert (alone.lead, alone.report) == (timedelta(seconds=10), True), "no project, no job file"


def test_the_step_it_finished_at_is_the_last_one_printed_or_none(execute: Exec) -> None:
    """The number in a checkpoint's name need not be a step: here it counts epochs."""
    assert execute("--checkpoint-glob=epoch-*", "--", "touch", "epoch-7").returncode == 0
    (finished,) = execute.events(Finished)
    assert finished.step == 0
    (ended,) = execute.events(LaunchEnded)
    assert ended.step is None


def test_explain_has_the_exit_code_and_the_last_lines_of_the_output(execute: Exec) -> None:
    script = "for n in {1..30}; do echo line $n; done; echo no data in /data/x >&2; exit 7"
    assert execute("--", "bash", "-c", script).returncode == 7
    told = execute.told("explain")
    last = "exit code 7; output: line 30; output: no data in /data/x"
    assert told.count(last) == told.count("exit code") == 2, told
    assert "line 28" not in told


def test_explain_counts_the_steps_that_are_computed_again(execute: Exec) -> None:
    (execute.folder / "steps.sh").write_text("""
    from=${1##*-}
    for ((n = ${from:-0} + 1; n <= 12; n++)); do
        echo "step $n loss 0.5"
        ((n % 5)) || touch c-$n
        if ((n == 8)) && mkdir died; then exit 7; fi
    done
    """)
    options = ("--metric-pattern=plain", "--checkpoint-glob=c-*", "--resume-arg={latest}")
    assert execute(*options, "--", "bash", "steps.sh").returncode == 0
    told = execute.told("explain")
    assert "exit code 7; output: step 7 loss 0.5; output: step 8 loss 0.5" in told
    assert "at least 3 steps repeated" in told
    assert "from step 5 (c-5), reached step 12" in told
    assert "loss 0.5 (step 12)" in execute.told("status")


def test_a_progress_bar_tells_its_last_step(execute: Exec) -> None:
    bar = "printf 'step 7 | step 33 | step 60'"
    assert execute("--step-pattern=step (\\d+)", "--", "bash", "-c", bar).returncode == 0
    (finished,) = execute.events(Finished)
    assert finished.step == 60


def test_the_batch_step_of_slurm_26_05_is_no_step_of_sruns(execute: Exec) -> None:
    batch = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "-5", "SLURM_STEPID": "-5"}
    place = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_CONF": "/dev/null"}
    done = execute("--", "true", **batch, **place)
    assert done.returncode == 0, done.stderr
    assert execute.run.is_done()


def test_what_is_not_understood_of_slurm_ends_nothing_and_is_noted_once(execute: Exec) -> None:
    batch = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "-5", "SLURM_CONF": "/dev/null"}
    strange = {"SLURM_JOB_END_TIME": "tomorrow", "SLURM_JOB_PARTITION": "a b"}
    command = ("--", "sh", "-c", "test $SLURM_FORGE_RESTARTS -ge 1")
    assert execute(*command, **batch, **strange).returncode == 0
    notes = [each.text for each in execute.events(Note) if isinstance(each, Note)]
    told = [each for each in notes if each.startswith("not understood, ignored: ")]
    assert sorted(each.partition(": ")[2] for each in told) == [
        "SLURM_JOB_END_TIME='tomorrow'",
        "SLURM_JOB_PARTITION='a b'",
    ]


def test_what_fails_is_started_again_and_then_held(execute: Exec) -> None:
    done = execute("--", "bash", "-c", "echo once >> ran; echo 'KeyError: 3' >&2; exit 7")
    assert done.returncode == 7, "the status of the command itself"
    assert (execute.folder / "ran").read_text() == "once\nonce\n"
    assert execute.state.status is RunStatus.HELD
    assert "the same error twice in a row" in execute.state.reason


def test_it_is_told_where_to_go_on(execute: Exec) -> None:
    """From the second start on, with the newest checkpoint; hostile names stay one word."""
    hostile = "out/checkpoint-12 $(touch pwned);'\"`touch pwned`"
    program = (
        "import os, sys, pathlib\n"
        "sys.stdout.write(repr(sys.argv[1:]) + '\\n')\n"
        "sys.stdout.write(os.environ.get('SLURM_FORGE_LATEST', '-') + '\\n')\n"
        "sys.stdout.write(os.environ['SLURM_FORGE_RESTARTS'] + '\\n')\n"
        "pathlib.Path('out').mkdir(exist_ok=True)\n"
        "pathlib.Path('out/checkpoint-9').touch()\n"
        f"pathlib.Path({hostile!r}).touch()\n"
        "sys.exit(0 if len(sys.argv) > 2 else 'RuntimeError: unlucky')\n"
    )
    (execute.folder / "program.py").write_text(program)
    done = execute(
        "--checkpoint-glob=out/checkpoint-*",
        "--resume-arg=--resume={latest} --n {restarts} '{{$(touch pwned)}}'",
        "--",
        sys.executable,
        "program.py",
        "first; touch pwned",
    )
    assert done.returncode == 0
    latest = f"{execute.folder}/{hostile}"
    assert done.stdout.splitlines() == [
        "['first; touch pwned']",
        "-",
        "0",
        repr(["first; touch pwned", f"--resume={latest}", "--n", "1", "{$(touch pwned)}"]),
        latest,
        "1",
    ]
    assert not list(execute.folder.rglob("pwned")), "something was given to a shell"


def test_progress_frees_budgets(execute: Exec) -> None:
    """Failing again and again is no loop as long as there is a further checkpoint each time."""
    program = "n=$(ls | grep -c ^state-); touch state-$n; echo 'RuntimeError: again'; [ $n -ge 6 ]"
    done = execute("--progress-file=state-*", "--", "bash", "-c", program)
    assert done.returncode == 0, execute.state.reason
    assert [event.step for event in execute.events(Advanced)] == [0, 1, 2, 3, 4, 5, 6]
    told = execute.told("explain")
    assert told.startswith("x   finished   1 attempt"), told
    assert "at step" not in told, "a file's number is no step"
    assert "external program   reached state-3" in told
    assert "RuntimeError: again" in told


#: Writes a checkpoint every fifth step and goes bad at step 13, in the first start alone.
GOES_BAD = """
import pathlib, sys, time
start = int(sys.argv[1].rpartition("-")[2]) if sys.argv[1:] else 0
bad = bool(start) and pathlib.Path(sys.argv[1]).read_text() == "bad"
cured = pathlib.Path("cured")
for step in range(start + 1, 21):
    if step == 13 and not cured.exists():
        bad = True
        cured.touch()
    loss = float("nan") if bad else 1 / step
    if step % 5 == 0:
        pathlib.Path(f"c-{step}").write_text("bad" if bad else "good")
    sys.stdout.write(f"\\x1b[32mstep {step}\\x1b[0m loss {loss:.3f}\\r")
"""


@pytest.mark.parametrize(
    "ladder",
    [
        "rollback, times: 2",
        pytest.param("hold", marks=pytest.mark.slow),
        pytest.param("warn, times: 2", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_prints_nan_goes_back_to_a_checkpoint_from_before(
    execute: Exec, ladder: str
) -> None:
    (execute.folder / "program.py").write_text(GOES_BAD)
    (execute.folder / "job.yaml").write_text(
        f"recovery: {{non_finite: [{{do: skip, times: 3}}, {{do: {ladder}}}]}}\n"
        "program: {metric_pattern: plain, checkpoint_glob: 'c-*', resume_arg: '{latest}'}\n"
    )
    done = execute("--job=job.yaml", "--", sys.executable, "program.py")
    seen = execute.events(IncidentSeen)[0]
    assert isinstance(seen, IncidentSeen)
    assert (seen.incident.cause, seen.incident.onset) == (Cause.NON_FINITE, 13)
    assert seen.incident.evidence[0].text.startswith("step 13 loss nan")
    if ladder == "hold":
        assert execute.state.status is RunStatus.HELD
        return
    if ladder.startswith("warn"):
        assert execute.run.is_done()
        return
    assert done.returncode == 0, done.stderr
    (taken,) = execute.events(DecisionTaken)
    assert isinstance(taken, DecisionTaken)
    assert taken.decision.target == "c-10"
    assert {(execute.folder / f"c-{n}").read_text() for n in (5, 10, 15, 20)} == {"good"}
    resumes = [each for each in execute.events(Resumed) if isinstance(each, Resumed)]
    assert [each.step for each in resumes] == [0, 10]
    story = execute.told("explain")
    assert "rolled back to step 10" in story
    assert "from step 10 (c-10), reached step 20" in story
    assert "repeated" in story
    assert "loss 0.05 (step 20)" in execute.told("status")


def test_a_program_that_ends_well_with_a_bad_loss_is_not_finished(execute: Exec) -> None:
    done = execute("--metric-pattern=loss=loss (\\S+)", "--", "echo", "loss nan")
    assert done.returncode == 1
    assert execute.state.status is RunStatus.HELD
    assert "no rollback: --checkpoint-glob" in execute.state.reason


def test_the_last_lines_stand_beside_the_exit_code(execute: Exec) -> None:
    lines = "for n in $(seq 30); do echo line $n; done; echo 'no such table: users'; exit 7"
    execute("--", "bash", "-c", lines)
    story = execute.told("explain")
    assert "exit code 7; output: line 30; output: no such table: users" in story
    assert "line 29" not in story


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_person_stops_it(execute: Exec, number: signal.Signals) -> None:
    program = "trap 'echo saved; exit 0' TERM; touch here; while :; do sleep 0.05; done"
    process = execute.start("--", "bash", "-c", program)
    wait_for((execute.folder / "here").exists)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert out == "saved\n"
    assert "stopped" in err
    assert execute.state.status is RunStatus.STOPPED
    assert execute.state.attempts[0].incidents[0][1].cause is Cause.STOP_REQUESTED
    # Whoever types it again wants it to go on.
    assert execute("--", "true").returncode == 0
    assert execute.run.is_done()


def test_it_insists_on_a_program_that_does_not_listen(execute: Exec) -> None:
    """Also on what has left its process group, as torchrun's workers do."""
    program = (
        "trap '' TERM INT; setsid bash -c 'trap \"\" TERM; echo $$ > pid; while :; do sleep 0.05; done' "
        "& while :; do sleep 0.05; done"
    )
    process = execute.start("--", "bash", "-c", program)
    pid = execute.folder / "pid"
    wait_for(lambda: pid.exists() and pid.read_text().strip() != "")
    process.send_signal(signal.SIGINT)
    time.sleep(1.1)  # what comes sooner counts as the same request, passed on twice
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    left = Path(f"/proc/{int(pid.read_text())}/stat")
    # Where nobody reaps it, what has ended is still there as a zombie.
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("options", "command", "starts"),
    [
        (["--done-exit-code=9"], "echo >> ran; exit 9", 1),
        (["--requeue-exit-code=8"], "echo >> ran; [ $(wc -l < ran) -ge 3 ] || exit 8", 3),
        (["--done-file=done"], "echo >> ran; touch done; exit 1", 1),
        (["--done-pattern=^all .* done$"], "echo >> ran; echo all of it done; exit 1", 1),
    ],
)
def test_how_a_program_says_that_it_is_through(
    execute: Exec, options: list[str], command: str, starts: int
) -> None:
    done = execute(*options, "--", "bash", "-c", command)
    assert done.returncode == 0, done.stderr
    assert execute.run.is_done()
    assert (execute.folder / "ran").read_text() == "\n" * starts


def test_a_terminal_stays_one(execute: Exec) -> None:
    """Colours and progress bars are for terminals: the program has one where we have one."""
    words = [sys.executable, "-m", "slurm_forge.cli.main", "exec", "--name", "x", "--"]
    words += ["bash", "-c", "[ -t 1 ] && [ -t 2 ] && printf 'a\\rb\\n'"]
    done = subprocess.run(
        ["script", "-qec", shlex.join(words), "/dev/null"],
        cwd=execute.folder,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert b"a\rb\r\n" in done.stdout


def test_what_a_killed_exec_left_running_does_not_run_beside_the_next(execute: Exec) -> None:
    program = "echo $$ >> pids; while [ $(wc -l < pids) -lt 2 ]; do sleep 0.05; done"
    first = execute.start("--", "setsid", "bash", "-c", program)
    pids = execute.folder / "pids"
    wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"))
    first.kill()
    first.communicate()
    left = int(pids.read_text())
    os.kill(left, 0)  # or there is nothing to be seen here
    os.kill(left, signal.SIGSTOP)  # it would go away by itself once the second is there
    assert execute("--", "setsid", "bash", "-c", program).returncode == 0
    stat = Path(f"/proc/{left}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_program_ends_once_another_attempt_owns_the_run(execute: Exec) -> None:
    process = execute.start("--", "bash", "-c", "echo $$ > pid; exec sleep 60")
    pid = execute.folder / "pid"
    wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))
    claim_attempt(
        execute.run, job="77", restart_count=0, host="other", pid=1, nodes=(), time=time.time()
    )
    _, err = process.communicate(timeout=30)
    assert "attempt 2 has taken over" in err and process.returncode == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_closed_streams_are_nowhere(execute: Exec) -> None:
    command = (
        f"{sys.executable} -m slurm_forge.cli.main exec --name x -- bash -c 'echo x; echo y >&2'"
    )
    done = subprocess.run(
        ["bash", "-c", f"exec {command} <&- >&- 2>&-"],
        cwd=execute.folder,
        env={**os.environ, "SLURM_FORGE_NODES": "off"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and execute.run.is_done()
    journal = b"".join(path.read_bytes() for path in execute.run.journal.iterdir())
    assert all(line.startswith(b"{") for line in journal.splitlines()), "output in the journal"
