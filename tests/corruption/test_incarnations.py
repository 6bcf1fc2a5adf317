"""An old incarnation that is still alive beside a new one, in hundreds of interleavings.

What is promised: after a newer claim an incarnation publishes and prunes nothing.  Between its last
look at the claims and the rename there is no other call, but no file system can make the two one:
at most that one rename may still come through.  What then holds is asserted, too: names of two
attempts never meet, nothing of the newer one is displaced or deleted, and whoever resumed has
listed what there was before.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import warnings
from collections import Counter

import pytest
import torch

from slurm_forge.checkpoint.read.load import resume
from slurm_forge.errors import CheckpointError, FencedError
from slurm_forge.run_directory import Fence, RunDirectory, claim_attempt, list_claims
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import STAGE_PREFIX, TRASH_PREFIX, CheckpointName
from tests.corruption.clockwork import Actor, Clockwork
from tests.corruption.contents import memory_directory
from tests.unit.checkpoint.helpers import save, value_of, weights

SAVES = 3
KEEP = 2


class World:
    """One run directory, and the incarnations that train it."""

    def __init__(self, folder):
        self.run = RunDirectory.at(folder / "run")
        self.run.create(b"name: run\n")
        self.clockwork = Clockwork()
        self.attempts = {}
        self.zombies = []
        self.resumed = {}

    def claim(self, host):
        return claim_attempt(
            self.run, job="1", restart_count=0, host=host, pid=1, nodes=[host], time=0.0
        ).attempt

    def store(self):
        return CheckpointStore(self.run.checkpoints, "run")

    def fence(self, attempt):
        asked = Fence(self.run, attempt)

        def fence():
            try:
                asked()
            except FencedError:
                self.clockwork.note("fenced")
                raise
            self.clockwork.note("may", attempt)

        return fence

    def incarnation(self, name, attempt=None):
        """Claim, resume, then save and prune some times: what every attempt of a run does."""

        def program(actor):
            mine = self.attempts[name] = attempt or self.claim(name)
            store, fence = self.store(), self.fence(mine)
            step = self.go_on(store, mine)
            for _ in range(SAVES):
                step += 1
                save(store, weights(worth(step, mine)), step, mine, fence=fence)
                store.prune(lambda found: found[:KEEP], fence, current=(mine, 1))

        return Actor(name, program)

    def go_on(self, store, attempt):
        """Resume as a program does; the step."""
        target = weights(-1.0)
        loaded = resume(store, target, group=None, on_reject=lambda *_: None)
        if loaded is None:
            return 0
        name = loaded.manifest.name
        assert value_of(target) == loaded.extra["value"] == worth(name.step, name.attempt)
        self.resumed[attempt] = name
        return name.step


def worth(step, attempt):
    """The number that a checkpoint holds: it tells which one it is."""
    return float(1000 * attempt + step)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():  # paused in the middle of a load, filters come back in disorder
        yield
    torch.set_num_threads(before)


@pytest.fixture
def worlds(tmp_path):
    """As many fresh worlds as asked for."""
    folder = memory_directory(tmp_path)
    made = []

    def make():
        made.append(World(folder / f"world-{len(made)}"))
        return made[-1]

    yield make
    shutil.rmtree(folder, ignore_errors=True)


def judge(world, actors):
    """Everything that holds after any interleaving; what was late, by kind."""
    late = Counter()
    highest = max(world.attempts.values())
    claimed, allowed = 0, {}
    happenings = world.clockwork.happenings
    for happening in happenings:
        attempt = world.attempts.get(happening.actor, 0)
        source, _, target = happening.detail.partition(" -> ")
        if happening.what == "link" and target.removesuffix(".json").isdecimal():
            claimed = int(target.removesuffix(".json"))
        elif happening.what == "may":
            assert claimed <= attempt, "it was let pass after the newer claim"
            allowed[happening.actor] = True
        elif happening.what == "fenced":
            assert claimed > attempt
        elif happening.what == "rename":
            assert allowed.pop(happening.actor, False), "a rename without a look at the claims"
            kind = "prune" if target.startswith(TRASH_PREFIX) else "publish"
            name = CheckpointName.parse(source if kind == "prune" else target)
            assert name.attempt <= attempt if kind == "prune" else name.attempt == attempt
            if claimed > attempt:
                late[happening.actor, kind] += 1
        elif happening.what != "link":
            # Whatever else is called in between would make the window longer.
            allowed.pop(happening.actor, None)
    assert all(count <= 1 for count in late.values()), late
    assert len({actor for actor, _ in late}) == len(late), "one rename in the window, no more"

    store = world.store()
    by_attempt = {world.attempts.get(actor.name): actor for actor in actors}
    for attempt, actor in by_attempt.items():
        if attempt == highest:
            assert actor.error is None, f"the newest incarnation failed: {actor.error!r}"
        elif actor.error is not None:
            assert isinstance(actor.error, FencedError | CheckpointError), repr(actor.error)
    mine = [name for name in store.candidates() if name.attempt == highest]
    first = world.resumed[highest].step if highest in world.resumed else 0
    # Its last ones are there; the first made room by its own wish.
    assert [name.step for name in mine][:KEEP] == [first + SAVES, first + SAVES - 1][: len(mine)]
    assert mine
    for name in mine:
        store.verify_manifest(name)

    # An old incarnation that comes to itself now does nothing at all.
    before = sorted(path.name for path in store.directory.iterdir())
    for attempt in world.attempts.values():
        if attempt < highest:
            fence = Fence(world.run, attempt)
            with pytest.raises(FencedError):
                save(store, weights(0.0), 999, attempt, fence=fence)
            with contextlib.suppress(FencedError):  # not asked where there is nothing to delete
                store.prune([], fence, current=(attempt, 1))
    assert sorted(path.name for path in store.directory.iterdir()) == before

    # The next one finds a whole one, of the higher attempt where two are of one step.
    following = world.claim("next")
    world.go_on(store, following)
    found = world.resumed[following]
    assert found.step >= first + SAVES
    assert found.attempt == max(n.attempt for n in store.candidates() if n.step == found.step)
    store.prune(lambda names: names, Fence(world.run, following), current=(following, 1))
    left = [p.name for p in store.directory.iterdir() if p.name.startswith((STAGE_PREFIX, ".tr"))]
    assert left == [], "what old incarnations began is swept"
    if found.attempt < highest:
        late["resumed later"] += 1
    return late


def play(world, actors, schedule):
    """Let the actors go on as ``schedule`` (asked with those that are not done) chooses."""
    with world.clockwork.active() as clockwork:
        for actor in actors:
            clockwork.start(actor)
        while waiting := [actor for actor in actors if not actor.done]:
            clockwork.step(schedule(waiting))
    return judge(world, actors)


def one_before(world, saves=2):
    """The first attempt has been there for a while."""
    attempt = world.claim("first")
    store = world.store()
    for step in range(1, saves + 1):
        save(store, weights(worth(step, attempt)), step, attempt)
    return world.incarnation("old", attempt)


#: How far the new one gets while the old one stands still.
FAR = {
    "has claimed": lambda world, new: len(list_claims(world.run)) == 2,
    "has resumed": lambda world, new: 2 in world.resumed,
    "has saved": lambda world, new: any(n.attempt == 2 for n in world.store().candidates()),
    "has ended": lambda world, new: new.done,
}


@pytest.mark.parametrize("far", FAR)
def test_the_new_one_comes_between_any_two_calls_of_the_old_one(worlds, far):
    """The old one stands still at each of its calls in turn, comes back, and trains to its end."""
    seen, at = Counter(), 0
    while True:
        world = worlds()
        old, new = one_before(world), world.incarnation("new")

        def schedule(waiting, at=at, world=world, old=old, new=new):
            first = old if old.steps < at or FAR[far](world, new) else new
            return first if first in waiting else waiting[0]

        seen += play(world, [old, new], schedule)
        if old.steps <= at:
            break
        at += 2 if far == "has ended" else 1
    assert at > 80
    if far == "has ended":
        # What it had begun was swept away meanwhile: even the window is closed.
        assert not seen
    else:
        assert seen["old", "publish"] > 0 and seen["old", "prune"] > 0, seen


def test_the_old_one_comes_between_any_two_calls_of_the_new_one(worlds):
    at, ended = 0, Counter()
    while True:
        world = worlds()
        old, new = one_before(world), world.incarnation("new")
        play(world, [old, new], lambda waiting, at=at: (
            waiting[-1] if waiting[-1].name == "old" or waiting[-1].steps < at else waiting[0]
        ))  # fmt: skip
        ended[type(old.error)] += 1
        if new.steps <= at:
            break
        at += 2
    assert at > 80
    assert ended[FencedError] > 25 and ended[type(None)] > 0, ended


@pytest.mark.parametrize("count", [2, 3])
def test_any_interleaving(worlds, count):
    """Seeded schedules of bursts, so that each gets far into what another has just begun."""
    seen = Counter()
    for seed in range(60):
        dice, world = random.Random(seed), worlds()
        actors = [one_before(world, saves=dice.randrange(4))]
        actors += [world.incarnation(f"new-{number}") for number in range(1, count)]
        burst = []

        def schedule(waiting, dice=dice, burst=burst):
            if not burst or burst[0] not in waiting:
                burst[:] = [dice.choice(waiting)] * dice.choice([1, 1, 2, 3, 5, 8, 13, 21, 34])
            return burst.pop()

        seen += play(world, actors, schedule)
        assert len(list_claims(world.run)) == count + 1
    if count == 3:
        assert sum(seen.values()) > 0, "the window was never hit: these schedules prove little"


def test_a_late_checkpoint_is_not_seen_by_who_resumed_before(worlds):
    """A resume decides by what it listed first: what comes up meanwhile changes nothing."""
    world = worlds()
    store = world.store()
    attempt = world.claim("old")
    for step in (1, 2):
        save(store, weights(worth(step, attempt)), step, attempt)
    newest = max(store.candidates())
    shard = store.path(newest) / "rank-00000.data"
    shard.write_bytes(bytes(shard.stat().st_size))
    rejected = []

    def late(name, why):
        rejected.append(name)
        save(store, weights(worth(3, attempt)), 3, attempt)

    world.claim("new")
    target = weights(-1.0)
    loaded = resume(store, target, group=None, on_reject=late)
    assert (loaded.manifest.step, rejected) == (1, [newest])
    assert max(store.candidates()).step == 3


def test_at_the_same_step_the_higher_attempt_counts_whoever_was_later(worlds):
    world = worlds()
    store = world.store()
    for attempt in (2, 1):
        save(store, weights(worth(5, attempt)), 5, attempt)
    world.go_on(store, 3)
    assert world.resumed[3].attempt == 2


def test_a_stage_that_the_new_one_swept_is_never_published(worlds):
    world = worlds()
    store = world.store()
    first, second = world.claim("old"), world.claim("new")
    save(store, weights(worth(1, second)), 1, second)

    def fence():
        # It had looked at the claims before; then it was gone for long.
        store.prune([], Fence(world.run, second), current=(second, 1))

    with pytest.raises(CheckpointError):
        save(store, weights(worth(9, first)), 9, first, fence=fence)
    assert [name.attempt for name in store.candidates()] == [second]
