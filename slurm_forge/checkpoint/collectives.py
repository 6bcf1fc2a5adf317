"""How the ranks of a save or load tell each other what happened: small, and never pickled.

One exchange is a gather to rank 0 and a broadcast back.  Whatever goes wrong on one rank reaches
all of them as the same error, and none is left waiting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slurm_forge.errors import CheckpointError, FencedError, RanksLostError
from slurm_forge.vocabulary.json_value import Json

__all__ = ["Ranks"]

_MOST_FAILURES = 20
_LONGEST_TEXT = 2000


@dataclass(frozen=True)
class Ranks:
    """The ranks of ``group``, which can carry CPU tensors; ``None`` is one process alone."""

    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        if self.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("there are several ranks: hand over a process group for CPU tensors")

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def agree(
        self,
        error: Exception | None,
        report: Json,
        decide: Callable[[Sequence[Any]], Json],
        *,
        doing: str,
    ) -> Any:
        """Give every rank what ``decide`` makes of all reports, or the same error.

        ``error`` is what went wrong on this rank before.  ``decide`` runs on rank 0, only if no
        rank had an error; FencedError stays one on all ranks, anything else is a CheckpointError
        (``doing`` tells what was going on).  Raises RanksLostError where a rank is gone.
        """
        told: Json = {"report": report} if error is None else {"error": _describe(error)}
        verdict: dict[str, Any] = {}
        mine = error
        everything = self._gather(told)
        if everything is not None:
            failures: list[Any] = [
                [rank, *each["error"]] for rank, each in enumerate(everything) if "error" in each
            ]
            if not failures:
                try:
                    verdict["result"] = decide([each["report"] for each in everything])
                except Exception as caught:
                    mine = caught
                    failures = [[0, *_describe(caught)]]
            verdict["failures"] = failures[:_MOST_FAILURES]
        verdict = self._broadcast(verdict)
        if verdict["failures"]:
            raise _failure(verdict["failures"], doing) from mine
        return verdict["result"]

    def _gather(self, value: Json) -> list[Any] | None:
        """Every rank's value on rank 0, else None."""
        if self.group is None:
            return [value]
        mine = _to_tensor(value)
        try:
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self.group)
            sizes = [int(length) for length in lengths]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: mine.numel()] = mine
            parts = [torch.zeros_like(padded) for _ in sizes] if self.rank == 0 else None
            dist.gather(padded, parts, dst=self._root, group=self.group)
        except RuntimeError as error:
            raise _lost(error) from error
        if parts is None:
            return None
        return [_from_tensor(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def _broadcast(self, value: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's value on every rank."""
        if self.group is None:
            return value
        mine = _to_tensor(value)
        try:
            length = torch.tensor([mine.numel()])
            dist.broadcast(length, src=self._root, group=self.group)
            data = mine if self.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
            dist.broadcast(data, src=self._root, group=self.group)
        except RuntimeError as error:
            raise _lost(error) from error
        found: dict[str, Any] = _from_tensor(data)
        return found

    @property
    def _root(self) -> int:
        if self.group is None:
            raise AssertionError("a process alone has nobody to ask")
        return dist.get_global_rank(self.group, 0)


def _to_tensor(value: Json) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode("ascii")), dtype=torch.uint8)


def _from_tensor(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.numpy()).decode("ascii"))


def _describe(error: Exception) -> list[Json]:
    text = error.message if isinstance(error, CheckpointError | FencedError) else str(error)
    if not isinstance(error, CheckpointError | FencedError):
        text = f"{type(error).__name__}: {text}"
    step = getattr(error, "next_step", "")
    return [isinstance(error, FencedError), text[:_LONGEST_TEXT], str(step)[:_LONGEST_TEXT]]


def _failure(failures: Sequence[Any], doing: str) -> Exception:
    fenced = [text for _, is_fenced, text, _ in failures if is_fenced]
    steps = [step for *_, step in failures if step]
    if fenced:
        return FencedError(fenced[0], next_step=steps[0] if steps else "")
    texts = "; ".join(f"rank {rank}: {text}" for rank, _, text, _ in failures)
    return CheckpointError(
        f"{doing} failed: {texts}",
        next_step=steps[0]
        if steps
        else "The checkpoint before it is untouched; training can go "
        "on. Look at free space, quota and permissions of the run directory.",
    )


def _lost(error: RuntimeError) -> RanksLostError:
    return RanksLostError(
        f"the ranks lost each other: {error}",
        next_step="End this launch; the next one resumes from the last published checkpoint.",
    )
