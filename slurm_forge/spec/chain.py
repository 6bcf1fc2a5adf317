"""An array of attempts: how many tasks there are, and which template has them."""

from __future__ import annotations

from slurm_forge.documents import wrong_key
from slurm_forge.spec.launchers import Template

__all__ = ["MOST_TASKS", "check_chain"]

#: Slurm's own default (MaxArraySize 1001); nobody needs that many segments of one run.
MOST_TASKS = 1000


def check_chain(template: Template | None, chain: int | None) -> None:
    """``ValueError`` for an array without tasks, and for tasks without an array."""
    if template is Template.ARRAY and chain is None:
        raise wrong_key(
            "template",
            'how many tasks the array has is missing: "chain: 10" (each is an attempt as long as '
            "resources.time)",
        )
    if chain is not None and template is not Template.ARRAY:
        raise wrong_key("chain", 'only an array has tasks: write "template: array", too')
