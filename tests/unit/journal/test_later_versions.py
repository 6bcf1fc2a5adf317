"""What a later or an earlier slurm_forge wrote, in every format that outlives a process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.documents import dump
from slurm_forge.errors import CheckpointRejectedError, ConfigError, FormatError, RunDirectoryError
from slurm_forge.format_version import FormatVersion, refuse_later
from slurm_forge.journal import RunStatus, fold, read_journal, read_to_fold
from slurm_forge.journal.file import decode
from slurm_forge.run_directory import RunDirectory, newest_claim
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile, read_run_file, replace_run_file
from slurm_forge.store.manifest import Manifest
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.trust import Trust

FILES = Path(__file__).parents[2] / "golden" / "files"
EVENTS = {
    json.loads(line)["event"]["kind"]: json.loads(line)
    for line in (FILES / "events.jsonl").read_bytes().splitlines()
}
#: Every kind of event that has a word in it which later versions may add to.
WORDS = [
    ("incident", ("incident", "cause"), "quantum_flip"),
    ("incident", ("incident", "confidence"), "proven"),
    ("decision", ("decision", "cause"), "quantum_flip"),
    ("decision", ("decision", "action"), "teleport"),
    ("checkpoint_judged", ("trust",), "sworn"),
    ("job_changed", ("changes", 0, "affects"), "weather"),
]


def changed(body: Any, path: tuple[int | str, ...], value: object) -> Any:
    copy = json.loads(json.dumps(body))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


def record_of(body: object) -> Any:
    return decode(json.dumps(body).encode(), "rank0-00000000")


# -- the journal -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(EVENTS))
def test_each_kind_may_get_keys_and_a_later_minor_version(kind: str) -> None:
    line = EVENTS[kind]
    later = {**line, "v": "1.99", "by": "9.8.7", "sky": "blue"}
    later["event"] = {**line["event"], "colour": {"r": [1]}}
    assert record_of(later) == record_of(line)


@pytest.mark.parametrize("kind", sorted(EVENTS))
def test_each_kind_without_a_key_that_it_must_have_is_damage(kind: str) -> None:
    event = EVENTS[kind]["event"]
    required = [key for key in event if key != "kind" and not _has_default(kind, key)]
    for key in required:
        short = {name: value for name, value in event.items() if name != key}
        with pytest.raises(ValueError, match=key):
            record_of({**EVENTS[kind], "event": short})
    optional = {key: value for key, value in event.items() if key in (*required, "kind")}
    assert record_of({**EVENTS[kind], "event": optional}).event.kind == kind


def _has_default(kind: str, key: str) -> bool:
    (field,) = (f for f in dataclasses.fields(record_of(EVENTS[kind]).event) if f.name == key)
    has = (field.default, field.default_factory)
    return has != (dataclasses.MISSING, dataclasses.MISSING)


@pytest.mark.parametrize("version", ["2.0", "2.7", 2, 999_999])
@pytest.mark.parametrize("kind", ["progress", "decision", "teleported"])
def test_a_later_major_version_is_refused_with_what_to_install(kind: str, version: object) -> None:
    line = EVENTS.get(kind, EVENTS["note"])
    later = {**line, "v": version, "by": "2.3.4", "event": {**line["event"], "kind": kind}}
    with pytest.raises(FormatError, match=r'pip install "slurm-forge>=2\.3\.4"'):
        record_of(later)


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.400", 1, None])
def test_versions_that_are_read(version: object) -> None:
    line = {**EVENTS["progress"], "v": version}
    if version is None:
        del line["v"]
    assert record_of(line) == record_of(EVENTS["progress"])


@pytest.mark.parametrize("version", ["", "x", "1", "1.", "-1.0", 0, -1, 1.5, True, [], {}, "0.9"])
def test_what_is_no_version_is_damage(version: object) -> None:
    with pytest.raises(ValueError, match="version"):
        record_of({**EVENTS["progress"], "v": version})


@pytest.mark.parametrize(("kind", "path", "word"), WORDS, ids=[f"{w[0]}.{w[1][-1]}" for w in WORDS])
@pytest.mark.parametrize("version", ["1.1", "1.2"])
def test_a_word_of_a_later_version_is_taken_for_a_safe_one(
    kind: str, path: tuple[int | str, ...], word: str, version: str
) -> None:
    body = {**changed(EVENTS[kind], ("event", *path), word), "v": version}
    event = record_of(body).event
    expected = {
        "cause": Cause.UNKNOWN,
        "action": Action.HOLD,
        "confidence": Confidence.GUESS,
        "trust": Trust.SUSPECT,
        "affects": "science",
    }
    found: Any = event
    for key in path:
        found = found[key] if isinstance(key, int) else getattr(found, key)
    assert found == expected[str(path[-1])]
    if kind != "job_changed":
        assert word in str(event), "what was written is told"


@pytest.mark.parametrize("word", [None, 7, [], {}, ""])
def test_what_is_no_word_is_damage(word: object) -> None:
    with pytest.raises(ValueError, match="cause"):
        record_of(changed(EVENTS["incident"], ("event", "incident", "cause"), word))


def test_unknown_kinds_are_counted_and_change_nothing() -> None:
    line = {**EVENTS["note"], "by": "9.8.7", "event": {"kind": "teleported", "to": "Mars"}}
    records = [record_of({**line, "seq": number}) for number in range(3)]
    records.append(record_of({**EVENTS["progress"], "seq": 4}))
    state = fold(records)
    assert [(each.kind, each.by, each.count) for each in state.later] == [
        ("teleported", "9.8.7", 3)
    ]
    assert state.status == fold(records[3:]).status


# -- run.yaml --------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    job = job_from_mapping({"name": "tiny", "entry": "a.b:train", "args": {"lr": 0.1}})
    run = RunDirectory.at(tmp_path / "tiny")
    run.create(RunFile(submitted_from="/", python="python", job=job).to_yaml().encode())
    return run


def rewrite(run: RunDirectory, change: Callable[[dict[str, Any]], object]) -> None:
    body = read_run_file(run.spec_file).model_dump(mode="json")
    change(body)
    run.spec_file.write_text(dump(body))


PLACES: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda body: body,
    lambda body: body["job"],
    lambda body: body["job"]["checkpoint"],
    lambda body: body["job"]["resources"],
    lambda body: body["job"]["recovery"],
]


@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.parametrize("value", [None, 3, {"a": [1]}], ids=repr)
def test_keys_of_a_later_minor_version_are_read_over_and_kept(
    run: RunDirectory, place: int, value: object
) -> None:
    was = read_run_file(run.spec_file)

    def later(body: dict[str, Any]) -> None:
        body.update(format_version="1.99", written_by="9.8.7")
        PLACES[place](body)["beam"] = value

    rewrite(run, later)
    file = read_run_file(run.spec_file)
    assert file.job == was.job
    more = file.model_copy(update={"ranks": 3})
    replace_run_file(run, file, more)
    again = read_run_file(run.spec_file)
    assert (again.ranks, again.job) == (3, was.job)
    body = json.loads(json.dumps(again.model_dump(mode="json")))
    assert "beam" not in PLACES[place](body)
    assert "beam:" in run.spec_file.read_text()


@pytest.mark.parametrize("place", range(len(PLACES)))
def test_unknown_keys_of_this_version_are_mistakes(run: RunDirectory, place: int) -> None:
    rewrite(run, lambda body: PLACES[place](body).update(beam=1))
    with pytest.raises(ConfigError, match="beam"):
        read_run_file(run.spec_file)


@pytest.mark.parametrize("key", ["format_version", "written_by"])
def test_a_file_of_a_first_version_has_no_version(run: RunDirectory, key: str) -> None:
    was = read_run_file(run.spec_file)
    rewrite(run, lambda body: body.pop(key))
    assert read_run_file(run.spec_file) == was


@pytest.mark.parametrize("key", ["job", "python", "submitted_from"])
def test_a_key_that_it_must_have(run: RunDirectory, key: str) -> None:
    rewrite(run, lambda body: body.pop(key))
    with pytest.raises(ConfigError, match=key):
        read_run_file(run.spec_file)


def test_a_later_major_version_of_run_yaml_is_refused(run: RunDirectory) -> None:
    rewrite(run, lambda body: body.update(format_version="2.0", written_by="2.3.4"))
    with pytest.raises(FormatError, match=r"run\.yaml has format 2\.0(.|\n)*slurm-forge>=2\.3\.4"):
        read_run_file(run.spec_file)


def test_a_value_that_only_a_later_minor_version_knows_is_refused(run: RunDirectory) -> None:
    def later(body: dict[str, Any]) -> None:
        body.update(format_version="1.99", written_by="9.8.7")
        body["job"]["resources"]["nodes"] = "many"

    rewrite(run, later)
    with pytest.raises(FormatError, match=r"nodes(.|\n)*slurm-forge>=9\.8\.7"):
        read_run_file(run.spec_file)


@pytest.mark.parametrize("version", ["x", 0, [1]])
def test_what_is_no_version_of_run_yaml(run: RunDirectory, version: object) -> None:
    rewrite(run, lambda body: body.update(format_version=version))
    with pytest.raises(ConfigError, match="format_version"):
        read_run_file(run.spec_file)


def test_two_commands_do_not_undo_what_the_other_one_wrote(run: RunDirectory) -> None:
    was = read_run_file(run.spec_file)
    replace_run_file(run, was, was.model_copy(update={"ranks": 2}))
    with pytest.raises(RunDirectoryError, match="changed by another command"):
        replace_run_file(run, was, was.model_copy(update={"shorten_requeue": False}))
    assert read_run_file(run.spec_file).ranks == 2


# -- claims ----------------------------------------------------------------------------------------


CLAIM = json.loads((FILES / "claim.json").read_bytes())


def claim(run: RunDirectory, body: dict[str, Any]) -> Any:
    path = run.attempts / "1.json"
    path.write_text(json.dumps(body))
    path.chmod(0o600)
    return newest_claim(run)


@pytest.mark.parametrize("more", [{}, {"v": "1.99", "by": "9.8.7", "moon": "full"}, {"v": 1}])
def test_a_claim_of_a_later_minor_version_is_read(run: RunDirectory, more: dict[str, Any]) -> None:
    assert claim(run, {**CLAIM, **more}) == claim(run, CLAIM)


def test_a_claim_of_a_first_version_is_read(run: RunDirectory) -> None:
    first = {key: value for key, value in CLAIM.items() if key not in ("v", "by")}
    assert claim(run, first) == claim(run, CLAIM)


def test_a_claim_of_a_later_major_version_is_refused(run: RunDirectory) -> None:
    with pytest.raises(FormatError, match=r"slurm-forge>=2\.3\.4"):
        claim(run, {**CLAIM, "v": "2.0", "by": "2.3.4"})


@pytest.mark.parametrize("key", sorted(set(CLAIM) - {"v", "by", "attempt"}))
def test_a_claim_without_a_key_is_damaged(run: RunDirectory, key: str) -> None:
    short = {name: value for name, value in CLAIM.items() if name != key}
    with pytest.raises(RunDirectoryError, match=key):
        claim(run, short)


# -- manifests -------------------------------------------------------------------------------------


MANIFEST = json.loads((FILES / "manifest.json").read_bytes())["body"]


def manifest(body: dict[str, Any]) -> Manifest:
    data = json.dumps(body, separators=(",", ":")).encode()
    whole = b'{"body":' + data + b',"sha256":"' + hashlib.sha256(data).hexdigest().encode() + b'"}'
    return Manifest.from_bytes(whole + b"\n")


def test_a_manifest_of_a_later_minor_version_is_read() -> None:
    assert manifest({**MANIFEST, "format": "1.99", "tide": 7}) == manifest(MANIFEST)


def test_a_manifest_of_a_later_major_version_is_refused_and_not_passed_over() -> None:
    with pytest.raises(FormatError, match="pip install --upgrade slurm-forge"):
        manifest({**MANIFEST, "format": 2})


@pytest.mark.parametrize("version", [None, 0, "x", True, 1.5])
def test_what_is_no_version_of_a_manifest_is_damage(version: object) -> None:
    with pytest.raises(CheckpointRejectedError, match="version"):
        manifest({**MANIFEST, "format": version})


@pytest.mark.parametrize("key", sorted(MANIFEST))
def test_a_manifest_without_a_key_is_damaged(key: str) -> None:
    with pytest.raises(CheckpointRejectedError):
        manifest({name: value for name, value in MANIFEST.items() if name != key})


@pytest.mark.parametrize("by", ["", None, 7, 'x"; rm -rf ~', "1.2.3"])
def test_what_to_install_is_only_ever_a_version(by: object) -> None:
    with pytest.raises(FormatError) as refused:
        refuse_later("it", FormatVersion(2), FormatVersion(1), by)
    assert ("rm -" in str(refused.value), ">=1.2.3" in str(refused.value)) == (False, by == "1.2.3")


# -- what earlier commits wrote --------------------------------------------------------------------


KEPT = [
    *sorted((FILES.parent / "journals").iterdir()),
    *sorted((FILES.parent / "runs").glob("*/finished")),
]


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.parent.name + "/" + path.name)
def test_a_run_of_an_earlier_commit_is_read(kept: Path, tmp_path: Path) -> None:
    """Preempted at step 15 and brought back, a step skipped at 26, finished at 40."""
    run = RunDirectory.at(tmp_path / "finished")
    shutil.copytree(kept, run.path, ignore=shutil.ignore_patterns("checkpoints"))
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    records, damage = read_journal(run)
    assert damage == []
    state = fold(records)
    assert state == fold(read_to_fold(run))
    assert (state.status, state.high_water, state.later) == (RunStatus.FINISHED, 40, ())
    assert [(each.number, each.outcome) for each in state.attempts][-1] == (2, "finished")
    causes = [incident.cause for each in state.attempts for _, incident in each.incidents]
    assert causes.count(Cause.PREEMPTED) == 1
    assert read_run_file(run.spec_file).job.args["steps"] == 40
    claim = newest_claim(run)
    assert claim is not None and claim.attempt == 2
