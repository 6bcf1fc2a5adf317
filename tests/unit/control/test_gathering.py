"""Agreement as a pure game: ranks, a hub, and messages that may take any time.

The ranks run the same program of boundaries, phases, polls and collectives.  A scheduler decides
at every turn who moves and which message arrives.  Whatever it does: a request is acted on by every
rank at the same place in its order of collectives, or by none, and nobody waits for ever.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.gathering import SETTLE_S, RankAgreement, RankPosition, RequestAnswers
from slurm_forge.control.messages.hub import Request, RequestKind, RequestTarget
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import PositionReport
from slurm_forge.vocabulary.position import LAST, Position


@dataclass(frozen=True)
class Pass:
    """Come by a position.  ``polls``: only while something is pending, as a waiting loop does."""

    position: Position
    path: str = ""
    entering: bool = False
    only_if_pending: bool = False
    leaving: bool = False


@dataclass(frozen=True)
class Together:
    """A collective of the program."""

    key: str


Op = Pass | Together


@dataclass(frozen=True)
class Evaluation:
    """``polls`` per rank; with collectives between them all ranks poll as often."""

    polls: tuple[int, ...]
    name: str
    collective: bool = False
    ranks: frozenset[int] = frozenset()


def program(rank: int, steps: int, evaluations: dict[int, list[Evaluation]]) -> list[Op]:
    ops: list[Op] = []
    for step in range(steps):
        ops.append(Pass(Position(step)))
        phase, path = 0, ""
        for number, evaluation in enumerate(evaluations.get(step, [])):
            if evaluation.ranks and rank not in evaluation.ranks:
                continue
            phase, path = phase + 1, f"{path}/{evaluation.name}"
            ops.append(Pass(Position(step, phase), path, entering=True))
            for poll in range(1, evaluation.polls[rank] + 1):
                if evaluation.collective:
                    ops.append(Together(f"eval {step}.{number}.{poll}"))
                ops.append(Pass(Position(step, phase, poll), path))
            ops.append(Pass(Position(step, phase, LAST), path))
        phase, path = phase + 1, f"{path}/data"
        ops.append(Pass(Position(step, phase), path))
        ops += [Pass(Position(step, phase, poll), path, only_if_pending=True) for poll in (1, 2)]
        ops.append(Pass(Position(step, phase, LAST), path))
        ops.append(Together(f"step {step}"))
    ops.append(Pass(Position(steps)))
    ops.append(Pass(Position(steps, 1), entering=True, leaving=True))
    return ops


@dataclass
class Rank:
    number: int
    ops: deque[Op]
    agreement: RankAgreement = field(default_factory=RankAgreement)
    arrived: bool = False
    at_collective: str | None = None
    collectives: int = 0
    todo: deque[Request] = field(default_factory=deque)
    acted: dict[int, tuple[int, int]] = field(default_factory=dict)
    over: bool = False


class World:
    """Ranks and a hub; ``turn`` lets one of them move."""

    def __init__(self, programs: list[list[Op]], choose: random.Random) -> None:
        self.choose = choose
        self.now = 0.0
        self.ranks = [Rank(number, deque(ops)) for number, ops in enumerate(programs)]
        self.requests: dict[int, tuple[Request, RequestAnswers]] = {}
        self.to_hub: list[deque[Message]] = [deque() for _ in programs]
        self.to_rank: list[deque[Message]] = [deque() for _ in programs]

    # -- the hub, as Hub does it -----------------------------------------------------------

    def ask(self, kind: RequestKind) -> None:
        request = Request(id=len(self.requests) + 1, kind=kind, reason="test")
        self.requests[request.id] = (request, RequestAnswers(len(self.ranks), self.now))
        self.broadcast(request)

    def broadcast(self, message: Message) -> None:
        for queue in self.to_rank:
            queue.append(message)

    def hub_hears(self, rank: int) -> None:
        at = self.to_hub[rank].popleft()
        assert isinstance(at, PositionReport)
        request, gathering = self.requests[at.id]
        if gathering.take((rank,), at, self.now):
            request = replace(request, round=gathering.round)
            self.requests[at.id] = (request, gathering)
            self.broadcast(request)
        self.settle()

    def settle(self) -> None:
        for request, gathering in self.requests.values():
            if gathering.target is None and gathering.settle(self.now) is not None:
                assert gathering.target is not None
                self.broadcast(
                    RequestTarget(id=request.id, round=request.round, position=gathering.target)
                )

    # -- a rank, as Member and StepBoundaries do it ---------------------------------------------

    def rank_hears(self, rank: Rank) -> None:
        message = self.to_rank[rank.number].popleft()
        if isinstance(message, Request):
            answer = rank.agreement.on_request(message)
            if answer is not None:
                self.to_hub[rank.number].append(answer)
        else:
            assert isinstance(message, RequestTarget)
            answer = rank.agreement.on_target(message)
            if answer is not None:
                self.to_hub[rank.number].append(answer)

    def can_move(self, rank: Rank) -> bool:
        if rank.over:
            return False
        if rank.at_collective is not None:
            return all(other.at_collective == rank.at_collective for other in self.ranks)
        return not (rank.arrived and rank.agreement.blocked)

    def move(self, rank: Rank) -> None:
        if rank.at_collective is not None:
            for other in self.ranks:
                stops = (other.at_collective or "").startswith("stop")
                other.at_collective = None
                other.collectives += 1
                other.over = other.over or stops
            return
        if rank.todo:
            self.act(rank, rank.todo.popleft())
            return
        if not rank.ops:
            rank.over = True
            return
        op = rank.ops[0]
        if isinstance(op, Together):
            rank.ops.popleft()
            rank.at_collective = op.key
            return
        if op.only_if_pending and not rank.arrived and not rank.agreement.pending:
            rank.ops.popleft()
            return
        if not rank.arrived:
            self.to_hub[rank.number] += rank.agreement.arrive(
                op.position, op.path, entering=op.entering
            )
            rank.arrived = True
            if rank.agreement.blocked:
                return
        rank.arrived = False
        rank.ops.popleft()
        due = rank.agreement.go_on()
        if not op.leaving:
            rank.todo += due

    def act(self, rank: Rank, request: Request) -> None:
        assert request.id not in rank.acted, "acted twice"
        rank.acted[request.id] = (rank.agreement.position.step, rank.collectives)
        if request.kind is not RequestKind.PROBE:
            rank.at_collective = f"{request.kind.value} {request.id}"

    # -- the scheduler ----------------------------------------------------------------------

    def turn(self) -> bool:
        """One move of somebody; False when nobody can move."""
        moves = [rank for rank in self.ranks if self.can_move(rank)]
        hearing = [rank for rank in self.ranks if self.to_rank[rank.number]]
        talking = [n for n, queue in enumerate(self.to_hub) if queue]
        kinds = [kind for kind in (moves, hearing, talking) if kind]
        if not kinds:
            return False
        kind = self.choose.choice(kinds)
        if kind is moves:
            self.move(self.choose.choice(moves))
        elif kind is hearing:
            self.rank_hears(self.choose.choice(hearing))
        else:
            self.hub_hears(self.choose.choice(talking))
        return True

    def play(self, kinds: list[RequestKind]) -> None:
        waiting = list(kinds)
        for _ in range(20_000):
            if waiting and self.choose.random() < 0.05:
                self.ask(waiting.pop())
            if self.choose.random() < 0.02:
                self.pass_time()
            if not self.turn():
                if all(rank.over for rank in self.ranks):
                    return
                before = [gathering.target for _, gathering in self.requests.values()]
                self.pass_time()
                after = [gathering.target for _, gathering in self.requests.values()]
                assert before != after, f"nobody can move: {self.ranks}"
        raise AssertionError("it goes on for ever")

    def pass_time(self) -> None:
        self.now += SETTLE_S + 0.1
        self.settle()

    def check(self) -> None:
        for number in self.requests:
            places = [rank.acted.get(number) for rank in self.ranks]
            assert len(set(places)) == 1, f"request {number} was acted on at {places}"


@st.composite
def programs(draw: st.DrawFn) -> list[list[Op]]:
    ranks = draw(st.integers(2, 4))
    steps = draw(st.integers(1, 4))
    each = st.tuples(*(st.integers(0, 4) for _ in range(ranks)))
    evaluations: dict[int, list[Evaluation]] = {}
    for step in range(steps):
        found = []
        for kind in draw(st.lists(st.sampled_from(["free", "collective", "rank 0"]), max_size=2)):
            if kind == "collective":
                found.append(Evaluation((draw(st.integers(0, 4)),) * ranks, "all", collective=True))
            else:
                only = frozenset({0}) if kind == "rank 0" else frozenset[int]()
                found.append(Evaluation(draw(each), kind, ranks=only))
        evaluations[step] = found
    return [program(rank, steps, evaluations) for rank in range(ranks)]


KINDS = st.lists(
    st.sampled_from([RequestKind.PROBE, RequestKind.SAVE, RequestKind.PROBE]), max_size=3
)


@given(
    ranks=programs(),
    kinds=KINDS,
    stop=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_rank_acts_at_the_same_place_whatever_the_schedule(
    ranks: list[list[Op]], kinds: list[RequestKind], stop: bool, seed: int
) -> None:
    choose = random.Random(seed)
    world = World(ranks, choose)
    world.play([*([RequestKind.STOP] if stop else []), *kinds])
    world.check()


def test_many_schedules_of_one_awkward_program() -> None:
    """Rank 0 evaluates alone, then all together, with collectives between the polls."""
    evaluations = {
        0: [Evaluation((2, 2, 2), "all", collective=True)],
        1: [Evaluation((3, 0, 0), "mine", ranks=frozenset({0})), Evaluation((2, 3, 1), "free")],
    }
    kinds = [RequestKind.PROBE, RequestKind.SAVE, RequestKind.STOP, RequestKind.PROBE]
    for seed in range(300):
        choose = random.Random(seed)
        world = World([program(rank, 2, evaluations) for rank in range(3)], choose)
        world.play(choose.sample(kinds, choose.randint(1, 4)))
        world.check()


# -- the rules one by one ------------------------------------------------------------------------


def answered(*places: RankPosition, now: float = 0.0) -> RequestAnswers:
    gathering = RequestAnswers(world=len(places), asked_at=0.0)
    for rank, place in enumerate(places):
        gathering.answer((rank,), place, now)
    return gathering


def test_the_target_lies_after_the_furthest_rank() -> None:
    gathering = answered(
        RankPosition(Position(4)), RankPosition(Position(6)), RankPosition(Position(5))
    )
    assert gathering.settle(0.0) == Position(7)


def test_a_rank_waiting_at_a_boundary_can_still_act_there() -> None:
    gathering = answered(RankPosition(Position(5), waiting=True), RankPosition(Position(4)))
    assert gathering.settle(0.0) == Position(5)


def test_there_is_no_target_before_everybody_has_answered() -> None:
    gathering = RequestAnswers(world=3, asked_at=0.0)
    gathering.answer((0,), RankPosition(Position(4)), 0.0)
    gathering.answer((2,), RankPosition(Position(4)), 0.0)
    assert gathering.missing() == (1,)
    assert gathering.settle(100.0) is None


def test_all_inside_one_evaluation_stop_at_its_next_poll() -> None:
    gathering = answered(
        RankPosition(Position(4, 1, 3)), RankPosition(Position(4, 1, 5), waiting=True)
    )
    assert gathering.settle(0.0) == Position(4, 1, 5)


def test_a_mixed_picture_settles_before_the_boundary_is_taken() -> None:
    gathering = answered(RankPosition(Position(4, 1, 3)), RankPosition(Position(4)), now=10.0)
    assert gathering.settle(10.0 + SETTLE_S / 2) is None
    assert gathering.settle(10.0 + SETTLE_S) == Position(5)


def test_a_mixed_picture_becomes_common_when_the_other_rank_enters() -> None:
    gathering = answered(RankPosition(Position(4, 1, 3)), RankPosition(Position(4)))
    gathering.answer((1,), RankPosition(Position(4, 1), waiting=True), 0.2)
    assert gathering.settle(0.2) == Position(4, 1, 4)


def test_phases_of_one_number_but_another_path_are_not_the_same_phase() -> None:
    """Rank 0's own evaluation comes before the common one, which has collectives."""
    gathering = answered(
        RankPosition(Position(4, 1, 3), path="/mine"),
        RankPosition(Position(4, 1), waiting=True, path="/all"),
    )
    assert gathering.settle(SETTLE_S / 2) is None
    assert gathering.settle(SETTLE_S) == Position(5)


def test_entering_a_phase_asks_anew_and_the_old_target_stands_where_one_has_passed_it() -> None:
    gathering = answered(RankPosition(Position(4)), RankPosition(Position(4)))
    assert gathering.settle(0.0) == Position(5)
    anew = PositionReport(id=1, round=1, path="", position=Position(4, 1), waiting=True)
    assert gathering.take((0,), anew, 0.0)
    gathering.take(
        (1,), PositionReport(id=1, round=1, path="", position=Position(5), waiting=False), 0.0
    )
    assert gathering.settle(0.0) is None
    assert gathering.settle(SETTLE_S) == Position(5)


def test_a_late_answer_to_an_older_round_changes_nothing() -> None:
    gathering = answered(RankPosition(Position(4)), RankPosition(Position(4)))
    assert gathering.settle(0.0) == Position(5)
    assert gathering.take(
        (0,), PositionReport(id=1, round=1, path="", position=Position(4, 1), waiting=True), 0.0
    )
    assert not gathering.take(
        (1,), PositionReport(id=1, round=0, path="", position=Position(4, 1, 2), waiting=True), 0.0
    )
    assert gathering.missing() == (1,)


def test_an_answer_that_crosses_the_target_does_not_ask_anew() -> None:
    gathering = answered(RankPosition(Position(4, 1, 7)), RankPosition(Position(4, 1, 7)))
    assert gathering.settle(0.0) == Position(4, 1, 8)
    crossed = PositionReport(id=1, round=0, path="", position=Position(4, 1, 8), waiting=True)
    assert not gathering.take((1,), crossed, 0.0)
    assert gathering.target == Position(4, 1, 8)


def test_a_target_of_an_older_round_frees_nobody() -> None:
    agreement = RankAgreement()
    agreement.on_request(Request(id=1, kind=RequestKind.STOP, reason=""))
    agreement.on_target(RequestTarget(id=1, round=0, position=Position(5)))
    agreement.arrive(Position(4, 1), entering=True)
    assert agreement.blocked
    agreement.on_target(RequestTarget(id=1, round=0, position=Position(5)))
    assert agreement.blocked
    agreement.on_target(RequestTarget(id=1, round=1, position=Position(4, 1)))
    assert [request.id for request in agreement.go_on()] == [1]


def test_a_target_that_comes_while_a_rank_is_about_to_enter_is_asked_anew_once() -> None:
    agreement = RankAgreement()
    agreement.on_request(Request(id=1, kind=RequestKind.STOP, reason=""))
    (waiting,) = agreement.arrive(Position(4, 1), "/eval", entering=True)
    assert waiting.round == 0
    anew = agreement.on_target(RequestTarget(id=1, round=0, position=Position(5)))
    assert anew == PositionReport(
        id=1, round=1, path="/eval", position=Position(4, 1), waiting=True
    )
    assert agreement.blocked
    assert agreement.on_target(RequestTarget(id=1, round=1, position=Position(5))) is None
    assert not agreement.blocked
    assert agreement.go_on() == ()


def test_nobody_waits_at_an_evaluation_for_a_probe_that_is_agreed_for_behind_it() -> None:
    """Others may hold their interpreter's lock by now: asked anew it could not be given up."""
    agreement = RankAgreement()
    agreement.on_request(Request(id=1, kind=RequestKind.PROBE, reason=""))
    agreement.on_target(RequestTarget(id=1, round=0, position=Position(5)))
    assert agreement.arrive(Position(4, 1), "/eval", entering=True) == []
    assert not agreement.blocked
    assert agreement.go_on() == ()
    agreement.arrive(Position(5))
    assert [request.id for request in agreement.go_on()] == [1]


def test_what_was_acted_on_long_ago_is_not_remembered_for_ever() -> None:
    agreement = RankAgreement()
    for number in range(1, 5001):
        agreement.on_request(Request(id=number, kind=RequestKind.PROBE, reason=""))
        if number % 2:
            agreement.withdrawn(number)
        else:
            agreement.on_target(RequestTarget(id=number, round=0, position=Position(number)))
            agreement.arrive(Position(number))
            assert [request.id for request in agreement.go_on()] == [number]
        assert not agreement.pending
    assert len(agreement._acted) <= 1000
    agreement.on_request(Request(id=5000, kind=RequestKind.PROBE, reason="", round=1))
    assert not agreement.pending, "what was acted on is never acted on again"


def test_a_target_inside_the_phase_to_be_entered_stands() -> None:
    """It was agreed with this rank in front of the phase, which waits there for another request."""
    agreement = RankAgreement()
    agreement.on_request(Request(id=1, kind=RequestKind.PROBE, reason=""))
    agreement.on_request(Request(id=2, kind=RequestKind.SAVE, reason=""))
    agreement.arrive(Position(4, 1), "/eval", entering=True)
    assert agreement.on_target(RequestTarget(id=1, round=0, position=Position(4, 1, 3))) is None
    assert agreement.on_target(RequestTarget(id=2, round=0, position=Position(4, 1, 2))) is None
    assert agreement.go_on() == ()


def test_what_is_due_at_once_is_done_in_the_order_of_the_targets() -> None:
    """Another rank meets the targets one by one, and both may be collectives."""
    agreement = RankAgreement()
    for number, poll in ((1, 9), (2, 3), (3, 9)):
        agreement.on_request(Request(id=number, kind=RequestKind.SAVE, reason=""))
        agreement.on_target(RequestTarget(id=number, round=0, position=Position(4, 1, poll)))
    agreement.arrive(Position(4, 1, LAST), "/data")
    assert [request.id for request in agreement.go_on()] == [2, 1, 3]


@pytest.mark.parametrize("kind", list(RequestKind))
def test_a_rank_acts_once_however_often_it_is_asked(kind: RequestKind) -> None:
    agreement = RankAgreement()
    request = Request(id=1, kind=kind, reason="")
    agreement.on_request(request)
    agreement.on_target(RequestTarget(id=1, round=0, position=Position(3)))
    agreement.arrive(Position(3))
    assert agreement.go_on() == (request,)
    answer = agreement.on_request(replace(request, round=1))
    assert answer == PositionReport(id=1, round=1, path="", position=Position(3), waiting=False)
    agreement.arrive(Position(4))
    assert not agreement.blocked
    assert agreement.go_on() == ()
