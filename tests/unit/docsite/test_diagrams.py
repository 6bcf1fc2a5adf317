"""Drawings show what their text sources, and the policy of today, say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docsite.diagrams import LADDER, ladder_text

DOCS = Path(__file__).resolve().parents[3] / "docs"
SOURCES = {file.stem: file.read_text() for file in (DOCS / "diagrams").glob("*.dot")}
SOURCES[f"ladder-{LADDER.value}"] = ladder_text(LADDER)


@pytest.mark.parametrize("name", SOURCES)
def test_a_drawing_has_every_line_of_its_source(name: str) -> None:
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", (DOCS / "assets" / f"{name}.svg").read_text())
    lines = [
        line
        for label in re.findall(r'label="([^"]*)"', SOURCES[name])
        for line in label.split("\\n")
    ]
    plain = {each.replace("&#45;", "-").replace("&#39;", "'").strip() for each in drawn}
    assert lines and plain == {line.strip() for line in lines}, "scripts/diagrams draws it anew"
