"""``python -m tests.rendered --count N [--seed N] [--json FILE]``: scripts/fuzz-templates."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.rendered.bench import Bench
from tests.rendered.fuzz import FIELDS, Tally, cases


def main() -> int:
    """Exit status 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="fuzz-templates", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    began, tally = time.monotonic(), Tally()
    with tempfile.TemporaryDirectory(prefix="forge-fuzz-") as folder:
        bench = Bench(Path(folder))
        for case in cases(asked.seed, asked.count):
            tally.add(case, bench)
    result = {
        "texts": tally.texts,
        "seed": asked.seed,
        "refused": tally.refused.total(),
        "rendered": tally.rendered.total(),
        "scripts": tally.scripts,
        "started": tally.started,
        "not_started": tally.not_started,
        "wrong": tally.wrong,
        "seconds": round(time.monotonic() - began, 1),
        "fields": {
            name: {"refused": tally.refused[name], "rendered": tally.rendered[name]}
            for name in FIELDS
        },
    }
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1, ensure_ascii=True) + "\n")
    shown = {key: value for key, value in result.items() if key not in ("fields", "wrong")}
    sys.stdout.write(f"{json.dumps(shown)}\n")
    for each in tally.wrong:
        sys.stdout.write(f"{each!a}\n")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
