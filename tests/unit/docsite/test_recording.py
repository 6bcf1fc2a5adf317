"""The README's terminal recording."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from docsite.recording import Line, record, svg


def test_what_a_command_prints_is_recorded_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        "import sys\n"
        "print('\\x1b[1mone\\x1b[0m')\n"
        "print('two', file=sys.stderr)\n"
        "print('end', end='')"
    )
    lines = list(record([f"{sys.executable} -u talk.py"], tmp_path))
    assert [line.text for line in lines] == [f"$ {sys.executable} -u talk.py", "one", "two", "end"]
    assert [line.command for line in lines] == [True, False, False, False]
    assert all(before.at <= after.at for before, after in pairwise(lines))


def test_the_picture_shows_every_line_in_both_themes_and_shortens_pauses() -> None:
    lines = [
        Line(0.0, "$ run --a '<b>'", command=True),
        Line(30.0, "10:00:00  skipped the update of step 3"),
        Line(30.0, ""),
        Line(90.0, f"finished {'x ' * 120}& done"),
    ]
    picture = svg(lines)
    root = ElementTree.fromstring(picture)
    rows = root.findall("{http://www.w3.org/2000/svg}text")
    texts = ["".join(row.itertext()) for row in rows]
    assert texts[:2] == [lines[0].text, lines[1].text]
    assert " ".join(" ".join(texts[2:]).split()) == lines[3].text
    assert len(rows) > 3, "a long line is wrapped"
    assert "prefers-color-scheme:dark" in picture
    delays = [float(each) for each in re.findall(r"animation-delay:([\d.]+)s", picture)]
    assert delays == sorted(delays)
    assert delays[0] == 0
    assert 0 < delays[-1] < 3
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", ""), "nothing is fetched"
