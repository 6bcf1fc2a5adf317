"""``python -m tests.compat.matrix``: the package on each version of torch and Python it promises.

Each version of torch is installed into a virtual environment of its own, which goes once it has
been tried.  Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_OLDEST = (2, 6)
#: The Pythons that tests run on, beside the minor version of torch; "newest" is the last released.
TESTED = {"2.6": "3.10", "2.8": "3.12", "2.10": "3.13", "newest": "3.11"}
#: Where calls are bound and nothing is run.
_BINDING_PYTHON = "3.12"
_CHECKS = ("binding", "unit", "core")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
_UNIT_MARKS, _CORE_MARKS = "not slow and not gpu", "core and not slow and not gpu"


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One version of torch on one Python, and what is tried there."""

    torch: str
    python: str
    checks: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-python-{self.python}"


@dataclass(frozen=True, kw_only=True)
class PytestOutcome:
    """How pytest ended."""

    passed: int
    failed: int
    skipped: int
    seconds: int
    failures: tuple[str, ...]
    commit: str = ""
    """Of the tests and the package, with ``-dirty`` where files differ from it."""

    @property
    def ok(self) -> bool:
        return self.passed > 0 and self.failed == 0


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What was found of a combination; a check that was not made is None."""

    torch: str
    python: str
    date: str
    binding: dict[str, Any] | None = None
    unit: PytestOutcome | None = None
    core: PytestOutcome | None = None
    problem: str = ""
    machine: str = field(default_factory=platform.machine)
    cpus: int = field(default_factory=lambda: os.cpu_count() or 0)

    @property
    def ok(self) -> bool:
        binds = self.binding is None or not self.binding["misfits"]
        return not self.problem and binds and all(each is None or each.ok for each in self.runs)

    @property
    def runs(self) -> tuple[PytestOutcome | None, PytestOutcome | None]:
        return self.unit, self.core


class InstallError(Exception):
    """A version can't be had here."""


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all that this call has tried passed; rows of earlier calls don't count."""
    given = _parser().parse_args(argv)
    rows = read(given.json) if given.json else []
    passed = True
    for combination in chosen(released(), given.torch, given.python, given.check):
        tried = _try(combination, given)
        passed = passed and tried.ok
        rows = merged(rows, tried)
        if given.json:
            given.json.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    print(page(rows))
    if given.page:
        given.page.write_text(page(rows))
    return int(not passed)


# --- which -------------------------------------------------------------------------------------


def released() -> list[str]:
    """The newest release of each minor version that the package index has, oldest first."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"],
        capture_output=True, text=True, check=False, env=_pip_environment(None),
    )  # fmt: skip
    versions = newest_of_minors(asked.stdout)
    if not versions:
        raise SystemExit(f"pip names no version of torch: {asked.stderr.strip()[-500:]}")
    return versions


def newest_of_minors(text: str) -> list[str]:
    """From what ``pip index versions`` prints: the newest patch release of each minor version."""
    words = re.search(r"^Available versions: (.*)$", text, re.MULTILINE)
    newest: dict[tuple[int, int], int] = {}
    for word in words[1].split(",") if words else ():
        match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\+\w+)?", word.strip())
        if match is not None:
            minor = int(match[1]), int(match[2])
            newest[minor] = max(newest.get(minor, 0), int(match[3]))
    return [f"{a}.{b}.{newest[a, b]}" for a, b in sorted(newest) if (a, b) >= _OLDEST]


def chosen(
    versions: Sequence[str],
    torches: Sequence[str] | None,
    pythons: Sequence[str] | None,
    checks: Sequence[str] | None,
) -> list[Combination]:
    """What is tried: by default everything, tests on those of ``TESTED``."""
    named = {each.rpartition(".")[0]: each for each in versions} | {"newest": versions[-1]}
    if torches:
        wanted = [named.get(each, each) for each in torches]
        return [
            Combination(torch=torch, python=python, checks=tuple(checks or _CHECKS))
            for torch in wanted
            for python in pythons or [_tested_python(torch, named) or _BINDING_PYTHON]
        ]
    found = []
    for torch in versions:
        tested = _tested_python(torch, named)
        if tested is None:
            plan = Combination(torch=torch, python=_BINDING_PYTHON, checks=("binding",))
        else:
            plan = Combination(torch=torch, python=tested, checks=_CHECKS)
        kept = tuple(each for each in plan.checks if not checks or each in checks)
        if kept and (not pythons or plan.python in pythons):
            found.append(Combination(torch=torch, python=plan.python, checks=kept))
    return found


def _tested_python(torch: str, named: dict[str, str]) -> str | None:
    return next((python for key, python in TESTED.items() if named.get(key) == torch), None)


def find_python(version: str) -> Path:
    """An interpreter: from PATH, or one of pyenv's or uv's.

    Raises:
        InstallError: There is none here.
    """
    on_path = shutil.which(f"python{version}")
    folders = (
        Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions",
        Path("~/.local/share/uv/python").expanduser(),
    )
    installed = [each for folder in folders for each in folder.glob(f"*{version}.*/bin/python3")]
    for candidate in [*([Path(on_path)] if on_path else []), *sorted(installed, reverse=True)]:
        asked = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if asked.stdout.strip() == version:
            return candidate
    raise InstallError(f"no Python {version} here: install it, e.g. with pyenv or uv")


# --- trying ------------------------------------------------------------------------------------


def _try(combination: Combination, given: argparse.Namespace) -> Tried:
    folder: Path = given.cache / combination.name
    logs: Path = given.cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    say = functools.partial(print, f"{combination.name}:", flush=True)
    tried = Tried(
        torch=combination.torch,
        python=combination.python,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
    )
    try:
        python = _installed(combination, folder, say)
        found = {
            check: _CHECK[check](python, logs / f"{combination.name}-{check}.log", given.workers)
            for check in combination.checks
        }
        tried = Tried(**(_shallow(tried) | found))
    except InstallError as error:
        tried = Tried(**(_shallow(tried) | {"problem": str(error)}))
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    say("right" if tried.ok else f"WRONG {tried.problem}")
    return tried


def _shallow(tried: Tried) -> dict[str, Any]:
    return dict(vars(tried))


def _installed(combination: Combination, folder: Path, say: Callable[[str], None]) -> Path:
    """The interpreter of an environment with this torch, and the package where tests run."""
    python = folder / "bin/python"
    if not python.exists():
        _run([find_python(combination.python), "-m", "venv", folder])
    constraints = folder / "constraints.txt"
    pinned = (ROOT / "constraints-dev.txt").read_text().splitlines()
    others = [line for line in pinned if not line.startswith("torch==")]
    constraints.write_text("\n".join([*others, f"torch=={combination.torch}"]) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    environment = _pip_environment(constraints)
    if not _has_torch(python, combination.torch):
        say("installing torch (some 5 GB in builds with CUDA)")
        _run([*pip, f"torch=={combination.torch}", "numpy"], environment)
    if not set(combination.checks) <= {"binding"}:
        say("installing the package and what its tests need")
        _run([*pip, "--editable", f"{ROOT}[dev]"], environment)
    return python


def _has_torch(python: Path, version: str) -> bool:
    code = "import torch; print(torch.__version__)"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return asked.stdout.strip().partition("+")[0] == version


def _pip_environment(constraints: Path | None) -> dict[str, str]:
    """Constraints of this machine would rule out what is to be tried."""
    return {**os.environ, "PIP_CONSTRAINT": os.devnull if constraints is None else str(constraints)}


def _run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise InstallError(f"{command[-1]}: {done.stderr.strip()[-300:]}")


def _bind(python: Path, log: Path, workers: int) -> dict[str, Any]:
    result = log.with_suffix(".json")
    result.unlink(missing_ok=True)
    command = [python, "-m", "tests.compat.binding", "--json", result]
    with log.open("w") as output:
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False)
    if not result.exists():
        raise InstallError(f"torch can't be imported: {log}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _pytest(folder: str, marks: str, python: Path, log: Path, workers: int) -> PytestOutcome:
    command = [
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{ROOT}/tests/{folder}"),
        *("-n", str(workers), "--dist", "worksteal", "-m", marks),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = datetime.now(timezone.utc)
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=output, check=False, env=environment
        )
    seconds = (datetime.now(timezone.utc) - began).seconds
    outcome = pytest_outcome(log.read_text(errors="replace"), seconds, done.returncode)
    return replace(outcome, commit=_commit())


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    return asked.stdout.strip()


def pytest_outcome(text: str, seconds: int, code: int) -> PytestOutcome:
    """What pytest's last line says; a run without one, or that ended otherwise, has failed."""
    lines = text.strip().splitlines()
    counts = {
        word.rstrip("s"): int(number) for number, word in _COUNT.findall(lines[-1] if lines else "")
    }
    failed = counts.get("failed", 0) + counts.get("error", 0)
    names = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return PytestOutcome(
        passed=counts.get("passed", 0),
        failed=max(failed, int(code != 0)),
        skipped=counts.get("skipped", 0),
        seconds=seconds,
        failures=tuple(names[:20]),
    )


_CHECK: dict[str, Callable[[Path, Path, int], Any]] = {
    "binding": _bind,
    "unit": functools.partial(_pytest, "unit", _UNIT_MARKS),
    "core": functools.partial(_pytest, "distributed", _CORE_MARKS),
}


# --- what was found ----------------------------------------------------------------------------


def read(file: Path) -> list[Tried]:
    """The rows that an earlier call wrote."""
    if not file.exists():
        return []
    rows = json.loads(file.read_text())
    runs = {"unit", "core"}
    return [
        Tried(**{key: _test_run(value) if key in runs else value for key, value in row.items()})
        for row in rows
    ]


def _test_run(value: dict[str, Any] | None) -> PytestOutcome | None:
    return (
        None if value is None else PytestOutcome(**(value | {"failures": tuple(value["failures"])}))
    )


def merged(rows: Iterable[Tried], new: Tried) -> list[Tried]:
    """The rows with a new one; what it has not checked stays as it was found before."""
    earlier = [each for each in rows if (each.torch, each.python) == (new.torch, new.python)]
    others = [each for each in rows if each not in earlier]
    facts = _shallow(new)
    for old in earlier:
        for name in ("binding", "unit", "core"):
            if facts[name] is None:
                facts[name] = getattr(old, name)
    return sorted([*others, Tried(**facts)], key=lambda each: [*map(int, each.torch.split("."))])


def page(rows: Sequence[Tried]) -> str:
    """A table in Markdown, a row for each combination."""
    lines = [
        "| torch | Python | calls bound | unit tests | core tests with ranks | date |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row.torch,
            row.python,
            row.problem or _bound(row),
            *map(_tests, row.runs),
            row.date,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for row in rows:
        failures = [*(row.binding or {}).get("misfits", ())]
        failures += [name for run in row.runs if run is not None for name in run.failures]
        if failures:
            lines += ["", f"torch {row.torch}, Python {row.python}:", ""]
            lines += [f"* `{failure}`" for failure in failures]
    return "\n".join(lines) + "\n"


def _bound(row: Tried) -> str:
    if row.binding is None:
        return ""
    if row.binding["misfits"]:
        return f"**{len(row.binding['misfits'])} do not fit**"
    return f"{row.binding['bound']} fit, {row.binding['unchecked']} exist"


def _tests(run: PytestOutcome | None) -> str:
    if run is None:
        return ""
    counts = f"{run.passed:,} passed, {run.skipped} skipped, {run.seconds:,} s"
    counts += f" ({run.commit})" if run.commit else ""
    return counts if run.ok else f"**{run.failed} failed**, {counts}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/compat-matrix", description=__doc__)
    parser.add_argument("--torch", nargs="+", metavar="V", help="2.6, 2.8.0, newest: not all")
    parser.add_argument("--python", nargs="+", metavar="V", help="on these, such as 3.13")
    parser.add_argument("--check", nargs="+", choices=_CHECKS, help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are read and merged here")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table, as Markdown")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="of pytest (2)")
    parser.add_argument("--keep", action="store_true", help="keep the environments (6 GB each)")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "slurm_forge-compat"
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help=f"({cache})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
