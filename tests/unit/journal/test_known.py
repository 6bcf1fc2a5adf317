from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal import events as ev
from slurm_forge.journal.known import (
    Known,
    KnownCheckpoint,
    doubt_after_instability,
    newest_usable,
)
from slurm_forge.journal.known import roll_back as roll_back_past
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust
from tests.unit.journal.test_fold import Story


def trusts(story: Story) -> dict[int, str]:
    return {each.name.step: each.trust.value for each in story.state().known}


def judge(story: Story, step: int, trust: Trust, by: str = "rank0", why: str = "") -> Story:
    return story.tell(ev.CheckpointJudged(name=story.name(step), trust=trust, reason=why), by)


def skip(story: Story, *steps: int) -> Story:
    for number, step in enumerate(steps, start=1):
        story.tell(
            ev.StepSkipped(step=step, first_sample=0, samples=1, consecutive=number), "rank0"
        )
    return story


def test_trust_is_earned_and_a_later_verification_takes_nothing_away() -> None:
    story = Story().start().commit(10)
    assert trusts(story) == {10: "written"}
    assert trusts(judge(story, 10, Trust.VERIFIED)) == {10: "verified"}
    assert trusts(judge(story, 10, Trust.GOOD)) == {10: "good"}
    assert trusts(judge(story, 10, Trust.VERIFIED)) == {10: "good"}


def test_what_is_not_healthy_is_suspect_from_the_start_and_stays_so() -> None:
    story = Story().start()
    story.tell(
        ev.CheckpointCommitted(
            name=story.name(10), step=10, reason="", seconds=1, size=1, findings=("inf in adam",)
        )
    )
    judge(story, 10, Trust.GOOD)
    (known,) = story.state().known
    assert (known.trust, known.why) == (Trust.SUSPECT, "inf in adam")


def test_after_an_instability_only_good_ones_count() -> None:
    story = Story().start().commit(10).commit(20).commit(30).commit(32)
    judge(story, 10, Trust.GOOD)
    skip(story, 31, 32, 33).incident(Cause.NON_FINITE, 33)
    assert trusts(story) == {10: "good", 20: "suspect", 30: "suspect", 32: "suspect"}
    why = {each.name.step: each.why for each in story.state().known}
    assert "onset of non_finite at step 31" in why[32]
    assert "not known to be good yet" in why[30]
    usable = newest_usable(story.state().known)
    assert usable is not None and usable.name.step == 10


def test_without_a_good_one_yet_those_from_before_the_onset_are_all_there_is() -> None:
    story = skip(Story().start().commit(20).commit(30).commit(32), 31, 32, 33)
    story.incident(Cause.NON_FINITE, 33)
    assert trusts(story) == {20: "written", 30: "written", 32: "suspect"}


def test_a_preemption_casts_no_doubt() -> None:
    story = Story().start().commit(20).incident(Cause.PREEMPTED, 25)
    assert trusts(story) == {20: "written"}


def test_what_a_person_says_has_the_last_word_whenever_it_was_said() -> None:
    story = Story().start()
    judge(story, 30, Trust.GOOD, by="cli", why="looked at by hand")  # its line comes first
    story.commit(20).commit(30)
    skip(story, 25, 26, 27).incident(Cause.NON_FINITE, 27)
    judge(story, 30, Trust.SUSPECT)
    assert trusts(story) == {20: "written", 30: "good"}
    assert trusts(judge(story, 30, Trust.SUSPECT, by="cli")) == {20: "written", 30: "suspect"}


def test_what_was_deleted_is_known_no_more() -> None:
    story = Story().start().commit(10).commit(20)
    story.tell(ev.CheckpointsPruned(names=(story.name(10), "nonsense"), reason=""), "rank0")
    assert trusts(story) == {20: "written"}


def test_a_judgement_whose_line_comes_late_brings_nothing_back() -> None:
    story = Story().start().commit(10).commit(20)
    name = story.name(10)
    story.tell(ev.CheckpointsPruned(names=(name,), reason=""), "rank0")
    judge(story, 10, Trust.GOOD, by="cli")
    assert trusts(story) == {20: "written"}


def test_reading_it_back_by_hand_binds_nobody() -> None:
    story = judge(Story().start().commit(10), 10, Trust.VERIFIED, by="cli")
    assert trusts(story) == {10: "verified"}
    assert trusts(judge(story, 10, Trust.GOOD)) == {10: "good"}
    story = judge(Story().start().commit(40), 40, Trust.VERIFIED, by="cli")
    assert trusts(skip(story, 39, 40).incident(Cause.NON_FINITE, 40)) == {40: "suspect"}


def test_what_an_older_attempt_publishes_late_is_another_branch() -> None:
    story = Story().start().commit(10)
    early = CheckpointName.parse(story.name(10))
    late = CheckpointName(50, 1, 1, "0000beef")
    story.start()
    story.tell(ev.Resumed(step=10, checkpoint=str(early), world_size=2, candidates=(str(early),)))

    def refused(name: CheckpointName) -> str | None:
        return story.state().refusal(name)

    assert refused(late) is None, "nothing has been trained since: it is simply newer"
    story.progress(11)
    assert "after attempt 2 had gone on" in str(refused(late))
    assert refused(early) is None
    assert refused(CheckpointName(5, 1, 1, "0000beef")) is None, "one that fell off the list"
    assert refused(CheckpointName(60, 2, 1, "0000beef")) is None


def doubted(known: Known, onset: int, cause: Cause = Cause.LOSS_SPIKE) -> Known:
    by_name = {each.name: each for each in known}
    doubt_after_instability(by_name, onset, cause)
    return tuple(by_name.values())


def gone_back(known: Known, target: CheckpointName) -> Known:
    by_name = {each.name: each for each in known}
    roll_back_past(by_name, target)
    return tuple(by_name.values())


@st.composite
def histories(draw: st.DrawFn) -> Known:
    steps = draw(st.lists(st.integers(0, 40), unique=True, max_size=8))
    return tuple(
        KnownCheckpoint(
            name=CheckpointName(step, 1, 1, f"{step:08x}"),
            trust=draw(st.sampled_from(Trust)),
            by_person=draw(st.booleans()),
        )
        for step in steps
    )


@given(histories(), st.integers(0, 40))
def test_doubt_only_ever_takes_trust_away_and_twice_is_once(known: Known, onset: int) -> None:
    once = doubted(known, onset)
    assert doubted(once, onset) == once
    for before, after in zip(known, once, strict=True):
        assert after == before or (after.trust is Trust.SUSPECT and not before.by_person)
        if after.name.step >= onset and not before.by_person:
            assert after.trust is Trust.SUSPECT
        if before.trust is Trust.GOOD and before.name.step < onset:
            assert after == before


@pytest.mark.parametrize("onset", [1, 50])
def test_newest_usable_of_nothing(onset: int) -> None:
    assert newest_usable(doubted((), onset, Cause.NON_FINITE)) is None


# -- rolling back ----------------------------------------------------------------------------------


def roll_back(story: Story, step: int | None, ident: str = "r") -> Story:
    return story.tell(
        ev.DecisionTaken(
            decision=Decision(
                incident_id=ident,
                cause=Cause.NON_FINITE,
                action=Action.ROLLBACK,
                reason="",
                plan=RecoveryPlan(),
                rung=1,
                target=None if step is None else story.name(step),
            )
        )
    )


def test_what_is_younger_than_the_target_of_a_rollback_is_not_resumed_from() -> None:
    story = roll_back(Story().start().commit(10).commit(20).commit(30), 20)
    assert trusts(story) == {10: "written", 20: "written", 30: "suspect"}
    (why,) = [each.why for each in story.state().known if each.why]
    assert why == "rolled back past it, to step 20"


def test_a_rollback_to_nothing_or_nonsense_casts_no_doubt() -> None:
    story = roll_back(Story().start().commit(10), None)
    assert trusts(story) == {10: "written"}
    story.tell(
        ev.DecisionTaken(
            decision=Decision(
                incident_id="n",
                cause=Cause.NON_FINITE,
                action=Action.ROLLBACK,
                reason="",
                plan=RecoveryPlan(),
                target="edited by hand",
            )
        )
    )
    assert trusts(story) == {10: "written"}


def test_only_the_first_decision_about_an_incident_counts() -> None:
    story = roll_back(roll_back(Story().start().commit(10).commit(20), 20), 10)
    assert trusts(story) == {10: "written", 20: "written"}


def test_a_rollback_does_not_overrule_a_person() -> None:
    story = judge(Story().start().commit(10).commit(20), 20, Trust.GOOD, by="cli")
    assert trusts(roll_back(story, 10)) == {10: "written", 20: "good"}


def test_what_is_written_after_the_rollback_is_trusted_as_any_other() -> None:
    story = roll_back(Story().start().commit(10).commit(20), 10)
    story.launch = 2
    assert sorted(each.trust.value for each in story.commit(20).state().known) == [
        "suspect",
        "written",
        "written",
    ]


@given(histories(), st.integers(0, 40))
def test_going_back_takes_trust_away_from_younger_ones_only(known: Known, step: int) -> None:
    target = CheckpointName(step, 1, 1, "ffffffff")
    once = gone_back(known, target)
    assert gone_back(once, target) == once
    for before, after in zip(known, once, strict=True):
        if before.name.step <= step or before.by_person:
            assert after == before
        else:
            assert after.trust is Trust.SUSPECT


def test_the_onset_that_was_found_counts_more_than_the_steps_that_were_skipped() -> None:
    story = skip(Story().start().commit(20).commit(30), 31, 32, 33)
    story.tell(
        ev.IncidentSeen(
            incident=Incident(
                id="x",
                cause=Cause.LOSS_SPIKE,
                confidence=Confidence.LIKELY,
                step=33,
                onset=25,
            )
        )
    )
    assert trusts(story) == {20: "written", 30: "suspect"}
