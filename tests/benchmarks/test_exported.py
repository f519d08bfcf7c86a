"""The comparison of an exported tutor's answers: its prompts, its readers, and what it says of a difference."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.exported import answers, compared, prompts_of
from classroom_rl.models.random_model import write_tiny_chat_model


def test_a_prompt_is_what_was_said_before_the_last_message(tmp_path: Path) -> None:
    write_tiny_chat_model(tmp_path / "model", ["Where does Ann walk? She walks home."] * 3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt, first, student, last = (tokenizer.encode(text) for text in ("Where", " does", " Ann", " walk"))
    record = {
        "prompt_ids": prompt,
        "completion_ids": [*first, *student, *last],
        "mask": [*[1] * len(first), *[0] * len(student), *[1] * len(last)],
    }
    at_once = {"prompt_ids": prompt, "completion_ids": last, "mask": [1] * len(last)}
    silent = {"prompt_ids": prompt, "completion_ids": [], "mask": []}
    file = tmp_path / "records.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in (record, record, at_once, silent)))
    assert prompts_of(file, tmp_path / "model", 50) == ["Where does Ann", "Where"]
    assert prompts_of(file, tmp_path / "model", 1) == ["Where does Ann"]


def test_a_reader_answers_and_other_answers_are_told_apart(tmp_path: Path) -> None:
    write_tiny_chat_model(tmp_path / "model", ["Where does Ann walk? She walks home."] * 3)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["Where does", "She walks"]))
    result = answers("transformers", tmp_path / "model", prompts)
    assert len(result["answers"][0]) == len(result["gaps"][0]) == 32
    assert compared(result, result) == "2 of 2 answers equal, 2 prompts of equal tokens"
    first, second = result["answers"]
    gap = f"preferred by {result['gaps'][1][3]:.4f}"
    for position, other in ((3, [*second[:3], second[3] + 1, *second[4:]]), (3, second[:3])):
        text = compared(result, result | {"answers": [first, other]})
        assert text == f"1 of 2 answers equal, 2 prompts of equal tokens; answer 1 parts at token {position}, {gap}"
