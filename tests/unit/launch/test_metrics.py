"""Step, loss and gradient norm, as programs of several frameworks print them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_forge.journal.events import Logged, Progress, Resumed
from slurm_forge.launch.command.checkpoint_files import CheckpointWatch, resumable
from slurm_forge.launch.command.metrics import (
    LineMetrics,
    LineParser,
    MetricHistory,
    MetricJournal,
    non_finite_output,
)
from slurm_forge.launch.command.program_process import LineSplitter
from slurm_forge.spec.launchers import ProgramSpec
from slurm_forge.spec.metric_patterns import PRESETS, check_metric_pattern, metric_patterns
from slurm_forge.vocabulary.plan import AbandonedCheckpoints, RecoveryPlan


def history_of(lines: Sequence[str], *given_patterns: str) -> MetricHistory:
    patterns = metric_patterns(given_patterns)
    assert patterns is not None
    parser, history = LineParser(patterns), MetricHistory()
    for line in lines:
        history = history.after(parser.parse(line), line)
    return history


NAN = math.nan

#: As printed by transformers 5, Lightning 2.6 (tqdm, rich), Keras 3, torchtitan, KempnerForge.
SAMPLES = {
    "hf": (
        "Loading weights: 100%|██████████| 20/20 [00:00<00:00, 999.0it/s]",
        "  0%|          | 0/500 [00:00<?, ?it/s]",
        "  8%|▊         | 40/500 [00:01<00:50,  9.8it/s]",
        "                                                 ",
        "{'loss': '2.5', 'grad_norm': '1.25', 'learning_rate': '5e-05', 'epoch': '0.4'}",
        " 50%|█████     | 10/20 [00:00<00:00, 50.0it/s]",
        "{'eval_loss': '9', 'eval_runtime': '0.1', 'epoch': '0.4'}",
    ),
    "lightning": (
        "Epoch 0:  50%|█████     | 5/10 [00:00<00:00, 50.0it/s, v_num=0, train_loss=9.500]",
        "Validation DataLoader 0: 50%|█████     | 7/10 [00:00<00:00]",
        "Epoch 3: 100%|██████████| 10/10 [00:00<00:00, 50.0it/s, v_num=0, train_loss=2.5, "
        "val_loss=7.0]",
    ),
    "keras": (
        "Epoch 1/4",
        "\x1b[1m10/10\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m\x1b[0m 0s 5ms/step - loss: 9",
        "Epoch 4/4",
        "\x08\x08\x1b[1m10/10\x1b[0m \x1b[32m━━━━\x1b[0m 0s 5ms/step - "
        "loss: 2.5000 - val_loss: 7.0",
    ),
    "torchtitan": (
        "[titan] 2026-11-01 10:00:00,100 - root - INFO - \x1b[31mstep: 40  \x1b[32mloss:  2.5000  "
        "\x1b[38;2;180;60;0mgrad_norm:  1.2500  \x1b[36mmemory:  1.2GiB(1.5%)\x1b[39m",
    ),
    "kempnerforge": (
        "[rank 0] INFO     [step 40] loss=2.5000 | lr=2.74e-04 | grad_norm=1.250 | tok/s=29,810",
    ),
    "plain": ("step: 40, train_loss=2.5, Grad Norm 1.25, val_loss 7.0",),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_read_what_their_frameworks_print(preset: str) -> None:
    history = history_of(SAMPLES[preset], preset)
    assert history.step == 40
    assert history.loss == 2.5
    assert history.grad_norm == (
        1.25 if PRESETS[preset].grad_norm and "norm" in str(SAMPLES[preset]).lower() else None
    )
    assert history.bad == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_see_nan_and_infinity(preset: str) -> None:
    for word in ("nan", "inf"):
        lines = [line.replace("2.5000", word).replace("2.5", word) for line in SAMPLES[preset]]
        history = history_of(lines, preset)
        assert history.bad == 1
        assert history.loss_bad
        assert history.loss in (None, 9.5, 9.0), "the last finite one"


def test_one_pattern_of_ones_own_beside_a_preset() -> None:
    history = history_of(["it 12 objective 0.5 loss 3"], "plain", r"loss=objective (\S+)")
    assert history.loss == 0.5
    assert history_of(["at 1,200: x"], r"step=at ([\d,]+)").step == 1200


def test_a_step_counts_once_however_many_ranks_print_it() -> None:
    lines = [f"step {step} loss nan" for step in (5, 6) for _ in range(8)]
    history = history_of(lines, "plain")
    assert (history.bad, history.onset, history.at) == (2, 5, 6)


def test_one_bad_rank_among_good_ones_is_bad() -> None:
    lines = [
        f"step {n} loss {'nan' if rank == 1 else 2.0}" for n in range(3, 6) for rank in (0, 1, 2)
    ]
    history = history_of(["step 2 loss 1.0", *lines], "plain")
    assert (history.bad, history.onset, history.healthy) == (3, 3, 2)


def test_what_a_rank_that_is_behind_prints_changes_nothing() -> None:
    history = history_of(["step 9 loss nan", "step 8 loss 1.0"], "plain")
    assert history.bad == 1


def test_a_good_step_ends_the_row() -> None:
    lines = ["step 1 loss nan", "step 2 loss nan", "step 3 loss 1", "step 4 loss nan"]
    history = history_of(lines, "plain")
    assert (history.bad, history.onset) == (1, 4)
    assert non_finite_output(history, 3, ended=False) is None
    trouble = non_finite_output(history, 3, ended=True)
    assert trouble is not None, "it ended with a loss that is none"
    assert trouble.step == 4


def test_a_gradient_norm_that_overflows_at_the_end_is_no_trouble() -> None:
    """A loss scaler skips such a step."""
    history = history_of(["step 1 loss 1.0 grad_norm inf"], "plain")
    assert history.bad == 1
    assert non_finite_output(history, 3, ended=True) is None


def test_of_a_trainer_that_filters_losses_the_gradient_norm_tells() -> None:
    """logging_nan_inf_filter of transformers: the loss is printed as 0."""
    lines = ["{'loss': '0', 'grad_norm': 'nan', 'epoch': '1'}"] * 3
    trouble = non_finite_output(history_of(lines, "hf"), 3, ended=False)
    assert trouble is not None
    assert "3 times in a row" in trouble.text


@pytest.mark.parametrize(
    ("lines", "number", "step"),
    [
        (["step 1", "step 2"], None, 0),
        (["step 10", "step 20"], None, 0),
        (["step 41", "step 42"], 40, 40),
        (["step 50", "step 60"], 45, 45),
        # The number of Lightning's hpc_ckpt_1 counts saves.
        (["step 41", "step 42"], 1, 40),
        (["step 41"], 40, None),
    ],
)
def test_where_a_start_went_on(lines: list[str], number: int | None, step: int | None) -> None:
    assert history_of(lines, "plain").resumed_at(number) == step


def test_what_is_written_down() -> None:
    journal = MetricJournal(0.0, 40, "checkpoint-40")
    history = history_of(["step 41 loss 2"], "plain")
    assert not list(journal.events(history, 1.0, ended=False)), "where it began is not known yet"
    history = history_of(["step 41 loss 2", "step 42 loss 3"], "plain")
    assert list(journal.events(history, 1.0, ended=False)) == [
        Resumed(step=40, checkpoint="checkpoint-40", world_size=0),
        Progress(step=42),
        Logged(step=42, values={"loss": 3.0}),
    ]
    later = history_of(["step 41 loss 2", "step 42 loss 3", "step 43 loss nan"], "plain")
    assert not list(journal.events(later, 1.5, ended=False)), "not every line"
    assert list(journal.events(later, 1.6, ended=True)) == [
        Progress(step=43),
        Logged(step=43, values={"loss": 3.0}),
    ]
    assert not list(journal.events(later, 9.0, ended=True)), "nothing is new"


#: Anything a program may print, with pieces of what is looked for.
LINES = st.lists(
    st.one_of(
        st.text(max_size=60),
        st.sampled_from([line for lines in SAMPLES.values() for line in lines]),
        st.builds(
            "step {} loss {} grad_norm {}".format,
            st.integers(-5, 10**20),
            st.floats(),
            st.one_of(st.floats(), st.text(max_size=5)),
        ),
    ),
    max_size=12,
)


@settings(max_examples=30)
@given(lines=LINES, preset=st.sampled_from(sorted(PRESETS)))
def test_no_output_is_too_strange(lines: list[str], preset: str) -> None:
    patterns = metric_patterns((preset,))
    assert patterns is not None
    parser, history = LineParser(patterns), MetricHistory()
    for line in lines:
        found = parser.parse(line)
        after = history.after(found, line)
        assert after.step is None or after.step >= 0
        assert (after.step or 0) >= (history.step or 0), "a step is never taken back"
        assert all(x is None or math.isfinite(x) for x in (after.loss, after.grad_norm))
        assert 0 <= after.bad <= history.bad + 1
        assert after.bad == 0 or not after.at_bad or after.text or not line.strip()
        assert len(after.text) <= 300
        if found == LineMetrics():
            assert after == history
        history = after


@given(steps=st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=30))
def test_a_row_is_what_its_steps_say(steps: list[tuple[int, bool]]) -> None:
    """Against the plainest way to say it: the bad steps at the end of all that were printed."""
    ordered = sorted(dict(steps).items())
    lines = [f"step {step} loss {'nan' if bad else 1.0}" for step, bad in ordered]
    history = history_of(lines, "plain")
    row = 0
    for _, bad in reversed(ordered):
        if not bad:
            break
        row += 1
    # A good step ends a row once the next one is there: another rank may still say otherwise.
    assert history.bad == row or (history.at_bad is False and row == 0)
    if row:
        assert history.onset == ordered[-row][0]


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_lines_are_bounded_and_do_not_depend_on_how_they_arrive(
    data: bytes, cuts: list[int]
) -> None:
    def lines_of(parts: Sequence[bytes]) -> list[str]:
        lines: list[str] = []
        splitter = LineSplitter(lines.append)
        for part in parts:
            splitter.add(part)
        splitter.end()
        return [line for line in lines if line]

    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[a:b] for a, b in itertools.pairwise(places)]
    assert lines_of(parts) == lines_of([data])
    assert all(len(line) <= 4096 for line in lines_of([data * 50]))


# -- the checkpoints beside it ---------------------------------------------------------------------


def spec(**options: object) -> ProgramSpec:
    given_options = {"checkpoint_glob": "out/c-*", "resume_arg": "--from {latest}", **options}
    return ProgramSpec.model_validate(given_options)


def write(path: Path, at: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, ns=(at, at))


def test_good_is_what_was_trained_past(tmp_path: Path) -> None:
    write(tmp_path / "out/c-10", 1)
    watch = CheckpointWatch(spec(), tmp_path, RecoveryPlan())
    assert not watch.found(None).good, "nothing was trained past it"
    write(tmp_path / "out/c-20", 2)
    watch.sample(19)
    assert [each.name for each in watch.found(19).good] == ["c-10"]
    assert [each.name for each in watch.found(25).good] == ["c-20", "c-10"]
    write(tmp_path / "out/c-30", 3)
    found = watch.found(25)
    assert [each.name for each in found.good] == ["c-20", "c-10"]
    assert found.newest_ns == 3
    write(tmp_path / "out/c-20", 4)
    assert [each.name for each in watch.found(25).good] == ["c-10"], "it was written again"


def test_a_checkpoint_of_the_step_before_a_bad_one_is_not_good(tmp_path: Path) -> None:
    """The figure of step 40 is that before the update that c-40 holds."""
    watch = CheckpointWatch(spec(), tmp_path, RecoveryPlan())
    for number in (10, 40):
        write(tmp_path / f"out/c-{number}", number)
        watch.sample(number - 1, number)
    assert [each.name for each in watch.found(40, 41).good] == ["c-10"]
    assert [each.name for each in watch.found(41, 42).good] == ["c-40", "c-10"]


def test_checkpoints_that_are_ahead_of_a_slow_output_are_not_good(tmp_path: Path) -> None:
    """A program that writes into a pipe keeps back what it prints."""
    watch = CheckpointWatch(spec(), tmp_path, RecoveryPlan())
    watch.sample(4, 4)
    for number in (5, 10, 25, 30):
        write(tmp_path / f"out/c-{number}", number)
    watch.sample(7, 7)
    assert [each.name for each in watch.found(21, 26).good] == ["c-10", "c-5"]


def test_numbers_that_are_no_steps_are_good_by_their_time(tmp_path: Path) -> None:
    watch = CheckpointWatch(spec(), tmp_path, RecoveryPlan())
    write(tmp_path / "out/c-4096000", 1)
    watch.sample(10, 10)
    assert [each.name for each in watch.found(20, 22).good] == ["c-4096000"]


def test_what_goes_bad_at_once_goes_back_to_before_what_it_resumed_from(tmp_path: Path) -> None:
    for number in (10, 20, 30):
        write(tmp_path / f"out/c-{number}", number)
    watch = CheckpointWatch(spec(), tmp_path, RecoveryPlan())
    assert [each.name for each in watch.found(None).good] == ["c-20", "c-10"]
    (tmp_path / "out/c-20").unlink()
    (tmp_path / "out/c-10").unlink()
    assert "c-30" in watch.found(None).refusal


def test_of_lightnings_checkpoints_the_time_decides(tmp_path: Path) -> None:
    """One number counts saves, the other steps."""
    lightning = spec(convention="lightning", checkpoint_glob="out/step=*.ckpt")
    write(tmp_path / "out/step=400.ckpt", 1)
    write(tmp_path / "hpc_ckpt_3.ckpt", 2)
    watch = CheckpointWatch(lightning, tmp_path, RecoveryPlan())
    (older,) = watch.found(None).good
    left = AbandonedCheckpoints(older.name, older.number, older.changed_ns, until_ns=2)
    usable = resumable(lightning, tmp_path, RecoveryPlan(abandoned=(left,)))
    assert [each.path.name for each in usable] == ["step=400.ckpt"]


def test_a_number_that_is_no_step_does_not_vouch(tmp_path: Path) -> None:
    watch = CheckpointWatch(spec(), tmp_path, RecoveryPlan())
    watch.sample(100)
    write(tmp_path / "out/c-2", 1)
    write(tmp_path / "out/c-150", 2)
    assert [each.name for each in watch.found(200).good] == ["c-150"]


def test_what_a_rollback_left_behind_is_not_resumed_from(tmp_path: Path) -> None:
    for number in (10, 20, 30):
        write(tmp_path / f"out/c-{number}", number)
    left = AbandonedCheckpoints("c-10", 10, 10, until_ns=30)
    plan = RecoveryPlan(abandoned=(left,))
    assert [f.path.name for f in resumable(spec(), tmp_path, plan)] == ["c-10"]
    write(tmp_path / "out/c-20", 31)
    assert [f.path.name for f in resumable(spec(), tmp_path, plan)] == ["c-20", "c-10"]
    start = RecoveryPlan(abandoned=(AbandonedCheckpoints("", -1, 0, until_ns=30),))
    assert [f.path.name for f in resumable(spec(), tmp_path, start)] == ["c-20"]


def test_lightning_s_own_checkpoint_is_among_them_by_time(tmp_path: Path) -> None:
    lightning = spec(convention="lightning", checkpoint_glob="logs/*/ck-step=*.ckpt")
    write(tmp_path / "logs/v0/ck-step=25.ckpt", 25)
    write(tmp_path / "hpc_ckpt_1.ckpt", 42)
    newest, other = resumable(lightning, tmp_path, RecoveryPlan())
    assert (newest.path.name, other.path.name) == ("hpc_ckpt_1.ckpt", "ck-step=25.ckpt")
    write(tmp_path / "logs/v1/ck-step=50.ckpt", 50)
    assert resumable(lightning, tmp_path, RecoveryPlan())[0].path.name == "ck-step=50.ckpt"
    # Of another convention it is just a file.
    plain = spec(checkpoint_glob="logs/*/ck-step=*.ckpt")
    assert len(resumable(plain, tmp_path, RecoveryPlan())) == 2
    # default_root_dir may be any folder above the pattern's.
    write(tmp_path / "logs/hpc_ckpt_2.ckpt", 60)
    assert resumable(lightning, tmp_path, RecoveryPlan())[0].path.name == "hpc_ckpt_2.ckpt"


def test_a_program_that_can_not_be_told(tmp_path: Path) -> None:
    for options, words in (
        ({"checkpoint_glob": None, "resume_arg": None}, "--checkpoint-glob does not say"),
        ({"resume_arg": None}, "chooses its checkpoint itself"),
    ):
        watch = CheckpointWatch(spec(**options), tmp_path, RecoveryPlan())
        assert words in watch.found(5).refusal


@pytest.mark.parametrize("pattern", [r"loss=^(?:[\w:]+\s*)+loss: (\S+)", r"loss=(?:a|b*)*(\d+)x"])
def test_a_pattern_that_can_take_forever_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="repeats a repetition"):
        check_metric_pattern(pattern)


def test_a_count_that_begins_anew_with_an_epoch_hides_nothing() -> None:
    first = [f"step {n} loss 2.3" for n in range(0, 1000, 10)]
    found = history_of([*first, *(f"step {n} loss nan" for n in range(0, 50, 10))], "plain")
    assert found.bad == 5
    found = history_of([*first, "step 0 loss nan", "step 10 loss 2.2", "step 20 loss nan"], "plain")
    assert found.bad == 1


def test_a_bar_before_training_is_not_that_of_training() -> None:
    bars = [f" {n}%|##  | {n}/10 [00:01" for n in range(1, 11)]
    steps = [f" {n}%|##  | {n}/500 [00:01" for n in range(200)]
    assert history_of([*bars, *steps], "hf").step == 199


@pytest.mark.parametrize("end", ["]", ".", ")", ","])
def test_a_value_with_punctuation_behind_it_is_read(end: str) -> None:
    patterns = metric_patterns((r"loss=loss: (\S+)",))
    assert patterns is not None
    found = LineParser(patterns).parse(f"[loss: nan{end}")
    assert found.loss is not None
    assert not found.is_finite


@pytest.mark.parametrize("line", ["step 9 val/loss: nan", "test loss: nan", "best loss: inf -> 1"])
def test_a_loss_of_an_evaluation_is_not_that_of_training(line: str) -> None:
    assert history_of(["step 8 loss 1.0", line], "plain").bad == 0
