"""TRL's SFTTrainer with a LoRA of PEFT, by the same line: stopped, and equal to an undisturbed one.

Where trl and peft are installed (``pip install trl peft``: 200 MB with what they need).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import slurm_forge as forge
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from tests.distributed.launches import Gate, launched, new_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

from slurm_forge.integrations.transformers import ForgeCallback  # noqa: E402

RANKS, STEPS, WORDS = 2, 8, ["<pad>", "<eos>", "a", "b", "c", "d"]


class Pause(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    def __init__(self, run: forge.Run, gate: Gate | None) -> None:
        self.run, self.gate = run, gate

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        if self.gate is not None and self.run.step_number == 4:
            self.gate.wait(self.run.rank)


def tokenizer() -> object:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel(dict(zip(WORDS, range(6), strict=True)), "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )


def program(gate: Gate | None = None) -> Callable[[forge.Run], None]:
    def train(run: forge.Run) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(run.world_size)
        torch.manual_seed(7)
        config = transformers.GPT2Config(
            vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=2, n_head=2,
            bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        texts = [" ".join(WORDS[2 + (i + j) % 4] for j in range(3 + i % 5)) for i in range(40)]
        trainer = trl.SFTTrainer(
            transformers.GPT2LMHeadModel(config),
            trl.SFTConfig(
                output_dir=str(run.directory / "trainer"), use_cpu=True, bf16=False,
                max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                learning_rate=0.05, logging_steps=1, save_strategy="no", report_to=[],
                disable_tqdm=True, gradient_checkpointing=False,
            ),
            train_dataset=datasets.Dataset.from_dict({"text": texts}),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True),
            callbacks=[Pause(run, gate)],
        )  # fmt: skip
        ForgeCallback(run).train(trainer)

    return train


def finished(run: RunDirectory) -> RunDirectory:
    with launched(run, RANKS, program()) as launch:
        pass
    assert [(told.outcome, told.step) for told in launch.told] == [
        (RankOutcome.FINISHED, STEPS)
    ] * RANKS
    return run


def test_a_stopped_sft_with_a_lora_loses_no_step_and_ends_the_same(
    tmp_path: Path, gate: Gate
) -> None:
    undisturbed = finished(new_run(tmp_path, name="undisturbed"))
    run = new_run(tmp_path, name="stopped")
    with launched(run, RANKS, program(gate)) as launch:
        launch.at(gate, RANKS)
        launch.stop_together()
        gate.open()
    assert {(told.outcome, told.step) for told in launch.told} == {(RankOutcome.STOPPED, 5)}
    finished(run)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)
