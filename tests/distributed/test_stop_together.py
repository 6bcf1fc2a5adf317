"""A signal to any of the ranks at any moment: all stop at the same step, saved, and soon.

A hundred signals on gloo without Slurm.  A case holds some ranks at a gate where its moment is (in
a loader worker, before a backward for which the others wait in their all-reduce, in an evaluation,
in the middle of a save), signals some of them, and opens the gate once the conductor has asked for
the stop.  Then the run is resumed on another number of ranks: no sample is lost, none comes twice.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.core.sample_order import SampleOrder
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import (
    Gate,
    Launch,
    is_alive,
    launched,
    loader_workers_of,
    new_run,
    newest_manifest,
)
from tests.fsdp import fully_shard

pytestmark = [pytest.mark.distributed]

LENGTH, BATCH, STEPS, EVAL_EVERY = 101, 12, 18, 6
#: From the signal (from the moment the ranks can act, where they can't at once) to the last process
#: gone: less than anything that is waited for in vain, and 5 s where nothing else runs.
LIMIT_S = 30.0
CASES = 100


class Moment(str, Enum):
    """Where the held ranks are when the signal comes."""

    DATA = "in data wait"
    STUCK = "in data wait with loader workers that never answer"
    COLLECTIVE = "before a backward for which the others wait"
    EVALUATION = "in an evaluation"
    LOCKSTEP = "in an evaluation with collectives of its own"
    RANK_ZERO = "in an evaluation of rank 0 alone"
    SAVE = "in a save"
    STOP_SAVE = "in the save of the stop itself"
    BETWEEN = "between two steps, when the others are in the next one"
    FROZEN = "between two steps, with a rank that does not answer for a while"
    LAST_STEP = "in the last step"
    END = "after the last step"
    BUILD = "while the model is built"
    LOAD = "while a checkpoint is loaded"
    ANY = "anywhere"


@dataclass(frozen=True)
class Case:
    number: int
    moment: Moment
    ranks: int
    held: tuple[int, ...]
    hit: tuple[int, ...]
    step: int
    workers: int
    signal: signal.Signals
    everything: bool
    parallel: str
    probing: bool
    micro_batch: int | None
    resumed_on: int
    delay: float
    save_every: int
    pace: float

    @property
    def frozen(self) -> int:
        """The rank that is stopped for a while: not the only one that is signalled."""
        return next(r for r in (*range(self.ranks), 0) if (r,) != self.hit)

    def __str__(self) -> str:
        return f"{self.number}-{self.moment.name.lower()}-{self.ranks}"


def make_case(number: int) -> Case:
    """Case ``number``, the same one every time."""
    choose = random.Random(f"stop together {number}")
    moment = list(Moment)[number % len(Moment)]
    ranks = choose.choice((2, 2, 3, 4) if number >= len(Moment) else (2, 2, 2, 3))
    some = [rank for rank in range(ranks) if choose.random() < 0.5] or [choose.randrange(ranks)]
    if moment in (Moment.STUCK, Moment.FROZEN):
        some = list(range(ranks))
    if moment is Moment.EVALUATION and (number < len(Moment) or number % 2):
        some = list(range(ranks))
    if moment is Moment.BETWEEN:
        some = some[:-1] or some  # at least one is ahead
    if moment is Moment.RANK_ZERO:
        some = [0]
    step = choose.randrange(2, STEPS - 2)
    if moment in (Moment.EVALUATION, Moment.LOCKSTEP, Moment.RANK_ZERO):
        step = choose.choice([s for s in range(1, STEPS) if s % EVAL_EVERY == 0])
    if moment in (Moment.BETWEEN, Moment.FROZEN):
        # Behind it neither a save nor an evaluation: there ranks wait for each other anyway.
        step = choose.choice([s for s in range(2, STEPS - 3) if (s + 1) % 5 and (s + 1) % 6])
    if moment in (Moment.LAST_STEP, Moment.END):
        step = STEPS - (moment is Moment.LAST_STEP)
    if moment in (Moment.SAVE, Moment.LOAD):
        step = choose.choice((5, 10))
    workers = choose.choice((0, 1, 2))
    if moment in (Moment.DATA, Moment.STUCK):
        workers = choose.choice((1, 2))
        step = choose.randrange(2, LENGTH // BATCH)  # in the first epoch: an index comes once
    return Case(
        number=number,
        moment=moment,
        ranks=ranks,
        held=tuple(some),
        hit=tuple(sorted(choose.sample(range(ranks), choose.randint(1, ranks)))),
        step=step,
        workers=workers,
        signal=choose.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)),
        everything=choose.random() < 0.3,
        parallel=choose.choice(("ddp", "ddp", "fsdp2")),
        probing=choose.random() < 0.3,
        micro_batch=choose.choice((None, 1, 2)),
        resumed_on=choose.choice((1, 2, 3, 4)),
        delay=choose.random() * 0.1,
        save_every=choose.choice((5, 6)) if moment is Moment.END else 5,
        pace=0.01 if moment is Moment.ANY else 0.0,
    )


class Data(torch.utils.data.Dataset):
    """Samples that depend on their index; some of them come when the gate opens."""

    def __init__(self, stay: Callable[[], None] = lambda: None, blocked: Any = ()) -> None:
        self._stay, self._blocked = stay, frozenset(blocked)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self._blocked:
            self._stay()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), index % 3


class Pausing:
    """An object with a state, at whose saving and loading something happens."""

    def __init__(self, saved: Callable[[], None], loaded: Callable[[], None]) -> None:
        self._saved, self._loaded = saved, loaded

    def state_dict(self) -> dict[str, Any]:
        self._saved()
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded()


class Gates:
    """Where the ranks of a case are held: ``first`` at its moment, ``second`` in the stop."""

    def __init__(self) -> None:
        self.first, self.second = Gate(), Gate()

    def close(self) -> None:
        self.first.close()
        self.second.close()


def program(case: Case, gates: Gates | None = None) -> Callable[[forge.Run], None]:
    """The training of a case; without gates nobody is held."""

    def train(run: forge.Run) -> None:
        held = gates is not None and run.rank in case.held
        choose = random.Random(f"{case.number} {run.rank}")

        def pass_by(*moments: Moment) -> None:
            time.sleep(choose.random() * case.pace)
            if held and case.moment in moments:
                gates.first.wait(run.rank)

        def saved() -> None:
            if run.step_number == case.step:
                pass_by(Moment.SAVE)
            if held and case.moment is Moment.STOP_SAVE and run.step_number == case.step + 1:
                gates.second.wait(run.rank)

        torch.manual_seed(1)
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        if run.world_size > 1:
            wrap = fully_shard if case.parallel == "fsdp2" else DistributedDataParallel
            model = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        pass_by(Moment.BUILD)
        pausing = Pausing(saved, lambda: pass_by(Moment.LOAD))
        run.register(model=model, optimizer=optimizer, pausing=pausing)
        notes = Notes(run)

        def compute_loss(micro: Any) -> torch.Tensor:
            if run.step_number == case.step:
                pass_by(Moment.COLLECTIVE, Moment.LAST_STEP)
            return F.cross_entropy(model(micro[0]), micro[1])

        data = Data()
        if held and case.moment in (Moment.DATA, Moment.STUCK):
            order = SampleOrder(0, LENGTH, BATCH)
            mine = order.steps(case.step * BATCH, 1, rank=run.rank, ranks=run.world_size)[0]
            data = Data(lambda: gates.first.wait(run.rank), [mine[0][1]])
        for batch in run.batches(
            data,
            global_batch_size=BATCH,
            micro_batch_size=case.micro_batch,
            num_workers=case.workers,
            until=forge.Steps(STEPS),
        ):
            step = run.step_number
            alone = case.moment is Moment.RANK_ZERO
            if run.due("eval", every=EVAL_EVERY) and (run.rank == 0 or not alone):
                with run.phase("eval"):
                    evaluate(run, case, pass_by)
                notes.evaluated(step)
            if step == case.step:
                pass_by(Moment.STOP_SAVE)
                if held and case.moment is Moment.ANY:
                    gates.first.tell(run.rank)
            run.train_step(batch, compute_loss, max_norm=1.0)
            notes.trained(step, batch.sample_ids)
            if step == case.step:
                pass_by(Moment.BETWEEN)
                if held and case.moment is Moment.FROZEN:
                    stay_or_freeze(case, gates, run.rank)
        pass_by(Moment.END)

    return train


def stay_or_freeze(case: Case, gates: Gates, rank: int) -> None:
    """The one that freezes stays when the others go on."""
    if rank == case.frozen:
        gates.first.tell(rank)
        gates.second.wait(rank)
    else:
        gates.first.wait(rank)


def evaluate(run: forge.Run, case: Case, pass_by: Callable[..., None]) -> None:
    """Polls, each rank as often as it likes unless there are collectives in between."""
    together = case.moment is Moment.LOCKSTEP and run.world_size > 1
    more = 0 if together else run.rank
    for number in range(12 + 5 * more):
        run.poll()
        if number == 4 + 2 * more and run.step_number == case.step:
            pass_by(Moment.EVALUATION, Moment.LOCKSTEP, Moment.RANK_ZERO)
        torch.rand(1)
        if together:
            dist.all_reduce(torch.ones(1))


class Notes:
    """What each rank did, on disk: the oracle of "each sample once"."""

    def __init__(self, run: forge.Run) -> None:
        self._file = (run.directory / f"notes-{run.attempt}-{run.rank}.jsonl").open("a")

    def trained(self, step: int, samples: Any) -> None:
        self._write(["trained", step, [list(sample) for sample in samples]])

    def evaluated(self, step: int) -> None:
        self._write(["evaluated", step, []])

    def _write(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()


def read_notes(run: RunDirectory, what: str, who: str = "*") -> Iterator[tuple[int, list[Any]]]:
    for file in run.path.glob(f"notes-*-{who}.jsonl"):
        for line in file.read_text().splitlines():
            kind, step, samples = json.loads(line)
            if kind == what:
                yield step, [tuple(sample) for sample in samples]


def in_place(case: Case, launch: Launch, gates: Gates) -> None:
    """Wait until the case's moment has come: for the held ranks and for all others."""
    launch.at(gates.first, len(case.held))
    if case.moment in (Moment.BUILD, Moment.LOAD):
        return
    if case.moment is Moment.ANY:
        launch.until(launch.has_begun, "the first step")
        threading.Event().wait(case.delay)  # for nothing in particular: to come at any time
        return
    here, elsewhere = PHASES.get(case.moment, ("train", "train"))
    others = [rank for rank in range(case.ranks) if rank not in case.held]
    # The position that is said is the last boundary passed: of those between two steps, the first.
    launch.until(lambda: launch.doing(here, case.held, case.step), here)
    ahead = case.step + (case.moment is Moment.BETWEEN)
    launch.until(lambda: launch.doing(elsewhere, others, ahead), elsewhere)


#: What the held ranks and the others say that they are doing where it is not training.  Others have
#: left an evaluation, or wait for data, that has no collectives, and wait in the next all-reduce;
#: after the last step they wait in the final check, which comes before the last save.
PHASES = {
    Moment.DATA: ("data", "train"),
    Moment.STUCK: ("data", "data"),
    Moment.EVALUATION: ("eval", "train"),
    Moment.LOCKSTEP: ("eval", "eval"),
    Moment.RANK_ZERO: ("eval", "train"),
    Moment.SAVE: ("save", "save"),
}


#: Of every moment the first case, except those that another one covers but for who waits for whom.
REPRESENTATIVES = {
    number
    for number, moment in enumerate(Moment)
    if moment not in (Moment.LOCKSTEP, Moment.FROZEN, Moment.ANY)
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            make_case(number),
            id=str(make_case(number)),
            marks=() if number in REPRESENTATIVES else pytest.mark.slow,
        )
        for number in range(CASES)
    ],
)
@pytest.mark.core
def test_all_stop_at_the_same_step(case: Case, tmp_path: Path) -> None:
    print(case)
    run = new_run(
        tmp_path,
        checkpoint={"every_steps": case.save_every, "every_minutes": None, "keep_last": 100},
        probe={"enabled": case.probing, "every": "0.2s", "deadline": "20s"},
    )
    if case.moment is Moment.LOAD:
        stop_at(run, case, case.step)
    before, gates = newest_manifest(run), Gates()
    with launched(run, case.ranks, program(case, gates)) as launch:
        in_place(case, launch, gates)
        workers = [pid for rank in launch.group.pids for pid in loader_workers_of(rank)]
        if case.moment not in (Moment.BUILD, Moment.LOAD, Moment.END, Moment.ANY):
            assert len(workers) == case.ranks * case.workers
        if case.moment is Moment.FROZEN:
            launch.freeze(case.frozen)
        for rank in case.hit:
            launch.kill(rank, case.signal, everything=case.everything)
        began = time.monotonic()
        if case.moment is Moment.FROZEN:
            go_on_without(launch, case, gates)
        launch.heard()
        if case.moment is Moment.FROZEN:
            gates.second.open()
        if case.moment is not Moment.STUCK:
            gates.first.open()
            began = time.monotonic()
        if case.moment is Moment.STOP_SAVE:
            launch.at(gates.second, len(case.held))
            for rank in case.hit:
                launch.kill(rank, case.signal, everything=case.everything)
            gates.second.open()
    gates.close()
    took = launch.gone - began
    print(f"gone after {took:.2f} s")

    assert took < LIMIT_S
    assert not [pid for pid in workers if is_alive(pid)]
    if case.moment in (Moment.BUILD, Moment.LOAD):
        assert set(launch.exitcodes) == {1}, "nothing was computed: they leave at once"
        assert newest_manifest(run) == before
    else:
        check_stop(case, launch)
    if not run.is_done():
        assert launch.decision is not None and launch.decision.action is Action.REQUEUE
        with launched(run, case.resumed_on, program(case)) as resumed:
            pass
        assert {told.outcome for told in resumed.told} == {RankOutcome.FINISHED}
    check_samples(run)


def go_on_without(launch: Launch, case: Case, gates: Gates) -> None:
    """The others come to a boundary while one of them can't say where it is; then it can."""
    number = launch.asked_to_stop()
    launch.until(lambda: launch.hub.unanswered(number) == (case.frozen,), "all answers but one")
    gates.first.open()
    members, others = launch.hub.members, [r for r in range(case.ranks) if r != case.frozen]
    since: list[float] = []

    def have_waited() -> bool:
        if not all(members()[r].phase == "train" for r in others):
            since.clear()
            return False
        since.append(time.monotonic())
        return since[-1] - since[0] > 0.2

    launch.until(have_waited, "the others' waiting")
    launch.kill(case.frozen, signal.SIGCONT)


def stop_at(run: RunDirectory, case: Case, step: int) -> None:
    """A first attempt that is stopped by hand after ``step`` steps."""
    case, gates = replace(case, moment=Moment.COLLECTIVE, held=(0,), step=step - 1), Gates()
    with launched(run, case.ranks, program(case, gates)) as launch:
        launch.at(gates.first, 1)
        launch.stop_together()
        gates.first.open()
    gates.close()
    assert {told.step for told in launch.told} == {step}


def check_stop(case: Case, launch: Launch) -> None:
    told = launch.told
    steps = {each.step for each in told}
    assert len(steps) == 1, f"ranks stopped at different steps: {told}"
    step = steps.pop()
    assert all(each.children == () for each in told), "a rank left loader workers behind"
    manifest = newest_manifest(launch.run)
    assert manifest is not None and manifest.name.step == step
    outcomes = {each.outcome for each in told}
    if case.moment is Moment.END:
        assert outcomes == {RankOutcome.FINISHED} and step == STEPS
        assert launch.run.is_done()
        return
    if case.moment is Moment.ANY and outcomes == {RankOutcome.FINISHED}:
        assert step == STEPS
        return
    assert outcomes == {RankOutcome.STOPPED}
    assert launch.facts is not None
    assert launch.facts.stopped_at == step
    assert launch.facts.checkpoint == str(manifest.name)
    assert launch.facts.failures == () and launch.facts.lost == ()
    if case.moment in (Moment.STUCK, Moment.LOCKSTEP):
        assert step == case.step
    elif case.moment in (Moment.DATA, Moment.EVALUATION):
        assert step == case.step + (len(case.held) < case.ranks)
    elif case.moment is not Moment.ANY:
        assert step == case.step + 1 + (case.moment is Moment.BETWEEN)


def check_samples(run: RunDirectory) -> None:
    """Every step's samples are those of the order, and every one was trained on once."""
    order = SampleOrder(0, LENGTH, BATCH)
    trained: dict[int, list[Any]] = {}
    for step, samples in read_notes(run, "trained"):
        trained.setdefault(step, []).extend(samples)
    assert {step: sorted(found) for step, found in trained.items()} == {
        step: sorted(order.indices(step * BATCH, BATCH)) for step in range(STEPS)
    }
    finished = Counter(step for step, _ in read_notes(run, "evaluated", "0"))
    assert finished == {step: 1 for step in range(1, STEPS) if step % EVAL_EVERY == 0}


def stuck(gate: Gate, then: Callable[[forge.Run], None]) -> Callable[[forge.Run], None]:
    """Rank 0 waits for loader workers that never answer, the others come to ``then``."""

    def train(run: forge.Run) -> None:
        model = DistributedDataParallel(nn.Linear(8, 3))
        run.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), fused=True))
        blocked = range(LENGTH) if run.rank == 0 else ()
        data = Data(lambda: gate.wait(run.rank), blocked)
        for batch in run.batches(
            data, global_batch_size=BATCH, num_workers=2, until=forge.Steps(STEPS)
        ):
            then(run)
            run.train_step(batch, lambda micro: F.cross_entropy(model(micro[0]), micro[1]))

    return train


@pytest.mark.parametrize("what", ["a rank fails", "a rank is killed", "the supervisor is gone"])
@pytest.mark.core
def test_a_launch_that_is_over_leaves_nothing_behind(what: str, tmp_path: Path) -> None:
    """Ranks in a collective or with stuck loader workers are gone at once, their workers too."""
    run, gate, failing = new_run(tmp_path), Gate(), Gate()

    def then(run: forge.Run) -> None:
        if what == "a rank fails" and run.rank == 2:
            failing.wait(2)
            raise RuntimeError("on purpose")

    with launched(run, 3, stuck(gate, then), exits=True) as launch:
        launch.at(gate, 2)
        if what == "a rank fails":
            launch.at(failing, 1)
        launch.until(lambda: launch.doing("data", [0], 0), "the data wait")
        launch.until(lambda: launch.doing("train", [1, 2], 0), "the collective")
        workers: list[int] = []

        def are_there() -> bool:
            workers[:] = [pid for rank in launch.group.pids for pid in loader_workers_of(rank)]
            return len(workers) == 6

        launch.until(are_there, "two loader workers of each rank")
        match what:
            case "a rank fails":
                failing.open()
            case "a rank is killed":
                launch.kill(2, signal.SIGKILL)
            case _:
                launch.hub.close()
        launch.gone_within([*launch.group.pids, *workers], LIMIT_S)
    assert newest_manifest(run) is None


def test_stuck_loader_workers_do_not_keep_a_stopped_run_from_ending(tmp_path: Path) -> None:
    run, gate = new_run(tmp_path), Gate()

    def train(run: forge.Run) -> None:
        run.register(model=nn.Linear(8, 3))
        data = Data(lambda: gate.wait(run.rank), range(LENGTH))
        next(iter(run.batches(data, global_batch_size=4, num_workers=2, until=forge.Steps(9))))

    with launched(run, 2, train, exits=True) as launch:
        launch.at(gate, 4)
        launch.until(lambda: launch.doing("data", [0, 1], 0), "the data wait")
        workers = [pid for rank in launch.group.pids for pid in loader_workers_of(rank)]
        launch.kill(0, signal.SIGTERM, everything=True)
        launch.gone_within([*launch.group.pids, *workers], LIMIT_S)
    assert launch.exitcodes == [0, 0]
    assert launch.facts is not None and launch.facts.stopped_at == 0
    manifest = newest_manifest(run)
    assert manifest is not None and manifest.name.step == 0
