"""Changes of a run's job on purpose: what each key may affect, and what a resume accepts for it.

Pure decisions.  A key that is not known here counts as science: one report too many is better than
a change of the result that is not reported.
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

#: How ``JobChange`` calls the batch size that the program passes to ``run.batches``.
GLOBAL_BATCH = "global_batch"

_RESOURCES = frozenset({"resources", "template", "chain"})
_OPERATION = frozenset({
    "checkpoint", "environment", "recovery", "probe", "preflight", "watchdog", "lead", "inject",
    "container", "program", "notify", "report",
})  # fmt: skip
#: Keys whose fact in a checkpoint has another name than ``job.KEY``.
_FACTS = {"seed": "sampling.seed", GLOBAL_BATCH: "sampling.global_batch"}
#: The fact of a loader that makes batches by itself.
_LOADER_BATCH = "sampling.batch_size"
_JOB_FACTS = ("args.", "entry", "command", "batch_coupled")
#: An argument of such a name is taken for the batch size where its value is that of the run.
_BATCH_SIZE = re.compile(r"(.*[._-])?(batch|bs|bsz|batchsize)([._-].*)?", re.IGNORECASE)


def job_changes(
    old: JobSpec,
    new: JobSpec,
    *,
    global_batch: int | None = None,
    new_global_batch: int | None = None,
) -> tuple[JobChange, ...]:
    """Every key whose value is another, science first, in the order of the job file.

    ``global_batch`` is the batch size that the run was trained with last, where that is known.  Its
    new value is ``new_global_batch``, or that of a changed argument which had the old one and whose
    name says batch size.
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
    """Both as one change of each key, from its first value to its last one.

    Changes of the code stay apart: each names the files in which it differs from the one before.
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
    """``ConfigError`` for what can't be changed in a run that exists."""
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
    """``ConfigError`` where one job has an entry and the other a command."""
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
    """``ConfigError`` unless every change only prolongs the run.

    That is a whole number of ``args`` that grows (steps, epochs), and ``resources.time``.  Where
    the job does not set an argument, its value is that of the program's ``defaults``.
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
    """Whether a difference from the checkpoint is what was changed on purpose, and nothing else.

    The value now must be that of the last change of this key, and the saved one a value before it.
    """
    own = [
        each
        for each in changes
        if fact_of(each.key) == difference.key
        # A loader's batch size is known to the job as an argument.
        or (difference.key == _LOADER_BATCH and _is_named_batch_size(each.key))
    ]
    if not own or own[-1].new != difference.now:
        return False
    return any(each.old == difference.saved for each in own)


def unmet_batch(now: Mapping[str, str], changes: Sequence[JobChange]) -> str | None:
    """The batch size that the run was changed to, where the program uses another one."""
    wanted = [each.new for each in changes if each.key == GLOBAL_BATCH]
    used = now.get(_FACTS[GLOBAL_BATCH], "")
    return wanted[-1] if wanted and used.isdecimal() and wanted[-1] != used else None


def fact_of(key: str) -> str | None:
    """The key under which a checkpoint's facts hold the value of a key; None where none does."""
    if key in _FACTS:
        return _FACTS[key]
    return f"job.{key}" if key.startswith(_JOB_FACTS) else None


def arguments_changed(
    saved: Mapping[str, str], now: Mapping[str, str], changes: Sequence[JobChange]
) -> bool:
    """Whether an argument is another than in the checkpoint, and was changed on purpose."""
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
    """Every value as text by its dotted key; what is not set has none."""
    flat: dict[str, str] = {}
    for key, text in flat_facts("", to_mapping(job)):
        empty = text in ("{}", "[]", "null") and not key.startswith("args.")
        if not empty and not (key == "args" and text == "{}"):
            flat[key] = text
    return flat
