"""The positions that a rank passes, and what becomes of a request that is due at one of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from slurm_forge.control.messages.hub import Request, RequestKind
from slurm_forge.training.core.step_boundary import (
    RunStopped,
    StepBoundaries,
)
from slurm_forge.vocabulary.position import LAST, Position

STOP = Request(id=1, kind=RequestKind.STOP, reason="test")
SAVE = Request(id=2, kind=RequestKind.SAVE, reason="test")


@dataclass
class Channel:
    """Notes every position; ``due`` says what is asked for where."""

    due: dict[Position, tuple[Request, ...]] = field(default_factory=dict)
    passed: list[tuple[Position, bool]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    pending: bool = False

    def advance(
        self, position: Position, path: str, *, entering: bool = False, phase: str = ""
    ) -> tuple[Request, ...]:
        if phase:
            self.enter(phase)
        self.passed.append((position, entering))
        self.paths.append(path)
        return self.due.get(position, ())

    def enter(self, phase: str) -> None:
        self.phases.append(phase)


@dataclass
class Program:
    """Boundaries, what was done at them, and what happened at a stop inside a phase."""

    channel: Channel = field(default_factory=Channel)
    acted: list[RequestKind] = field(default_factory=list)
    stopped: int = 0

    def __post_init__(self) -> None:
        self.boundaries = StepBoundaries(self.channel, self.act)  # type: ignore[arg-type]

    def act(self, request: Request) -> None:
        self.acted.append(request.kind)
        if request.kind is RequestKind.STOP:
            raise RunStopped

    def stop(self) -> None:
        assert self.boundaries.inside is None, "what is saved is not inside the phase any more"
        self.stopped += 1

    def evaluate(self, polls: int) -> None:
        with self.boundaries.phase("eval", self.stop):
            for _ in range(polls):
                self.boundaries.poll()


def test_a_step_passes_its_boundary_its_data_and_its_phases_in_order():
    program = Program()
    assert program.boundaries.boundary(3)
    program.boundaries.begin_data_wait()
    program.boundaries.end_data_wait()
    program.evaluate(2)
    assert program.boundaries.boundary(4)
    assert program.channel.passed == [
        (Position(3), False),
        (Position(3, 1), False),
        (Position(3, 1, LAST), False),
        # Only here may a long stretch begin that a target lies behind.
        (Position(3, 2), True),
        (Position(3, 2, 1), False),
        (Position(3, 2, 2), False),
        (Position(3, 2, LAST), False),
        (Position(4), False),
    ]
    assert program.channel.phases == ["train", "data", "train", "eval", "train", "train"]
    assert program.channel.paths == ["", *2 * ["/data"], *4 * ["/data/eval"], ""]


def test_a_boundary_is_passed_once_per_step():
    program = Program(Channel({Position(3): (SAVE,)}))
    assert program.boundaries.boundary(3)
    assert not program.boundaries.boundary(3)
    assert program.acted == [RequestKind.SAVE]


def test_waiting_for_data_counts_its_polls_only_while_something_is_asked_for():
    program = Program()
    program.boundaries.boundary(0)
    program.boundaries.begin_data_wait()
    program.boundaries.data_poll()
    program.channel.pending = True
    program.boundaries.data_poll()
    program.boundaries.data_poll()
    program.boundaries.end_data_wait()
    assert [position for position, _ in program.channel.passed] == [
        Position(0),
        Position(0, 1),
        Position(0, 1, 1),
        Position(0, 1, 2),
        Position(0, 1, LAST),
    ]


@pytest.mark.parametrize("where", [Position(0), Position(0, 1), Position(0, 1, 1)])
def test_a_stop_at_a_boundary_or_in_a_data_wait_unwinds_the_program(where):
    program = Program(Channel({where: (STOP,)}, pending=True))
    with pytest.raises(RunStopped):
        program.boundaries.boundary(0)
        program.boundaries.begin_data_wait()
        program.boundaries.data_poll()
    assert program.acted == [RequestKind.STOP]
    assert program.channel.passed[-1][0] == where


@pytest.mark.parametrize("poll", [1, 3])
def test_a_stop_inside_a_phase_leaves_it_there_and_is_done_at_its_end(poll):
    program = Program(Channel({Position(2, 1, poll): (STOP,)}))
    program.boundaries.boundary(2)
    polled, cleaned = 0, False
    with pytest.raises(RunStopped):
        with program.boundaries.phase("eval", program.stop):
            try:
                for _ in range(5):
                    polled += 1
                    program.boundaries.poll()
            except Exception:
                pytest.fail("a program's own handler could have swallowed it")
            finally:
                cleaned = program.stopped == 0
    assert (polled, cleaned, program.stopped, program.acted) == (poll, True, 1, [])
    assert program.channel.phases[-1] == "train"


def test_a_stop_at_the_beginning_of_a_phase_does_not_begin_it():
    program = Program(Channel({Position(2, 1): (STOP,)}))
    program.boundaries.boundary(2)
    with pytest.raises(RunStopped):
        with program.boundaries.phase("eval", program.stop):
            pytest.fail("began")
    assert program.stopped == 1


def test_a_stop_at_the_end_of_a_phase_counts_as_one_inside():
    # Other ranks may have been cut off in the middle: none of them has evaluated.
    program = Program(Channel({Position(2, 1, LAST): (STOP,)}))
    program.boundaries.boundary(2)
    with pytest.raises(RunStopped):
        program.evaluate(3)
    assert (program.stopped, program.acted) == (1, [])


def test_a_save_inside_a_phase_does_not_end_it():
    program = Program(Channel({Position(2, 1, 2): (SAVE,)}))
    program.boundaries.boundary(2)
    program.evaluate(3)
    assert program.acted == [RequestKind.SAVE]
    assert program.channel.passed[-1][0] == Position(2, 1, LAST)


def test_what_is_due_after_a_stop_is_not_done():
    program = Program(Channel({Position(2): (SAVE, STOP, SAVE)}))
    with pytest.raises(RunStopped):
        program.boundaries.boundary(2)
    assert program.acted == [RequestKind.SAVE, RequestKind.STOP]


def test_a_phase_inside_a_phase_is_a_mistake_and_leaves_the_outer_one_usable():
    program = Program()
    program.boundaries.boundary(0)
    with program.boundaries.phase("eval", program.stop):
        with pytest.raises(RuntimeError, match="'probe' inside phase 'eval'"):
            with program.boundaries.phase("probe", program.stop):
                pytest.fail("began")
        program.boundaries.poll()
        assert program.boundaries.inside == "eval"
    assert program.channel.passed[-2:] == [
        (Position(0, 1, 1), False),
        (Position(0, 1, LAST), False),
    ]


def test_an_error_inside_a_phase_is_the_program_s_and_ends_the_phase():
    program = Program()
    program.boundaries.boundary(0)
    with pytest.raises(ZeroDivisionError):
        with program.boundaries.phase("eval", program.stop):
            1 / 0  # noqa: B018
    assert program.boundaries.inside is None
    assert (program.stopped, program.channel.phases[-1]) == (0, "train")


def test_the_end_of_the_program_asks_the_others_anew_and_does_nothing_any_more():
    program = Program(Channel({Position(9, 1): (STOP, SAVE)}))
    program.boundaries.boundary(9)
    program.boundaries.leave()
    assert program.channel.passed[-1] == (Position(9, 1), True)
    assert program.acted == []


@pytest.mark.parametrize("inside", [True, False])
def test_after_a_moment_of_something_else_ranks_say_again_what_they_are_in(inside):
    program = Program()
    program.boundaries.boundary(0)
    if inside:
        with program.boundaries.phase("eval", program.stop):
            with program.boundaries.meanwhile("save"):
                pass
            assert program.channel.phases == ["train", "eval", "save", "eval"]
    else:
        with program.boundaries.meanwhile("save"):
            pass
        assert program.channel.phases == ["train", "save", "train"]


def test_without_a_channel_nothing_is_asked_for():
    boundaries = StepBoundaries(None, lambda request: pytest.fail("asked"))
    assert boundaries.boundary(0)
    boundaries.begin_data_wait()
    boundaries.data_poll()
    boundaries.end_data_wait()
    with boundaries.phase("eval", lambda: pytest.fail("stopped")):
        boundaries.poll()
    boundaries.leave()
