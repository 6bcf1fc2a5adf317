"""Damages checkpoints in thousands of ways and counts what is noticed, beside plain torch.

    python -m tests.corruption.matrix [--flips N] [--seed N] [--json FILE]

Ours: noticed means that a restart takes the older checkpoint, tells why, and holds exactly what was
saved there.  The others have one checkpoint each: noticed means any exception.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.corruption.bench import Bench, Shape, Verdict, catalogue
from tests.corruption.contents import Wrapping, memory_directory
from tests.corruption.damage import Damage
from tests.corruption.plain_formats import FORMATS, Outcome, try_all

_OURS = (
    (Shape(1, 6_000), 1.0, True),
    (Shape(2, 6_000, Wrapping.DDP), 1.0, True),
    (Shape(2, 6_000, Wrapping.FSDP2), 1.0, True),
    (Shape(1, 700_000), 0.1, False),
    (Shape(2, 1_400_000, Wrapping.FSDP2), 0.1, False),
)
_FLOATS = 6_000
_FOOLED = "FOOLED"

Tally = dict[str, Counter[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 1 where a damage of ours went unnoticed."""
    parser = argparse.ArgumentParser(prog="scripts/corruption-matrix", description=__doc__)
    parser.add_argument("--flips", type=int, default=1000, help="bit flips per store (1000)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write every figure there as well")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began = time.monotonic()
    print(f"seed {options.seed}, torch {torch.__version__}")
    ours: Tally = {}
    fooled: list[str] = []
    for shape, share, texts in _OURS:
        _in_folder(lambda folder, what=(shape, share, texts): _ours(
            folder, what, options, ours, fooled))  # fmt: skip
    plain: dict[str, Tally] = {}
    for kind in FORMATS:
        plain[kind.name] = tally = {}
        for damage, outcome in _in_folder(
            lambda folder, kind=kind: try_all(
                folder, kind, _FLOATS, seed=options.seed, flips=options.flips
            )
        ):
            tally.setdefault(damage.kind, Counter())[outcome.value] += 1
    _print(ours, plain)
    for line in fooled:
        print(line)
    seconds = time.monotonic() - began
    bad = sum(row[_FOOLED] + row[Verdict.SILENT.value] for row in ours.values())
    total = sum(sum(row.values()) for row in ours.values())
    print(f"\nslurm_forge: {total} damages, {bad} unnoticed; {seconds:.0f} s")
    if options.json:
        figures = {"seed": options.seed, "slurm_forge": ours, **plain, "seconds": seconds}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if bad else 0


def _ours(
    folder: Path,
    what: tuple[Shape, float, bool],
    options: argparse.Namespace,
    tally: Tally,
    fooled: list[str],
) -> list[tuple[Damage, Outcome]]:
    shape, share, texts = what
    bench = Bench(folder, shape)
    for damage in catalogue(
        bench, seed=options.seed, flips=int(options.flips * share), texts=texts
    ):
        try:
            verdict = bench.examine(damage).value
        except AssertionError as error:
            verdict = _FOOLED
            fooled.append(f"{shape}: {damage.kind}: {damage.what}: {error}")
        tally.setdefault(damage.kind, Counter())[verdict] += 1
    return []


def _in_folder(
    work: Callable[[Path], list[tuple[Damage, Outcome]]],
) -> list[tuple[Damage, Outcome]]:
    spare = Path(tempfile.mkdtemp(prefix="forge-corruption-"))
    folder = memory_directory(spare)
    try:
        return work(folder)
    finally:
        shutil.rmtree(spare)
        shutil.rmtree(folder, ignore_errors=True)


def _print(ours: Tally, plain: dict[str, Tally]) -> None:
    heads = ["damage", "slurm_forge", "unnoticed", "(harmless)"]
    for name in plain:
        heads += [name, "unnoticed", "(harmless)"]
    rows = []
    for kind in ours:
        row = ours[kind]
        rows.append([
            kind, sum(row.values()), row[_FOOLED] + row[Verdict.SILENT.value],
            row[Verdict.SAME.value],
        ])  # fmt: skip
        for tally in plain.values():
            found = tally.get(kind)
            rows[-1] += (
                ["-", "-", "-"] if found is None
                else [sum(found.values()), found[Outcome.SILENT.value],
                      found[Outcome.UNCHANGED.value]]
            )  # fmt: skip
    sums = [sum(row[at] for row in rows if row[at] != "-") for at in range(1, len(heads))]
    widths = [max(len(head), 9) for head in heads]
    widths[0] = max(len(row[0]) for row in rows)
    for row in (heads, *rows, ["together", *sums]):
        cells = [str(row[0]).ljust(widths[0])]
        cells += [str(cell).rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))
    print(
        "\nunnoticed: other numbers than were saved, and no error.  harmless: nothing said or read"
    )
    print("differently (white space, padding, parts of an archive that no reader looks at).")


if __name__ == "__main__":
    sys.exit(main())
