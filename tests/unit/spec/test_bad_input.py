# ruff: noqa: E501  (messages are compared whole)
"""Wrong job files, and exactly what the user reads about each."""

from __future__ import annotations

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.spec import from_yaml, job_from_mapping

HEAD = "name: x\nentry: a.b:f\n"
HIDDEN = "line breaks, control and invisible characters are not allowed here"
ACTIONS = (
    "warn, skip, rollback, shrink_micro_batch, raise_mem, raise_time, fewer_nodes, fewer_workers, hook, relaunch, requeue, "
    "hold, raise"
)
OPTION = "not the long name of an sbatch option (lower-case letters, digits and dashes, without the leading --)"
NAME = (
    "a name is 1 to 64 letters, digits, dots, dashes and underscores, "
    "and starts with a letter or a digit"
)

#: What follows HEAD, the line of the mistake, the message.
IN_A_JOB = [
    # keys
    ("recovery:\n  cuda_oom: [{do: shrink_micro_batch, time: 3}]", 4, 'recovery.cuda_oom[0].time: unknown key (did you mean "times"?)'),
    ("resorces: {}", 3, 'resorces: unknown key (did you mean "resources"?)'),
    ("nodes: 2", 3, 'nodes: unknown key (did you mean "resources.nodes"?)'),
    ("walltime: 2h", 3, 'walltime: unknown key (did you mean "resources.time"?)'),
    ("resources:\n  ntasks-per-node: 2", 4, 'resources.ntasks-per-node: unknown key (did you mean "tasks_per_node"?)'),
    ("resources: {gpus: 8}", 3, 'resources.gpus: unknown key (did you mean "gpus_per_node"?)'),
    ("checkpoint: {keep: 3}", 3, 'checkpoint.keep: unknown key (did you mean "keep_last"?)'),
    ("checkpoint: {zzz: 3}", 3, "checkpoint.zzz: unknown key (known here: every_steps, every_epochs, every_minutes, background, keep_last, keep_best, keep_every_steps, keep_every_epochs, keep_every_minutes, fallback, good_after_steps)"),
    ("environment: {OMP_NUM_THREADS: 4}", 3, 'environment.OMP_NUM_THREADS: environment variables of the job are written under "env"'),
    ("environment: {pytorch: warn}", 3, 'environment.pytorch: unknown key (did you mean "torch"?)'),
    ("environment: {torch: wran}", 3, 'environment.torch: unknown value "wran" (did you mean "warn"?)'),
    ("recovery: {nan: []}", 3, 'recovery.nan: unknown key (did you mean "non_finite"?)'),
    ("seed: 1\nseed: 2", 4, "seed: this key is already on line 3"),
    ("preflight: false", 3, 'preflight: to switch it off, write "preflight: {enabled: false}"'),
    ("preflight: {timeout: 10s}", 3, 'preflight.timeout: unknown key (did you mean "within"?)'),
    ("inject: [bad_node@12]", 3, 'inject[0]: "bad_node@12": name the place: bad_node:rank1, or bad_node:host=n2'),
    ("inject: ['nan@12:host=n2']", 3, 'inject[0]: "nan@12:host=n2": host= is for bad_node, bad_link and bad_sum; others strike a rank'),
    ("template: torchrum", 3, 'template: unknown value "torchrum" (did you mean "torchrun"?)'),
    ("launcher: srun", 3, 'launcher: unknown key (did you mean "template"?)'),
    ("image: /i.sif", 3, 'image: unknown key (did you mean "container.image"?)'),
    ("container: /i.sif", 3, 'container: expected keys and values, got "/i.sif"'),
    ("container: {runtime: apptainer}", 3, "container.image: missing, and there is no default for it"),
    ("container:\n  image: x\n  runtime: docker", 5, 'container.runtime: unknown value "docker" (known here: apptainer, singularity, pyxis)'),
    ("container: {image: x, binds: [/a]}", 3, 'container.binds: unknown key (did you mean "mounts"?)'),
    ('container: {image: "--fakeroot"}', 3, 'container.image: starts with "-", which the runtime would read as an option'),
    ("container: {image: x, python: /bin/sh}", 3, 'container.python: "/bin/sh" is not a Python interpreter: the name of its file begins with "python"'),
    ('container: {image: x, mounts: ["/a,/b"]}', 3, "container.mounts[0]: a path in a mount can't hold commas or quotes; mounts are a list"),
    ("container: {image: x, mounts: [data]}", 3, 'container.mounts[0]: expected absolute paths: "/data", "/data:/mnt" or "/data:/mnt:ro"'),
    ('container: {image: x, mounts: ["/a:/b:rx"]}', 3, 'container.mounts[0]: unknown flag "rx" (one of: ro, rw)'),
    ('container: {image: x, mounts: ["/a:/b:"]}', 3, 'container.mounts[0]: expected absolute paths: "/data", "/data:/mnt" or "/data:/mnt:ro"'),
    ('container: {image: "x\\ny"}', 3, f"container.image: character 2 is a line break; {HIDDEN}"),
    # types
    ("resources:\n  nodes: two", 4, 'resources.nodes: expected a whole number, got "two"'),
    ("resources:\n  nodes: 1.5", 4, "resources.nodes: expected a whole number, got 1.5"),
    ('resources:\n  nodes: "2"', 4, 'resources.nodes: expected a whole number, got "2"'),
    ("resources: {nodes: 0}", 3, "resources.nodes: expected at least 1, got 0"),
    ("resources: {nodes: 4, spare_nodes: -1}", 3, "resources.spare_nodes: expected at least 1, got -1"),
    ("resources: {nodes: 4, spare_nodes: 0}", 3, "resources.spare_nodes: expected at least 1, got 0"),
    ("resources: {nodes: 4, spare_nodes: true}", 3, "resources.spare_nodes: expected a whole number, got true"),
    ("resources: {nodes: 4, spares: 1}", 3, 'resources.spares: unknown key (did you mean "spare_nodes"?)'),
    ("spare_nodes: 1", 3, 'spare_nodes: unknown key (did you mean "resources.spare_nodes"?)'),
    ("resources: {spare_nodes: 1}", 3, "resources.spare_nodes: a run on one node (resources.nodes) lives on that of its batch script, without which there is no job; remove it"),
    ("resources: {nodes: 2, extra: {no-kill: true}}", 3, "resources.extra.no-kill: slurm_forge sets this option itself where resources.spare_nodes asks for spare nodes; remove it"),
    ("checkpoint: {every_steps: true}", 3, "checkpoint.every_steps: expected a whole number, got true"),
    ("checkpoint: {fallback: scratch/me}", 3, 'checkpoint.fallback: expected an absolute path, got "scratch/me"'),
    ("checkpoint: {every_epochs: 0}", 3, "checkpoint.every_epochs: expected at least 1, got 0"),
    ("checkpoint: {every_minutes: 10m}", 3, 'checkpoint.every_minutes: expected a number of minutes or auto, got "10m"'),
    ("checkpoint: {every_minutes: -1}", 3, "checkpoint.every_minutes: expected more than 0, got -1"),
    ("checkpoint: {keep_best: {metric: loss, mode: minimum}}", 3, 'checkpoint.keep_best.mode: unknown value "minimum" (did you mean "min"?)'),
    ("batch_coupled: 1", 3, "batch_coupled: expected true or false, got 1"),
    ("seed: -1", 3, "seed: expected at least 0, got -1"),
    ("args: 3", 3, "args: expected keys and values, got 3"),
    ("resources:", 3, "resources: expected keys and values, got nothing"),
    ("setup: module load cuda", 3, 'setup: expected a list, got "module load cuda"'),
    # YAML's traps
    ("resources:\n  time: 48:00:00", 4, 'resources.time: 48:00:00 without quotes is a number to base 60 in YAML; quote it: "48:00:00"'),
    ("batch_coupled: yes", 3, 'batch_coupled: yes without quotes is a truth value to some readers of YAML and text to others; write true, or quote it: "yes"'),
    ("probe: off", 3, 'probe: off without quotes is a truth value to some readers of YAML and text to others; write false, or quote it: "off"'),
    ("resources: {nodelist: 0123}", 3, 'resources.nodelist: 0123 without quotes is octal to some readers of YAML; write it without the leading 0, or quote it: "0123"'),
    ("args: {lr: .inf}", 3, "args.lr: .inf: infinity and not-a-number are not allowed here"),
    # durations and sizes
    ("resources: {time: 30}", 3, 'resources.time: 30 has no unit; write "30s" for seconds or "30m" for minutes'),
    ("resources: {time: UNLIMITED}", 3, "resources.time: leave it out for the partition's own limit; a run continues beyond it"),
    ('resources: {time: "0:00"}', 3, "resources.time: must be longer than 0"),
    ("resources: {time: 7200}", 3, 'resources.time: 7200 has no unit; write "7200s" for seconds or "7200m" for minutes (YAML 1.1 reads 2:00:00 without quotes as 7200: then write "2:00:00")'),
    ("probe: {every: 60}", 3, 'probe.every: 60 has no unit; write "60s" for seconds or "60m" for minutes'),
    ("probe: {deadline: soon}", 3, 'probe.deadline: "soon" is not a duration; write it like "60s", "10m", "1h30m", "2d" or "48:00:00"'),
    ("template: array", 3, 'template: how many tasks the array has is missing: "chain: 10" (each is an attempt as long as resources.time)'),
    ("chain: 3", 3, 'chain: only an array has tasks: write "template: array", too'),
    ("template: torchrun\nchain: 3", 4, 'chain: only an array has tasks: write "template: array", too'),
    ("template: array\nchain: 0", 4, "chain: expected at least 1, got 0"),
    ("template: array\nchain: 1001", 4, "chain: expected at most 1000, got 1001"),
    ("template: array\nchain: 1-5%1", 4, 'chain: expected a whole number, got "1-5%1"'),
    ("array: 5", 3, 'array: unknown key (did you mean "chain"?)'),
    ("resources: {extra: {array: 1-5}}", 3, 'resources.extra.array: for one run in many tasks, each an attempt, write "template: array" and "chain: 10"; for many runs submit each of them'),
    ("lead: 2h\nresources: {time: 1h}", 3, "lead: must be shorter than resources.time, or nothing would be trained"),
    ("resources: {mem: 4GB}", 3, 'resources.mem: "4GB" is not a memory size; write it like "4G"'),
    ("resources: {mem: 4294967296}", 3, 'resources.mem: 4294967296 without a unit is MiB, as in Slurm; write "4G" if it is bytes'),
    ("resources: {gpus_per_node: many}", 3, 'resources.gpus_per_node: expected a number of GPUs, or kind and number like "a100:4"'),
    ("resources:\n  gpus_per_node: 1\n  gpus_per_task: 1", 5, "resources.gpus_per_task: gpus_per_node says it already; keep one of the two"),
    # what would reach sbatch
    ('resources: {partition: "gpu --wrap=evil"}', 3, "resources.partition: holds a space; spaces, quotes and \\ are not allowed here"),
    ('resources: {partition: "--wrap=evil"}', 3, 'resources.partition: starts with "-", which Slurm would read as another option'),
    ('resources: {partition: "gpu\\n#SBATCH --uid=0"}', 3, f"resources.partition: character 4 is a line break; {HIDDEN}"),
    ('resources: {account: "a\\0b"}', 3, f"resources.account: character 2 is U+0000; {HIDDEN}"),
    ('resources: {constraint: "a\\u2028b"}', 3, f"resources.constraint: character 2 is U+2028; {HIDDEN}"),
    ('resources: {qos: ""}', 3, "resources.qos: is empty; leave the key out"),
    ("resources: {partition: 3}", 3, "resources.partition: expected text, got 3"),
    ("resources: {extra: {time: 3}}", 3, 'resources.extra.time: write it as "resources.time"'),
    ("resources: {extra: {requeue: true}}", 3, "resources.extra.requeue: slurm_forge sets this option itself; remove it"),
    ("resources: {extra: {--exclusive: true}}", 3, f"resources.extra.--exclusive: {OPTION}"),
    ("resources:\n  extra:\n    a;b: 1", 5, f'resources.extra["a;b"]: {OPTION}'),
    ("resources: {extra: {nice: false}}", 3, "resources.extra.nice: write true for an option without a value, or remove it"),
    ("resources: {extra: {nice: 1.5}}", 3, 'resources.extra.nice: expected text, got 1.5; quote it: "1.5"'),
    ("resources: {extra: {comment: 'a\"b'}}", 3, "resources.extra.comment: quotes and \\ are not allowed here"),
    ('resources: {extra: {comment: ""}}', 3, "resources.extra.comment: is empty; write true for an option without a value, or remove it"),
    ('lead: "\\e[2Jsoon"', 3, 'lead: "\\x1b[2Jsoon" is not a duration; write it like "60s", "10m", "1h30m", "2d" or "48:00:00"'),
    ('resources: {extra: {comment: "-x"}}', 3, 'resources.extra.comment: starts with "-", which Slurm would read as another option'),
    ('setup: ["module load a\\nrm x"]', 3, f"setup[0]: character 14 is a line break; {HIDDEN}"),
    ("env: {A-B: 1}", 3, "env.A-B: not a name for an environment variable"),
    ("env: {A: true}", 3, 'env.A: expected text, got true; quote it: "true"'),
    ('env: {A: "a\\nb"}', 3, f"env.A: character 2 is a line break; {HIDDEN}"),
    # recovery
    ("recovery:\n  cuda_oom:\n  - do: shrink", 5, 'recovery.cuda_oom[0].do: unknown value "shrink" (did you mean "shrink_micro_batch"?)'),
    ("recovery: {crash: [{do: stop}]}", 3, f'recovery.crash[0].do: unknown value "stop" (known here: {ACTIONS})'),
    ("recovery: {crash: [{times: 2}]}", 3, "recovery.crash[0].do: missing, and there is no default for it"),
    ("recovery: {crash: requeue}", 3, 'recovery.crash: expected a list, got "requeue"'),
    ("recovery: {crash: [requeue]}", 3, 'recovery.crash[0]: expected keys and values, got "requeue"'),
    ("recovery:\n  node_fail:\n  - {do: requeue, factor: 2}", 5, 'recovery.node_fail[0].factor: does not belong to "do: requeue" (it takes times, wait, exclude_node, variables)'),
    ("recovery: {crash: [{do: hold, times: 2}]}", 3, 'recovery.crash[0].times: does not belong to "do: hold" (it takes nothing else)'),
    ("recovery: {hang: [{do: skip, times: 2}]}", 3, 'recovery.hang[0].do: "skip" does nothing about hang (try: warn, fewer_nodes, relaunch, requeue, hold)'),
    ("recovery:\n  hang: [{do: relaunch, times: 1},\n    {do: requeue}]", 5, 'recovery.hang[1].do: say how often ("times: 2"); only preempted, time_limit, node_fail, admin_requeue may repeat without limit'),
    ("recovery: {preempted: [{do: requeue}, {do: hold}]}", 3, 'recovery.preempted[0].do: "requeue" has no times and repeats without limit: remove the rungs after it'),
    ("recovery: {crash: [{do: hold}, {do: requeue, times: 1}]}", 3, 'recovery.crash[0].do: "hold" ends the ladder: remove the rungs after it'),
    ("recovery: {host_oom: [{do: raise_mem, times: 1, factor: 0.5}]}", 3, "recovery.host_oom[0].factor: expected more than 1 and at most 16, got 0.5"),
    ("recovery: {cuda_oom: [{do: shrink_micro_batch, times: 1, factor: 2}]}", 3, "recovery.cuda_oom[0].factor: expected less than 1, got 2.0"),
    ("recovery: {non_finite: [{do: rollback, times: 1, ramp_steps: 3}]}", 3, "recovery.non_finite[0].ramp_steps: there is nothing to ramp without lr_scale below 1"),
    ("recovery: {non_finite: [{do: rollback, times: 1, lr_scale: 2}]}", 3, "recovery.non_finite[0].lr_scale: expected at most 1, got 2"),
    ("recovery: {crash: [{do: relaunch, times: 1, start: hot}]}", 3, 'recovery.crash[0].start: unknown value "hot" (known here: cold, warm, in_process)'),
    ("recovery: {crash: [{do: requeue, times: 1, start: warm}]}", 3, 'recovery.crash[0].start: does not belong to "do: requeue" (it takes times, wait, exclude_node, variables)'),
    ("recovery: {non_finite: [{do: rollback, times: 1, skip_samples: all}]}", 3, 'recovery.non_finite[0].skip_samples: unknown value "all" (known here: none, window)'),
    # probe
    ("probe: false", 3, 'probe: to switch the probe off, write "probe: {enabled: false}"'),
    ("watchdog: false", 3, 'watchdog: to switch the watchdog off, write "watchdog: {enabled: false}"'),
    ("watchdog: {timeout: 5m}", 3, 'watchdog.timeout: unknown key (did you mean "at_most"?)'),
    ("watchdog: {at_least: 30}", 3, 'watchdog.at_least: 30 has no unit; write "30s" for seconds or "30m" for minutes'),
    ("watchdog: {factor: 0.5}", 3, "watchdog: factor must be 1 or more: otherwise every ordinary step would be a hang"),
    ("watchdog: {at_least: 20m}", 3, "watchdog: at_least (20m) is longer than at_most (10m): raise at_most too"),
    ("watchdog: {factor: .inf}", 3, "watchdog.factor: .inf: infinity and not-a-number are not allowed here"),
    ("probe: {every: 0s}", 3, "probe.every: must be longer than 0"),
    ("probe: {silence: 3s}", 3, "probe: silence (3s) must be 4s or more: heartbeats come every second or two, and ranks of a suspended job fall silent one after the other"),
    ("probe: off", 3, 'probe: off without quotes is a truth value to some readers of YAML and text to others; write false, or quote it: "off"'),
    ("preflight: false", 3, 'preflight: to switch it off, write "preflight: {enabled: false}"'),
    ("preflight: {within: 0s}", 3, "preflight.within: must be longer than 0"),
    ("preflight: {within: 4s}", 3, "preflight: within (4s) must be 5s or more: a healthy node that is busy would be refused"),
    ("preflight: {withn: 5s}", 3, 'preflight.withn: unknown key (did you mean "within"?)'),
    ("probe: {straggler: 0.9}", 3, "probe.straggler: expected more than 1, got 0.9"),
    ("probe: {stragglers: 2}", 3, 'probe.stragglers: unknown key (did you mean "straggler"?)'),
    ("recovery: {straggler: [{do: rollback, times: 1}]}", 3, 'recovery.straggler[0].do: "rollback" does nothing about straggler (try: warn, relaunch, requeue, hold)'),
    ("probe: {enabled: 1}", 3, "probe.enabled: expected true or false, got 1"),
]  # fmt: skip

#: A whole job file, the line of the mistake, the message.
WHOLE = [
    ("entry: a:f", 1, "name: missing, and there is no default for it"),
    ("name: a/../b\nentry: a:f", 1, f"name: {NAME}"),
    ("name: -x\nentry: a:f", 1, f"name: {NAME}"),
    ('name: "x\\n"\nentry: a:f', 1, f"name: {NAME}"),
    (f"name: {'x' * 65}\nentry: a:f", 1, f"name: {NAME}"),
    ("name: 3\nentry: a:f", 1, "name: expected text, got 3"),
    ("name: x", 1, 'nothing to run; add entry ("package.module:train") or command ([python, train.py])'),
    ("name: x\nentry: train.py", 2, 'entry: names no function; write "package.module:train" or "path/file.py:train"'),
    ("name: x\nentry: a-b:f", 2, 'entry: "a-b" is neither a module ("package.module") nor a path to a .py file'),
    ("name: x\nentry: a:f-g", 2, 'entry: "f-g" is not the name of a function'),
    ("name: x\nentry: -m.py:f", 2, 'entry: "-m.py" is not a path that can be run: it holds ":" or starts with "-"'),
    ("name: x\nentry: a:f\ncommand: [python]", 3, "command: entry already names what to run; keep one of the two"),
    ("name: x\ncommand: python train.py", 2, 'command: expected a list of words, such as [python, train.py, "--lr=0.1"]'),
    ("name: x\ncommand: []", 2, "command: expected at least 1 in the list, got 0"),
    ("name: x\ncommand:\n- python\n- 0.1", 4, 'command[1]: expected text, got 0.1; quote it: "0.1"'),
    ("name: x\ncommand: [-x]", 2, "command[0]: the first word must be the program to run"),
    ("name: x\ncommand: [torchrun, a.py]\ntemplate: torchrun", 3, "template: torchrun adds torchrun itself: write the script alone as the command"),
    ("name: x\ncommand: [python, -m, torch.distributed.run, a.py]\ntemplate: torchrun", 3, "template: torchrun adds torchrun itself: write the script alone as the command"),
    ("name: x\ncommand: [srun, a]\ntemplate: srun", 3, "template: the command starts with srun already; keep one of the two"),
    ("name: x\ncommand: [srun, a]\ncontainer: {image: x}", 3, 'container: the command starts with srun, which no container has: write "template: srun" and the program alone as the command'),
    ("name: x\ncommand: [a]\nargs: {b: 1}", 3, "args: only an entry reads args; put them into command"),
]  # fmt: skip


def told(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_yaml(text, "job.yaml")
    return str(caught.value)


@pytest.mark.parametrize(("text", "line", "message"), IN_A_JOB)
def test_a_mistake_in_an_otherwise_good_job(text: str, line: int, message: str) -> None:
    assert told(HEAD + text + "\n") == f"job.yaml:{line}: {message}"


@pytest.mark.parametrize(("text", "line", "message"), WHOLE)
def test_a_mistake_in_what_every_job_says(text: str, line: int, message: str) -> None:
    assert told(text + "\n") == f"job.yaml:{line}: {message}"


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    text = HEAD + "resources: {nodes: two}\nprobe: {every: 5}\nresorces: {}\nseed: 1.5\n"
    assert told(text).splitlines() == [
        'job.yaml:3: resources.nodes: expected a whole number, got "two"',
        'job.yaml:4: probe.every: 5 has no unit; write "5s" for seconds or "5m" for minutes',
        'job.yaml:5: resorces: unknown key (did you mean "resources"?)',
        "job.yaml:6: seed: expected a whole number, got 1.5",
    ]


def test_the_same_mistakes_are_found_in_python_values() -> None:
    with pytest.raises(ConfigError, match=r"^resources\.nodes: expected a whole number, got \"2\""):
        job_from_mapping({"name": "x", "entry": "a:f", "resources": {"nodes": "2"}})
    with pytest.raises(ConfigError, match=r"^args\.lr: infinity and not-a-number"):
        job_from_mapping({"name": "x", "entry": "a:f", "args": {"lr": float("nan")}})
    deep: list[object] = []
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested deeper than 24 levels"):
        job_from_mapping({"name": "x", "entry": "a:f", "args": {"deep": deep}})
