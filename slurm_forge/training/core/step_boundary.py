"""Pass step boundaries and phases, and do what is due there: the main thread's side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from slurm_forge.control import Member
from slurm_forge.control.messages.hub import Request, RequestKind
from slurm_forge.vocabulary.position import LAST, Position


class RunStopped(BaseException):
    """The run stops here on all ranks; everything that had to be saved is saved.

    Not an ``Exception``, so that a program's own ``except Exception`` can't swallow it.
    """


class PhaseStopped(BaseException):
    """Leaves the body of a phase, for the save at the phase's end."""


class StepBoundaries:
    """Counts positions and calls ``act`` for what is due: ``act`` may raise ``RunStopped``.

    Costs a lock and a comparison per position if there is no request.
    """

    def __init__(self, member: Member | None, act: Callable[[Request], None]) -> None:
        self._member = member
        self._act = act
        self._step = -1
        self._phase = 0
        self._poll = 0
        #: The names of the phases since the boundary: the same for two ranks in the same phase.
        self._path = ""
        #: The phase that the program is in, if any.
        self.inside: str | None = None
        self._acts_inside = True
        self._doing = "train"
        #: How often training was rolled back in this launch, which repeats steps.
        self.rollbacks = 0

    def rewound(self) -> None:
        """Training continues at an earlier step; its boundary is yet to be passed."""
        self.rollbacks += 1
        self._begin(-1)

    def boundary(self, step: int) -> bool:
        """Pass the boundary after ``step`` steps; False if it was passed already."""
        if step == self._step:
            return False
        self._begin(step)
        self._due(doing="train")
        return True

    @contextmanager
    def phase(self, name: str, on_stop: Callable[[], None], *, acts: bool = True) -> Iterator[None]:
        """A phase in which ranks may differ; a stop inside it calls ``on_stop`` at its end.

        Without ``acts`` requests wait for the next boundary.
        """
        if self.inside is not None:
            raise RuntimeError(f"phase {name!r} inside phase {self.inside!r}: end that one first")
        outer = "train"
        self._enter(name)
        self.inside, self._acts_inside = name, acts
        try:
            if acts:
                self._begin_phase(name)
                self._due(entering=True)
            yield
            if acts:
                self._due(LAST)
        except PhaseStopped:
            self.inside = None
            on_stop()
            raise RunStopped from None
        finally:
            self.inside = None
            self._enter(outer)

    def begin_data_wait(self) -> None:
        """Begin waiting for the next batch; the waiting loop calls ``data_poll`` meanwhile."""
        self._begin_phase("data")
        self._due(doing="data")

    def end_data_wait(self) -> None:
        """The batch has arrived."""
        self._due(LAST, doing="train")

    def data_poll(self) -> None:
        """Check for a request while waiting for a batch."""
        if self._member is not None and self._member.pending:
            self._poll += 1
            self._due(self._poll)

    def poll(self) -> None:
        """Check for a request inside a phase; cheap enough for every batch of an evaluation.

        Every call counts: if an evaluation has collectives of its own, ranks that call it equally
        often leave it at the same call.
        """
        if self._acts_inside:
            self._poll += 1
            self._due(self._poll)

    def leave(self) -> None:
        """The program is done: open requests are answered and no longer acted on."""
        if self._member is not None:
            self._begin_phase(self._doing)
            self._member.advance(
                Position(self._step, self._phase, 0, self.rollbacks), self._path, entering=True
            )

    @contextmanager
    def meanwhile(self, name: str) -> Iterator[None]:
        """Switch to another phase for a moment (a save), and back."""
        doing = self._doing
        self._enter(name)
        try:
            yield
        finally:
            self._enter(doing)

    def _begin(self, step: int) -> None:
        self._step, self._phase, self._poll, self._path = step, 0, 0, ""

    def _begin_phase(self, name: str) -> None:
        self._phase, self._poll, self._path = self._phase + 1, 0, f"{self._path}/{name}"

    def _enter(self, name: str) -> None:
        self._doing = name
        if self._member is not None:
            self._member.enter(name)

    def _due(self, poll: int = 0, *, entering: bool = False, doing: str = "") -> None:
        self._doing = doing or self._doing
        if self._member is None:
            return
        position = Position(self._step, self._phase, poll, self.rollbacks)
        for request in self._member.advance(position, self._path, entering=entering, phase=doing):
            if request.kind is RequestKind.STOP and self.inside is not None:
                raise PhaseStopped
            self._act(request)


#: How often the waiting loop of the data phase checks for requests.
DATA_POLL = timedelta(milliseconds=20)
