"""Deliberate changes of a run's job: what each key may affect, and what a resume accepts for it.

Pure decisions.  An unknown key counts as affecting the result: a superfluous report is better than
an unreported change of the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from slurm_forge.errors import ConfigError
from slurm_forge.recovery.fingerprint import Difference, flat_facts
from slurm_forge.spec import JobSpec
from slurm_forge.spec.loading import to_mapping
from slurm_forge.vocabulary.job_change import CODE, ChangeEffect, JobChange

#: What ``JobChange`` calls the batch size that the program passes to ``run.batches``.
GLOBAL_BATCH = "global_batch"

_RESOURCES = frozenset({"resources", "template", "chain"})
_OPERATION = frozenset({
    "checkpoint", "environment", "recovery", "probe", "preflight", "watchdog", "lead", "inject",
    "container", "program", "notify", "report",
})  # fmt: skip
#: Keys whose fact in a checkpoint is not called ``job.KEY``.
_FACTS = {"seed": "sampling.seed", GLOBAL_BATCH: "sampling.global_batch"}
#: The fact about a loader that forms batches itself.
_LOADER_BATCH = "sampling.batch_size"
_JOB_FACTS = ("args.", "entry", "command", "batch_coupled")
#: An argument with such a name is taken for the batch size if its value equals the run's.
_BATCH_SIZE = re.compile(r"(.*[._-])?(batch|bs|bsz|batchsize)([._-].*)?", re.IGNORECASE)


def job_changes(
    old: JobSpec,
    new: JobSpec,
    *,
    global_batch: int | None = None,
    new_global_batch: int | None = None,
) -> tuple[JobChange, ...]:
    """Every key whose value has changed: those that affect the result first, in job-file order.

    ``global_batch`` is the batch size that the run was last trained with, if known.  Its new value
    is ``new_global_batch``, or that of a changed argument that had the old value and whose name
    suggests a batch size.
    """
    before, after = _flat(old), _flat(new)
    changes = [
        JobChange(key=key, old=before.get(key), new=after.get(key), affects=effect_of(key))
        for key in dict.fromkeys((*after, *before))
        if before.get(key) != after.get(key)
    ]
    batch = None if new_global_batch is None else str(new_global_batch)
    if batch is None and global_batch is not None:
        batch = next((each.new for each in changes if _is_batch_size(each, global_batch)), None)
    if batch is not None and batch != str(global_batch):
        was = None if global_batch is None else str(global_batch)
        changes.append(JobChange(key=GLOBAL_BATCH, old=was, new=batch))
    return tuple(sorted(changes, key=lambda each: each.affects is not ChangeEffect.SCIENCE))


def merged(earlier: Sequence[JobChange], later: Sequence[JobChange]) -> tuple[JobChange, ...]:
    """Combine both into one change per key, from its first value to its last one.

    Changes of the code stay separate: each names the files that differ from the state before it.
    """
    every = [(str(each) if each.key == CODE else each.key, each) for each in (*earlier, *later)]
    first = dict(reversed(every))
    last = {key: each.new for key, each in every}
    both = (replace(each, new=last[key]) for key, each in reversed(first.items()))
    return tuple(each for each in both if each.old != each.new)


def effect_of(key: str) -> ChangeEffect:
    """What a key of the job file may affect."""
    section = key.partition(".")[0]
    if section in _RESOURCES:
        return ChangeEffect.RESOURCES
    return ChangeEffect.OPERATION if section in _OPERATION else ChangeEffect.SCIENCE


def refuse_change(old: JobSpec, new: JobSpec, run: str) -> None:
    """Raise ``ConfigError`` for a change that an existing run can't undergo."""
    if old.name != new.name:
        raise ConfigError(
            f"name: a run keeps its name, {old.name}",
            next_step=f"To begin a run of another name: slurm-forge fork {run} --name {new.name}",
        )
    if old.code != new.code:
        raise ConfigError(
            "code: whether a run keeps its code is settled when it is submitted",
            next_step=f"To take the present code: slurm-forge requeue {run} --code new.  For a run "
            f"that does it another way: slurm-forge fork {run} --name NEW --set code=…",
        )
    refuse_other_kind(old, new)


def refuse_other_kind(old: JobSpec, new: JobSpec) -> None:
    """Raise ``ConfigError`` if one job has an entry and the other a command."""
    if (old.entry is None) == (new.entry is None):
        return
    key, has = ("command", "an entry") if old.entry is not None else ("entry", "a command")
    raise ConfigError(
        f"{key}: the run has {has}, and its checkpoints are of that kind",
        next_step="Submit the other program as a new run with a job file of its own.",
    )


def refuse_not_prolonging(
    changes: Iterable[JobChange], run: str, defaults: Mapping[str, object]
) -> None:
    """Raise ``ConfigError`` unless every change only prolongs the run.

    That is an integer in ``args`` that grows (steps, epochs), or ``resources.time``.  An argument
    that the job does not set has its value in the program's ``defaults``.
    """
    for each in changes:
        name = each.key.removeprefix("args.")
        was = each.old if each.old is not None else defaults.get(name)
        if each.key == "resources.time" or (name != each.key and _grows(was, each.new)):
            continue
        why = "is not just an extension of the run"
        if was is None and name != each.key:
            why = (
                "may not be just an extension of the run: the program's source shows no whole "
                f"number as the default of {name}"
            )
        raise ConfigError(
            f"{each} {why}; extend takes whole numbers of args that grow, and resources.time",
            next_step=f"Use slurm-forge change {run} --set KEY=VALUE.",
        )


def accepted(difference: Difference, changes: Sequence[JobChange]) -> bool:
    """Whether a difference from the checkpoint is exactly the deliberate change.

    The current value must be that of the last change of this key, and the saved one an older one.
    """
    own = [
        each
        for each in changes
        if fact_of(each.key) == difference.key
        # The job knows a loader's batch size as an argument.
        or (difference.key == _LOADER_BATCH and _is_named_batch_size(each.key))
    ]
    if not own or own[-1].new != difference.now:
        return False
    return any(each.old == difference.saved for each in own)


def unmet_batch(now: Mapping[str, str], changes: Sequence[JobChange]) -> str | None:
    """The batch size that the run was changed to, if the program uses another one."""
    wanted = [each.new for each in changes if each.key == GLOBAL_BATCH]
    used = now.get(_FACTS[GLOBAL_BATCH], "")
    return wanted[-1] if wanted and used.isdecimal() and wanted[-1] != used else None


def fact_of(key: str) -> str | None:
    """The key under which a checkpoint's facts hold the value of a job key, if any."""
    if key in _FACTS:
        return _FACTS[key]
    return f"job.{key}" if key.startswith(_JOB_FACTS) else None


def arguments_changed(
    saved: Mapping[str, str], now: Mapping[str, str], changes: Sequence[JobChange]
) -> bool:
    """Whether an argument differs from the checkpoint and was changed deliberately."""
    keys = {key for key in (*saved, *now) if key.startswith("job.args")}
    for key in keys:
        was, is_now = saved.get(key), now.get(key)
        if was != is_now and accepted(Difference.of(key, was, is_now), changes):
            return True
    return False


def _is_batch_size(change: JobChange, global_batch: int) -> bool:
    return (
        change.old == str(global_batch)
        and change.new is not None
        and change.new.isdecimal()
        and _is_named_batch_size(change.key)
    )


def _is_named_batch_size(key: str) -> bool:
    return key.startswith("args.") and _BATCH_SIZE.fullmatch(key.rpartition(".")[2]) is not None


def _grows(was: object, now: str | None) -> bool:
    try:
        return int(now or "") > int(str(was))
    except ValueError:
        return False


def _flat(job: JobSpec) -> dict[str, str]:
    """Every value as text under its dotted key; values that are not set are missing."""
    flat: dict[str, str] = {}
    for key, text in flat_facts("", to_mapping(job)):
        empty = text in ("{}", "[]", "null") and not key.startswith("args.")
        if not empty and not (key == "args" and text == "{}"):
            flat[key] = text
    return flat
