"""One run, one set of figures: every view of it tells the same goodput, steps and lost time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slurm_forge.cli.main import application
from slurm_forge.cli.monitoring.metrics_runs import MetricsRuns
from slurm_forge.cli.monitoring.top_reading import Fleet
from slurm_forge.cli.observe.report_sources import read_sources
from slurm_forge.report import text as t
from slurm_forge.report.page.html import run_html
from slurm_forge.report.page.run_page import run_page
from slurm_forge.report.story.time_use import TimeUse
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.report.journals import Scribe

GOLDEN = Path(__file__).parents[2] / "golden" / "runs"
_LOST = (TimeUse.REPEATED, TimeUse.RESTART)
RUNS = sorted(path.parent for path in GOLDEN.glob("*/*/journal"))


def _eventful(scribe: Scribe, end: str) -> RunDirectory:
    """A crash, a rollback whose cost was measured, a preemption, and an end."""
    scribe.submitted()
    scribe.later(60).begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(20)
    scribe.train(21, 30)
    scribe.later(9).incident(Cause.CRASH, Action.RELAUNCH, step=30)
    scribe.later(4).relaunch()
    scribe.resume(20)
    scribe.train(21, 40)
    scribe.save(40)
    scribe.train(41, 45)
    name = scribe.unstable(45, Action.ROLLBACK, target=40)
    scribe.again(40)
    scribe.train(41, 46)
    scribe.recovered(name, 5, 99.0)
    scribe.preempted(46)
    scribe.later(50).begin()
    scribe.resume(46)
    scribe.train(47, 50)
    if end == "finished":
        scribe.finish(50)
    else:
        scribe.incident(Cause.HANG, Action.HOLD, step=50)
        scribe.held("hang")
    return scribe.run


@pytest.fixture(params=[*RUNS, "finished", "held"], ids=str)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    if isinstance(request.param, Path):
        return RunDirectory.at(request.param)
    return _eventful(Scribe(tmp_path), request.param)


def test_every_view_of_a_run_tells_the_same_figures(run: RunDirectory) -> None:
    def asked(verb: str) -> str:
        done = CliRunner().invoke(application(), [verb, str(run.path), "--json"])
        assert done.exit_code == 0, done.output
        return done.stdout

    story, status = json.loads(asked("explain")), json.loads(asked("status"))
    page = run_page(read_sources(run))
    (figures,), _ = MetricsRuns(limit=9, rested_for_s=1e12).refresh([run])
    fleet = Fleet(lambda: [run], run.path.parent, None)
    fleet.poll()
    fleet.study(str(run.path))
    (row,) = fleet.rows()

    assert {story["step"], status["step"], figures.step, row.step} == {story["step"]}
    assert {story["status"], status["status"], page.status, figures.status, row.state} == {
        story["status"]
    }
    assert figures.goodput == row.goodput == story["goodput"]
    shown = {each.label: each.value for each in page.key_figures}
    assert shown["Goodput"] == t.share(story["goodput"])

    bars = {each.use: each for each in page.waterfall.losses}
    repeated = bars.get(TimeUse.REPEATED.value)
    seconds = 0.0 if repeated is None else repeated.seconds
    assert seconds == pytest.approx(story["repeated_s"])
    assert figures.time_s[TimeUse.REPEATED] == pytest.approx(story["repeated_s"])
    lost = [bars[use.value].rank_seconds for use in _LOST if use.value in bars]
    assert sum(lost) == pytest.approx(story["lost_rank_s"])
    idle = bars.get(TimeUse.IDLE.value)
    assert story["idle_rank_s"] == pytest.approx(0.0 if idle is None else idle.rank_seconds)


def test_what_an_incident_had_repeated_is_told_in_the_same_words(tmp_path: Path) -> None:
    run = _eventful(Scribe(tmp_path), "finished")
    done = CliRunner().invoke(application(), ["explain", str(run.path), "--json"])
    story = json.loads(done.stdout)
    incidents = [
        each
        for attempt in story["attempts"]
        for launch in attempt["launches"]
        for each in launch["incidents"]
    ]
    assert sum(each["repeated_steps"] or 0 for each in incidents) == story["repeated_steps"] == 15
    assert sum(each["repeated_s"] for each in incidents) == pytest.approx(story["repeated_s"])
    text = CliRunner().invoke(application(), ["explain", str(run.path), "--all"]).stdout
    html = run_html(run_page(read_sources(run)))
    for phrase in ("10 steps repeated, 1 min 40 s", "5 steps repeated, 50 s"):
        assert phrase in text
        assert phrase in html
    assert "99 s" not in text + html, "from the incident until training was past it"
