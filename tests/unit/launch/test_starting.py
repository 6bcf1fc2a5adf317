"""What every batch script does before the supervisor runs, by a real bash and commands of ours."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import slurm_forge
from slurm_forge.launch.render import batch_script
from slurm_forge.launch.render.batch_script import (
    begin_lines,
    render,
    start_file,
    start_lines,
    successor_lines,
)
from slurm_forge.launch.submit.submission import keep_start_file
from slurm_forge.report.status.report_facts import NotStarted
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile

BROKEN = "#!/bin/bash\necho 'ModuleNotFoundError: slurm_forge' >&2\nexit 1\n"
WHOLE = '#!/bin/bash\n[ "$1" = -c ] || printf \'%s\\0\' started "$@"\n'
#: Imports, and is gone when it is to be executed.
VANISHING = '#!/bin/bash\nrm -- "$0"\n'
#: Notes what it is asked, and answers from files; ``refused`` holds what it says no to.
SCONTROL = """#!/bin/bash
case "$*" in
    "-o show job"*) cat "FOLDER/job" 2> /dev/null; exit ;;
    "-o show partition"*) cat "FOLDER/partition" 2> /dev/null; exit ;;
    "show hostnames"*) tr , "\\n" <<< "$3"; exit ;;
esac
printf "%s\\n" "$*" >> "FOLDER/asked"
! grep -qsx -- "$1" "FOLDER/refused"
"""


@dataclass
class Node:
    """A node with a run whose path is hard on a shell, and a ``scontrol`` that remembers."""

    folder: Path

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / "it's $(touch owned) run")

    def python(self, text: str | None) -> str:
        path = self.folder / "py 'thon"
        if text is not None:
            path.write_text(text)
            path.chmod(0o755)
        return str(path)

    def script(self, python: str, *setup: str) -> Path:
        job = job_from_mapping({"name": "tiny", "entry": "a:b", "setup": list(setup)})
        file = RunFile(submitted_from="/", python=python, job=job)
        self.run.create(b"x")
        path = self.folder / "job.sbatch"
        text = render(file, Site(name="generic"), self.run)
        keep_start_file(self.run.submissions, text)
        path.write_text(text)
        return path

    def lines(self, *lines: str) -> Path:
        """A script of these lines, behind those that every script begins with."""
        self.run.create(b"x")
        text = "\n".join([begin_lines(shlex.quote(str(start_file(self.run.submissions)))), *lines])
        keep_start_file(self.run.submissions, text)
        path = self.folder / "job.sbatch"
        path.write_text(text)
        return path

    def environ(self, **more: str) -> dict[str, str]:
        commands = self.folder / "bin"
        commands.mkdir(exist_ok=True)
        scontrol = commands / "scontrol"
        scontrol.write_text(SCONTROL.replace("FOLDER", str(self.folder)))
        sleep = commands / "sleep"
        sleep.write_text(f'#!/bin/bash\n[ "$1" = 77 ] && exec {_command("sleep")} 30\nexit 0\n')
        for each in (scontrol, sleep):
            each.chmod(0o755)
        path = f"{commands}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n3", **more}

    def execute(self, script: Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script)],
            env=self.environ(**more),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def slurm_says(self, *, nodes: int, excluded: str = "(null)", wanted: str = "(null)") -> None:
        """What the job leaves out and asks for by name, and how many nodes its partition has."""
        lists = f"ReqNodeList={wanted} ExcNodeList={excluded}"
        (self.folder / "job").write_text(f"JobId=12 JobName=tiny {lists} NodeList=n3 \n")
        partition = f"PartitionName=long TotalCPUs=8 TotalNodes={nodes} SelectTypeParameters=NONE\n"
        (self.folder / "partition").write_text(partition)

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def note(self, job: str = "12") -> str:
        path = self.run.submissions / f"not-started-{job}.txt"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        return path.read_text()

    @property
    def has_notes(self) -> bool:
        return bool(list(self.run.submissions.glob("not-started-*")))


def _command(name: str) -> str:
    return subprocess.check_output(["bash", "-c", f"command -v {name}"], text=True).strip()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_whole_environment_becomes_the_supervisor(node: Node) -> None:
    done = node.execute(node.script(node.python(WHOLE)))
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split("\0")[:-1]
    assert words[:4] == ["started", "-m", "slurm_forge.process", "supervise"]
    assert words[4] == str(node.run.path)
    assert node.asked == []
    assert not node.has_notes


@pytest.mark.parametrize(
    ("python", "told"),
    [
        (None, "No such file or directory"),
        (BROKEN, "ModuleNotFoundError: slurm_forge"),
        (VANISHING, "can not be executed"),
    ],
    ids=["gone", "no slurm_forge", "gone between check and start"],
)
def test_what_is_broken_is_written_down_and_the_job_waits(
    node: Node, python: str | None, told: str
) -> None:
    done = node.execute(node.script(node.python(python)))
    assert done.returncode == 1
    assert told in node.note()
    assert "job 12 on n3" in node.note()
    assert told in done.stderr, "the log says it too"
    note = node.run.submissions / "not-started-12.txt"
    assert node.asked == [
        f"update JobId=12 Comment=slurm_forge: not started, see {note}",
        "requeuehold 12",
    ]
    assert not (node.folder / "owned").exists()


def test_a_supervisor_that_can_not_be_imported_is_told_by_the_script_begun_again(
    node: Node,
) -> None:
    # What a package has that is being upgraded while the job starts.
    (node.folder / "pydantic.py").write_text("raise ImportError('half of a package')\n")
    root = str(Path(slurm_forge.__file__).parents[1])
    done = node.execute(
        node.script(sys.executable, "cd /"),
        PYTHONPATH=os.pathsep.join([str(node.folder), root]),
    )
    assert done.returncode == 1
    assert "ImportError: half of a package" in node.note()
    assert "this interpreter can not import slurm_forge" in done.stderr
    assert [line.split()[0] for line in node.asked] == ["update", "requeuehold"]


def test_imports_that_come_to_no_end_are_told_by_the_script_begun_again(tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text('printf %s "$forge_not_started"\n')
    (tmp_path / "blocked.py").write_text("import threading\nthreading.Event().wait()\n")
    lines = [
        "from slurm_forge import process",
        "process._IMPORT_WITHIN_S = 0.1",
        "process.MODULES['blocked'] = 'blocked'",
        "process.main(['blocked'])",
    ]
    root = str(Path(slurm_forge.__file__).parents[1])
    told = subprocess.check_output(
        [sys.executable, "-c", "\n".join(lines)],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(tmp_path), root]),
            "forge_script": str(script),
        },
        text=True,
        timeout=60,
    )
    assert told.startswith("importing blocked took")


def test_the_supervisor_is_imported_once_per_start(node: Node) -> None:
    """Its imports are most of a second of every start; the check has none of them."""
    python = node.python('#!/bin/bash\nprintf "%s\\n" "$1 $2 $3" >> calls\n')
    node.execute(node.script(python))
    assert (node.folder / "calls").read_text().splitlines() == [
        "-c import slurm_forge.process ",
        "-m slurm_forge.process supervise",
    ]
    lines = "import sys, slurm_forge.process\nprint('pydantic' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", lines], text=True) == "False\n"


def test_a_task_of_an_array_is_held_by_its_own_id(node: Node) -> None:
    script = node.script(node.python(BROKEN))
    node.execute(script, SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="7")
    assert node.asked[-1] == "requeuehold 40_7"
    assert "job 40_7 on n3" in node.note("40_7")


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        (["set -eu", "false"], "the script ended with status 1"),
        (["exit 3"], "the script ended with status 3"),
        (["set -u", 'echo "$nothing_of_that_name"'], "the script ended with status 1"),
    ],
)
def test_a_setup_that_ends_the_script_is_told(node: Node, setup: list[str], told: str) -> None:
    node.execute(node.script(node.python(WHOLE), *setup))
    assert told in node.note()
    assert node.asked[-1] == "requeuehold 12"


def test_where_the_setup_failed_is_told_and_no_secret_of_it(node: Node) -> None:
    setup = ["set -e", "login() { return 5; }", "login --password sesame"]
    done = node.execute(node.script(node.python(WHOLE), *setup))
    line = 1 + (node.folder / "job.sbatch").read_text().splitlines().index(setup[2])
    assert f"before that: status 5 in line {line}: login\n" in node.note()
    assert "sesame" not in node.note() + done.stderr


@pytest.mark.parametrize("line", ["TOKEN=sesame false", "/bin/false sesame", "false <<<sesame"])
def test_no_word_but_the_first_is_told(node: Node, line: str) -> None:
    done = node.execute(node.script(node.python(WHOLE), "set -e", line))
    assert "before that: status 1 in line" in node.note()
    assert "sesame" not in node.note() + done.stderr


def test_an_earlier_failure_is_not_the_reason_for_a_later_one(node: Node) -> None:
    node.execute(node.script(node.python(BROKEN), "module() { return 5; }", "module load python"))
    assert "ModuleNotFoundError" in node.note()
    assert "before that" not in node.note()


def test_what_the_setup_sources_may_not_take_the_traps_away(node: Node) -> None:
    sourced = node.folder / "activate.sh"
    sourced.write_text("trap 'echo bye' EXIT TERM\nexport script=$$\n")
    ended = node.python("#!/bin/bash\nkill -TERM $script\n")
    done = node.execute(node.script(ended, f"source '{sourced}'"))
    assert done.returncode == 143
    assert "Slurm ended it (SIGTERM)" in node.note()
    assert "bye" not in done.stdout


def test_a_check_that_takes_too_long_is_ended_and_told(node: Node) -> None:
    script = node.script(node.python('#!/bin/bash\n[ "$1" != -c ] || exec tail -f /dev/null\n'))
    start = start_file(node.run.submissions)
    text = start.read_text()
    assert "timeout -k 10 300 " in text
    start.write_text(text.replace("-k 10 300", "-k 1 1").replace("-ge 300", "-ge 1"))
    node.execute(script)
    assert "no answer in 300 seconds" in node.note()
    assert node.asked[-1] == "requeuehold 12"


# -- one broken node ------------------------------------------------------------------------------


def test_a_broken_node_is_left_out_once_and_then_the_job_waits(node: Node) -> None:
    node.slurm_says(nodes=4, excluded="n7")
    script = node.script(node.python(None))
    node.execute(script)
    assert node.asked[1:] == ["requeue 12", "update JobId=12 ExcNodeList=n3,n7"]
    assert "No such file or directory" in node.note()
    assert "it goes to other nodes, once, away from n3" in node.note()
    node.execute(script, SLURMD_NODENAME="n4")
    assert node.asked[-1] == "requeuehold 12", "it is not the node"
    assert "job 12 on n4" in node.note()


def test_a_start_in_between_makes_it_a_first_failure_again(node: Node) -> None:
    node.slurm_says(nodes=4)
    script = node.script(node.python(None))
    node.execute(script)
    note = node.run.submissions / "not-started-12.txt"
    os.utime(note, (1, 1))
    os.utime(node.run.attempts, (2, 2))
    node.execute(script, SLURMD_NODENAME="n4")
    assert node.asked[-2:] == ["requeue 12", "update JobId=12 ExcNodeList=n4"]


@pytest.mark.parametrize(
    "says",
    [
        {"nodes": 1},
        {"nodes": 3, "excluded": "n1"},
        {"nodes": 4, "wanted": "n3"},
    ],
    ids=["its only node", "too few left", "asked for by name"],
)
def test_a_node_that_the_job_can_not_do_without_is_not_left_out(
    node: Node, says: dict[str, object]
) -> None:
    node.slurm_says(**says)  # type: ignore[arg-type]
    node.execute(node.script(node.python(None)), SLURM_JOB_NUM_NODES="2")
    assert [line.split()[0] for line in node.asked] == ["update", "requeuehold"]


def test_a_node_that_can_not_be_left_is_a_reason_to_wait(node: Node) -> None:
    node.slurm_says(nodes=4)
    (node.folder / "refused").write_text("requeue\n")
    node.execute(node.script(node.python(None)))
    assert node.asked[-1] == "requeuehold 12"


def test_a_job_that_could_not_remember_does_not_go_round(node: Node) -> None:
    node.slurm_says(nodes=4)
    script = node.script(node.python(None))
    (node.run.submissions / "not-started-12.txt").symlink_to("/dev/full")
    node.execute(script)
    assert "requeue 12" not in node.asked
    assert node.asked[-1] == "requeuehold 12"


def test_a_setup_that_fails_and_harms_nothing_is_nobody_s_business(node: Node) -> None:
    done = node.execute(node.script(node.python(WHOLE), "false"))
    assert "started" in done.stdout
    assert not node.has_notes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_job_that_is_ended_in_its_setup_is_not_broken(node: Node, number: signal.Signals) -> None:
    script = node.script(node.python(WHOLE), "bash -c 'touch begun; exec sleep 77'")
    process = subprocess.Popen(
        ["bash", str(script)], env=node.environ(), cwd=node.folder, start_new_session=True
    )
    while not (node.folder / "begun").exists():
        time.sleep(0.01)
    os.killpg(process.pid, number)
    assert process.wait(20) == 143
    assert f"Slurm ended it ({number.name}) before it had begun" in node.note()
    assert NotStarted("7", 0.0, node.note()).signal == number.name
    assert node.asked == [], "what was cancelled came back"


def test_a_finished_run_is_not_held(node: Node) -> None:
    script = node.script(node.python(None))
    node.run.mark_done(1, 1)
    assert node.execute(script).returncode == 0
    assert node.asked == []


def test_a_disk_that_is_full_does_not_keep_the_job_from_being_held(node: Node) -> None:
    script = node.script(node.python(BROKEN))
    (node.run.submissions / "not-started-12.txt").symlink_to("/dev/full")
    done = node.execute(script)
    assert "ModuleNotFoundError" in done.stderr
    assert node.asked[-1] == "requeuehold 12"


def test_the_teardown_comes_after_the_supervisor_also_when_the_job_is_ended(node: Node) -> None:
    python = node.python('#!/bin/bash\n[ "$3" = --try ] || { touch begun; exec sleep 77; }\n')
    command = f"{shlex.quote(python)} -m slurm_forge.process supervise"
    script = node.lines(start_lines(command, teardown=True), "touch torn-down")
    process = subprocess.Popen(
        ["bash", str(script)], env=node.environ(), cwd=node.folder, start_new_session=True
    )
    while not (node.folder / "begun").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(20)
    assert (node.folder / "torn-down").exists()
    assert node.asked == []


def test_a_successor_finds_its_submission_and_its_results_are_found(node: Node) -> None:
    folder = node.folder / "it's $(touch owned) logs"
    folder.mkdir()
    kept = node.folder / "submitted.pkl"
    kept.write_bytes(b"payload")
    kept.chmod(0o600)
    script = node.lines(successor_lines(kept, folder, first="9_1", tasks=3), "forge_starting=")
    (folder / "9_1_0_result.pkl").write_bytes(b"an error of the first attempt")
    for number in ("12", "13"):  # a successor of a successor
        done = node.execute(script, SLURM_JOB_ID=number)
        assert (done.returncode, done.stderr) == (0, "")
        theirs = folder / f"{number}_submitted.pkl"
        assert theirs.read_bytes() == b"payload"
        assert stat.S_IMODE(theirs.stat().st_mode) == 0o600
    assert not (folder / "9_1_0_result.pkl").exists(), "done before the end"
    (folder / "13_2_result.pkl").write_bytes(b"result")
    assert (folder / "9_1_2_result.pkl").read_bytes() == b"result"
    assert not (node.folder / "owned").exists()


# -- the file that a script sources ---------------------------------------------------------------


def test_a_start_file_that_is_torn_or_changed_is_renewed(node: Node) -> None:
    script = node.script(node.python(WHOLE))
    start = start_file(node.run.submissions)
    text = start.read_text()
    for harm in (text[:100], "", text + "exit 3\n"):
        start.write_text(harm)
        keep_start_file(node.run.submissions, script.read_text())
        assert start.read_text() == text
    assert "started" in node.execute(script).stdout


def test_slurm_is_asked_again_to_hold_a_job_without_its_start_file(node: Node) -> None:
    script = node.script(node.python(WHOLE))
    start_file(node.run.submissions).unlink()
    (node.folder / "refused").write_text("requeuehold\n")
    assert node.execute(script).returncode == 1
    assert node.asked == ["requeuehold 12"] * 3


def test_the_arguments_of_a_script_stay_its_own(node: Node) -> None:
    script = node.lines('printf "%s|" "$@"', "forge_starting=")
    script.write_text(f"set -- --chain a\n{script.read_text()}")
    assert node.execute(script).stdout == "--chain|a|"


@pytest.mark.parametrize("harm", ["gone", "writable by others", "a link", "a folder"])
def test_a_script_without_the_file_that_it_sources_says_so_and_waits(node: Node, harm: str) -> None:
    script = node.script(node.python(WHOLE))
    start = start_file(node.run.submissions)
    if harm == "writable by others":
        start.chmod(0o620)
    else:
        start.rename(node.folder / "elsewhere")
    if harm == "a link":
        start.symlink_to(node.folder / "elsewhere")
    if harm == "a folder":
        start.mkdir(mode=0o700)
    done = node.execute(script)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"slurm_forge: {start} is missing here, or others may write it" in done.stderr
    assert node.asked == ["requeuehold 12"]
    shutil.rmtree(start) if harm == "a folder" else None
    keep_start_file(node.run.submissions, script.read_text())
    assert "started" in node.execute(script).stdout


def test_a_script_copied_elsewhere_starts_as_long_as_its_run_is_there(node: Node) -> None:
    copy = node.folder / "elsewhere" / "my.sbatch"
    copy.parent.mkdir()
    node.script(node.python(WHOLE)).rename(copy)
    assert "started" in node.execute(copy).stdout


def test_a_newer_version_leaves_the_file_of_a_waiting_job_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = node.script(node.python(WHOLE))
    old = start_file(node.run.submissions)
    monkeypatch.setattr(batch_script, "start_text", lambda: "exit 9 # another version\n")
    assert start_file(node.run.submissions) != old
    keep_start_file(node.run.submissions, str(start_file(node.run.submissions)))
    assert "started" in node.execute(script).stdout


def test_what_is_set_already_wins_over_the_site_s_variables(node: Node) -> None:
    shown = 'printf "%s|" "$A" "$B" "${C-unset}" "$D"; bash -c "echo $A"; forge_starting='
    script = node.lines("B=of-the-user", "forge_defaults A=1 B=2 C= D='a b$x'", shown)
    done = node.execute(script, A="mine")
    assert done.stderr == ""
    assert done.stdout == "mine|of-the-user||a b$x|mine\n"
