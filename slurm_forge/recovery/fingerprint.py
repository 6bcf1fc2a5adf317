"""Compare what a run was trained with and what it is resumed with.

A fingerprint is a set of facts, each a short text under a dotted key: ``torch``, ``code.revision``,
``job.args.lr``.  The first component selects the policy in the job file.  Refusal is the default
only for differences that silently turn the run into another experiment or that are unsafe to load;
differences that a cluster makes by itself (node, driver, GPU) are never refused.
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

#: Defaults; the longest matching prefix of a key counts, and any other key is a warning.
_DEFAULTS = {
    "job.entry": Policy.REFUSE,
    "sampling": Policy.REFUSE,
    "data": Policy.REFUSE,
    # Staging data onto a node's disk changes the times of all files.
    "data.times": Policy.WARN,
}
#: Parts whose major version is compared: a different one is refused by default.
_MAJOR_COUNTS = frozenset({"torch"})


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Facts by key.  ``complete`` names the parts whose facts are exhaustive: there, a missing key
    means "not set"; in any other part it is unknown, which is no difference.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    complete: frozenset[str] = frozenset()

    def __or__(self, other: Fingerprint) -> Fingerprint:
        """Both sets combined; the right-hand one wins."""
        return Fingerprint({**self.facts, **other.facts}, self.complete | other.complete)

    def to_json(self) -> dict[str, Json]:
        """For a checkpoint's manifest."""
        return {
            "facts": dict[str, Json](sorted(self.facts.items())),
            "complete": list[Json](sorted(self.complete)),
        }

    @classmethod
    def from_json(cls, value: object) -> Fingerprint:
        """Parse what is understood of it: other versions may record less, or more."""
        body: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        facts, complete = body.get("facts"), body.get("complete")
        values: dict[str, str] = {}
        for key, fact in facts.items() if isinstance(facts, Mapping) else ():
            if isinstance(key, str) and isinstance(fact, str) and len(values) < _MOST:
                values[key] = fact
        parts = complete if isinstance(complete, list) else []
        return cls(values, frozenset(part for part in parts if isinstance(part, str)))

    def _says(self, key: str) -> bool:
        """Whether ``key`` is known here, even if only as "not set"."""
        return key in self.facts or _part(key) in self.complete


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact that has changed; None means "not set"."""

    key: str
    saved: str | None
    now: str | None
    policy: Policy
    #: The job was changed deliberately: never a refusal.
    on_purpose: bool = False

    @classmethod
    def of(cls, key: str, saved: str | None, now: str | None) -> Difference:
        """A difference under the default policy."""
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
    """All differences that matter under ``policy``: refusals first, then in the order of the keys.

    An ``accepted`` difference was made deliberately and is not refused, whatever the policy is.
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
    """The error message if one of the differences is a refusal, including the way out."""
    reasons = [each for each in differences if each.policy is Policy.REFUSE]
    if not reasons:
        return None
    ways = ", ".join(f"{part}: warn" for part in dict.fromkeys(_part(each.key) for each in reasons))
    summary = "; ".join(str(each) for each in reasons[:5])
    more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return f"{summary}{more} (to allow it: environment: {{{ways}}})"


def job_facts(spec: JobSpec) -> Fingerprint:
    """The facts in a job file that affect the result: the entry, and each argument."""
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
    """The facts that determine samples and their order; ``source`` comes from the data source."""
    facts = {"seed": seed, "global_batch": global_batch, **source}
    return Fingerprint(
        {f"sampling.{key}": str(value) for key, value in facts.items() if value is not None}
    )


def shown_value(value: Json) -> str:
    """A plain value as a short text that differs whenever the values do."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 30]}… ({_hash(text)})"


def flat_facts(prefix: str, value: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """A mapping as facts under dotted keys; values that look secret are compared but not shown."""
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
