"""Random states survive a round trip bit for bit, as tensors, or are refused."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import CheckpointError
from slurm_forge.training.core import host_generators, rng
from slurm_forge.training.core.host_generators import (
    HostGenerator,
    HostGenerators,
    SampleRandomness,
)


def draw() -> list[float]:
    """Numbers from every generator, through the calls that keep something back."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
    ]


@pytest.fixture(autouse=True)
def seeded():
    with rng.preserved():
        rng.derive(1, 2, 3)
        yield


@given(st.integers(0, 9))
def test_restored_generators_go_on_exactly_where_they_were(drawn_before):
    for _ in range(drawn_before):
        draw()
    random.gauss(0, 1), numpy.random.randn()  # half a pair each is now held back
    state = rng.capture()
    expected = [draw() for _ in range(3)]
    rng.derive(9, 9, 9)
    assert rng.restore(state) == ()
    assert [draw() for _ in range(3)] == expected


def test_a_captured_state_is_tensors_that_later_draws_do_not_change():
    state = rng.capture()
    before = {name: tensor.clone() for name, tensor in state.items()}
    draw()
    assert set(state) == {"python", "numpy", "torch"}
    for name, tensor in state.items():
        assert tensor.dtype in (torch.int64, torch.uint8)
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, before[name])


def broken(change) -> dict[str, torch.Tensor]:
    state = dict(rng.capture())
    change(state)
    return state


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("torch"),
        lambda s: s.pop("python"),
        lambda s: s.update(other=torch.zeros(1)),
        lambda s: s.update(torch=s["torch"][:-1]),
        lambda s: s.update(torch=s["torch"].to(torch.int64)),
        lambda s: s.update(python=s["python"].to(torch.float64)),
        lambda s: s.update(numpy=s["numpy"].reshape(1, -1)),
        lambda s: s.update(python="no tensor"),
        lambda s: s.update(python=torch.cat([torch.tensor([9]), s["python"][1:]])),
        lambda s: s.update(python=torch.cat([s["python"][:1], -s["python"][1:]])),
        lambda s: s.update(numpy=torch.full_like(s["numpy"], -1)),
    ],
)
def test_what_capture_does_not_write_is_refused(change):
    with pytest.raises(CheckpointError):
        rng.restore(broken(change))


def test_refusing_for_a_shape_leaves_every_generator_alone():
    state = rng.capture()
    bad = {**state, "numpy": torch.zeros(3)}
    expected = draw()
    rng.restore(state)
    with pytest.raises(CheckpointError):
        rng.restore(bad)
    assert draw() == expected


def test_generators_of_another_kind_of_machine_are_named():
    state = {**rng.capture(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert rng.restore(state) == ("cuda",)
    # The name that a backend of somebody else's has given its device, which is not installed here.
    state["npu"] = state.pop("cuda")
    assert rng.restore(state) == ("npu",)


def test_derived_states_repeat_and_differ_by_step_and_rank():
    def drawn(*which):
        rng.derive(*which)
        return tuple(draw())

    seen = [drawn(*which) for which in [(0, 5, 1), (0, 5, 2), (0, 6, 1), (1, 5, 1)]]
    assert len(set(seen)) == 4
    assert len({value for numbers in seen for value in numbers}) == 4 * len(seen[0])
    assert drawn(0, 5, 1) == seen[0]


def test_randomness_of_a_sample_depends_on_its_identity_alone():
    def drawn(seed, *which, **how):
        randomness = SampleRandomness(seed)
        randomness.use_all()
        (randomness.begin_collate if how else randomness.begin)(*which)
        return tuple(draw())

    first = drawn(0, 3, 7)
    draw()
    assert drawn(0, 3, 7) == first
    others = [drawn(0, 3, 8), drawn(0, 4, 7), drawn(1, 3, 7), drawn(0, 3, 7, collate=True)]
    assert len({first, *others}) == 5


def test_preserved_gives_the_caller_its_states_back_after_an_error_too():
    random.gauss(0, 1), numpy.random.randn()
    state = rng.capture()
    expected = draw()
    rng.restore(state)
    with pytest.raises(KeyError), rng.preserved():
        draw()
        raise KeyError
    assert draw() == expected


DRAWS = {
    HostGenerator.PYTHON: [random.random, lambda: random.gauss(0, 1), lambda: random.seed(1)],
    HostGenerator.TORCH: [lambda: torch.rand(1), lambda: torch.randn(1)],
    HostGenerator.NUMPY: [numpy.random.rand, numpy.random.randn, lambda: numpy.random.seed(1)],
}


@pytest.mark.parametrize("which", [HostGenerator.PYTHON, HostGenerator.NUMPY])
def test_a_normal_number_held_back_over_the_same_words_is_noticed(which):
    """Seeded again, the words and the position in them are those of before; what is held is not."""
    uniform, normal, seed = DRAWS[which]
    generators = HostGenerators()
    seed(), normal(), uniform(), normal()
    states = generators.states()
    seed(), normal(), uniform()
    assert generators.drawn(states) == {which}


@given(
    st.lists(st.tuples(st.sampled_from(HostGenerator), st.integers(0, 2)), max_size=6),
    st.lists(st.tuples(st.sampled_from(HostGenerator), st.integers(0, 2)), max_size=6),
)
def test_what_is_drawn_from_is_known_and_put_back(earlier, later):
    def play(draws):
        for which, number in draws:
            DRAWS[which][number % len(DRAWS[which])]()

    generators = HostGenerators()
    generators.states()
    play(earlier)  # a normal number may be held back now, which leaves no trace when it is drawn
    before, states = rng.capture(), generators.states()
    assert generators.drawn(states) == frozenset()
    play(later)
    after = rng.capture()
    changed = {
        which for which in HostGenerator if not (after[which.value] == before[which.value]).all()
    }
    assert generators.drawn(states) == changed
    assert generators.put_back(states) == changed
    assert all((rng.capture()[name] == before[name]).all() for name in before)
    assert generators.drawn(states) == frozenset()


@pytest.mark.parametrize("kind", HostGenerator)
def test_no_state_is_copied_where_nothing_was_drawn(kind, monkeypatch):
    generators = HostGenerators()
    random.setstate(random.getstate())
    numpy.random.set_state(numpy.random.get_state())
    torch.default_generator.set_state(torch.default_generator.get_state())
    before = generators.states()
    watch = getattr(generators, f"_{kind.value}")
    monkeypatch.setattr(watch, "_copy", lambda: pytest.fail(f"{kind} was copied"))
    assert generators.states() == before
    assert generators.are_unchanged(before)


@pytest.mark.parametrize("kind", HostGenerator)
def test_where_its_memory_is_not_known_a_generator_is_copied_each_time(kind, monkeypatch):
    monkeypatch.setattr(host_generators, f"_reader_of_{kind.value}", lambda *_: bytes)
    generators = HostGenerators()
    before = generators.states()
    assert generators.are_unchanged(before)
    expected = draw()
    assert generators.drawn(before) == frozenset(HostGenerator)
    generators.put_back(before)
    assert generators.are_unchanged(before)
    assert draw() == expected


@pytest.mark.parametrize("places", [[None, None], [64, 128]])
def test_memory_that_is_not_as_expected_is_not_read(places, monkeypatch):
    found = iter(places)
    monkeypatch.setattr(host_generators, "_place_of_words", lambda _: next(found))
    assert host_generators._reader_of_torch(torch.default_generator) is bytes


def test_a_generator_of_numpy_that_was_exchanged_is_watched_as_well():
    mine = numpy.random.get_bit_generator()
    generators = HostGenerators()
    try:
        for kind in (numpy.random.MT19937, numpy.random.PCG64):
            before = generators.states()
            numpy.random.set_bit_generator(kind(3))
            assert generators.drawn(before) == {HostGenerator.NUMPY}
            states = generators.states()
            first = numpy.random.rand()
            assert HostGenerator.NUMPY in generators.drawn(states)
            generators.put_back(states)
            assert numpy.random.rand() == first
    finally:
        numpy.random.set_bit_generator(mine)
