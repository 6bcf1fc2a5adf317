from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_forge.control import LaunchBrief
from slurm_forge.control.addresses import (
    candidates,
    format_addresses,
    parse_addresses,
    usable_hosts,
)
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.agent import AgentMessage, decode_agents
from slurm_forge.control.messages.hub import Publish, RequestKind, RequestTarget
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import RankFailed
from slurm_forge.control.session import LINE_LIMIT
from slurm_forge.errors import ControlChannelError
from slurm_forge.json_codec import parse
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.position import LAST, Position
from tests.golden.samples import kinds_of

KINDS: list[type[Message]] = list(kinds_of(protocol.ControlMessage))
NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=30)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBERS,
    str: TEXT,
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str | None: st.none() | TEXT,
    Position: st.builds(Position, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    tuple[int, ...]: st.lists(NUMBERS, max_size=5).map(tuple),
    tuple[str, ...]: st.lists(TEXT, max_size=5).map(tuple),
    RequestKind: st.sampled_from(list(RequestKind)),
}


def message_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    hints = typing.get_type_hints(kind)
    values = {
        f.name: st.tuples(VALUES[typing.get_args(hints[f.name])[0]])
        if f.name in kind.columns
        else VALUES[hints[f.name]]
        for f in dataclasses.fields(kind)
        if f.name != "m"
    }
    return st.builds(kind, **values)


MESSAGES = st.one_of(*(message_of(kind) for kind in KINDS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: type[Message]) -> None:
    @settings(max_examples=25, deadline=None)
    @given(message_of(kind))
    def back(message: Message) -> None:
        line = protocol.encode(message)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert protocol.decode(line) == message

    back()


AGENTS: list[type[Message]] = list(kinds_of(AgentMessage))


@pytest.mark.parametrize("kind", AGENTS, ids=lambda kind: kind.__name__)
def test_agents_messages_come_back_and_are_none_of_the_ranks(kind: type[Message]) -> None:
    @settings(max_examples=25, deadline=None)
    @given(message_of(kind))
    def back(message: Message) -> None:
        line = protocol.encode(message)
        assert decode_agents(line) == message
        with pytest.raises(ControlChannelError):
            protocol.decode(line)

    back()


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(line: bytes) -> None:
    try:
        protocol.decode(line)
    except ControlChannelError as error:
        assert error.next_step


@given(
    message=MESSAGES,
    key=TEXT,
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=6,
    ),
)
def test_a_message_with_one_wrong_field_is_taken_or_refused(
    message: Message, key: str, value: object
) -> None:
    body = json.loads(protocol.encode(message))
    names = [name for name in body if name != "m"]
    body[names[len(key) % len(names)] if names else key] = value
    try:
        found = protocol.decode(json.dumps(body).encode())
    except ControlChannelError:
        return
    assert type(found) is type(message)
    protocol.encode(found)


PULSE = (
    '{"m":"pulse","turn":0,"step":%s,"begun":1,"phase_no":0,"poll":0,"phase":"","kind":"",'
    '"since_s":%s,"mute_s":[0],"state":["S"]}'
)
AT = '{"m":"at","id":1,"round":0,"path":"","position":%s,"waiting":true}'


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000,
        b'{"m":' * 10_000,
        *(
            (PULSE % (step, since)).encode()
            for step, since in (
                ("1", "[1" + "0" * 400 + "]"),
                ("1", "[NaN]"),
                ("1", "[-Infinity]"),
                ("1", "[true]"),
                ("1", '["1"]'),
                ("1", "1"),
                ("1", "[]"),
                ("1", "[1,1]"),
                ("1" + "0" * 5000, "[1]"),
                ("18446744073709551616", "[1]"),
                ("-9223372036854775809", "[1]"),
                ("1.0", "[1]"),
                ("true", "[1]"),
                ('"1"', "[1]"),
                ("null", "[1]"),
            )
        ),
        *(
            (AT % position).encode()
            for position in (
                "[1]",
                "[1,2,3,4,5]",
                "[1,2,true,0]",
                "[1,2,3,9223372036854775808]",
                '{"step":1,"phase":2,"poll":3,"turn":4}',
            )
        ),
        b'{"m":"notice"}',
        b'{"m":"notice","what":"x","more":1}',
        b'{"m":"notice","what":"\\ud800"}',
        b'{"m":"notice","what":"\xff"}',
        b'{"m":"request","id":1,"kind":"unheard-of","reason":"","round":0}',
        b'{"m":"unheard-of"}',
        b'{"what":"x"}',
        b"7",
        b'"m"',
        b"",
    ],
    ids=lambda line: repr(line[:90]),
)
def test_what_is_none_of_ours_is_refused(line: bytes) -> None:
    with pytest.raises(ControlChannelError) as refused:
        protocol.decode(line)
    assert len(str(refused.value)) < 300


def test_these_lines_are_refused_for_what_is_wrong_with_them() -> None:
    assert protocol.decode((PULSE % ("1", "[1]")).encode())
    assert protocol.decode((AT % "[1,2,3,4]").encode())


@pytest.mark.parametrize("letter", ["x", "é", "漢", "\U0001f525", "\udcff", "\0", "\n"])
def test_last_words_always_fit_a_line_and_keep_their_end(letter: str) -> None:
    failed = RankFailed(
        step=5,
        phase="train",
        error="builtins.ValueError",
        text=letter * 50_000 + "in short",
        trace=letter * 50_000 + "ValueError: at last",
        cause="app_error",
        micro_batch=8,
    )
    line = protocol.encode(failed)
    assert len(line) <= LINE_LIMIT
    found = protocol.decode(line)
    assert isinstance(found, RankFailed)
    assert found.text.endswith("in short")
    assert found.trace.endswith("ValueError: at last")
    assert (found.step, found.cause) == (5, "app_error")


def test_a_published_value_is_whole_or_an_error() -> None:
    long = "n001," * 10_000
    found = protocol.decode(protocol.encode(Publish(key="k", value=long)))
    assert found == Publish(key="k", value=long)
    with pytest.raises(ValueError, match="bytes"):
        protocol.encode(Publish(key="k", value="x" * (1 << 17)))


def test_the_end_of_a_phase_survives_the_wire() -> None:
    message = RequestTarget(id=1, round=0, position=Position(4, 1, LAST))
    assert protocol.decode(protocol.encode(message)) == message


@given(
    factor=st.floats(0.01, 1),
    excluded=st.lists(st.from_regex(r"n[0-9]{1,3}", fullmatch=True), max_size=5),
    micro=st.none() | st.integers(1, 64),
    committed=st.none() | st.integers(0, 10**9),
)
def test_ranks_read_the_brief_as_the_conductor_wrote_it(
    factor: float, excluded: list[str], micro: int | None, committed: int | None
) -> None:
    brief = LaunchBrief(
        attempt=3,
        launch=2,
        plan=RecoveryPlan(lr_factor=factor, micro_batch=micro, exclude_nodes=tuple(excluded)),
        committed_step=committed,
    )
    assert parse(LaunchBrief, brief.to_text()) == brief


def test_addresses_go_through_one_variable_and_come_back() -> None:
    hosts = candidates("10.1.2.3")
    assert hosts[0] == "10.1.2.3"
    assert usable_hosts(hosts)[-1] == "127.0.0.1"
    assert "127.0.0.1" not in usable_hosts([*hosts[:-1], "local-0123456789abcdef"])
    assert parse_addresses(format_addresses(hosts, 4711)) == (hosts, 4711)
    for text in ("", "host", ":80", "host:", "host:x"):
        with pytest.raises(ValueError, match="not an address"):
            parse_addresses(text)
