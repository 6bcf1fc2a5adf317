"""``slurm-forge metrics``: what scrapers get, of real run directories, and what it leaves out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner, Result

from benchmarks.many_runs import write_many
from slurm_forge.cli.main import application
from slurm_forge.cli.monitoring.metrics_runs import MetricsRuns
from slurm_forge.cli.monitoring.metrics_server import MetricsPage, serving
from slurm_forge.cli.observe.run_reading import RunReader, gather
from slurm_forge.errors import ConfigError
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import Record, encode, without_superseded
from slurm_forge.journal.line_reader import read_lines
from slurm_forge.journal.tail import without_superseded_records
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.metrics.exposition import Refreshed, exposition
from slurm_forge.report.metrics.run_figures import run_figures
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.launch.message_servers import free_port
from tests.unit.report.journals import TUESDAY, Scribe

REFRESHED = Refreshed(time=1.0, seconds=0.5, omitted=0, unreadable=0)
Samples = dict[tuple[str, ...], float]


def metrics(*words: str) -> Result:
    return CliRunner().invoke(application("metrics"), ["metrics", *words])


def samples(text: str) -> Samples:
    """Values by the name of the metric and the values of its labels."""
    return {
        (sample.name.removeprefix("slurm_forge_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    """A run that was preempted once, went back once, and trains."""
    scribe = Scribe(tmp_path)
    scribe.submitted()
    scribe.later(60).begin("n01", "n02")
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(20, seconds=4.0)
    scribe.preempted(30)
    scribe.later(120).begin("n01", "n02")
    scribe.resume(30)
    scribe.write("rank0", ev.Logged(step=40, values={"loss": 2.5, "lr": 0.1}))
    scribe.write("supervisor", ev.ProbeMeasured(ok=True, step=40, latency_s=0.004))
    scribe.later(20).write("rank0", ev.Progress(step=50))
    return scribe


def read(scribe: Scribe, **limits: float) -> str:
    settings = {"limit": 10, "rested_for_s": 1e9, **limits}
    runs = MetricsRuns(**settings, clock=lambda: scribe.now)  # type: ignore[arg-type]
    return MetricsPage(*runs.refresh([scribe.run])).text().decode()


def test_the_figures_are_those_of_explain_and_status(scribe: Scribe) -> None:
    values = samples(read(scribe))
    reader = RunReader(scribe.run, clock=lambda: scribe.now)
    reader.poll()
    story = explain(reader.facts())
    name = "tiny-gpt"
    (info,) = (key for key in values if key[0] == "run_info")
    assert set(info) >= {name, "running", story.job}
    assert values["run_step", name] == 50
    assert values["run_target_step", name] == 400
    assert values["run_loss", name] == 2.5
    assert values["run_ranks", name] == 8
    assert values["run_attempts_total", name] == 2
    assert values["run_attempt_started_timestamp_seconds", name] == story.attempts[-1].started
    assert values["run_incidents_total", "preempted", name] == 1
    assert values["run_probe_latency_seconds", name] == 0.004
    assert values["run_last_checkpoint_duration_seconds", name] == 4.1
    assert values["run_last_progress_timestamp_seconds", name] == scribe.now
    times = {k[2]: v for k, v in values.items() if k[0] == "run_time_seconds"}
    assert sum(times.values()) == pytest.approx(scribe.now - TUESDAY, abs=2)
    assert times["training"] > 0 and times["restart"] > 0 and all(times.values())
    assert values["run_goodput_ratio", name] == pytest.approx(story.goodput)
    assert times["training"] + times.get("saving", 0.0) == pytest.approx(story.kept_s)


def test_the_time_of_a_step_is_that_of_the_last_half_minute(scribe: Scribe) -> None:
    runs = MetricsRuns(limit=10, rested_for_s=1e9, clock=lambda: scribe.now)
    (first,), _ = runs.refresh([scribe.run])
    assert first.step_s == pytest.approx(1.0, abs=0.3), "of the launch: 20 s for 20 steps"
    scribe.later(40).write("rank0", ev.Progress(step=60))
    (second,), _ = runs.refresh([scribe.run])
    assert second.step_s == pytest.approx(4.0)
    # At a step back nothing is made up.
    scribe.later(40).write("rank0", ev.Progress(step=55))
    (third,), _ = runs.refresh([scribe.run])
    assert third.step_s is None or third.step_s > 0


def test_a_run_that_waits_has_its_wait_and_nothing_that_only_a_running_one_has(
    scribe: Scribe, tmp_path: Path
) -> None:
    new = Scribe(tmp_path, "new")
    new.submitted()
    new.later(300)
    values = samples(read(new))
    assert sum(key[0] == "run_info" and "submitted" in key for key in values) == 1
    assert values["run_queue_wait_seconds", "new"] == 300
    assert values["run_time_seconds", "new", "training"] == 0, "of which goodput is a share"
    assert not any(key[0] in ("run_loss", "run_step_duration_seconds") for key in values)
    running = {key[0] for key in samples(read(scribe))}
    scribe.preempted(60)
    scribe.later(240)
    values = samples(read(scribe))
    assert values["run_queue_wait_seconds", "tiny-gpt"] == pytest.approx(240, abs=2)
    only_of_a_job = running - {key[0] for key in values}
    assert "run_last_progress_timestamp_seconds" in only_of_a_job
    assert only_of_a_job >= {"run_ranks", "run_attempt_started_timestamp_seconds"}
    assert ("run_loss", "tiny-gpt") in values and ("run_step", "tiny-gpt") in values


def test_saves_that_fail_count_until_one_succeeds(scribe: Scribe) -> None:
    key = ("run_failing_saves", "tiny-gpt")
    assert key not in samples(read(scribe))
    for step in (55, 60):
        scribe.later(5).write("rank0", ev.CheckpointFailed(step=step, reason="no space left"))
    assert samples(read(scribe))[key] == 2
    scribe.save(65, seconds=4.0)
    assert key not in samples(read(scribe))


def test_a_running_run_has_few_series(scribe: Scribe) -> None:
    """Each is new to a Prometheus once, and there are a thousand runs."""
    of_the_run = [key for key in samples(read(scribe)) if "tiny-gpt" in key]
    assert len(of_the_run) <= 20, of_the_run


def test_runs_that_have_rested_for_long_and_those_beyond_the_limit_are_left_out(
    tmp_path: Path,
) -> None:
    scribes = []
    for number in range(4):
        scribe = Scribe(tmp_path, f"run-{number}")
        scribe.begin("n01")
        scribe.resume(0)
        scribe.later(number * 100).train(1, 2)
        scribes.append(scribe)
    held, finished, *live = scribes
    held.incident(Cause.HANG, Action.HOLD)
    finished.finish(2)
    now = live[-1].now
    os.utime(finished.run.done_file, (now, now))
    runs = MetricsRuns(limit=3, rested_for_s=86400, clock=lambda: now)
    figures, refreshed = runs.refresh([each.run for each in scribes])
    assert len(figures) == 3 and refreshed.omitted == 1
    later = MetricsRuns(limit=3, rested_for_s=86400, clock=lambda: now + 2 * 86400)
    figures, _ = later.refresh([each.run for each in scribes])
    assert {each.run for each in figures} <= {"run-2", "run-3"}


def test_a_run_that_cannot_be_read_is_counted_and_the_others_are_exported(
    scribe: Scribe, tmp_path: Path
) -> None:
    bad = Scribe(tmp_path, "bad")
    bad.begin("n01")
    for file in bad.run.journal.iterdir():
        file.chmod(0o666)
    runs = MetricsRuns(limit=10, rested_for_s=1e9, clock=lambda: scribe.now)
    figures, refreshed = runs.refresh([bad.run, scribe.run])
    assert [each.run for each in figures] == ["tiny-gpt"]
    assert refreshed.unreadable == 1
    text = exposition(figures, refreshed)[1].decode()
    assert samples(text)["exporter_runs_unreadable",] == 1


def test_a_run_without_change_is_not_read_again(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = MetricsRuns(limit=10, rested_for_s=1e9, clock=lambda: scribe.now)
    polls: list[int] = []
    poll = RunReader.poll
    monkeypatch.setattr(RunReader, "poll", lambda self: polls.append(1) or poll(self))
    for _ in range(3):
        runs.refresh([scribe.run])
    assert len(polls) == 1
    scribe.write("rank0", ev.Progress(step=51))
    (now,), _ = runs.refresh([scribe.run])
    assert len(polls) == 2 and now.step == 51


def test_both_formats_are_what_their_parsers_and_promtool_take(scribe: Scribe) -> None:
    facts = gather(scribe.run)
    figures = [run_figures(facts, explain(facts))]
    kind, text = exposition(figures, REFRESHED)
    assert kind.startswith("text/plain")
    kind, body = exposition(figures, REFRESHED, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(body.decode())}
    assert {"slurm_forge_run_incidents", "slurm_forge_run_info"} <= names
    if shutil.which("promtool"):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_every_metric_that_the_rules_the_dashboard_and_the_page_name_exists(
    scribe: Scribe,
) -> None:
    there = {
        line.split("{")[0].split(" ")[0]
        for line in read(scribe).splitlines()
        if not line.startswith("#")
    } | set(re.findall(r"# TYPE (\S+)", read(scribe)))
    rules, dashboard = metrics("--alert-rules").stdout, metrics("--dashboard").stdout
    json.loads(dashboard)
    for text in (rules, dashboard):
        named = set(re.findall(r"slurm_forge_(?:run|exporter)_\w+", text))
        assert len(named) >= 5 and named - there == set()
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `slurm_forge_")]
    documented = set()
    for row in rows:
        first, *more = re.findall(r"`(slurm_forge_\w+|…_\w+)(?:\{[\w,]+\})?`", row.split("|")[1])
        documented.add(first)
        base = "slurm_forge_exporter" if "exporter" in first else "slurm_forge_run"
        middle = "_last_checkpoint" if "last_checkpoint" in first else ""
        documented |= {f"{base}{middle}{each[1:]}" for each in more}
    assert documented == there


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's model needs Python 3.11")
def test_grafana_s_own_model_of_a_dashboard_has_every_field_of_ours() -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    ours = json.loads(metrics("--dashboard").stdout)
    theirs = json.loads(JSONEncoder().encode(Dashboard.from_json(ours)))
    assert list(not_kept(ours, theirs, "")) == []
    assert len(theirs["panels"]) == len(ours["panels"]) > 10


def not_kept(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    """The fields of ours that are missing or others in theirs, which adds defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from not_kept(value, theirs.get(key), f"{where}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, each in enumerate(ours):
            yield from not_kept(each, theirs[number], f"{where}[{number}]")
    elif ours != theirs:
        yield f"{where}: {ours!r} became {theirs!r}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
def test_prometheus_can_parse_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [
        target["expr"].replace("$__rate_interval", "5m").replace("$__range", "5m")
        for panel in json.loads(metrics("--dashboard").stdout)["panels"]
        for target in panel.get("targets", [])
    ]
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"SUCCESS: {len(queries)} rules found" in checked.stdout


def rule_test(name: str, series: dict[str, str], raised: dict[str, tuple[str, ...]]) -> Any:
    """A test of ``promtool``: values for each minute, and which alerts are raised at what time."""
    of_run = [
        {"series": f'slurm_forge_run_{metric}{{run="x"}}', "values": values}
        for metric, values in series.items()
    ]
    running = {"series": 'slurm_forge_run_info{run="x",state="running"}', "values": "1x400"}
    return {
        "name": name,
        "interval": "1m",
        "input_series": [*of_run, running],
        "promql_expr_test": [
            {
                "eval_time": time,
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts
                ],
            }
            for time, alerts in raised.items()
        ],
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
def test_alerts_count_from_the_start_of_the_attempt_or_later(tmp_path: Path) -> None:
    started, progress, saved = (
        f"{each}_timestamp_seconds"
        for each in ("attempt_started", "last_progress", "last_checkpoint")
    )
    both = ("SlurmForgeNoProgress", "SlurmForgeCheckpointOld")
    # Attempts start at 0, after ten hours in the queue where there was one before.
    tests = [
        rule_test(
            "what came before the queue raises nothing",
            {started: "0x400", progress: "-36000x400", saved: "-36000x400"},
            {"20m": (), "40m": both[:1], "300m": both},
        ),
        rule_test(
            "a first attempt that hangs before its first step",
            {started: "0x400"},
            {"20m": (), "40m": both[:1], "300m": both},
        ),
        rule_test(
            "a run that trains and saves",
            {started: "0x400", progress: "0+60x400", saved: "0+60x400"},
            {"20m": (), "40m": (), "300m": ()},
        ),
        rule_test(
            "a run that has stopped training after an hour",
            {started: "0x400", progress: "3600x400", saved: "3600x400"},
            {"80m": (), "96m": both[:1], "299m": both[:1], "306m": both},
        ),
    ]
    (tmp_path / "forge.rules.yml").write_text(metrics("--alert-rules").stdout)
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": ["forge.rules.yml"], "tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- the verb --------------------------------------------------------------------------------------


def test_a_scraper_gets_what_was_read_last(scribe: Scribe) -> None:
    runs = MetricsRuns(limit=10, rested_for_s=1e9, clock=lambda: scribe.now)
    with serving("127.0.0.1:0", MetricsPage(*runs.refresh([scribe.run]))) as server:

        def step() -> float:
            with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
                return samples(answer.read().decode())["run_step", "tiny-gpt"]

        with pytest.MonkeyPatch.context() as patch:
            patch.delattr("slurm_forge.cli.monitoring.metrics_server.exposition")
            assert step() == 50, "the page was made before anybody could ask for it"
        scribe.write("rank0", ev.Progress(step=77))
        assert step() == 50, "a scrape reads no run"
        server.show(MetricsPage(*runs.refresh([scribe.run])))
        assert step() == 77
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://{server.address}/other")
        with (
            pytest.raises(ConfigError, match="can't be used"),
            serving(server.address, MetricsPage((), REFRESHED)),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="is not HOST:PORT"),
        serving("9877", MetricsPage((), REFRESHED)),
    ):
        pass


def test_the_textfile_is_replaced_whole_and_readable_for_others(
    scribe: Scribe, tmp_path: Path
) -> None:
    file = tmp_path / "out" / "slurm_forge.prom"
    file.parent.mkdir()
    done = metrics("--textfile", str(file), "--once", "--runs", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert samples(file.read_text())["run_step", "tiny-gpt"] == 50
    assert file.stat().st_mode & 0o444 == 0o444
    assert list(file.parent.iterdir()) == [file], "nothing else that the collector would read"
    assert metrics("--textfile", str(file.with_suffix(".txt")), "--once").exit_code == 2
    nowhere = metrics(
        "--textfile", str(tmp_path / "no" / "x.prom"), "--once", "--runs", str(tmp_path)
    )
    assert nowhere.exit_code == 2
    assert "no/x.prom can't be written: No such file or directory" in " ".join(
        nowhere.output.split()
    )
    assert "a folder of yours" in " ".join(nowhere.output.split())


def test_a_file_that_can_not_be_written_now_is_written_later(
    scribe: Scribe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "away"

    def sleeps(seconds: float) -> None:
        if (folder / "x.prom").exists():
            raise KeyboardInterrupt
        if tried:
            folder.mkdir(exist_ok=True)
        tried.append(seconds)

    tried: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps)
    done = metrics("--textfile", str(folder / "x.prom"), "--runs", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "can't be written" in done.output
    assert samples((folder / "x.prom").read_text())["run_step", "tiny-gpt"] == 50


def test_without_options_it_prints_once_and_without_the_library_it_names_the_extra(
    scribe: Scribe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = metrics("--runs", str(tmp_path))
    assert samples(printed.stdout)["run_step", "tiny-gpt"] == 50
    assert metrics("--runs", str(tmp_path / "none")).exit_code == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused = metrics("--runs", str(tmp_path))
    assert refused.exit_code == 2 and "slurm_forge[metrics]" in refused.output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus")
def test_a_real_prometheus_scrapes_a_thousand_runs_and_raises_the_alerts(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    write_many(runs, 1000)
    (tmp_path / "forge.rules.yml").write_text(metrics("--alert-rules").stdout)
    words = [sys.executable, "-m", "slurm_forge.cli.main", "metrics", "--runs", str(runs)]
    exporter = subprocess.Popen(
        [*words, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    )
    assert exporter.stderr is not None
    target = exporter.stderr.readline().removeprefix("http://").removesuffix("/metrics\n")
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 2s, evaluation_interval: 2s}\n"
        "rule_files: [forge.rules.yml]\n"
        "scrape_configs:\n"
        "  - job_name: slurm_forge\n"
        f"    static_configs: [{{targets: ['{target}']}}]\n"
    )
    port = free_port()
    prometheus = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )

    def asked(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=30) as answer:
            return json.load(answer)["data"]

    def value(query: str) -> float | None:
        result = asked(f"query?query={urllib.parse.quote(query)}")["result"]
        return float(result[0]["value"][1]) if result else None

    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                if value("count(slurm_forge_run_info)") == 1000:
                    break
            assert time.monotonic() < deadline, "Prometheus has not got them"
            time.sleep(0.5)
        assert value("up") == 1
        assert value('count(slurm_forge_run_info{state="held"})') == 50
        assert value("count(slurm_forge_run_loss)") == 950
        (group,) = asked("rules")["groups"]
        assert {each["health"] for each in group["rules"]} <= {"ok", "unknown"}
        while not (alerts := asked("alerts")["alerts"]):
            assert time.monotonic() < deadline, "no alert was raised"
            time.sleep(0.5)
        held = [each for each in alerts if each["labels"]["alertname"] == "SlurmForgeRunHeld"]
        assert len(held) == 50
        while (value("count_over_time(scrape_duration_seconds[5m])") or 0) < 10:
            assert time.monotonic() < deadline, "it does not scrape any more"
            time.sleep(0.5)
        # Its own parsing and storing of all samples is part of what Prometheus measures.
        for of in ("max_over_time(", "quantile_over_time(0.5, "):
            print("scrape_duration_seconds", of, value(f"{of}scrape_duration_seconds[5m])"))
    finally:
        for process in (prometheus, exporter):
            process.kill()
            process.wait()


# -- progress that is superseded -------------------------------------------------------------------

EVENTS = st.one_of(
    st.builds(ev.Progress, step=st.integers(0, 99)),
    st.builds(
        ev.Logged,
        step=st.integers(0, 99),
        values=st.dictionaries(st.sampled_from(["loss", "lr", "x"]), st.just(1.0), min_size=1),
    ),
    st.just(ev.Note(text="x")),
)


@given(st.lists(EVENTS, max_size=30), st.lists(st.integers(0, 30)))
def test_records_read_in_pieces_are_thinned_as_those_that_are_read_at_once(
    events: list[ev.Event], cuts: list[int]
) -> None:
    records = [
        Record(attempt=1, launch=1, sequence=i, time=float(i), writer="rank0-0", event=event)
        for i, event in enumerate(events)
    ]
    content = b"".join(map(encode, records))
    at_once, _ = read_lines(without_superseded(content), file="f", writer="rank0-0")
    kept: list[Record] = []
    before = 0
    for cut in (*sorted(cuts), len(records)):
        kept = without_superseded_records([*kept, *records[before:cut]])
        before = max(before, cut)
    assert [each.sequence for each in kept] == [each.sequence for each in at_once]
