"""Diagrams of the documentation: drawn by Graphviz from ``docs/diagrams`` and from the policy.

    scripts/diagrams

Writes ``docs/assets/NAME.svg``; wants Graphviz's ``dot``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from docsite.causes import rungs_of
from slurm_forge.vocabulary.cause import Cause

_DOCS = Path(__file__).resolve().parents[1] / "docs"
#: The cause whose ladder is drawn.
LADDER = Cause.NON_FINITE
#: Readable on a light page and on a dark one: every box has a ground of its own.
_STYLE = (
    "-Nshape=box", "-Nstyle=rounded,filled", "-Nfillcolor=#e8f1f8", "-Ncolor=#0072b2",
    "-Nfontname=Helvetica,Arial,sans-serif", "-Nfontsize=11", "-Nfontcolor=#16202a",
    "-Nmargin=0.2,0.1", "-Ecolor=#6b7785", "-Efontname=Helvetica,Arial,sans-serif",
    "-Gbgcolor=transparent", "-Gnodesep=0.3", "-Granksep=0.3",
)  # fmt: skip


def ladder_text(cause: Cause) -> str:
    """The default ladder of a cause as a graph in Graphviz's language, its hold included."""
    rungs = [*rungs_of(cause), "hold (until a person releases it)"]
    steps = [rung.replace('"', "").replace(" (", "\\n(", 1) for rung in rungs]
    nodes = "".join(f'  r{at} [label="{text}"]\n' for at, text in enumerate(steps))
    edges = " -> ".join(f"r{at}" for at in range(len(steps)))
    return f"digraph ladder {{\n{nodes}  {edges}\n}}\n"


def main() -> int:
    """Draw them all."""
    texts = {file.stem: file.read_text() for file in sorted((_DOCS / "diagrams").glob("*.dot"))}
    texts[f"ladder-{LADDER.value}"] = ladder_text(LADDER)
    for name, text in texts.items():
        picture = _DOCS / "assets" / f"{name}.svg"
        words = ["dot", "-Tsvg", *_STYLE, "-o", str(picture)]
        subprocess.run(words, input=text, text=True, check=True)
        sys.stdout.write(f"docs/assets/{picture.name} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
