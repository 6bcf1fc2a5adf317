from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.protocol import decode, encode
from slurm_forge.control.messages.rank import RequestProposal
from slurm_forge.errors import ControlChannelError
from slurm_forge.recovery.monitor.loss_anomaly import (
    Anomaly,
    Spikes,
    announce,
    announced,
)
from slurm_forge.vocabulary.cause import Cause

NAN = math.nan


def watched(
    losses: Iterable[float], spikes: Spikes | None = None, first: int = 0
) -> tuple[Spikes, list[Anomaly]]:
    spikes = Spikes() if spikes is None else spikes
    found = [
        spikes.note(step, loss=float(loss), norm=1.0, applied=True)
        for step, loss in enumerate(losses, first)
    ]
    return spikes, [anomaly for anomaly in found if anomaly is not None]


def noisy(level: float, deviation: float, count: int, seed: int = 0) -> list[float]:
    return (level + deviation * np.random.default_rng(seed).normal(size=count)).tolist()


def test_random_targets_are_noticed_at_the_third_step() -> None:
    _, found = watched([*noisy(2.0, 0.05, 300), 4.9, 4.8, 5.0, 4.9])
    assert [(a.cause, a.onset, a.step) for a in found] == [(Cause.LOSS_SPIKE, 300, 302)]
    for figure in ("4.9, 4.8, 5 in 3 of the last 3 steps", "over 256 steps was 1.998"):
        assert figure in found[0].text


def test_three_of_four_will_do() -> None:
    _, found = watched([*noisy(2.0, 0.05, 300), 4.9, 4.8, 2.0, 4.9])
    assert [(a.onset, a.step) for a in found] == [(300, 303)]


def test_one_outlier_or_two_are_counted_and_no_more() -> None:
    for outliers in ([90.0], [90.0, 80.0]):
        spikes, found = watched([*noisy(2.0, 0.05, 300), *outliers, *noisy(2.0, 0.05, 300, 1)])
        assert found == []
        assert spikes.outliers == len(outliers)


def kinds(share: float, high: float, count: int) -> list[float]:
    """Two kinds of data: with so much of the second, whose loss is so much higher."""
    rng = np.random.default_rng(3)
    second = high * (rng.random(count) < share)
    return (2.0 + second + 0.05 * rng.normal(size=count)).tolist()


@pytest.mark.parametrize(("share", "high"), [(0.02, 8.0), (0.02, 1.0), (0.1, 1.0), (0.3, 4.0)])
def test_a_second_kind_of_data_is_no_spike(share: float, high: float) -> None:
    losses = kinds(share, high, 50_000)
    spikes, found = watched(losses)
    assert found == []
    assert len(watched([2.0 + 9 * high] * 6, spikes, 50_000)[1]) == 1


def waves(count: int) -> list[float]:
    pushed = np.random.default_rng(4).normal(size=count) * math.sqrt(1 - 0.81)
    return list(accumulate(pushed.tolist(), lambda before, push: 0.9 * before + push))


def test_noise_that_swings_slowly_is_no_spike_where_little_is_known_either() -> None:
    losses = waves(100_000)
    spikes = Spikes()
    alarms = 0
    for at in range(0, len(losses), 100):
        spikes.restart(losses[max(0, at - 64) : at], at - 1)
        alarms += len(watched(losses[at : at + 100], spikes, at)[1])
    assert alarms == 0


def test_outliers_never_make_it_blind() -> None:
    losses = noisy(2.0, 0.05, 340)
    losses[100:320:20] = [1e6] * 11
    _, found = watched([*losses, *[4.9] * 5])
    assert [a.onset for a in found] == [340]


def test_where_outliers_are_common_it_takes_five_and_three_later_on() -> None:
    losses = noisy(2.0, 0.05, 340)
    losses[300] = losses[320] = 9.0
    spikes, _ = watched(losses)
    assert watched([4.9] * 4, spikes, 340)[1] == []
    assert [(a.onset, a.step) for a in watched([4.9], spikes, 344)[1]] == [(340, 344)]
    spikes.restart(noisy(2.0, 0.05, 64), at=330)  # another beginning
    assert [a.step for a in watched([4.9] * 3, spikes, 331)[1]] == [333]

    spikes, _ = watched([*losses, *noisy(2.0, 0.05, 512, 1)])
    assert [a.step for a in watched([4.9] * 3, spikes, 852)[1]] == [854]


def test_every_second_step_is_no_anomaly() -> None:
    assert watched([*noisy(2.0, 0.05, 300), *[4.9, 2.0] * 3, *noisy(2.0, 0.05, 50)])[1] == []


@pytest.mark.parametrize("level", [2.0, -100.0])
def test_a_bump_of_a_fifth_is_no_spike(level: float) -> None:
    bump, noise = [level + abs(level) / 5] * 10, abs(level) / 200
    losses = [*noisy(level, noise, 300), *bump, *noisy(level, noise, 100, 1), *bump]
    assert watched(losses)[1] == []


def test_what_grows_is_not_taken_for_usual_meanwhile() -> None:
    growth = 0.02 * np.exp(0.15 * np.arange(40))
    before = np.array(noisy(2.0, 0.02, 400))
    before[-40:] += growth
    _, found = watched(before.tolist())
    assert len(found) == 1
    assert found[0].step < 390
    # Told to have begun when it could be seen, not when it was far off.
    assert 360 < found[0].onset < found[0].step - 5


def test_the_anomaly_does_not_teach_what_is_usual() -> None:
    spikes, _ = watched(noisy(2.0, 0.05, 300))
    bound = spikes.bound
    watched([50.0, 50.0], spikes, 300)
    watched(noisy(2.0, 0.05, 256, 1), spikes, 302)
    assert spikes.bound == pytest.approx(bound, rel=0.05)


def test_steps_that_were_left_out_and_losses_that_are_not_known_count_for_nothing() -> None:
    spikes, _ = watched(noisy(2.0, 0.05, 300))
    for step in range(300, 600):
        assert spikes.note(step, loss=50.0, norm=NAN, applied=False) is None
        assert spikes.note(step, loss=NAN, norm=1.0, applied=True) is None
    assert spikes.outliers == 0
    now_and_then = watched([4.9, NAN, 4.9, NAN, NAN, 4.9], spikes, 600)[1]
    assert [(a.onset, a.step) for a in now_and_then] == [(600, 605)]


def test_an_infinite_loss_is_far() -> None:
    spikes, found = watched([*noisy(2.0, 0.05, 300), math.inf, math.inf, math.inf])
    assert [a.onset for a in found] == [300]
    spikes.tolerate()
    _, found = watched(noisy(2.0, 0.05, 300), spikes, 303)
    assert found == []
    assert spikes.bound < 3.0


@pytest.mark.parametrize("level", [-1000.0, -0.5, 0.0, 0.001, 40.0])
def test_any_level_will_do(level: float) -> None:
    deviation = max(abs(level), 1.0) / 50
    usual = noisy(level, deviation, 2000)
    assert watched(usual)[1] == []
    far = level + 20 * deviation
    assert len(watched([*usual, far, far, far])[1]) == 1


def test_a_constant_loss() -> None:
    assert watched([0.0] * 300 + [1e-9] * 5)[1] == []  # no scale
    assert len(watched([0.7] * 300 + [1.4] * 5)[1]) == 1
    assert watched([0.7] * 300 + [0.2] * 300 + [0.24] * 5)[1] == []


def test_nothing_is_judged_before_something_is_known() -> None:
    assert watched([11.0, 11.0, 11.0, *[200.0] * 20])[1] == []


def test_it_says_so_once_and_lives_with_it_if_nobody_does_anything() -> None:
    spikes, found = watched([*noisy(2.0, 0.05, 300), *[5.0] * 60])
    assert len(found) == 1
    _, found = watched([5.0] * 200, spikes, 360)
    assert found == []
    _, found = watched([9.0] * 3, spikes, 560)
    assert len(found) == 1


def test_what_is_tolerated_is_usual_and_what_comes_then_is_seen() -> None:
    spikes, found = watched([*noisy(2.0, 0.05, 300), 4.0, 4.0, 4.0])
    assert len(found) == 1
    spikes.tolerate()
    assert watched(noisy(4.0, 0.05, 100), spikes, 303)[1] == []
    assert len(watched([8.0] * 3, spikes, 403)[1]) == 1


def test_after_a_resume_the_saved_losses_are_what_is_usual() -> None:
    spikes = Spikes()
    spikes.restart([NAN, *noisy(2.0, 0.05, 63)], at=1000)
    _, found = watched([5.0] * 3, spikes, 1001)
    assert [(a.onset, a.step) for a in found] == [(1001, 1003)]


def test_an_onset_among_the_saved_losses_is_a_step_that_there_was() -> None:
    spikes = Spikes()
    spikes.restart([*noisy(2.0, 0.05, 62), 5.0, 5.0], at=1000)
    assert [(a.onset, a.step) for a in watched([5.0], spikes, 1001)[1]] == [(999, 1001)]
    spikes.restart([*noisy(2.0, 0.05, 62), 5.0, 5.0], at=0)
    (found,) = watched([5.0], spikes, 1)[1]
    assert announced(announce(found)) == found


def test_after_a_resume_nothing_from_before_counts() -> None:
    spikes, _ = watched(noisy(2.0, 0.05, 300))
    spikes.restart([], at=100)
    assert watched([5.0] * 100, spikes, 101)[1] == []


def test_a_level_that_was_lived_with_before_a_resume_is_no_anomaly_behind_it() -> None:
    spikes = Spikes()
    spikes.restart([*noisy(2.0, 0.01, 50), *noisy(4.0, 0.01, 14)], at=1000)
    assert watched(noisy(4.0, 0.01, 60, 1), spikes, 1001)[1] == []
    assert len(watched([9.9] * 3, spikes, 1061)[1]) == 1


def norms(
    values: Iterable[float], spikes: Spikes | None = None, first: int = 0
) -> tuple[Spikes, list[int]]:
    """As on a device that takes every limit over at once."""
    spikes = Spikes() if spikes is None else spikes
    left_out = []
    for step, norm in enumerate(values, first):
        applied = spikes.limit is None or norm <= spikes.limit
        if not applied:
            left_out.append(step)
        spikes.note(step, loss=NAN, norm=float(norm), applied=applied)
    return spikes, left_out


def lognormal(sigma: float, count: int, seed: int = 0) -> list[float]:
    return np.exp(sigma * np.random.default_rng(seed).normal(size=count)).tolist()


def test_there_is_no_limit_before_64_norms() -> None:
    spikes, _ = norms(lognormal(0.2, 63))
    assert spikes.limit is None
    assert norms([1.0], spikes, 63)[0].limit == pytest.approx(6.0, rel=0.2)


def test_a_single_norm_ten_times_too_large_is_left_out() -> None:
    usual = lognormal(0.1, 300)
    spikes, left_out = norms([*usual, 10.0, *usual])
    assert left_out == [300]
    assert spikes.limit == pytest.approx(6.0, rel=0.2)


def test_noisy_norms_make_the_limit_generous() -> None:
    assert norms(lognormal(0.5, 20_000))[1] == []
    slow = np.exp(np.linspace(0, math.log(100), 2000)) * lognormal(0.2, 2000)
    assert norms(slow)[1] == []


def test_norms_that_are_not_finite_or_zero_teach_nothing() -> None:
    spikes, _ = norms(lognormal(0.1, 200))
    before = spikes.limit
    for step, norm in enumerate((NAN, math.inf, 0.0) * 50, 200):
        spikes.note(step, loss=NAN, norm=norm, applied=not math.isnan(norm))
    assert spikes.limit == before


def test_a_limit_that_leaves_out_too_many_is_given_up_and_learned_anew() -> None:
    rng = np.random.default_rng(1)
    shifted = np.where(rng.random(400) < 0.3, 20.0, 1.0)  # hardly ever three in a row
    spikes, left_out = norms([*lognormal(0.1, 300), *shifted])
    assert len(left_out) == 4
    assert spikes.limit is not None
    assert spikes.limit > 20.0


def test_the_row_that_is_an_incident_comes_before_that() -> None:
    spikes = Spikes(skips=10)
    _, left_out = norms([*lognormal(0.1, 300), *[50.0] * 10], spikes)
    assert len(left_out) == 10
    assert spikes.limit is not None


def test_no_limit_where_it_left_updates_out_before_the_rollback() -> None:
    usual = lognormal(0.1, 300)
    spikes, left_out = norms([*usual, 50.0, 50.0, 50.0])
    assert left_out == [300, 301, 302]
    spikes.restart([], at=150)
    _, left_out = norms([*usual[:149], *[50.0] * 30], spikes, 151)
    assert left_out == []
    _, left_out = norms([*[50.0] * 300, 2000.0], spikes, 330)
    assert left_out == [630]  # and behind that place there is one again


def test_what_was_left_out_long_ago_is_another_place() -> None:
    usual = lognormal(0.1, 300)
    spikes, left_out = norms([*usual, 50.0, *usual])
    assert left_out == [300]
    spikes.restart([], at=150)
    assert norms([*usual[:100], 50.0], spikes, 151)[1] == [251]


def test_a_limit_comes_back_after_any_other_rollback() -> None:
    usual = lognormal(0.1, 300)
    spikes, _ = norms(usual)
    spikes.restart([], at=150)
    assert spikes.limit is None
    assert norms([*usual[:100], 50.0], spikes, 151)[1] == [251]


anomalies = st.builds(
    lambda cause, onset, more, text: Anomaly(cause, onset, onset + more, text),
    st.sampled_from([Cause.NON_FINITE, Cause.LOSS_SPIKE]),
    st.integers(0, 2**62 - 1),
    st.integers(0, 2**62),
    st.text(st.characters(codec=None), max_size=1000),
)


@given(anomalies)
def test_an_announcement_arrives_as_it_was_sent(anomaly: Anomaly) -> None:
    line = encode(RequestProposal(kind=RequestKind.RECOVER, reason=announce(anomaly)))
    message = decode(line)
    assert isinstance(message, RequestProposal)
    text = anomaly.text.encode(errors="replace").decode()  # half of a pair has no bytes
    assert announced(message.reason) == replace(anomaly, text=text)


@pytest.mark.parametrize("character", ["\x00", "\U0001f600", "\ud800", '"', "\\"])
def test_a_text_that_is_too_long_loses_its_end(character: str) -> None:
    long = Anomaly(Cause.LOSS_SPIKE, 1, 2, character * 20_000)
    line = encode(RequestProposal(kind=RequestKind.RECOVER, reason=announce(long)))
    message = decode(line)
    assert isinstance(message, RequestProposal)
    assert announced(message.reason).text == long.text[:1000].encode(errors="replace").decode()


GOOD = {"cause": "loss_spike", "onset": 3, "step": 5, "text": "x"}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[]",
        "{",
        "9" * 5000,
        "[" * 100_000,
        *(
            json.dumps({**GOOD, **wrong})
            for wrong in (
                {"cause": "mood"},
                {"cause": None},
                {"cause": []},
                {"onset": 6},
                {"onset": -1},
                {"onset": True},
                {"onset": 3.0},
                {"step": "5"},
                {"step": 2**63},
                {"text": 1},
                {"more": 1},
            )
        ),
        *(json.dumps({k: v for k, v in GOOD.items() if k != key}) for key in GOOD),
    ],
)
def test_nonsense_is_refused(body: str) -> None:
    with pytest.raises(ControlChannelError, match="can't be read"):
        announced(body)


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ControlChannelError):
        announced(text)


def test_a_loss_that_has_fallen_far_may_swing_at_the_bottom() -> None:
    """From 8 to a millionth: six millionths are as good as none, and nothing to go back for."""
    spikes, found = Spikes(), []
    falling = [8.0 * math.exp(-step / 60.0) + 1e-6 * (1 + step % 3) for step in range(3000)]
    for step, loss in enumerate([*falling, *[6e-6, 4e-5, 9e-6] * 20, *[2.0] * 4]):
        found.append(spikes.note(step, loss=loss, norm=1.0, applied=True))
    seen = [anomaly for anomaly in found if anomaly is not None]
    assert len(seen) == 1
    assert seen[0].onset == 3060, "a quarter of the way back up is something else"


def test_what_was_usual_at_first_is_known_after_a_resume() -> None:
    spikes = Spikes()
    spikes.highest_usual_loss = 8.0
    spikes.restart([1e-6 * (1 + step % 3) for step in range(64)], at=64)
    losses = [*[1e-6] * 50, *[6e-6] * 20]
    assert not any(
        spikes.note(65 + n, loss=loss, norm=1.0, applied=True) for n, loss in enumerate(losses)
    )
