"""Keys of tensors in a checkpoint, in the words of the program that registered them.  Pure."""

from __future__ import annotations

from slurm_forge.checkpoint.content.json_state import unescape


def in_words(key: str) -> str:
    """``models/net/0.weight`` as ``0.weight of model 'net'``; other keys as they are."""
    parts = [unescape(part) for part in key.split("/")]
    match parts:
        case ["models", model, name]:
            return f"{name} of model {model!r}"
        case ["optimizers", optimizer, "state", model, name, entry]:
            return f"{entry} of {name} of model {model!r} (optimizer {optimizer!r})"
        case _:
            return key


def is_compared(key: str, parameters: frozenset[str]) -> bool:
    """Whether copies of it have to be equal on all ranks: a parameter, or state of an optimizer.

    Not buffers: DDP makes those of a rank its own statistics until the next forward.
    ``parameters`` are the keys of all parameters.
    """
    return key in parameters or (key.startswith("optimizers/") and "/state/" in key)
