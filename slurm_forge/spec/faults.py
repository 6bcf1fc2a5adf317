"""The language of faults on purpose: ``kind@step[xN][:rankR][:where…]``, text to value and back.

``nan@120`` strikes in the step that 120 steps were done before, on every rank, once in the life of
the run; ``oom@200:rank1:above=4``, ``nan@120x3``, ``kill@350:rank0``, ``exception@6:always``,
``nan:samples=4000-5279``, ``corrupt@40:rank0:adam_v:1e30`` say more.  Parts may also be written as
``key=value`` and be parted by commas (``nan@step=5,until=7,rank=0``).  docs/how-to/rehearsing.md
has all of it.  Parsers raise ``ValueError`` with a sentence for the user; ``Fault.parse`` a
ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slurm_forge.documents import did_you_mean
from slurm_forge.errors import ConfigError
from slurm_forge.vocabulary.plan import SampleWindow


class FaultKind(str, Enum):
    """What goes wrong."""

    NAN = "nan"
    INF = "inf"
    SPIKE = "spike"
    OOM = "oom"
    CORRUPT = "corrupt"
    EXCEPTION = "exception"
    TERM = "term"
    USR1 = "usr1"
    KILL = "kill"
    STOP = "stop"
    HANG = "hang"
    LOCK = "lock"
    GIL = "gil"
    COLLECTIVE = "collective"
    DATA = "data"
    SLOW = "slow"
    #: Before a launch: a node computes wrong, takes part in no collective, or spoils its sums.
    BAD_NODE = "bad_node"
    BAD_LINK = "bad_link"
    BAD_SUM = "bad_sum"
    #: What this rank contributes to the next probe arrives changed.
    WRONG = "wrong"


class FaultTarget(str, Enum):
    """What ``corrupt`` writes its value into: one element of it; of the loss all there is.

    ``node`` is for ``slow``: it is the node that is slow, not what the rank has to do.
    """

    LOSS = "loss"
    GRAD = "grad"
    WEIGHT = "weight"
    ADAM_M = "adam_m"
    ADAM_V = "adam_v"
    BUFFER = "buffer"
    NODE = "node"


_SPIKE = 1e4
#: How other tools and people call them.
_KNOWN_AS = {
    "sigterm": "term", "sigusr1": "usr1", "sigkill": "kill", "sigstop": "stop", "crash": "kill",
    "error": "exception", "raise": "exception", "freeze": "hang", "sleep": "slow",
    "delay": "slow", "deadlock": "lock", "hold_gil": "gil", "loader": "data",
    "nccl": "collective", "infinity": "inf", "preempt": "term", "bitflip": "corrupt",
    "wrong_value": "wrong", "sdc": "wrong",
}  # fmt: skip
_HEAD = re.compile(r"([^@:,]*)([@:,]?)(.*)", re.DOTALL)
_STEP = re.compile(r"([0-9]{1,15})(?:x([0-9]{1,6}))?")
_RANK = re.compile(r"rank([0-9]{1,9})")
_WHOLE = re.compile(r"[0-9]{1,15}")
_SAMPLES = re.compile(r"([0-9]{1,15})-([0-9]{1,15})")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,3})?|inf|nan)")
#: Of a list with commas: what goes on with the fault before it, rather than beginning another.
_GOES_ON = re.compile(r"[a-z_]+=|rank[0-9]|always\Z|always:")
_WHOLE_KEYS = ("step", "until", "rank", "attempt", "above")
_KEYS = (*_WHOLE_KEYS, "samples", "factor", "seconds", "host")
_STATE = (FaultTarget.WEIGHT, FaultTarget.ADAM_M, FaultTarget.ADAM_V, FaultTarget.BUFFER)
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_OF_START = (FaultKind.BAD_NODE, FaultKind.BAD_LINK, FaultKind.BAD_SUM)
_OPTIONS = {
    "factor": (FaultKind.SPIKE, FaultKind.SLOW),
    "seconds": (FaultKind.SLOW, FaultKind.HANG, FaultKind.GIL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, and when and where it strikes.

    ``step`` is the number of optimizer steps done before it, ``times`` the number of consecutive
    steps.  ``above`` is for micro-batches of more samples only, ``samples`` for those that contain
    a sample of this window of the stream.  ``value`` is a number as text: nan equals nan then.
    """

    kind: FaultKind
    step: int | None = None
    times: int = 1
    rank: int | None = None
    attempt: int | None = None
    above: int | None = None
    samples: SampleWindow | None = None
    target: FaultTarget | None = None
    value: str | None = None
    factor: float | None = None
    seconds: float | None = None
    always: bool = False
    #: Of a fault before the launch: the node that it lies with, whichever ranks are on it.
    host: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read one fault; ConfigError says what is wrong with it."""
        try:
            return parse_fault(text)
        except ValueError as error:
            raise ConfigError(
                str(error), next_step="Write kind@step, such as nan@120 or oom@200:rank1."
            ) from None

    @property
    def deterministic(self) -> bool:
        """Whether it strikes whenever its step, or its samples, come by; else once per run."""
        return self.always or self.samples is not None or self.host is not None

    @property
    def of_start(self) -> bool:
        """Whether it is a node's, and found before a launch trains."""
        return self.kind in _OF_START

    @property
    def drags(self) -> bool:
        """Whether it makes a rank slower by a factor, which changes nothing that stays."""
        return self.kind is FaultKind.SLOW and self.factor is not None

    @property
    def of_state(self) -> bool:
        """Whether it changes what a checkpoint holds, which is done between two steps."""
        return self.target in _STATE

    @property
    def number(self) -> float:
        """The value that is written; nan without one."""
        return float(self.value or "nan")

    @property
    def loss_factor(self) -> float | None:
        """What the loss is multiplied by, for faults that do so."""
        if self.kind is FaultKind.SPIKE:
            return _SPIKE if self.factor is None else self.factor
        if self.kind in (FaultKind.NAN, FaultKind.INF):
            return float(self.kind.value)
        return self.number if self.target is FaultTarget.LOSS else None

    @property
    def of_batch(self) -> bool:
        """Whether it depends on, or acts on, the loss of a micro-batch."""
        on_loss = (FaultKind.NAN, FaultKind.INF, FaultKind.SPIKE, FaultKind.OOM)
        chosen_by_batch = self.above is not None or self.samples is not None
        return (
            self.kind in on_loss
            or self.target in (FaultTarget.LOSS, FaultTarget.GRAD)
            or chosen_by_batch
        )

    @property
    def of_gradient(self) -> bool:
        """Whether it can act on gradients that are computed already, whatever the samples."""
        if self.above is not None or self.samples is not None:
            return False
        return self.target is FaultTarget.GRAD or self.loss_factor is not None

    def comes(self, *, step: int, rank: int, attempt: int) -> bool:
        """Whether step, rank and attempt are its own."""
        if self.step is not None and not self.step <= step < self.step + self.times:
            return False
        return self.rank in (None, rank) and self.attempt in (None, attempt)

    def __str__(self) -> str:
        """As ``parse_fault`` reads it: equal faults have equal texts."""
        step = "" if self.step is None else f"@{self.step}"
        parts = [f"{self.kind.value}{step}{f'x{self.times}' if self.times > 1 else ''}"]
        parts += [] if self.rank is None else [f"rank{self.rank}"]
        parts += [] if self.target is None else [self.target.value]
        parts += [] if self.value is None else [self.value]
        parts += [] if self.host is None else [f"host={self.host}"]
        for key in ("attempt", "above", "factor", "seconds"):
            value = getattr(self, key)
            parts += [] if value is None else [f"{key}={str(value).removesuffix('.0')}"]
        if self.samples is not None:
            parts.append(f"samples={self.samples.first}-{self.samples.stop - 1}")
        parts += ["always"] if self.always else []
        return ":".join(parts)


def parse_fault(text: str) -> Fault:
    """The fault that a text says; ``ValueError`` with a sentence where it says none."""
    head, sign, rest = _HEAD.fullmatch(text.strip()).groups()  # type: ignore[union-attr]
    fields: dict[str, Any] = {"kind": _kind(head.strip())}
    parts = [part.strip() for part in re.split("[:,]", rest)] if sign else []
    if sign == "@":
        step = _STEP.fullmatch(parts[0])
        if step is not None:
            fields["step"] = int(step[1])
            fields |= {} if step[2] is None else {"times": int(step[2])}
            parts.pop(0)
        elif "=" not in parts[0]:
            raise ValueError(f'"{parts[0]}" in "{text}" is not a step; write {head}@120')
    for part in parts:
        key, value = _condition(part, text)
        if key in fields:
            raise ValueError(f'"{text}" gives {key} twice')
        fields[key] = value
    until = fields.pop("until", None)
    if until is not None:
        if fields.get("step") is None or "times" in fields or until < fields["step"]:
            raise ValueError(f'"until" in "{text}" needs step=, and must not be before it')
        fields["times"] = until - fields["step"] + 1
    try:
        return Fault(**fields)
    except ValueError as error:
        raise ValueError(f'"{text}": {error}') from None


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults of a list with commas, as ``--inject`` has it; ``ValueError`` for a wrong one."""
    texts: list[str] = []
    for part in (each.strip() for each in text.split(",")):
        if texts and _GOES_ON.match(part):
            texts[-1] += f",{part}"
        else:
            texts.append(part)
    return without_repeats(map(parse_fault, texts))


def without_repeats(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The faults as they are; ``ValueError`` where one is there twice."""
    unique: list[Fault] = []
    for fault in faults:
        if fault in unique:
            raise ValueError(f'"{fault}" is listed twice')
        unique.append(fault)
    return tuple(unique)


def _kind(word: str) -> FaultKind:
    try:
        return FaultKind(word)
    except ValueError:
        kinds = [kind.value for kind in FaultKind]
        hint = did_you_mean(word, kinds, _KNOWN_AS)
        raise ValueError(f'"{word[:40]}" is not a known fault {hint}') from None


def _condition(part: str, text: str) -> tuple[str, Any]:
    """Key and value of what stands behind the step."""
    key, equals, value = part.partition("=")
    rank = _RANK.fullmatch(part)
    if rank is not None:
        return "rank", int(rank[1])
    if part == "always":
        return "always", True
    if part in {target.value for target in FaultTarget}:
        return "target", FaultTarget(part)
    if not equals:
        if _NUMBER.fullmatch(part):
            return "value", repr(float(part))
        words = ["rank0", "always", *(f"{key}=" for key in _KEYS), *(t.value for t in FaultTarget)]
        raise ValueError(f'"{part[:40]}" in "{text}" is not understood {did_you_mean(part, words)}')
    if key in _WHOLE_KEYS and _WHOLE.fullmatch(value):
        return key, int(value)
    if key == "samples" and (window := _SAMPLES.fullmatch(value)):
        return key, SampleWindow(int(window[1]), int(window[2]) + 1)
    if key in _OPTIONS and _NUMBER.fullmatch(value):
        return key, float(value)
    if key == "host" and _HOST.fullmatch(value):
        return key, value
    if key not in _KEYS:
        raise ValueError(f'"{key[:40]}" in "{text}" is not understood {did_you_mean(key, _KEYS)}')
    wanted = "FIRST-LAST, such as samples=4000-5279" if key == "samples" else "a number"
    wanted = "the name of a node" if key == "host" else wanted
    raise ValueError(f'{key} in "{text}" is {wanted}')


def _check(fault: Fault) -> None:
    """``ValueError`` for what contradicts itself, or would never strike."""
    corrupts = fault.kind is FaultKind.CORRUPT
    chosen_by_batch = fault.samples is not None or fault.above is not None
    if fault.of_start:
        _check_of_start(fault)
        return
    if fault.host is not None:
        raise ValueError("host= is for bad_node, bad_link and bad_sum; others strike a rank")
    if fault.step is None and not chosen_by_batch:
        raise ValueError(f"missing step; write {fault.kind.value}@120")
    if fault.samples is not None and fault.step is not None:
        raise ValueError("give a step or samples, not both")
    if fault.samples is not None and fault.samples.first >= fault.samples.stop:
        raise ValueError("its last sample comes before its first")
    if fault.times < 1 or (fault.times > 1 and fault.step is None):
        raise ValueError("a number of steps needs a step, and must be 1 or more")
    if fault.attempt == 0:
        raise ValueError("attempts are counted from 1")
    if corrupts and (fault.target is None or fault.value is None):
        raise ValueError(
            "name the target and the value, such as corrupt@40:weight:nan "
            f"({', '.join(each.value for each in FaultTarget if each is not FaultTarget.NODE)})"
        )
    if fault.target is FaultTarget.NODE:
        if not fault.drags:
            raise ValueError(
                "node goes with slow and a factor, such as slow@5x400:rank1:factor=2:node"
            )
    elif not corrupts and (fault.target is not None or fault.value is not None):
        condition = fault.value if fault.target is None else fault.target.value
        raise ValueError(f"{condition} is for corrupt, such as corrupt@40:weight:nan")
    if fault.of_state and chosen_by_batch:
        raise ValueError("a change between two steps takes a step alone, no samples")
    for key, kinds in _OPTIONS.items():
        number = getattr(fault, key)
        if number is None:
            continue
        if fault.kind not in kinds:
            raise ValueError(f"{key} is for {' and '.join(kind.value for kind in kinds)}")
        if fault.drags and (not number >= 1 or fault.seconds is not None or chosen_by_batch):
            raise ValueError(
                "slow with a factor needs one of 1 or more and a step, and takes no seconds"
            )
        if not abs(number) < float("inf") or (key == "seconds" and not 0 <= number < 1e7):
            raise ValueError(f"{key}={number} is out of range")


def _check_of_start(fault: Fault) -> None:
    name = fault.kind.value
    if (fault.rank is None) == (fault.host is None):
        raise ValueError(f"name the place: {name}:rank1, or {name}:host=n2")
    conditions = (fault.step, fault.above, fault.samples, fault.target, fault.value)
    if (
        any(each is not None for each in (*conditions, fault.factor, fault.seconds))
        or fault.times != 1
    ):
        raise ValueError(f"it applies before the first step; write {name}:rank1")
    if fault.attempt == 0:
        raise ValueError("attempts are counted from 1")
