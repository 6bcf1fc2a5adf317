"""What a line of output tells: its time, its rank, the launch; and errors among lines."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.report.logs.errors import find_errors
from slurm_forge.report.logs.files import outputs_of, rank_of
from slurm_forge.report.logs.lines import (
    AttemptSpan,
    LaunchSpan,
    Line,
    Place,
    Source,
    mark_of,
    rank_in,
    time_of,
)
from slurm_forge.report.logs.merging import LineSelection, merged
from slurm_forge.report.text import printed

UTC = timezone.utc
MOMENT = datetime(2026, 8, 11, 9, 0, 5, tzinfo=UTC)
NOW = MOMENT.timestamp()


@pytest.mark.parametrize(
    "text",
    [
        "2026-08-11 09:00:05,250 INFO x",  # logging
        "[2026-08-11 09:00:05,250][train][INFO] - x",  # Hydra
        "2026-08-11T09:00:05.250Z x",
        "2026-08-11T11:00:05.250+02:00 x",
        "INFO 2026-08-11 09:00:05.250 x",
        "INFO:root: 2026-08-11 09:00:05.250 x",
        "2026-08-11 09:00:05.250 | INFO     | __main__:main:3 - x",  # loguru
        "[rank3]:[E811 x".replace("E811", "E0811")
        and "[rank3]:[E0811 09:00:05.250000 12 p.cpp:3] x",
        "E0811 09:00:05.250000 12 p.py:3] x",  # torchrun
        "INFO 08-11 09:00:05.250 [llm.py:3] x",  # vLLM
        "3: 2026-08-11 09:00:05.250 x",  # srun --label
        "[09:00:05.250] x",
        "09:00:05.250 x",
    ],
)
def test_times_of_loggers(text: str) -> None:
    assert time_of(text, near=NOW + 40, zone=UTC) == pytest.approx(NOW + 0.25)


@pytest.mark.parametrize(
    "text",
    [
        "resumed from the checkpoint of 2026-08-11 09:00:05",
        "step 12 loss 2.5",
        "2026-13-41 09:00:05 x",
        '  File "train.py", line 3',
        "12345678 09:00:05",
        "0 99:99:99 x",
        "",
    ],
)
def test_what_is_no_time_of_the_line(text: str) -> None:
    assert time_of(text, near=NOW, zone=UTC) is None


def test_slurm_says_when_at_the_end() -> None:
    for name in ("slurmstepd", "slurmstepd-n1"):
        text = f"{name}: error: *** JOB 3 ON n1 CANCELLED AT 2026-08-11T09:00:05 DUE TO TIME"
        assert time_of(text, near=NOW, zone=UTC) == NOW


def test_a_time_of_day_after_midnight_and_a_line_of_last_december() -> None:
    midnight = datetime(2026, 8, 12, tzinfo=UTC).timestamp()
    assert time_of("00:00:01 x", near=midnight - 5, zone=UTC) == midnight + 1
    assert time_of("23:59:59 x", near=midnight + 5, zone=UTC) == midnight - 1
    december = datetime(2025, 12, 31, 23, 0, tzinfo=UTC).timestamp()
    assert time_of("E1231 23:00:00.0 x", near=december + 7200, zone=UTC) == december


@given(st.text(max_size=200), st.floats(allow_nan=True, allow_infinity=True))
def test_any_text_is_read(text: str, near: float) -> None:
    time_of(text, near=near, zone=UTC)
    rank_in(text, 8)
    mark_of(text)
    assert printed(text).isprintable()


@given(st.integers(946684800, 4102444800), st.integers(-720, 720))
def test_every_time_with_an_offset_is_read(moment: int, minutes: int) -> None:
    aware = datetime.fromtimestamp(moment, timezone(timedelta(minutes=minutes)))
    text = aware.isoformat(sep=" ", timespec="microseconds")
    assert time_of(f"{text} INFO x", near=0.0) == pytest.approx(aware.timestamp(), abs=1e-3)


def test_ranks_in_lines() -> None:
    assert rank_in("[rank12]: Traceback", 0) == 12
    assert rank_in(" 3: step", 8) == 3
    assert rank_in("9: of a numbered list", 8) is None
    assert rank_in("step 3: x", 8) is None


def test_ranks_and_jobs_of_files() -> None:
    assert rank_of("a/77_3_log.err") == 3
    assert rank_of("a/901_2_5_log.out.gz") == 5
    assert rank_of("a/tiny-77.out") is None
    logs = ("a/x-904.out", "a/x-12.out", "a/77_0_log.err")
    files = outputs_of(["901_3", "12", "local-77"], logs)
    assert files == {"901_3": logs[:1], "12": logs[1:2], "local-77": logs[2:]}


def source(*launches: LaunchSpan, path: str = "x") -> Source:
    return Source(path, (AttemptSpan(1, "7", NOW, launches),), written=NOW + 100)


def read(place: Place, *texts: str) -> list[Line]:
    return [line for line in map(place.read, texts) if line is not None]


def test_lines_without_a_time_stay_behind_the_one_before() -> None:
    place = Place.at_beginning(source(LaunchSpan(1, NOW + 3)), now=NOW + 100, zone=UTC)
    lines = read(place, "a", "2026-08-11 09:00:15 b", "c", "2026-08-11 09:00:10 late", "d")
    assert [line.time - NOW for line in lines] == [3, 10, 10, 10, 10]
    # A time that is yet to come is not when the line was written.
    assert read(place, "2026-08-12 09:00:00 the reservation begins")[0].time == NOW + 10


def test_the_end_of_a_file_begins_where_its_lines_show() -> None:
    spans = tuple(
        AttemptSpan(n, "7", NOW + 100 * n, (LaunchSpan(1, NOW + 100 * n),)) for n in (1, 2, 3)
    )
    file = Source("x", spans, written=NOW + 1000)

    def attempts(*texts: str) -> list[int]:
        place = Place.within(file, texts, now=NOW + 1000, zone=UTC)
        return [line.attempt for line in read(place, *texts)]

    assert attempts("a", "slurm_forge: launch 3.1", "b") == [2, 3]
    assert attempts("a", "slurm_forge: launch 2.2", "b") == [2, 2]
    assert attempts("a", "b") == [3, 3]
    assert attempts("2026-08-11 09:03:30 a", "2026-08-11 09:05:06 b") == [2, 3]


@given(st.lists(st.lists(st.floats(0, 1e6), max_size=20), max_size=5))
def test_merged_lines_are_all_there_and_each_file_keeps_its_order(times: list[list[float]]) -> None:
    files = []
    for index, each in enumerate(times):
        of = source(path=str(index))
        ordered = sorted(each)
        files.append([Line(str(n), of, 1, 1, None, time) for n, time in enumerate(ordered)])
    stream = list(merged(files, LineSelection(1)))
    assert sorted(line.time for line in stream) == [line.time for line in stream]
    for lines in files:
        assert (
            [line for line in stream if line.source.path == lines[0].source.path] == lines
            if (lines)
            else True
        )


def errors(text: str) -> list[list[str]]:
    lines = [Line(each, source(), 1, 1, 0, NOW) for each in text.split("\n")]
    return [[line.text for line in block.lines] for block in find_errors(lines)]


def test_exceptions_that_led_to_each_other_are_one_error() -> None:
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: a'
    cause = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    text = f"before\n{trace}{cause}{trace.replace('Value', 'Type')}\nafter"
    assert errors(text) == [text.split("\n")[1:-1]]
    assert len(errors(f"{trace}\nin between\n{trace}")) == 2


def test_a_known_line_is_shown_with_its_neighbours() -> None:
    text = "\n".join(
        ["a", "b", "c", "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off", "d", "e"]
    )
    assert errors(text) == [text.split("\n")[1:6]]
    assert errors("nothing\nto see") == []
