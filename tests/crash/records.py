"""The paths of the rest of a run directory: the journal and the claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import FencedError, ForgeError
from slurm_forge.journal import (
    JournalWriter,
    compact_journal,
    fold,
    read_journal,
    read_to_fold,
)
from slurm_forge.journal.events import AttemptStarted, CheckpointCommitted, LaunchStarted, Progress
from slurm_forge.journal.fold import in_order
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.claims import Fence, claim_attempt, list_claims, newest_claim
from slurm_forge.store.identity import CheckpointName
from tests.crash.case import Case, Look, Report
from tests.crash.engines import Forge
from tests.crash.saves import AGAIN, CHANGES, arm
from tests.crash.shim import Shim, Strike, Watch

_EVENTS = 9
_CLOCK = 1_750_000_000.0


def _event(number: int) -> AttemptStarted | LaunchStarted | Progress | CheckpointCommitted:
    if number == 0:
        return AttemptStarted(job="1", restart_count=0, nodes=("n",), host="n", via="batch")
    if number == 1:
        return LaunchStarted(world_size=2)
    if number % 3 == 2:
        return Progress(step=number)
    name = CheckpointName(number, 1, 1, "0" * 8)
    return CheckpointCommitted(name=str(name), step=number, reason="test", seconds=0.1, size=1)


def _durable(number: int) -> bool:
    return isinstance(_event(number), CheckpointCommitted)


@dataclass(frozen=True)
class Journalling:
    """Events, every one acknowledged when ``write`` returned; the state is that of a prefix.

    A file is left once it has ``rotate_at`` bytes.
    """

    name: str = "journal"
    rotate_at: int = 1 << 24
    ranks: int = 1
    watch: Watch = Watch.CHANGES
    strikes: tuple[Strike, ...] = CHANGES
    power: bool = True

    def body(self, rank: int, case: Case, shim: Shim) -> Report:
        shim.be(rank)
        run = RunDirectory.at(Path(shim.root) / "run")
        run.create(b"{}")
        arm(shim, rank, case, self.watch)
        now = _CLOCK
        journal = JournalWriter(
            run,
            attempt=1,
            writer="rank",
            launch=1,
            clock=lambda: now,
            rotate_at=self.rotate_at,
        )
        refused = []
        for number in range(_EVENTS):
            now = _CLOCK + number
            try:
                journal.write(_event(number))
                shim.mark(number)
            except OSError:
                refused.append(number)
        shim.disarm()
        now = _CLOCK + _EVENTS
        problems = []
        try:
            journal.write(_event(_EVENTS))
            shim.mark(_EVENTS)
        except OSError as error:
            problems.append(f"BLOCKED the next event: {error}")
        journal.close()
        outcome = "refused" if refused else "done"
        return Report(
            outcome, refused=tuple(refused), problems=tuple(problems), found=_EVENTS - len(refused)
        )

    def possible(self, acked: Sequence[int], reports: Sequence[Report | None]) -> list[int]:
        refused = [number for report in reports if report for number in report.refused]
        return [*refused, max(acked, default=-1) + 1]

    def look(
        self, root: Path, acked: Sequence[int], possible: Sequence[int], *, power: bool
    ) -> Look:
        if not (root / "run").exists():
            return Look(None, "the run directory is gone", True)
        run = RunDirectory.at(root / "run")
        try:
            records, _ = read_journal(run)
            state = fold(records)
        except Exception as error:
            return Look(None, f"it can't be read: {type(error).__name__}: {error}", True)
        found = [int(record.time - _CLOCK) for record in in_order(records)]
        owed = {number for number in acked if number < 100 and (_durable(number) or not power)}
        owed |= {number for number in acked if number >= 100}
        last = found[-1] if found else None
        if owed - set(found):
            return Look(last, f"{sorted(owed - set(found))} of {found} are lost", True)
        if found != sorted(set(found)):
            return Look(last, f"out of order or twice: {found}")
        strange = set(found) - set(acked) - set(possible)
        if strange:
            return Look(last, f"{sorted(strange)} were never written")
        # No holes: who finds a later event finds every earlier one that was acknowledged.
        mine = [number for number in found if number < 100 and number not in possible]
        whole = [n for n in range(max(mine, default=-1) + 1) if n not in possible]
        if mine != whole:
            return Look(last, f"not a prefix: {found}")
        commits = [number for number in owed if _durable(number)]
        if commits and (state.committed_step or 0) < max(commits):
            return Look(
                last, f"the state says {state.committed_step}, {max(commits)} was told", True
            )
        return Look(last)

    def next_attempt(self, root: Path) -> tuple[int, list[str]]:
        run = RunDirectory.at(root / "run")
        journal = JournalWriter(run, attempt=2, writer="rank", launch=1, clock=lambda: _CLOCK + 100)
        journal.write(_event(100))  # a commit
        journal.close()
        return 100, []

    def look_after(self, reports: Sequence[Report]) -> str:
        return ""


@dataclass(frozen=True)
class Archiving:
    """Attempts that are long over: whatever strikes, each of their events is there, and once."""

    name: str = "archive"
    ranks: int = 1
    watch: Watch = Watch.CHANGES
    strikes: tuple[Strike, ...] = CHANGES
    power: bool = True

    def body(self, rank: int, case: Case, shim: Shim) -> Report:
        shim.be(rank)
        run = RunDirectory.at(Path(shim.root) / "run")
        run.create(b"{}")
        for attempt in range(1, _ATTEMPTS + 1):
            _write_attempt(run, attempt)
        shim.mark(_ATTEMPTS)
        arm(shim, rank, case, self.watch)
        # Nothing of it may keep an attempt from starting.
        compact_journal(run, _ATTEMPTS, block=2, kept=1)
        shim.disarm()
        return Report("done", found=_ATTEMPTS, problems=tuple(_wrong_with(run, _ATTEMPTS)))

    def possible(self, acked: Sequence[int], reports: Sequence[Report | None]) -> list[int]:
        return []

    def look(
        self, root: Path, acked: Sequence[int], possible: Sequence[int], *, power: bool
    ) -> Look:
        if not acked:
            return Look(None)
        run = RunDirectory.at(root / "run")
        try:
            problems = _wrong_with(run, max(acked))
        except Exception as error:
            problems = [f"it can't be read: {type(error).__name__}: {error}"]
        return Look(max(acked), "; ".join(problems), bool(problems))

    def next_attempt(self, root: Path) -> tuple[int, list[str]]:
        run = RunDirectory.at(root / "run")
        newest = max(attempt for attempt in range(1, 99) if list(run.journal.glob(f"{attempt}-*")))
        for attempt in range(newest + 1, newest + 3):
            _write_attempt(run, attempt)
            compact_journal(run, attempt, block=2, kept=1)
        problems = [f"{path.name} is left" for path in run.journal.glob("[12]-*")]
        return newest + 2, problems

    def look_after(self, reports: Sequence[Report]) -> str:
        return ""


_ATTEMPTS = 5


def _write_attempt(run: RunDirectory, attempt: int) -> None:
    journal = JournalWriter(
        run, attempt=attempt, writer="rank", launch=1, clock=lambda: _CLOCK + attempt
    )
    for number in range(_EVENTS):
        event = _event(number)
        if isinstance(event, CheckpointCommitted):
            name = str(CheckpointName(number, attempt, 1, "0" * 8))
            event = CheckpointCommitted(name=name, step=number, reason="test", seconds=0.1, size=1)
        journal.write(event, durable=True)
    journal.close()


def _wrong_with(run: RunDirectory, attempts: int) -> list[str]:
    """What is not as the events of so many attempts are."""
    numbers = list(range(1, attempts + 1))
    saved = [number for number in range(_EVENTS) if _durable(number)]
    problems = []
    records, damage = read_journal(run)
    found = [
        (record.attempt, record.event.step)
        for record in in_order(records)
        if isinstance(record.event, CheckpointCommitted)
    ]
    if found != [(attempt, step) for attempt in numbers for step in saved] or damage:
        problems.append(f"the records are {found}, damaged {damage}")
    for state in (fold(records), fold(read_to_fold(run))):
        known = [(each.number, len(each.checkpoints)) for each in state.attempts]
        if known != [(attempt, len(saved)) for attempt in numbers]:
            problems.append(f"the state is {known}")
    return problems


@dataclass(frozen=True)
class Claiming:
    """Attempt numbers: no two alike, none forgotten, the older one fenced."""

    name: str = "claim"
    ranks: int = 1
    watch: Watch = Watch.CHANGES
    strikes: tuple[Strike, ...] = CHANGES
    power: bool = True

    def body(self, rank: int, case: Case, shim: Shim) -> Report:
        shim.be(rank)
        run = RunDirectory.at(Path(shim.root) / "run")
        run.create(b"{}")
        shim.mark(_claim(run))
        arm(shim, rank, case, self.watch)
        problems: list[str] = []
        outcome = "done"
        try:
            shim.mark(_claim(run))
        except (OSError, ForgeError) as error:
            outcome = f"refused: {error}"
        shim.disarm()
        try:
            shim.mark(_claim(run))
        except (OSError, ForgeError) as error:
            problems.append(f"BLOCKED the next claim: {error}")
        return Report(outcome, problems=tuple(problems))

    def possible(self, acked: Sequence[int], reports: Sequence[Report | None]) -> list[int]:
        return list(range(1, max(acked, default=0) + 2))

    def look(
        self, root: Path, acked: Sequence[int], possible: Sequence[int], *, power: bool
    ) -> Look:
        if not (root / "run").exists():
            return Look(None, "the run directory is gone", True)
        run = RunDirectory.at(root / "run")
        try:
            numbers, newest = list_claims(run), newest_claim(run)
        except Exception as error:
            return Look(None, f"the claims can't be read: {error}", False)
        last = numbers[-1] if numbers else None
        if len(set(acked)) != len(acked):
            return Look(last, f"a number was given away twice: {acked}")
        if set(acked) - set(numbers):
            return Look(last, f"{sorted(set(acked) - set(numbers))} of {numbers} is lost", True)
        if set(numbers) - set(acked) - set(possible) or newest is None or newest.attempt != last:
            return Look(last, f"{numbers}, in force {newest}")
        return Look(last)

    def next_attempt(self, root: Path) -> tuple[int, list[str]]:
        run = RunDirectory.at(root / "run")
        before = list_claims(run)
        number = _claim(run)
        problems = [] if number > max(before) else [f"{number} after {before}"]
        try:
            Fence(run, max(before))()
            problems.append(f"attempt {max(before)} is not fenced by {number}")
        except FencedError:
            pass
        return number, problems

    def look_after(self, reports: Sequence[Report]) -> str:
        return ""


@dataclass(frozen=True)
class Submitting:
    """The run directory itself: what is saved in it later hangs on its names, too."""

    name: str = "submission"
    ranks: int = 1
    watch: Watch = Watch.CHANGES
    strikes: tuple[Strike, ...] = CHANGES
    power: bool = True

    def body(self, rank: int, case: Case, shim: Shim) -> Report:
        shim.be(rank)
        run = RunDirectory.at(Path(shim.root) / "run")
        arm(shim, rank, case, self.watch)
        try:
            run.create(b"{}")
            shim.mark(1)
        except OSError as error:
            return Report(f"refused: {error}")
        return Report("done")

    def possible(self, acked: Sequence[int], reports: Sequence[Report | None]) -> list[int]:
        return [1]

    def look(
        self, root: Path, acked: Sequence[int], possible: Sequence[int], *, power: bool
    ) -> Look:
        run = RunDirectory.at(root / "run")
        spec = run.spec_file.read_bytes() if run.spec_file.exists() else None
        if spec not in (None, b"{}"):
            return Look(None, f"run.yaml holds {spec!r}")
        if acked and spec is None:
            return Look(None, f"run.yaml is gone, and {list(acked)} were told", True)
        if AGAIN not in acked:
            return Look(None if spec is None else 1)
        found = Forge.resume_alone(run.path, lambda _: None)
        return Look(found, "" if found == AGAIN else f"{found} instead of {AGAIN}", found != AGAIN)

    def next_attempt(self, root: Path) -> tuple[int, list[str]]:
        run = RunDirectory.at(root / "run")
        if not run.spec_file.exists():  # else the run can be continued as it is
            run.create(b"{}")
        _claim(run)
        return AGAIN, Forge.next_attempt(run.path, AGAIN)

    def look_after(self, reports: Sequence[Report]) -> str:
        return ""


def _claim(run: RunDirectory) -> int:
    return claim_attempt(
        run, job="1", restart_count=0, host="n", pid=1, nodes=("n",), time=_CLOCK, tries=3
    ).attempt
