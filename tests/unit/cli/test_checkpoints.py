"""``checkpoints`` and ``export``: what a person does with a run's checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from datetime import datetime, timezone

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import nn

from slurm_forge.cli.checkpoints import prune as deleting
from slurm_forge.journal import RunStatus, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.run_directory import claim_attempt
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import INDEX_NAME, FileEntry, Manifest
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.trust import Trust
from tests.unit.cli.conftest import Shell
from tests.unit.cli.test_start import HEAVY, imported
from tests.unit.report.journals import TUESDAY, Scribe

BLOCK = 4096
#: More blocks than one thread reads in a row.
BLOCKS = 150


def spec(checkpoint: str = "{keep_last: 3}") -> bytes:
    job = f"{{name: tiny-gpt, entry: 'tiny:train', args: {{}}, checkpoint: {checkpoint}}}"
    return f"submitted_from: /tmp\npython: {sys.executable}\njob: {job}\n".encode()


class Checkpoints:
    """A run with checkpoints of it on disk, and a journal that knows of them."""

    def __init__(self, folder, checkpoint: str = "{keep_last: 3}") -> None:
        self.scribe = Scribe(folder, spec=spec(checkpoint))
        self.run = self.scribe.run
        self.store = CheckpointStore(self.run.checkpoints, "tiny-gpt")
        self.names: dict[int, CheckpointName] = {}
        self.scribe.begin()

    def save(self, step: int, *, told: bool = True, nonce: str = "00000000") -> CheckpointName:
        scribe = self.scribe
        name = CheckpointName(step, scribe.attempt, scribe.launch, nonce)
        stage = self.store.create_stage(name)
        content = {
            INDEX_NAME: b"{}",
            "rank-00000.data": bytes([step % 256]) * (BLOCKS * BLOCK - 100),
            "rank-00001.data": bytes([step % 256]) * 10,
        }
        files = []
        for file, data in content.items():
            (stage / file).write_bytes(data)
            (stage / file).chmod(0o600)
            hashes = [xxhash.xxh3_128_hexdigest(data[at : at + BLOCK])
                      for at in range(0, len(data), BLOCK)]  # fmt: skip
            files.append(FileEntry(file, len(data), tuple(hashes)))
        manifest = Manifest(
            run_id="tiny-gpt", name=name, sequence=self.store.next_sequence(), world_size=2,
            files=tuple(files), state={}, torch_version="2.13", reason="every_steps",
            created_at=datetime.fromtimestamp(TUESDAY, timezone.utc), block_size=BLOCK,
        )  # fmt: skip
        self.store.publish(stage, manifest, lambda: None)
        if told:
            scribe.save(step)
        self.names[step] = name
        return name

    def judge(self, step: int, trust: Trust) -> None:
        event = ev.CheckpointJudged(name=str(self.names[step]), trust=trust, reason="seen")
        self.scribe.write("rank0", event)

    def hold(self) -> None:
        self.scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
        self.scribe.end("hold")

    def damage(self, step: int, block: int = 70) -> None:
        path = self.store.path(self.names[step]) / "rank-00000.data"
        data = bytearray(path.read_bytes())
        data[block * BLOCK + 5] ^= 1
        path.write_bytes(data)

    @property
    def trust(self) -> dict[int, str]:
        state = fold(read_journal(self.run)[0])
        return {each.name.step: each.trust.value for each in state.known}

    @property
    def on_disk(self) -> list[int]:
        return sorted(name.step for name in self.store.candidates())

    def events(self, kind):
        return [r.event for r in read_journal(self.run)[0] if isinstance(r.event, kind)]


@pytest.fixture
def made(shell: Shell) -> Checkpoints:
    """Five checkpoints of a run that was held."""
    made = Checkpoints(shell.folder / "runs")
    for step in (100, 200, 300, 400, 500):
        made.save(step)
    made.hold()
    return made


def listed(shell: Shell):
    result = shell("checkpoints", "list", "tiny-gpt", "--json")
    assert result.exit_code == 0, result.stderr
    return {each["step"]: each for each in json.loads(result.stdout)["checkpoints"]}


def next_of(shell: Shell) -> list[int]:
    return [step for step, each in listed(shell).items() if each["next"]]


def test_list_shows_what_is_there_newest_first(shell: Shell, made: Checkpoints) -> None:
    made.save(600, told=False)
    (made.store.path(made.names[300]) / "rank-00001.data").unlink()
    (made.store.directory / ".stage-half").mkdir()
    (made.store.directory / ".stage-half" / "x").write_bytes(bytes(2000))
    result = shell("checkpoints", "list", "tiny-gpt")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  step")] == [
        "600", "500", "400", "300", "200", "100",
    ]  # fmt: skip
    assert "unknown" in lines[1]
    assert lines[1].endswith("<- next")
    assert "rank-00001.data is missing" in result.stdout
    assert "1 folder of saves" in lines[-1]
    assert "2.00 kB" in lines[-1]


def test_verify_reads_all_and_writes_down_what_it_found(shell: Shell, made: Checkpoints) -> None:
    made.damage(500)
    result = shell("checkpoints", "verify", "tiny-gpt")
    assert result.exit_code == 1
    told = result.stdout.splitlines()
    assert told[0].startswith("step 500   step-00000500.a1.l1-00000000   damaged: ")
    assert "rank-00000.data: block 70 (of 4096 bytes) has changed" in told[0]
    assert "whole   614 kB read in" in told[1]
    assert made.trust == {500: "suspect", 400: "verified", 300: "verified", 200: "verified",
                          100: "verified"}  # fmt: skip
    assert next_of(shell) == [400]
    assert listed(shell)[500]["why"].startswith("damaged: rank-00000.data: block 70")


def test_verify_of_one_tells_of_every_damaged_stretch(shell: Shell, made: Checkpoints) -> None:
    made.damage(400, 3)
    made.damage(400, BLOCKS - 1)
    made.damage(500)
    result = shell("checkpoints", "verify", "tiny-gpt", "400", "--json")
    assert result.exit_code == 1
    (read,) = json.loads(result.stdout)["checkpoints"]
    assert read["verdict"] == "damaged"
    assert "block 3 " in read["problem"]
    assert f"block {BLOCKS - 1} " in read["problem"]
    assert made.trust[500] == "written"  # it was not asked about


def test_a_good_one_stays_good_when_it_is_verified(shell: Shell, made: Checkpoints) -> None:
    made.judge(400, Trust.GOOD)
    assert shell("checkpoints", "verify", "tiny-gpt", "good").exit_code == 0
    assert made.trust[400] == "good"


@pytest.mark.parametrize("what", ["a mode", "reading"])
def test_what_can_not_be_read_is_not_called_damaged(
    shell: Shell, made: Checkpoints, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "a mode":
        (made.store.path(made.names[500]) / "rank-00000.data").chmod(0o666)
    else:
        monkeypatch.setattr("slurm_forge.store.blocks.os.preadv", broken)
    result = shell("checkpoints", "verify", "tiny-gpt", "500")
    assert result.exit_code == 1
    assert "   unreadable: " in result.stdout
    assert made.trust[500] == "written"


def broken(*_):
    raise OSError(5, "Input/output error")


def test_one_that_the_run_deletes_meanwhile_is_no_damage(
    shell: Shell, made: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(*_):
        made.store.path(made.names[100]).rename(made.store.directory / ".trash-x")
        raise FileNotFoundError(2, "No such file")

    monkeypatch.setattr("slurm_forge.store.blocks.os.preadv", vanish)
    result = shell("checkpoints", "verify", "tiny-gpt", "100")
    assert result.exit_code == 0, result.stdout
    assert "gone: it has been deleted meanwhile" in result.stdout
    assert made.trust[100] == "written"


@pytest.mark.parametrize(("word", "step"), [
    ("step-00000300.a1.l1-00000000", 300), ("step-000003", 300), ("300", 300), ("0300", 300),
    ("latest", 500), ("next", 500), ("good", 200),
])  # fmt: skip
def test_a_checkpoint_has_many_names(shell: Shell, made: Checkpoints, word: str, step: int) -> None:
    made.judge(200, Trust.GOOD)
    result = shell("checkpoints", "verify", "tiny-gpt", word, "--json")
    assert [each["step"] for each in json.loads(result.stdout)["checkpoints"]] == [step]


@pytest.mark.parametrize(("word", "why"), [
    ("310", "there is no checkpoint of step 310; the nearest is of step 300"),
    ("step-00000300.a2", 'did you mean "step-00000300.a1.l1-00000000"?'),
    ("latst", 'did you mean "latest"?'),
    ("good", "no checkpoint is known to be good yet"),
    ("step-00000", "matches 5 checkpoints"),
])  # fmt: skip
def test_a_checkpoint_that_there_is_not(
    shell: Shell, made: Checkpoints, word: str, why: str
) -> None:
    result = shell("checkpoints", "suspect", "tiny-gpt", word, "--reason", "x")
    assert result.exit_code == 2
    assert why in result.stderr
    assert "step-00000300.a1.l1-00000000" in result.stderr
    assert set(made.trust.values()) == {"written"}


def test_two_of_one_step_are_told_apart(shell: Shell, made: Checkpoints) -> None:
    made.save(500, told=False, nonce="abcdef01")
    result = shell("checkpoints", "verify", "tiny-gpt", "500")
    assert result.exit_code == 2
    assert "'500' matches 2 checkpoints" in result.stderr
    assert shell("checkpoints", "verify", "tiny-gpt", "step-00000500.a1.l1-a").exit_code == 0


def test_suspect_and_promote_move_what_comes_next(shell: Shell, made: Checkpoints) -> None:
    result = shell("checkpoints", "suspect", "tiny-gpt", "latest", "--reason", "loss rose")
    assert result.exit_code == 0, result.stderr
    assert next_of(shell) == [400]
    assert "loss rose" in listed(shell)[500]["why"]
    result = shell("checkpoints", "promote", "tiny-gpt", "500", "--reason", "it fell again")
    assert result.exit_code == 0, result.stderr
    assert "is now good" in result.stdout
    assert next_of(shell) == [500]
    assert made.trust[500] == "good"


def test_a_damaged_one_is_not_promoted(shell: Shell, made: Checkpoints) -> None:
    made.damage(500)
    result = shell("checkpoints", "promote", "tiny-gpt", "500", "--reason", "I like it")
    assert result.exit_code == 2
    assert "not promoted: rank-00000.data: block 70" in result.stderr
    assert made.trust[500] == "written"
    words = ["--reason", "I like it", "--no-verify", "--json"]
    result = shell("checkpoints", "promote", "tiny-gpt", "500", *words)
    assert json.loads(result.stdout)["trust"] == "good"
    assert made.trust[500] == "good"


@pytest.mark.parametrize("reason", [[], ["--reason", "  "]])
def test_a_judgement_needs_a_reason(shell: Shell, made: Checkpoints, reason: list[str]) -> None:
    assert shell("checkpoints", "suspect", "tiny-gpt", "500", *reason).exit_code == 2
    assert made.events(ev.CheckpointJudged) == []


def test_what_is_deleted_after_a_judgement_is_not_remembered(shell: Shell) -> None:
    made = Checkpoints(shell.folder / "runs")
    made.scribe.now = time.time() - 60
    made.save(100)
    made.save(200)
    assert shell("checkpoints", "promote", "tiny-gpt", "100", "--reason", "x").exit_code == 0
    assert made.trust[100] == "good"
    made.scribe.now = time.time() + 1
    event = ev.CheckpointsPruned(names=(str(made.names[100]),), reason="retention")
    made.scribe.write("rank0", event)
    assert made.trust == {200: "written"}


def prune(shell: Shell, *words: str):
    return shell("checkpoints", "prune", "tiny-gpt", *words)


def test_prune_shows_asks_deletes_and_says_so(shell: Shell, made: Checkpoints) -> None:
    result = prune(shell, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "delete  step 100   step-00000100.a1.l1-00000000   614 kB" in result.stdout
    assert "2 checkpoints to delete, 1.23 MB" in result.stdout
    refused = prune(shell)
    assert refused.exit_code == 2
    assert "no terminal to ask" in refused.stderr
    assert made.on_disk == [100, 200, 300, 400, 500]
    assert made.events(ev.CheckpointsPruned) == []
    result = prune(shell, "--yes")
    assert result.exit_code == 0, result.stderr
    assert "deleted 2 checkpoints, 1.23 MB" in result.stdout
    assert made.on_disk == [300, 400, 500]
    assert sorted(made.trust) == [300, 400, 500]
    assert not [path for path in made.store.directory.iterdir() if path.name.startswith(".")]
    (event,) = made.events(ev.CheckpointsPruned)
    assert event.names == (str(made.names[100]), str(made.names[200]))


def test_a_person_at_a_terminal_is_asked(
    shell: Shell, made: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleting, "sys", types.SimpleNamespace(
        stdin=types.SimpleNamespace(isatty=lambda: True)))  # fmt: skip
    assert prune(shell).exit_code != 0  # the answer is the end of the input
    assert made.on_disk == [100, 200, 300, 400, 500]
    monkeypatch.setattr("typer.confirm", lambda text, abort: True)
    assert prune(shell).exit_code == 0
    assert made.on_disk == [300, 400, 500]


def test_a_user_without_a_name_is_told_by_number(
    shell: Shell, made: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that has no entry for whoever runs in it."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    result = prune(shell, "--yes")
    assert result.exit_code == 0, result.stderr
    (event,) = made.events(ev.CheckpointsPruned)
    assert event.names == (str(made.names[100]), str(made.names[200]))
    assert event.reason == f"asked for by {os.getuid()}"
    result = shell("checkpoints", "suspect", "tiny-gpt", "500", "--reason", "odd")
    assert result.exit_code == 0, result.stderr
    assert shell("stop", "tiny-gpt").exit_code == 0
    assert [event.user for event in made.events(ev.UserAsked)][-1] == str(os.getuid())


def test_what_is_needed_stays_whatever_is_asked(shell: Shell, made: Checkpoints) -> None:
    made.judge(200, Trust.GOOD)
    made.judge(400, Trust.SUSPECT)
    (made.store.path(made.names[300]) / "manifest.json").write_bytes(b"rot")
    result = prune(shell, "--keep-last", "1", "--yes", "--json")
    assert result.exit_code == 0, result.stderr
    # 500 the newest, 200 good and the second that is whole, 400 the newest suspect one; 300 can't
    # be read: somebody may want to look why.
    assert made.on_disk == [200, 300, 400, 500]
    told = json.loads(result.stdout)
    assert told["removed"] == [str(made.names[100])]
    assert len(told["kept"]) == 4
    assert told["size"] == BLOCKS * BLOCK - 100 + 12


def test_two_stay_where_one_is_asked_for_and_dry_run_knows(shell: Shell, made: Checkpoints) -> None:
    words = ["--keep-last", "1", "--json"]
    shown = json.loads(prune(shell, *words, "--dry-run").stdout)
    assert made.on_disk == [100, 200, 300, 400, 500]
    done = json.loads(prune(shell, *words, "--yes").stdout)
    assert made.on_disk == [400, 500]
    assert (shown.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert shown == done


def test_old_suspect_ones_go_and_fill_no_place(shell: Shell, made: Checkpoints) -> None:
    for step in (300, 400, 500):
        made.judge(step, Trust.SUSPECT)
    assert prune(shell, "--keep-last", "1", "--yes").exit_code == 0
    assert made.on_disk == [100, 200, 500]


def test_nothing_goes_while_fewer_than_two_are_whole(shell: Shell, made: Checkpoints) -> None:
    for step in (100, 300, 400, 500):
        made.judge(step, Trust.SUSPECT)
    result = prune(shell, "--keep-last", "1", "--yes")
    assert "no checkpoint to delete" in result.stdout
    assert made.on_disk == [100, 200, 300, 400, 500]


def test_what_the_job_keeps_for_good_stays(shell: Shell) -> None:
    made = Checkpoints(shell.folder / "runs", "{keep_last: 1, keep_every_steps: 200}")
    for step in (100, 200, 300, 400, 500, 600):
        made.save(step)
    made.hold()
    assert prune(shell, "--yes").exit_code == 0
    assert made.on_disk == [100, 200, 400, 500, 600]


def test_a_run_that_is_going_on_is_left_alone(shell: Shell) -> None:
    made = Checkpoints(shell.folder / "runs")
    for step in (100, 200, 300, 400):
        made.save(step)
    stage = made.store.create_stage(CheckpointName(500, 1, 1, "00000000"))
    assert fold(read_journal(made.run)[0]).status is RunStatus.RUNNING
    result = prune(shell, "--yes")
    assert result.exit_code == 2
    assert "tiny-gpt is active" in result.stderr
    assert made.on_disk == [100, 200, 300, 400]
    assert prune(shell, "--dry-run").exit_code == 0
    assert prune(shell, "--yes", "--while-running").exit_code == 0
    assert made.on_disk == [200, 300, 400]
    assert stage.exists()  # it is being written
    made.scribe.write("supervisor", ev.Finished(step=400))
    made.scribe.end("finished")
    assert prune(shell, "--yes").exit_code == 0
    assert not stage.exists()


def test_a_start_in_the_middle_ends_it(
    shell: Shell, made: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_trash = CheckpointStore._to_trash

    def start_after(store, directory):
        to_trash(store, directory)
        claim_attempt(made.run, job="2", restart_count=1, host="n", pid=1, nodes=(), time=TUESDAY)

    monkeypatch.setattr(CheckpointStore, "_to_trash", start_after)
    result = prune(shell, "--yes")
    assert result.exit_code == 2
    assert "has been started meanwhile" in result.stderr
    assert made.on_disk == [200, 300, 400, 500]
    (event,) = made.events(ev.CheckpointsPruned)
    assert event.names == (str(made.names[100]),)


@pytest.fixture
def trained(shell: Shell) -> nn.Linear:
    """The model of a checkpoint of ``tiny-gpt`` that can really be exported."""
    from tests.unit.checkpoint.helpers import save, weights

    made = Checkpoints(shell.folder / "runs")
    state = weights(2.5)
    save(made.store, state, step=50)
    return state.models["model"]


def test_export_writes_what_safetensors_opens(shell: Shell, trained: nn.Linear) -> None:
    # A module of that name in the folder where the person stands is not what is meant.
    (shell.folder / "torch.py").write_text("raise SystemExit('planted')\n")
    result = shell("export", "tiny-gpt", "--to", "x.safetensors")
    assert result.exit_code == 0, result.stderr
    target = shell.folder / "x.safetensors"
    assert result.stdout == f"{target}: 1 tensor, {target.stat().st_size} B (safetensors)\n"
    assert torch.equal(load_file(target)["weight"], trained.weight)


@pytest.mark.parametrize("path", [
    ":parent/product:",
    pytest.param("parent/product", marks=pytest.mark.slow),
    pytest.param("./parent/product:x", marks=pytest.mark.slow),
])  # fmt: skip
def test_export_finds_what_is_found_from_here(
    shell: Shell, trained: nn.Linear, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A relative PYTHONPATH counts; an empty entry does not make this folder count."""
    product = shell.folder / "parent" / "product"
    product.mkdir(parents=True)
    (product / "sitecustomize.py").write_text("import sys\nsys.stderr.write('from here\\n')\n")
    (shell.folder / "torch.py").write_text("raise SystemExit('planted')\n")
    monkeypatch.setenv("PYTHONPATH", path)
    words = [sys.executable, "-c", "from slurm_forge.cli.main import main; main()"]
    done = subprocess.run(
        [*words, "export", "tiny-gpt", "--to", "x.safetensors"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("from here") == 2  # of the command line, and of its child


class Child:
    """Stands for the process with torch: remembers what it was asked."""

    returncode = 0

    def __init__(self, words, **options):
        Child.words = words
        self.told = {"path": "/x", "format": "torch", "tensors": 1, "size": 9, "notes": ["no step"]}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def stdout(self):
        lines = ({"done": 3, "total": 9}, self.told)
        return [json.dumps(line).encode() + b"\n" for line in lines]


@pytest.mark.parametrize(("name", "kind"), [
    ("a.pt", "torch"), ("a.pth", "torch"), ("a.BIN", "torch"), ("a.safetensors", "safetensors"),
    ("folder", "dcp"),
])  # fmt: skip
def test_the_name_of_the_file_says_the_format(
    shell: Shell, made: Checkpoints, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr("subprocess.Popen", Child)
    made.judge(500, Trust.SUSPECT)
    words = ["--checkpoint", "500", "--only", "model, optimizer"]
    result = shell("checkpoints", "export", "tiny-gpt", "--to", name, *words)
    assert result.exit_code == 0, result.stderr
    assert Child.words[Child.words.index("--format") + 1] == kind
    assert Child.words[Child.words.index("--to") + 1] == str(shell.folder / name)
    assert Child.words[Child.words.index("--name") + 1] == str(made.names[500])
    assert [w for w, before in zip(Child.words[1:], Child.words, strict=False)
            if before == "--only"] == ["model", "optimizer"]  # fmt: skip
    assert "is not resumed from: seen" in result.stderr
    assert "note: no step" in result.stderr


@pytest.mark.parametrize("words", [
    ["tiny-gpt"], ["--to", "x.pt"], ["tiny-gpt", "--from", "d", "--to", "x.pt"],
])  # fmt: skip
def test_export_needs_one_source_and_a_target(
    shell: Shell, made: Checkpoints, words: list[str]
) -> None:
    assert shell("export", *words).exit_code == 2


def test_export_without_torch_says_where_to_find_it(
    shell: Shell, made: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = shell("export", "tiny-gpt", "--to", "x.pt")
    assert result.exit_code == 2
    assert "export needs torch" in result.stderr
    assert "the Python that the run trains with" in result.stderr


def test_an_export_that_is_killed_says_by_what(
    shell: Shell, made: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", Child)
    monkeypatch.setattr(Child, "returncode", -9)
    result = shell("export", "tiny-gpt", "--to", "x.pt")
    assert result.exit_code == 2
    assert "SIGKILL" in result.stderr


@pytest.mark.parametrize("verb", ["list", "verify", "promote", "suspect", "prune", "export"])
def test_the_help_of_every_verb_has_an_example(shell: Shell, verb: str) -> None:
    result = shell("checkpoints", verb, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout


def test_looking_imports_nothing_heavy(shell: Shell, made: Checkpoints) -> None:
    for words in (["list"], ["verify"], ["prune", "--dry-run"]):
        found = imported("checkpoints", *words, str(made.run.path))
        assert "xxhash" in found
        assert not found & HEAVY
