"""The driver: finds every call of every path, lets each kind of fault strike there, and judges.

Ranks are forked from this process, which has torch in memory already: a case costs a tenth of a
second, most of it for two process groups that find each other.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.crash.case import AFTER_ACK, KINDS, Case, Look, LostError, Report, Result
from tests.crash.disk import Disk, Loss, read_tree, write_tree
from tests.crash.records import Archiving, Claiming, Journalling, Submitting
from tests.crash.saves import dcp_paths, save_paths
from tests.crash.shim import SETTLED, Op, Record, Shim, Strike
from tests.distributed.ranks import Outcome, start_ranks

#: Seconds: a whole case; what is left of it once a rank is gone, before that is called a hang.
_DEADLINE, _GRACE = 40.0, 10.0
_LETHAL = frozenset({Strike.KILL_BEFORE, Strike.KILL_AFTER, Strike.TORN, Strike.POWER})
#: What a call must be of for a kind of fault to make sense there; the bits of shim.c.
_ONLY_AT = {Strike.TORN: 2, Strike.REPEATED: 4}

PATHS: dict[str, Any] = {
    path.name: path
    for path in [
        *save_paths(),
        Journalling(),
        Journalling("journal, rotated", rotate_at=500),
        Archiving(),
        Claiming(),
        Submitting(),
        *dcp_paths(),
    ]
}


def run_case(case: Case) -> list[Result]:
    """Let it happen, restart, and say what came of it: one result per state of the disk."""
    with tempfile.TemporaryDirectory(prefix="case-", ignore_cleanup_errors=True) as scratch:
        return _Run(case, Path(scratch).resolve()).results()


class _Run:
    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.path = PATHS[case.path]
        self.root, self.log = folder / "disk", folder / "log"
        self.root.mkdir(mode=0o700)
        self.root_inode = self.root.stat().st_ino
        self.shim = Shim()
        self.shim.start(self.log, self.root)
        self.copies = 0

    def results(self) -> list[Result]:
        try:
            return list(self._results())
        finally:
            self.shim.stop()

    def _results(self) -> Iterator[Result]:
        case, path = self.case, self.path
        with start_ranks(
            path.ranks, path.body, case, self.shim, init=path.ranks > 1, pg_timeout=_DEADLINE
        ) as group:
            outcomes = group.wait(_DEADLINE, grace=_GRACE)
        self.shim.recover()
        self.shim.disarm()
        reports = [_report(outcome) for outcome in outcomes]
        records = self.shim.records(self.log)
        seen = Disk(self.root_inode, records)
        # The model is right only if nothing went past it: then it is the folder, byte for byte.
        if self.shim.escaped or seen.tree() != read_tree(self.root):
            raise AssertionError(f"{case}: the log is not what lies in the folder")
        struck = self.shim.struck(case.victim)
        if case.strike is Strike.COUNT:
            yield from self._after_ack(records)
            return
        if struck is None:
            return
        hang = any(outcome.overdue for outcome in outcomes)
        if case.strike is Strike.POWER:
            yield from self._after_power_loss(records, reports, struck)
        else:
            yield self._alive(records, reports, outcomes, struck, hang)

    def _after_power_loss(
        self, records: Sequence[Record], reports: Sequence[Report | None], struck: str
    ) -> Iterator[Result]:
        acked = _acked(records)
        disk = Disk(self.root_inode, records)
        for loss in self.case.losses:
            copy = self._copy(disk, loss)
            look = self.path.look(copy, acked, self.path.possible(acked, reports), power=True)
            blocked = self._again(copy, acked, reports, power=True)
            yield self._result(loss.value, struck, look, blocked=blocked)

    def _alive(
        self,
        records: Sequence[Record],
        reports: Sequence[Report | None],
        outcomes: Sequence[Outcome],
        struck: str,
        hang: bool,
    ) -> Result:
        """The machine lives on: another attempt on the same disk, or the same ranks went on."""
        acked = _acked(records)
        wrong, blocked = [], []
        if all(reports) and (self.case.strike not in _LETHAL or not self.path.power):
            told: list[Report] = [report for report in reports if report is not None]
            wrong.append(self.path.look_after(told))
            if self.case.strike is Strike.REPEATED:  # it was done, and must count as done
                wrong += [report.outcome for report in told if report.outcome != "done"]
            problems = [problem for report in told for problem in report.problems]
            wrong += [p.removeprefix("WRONG ") for p in problems if p.startswith("WRONG")]
            blocked += [p.removeprefix("BLOCKED ") for p in problems if p.startswith("BLOCKED")]
        elif self.case.strike not in _LETHAL:
            wrong.append("a rank is gone: " + "".join(str(outcome) for outcome in outcomes))
        elif any(report and report.outcome.startswith("crashed") for report in reports):
            wrong.append(f"a survivor crashed: {reports}")
        possible = self.path.possible(acked, reports)
        look = self.path.look(self.root, acked, possible, power=False)
        again = self._again(self.root, acked, reports, power=False)
        if not again and not getattr(self.path, "settled", False):
            # What the next attempt was told to be safe is so in any weather.
            records = self.shim.records(self.log)
            now = _acked(records)
            disk = Disk(self.root_inode, records)
            for loss in Loss:
                later = self.path.look(self._copy(disk, loss), now, possible, power=True)
                if later.wrong:
                    look = Look(look.value, f"later, {loss.value}: {later.wrong}", later.lost)
        kind = KINDS[self.case.strike]
        text = "; ".join(filter(None, [*wrong, look.wrong]))
        look = Look(look.value, text, look.lost, look.passed_over)
        # What a restart would have found before anybody went on.
        lived = [report for report in reports if report is not None]
        if self.case.strike not in _LETHAL or not self.path.power:
            value = next((report.found for report in lived if report.found is not None), None)
            state = Look(value, look.wrong, look.lost, look.passed_over) if lived else look
        else:
            state = look
        return self._result(
            kind, struck, state, blocked="; ".join(filter(None, [*blocked, again])), hang=hang
        )

    def _after_ack(self, records: Sequence[Record]) -> Iterator[Result]:
        """Power goes the moment that something was acknowledged."""
        disk = Disk(self.root_inode)
        acked: list[int] = []
        for record in records:
            disk.apply(record)
            if record.op is not Op.MARK or record.length in (SETTLED, *acked):
                continue
            acked.append(record.length)
            for loss in Loss:
                copy = self._copy(disk, loss)
                look = self.path.look(copy, acked, [], power=True)
                again = self._again(copy, acked, [], power=True)
                site = f"acknowledged {record.length}"
                yield self._result(AFTER_ACK + loss.value, site, look, blocked=again)

    def _again(
        self,
        root: Path,
        acked: Sequence[int],
        reports: Sequence[Report | None],
        *,
        power: bool,
    ) -> str:
        """What keeps a next attempt from doing the same; nothing, hopefully."""
        try:
            value, problems = self.path.next_attempt(root)
        except BaseException as error:
            return f"the next attempt: {type(error).__name__}: {error}"
        if problems:
            return f"the next attempt: {problems}"
        if not power:
            self.shim.mark(value)
        possible = self.path.possible(acked, reports)
        look = self.path.look(root, [*acked, value], possible, power=power)
        return f"after the next attempt: {look.wrong}" if look.wrong else ""

    def _copy(self, disk: Disk, loss: Loss) -> Path:
        self.copies += 1
        folder = self.folder / f"copy-{self.copies}"
        write_tree(disk.tree(loss, self.case.seed + self.copies), folder)
        return folder

    def _result(self, kind: str, site: str, look: Look, **more: Any) -> Result:
        new = getattr(self.path, "new", 0)
        state = "none" if look.value is None else "old" if look.value < new else "new"
        return Result(
            path=self.case.path,
            kind=kind,
            rank=self.case.victim,
            call=self.case.call,
            site=site,
            state=state if not look.wrong else "",
            wrong=look.wrong,
            lost=look.lost,
            passed_over=look.passed_over,
            direct_writes=self.shim.direct_writes,
            **more,
        )


def _report(outcome: Outcome) -> Report | None:
    if outcome.ok:
        return outcome.value
    if isinstance(outcome.exception, LostError) and not outcome.overdue:
        return outcome.exception.report
    return None


def _acked(records: Sequence[Record]) -> list[int]:
    found: list[int] = []
    for record in records:
        if record.op is Op.MARK and record.length not in (SETTLED, *found):
            found.append(record.length)
    return found


def find_calls(name: str) -> list[tuple[int, int, str, int]]:
    """Every call of the path: rank, number, what it is, and its bits."""
    path = PATHS[name]
    with tempfile.TemporaryDirectory(prefix="count-", ignore_cleanup_errors=True) as scratch:
        run = _Run(Case(name, Strike.COUNT, 0, -1), Path(scratch).resolve())
        with start_ranks(
            path.ranks, path.body, run.case, run.shim, init=path.ranks > 1, pg_timeout=_DEADLINE
        ) as group:
            outcomes = group.wait(_DEADLINE)
        assert all(outcome.ok for outcome in outcomes), "".join(map(str, outcomes))
        problems = [p for outcome in outcomes for p in outcome.value.problems]
        assert not problems, problems
        sites = [
            (record.rank, record.call, record.name, record.inode)
            for record in run.shim.records(run.log)
            if record.op is Op.SITE
        ]
        run.shim.stop()
    return sites


def enumerate_cases(names: Sequence[str], *, seed: int = 0) -> list[Case]:
    """Every kind at every call of every rank of the paths; power loss counts as four."""
    cases = []
    for name in names:
        path = PATHS[name]
        cases.append(Case(name, Strike.COUNT, 0, -1, seed))
        for rank, call, _, bits in find_calls(name):
            for strike in path.strikes:
                if strike not in _ONLY_AT or bits & _ONLY_AT[strike]:
                    cases.append(Case(name, strike, rank, call, seed))
            if path.power:
                cases.append(Case(name, Strike.POWER, rank, call, seed, tuple(Loss)))
    return cases


def run_all(
    cases: Sequence[Case], *, jobs: int, told: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Run them, several at once; in whatever order."""
    torch.set_num_threads(1)
    results = []
    order = list(cases)
    random.Random(1).shuffle(order)  # the long ones are not all at the end
    pool = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("fork"), initializer=_quiet
    )
    with pool:  # a worker that dies is an error, not a wait without end
        for found in pool.map(run_case, order):
            for result in found:
                results.append(result)
                told(result)
    return results


def _quiet() -> None:
    torch.set_num_threads(1)


def scratch_folder(base: Path | None = None) -> Path:
    """A folder for the disks of all cases, in ``base``: else in memory where that can be had."""
    memory = Path("/dev/shm")
    if base is None:
        base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix="forge-crash-", dir=base))


def remove(folder: Path) -> None:
    """Whatever is left of it."""
    shutil.rmtree(folder, ignore_errors=True)
