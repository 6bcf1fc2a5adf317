"""Compares the replicas of tensors over ranks, and finds the rank that differs.

Each rank reports one digest per replica group, in an exchange that a save needs anyway.  If the
digests of a group differ, a second exchange compares the sums of its tensors one by one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slurm_forge.checkpoint.content.tensors import local_part
from slurm_forge.checkpoint.content.training_state import Captured
from slurm_forge.checkpoint.write.digests import (
    PendingSums,
    Sample,
    digest_of,
)
from slurm_forge.checkpoint.write.plan import Plan
from slurm_forge.checkpoint.write.tensor_keys import in_words
from slurm_forge.vocabulary.json_value import Json

#: Digits of a reported digest.
_SHORT = 16
#: Prefix of the groups that hold buffers.
_BUFFERS = "buffers "
_NAMED = 3
_SHOWN_RANKS = 8
#: A wrong replica can be identified only if two others agree.
_ENOUGH_TO_TELL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMismatch:
    """A difference between ranks that should be equal.

    ``rank`` and ``host`` identify the rank if a single one differs.  ``equal_at`` is the step after
    which the ranks were last equal, None if they never were.
    """

    text: str
    step: int
    rank: int | None = None
    host: str = ""
    equal_at: int | None = None

    def to_json(self) -> dict[str, Json]:
        """Encode it for the other ranks."""
        return {
            "text": self.text,
            "step": self.step,
            "rank": self.rank,
            "host": self.host,
            "equal_at": self.equal_at,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RankMismatch:
        """Decode what ``to_json`` returned."""
        return cls(**body)


@dataclass(frozen=True, slots=True)
class _HeldCopies:
    """What all ranks of ``group`` hold, or this rank alone (None), in the same order on all."""

    group: str | None
    keys: tuple[str, ...]
    sample: Sample

    @property
    def may_differ(self) -> bool:
        """Whether these are buffers, which may differ between ranks."""
        return self.group is not None and self.group.startswith(_BUFFERS)


class StateDigest:
    """The digest of one rank's parameters and optimizer state, per replica group."""

    def __init__(self, captured: Captured, plan: Plan, turn: int, host: str) -> None:
        """Start computing it; the state may change once this returns.

        ``turn``, equal on all ranks, selects the sample of a large state.
        """
        self.turn = turn
        self._host = host
        self._alike = captured.alike
        self._common = captured.common
        self._copies: list[_HeldCopies] = []
        chosen: list[torch.Tensor] = []
        samples: list[Sample] = []
        for each in plan.copies:
            sample = Sample.of(len(each.keys), each.size, turn)
            keys = tuple(each.keys[number] for number in sample.chosen(len(each.keys)))
            tensors = [local_part(captured.tensors[key]) for key in keys]
            sample = sample.on(tensors, each.size)
            group = None if each.group is None else f"{_BUFFERS * each.buffers}{each.group}"
            self._copies.append(_HeldCopies(group, keys, sample))
            chosen += tensors
            samples += [sample] * len(keys)
        self._pending = PendingSums(chosen, samples)
        self._layout = plan.layout
        self._sums: list[list[int]] | None = None

    def report(self) -> dict[str, Json]:
        """Return the short report that ranks compare.  Waits for the device."""
        groups: dict[str, Json] = {
            copies.group: [copies.sample.tensors, copies.sample.pieces, digest_of(sums)]
            for copies, sums in zip(self._copies, self._read(), strict=True)
            if copies.group is not None
        }
        common: dict[str, Json] = {key: text[:_SHORT] for key, text in self._common.items()}
        return {"groups": groups, "state": self.state, "turn": self.turn, "common": common}

    @property
    def covered(self) -> float:
        """The share of the state that the digest covers, at most 1."""
        parts = [each.sample.tensors * each.sample.pieces for each in self._copies]
        return len(parts) / sum(parts) if parts else 1.0

    @property
    def state(self) -> str:
        """The digest of all parameters and optimizer state and of their layout, for a checkpoint.

        It has no buffers: which of them are saved per rank is known only once ranks differ.
        """
        held = [
            pair for pair in zip(self._copies, self._read(), strict=True) if not pair[0].may_differ
        ]
        samples = [(each.sample.tensors, each.sample.pieces) for each, _ in held]
        layout = hashlib.blake2b(f"{self._layout} {samples}".encode(), digest_size=8).hexdigest()
        return f"{layout}:{digest_of([value for _, sums in held for value in sums])}"

    def details(self, groups: Sequence[str]) -> dict[str, Json]:
        """Return the sum of each tensor in the given groups."""
        own: dict[str, Json] = {}
        for copies, sums in zip(self._copies, self._read(), strict=True):
            if copies.group is not None and copies.group in groups:
                own[copies.group] = {
                    "sums": [f"{value:x}" for value in sums],
                    "keys": list(copies.keys),
                    "wrapped": all(
                        key in self._alike or key.startswith("objects/") for key in copies.keys
                    ),
                    "whole": copies.sample.whole,
                }
        return {"host": self._host, "groups": own}

    def _read(self) -> list[list[int]]:
        if self._sums is None:
            values = self._pending.read()
            self._sums, at = [], 0
            for copies in self._copies:
                self._sums.append(values[at : at + len(copies.keys)])
                at += len(copies.keys)
        return self._sums


def differing(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the groups whose ranks report different digests."""
    first: dict[str, Any] = {}
    groups: dict[str, None] = {}
    for report in reports:
        for group, digest in report["groups"].items():
            if first.setdefault(group, digest) != digest:
                groups[group] = None
    return list(groups)


def differing_parts(
    reports: Sequence[Mapping[str, Any]], *, step: int, equal_at: int | None
) -> str:
    """Describe the options and states that should be equal and differ; empty if none does."""
    differences: list[tuple[str, dict[int, str]]] = []
    for part in reports[0]["common"]:
        values = {rank: str(each["common"].get(part)) for rank, each in enumerate(reports)}
        if len(set(values.values())) > 1:
            differences.append((part, values))
    if not differences:
        return ""
    text = _text(differences, None, "", step, equal_at, wrapped=True, whole=True)
    return (
        f"{text}; step a scheduler with the same figures on every rank (an average of the loss "
        "over the ranks), and set the same options"
    )


def same_state(saved: Sequence[str], now: Sequence[str]) -> bool | None:
    """Whether the ranks hold what was saved, bit by bit; None if the layouts differ.

    Each argument has the ``StateDigest.state`` of every rank.
    """
    if len(saved) != len(now):
        return None
    pairs = [(one.partition(":"), two.partition(":")) for one, two in zip(saved, now, strict=True)]
    if any(one[0] != two[0] for one, two in pairs):
        return None
    return all(one == two for one, two in pairs)


def explained(
    details: Sequence[Mapping[str, Any]], *, step: int, equal_at: int | None
) -> tuple[RankMismatch | None, list[str]]:
    """Return the mismatch that the details of all ranks show, and what each rank has of its own."""
    differences: list[tuple[str, dict[int, str]]] = []
    buffers: list[str] = []
    wrapped, whole = True, True
    for group in dict.fromkeys(group for each in details for group in each["groups"]):
        members = {
            rank: each["groups"][group]
            for rank, each in enumerate(details)
            if group in each["groups"]
        }
        first = next(iter(members.values()))
        for number, key in enumerate(first["keys"]):
            values = {rank: each["sums"][number] for rank, each in members.items()}
            if len(set(values.values())) == 1:
                continue
            if group.startswith(_BUFFERS):
                # An object is saved as a whole, for each rank.
                own = "/".join(key.split("/")[:2]) if key.startswith("objects/") else key
                buffers += [own] * (own not in buffers)
                continue
            differences.append((key, values))
            wrapped, whole = wrapped and first["wrapped"], whole and first["whole"]
    if not differences:
        return None, buffers
    alone = _alone([values for _, values in differences])
    host = "" if alone is None else str(details[alone]["host"])
    mismatch = RankMismatch(
        text=_text(differences, alone, host, step, equal_at, wrapped=wrapped, whole=whole),
        step=step,
        rank=alone,
        host=host,
        equal_at=equal_at,
    )
    return mismatch, buffers


def _alone(differences: Sequence[Mapping[int, str]]) -> int | None:
    """Return the one rank that differs from all others wherever ranks differ, if there is one."""
    suspects: set[int] | None = None
    for values in differences:
        usual, count = Counter(values.values()).most_common(1)[0]
        odd = {rank for rank, value in values.items() if value != usual}
        if len(values) < _ENOUGH_TO_TELL or count < len(values) - 1:
            return None
        suspects = odd if suspects is None else suspects & odd
    return suspects.pop() if suspects and len(suspects) == 1 else None


def _text(
    differences: Sequence[tuple[str, Mapping[int, str]]],
    alone: int | None,
    host: str,
    step: int,
    equal_at: int | None,
    *,
    wrapped: bool,
    whole: bool,
) -> str:
    values = differences[0][1]
    names = ", ".join(in_words(key) for key, _ in differences[:_NAMED])
    more = len(differences) - _NAMED
    names += f" and {more} more" if more > 0 else ""
    verb = "differs" if len(differences) == 1 else "differ"
    if alone is not None:
        others = len(values) - 1
        between = f"on rank {alone}{host and f' ({host})'} from the {others} other ranks"
    else:
        between = f"between ranks {_ranks_of(values)}"
    since = f"after step {step}"
    if equal_at is None:
        since += ", the first comparison"
    else:
        since += f"; they were equal after step {equal_at}"
        since += "" if whole else ", as far as a sample of them shows"
    text = f"{names} {verb} {between} {since}"
    if alone is not None and equal_at is None:
        return (
            f"{text}: that rank builds or loads it differently, or its GPU computes wrong (silent "
            "data corruption)"
        )
    if alone is not None:
        return f"{text}: a fault of that rank's memory or GPU (silent data corruption) is likely"
    if not wrapped:
        return (
            f"{text}: wrap the model in DistributedDataParallel or fully_shard, which average the "
            "gradients; parts of one model (pipeline stages, experts) need names of their own in "
            "run.register"
        )
    return text


def _ranks_of(values: Mapping[int, str]) -> str:
    """Name one rank for each distinct value, and how many values are not named."""
    first: dict[str, int] = {}
    for rank, value in values.items():
        first.setdefault(value, rank)
    ranks = [str(rank) for rank in first.values()]
    if len(ranks) > _SHOWN_RANKS:
        return f"{', '.join(ranks[:_SHOWN_RANKS])} and {len(ranks) - _SHOWN_RANKS} more"
    return f"{', '.join(ranks[:-1])} and {ranks[-1]}"
