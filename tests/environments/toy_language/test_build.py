"""The folder of the quickstart's world: lessons, tokenizer and untrained model."""

import json

import pytest

from classroom_rl.environments.toy_language.build import build_world
from classroom_rl.environments.toy_language.grammar import PLACES, TOPICS, past
from classroom_rl.environments.toy_language.lessons import Lesson, parse_problem

VERBS = [verb for topic in TOPICS.values() for verb in topic.verbs]
NOUNS = [noun for topic in TOPICS.values() for noun in topic.nouns]


def test_world_is_complete_and_made_once(world):
    lessons = [json.loads(line) for line in (world / "lessons_heldout.jsonl").read_text().splitlines()]
    assert len(lessons) == 116 and set(lessons[0]) == {"problem", "answer"}
    assert isinstance(parse_problem(lessons[0]["problem"]), Lesson)
    before = {path: path.stat().st_mtime_ns for path in world.rglob("*")}
    assert not build_world(world, 7)
    assert {path: path.stat().st_mtime_ns for path in world.rglob("*")} == before
    assert [path.name for path in world.parent.iterdir()] == ["world"]


def test_a_world_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("classroom_rl.environments.toy_language.build.save_blank", fail)
    with pytest.raises(OSError, match="disk full"):
        build_world(tmp_path / "world", 42)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_kept(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="something else"):
        build_world(tmp_path, 42)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_tokenizer_and_blank_model(world):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "blank")
    model = AutoModelForCausalLM.from_pretrained(world / "blank")
    assert len(tokenizer) == model.config.vocab_size <= 1024
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token_id is not None
    assert model.num_parameters() < 1_000_000 and str(model.dtype) == "torch.float32"
    for word in [*VERBS, *NOUNS, *PLACES]:
        assert len(tokenizer.encode(f" {word}")) == 1, f"{word} must be one token, in a sentence and after `here:`"
    for verb in VERBS:
        assert [tokenizer.decode(token) for token in tokenizer.encode(f" {past(verb)}")] == [f" {verb}", "ed"]
    for text in ("Check the tense here: go.", "naïve → 你好\n\t<|im_start|>", "<end_of_conversation>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_is_learned_is_marked_by_the_chat_template(world):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "blank")
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "Hi!", "weight": 0},
        {"role": "user", "content": "Good."},
        {"role": "assistant", "content": "Yes."},
    ]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    learned = [token for token, bit in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if bit]
    assert tokenizer.decode(learned) == "Yes.<|im_end|>"
    assert tokenizer.decode(encoded["input_ids"]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n"
        "<|im_start|>user\nGood.<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    )
