from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge import units

SECONDS = st.integers(min_value=0, max_value=10**9)
EXACT = st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=999_999))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("0", 0),
        ("90:00", 5400),
        ("12:30", 750),
        ("48:00:00", 172_800),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-02:03:04", 93_784),
        (" 00:10:00 ", 600),
    ],
)
def test_slurm_durations_mean_what_the_sbatch_man_page_says(text: str, seconds: int) -> None:
    assert units.parse_slurm_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["UNLIMITED", "INFINITE", "infinite", "-1"])
def test_no_limit_is_none(text: str) -> None:
    assert units.parse_slurm_duration(text) is None


def test_sacct_fractions_are_kept() -> None:
    assert units.parse_slurm_duration("00:01.250") == timedelta(seconds=1.25)


@pytest.mark.parametrize(
    "text",
    ["", "1:2:3:4", "1-", "-5", "INVALID", "NOT_SET", "1h", "٣٠", "1-2-3", "1:2:\n3", "1.5"],
)
def test_what_is_not_a_slurm_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Slurm duration"):
        units.parse_slurm_duration(text)


@given(SECONDS)
def test_slurm_durations_round_trip(seconds: int) -> None:
    value = timedelta(seconds=seconds)
    assert units.parse_slurm_duration(units.format_slurm_duration(value)) == value


@given(EXACT)
def test_a_limit_is_never_shortened_and_by_less_than_a_second_lengthened(value: timedelta) -> None:
    back = units.parse_slurm_duration(units.format_slurm_duration(value))
    assert back is not None
    assert timedelta(0) <= back - value < timedelta(seconds=1)


def test_no_limit_round_trips() -> None:
    assert units.format_slurm_duration(None) == "UNLIMITED"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("60s", timedelta(seconds=60)),
        ("10m", timedelta(minutes=10)),
        ("2h", timedelta(hours=2)),
        ("1d", timedelta(days=1)),
        ("1h30m", timedelta(minutes=90)),
        ("0.5s", timedelta(milliseconds=500)),
        ("1.5h", timedelta(minutes=90)),
        ("48:00:00", timedelta(hours=48)),
        ("12:30", timedelta(minutes=12, seconds=30)),
        ("2-12", timedelta(days=2.5)),
        (timedelta(seconds=3), timedelta(seconds=3)),
    ],
)
def test_durations_in_our_files(text: object, value: timedelta) -> None:
    assert units.parse_duration(text) == value


@pytest.mark.parametrize("bare", [30, "30", 1.5])
def test_a_number_without_unit_is_refused_with_both_ways_to_write_it(bare: object) -> None:
    with pytest.raises(ValueError, match=rf'no unit; write "{bare}s" for seconds or "{bare}m"'):
        units.parse_duration(bare)


@pytest.mark.parametrize("wrong", ["", "10 minutes", "5w", "m", None, True, [1], "30m1h", "1e3s"])
def test_what_is_not_a_duration_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="is not a duration; write it like"):
        units.parse_duration(wrong)


def test_too_fine_and_negative_durations_are_refused() -> None:
    with pytest.raises(ValueError, match="finer than a microsecond"):
        units.parse_duration("0.0000001s")
    with pytest.raises(ValueError, match="never negative"):
        units.parse_duration(timedelta(seconds=-1))


@given(EXACT)
def test_durations_round_trip_to_the_microsecond(value: timedelta) -> None:
    assert units.parse_duration(units.format_duration(value)) == value


def test_durations_are_written_short() -> None:
    assert units.format_duration(timedelta(minutes=90)) == "1h30m"
    assert units.format_duration(timedelta(0)) == "0s"
    assert units.format_duration(timedelta(seconds=0.5)) == "0.5s"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1500M", 1500 * units.MIB),
        ("4G", 4 * 1024 * units.MIB),
        ("4g", 4 * 1024 * units.MIB),
        ("1500", 1500 * units.MIB),
        (1500, 1500 * units.MIB),
        ("2048K", 2 * units.MIB),
        ("1.5G", 1536 * units.MIB),
        ("1T", 1024**4),
        ("0", 0),
    ],
)
def test_memory_sizes(text: object, size: int) -> None:
    assert units.parse_memory(text) == size


@pytest.mark.parametrize("wrong", ["", "-1", "4X", "four", None, True, 1.5, [4], "4 G", "٤G"])
def test_what_is_not_a_memory_size_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="is not a memory size"):
        units.parse_memory(wrong)


def test_the_common_long_unit_gets_the_short_one_as_hint() -> None:
    with pytest.raises(ValueError, match=r'write it like "4G"$'):
        units.parse_memory("4GB")


@given(st.integers(min_value=0, max_value=2**40))
def test_memory_round_trips_in_whole_kib(kib: int) -> None:
    size = kib * units.KIB
    assert units.parse_memory(units.format_memory(size)) == size


@given(st.integers(min_value=0, max_value=2**50))
def test_a_memory_limit_is_never_lowered(size: int) -> None:
    assert 0 <= units.parse_memory(units.format_memory(size)) - size < units.KIB


def test_memory_is_written_in_the_largest_exact_unit() -> None:
    assert [units.format_memory(units.parse_memory(t)) for t in ("4096M", "1500M", "1000K")] == [
        "4G",
        "1500M",
        "1000K",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("180 GB/s", 180 * 10**9),
        ("180GB/s", 180 * 10**9),
        ("1.2 TB/s", 1_200_000_000_000),
        ("400 Gbit/s", 50 * 10**9),
        (" 12.5 MB/s ", 12_500_000),
    ],
)
def test_bandwidths(text: str, value: int) -> None:
    assert units.parse_bandwidth(text) == value


@pytest.mark.parametrize(
    "value",
    ["180", 180, None, "180 Gb/s", "180 GiB/s", "-1 GB/s", "0 GB/s", "", "GB/s", "1e3 GB/s", True],
)
def test_what_is_no_bandwidth(value: object) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        units.parse_bandwidth(value)


@given(st.integers(1, 10**15))
def test_a_bandwidth_comes_back(value: int) -> None:
    assert units.parse_bandwidth(units.format_bandwidth(value)) == value
