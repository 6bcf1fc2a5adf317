"""What a proof consists of: checks that passed, failed or did not run, and figures with goals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any
from xml.etree import ElementTree


class Outcome(str, Enum):
    """How a check ended; only what ran to its end can pass."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about the hardware; ``detail`` says why it failed or did not run."""

    part: str
    name: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value; ``goal`` is the most it may be, None where nothing is promised."""

    name: str
    value: float
    unit: str
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        return None if self.goal is None else self.value <= self.goal


@dataclass(frozen=True, slots=True)
class Proof:
    """All that one call found; a ``rehearsal`` on a made-up device proves nothing of hardware."""

    machine: Mapping[str, str]
    checks: Sequence[Check]
    figures: Sequence[Figure]
    seconds: float
    rehearsal: bool = False

    def count(self, outcome: Outcome) -> int:
        """How many checks ended so."""
        return sum(check.outcome is outcome for check in self.checks)

    @property
    def holds(self) -> bool:
        """Whether something passed, nothing failed, and everything ran."""
        return 0 < self.count(Outcome.PASSED) == len(self.checks)


def checks_of_junit(part: str, text: str) -> list[Check]:
    """A check for each test case of pytest's JUnit file; a skipped one did not run.

    Raises:
        ElementTree.ParseError: The file is not complete.
    """
    found = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name', '')}"
        seconds = float(case.get("time") or 0)
        broken = [each for kind in ("failure", "error") for each in case.iter(kind)]
        skipped = list(case.iter("skipped"))
        if broken:
            outcome, detail = Outcome.FAILED, broken[0].get("message") or "no message"
        elif skipped:
            outcome, detail = Outcome.NOT_RUN, skipped[0].get("message") or "skipped"
        else:
            outcome, detail = Outcome.PASSED, ""
        found.append(Check(part, name, outcome, detail, seconds))
    return found


def why_not_run(ranks: int, devices: int, seconds_left: float) -> str:
    """Why a part with that many ranks can't run; empty where it can."""
    if ranks > devices:
        return f"needs {ranks} devices, has {devices}"
    return "no time is left" if seconds_left <= 0 else ""


def last_line(out: str, err: str, code: int) -> str:
    """What a program that failed said last."""
    said = (err.strip() or out.strip()).splitlines()
    return said[-1] if said else f"exit status {code}"


def as_json(proof: Proof) -> dict[str, Any]:
    """The proof for programs, with stable keys."""
    return {
        "schema": 1,
        "holds": proof.holds,
        "rehearsal": proof.rehearsal,
        "seconds": round(proof.seconds, 1),
        "machine": dict(proof.machine),
        "checks": [asdict(check) for check in proof.checks],
        "figures": [{**asdict(figure), "met": figure.met} for figure in proof.figures],
    }


def as_page(proof: Proof, *, command: str) -> str:
    """The proof as one page of Markdown."""
    device = proof.machine.get("device", "no accelerator")
    verdict = "Proven on this machine" if proof.holds else "Not proven on this machine"
    if proof.rehearsal:
        verdict = "A rehearsal on a made-up device: its times mean nothing"
    lines = [
        f"# Proof on {_cell(device)}",
        "",
        f"`{command}`, {proof.machine.get('date', '')}, {proof.seconds:.0f} s: "
        + ", ".join(f"{proof.count(outcome)} {outcome.value}" for outcome in Outcome)
        + f". **{verdict}.**",
        "",
        *_table(("", ""), ((key, value) for key, value in proof.machine.items())),
        "",
        "## Figures",
        "",
        *_table(
            ("what", "measured", "goal", ""),
            (
                (
                    figure.name,
                    f"{figure.value:.4g} {figure.unit}",
                    "-" if figure.goal is None else f"at most {figure.goal:g} {figure.unit}",
                    {None: "", True: "met", False: "**missed**"}[figure.met],
                )
                for figure in proof.figures
            ),
        ),
        "",
    ]
    for outcome in (Outcome.FAILED, Outcome.NOT_RUN, Outcome.PASSED):
        chosen = [check for check in proof.checks if check.outcome is outcome]
        if not chosen:
            continue
        lines += [f"## {outcome.value.capitalize()} ({len(chosen)})", ""]
        lines += _table(
            ("part", "check", "s", ""),
            ((c.part, c.name, f"{c.seconds:.1f}", _first_line(c.detail)) for c in chosen),
        )
        lines.append("")
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(map(_cell, row)) + " |" for row in rows),
    ]


def _cell(text: str) -> str:
    line = " ".join(text.splitlines())
    return line.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
