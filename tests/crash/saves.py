"""The paths of checkpoints: save in front and behind, the first one, prune, resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_forge.errors import CheckpointError
from slurm_forge.store.identity import CheckpointName
from tests.crash.case import Case, Look, LostError, Report
from tests.crash.engines import DcpFresh, DcpInPlace, Forge, Mixture
from tests.crash.shim import SETTLED, Shim, Strike, Watch

CHANGES = (
    Strike.KILL_BEFORE,
    Strike.KILL_AFTER,
    Strike.TORN,
    Strike.ENOSPC_ONCE,
    Strike.ENOSPC_STICKY,
    Strike.EIO_ONCE,
    Strike.REPEATED,
)
READS = (
    Strike.KILL_BEFORE,
    Strike.KILL_AFTER,
    Strike.TORN,
    Strike.EIO_ONCE,
    Strike.EIO_STICKY,
)
AGAIN = 50


def meet(ranks: int) -> None:
    """Wait for the others, and see whether training can go on."""
    if ranks > 1:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == ranks


def arm(shim: Shim, rank: int, case: Case, watch: Watch) -> None:
    if rank == case.victim or case.strike is Strike.COUNT:
        shim.arm(rank, case.strike, case.call, watch)


def attempt(act: Callable[[], Any], refusal: Any, lost: Any) -> str:
    """How it ended, in a word and the reason."""
    try:
        act()
    except lost as error:
        return f"lost: {error}"
    except refusal as error:
        return f"refused: {type(error).__name__}: {error}"
    except BaseException as error:
        return f"crashed: {type(error).__name__}: {error}"
    return "done"


def disarm_together(shim: Shim, rank: int, ranks: int) -> None:
    meet(ranks)
    if rank == 0:
        shim.disarm()
    meet(ranks)


@dataclass(frozen=True)
class Saving:
    """Saves ``before``, acknowledged; then one that the fault strikes; then another."""

    name: str
    engine: Any = Forge
    ranks: int = 2
    big: bool = False
    background: bool = False
    prune: bool = False
    before: tuple[int, ...] = (1,)
    watch: Watch = Watch.CHANGES
    strikes: tuple[Strike, ...] = CHANGES
    power: bool = True
    #: What was saved before counts as written back by the kernel in the meantime, synced or not.
    settled: bool = False

    @property
    def new(self) -> int:
        return max(self.before, default=0) + 1

    def body(self, rank: int, case: Case, shim: Shim) -> Report:
        options = {"background": self.background, "prune": self.prune} if self._options else {}
        behind = dist.new_group(backend="gloo") if self.background else None
        shim.be(rank)
        engine = self._open(shim, rank, behind)
        for value in self.before:
            engine.save(value)
            shim.mark(value)
        meet(self.ranks)
        if self.settled:
            shim.mark(SETTLED)
            meet(self.ranks)
        arm(shim, rank, case, self.watch)
        outcome = attempt(
            lambda: engine.save(self.new, **options), self.engine.refusal, self.engine.lost
        )
        if outcome == "done":
            shim.mark(self.new)
        if outcome.startswith("lost"):
            raise LostError(Report(outcome))
        try:
            disarm_together(shim, rank, self.ranks)
        except RuntimeError as error:
            told = Report(f"lost: {error}" if outcome == "done" else outcome)
            raise LostError(told) from error
        problems, found = self._go_on(engine, outcome, shim)
        return Report(outcome, problems=tuple(problems), found=found)

    @property
    def _options(self) -> bool:
        return self.background or self.prune

    def _open(self, shim: Shim, rank: int, behind: Any) -> Any:
        root = Path(shim.root)
        if self.engine is Forge:
            return Forge(root, rank, big=self.big, background=behind)
        return self.engine(root, rank)

    def _go_on(self, engine: Any, outcome: str, shim: Shim) -> tuple[list[str], int | None]:
        """The fault is gone: what a restart would find now, and whether the next save works."""
        problems = []
        found: int | None = None
        allowed = {self.new} if outcome == "done" else {max(self.before, default=None), self.new}
        try:
            found = engine.resume()
            if found not in allowed:
                problems.append(f"WRONG after {outcome!r} a restart gives {found}")
        except Mixture as error:
            problems.append(f"WRONG after {outcome!r} a mixture: {error}")
        except BaseException as error:
            problems.append(
                f"WRONG after {outcome!r} nothing loads: {type(error).__name__}: {error}"
            )
        again = attempt(lambda: engine.save(self.new + 1), self.engine.refusal, self.engine.lost)
        if again == "done":
            shim.mark(self.new + 1)
        else:
            problems.append(f"BLOCKED the next save: {again}")
        return problems, found

    def look(
        self, root: Path, acked: Sequence[int], possible: Sequence[int], *, power: bool
    ) -> Look:
        passed: list[str] = []
        last = max(acked, default=None)
        try:
            found = self.engine.resume_alone(root, passed.append)
        except Mixture as error:
            return Look(None, f"a mixture: {error}", False, tuple(passed))
        except BaseException as error:
            why = f"nothing loads: {type(error).__name__}: {error}"
            if last is None:  # nothing was acknowledged, and a fresh start is refused
                return Look(None, why, False, tuple(passed))
            return Look(None, why, True, tuple(passed))
        if passed and self.watch is Watch.CHANGES:
            return Look(found, f"published and damaged: {passed}", False, tuple(passed))
        if found == last or (found in possible and found is not None and found > (last or 0)):
            return Look(found, passed_over=tuple(passed))
        lost = last is not None and (found is None or found < last)
        return Look(found, f"{found} instead of {last}", lost, tuple(passed))

    def next_attempt(self, root: Path) -> tuple[int, list[str]]:
        return AGAIN, self.engine.next_attempt(root, AGAIN)

    def possible(self, acked: Sequence[int], reports: Sequence[Report | None]) -> list[int]:
        """What may be there without having been acknowledged."""
        return [self.new]

    def look_after(self, reports: Sequence[Report]) -> str:
        kinds = {report.outcome.split(":")[0] for report in reports}
        if len(kinds) != 1 or not kinds <= {"done", "refused"}:
            return f"the ranks tell different ends: {[report.outcome for report in reports]}"
        return ""


@dataclass(frozen=True)
class Pruning(Saving):
    """Deletes old checkpoints, an abandoned stage and old trash; two verified ones must stay."""

    ranks: int = 1
    before: tuple[int, ...] = (1, 2, 3)

    @property
    def new(self) -> int:
        return max(self.before)

    def body(self, rank: int, case: Case, shim: Shim) -> Report:
        shim.be(rank)
        engine = Forge(Path(shim.root), rank)
        for value in self.before:
            engine.save(value)
            shim.mark(value)
        stage = engine.store.create_stage(CheckpointName.new(step=9, attempt=1, launch=0))
        (stage / "rank-00000.data").write_bytes(b"half of it")
        arm(shim, rank, case, self.watch)
        # A folder that can't be listed is told; training asks again after the next save.
        left: list[str] = []
        outcome = attempt(lambda: left.extend(engine.prune(1)), (OSError, CheckpointError), ())
        shim.disarm()
        problems, found = self._go_on(engine, "done", shim)
        if left and case.strike is Strike.REPEATED:
            problems.append(f"WRONG what was deleted counts as left: {left}")
        engine.prune(2)
        left = [p.name for p in engine.store.directory.iterdir() if p.name.startswith(".")]
        if left:
            problems.append(f"BLOCKED the next prune leaves {left}")
        return Report(outcome, problems=tuple(problems), found=found)

    def look(
        self, root: Path, acked: Sequence[int], possible: Sequence[int], *, power: bool
    ) -> Look:
        found = super().look(root, acked, possible, power=power)
        store = Forge(root, 0).store
        whole = 0
        for name in store.candidates():
            try:
                store.verify_manifest(name)
                whole += 1
            except CheckpointError:
                continue
        if whole < min(2, len(acked)) and not found.wrong:
            return Look(found.value, f"{whole} verified checkpoints are left", True)
        return found


@dataclass(frozen=True)
class Resuming(Saving):
    """Reads that fail: the newest, an older one, or an error; never nothing, never a mixture."""

    before: tuple[int, ...] = (1, 2)
    watch: Watch = Watch.READS
    strikes: tuple[Strike, ...] = READS
    power: bool = False

    @property
    def new(self) -> int:
        return max(self.before)

    def body(self, rank: int, case: Case, shim: Shim) -> Report:
        shim.be(rank)
        engine = self._open(shim, rank, None)
        for value in self.before:
            engine.save(value)
            shim.mark(value)
        meet(self.ranks)
        arm(shim, rank, case, self.watch)
        found: list[int | None] = []
        outcome = attempt(
            lambda: found.append(engine.resume()), self.engine.refusal, self.engine.lost
        )
        if outcome.startswith("lost"):
            raise LostError(Report(outcome))
        try:
            disarm_together(shim, rank, self.ranks)
        except RuntimeError as error:
            raise LostError(Report(f"lost: {error}")) from error
        problems, _ = self._go_on(engine, "done", shim)
        if found and found[0] not in self.before:
            problems.append(f"WRONG a resume under the fault gives {found[0]}")
        if found and found[0] != self.new and case.strike is Strike.TORN:
            problems.append(f"WRONG a short read made it fall back to {found[0]}")
        return Report(outcome, problems=tuple(problems), found=found[0] if found else None)


def save_paths() -> list[Any]:
    """Ours."""
    return [
        Saving("save"),
        Saving("save, 2.5 MiB", big=True),
        Saving("first save", before=()),
        Saving("background + prune", background=True, prune=True, before=(1, 2)),
        Saving("background + prune, 2.5 MiB", big=True, background=True, prune=True, before=(1, 2)),
        Saving("save, 4 ranks", ranks=4),
        Pruning("prune"),
        Resuming("resume"),
        Resuming("resume, 2.5 MiB", big=True),
    ]


def dcp_paths() -> list[Any]:
    """Theirs."""
    return [
        Saving("DCP in place", engine=DcpInPlace, settled=True),
        Saving("DCP fresh folders", engine=DcpFresh, settled=True),
    ]
