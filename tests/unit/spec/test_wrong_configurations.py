# ruff: noqa: E501  (messages are compared whole)
"""Wrong configurations as people make them: in which file or option, and all that they read.

The files lie where they are looked for and are read as ``slurm-forge submit`` reads them.  More of
what a job file may hold wrong stands in ``test_bad_input``, of site files in ``test_wrong_files``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError, ForgeError, UnsafeFileError
from slurm_forge.knobs import Knobs
from slurm_forge.spec.layers import layered_job
from tests.unit.spec.test_bad_input import IN_A_JOB, WHOLE

HEAD = "name: x\nentry: a.b:f\n"


@dataclass(frozen=True)
class Given:
    """What stands in ``train.yaml`` (behind HEAD, or the ``whole`` of it), in the user's
    ``config.yaml``, in ``slurm_forge.yaml`` beside the job file, and behind ``--set``."""

    job: str = ""
    whole: bytes | None = None
    user: str | None = None
    project: str | None = None
    sets: tuple[str, ...] | list[str] = ()

    def write(self, home: Path, work: Path) -> None:
        whole = (HEAD + self.job).encode() if self.whole is None else self.whole
        files = {
            work / "train.yaml": whole,
            home / ".config" / "slurm_forge" / "config.yaml": self.user,
            work / "slurm_forge.yaml": self.project,
        }
        for path, content in files.items():
            if content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
                path.chmod(0o600)


IN_THE_JOB_FILE = [
    (Given(job="resources: {time: 48:00:00}"), 'train.yaml:3: resources.time: 48:00:00 without quotes is a number to base 60 in YAML; quote it: "48:00:00"'),
    (Given(job="probe: {enabled: on}"), 'train.yaml:3: probe.enabled: on without quotes is a truth value to some readers of YAML and text to others; write true, or quote it: "on"'),
    (Given(job="probe: {enabled: no}"), 'train.yaml:3: probe.enabled: no without quotes is a truth value to some readers of YAML and text to others; write false, or quote it: "no"'),
    (Given(job="probe: {enabled: Off}"), 'train.yaml:3: probe.enabled: Off without quotes is a truth value to some readers of YAML and text to others; write false, or quote it: "Off"'),
    (Given(job="resources: {nodes: 1e-3}"), "train.yaml:3: resources.nodes: expected a whole number, got 0.001"),
    (Given(job="resources: {nodes: 010}"), 'train.yaml:3: resources.nodes: 010 without quotes is octal to some readers of YAML; write it without the leading 0, or quote it: "010"'),
    (Given(job="resources: {nodes: 0x10}"), 'train.yaml:3: resources.nodes: 0x10 without quotes is a number to some readers of YAML; quote it: "0x10"'),
    (Given(job="seed: 99999999999999999999"), "train.yaml:3: seed: expected less than 9223372036854775808, got 99999999999999999999"),
    (Given(job="seed: " + "9" * 301), "train.yaml:3: seed: expected a whole number, got 1e+301"),
    (Given(job="args: {lr: 1e999}"), 'train.yaml:3: args.lr: 1e999 is too large for a number; quote it: "1e999" if it is text'),
    (Given(job="args: {day: 2026-11-22}"), 'train.yaml:3: args.day: 2026-11-22 without quotes is a date in YAML; quote it: "2026-11-22"'),
    (Given(job="args: {x: .NaN}"), "train.yaml:3: args.x: .NaN: infinity and not-a-number are not allowed here"),
    (Given(job="seed: 1\nseed: 2"), "train.yaml:4: seed: this key is already on line 3"),
    (Given(job="resources:\n\tnodes: 2"), "train.yaml:4: not YAML: found character '\\t' that cannot start any token; indent with spaces, not tabs"),
    (Given(job="resources:\n  nodes: 2\n   mem: 4G"), "train.yaml:5: not YAML: this line is indented further than line 4, which has a value already; indent keys that belong together alike"),
    (Given(job="resources:\n    nodes: 2\n  mem: 4G"), "train.yaml:5: not YAML: the indentation of this line fits none of the lines above; indent keys that belong together alike"),
    (Given(job="seed: 1\n  lead: 2m"), "train.yaml:4: not YAML: this line is indented further than line 3, which has a value already; indent keys that belong together alike"),
    (Given(job="args: &a {x: 1}"), "train.yaml:3: args: anchors and aliases (& and *) are not read; write it out"),
    (Given(job="args: {x: *a}"), "train.yaml:3: args.x: anchors and aliases (& and *) are not read; write it out"),
    (Given(job="a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]"), "train.yaml:3: a: anchors and aliases (& and *) are not read; write it out"),
    (Given(job="resources: {<<: {nodes: 2}}"), "train.yaml:3: resources: merge keys (<<) are not read; write the keys out"),
    (Given(job="args: !!python/object/apply:os.system [id]"), "train.yaml:3: args: the tag tag:yaml.org,2002:python/object/apply:os.system is not read; remove it"),
    (Given(job="env: {A: !env HOME}"), "train.yaml:3: env.A: the tag !env is not read; remove it"),
    (Given(job="---\nname: y"), 'train.yaml:3: a second document begins here; one file holds one ("---")'),
    (Given(job="args: " + "[" * 40 + "]" * 40), "train.yaml:3: args[0][0]: nested deeper than 32 levels"),
    (Given(whole=b'name: x\nentry: a.b:f\nenv: {A: \xe9}\n'), "train.yaml:3: not UTF-8 text"),
    (Given(whole=b'name: x\nentry: a.b:f\nseed: \x00\n'), "train.yaml:3: not YAML: character 0x0 is not allowed"),
    (Given(whole=b'\xef\xbb\xbfname: x\nentry: a.b:f\nsead: 1\n'), 'train.yaml:3: sead: unknown key (did you mean "seed"?)'),
    (Given(whole=b'\xff\xfen\x00a\x00m\x00e\x00:\x00 \x00x\x00\n\x00e\x00n\x00t\x00r\x00y\x00:\x00 \x00a\x00.\x00b\x00:\x00f\x00\n\x00'), "train.yaml:1: not UTF-8 text"),
    (Given(whole=b''), "train.yaml:1: the file is empty"),
    (Given(whole=b'- name: x\n'), 'train.yaml:1: expected keys and values ("name: my-run")'),
    (Given(job="#" * (1 << 20)), "train.yaml: larger than 1048576 bytes\n  Nothing that is written by hand grows that large: is it the right file?"),
    (Given(job="Resources: {nodes: 2}"), 'train.yaml:3: Resources: unknown key (did you mean "resources"?)'),
    (Given(job="resources: {Nodes: 2}"), 'train.yaml:3: resources.Nodes: unknown key (did you mean "nodes"?)'),
    (Given(job="resources: {nodes : two words: 3}"), "train.yaml:3: not YAML: expected ',' or '}', but got ':'"),
    (Given(job="{}"), "train.yaml:3: not YAML: could not find expected ':'"),
    (Given(job="resources: {nodes: 2"), "train.yaml:3: not YAML: expected ',' or '}', but got '<stream end>'"),
    (Given(job='args: {x: "a}'), "train.yaml:3: not YAML: found unexpected end of stream"),
    (Given(job="1: 2"), 'train.yaml:3: the key 1 is not text in YAML; quote it: "1"'),
    (Given(job="yes: 2"), 'train.yaml:3: the key yes is not text in YAML; quote it: "yes"'),
    (Given(job="null: 2"), 'train.yaml:3: the key null is not text in YAML; quote it: "null"'),
    (Given(job="? [a]\n: 1"), "train.yaml:3: a key must be text"),
    (Given(job="args: {x: 0b1}"), 'train.yaml:3: args.x: 0b1 without quotes is a number to some readers of YAML; quote it: "0b1"'),
    (Given(job="resources: {nodelist: 1_2}"), 'train.yaml:3: resources.nodelist: 1_2 without quotes is a number to some readers of YAML; quote it: "1_2"'),
    (Given(job='setup: ["a\\ud800"]'), "train.yaml:3: setup[0]: half of a surrogate pair is not text"),
    (Given(job="env: {A: ~}"), "train.yaml:3: env.A: expected text"),
    (Given(job="site: mila"), "train.yaml:3: site: not a key of a job file; give it as --site, or write it into slurm_forge.yaml or your own config.yaml"),
    (Given(job="runs: /x"), "train.yaml:3: runs: not a key of a job file; give it as --runs, or write it into slurm_forge.yaml or your own config.yaml"),
]  # fmt: skip

IN_THE_SETTINGS = [
    (Given(user="name: x"), "~/.config/slurm_forge/config.yaml:1: name: only a job file or --set may have this key; remove it here"),
    (Given(user="entry: a:f"), "~/.config/slurm_forge/config.yaml:1: entry: only a job file or --set may have this key; remove it here"),
    (Given(user="command: [a]"), "~/.config/slurm_forge/config.yaml:1: command: only a job file or --set may have this key; remove it here"),
    (Given(user="args: {a: 1}"), "~/.config/slurm_forge/config.yaml:1: args: only a job file or --set may have this key; remove it here"),
    (Given(user="inject: [nan@3]"), "~/.config/slurm_forge/config.yaml:1: inject: only a job file or --set may have this key; remove it here"),
    (Given(user="resorces: {nodes: 2}"), '~/.config/slurm_forge/config.yaml:1: resorces: unknown key (did you mean "resources"?)'),
    (Given(user="partition: long"), '~/.config/slurm_forge/config.yaml:1: partition: unknown key (did you mean "resources.partition"?)'),
    (Given(user="resources: {nodes: two}"), '~/.config/slurm_forge/config.yaml:1: resources.nodes: expected a whole number, got "two"'),
    (Given(user="resources: {nodes: two}", job="resources: {nodes: 2}"), '~/.config/slurm_forge/config.yaml:1: resources.nodes: expected a whole number, got "two"'),
    (Given(user="resources: {time: 12:00:00}"), '~/.config/slurm_forge/config.yaml:1: resources.time: 12:00:00 without quotes is a number to base 60 in YAML; quote it: "12:00:00"'),
    (Given(user="site: [a]"), "~/.config/slurm_forge/config.yaml:1: site: expected text, got a list"),
    (Given(user="site: ''"), "~/.config/slurm_forge/config.yaml:1: site: is empty; leave the key out"),
    (Given(user="runs: runs"), "~/.config/slurm_forge/config.yaml:1: runs: a folder for all jobs must begin with / or ~"),
    (Given(user="runs: $SCRATCH/runs"), "~/.config/slurm_forge/config.yaml:1: runs: variables are not expanded here; write the path, or set SLURM_FORGE_RUNS in your shell"),
    (Given(user="site: 3"), "~/.config/slurm_forge/config.yaml:1: site: expected text, got 3"),
    (Given(user="runs: ~nobody-there/x"), '~/.config/slurm_forge/config.yaml:1: runs: there is no home folder for "~nobody-there/x"; write the path from / on'),
    (Given(user="- a"), '~/.config/slurm_forge/config.yaml:1: expected keys and values ("seed: 1")'),
    (Given(user='site: "a\\nb"'), "~/.config/slurm_forge/config.yaml:1: site: must be one line of printable text"),
    (Given(user="sites: mila"), '~/.config/slurm_forge/config.yaml:1: sites: unknown key (did you mean "site"?)'),
    (Given(user="setup: module load x"), '~/.config/slurm_forge/config.yaml:1: setup: expected a list, got "module load x"'),
    (Given(user="program: {convention: hf}"), "~/.config/slurm_forge/config.yaml:1: program: it is for a command; an entry saves and resumes by itself (entry: train.yaml:2)"),
    (Given(user="resources: {gpus_per_node: 4}", job="resources: {gpus_per_task: 1}"), "train.yaml:3: resources.gpus_per_task: gpus_per_node says it already; keep one of the two (resources.gpus_per_node: ~/.config/slurm_forge/config.yaml:1)"),
    (Given(user="lead: 2h", job="resources: {time: 1h}"), "~/.config/slurm_forge/config.yaml:1: lead: must be shorter than resources.time, or nothing would be trained (resources.time: train.yaml:3)"),
    (Given(user="resources: {spare_nodes: 1}", job="resources: {nodes: 1}"), "~/.config/slurm_forge/config.yaml:1: resources.spare_nodes: a run on one node (resources.nodes) lives on that of its batch script, without which there is no job; remove it (resources.nodes: train.yaml:3)"),
    (Given(user="resources: {spare_nodes: 1}"), "~/.config/slurm_forge/config.yaml:1: resources.spare_nodes: a run on one node (resources.nodes) lives on that of its batch script, without which there is no job; remove it"),
    (Given(project="name: x"), "slurm_forge.yaml:1: name: only a job file or --set may have this key; remove it here"),
    (Given(project="recovery:\n  cuda_oom: [{do: shrink_micro_batch, time: 3}]"), 'slurm_forge.yaml:2: recovery.cuda_oom[0].time: unknown key (did you mean "times"?)'),
    (Given(project="recovery: {hang: [{do: skip, times: 1}]}"), 'slurm_forge.yaml:1: recovery.hang[0].do: "skip" does nothing about hang (try: warn, fewer_nodes, relaunch, requeue, hold)'),
    (Given(project="seed: off"), 'slurm_forge.yaml:1: seed: off without quotes is a truth value to some readers of YAML and text to others; write false, or quote it: "off"'),
    (Given(project="env: {A B: 1}"), 'slurm_forge.yaml:1: env["A B"]: not a name for an environment variable'),
    (Given(project="runs: ''"), "slurm_forge.yaml:1: runs: is empty; leave the key out"),
    (Given(project="resources: {nodes: 2}\nresources: {nodes: 3}"), "slurm_forge.yaml:2: resources: this key is already on line 1"),
]  # fmt: skip

ON_THE_COMMAND_LINE = [
    (Given(sets=["recovery.cuda_oom.time=2"]), '--set recovery.cuda_oom.time=2: recovery.cuda_oom[0].time: unknown key (did you mean "times"?)'),
    (Given(sets=["recovery.hang.times=3"]), "--set recovery.hang.times=3: recovery.hang has 2 items; say which: recovery.hang[0].times or recovery.hang[1].times\n  To see what can be set: slurm-forge config show JOB.yaml"),
    (Given(sets=["recovery.hang[2].times=3"]), "--set recovery.hang[2].times=3: recovery.hang has 2 items, counted from 0; to add one, set all of it\n  To see what can be set: slurm-forge config show JOB.yaml"),
    (Given(sets=["recovery.env_mismatch.times=1"]), "--set recovery.env_mismatch.times=1: recovery.env_mismatch is an empty list; set all of it\n  To see what can be set: slurm-forge config show JOB.yaml"),
    (Given(sets=["recovery.oom.times=2"]), '--set recovery.oom.times=2: recovery.oom: unknown key (did you mean "cuda_oom"?)'),
    (Given(sets=["recover.oom.times=2"]), '--set recover.oom.times=2: recover: unknown key (did you mean "recovery"?)'),
    (Given(sets=["nodes=2"]), '--set nodes=2: nodes: unknown key (did you mean "resources.nodes"?)'),
    (Given(sets=["resources.nodes=two"]), '--set resources.nodes=two: resources.nodes: expected a whole number, got "two"'),
    (Given(sets=["resources.nodes=0"]), "--set resources.nodes=0: resources.nodes: expected at least 1, got 0"),
    (Given(sets=["resources.time=48:00:00"]), "--set resources.time=48:00:00: resources.time: 48:00:00 without quotes is a number to base 60 in YAML; quote it: \"48:00:00\"\n  In a shell the quotes need some of their own: --set 'resources.time=\"48:00:00\"'"),
    (Given(sets=["probe.enabled=off"]), "--set probe.enabled=off: probe.enabled: off without quotes is a truth value to some readers of YAML and text to others; write false, or quote it: \"off\"\n  In a shell the quotes need some of their own: --set 'probe.enabled=\"off\"'"),
    (Given(sets=["seed=010"]), "--set seed=010: seed: 010 without quotes is octal to some readers of YAML; write it without the leading 0, or quote it: \"010\"\n  In a shell the quotes need some of their own: --set 'seed=\"010\"'"),
    (Given(sets=["seed"]), "--set seed: expected a key, = and a value\n  Write it like --set recovery.cuda_oom.times=2; a part of a key that is not a plain word is written in brackets and quotes: 'args[\"a.b\"]=1'."),
    (Given(sets=["seed="]), '--set seed=: seed: no value; write null for none, or "" for an empty text'),
    (Given(sets=["=1"]), "--set =1: expected a key, = and a value\n  Write it like --set recovery.cuda_oom.times=2; a part of a key that is not a plain word is written in brackets and quotes: 'args[\"a.b\"]=1'."),
    (Given(sets=["a b=1"]), "--set a b=1: expected a key, = and a value\n  Write it like --set recovery.cuda_oom.times=2; a part of a key that is not a plain word is written in brackets and quotes: 'args[\"a.b\"]=1'."),
    (Given(sets=["[0]=1"]), "--set [0]=1: expected a key, = and a value\n  Write it like --set recovery.cuda_oom.times=2; a part of a key that is not a plain word is written in brackets and quotes: 'args[\"a.b\"]=1'."),
    (Given(sets=["seed=1 # x"]), "--set seed=1 # x: seed: \"# x\" would be a comment; quote the whole value\n  In a shell the quotes need some of their own: --set 'seed=\"1 # x\"'"),
    (Given(sets=["seed=# x"]), "--set seed=# x: seed: no value, only a comment; quote it if it is text\n  In a shell the quotes need some of their own: --set 'seed=\"# x\"'"),
    (Given(sets=["seed=[1"]), "--set seed=[1: seed: not YAML: expected ',' or ']', but got '<stream end>'"),
    (Given(sets=["seed=a: b"]), "--set seed=a: b: seed: write keys and values in braces here: {key: value}"),
    (Given(sets=["setup=- a"]), "--set setup=- a: setup: write a list in brackets here: [a, b]"),
    (Given(sets=["seed=--- 1"]), "--set seed=--- 1: seed: expected one value, without document markers"),
    (Given(sets=["seed=1 2"]), '--set seed=1 2: seed: expected a whole number, got "1 2"'),
    (Given(sets=["seed='a' b"]), "--set seed='a' b: seed: more than one value; quote the whole\n  In a shell, single quotes around all of it keep those of the value."),
    (Given(sets=["seed=|"]), "--set seed=|: seed: | begins a text of several lines; quote it\n  In a shell the quotes need some of their own: --set 'seed=\"|\"'"),
    (Given(sets=["seed=&a 1"]), "--set seed=&a 1: seed: anchors and aliases (& and *) are not read; write it out"),
    (Given(sets=["seed=!!int 1x"]), "--set seed=!!int 1x: seed: 1x does not fit the tag; remove the tag"),
    (Given(sets=["seed={a: 1, a: 2}"]), "--set seed={a: 1, a: 2}: seed.a: this key is already there"),
    (Given(sets=["seed.x=1"]), "--set seed.x=1: seed: expected a whole number, got keys and values"),
    (Given(job="seed: 1", sets=["seed.x=1"]), "--set seed.x=1: seed has no keys; set it as a whole\n  To see what can be set: slurm-forge config show JOB.yaml"),
    (Given(sets=["resources[0]=1"]), "--set resources[0]=1: resources is not a list\n  To see what can be set: slurm-forge config show JOB.yaml"),
    (Given(sets=["setup[0]=a"]), "--set setup[0]=a: setup is an empty list; set all of it\n  To see what can be set: slurm-forge config show JOB.yaml"),
    (Given(sets=["site=mila"]), "--set site=mila: site: not a key of a job\n  Give it as a separate option: --site."),
    (Given(sets=["runs=/x"]), "--set runs=/x: runs: not a key of a job\n  Give it as a separate option: --runs."),
    (Given(sets=["args.a=1\n2"]), "--set args.a=1?2: args.a: must be one line of printable text"),
    (Given(sets=["recovery.cuda_oom=[{do: shrink}]"]), '--set recovery.cuda_oom=[{do: shrink}]: recovery.cuda_oom[0].do: unknown value "shrink" (did you mean "shrink_micro_batch"?)'),
    (Given(sets=["recovery.cuda_oom[0].do=skip"]), '--set recovery.cuda_oom[0].do=skip: recovery.cuda_oom[0].do: "skip" does nothing about cuda_oom (try: shrink_micro_batch, relaunch, requeue, hold, raise)'),
    (Given(sets=["env.A=1", "env.A=true"]), '--set env.A=true: env.A: expected text, got true; quote it: "true"'),
    (Given(sets=["Resources.nodes=2"]), '--set Resources.nodes=2: Resources: unknown key (did you mean "resources"?)'),
    (Given(sets=["command=[python]"]), "--set command=[python]: command: entry already names what to run; keep one of the two (entry: train.yaml:2)"),
    (Given(sets=["resources.gpus_per_node=4", "resources.gpus_per_task=1"]), "--set resources.gpus_per_task=1: resources.gpus_per_task: gpus_per_node says it already; keep one of the two (resources.gpus_per_node: --set resources.gpus_per_node=4)"),
    (Given(sets=["name=a/b"]), "--set name=a/b: name: a name is 1 to 64 letters, digits, dots, dashes and underscores, and starts with a letter or a digit"),
    (Given(sets=["inject=[x]"]), '--set inject=[x]: inject[0]: "x" is not a known fault (known here: nan, inf, spike, oom, corrupt, exception, term, usr1, kill, stop, hang, lock, gil, collective, data, slow, bad_node, bad_link, bad_sum, wrong)'),
    (Given(sets=["resources.extra.time=1h"]), '--set resources.extra.time=1h: resources.extra.time: write it as "resources.time"'),
    (Given(sets=['resources.extra["a b"]=1']), '--set resources.extra["a b"]=1: resources.extra["a b"]: not the long name of an sbatch option (lower-case letters, digits and dashes, without the leading --)'),
    (Given(sets=["lead=30"]), '--set lead=30: lead: 30 has no unit; write "30s" for seconds or "30m" for minutes'),
    (Given(sets=["args.x=.inf"]), "--set args.x=.inf: args.x: .inf: infinity and not-a-number are not allowed here"),
    (Given(sets=["checkpoint.keep_best.mode=max"]), "--set checkpoint.keep_best.mode=max: checkpoint.keep_best.metric: missing, and there is no default for it"),
    (Given(job="resources: {gpus_per_node: 2}", sets=["resources.gpus_per_task=1"]), "--set resources.gpus_per_task=1: resources.gpus_per_task: gpus_per_node says it already; keep one of the two (resources.gpus_per_node: train.yaml:3)"),
]  # fmt: skip

TABLE = [*IN_THE_JOB_FILE, *IN_THE_SETTINGS, *ON_THE_COMMAND_LINE]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that somebody works in, below a home of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(folder)
    return folder


def told(given: Given, work: Path) -> str:
    given.write(work.parent / "home", work)
    with pytest.raises(ForgeError) as caught:
        layered_job(Path("train.yaml"), Knobs(), given.sets)
    assert isinstance(caught.value, ConfigError)
    return str(caught.value)


@pytest.mark.parametrize(("given", "message"), TABLE)
def test_a_wrong_configuration_is_told_where_it_stands(
    given: Given, message: str, work: Path
) -> None:
    assert told(given, work) == message


def test_there_are_enough_of_them_and_no_two_are_the_same() -> None:
    assert len({repr(given) for given, _ in TABLE}) == len(TABLE)
    messages = {message for _, message in TABLE}
    others = {message for _, _, message in [*IN_A_JOB, *WHOLE]}
    assert len(messages) >= 60
    assert len(others | messages) >= 180


def blamed(given: Given, message: str) -> Given:
    """What is left without the file or the option that the message names."""
    parts = {"--set": "sets", "train.yaml": "job", "~": "user", "slurm_forge.yaml": "project"}
    part = next(name for start, name in parts.items() if message.startswith(start))
    return replace(given, whole=None, **{part: Given.__dataclass_fields__[part].default})


@pytest.mark.parametrize(("given", "message"), [row for row in TABLE if row[0].whole is None])
def test_without_what_is_blamed_nothing_is_wrong(given: Given, message: str, work: Path) -> None:
    rest = blamed(given, message)
    assert rest != given
    rest.write(work.parent / "home", work)
    assert layered_job(Path("train.yaml"), Knobs(), rest.sets).job.name == "x"


def test_all_mistakes_of_all_files_are_told_at_once(work: Path) -> None:
    given = Given(
        user="resources:\n  nodes: two\n",
        project="probe: {every: 60}\n",
        job="sead: 1\n",
        sets=("watchdog.factor=x",),
    )
    assert told(given, work).splitlines() == [
        '~/.config/slurm_forge/config.yaml:2: resources.nodes: expected a whole number, got "two"',
        'slurm_forge.yaml:1: probe.every: 60 has no unit; write "60s" for seconds or "60m" for minutes',
        'train.yaml:3: sead: unknown key (did you mean "seed"?)',
        '--set watchdog.factor=x: watchdog.factor: expected a number, got "x"',
    ]


@pytest.mark.parametrize("name", ["slurm_forge.yaml", "~/.config/slurm_forge/config.yaml"])
@pytest.mark.parametrize("how", ["group", "others", "link", "folder", "owner"])
def test_settings_that_others_can_write_are_refused(name: str, how: str, work: Path) -> None:
    Given(user="seed: 1", project="seed: 2").write(work.parent / "home", work)
    path = Path(name).expanduser().absolute()
    if how == "group":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another group")
        os.chown(path, -1, 12345)
        path.chmod(0o664)
        message = f"{path} can be written by other users: group 12345 (mode 0664)\n  Check that its content is yours, then: chmod go-w {path}"
    elif how == "others":
        path.chmod(0o646)
        message = f"{path} can be written by other users: everybody (mode 0646)\n  Check that its content is yours, then: chmod go-w {path}"
    elif how == "link":
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved"))
        message = f"{path} is a symbolic link\n  Check where it points, then replace it with the file itself."
    elif how == "folder":
        path.unlink()
        path.mkdir()
        message = f"{path} is not a regular file\n  Remove it and try again."
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 65534, -1)
        message = f"{path} belongs to uid 65534, not to uid 0\n  Use a path of your own, or ask its owner."
    with pytest.raises(UnsafeFileError) as caught:
        layered_job(Path("train.yaml"), Knobs(), ())
    assert str(caught.value) == message
