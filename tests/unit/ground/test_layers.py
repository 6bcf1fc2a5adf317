"""Documents laid over each other: what wins, and where every key is from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge import documents
from slurm_forge.documents import DEFAULT, Document, KeyPath, SourcePlace
from slurm_forge.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["x", "1e-3", "a: b"])
#: Few keys, so that layers meet; all kinds of values at the same key, so that they clash.
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)
DATA = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)
JSON = st.recursive(
    PLAIN | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def layer(data: dict[str, Any], name: str) -> Document:
    return documents.load(documents.dump(data), name, may_be_empty=True)


def at(data: Any, path: KeyPath) -> Any:
    """The value at a path; KeyError where there is none."""
    for part in path:
        if not isinstance(data, list if isinstance(part, int) else dict):
            raise KeyError(part)
        try:
            data = data[part]
        except IndexError:
            raise KeyError(part) from None
    return data


def there(data: Any, path: KeyPath) -> bool:
    try:
        at(data, path)
    except KeyError:
        return False
    return True


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Values that are taken as a whole: all but keys and values that are not empty."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def over(low: Any, high: Any) -> Any:
    """What merging is, said in the shortest way."""
    if isinstance(low, dict) and isinstance(high, dict):
        return {
            key: over(low[key], high[key]) if key in low and key in high else {**low, **high}[key]
            for key in {**low, **high}
        }
    return high


@given(DATA, DATA, DATA)
def test_it_does_not_matter_which_neighbours_are_merged_first(
    low: dict[str, Any], middle: dict[str, Any], high: dict[str, Any]
) -> None:
    a, b, c = layer(low, "a"), layer(middle, "b"), layer(high, "c")
    assert documents.merged(documents.merged(a, b), c) == documents.merged(
        a, documents.merged(b, c)
    )
    assert documents.merged(a, b, c).data == over(over(low, middle), high)


@given(st.lists(DATA, min_size=1, max_size=4))
def test_every_value_is_from_the_highest_layer_that_says_it(data: list[dict[str, Any]]) -> None:
    layers = [layer(each, f"{index}.yaml") for index, each in enumerate(data)]
    whole = documents.merged(*layers)
    for path, value in leaves(whole.data):
        if not path:
            continue
        place = whole.written_at(path)
        assert place is not None
        (index,) = (number for number, each in enumerate(layers) if each.path == place.source)
        assert at(layers[index].data, path) == value or value == {}
        assert place.line == layers[index].lines[path]
        assert not any(there(each.data, path) for each in layers[index + 1 :])
    assert set(whole.lines) == set(documents.paths_in(whole.data))


@given(DATA, DATA)
def test_what_is_taken_out_leaves_no_trace(low: dict[str, Any], high: dict[str, Any]) -> None:
    whole = documents.merged(layer(low, "a"), layer(high, "b"))
    found = documents.without(whole, "a", "c")
    assert found.data == {key: value for key, value in whole.data.items() if key == "b"}
    assert set(found.lines) == set(documents.paths_in(found.data))
    assert documents.without(whole, "zzz") == whole


# with_value

DEFAULTS = {"ladder": [{"do": "x", "times": 3}], "two": [{"n": 1}, {"n": 2}], "none": [], "n": {}}


def set_at(text: str, path: KeyPath, value: Any) -> Document:
    document = documents.load(text, "f.yaml", may_be_empty=True)
    return documents.with_value(document, path, value, "--set", DEFAULTS)


@pytest.mark.parametrize(
    ("text", "path", "value", "expected"),
    [
        ("a: 1", ("a",), 2, {"a": 2}),
        ("a: 1", ("b", "c"), 2, {"a": 1, "b": {"c": 2}}),
        ("a: {b: 1}", ("a", "c"), 2, {"a": {"b": 1, "c": 2}}),
        ("a: {b: 1}", ("a",), {"c": 2}, {"a": {"b": 1, "c": 2}}),
        ("a: {b: 1}", ("a",), [1], {"a": [1]}),
        ("a: null", ("a", "b"), 2, {"a": {"b": 2}}),
        ("a: [1, 2]", ("a", 1), 3, {"a": [1, 3]}),
        ("a: [{b: 1, c: 2}]", ("a", "b"), 3, {"a": [{"b": 3, "c": 2}]}),
        ("a: [[{b: 1}, 2]]", ("a", 0, 0, "b"), 3, {"a": [[{"b": 3}, 2]]}),
        ("a: 1", ("ladder", "times"), 2, {"a": 1, "ladder": [{"do": "x", "times": 2}]}),
        ("a: 1", ("two", 1, "n"), 9, {"a": 1, "two": [{"n": 1}, {"n": 9}]}),
        ("ladder: [{do: y}]", ("ladder", 0, "times"), 2, {"ladder": [{"do": "y", "times": 2}]}),
    ],
)
def test_a_value_is_set(text: str, path: KeyPath, value: Any, expected: dict[str, Any]) -> None:
    found = set_at(text, path, value)
    assert found.data == expected
    assert found.path == "f.yaml"


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("a: 1", ("a", "b"), "a has no keys; set it as a whole"),
        ("a: [x]", ("a", "b"), "a[0] has no keys; set it as a whole"),
        ("a: {b: 1}", ("a", 0), "a is not a list"),
        ("a: [1]", ("a", 1), "a has one item, counted from 0; to add one, set all of it"),
        ("a: [1, 2]", ("a", 2), "a has 2 items, counted from 0; to add one, set all of it"),
        ("a: [1, 2, 3]", ("a", "b"), "a has 3 items; say which: a[0].b to a[2].b"),
        ("a: 1", ("two", "n"), "two has 2 items; say which: two[0].n or two[1].n"),
        ("a: 1", ("none", "n"), "none is an empty list; set all of it"),
        ("a: 1", ("none", 0), "none is an empty list; set all of it"),
    ],
)
def test_a_place_that_is_not_there(text: str, path: KeyPath, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        set_at(text, path, 1)
    assert str(caught.value) == message


def test_what_is_set_is_from_the_option_and_nothing_else_is() -> None:
    found = set_at("a:\n  b: 1\n", ("ladder", "times"), 2)
    assert found.written_at(("a", "b")) == SourcePlace("f.yaml", 2)
    assert found.written_at(("ladder", 0, "times")) == SourcePlace("--set")
    assert found.written_at(("ladder", 0, "do")) == SourcePlace(DEFAULT)
    # A mistake in what nobody wrote is that of the option by which it got there.
    assert found.place_of(("ladder", 0, "do")) == SourcePlace("--set")
    assert found.place_of(("a", "c")) == SourcePlace("f.yaml", 1)


# paths and values of the command line


@given(
    st.lists(
        st.sampled_from(["a", "b_c", "cpu-freq", "x.y", "a b", "[0]", '"', "", "ü"])
        | st.integers(0, 30),
        min_size=1,
    )
)
def test_a_path_is_read_back(parts: list[str | int]) -> None:
    path = ("first", *parts)
    assert documents.leading(documents.dotted(path) + "=1") == (path, "=1")


@pytest.mark.parametrize(
    ("text", "path", "rest"),
    [
        ("a.b=1", ("a", "b"), "=1"),
        ("a..b=1", ("a",), "..b=1"),
        (".a=1", (), ".a=1"),
        ("a[x]=1", ("a",), "[x]=1"),
        ("a[-1]=1", ("a",), "[-1]=1"),
        ('a["\\x"]=1', ("a",), '["\\x"]=1'),
        ('a["\\ud800"]=1', ("a",), '["\\ud800"]=1'),
        ('["a.b"].c=1', ("a.b", "c"), "=1"),
    ],
)
def test_where_a_path_ends(text: str, path: KeyPath, rest: str) -> None:
    assert documents.leading(text) == (path, rest)


@given(JSON)
def test_a_value_in_one_line_is_read_back(value: Any) -> None:
    text = documents.flow(value)
    assert text.isprintable()
    assert repr(documents.load_value(text, ("a",))) == repr(value)


@given(st.text(max_size=20) | st.from_regex(r"[\[\]{}:,#&*!|>'\"%@a0 .-]{0,8}", fullmatch=True))
def test_any_text_is_one_value_or_refused_without_a_line(text: str) -> None:
    try:
        value = documents.load_value(text, ("a",))
    except ConfigError as error:
        assert error.message.startswith("a")
        assert error.line is None
        assert error.path is None
        return
    # Nothing of what was typed is lost: neither as a comment, nor as a second value.
    assert repr(documents.load(f"a: {text}").data["a"]) == repr(value)
    assert "#" not in text or "#" in documents.flow(value)
