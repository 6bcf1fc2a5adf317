"""A survey says what it could not ask, and guesses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import SlurmCommandError, SlurmUnreachableError
from slurm_forge.slurm.survey import Reply, take_survey
from slurm_forge.slurm.text.json_answers import (
    json_associations,
    json_partitions,
    json_qos,
)
from tests.unit.slurm.recorded import DATA, Recorded, recorded

NOT_HERE = SlurmUnreachableError(("x",), 127, "it can't be started: No such file or directory")
LATE = SlurmUnreachableError(("x",), 124, "no answer within 10 s.")
FORBIDDEN = SlurmCommandError(("x",), 1, "Access/permission denied")


@pytest.mark.parametrize("version", ["v22", "v26"])
def test_everything_is_asked_once(version: str) -> None:
    slurm = Recorded(recorded(version))
    survey = take_survey(slurm, "root")
    assert len(slurm.asked) == len(survey.questions) == 7
    assert {each.reply for each in survey.questions} == {Reply.ANSWERED}
    assert survey.config is not None and survey.config.cluster_name is not None
    assert survey.partitions is not None and len(survey.partitions) == 4
    assert survey.nodes is not None and survey.qos is not None and len(survey.qos) == 5
    assert survey.associations is not None and survey.default_account == "lab"
    assert survey.architecture == "aarch64"
    # One database may serve several clusters.
    cluster = survey.config.cluster_name
    assert any(f"user=root cluster={cluster}" in line for line in slurm.asked)


@pytest.mark.parametrize(
    ("wall", "ahead"),
    [
        ((1000.2, 1001.5), 0.0),
        ((1000.9, 1003.0), 0.0),  # its second may have begun after the question
        ((4600.0, 4608.0), 3599.0),
        ((0.0, 100.0), -900.0),
    ],
)
def test_the_controllers_clock_is_compared_with_this_machines(
    wall: tuple[float, float], ahead: float
) -> None:
    answers = recorded("v22")
    config = answers["scontrol show config"].replace("as of 1795255017", "as of 1000")
    clock = iter(wall)
    slurm = Recorded(answers | {"scontrol show config": config})
    survey = take_survey(slurm, "root", wall=lambda: next(clock))
    assert survey.clock_ahead_s == ahead


def test_a_controller_that_does_not_tell_its_time_is_not_compared() -> None:
    answers = recorded("v26")
    config = answers["scontrol show config"].partition("\n")[2]
    assert (
        take_survey(Recorded(answers | {"scontrol show config": config}), "root").clock_ahead_s
        is None
    )
    assert take_survey(Recorded(answers, {"scontrol": LATE}), "root").clock_ahead_s is None


def test_a_controller_that_is_gone_is_waited_for_once() -> None:
    slurm = Recorded(recorded("v26"), {"scontrol": LATE, "sinfo": LATE, "sacctmgr": LATE})
    survey = take_survey(slurm, "root")
    assert [line.split(" ")[0] for line in slurm.asked] == ["scontrol", "sacctmgr"]
    assert survey.config is survey.partitions is survey.nodes is survey.qos is None
    assert survey.questions[0].words == "no answer within 10 s."
    assert {each.reply for each in survey.questions} == {Reply.NO_ANSWER, Reply.NOT_ASKED}


def test_a_command_that_is_missing_keeps_nothing_else_from_being_asked() -> None:
    survey = take_survey(
        Recorded(recorded("v26"), {"sinfo": NOT_HERE, "sacctmgr": NOT_HERE}), "root"
    )
    assert survey.partitions is not None and survey.nodes is None and survey.qos is None
    replies = {each.command: each.reply for each in survey.questions}
    assert replies["sinfo"] is replies["sacctmgr show qos"] is Reply.NO_COMMAND
    assert replies["scontrol show partition"] is Reply.ANSWERED


def test_what_is_forbidden_is_told_in_slurms_own_words() -> None:
    broken: dict[str, Exception] = {"sacctmgr --noheader --parsable2 show qos": FORBIDDEN}
    survey = take_survey(Recorded(recorded("v26") | {"sacctmgr --json": "{}"}, broken), "root")
    (question,) = [each for each in survey.questions if each.reply is not Reply.ANSWERED]
    assert question.reply is Reply.REFUSED and question.words == "Access/permission denied"
    assert survey.qos is None and survey.associations


def test_json_where_the_text_is_not_understood() -> None:
    answers = recorded("v26") | {
        "scontrol -a show partition": "partitions, in a form of 2030",
        "sacctmgr --noheader --parsable2 show qos": "a|b",
    }
    answers = {
        "scontrol -a show partition --json": (DATA / "v26/partition.json").read_text(),
        "sacctmgr --json show qos": (DATA / "v26/qos.json").read_text(),
        **answers,
    }
    survey = take_survey(Recorded(answers), "root")
    assert survey.partitions is not None and survey.partitions[1].name == "preempt"
    assert survey.qos is not None and survey.qos[2].name == "scavenge"
    assert {each.reply for each in survey.questions} == {Reply.ANSWERED}


def test_without_a_database_nobody_is_asked_for_qos() -> None:
    answers = recorded("v26")
    answers["scontrol show config"] = answers["scontrol show config"].replace(
        "accounting_storage/slurmdbd", "(null)"
    )
    slurm = Recorded(answers)
    survey = take_survey(slurm, "root")
    assert survey.has_database is False and survey.qos == survey.associations == ()
    assert not any(line.startswith("sacctmgr") for line in slurm.asked)


def test_a_name_that_is_an_option_is_never_handed_on() -> None:
    slurm = Recorded(recorded("v26"))
    take_survey(slurm, "root; rm -rf /")
    assert not any("rm" in line.split() for line in slurm.asked)


KINDS = st.sampled_from([None, NOT_HERE, LATE, FORBIDDEN, ""])


@given(st.lists(KINDS, min_size=7, max_size=7), st.text(max_size=60))
def test_whatever_fails_is_told_and_the_rest_is_known(kinds: list[object], rubbish: str) -> None:
    answers = recorded("v26") | {"scontrol show partition": "", "sacctmgr --json": rubbish}
    broken: dict[str, Exception] = {}
    for start, kind in zip(recorded("v26"), kinds, strict=True):
        if isinstance(kind, Exception):
            broken[start] = kind
        elif kind == "":
            answers[start] = rubbish
    survey = take_survey(Recorded(answers, broken), "root")
    bad = [each for each in survey.questions if each.reply is not Reply.ANSWERED]
    if survey.config is None:
        assert any(each.command == "scontrol show config" for each in bad)
    if survey.partitions is None:
        assert any("partition" in each.command for each in bad)
    if survey.qos is None:
        assert any("qos" in each.command for each in bad)
    assert all(len(each.words) <= 200 for each in survey.questions)


def test_nodes_that_can_not_be_read_leave_the_architecture_unknown() -> None:
    answers = recorded("v26")
    answers["scontrol -a show partition"] = answers["scontrol -a show partition"].replace(
        " Nodes=n", " Nodes=n[1-99999999],n"
    )
    survey = take_survey(Recorded(answers), "root")
    assert survey.partitions and survey.architecture is None


WRONG = st.sampled_from([None, "x", 5, -1, 1.5, [], {}, ["a"], True, 10**20])


@given(st.sampled_from(["partition", "qos", "assoc"]), st.data())
def test_json_of_other_types_is_not_understood_and_never_a_record(
    kind: str, data: st.DataObject
) -> None:
    """Records that hold a list for a number would fail far from here."""
    body = json.loads((DATA / "v26" / f"{kind}.json").read_text())
    places = list(
        _places(body[{"partition": "partitions", "assoc": "associations"}.get(kind, kind)])
    )
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(WRONG)
    read = {"partition": json_partitions, "qos": json_qos, "assoc": json_associations}[kind]
    try:
        records = read(json.dumps(body))
    except SlurmCommandError:
        return
    hints = {each.name: each.type for each in fields(records[0])} if records else {}
    allowed = {"str": str, "int": int, "timedelta": timedelta, "bool": bool, "None": type(None)}
    for record in records:
        for name, hint in hints.items():
            kinds = tuple(allowed.get(word.strip(), tuple) for word in str(hint).split(" | "))
            assert isinstance(getattr(record, name), kinds), (name, getattr(record, name))
            hash(getattr(record, name))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)
