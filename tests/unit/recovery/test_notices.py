"""Which events of a run are worth a message, from its journal; and the rate of messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal import events as ev
from slurm_forge.journal import fold, read_to_fold
from slurm_forge.launch.notify.message_text import message_of
from slurm_forge.recovery.notices import (
    MOST_PER_HOUR,
    EventNotice,
    may_send,
    notice_of,
    notices_of,
)
from slurm_forge.recovery.run_watch import FindingKind, Remedy, WatchFinding
from slurm_forge.run_directory.sent_messages import (
    MOST_TRIES,
    Outcome,
    SendTry,
    SentMessages,
    digest_of,
)
from slurm_forge.spec.notifications import NotifyEvent, NotifySpec
from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.decision import Action
from tests.unit.report.journals import Scribe

EVERY = NotifySpec(to=("me",), events=tuple(NotifyEvent), requeues_per_hour=3)
HOUR = 3600.0


def notices(scribe: Scribe, spec: NotifySpec = EVERY, *, after: float = 0.0) -> list[EventNotice]:
    records = read_to_fold(scribe.run)
    state = fold(records)
    return list(notices_of(state, records, spec, run="tiny-gpt", now=scribe.now + after))


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    scribe = Scribe(tmp_path)
    scribe.submitted()
    scribe.begin("n01", "n02")
    scribe.resume(0)
    return scribe


def test_a_held_run_is_told_with_what_the_error_itself_says_to_do(scribe: Scribe) -> None:
    scribe.incident(
        Cause.APP_ERROR, Action.HOLD, reason="app_error: KeyError twice; next: fix the key"
    )
    scribe.held("app_error")
    (held,) = notices(scribe)
    assert (held.event, held.words) == (NotifyEvent.HELD, "held: app_error: KeyError twice")
    assert held.next == "fix the key; then slurm-forge requeue tiny-gpt"


def test_else_the_remedy_of_the_cause_or_of_the_evidence_is_the_next_step(
    scribe: Scribe, tmp_path: Path
) -> None:
    scribe.incident(Cause.STORAGE, Action.HOLD)
    (held,) = notices(scribe)
    assert held.next.startswith("check quota and free space")
    other = Scribe(tmp_path / "other")
    other.begin("n01")
    other.incident(
        Cause.CRASH, Action.HOLD, evidence=(Evidence("rank 0", "died; next: install zlib."),)
    )
    assert notices(other)[0].next.startswith("install zlib; then")


def test_who_lets_a_held_run_go_on_needs_no_message_about_it(scribe: Scribe) -> None:
    scribe.incident(Cause.APP_ERROR, Action.HOLD)
    scribe.held("app_error")
    scribe.write("cli", ev.UserAsked(verb="requeue", user="me"), launch=1 << 30)
    scribe.begin("n01")
    assert notices(scribe) == []


def test_requeues_are_told_when_there_are_so_many_in_an_hour_and_then_counted_anew(
    scribe: Scribe,
) -> None:
    keys = set()
    for number in range(7):
        if number:
            scribe.later(60).begin("n01")
        scribe.preempted(number)
        keys |= {each.key for each in notices(scribe)}
    assert [each.words for each in notices(scribe)] == [
        "requeued 3 times within an hour, the last time for: preempted: requeue"
    ] * 2
    assert len(keys) == 2, "the same events have the same keys later on"


def test_slow_requeues_are_nothing_to_tell(scribe: Scribe) -> None:
    for number in range(5):
        if number:
            scribe.later(HOUR / 2 + 60).begin("n01")
        scribe.preempted(number)
    assert notices(scribe) == []


def test_a_rollback_a_standstill_and_the_end(scribe: Scribe) -> None:
    scribe.save(40)
    scribe.unstable(50, Action.ROLLBACK, target=40)
    for _ in range(2):
        scribe.write(
            "supervisor",
            ev.StallSeen(step=60, late_ranks=(3,), late_hosts=("n02",), since_s=48, limit_s=30),
        )
    scribe.finish(400)
    rollback, stall, finished = notices(scribe)
    assert "rolled back to step-00000040" in rollback.words
    assert stall.words == "no progress for 48 s at step 60; late: rank 3 on n02"
    assert finished.words == "finished at step 400"
    only = NotifySpec(to=("me",), events=(NotifyEvent.FINISHED,))
    assert notices(scribe, only) == [finished]
    assert notices(scribe, after=25 * HOUR) == [], "that is no news any more"


@pytest.mark.parametrize("kind", FindingKind)
def test_a_finding_that_needs_a_person_becomes_a_notice(kind: FindingKind) -> None:
    finding = WatchFinding(
        run="x", kind=kind, job="1", words="words", next="next", person=True, key="key"
    )
    of_journal = {FindingKind.HELD, FindingKind.CANCELLED, FindingKind.DELAYED}
    notice = notice_of(finding, 5.0)
    assert (notice is None) == (kind in of_journal | {FindingKind.UNREADABLE})
    handled = WatchFinding(
        run="x", kind=kind, job="1", words="", next="", person=False, remedy=Remedy.RECONCILE
    )
    assert notice_of(handled, 5.0) is None


@given(st.lists(st.booleans(), min_size=30, max_size=100), st.floats(1, 600))
def test_no_hour_has_more_messages_than_allowed_and_half_are_for_ends(
    kinds: list[bool], pause: float
) -> None:
    sent: list[tuple[float, bool]] = []
    for number, is_last in enumerate(kinds):
        now = number * pause
        if may_send([time for time, _ in sent], now, is_last=is_last):
            sent.append((now, is_last))
    for start, _ in sent:
        within = [last for time, last in sent if start <= time < start + HOUR]
        assert len(within) <= MOST_PER_HOUR
        assert within.count(False) <= MOST_PER_HOUR // 2


@given(
    st.lists(st.tuples(st.floats(0, 10_000), st.sampled_from(Outcome), st.booleans()), max_size=40)
)
def test_a_message_that_was_sent_is_never_due_again(
    looks: list[tuple[float, Outcome, bool]],
) -> None:
    """Whatever comes of the tries, whenever somebody looks."""
    key, now = ("me", digest_of("held|1|1.1")), 0.0
    tries: dict[tuple[str, str], SendTry] = {}
    outcomes: list[Outcome] = []
    for pause, outcome, at_once in looks:
        now += pause
        due = SentMessages(tries).next_try("me", "held|1|1.1", now, at_once=at_once)
        if due is None:
            continue
        assert Outcome.SENT not in outcomes
        assert due.number == len(outcomes) + 1 <= MOST_TRIES
        if outcomes and outcomes[-1] is Outcome.SENDING:
            assert now - tries[key].time >= 60
        outcomes.append(outcome)
        tries[key] = SendTry(
            target="me", digest=key[1], number=due.number, time=now, outcome=outcome
        )


def test_what_somebody_is_sending_is_not_due_where_the_clock_is_behind() -> None:
    sending = SendTry(
        target="me", digest=digest_of("held|1|1.1"), number=1, time=100.0, outcome=Outcome.SENDING
    )
    messages = SentMessages({("me", sending.digest): sending})
    assert messages.next_try("me", "held|1|1.1", 98.0, at_once=False) is None
    assert messages.next_try("me", "held|1|1.1", 100.0 - 7200, at_once=False) is not None


@given(st.text(), st.text(), st.text())
def test_texts_of_programs_stay_on_their_lines(words: str, next_: str, job: str) -> None:
    notice = EventNotice(event=NotifyEvent.HELD, key="k", time=0.0, words=words, next=next_)
    message = message_of(
        [notice], run="x", path="/runs/x", job=job, attempt=1, report=None, attached=False
    )
    assert message.title.isprintable() and len(message.title) <= 120
    lines = message.body.split("\n")
    assert lines[1].startswith("Next: ")
    assert len(lines) == (5 if job else 4)
    assert all(line.isprintable() for line in lines)
