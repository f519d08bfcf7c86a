"""A real fine-tuning of a few steps on corrections: their tokens are trained on as they are, and what does not fit the
model is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from classroom_rl.config.train_sft import ConversationSource
from classroom_rl.errors import DataError
from classroom_rl.results.corrections import (
    Correction,
    CorrectionDecision,
    append_decision,
    tokenizer_fingerprint,
    write_corrections,
)
from classroom_rl.trainer.sft import run as sft
from classroom_rl.trainer.sft.corrections import MASKED, are_corrections, read_examples
from tests.rollout.test_chat_template import CHATML, make_tokenizer
from tests.trainer.sft.test_padding_free import cross_entropy_of
from tests.trainer.sft.test_run import ROWS, blank_model, make_config, one_thread, trainer_of, write_rows  # noqa: F401

TARGETS = ["Two eggs.", "She cooked eggs.", "No more."]


@pytest.fixture(scope="module")
def blank(tmp_path_factory) -> Path:
    """A model whose chat template marks nothing: corrections need no marks."""
    return blank_model(tmp_path_factory.mktemp("blank"), template=CHATML)


@pytest.fixture(scope="module")
def tokenizer(blank):
    return AutoTokenizer.from_pretrained(blank)


def corrections_of(tokenizer) -> list[Correction]:
    """A correction for each target, under a prompt of its own; the drafts are what must not be learned."""
    return [
        Correction(
            conversation=f"r-{number}",
            step=1,
            turn=1,
            draft=-1,
            policy="abc v1",
            prompt_ids=tokenizer.encode(f"<|im_start|>user\n{number}<|im_end|>\n<|im_start|>assistant\n"),
            draft_ids=tokenizer.encode("assistant"),
            draft_logprobs=[-1.0] * len(tokenizer.encode("assistant")),
            target_text=target,
            target_ids=tokenizer.encode(f"{target}<|im_end|>"),
            category="leak",
            critique="Too much.",
            source="rules",
        )
        for number, target in enumerate(TARGETS)
    ]


@pytest.fixture
def corrections(tmp_path, tokenizer) -> Path:
    path = tmp_path / "corrections.parquet"
    write_corrections(path, corrections_of(tokenizer), tokenizer_fingerprint(tokenizer))
    return path


def test_the_prompt_is_masked_and_the_target_is_trained_on_as_it_is(tmp_path, blank, corrections, tokenizer):
    trainer = trainer_of(make_config(tmp_path / "run", blank, corrections))
    rows = {tuple(row["input_ids"]): row["labels"] for row in trainer.train_dataset}
    expected = {
        (*correction.prompt_ids, *correction.target_ids): [-100] * len(correction.prompt_ids) + correction.target_ids
        for correction in corrections_of(tokenizer)
    }
    assert rows == expected
    batch = next(iter(trainer.get_train_dataloader()))
    assert int((batch["labels"] != -100).sum()) == sum(
        len(correction.target_ids) for correction in corrections_of(tokenizer)
    )
    loss = cross_entropy_of(blank, batch)
    assert trainer.compute_loss(trainer.model, dict(batch)).item() == pytest.approx(loss, abs=1e-5)


def test_the_model_says_the_corrected_messages_afterwards(tmp_path, blank, corrections, tokenizer, caplog):
    validation = f"dataset.val_datasets=[{{name_or_path: {corrections}}}]"
    run = tmp_path / "run"
    learning = ("train.max_steps=45", "train.optimizer=muon", "train.learning_rate=2e-2")
    with caplog.at_level("INFO"):
        sft.train(make_config(run, blank, corrections, validation, *learning))
    assert "reading 6 corrections" in caplog.text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] > 4 > 0.2 > losses[-1] and any("eval_loss" in line for line in lines)
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    for correction in corrections_of(tokenizer):
        generated = model.generate(
            torch.tensor([correction.prompt_ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert tokenizer.decode(generated[0, len(correction.prompt_ids) :]) == f"{correction.target_text}<|im_end|>"


def test_another_models_corrections_are_refused(tmp_path, blank, tokenizer):
    other_tokenizer = make_tokenizer(CHATML)
    other_tokenizer.add_tokens(["another"])
    path = tmp_path / "corrections.parquet"
    write_corrections(path, corrections_of(tokenizer), tokenizer_fingerprint(other_tokenizer))
    with pytest.raises(DataError, match="corrections.parquet holds token ids of another tokenizer than the model's"):
        trainer_of(make_config(tmp_path / "run", blank, path))


def test_corrections_that_are_too_long_are_left_out_and_told_about(tmp_path, blank, tokenizer, caplog):
    first, second, third = corrections_of(tokenizer)
    path = tmp_path / "corrections.parquet"
    longest = replace(second, prompt_ids=second.prompt_ids * 20)
    write_corrections(path, [first, longest, third], tokenizer_fingerprint(tokenizer))
    length = max(len(correction.prompt_ids) + len(correction.target_ids) for correction in (first, third))
    trainer = trainer_of(make_config(tmp_path / "run", blank, path, f"model.max_length={length}"))
    trained_ids = {tuple(row["input_ids"]) for row in trainer.train_dataset}
    assert trained_ids == {(*correction.prompt_ids, *correction.target_ids) for correction in (first, third)}
    assert f"1 of 3 corrections have more than {length} tokens (model.max_length) and are left out" in caplog.text
    with pytest.raises(DataError, match=r"No correction has at most 2 tokens, its prompt included"):
        trainer_of(make_config(tmp_path / "run", blank, path, "model.max_length=2"))


@pytest.mark.parametrize("lacking", ["prompt", "target"])
def test_a_correction_without_tokens_is_named_by_its_row(tmp_path, tokenizer, lacking):
    first, second, _ = corrections_of(tokenizer)
    path = tmp_path / "corrections.parquet"
    write_corrections(path, [first, replace(second, **{f"{lacking}_ids": []})], tokenizer_fingerprint(tokenizer))
    with pytest.raises(DataError, match=f"the correction in row 2 has no {lacking}_ids"):
        read_examples([ConversationSource(name_or_path=str(path))], tokenizer, 128)


def test_shares_and_limits_hold_for_corrections(tmp_path, tokenizer):
    path = tmp_path / "corrections.parquet"
    write_corrections(path, corrections_of(tokenizer), tokenizer_fingerprint(tokenizer))
    source = ConversationSource(name_or_path=str(path))
    assert len(read_examples([source], tokenizer, 128, limit=2, seed=1)) == 2
    assert len(read_examples([replace(source, ratio=0.34)], tokenizer, 128, seed=1)) == 1


def test_corrections_and_conversations_are_not_mixed(tmp_path, blank, corrections):
    corpus = write_rows(tmp_path / "corpus.jsonl", ROWS)
    sources = [ConversationSource(name_or_path=str(path)) for path in (corrections, corpus)]
    assert are_corrections(sources[:1]) and not are_corrections(sources[1:])
    message = "corrections.parquet holds corrections and .*corpus.jsonl conversations"
    with pytest.raises(DataError, match=message):
        are_corrections(sources)
    with pytest.raises(DataError, match=message):
        validation = f"dataset.val_datasets=[{{name_or_path: {corpus}}}]"
        trainer_of(make_config(tmp_path / "run", blank, corrections, validation))


def test_what_people_decided_is_trained_on(corrections: Path, tokenizer) -> None:
    """The first correction is rejected, the second edited; the file itself stays as it was."""
    before = corrections.read_bytes()
    fields = {"time": 1.0, "turn": 1, "draft": -1}
    append_decision(corrections.parent, CorrectionDecision(conversation="r-0", decision="reject", **fields))
    append_decision(
        corrections.parent, CorrectionDecision(conversation="r-1", decision="edit", text="Check the verb.", **fields)
    )
    source = ConversationSource(name_or_path=str(corrections))
    (edited, *rest) = read_examples([source], tokenizer, 512)
    assert len(rest) == len(TARGETS) - 2 and corrections.read_bytes() == before
    target = [label for label in edited["labels"] if label != MASKED]
    assert tokenizer.decode(target) == "Check the verb.<|im_end|>"
