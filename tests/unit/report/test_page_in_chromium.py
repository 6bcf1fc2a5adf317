"""The page in a real browser: it draws, it can be used, and it complains about nothing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.report.page.html import index_html, run_html
from slurm_forge.report.page.index_page import index_page, indexed
from slurm_forge.report.page.run_page import run_page
from slurm_forge.report.page.values import RunSources
from tests.unit.report.journals import Scribe
from tests.unit.report.test_page import EVIL, rolled_back

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

#: What keeps a browser in a container from starting: a sandbox of its own, a small /dev/shm.
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # Chromium makes the folders of its settings, and those of the tests are to be nowhere.
    home = str(tmp_path_factory.mktemp("chromium"))
    variables = {**os.environ, "HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, env=variables
        )
        yield chromium
        chromium.close()


#: 500 to 999 pixels.
WIDE = re.compile(r"[5-9]\d\d(\.\d+)?px")


class Opened:
    """A page in the browser; what went wrong in it fails the test that closes it."""

    def __init__(self, browser: Any, html: str, folder: Path, *, width: int, scheme: str) -> None:
        file = folder / "page.html"
        file.write_text(html, "utf-8")
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.tab.set_default_timeout(60_000)
        self.tab.on("console", self._heard)
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(file.as_uri())
        # Not wait_for_function: the page's policy forbids what that evaluates.
        self.tab.wait_for_selector("html[data-ready=yes]", state="attached")

    def _heard(self, message: Any) -> None:
        if "willReadFrequently" not in message.text:  # of how this test looks at the charts
            self.complaints.append(message.text)

    def __enter__(self) -> Any:
        return self.tab

    def __exit__(self, *_: object) -> None:
        overflow = self.tab.evaluate("document.documentElement.scrollWidth - innerWidth")
        self.tab.close()
        assert self.complaints == []
        assert [url[:7] for url in self.requests] == ["file://"]
        assert overflow <= 0


def sources(folder: Path, name: str = "tiny-gpt") -> RunSources:
    scribe = rolled_back(Scribe(folder, name))
    scribe.preempted(40)
    scribe.later(300).begin("n01", "n03")
    scribe.resume(40)
    scribe.train(41, 60)
    scribe.write("rank0", ev.Logged(step=60, values={"loss": 1.5}))
    return RunSources(facts=scribe.facts())


def inked(tab: Any, chart: str) -> list[int]:
    """How many pixels of a chart have a color, and how many colors there are."""
    found: list[int] = tab.evaluate(
        """(id) => {
            const canvas = document.querySelector(`#${id} canvas`);
            const { width, height } = canvas;
            const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
            const colors = new Set();
            let drawn = 0;
            for (let at = 0; at < data.length; at += 4) {
                if (!data[at + 3]) continue;
                drawn += 1;
                colors.add(data.slice(at, at + 3).join());
            }
            return [drawn, colors.size];
        }""",
        chart,
    )
    return found


def across(tab: Any, chart: str) -> Any:
    """What the x axis of a chart shows: its labels are drawn, so its tooltip is asked."""
    over = tab.locator(f"#{chart} .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 8)
    return tab.locator(f"#{chart} .tip").inner_text()


def test_the_page_of_a_run_in_chromium(browser: Any, tmp_path: Path) -> None:
    made = sources(tmp_path)
    page = run_page(made)
    with Opened(browser, run_html(page), tmp_path, width=1400, scheme="light") as tab:
        names = tab.locator("main > section").evaluate_all("all => all.map(one => one.id)")
        assert names == [
            "story", "timeline", "loss", "time", "incidents", "nodes", "checkpoints", "changes",
        ]  # fmt: skip
        assert tab.locator(".story > span").all_inner_texts() == list(page.story)
        shown = dict(
            tab.locator(".figures > div").evaluate_all(
                "all => all.map(one => [one.querySelector('dt').innerText, "
                "one.querySelector('dd a').innerText])"
            )
        )
        assert shown == {figure.label: figure.value for figure in page.key_figures}
        assert tab.locator("#incidents .incident").count() == 2
        for chart in ("timeline-chart", "loss-chart"):
            drawn, colors = inked(tab, chart)
            assert drawn > 2000, chart
            assert colors > 4, chart
        # Zoom by button, by key and back: what is under the middle changes, and is the same again.
        whole = across(tab, "timeline-chart")
        tab.mouse.move(0, 0)
        before = inked(tab, "timeline-chart")
        tab.locator("[data-for=timeline-chart] [data-zoom=in]").click()
        tab.locator("#timeline-chart").press("ArrowLeft")
        assert inked(tab, "timeline-chart") != before
        tab.locator("#timeline-chart").press("0")
        assert inked(tab, "timeline-chart") == before
        assert across(tab, "timeline-chart") == whole
        # Another figure, another axis.
        assert tab.locator("#figure option").all_inner_texts() == ["loss", "lr"]
        loss = inked(tab, "loss-chart")
        tab.locator("#figure").select_option("lr")
        assert inked(tab, "loss-chart") != loss
        tab.locator("#axis").select_option("time")
        assert "step" in across(tab, "loss-chart")
        # Dark, and as it was: the charts too.
        light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.locator("#theme").click()  # automatic, light, dark
        tab.locator("#theme").click()
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
        assert tab.locator("#theme").get_attribute("aria-label") == "Theme: dark"
        tab.locator(".incident summary").last.click()
        assert tab.locator(".incident dl").last.is_visible()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_on_a_telephone(browser: Any, tmp_path: Path, scheme: str) -> None:
    html = run_html(run_page(sources(tmp_path)))
    with Opened(browser, html, tmp_path, width=400, scheme=scheme) as tab:
        for chart in ("timeline-chart", "loss-chart"):
            width = tab.locator(f"#{chart} canvas").bounding_box()["width"]
            assert 300 < width <= 400
        ink = tab.evaluate("getComputedStyle(document.body).color").strip("rgb() ").split(",")
        assert (int(ink[0]) > 128) == (scheme == "dark")
        tab.set_viewport_size({"width": 700, "height": 900})
        sync_api.expect(tab.locator("#loss-chart canvas")).to_have_css("width", WIDE)


@pytest.mark.slow
def test_what_looks_like_a_script_runs_nowhere(browser: Any, tmp_path: Path) -> None:
    scribe = rolled_back(Scribe(tmp_path))
    scribe.write("rank0", ev.Logged(step=41, values={EVIL: 1.0}))
    facts = sources(tmp_path, "other").facts
    html = run_html(run_page(RunSources(facts=scribe.facts())))
    # An escape that was forgotten: the policy of the page keeps it from running all the same.
    forgotten = html.replace(
        "</main>", f"{EVIL.partition('<!--')[0]}<b onclick='alert(3)'>x</b></main>", 1
    )
    with pytest.raises(AssertionError, match="Content Security Policy"):
        with Opened(browser, forgotten, tmp_path, width=1400, scheme="light") as tab:
            tab.locator("text=x").last.click()
    with Opened(browser, html, tmp_path, width=1400, scheme="light") as tab:
        assert EVIL[:30] in str(tab.locator("#figure option").all_inner_texts())
    assert facts.name == "other"


@pytest.mark.slow
def test_several_runs_in_chromium(browser: Any, tmp_path: Path) -> None:
    runs = [
        indexed(sources(tmp_path, name), utc_offset=timedelta(0), settings={"lr": rate})
        for name, rate in (("a", 0.1), ("b", 0.01))
    ]
    page = index_page("lr", "sweep", runs, now=1786438800.0, utc_offset=timedelta(0))
    for width in (400, 1400):
        html = index_html(page)
        with Opened(browser, html, tmp_path, width=width, scheme="light") as tab:
            assert inked(tab, "index-chart")[0] > 1000
            assert tab.locator(".runs tbody tr").count() == 2
            colors = tab.locator("[data-run]").evaluate_all(
                "all => all.map(o => o.style.background)"
            )
            assert len(set(colors)) == 2
