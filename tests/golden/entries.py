"""Everything that outlives a process: who writes it, who reads it, and a value of it.

This is the one place that names modules: where they move, its imports move with them, and the
files stay as they are.
"""

from __future__ import annotations

import json
import pickle
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import torch

from slurm_forge import ForgeError, ForgeJob
from slurm_forge.checkpoint.content.index import (
    Index,
    SavedTensor,
)
from slurm_forge.checkpoint.content.shard_layout import (
    Shard,
    ShardPlacement,
)
from slurm_forge.control.handshake import Credentials
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.agent import AgentMessage, decode_agents
from slurm_forge.control.messages.live import ListenerEvent as LiveTold
from slurm_forge.control.messages.live import format_event
from slurm_forge.control.messages.preflight import NodeReport, PreflightRound
from slurm_forge.documents import build, load
from slurm_forge.journal import file as journal_file
from slurm_forge.journal.events import Event
from slurm_forge.json_codec import parse
from slurm_forge.knobs import Knobs
from slurm_forge.launch.diagnose.live_rounds import parse_event
from slurm_forge.launch.render.save_times import SaveNote, SaveNotes
from slurm_forge.launch.submitit.embedded import (
    Rendezvous,
)
from slurm_forge.node_ledger import lines as ledger
from slurm_forge.process import MODULES
from slurm_forge.recovery.nodes.statements import NodeRelease, Strike
from slurm_forge.run_directory import Claim, RunDirectory, claim_attempt, newest_claim
from slurm_forge.run_directory.last_words import LastWords, read_last_words, write_last_words
from slurm_forge.run_directory.learned import BegunFile, LearnedFiles, MicroBatchNote
from slurm_forge.run_directory.reported_findings import ReportedFindings
from slurm_forge.site.model import Site
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import FileEntry, Manifest
from tests.golden.samples import NOW, kinds_of, sample, words_of

FILES = Path(__file__).parent / "files"
_KEY = "0123456789abcdef"
_NAME = CheckpointName(step=1200, attempt=2, launch=1, nonce="0123abcd")


@dataclass(frozen=True)
class Entry:
    """A golden file: ``write`` gives its bytes today, ``read`` the value of what it is given."""

    file: str
    value: Any
    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def _lines(
    values: Sequence[Any], write: Callable[[Any], bytes], read: Callable[[bytes], Any]
) -> tuple[list[Any], Callable[[Any], bytes], Callable[[bytes], Any]]:
    """A file with a line for each value."""
    return (
        list(values),
        lambda several: b"".join(map(write, several)),
        lambda data: [read(line) for line in data.splitlines(keepends=True)],
    )


def _in_folder(
    place: Callable[[Path], Path],
    write: Callable[[Path, Any], object],
    read: Callable[[Path], Any],
) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """For writers and readers that take a folder; ``place`` is their file in it."""

    def written(value: Any) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), value)
            return place(Path(folder)).read_bytes()

    def read_back(data: bytes) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            file = place(Path(folder))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            return read(Path(folder))

    return written, read_back


def _run(folder: Path) -> RunDirectory:
    return RunDirectory(folder / "tiny")


# -- the run directory -----------------------------------------------------------------------------


def _record(kind: type) -> journal_file.Record:
    return journal_file.Record(
        attempt=2,
        launch=1,
        sequence=3,
        time=1795437000.25,
        writer="rank0",
        event=sample(kind),
        logical_time=4,
    )


def _events() -> Entry:
    records = [_record(kind) for kind in kinds_of(Event)]
    parts = _lines(records, journal_file.encode, lambda line: journal_file.decode(line, "rank0"))
    return Entry("events.jsonl", *parts)


def _claim_once(folder: Path, claim: Claim) -> None:
    numbers = count(1)
    given = {name: getattr(claim, name) for name in ("job", "restart_count", "host", "pid")}
    with mock.patch.object(secrets, "token_hex", lambda _: claim.nonce):
        while next(numbers) <= claim.attempt:
            claim_attempt(_run(folder), **given, nodes=claim.nodes, time=claim.time)


def _claim() -> Entry:
    claim = Claim(
        attempt=1,
        nonce="0123456789abcdef",
        job="8812301",
        restart_count=2,
        host="n01",
        pid=4321,
        nodes=("n01", "n02"),
        time=1795437000.25,
    )
    parts = _in_folder(
        lambda folder: _run(folder).attempts / "1.json",
        _claim_once,
        lambda folder: newest_claim(_run(folder)),
    )
    return Entry("claim.json", claim, *parts)


def _last_words() -> Entry:
    words = sample(LastWords)
    parts = _in_folder(
        lambda folder: _run(folder).last_words(2, 1, words.rank),
        lambda folder, value: write_last_words(_run(folder), 2, 1, value),
        lambda folder: read_last_words(_run(folder), 2, 1)[0],
    )
    return Entry("last-words.json", words, *parts)


def _done() -> Entry:
    parts = _in_folder(
        lambda folder: _run(folder).done_file,
        lambda folder, value: (_run(folder).path.mkdir(), _run(folder).mark_done(**value)),
        lambda folder: json.loads(_run(folder).done_file.read_bytes()),
    )
    return Entry("DONE", {"step": 20000, "attempt": 3}, *parts)


def _rendezvous() -> Entry:
    def write(folder: Path, value: Rendezvous) -> None:
        _run(folder).attempts.mkdir(parents=True)
        value.publish(_run(folder), "8812301-0")

    value = Rendezvous("10.0.0.1:4444", Credentials("nonce", "secret"), 2)
    parts = _in_folder(
        lambda folder: _run(folder).rendezvous("8812301-0"),
        write,
        lambda folder: Rendezvous.read(_run(folder), "8812301-0"),
    )
    return Entry("rendezvous.json", value, *parts)


#: One of every section of a job file.
_JOB = {
    "name": "tiny",
    "entry": "train.py:main",
    "args": {"steps": 20000, "lr": 3e-4},
    "resources": {
        "nodes": 2, "tasks_per_node": 4, "gpus_per_node": 4, "cpus_per_task": 8, "mem": "64G",
        "time": "12:00:00", "partition": "long", "account": "abc", "extra": {"mail-type": "FAIL"},
    },
    "checkpoint": {
        "every_steps": 50, "every_minutes": 10, "keep_last": 3, "good_after_steps": 20,
        "keep_best": {"metric": "val_loss", "mode": "min"},
    },
    "recovery": {
        "cuda_oom": [{"do": "shrink_micro_batch", "factor": 0.5, "times": 3}],
        "non_finite": [{"do": "skip", "times": 3}, {"do": "rollback", "times": 2, "lr_scale": 0.5}],
        "preempted": [{"do": "requeue"}],
    },
    "probe": {"every": "60s", "deadline": "30s"},
    "setup": ["module load cuda"],
}  # fmt: skip


def _run_file() -> Entry:
    given = {
        name: sample(hint, name)
        for name, hint in get_type_hints(RunFile).items()
        if name in RunFile.model_fields and name != "job"
    }
    given |= {"expected_bandwidth": 4e11, "format_version": "1.2", "written_by": "0.1.0"}
    file = RunFile(**given, job=job_from_mapping(_JOB))

    def read(folder: Path) -> RunFile:
        return read_run_file(folder / "run.yaml")

    parts = _in_folder(lambda folder: folder / "run.yaml", lambda *_: None, read)
    return Entry("run.yaml", file, lambda value: value.to_yaml().encode(), parts[1])


# -- a checkpoint ----------------------------------------------------------------------------------


def _manifest() -> Entry:
    manifest = Manifest(
        run_id="tiny",
        name=_NAME,
        sequence=3,
        world_size=2,
        files=(
            FileEntry("index.json", 120, ("0" * 32,)),
            FileEntry("rank-00000.data", 5 << 20, ("1" * 32, "2" * 32)),
        ),
        state={"step": 1200, "epoch": 1, "rng": {"python": [1, 2.5, "x", None, True]}},
        torch_version="2.6.0",
        created_at=NOW,
        reason="every_steps",
        parent=CheckpointName(step=1100, attempt=1, launch=1, nonce="89abcdef"),
        findings=("nan in layers.0.weight",),
        about={"environment": {"python": "3.11"}},
    )
    return Entry("manifest.json", manifest, Manifest.to_bytes, Manifest.from_bytes)


def _index() -> Entry:
    halves = tuple(
        (
            Shard("model.w", "float32", 4, (4, 3), (2 * at, 0), (2, 3)),
            ShardPlacement(file=at, at=0),
        )
        for at in range(2)
    )
    scalar = (Shard("optimizer.step", "int64", 8, (), (), ()), ShardPlacement(file=0, at=64))
    index = Index(
        files=("rank-00000.data", "rank-00001.data"),
        tensors={
            "model.w": SavedTensor((4, 3), torch.float32, halves),
            "optimizer.step": SavedTensor((), torch.int64, (scalar,)),
        },
    )
    sizes = {"rank-00000.data": 72, "rank-00001.data": 24}
    return Entry("index.json", index, Index.to_bytes, lambda data: Index.from_bytes(data, sizes))


# -- what runs learn for each other ----------------------------------------------------------------


def _learned() -> tuple[Entry, ...]:
    note = sample(MicroBatchNote)
    begun, saves = 16, SaveNote(seconds=6.5, blocked_s=0.25, job="8812301")

    def begin(folder: Path, value: int) -> None:
        _run(folder).attempts.mkdir(parents=True)
        BegunFile(_run(folder)).write(_KEY, value)

    return (
        Entry(
            "micro-batch.json",
            note,
            *_in_folder(
                lambda folder: folder / ".learned" / f"{_KEY}.json",
                lambda folder, value: LearnedFiles.beside(_run(folder)).write(_KEY, value),
                lambda folder: LearnedFiles.beside(_run(folder)).read(_KEY),
            ),
        ),
        Entry(
            "micro-batch-begun.json",
            begun,
            *_in_folder(
                lambda folder: _run(folder).attempts / "micro-batch.json",
                begin,
                lambda folder: BegunFile(_run(folder)).read(_KEY),
            ),
        ),
        Entry(
            "saves.json",
            saves,
            *_in_folder(
                lambda folder: folder / ".learned" / f"saves-{_KEY}.json",
                lambda folder, value: SaveNotes.beside(_run(folder)).write(_KEY, value),
                lambda folder: SaveNotes.beside(_run(folder)).read(_KEY),
            ),
        ),
    )


def _ledger() -> Entry:
    strike, release = sample(Strike), sample(NodeRelease)
    cause = "node_fail"
    values = [
        Strike(**{**vars_of(strike), "cause": cause, "weight": 1.5, "until": None}),
        Strike(**{**vars_of(strike), "cause": "by_hand", "weight": 1.0}),
        release,
    ]
    parts = _lines(values, ledger.line_of, lambda line: ledger.parse_line(line, 1e10))
    return Entry("nodes.jsonl", *parts)


def vars_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, with slots or without."""
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}


def _told() -> Entry:
    runs = Path("/runs")

    def file(folder: Path) -> Path:
        return ReportedFindings(folder, runs).lock.with_suffix(".json")

    parts = _in_folder(
        file,
        lambda folder, value: ReportedFindings(folder, runs).write(value),
        lambda folder: ReportedFindings(folder, runs).read(),
    )
    return Entry("watch.json", {"tiny": ("held 2", "finished")}, *parts)


# -- between processes -----------------------------------------------------------------------------


def _channel(file: str, kinds: Any, decode: Callable[[bytes], Any]) -> Entry:
    parts = _lines(
        [sample(kind) for kind in kinds_of(kinds)],
        protocol.encode,
        decode,
    )
    return Entry(file, *parts)


def _preflight() -> tuple[Entry, ...]:
    return (
        Entry(
            "node-report.json",
            sample(NodeReport),
            lambda value: value.to_text().encode(),
            lambda data: NodeReport.from_text(data.decode()),
        ),
        Entry(
            "preflight-groups.json",
            PreflightRound(groups=((0, 1), (2, 3)), within_s=20.0, backend="nccl"),
            lambda value: value.to_text().encode(),
            lambda data: parse(PreflightRound, data),
        ),
        Entry(
            "live.txt",
            LiveTold(way="task", host="n01", what="saw", at=1795437000.25, signal="SIGTERM"),
            format_event,
            lambda data: parse_event(data.decode()),
        ),
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _environment() -> Entry:
    return Entry(
        "environment.json",
        sample(Knobs),
        lambda value: _json(value.to_environ()),
        lambda data: Knobs.from_environ(json.loads(data)),
    )


def _processes() -> Entry:
    return Entry("processes.json", sorted(MODULES), _json, json.loads)


def _words() -> Entry:
    """Every word that an event or a message may hold where only some are known."""
    found: dict[Any, None] = {}
    for each in (Event, protocol.ControlMessage, AgentMessage, NodeReport):
        words_of(each, found)
    values = sorted([word.value for word in kind] for kind in found)
    return Entry("words.json", values, _json, json.loads)


# -- what submitit keeps ---------------------------------------------------------------------------


def _pickled() -> tuple[Entry, ...]:
    def write(value: object) -> bytes:
        return pickle.dumps(value, protocol=4)

    error = ForgeError("tiny did not finish: it was held", next_step="slurm-forge explain tiny")
    return (
        Entry("job.pkl", ForgeJob("/runs/tiny"), write, pickle.loads),
        Entry("error.pkl", str(error), lambda _: write(error), lambda d: str(pickle.loads(d))),
    )


# -- what people write -----------------------------------------------------------------------------


def _read_site(data: bytes) -> Any:
    return build(Site, load(data.decode(), "site.yaml")).model_dump(mode="json")


def _site() -> Entry:
    """What ``site.yaml``, which is kept by hand, is read as."""
    text = (FILES / "kept" / "site.yaml").read_bytes()
    return Entry("site.json", _read_site(text), _json, json.loads)


ENTRIES: tuple[Entry, ...] = (
    _events(),
    _claim(),
    _last_words(),
    _done(),
    _rendezvous(),
    _run_file(),
    _manifest(),
    _index(),
    *_learned(),
    _ledger(),
    _told(),
    _channel("control.jsonl", protocol.ControlMessage, protocol.decode),
    _channel("agents.jsonl", AgentMessage, decode_agents),
    *_preflight(),
    _environment(),
    _processes(),
    _words(),
    *_pickled(),
    _site(),
)
