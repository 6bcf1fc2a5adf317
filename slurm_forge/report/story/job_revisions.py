"""What persons changed of a run's job on purpose, and where a run begins in another, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_forge.journal import RunState
from slurm_forge.journal import events as ev
from slurm_forge.report.text import clean, number
from slurm_forge.vocabulary.job_change import ChangeEffect, JobChange

_SHOWN_STEPS = 3

_SHOWN = 5


def revision_line(event: ev.JobChanged) -> str:
    """``args.lr 0.1 → 0.01 from step 400 on (change, ada)``; all that was changed at once."""
    return with_origin(event, event.changes)


def with_origin(event: ev.JobChanged, changes: Sequence[JobChange]) -> str:
    """Some of the changes of one event, with where they begin and who made them."""
    shown = "; ".join(clean(each, 200) for each in changes[:_SHOWN])
    more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    since = "" if event.step is None else f" from step {number(event.step)} on"
    origin = ", ".join(clean(each, 64) for each in (event.verb, event.user) if each)
    return f"{shown}{more}{since} ({origin})"


def fork_line(event: ev.Forked) -> str:
    """``begins at step 400 of runs/base (step-…), with its optimizer, …``."""
    fresh = ", ".join(clean(each, 20) for each in event.fresh)
    state = f"fresh: {fresh}" if fresh else "with its optimizer, data position and random states"
    parent, checkpoint = clean(event.parent, 200), clean(event.checkpoint, 80)
    return f"begins at step {number(event.step)} of {parent} ({checkpoint}), {state}"


def lineage_lines(state: RunState) -> tuple[str, ...]:
    """For a screen: where the run begins, and what was changed last."""
    fork, change = state.forked, state.last_change
    return (
        *(() if fork is None else (fork_line(fork),)),
        *(() if change is None else (revision_line(change),)),
    )


def changes_by_effect(event: ev.JobChanged) -> Iterator[tuple[bool, str]]:
    """Whether it may affect the result, and the line, for each kind of change that there is."""
    for science in (True, False):
        own = [each for each in event.changes if (each.affects is ChangeEffect.SCIENCE) is science]
        if own:
            yield science, with_origin(event, own)


def step_list(steps: Sequence[int]) -> str:
    """``step 400``, or ``steps 400, 700, 900 and 2 more``."""
    if len(steps) == 1:
        return f"step {number(steps[0])}"
    more = len(steps) - _SHOWN_STEPS
    shown = ", ".join(map(number, steps[:_SHOWN_STEPS]))
    return f"steps {shown}" + (f" and {number(more)} more" if more > 0 else "")


def missing_position_line(*steps: int) -> str:
    """One line about a loop of the program's own that can't know how far its data were read."""
    return (
        f"resumed at {step_list(steps)} without a data position: what the program derives "
        "from run.step_number or draws at random continues; anything else, such as an epoch "
        "counter or an iterator, started over (register a StatefulDataLoader, or keep the "
        "position in run.extra)"
    )
