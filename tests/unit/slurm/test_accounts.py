"""QOS and associations, as recorded from Slurm 22.05.8 and 26.05.3, in text and in JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.accounts import (
    QosRecord,
    parse_associations,
    parse_default_account,
    parse_qos,
)
from slurm_forge.slurm.text.json_answers import (
    json_associations,
    json_partitions,
    json_qos,
)
from slurm_forge.slurm.text.parsing import (
    parse_config,
    parse_partitions,
)
from slurm_forge.units import format_slurm_duration

DATA = Path(__file__).parent / "data"
VERSIONS = ["v22", "v26"]


def text(name: str) -> str:
    return (DATA / name).read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_qos_says_what_it_does_to_its_jobs(version: str) -> None:
    found = {each.name: each for each in parse_qos(text(f"{version}/qos.txt"))}
    assert list(found) == ["normal", "high", "scavenge", "cancelled", "own"]
    assert found["scavenge"] == QosRecord(
        name="scavenge",
        grace_time=timedelta(seconds=60),
        exempt_time=timedelta(minutes=10),
        preempt_mode="requeue",
        flags=("DenyOnLimit", "OverPartQOS"),
        max_wall=timedelta(days=1),
    )
    assert found["high"].preempts == ("cancelled", "scavenge")
    assert found["normal"].preempt_mode is None, '"cluster" is the cluster\'s own'
    assert found["own"].preempts_within and not found["scavenge"].preempts_within


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_user_may_ask_for(version: str) -> None:
    found = {each.account: each for each in parse_associations(text(f"{version}/assoc.txt"))}
    assert found["lab"].qos == ("high", "normal", "scavenge")
    assert found["lab"].default_qos == "scavenge"
    assert found["lab"].max_wall == timedelta(hours=12)
    assert found["root"].default_qos is None
    assert parse_default_account(text(f"{version}/user.txt")) == "lab"


def test_nobody_and_nothing_are_no_mistakes() -> None:
    assert parse_qos("") == parse_associations("\n") == ()
    assert parse_default_account("") is None
    assert parse_default_account("alice|\n") is None
    # An account's own limits, which are not a user's.
    assert parse_associations("lab|||||\n") == ()


def test_json_says_the_same_but_for_what_slurm_leaves_out_of_it() -> None:
    of_text, of_json = parse_qos(text("v26/qos.txt")), json_qos(text("v26/qos.json"))
    assert of_json[:-1] == of_text[:-1]
    # Slurm 26.05.3 itself: WITHIN is not among its words there.
    assert of_json[-1] == replace(of_text[-1], preempt_mode="requeue")
    assert sorted(json_associations(text("v26/assoc.json")), key=lambda each: each.account) == (
        sorted(parse_associations(text("v26/assoc.txt")), key=lambda each: each.account)
    )
    assert json_partitions(text("v26/partition.json")) == parse_partitions(
        text("v26/partition.txt")
    )


@pytest.mark.parametrize("missing", ["preempt_mode", "grace_time", "name", "nodes"])
def test_json_that_says_too_little_is_refused(missing: str) -> None:
    """Partitions of 23.11 come without PreemptMode: better the text form than a guess."""
    body = json.loads(text("v26/partition.json"))
    for each in body["partitions"]:
        del each[missing]
    with pytest.raises(SlurmCommandError, match="not understood"):
        json_partitions(json.dumps(body))


@pytest.mark.parametrize(
    "given",
    ["", "[]", "null", '{"qos": {}}', '{"qos": [1]}', '{"qos": [], "errors": ["no"]}', "[" * 9999],
)
def test_other_json_is_refused(given: str) -> None:
    if given == '{"qos": {}}':
        assert json_qos(given) == ()
        return
    with pytest.raises(SlurmCommandError):
        json_qos(given)


@pytest.mark.parametrize(
    "row",
    [
        "normal|00:00:00",
        "normal|soon|||cluster||",
        "|00:00:00|||cluster||",
        "You have new mail.",
    ],
)
def test_a_row_that_is_none_is_told(row: str) -> None:
    with pytest.raises(SlurmCommandError, match="not understood"):
        parse_qos(row)


NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789_-", min_size=1, max_size=12)
SECONDS = st.integers(0, 10**6).map(lambda count: timedelta(seconds=count))
MODES = st.sampled_from([None, "requeue", "cancel", "suspend", "within,requeue"])


@given(
    st.lists(
        st.builds(
            QosRecord,
            name=NAMES,
            grace_time=SECONDS,
            preempts=st.lists(NAMES, max_size=4).map(lambda names: tuple(sorted(names))),
            exempt_time=st.none() | SECONDS,
            preempt_mode=MODES,
            max_wall=st.none() | SECONDS,
        ),
        max_size=5,
    )
)
def test_what_sacctmgr_prints_is_read_back(records: list[QosRecord]) -> None:
    def cell(value: Any) -> str:
        if isinstance(value, timedelta):
            return format_slurm_duration(value)
        return "" if value is None else ",".join(value) if isinstance(value, tuple) else str(value)

    rows = [
        "|".join(
            [
                each.name, cell(each.grace_time), cell(each.preempts), cell(each.exempt_time),
                each.preempt_mode or "cluster", "", cell(each.max_wall),
            ]
        )
        for each in records
    ]  # fmt: skip
    assert parse_qos("\n".join(rows)) == tuple(records)


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(given: str) -> None:
    for parse in (parse_qos, parse_associations, parse_default_account, json_qos,
                  json_associations, json_partitions):  # fmt: skip
        try:
            parse(given)
        except SlurmCommandError as error:
            assert error.next_step


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(["qos", "partitions", "associations"]), st.lists(JSON, max_size=3))
def test_any_json_is_read_or_refused(key: str, given: list[Any]) -> None:
    for parse in (json_qos, json_associations, json_partitions):
        try:
            parse(json.dumps({key: given}))
        except SlurmCommandError:
            continue


@given(st.data())
def test_a_document_with_one_value_changed_is_read_or_refused(data: st.DataObject) -> None:
    body = json.loads(text("v26/partition.json"))
    place: Any = data.draw(st.sampled_from(body["partitions"]))
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not (isinstance(place[key], dict) and place[key]) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        json_partitions(json.dumps(body))
    except SlurmCommandError as error:
        assert error.next_step


def test_configuration_of_26_05() -> None:
    config = parse_config(text("v26/config.txt"))
    assert config.version == "26.05.3" and config.sends_user_signal
    assert config.max_batch_requeue == 5
    assert config.constrain_ram is not None
    assert config.job_submit_plugins == ()


#: Written from the man pages of 20.11: there the option stood in another place.
OF_20_11 = """\
Configuration data as of 2021-03-01T10:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = old
EnforcePartLimits       = ALL
JobSubmitPlugins        = lua
LaunchParameters        = mpir_use_nodeaddr,test_exec
MaxArraySize            = 10001
PreemptMode             = GANG,SUSPEND
PreemptType             = preempt/qos
RequeueExit             = 142
SLURM_VERSION           = 20.11.9
SlurmctldParameters     = idle_on_node_suspend,preempt_send_user_signal
"""


def test_configuration_of_20_11() -> None:
    config = parse_config(OF_20_11)
    assert config.sends_user_signal and config.preempt_type == "preempt/qos"
    assert config.accounting_storage_enforce == ("associations", "limits", "qos")
    assert config.job_submit_plugins == ("lua",)
    assert config.requeue_exit == "142"
    assert config.constrain_ram is None, "not said, so not known"


def test_who_may_use_a_partition() -> None:
    shown = text("v26/partition.txt").split("\n\n")[0]
    (open_,) = parse_partitions(shown)
    assert open_.allow_accounts is open_.allow_qos is open_.allow_groups is None
    limited = shown.replace("AllowAccounts=ALL AllowQos=ALL", "DenyAccounts=bad AllowQos=a,b")
    limited = limited.replace("AllowGroups=ALL", "AllowGroups=phys").replace(
        "OverSubscribe=NO", "OverSubscribe=EXCLUSIVE"
    )
    (closed,) = parse_partitions(limited)
    assert closed.allow_groups == ("phys",) and closed.allow_qos == ("a", "b")
    assert closed.deny_accounts == ("bad",) and closed.allow_accounts is None
    assert closed.exclusive and not open_.exclusive
