"""Tests of the messages that the page shows: text as it was written, tokens as pieces of text, and thoughts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.thoughts import split_thoughts, visible_text
from classroom_rl.viewer.turn_views import pieces_of
from tests.support.viewer_run import GROUP, HOSTILE, HOSTILE_LESSON, LESSONS, add_tokenizer, conversation, one


def test_what_was_said_arrives_letter_for_letter(http: TestClient) -> None:
    for index, text in enumerate(HOSTILE.values()):
        record = one(http, 2 * GROUP + index, "step-0")
        assert record["turns"][0]["parts"] == [["said", text]] and record["problem"] == HOSTILE_LESSON


def test_tokens_come_as_text_with_their_mask_where_the_run_has_the_tokenizer(http, run) -> None:
    without = one(http, 0, route="tokens")
    assert not without["pieces"] and "holds no tokenizer.json" in without["why"] and without["trained"] == 9
    add_tokenizer(run)
    tokens = one(http, 0, route="tokens")
    assert tokens["prompt"] == "t1t2" and "".join(piece[0] for piece in tokens["pieces"]) == "".join(
        f"t{i}" for i in range(3, 16)
    )
    assert [piece[1] for piece in tokens["pieces"]] == [1, 1, 1, 0, 0] * 2 + [1, 1, 1]
    assert [piece[2] for piece in tokens["pieces"]][:4] == [-0.5, -0.5, -0.5, 0.0]
    write_rollouts(run, 1, 0, [conversation(1, 0, LESSONS[0], completion_ids=list(range(90, 103)))])
    assert "does not have all of them" in one(http, 0, route="tokens")["why"]


def test_messages_of_an_older_version_lack_fields_and_are_shown(http, run) -> None:
    path = run / "rollouts" / "step_000001-0.parquet"
    message = {"role": "teacher", "text": "Hello.", "persona": None, "tokens": 3, "ended": True}
    draft = {"text": "Hi.", "tokens": 2, "review": {"valid": False, "of_another_version": 1}}
    table = pq.read_table(path)
    position = table.schema.get_field_index("turns")
    stored = pa.array([json.dumps([message, message | {"drafts": [draft]}])] * len(table))
    pq.write_table(table.set_column(position, "turns", stored), path)
    first, second = one(http, 0)["turns"]
    assert first["parts"] == [["said", "Hello."]] and (first["tokens"], first["given"], first["review"]) == (
        3,
        False,
        None,
    )
    assert first["trained"] == 0 and first["policy"] is None and not first["drafts"] and not first["tool_calls"]
    (shown,) = second["drafts"]
    assert shown["review"]["valid"] is False and shown["review"]["critique"] == "" and not shown["tool_calls"]


def test_a_character_of_several_tokens_is_one_piece() -> None:
    data = "aé👩".encode()

    def decode(ids: list[int]) -> str:
        return bytes(data[i] for i in ids).decode(errors="replace")

    assert pieces_of(decode, range(7), [1] * 7) == [("a", 1, 1), ("é", 1, 2), ("👩", 1, 4)]
    assert [count for _, _, count in pieces_of(decode, range(7), [1, 1, 0, 0, 0, 0, 0])] == [1, 1, 5]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello.", [("said", "Hello.")]),
        ("<think>a</think>b", [("thought", "<think>a</think>"), ("said", "b")]),
        ("b<think>a", [("said", "b"), ("thought", "<think>a")]),
        ("a</think>b", [("thought", "a</think>"), ("said", "b")]),
        ("a</think>b<think>c", [("thought", "a</think>"), ("said", "b"), ("thought", "<think>c")]),
        ("<think>a</think>b</think>c", [("thought", "<think>a</think>b</think>"), ("said", "c")]),
        ("", []),
    ],
)
def test_thoughts_are_told_from_what_is_said(text: str, parts: list) -> None:
    assert split_thoughts(text) == parts


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "b ", " ", "\n", "<thi"])).map("".join))
def test_what_is_said_is_what_others_hear_and_nothing_is_lost(text: str) -> None:
    parts = split_thoughts(text)
    assert "".join(piece for _, piece in parts) == text
    assert "".join(piece for kind, piece in parts if kind == "said").strip() == visible_text(text)
