"""Rows of several conversations, without padding: none sees another, and the weights learn what they learn from padded
rows."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from classroom_rl.errors import ConfigError
from classroom_rl.trainer.padding_free import attend_within_sequences
from classroom_rl.trainer.sft import run as sft
from tests.trainer.sft.test_run import (  # noqa: F401
    ROWS,
    blank,
    corpus,
    make_config,
    one_thread,
    trainer_of,
    write_rows,
)


def cross_entropy_of(model: Path, batch: dict) -> float:
    """The mean over the labelled tokens of a row of sequences, each of which is read by itself."""
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = [reference(ids).logits[0, :-1] for ids in batch["input_ids"].split(lengths, dim=1)]
    labels = [sequence[0, 1:] for sequence in batch["labels"].split(lengths, dim=1)]
    return nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels)).item()


def test_the_loss_is_the_cross_entropy_of_the_labelled_tokens(tmp_path, blank, corpus):  # noqa: F811
    trainer = trainer_of(make_config(tmp_path, blank, corpus))
    batch = next(iter(trainer.get_train_dataloader()))
    expected = cross_entropy_of(blank, batch)
    assert trainer.compute_loss(trainer.model, dict(batch)).item() == pytest.approx(expected, abs=1e-5)


def test_no_sequence_of_a_row_sees_another(blank):  # noqa: F811
    model, reference = (AutoModelForCausalLM.from_pretrained(blank, dtype=torch.float32) for _ in range(2))
    assert attend_within_sequences(model) is None
    sequences = [torch.randint(0, 60, (length,)) for length in (7, 1, 12)]
    collate = DataCollatorForLanguageModeling(0, padding_free=True)
    row = collate([{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in sequences])
    row.pop("labels")
    packed_logits = model(**row).logits[0].split([7, 1, 12])
    for ids, logits in zip(sequences, packed_logits, strict=True):
        torch.testing.assert_close(logits, reference(ids.unsqueeze(0)).logits[0], atol=1e-5, rtol=1e-4)
    with pytest.raises(ConfigError, match="is not told where the sequences of a row begin"):
        model(sequences[2].unsqueeze(0))


@pytest.mark.parametrize("lacking", ["eager", "window"])
def test_a_model_that_attends_in_another_way_gets_padded_rows(tmp_path, blank, corpus, monkeypatch, lacking):  # noqa: F811
    load_model = sft.load_model

    def other_model(*arguments):
        model = load_model(*arguments)
        if lacking == "eager":
            model.set_attn_implementation("eager")
        else:
            model.config.layer_types = ["full_attention", "sliding_attention"]
        return model

    monkeypatch.setattr(sft, "load_model", other_model)
    batch = next(iter(trainer_of(make_config(tmp_path, blank, corpus)).get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 8 and batch["attention_mask"].shape == batch["input_ids"].shape


@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_learn_without_padding_what_they_learn_with_it(tmp_path, blank, monkeypatch, checkpointing):  # noqa: F811
    rows = [{"messages": [*row["messages"][:3], *row["messages"][3:] * (index % 4)]} for index, row in enumerate(ROWS)]
    uneven = write_rows(tmp_path / "uneven.jsonl", rows)
    weights = []
    for name in ("without", "padded"):
        if name == "padded":
            monkeypatch.setattr(sft, "attend_within_sequences", lambda _: "it is padded")
        option = f"train.gradient_checkpointing={str(checkpointing).lower()}"
        sft.train(make_config(tmp_path / name, blank, uneven, "train.max_steps=5", "train.dtype=float32", option))
        weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / name / "model", dtype=torch.float32))
    assert weights[0].config._attn_implementation == "sdpa"
    for (name, unpadded), padded in zip(weights[0].named_parameters(), weights[1].parameters(), strict=True):
        torch.testing.assert_close(unpadded, padded, msg=name, rtol=1e-3, atol=1e-4)
