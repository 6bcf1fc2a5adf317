"""The probe matrix: for each kind of fault the host that it struck is named, and no other.

One of each kind here; the other moments and victims are slow, and all is scripts/probe-matrix.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.netbed.bed import why_not
from tests.netbed.cases import Case, Fault, Found, Moment, Who, all_cases, play, play_all

pytestmark = [pytest.mark.distributed]

ONE_OF_EACH = (
    Case(Fault.STOPPED, Who.PAIR, Moment.EVALUATION),
    Case(Fault.KILLED, Who.FIRST, Moment.COLLECTIVE),
    Case(Fault.DELAYED, Who.OTHER, Moment.COLLECTIVE),
    # The supervisor, which sits on that host, hears of nobody else any more.
    Case(Fault.CUT, Who.FIRST, Moment.IDLE),
    Case(Fault.WRONG, Who.OTHER, Moment.EVALUATION),
    Case(Fault.SLOW, Who.OTHER, Moment.IDLE),
)


@cache
def played() -> dict[str, Found]:
    """All of them, side by side: most of the time they wait."""
    return {found.name: found for found in play_all(ONE_OF_EACH, 3)}


@cache
def problem() -> str:
    return why_not()


def check(found: Found) -> None:
    assert not found.error, found.error
    assert found.hosts == (found.expected,), found


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.name)
def test_the_right_host_is_named(case: Case) -> None:
    if problem():
        pytest.skip(problem())
    check(played()[case.name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [each for each in all_cases(1) if each not in ONE_OF_EACH], ids=lambda case: case.name
)
def test_the_right_host_is_named_whoever_it_is_and_whatever_it_does(case: Case) -> None:
    if problem():
        pytest.skip(problem())
    check(play(case))
