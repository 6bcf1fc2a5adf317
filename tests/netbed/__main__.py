"""``python -m tests.netbed``: the probe matrix, as a table; see scripts/probe-matrix."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.netbed.bed import why_not
from tests.netbed.cases import Case, Fault, Found, Moment, Who, all_cases, found_from, play_all


def main(arguments: list[str]) -> int:
    """Play what is asked for, and is not known yet; 0 if all named the right host."""
    parser = argparse.ArgumentParser(prog="probe-matrix", description=__doc__)
    parser.add_argument("--json", type=Path, help="every case and what came of it; is gone on with")
    parser.add_argument("--only", action="append", default=[], help="names that contain this text")
    parser.add_argument("--repeats", type=int, default=4, help="of each of the 54 classes")
    parser.add_argument("--jobs", type=int, default=1, help="so many side by side")
    parser.add_argument("--again", action="store_true", help="also what is in the file already")
    options = parser.parse_args(arguments)
    problem = why_not()
    if problem:
        sys.stderr.write(f"probe-matrix: {problem}\n")
        return 2
    known = {} if options.again or options.json is None else _read(options.json)
    cases = [
        case
        for case in all_cases(options.repeats)
        if all(text in case.name for text in options.only)
    ]
    left = [case for case in cases if case.name not in known]
    began = time.monotonic()
    for found in play_all(left, options.jobs):
        known[found.name] = found
        _say(found, len([case for case in cases if case.name in known]), len(cases))
        if options.json is not None:
            text = json.dumps([asdict(each) for each in known.values()], indent=1)
            options.json.write_text(text + "\n")
    results = [known[case.name] for case in cases]
    _table(cases, known)
    wrong = [each for each in results if not each.right]
    for each in wrong:
        print(f"\n{each.name}: expected {each.expected}, named {', '.join(each.hosts) or 'nobody'}")
        print("\n".join(f"  {line}" for line in (*each.evidence, each.error) if line))
    false_names = sum(bool(set(each.hosts) - {each.expected}) for each in results)
    print(
        f"\n{len(results)} cases, the right host named in {len(results) - len(wrong)}, "
        f"a wrong one in {false_names}; {time.monotonic() - began:.0f} s for {len(left)} of them"
    )
    return 1 if wrong else 0


def _read(path: Path) -> dict[str, Found]:
    if not path.exists():
        return {}
    return {each["name"]: found_from(each) for each in json.loads(path.read_text())}


def _say(found: Found, number: int, count: int) -> None:
    mark = "ok  " if found.right else "BAD "
    named = ", ".join(found.hosts) or "nobody"
    print(
        f"{mark}{number:4}/{count}  {found.name:52} {named:12} {found.cause:10} "
        f"{found.after:6.1f} s  ({found.took:.0f} s)  {found.error[-60:]!r}",
        flush=True,
    )


def _table(cases: list[Case], known: dict[str, Found]) -> None:
    print(f"\n{'':10} {'':24}" + "".join(f"{moment.value:>26}" for moment in Moment))
    for fault in Fault:
        for who in Who:
            cells = []
            for moment in Moment:
                found = [
                    known[case.name]
                    for case in cases
                    if (case.fault, case.who, case.moment) == (fault, who, moment)
                ]
                if not found:
                    cells.append("-")
                    continue
                right = sum(each.right for each in found)
                after = [each.after for each in found if each.right]
                seconds = f"{statistics.median(after):.1f} s" if after else "-"
                most = f", most {max(after):.1f}" if after else ""
                cells.append(f"{right}/{len(found)} {seconds}{most}")
            print(f"{fault.value:10} {who.value:24}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
