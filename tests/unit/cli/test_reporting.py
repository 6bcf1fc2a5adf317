"""``report`` and the process of that name: which file is written, and when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slurm_forge.cli.main import application
from slurm_forge.cli.observe import report_sources
from slurm_forge.cli.observe.report_process import write_report
from slurm_forge.cli.observe.report_sources import read_sources
from slurm_forge.journal import events as ev
from slurm_forge.launch.attempt.report_refresh import ReportRefresh
from slurm_forge.process import process_words
from slurm_forge.report.page.values import RunSources
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.sweep_runs import SweepFile, SweepRun
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.report.journals import Scribe


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return hung(Scribe(tmp_path / "runs"))


def hung(scribe: Scribe) -> Scribe:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    for step in range(1, 6):
        scribe.write("rank0", ev.Logged(step=step, values={"loss": 1 / step}))
    folder = scribe.run.stacks(1, 1)
    folder.mkdir(parents=True)
    (folder / "rank-3.txt").write_text('  File "model.py", line 12 in forward <module>\n')
    files = ("attempts/1/stacks/1/rank-3.txt", "../../outside.txt")
    (scribe.run.path.parent.parent / "outside.txt").write_text("a secret")
    scribe.write(
        "supervisor",
        ev.StallSeen(
            step=5, late_ranks=(3,), late_hosts=("n01",), since_s=9, limit_s=5, files=files
        ),
    )
    scribe.incident(Cause.HANG, Action.HOLD, step=5)
    scribe.held("hang")
    return scribe


def typed(*words: str) -> str:
    done = CliRunner().invoke(application(), ["report", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_report_of_a_run_lies_in_its_folder(scribe: Scribe) -> None:
    path = typed(str(scribe.run.path)).strip()
    assert path == str(scribe.run.report_file)
    page = scribe.run.report_file.read_text()
    assert "<h1>tiny-gpt</h1>" in page
    # Every logged figure, not only the newest one, which is all that other reports read.
    assert '"values":[1.0,0.5,0.333333,0.25,0.2]' in page
    assert "line 12 in forward &lt;module&gt;" in page
    assert "a secret" not in page


def test_another_file_or_stdout(scribe: Scribe, tmp_path: Path) -> None:
    typed(str(scribe.run.path), "-o", str(tmp_path / "x.html"))
    assert not scribe.run.report_file.exists()
    page = typed(str(scribe.run.path), "-o", "-")
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert (tmp_path / "x.html").read_text()[:400] == page[:400]


def test_several_runs_are_one_page_that_links_to_their_own(
    scribe: Scribe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = hung(Scribe(tmp_path / "runs", "other"))
    typed(str(scribe.run.path))
    assert typed(str(scribe.run.path), str(other.run.path)).strip() == "slurm-forge-report.html"
    page = (tmp_path / "slurm-forge-report.html").read_text()
    assert '<a href="./runs/tiny-gpt/report.html">tiny-gpt</a>' in page
    assert "<h1>tiny-gpt, other</h1>" in page


def test_a_sweep_lists_its_runs_and_what_each_of_them_is(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    hung(Scribe(runs, "lr-0"))
    folder = runs / "lr"
    folder.mkdir()
    entries = tuple(SweepRun(run=f"lr-{n}", settings={"args.lr": 0.1 / (n + 1)}) for n in range(2))
    (folder / "sweep.yaml").write_text(SweepFile(name="lr", runs=entries).to_yaml())
    (folder / "sweep.yaml").chmod(0o600)
    assert typed("lr", "--runs", str(runs)).strip() == str(folder / "report.html")
    page = (folder / "report.html").read_text()
    assert '<th scope="col">args.lr</th>' in page
    assert "<td>0.05</td>" in page
    assert "holds no run" in page  # the second one was never made


@pytest.mark.parametrize("where", [".", "no/folder/x.html"])
def test_a_file_that_can_not_be_written_is_told_with_another_way(
    scribe: Scribe, tmp_path: Path, where: str
) -> None:
    words = ["report", str(scribe.run.path), "-o", str(tmp_path / where)]
    done = CliRunner().invoke(application("report"), words)
    assert done.exit_code == 2
    told = " ".join(done.output.split())
    assert f"{tmp_path / where} can't be written: " in told
    assert "-o - for standard output" in told
    assert not list(tmp_path.glob("*.tmp"))


def test_the_process_writes_only_what_is_new(scribe: Scribe) -> None:
    run = scribe.run
    assert write_report(run)
    made = run.report_file.stat()
    assert not write_report(run)
    assert run.report_file.stat().st_mtime_ns == made.st_mtime_ns
    scribe.write("cli", ev.UserAsked(verb="requeue", user="mia"), launch=1 << 30)
    assert write_report(run)


def test_what_is_written_while_a_report_is_made_is_in_the_next_one(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as meanwhile:

        def read(run: RunDirectory, **options: Any) -> RunSources:
            sources = read_sources(run, **options)
            scribe.write("cli", ev.UserAsked(verb="requeue", user="mia"), launch=1 << 30)
            return sources

        meanwhile.setattr(report_sources, "read_sources", read)
        assert write_report(scribe.run)
    assert write_report(scribe.run)
    assert not write_report(scribe.run)


def test_the_process_yields_and_says_what_went_wrong(scribe: Scribe, tmp_path: Path) -> None:
    def started(path: Path) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, *process_words("report", str(path))]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    done = started(scribe.run.path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "<h1>tiny-gpt</h1>" in scribe.run.report_file.read_text()
    scribe.run.report_file.unlink()
    scribe.run.report_file.mkdir()
    os.utime(scribe.run.report_file, (0, 0))
    failed = started(scribe.run.path)
    assert failed.returncode == 1
    assert failed.stderr.startswith("slurm_forge: no report of tiny-gpt: ")


def test_the_process_takes_little_and_is_not_ended_in_place_of_a_rank(scribe: Scribe) -> None:
    program = f"""
import json, os, resource, signal
from slurm_forge.cli.observe import report_process

def tell(run):
    adjusted = open("/proc/self/oom_score_adj").read()
    limits = [resource.getrlimit(each)[0] for each in (resource.RLIMIT_DATA, resource.RLIMIT_CPU)]
    wall = signal.getitimer(signal.ITIMER_REAL)[0]
    print(json.dumps([os.nice(0), *limits, wall, adjusted]))

report_process.write_report = tell
report_process.main([{str(scribe.run.path)!r}])
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    nice, memory, processor, wall, adjusted = json.loads(done.stdout)
    assert (nice, memory, processor) == (19, 512 << 20, 60)
    # Beside busy ranks a second of a processor takes many: until the next report is due.
    assert 500 < wall < 600
    assert adjusted == Path("/proc/self/oom_score_adj").read_text()


class Processes:
    """Stands for the processes that make reports: each takes as long as its program says."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.started: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []

    def __call__(self, run: RunDirectory, log: Path) -> subprocess.Popen[bytes]:
        self.logs.append(log)
        self.started.append(subprocess.Popen([sys.executable, "-S", "-c", self.program]))
        return self.started[-1]

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.started) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_reports_are_made_while_it_runs_and_once_more_at_its_end(scribe: Scribe) -> None:
    processes = Processes("pass")
    report = ReportRefresh(scribe.run, 1, start=processes, every_s=0.01, patience_s=60)
    processes.wait(3)
    report.last()
    count = len(processes.started)
    report.finish(urgent=False)
    assert processes.started[-1].returncode == 0
    assert len(processes.started) == count


def test_a_report_that_does_not_end_holds_up_nobody(scribe: Scribe) -> None:
    processes = Processes("import time; time.sleep(600)")
    report = ReportRefresh(
        scribe.run, 1, start=processes, every_s=0.01, patience_s=600, urgent_patience_s=0.05
    )
    processes.wait(1)
    report.last()
    report.finish(urgent=True)
    first, last = processes.started  # no other one was started beside the first
    assert (first.wait(60), last.wait(60)) == (-9, -9)


def test_what_can_t_be_started_is_no_trouble(scribe: Scribe) -> None:
    def fails(run: RunDirectory, log: Path) -> subprocess.Popen[bytes]:
        raise OSError("no such file")

    report = ReportRefresh(scribe.run, 1, start=fails, every_s=600)
    report.last()
    report.finish(urgent=False)


def test_of_a_run_here_the_newest_attempt_keeps_what_went_wrong(
    scribe: Scribe, tmp_path: Path
) -> None:
    processes = Processes("pass")
    new = Scribe(tmp_path / "new")
    for run in (new.run, scribe.run):
        report = ReportRefresh(run, None, start=processes)
        scribe.begin()
        report.last()
        report.finish(urgent=False)
    assert processes.logs == [scribe.run.attempt(3) / "report.log"], "of the other nothing is known"
