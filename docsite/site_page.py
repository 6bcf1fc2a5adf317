"""A page for people about each site, from its file: Markdown, the same for the same file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    JobConditions,
    brought_back,
)
from slurm_forge.site.model import PartitionFacts, PreemptionMode, Site
from slurm_forge.site.parts import (
    FactConfidence,
    GpuOption,
    LauncherStyle,
    MasterAddress,
    OptionRule,
)
from slurm_forge.slurm.sbatch_words import asks_for_requeue
from slurm_forge.units import format_bandwidth, format_memory, words_for_duration

__all__ = ["site_index", "site_page"]

_HEAD = "<!-- Made by scripts/site-pages from site_configs/{}.yaml; change that file. -->"
_CONFIDENCE = {
    FactConfidence.TRIED: "seen on the cluster itself",
    FactConfidence.OFFICIAL: "from the centre's own documents",
    FactConfidence.OFFICIAL_EXCERPT: "from parts of the centre's own documents",
    FactConfidence.COMMUNITY: "from public job scripts and notes of users",
}
_GPUS = {
    GpuOption.GPUS_PER_NODE: "--gpus-per-node=4",
    GpuOption.GPUS_PER_TASK: "--gpus-per-task=1, with four ranks a node",
    GpuOption.GPUS: "--gpus=4 on one node, and `--gpus-per-node=4` on several",
    GpuOption.GRES: "--gres=gpu:4",
    GpuOption.NONE: "no option at all: the partition implies them",
}
_MASTER = {
    MasterAddress.NAME: "its name",
    MasterAddress.ADDRESS: "the address of its name",
    MasterAddress.INTERFACE: "the address of the interface below",
}


def site_page(site: Site) -> str:
    """The page of one site."""
    parts = [
        _HEAD.format(site.name),
        f"# {site.title or site.name}",
        _about(site),
        _section("Partitions and QOS", f"Empty cells are unknown.\n\n{_partitions(site)}"),
        _section("Asking for a job", _bullets(_asking(site))),
        _section("Ranks and network", _bullets(_network(site))),
        _section("Variables", _variables(site)),
        _section("Files", _storage(site)),
        _section("Clusters", _clusters(site)),
        _section("Notes", _bullets(map(_text, site.notes))),
        _section("Sources", _bullets(_sources(site))),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def site_index(sites: Iterable[Site]) -> str:
    """A table of all sites, each with a link to its page."""
    rows = [
        (
            f"[{site.name}]({site.name}.md)",
            _text(site.title or ""),
            _text(_gpus_in_a_word(site)),
            _told_by(site),
            "" if site.confidence is None else site.confidence.value.replace("_", " "),
        )
        for site in sorted(sites, key=lambda each: each.name)
    ]
    return "\n\n".join(
        [
            "<!-- Made by scripts/site-pages from site_configs/. -->",
            "# Clusters",
            "Facts about public clusters, from the files in `site_configs/`. For a cluster of your "
            "own, [write a site file](contributing.md). slurm_forge asks Slurm for facts that a "
            "file does not have. A file is as old as its sources; `sites show` prints its lines.",
            _table(("site", "cluster", "GPUs", "recognised by", "facts"), rows),
            "",
        ]
    )


def _about(site: Site) -> str:
    lines = [f"    slurm-forge submit train.yaml --site {site.name}", ""]
    told = _told_by(site)
    lines.append(
        f"* Recognised by {told}." if told else "* Not recognised automatically: use `--site`."
    )
    if site.confidence is not None:
        when = "" if site.checked is None else f", compared with them in {site.checked}"
        lines.append(f"* The facts are {_CONFIDENCE[site.confidence]}{when}.")
    if site.contact is not None:
        lines.append(f"* Contact: {_text(site.contact)}")
    return "\n".join(lines)


def _told_by(site: Site) -> str:
    told = [f"ClusterName {_code(name)}" for name in site.cluster_names]
    told += [
        f"the variable {_code(name)} ({', '.join(map(_code, values))})"
        for name, values in site.detect.variables.items()
    ]
    told += [f"the host name {_code(host)}" for host in site.detect.hosts]
    return " or ".join(told)


def _partitions(site: Site) -> str:
    rows = [
        _partition(kind, name, site)
        for kind, names in (("", site.partitions), ("QOS ", site.qos))
        for name in names
    ]
    if not rows:
        rows = [_row(site, "every partition", site.facts(None))]
    return _table(
        ("where", "GPUs of a node", "longest run", "most nodes", "preempted jobs", "note"), rows
    )


def _partition(kind: str, name: str, site: Site) -> Sequence[str]:
    own = site.qos[name] if kind else site.partitions[name]
    facts = site.facts(None, name) if kind else site.facts(name, "-")
    return _row(site, f"{kind}`{name}`", facts, own.note)


def _row(site: Site, where: str, facts: PartitionFacts, note: str | None = None) -> Sequence[str]:
    count = "" if facts.gpus_per_node is None else f"{facts.gpus_per_node}x "
    longest = "" if facts.max_time is None else words_for_duration(facts.max_time)
    by_size = [
        f"{words_for_duration(limit.max_time)} from {limit.min_nodes} nodes on"
        for limit in facts.max_time_by_nodes
        if limit.max_time is not None
    ]
    remarks = [note] if note else []
    if facts.max_gpus_per_job is not None:
        most = facts.max_gpus_per_job
        remarks.append(f"{most} GPUs a job" if most > 1 else "one GPU a job")
    if facts.exclusive_nodes:
        remarks.append("whole nodes")
    if facts.self_requeue_allowed is False:
        remarks.append("jobs must not requeue themselves: the run is held instead")
    return (
        where,
        "" if where.startswith("QOS") else _text(f"{count}{facts.gpu or ''}".removesuffix("x ")),
        "; ".join(filter(None, [longest, *by_size])),
        "" if facts.max_nodes is None else str(facts.max_nodes),
        _preempted(facts, site),
        _text("; ".join(remarks)),
    )


def _preempted(facts: PartitionFacts, site: Site) -> str:
    known = facts.preemption
    if known.mode is None:
        return "reported by Slurm"
    notice = {None: "after a notice of unknown length", 0.0: "without notice"}.get(
        None if known.grace is None else known.grace.total_seconds()
    )
    if notice is None and known.grace is not None:
        notice = f"after {words_for_duration(known.grace)} of notice"
    told = {
        PreemptionMode.OFF: "there are none",
        PreemptionMode.REQUEUE: f"requeued {notice}",
        PreemptionMode.CANCEL: f"cancelled {notice}; {_comes_back(facts, site)}",
        PreemptionMode.SUSPEND: "suspended, and continue later",
    }[known.mode]
    if known.exempt:
        told += f"; not before they have run for {words_for_duration(known.exempt)}"
    return told


def _comes_back(facts: PartitionFacts, site: Site) -> str:
    back_by = brought_back(
        JobConditions(
            preemption=facts.preemption,
            self_requeue_allowed=facts.self_requeue_allowed,
            requeue=asks_for_requeue(("--requeue", *site.sbatch_options)),
        )
    )
    return {
        BroughtBack.SUCCESSOR: "a successor is submitted",
        BroughtBack.PERSON: "the run is held",
    }.get(back_by, "the run requeues itself")


def _asking(site: Site) -> Iterator[str]:
    facts = site.everywhere
    if site.gpu_request is not None:
        told = _GPUS[site.gpu_request]
        option, _, rest = told.partition(" ") if told.startswith("--") else ("", "", told)
        shown = " ".join(filter(None, [_code(option.rstrip(",")) if option else "", rest]))
        yield f"`gpus_per_node: 4` in the job file becomes {shown}."
    for kind, feature in site.gpu_types.items():
        asked = _code(f"--constraint={feature}")
        yield f'`gpus_per_node: "{kind}:4"` asks for that kind by {asked}.'
    if site.account_required:
        such = "" if site.account_example is None else f", such as {_code(site.account_example)}"
        yield f"An account is needed (`resources.account`){such}."
    for rule in site.accounts:
        such = " or ".join(_code(each) for each in rule.accounts)
        goes = [f"constraint {_code(each)}" for each in rule.constraint]
        goes += [f"partition {_code(each)}" for each in rule.partitions]
        yield f"Accounts {such} go with {' or '.join(goes)}."
    if site.default_qos is not None:
        yield f"A job that names no QOS gets `{site.default_qos}`."
    if facts.default_time is not None:
        yield f"A job that asks for no time limit gets {words_for_duration(facts.default_time)}."
    if facts.cpus_per_gpu is not None:
        yield f"{facts.cpus_per_gpu} CPUs go with each GPU."
    if facts.memory_per_gpu is not None:
        yield f"{format_memory(facts.memory_per_gpu)} of memory go with each GPU."
    yield from _rules("Refused", site.rejected_options)
    yield from _rules("Required", site.required_options)
    yield from _rules("Discouraged", site.discouraged_options)
    if site.sbatch_options:
        yield f"Added to every job: {', '.join(map(_code, site.sbatch_options))}."
    if site.srun_options:
        yield f"Added to srun: {', '.join(map(_code, site.srun_options))}."
    if site.requeue_delay is not None:
        yield f"A requeued job can start again after {words_for_duration(site.requeue_delay)}."


def _rules(word: str, rules: Iterable[OptionRule]) -> Iterator[str]:
    for rule in rules:
        why = "" if rule.why is None else f": {_text(rule.why)}"
        yield f"{word}: {_code(rule.option)}{why}"


def _network(site: Site) -> Iterator[str]:
    if site.fabric is not None:
        yield f"Network: {_text(site.fabric)}."
    if site.backend is not None or site.architecture is not None:
        parts = [each.value for each in (site.backend, site.architecture) if each is not None]
        yield f"Ranks: {', '.join(parts)}."
    if site.socket_interface is not None:
        yield f"Interface of sockets: {_code(site.socket_interface)}."
    if site.host_suffix is not None:
        yield f"Host names on the fast network end with {_code(site.host_suffix)}."
    if site.master_address is not None:
        yield f"Torchrun gets the first node as {_MASTER[site.master_address]}."
    if site.launcher is not None:
        per_gpu = site.launcher is LauncherStyle.SRUN_PER_GPU
        told = "srun, one rank for each GPU" if per_gpu else "torchrun, once a node"
        yield f"The centre's documents start ranks by {told}."
    if site.modules:
        yield f"Loaded in every job: {', '.join(map(_code, site.modules))}."
    for name, known in site.partitions.items():
        if known.modules:
            yield f"Loaded in `{name}`: {', '.join(map(_code, known.modules))}."
    for each in site.containers:
        words = [*each.sbatch_options, *each.srun_options, *filter(None, [each.command])]
        note = "" if each.note is None else f" ({_text(each.note)})"
        yield f"Containers by {each.runtime.value}: {', '.join(map(_code, words))}{note}"
    if site.internet_on_compute_nodes is not None:
        told = "can" if site.internet_on_compute_nodes else "cannot"
        yield f"Compute nodes {told} reach the internet."
    if site.expected_bandwidth is not None:
        yield f"A large all-reduce reaches {format_bandwidth(site.expected_bandwidth)}."


def _variables(site: Site) -> str:
    sets: tuple[tuple[str, Mapping[str, str]], ...] = (
        ("always", site.env.always),
        ("after a hang", site.env.on_hang),
        ("never", site.env.never),
    )
    rows = [
        (_code(name), when, _text(value) if when == "never" else _code(value))
        for when, values in sets
        for name, value in values.items()
    ]
    return _table(("variable", "when", "value, or why not"), rows) if rows else ""


def _storage(site: Site) -> str:
    rows = []
    for each in site.storage:
        path = "" if each.path is None else _code(each.path)
        variable = "" if each.env is None else f"`${each.env}`"
        purge = ""
        if each.purge_after is not None:
            purge = f"after {words_for_duration(each.purge_after)}"
        rows.append(
            (
                _text(each.role),
                " ".join(filter(None, [path, variable])),
                _text(each.filesystem or ""),
                purge,
                _text(each.purge_basis or ""),
                _text(each.note or ""),
            )
        )
    head = ("what for", "where", "file system", "deleted", "by", "note")
    return _table(head, rows) if rows else ""


def _clusters(site: Site) -> str:
    rows = []
    for name, known in site.clusters.items():
        internet = {True: "yes", False: "no", None: ""}[known.internet_on_compute_nodes]
        rows.append(
            (
                f"`{name}`",
                _text(known.everywhere.gpu or ""),
                internet,
                _text(" ".join(known.notes)),
            )
        )
    return _table(("cluster", "GPUs", "internet on compute nodes", "note"), rows) if rows else ""


def _sources(site: Site) -> Iterator[str]:
    for source in site.sources:
        page = f"<{source.page}>" if source.page.startswith("http") else _text(source.page)
        when = f"of {source.dated}" if source.dated else f"read in {source.seen}"
        note = "" if source.note is None else f"; {_text(source.note)}"
        dated = f" ({when}{note})" if source.dated or source.seen else ""
        yield f"{page}{dated}"


def _gpus_in_a_word(site: Site) -> str:
    kinds = [site.everywhere.gpu, *(facts.gpu for facts in site.partitions.values())]
    kinds += [cluster.everywhere.gpu for cluster in site.clusters.values()]
    return ", ".join(dict.fromkeys(kind for kind in kinds if kind))


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns that are empty in every row are left out."""
    given = [tuple(row) for row in rows]
    kept = [at for at in range(len(head)) if any(row[at] for row in given)]
    lines = [[head[at] for at in kept], ["---"] * len(kept)]
    lines += [[row[at] for at in kept] for row in given]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(text: str) -> str:
    """Text that Markdown shows as it is."""
    for sign in "\\`*_<>|[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def _code(text: str) -> str:
    """Code, also in a table, also with backquotes in it."""
    fence = "``" if "`" in text else "`"
    inner = f" {text} " if "`" in text else text
    return f"{fence}{inner}{fence}".replace("|", "\\|")
