"""Through how many files of the package one act runs, and under how many names a signal is known.

    python -m benchmarks.files_passed render|step|nan|signal [--json FILE]

Prints each file with its calls, in the order in which they are reached; of ``signal`` each class
whose values quote it, with the processes that had one.  Each act is a function of
a module here; to add one, write it and its row in ``_MEASURES``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from benchmarks.files_passed.counting import Passage
from benchmarks.tables import table, write_json

_MEASURES = {
    "render": ("benchmarks.files_passed.render", "measure"),
    "step": ("benchmarks.files_passed.training", "measure_step"),
    "nan": ("benchmarks.files_passed.training", "measure_nan"),
    "signal": ("benchmarks.files_passed.signals", "measure"),
}


def main() -> None:
    """Measure one act and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.files_passed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("act", choices=_MEASURES)
    parser.add_argument("--json", type=lambda text: Path(text).absolute())
    options = parser.parse_args()
    module, function = _MEASURES[options.act]
    passage: Passage = getattr(import_module(module), function)()
    rows = [(file, str(n)) for file, n in passage.files.items()]
    if options.act == "signal":
        print(table(("class", "processes"), rows))
        print(f"signal: {len(rows)} names")
    else:
        print(table(("file", "calls"), rows))
        print(f"{options.act}: {len(rows)} files, {passage.moves} moves between files")
    write_json(options.json, {"act": options.act, **asdict(passage)})


if __name__ == "__main__":
    main()
