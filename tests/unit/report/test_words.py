"""What the reports say of runs whose every step is known, in many kinds of interruption.

A play trains, saves and is struck, and writes what the supervisor and rank 0 of a real run would
have been able to write; the claims of the reports are held against what the play really did.  On a
real Slurm ``tests/slurm/truth`` does the same.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.report.story.queue_reason import QueueAnswer
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.slurm.truth.words import Claim, Deeds, Told, claims, what_is_told
from tests.unit.report.journals import Scribe

JOB = 8812301
TOTAL = 60
EVERY = 10
#: As rank 0 writes it: far less often than there are steps.
PROGRESS_EVERY = 5
FULL = (
    "no room for a checkpoint of 4310K: 1200K free\n  Make room, or keep fewer "
    "(checkpoint.keep_last, slurm-forge checkpoints prune). Training continues, and the next save "
    "tries again."
)


class When(Enum):
    """After how many steps it is struck: before any, between saves, at one, and two in a row."""

    FIRST = (0,)
    BETWEEN = (17,)
    AT_SAVE = (20,)
    TWICE = (17, 38)


class Fails(Enum):
    """What fails beside it."""

    NOTHING = "nothing"
    LAST_SAVE = "the save at the end"
    EVERY_SAVE = "every save after the first"
    #: Ranks and supervisor are gone before a line of it is written.
    WORDS = "everybody's last words"


class After(Enum):
    """What becomes of it."""

    GOES_ON = "goes on and finishes"
    LEFT = "the job is over by Slurm's record"


#: Who wants it to stop lets the ranks agree; else they are gone, and only heartbeats tell.
ASKED = {
    Cause.PREEMPTED: Action.REQUEUE,
    Cause.TIME_LIMIT: Action.REQUEUE,
    Cause.ADMIN_REQUEUE: Action.REQUEUE,
    Cause.USER_CANCELLED: Action.STOP,
}
DIES = {
    Cause.CRASH: Action.RELAUNCH,
    Cause.HOST_OOM: Action.REQUEUE,
    Cause.NODE_FAIL: Action.REQUEUE,
    Cause.APP_ERROR: Action.RELAUNCH,
}


@dataclass
class Play:
    """A run, and what it really does."""

    scribe: Scribe
    #: (attempt, launch) and step of every step that was computed.
    done: list[tuple[int, int, int]] = field(default_factory=list)
    step: int = 0
    saved: int | None = None
    failing: int = 0
    failed: int = 0
    launches: int = 0
    causes: list[Cause] = field(default_factory=list)
    struck: set[str] = field(default_factory=set)

    def begin(self, *, trains: bool = True) -> None:
        self.scribe.later(5).begin("n01", "n02", job=str(JOB))
        self.launches += 1
        if trains:
            self._resume()

    def relaunch(self) -> None:
        self.scribe.relaunch()
        self.launches += 1
        self._resume()

    def _resume(self) -> None:
        self.step = self.saved or 0
        self.scribe.resume(self.step)

    def train(self, last: int, *, saves: bool = True) -> None:
        while self.step < last:
            self._compute()
            if self.step % PROGRESS_EVERY == 1:
                self.scribe.write("rank0", ev.Progress(step=self.step))
            if self.step % EVERY == 0:
                self.save(works=saves or self.saved is None)

    def _compute(self) -> None:
        self.step += 1
        self.scribe.later(1)
        self.done.append((self.scribe.attempt, self.scribe.launch, self.step))

    def save(self, *, works: bool, reason: str = "every_steps") -> None:
        if works:
            self.scribe.save(self.step, reason=reason)
            self.saved, self.failing = self.step, 0
        else:
            self.scribe.write("rank0", ev.CheckpointFailed(step=self.step, reason=FULL))
            self.failing += 1
            self.failed += 1

    def strike(self, cause: Cause, fails: Fails) -> None:
        """The launch ends of it, with the words that somebody was left to write."""
        if fails is Fails.WORDS:
            return
        self.causes.append(cause)
        action = ASKED.get(cause) or DIES[cause]
        if cause in ASKED:
            self.scribe.write("supervisor", ev.NoticeSeen(what="SIGTERM", source="rank 1"))
            if self.step:
                self._compute()
                self.scribe.write("supervisor", ev.StopAgreed(step=self.step, seconds=0.01))
                works = fails is Fails.NOTHING or (fails is Fails.EVERY_SAVE and self.saved is None)
                self.save(works=works, reason="stop")
            self.scribe.incident(cause, action, step=self.step or None, text="PreemptTime=…")
            return
        # A rank that raises says where; of one that is killed the last heartbeat is known.
        exact = cause is Cause.APP_ERROR
        heard = None if not self.step else self.step if exact else max(self.step - 3, 0)
        self.scribe.incident(cause, action, step=heard, exact=exact)
        if cause in (Cause.CRASH, Cause.NODE_FAIL, Cause.HOST_OOM):
            self.struck.add("n01")
            self.scribe.struck("n01", until=None)

    def come_back(self, cause: Cause, fails: Fails) -> None:
        if fails is Fails.WORDS:
            self.causes.append(Cause.NODE_FAIL)
            self.scribe.found_out(Cause.NODE_FAIL, Action.REQUEUE)
            self.scribe.later(30)
            self.begin()
        elif DIES.get(cause) is Action.RELAUNCH:
            self.relaunch()
        else:
            self.scribe.requeued(str(JOB))
            self.scribe.later(60)
            self.begin()

    def deeds(self, state: JobState, *, finished: bool) -> Deeds:
        steps = [step for _, _, step in self.done]
        return Deeds(
            causes=tuple(self.causes),
            repeated=len(steps) - len(set(steps)),
            furthest=self.step or None,
            starts=self.scribe.attempt,
            launches=self.launches,
            state=state,
            finished=finished,
            blamed=frozenset(self.struck),
            checkpoint=self.saved,
            failing=self.failing,
            failed_saves=self.failed,
        )


def by_slurm(state: JobState) -> QueueAnswer:
    record = JobRecord(
        job_id=JOB, name="x", state=state, state_text=state.value, exit_code=(0, 9), reason="None"
    )
    return QueueAnswer(str(JOB), record)


def performed(scribe: Scribe, cause: Cause, when: When, fails: Fails, after: After) -> Play:
    play = Play(scribe)
    scribe.submitted(str(JOB))
    play.begin(trains=when is not When.FIRST)
    for number, last in enumerate(when.value):
        if number:
            play.come_back(cause, fails)
        play.train(last, saves=fails is not Fails.EVERY_SAVE)
        scribe.later(2)
        play.strike(cause, fails)
    if after is After.GOES_ON and cause is not Cause.USER_CANCELLED:
        play.come_back(cause, fails)
        play.train(TOTAL)
        scribe.finish(TOTAL)
    elif fails is not Fails.WORDS:
        scribe.end("cancelled" if cause is Cause.USER_CANCELLED else "over")
    scribe.later(60)
    return play


CELLS = [
    (cause, when, fails, after)
    for cause in (*ASKED, *DIES)
    for when in When
    for fails in Fails
    for after in After
    # Nothing can be saved, and nothing can fail to be saved, before the first step.
    if not (when is When.FIRST and fails in (Fails.LAST_SAVE, Fails.EVERY_SAVE))
    # A save that fails at the end is one that somebody has asked for.
    if not (fails is Fails.LAST_SAVE and cause in DIES)
    if not (cause is Cause.USER_CANCELLED and when is When.TWICE)
    if not (cause is Cause.USER_CANCELLED and after is After.GOES_ON)
]


def every_pair() -> list[tuple[Cause, When, Fails, After]]:
    """Some of the cells, in which each value of one column meets all it can of the others."""
    chosen, met = [], set[tuple[object, object]]()
    for cell in CELLS:
        pairs = set(itertools.combinations(cell, 2))
        if not pairs <= met:
            met |= pairs
            chosen.append(cell)
    return chosen


EVERY_PAIR = every_pair()


def told_of(
    folder: Path, cause: Cause, when: When, fails: Fails, after: After
) -> tuple[Told, tuple[Claim, ...]]:
    play = performed(Scribe(folder), cause, when, fails, after)
    finished = play.scribe.run.is_done()
    state = JobState.COMPLETED if finished else JobState.FAILED
    if cause is Cause.USER_CANCELLED:
        state = JobState.CANCELLED
    facts = replace(play.scribe.facts(total=TOTAL), queue=by_slurm(state))
    told = what_is_told(facts)
    return told, claims(told, play.deeds(state, finished=finished))


def test_there_are_enough_cells() -> None:
    assert len(CELLS) >= 100


@pytest.mark.parametrize(
    ("cause", "when", "fails", "after"),
    [pytest.param(*cell, marks=() if cell in EVERY_PAIR else [pytest.mark.slow]) for cell in CELLS],
    ids=["-".join([c.value, w.name, f.name, a.name]).lower() for c, w, f, a in CELLS],
)
def test_what_is_told_is_what_was_done(
    tmp_path: Path, cause: Cause, when: When, fails: Fails, after: After
) -> None:
    told, made = told_of(tmp_path, cause, when, fails, after)
    wrong = [str(claim) for claim in made if not claim.holds]
    assert wrong == [], f"{told.screen}\n{told.text}"
    assert len(made) >= 10
