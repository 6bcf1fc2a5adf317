"""A job from several files and the command line: which are read, what wins, what is from where."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.documents import DEFAULT, Document, KeyPath, SourcePlace, dump, load, paths_in
from slurm_forge.documents.writing import shorten
from slurm_forge.errors import ConfigError
from slurm_forge.knobs import Knobs
from slurm_forge.spec import JobSpec, from_yaml, to_mapping
from slurm_forge.spec.layers import (
    OF_THE_JOB,
    Layer,
    Layered,
    Setting,
    combined,
    layered_job,
    project_file,
    settings_schema,
    shown,
    user_setting,
)
from slurm_forge.spec.origins import JobValue, job_values

USER, PROJECT, JOB = "~/.config/slurm_forge/config.yaml", "slurm_forge.yaml", "train.yaml"
#: A value of another kind than the default for most keys.
RICH = """\
name: big
entry: a.b:f
args: {lr: 1.0e-3, betas: [0.9, 0.95], "a.b": {c: "off"}, layers: [{width: 3}, {width: 4}]}
resources:
  nodes: 4
  spare_nodes: 1
  tasks_per_node: 8
  cpus_per_task: 6
  gpus_per_node: a100:8
  mem: 60G
  time: "48:00:00"
  partition: long
  account: abc
  qos: low
  constraint: "a&b"
  exclude: n[1-3,7]
  nodelist: n9
  gres: gres:x
  reservation: r
  extra: {cpu-freq: high, exclusive: true, comment: "to be, or not"}
checkpoint:
  every_steps: 50
  every_minutes: 12.5
  background: false
  keep_last: 5
  keep_best: {metric: val_loss, mode: max}
  keep_every_steps: 1000
  keep_every_minutes: 60.0
  good_after_steps: 7
recovery:
  non_finite: [{do: skip, times: 3}, {do: rollback, times: 2, lr_scale: 0.5, ramp_steps: 9}]
  cuda_oom: [{do: shrink_micro_batch, factor: 0.25, times: 3}]
  node_fail: []
  limits: {starts: 7}
probe: {every: 2m, deadline: 1m, bandwidth: {enabled: false}, straggler: 2.5}
preflight: {within: 30s}
watchdog: {factor: 3.5}
environment: {torch: refuse, packages: warn}
seed: 3
batch_coupled: true
lead: 10m
setup: [module load cuda, "echo '# $x'"]
env: {A: "1", B: "x y"}
inject: [nan@120, "oom@200:rank1"]
"""
SMALL = "name: x\nentry: a.b:f\n"
COMMAND = "name: x\ncommand: [python, train.py]\nprogram: {convention: hf, notify: USR1}\n"


def resolved(job: str | None, *settings: str, user: str = "", project: str = "") -> Layered:
    files = ((user, USER, "/home/me/.config/slurm_forge"), (project, PROJECT, "/repos/mine"))
    shared = [
        Layer(load(text, name), Path(at), own=name == USER) for text, name, at in files if text
    ]
    return combined(shared, None if job is None else load(job, JOB), settings)


def nested(path: KeyPath, value: Any) -> Any:
    for part in reversed(path):
        value = {part: value}
    return value


def merged_into(data: Mapping[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    """What somebody would write who changes one key of a file."""
    head, *rest = path
    if not rest:
        return {**data, head: value}
    inner = data.get(str(head)) or {}
    return {**data, str(head): merged_into(inner, tuple(rest), value)}


RICH_VALUES = job_values(resolved(RICH))
COMMAND_VALUES = job_values(resolved(COMMAND))
#: Those that can be written without a list around them.
FREE = [value for value in RICH_VALUES if not any(isinstance(part, int) for part in value.path)]


# what is shown


def test_every_value_of_the_job_is_shown_once() -> None:
    found = resolved(RICH)
    paths = [value.path for value in job_values(found)]
    assert len(set(paths)) == len(paths)
    data: Any = to_mapping(found.job)
    for value in job_values(found):
        inner = data
        for part in value.path:
            inner = inner[part]
        assert inner == value.value
    covered = {path[:end] for path in paths for end in range(len(path) + 1)}
    leaves = {path for path in paths_in(data) if path not in covered}
    # All but the items of lists that are shown as a whole.
    assert all(isinstance(path[-1], int) for path in leaves)


def test_keys_that_are_written_have_the_line_and_the_others_are_defaults() -> None:
    lines = RICH.splitlines()
    document = load(RICH, JOB)
    for value in RICH_VALUES:
        if value.place.source == DEFAULT:
            assert value.path not in document.lines
        else:
            assert value.place.source == JOB
            assert value.place.line is not None
            named = [str(part) for part in value.path if isinstance(part, str)]
            assert named[-1] in lines[value.place.line - 1]
    assert sum(value.place.source == JOB for value in RICH_VALUES) >= 60


@functools.cache
def job_without_settings(text: str) -> dict[str, Any]:
    return to_mapping(from_yaml(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param(text, value, id=value.key)
        for text, values in ((RICH, RICH_VALUES), (COMMAND, COMMAND_VALUES))
        for value in values
    ],
)
def test_what_is_shown_can_be_set_and_changes_nothing(text: str, value: JobValue) -> None:
    found = resolved(text, f"{value.key}={value.text}")
    assert to_mapping(found.job) == job_without_settings(text)
    places = {each.path: each.place for each in job_values(found)}
    changed = {path for path, place in places.items() if str(place.source).startswith("--set")}
    assert changed == ({value.path} if value.value not in ({}, []) else changed)


@given(st.lists(st.sampled_from(FREE), min_size=1, max_size=6, unique_by=lambda value: value.path))
def test_to_set_a_key_is_to_write_it_into_the_file(values: list[JobValue]) -> None:
    text, data = SMALL, dict(load(SMALL).data)
    for value in values:
        data = merged_into(data, value.path, value.value)
    settings = [f"{value.key}={value.text}" for value in values]
    try:
        written: JobSpec | str = from_yaml(dump(data))
    except ConfigError as error:
        written = error.message
    try:
        found = resolved(text, *settings)
    except ConfigError as error:
        assert isinstance(written, str), "only --set refuses it"
        assert error.message.split(" (")[0].splitlines()[0] in written
        return
    assert isinstance(written, JobSpec), "only the file refuses it"
    assert to_mapping(found.job) == to_mapping(written)
    places = {each.path: each.place for each in job_values(found)}
    for value in values:
        if value.value != {}:
            setting = shorten(f"{value.key}={value.text}")
            assert places[value.path] == SourcePlace(f"--set {setting}")


@given(
    st.lists(
        st.tuples(st.sampled_from(FREE), st.sampled_from(["user", "project", "job", "set"])),
        max_size=12,
    )
)
def test_each_value_is_from_the_highest_layer_that_says_it(
    said: list[tuple[JobValue, str]],
) -> None:
    order = ["user", "project", "job", "set"]
    names = {"user": USER, "project": PROJECT, "job": JOB}
    layers: dict[str, dict[str, Any]] = {name: {} for name in order}
    for value, where in said:
        if where in ("user", "project") and value.path[0] in OF_THE_JOB:
            continue
        layers[where] = merged_into(layers[where], value.path, value.value)
    settings = [f"{value.key}={value.text}" for value, where in said if where == "set"]
    job = SMALL if not layers["job"] else dump({**load(SMALL).data, **layers["job"]})
    try:
        found = resolved(
            job,
            *settings,
            user=dump(layers["user"]) if layers["user"] else "",
            project=dump(layers["project"]) if layers["project"] else "",
        )
    except ConfigError:
        return  # keys that do not go together; that is another test's
    for value in job_values(found):
        says = [
            name
            for name in order
            if _says(load(job).data if name == "job" else layers[name], value.path)
            or (name == "set" and any(each.path == value.path for each, at in said if at == "set"))
        ]
        source = str(value.place.source)
        if value.value in ({}, []):
            continue
        if not says:
            assert source == DEFAULT, value.key
        elif says[-1] == "set":
            assert source.startswith(f"--set {value.key}="[:60])
        else:
            assert source == names[says[-1]]


def _says(data: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


SECTIONS = [("",), ("resources",), ("checkpoint",), ("probe", "bandwidth"), ("recovery", "limits")]


@given(
    st.sampled_from(SECTIONS),
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,12}", fullmatch=True),
    st.sampled_from(["user", "project", "job", "set"]),
)
def test_an_unknown_key_never_passes(section: tuple[str, ...], key: str, where: str) -> None:
    path = (*(part for part in section if part), f"{key}_zz")
    text = json.dumps(nested(path, 1))
    given_as: dict[str, Any] = {"user": "", "project": ""}
    job, settings = SMALL, []
    if where == "job":
        job = dump({**load(SMALL).data, **nested(path, 1)})
    elif where == "set":
        settings = [f"{'.'.join(path)}=1"]
    else:
        given_as[where] = text
    with pytest.raises(ConfigError) as caught:
        resolved(job, *settings, **given_as)
    place = {"user": f"{USER}:1", "project": f"{PROJECT}:1", "job": JOB, "set": "--set "}[where]
    assert str(caught.value).startswith(place)
    assert f"{'.'.join(path)}: unknown key" in caught.value.message


# what wins


def test_keys_are_merged_and_lists_are_replaced() -> None:
    found = resolved(
        SMALL + "resources: {nodes: 2}\nsetup: [c]\nenv: {B: job}\n",
        "resources.time=2h",
        user="resources: {account: me, partition: a}\nsetup: [a, b]\nenv: {A: user, B: user}\n",
        project="resources: {partition: b, nodes: 9}\nrecovery: {cuda_oom: []}\n",
    )
    job = found.job
    assert (job.resources.account, job.resources.partition) == ("me", "b")
    assert (job.resources.nodes, str(job.resources.time)) == (2, "2:00:00")
    assert job.setup == ("c",)
    assert job.env == {"A": "user", "B": "job"}
    assert job.recovery.cuda_oom == ()
    assert found.files == (USER, PROJECT, JOB)


def test_null_takes_back_what_stands_below() -> None:
    found = resolved(
        SMALL + "resources: {gpus_per_task: 1, gpus_per_node: null}\n",
        user="resources: {gpus_per_node: 4, time: 1h}\ncheckpoint: {keep_best: {metric: x}}\n",
        project="checkpoint: {keep_best: null}\n",
    )
    assert found.job.resources.gpus_per_node is None
    assert found.job.checkpoint.keep_best is None


def test_a_rung_of_a_default_ladder_can_be_changed() -> None:
    for key in ("recovery.cuda_oom.times", "recovery.cuda_oom[0].times"):
        found = resolved(SMALL, f"{key}=2")
        (rung,) = found.job.recovery.cuda_oom
        assert (rung.do.value, rung.times, rung.factor) == ("shrink_micro_batch", 2, 0.5)
        assert (
            found.job.recovery.model_copy(
                update={"cuda_oom": JobSpec(name="x", entry="a:f").recovery.cuda_oom}
            )
            == JobSpec(name="x", entry="a:f").recovery
        )
    # What the default said beside it does not get in the way of something else.
    (rung,) = resolved(SMALL, "recovery.cuda_oom.do=requeue").job.recovery.cuda_oom
    assert (rung.do.value, rung.times) == ("requeue", 3)


def test_later_settings_win_and_see_the_earlier_ones() -> None:
    job = resolved(SMALL, "args.a=1", "args={b: 2}", "args.a=3", "setup=[x]", "setup[0]=y").job
    assert (job.args, job.setup) == ({"a": 3, "b": 2}, ("y",))


WORDS = st.sampled_from(
    ["seed", "args", "recovery.hang", "resources.extra", "setup", "env", "inject", ".", "[0]",
     "[9]", '["a b"]', '["\\ud800"]', "=", "=", "1", "{", "}", "[", "]", ": ", "a", "\"", "'", "#",
     "\n", "\0", "\udcff", "\x1b[2J", "&a", "*a", "!!python/name:os.system", "<<", "- ", "|",
     "\u2028"]
)  # fmt: skip


@given(st.lists(st.lists(WORDS, max_size=9).map("".join) | st.text(max_size=9), max_size=3))
def test_whatever_is_typed_is_set_or_refused_in_words(settings: list[str]) -> None:
    try:
        assert resolved(SMALL, *settings).job.name
    except ConfigError as error:
        told = str(error)
        assert told.startswith("--set "), told
        assert all(line.isprintable() for line in told.splitlines())
        told.encode()


# which files


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git working tree ``repo`` in a folder with settings of its own, and a home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("home", "repo/.git", "repo/exp/deep", "other", "plain/inner"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "other")
    return tmp_path


def put(path: Path, text: str = "") -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


def test_the_nearest_project_file_below_the_top_of_the_working_tree(tree: Path) -> None:
    put(tree / PROJECT)  # beyond the top of the working tree
    put(tree / "other" / PROJECT)  # the current folder, of another tree
    deep = tree / "repo" / "exp" / "deep"
    assert project_file(deep) is None
    top = put(tree / "repo" / PROJECT)
    assert project_file(deep) == top
    near = put(tree / "repo" / "exp" / PROJECT)
    assert project_file(deep) == near
    assert project_file(tree / "repo") == top


def test_outside_of_a_working_tree_only_beside_the_job_file(tree: Path) -> None:
    put(tree / "plain" / PROJECT)
    assert project_file(tree / "plain" / "inner") is None
    assert project_file(tree / "plain") == tree / "plain" / PROJECT


def test_a_working_tree_may_be_a_worktree_or_a_submodule(tree: Path) -> None:
    put(tree / "repo" / PROJECT)
    put(tree / "repo" / "exp" / ".git", "gitdir: elsewhere")
    assert project_file(tree / "repo" / "exp" / "deep") is None


def test_links_to_a_folder_lead_to_where_it_is(tree: Path) -> None:
    put(tree / "repo" / PROJECT, "seed: 5")
    (tree / "other" / "link").symlink_to(tree / "repo" / "exp")
    put(tree / "repo" / "exp" / "job.yaml", SMALL)
    assert layered_job(Path("link/job.yaml"), Knobs()).job.seed == 5


def test_the_current_folder_counts_for_nothing(tree: Path) -> None:
    put(tree / "other" / PROJECT, "seed: 5")
    job = put(tree / "repo" / "exp" / "train.yaml", SMALL)
    assert layered_job(job, Knobs()).job.seed == 0
    assert layered_job(job, Knobs()).files == (str(job),)


def test_a_job_file_may_be_called_like_a_projects(tree: Path) -> None:
    job = put(tree / "repo" / PROJECT, SMALL)
    assert layered_job(job, Knobs()).job.name == "x"


def test_the_users_file_is_where_xdg_says(tree: Path) -> None:
    job = put(tree / "repo" / "train.yaml", SMALL)
    for home, folder in (
        (None, tree / "home" / ".config"),
        ("relative/is/ignored", tree / "home" / ".config"),
        (str(tree / "xdg"), tree / "xdg"),
    ):
        own = folder / "slurm_forge"
        own.mkdir(parents=True, exist_ok=True)
        put(own / "config.yaml", "seed: 7\nruns: ~/runs\n")
        knobs = Knobs(config_home=home)
        assert layered_job(job, knobs).job.seed == 7
        said = user_setting(knobs, "runs")
        assert said is not None
        assert said.value == str(tree / "home" / "runs")
        assert user_setting(knobs, "site") is None
        (own / "config.yaml").unlink()
        assert user_setting(knobs, "runs") is None


def test_an_empty_file_says_nothing(tree: Path) -> None:
    put(tree / "repo" / PROJECT, "# resources: {nodes: 2}\n")
    job = put(tree / "repo" / "train.yaml", SMALL)
    assert layered_job(job, Knobs()).job == from_yaml(SMALL)


def test_paths_start_at_the_folder_of_the_file_that_says_them() -> None:
    found = resolved(SMALL, user="site: mila\nruns: /scratch/me\n", project="runs: out/runs\n")
    assert found.site is not None
    assert found.runs is not None
    assert (found.site.value, str(found.site.place)) == ("mila", f"{USER}:1")
    assert (found.runs.value, str(found.runs.place)) == ("/repos/mine/out/runs", f"{PROJECT}:1")
    found = resolved(SMALL, project="site: clusters/hill.yaml\n")
    assert found.site is not None
    assert found.site.value == "/repos/mine/clusters/hill.yaml"


def test_what_a_file_is_called(tree: Path) -> None:
    assert shown(tree / "other" / "a") == "a"
    assert shown(tree / "home" / "a" / "b") == "~/a/b"
    assert shown(tree / "repo" / "a") == str(tree / "repo" / "a")


def test_without_a_job_file_there_are_the_settings() -> None:
    found = resolved(None, "seed=3", user="resources: {account: me}\nprogram: {convention: hf}\n")
    assert (found.job.seed, found.job.resources.account) == (3, "me")
    named = {value.key: value.place.source for value in job_values(found)}
    assert named["name"] == DEFAULT
    assert named["program.convention"] == USER


def test_the_schema_of_settings_knows_what_they_may_say() -> None:
    schema = settings_schema()
    keys = set(schema["properties"])
    assert keys == {"site", "runs", *JobSpec.model_fields} - set(OF_THE_JOB)
    assert "required" not in schema
    assert json.dumps(schema)


def test_a_document_made_by_hand_has_no_places() -> None:
    assert Document({"a": 1}, "f").place_of(("a",)) == SourcePlace("f")
    assert str(SourcePlace(None)) == ""


@pytest.mark.parametrize(
    "text", ["a." * 30_000 + "a=1", "args" + ".b" * 200 + "=1", "args" + '["b"]' * 5000 + "=1"]
)
def test_a_key_that_never_ends_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match="a key of more than 32 parts"):
        Setting.parsed(text)


def test_a_long_value_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as told:
        Setting.parsed("seed=" + "1" * 100_000)
    assert "quote it" in str(told.value) and len(str(told.value)) < 400


def test_links_in_a_circle_are_no_crash(tree: Path) -> None:
    (tree / "round").symlink_to("round")
    assert project_file(tree / "round") is None
    with pytest.raises(ConfigError, match="symbolic links"):
        layered_job(tree / "round" / "job.yaml", Knobs())


@pytest.mark.parametrize("home", ["", ".", "somewhere"])
def test_a_home_below_the_current_folder_is_none(
    tree: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.chdir(tree)
    monkeypatch.setenv("HOME", home)
    for folder in (tree, tree / "somewhere"):
        (folder / ".config" / "slurm_forge").mkdir(parents=True)
        put(folder / ".config" / "slurm_forge" / "config.yaml", "seed: 7\n")
    (tree / "elsewhere").mkdir()
    job = put(tree / "elsewhere" / "job.yaml", "name: a\ncommand: [x]\n")
    assert layered_job(job, Knobs()).files == (str(job),)
    assert Knobs().config_folder.is_absolute() and Knobs().state_folder.is_absolute()
    if home:  # without any letter in it, it is the root of everything
        put(tree / "elsewhere" / "slurm_forge.yaml", "runs: ~/runs\n")
        with pytest.raises(ConfigError, match="there is no home folder"):
            layered_job(job, Knobs())


def test_a_user_without_a_home_has_no_settings(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(path: str) -> str:
        return path  # as os.path.expanduser does for a number that nobody has named

    monkeypatch.setattr(os.path, "expanduser", nobody)
    job = put(tree / "job.yaml", "name: a\ncommand: [x]\n")
    assert layered_job(job, Knobs()).job.name == "a"
