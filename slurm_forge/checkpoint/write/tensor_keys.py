"""Keys of tensors in a checkpoint, in terms of the program that registered them.  Pure."""

from __future__ import annotations

from slurm_forge.checkpoint.content.json_state import unescape


def in_words(key: str) -> str:
    """``models/net/0.weight`` becomes ``0.weight of model 'net'``; other keys stay as they are."""
    parts = [unescape(part) for part in key.split("/")]
    match parts:
        case ["models", model, name]:
            return f"{name} of model {model!r}"
        case ["optimizers", optimizer, "state", model, name, entry]:
            return f"{entry} of {name} of model {model!r} (optimizer {optimizer!r})"
        case ["models", model]:
            return f"the extra state of model {model!r}"
        case ["objects", name]:
            return f"object {name!r}"
        case ["objects", name, *path]:
            return f"{'.'.join(path)} of object {name!r}"
        case ["optimizers", optimizer, "groups", group, option, *_]:
            return f"{option} of group {group} of optimizer {optimizer!r}"
        case ["optimizers", optimizer]:
            return f"an option (such as the learning rate) of optimizer {optimizer!r}"
        case _:
            return key


def is_compared(key: str, replicated: frozenset[str]) -> bool:
    """Whether its copies must be equal on all ranks: a parameter, or a tensor of an optimizer.

    Not buffers: under DDP each rank has its own statistics until the next forward.
    ``replicated`` are the keys of all parameters, and of objects' copies of them.
    """
    return key in replicated or key.startswith("optimizers/")
