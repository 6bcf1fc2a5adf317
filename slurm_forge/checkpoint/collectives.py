"""Exchanges between ranks: small reports to rank 0, and one answer to all, never pickled.

An exchange is a gather to rank 0 and a broadcast back.  An error on one rank is raised on all of
them as the same error, and none is left waiting.  Each rank names the purpose of its exchange: if
purposes differ (one rank has left the loop, say), all get one error that names them.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slurm_forge.errors import (
    CheckpointError,
    FencedError,
    MismatchError,
    RanksLostError,
    StorageFullError,
    UnsupportedError,
)
from slurm_forge.vocabulary.json_value import Json

_MOST_FAILURES = 20
_LONGEST_TEXT = 2000
_SHOWN_RANKS = 8
#: Bytes of a packet: a length, and a report no longer than that of an ordinary save.
_HEAD = 8
_SHORT = 2048 - _HEAD


@dataclass(frozen=True)
class Ranks:
    """The ranks of ``group``, which can carry CPU tensors; ``None`` is one process alone."""

    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        if self.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("there are several ranks: pass a process group for CPU tensors")

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
        """Return the result of ``decide`` on all reports on every rank, or raise the same error.

        ``error`` is an earlier failure of this rank.  ``decide`` runs on rank 0, and only if no
        rank had an error.  FencedError and MismatchError keep their type; a lack of space or quota
        on any rank is a StorageFullError; any other error is a CheckpointError (``doing`` names the
        operation).  Raises RanksLostError if a rank is gone, UnsupportedError on all ranks if they
        are not all ``doing`` the same.
        """
        entry: dict[str, Json] = {"doing": doing}
        entry |= {"report": report} if error is None else {"error": _describe(error)}
        cause = error

        def judge(everything: Sequence[Any]) -> dict[str, Any]:
            nonlocal cause
            if apart := _apart([str(each["doing"]) for each in everything]):
                return {"apart": apart}
            verdict: dict[str, Any] = {}
            failing = {
                rank: each["error"] for rank, each in enumerate(everything) if "error" in each
            }
            if not failing:
                try:
                    verdict["result"] = decide([each["report"] for each in everything])
                except Exception as caught:
                    cause = caught
                    failing = {0: _describe(caught)}
            # The same error on many ranks is reported as one failure of all of them.
            alike: dict[tuple[str, ...], list[int]] = {}
            for rank, failure in failing.items():
                alike.setdefault(tuple(map(str, failure)), []).append(rank)
            failures = [[_named(some), *failure] for failure, some in alike.items()]
            verdict["failures"] = failures[:_MOST_FAILURES]
            return verdict

        verdict = judge([entry]) if self.group is None else self._exchange(entry, judge)
        if "apart" in verdict:
            raise UnsupportedError(
                f"the ranks are at different places of the program: {verdict['apart']}",
                next_step="Let every rank take the same steps, make the same calls, and leave the "
                "loop after the same step: decide it from what all ranks know, or agree on it with "
                "torch.distributed.all_reduce.",
            ) from cause
        if verdict["failures"]:
            raise _failure(verdict["failures"], doing) from cause
        return verdict["result"]

    def _exchange(
        self, value: Json, judge: Callable[[Sequence[Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the result of ``judge`` on the values of all ranks on every rank; it runs on 0.

        One gather and one broadcast if everything is short: each costs up to a millisecond.
        """
        data = _to_bytes(value)
        heads = self._gather(_packet(data))
        if heads is None:
            packet = self._broadcast(_packet(b""))
            if (longest := -_length(packet)) > 0:  # a rank's value is longer than a packet
                self._gather(_padded(data[_SHORT:], longest - _SHORT))
                packet = self._broadcast(_packet(b""))
            size = _length(packet)
            rest = self._broadcast(_padded(b"", size - _SHORT)) if size > _SHORT else None
            result: dict[str, Any] = _from_parts(packet, rest)
            return result
        longest = max(map(_length, heads))
        rests: Sequence[torch.Tensor | None] = [None] * len(heads)
        if longest > _SHORT:
            self._broadcast(_packet(b"", -longest))
            rests = self._gather(_padded(data[_SHORT:], longest - _SHORT)) or rests
        verdict = judge([_from_parts(*parts) for parts in zip(heads, rests, strict=True)])
        answer = _to_bytes(verdict)
        self._broadcast(_packet(answer))
        if len(answer) > _SHORT:
            self._broadcast(_padded(answer[_SHORT:], len(answer) - _SHORT))
        return verdict

    def _gather(self, packet: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the tensors of all ranks on rank 0, else None; they have the same length."""
        parts = [torch.empty_like(packet) for _ in range(self.size)] if self.rank == 0 else None
        try:
            dist.gather(packet, parts, dst=self._root, group=self.group)
        except RuntimeError as error:
            raise _lost(error) from error
        return parts

    def _broadcast(self, packet: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor on every rank; they have the same length."""
        try:
            dist.broadcast(packet, src=self._root, group=self.group)
        except RuntimeError as error:
            raise _lost(error) from error
        return packet

    @property
    def _root(self) -> int:
        if self.group is None:
            raise AssertionError("a single process has no other ranks")
        return dist.get_global_rank(self.group, 0)


def _to_bytes(value: Json | dict[str, Any]) -> bytes:
    return json.dumps(value).encode("ascii")


def _packet(data: bytes, length: int | None = None) -> torch.Tensor:
    """Return a length, followed by as much of the data as fits."""
    head = (len(data) if length is None else length).to_bytes(_HEAD, "little", signed=True)
    return _padded(head + data[:_SHORT], _HEAD + _SHORT)


def _padded(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)[:size]


def _length(packet: torch.Tensor) -> int:
    return int.from_bytes(bytes(packet[:_HEAD].numpy()), "little", signed=True)


def _from_parts(packet: torch.Tensor, rest: torch.Tensor | None) -> Any:
    data = bytes(packet[_HEAD:].numpy()) + (b"" if rest is None else bytes(rest.numpy()))
    return json.loads(data[: _length(packet)].decode("ascii"))


def _apart(doing: Sequence[str]) -> str:
    """Describe which rank is doing what; empty if all are doing the same."""
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(doing):
        ranks.setdefault(each, []).append(rank)
    if len(ranks) == 1:
        return ""
    return "; ".join(f"{_named(some)}: {each}" for each, some in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = len(ranks) - _SHOWN_RANKS
    return f"ranks {shown}{f' and {more} more' if more > 0 else ''}"


#: Errors that keep their type on every rank; everything else becomes a CheckpointError.
_KINDS: dict[str, type[CheckpointError] | type[FencedError]] = {
    "fenced": FencedError,
    "mismatch": MismatchError,
}
_FULL = "full"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def _describe(error: Exception) -> list[Json]:
    own = isinstance(error, CheckpointError | FencedError)
    text = error.message if isinstance(error, CheckpointError | FencedError) else str(error)
    if not own:
        text = f"{type(error).__name__}: {text}"
    step = getattr(error, "next_step", "")
    kind = next((kind for kind, known in _KINDS.items() if isinstance(error, known)), "")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        kind = _FULL
    return [kind, text[:_LONGEST_TEXT], str(step)[:_LONGEST_TEXT]]


def _failure(failures: Sequence[Any], doing: str) -> Exception:
    steps = [step for *_, step in failures if step]
    fenced = [text for _, kind, text, _ in failures if kind == "fenced"]
    if fenced:
        return FencedError(fenced[0], next_step=steps[0] if steps else "")
    texts = "; ".join(f"{ranks}: {text}" for ranks, _, text, _ in failures)
    kinds = {kind for _, kind, _, _ in failures}
    of_all = MismatchError if kinds == {"mismatch"} else CheckpointError
    return (StorageFullError if _FULL in kinds else of_all)(
        f"{doing} failed: {texts}",
        next_step=steps[0]
        if steps
        else "The checkpoint before it is untouched; training can continue. Check free space, "
        "quota and permissions of the run directory.",
    )


def _lost(error: RuntimeError) -> RanksLostError:
    return RanksLostError(
        f"the ranks lost each other: {error}",
        next_step="End this launch; the next one resumes from the last published checkpoint.",
    )
