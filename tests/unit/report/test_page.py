"""The page of a run: what stands in it is what ``explain`` tells, and all of it is text."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from datetime import timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_forge.journal import events as ev
from slurm_forge.journal.logged import LoggedCurve
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import costs, explain_text
from slurm_forge.report.page.figures import MOST_POINTS, Figure, Point, thinned
from slurm_forge.report.page.html import index_html, run_html
from slurm_forge.report.page.index_page import index_page, indexed, unreadable
from slurm_forge.report.page.run_page import run_page
from slurm_forge.report.page.values import Ancestor, RunPage, RunSources, StackFile
from slurm_forge.report.page.waterfall import waterfall
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.decision import Action, Change
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.unit.report.journals import Scribe
from tests.unit.report.test_any_journal import FACTS, TESTED
from tests.unit.report.test_time_spans import ENDS, MOVES, Move, played

EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--\u2028'\"&"
    f"\x1b[31m\x00\x9b\u202e\u0085{'A' * 10_000}"
)


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


class Parsed(HTMLParser):
    """A page as a browser takes it apart, but for what scripts do."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.data = ""
        self.text = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = "data" if ("id", "report-data") in attrs else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("script", "style"):
            self.text += data


def page_of(facts: RunFacts, **sources: object) -> RunPage:
    return run_page(RunSources(facts=facts, **sources))  # type: ignore[arg-type]


def rolled_back(scribe: Scribe) -> Scribe:
    """Ten steps are undone by a rollback with half the learning rate."""
    scribe.submitted()
    scribe.later(60).begin()
    scribe.resume(0)
    for step in range(1, 31):
        scribe.train(step, step)
        scribe.write("rank0", ev.Logged(step=step, values={"loss": 3.0 - step / 100, "lr": 0.1}))
        if step == 20:
            scribe.save(20)
    plan = RecoveryPlan(lr_factor=0.5, lr_from_step=20, lr_ramp_steps=10)
    scribe.unstable(
        30,
        Action.ROLLBACK,
        onset=30,
        target=20,
        plan=plan,
        changes=(Change("lr_scale", "1", "0.5"),),
        evidence=(Evidence("all ranks", "the gradient is not finite"),),
    )
    scribe.again(20)
    for step in range(21, 41):
        scribe.train(step, step)
        scribe.write("rank0", ev.Logged(step=step, values={"loss": 2.0, "lr": 0.05}))
    return scribe


def test_the_page_tells_what_happened_what_it_cost_and_what_to_do(scribe: Scribe) -> None:
    facts = replace(rolled_back(scribe).facts(), gpus_per_rank=4.0)
    page, story = page_of(facts), explain(facts)
    told = " ".join(page.story)
    assert "running at step 40 of 400" in told
    assert "In 1 attempt there was 1 stretch of NaN or infinite gradients: all ranks: " in told
    assert "all ranks: the gradient is not finite. What followed: rolled back to step 20" in told
    assert "learning rate x1 → x0.5, back by step 30" in told
    assert f"What it cost: {', '.join(costs(story))}." in told
    assert "1 change that affects your results: learning rate lowered for 10 steps" in told
    assert ["".join(piece.text for piece in step) for step in page.next] == [
        "Nothing to do; to watch it: slurm-forge status tiny-gpt --follow"
    ]
    assert [piece.text for piece in page.next[0] if piece.command] == [
        "slurm-forge status tiny-gpt --follow"
    ]
    figures = {figure.label: figure.value for figure in page.key_figures}
    text = explain_text(story, now=facts.now, reference="x", zone=timezone.utc)
    assert f"goodput {figures['Goodput']}" in text
    assert figures == {
        "Step": "40",
        "Goodput": "77.8 %",
        "GPU time": "4.6 GPU-hours",
        "Incidents": "1",
        "In the queue": "60 s",
        "Results": "1 change",
    }


def test_a_held_run_says_why_once_and_what_to_do(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    scribe.incident(
        Cause.HANG, Action.HOLD, step=5, reason="hang: 3 times; next: look at the driver"
    )
    scribe.held("hang: 3 times; next: look at the driver")
    page = page_of(scribe.facts())
    told = Parsed(run_html(page)).text
    assert told.count("3 times") == 1
    assert told.count("Slurm's queue") == 1
    assert page.tone == "bad"
    assert page.next[0][0].text.startswith("Look at the driver, then ")
    assert any(piece.command and "requeue" in piece.text for piece in page.next[0])
    assert [card.tone for card in page.incidents] == ["held"]


def test_what_is_not_saved_is_no_training_that_stayed(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    scribe.save(5)
    scribe.train(6, 8)
    scribe.incident(Cause.HANG, Action.HOLD, step=8, reason="hang: 3 times")
    scribe.held("hang: 3 times")
    page = page_of(scribe.facts())
    (step,) = [each for each in page.key_figures if each.label == "Saved to step"]
    assert (step.value, step.note) == ("5", "(reached 8) of 400 steps")
    assert page.progress == pytest.approx(5 / 400)
    unsaved = next(bar for bar in page.waterfall.losses if bar.use == "unsaved")
    assert unsaved.seconds == pytest.approx(3 * 10, abs=0.5)
    assert page.waterfall.training is not None
    assert page.waterfall.training.seconds == pytest.approx(5 * 10, abs=0.5)
    assert "30 s of them not saved" in page.key_figures[1].note


def test_a_skipped_update_without_an_incident_is_told_with_its_weight(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 3)
    scribe.skip(3, evidence=(Evidence("rank 1 (n02)", "its loss was not finite in the step"),))
    scribe.train(4, 8)
    page = page_of(scribe.facts())
    (card,) = page.skips
    assert card.evidence == ("rank 1 (n02): its loss was not finite in the step",)
    assert card.consequences == ("1 of 8 updates, 32 samples without effect",)
    (results,) = [each for each in page.key_figures if each.label == "Results"]
    assert (results.value, results.note) == ("1 of 8", "updates skipped")
    assert "1 update skipped at step 3" in Parsed(run_html(page)).text


def test_steps_in_a_row_and_a_signal_from_nobody_are_told_in_plain_words(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 9)
    scribe.skip(7, count=3)
    scribe.unstable(9, Action.SKIP, onset=7, evidence=(Evidence("all ranks", "3 steps"),))
    scribe.incident(
        Cause.PREEMPTED, Action.REQUEUE, source="signals", text="SIGTERM, of unknown origin", step=9
    )
    scribe.requeued()
    page = page_of(scribe.facts())
    assert [(card.cause, card.headline) for card in page.incidents] == [
        ("stopped", "stopped by SIGTERM (sender unknown)"),
        ("non_finite", "3 consecutive steps (7-9) had NaN or infinite gradients"),
    ]
    assert page.skips == ()  # told with the incident
    assert "1 stop by a signal" in page.story[1]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("PreemptTime=23:59:50 EndTime=00:00:20", "Slurm took the nodes back, with 30 s of notice"),
        ("PreemptTime=11:02:10 EndTime=11:02:10", "Slurm took the nodes back, without notice"),
        ("PreemptTime=11:02:10", "Slurm took the nodes back, length of the notice unknown"),
        ("JobState=RUNNING", "scontrol: JobState=RUNNING"),
    ],
)
def test_a_preemption_is_told_in_plain_words(scribe: Scribe, record: str, words: str) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 9)
    scribe.incident(Cause.PREEMPTED, Action.REQUEUE, source="scontrol", text=record, step=9)
    scribe.requeued()
    page = page_of(scribe.facts())
    assert page.incidents[0].headline == words
    assert page.incidents[0].evidence == (f"scontrol: {record}",)
    assert page.story[1].startswith(f"In 1 attempt there was 1 preemption: {words}. What followed:")


def test_what_a_rollback_undid_is_a_branch_of_its_own(scribe: Scribe) -> None:
    page = page_of(rolled_back(scribe).facts())
    loss, rate = page.charts.figures
    assert (loss.name, rate.name) == ("loss", "lr")
    assert [point.step for point in loss.kept] == list(range(1, 41))
    assert [point.value for point in loss.kept][19:22] == [pytest.approx(2.8), 2.0, 2.0]
    (branch,) = loss.discarded
    assert [point.step for point in branch] == list(range(20, 31))
    kinds = {mark.kind: mark for mark in page.charts.marks}
    assert (kinds["rollback"].step, kinds["rollback"].to_step) == (30, 20)
    assert (kinds["lr"].step, kinds["lr"].to_step) == (20, 30)
    assert kinds["incident"].text == "non_finite: all ranks: the gradient is not finite"
    assert kinds["checkpoint-pruned"].step == 20


def test_the_stacks_of_a_hang_stand_with_it(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    scribe.incident(Cause.HANG, Action.RELAUNCH, step=5)
    stacks = (StackFile(attempt=1, launch=1, name="rank-3.txt", text="a\n  File b\n"),)
    (card,) = page_of(scribe.facts(), stacks=stacks).incidents
    assert [(stack.name, stack.text) for stack in card.stacks] == [("rank-3.txt", "a\n  File b\n")]
    other = (StackFile(attempt=1, launch=2, name="rank-3.txt", text="a"),)
    assert page_of(scribe.facts(), stacks=other).incidents[0].stacks == ()


def test_nodes_with_something_against_them_come_first(scribe: Scribe) -> None:
    scribe.begin("n01", "n02")
    scribe.resume(0)
    scribe.train(1, 5)
    scribe.write(
        "supervisor",
        ev.StragglerSeen(
            step=5, since_step=3, ranks=(3,), host="n02", factor=1.5, trial=1.5, why="node",
            lost_s=2.0,
        ),
    )  # fmt: skip
    scribe.train(6, 8)
    page = page_of(scribe.facts())
    assert [(row.name, row.tone) for row in page.nodes] == [("n02", "bad"), ("n01", "")]
    assert page.nodes[0].notes[0].startswith("slow: ")
    # Of 3 steps 2 s each were lost to it, and are no training any more.
    slow = next(bar for bar in page.waterfall.losses if bar.use == "slow")
    assert slow.rank_seconds == pytest.approx(8 * (8 - 3) * 2.0)


def test_everything_in_the_page_is_text(scribe: Scribe) -> None:
    scribe.begin(EVIL, EVIL[::-1], job=EVIL)
    scribe.relaunch(nodes=(EVIL, EVIL[::-1]))
    scribe.resume(0)
    scribe.train(1, 2)
    scribe.write("rank0", ev.Logged(step=2, values={EVIL: 1.0}))
    scribe.write("rank0", ev.Note(text=EVIL))
    scribe.save(2, reason=EVIL, findings=(EVIL,))
    scribe.incident(
        Cause.APP_ERROR,
        Action.HOLD,
        evidence=(Evidence(EVIL, EVIL), Evidence(EVIL, EVIL)),
        reason=f"{EVIL}; next: {EVIL}",
        changes=(Change(EVIL, EVIL, EVIL),),
    )
    scribe.struck(EVIL, excluded=(EVIL,), until=None)
    scribe.held(EVIL)
    facts = replace(scribe.facts(), name=EVIL, path=EVIL, reference=EVIL, problems=(EVIL,))
    sources = RunSources(
        facts=facts,
        stacks=(StackFile(attempt=1, launch=2, name=EVIL, text=EVIL),),
        ancestors=(Ancestor(run=EVIL, path=EVIL, step=1, checkpoint=EVIL, words=EVIL),),
    )
    index = index_page(
        EVIL,
        EVIL,
        [
            indexed(sources, utc_offset=timedelta(0), settings={EVIL: EVIL}, link="./" + EVIL),
            unreadable(EVIL, EVIL),
        ],
        now=facts.now,
        utc_offset=timedelta(0),
        reference=EVIL,
    )
    for page in (run_html(run_page(sources)), index_html(index)):
        parsed = Parsed(page)
        assert parsed.tags.count("script") == 2
        assert not set(parsed.tags) & {"img", "iframe", "object", "link", "form", "base"}
        assert not [name for name, _ in parsed.attributes if name.startswith(("on", "style"))]
        assert "<script>alert(1)</script>" in parsed.text
        assert "<" not in parsed.data
        shown = [parsed.text, *(str(value) for _, value in parsed.attributes)]
        assert all(line.isprintable() for each in shown for line in each.split("\n"))
        assert "</script><script>alert(1)" in str(json.loads(parsed.data))


def test_nothing_is_loaded_and_the_policy_names_what_runs(scribe: Scribe) -> None:
    page = run_html(page_of(rolled_back(scribe).facts()))
    links = [value for name, value in Parsed(page).attributes if name in ("src", "href")]
    assert all(str(link).startswith("#") for link in links)
    policy = next(v for n, v in Parsed(page).attributes if n == "content" and "default" in str(v))
    assert str(policy).startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in str(policy)
    assert len(page) < 200_000


@TESTED
@given(FACTS)
def test_no_journal_keeps_a_page_from_being_made(facts: RunFacts) -> None:
    parsed = Parsed(run_html(page_of(facts)))
    assert json.loads(parsed.data)["kind"] == "run"
    assert parsed.tags.count("script") == 2


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from(MOVES), max_size=6), st.sampled_from(ENDS))
def test_the_waterfall_is_what_explain_counts(moves: list[Move], end: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        story = explain(played(Scribe(Path(folder)), moves, end))
    spent = waterfall(story)
    bars = {bar.use: bar for bar in spent.losses}
    training = spent.training
    assert training is not None
    assert sum(bar.rank_seconds for bar in (*spent.losses, training)) == pytest.approx(
        spent.rank_seconds
    )
    assert sum(bar.share for bar in (*spent.losses, training)) == pytest.approx(1)
    lost = sum(bars[use].rank_seconds for use in ("repeated", "restart") if use in bars)
    assert lost == pytest.approx(story.lost_rank_s)
    idle = bars["idle"].rank_seconds if "idle" in bars else 0.0
    assert idle == pytest.approx(story.idle_rank_s)
    assert (spent.queued_s, spent.stopped_s) == (
        pytest.approx(story.waited_s),
        pytest.approx(story.rest_s),
    )
    assert spent.seconds == pytest.approx(
        sum(span.seconds for span in story.spans if span.ranks), abs=1e-6
    )


VALUES = st.floats(-1e6, 1e6) | st.sampled_from([float("nan"), float("inf")])


@given(st.lists(VALUES, max_size=400), st.integers(5, 60))
def test_fewer_points_keep_the_extremes_and_what_is_not_finite(
    values: list[float], most: int
) -> None:
    points = [Point(step, float(step), value) for step, value in enumerate(values)]
    kept = thinned(points, most)
    assert len(kept) <= max(most, 5)
    assert [point.step for point in kept] == sorted({point.step for point in kept})
    assert set(kept) <= set(points) or any(value != value for value in values)
    finite = [value for value in values if abs(value) < float("inf")]
    shown = [point.value for point in kept if abs(point.value) < float("inf")]
    assert (min(finite, default=0), max(finite, default=0)) == (
        min(shown, default=0),
        max(shown, default=0),
    )
    assert (len(finite) < len(values)) == (len(shown) < len(kept))
    assert (kept[:1], kept[-1:]) == (tuple(points[:1]), tuple(points[-1:])) or len(finite) < len(
        values
    )


def test_a_spike_outlives_a_curve_of_any_length() -> None:
    def line(number: int) -> bytes:
        value = 1e9 if number == 44_321 else 1.0
        body = {
            "attempt": 1, "launch": 1, "seq": number, "time": float(number), "logical_time": number,
            "event": {"step": number, "values": {"loss": value}, "kind": "logged"},
        }  # fmt: skip
        return json.dumps(body, separators=(",", ":")).encode() + b"\n"

    curve = LoggedCurve()
    for begin in range(0, 60_000, 10_000):
        lines = b"".join(line(number) for number in range(begin, begin + 10_000))
        curve.add(lines + b'{"kind":"logged", torn\n', "rank0-00000001")
    assert len(curve.records) <= 40_000
    events = [record.event for record in curve.records]
    assert max(e.values["loss"] for e in events if isinstance(e, ev.Logged)) == 1e9
    points = [Point(e.step, 0.0, e.values["loss"]) for e in events if isinstance(e, ev.Logged)]
    shown = Figure("loss", thinned(points, MOST_POINTS)).kept
    assert (len(shown) <= MOST_POINTS, max(point.value for point in shown)) == (True, 1e9)


def test_a_loss_that_stays_nan_is_thinned_too() -> None:
    body = (
        b'{"attempt":1,"launch":1,"seq":%d,"time":%d,"event":'
        b'{"step":%d,"values":{"loss":NaN},"kind":"logged"}}\n'
    )
    curve = LoggedCurve()
    for begin in range(0, 41_000, 10_250):
        numbers = range(begin, begin + 10_250)
        curve.add(b"".join(body % (n, n, n) for n in numbers), "rank0-00000001")
    steps = [each.event.step for each in curve.records if isinstance(each.event, ev.Logged)]
    assert (steps[0], steps[-1]) == (0, 40_999)
    assert len(steps) <= 40_000


def test_several_runs_on_one_page(tmp_path: Path) -> None:
    first, second = rolled_back(Scribe(tmp_path, "a")), Scribe(tmp_path, "b")
    second.begin()
    second.resume(0)
    second.train(1, 3)
    second.write("rank0", ev.Logged(step=3, values={"loss": 1.25}))
    second.incident(Cause.CRASH, Action.HOLD, step=3)
    second.held("crash")
    runs = [
        indexed(
            RunSources(facts=each.facts()), utc_offset=timedelta(0), settings={"lr": rate}, link=""
        )
        for each, rate in ((first, 0.1), (second, 0.01))
    ]
    page = index_page(
        "lr", "sweep", [*runs, unreadable("c", "torn")], now=second.now, utc_offset=timedelta(0),
        reference="lr",
    )  # fmt: skip
    assert page.summary[0] == "3 runs: 1 running, 1 held, 1 unreadable."
    assert [(row.name, row.settings, row.figure, row.steps) for row in page.rows] == [
        ("a", ("0.1",), "2", "40 of 400"),
        ("b", ("0.01",), "1.25", "3 of 400 (saved to step 0)"),
        ("c", ("",), "", ""),
    ]
    assert [name for name, _ in page.curves] == ["a", "b"]
    assert "Look at the unreadable run: c" in "".join(piece.text for piece in page.next[0])
    data = json.loads(Parsed(index_html(page)).data)
    assert [(curve["run"], curve["steps"][-1]) for curve in data["curves"]] == [("a", 40), ("b", 3)]


def test_a_sweep_names_the_finished_run_with_the_lowest_loss(tmp_path: Path) -> None:
    runs = []
    for name, loss, finished in (("a", 2.5, True), ("b", 2.25, True), ("c", 1.0, False)):
        scribe = Scribe(tmp_path, name)
        scribe.begin()
        scribe.resume(0)
        scribe.train(1, 4)
        scribe.write("rank0", ev.Logged(step=4, values={"loss": loss}))
        if finished:
            scribe.finish(4)
        sources = RunSources(facts=scribe.facts())
        runs.append(indexed(sources, utc_offset=timedelta(0), settings={"lr": name}, link=""))
    page = index_page("lr", "sweep", runs, now=0.0, utc_offset=timedelta(0))
    assert page.summary[-1] == "Lowest final loss: 2.25, b (lr=b)."
    alone = index_page("lr", "sweep", runs[1:], now=0.0, utc_offset=timedelta(0))
    assert not any("Lowest" in sentence for sentence in alone.summary)


def test_of_very_many_incidents_the_newest_are_shown_and_the_others_counted(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_forge.report.page.incident_cards.MOST_CARDS", 2)
    scribe.begin()
    for number in range(5):
        scribe.resume(0)
        scribe.train(1, 2)
        scribe.incident(Cause.CRASH, Action.RELAUNCH, step=2, text=f"signal {number}")
        scribe.relaunch()
    page = page_of(scribe.facts())
    assert [card.headline for card in page.incidents] == [
        "rank 0 on n01: signal 4",
        "rank 0 on n01: signal 3",
    ]
    assert page.hidden_incidents == 3
    assert "and 3 older ones: slurm-forge explain tiny-gpt --all" in Parsed(run_html(page)).text


def test_a_branch_begins_at_the_checkpoint_that_training_went_back_to(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    for _ in range(2):
        scribe.train(1, 8)
        for step, value in ((4, 3.0), (8, 2.0)):
            scribe.write("rank0", ev.Logged(step=step, values={"loss": value}))
        scribe.again(5)
    (loss,) = page_of(scribe.facts()).charts.figures
    first, second = loss.discarded
    assert [(point.step, point.value) for point in first] == [(5, 2.75), (8, 2.0)]
    assert second[0].step == 5
