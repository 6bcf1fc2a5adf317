from __future__ import annotations

import json

import pytest

from slurm_forge.documents import build, build_plain, dump, load
from slurm_forge.errors import ConfigError
from slurm_forge.spec.safeguards import EnvironmentSpec, Policy


def test_what_is_left_out_is_left_to_the_default() -> None:
    spec = build(EnvironmentSpec, load("torch: refuse\ndriver: ignore\npython:\n"))
    assert (spec.of("torch"), spec.of("driver")) == (Policy.REFUSE, Policy.IGNORE)
    assert spec.of("python") is spec.of("gpu") is spec.of("never_heard_of") is None
    assert spec.of("of") is spec.of("known_as") is None


def test_it_is_written_and_read_back_equal() -> None:
    spec = build_plain(EnvironmentSpec, {"data": "warn", "code": Policy.REFUSE})
    assert build(EnvironmentSpec, load(dump(spec.model_dump(mode="json")))) == spec
    assert EnvironmentSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pythn: warn", 'e:1: pythn: unknown key (did you mean "python"?)'),
        ("git: warn", 'e:1: git: unknown key (did you mean "code"?)'),
        ("pytorch: warn", 'e:1: pytorch: unknown key (did you mean "torch"?)'),
        ("args: warn", 'e:1: args: unknown key (did you mean "job"?)'),
        (
            "gpu: warn\ntorch: refused",
            'e:2: torch: unknown value "refused" (did you mean "refuse"?)',
        ),
        ("torch: fail", 'e:1: torch: unknown value "fail" (known here: ignore, warn, refuse)'),
        ("torch: true", "e:1: torch: expected one of ignore, warn, refuse, got true"),
        (
            "CUDA_HOME: /usr",
            'e:1: CUDA_HOME: environment variables of the job are written under "env"',
        ),
    ],
)
def test_a_mistake_is_told_with_the_way_out(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(EnvironmentSpec, load(text, "e"))
    assert str(caught.value) == message


def test_editors_are_told_the_words() -> None:
    schema = json.dumps(EnvironmentSpec.model_json_schema())
    assert '"enum": ["ignore", "warn", "refuse"]' in schema
