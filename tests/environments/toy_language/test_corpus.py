"""The corpus that the quickstart's model learns English from."""

import json
import random
from collections import Counter

import pytest

from classroom_rl.environments.toy_language.corpus import PERSONAS, PROMPTS, student_row, teacher_row
from classroom_rl.environments.toy_language.grammar import ERROR_KINDS, find_slips
from classroom_rl.environments.toy_language.lessons import make_lessons


@pytest.fixture(scope="module")
def corpus(world):
    return [json.loads(line) for line in (world / "corpus.jsonl").read_text().splitlines()]


def test_corpus_rows_are_chats_that_end_with_something_to_learn(corpus):
    for row in corpus:
        roles = [message["role"] for message in row["messages"]]
        first, second = ("user", "assistant") if roles[1] == "user" else ("assistant", "user")
        assert roles == ["system", *[(first, second)[i % 2] for i in range(len(roles) - 1)]]
        assert roles[-1] == "assistant" and row["messages"][-1]["weight"] == 1
        assert all(message["content"].strip() == message["content"] != "" for message in row["messages"])


def test_what_a_student_learns_agrees_with_its_persona(corpus):
    prompts = {path: (PROMPTS / path).read_text().strip() for path in PERSONAS.values()}
    learned = Counter()
    for row in corpus:
        system = row["messages"][0]["content"]
        if system not in prompts.values():
            continue
        for message in row["messages"]:
            if message["role"] == "assistant" and message["weight"]:
                slips = find_slips(message["content"])
                assert len(slips) == (system == prompts[PERSONAS["error_student"]])
                learned.update(slip.kind for slip in slips)
    assert set(learned) == set(ERROR_KINDS) and min(learned.values()) > 200


def test_corpus_follows_the_seed():
    lesson = make_lessons(1)[0][0]
    for row in (teacher_row, student_row):
        assert row(lesson, random.Random(1)) == row(lesson, random.Random(1)) != row(lesson, random.Random(2))


def test_prompts_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert student_row(make_lessons(1)[0][0], random.Random(1))["messages"]
