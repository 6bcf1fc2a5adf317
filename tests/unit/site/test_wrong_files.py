# ruff: noqa: E501  (messages are compared whole)
"""Wrong site files, and exactly what the user reads about each."""

from __future__ import annotations

from datetime import date

import pytest

from slurm_forge.documents import build, load
from slurm_forge.errors import ConfigError
from slurm_forge.site.checking import check_site, check_together
from slurm_forge.site.model import Site

HEAD = "name: hill\ntitle: The hill\n"
FACTS = "preemption, max_time, max_time_by_nodes, default_time, max_nodes, gpu, gpus_per_node, max_gpus_per_job, gpus_required, cpus_per_gpu, memory_per_gpu, constraint, exclusive_nodes, modules, self_requeue_allowed, expected_bandwidth, note"

#: What follows HEAD, the line of the mistake, the message.
NOT_READ = [
    # keys
    ("prempt: {}", 3, 'prempt: unknown key (did you mean "preemption_default"?)'),
    ("socket_ifname: ib0", 3, 'socket_ifname: unknown key (did you mean "socket_interface"?)'),
    ("hostnames: [a]", 3, 'hostnames: unknown key (did you mean "detect.hosts"?)'),
    ("max_time: 2d", 3, 'max_time: unknown key (did you mean "everywhere.max_time"?)'),
    ("arch: aarch64", 3, 'arch: unknown key (did you mean "architecture"?)'),
    ("rejected: []", 3, 'rejected: unknown key (did you mean "rejected_options"?)'),
    ("partitions:\n  long: {max_walltime: 2d}", 4, 'partitions.long.max_walltime: unknown key (did you mean "max_time"?)'),
    ("partitions:\n  long: {zzz: 1}", 4, f"partitions.long.zzz: unknown key (known here: {FACTS})"),
    ("qos:\n  low:\n    preemption: {mode: REQUEUE, grace_s: 120}", 5, 'qos.low.preemption.grace_s: unknown key (did you mean "grace"?)'),
    ("detect: {env: {A: [b]}}", 3, 'detect.env: unknown key (did you mean "variables"?)'),
    ("storage:\n- {role: scratch, purge: 90d}", 4, 'storage[0].purge: unknown key (did you mean "purge_after"?)'),
    ("accounts:\n- {account: x, accounts: [x], constraint: [a]}", 4, 'accounts[0].account: unknown key (did you mean "accounts"?)'),
    ("sources:\n- {url: x, page: y}", 4, 'sources[0].url: unknown key (did you mean "page"?)'),
    # values
    ("preemption_default: {mode: off}", 3, 'preemption_default.mode: off without quotes is a truth value to some readers of YAML and text to others; write false, or quote it: "off"'),
    ('preemption_default: {mode: "off"}', 3, 'preemption_default.mode: unknown value "off" (known here: OFF, REQUEUE, CANCEL, SUSPEND)'),
    ("preemption_default: {mode: requeue}", 3, 'preemption_default.mode: unknown value "requeue" (known here: OFF, REQUEUE, CANCEL, SUSPEND)'),
    ("preemption_default: {mode: REQUEUE, grace: 120}", 3, 'preemption_default.grace: 120 has no unit; write "120s" for seconds or "120m" for minutes'),
    ("everywhere: {max_time: 48:00:00}", 3, 'everywhere.max_time: 48:00:00 without quotes is a number to base 60 in YAML; quote it: "48:00:00"'),
    ("everywhere: {memory_per_gpu: 60GB}", 3, 'everywhere.memory_per_gpu: "60GB" is not a memory size; write it like "60G"'),
    ("everywhere: {gpus_per_node: four}", 3, 'everywhere.gpus_per_node: expected a whole number, got "four"'),
    ("everywhere: {max_nodes: 0}", 3, "everywhere.max_nodes: expected at least 1, got 0"),
    ("expected_bandwidth: 180", 3, 'expected_bandwidth: 180 is not a bandwidth; write it like "180 GB/s" or "400 Gbit/s"'),
    ("gpu_request: gpu", 3, 'gpu_request: unknown value "gpu" (did you mean "gpus"?)'),
    ("launcher: srun", 3, 'launcher: unknown value "srun" (did you mean "srun_per_gpu"?)'),
    ("confidence: sure", 3, 'confidence: unknown value "sure" (known here: tried, official, official_excerpt, community)'),
    ('rejected_options: ["mem"]', 3, 'rejected_options[0]: options begin with a dash, like "--gres" or "--network=single_node_vni"'),
    ("required_options:\n- {why: because}", 4, "required_options[0].option: missing, and there is no default for it"),
    ('gpu_types: {a100: "a100 --wrap=id"}', 3, 'gpu_types.a100: features as --constraint takes them, without spaces: "a100&nvlink"'),
    ('everywhere: {constraint: "-a"}', 3, 'everywhere.constraint: features as --constraint takes them, without spaces: "a100&nvlink"'),
    ("modules: [a b]", 3, 'modules[0]: the name of a module, like "cuda/12.4"'),
    ('setup: ["a\\nb"]', 3, "setup[0]: must be one line of printable text"),
    ("sources: [{page: x, dated: 2026-08-20}]", 3, 'sources[0].dated: 2026-08-20 without quotes is a date in YAML; quote it: "2026-08-20"'),
    ('checked: "2026-13"', 3, 'checked: a day like "2026-08-20", or a month like "2026-08"'),
    ('checked: "August"', 3, 'checked: a day like "2026-08-20", or a month like "2026-08"'),
    ('detect: {hosts: ["login[0-9]+"]}', 3, 'detect.hosts[0]: a host name, with * and ? for what varies: "login*.hill.example"'),
    ('detect: {hosts: ["*"]}', 3, 'detect.hosts[0]: a host name, with * and ? for what varies: "login*.hill.example"'),
    ("detect: {variables: {HOST: hill}}", 3, 'detect.variables.HOST: expected a list, got "hill"'),
    ('accounts: [{accounts: ["*@a100"]}]', 3, "accounts[0]: has no constraint and no partitions that these accounts go with; for all jobs write account_required and account_example"),
    ("accounts: [{accounts: [], constraint: [a]}]", 3, "accounts[0].accounts: expected at least 1 in the list, got 0"),
    ('env: {always: {A: "1"}, never: {A: why}}', 3, "env.always.A: env.never says that it must not be set"),
    ("containers: [{runtime: docker}]", 3, 'containers[0].runtime: unknown value "docker" (known here: apptainer, singularity, pyxis, enroot, sarus, shifter, podman, container_engine)'),
    ("name: mountain", 3, "name: this key is already on line 1"),
]  # fmt: skip

SOUND = 'contact: x\nconfidence: tried\nchecked: "2026-11"\nsources: [{page: x, dated: "2026-11"}]\ncluster_names: [hill]\n'

#: What follows HEAD and SOUND, the line of the mistake, what the checker says.
FOUND_BY_THE_CHECKER = [
    ('preemption_default: {grace: "120s"}', 8, "preemption_default.grace: without a mode it is a guess; say what happens to the job, or null"),
    ('partitions:\n  p: {preemption: {exempt: "2h"}}', 9, "partitions.p.preemption.exempt: without a mode it is a guess; say what happens to the job, or null"),
    ('preemption_default: {mode: "OFF", grace: "120s"}', 8, 'preemption_default.grace: with mode: "OFF" nothing is preempted'),
    ('preemption_default: {mode: SUSPEND, grace: "120s"}', 8, "preemption_default.grace: Slurm suspends without any notice"),
    ('preemption_default: {mode: CANCEL, grace: "120h"}', 8, "preemption_default.grace: 5d is longer than makes sense (1d at most); is the unit right?"),
    ("everywhere: {preemption: {mode: REQUEUE}}", 8, "everywhere.preemption: write it in preemption_default"),
    ("partitions:\n  p: {max_time: 9999d}", 9, "partitions.p.max_time: 9999d is longer than makes sense (366d at most); is the unit right?"),
    ('everywhere: {max_time: "1h", default_time: "2h"}', 8, "everywhere.default_time: longer than max_time"),
    ('everywhere:\n  max_time_by_nodes:\n  - {min_nodes: 9, max_time: "1h"}\n  - {min_nodes: 2, max_time: "2h"}', 11, "everywhere.max_time_by_nodes[1].min_nodes: 2 after 9; begin with the smallest jobs"),
    ("everywhere: {max_time_by_nodes: [{min_nodes: 1, max_time: null}]}", 8, "everywhere.max_time_by_nodes[0]: has no max_time"),
    ("default_qos: debog\nqos: {debug: {}}", 8, 'default_qos: qos does not have it (did you mean "debug"?)'),
    ("clusters: {dale: {}}", 8, "clusters.dale: neither cluster_names nor detect.variables holds this name"),
    ('rejected_options: ["--mme"]', 8, 'rejected_options[0]: sbatch itself has no --mme (did you mean "--mem"?)'),
    ('rejected_options: ["--mem", {option: "--mem"}]', 8, "rejected_options[1]: --mem is already in the list"),
    ('rejected_options: ["--mem"]\nrequired_options: ["--mem"]', 9, "required_options[0]: --mem is one of rejected_options, too"),
    ('rejected_options: ["--hint"]\nsbatch_options: ["--hint=nomultithread"]', 9, "sbatch_options[0]: --hint=nomultithread is one of rejected_options, too"),
    ('sbatch_options: ["-C gpu"]', 8, "sbatch_options[0]: write the long name: --constraint"),
    ('rejected_options: ["--gres"]\ngpu_request: gres', 9, "gpu_request: --gres is one of rejected_options"),
    ("storage: [{role: scratch}]", 8, "storage[0]: has neither path nor env"),
    ('storage: [{role: scratch, env: S, purge_after: "90d"}]', 8, "storage[0].purge_after: without purge_basis: say what the age counts from (atime, content …)"),
    ('storage: [{role: scratch, env: S, purge_after: "90m", purge_basis: atime}]', 8, "storage[0].purge_after: less than a day; is the unit right?"),
    ("env: {always: {NCCL_SOCKET_IFNAME: ib0}}", 8, "env.always.NCCL_SOCKET_IFNAME: write it as socket_interface, from which gloo and our own channel have it"),
    ("env: {always: {GLOO_SOCKET_IFNAME: =ib0}}", 8, "env.always.GLOO_SOCKET_IFNAME: gloo takes whole names only, no ^ or ="),
    ("expected_bandwidth: 400 TB/s", 8, "expected_bandwidth: faster than any network; give nccl-tests' busbw, per rank"),
    ("notes: [It is probably 40 GB.]", 8, 'notes[0]: "probably" is a guess; find it out, or leave it null'),
    ("requeue_delay: 121h", 8, "requeue_delay: 5d1h is longer than makes sense (1d at most); is the unit right?"),
]  # fmt: skip

#: A whole file but for HEAD, the lines and messages.
WITHOUT_PROOF = [
    (
        "socket_interface: ib0",
        [
            "sources: facts without sources; say where they come from",
            "contact: no contact; give the centre's help page or mail address",
            "confidence: missing; write tried, official, official_excerpt or community",
            'checked: not said when the facts were last compared with the sources ("2026-11")',
        ],
    ),
    (
        SOUND.replace(', dated: "2026-11"', "") + "socket_interface: ib0",
        ["sources[0]: without a date; write dated (the page's own) or seen (when you read it)"],
    ),
    (
        SOUND.replace("[{page: x, dated: \"2026-11\"}]", "[x, y]") + "socket_interface: ib0",
        [
            "sources[0]: without a date; write dated (the page's own) or seen (when you read it)",
            "sources[1]: without a date; write dated (the page's own) or seen (when you read it)",
        ],
    ),
    (SOUND.replace("2026-11", "2027-01") + "python: x", ["sources[0].dated: 2027-01 is in the future", "checked: 2027-01 is in the future"]),
    ("", []),
]  # fmt: skip


def site(text: str) -> tuple[Site, object]:
    document = load(HEAD + text, "hill.yaml")
    return build(Site, document), document


@pytest.mark.parametrize(("text", "line", "message"), NOT_READ)
def test_a_file_that_is_not_read(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        site(text)
    assert str(mistake.value) == f"hill.yaml:{line}: {message}"


@pytest.mark.parametrize(("text", "line", "message"), FOUND_BY_THE_CHECKER)
def test_what_the_checker_finds(text: str, line: int, message: str) -> None:
    made, document = site(SOUND + text + "\n")
    assert [each.at(document) for each in check_site(made, date(2026, 12, 1))] == [(line, message)]


@pytest.mark.parametrize(("text", "messages"), WITHOUT_PROOF)
def test_facts_need_to_show_where_they_come_from(text: str, messages: list[str]) -> None:
    made, document = site(text + "\n")
    found = check_site(made, date(2026, 12, 1))
    assert [each.at(document)[1] for each in found if each.mistake] == messages


def test_old_facts_and_options_that_nobody_knows_are_advice() -> None:
    made, document = site(SOUND + 'sbatch_options: ["--container-image=x", "--xyzzy=1"]\n')
    found = check_site(made, date(2029, 1, 1))
    assert [(each.mistake, each.at(document)) for each in found] == [
        (False, (5, "checked: 2026-11 is more than two years ago; compare the facts again")),
        (False, (8, "sbatch_options[1]: sbatch itself has no --xyzzy")),
    ]


def test_two_files_that_claim_the_same_cluster() -> None:
    one, _ = site(SOUND + "detect: {variables: {A: [b]}, hosts: ['login*']}\n")
    other, document = site("detect: {hosts: ['LOGIN*']}\ncluster_names: [dale, hill]\n")
    found = check_together({"one.yaml": one, "other.yaml": other})
    assert [(file, each.at(document)) for file, each in found] == [
        ("other.yaml", (4, "cluster_names[1]: one.yaml claims ClusterName hill, too: only one of them would be found")),
        ("other.yaml", (3, "detect.hosts[0]: one.yaml claims the host login*, too: only one of them would be found")),
    ]  # fmt: skip
