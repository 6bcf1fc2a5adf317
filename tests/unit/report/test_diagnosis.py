"""Whom the incidents point at: one rank at one step on many nodes is no node's fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.page.run_page import run_page
from slurm_forge.report.page.values import RunPage, RunSources
from slurm_forge.report.story import story as s
from slurm_forge.report.story.diagnosis import diagnosis
from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.decision import Action
from tests.unit.report.journals import Scribe

#: Rank, step, node.
Place = tuple[int | None, int | None, str]


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


def story_of(scribe: Scribe, places: list[Place], cause: Cause = Cause.HANG) -> s.RunStory:
    """A launch for each place, which its rank ends."""
    scribe.begin("n1", "n2", "n3")
    for _ in places:
        scribe.resume(0)
        scribe.train(1, 2)
        scribe.incident(cause, Action.RELAUNCH, step=2)
        scribe.relaunch(nodes=("n1", "n2", "n3"))
    story = explain(scribe.facts())
    (attempt,) = story.attempts
    launches = tuple(
        replace(
            launch,
            incidents=tuple(
                replace(each, rank=rank, step=step, hosts=(host,)) for each in launch.incidents
            ),
        )
        for launch, (rank, step, host) in zip(attempt.launches, places, strict=False)
    )
    return replace(story, attempts=(replace(attempt, launches=launches),))


@pytest.mark.parametrize(
    ("places", "agreeing", "text"),
    [
        (
            [(1, 220, "n1"), (1, 220, "n2"), (1, 220, "n3")],
            "all 3",
            "rank 1 at step 220, on 3 different nodes: suspect the code or the data, not a node",
        ),
        (
            [(1, 220, "n1"), (0, 7, "n3"), (1, 220, "n2")],
            "2 of 3",
            "rank 1 at step 220, on 2 different nodes: suspect the code or the data, not a node",
        ),
        (
            [(0, 5, "n2"), (1, 9, "n2")],
            "all 2",
            "on node n2, at different ranks: suspect the node",
        ),
        ([(1, 5, "n2"), (1, 9, "n2")], "all 2", "on node n2, at different steps: suspect the node"),
    ],
)
def test_what_incidents_have_in_common(
    scribe: Scribe, places: list[Place], agreeing: str, text: str
) -> None:
    found = diagnosis(story_of(scribe, places))
    assert found is not None
    assert (found.cause, found.agreeing, found.text) == ("hang", agreeing, text)


@pytest.mark.parametrize(
    "places",
    [
        [(1, 220, "n1")],
        [(1, 220, "n1"), (1, 220, "n1")],  # the same rank, step and node: it may be either
        [(1, 220, "n1"), (0, 7, "n2"), (2, 9, "n3")],
        [(None, None, "n1"), (None, None, "n2")],
    ],
)
def test_incidents_without_a_pattern_point_at_nothing(scribe: Scribe, places: list[Place]) -> None:
    assert diagnosis(story_of(scribe, places)) is None


def test_preemptions_and_full_disks_are_nobodys_fault_here(scribe: Scribe) -> None:
    places: list[Place] = [(1, 220, "n1"), (1, 220, "n2")]
    assert diagnosis(story_of(scribe, places, Cause.STORAGE)) is None


def page_of(scribe: Scribe) -> RunPage:
    return run_page(RunSources(facts=scribe.facts()))


def next_of(page: RunPage) -> str:
    return " ".join(piece.text for step in page.next for piece in step)


def test_a_hang_names_the_file_of_its_stack_and_one_command(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    scribe.save(4)
    stacks = Evidence("stacks", "attempts/1/stacks/1/rank-00001.txt")
    reason = (
        "hang; next: look in the output for what the rank named in the evidence was waiting for"
    )
    scribe.incident(
        Cause.HANG, Action.HOLD, step=5, rank=1, evidence=(Evidence("watchdog", "x"), stacks),
        reason=reason,
    )  # fmt: skip
    scribe.held(reason)
    page = page_of(scribe)
    assert next_of(page) == (
        "Read in attempts/1/stacks/1/rank-00001.txt what rank 1 was waiting for, then "
        " slurm-forge requeue tiny-gpt  (it continues from step 4)"
    )
    assert [p.text for step in page.next for p in step if p.command] == [
        "slurm-forge requeue tiny-gpt"
    ]


def suspected(scribe: Scribe, *, on_purpose: bool) -> RunPage:
    scribe.begin("n01", "n02")
    scribe.resume(0)
    if on_purpose:
        scribe.write("rank0", ev.Note(text="injected faults: nan@2"))
    scribe.train(1, 2)
    scribe.skip(2, evidence=(Evidence("replay", "transient; suspect n02"),))
    scribe.train(3, 4)
    scribe.finish(4)
    return page_of(scribe)


def test_a_suspected_node_is_in_its_row_and_in_the_next_step(scribe: Scribe) -> None:
    page = suspected(scribe, on_purpose=False)
    (row, clear) = page.nodes
    assert (row.name, row.tone, clear.notes) == ("n02", "warn", ())
    assert "step 2 went wrong there and was fine when computed again" in row.notes[0]
    assert "before the next run check n02, where step 2 went wrong" in next_of(page)


def test_no_node_is_to_be_checked_for_a_fault_on_purpose(scribe: Scribe) -> None:
    page = suspected(scribe, on_purpose=True)
    assert page.nodes[0].notes[0].endswith("but faults were injected on purpose")
    assert "check" not in next_of(page)
    assert "n02 came under suspicion (step 2), but faults were injected" in next_of(page)
