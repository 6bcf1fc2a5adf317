"""What the documentation says of the code is so, and what it tells people to type can be typed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import pytest
from pydantic import ConfigDict, Field

from docsite import events as docsite_events
from docsite.causes import page_of
from docsite.keys import keys_of_model
from docsite.links import rewritten
from docsite.pages import DOCS, missing, pages, title_of
from docsite.variables import variables
from slurm_forge.cli.examples import words_for_us
from slurm_forge.documents import load
from slurm_forge.journal import events
from slurm_forge.knobs import Knobs
from slurm_forge.spec.faults import parse_faults
from slurm_forge.spec.layers import Layer, combined
from slurm_forge.spec.loading import job_from_mapping, to_mapping
from slurm_forge.spec.types import JobSection
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.slurm.truth.promises import PROMISES
from tests.unit.cli.test_examples import parse

CAUSES = [DOCS / page_of(cause) for cause in Cause]
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
GUIDES = sorted((DOCS / "how-to").glob("*.md"))
SETTINGS = DOCS / "how-to" / "configuration.md"
PAGES = sorted(DOCS.rglob("*.md"))
README = DOCS.parent / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(file: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(file.read_text()) if language in languages]


def test_every_page_is_current() -> None:
    assert missing() == []
    old = [page.name for page in pages() if not page.is_current(DOCS)]
    assert old == [], "run scripts/reference"


def test_a_change_of_a_ladder_is_seen(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs)
    page = docs / page_of(Cause.HANG)
    page.write_text(page.read_text().replace("relaunch (2 times)", "relaunch (9 times)"))
    assert [each.name for each in pages(docs) if not each.is_current(docs)] == ["causes/hang.md"]
    page.unlink()
    with pytest.raises(LookupError, match=r"docs/causes/hang\.md is not there"):
        list(pages(docs))


def test_a_new_key_appears_by_itself() -> None:
    class Inner(JobSection):
        """A part."""

        width: int = Field(default=3, ge=1, description="How | wide.")

    class Outer(JobSection):
        """All of it."""

        inner: Inner = Field(default_factory=Inner, description="The part.")
        many: dict[str, Inner] = Field(default_factory=dict)
        #: Said above.
        plain: bool = False

    text = "\n".join(keys_of_model(Outer, "Top"))
    assert "| `inner` | [inner](#inner) | - | The part. |" in text
    assert "| `width` | whole number, 1 or more | `3` | How &#124; wide. |" in text
    assert "| `many` | mapping of names to [inner](#inner) | - | - |" in text
    assert "| `plain` | true or false | `false` | Said above. |" in text


def _with_short_form(made: dict[str, Any]) -> None:
    model = dict(made)
    made.clear()
    made["anyOf"] = [{"type": "string"}, model]


def test_a_short_form_beside_a_model_is_told() -> None:
    class Rule(JobSection):
        """A rule."""

        model_config = ConfigDict(json_schema_extra=_with_short_form)
        option: str = Field(description="Which.")

    class Rules(JobSection):
        """Some."""

        rules: tuple[Rule, ...] = ()

    text = "\n".join(keys_of_model(Rules, "Top"))
    assert "| `rules` | list of text or [rules[]](#rules) | - | - |" in text
    assert "| `option` | text | required | Which. |" in text


def test_a_new_kind_of_event_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Yawned:
        """Somebody was tired."""

        how_long_s: float
        kind: Literal["yawned"] = "yawned"

    monkeypatch.setattr(events, "Event", events.Annotated[events.Note | Yawned, "kind"])
    text = "\n".join(docsite_events.journal())
    assert "### yawned\n\nSomebody was tired.\n" in text
    assert "| `how_long_s` | `float` | required |" in text


def test_every_variable_is_named_once() -> None:
    text = "\n".join(variables())
    known = Knobs(
        channel="h:1", nonce="n", attempt=1, launch=1, started=1.0, agents="h:1", agents_nonce="n",
        lifeline=True, run="r", latest="l", restarts=1, site="s", runs="r", nodes="n",
        state_home="/s", config_home="/c",
    ).to_environ()  # fmt: skip
    for name in known:
        assert text.count(f"| `{name}` |") == 1, name


@pytest.mark.parametrize("file", [*CAUSES, *TUTORIALS, *GUIDES, README], ids=lambda f: f.stem)
def test_what_is_to_be_typed_can_be_typed(file: Path) -> None:
    found = 0
    for text in blocks(file, ""):
        for line in text.replace("\\\n", " ").replace("$ slurm-forge", "slurm-forge").splitlines():
            if not line.startswith(("slurm-forge ", "exec slurm-forge ")):
                continue
            words = words_for_us(line)
            assert words is not None
            parse(words)
            found += 1
            for option, faults in pairwise(words):
                if option == "--inject":
                    assert parse_faults(faults)
    assert found or "yaml" in file.read_text() or file in GUIDES


@pytest.mark.parametrize("file", [*CAUSES, *TUTORIALS], ids=lambda file: file.stem)
def test_what_is_to_be_written_into_a_job_file_is_valid(file: Path) -> None:
    from slurm_forge.documents import load

    for text in blocks(file, "yaml"):
        written = dict(load(text).data)
        job = job_from_mapping({"name": "x", "entry": "a:b", **written})
        # Neither the same as the default, nor read as something else.
        for key in written:
            assert to_mapping(job)[key] != to_mapping(
                job_from_mapping({"name": "x", "entry": "a:b"})
            ).get(key), f"{key} changes nothing"
    for rung in re.findall(r"`([a-z_]+): (\[\{.*?\}\])`", file.read_text()):
        job_from_mapping(
            {"name": "x", "entry": "a:b", "recovery": {rung[0]: load(f"x: {rung[1]}").data["x"]}}
        )


def test_settings_that_are_shown_are_valid_and_so_is_what_is_set() -> None:
    small = load("name: x\nentry: a:b\n", "train.yaml")
    found = blocks(SETTINGS, "yaml")
    assert len(found) >= 2
    for text in found:
        layered = combined([Layer(load(text, "config.yaml"), Path("/"), own=True)], small)
        assert layered.job != job_from_mapping({"name": "x", "entry": "a:b"})
    sets = [
        words[index + 1]
        for text in blocks(SETTINGS, "")
        for line in text.splitlines()
        if line.startswith("slurm-forge ")
        for words in [words_for_us(line) or []]
        for index, word in enumerate(words)
        if word == "--set"
    ]
    assert len(sets) >= 8
    for setting in sets:
        assert combined([], small, [setting]).job != combined([], small).job or "[]" in setting


def test_every_action_is_explained() -> None:
    text = (DOCS / "causes" / "index.md").read_text()
    explained = set(re.findall(r"`([a-z_]+)`", text.partition("## What a ladder can do")[2]))
    assert {action.value for action in Action if action is not Action.STOP} <= explained


def test_every_page_can_be_reached_from_the_map() -> None:
    reached = {DOCS / "index.md"}
    while True:
        indexes = [page for page in reached if page.name == "index.md"]
        linked = {
            (page.parent / target).resolve()
            for page in indexes
            for target in re.findall(r"\]\(([^)#:]+\.md)", page.read_text())
        }
        if linked <= reached:
            break
        reached |= linked
    assert set(PAGES) <= reached


def test_the_readme_is_short_and_shows_the_recording() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    picture = re.search(r"!\[[^\]]+\]\((\S+\.svg)\)", text)
    assert picture is not None
    file = README.parent / picture[1]
    assert file.stat().st_size < 30_000
    shown = "".join(ElementTree.fromstring(file.read_text()).itertext())
    for word in ("slurm-forge run", "skipped", "finished", "prefers-color-scheme:dark"):
        assert word in shown


def test_measurements_are_one_entry_of_the_menu() -> None:
    menu = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert menu.count("results/") == 1
    listed = set(re.findall(r"\]\(([a-z-]+\.md)\)", (DOCS / "results" / "index.md").read_text()))
    assert listed == {file.name for file in (DOCS / "results").glob("*.md")} - {"index.md"}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.relative_to(DOCS).as_posix())
def test_links_lead_somewhere(file: Path) -> None:
    assert title_of(file)
    text = BLOCK.sub("", file.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path = target.partition("#")[0]
        if path and "://" not in path and not path.startswith("mailto:"):
            assert (file.parent / path).exists(), f"{file}: {target}"


@pytest.mark.parametrize(
    ("text", "source", "expected"),
    [
        ("[a](docs/how-to/exec.md#x)", "README.md", "[a](how-to/exec.md#x)"),
        ("[a](docs/results/)", "README.md", "[a](results/index.md)"),
        ("[a](../exec.md)", "docs/causes/hang.md", "[a](../exec.md)"),
        ("[a](../../CONTRIBUTING.md)", "docs/causes/hang.md", "[a](../contributing.md)"),
        ("[map](../index.md)", "docs/how-to/exec.md", "[map](../map.md)"),
        ("![f](poison.svg)", "docs/results/poison.md", "![f](poison.svg)"),
        ("[`examples/exec`](../../examples/exec)", "docs/how-to/exec.md", "`examples/exec`"),
        ("[them](../../examples/exec)", "docs/how-to/exec.md", "them (`examples/exec`)"),
        ("[a](https://x.org/a.md) [b](#c)", "README.md", "[a](https://x.org/a.md) [b](#c)"),
        (
            "```\n[a](docs/how-to/exec.md)\n```\n",
            "README.md",
            "```\n[a](docs/how-to/exec.md)\n```\n",
        ),
    ],
)
def test_links_on_the_site(text: str, source: str, expected: str) -> None:
    assert rewritten(text, source) == expected


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    root = DOCS.parent
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "s")]
    done = subprocess.run(
        words, cwd=root, env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=350, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "s" / "index.html").read_text()
    assert "PyTorch training runs that finish by themselves" in home
    assert "<title>The job file" in (tmp_path / "s" / "reference" / "job-file.html").read_text()
    assert "All measurements" in (tmp_path / "s" / "results" / "guard.html").read_text()
    assert "max_norm" in (tmp_path / "s" / "reference" / "python-api.html").read_text()
    for page in sorted((tmp_path / "s").rglob("*.html")):
        fetched = re.findall(
            r"<(?:script|img|link)[^>]+(?:src|href)=\"?(?:https?:)?//", page.read_text()
        )
        assert fetched == [], f"{page.name} fetches something when it is read"
    assert (tmp_path / "s" / "search" / "search_index.js").is_file(), "no search from a folder"
    for cause in Cause:
        built = (tmp_path / "s" / "causes" / f"{cause.value}.html").read_text()
        assert shlex.quote(cause.value) in built
        assert "```" not in built, "a block that was not understood"


def test_the_results_of_doctor_name_every_configuration_tried_or_not() -> None:
    text = (DOCS / "results" / "doctor.md").read_text()
    rows = set(re.findall(r"^\| ([a-z0-9-]+) \|", text, re.M)) - {"configuration"}
    told = re.search(r"Of the (\d+) that there are, (\d+) were not among them: ([^.]+)\.", text)
    left_out = [] if told is None else told[3].split(", ")
    assert [each.name for each in PROMISES if each.name not in rows] == left_out
    if told is not None:
        assert (int(told[1]), int(told[2])) == (len(PROMISES), len(left_out))
