"""Which checkpoint a person means: a name, the beginning of one, a step, or a word."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_forge.errors import CheckpointMissingError
from slurm_forge.journal import RunState
from slurm_forge.report.checkpoints import StoredCheckpoint, resumed_next
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.trust import Trust

LATEST = "latest"
GOOD = "good"
NEXT = "next"
BEST = "best"
_WORDS = (LATEST, GOOD, NEXT, BEST)
_LAST = "last"
_SHOWN = 8


def meant(
    wanted: str,
    state: RunState,
    stored: Sequence[StoredCheckpoint],
    *,
    smaller_is_better: bool | None = None,
) -> CheckpointName:
    """The checkpoint on disk that ``wanted`` means; ``stored`` is newest first.

    ``smaller_is_better`` is about the metric that the job keeps the best one by, None without one.
    CheckpointMissingError, naming the nearest, where there is none or more than one.
    """
    if not stored and state.known:
        raise CheckpointMissingError(
            f"the run saved step {state.known[-1].name.step}, but all its checkpoints are gone",
            next_step="Restore its checkpoints folder, or start another run.",
        )
    if not stored:
        raise CheckpointMissingError(
            "the run has no checkpoints yet", next_step="To ask for one: slurm-forge save RUN."
        )
    wanted = LATEST if wanted == _LAST else wanted
    if wanted == BEST:
        return _best(state, stored, smaller_is_better)
    if wanted in _WORDS:
        return _word(wanted, state, stored)
    names = [each.name for each in stored]
    if wanted.isascii() and wanted.isdecimal():
        same = [name for name in names if name.step == int(wanted)]
        if not same:
            near = min(names, key=lambda name: abs(name.step - int(wanted)))
            raise CheckpointMissingError(
                f"there is no checkpoint of step {int(wanted)}; the nearest is of step {near.step}",
                next_step=f"There are: {_listed(names)}.",
            )
    else:
        same = [name for name in names if wanted and str(name).startswith(wanted)]
        if not same:
            raise _unknown(wanted, names)
    if len(same) > 1:
        raise CheckpointMissingError(
            f"{wanted!r} matches {len(same)} checkpoints",
            next_step=f"Give more of its name: {_listed(same)}.",
        )
    return same[0]


def _word(word: str, state: RunState, stored: Sequence[StoredCheckpoint]) -> CheckpointName:
    if word == LATEST:
        return stored[0].name
    if word == GOOD:
        trusted = {each.name for each in state.known if each.trust is Trust.GOOD}
        for each in stored:
            if each.name in trusted:
                return each.name
        raise CheckpointMissingError(
            "no checkpoint is known to be good yet",
            next_step=f"There are: {_listed([each.name for each in stored])}.",
        )
    name = resumed_next(state, stored)
    if name is None:
        raise CheckpointMissingError(
            "none of the checkpoints can be resumed from: all are suspect or unreadable",
            next_step=f"Name one: {_listed([each.name for each in stored])}.",
        )
    return name


def _best(
    state: RunState, stored: Sequence[StoredCheckpoint], smaller_is_better: bool | None
) -> CheckpointName:
    there = {each.name for each in stored}
    measured = [
        (each.metric, each.name)
        for each in state.known
        if each.metric is not None and each.name in there and each.trust is not Trust.SUSPECT
    ]
    if smaller_is_better is None or not measured:
        raise CheckpointMissingError(
            "no checkpoint is known to be the best: the job keeps none by a metric"
            if smaller_is_better is None
            else "no checkpoint has been evaluated yet",
            next_step="Set checkpoint.keep_best and log its metric in an evaluation, or name one: "
            f"{_listed([each.name for each in stored])}.",
        )
    choose = min if smaller_is_better else max
    return choose(measured)[1]


def _unknown(wanted: str, names: Sequence[CheckpointName]) -> CheckpointMissingError:
    import difflib

    # Names begin alike: what counts is how far they agree.
    alike = max((str(name) for name in names), key=lambda name: _agree(wanted, name))
    close = difflib.get_close_matches(wanted, [alike, *_WORDS], n=1, cutoff=0.5)
    likely = f' (did you mean "{close[0]}"?)' if close else ""
    words = ", ".join(_WORDS)
    return CheckpointMissingError(
        f"there is no checkpoint {wanted!r}{likely}",
        next_step=f"There are: {_listed(names)}.  Or use {words}, or a step.",
    )


def _agree(one: str, other: str) -> int:
    """The length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _listed(names: Sequence[CheckpointName]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(str(name) for name in names[:_SHOWN]) + (f", … ({more} more)" * (more > 0))
