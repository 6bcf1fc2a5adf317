"""``python -m tests.shared_storage``: two nodes on NFS, as a table; see scripts/shared-storage."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.crash import shim
from tests.shared_storage.guest import SHIM
from tests.shared_storage.machine import boot, missing, unpack
from tests.shared_storage.suite import BEGUN, MARK, MOUNTS, OVER, PROMISES_LESS

_ROOT = Path(__file__).parents[2]
_CACHE = _ROOT / "build" / "shared-storage"
_SCRIPT = """\
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mkdir -p /tree
cp -a {root}/slurm_forge {root}/tests {root}/site_configs /tree
cd /tree
{python} -m tests.shared_storage.suite {mounts!r} {cases}
echo o > /proc/sysrq-trigger
while :; do :; done
"""


def main(arguments: list[str]) -> int:
    """Start the machines, hear what came of every case, and show it."""
    parser = argparse.ArgumentParser(prog="shared-storage", description=__doc__)
    parser.add_argument("--json", type=Path, help="every case and what came of it")
    parser.add_argument("--mount", action="append", help="only these options of mount")
    parser.add_argument("--case", action="append", default=[], help="only these cases")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="where packages are kept")
    parser.add_argument("--within", type=float, default=5400.0, help="seconds, at most")
    parser.add_argument("--machines", type=int, default=2, help="which share the mounts")
    options = parser.parse_args(arguments)
    if reason := missing():
        print(f"shared-storage: {reason}", file=sys.stderr)
        return 2
    cache, mounts = options.cache.absolute(), tuple(options.mount or MOUNTS)
    unpack(cache)
    shim.build(cache / "packages" / SHIM.parent.relative_to("/"))
    begun = time.monotonic()
    parts = [mounts[number :: options.machines] for number in range(options.machines)]
    files = [cache / f"console-{number}.txt" for number in range(options.machines)]
    with ThreadPoolExecutor(len(parts)) as machines:
        start = partial(_start, cache, cases=options.case, within_s=options.within)
        consoles = list(machines.map(start, files, filter(None, parts)))
    results = [each for text in consoles for each in read_console(text)]
    results.sort(key=lambda each: mounts.index(each["mount"]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print(table(results))
    bad = [each for each in results if each["problems"] and not _is_documented(each)]
    print(
        f"\n{len(results)} cases, {sum(each['struck'] for each in results)} calls struck, "
        f"{sum(each['repeated'] for each in results)} answers lost, {len(bad)} cases with a wrong "
        f"outcome; {time.monotonic() - begun:.0f} s"
    )
    for each in bad:
        print(f"\n{each['mount']}, {each['case']}: {'; '.join(each['problems'])}", file=sys.stderr)
        print(each["console"], file=sys.stderr)
    unfinished = [text for text in consoles if OVER not in text]
    for text in unfinished:
        print(f"\nnot finished: {text.rpartition(BEGUN)[2]}", file=sys.stderr)
    print(f"consoles: {cache}/console-*.txt")
    return 1 if bad or unfinished else 0


def read_console(text: str) -> list[dict[str, Any]]:
    """What came of every case, and in ``console`` what its processes printed."""
    results = []
    for section in text.split(f"\n{BEGUN}")[1:]:
        printed, _, found = section.partition(f"\n{MARK}")
        if found:
            results.append({**json.loads(found.splitlines()[0]), "console": printed})
    return results


def _start(
    cache: Path, console: Path, mounts: Sequence[str], cases: Sequence[str], within_s: float
) -> str:
    """Run these mounts in a machine of their own; what it printed, which ``console`` keeps."""
    folder = Path(tempfile.mkdtemp(prefix="machine-", dir=cache))
    script = folder / "job.sh"
    script.write_text(
        _SCRIPT.format(
            root=_ROOT, python=sys.executable, mounts=";".join(mounts), cases=" ".join(cases)
        )
    )
    try:
        return boot(cache, script, console, memory_mib=3072, within_s=within_s)
    finally:
        shutil.rmtree(folder)


def table(results: list[dict[str, Any]]) -> str:
    """Case by mount: how many problems, and how many calls were struck or answers lost."""
    mounts = list(dict.fromkeys(each["mount"] for each in results))
    lines = [f"| case | {' | '.join(mounts)} |", "|---" * (len(mounts) + 1) + "|"]
    for case in dict.fromkeys(each["case"] for each in results):
        cells = []
        for mount in mounts:
            found = [e for e in results if (e["mount"], e["case"]) == (mount, case)]
            cells.append(_cell(found[0]) if found else "")
        lines.append(f"| {case.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _is_documented(result: dict[str, Any]) -> bool:
    return result["case"] in PROMISES_LESS.get(result["mount"], set())


def _cell(result: dict[str, Any]) -> str:
    word = "ok" if not result["problems"] else "no" if _is_documented(result) else "WRONG"
    count = result["struck"] or result["repeated"]
    return f"{word}, {count}" if count else word


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
