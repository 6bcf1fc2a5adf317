"""What a run was trained with, compared with what it is resumed with.

A fingerprint is a set of facts, each a short text under a dotted key: ``torch``, ``code.revision``,
``job.args.lr``.  The first component is the part that the job file has a policy for.  A refusal by
default is kept for what silently makes another experiment of the run, or is not safe to load;
what a cluster changes by itself (node, driver, GPU) never is one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_forge.spec.job import JobSpec
from slurm_forge.spec.safeguards import EnvironmentSpec, Policy
from slurm_forge.vocabulary.job_change import ON_PURPOSE
from slurm_forge.vocabulary.json_value import Json

_LONGEST = 200
_MOST = 5_000
#: Arguments with such a name are compared, not shown (tokenizer and max_tokens are no secrets).
_SECRET = re.compile(
    r"(.*[_.-])?(token|secret|password|passwd|credentials?|(api|access|private|secret)_?key)",
    re.IGNORECASE,
)
_MAJOR = re.compile(r"([0-9]+)\.")

#: By default; the longest prefix of a key counts, and what is not here is a warning.
_DEFAULTS = {
    "job.entry": Policy.REFUSE,
    "sampling": Policy.REFUSE,
    "data": Policy.REFUSE,
    # Staging data onto a node's disk gives every file a new time.
    "data.times": Policy.WARN,
}
#: Parts of which another major version is refused by default.
_MAJOR_COUNTS = frozenset({"torch"})


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Facts by key.  ``complete`` are the parts of which no fact is left out: there, a key that is
    missing was not set; elsewhere it is only unknown, and no difference.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    complete: frozenset[str] = frozenset()

    def __or__(self, other: Fingerprint) -> Fingerprint:
        """Both together; where both know a fact, the other's."""
        return Fingerprint({**self.facts, **other.facts}, self.complete | other.complete)

    def to_json(self) -> dict[str, Json]:
        """For the manifest."""
        return {
            "facts": dict[str, Json](sorted(self.facts.items())),
            "complete": list[Json](sorted(self.complete)),
        }

    @classmethod
    def from_json(cls, value: object) -> Fingerprint:
        """What can be understood of it: older and newer versions may say less, or more."""
        body: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        facts, complete = body.get("facts"), body.get("complete")
        values: dict[str, str] = {}
        for key, fact in facts.items() if isinstance(facts, Mapping) else ():
            if isinstance(key, str) and isinstance(fact, str) and len(values) < _MOST:
                values[key] = fact
        parts = complete if isinstance(complete, list) else []
        return cls(values, frozenset(part for part in parts if isinstance(part, str)))

    def _says(self, key: str) -> bool:
        """Whether it says anything about ``key``, if only that it was not set."""
        return key in self.facts or _part(key) in self.complete


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact that is another now; None is "not set"."""

    key: str
    saved: str | None
    now: str | None
    policy: Policy
    #: The job was changed on purpose: never a refusal.
    on_purpose: bool = False

    @classmethod
    def of(cls, key: str, saved: str | None, now: str | None) -> Difference:
        """With the policy that holds by default."""
        return cls(key, saved, now, _default(key, saved, now))

    def __str__(self) -> str:
        text = f"{self.key}: was {_or_not_set(self.saved)}, is {_or_not_set(self.now)}"
        return f"{text}{ON_PURPOSE}" if self.on_purpose else text


def compare(
    saved: Fingerprint,
    now: Fingerprint,
    policy: EnvironmentSpec,
    accepted: Callable[[Difference], bool] = lambda _: False,
) -> tuple[Difference, ...]:
    """All differences that matter by ``policy``, refusals first, then in the order of the keys.

    One that is ``accepted`` was made on purpose, and is not refused whatever the policy says.
    """
    results = []
    for key in sorted({*saved.facts, *now.facts}):
        was, is_now = saved.facts.get(key), now.facts.get(key)
        if was == is_now or not (saved._says(key) and now._says(key)):
            continue
        does = policy.of(_part(key)) or _default(key, was, is_now)
        if does is not Policy.IGNORE:
            difference = Difference(key, was, is_now, does)
            if accepted(difference):
                difference = replace(difference, policy=Policy.WARN, on_purpose=True)
            results.append(difference)
    return tuple(sorted(results, key=lambda difference: difference.policy is not Policy.REFUSE))


def refused(differences: tuple[Difference, ...]) -> str | None:
    """What to tell the user where one of the differences is a refusal, with the way out."""
    reasons = [each for each in differences if each.policy is Policy.REFUSE]
    if not reasons:
        return None
    ways = ", ".join(f"{part}: warn" for part in dict.fromkeys(_part(each.key) for each in reasons))
    summary = "; ".join(str(each) for each in reasons[:5])
    more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return f"{summary}{more} (to allow it: environment: {{{ways}}})"


def job_facts(spec: JobSpec) -> Fingerprint:
    """What a job file says about the science: the entry, and every argument under its own key."""
    facts = {"job.batch_coupled": shown_value(spec.batch_coupled)}
    if spec.entry is not None:
        facts["job.entry"] = spec.entry
    if spec.command is not None:
        facts["job.command"] = shown_value(list(spec.command))
    facts.update(flat_facts("job.args", spec.args))
    return Fingerprint(facts, frozenset({"job"}))


def sampling_facts(
    *, seed: int, global_batch: int | str, source: Mapping[str, object]
) -> Fingerprint:
    """What the samples and their order follow from; ``source`` is what the data source says."""
    facts = {"seed": seed, "global_batch": global_batch, **source}
    return Fingerprint(
        {f"sampling.{key}": str(value) for key, value in facts.items() if value is not None}
    )


def shown_value(value: Json) -> str:
    """A plain value as a short text that differs wherever the values do."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 30]}… ({_hash(text)})"


def flat_facts(prefix: str, value: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """A mapping as facts under dotted keys; what looks like a secret is compared, not shown."""
    for key, item in value.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(item, (str, dict)) and _SECRET.fullmatch(key):
            yield path, f"(hidden, {_hash(json.dumps(item))[:8]})"
        elif isinstance(item, dict) and item:
            yield from flat_facts(path, item)
        else:
            yield path, shown_value(item)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _part(key: str) -> str:
    return key.partition(".")[0]


def _default(key: str, was: str | None, is_now: str | None) -> Policy:
    if _part(key) in _MAJOR_COUNTS:
        majors = {match[1] for text in (was, is_now) if (match := _MAJOR.match(text or ""))}
        return Policy.REFUSE if len(majors) > 1 else Policy.WARN
    prefix = key
    while prefix not in _DEFAULTS and prefix:
        prefix = prefix.rpartition(".")[0]
    return _DEFAULTS.get(prefix, Policy.WARN)


def _or_not_set(value: str | None) -> str:
    return "not set" if value is None else value
