"""Labelled messages are read from the forms in which the data sets were published, and what cannot be read is named."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from classroom_rl.errors import DataError
from classroom_rl.judges.moves import labelled
from classroom_rl.judges.moves.cross_validation import kappa
from classroom_rl.judges.moves.labelled import LABELS_OF, read_labelled
from classroom_rl.judges.readings import Exchange
from classroom_rl.system.shipped import ROOT
from tests.support.tutor_messages import cima_rows, mathdial_rows, write_rows

TARGET = {"obj": "puerta", "engObj": "door", "prep": "está en", "engPrep": "in", "color": "roja", "engColor": "red"}
CIMA_ROW = {
    "history": ["Fill in the blank.", "What is door?", "Door is puerta.", "está en puerta rojo"],
    "target": TARGET,
    "tutor": "Nearly! Think of the ending.",
    "tutor_actions": {"question": False, "hint": True, "correction": True, "confirmation": False, "other": False},
}
MRBENCH_LABELS = {
    "Mistake_Identification": "Yes",
    "Revealing_of_the_Answer": "Yes (but the answer is incorrect)",
    "Actionability": "To some extent",
}
HISTORY = "Tutor: What is 85-77? \n Student: 12? \n Tutor: Really? \n Student: Yes,\xa0it is 12."


def as_published(rows: list[dict]) -> dict:
    """CIMA's own form of flat rows: one row for each conversation, with flags as lists."""
    conversations = {}
    for row in rows:
        empty = {"past_convo": row["history"], **row["target"], "tutorResponses": [], "tutorActions": []}
        conversation = conversations.setdefault(json.dumps([row["history"], row["target"]]), empty)
        conversation["tutorResponses"].append(row["tutor"])
        conversation["tutorActions"].append([*row["tutor_actions"].values()])
    return {"prepDataset": {str(number): row for number, row in enumerate(conversations.values())}, "shapeDataset": {}}


def test_a_flat_row_of_cima(tmp_path: Path):
    (message,) = read_labelled(str(write_rows(tmp_path / "a.jsonl", [CIMA_ROW])))
    assert message.exchange == Exchange(
        "Nearly! Think of the ending.", "está en puerta rojo", "está en puerta roja", tuple(CIMA_ROW["history"][:3])
    )
    assert {label for label, value in message.labels.items() if value} == {"hint", "correction", "treats_as_wrong"}
    assert tuple(sorted(message.labels)) == tuple(sorted(LABELS_OF["CIMA"]))


def test_cima_as_published_holds_the_same(tmp_path: Path):
    rows = cima_rows(6, seed=3)
    (tmp_path / "dataset.json").write_text(json.dumps(as_published(rows)), encoding="utf-8")
    flat = read_labelled(str(write_rows(tmp_path / "flat.jsonl", rows)))
    published = read_labelled(str(tmp_path / "dataset.json"))
    assert len(flat) == 30 and sorted(published, key=repr) == sorted(flat, key=repr)


def test_mrbench_flat_and_as_published(tmp_path: Path):
    flat = {"history": HISTORY, "solution": "85 - 77 = 8 \n 8", "tutor": "It is 8.", "labels": MRBENCH_LABELS}
    published = {
        "conversation_id": "1",
        "conversation_history": HISTORY,
        "Ground_Truth_Solution": "85 - 77 = 8 \n 8",
        "anno_llm_responses": {"Expert": {"response": "It is 8.", "annotation": MRBENCH_LABELS}},
    }
    (tmp_path / "published.json").write_text(json.dumps([published]), encoding="utf-8")
    (message,) = read_labelled(str(write_rows(tmp_path / "flat.jsonl", [flat])))
    assert [message] == read_labelled(str(tmp_path / "published.json"))
    assert message.exchange == Exchange("It is 8.", "Yes, it is 12.", "8", ("What is 85-77?", "12?", "Really?"))
    assert message.labels == {"reveals_answer": True, "actionable": False, "mistake_identified": True}


def test_a_solution_that_is_not_available_is_no_target(tmp_path: Path):
    row = {"history": HISTORY, "solution": "Not Available", "tutor": "Try again.", "labels": MRBENCH_LABELS}
    (message,) = read_labelled(str(write_rows(tmp_path / "a.jsonl", [row])))
    assert message.exchange.target == "" and message.lesson == HISTORY


def test_mathdial_flat_and_as_published(tmp_path: Path):
    turns = [
        {"role": "teacher", "move": "generic", "text": "Hi, tell me more."},
        {"role": "student", "move": None, "text": "I got 30."},
        {"role": "teacher", "move": "telling", "text": "Add them: 35."},
        {"role": "teacher", "move": None, "text": "Bye."},
    ]
    common = {"question": "How many?", "ground_truth": "20 + 15 = 35\n 35", "student_incorrect_solution": "It is 30."}
    conversation = "Teacher: (generic)Hi, tell me more.|EOM|Mariana: I got 30.|EOM|Teacher: (telling)Add them: 35."
    conversation += "|EOM|Teacher: Bye."
    flat = read_labelled(str(write_rows(tmp_path / "flat.jsonl", [common | {"turns": turns}])))
    published = read_labelled(str(write_rows(tmp_path / "published.jsonl", [common | {"conversation": conversation}])))
    assert flat == published
    assert [message.labels["telling"] for message in flat] == [False, True]
    assert flat[0].exchange == Exchange("Hi, tell me more.", "It is 30.", "35", ("How many?",))
    assert flat[1].exchange.before == ("How many?", "It is 30.", "Hi, tell me more.")
    assert flat[1].exchange.student == "I got 30."


def test_a_name_without_a_suffix_is_fetched_from_the_hub(monkeypatch: pytest.MonkeyPatch):
    sources = []
    monkeypatch.setattr(labelled, "load_rows", lambda source: sources.append(source) or mathdial_rows(2, seed=1))
    assert len(read_labelled("eth-nlped/mathdial", "test")) == 8
    assert [(source.name_or_path, source.split) for source in sources] == [("eth-nlped/mathdial", "test")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", None, "There is no file"),
        ("a.jsonl", '{"text": "Hello"}', "line 1 has the keys text"),
        ("a.jsonl", "", "holds no labelled message"),
        ("a.jsonl", "[1]", "line 1 is no JSON object"),
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.json", '"text"', "holds no list of rows"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
        ("a.csv", "a,b", "read from .jsonl, .json and .parquet files"),
        ("a.jsonl", json.dumps(CIMA_ROW | {"history": []}), "line 1 cannot be read: IndexError"),
        ("a.jsonl", json.dumps(CIMA_ROW | {"tutor": None}), "a text is missing"),
        ("a.jsonl", json.dumps(CIMA_ROW | {"tutor": "\ud800"}), "half of a character"),
        ("a.jsonl", json.dumps(CIMA_ROW | {"tutor_actions": {"hint": True}}), "KeyError 'question'"),
        ("a.jsonl", json.dumps({"history": HISTORY, "solution": "", "tutor": "", "labels": {}}), "KeyError"),
        (
            "a.json",
            json.dumps([{"past_convo": ["a"], "tutorResponses": ["b"], "tutorActions": [[True]]}]),
            "row 1 cannot be read: ValueError",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str | bytes | None, words: str):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words) as caught:
        read_labelled(str(path))
    assert str(path) in str(caught.value)


# The project's own replies -----------------------------------------------------------------------------------------

OWN = ROOT / "data/replies"


def test_a_reply_of_the_project_has_the_labels_that_both_readings_gave(tmp_path: Path):
    row = {
        "lesson": "l", "subject": "maths", "problem": "3 + 4?", "answer": "7 cats", "reply": "No!",
        "context": [["student", "5"], ["tutor", "Hm?"], ["student", "6"]],
        "labels_1": ["insult", "mistake_identified"], "labels_2": ["mistake_identified", "hint"], "overall": [0, 1],
    }  # fmt: skip
    (message,) = read_labelled(str(write_rows(tmp_path / "r.jsonl", [row])))
    assert message.exchange == Exchange("No!", "6", "7", ("3 + 4?", "5", "Hm?"))
    assert [label for label, holds in message.labels.items() if holds] == ["mistake_identified"]
    assert message.labels.keys() == set(LABELS_OF[labelled.REPLIES])
    phrase = row | {"subject": "language", "answer": "la casa roja"}
    (message,) = read_labelled(str(write_rows(tmp_path / "l.jsonl", [phrase])))
    assert message.exchange.target == "la casa roja"


def test_the_shipped_replies_are_as_their_page_says():
    """Enough of them, each labelled twice by the labels of the page; the readings agree by more than chance on each."""
    files = [OWN / "maths.jsonl", OWN / "language.jsonl"]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    page = (OWN / "criteria.md").read_text(encoding="utf-8")
    labels = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert labels == set(LABELS_OF[labelled.REPLIES]) and len(rows) == len({row["id"] for row in rows}) == 1600
    assert len({row["reply"] for row in rows}) > 1590 and len({row["lesson"] for row in rows}) == 200
    for subject in ("maths", "language"):
        subject_rows = [row for row in rows if row["subject"] == subject]
        assert len(subject_rows) == 800 and all(
            set(row["labels_1"]) | set(row["labels_2"]) <= labels for row in subject_rows
        )
        for label in labels:
            first, second = (
                np.array([label in row[name] for row in subject_rows]) for name in ("labels_1", "labels_2")
            )
            assert 15 <= first.sum() <= 785 and kappa(first, second) > 0.8, (subject, label)
