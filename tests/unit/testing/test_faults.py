"""The language of faults on purpose, and ``Faults`` in somebody's own loss function."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import ConfigError
from slurm_forge.spec.faults import parse_fault, parse_faults
from slurm_forge.testing.faults import Fault, FaultKind, Faults, Target
from slurm_forge.vocabulary.plan import SampleWindow

COUNT = st.integers(0, 10**12)
TEXTS = st.one_of(
    st.text(st.sampled_from("nanoomkill@:x=,-rank0123456789 \n\x00é"), max_size=24),
    st.text(max_size=12),
)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Every fault that can be said."""
    kind = draw(st.sampled_from(FaultKind))
    given: dict[str, Any] = {"kind": kind, "rank": draw(st.none() | st.integers(0, 10**6))}
    given["attempt"] = draw(st.none() | st.integers(1, 10**6))
    if kind in (FaultKind.BAD_NODE, FaultKind.BAD_LINK, FaultKind.BAD_SUM):
        if given["rank"] is None:
            given["host"] = draw(st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True))
        return Fault(**given, always=draw(st.booleans()))
    if kind is FaultKind.CORRUPT:
        given["target"] = draw(st.sampled_from([t for t in Target if t is not Target.NODE]))
        given["value"] = draw(st.sampled_from(["nan", "inf", "-inf", "1e+30", "-2.5"]))
    if kind is FaultKind.SPIKE:
        finite = st.floats(-1e30, 1e30, allow_subnormal=False)
        given["factor"] = draw(st.none() | finite)
    if kind in (FaultKind.SLOW, FaultKind.HANG):
        given["seconds"] = draw(st.none() | st.floats(0, 1e6, allow_subnormal=False))
    if kind is FaultKind.SLOW and given["seconds"] is None:
        given["factor"] = draw(st.none() | st.floats(1.5, 100))
        if given["factor"] is not None:
            given["target"] = draw(st.sampled_from([None, Target.NODE]))
    drags = kind is FaultKind.SLOW and given.get("factor") is not None
    state = drags or given.get("target") not in (None, Target.LOSS, Target.GRAD)
    if draw(st.booleans()) or state:
        given["step"], given["times"] = draw(COUNT), draw(st.integers(1, 10**5))
        given["always"] = draw(st.booleans())
        given["above"] = None if state else draw(st.none() | COUNT)
    else:
        first, count = draw(COUNT), draw(st.integers(1, 10**6))
        given["samples"] = SampleWindow(first, first + count)
    return Fault(**given)


@given(faults())
def test_every_fault_reads_back_as_itself(fault: Fault) -> None:
    assert Fault.parse(str(fault)) == fault


@given(st.lists(faults(), unique=True, min_size=1, max_size=5))
def test_a_list_with_commas_is_its_faults(some: list[Fault]) -> None:
    assert parse_faults(",".join(map(str, some))) == tuple(some)
    assert parse_faults(" , ".join(str(f).replace(":", " : ") for f in some)) == tuple(some)


CONDITIONS = [
    "oom@3,above=4", "nan@5,until=7,rank=1", "kill@9", "exception@6,always", "nan:samples=4-9",
    "spike@step=2,factor=10", "kill@1,rank2",
]  # fmt: skip


@given(st.lists(st.sampled_from(CONDITIONS), unique=True, min_size=1))
def test_conditions_after_a_comma_belong_to_the_fault_before_them(texts: list[str]) -> None:
    assert parse_faults(",".join(texts)) == tuple(map(parse_fault, texts))


@given(TEXTS)
def test_anything_else_is_a_sentence_and_never_a_crash(text: str) -> None:
    try:
        found = parse_faults(text)
    except ValueError as error:
        assert str(error)
    else:
        assert parse_faults(",".join(map(str, found))) == found


@given(faults(), st.integers(0, 10**13), st.integers(0, 5), st.integers(1, 5))
def test_a_fault_comes_at_its_steps_on_its_rank_and_nowhere_else(
    fault: Fault, step: int, rank: int, attempt: int
) -> None:
    begun = fault.step is None or step >= fault.step
    over = fault.step is not None and step >= fault.step + fault.times
    mine = fault.rank in (None, rank) and fault.attempt in (None, attempt)
    comes = fault.comes(step=step, rank=rank, attempt=attempt)
    assert comes == (begun and not over and mine)


def test_the_examples_mean_what_they_say() -> None:
    assert parse_fault("nan@120") == Fault(kind=FaultKind.NAN, step=120)
    assert parse_fault("nan@120x3") == Fault(kind=FaultKind.NAN, step=120, times=3)
    oom = Fault(kind=FaultKind.OOM, step=200, rank=1, above=4)
    assert parse_fault("oom@200:rank1:above=4") == oom
    assert parse_fault("oom@step=200,rank=1,above=4") == oom
    assert parse_fault("nan@step=5,until=7") == Fault(kind=FaultKind.NAN, step=5, times=3)
    poison = parse_fault("nan:samples=4000-5280")
    assert poison.samples == SampleWindow(4000, 5281)
    assert poison.deterministic
    assert not parse_fault("nan@120").deterministic
    assert parse_fault("exception@6:always").deterministic
    damage = parse_fault("corrupt@40:rank0:adam_v:1e30")
    assert (damage.target, damage.number, damage.rank) == (Target.ADAM_V, 1e30, 0)
    assert parse_fault("corrupt@40:1e30:adam_v:rank0") == damage
    assert parse_fault("nan@3:rank1") != parse_fault("nan@3")


@pytest.mark.parametrize(("text", "said"), [
    ("nna@120", 'did you mean "nan"'),
    ("sigkill@3", 'did you mean "kill"'),
    ("", "known here: nan, inf"),
    ("nan", "missing step"),
    ("nan@", "is not a step"),
    ("nan@soon", "is not a step"),
    ("nan@-3", "is not a step"),
    ("nan@3x0", "1 or more"),
    ("nan@3:rnk1", 'did you mean "rank'),
    ("nan@3:rank=x", "rank in"),
    ("nan@3:rank1:rank=2", "gives rank twice"),
    ("nan@3:always:always", "gives always twice"),
    ("nan@3x2,until=4", "until"),
    ("nan@5:until=3", "not be before it"),
    ("nan@3:samples=1-5", "not both"),
    ("nan:samples=5-3", "before its first"),
    ("nan:samples=5", "FIRST-LAST"),
    ("corrupt@3:weight", "name the target and the value"),
    ("corrupt@3:nan", "name the target and the value"),
    ("corrupt:samples=1-2:adam_m:nan", "a step alone"),
    ("corrupt@3:buffer:nan:above=4", "a step alone"),
    ("nan@3:weight", "weight is for corrupt"),
    ("spike@3:factor=inf", "is out of range"),
    ("slow@3:seconds=-1", "is out of range"),
    ("slow@3:seconds=nan", "is out of range"),
    ("kill@3:factor=2", "factor is for spike"),
    ("nan@3:seconds=2", "seconds is for slow and hang and gil"),
    ("nan@3:attempt=0", "counted from 1"),
])  # fmt: skip
def test_nonsense_is_refused_with_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fault.parse(text)
    assert said in caught.value.message
    assert caught.value.next_step


def test_the_same_fault_twice_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="listed twice"):
        parse_faults("nan@3,kill@4,nan@step=3")


# -- in a loss function ---------------------------------------------------------------------------


@dataclass
class Run:
    """What a loss function has at hand."""

    directory: Path
    step_number: int = 0
    rank: int = 0
    world_size: int = 2
    attempt: int = 1
    launch: int = 1


def test_in_a_loss_function_a_fault_strikes_all_micro_batches_of_its_step_once(
    tmp_path: Path,
) -> None:
    run, faults = Run(tmp_path), Faults(["nan@1", "inf@2:rank1"])
    one = torch.ones(())

    def steps(*numbers: int) -> list[bool]:
        found = []
        for run.step_number in numbers:
            found += [bool(faults.loss(one, run, samples=2).isfinite()) for _ in range(2)]
        return found

    assert steps(0, 1, 2) == [True, True, False, False, True, True]
    assert steps(1, 2) == [True] * 4, "again after a rollback"
    run.attempt, faults = 2, Faults(["nan@1", "inf@2:rank1"])
    assert steps(1) == [True, True], "again in the next attempt"


def test_in_a_loss_function_above_is_the_size_of_the_micro_batch(tmp_path: Path) -> None:
    run, faults = Run(tmp_path), Faults("oom@0:above=4:always")
    weight = torch.ones((), requires_grad=True)
    faults.loss(weight * 2, run, samples=4).backward()
    with pytest.raises(torch.OutOfMemoryError, match="an injected fault"):
        faults.loss(weight * 2, run, samples=5).backward()


def test_what_a_loss_function_cannot_reach_is_refused_at_once() -> None:
    for text in ("corrupt@3:weight:nan", "nan:samples=3-9"):
        with pytest.raises(ConfigError, match="loss function"):
            Faults([text])


def test_without_faults_the_loss_is_the_loss(tmp_path: Path) -> None:
    loss = torch.ones(())
    assert Faults().loss(loss, None) is loss
    assert not any(tmp_path.iterdir())
