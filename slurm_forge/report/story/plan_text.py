"""A recovery plan, and what a decision changes in it: as values of a story, and in words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_forge.report import text as t
from slurm_forge.report.story import story as s
from slurm_forge.store.identity import CheckpointName
from slurm_forge.units import format_memory
from slurm_forge.vocabulary.decision import Change
from slurm_forge.vocabulary.plan import RecoveryPlan, SampleWindow

_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
#: Windows of samples that are named; of more only how many there are.
_SHOWN_RANGES = 4
_MIB = 1 << 20
#: How a decision writes down that nothing was asked for.
_NONE = ("", "-", "None")
#: More than this many times what was asked for is a journal that somebody has edited.
_MOST_MEMORY = 1e6


def planned(plan: RecoveryPlan, *, at: int, rolled_back_to: int | None = None) -> s.PlanInForce:
    """The plan as it is at step ``at``."""
    ramps = plan.lr_factor != 1.0 and plan.lr_ramp_steps > 0
    return s.PlanInForce(
        plan=plan,
        lr_scale=plan.lr_scale(at),
        lr_back_step=plan.lr_from_step + plan.lr_ramp_steps if ramps else None,
        rolled_back_to=rolled_back_to,
    )


def step_of(name: str | None) -> int | None:
    """The step of a checkpoint; None where there is none, or what is no name of one."""
    try:
        return None if name is None else CheckpointName.parse(name).step
    except ValueError:  # of a journal that somebody has edited
        return None


def back_to_schedule(plan: RecoveryPlan, total_steps: int | None) -> str:
    """When the learning rate is back, or how far it comes where the run ends before that."""
    if plan.lr_ramp_steps <= 0:
        return ""
    back = plan.lr_from_step + plan.lr_ramp_steps
    if total_steps is None or back <= total_steps:
        return f", back by step {t.number(back)}"
    scale = plan.lr_scale(total_steps)
    return f", back up to x{scale:.2g} at the end, step {t.number(total_steps)}"


def samples_in(windows: Iterable[SampleWindow]) -> int:
    """How many samples they hold together."""
    return sum(max(0, each.stop - each.first) for each in windows)


def windows_in_words(windows: Iterable[SampleWindow]) -> str:
    """``144-335``, ``144-335 and 5000-5047``; of many windows the first few."""
    windows = tuple(windows)
    texts = [t.steps(each.first, each.stop - 1) for each in windows[:_SHOWN_RANGES]]
    more = len(windows) - len(texts)
    return f"{', '.join(texts)}, and {more} more" if more > 0 else " and ".join(texts)


def factor(text: object) -> str:
    """``0.25``, ``0.818`` of what a decision wrote down; foreign text as it is."""
    try:
        return f"{float(str(text)):.3g}"
    except ValueError:
        return t.clean(text, 60)


def memory_times(requested: int | None, times: str) -> str:
    """``24G``; empty where it is not known what was asked for, or how often it is taken."""
    try:
        value = float(times)
    except ValueError:
        return ""
    if not requested or not 0 < value < _MOST_MEMORY:
        return ""
    return format_memory(-(-int(requested * value) // _MIB) * _MIB)


def in_words(
    change: Change,
    plan: RecoveryPlan,
    total: int | None,
    memory: int | None = None,
    nodes: int | None = None,
) -> str:
    """One change of a decision that led to ``plan``.

    ``memory`` (in bytes) and ``nodes`` are what the job requests, if known.
    """
    old, new = t.clean(change.old, 120), t.clean(change.new, 120)
    match change.parameter:
        case "lr_scale":
            back = back_to_schedule(plan, total)
            return f"learning rate x{factor(old)} → x{factor(new)}{back}"
        case "micro_batch":
            before = "" if old in ("", "-") else f"{old} → "
            return f"micro-batch {before}{new}, same global batch"
        case "skipped_samples":
            return _skipped_samples(old, new, plan)
        case "mem_factor":
            before, after = memory_times(memory, old), memory_times(memory, new)
            if before and after:
                return f"memory {before} → {after} per node"
            return f"memory request x{factor(old)} → x{factor(new)}"
        case "worker_factor":
            return f"data-loader workers x{factor(old)} → x{factor(new)}"
        case "time_factor":
            before = "" if factor(old) == "1" or old in _NONE else f" (before: x{factor(old)})"
            return f"time limit x{factor(new)}{before}"
        case "nodes":
            return nodes_in_words(old, new, nodes)
        case "reseeded":
            return "random numbers re-seeded"
        case "exclude_nodes":
            before = "" if old in ("", "-") else f" (before: {old})"
            return f"excluding {new or 'no node'}{before}"
        case "variables":
            return f"with {new}" if new else "without the site's post-hang variables"
        case _:
            return f"{t.clean(change.parameter, 64)} {old or 'none'} → {new}"


def nodes_in_words(old: str, new: str, requested: int | None) -> str:
    """``nodes 4 → 3``: a plan that says nothing means what the job asks for."""
    usual = "as requested" if requested is None else t.number(requested)
    before, after = (usual if each in _NONE else each for each in (old, new))
    return f"nodes {before} → {after}"


def _skipped_samples(old: str, new: str, plan: RecoveryPlan) -> str:
    before = {SampleWindow(int(a), int(b) + 1) for a, b in _RANGE.findall(old)}
    added = [each for each in plan.skipped if each not in before]
    if not added:
        return f"samples skipped: {old} → {new}"
    grown = sorted(each for each in before if each not in plan.skipped)
    so_far = f", before: {windows_in_words(grown)}" if grown else ""
    count = t.plural(samples_in(added), "sample")
    return f"samples {windows_in_words(added)} skipped ({count}{so_far})"
