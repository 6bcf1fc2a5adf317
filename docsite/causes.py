"""What the pages of the causes say of the policy: from the default ladders, not typed by hand."""

from __future__ import annotations

from docsite.tables import code, table
from slurm_forge.recovery.policy.rehearsal import (
    Assumed,
    rehearse,
)
from slurm_forge.report.submission.policy_text import (
    policy_test,
    policy_text,
)
from slurm_forge.spec import JobSpec
from slurm_forge.spec.loading import job_from_mapping
from slurm_forge.spec.recovery import Recovery, cures
from slurm_forge.vocabulary.cause import Cause

__all__ = ["about_cause", "all_causes", "page_of", "rungs_of"]

_AT = 1200
#: More than any default ladder has tries: where it ends is then seen.
_REPEAT = 8
#: Where nothing changes from one time to the next.
_REPEAT_ENDLESS = 2


def page_of(cause: Cause) -> str:
    """The page of a cause, below ``docs/``."""
    return f"causes/{cause.value}.md"


def rungs_of(cause: Cause) -> tuple[str, ...]:
    """The default ladder of a cause, a line for each rung."""
    job = _job()
    found = rehearse(job, cause, at=_AT, repeat=1, assumed=Assumed(every_steps=100))
    return tuple(policy_test(job, found).ladder)


def about_cause(cause: Cause) -> list[str]:
    """Between the marks of the cause's page: the default ladder, and what it comes to."""
    job = _job()
    ladder = job.recovery.ladder(cause)
    endless = any(rung.times is None for rung in ladder)
    found = rehearse(
        job,
        cause,
        at=_AT,
        repeat=_REPEAT_ENDLESS if endless else _REPEAT,
        assumed=Assumed(every_steps=100),
    )
    lines = []
    rungs = policy_test(job, found).ladder
    if rungs:
        lines += [f"{number}. {code(rung)}" for number, rung in enumerate(rungs, 1)]
        if not endless:
            lines.append(
                f"{len(rungs) + 1}. {code('hold')}: the job waits until a person releases it"
            )
    elif hasattr(Recovery(), cause.value):
        lines.append("No rung: the run is held at once, with the reason.")
    else:
        lines.append("There is no ladder: there is nothing to cure.")
    repeat = f" --repeat {len(found.acts)}" if len(found.acts) > 1 else ""
    lines += [
        "",
        "On paper:",
        "",
        "```",
        f"$ slurm-forge policy test train.yaml --cause {cause.value} --at {_AT}{repeat}",
        *policy_text(job, found).rstrip().splitlines(),
        "```",
    ]
    allowed = cures(cause)
    if allowed:
        words = ", ".join(code(action.value) for action in allowed)
        lines += ["", f"A ladder of your own may have: {words}."]
    return lines


def all_causes(titles: dict[Cause, str]) -> list[str]:
    """The table of the causes; ``titles`` are the first lines of their pages."""
    recovery = Recovery()
    rows = []
    for cause in Cause:
        rungs = [code(rung.do.value) for rung in recovery.ladder(cause)]
        what = " → ".join(rungs) or ("hold" if hasattr(recovery, cause.value) else "nothing")
        field = Recovery.model_fields.get(cause.value)
        said = "" if field is None else field.description or ""
        rows.append((f"[{titles[cause]}]({cause.value}.md)", code(cause.value), said, what))
    return table(("page", "cause", "what happened", "by default"), rows)


def _job() -> JobSpec:
    return job_from_mapping(
        {
            "name": "train",
            "entry": "train.py:train",
            "resources": {"nodes": 2, "mem": "64G", "time": "12:00:00"},
        }
    )
