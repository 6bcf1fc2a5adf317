# ruff: noqa: E501  (messages are compared whole)
from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pydantic
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge import documents
from slurm_forge.errors import ConfigError, UnsafeFileError


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        documents.load(text, "f.yaml")
    return str(caught.value)


QUOTE_OFF = (
    "off without quotes is a truth value to some readers of YAML and text to others; "
    'write false, or quote it: "off"'
)
ALIKE = "indent keys that belong together alike"
TRAPS = [
    ("a: 48:00:00", 'f.yaml:1: a: 48:00:00 without quotes is a number to base 60 in YAML; quote it: "48:00:00"'),
    ("a: 12:30", 'f.yaml:1: a: 12:30 without quotes is a number to base 60 in YAML; quote it: "12:30"'),
    ("a: 2:00:00", 'f.yaml:1: a: 2:00:00 without quotes is a number to base 60 in YAML; quote it: "2:00:00"'),
    ("a: 08:00:00.5", 'f.yaml:1: a: 08:00:00.5 without quotes is a number to base 60 in YAML; quote it: "08:00:00.5"'),
    ("b: 1\na: off", f"f.yaml:2: a: {QUOTE_OFF}"),
    ("a: Yes", 'f.yaml:1: a: Yes without quotes is a truth value to some readers of YAML and text to others; write true, or quote it: "Yes"'),
    ("a: 0123", 'f.yaml:1: a: 0123 without quotes is octal to some readers of YAML; write it without the leading 0, or quote it: "0123"'),
    ("a: 09", 'f.yaml:1: a: 09 without quotes is octal to some readers of YAML; write it without the leading 0, or quote it: "09"'),
    ("a: 0x1F", 'f.yaml:1: a: 0x1F without quotes is a number to some readers of YAML; quote it: "0x1F"'),
    ("a: 20240101_1", 'f.yaml:1: a: 20240101_1 without quotes is a number to some readers of YAML; quote it: "20240101_1"'),
    ("a: 2024-01-01", 'f.yaml:1: a: 2024-01-01 without quotes is a date in YAML; quote it: "2024-01-01"'),
    ("a: .nan", "f.yaml:1: a: .nan: infinity and not-a-number are not allowed here"),
    ("a: -.inf", "f.yaml:1: a: -.inf: infinity and not-a-number are not allowed here"),
    ("a: 1e999", 'f.yaml:1: a: 1e999 is too large for a number; quote it: "1e999" if it is text'),
    ("a: =", 'f.yaml:1: a: = without quotes is not text in YAML; quote it: "="'),
    ("on: 1", 'f.yaml:1: the key on is not text in YAML; quote it: "on"'),
    ("1: 2", 'f.yaml:1: the key 1 is not text in YAML; quote it: "1"'),
    ("a:\n  null: 1", 'f.yaml:2: a: the key null is not text in YAML; quote it: "null"'),
    ("? [a]\n: 1", "f.yaml:1: a key must be text"),
    ("!!int '1': 1", "f.yaml:1: 1: a key must be text; remove the tag"),
    ("a: 1\nb: 2\na: 3", "f.yaml:3: a: this key is already on line 1"),
    ("a: {b: 1, b: 2}", "f.yaml:1: a.b: this key is already on line 1"),
    ('a: 1\n"a": 2', "f.yaml:2: a: this key is already on line 1"),
    ("a: &x 1", "f.yaml:1: a: anchors and aliases (& and *) are not read; write it out"),
    ("a: [*x]", "f.yaml:1: a[0]: anchors and aliases (& and *) are not read; write it out"),
    ("&x a: 1", "f.yaml:1: anchors and aliases (& and *) are not read; write it out"),
    ("a: &x {b: 1}", "f.yaml:1: a: anchors and aliases (& and *) are not read; write it out"),
    ("a:\n  <<: {b: 1}", "f.yaml:2: a: merge keys (<<) are not read; write the keys out"),
    ("a: !!python/object/apply:os.system [id]", "f.yaml:1: a: the tag tag:yaml.org,2002:python/object/apply:os.system is not read; remove it"),
    ("a: !env X", "f.yaml:1: a: the tag !env is not read; remove it"),
    ("a: !!set {b}", "f.yaml:1: a: the tag tag:yaml.org,2002:set is not read; remove it"),
    ("a: !!int x", "f.yaml:1: a: x does not fit the tag; remove the tag"),
    ("a: " + "[" * 40, "f.yaml:1: a[0][0]: nested deeper than 32 levels"),
    ('a: "\\ud800"', "f.yaml:1: a: half of a surrogate pair is not text"),
    ("", "f.yaml:1: the file is empty"),
    ("# only a comment\n", "f.yaml:1: the file is empty"),
    ("- a\n", 'f.yaml:1: expected keys and values ("name: my-run")'),
    ("a: 1\n---\nb: 1\n", 'f.yaml:2: a second document begins here; one file holds one ("---")'),
    ("a:\n\t- b", "f.yaml:2: not YAML: found character '\\t' that cannot start any token; indent with spaces, not tabs"),
    ("a: b: c", "f.yaml:1: not YAML: mapping values are not allowed here; quote a value that holds \": \""),
    ("a: 1\nb: 2: 3", "f.yaml:2: not YAML: mapping values are not allowed here; quote a value that holds \": \""),
    ("a: 1\n  b: 2", f"f.yaml:2: not YAML: this line is indented further than line 1, which has a value already; {ALIKE}"),
    ("a:\n  # why\n  b: 1\n\n    c: 2", f"f.yaml:5: not YAML: this line is indented further than line 3, which has a value already; {ALIKE}"),
    ('a: "x"\n  b: 2', f"f.yaml:2: not YAML: this line is indented further than line 1, which has a value already; {ALIKE}"),
    ("a:\n- b\n   c: d", f"f.yaml:3: not YAML: this line is indented further than line 2, which has a value already; {ALIKE}"),
    ("a:\n    b: 1\n  c: 2", f"f.yaml:3: not YAML: the indentation of this line fits none of the lines above; {ALIKE}"),
    ("  a: 1\nb: 2", f"f.yaml:2: not YAML: the indentation of this line fits none of the lines above; {ALIKE}"),
    ("a: [1,\n2\n", "f.yaml:3: not YAML: expected ',' or ']', but got '<stream end>' (it begins on line 1)"),
    ("a: 1\nb: \x07", "f.yaml:2: not YAML: character 0x7 is not allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), TRAPS)
def test_traps_are_told_with_line_and_way_out(text: str, expected: str) -> None:
    assert message(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-1E5", -100_000.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1_000", 1000),
        ("+3", 3),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ('"48:00:00"', "48:00:00"),
        ("02:00:00", "02:00:00"),
        ("10:75", "10:75"),
        ("'off'", "off"),
        ("1-02:03:04", "1-02:03:04"),
        ("n[01-04]", "n[01-04]"),
        ("y", "y"),
        ("1.2.3", "1.2.3"),
        ("!!str 12", "12"),
        ("! 12", "12"),
        ("!!int '3'", 3),
        ("[1, [a], {b: c}]", [1, ["a"], {"b": "c"}]),
        ("|\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_plain_values(text: str, value: object) -> None:
    found = documents.load(f"a: {text}").data["a"]
    assert found == value
    assert type(found) is type(value)


def test_quoted_merge_and_special_keys_are_ordinary_text() -> None:
    assert documents.load('"<<": 1\n"on": 2').data == {"<<": 1, "on": 2}


def test_every_key_and_item_knows_its_line() -> None:
    text = "# comment\na:\n  b:\n    - x\n    - c: 1\n      d: 2\ne: {f: 1,\n  g: 2}\n"
    document = documents.load(text)
    assert document.line_of(("a",)) == 2
    assert document.line_of(("a", "b", 0)) == 4
    assert document.line_of(("a", "b", 1, "d")) == 6
    assert document.line_of(("e", "g")) == 8
    assert document.line_of(("a", "b", 1, "missing")) == 5
    assert documents.Document({}).line_of(("a",)) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, max_size=4))
def test_what_is_written_is_read_back_by_us_and_by_others(data: dict[str, Any]) -> None:
    text = documents.dump(data)
    assert documents.load(text).data == data
    assert repr(documents.load(text).data) == repr(data)  # 1, 1.0 and True are not the same
    assert yaml.safe_load(text) == data


@given(st.from_regex(r"[-+.0-9_xobeE:TZyYnNoOfF~=<]{1,12}", fullmatch=True))
def test_text_that_looks_like_something_else_is_written_with_quotes(text: str) -> None:
    assert documents.load(documents.dump({"a": text})).data == {"a": text}


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_with_a_config_error(text: str) -> None:
    try:
        documents.load(text)
    except ConfigError as error:
        assert error.line is not None


def test_a_large_text_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        documents.load("a: " + "x" * (1 << 20), "f.yaml")


# read


def test_a_file_is_read_with_or_without_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"\xef\xbb\xbfa: \xc3\xa9\n")
    document = documents.read(tmp_path / "f.yaml")
    assert document.data == {"a": "é"}
    assert document.path == str(tmp_path / "f.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(ConfigError, match="latin:2: not UTF-8 text"):
        documents.read(tmp_path / "latin")
    with pytest.raises(ConfigError, match="missing: can't be read: No such file"):
        documents.read(tmp_path / "missing")
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 34)
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        documents.read(tmp_path / "huge")


def test_a_found_file_is_no_link_a_named_one_may_be(tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("a: 1")
    path = tmp_path / "f.yaml"
    path.symlink_to(tmp_path / "there.yaml")
    assert documents.read(path).data == {"a": 1}
    with pytest.raises(UnsafeFileError):
        documents.read(path, trusted=True)
    (tmp_path / "there.yaml").chmod(0o666)
    with pytest.raises(
        UnsafeFileError, match=r"there\.yaml can be written by other users: everybody"
    ):
        documents.read(path)


# nearest


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("time", "times"),
        ("ntasks-per-node", "ntasks_per_node"),
        ("Times", "times"),
        ("gpus", "gpu_count"),
        ("exclude", "exclude_node"),
        ("zzz", None),
    ],
)
def test_nearest(key: str, expected: str | None) -> None:
    known = ["times", "ntasks_per_node", "factor", "exclude_node"]
    assert documents.nearest(key, known, {"gpus": "gpu_count"}) == expected


# build


class Inner(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    known_as: ClassVar[dict[str, str]] = {"number": "count"}
    count: int = 1
    ratio: float = 1.0
    flag: bool = False


class Outer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] = {}

    @pydantic.model_validator(mode="after")
    def _check(self) -> Outer:
        if self.many and self.many[0].count == 13:
            raise documents.wrong_key(("many", 0, "count"), "13 brings bad luck")
        return self


def wrong(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        documents.build(Outer, documents.load(text, "f.yaml"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("inner: {}", "f.yaml:1: name: missing, and there is no default for it"),
        ("name: x\ninner:\n  cuont: 1", 'f.yaml:3: inner.cuont: unknown key (did you mean "count"?)'),
        ("name: x\ninner: {number: 1}", 'f.yaml:2: inner.number: unknown key (did you mean "count"?)'),
        ("name: x\ninner: {zzz: 1}", "f.yaml:2: inner.zzz: unknown key (known here: count, ratio, flag)"),
        ("name: x\nmany:\n- {}\n- {falg: true}", 'f.yaml:4: many[1].falg: unknown key (did you mean "flag"?)'),
        ("name: x\nnamed:\n  a b:\n    falg: 1", 'f.yaml:4: named["a b"].falg: unknown key (did you mean "flag"?)'),
        ('name: x\ninner: {count: "1"}', 'f.yaml:2: inner.count: expected a whole number, got "1"'),
        ("name: x\ninner: {count: true}", "f.yaml:2: inner.count: expected a whole number, got true"),
        ("name: x\ninner: {flag: 1}", "f.yaml:2: inner.flag: expected true or false, got 1"),
        ("name: x\ninner: {ratio: }", "f.yaml:2: inner.ratio: expected a number, got nothing"),
        ("name: [x]", "f.yaml:1: name: expected text, got a list"),
        ("name: x\nmany: {a: 1}", "f.yaml:2: many: expected a list, got keys and values"),
        ("name: x\nmany:\n- count: 13", "f.yaml:3: many[0].count: 13 brings bad luck"),
    ],
)  # fmt: skip
def test_pydantics_errors_are_translated(text: str, expected: str) -> None:
    assert wrong(text) == expected


def test_several_errors_come_in_the_order_of_the_file() -> None:
    assert wrong("many: 3\ninner:\n  flag: 2\n  cuont: 1\nname: 7\n") == (
        "f.yaml:1: many: expected a list, got 3\n"
        "f.yaml:3: inner.flag: expected true or false, got 2\n"
        'f.yaml:4: inner.cuont: unknown key (did you mean "count"?)\n'
        "f.yaml:5: name: expected text, got 7"
    )


def test_very_many_errors_are_cut() -> None:
    lines = wrong("name: x\nmany:\n" + "- {flag: 1}\n" * 50).splitlines()
    assert len(lines) == 12
    assert lines[-1] == "and 39 more"


def test_plain_python_values_have_errors_without_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        documents.build_plain(Outer, {"name": "x", "inner": {"cuont": 1}}, "submit()")
    assert str(caught.value) == 'submit(): inner.cuont: unknown key (did you mean "count"?)'


def test_errors_show_no_control_characters() -> None:
    assert "\x1b" not in wrong('name: x\n"\\e[2J": 1\ninner: {count: "\\e[2J"}')


def test_reading_does_not_depend_on_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("a: 1")
    assert documents.read(os.fspath(tmp_path / "f.yaml")).data == {"a": 1}


def test_what_differs_is_told_key_by_key() -> None:
    old = {
        "name": "x",
        "args": {"steps": 400, "lr": 1.0, "gone": True},
        "setup": ["a"],
        "none": None,
    }
    new = {"name": "x", "args": {"steps": 800, "lr": 1, "new": "\x1b[2J"}, "setup": ["b"]}
    assert documents.differences(old, new) == (
        "args.steps: was 400, is 800",
        "args.lr: was 1.0, is 1",
        "args.gone: was true, is not given",
        'args.new: was not given, is "\\u001b[2J"',
        'setup: was ["a"], is ["b"]',
    )
    assert documents.differences(old, old) == ()
